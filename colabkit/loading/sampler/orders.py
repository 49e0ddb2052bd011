"""Orders of epochs: the one protocol, and the orders that need no data: as stored, and shuffled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from colabkit.foundation import (
    CHUNK,
    MAX_SAMPLES,
    InvalidOption,
    Positions,
    cannot,
    check_range,
    check_whole_number,
    epoch_order,
    kind_of,
)


@runtime_checkable
class Order(Protocol):
    """Which sample stands where in each epoch: a pure function, for any range of positions."""

    def __len__(self) -> int:
        """Return how many positions an epoch has."""

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`."""

    @property
    def n(self) -> int:
        """Samples in the data set."""

    @property
    def policy(self) -> str:
        """What tells this order from others in a saved state, as a short text; the seed is apart."""

    @property
    def seed(self) -> int:
        """What tells orders of the same policy apart; 0 where nothing is random."""


def set_whole_number(order: object, name: str, value: int, least: int, most: int | None = None) -> None:
    """Set a checked whole number on a frozen order.

    Raises:
        InvalidOption: if the value is no whole number of at least `least` and at most `most`.
    """
    act = f"make {kind_of(order)} order"
    value = check_whole_number(act, name, value, least)
    if most is not None and value > most:
        raise InvalidOption(cannot(act, f"{name}={value}", f"{most} at most", f"Use {name}={most} or less"))
    object.__setattr__(order, name, value)


def by_chunks(samples: Callable[[int, int], Positions], start: int, stop: int) -> Positions:
    """Return what a function of a range of positions returns, asked for chunk by chunk."""
    joined = np.empty(stop - start, np.int64)
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        joined[first - start : last - start] = samples(first, last)
    return joined


@dataclass(frozen=True)
class Sequential:
    """The order in which samples are stored: position i holds sample i, in every epoch.

    Args:
        n: samples in the data set.

    Raises:
        InvalidOption: if n is no whole number of 0 or more.
    """

    n: int

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)

    def __len__(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return `start` to `stop`, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie in [0, n].
        """
        check_range(start, stop, self.n)
        return np.arange(start, stop, dtype=np.int64)

    @property
    def policy(self) -> str:
        """`"sequential"`."""
        return "sequential"

    @property
    def seed(self) -> int:
        """0: nothing is random."""
        return 0


@dataclass(frozen=True)
class Shuffled:
    """Every sample once, in an order of its own for each epoch: `epoch_order`.

    Args:
        n: samples in the data set.
        seed: a whole number of 0 or more.

    Raises:
        InvalidOption: if an argument is no whole number of 0 or more.
    """

    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)
        set_whole_number(self, "seed", self.seed, 0)

    def __len__(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie in [0, n].
        """
        return epoch_order(self.n, self.seed, epoch, start, stop)

    @property
    def policy(self) -> str:
        """`"shuffle"`."""
        return "shuffle"

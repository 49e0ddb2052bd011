"""Orders of epochs: the one protocol, and the orders that hold every sample once: as stored, shuffled, by blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from colabkit.foundation import (
    CHUNK,
    MAX_SAMPLES,
    Positions,
    Stream,
    check_range,
    check_whole_number,
    epoch_order,
    hashed,
    key_of,
    kind_of,
    permute,
    permute_each,
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
    """Set a checked whole number on a frozen order; raises `InvalidOption` for anything else."""
    object.__setattr__(order, name, check_whole_number(f"make {kind_of(order)} order", name, value, least, most))


class PureOrder:
    """Base of the orders; a subclass returns the samples of any chunk of positions."""

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie inside the epoch.
        """
        check_range(start, stop, len(self))
        joined = np.empty(stop - start, np.int64)
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            joined[first - start : last - start] = self._samples(epoch, first, last)
        return joined

    def __len__(self) -> int:
        raise NotImplementedError

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        raise NotImplementedError


@dataclass(frozen=True)
class Sequential(PureOrder):
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
        """Return `start` to `stop`, `int64 [stop - start]`."""
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
class Shuffled(PureOrder):
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
        """Return the samples at positions `start` to `stop` of an epoch: those of `epoch_order`."""
        return epoch_order(self.n, self.seed, epoch, start, stop)

    @property
    def policy(self) -> str:
        """`"shuffle"`."""
        return "shuffle"


@dataclass(frozen=True)
class BlockShuffled(PureOrder):
    """Every sample once, mixed over a window of blocks: reading touches `window_blocks` blocks at a time.

    Blocks of consecutive samples are put into a random order, and each `window_blocks` consecutive blocks of it are a
    window, inside which all samples are mixed. A last block that is not full stands at any place, too. All of this is
    anew in each epoch, in the time and memory of the range that is asked for, and of 65,536 blocks at most.

    Args:
        n: samples in the data set.
        seed: a whole number of 0 or more.
        block_samples: consecutive samples that are read together. 64 images of 224 x 224 x 3 bytes are 10 MB, which
            disks and networks read at full speed.
        window_blocks: blocks whose samples are mixed; they have to fit in RAM together.

    Raises:
        InvalidOption: if an argument is no whole number in its range.
    """

    n: int
    seed: int = 0
    block_samples: int = 64
    window_blocks: int = 32

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)
        set_whole_number(self, "seed", self.seed, 0)
        set_whole_number(self, "block_samples", self.block_samples, 1)
        set_whole_number(self, "window_blocks", self.window_blocks, 1)

    def __len__(self) -> int:
        return self.n

    @property
    def policy(self) -> str:
        """`"block "` and the samples of a block x the blocks of a window."""
        return f"block {self.block_samples}x{self.window_blocks}"

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        # Places count as if the short block were full, so that all blocks and windows begin at multiples; what it
        # lacks is skipped. Full blocks are permuted among themselves and the short one is put in between.
        block = min(self.block_samples, self.n)
        full_blocks, rest = divmod(self.n, block)
        lack = block - rest if rest else 0
        blocks = full_blocks + bool(rest)
        window = min(self.window_blocks, blocks) * block
        short = key_of(self.seed, epoch, Stream.SHORT_BLOCK) * blocks >> 64 if rest else blocks
        short_window = short * block // window

        places = np.arange(start, stop, dtype=np.int64)
        places += lack * (places >= (short_window + 1) * window - lack)
        windows = places // window
        starts = windows * window
        is_short = windows == short_window
        sizes = np.minimum(blocks * block - starts, window)
        sizes -= lack * is_short
        places -= starts
        permute_each(places, sizes, hashed(key_of(self.seed, epoch, Stream.WINDOWS), windows))
        places += starts
        places += lack * (is_short & (places >= short * block + rest))

        numbers = places // block
        places -= numbers * block
        is_short = numbers == short
        numbers -= numbers > short
        np.minimum(numbers, full_blocks - 1, out=numbers)  # there is one number more where the short block is last
        permute(numbers, full_blocks, key_of(self.seed, epoch, Stream.BLOCKS))
        numbers[is_short] = full_blocks
        places += numbers * block
        return places

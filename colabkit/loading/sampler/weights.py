"""Samples drawn by weight, with replacement or without."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    InvalidOption,
    Positions,
    Stream,
    Words64,
    cannot,
    check_range,
    hashed,
    key_of,
    kind_of,
    uniforms,
)
from colabkit.loading.sampler.orders import by_chunks, set_whole_number

_ACT = "make a Weighted order"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Weighted:
    """Samples drawn with a chance proportional to their weights, anew in each epoch.

    With replacement each position is drawn for itself, in the time of the range that is asked for. Without, each sample
    comes at most once: samples are sorted by exponential random numbers divided by their weights, which is the same as
    drawing one after the other from what is left; this takes O(n log n) once per epoch, and the last epoch's order is
    kept (8 bytes a sample). A sample of weight 0 is never drawn; with replacement this holds in practice for one whose
    weight is below 2**-53 of the sum.

    Args:
        weights: `[N]` numbers of 0 or more that need not add up to 1: an array, list or tensor.
        num_samples: positions of an epoch; None takes as many as there are weights, or, without replacement, as many
            as there are weights above 0.
        seed: a whole number of 0 or more.
        replacement: whether a sample may come more than once.

    Raises:
        InvalidOption: if weights are negative, not finite or all 0, or do not suffice for `num_samples`.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006): exponential keys.
    """

    weights: npt.NDArray[np.float64]
    num_samples: int
    seed: int
    replacement: bool

    def __init__(
        self, weights: npt.ArrayLike, *, num_samples: int | None = None, seed: int = 0, replacement: bool = True
    ) -> None:
        checked = _weights(weights)
        object.__setattr__(self, "weights", checked)
        object.__setattr__(self, "replacement", bool(replacement))
        most = None if replacement else int(np.count_nonzero(checked))
        set_whole_number(self, "num_samples", num_samples if num_samples is not None else most or checked.size, 1, most)
        set_whole_number(self, "seed", seed, 0)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def n(self) -> int:
        """Samples in the data set."""
        return int(self.weights.size)

    def __repr__(self) -> str:
        options = f"num_samples={self.num_samples}, seed={self.seed}, replacement={self.replacement}"
        return f"Weighted({self.weights.size} weights, {options})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("weights", "num_samples", "seed", "replacement")}

    @cached_property
    def policy(self) -> str:
        """`"weighted "` and a digest of all but the seed."""
        digest = hashlib.sha256(f"{self.num_samples} {self.replacement} ".encode())
        digest.update(self.weights.astype("<f8", copy=False).data)
        return f"weighted {digest.hexdigest()[:16]}"

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie in [0, num_samples].
        """
        check_range(start, stop, self.num_samples)
        if not self.replacement:
            return self._drawn_once(epoch)[start:stop].copy()
        return by_chunks(partial(self._drawn, epoch), start, stop)

    def _drawn(self, epoch: int, start: int, stop: int) -> Positions:
        draws = uniforms(hashed(key_of(self.seed, epoch, Stream.DRAWS), np.arange(start, stop)))
        return np.searchsorted(self._cumulative, draws, side="right")

    @cached_property
    def _cumulative(self) -> npt.NDArray[np.float64]:
        # A sum reached by rounding ends in 1 exactly, and every draw is below 1.
        sums = np.cumsum(self.weights)
        sums /= sums[-1]
        return sums

    def _drawn_once(self, epoch: int) -> Positions:
        kept: tuple[int, Positions] | None = self.__dict__.get("_kept")
        if kept is None or kept[0] != epoch:
            candidates = np.flatnonzero(self.weights)
            words = hashed(key_of(self.seed, epoch, Stream.PRIORITIES), candidates)
            with np.errstate(over="ignore"):
                waits = _exponential(words) / self.weights[candidates]
            kept = epoch, candidates[np.argsort(waits, kind="stable")[: self.num_samples]]
            self.__dict__["_kept"] = kept
        return kept[1]


def _exponential(words: Words64) -> npt.NDArray[np.float64]:
    """Return words as exponential random numbers, -log(u): the same on every machine, unlike `np.log`.

    The logarithm of the mantissa m is the series of 2 artanh((m - 1) / (m + 1)), cut off below 2**-60.
    """
    mantissas, exponents = np.frexp(uniforms(words) + 2.0**-54)
    is_low = mantissas < math.sqrt(0.5)
    mantissas[is_low] *= 2
    exponents[is_low] -= 1
    ratios = (mantissas - 1) / (mantissas + 1)
    squares = ratios * ratios
    series = np.zeros_like(squares)
    for power in range(23, 0, -2):
        series *= squares
        series += 1 / power
    series *= ratios
    waits: npt.NDArray[np.float64] = exponents * -math.log(2) - 2 * series
    return waits


def _weights(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        checked = np.asarray(weights).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"weights in {kind_of(weights)} that NumPy cannot read"
        raise InvalidOption(cannot(_ACT, found, "one number a sample", "Pass an array of numbers")) from error
    if checked.ndim != 1 or not checked.size:
        found = f"weights of shape {checked.shape}"
        raise InvalidOption(cannot(_ACT, found, "one number a sample", "Pass an array of shape [N]"))
    with np.errstate(over="ignore"):
        total = float(checked.sum())
    if not (checked.min() >= 0 and 0 < total < np.inf):
        found = f"weights from {checked.min()} to {checked.max()} that add up to {total}"
        raise InvalidOption(cannot(_ACT, found, "finite weights of 0 or more with a sum above 0", "Mend the weights"))
    checked.setflags(write=False)
    return checked

"""Sample orders that depend on the data and may repeat samples: balanced classes, and weighted draws."""

from __future__ import annotations

import hashlib
import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    InvalidOption,
    Positions,
    Stream,
    Words64,
    cannot,
    checked_call,
    hashed,
    key_of,
    kind_of,
    permute_each,
    uniforms,
)
from colabkit.loading.sampler.orders import PureOrder, set_whole_number

_SORTED_UP_TO = 64
_MASK = (1 << 62) - 1


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BalancedOrder(PureOrder):
    """All classes equally often: each run of K positions holds each of the K classes once, in a random order.

    The samples of a class are shuffled again for each pass through the class. A pass continues from one epoch to the
    next, so a sample repeats only after all others of its class. If `num_samples` is not a multiple of K, the last run
    of an epoch is truncated, and each class missing from it skips one sample. The time for a range of positions depends
    only on its length. The order stores the sample indices by class (8 bytes per sample).

    Args:
        labels: class of each sample, whole numbers `[N]`: an array, list or tensor.
        num_samples: positions per epoch; None for the number of labels.
        seed: seed of the order, a whole number of 0 or more.

    Raises:
        InvalidOption: if labels are not whole numbers, or another argument is not a whole number in its range.

    Example:
        >>> import colabkit, torch
        >>> labels = torch.tensor([0] * 90 + [1] * 10)
        >>> order = colabkit.sampler.BalancedOrder(labels)
        >>> loader = colabkit.Loader((torch.rand(100, 8), labels), batch_size=20, sampler=order)
        >>> next(iter(loader))[1].bincount()
        tensor([10, 10])
    """

    num_samples: int
    seed: int
    # Sample indices sorted by class, [N].
    _members: Positions
    # Number of samples of each class, [K].
    _sizes: Positions
    # Start of each class in _members, [K].
    _starts: Positions

    @checked_call()
    def __init__(self, labels: npt.ArrayLike, *, num_samples: int | None = None, seed: int = 0) -> None:
        checked = _numbers("a BalancedOrder", "labels", labels)
        if checked.dtype.kind not in "iub":
            found = f"the labels have dtype {checked.dtype}"
            next_step = "Convert the labels with numpy.unique(labels, return_inverse=True)[1]"
            raise InvalidOption(cannot("make a BalancedOrder", found, "whole numbers", next_step))
        set_whole_number(self, "num_samples", checked.size if num_samples is None else num_samples, 1)
        set_whole_number(self, "seed", seed, 0)
        members = np.argsort(checked, kind="stable").astype(np.int64, copy=False)
        sorted_labels = checked[members]
        starts = np.flatnonzero(np.append(True, sorted_labels[1:] != sorted_labels[:-1]))
        object.__setattr__(self, "_members", members)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_sizes", np.diff(starts, append=members.size))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def n(self) -> int:
        """Number of samples in the dataset."""
        return int(self._members.size)

    def __repr__(self) -> str:
        found = f"{self._sizes.size} classes of {self._members.size} samples"
        return f"BalancedOrder({found}, num_samples={self.num_samples}, seed={self.seed})"

    @cached_property
    def policy(self) -> str:
        """The text `"balanced "` and a digest of everything except the seed."""
        digest = hashlib.sha256(f"{self.num_samples} ".encode())
        digest.update(self._sizes.astype("<i8", copy=False).data)
        digest.update(self._members.astype("<i8", copy=False).data)
        return f"balanced {digest.hexdigest()[:16]}"

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        count = self._sizes.size
        runs = np.arange(start, stop, dtype=np.int64) // count
        classes = self._classes(epoch, start, stop, runs)
        runs += operator.index(epoch) * -(-self.num_samples // count) & _MASK
        sizes = self._sizes[classes]
        passes = runs // sizes
        keys = hashed(hashed(key_of(self.seed, Stream.PASSES), classes), passes)
        runs -= passes * sizes
        permute_each(runs, sizes, keys)
        runs += self._starts[classes]
        return self._members[runs]

    def _classes(self, epoch: int, start: int, stop: int, runs: Positions) -> Positions:
        count = self._sizes.size
        key = key_of(self.seed, epoch, Stream.RUNS)
        if count > _SORTED_UP_TO:
            classes = np.arange(start, stop) - runs * count
            permute_each(classes, np.full_like(classes, count), hashed(key, runs))
            return classes
        first = start - start % count
        words = hashed(key, np.arange(first, -(-stop // count) * count))
        return np.argsort(words.reshape(-1, count), axis=1).ravel()[start - first : stop - first]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class WeightedOrder(PureOrder):
    """Random draws with probabilities proportional to the weights of the samples, independent in each epoch.

    With replacement, each position is drawn independently, and the time for a range of positions depends only on its
    length. Without replacement, each sample occurs at most once per epoch: samples are sorted by exponential random
    numbers divided by their weights, which is equivalent to drawing one at a time from the remaining samples. This
    takes O(n log n) once per epoch, and the order of the most recent epoch is cached (8 bytes per sample). A sample
    with weight 0 is never drawn. With replacement, a sample whose weight is below 2**-53 of the sum is in practice
    never drawn either.

    Args:
        weights: weight of each sample, numbers of 0 or more `[N]`: an array, list or tensor. The sum need not be 1.
        num_samples: positions per epoch; None for the number of weights or, without replacement, the number of
            weights above 0.
        seed: seed of the order, a whole number of 0 or more.
        replacement: whether a sample may occur more than once per epoch.

    Raises:
        InvalidOption: if a weight is negative or not finite, if all weights are 0, if another argument is not a whole
            number in its range, or if, without replacement, fewer than `num_samples` weights are above 0.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006): exponential keys.

    Example:
        >>> import colabkit
        >>> order = colabkit.sampler.WeightedOrder([0.0, 0.5, 0.5], num_samples=100)
        >>> 0 in order.indices(epoch=0, start=0, stop=100)
        False
    """

    weights: npt.NDArray[np.float64]
    num_samples: int
    seed: int
    replacement: bool

    @checked_call()
    def __init__(
        self, weights: npt.ArrayLike, *, num_samples: int | None = None, seed: int = 0, replacement: bool = True
    ) -> None:
        checked = _numbers("a WeightedOrder", "weights", weights, np.float64)
        with np.errstate(over="ignore"):
            total = float(checked.sum())
        if not (checked.min() >= 0 and 0 < total < np.inf):
            low, high = checked.min(), checked.max()
            found = f"the weights range from {low} to {high}, with a sum of {total}"
            expected = "finite weights of 0 or more with a sum above 0"
            raise InvalidOption(cannot("make a WeightedOrder", found, expected, "Correct the weights"))
        checked.setflags(write=False)
        object.__setattr__(self, "weights", checked)
        object.__setattr__(self, "replacement", bool(replacement))
        most = None if replacement else int(np.count_nonzero(checked))
        set_whole_number(self, "num_samples", num_samples if num_samples is not None else most or checked.size, 1, most)
        set_whole_number(self, "seed", seed, 0)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def n(self) -> int:
        """Number of samples in the dataset."""
        return int(self.weights.size)

    def __repr__(self) -> str:
        options = f"num_samples={self.num_samples}, seed={self.seed}, replacement={self.replacement}"
        return f"WeightedOrder({self.weights.size} weights, {options})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("weights", "num_samples", "seed", "replacement")}

    @cached_property
    def policy(self) -> str:
        """The text `"weighted "` and a digest of everything except the seed."""
        digest = hashlib.sha256(f"{self.num_samples} {self.replacement} ".encode())
        digest.update(self.weights.astype("<f8", copy=False).data)
        return f"weighted {digest.hexdigest()[:16]}"

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        if not self.replacement:
            return self._drawn_once(epoch)[start:stop]
        draws = uniforms(hashed(key_of(self.seed, epoch, Stream.DRAWS), np.arange(start, stop)))
        return np.searchsorted(self._cumulative, draws, side="right")

    @cached_property
    def _cumulative(self) -> npt.NDArray[np.float64]:
        # Dividing by the last sum makes the last entry exactly 1 despite rounding, so every draw in [0, 1) is below it.
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
    """Return exponential random numbers, -log(u), from random words, with the same result on every machine.

    `np.log` rounds differently on some machines.

    The logarithm of the mantissa m is the series of 2 artanh((m - 1) / (m + 1)), truncated below 2**-60.
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


def _numbers(order: str, name: str, values: npt.ArrayLike, dtype: Any = None) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
        array = array if dtype is None else array.astype(dtype)
        if array.ndim == 1 and array.size:
            return array
        found = f"the {name} have shape {array.shape}"
    except (TypeError, ValueError, RuntimeError):
        found = f"NumPy cannot convert the {name} ({kind_of(values)}) to an array of numbers"
    raise InvalidOption(cannot(f"make {order}", found, "one number per sample", "Pass an array of shape [N]"))

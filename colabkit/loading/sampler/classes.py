"""Every class equally often, however many samples it has."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    InvalidOption,
    Positions,
    Stream,
    cannot,
    check_range,
    hashed,
    key_of,
    kind_of,
    permute_each,
)
from colabkit.loading.sampler.orders import by_chunks, set_whole_number

_ACT = "make a Balanced order"
_SORTED_UP_TO = 64
_MASK = (1 << 62) - 1


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Balanced:
    """Every class equally often: each run of K positions holds each of the K classes once, in a random order.

    Inside a class samples come in a shuffled order of the class, anew for each pass through it. A pass goes on from one
    epoch to the next: a sample comes again only when all others of its class have had their turn. Where `num_samples`
    is no multiple of K, an epoch's last run is cut short, and classes that it lacks leave out one sample. Any range
    takes the time of that range; the samples' numbers by class are kept (8 bytes a sample).

    Args:
        labels: `[N]` whole numbers, the class of each sample: an array, list or tensor.
        num_samples: positions of an epoch; None takes as many as there are labels.
        seed: a whole number of 0 or more.

    Raises:
        InvalidOption: if labels are no whole numbers, or an argument is no whole number in its range.
    """

    num_samples: int
    seed: int
    _members: Positions  # the samples, class after class
    _sizes: Positions  # of the classes, [K]
    _starts: Positions  # of the classes in _members, [K]

    def __init__(self, labels: npt.ArrayLike, *, num_samples: int | None = None, seed: int = 0) -> None:
        checked = _labels(labels)
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
        """Samples in the data set."""
        return int(self._members.size)

    def __repr__(self) -> str:
        found = f"{self._sizes.size} classes of {self._members.size} samples"
        return f"Balanced({found}, num_samples={self.num_samples}, seed={self.seed})"

    @cached_property
    def policy(self) -> str:
        """`"balanced "` and a digest of all but the seed."""
        digest = hashlib.sha256(f"{self.num_samples} ".encode())
        digest.update(self._sizes.astype("<i8", copy=False).data)
        digest.update(self._members.astype("<i8", copy=False).data)
        return f"balanced {digest.hexdigest()[:16]}"

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie in [0, num_samples].
        """
        check_range(start, stop, self.num_samples)
        return by_chunks(partial(self._samples, epoch), start, stop)

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
        """Return the class at each position: a permutation of the classes for each run."""
        count = self._sizes.size
        key = key_of(self.seed, epoch, Stream.RUNS)
        if count > _SORTED_UP_TO:
            classes = np.arange(start, stop) - runs * count
            permute_each(classes, np.full_like(classes, count), hashed(key, runs))
            return classes
        first = start - start % count
        words = hashed(key, np.arange(first, -(-stop // count) * count))
        return np.argsort(words.reshape(-1, count), axis=1).ravel()[start - first : stop - first]


def _labels(labels: npt.ArrayLike) -> npt.NDArray[np.integer]:
    try:
        checked = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"labels in {kind_of(labels)} that NumPy cannot read"
        raise InvalidOption(cannot(_ACT, found, "one whole number a sample", "Pass an array of classes")) from error
    if checked.ndim != 1 or not checked.size or checked.dtype.kind not in "iub":
        found = f"labels of shape {checked.shape} and type {checked.dtype}"
        raise InvalidOption(cannot(_ACT, found, "one whole number a sample", "Pass classes as whole numbers"))
    return checked

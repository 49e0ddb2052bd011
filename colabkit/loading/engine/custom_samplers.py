"""Batches in the order of a custom sampler: torch's, a batch sampler, any iterable with a length."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from colabkit.foundation import InvalidOption, cannot, key_of, shown
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.batches import BatchPlan, EpochRange, Share, next_count
from colabkit.loading.engine.user_code import reporting_errors, restored_generators, seed_by_draws

_MAYBE_MASKS = {bool, np.bool_, torch.Tensor}
_STORED = (Sequence, np.ndarray, torch.Tensor)  # hold what they yield, so it can be counted
_AHEAD_BATCHES = 32  # that a sampler is asked for together: it may depend on what training has found meanwhile
_SAMPLER_STREAM = 1  # a stream of draws that no transform has
_OF_SINGLE_SAMPLES = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class SamplerPlanner:
    """Plans batches as a custom sampler yields them, which must shard samples across ranks itself.

    Each process counts positions for itself: one that has received k samples stands where all have received k.

    Attributes:
        sampler: yields indices of samples, or a list of them for each batch, as a batch sampler does; with a length.
        yields_batches: whether it yields lists.
        seed: of the loader: if the sampler draws from a generator, as torch's do, or shuffles by the global ones before
            it yields its first, its order depends on this seed and the epoch.
        n: samples in the data set.
        batch_size: if the sampler yields single samples.
        drop_last: leave out a last batch that is not full.
        share: which process this is, so that each draws random numbers of its own.
    """

    sampler: Any
    yields_batches: bool
    seed: int
    n: int
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return how many batches an epoch has after so many samples of it; an estimate within an epoch of lists."""
        if not self.yields_batches:
            return max(self._least(start), len(self._range(start)))
        if isinstance(self.sampler, _STORED):
            return sum(stop > start for stop in itertools.accumulate(map(_size, self.sampler)))
        return max(self._least(start), len(self.sampler) - start // self._size_of_batches)

    def samples(self, start: int) -> int:
        """Return how many samples these batches hold; an estimate for a batch sampler."""
        if not self.yields_batches:
            return max(self._least(start), self._range(start).stop - start)
        if isinstance(self.sampler, _STORED):
            return max(0, sum(map(_size, self.sampler)) - start)
        return max(self._least(start), len(self.sampler) * self._size_of_batches - start)

    def plans(self, epoch: int, start: int, most_batches: int) -> Iterator[BatchPlan]:
        """Return plans of these batches, without the samples before them.

        The sampler is asked for its first at once: it may draw from the global generators, which no thread may touch.

        Raises:
            InvalidOption: while it is iterated, if the sampler yields anything but indices of samples.
            LoaderFailed: if the sampler fails.
        """
        with reporting_errors():
            samples = _start_sampler(self.sampler, self.seed, epoch)
        return self._plans(samples, start, min(most_batches, _AHEAD_BATCHES))

    def _plans(self, samples: Iterator[Any], start: int, most_batches: int) -> Iterator[BatchPlan]:
        position, count = start, 1
        waiting: list[Sequence[Any]] = []
        for batch in self._batches(samples, start):
            position += len(batch)
            waiting.append(batch)
            if len(waiting) == count:
                yield _plan_of(waiting, position, self.n, self.share)
                waiting, count = [], next_count(count, most_batches)
        if waiting:
            yield _plan_of(waiting, position, self.n, self.share)

    def _batches(self, samples: Iterator[Any], start: int) -> Iterator[Sequence[Any]]:
        if not self.yields_batches:
            single = itertools.islice(samples, start, None)
            while batch := list(itertools.islice(single, self.batch_size)):
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch
            return
        position = 0
        for some in samples:
            if not isinstance(some, Collection):
                raise _sampler_error(some, "lists of samples, as its first is one")
            batch = list(some)
            position += len(batch)
            if batch and position > start:
                yield batch[max(0, len(batch) - (position - start)) :]

    def _least(self, start: int) -> int:
        """Return how many batches come at least: one within an epoch whose end is unknown."""
        is_known = isinstance(self.sampler, _STORED) or type(self.sampler) in _OF_SINGLE_SAMPLES
        return 1 if start and not is_known else 0

    def _range(self, start: int) -> EpochRange:
        return EpochRange.of(len(self.sampler), start, self.batch_size, Share(), self.drop_last)

    @property
    def _size_of_batches(self) -> int:
        return int(getattr(self.sampler, "batch_size", 0) or self.batch_size)


def yields_batches(sampler: Iterable[Any]) -> bool:
    """Return whether a custom sampler yields lists of samples, which are batches, by its first."""
    if type(sampler) in _OF_SINGLE_SAMPLES:  # the first would take as long as all of them
        return False
    with restored_generators():
        first = next(iter(sampler), None)
    return getattr(first, "ndim", 0) > 0 or (isinstance(first, Sequence) and not isinstance(first, str | bytes))


def seed_of(sampler: Any) -> int:
    """Return the seed of a custom sampler, 0 if it has none."""
    for each in _nested(sampler):
        seed, generator = getattr(each, "seed", None), getattr(each, "generator", None)
        if isinstance(seed, int):
            return operator.index(seed)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return 0


def _start_sampler(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Return an iterator over a sampler, which yields the same again for the same epoch where that is possible.

    `set_epoch` is called if the sampler has it. Those of torch read their generator before they yield the first sample:
    until then they have one that depends on the epoch, or a resumed epoch would have another order. So do those that
    shuffle by the global generators, which are restored afterwards.
    """
    generators = []
    for each in _nested(sampler):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
        draws = isinstance(each, Sampler) and hasattr(each, "generator")
        if draws and isinstance(each.generator, torch.Generator | None):
            generators.append((each, each.generator))
            own = 0 if each.generator is None else each.generator.initial_seed()
            each.generator = torch.Generator().manual_seed(key_of(own, seed, epoch))
    try:
        with restored_generators():
            seed_by_draws(Draws(seed, epoch, np.zeros(1, np.int64), _SAMPLER_STREAM))
            samples = iter(sampler)
            first = list(itertools.islice(samples, 1))
    finally:
        for each, generator in generators:
            each.generator = generator
    return itertools.chain(first, samples)


def _size(batch: Any) -> int:
    return len(batch) if isinstance(batch, Collection) else 1


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it takes samples from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _plan_of(batches: list[Sequence[Any]], stop: int, n: int, share: Share) -> BatchPlan:
    sizes = tuple(map(len, batches))
    ends = np.cumsum([stop - sum(sizes), *sizes])[1:]
    samples = [*itertools.chain.from_iterable(batches)]
    try:
        indices = np.fromiter(map(operator.index, samples), np.int64, len(samples))
        is_good = not samples or 0 <= indices.min() <= indices.max() < n
    except (TypeError, OverflowError):
        is_good = False
    if not is_good or (_MAYBE_MASKS.intersection(map(type, samples)) and any(map(_is_bool, samples))):
        needed = f"numbers of samples from 0 to {n - 1}"
        raise next(_sampler_error(some, needed) for some in samples if not _is_index(some, n))
    # As if the processes had taken samples in turn, as those of torch's DistributedSampler do.
    positions = np.arange(stop - len(indices), stop) * share.world_size + share.rank
    return BatchPlan(indices, positions, sizes, tuple(ends.tolist()))


def _is_index(value: Any, n: int) -> bool:
    try:
        return not _is_bool(value) and 0 <= operator.index(value) < n
    except TypeError:
        return False


def _is_bool(value: Any) -> bool:
    """Return whether a value is a bool, which Python takes for 0 or 1, so that a mask would look like indices."""
    return isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, np.bool_)


def _sampler_error(found: Any, needed: str) -> InvalidOption:
    return InvalidOption(cannot("make a batch", f"a sampler that gives {shown(found)}", needed, "Check the sampler"))

"""Batches in the order of a sampler of the user's own: torch's, a batch sampler, any iterable with a length."""

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

from colabkit.foundation import InvalidOption, cannot, key_of
from colabkit.loading.augment.checks import shown
from colabkit.loading.augment.draws import Draws
from colabkit.loading.loader.portions import Pass, Portion, Share, grown
from colabkit.loading.loader.seeding import generators_kept, seed_all

_MAYBE_MASKS = {bool, np.bool_, torch.Tensor}
_STORED = (Sequence, np.ndarray, torch.Tensor)  # hold what they give, so it can be counted
_AHEAD_BATCHES = 32  # that a sampler is asked for together: it may go by what training has found meanwhile
_OF_SAMPLERS = 1  # a stream of draws that no transform has
_OF_SINGLE_SAMPLES = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """Batches as a sampler of the user's own gives them; which samples are this process's, is its own business.

    Positions are counted in each process for itself: one that has got k samples stands where all have got k.

    Attributes:
        sampler: gives numbers of samples, or a list of them for each batch, as a batch sampler does; with a length.
        gives_batches: whether it gives lists.
        seed: of the loader: where the sampler draws from a generator, as torch's do, or shuffles by the global ones
            when it is asked for its first, what it draws depends on this seed and the epoch.
        n: samples in the data set.
        batch_size: where the sampler gives single samples.
        drop_last: leave out a last batch that is not full.
        share: which process this is, so that each draws random numbers of its own.
    """

    sampler: Any
    gives_batches: bool
    seed: int
    n: int
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return how many batches an epoch has after so many samples of it; in mid-epoch of a batch sampler about."""
        if not self.gives_batches:
            return max(self._least(start), len(self._pass(start)))
        if isinstance(self.sampler, _STORED):
            return sum(stop > start for stop in itertools.accumulate(map(_size, self.sampler)))
        return max(self._least(start), len(self.sampler) - start // self._size_of_batches)

    def samples(self, start: int) -> int:
        """Return how many samples these batches hold; of a batch sampler about."""
        if not self.gives_batches:
            return max(self._least(start), self._pass(start).stop - start)
        if isinstance(self.sampler, _STORED):
            return max(0, sum(map(_size, self.sampler)) - start)
        return max(self._least(start), len(self.sampler) * self._size_of_batches - start)

    def portions(self, epoch: int, start: int, most_batches: int) -> Iterator[Portion]:
        """Return these batches, passing over the samples before them.

        The sampler is asked for its first at once: it may draw from the global generators, which no thread may touch.

        Raises:
            InvalidOption: while it is iterated, if the sampler gives something else than numbers of samples.
        """
        try:
            given = _given(self.sampler, self.seed, epoch)
        except Exception as error:
            given = _failing(error)  # in its turn, as what fails later
        return self._portions(given, start, min(most_batches, _AHEAD_BATCHES))

    def _portions(self, given: Iterator[Any], start: int, most_batches: int) -> Iterator[Portion]:
        position, count = start, 1
        waiting: list[Sequence[Any]] = []
        for batch in self._batches(given, start):
            position += len(batch)
            waiting.append(batch)
            if len(waiting) == count:
                yield _portion(waiting, position, self.n, self.share)
                waiting, count = [], grown(count, most_batches)
        if waiting:
            yield _portion(waiting, position, self.n, self.share)

    def _batches(self, given: Iterator[Any], start: int) -> Iterator[Sequence[Any]]:
        if not self.gives_batches:
            numbers = itertools.islice(given, start, None)
            while batch := list(itertools.islice(numbers, self.batch_size)):
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch
            return
        position = 0
        for some in given:
            if not isinstance(some, Collection):
                raise _no_sample(some, "lists of samples, as its first is one")
            batch = list(some)
            position += len(batch)
            if batch and position > start:
                yield batch[max(0, len(batch) - (position - start)) :]

    def _least(self, start: int) -> int:
        """Return how many batches come at least: one in mid-epoch, where the end shows only when it comes."""
        is_known = isinstance(self.sampler, _STORED) or type(self.sampler) in _OF_SINGLE_SAMPLES
        return 1 if start and not is_known else 0

    def _pass(self, start: int) -> Pass:
        return Pass.of(len(self.sampler), start, self.batch_size, Share(), self.drop_last)

    @property
    def _size_of_batches(self) -> int:
        return int(getattr(self.sampler, "batch_size", 0) or self.batch_size)


def gives_batches(sampler: Iterable[Any]) -> bool:
    """Return whether a sampler of the user's own gives lists of samples, which are batches; asks it for the first."""
    if type(sampler) in _OF_SINGLE_SAMPLES:  # the first would take as long as all of them
        return False
    with generators_kept():
        first = next(iter(sampler), None)
    return getattr(first, "ndim", 0) > 0 or (isinstance(first, Sequence) and not isinstance(first, str | bytes))


def seed_of(sampler: Any) -> int:
    """Return the seed that a sampler of the user's own draws from, 0 if it tells of none."""
    for each in _nested(sampler):
        seed, generator = getattr(each, "seed", None), getattr(each, "generator", None)
        if isinstance(seed, int):
            return operator.index(seed)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return 0


def _given(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Return what a sampler gives in an epoch, the same whenever it is asked for that epoch, where that can be.

    A sampler is told the epoch if it wants to know. Those of torch read their generator when they are asked for the
    first sample: until then they have one that depends on the epoch, else a resumed epoch would have another order.
    So have those that shuffle by the global generators, which are as they were afterwards.
    """
    kept = []
    for each in _nested(sampler):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
        draws = isinstance(each, Sampler) and hasattr(each, "generator")
        if draws and isinstance(each.generator, torch.Generator | None):
            kept.append((each, each.generator))
            own = 0 if each.generator is None else each.generator.initial_seed()
            each.generator = torch.Generator().manual_seed(key_of(own, seed, epoch))
    try:
        with generators_kept():
            seed_all(Draws(seed, epoch, np.zeros(1, np.int64), _OF_SAMPLERS))
            given = iter(sampler)
            first = list(itertools.islice(given, 1))
    finally:
        for each, generator in kept:
            each.generator = generator
    return itertools.chain(first, given)


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _size(batch: Any) -> int:
    return len(batch) if isinstance(batch, Collection) else 1


def _nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those that it takes samples from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _portion(batches: list[Sequence[Any]], stop: int, n: int, share: Share) -> Portion:
    sizes = tuple(map(len, batches))
    reached = np.cumsum([stop - sum(sizes), *sizes])[1:]
    given = [*itertools.chain.from_iterable(batches)]
    try:
        numbers = np.fromiter(map(operator.index, given), np.int64, len(given))
        is_good = not given or 0 <= numbers.min() <= numbers.max() < n
    except (TypeError, OverflowError):
        is_good = False
    if not is_good or (_MAYBE_MASKS.intersection(map(type, given)) and any(map(_is_of_mask, given))):
        needed = f"numbers of samples from 0 to {n - 1}"
        raise next(_no_sample(some, needed) for some in given if not _is_sample(some, n))
    # As if the processes had taken samples in turn, as those of torch's DistributedSampler do.
    positions = np.arange(stop - len(numbers), stop) * share.world_size + share.rank
    return Portion(numbers, positions, sizes, tuple(reached.tolist()))


def _is_sample(number: Any, n: int) -> bool:
    try:
        return not _is_of_mask(number) and 0 <= operator.index(number) < n
    except TypeError:
        return False


def _is_of_mask(number: Any) -> bool:
    """Return whether it is a truth value, which Python takes for 0 or 1."""
    return isinstance(number, bool) or getattr(number, "dtype", None) in (torch.bool, np.bool_)


def _no_sample(found: Any, needed: str) -> InvalidOption:
    """Return the error for what a sampler gives."""
    return InvalidOption(cannot("make a batch", f"a sampler that gives {shown(found)}", needed, "Check the sampler"))

"""Code of users: its random numbers are seeded, its errors name the samples, and its samplers yield batches."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from colabkit.foundation import (
    ColabkitError,
    InvalidOption,
    LoaderFailed,
    cannot,
    format_count,
    format_things,
    key_of,
    shown,
)
from colabkit.loading.augment.transform import Draws, Transform
from colabkit.loading.engine.batches import BatchPlan, EpochRange, Share, next_count

_SHOWN = 3


def loader_failed(
    error: Exception | str, next_step: str = "Check them with one sample", where: str = ""
) -> LoaderFailed:
    """Return the error to raise for what code of users raised.

    Args:
        error: itself, or its text.
        next_step: how to reproduce it.
        where: the samples, as of `describe_samples`; empty if unknown.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    found = " ".join(text.split())  # which may be a traceback of many lines
    if where:
        found, next_step = f"{where}: {found}", "Run transform on a batch of these samples to see it"
    if "pic should be PIL Image" in found and "torch.Tensor" in found:  # of torchvision's older ToTensor
        next_step = "Samples are tensors: use v2.ToDtype(torch.float32, scale=True), or Normalize of colabkit.augment"
    return LoaderFailed(cannot("make a batch", found, "a data set and transforms without errors", next_step))


@contextmanager
def reporting_errors(describe: Callable[[], str] = str) -> Iterator[None]:
    """Raise `LoaderFailed` for what code of users raises in the block; `describe` returns the samples it worked on."""
    try:
        yield
    except ColabkitError:
        raise
    except Exception as error:
        raise loader_failed(error, where=describe()) from error


def check_collated(transform: object, images: Any, samples: int) -> None:
    """Raise `LoaderFailed` for a batch that a custom `collate_fn` left samples out of.

    Args:
        transform: to be applied; ours draw random numbers for each sample.
        images: the first field of the batch.
        samples: how many `collate_fn` was given.
    """
    if isinstance(transform, Transform) and isinstance(images, Tensor) and images.ndim and len(images) != samples:
        found = f"a batch of {len(images)} that collate_fn made of {format_things(samples, 'sample')}"
        next_step = "Leave samples out by sampler= or a Subset, or transform them in collate_fn"
        raise LoaderFailed(cannot("transform a batch", found, "one for each sample", next_step))


def describe_samples(epoch: int, indices: Sequence[int], name_of: Callable[[int], str] | None) -> str:
    """Return the samples of a batch for a message, as in `"samples 7 ('a/7.png' of 'tree'), 3, 5 and 61 more"`.

    Args:
        indices: of the samples, at least one.
        name_of: returns the name of a sample, empty if it has none; None if the data set has no names.
    """
    first, *others = indices[:_SHOWN]
    name = name_of(first) if name_of is not None else ""
    listed = ", ".join([f"{first} ({name})" if name else str(first), *map(str, others)])
    more = f" and {format_count(len(indices) - _SHOWN)} more" if len(indices) > _SHOWN else ""
    return f"sample{'s' if others else ''} {listed}{more} of epoch {epoch}"


def seeds_of(draws: Draws) -> list[int]:
    """Return a seed of 53 bits for each sample; computing many together costs a tenth as much for each."""
    return [int(uniform * 2**53) for uniform in draws.uniforms(1)[:, 0].tolist()]


def seed_by_draws(draws: Draws, device: torch.device | None = None) -> None:
    """Seed the global generators by the first sample of `draws`."""
    seed_generators(seeds_of(draws.part(0, 1))[0], device)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch with 53 bits; of GPUs only that of `device`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # `torch.manual_seed` would seed the generators of all GPUs.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def restored_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators, and that of a GPU `device`, after the block."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    gpu = device if device is not None and device.type == "cuda" else None
    on_gpu = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torchs)
        if gpu is not None and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, gpu)


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

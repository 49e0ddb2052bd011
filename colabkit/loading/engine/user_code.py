"""Run user code: seed its random numbers, report its errors with the samples, and plan batches of custom samplers."""

from __future__ import annotations

import itertools
import operator
import os
import random
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from colabkit.loading.engine.batches import BatchPlan, EpochRange, next_count
from colabkit.loading.engine.share import Share

_SHOWN = 3
_RUN_TRANSFORM = "Run transform on a batch of these samples to see the error"


_orphans: list[Generator[Any, None, None]] = []


def check_process(owner: int, batches: Generator[Any, None, None]) -> None:
    """Raise `LoaderFailed` unless this is still the process that started the iteration.

    A forked child process has none of the threads that build batches, and would wait for these threads forever.

    Args:
        owner: ID of the process that started the iteration.
        batches: generator of the batches of the iteration.
    """
    if os.getpid() != owner:
        # Keep the generator alive: closing it, or collecting it as garbage, would wait for the missing threads.
        _orphans.append(batches)
        found = "the process was forked during the iteration"
        next_step = "Start a new iteration in the child process"
        raise LoaderFailed(cannot("load batches", found, "an iteration that started in this process", next_step))


def loader_failed(text: str, next_step: str) -> LoaderFailed:
    """Return the `LoaderFailed` to raise for an error of user code.

    Args:
        text: the operation that raised the error, and the error's own text, which may have many lines.
        next_step: how to reproduce the error.
    """
    found = " ".join(text.split()).rstrip(" .:")
    # torchvision's old ToTensor raises this error for tensors.
    if "pic should be PIL Image" in found and "torch.Tensor" in found:
        next_step = "Replace ToTensor with v2.ToDtype(torch.float32, scale=True), or with Normalize of colabkit.augment"
    # This is the error of torchvision's Normalize.
    if "should be a float tensor" in found and "uint8" in found:
        next_step = "Put v2.ToDtype(torch.float32, scale=True) before Normalize, or use Normalize of colabkit.augment"
    return LoaderFailed(cannot("make a batch", found, "", next_step))


@contextmanager
def reporting_errors(describe: Callable[[], str], next_step: str = _RUN_TRANSFORM) -> Iterator[None]:
    """Raise `LoaderFailed` for any error of user code in the block, unless a GPU runs out of memory.

    Args:
        describe: function that returns the operation that raised the error, for the message.
        next_step: how to reproduce the error.
    """
    try:
        yield
    except (ColabkitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise loader_failed(f"{describe()} raised {type(error).__name__}: {error}", next_step) from error


def reporting_loading_errors() -> AbstractContextManager[None]:
    """Raise `LoaderFailed` for errors of user code in the block that no inner `reporting_errors` has reported."""
    next_step = "Check the sampler, the transform and one sample of the dataset"
    return reporting_errors(lambda: "loading samples", next_step)


def check_collated(transform: object, images: Any, samples: int) -> None:
    """Raise `LoaderFailed` if a custom `collate_fn` dropped samples, but the transform needs one item per sample.

    Args:
        transform: transform to apply; transforms of colabkit draw random numbers for each sample.
        images: first field of the batch.
        samples: number of samples passed to `collate_fn`.
    """
    if isinstance(transform, Transform) and isinstance(images, Tensor) and images.ndim and len(images) != samples:
        found = f"collate_fn made a batch of {len(images)} from {format_things(samples, 'sample')}"
        next_step = "Exclude samples with sampler= or a Subset, or apply the transform in collate_fn"
        raise LoaderFailed(cannot("transform a batch", found, "one item per sample", next_step))


def describe_samples(epoch: int, indices: Sequence[int], name_of: Callable[[int], str] | None) -> str:
    """Describe the samples of a batch, as in `"samples 7 ('a/7.png' of 'tree'), 3, 5 and 61 more of epoch 0"`.

    Args:
        epoch: number of the epoch.
        indices: sample indices, at least one.
        name_of: function that returns the name of a sample, or an empty text; None if the dataset has no names.
    """
    first, *others = indices[:_SHOWN]
    name = name_of(first) if name_of is not None else ""
    listed = ", ".join([f"{first} ({name})" if name else str(first), *map(str, others)])
    more = f" and {format_count(len(indices) - _SHOWN)} more" if len(indices) > _SHOWN else ""
    return f"sample{'s' if others else ''} {listed}{more} of epoch {epoch}"


def seeds_of(draws: Draws) -> list[int]:
    """Return a seed of 53 bits for each sample; computing many at once is ten times as fast per seed."""
    return [int(uniform * 2**53) for uniform in draws.uniforms(1)[:, 0].tolist()]


def seed_by_draws(draws: Draws, device: torch.device | None = None) -> None:
    """Seed the global generators by the first sample of `draws`."""
    seed_generators(seeds_of(draws.part(0, 1))[0], device)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch with a 53-bit number; of all GPUs, seed only `device`."""
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
# These types store their items, so the items can be counted without consuming an iterator.
_STORED = (Sequence, np.ndarray, torch.Tensor)
# Types of stored indices that can be read without running user code.
_INDEX_LISTS = (list, tuple, range, np.ndarray, torch.Tensor)
# Maximum number of batches to request from a sampler in advance; low, because a sampler may depend on the training so
# far.
_AHEAD_BATCHES = 32
# Number of a random stream that no transform uses.
_SAMPLER_STREAM = 1
_OF_SINGLE_SAMPLES = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True, slots=True)
class SamplerPlanner:
    """A planner of the batches of a custom sampler, which must shard samples across ranks itself.

    Each process counts its own samples: position k means that this process has received k samples.

    Attributes:
        sampler: iterable with a length; yields sample indices, or a list of them per batch, as a batch sampler does.
        yields_batches: whether the sampler yields lists.
        seed: seed of the loader. If the sampler draws from its own generator, as torch samplers do, or from the global
            generators before its first item, its order depends on this seed and the epoch.
        n: number of samples in the dataset.
        batch_size: samples per batch, if the sampler yields single samples.
        drop_last: whether to drop a last batch that is not full.
        share: rank of this process, so that each rank draws different random numbers.
    """

    sampler: Any
    yields_batches: bool
    seed: int
    n: int
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return the number of batches left after `start` samples; an estimate inside an epoch of a batch sampler."""
        if not self.yields_batches:
            return max(self._least(start), len(self._range(start)))
        if isinstance(self.sampler, _STORED):
            return sum(stop > start for stop in itertools.accumulate(map(_size, self.sampler)))
        return max(self._least(start), len(self.sampler) - start // self._size_of_batches)

    def samples(self, start: int) -> int:
        """Return the number of samples in the batches left after `start` samples; an estimate for a batch sampler."""
        if not self.yields_batches:
            return max(self._least(start), self._range(start).stop - start)
        if isinstance(self.sampler, _STORED):
            return max(0, sum(map(_size, self.sampler)) - start)
        return max(self._least(start), len(self.sampler) * self._size_of_batches - start)

    def plans(self, epoch: int, start: int, most_batches: int) -> Iterator[BatchPlan]:
        """Return plans of the batches after `start` samples of an epoch.

        The sampler's first item is requested immediately, in the caller's thread: the sampler may draw from the global
        generators, which worker threads must not touch.

        Raises:
            InvalidOption: during iteration, if the sampler yields anything other than sample indices.
            LoaderFailed: if the sampler fails.
        """
        with reporting_errors(lambda: "the sampler", "Iterate over the sampler to see the error"):
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
                raise _sampler_error(some, "a list of sample indices, like its first item")
            batch = list(some)
            position += len(batch)
            if batch and position > start:
                yield batch[max(0, len(batch) - (position - start)) :]

    def _least(self, start: int) -> int:
        """Return the minimum number of batches left: 1 inside an epoch whose end is unknown, else 0."""
        is_known = isinstance(self.sampler, _STORED) or type(self.sampler) in _OF_SINGLE_SAMPLES
        return 1 if start and not is_known else 0

    def _range(self, start: int) -> EpochRange:
        return EpochRange.of(len(self.sampler), start, self.batch_size, Share(), self.drop_last)

    @property
    def _size_of_batches(self) -> int:
        return int(getattr(self.sampler, "batch_size", 0) or self.batch_size)


def yields_batches(sampler: Iterable[Any]) -> bool:
    """Return whether a custom sampler yields batches (lists of indices), according to its first item."""
    # Avoid requesting an item: these samplers compute the complete order before they yield the first item.
    if type(sampler) in _OF_SINGLE_SAMPLES:
        return False
    with restored_generators():
        first = next(iter(sampler), None)
    return getattr(first, "ndim", 0) > 0 or (isinstance(first, Sequence) and not isinstance(first, str | bytes))


def seed_of(sampler: Any) -> int:
    """Return the seed of a custom sampler, or 0 if it has none."""
    for each in _nested(sampler):
        seed, generator = getattr(each, "seed", None), getattr(each, "generator", None)
        if isinstance(seed, int):
            return operator.index(seed)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return 0


def stored_digest(sampler: Any) -> str:
    """Return a digest of the indices that a custom sampler stores, such as those of a list; "" if it stores none."""
    found = 0
    for each in _nested(sampler):
        stored: Any = each if type(each) in _INDEX_LISTS else getattr(each, "indices", None)
        if type(stored) in _INDEX_LISTS:
            try:
                data = np.asarray(stored, np.int64).tobytes()
            except (OverflowError, TypeError, ValueError):
                # Batches may have different sizes, and indices may be invalid.
                data = repr([*stored]).encode()
            found = zlib.crc32(data, found)
    return f"{found:08x}" if found else ""


def _start_sampler(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Start iterating over a sampler, and make the order of each epoch reproducible where possible.

    `set_epoch` is called if the sampler has it. Torch samplers read their generator before they yield the first sample.
    Until then, a generator that depends on the epoch replaces it; otherwise a resumed epoch would have a different
    order. The global generators are seeded in the same way, for samplers that use them, and restored afterwards.
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
        expected = f"sample indices from 0 to {n - 1}"
        raise next(_sampler_error(some, expected) for some in samples if not _is_index(some, n))
    # Number the samples as if the ranks took turns, as in torch's DistributedSampler.
    positions = np.arange(stop - len(indices), stop) * share.world_size + share.rank
    return BatchPlan(indices, positions, sizes, tuple(ends.tolist()))


def _is_index(value: Any, n: int) -> bool:
    try:
        return not _is_bool(value) and 0 <= operator.index(value) < n
    except TypeError:
        return False


def _is_bool(value: Any) -> bool:
    """Return whether a value is a bool: Python accepts it as the index 0 or 1, so a mask would pass as indices."""
    return isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, np.bool_)


def _sampler_error(item: Any, expected: str) -> InvalidOption:
    return InvalidOption(cannot("make a batch", f"the sampler yielded {shown(item)}", expected, "Correct the sampler"))

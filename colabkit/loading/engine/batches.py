"""Plan which samples form the batches of an epoch, and represent the batches.

A global batch holds the samples that all ranks take in one step: `batch_size` consecutive positions of the epoch's
order for each rank. A position counted in samples is therefore independent of batch size and number of ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import Mark
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.share import Share
from colabkit.loading.sampler.orders import Order
from colabkit.loading.sampler.shard_order import ShardShuffledOrder
from colabkit.packs import Indices, stack_samples

T = TypeVar("T")

BATCHES_TOGETHER = 32
"""Largest number of batches that are built together; more may be planned together."""

# Number of positions in the first chunk: enough for a small epoch, and fast enough not to delay the first batch.
_FIRST_CHUNK = 1024
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Consecutive batches of one rank.

    Attributes:
        indices: sample indices, `int64 [S]`.
        positions: positions of the samples in the epoch's global order, `int64 [S]`.
        sizes: number of samples in each batch.
        ends: for each batch, the number of samples of the epoch that all ranks have received after the batch; with a
            custom sampler, the number that this rank has received.
    """

    indices: Indices
    positions: Indices
    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and stop of each batch, as indices into the plan's samples."""
        return [*itertools.pairwise(itertools.accumulate(self.sizes, initial=0))]

    def slice(self, first: int, stop: int | None = None) -> BatchPlan:
        """Return a plan of the batches from `first` up to, but excluding, `stop`; None means up to the end."""
        begin, end = sum(self.sizes[:first]), sum(self.sizes[:stop])
        return BatchPlan(
            self.indices[begin:end], self.positions[begin:end], self.sizes[first:stop], self.ends[first:stop]
        )


@dataclass(slots=True)
class Batch:
    """A batch, with its position and timing.

    Attributes:
        values: fields of the batch, or the object that `collate_fn` returned.
        positions: positions of the samples in the epoch's global order.
        end: entry of `BatchPlan.ends` for this batch.
        was_ready: whether the batch was ready when it was requested.
        marks: events in the device's stream before and after the wait for this batch, or its gather on the device.
    """

    values: Any
    positions: Indices
    end: int
    was_ready: bool = True
    marks: tuple[Mark, Mark] | None = None


class BatchGroup:
    """Batches that are built together.

    Attributes:
        plan: plan of the batches.
        buffer: pinned host memory of the batches, if any.
        values: each field of all samples, while the batches are built.
        result: first field after the transforms.
        draws: random numbers of the samples.
        bad: samples to leave out, as indices into the plan.
        batches: the finished batches.
        pieces: `(start, stop)` ranges of samples that threads may build independently.
        lock: protects the attributes that several threads set.
        pieces_left: number of unfinished pieces.
        error: error of the first piece that could not be built.
        failed_at: index in the plan of the first sample of that piece; the number of samples if nothing failed.
        is_done: whether the group is finished.
    """

    def __init__(self, plan: BatchPlan, buffer: Tensor | None = None) -> None:
        self.plan = plan
        self.buffer = buffer
        self.values: list[Any] = []
        self.result: Tensor | None = None
        self.draws: Draws
        self.bad: list[int] = []
        self.batches: list[Batch] = []
        self.pieces: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.pieces_left = 0
        self.error: BaseException | None = None
        self.failed_at = len(plan.indices)
        self.is_done = False


@dataclass(frozen=True, slots=True)
class EpochRange:
    """The global batches of one epoch, from a position to its end.

    All ranks get the same number of batches, and no position occurs twice. The last global batch holds the remaining
    samples. If these are fewer than one per rank, the last two global batches share their samples equally, so that no
    rank gets an empty batch or more than `batch_size` samples.

    Attributes:
        start: number of samples of the epoch that were received before this range.
        stop: position at which the range ends.
        batch_size: samples per batch of one rank.
        share: share of this process.
        is_dealt: whether each process takes single positions in turn, instead of consecutive ones.
    """

    start: int
    stop: int
    batch_size: int
    share: Share
    is_dealt: bool = False

    @classmethod
    def of(
        cls, n: int, start: int, batch_size: int, share: Share, drop_last: bool, is_dealt: bool = False
    ) -> EpochRange:
        """Return the range from `start` to `n` or, with `drop_last`, to the end of the last full batch."""
        rest = (n - start) % (batch_size * share.world_size) if drop_last else 0
        return cls(start, max(start, n - rest), batch_size, share, is_dealt)

    def __len__(self) -> int:
        """Return the number of batches per rank."""
        full, rest = divmod(self.stop - self.start, self._step)
        return full + (rest > 0 and not self.indivisible)

    @property
    def _step(self) -> int:
        return self.batch_size * self.share.world_size

    @property
    def indivisible(self) -> int:
        """Number of final samples that cannot be split into the same number of batches for each rank; usually 0."""
        full, rest = divmod(self.stop - self.start, self._step)
        is_shared = rest >= self.share.world_size or (full and self.batch_size > 1)
        return 0 if is_shared else rest

    def samples(self) -> int:
        """Return the number of samples in this rank's batches."""
        batches = len(self)
        full = max(0, batches - 2)
        return full * self.batch_size + sum(map(len, self._own(self._begins(full, batches - full))))

    def plan(self, order: _ChunkedOrder, epoch: int, first: int, count: int) -> BatchPlan:
        """Return the plan of `count` batches, starting with batch `first`."""
        begins = self._begins(first, count)
        spans = self._own(begins)
        sizes, ends = tuple(map(len, spans)), tuple(begins[1:])
        if self.share.world_size == 1:
            spans = [range(begins[0], begins[-1])]
        indices = [order.indices(epoch, span) for span in spans]
        positions = [np.arange(span.start, span.stop, span.step) for span in spans]
        if len(spans) == 1:
            return BatchPlan(indices[0], positions[0], sizes, ends)
        return BatchPlan(np.concatenate(indices), np.concatenate(positions), sizes, ends)

    def _begins(self, first: int, count: int) -> list[int]:
        step, batches = self._step, len(self)
        begins = [*range(self.start + step * first, self.start + step * (first + count) + 1, step)]
        if batches and first + count >= batches:
            begins[-1] = self.stop - self.indivisible
        last = self.start + step * (batches - 1)
        if batches > 1 and self.stop - last < self.share.world_size and first < batches <= first + count + 1:
            # The last batch would have fewer samples than ranks, so the last two batches divide their samples equally.
            begins[batches - 1 - first] = (last - step + self.stop) // 2
        return begins

    def _own(self, begins: list[int]) -> list[range]:
        own = self.share.dealt if self.is_dealt else self.share.consecutive
        return [own(begin, end) for begin, end in itertools.pairwise(begins)]


class _ChunkedOrder:
    """An order computed in chunks up to `stop`, because each call has the fixed cost of several thousand positions."""

    def __init__(self, order: Order, stop: int) -> None:
        self._order = order
        self._stop = stop
        self._held = range(0)
        self._chunk: Indices = np.empty(0, np.int64)
        self._size = _FIRST_CHUNK

    def indices(self, epoch: int, span: range) -> Indices:
        """Return the sample indices at the positions of `span`; `epoch` and step must be the same in every call."""
        first = self._held.index(span.start) if span.start in self._held else len(self._held)
        if first + len(span) > len(self._held):
            stop = min(max(span.stop, span.start + self._size * span.step), self._stop)
            self._held, first = range(span.start, stop, span.step), 0
            self._chunk, self._size = self._compute(epoch, self._held), _CHUNK
        return self._chunk[first : first + len(span)]

    def _compute(self, epoch: int, span: range) -> Indices:
        if span.step == 1:
            return self._order.indices(epoch, span.start, span.stop)
        # Positions of other orders are not dealt.
        assert isinstance(self._order, ShardShuffledOrder)
        return self._order.indices(epoch, span.start, span.stop, span.step)


@dataclass(frozen=True, slots=True)
class OrderPlanner:
    """A planner of the batches of one process, in an order of `colabkit.sampler`."""

    order: Order
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return the number of batches left after `start` samples of an epoch."""
        return len(self._range(start))

    def samples(self, start: int) -> int:
        """Return the number of samples in the batches left after `start` samples."""
        return self._range(start).samples()

    def plans(self, epoch: int, start: int, most_batches: int) -> Iterator[BatchPlan]:
        """Yield plans of the batches after `start` samples: first of one batch, then of up to `most_batches`."""
        whole = self._range(start)
        order = _ChunkedOrder(self.order, whole.stop)
        first, count, batches = 0, 1, len(whole)
        while first < batches:
            count = min(count, batches - first)
            yield whole.plan(order, epoch, first, count)
            first, count = first + count, next_count(count, most_batches)

    def _range(self, start: int) -> EpochRange:
        is_dealt = isinstance(self.order, ShardShuffledOrder) and self.order.streams > 1
        return EpochRange.of(len(self.order), start, self.batch_size, self.share, self.drop_last, is_dealt)


def next_count(batches: int, most_batches: int) -> int:
    """Return the number of batches in the plan that follows a plan of `batches` batches.

    Plans grow step by step, so that the first batches are ready soon. If a plan may hold more batches than are built
    together, its size does not delay the first batch. The plan then has the maximum size immediately, because every
    plan has a fixed cost.
    """
    if most_batches > BATCHES_TOGETHER:
        return most_batches
    return min(most_batches, batches * max(2, round(math.cbrt(most_batches))))


def split_plans(plans: Iterable[BatchPlan], most_batches: int) -> Iterator[BatchPlan]:
    """Split plans into plans of at most `most_batches` batches."""
    for plan in plans:
        if len(plan.sizes) <= most_batches:
            yield plan
            continue
        for first in range(0, len(plan.sizes), most_batches):
            yield plan.slice(first, first + most_batches)


class DeferredErrors(Generic[T]):
    """An iterable that ends at an error without raising it; `raise_error` raises the error afterwards."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        try:
            yield from self._items
        except Exception as error:
            self._error = error

    def raise_error(self) -> None:
        """Raise the error that ended the iteration, if there was one."""
        if self._error is not None:
            raise self._error


def fetch_ahead(items: Iterable[T], is_enough: Callable[[deque[T]], bool]) -> Generator[T, None, None]:
    """Yield items in order, each after enough of the following items have been fetched.

    An error of `items` is raised after all earlier items have been yielded.

    Args:
        items: items to fetch.
        is_enough: function that returns whether enough items have been fetched; must return False for an empty queue.
    """
    source = DeferredErrors(items)
    coming, waiting, is_over = iter(source), deque[T](), False
    while True:
        while not is_over and not is_enough(waiting):
            try:
                waiting.append(next(coming))
            except StopIteration:
                is_over = True
        if not waiting:
            break
        yield waiting.popleft()
    source.raise_error()


class EndDetector:
    """The plans of an epoch, fetched one ahead, so that the last batch is recognized when it is yielded.

    Attributes:
        end: entry of `BatchPlan.ends` for the last batch; None while unknown.
    """

    def __init__(self, plans: Iterable[BatchPlan]) -> None:
        self.end: int | None = None
        self._plans = plans

    def __iter__(self) -> Iterator[BatchPlan]:
        return fetch_ahead(self._until_end(), lambda waiting: len(waiting) > 1)

    def _until_end(self) -> Iterator[BatchPlan]:
        end = None
        for plan in self._plans:
            end = plan.ends[-1]
            yield plan
        self.end = end


def announce_plans(
    plans: Iterable[BatchPlan], announce: Callable[[BatchPlan], None], depth: int
) -> Iterator[BatchPlan]:
    """Yield each plan after announcing it and enough further plans to hold more than `depth` samples."""

    def announced() -> Iterator[BatchPlan]:
        for plan in plans:
            announce(plan)
            yield plan

    def is_enough(waiting: deque[BatchPlan]) -> bool:
        return len(waiting) > 1 and sum(len(plan.indices) for plan in waiting) > depth

    return fetch_ahead(announced(), is_enough)


def split_values(values: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Split the concatenated values of several batches into batches of the given sizes."""
    stops = [*itertools.accumulate(sizes, initial=0)]
    return [stack_samples(values[start:stop]) for start, stop in itertools.pairwise(stops)]


def split_batches(plan: BatchPlan, fields: Sequence[Any]) -> list[Batch]:
    """Split the fields of all samples of a plan into its batches."""
    # Unlike `split_with_sizes`, this gives each batch its own version counter. Otherwise, autograd would treat a change
    # of one batch as a change of all.
    columns = [
        torch.unsafe_split_with_sizes(value, plan.sizes)
        if isinstance(value, Tensor)
        else split_values(value, plan.sizes)
        for value in fields
    ]
    return [
        Batch(values, plan.positions[start:stop], end)
        for (start, stop), end, *values in zip(plan.spans, plan.ends, *columns, strict=True)
    ]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """Apply a function to every tensor of a batch and return a batch of the same structure.

    Args:
        batch: batch of any structure.
        function: function for tensors.
        other: function for other objects that have a method `to()`, which moves them to a device; None keeps them.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if other is not None and _moves_itself(batch):
        return other(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, other) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function, other) for value in batch)
    if isinstance(batch, MutableMapping):
        # A copy preserves other attributes of custom mappings.
        clone = copy.copy(batch)
        clone.update({name: map_tensors(value, function, other) for name, value in batch.items()})
        return clone
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, function, other) for name, value in batch.items()}
    return other(batch) if other is not None and callable(getattr(batch, "to", None)) else batch


def fields_of(batch: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the fields of a batch, and a function that rebuilds a batch of the same structure from fields."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(batch), lambda values: type(batch)(*values)
    if isinstance(batch, tuple | list):
        return list(batch), type(batch)
    if isinstance(batch, Mapping):
        return list(batch.values()), lambda values: dict(zip(batch, values, strict=True))
    return [batch], lambda values: values[0]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that `map_tensors` with `other` calls `function` for, in the same order."""
    if isinstance(batch, Tensor):
        return [batch]
    if _moves_itself(batch):
        return []
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def _moves_itself(batch: Any) -> bool:
    """Return whether a tuple has a method `to()`, such as a `PackedSequence`, one of whose tensors stays on the CPU."""
    return isinstance(batch, tuple) and callable(getattr(batch, "to", None))

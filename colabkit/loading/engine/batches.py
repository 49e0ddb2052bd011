"""Batches: which samples make them, epoch by epoch, and what they hold.

A global batch is what all ranks take in one step: `batch_size` consecutive positions of the epoch's order for each of
them. So a position counted in samples means the same whatever the batch size and the number of ranks.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import Mark
from colabkit.loading.augment.transform import Draws
from colabkit.loading.sampler.orders import Order
from colabkit.packs import stack_samples

T = TypeVar("T")
Indices: TypeAlias = npt.NDArray[np.int64]

BATCHES_TOGETHER = 32
"""Batches that are made together at most; more may be planned together."""

_FIRST_CHUNK = 1024  # positions: enough for a small epoch, and little for the one batch of the first plan
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Share:
    """Which of several processes this is, counted from 0."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Some consecutive batches of one rank.

    Attributes:
        indices: of the samples, `int64 [S]`.
        positions: their places in the epoch's global order, `int64 [S]`.
        sizes: samples of each batch.
        ends: for each batch, how many samples of the epoch all ranks have received after it; with a custom sampler, how
            many this rank has.
    """

    indices: Indices
    positions: Indices
    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each batch begins and ends among the samples."""
        return [*itertools.pairwise(itertools.accumulate(self.sizes, initial=0))]

    def slice(self, first: int, stop: int | None = None) -> BatchPlan:
        """Return its batches from `first` to `stop`, or to its end."""
        begin, end = sum(self.sizes[:first]), sum(self.sizes[:stop])
        return BatchPlan(
            self.indices[begin:end], self.positions[begin:end], self.sizes[first:stop], self.ends[first:stop]
        )


@dataclass(slots=True)
class Batch:
    """A batch, and how it came to the user.

    Attributes:
        values: its fields, or a whole batch that `collate_fn` made.
        positions: of its samples in the epoch's global order.
        end: how many samples of the epoch all ranks have received after it.
        was_ready: whether it was ready when it was requested.
        marks: set in the stream of its device before and after what waits for it.
    """

    values: Any
    positions: Indices
    end: int
    was_ready: bool = True
    marks: tuple[Mark, Mark] | None = None


class BatchGroup:
    """Batches that are made together.

    Attributes:
        buffer: the pinned host memory that they lie in, if any.
        values: each field of all samples, while they are made.
        result: what transforms made of the first field.
        draws: the samples' random numbers.
        bad: samples to leave out, by their place in the plan.
        pieces: `(start, stop)` of samples that any thread may make on its own.
        failed_at: the first sample that could not be made.
        lock: for what several threads set.
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

    The last one holds what is left. If that is less than one sample for each rank, the batch before it takes it too, so
    that all ranks get equally many batches and every sample comes once. (If there is no batch before it, because the
    epoch is resumed so near its end with more ranks than before, these few samples are left out.)

    Attributes:
        start: samples of the epoch that have been received before.
        stop: samples at which it ends.
        batch_size: of one rank.
        share: which rank this is.
    """

    start: int
    stop: int
    batch_size: int
    share: Share

    @classmethod
    def of(cls, n: int, start: int, batch_size: int, share: Share, drop_last: bool) -> EpochRange:
        """Return the range over `n` samples from `start` on; with `drop_last` it ends with the last full batch."""
        rest = (n - start) % (batch_size * share.world_size) if drop_last else 0
        return cls(start, max(start, n - rest), batch_size, share)

    def __len__(self) -> int:
        """Return how many batches each rank gets."""
        full, rest = divmod(self.stop - self.start, self._step)
        return full + (rest >= self.share.world_size)

    @property
    def _step(self) -> int:
        return self.batch_size * self.share.world_size

    def samples(self) -> int:
        """Return how many samples these batches hold."""
        batches = len(self)
        if not batches:
            return 0
        ((begin, end),) = self._own_spans(self._begins(batches - 1, 1))
        return (batches - 1) * self.batch_size + end - begin

    def plan(self, order: Order | _ChunkedOrder, epoch: int, first: int, count: int) -> BatchPlan:
        """Return `count` batches from the batch `first` on."""
        begins = self._begins(first, count)
        spans = self._own_spans(begins)
        sizes, ends = tuple([end - begin for begin, end in spans]), tuple(begins[1:])
        if self.share.world_size == 1:
            spans = [(begins[0], begins[-1])]
        indices = [order.indices(epoch, *span) for span in spans]
        positions = [np.arange(*span) for span in spans]
        if len(spans) == 1:
            return BatchPlan(indices[0], positions[0], sizes, ends)
        return BatchPlan(np.concatenate(indices), np.concatenate(positions), sizes, ends)

    def _begins(self, first: int, count: int) -> list[int]:
        """Return the positions where some global batches begin, and where the last of them ends."""
        step = self._step
        begins = [*range(self.start + step * first, self.start + step * (first + count) + 1, step)]
        if first + count >= len(self):
            begins[-1] = self.stop
        return begins

    def _own_spans(self, begins: list[int]) -> list[tuple[int, int]]:
        """Return the positions of each global batch that are this rank's."""
        rank, world = self.share.rank, self.share.world_size
        if world == 1:
            return [*itertools.pairwise(begins)]
        return [
            (begin + (end - begin) * rank // world, begin + (end - begin) * (rank + 1) // world)
            for begin, end in itertools.pairwise(begins)
        ]


class _ChunkedOrder:
    """An order that is computed in chunks up to `stop`: a call costs as much as some thousands of positions."""

    def __init__(self, order: Order, stop: int) -> None:
        self._order = order
        self._stop = stop
        self._from = 0
        self._chunk: Indices = np.empty(0, np.int64)
        self._size = _FIRST_CHUNK

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples at positions `start` to `stop` of an epoch, always the same one."""
        if not self._from <= start <= stop <= self._from + len(self._chunk):
            self._chunk = self._order.indices(epoch, start, min(max(stop, start + self._size), self._stop))
            self._from, self._size = start, _CHUNK
        return self._chunk[start - self._from : stop - self._from]


@dataclass(frozen=True, slots=True)
class OrderPlanner:
    """Plans batches in an order of `colabkit.sampler`, for one process."""

    order: Order
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return how many batches an epoch has after so many samples of it."""
        return len(self._range(start))

    def samples(self, start: int) -> int:
        """Return how many samples these batches hold."""
        return self._range(start).samples()

    def plans(self, epoch: int, start: int, most_batches: int) -> Iterator[BatchPlan]:
        """Yield plans of these batches: of one batch at first, then of more, up to a limit."""
        whole = self._range(start)
        order = _ChunkedOrder(self.order, whole.stop)
        first, count, batches = 0, 1, len(whole)
        while first < batches:
            count = min(count, batches - first)
            yield whole.plan(order, epoch, first, count)
            first, count = first + count, next_count(count, most_batches)

    def _range(self, start: int) -> EpochRange:
        return EpochRange.of(len(self.order), start, self.batch_size, self.share, self.drop_last)


def next_count(batches: int, most_batches: int) -> int:
    """Return how many batches to plan after a plan of so many.

    Those that are made together grow up to the limit, so that the next batch comes soon. If more are planned together,
    the limit is reached at once, because each plan has a cost of its own.
    """
    if most_batches > BATCHES_TOGETHER:
        return most_batches
    return min(most_batches, batches * max(2, round(math.cbrt(most_batches))))


def split_plans(plans: Iterable[BatchPlan], most_batches: int) -> Iterator[BatchPlan]:
    """Yield plans of at most so many batches."""
    for plan in plans:
        if len(plan.sizes) <= most_batches:
            yield plan
            continue
        for first in range(0, len(plan.sizes), most_batches):
            yield plan.slice(first, first + most_batches)


class DeferredErrors(Generic[T]):
    """Iterates items and ends quietly where they fail; `raise_error` raises the error afterwards."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        try:
            yield from self._items
        except Exception as error:
            self._error = error

    def raise_error(self) -> None:
        """Raise the error at which the items ended, if they did."""
        if self._error is not None:
            raise self._error


def fetch_ahead(items: Iterable[T], is_enough: Callable[[deque[T]], bool]) -> Generator[T, None, None]:
    """Yield items in order, but fetch more of them first, until those that wait are enough.

    An error of `items` is raised after the items before it. `is_enough` must not hold for none.
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
    """Iterates the plans of an epoch, fetched one ahead, so that the last batch is known when it comes.

    Attributes:
        end: how many samples of the epoch all ranks have received after its last batch; None while unknown.
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
    """Yield plans, after calling `announce` once with each of those within the next `depth` samples."""

    def announced() -> Iterator[BatchPlan]:
        for plan in plans:
            announce(plan)
            yield plan

    def is_enough(waiting: deque[BatchPlan]) -> bool:
        return len(waiting) > 1 and sum(len(plan.indices) for plan in waiting) > depth

    return fetch_ahead(announced(), is_enough)


def split_values(values: list[Any], sizes: Sequence[int]) -> list[Any]:
    """Return the values of each batch, of as many samples as its size."""
    stops = [*itertools.accumulate(sizes, initial=0)]
    return [stack_samples(values[start:stop]) for start, stop in itertools.pairwise(stops)]


def split_batches(plan: BatchPlan, fields: Sequence[Any]) -> list[Batch]:
    """Return the batches of a plan, of the values that its samples have in each field."""
    columns = [
        torch.split_with_sizes(value, plan.sizes) if isinstance(value, Tensor) else split_values(value, plan.sizes)
        for value in fields
    ]
    return [
        Batch(values, plan.positions[start:stop], end)
        for (start, stop), end, *values in zip(plan.spans, plan.ends, *columns, strict=True)
    ]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch of the same structure with the function's result for every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function) for value in batch)
    if isinstance(batch, MutableMapping):  # a copy keeps what else a class of mappings holds
        clone = copy.copy(batch)
        clone.update({name: map_tensors(value, function) for name, value in batch.items()})
        return clone
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, function) for name, value in batch.items()}
    return batch


def fields_of(batch: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the fields of a batch, and a function that makes a batch of fields again."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(batch), lambda values: type(batch)(*values)
    if isinstance(batch, tuple | list):
        return list(batch), type(batch)
    if isinstance(batch, Mapping):
        return list(batch.values()), lambda values: dict(zip(batch, values, strict=True))
    return [batch], lambda values: values[0]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_in(value)]

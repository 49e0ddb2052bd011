"""Batches on a GPU: copied there on a separate stream, or gathered there from rows in GPU memory.

Copies are synchronized in both directions. Device memory is allocated on the user's stream, so the caching allocator
reuses it in the order of that stream's work. The copy stream first waits for the user's stream, which may still use the
memory's former content; then the user's stream waits for the copy. All loaders share one copy stream per device and
process, because the allocator caches memory separately for each stream.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters, Mark
from colabkit.loading.augment.transform import sent
from colabkit.loading.engine.batches import Batch, BatchPlan, fetch_ahead, map_tensors, split_batches, tensors_in
from colabkit.loading.engine.columns import ColumnReader, DatasetColumn
from colabkit.loading.engine.gather import PinnedSlots, RowGather

_STEP_BYTES = 64 << 20


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU."""
    # torch converts a device to its number in Python, which takes longer than finding the stream.
    return torch.cuda.current_stream(device.index)


def set_mark(device: torch.device) -> torch.cuda.Event:
    """Record a timing event in the current stream of a device and return it."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(current_stream(device))
    return mark


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Destination(NamedTuple):
    """Device memory for a group of batches.

    Attributes:
        layouts: shape, strides and dtype of each tensor.
        tensors: the memory.
        made_on: stream that the memory was allocated on.
    """

    layouts: list[tuple[Any, ...]]
    tensors: list[Tensor]
    made_on: torch.cuda.Stream


@dataclass(slots=True)
class _SentGroup:
    """The copy of a group of batches.

    Attributes:
        copied: event at the end of the copy.
        made_on: stream that the memory was allocated on.
        awaited_on: stream that was the last to wait for the copy, if any.
    """

    copied: torch.cuda.Event
    made_on: torch.cuda.Stream
    awaited_on: torch.cuda.Stream | None = None


class DeviceTransfer:
    """A queue that copies host batches to a GPU ahead of their use and returns them in order.

    The memory for the next group is allocated together with each group. A copy then waits only for the work that was
    queued before the previous request. It overlaps the newest step even if the batch arrives after that step was
    queued, as happens when the host is faster than the GPU and waits for a free buffer.

    Args:
        device: the GPU.
        slots: pool that lends the buffers of the host batches; it lends a buffer again only after the copy.
        counts: meters of the loader, for `transfer`.
    """

    def __init__(self, device: torch.device, slots: PinnedSlots, counts: LoaderMeters) -> None:
        self._device = device
        self._slots = slots
        self._counts = counts
        self._stream = _copy_stream(device)
        self._in_flight: deque[tuple[Any, bool, _SentGroup]] = deque()
        self._layouts: list[tuple[Any, ...]] = []
        self._next: _Destination | None = None
        # After this event, no earlier work uses the newest destination. One event serves all destinations, because a
        # stream waits for the state of an event at the time of the call.
        self._is_free = torch.cuda.Event()

    def __len__(self) -> int:
        """Return the number of batches that have been submitted but not yet taken."""
        return len(self._in_flight)

    def submit(self, batches: Sequence[tuple[Any, int]], buffer: Tensor | None) -> None:
        """Start copying batches, without waiting for the copies.

        Args:
            batches: batches of any structure, each with its number of samples.
            buffer: buffer of `slots` that holds the batches; None if torch manages their memory and keeps it until the
                copies end.
        """
        # Collect the tensors before the batches are copied: a copy of a custom mapping may replace the values of the
        # original.
        tensors = [[tensor for tensor in tensors_in(batch) if _is_copied(tensor)] for batch, _ in batches]
        fields = _joined(tensors)
        wholes = [whole for whole, _ in fields] if fields else [tensor for batch in tensors for tensor in batch]
        layouts = [(whole.shape, whole.stride(), whole.dtype) for whole in wholes]
        to = self._next if self._next is not None and self._next.layouts == layouts else self._new(wholes, layouts)
        # If an error follows, `close` finds the memory here.
        self._next = to
        # With `blocking=True`, a thread that waits for the event sleeps; otherwise it would keep a CPU core busy.
        started, copied = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        self._stream.wait_event(self._is_free)
        # Without `device`, leaving the stream would create a context on the GPU that was current before.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            started.record(self._stream)
            for place, whole in zip(to.tensors, wholes, strict=True):
                place.copy_(whole, non_blocking=True)
            copied.record(self._stream)
        if buffer is not None:
            self._slots.give_back(buffer, copied)
        places = iter(to.tensors)
        if fields:
            # `data` gives each batch its own version counter; otherwise, autograd would treat a change of one batch as
            # a change of all.
            with torch.inference_mode(False):
                split = [
                    [part.data for part in place.split_with_sizes(rows)]
                    for place, (_, rows) in zip(to.tensors, fields, strict=True)
                ]
            places = itertools.chain.from_iterable(zip(*split, strict=True))
        others = list[Any]()

        def keep(value: Any) -> Any:
            others.append(value)
            return value

        group = _SentGroup(copied, to.made_on)
        for batch, _ in batches:
            others.clear()
            on_device = map_tensors(batch, lambda tensor: next(places) if _is_copied(tensor) else keep(tensor), keep)
            self._in_flight.append((on_device, bool(others), group))
        samples, size = sum(samples for _, samples in batches), sum(whole.nbytes for whole in wholes)
        self._counts.copied(samples, size, started, copied)
        self._next = None
        # Batches that differ from their predecessors would not fit. Without memory for the next group, only the overlap
        # is lost.
        if layouts == self._layouts:
            with suppress(torch.OutOfMemoryError):
                self._next = self._new(wholes, layouts)
        self._layouts = layouts

    def close(self) -> None:
        """Drop the batches not yet taken, after making the streams that own their memory wait for the copies.

        The memory is freed in the order of those streams, so it is not used again before the copies end. The current
        stream may be a different one, because any thread may close an abandoned iteration.
        """
        for _, _, group in self._in_flight:
            group.made_on.wait_event(group.copied)
        if self._next is not None:
            # An error may have interrupted `submit` after it started the copies.
            self._next.made_on.wait_stream(self._stream)
        self._in_flight.clear()
        self._next = None

    def take(self) -> tuple[Any, tuple[Mark, Mark] | None]:
        """Return the oldest batch, and events around the stream's wait for its copy, if any; the host does not wait."""
        batch, has_others, group = self._in_flight[0]
        current, marks = current_stream(self._device), None
        # The other batches of a group arrive with the first one.
        if current != group.awaited_on:
            before = set_mark(self._device)
            current.wait_event(group.copied)
            marks, group.awaited_on = (before, set_mark(self._device)), current
        _use_in(current, batch, group.made_on)
        # If a keyboard interrupt comes before this line, `close` still finds the batch.
        self._in_flight.popleft()
        if has_others:
            # These objects allocate memory themselves, so they are moved in the stream that uses them.
            batch = map_tensors(batch, self._moved, self._moved)
        return batch, marks

    def _new(self, tensors: Sequence[Tensor], layouts: list[tuple[Any, ...]]) -> _Destination:
        """Allocate memory for tensors on the device."""
        current = current_stream(self._device)
        # A tensor made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            places = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
        self._is_free.record(current)
        return _Destination(layouts, places, current)

    def _moved(self, value: Any) -> Any:
        """Return a tensor or a custom object on the device; `to()` of some objects changes them and returns None."""
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        moved = value.to(self._device)
        return value if moved is None else moved


def _joined(tensors: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, list[int]]] | None:
    """Join each field of several batches, without a copy, so that it can be copied at once.

    Fields stay separate, because users keep labels longer than images.

    Args:
        tensors: the tensors of each batch.

    Returns:
        Each field of all batches, and its number of rows in each batch; None unless all rows are consecutive in memory.
    """
    fields = []
    if len(tensors) == 1 or any(len(batch) != len(tensors[0]) for batch in tensors):
        return None
    for parts in zip(*tensors, strict=True):
        first = parts[0]
        dtype, shape, stride, rows = first.dtype, first.shape, first.stride(), list[int]()
        if not shape or stride[0] * shape[0] != first.numel():
            return None
        begin, row_bytes = first.data_ptr(), stride[0] * dtype.itemsize
        end = begin
        for part in parts:
            is_same = part.dtype == dtype and part.stride() == stride
            if not is_same or part.data_ptr() != end or part.shape[1:] != shape[1:]:
                return None
            rows.append(part.shape[0])
            end += rows[-1] * row_bytes
        storage = first.untyped_storage()
        if end > storage.data_ptr() + storage.nbytes():
            return None
        fields.append((first.as_strided((sum(rows), *shape[1:]), stride), rows))
    return fields


def _is_copied(tensor: Tensor) -> bool:
    """Return whether a tensor is copied ahead; a GPU tensor is not, since its stream may still be computing it."""
    return tensor.device.type == "cpu" and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _use_in(current: torch.cuda.Stream, batch: Any, made_on: torch.cuda.Stream) -> None:
    """Report to the allocator that a stream uses a batch, if another stream allocated its memory."""
    if current != made_on:
        for tensor in tensors_in(batch):
            if tensor.device == current.device and _is_dense(tensor):
                tensor.record_stream(current)


def send(
    transfer: DeviceTransfer,
    groups: Iterable[tuple[list[Batch], Tensor | None]],
    is_enough: Callable[[int], bool],
) -> Generator[Batch, None, None]:
    """Yield batches on the device; an error of `groups` is raised after all earlier batches.

    Args:
        transfer: queue that copies the batches; closed at the end.
        groups: host batches with their common buffer; None for memory that torch manages.
        is_enough: function that returns whether a number of submitted batches, at least one, is enough.
    """
    was_ready = True

    def submitted() -> Iterator[Batch]:
        nonlocal was_ready
        for batches, buffer in groups:
            was_ready = was_ready and batches[0].was_ready
            transfer.submit([(batch.values, len(batch.positions)) for batch in batches], buffer)
            batches.reverse()
            # Pop each batch, so that this generator does not keep it alive.
            while batches:
                yield batches.pop()

    try:
        for batch in fetch_ahead(submitted(), lambda waiting: bool(waiting) and is_enough(len(transfer))):
            batch.values, batch.marks = transfer.take()
            batch.was_ready, was_ready = was_ready, True
            yield batch
    finally:
        transfer.close()


class DeviceEngine:
    """An engine that gathers batches on a GPU from rows in GPU memory, with almost no work on the host.

    Args:
        columns: fields by name; rows are copied to the device once, other fields are read when needed.
        device: the GPU.
        plan_batches: number of batches that are gathered together.
        counts: meters of the loader, for `gather`.
        is_contiguous: whether images become contiguous.
    """

    def __init__(
        self,
        columns: Mapping[str, DatasetColumn],
        device: torch.device,
        plan_batches: int,
        counts: LoaderMeters,
        is_contiguous: bool,
    ) -> None:
        self.plan_batches = plan_batches
        self._is_contiguous = is_contiguous
        self._device = device
        self._counts = counts
        self._has_only_rows = all(isinstance(column, RowGather) for column in columns.values())
        self._stream = current_stream(device)
        self._columns = [
            column.on(device, _STEP_BYTES) if isinstance(column, RowGather) else column for column in columns.values()
        ]

    def batches(self, seed: int, epoch: int, plans: Iterator[BatchPlan]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch."""
        for plan in plans:
            began, before = time.perf_counter(), set_mark(self._device)
            gathered_on = current_stream(self._device)
            batches = self._gather(plan)
            self._counts.add("gather", len(plan.indices), 0, time.perf_counter() - began)
            gathered = set_mark(self._device)
            batches[0].marks = before, gathered
            batches.reverse()
            while batches:
                current = current_stream(self._device)
                # The user may request the batches of one plan in different streams.
                if current != gathered_on:
                    current.wait_event(gathered)
                    _use_in(current, batches[-1].values, gathered_on)
                yield batches.pop()

    # The batches of a plan may be requested in different modes.
    @torch.inference_mode(False)
    def _gather(self, plan: BatchPlan) -> list[Batch]:
        indices = sent(torch.from_numpy(plan.indices), self._device)
        current = current_stream(self._device)
        fields: list[Any] = []
        for column in self._columns:
            if isinstance(column, RowGather):
                # The loader may be freed while this stream still reads its rows.
                if current != self._stream:
                    for rows in column.maps:
                        rows.record_stream(current)
                memory = torch.empty(len(indices) * column.row_bytes, dtype=torch.uint8, device=self._device)
                gathered = column.gather(indices, memory)
                fields.append(gathered.contiguous() if self._is_contiguous else gathered)
            elif isinstance(column, ColumnReader):
                fields.append(column.read(plan.indices, self._is_contiguous))
        batches = split_batches(plan, fields)
        if not self._has_only_rows:
            for batch in batches:
                batch.values = map_tensors(batch.values, self._send)
        return batches

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

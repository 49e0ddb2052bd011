"""Batches on a GPU: copied there on a separate stream, or gathered there from rows in GPU memory.

Copies are synchronized in both directions. Device memory is allocated on the user's stream, so the caching allocator
reuses it in the order of that stream's work. The copy stream first waits for the user's stream, which may still use the
memory's former content; then the user's stream waits for the copy. All loaders share one copy stream per device and
process, because the allocator caches memory separately for each stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters, Mark
from colabkit.loading.engine.batches import Batch, BatchPlan, fetch_ahead, map_tensors, split_batches, tensors_in
from colabkit.loading.engine.columns import Column
from colabkit.loading.engine.gather import PinnedSlots, RowGather

_STEP_BYTES = 64 << 20


def set_mark(device: torch.device) -> Mark:
    """Record a timing event in the current stream of a device and return it."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class DeviceTransfer:
    """A queue that copies host batches to a GPU ahead of their use and returns them in order.

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
        self._in_flight: deque[tuple[Any, torch.cuda.Event, torch.cuda.Stream]] = deque()
        self._timed: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        """Return the number of batches that were submitted but not taken yet."""
        return len(self._in_flight)

    def submit(self, batches: Sequence[tuple[Any, int]], buffer: Tensor | None) -> None:
        """Start copying batches, without waiting for the copies.

        Args:
            batches: batches of any structure, each with its number of samples.
            buffer: buffer of `slots` that holds the batches; None if torch manages their memory and keeps it until the
                copies end.
        """
        # With `blocking=True`, a thread that waits for the event sleeps; otherwise it would keep a CPU core busy.
        copied = torch.cuda.Event(blocking=True)
        for batch, samples in batches:
            current = torch.cuda.current_stream(self._device)
            # Collect the tensors before they are copied: a copy of a custom mapping may replace the values of the
            # original.
            tensors = tensors_in(batch)
            on_device = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device=self._device))
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                started.record(self._stream)
                for place, tensor in zip(tensors_in(on_device), tensors, strict=True):
                    place.copy_(tensor, non_blocking=True)
                ended.record(self._stream)
            self._in_flight.append((on_device, ended, current))
            self._timed.append((samples, sum(tensor.nbytes for tensor in tensors), started, ended))
        copied.record(self._stream)
        if buffer is not None:
            self._slots.give_back(buffer, copied)

    def close(self) -> None:
        """Drop the batches that were never taken, after making the current stream wait for their copies.

        Their memory is freed in that stream's order, so it is not used again before the copies end.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_flight.clear()
        self._count_ended()

    def take(self) -> tuple[Any, tuple[Mark, Mark]]:
        """Return the oldest batch, and events around the stream's wait for its copy; the host does not wait."""
        batch, ended, made_on = self._in_flight.popleft()
        current = torch.cuda.current_stream(self._device)
        before = set_mark(self._device)
        current.wait_event(ended)
        after = set_mark(self._device)
        # The allocator has to know that a stream other than the allocating one uses the memory.
        if current != made_on:
            for tensor in tensors_in(batch):
                tensor.record_stream(current)
        self._count_ended()
        return batch, (before, after)

    def _count_ended(self) -> None:
        """Count the copies that have ended, without waiting for the others."""
        while self._timed and self._timed[0][3].query():
            samples, size, started, ended = self._timed.popleft()
            self._counts.add("transfer", samples, size, started.elapsed_time(ended) / 1000)


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
        columns: Mapping[str, Column],
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
        self._columns = [
            column.on(device, _STEP_BYTES) if isinstance(column, RowGather) else column for column in columns.values()
        ]

    def batches(self, seed: int, epoch: int, plans: Iterator[BatchPlan]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch."""
        for plan in plans:
            began, before = time.perf_counter(), set_mark(self._device)
            batches = self._gather(plan)
            self._counts.add("gather", len(plan.indices), 0, time.perf_counter() - began)
            batches[0].marks = before, set_mark(self._device)
            batches.reverse()
            while batches:
                yield batches.pop()

    def _gather(self, plan: BatchPlan) -> list[Batch]:
        indices = self._send(torch.from_numpy(plan.indices))
        fields: list[Any] = []
        for column in self._columns:
            if isinstance(column, RowGather):
                memory = torch.empty(len(indices) * column.row_bytes, dtype=torch.uint8, device=self._device)
                gathered = column.gather(indices, memory)
                fields.append(gathered.contiguous() if self._is_contiguous else gathered)
            elif callable(column):
                fields.append(column(plan.indices))
        batches = split_batches(plan, fields)
        if not self._has_only_rows:
            for batch in batches:
                batch.values = map_tensors(batch.values, self._send)
        return batches

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

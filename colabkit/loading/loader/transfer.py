"""Batches go to a GPU on a stream of their own, while the model computes on the current one.

Guarded both ways. Device memory is allocated on the user's stream, so the caching allocator hands it out in that
stream's order, and the copy stream first waits for what that stream still has to do: the memory's former content may be
in use there. The user's stream then waits for the copy. There is one copy stream for each device and process, since
every new one would keep memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters, Mark
from colabkit.loading.loader.slots import PinnedSlots
from colabkit.loading.loader.structures import mapped, tensors_in
from colabkit.loading.loader.workers import Batch


def marked(device: torch.device) -> Mark:
    """Set a mark in the current stream of a device and return it."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class DeviceTransfer:
    """Copies host batches to a GPU ahead of their use and hands them out in order.

    Args:
        device: the GPU.
        slots: where the host batches lie; they get their buffers back.
        meters: counts the part `transfer`.
    """

    def __init__(self, device: torch.device, slots: PinnedSlots, meters: LoaderMeters) -> None:
        self._device = device
        self._slots = slots
        self._meters = meters
        self._stream = _copy_stream(device)
        self._in_flight: deque[tuple[Any, torch.cuda.Event, torch.cuda.Stream]] = deque()
        self._timed: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        """Return how many batches are under way or waiting on the device."""
        return len(self._in_flight)

    def submit(self, batches: Sequence[tuple[Any, int]], buffer: Tensor | None) -> None:
        """Start copying batches; returns at once.

        Args:
            batches: tensors of any structure, and how many samples each holds.
            buffer: of the slots, that they lie in; None for memory of torch's own, which it keeps
                until it is copied.
        """
        copied = torch.cuda.Event(blocking=True)  # waiting for it must not spin one of few cores
        for batch, samples in batches:
            current = torch.cuda.current_stream(self._device)
            tensors = tensors_in(batch)  # first: a copy of somebody's mapping may share its values with it
            on_device = mapped(batch, lambda tensor: torch.empty_like(tensor, device=self._device))
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
        """Let batches go that were never taken: their memory may be handed out again only after their copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_flight.clear()
        self._count_ended()

    def take(self) -> tuple[Any, tuple[Mark, Mark]]:
        """Return the oldest batch, and marks around the current stream's wait for its copy; the host waits for none."""
        batch, ended, made_on = self._in_flight.popleft()
        current = torch.cuda.current_stream(self._device)
        before = marked(self._device)
        current.wait_event(ended)
        after = marked(self._device)
        if current != made_on:  # the allocator has to know of a stream that it did not give the memory to
            for tensor in tensors_in(batch):
                tensor.record_stream(current)
        self._count_ended()
        return batch, (before, after)

    def _count_ended(self) -> None:
        """Count the copies that have ended by now, without waiting for any."""
        while self._timed and self._timed[0][3].query():
            samples, size, started, ended = self._timed.popleft()
            self._meters.add("transfer", samples, size, started.elapsed_time(ended) / 1000)


@dataclass(slots=True)
class Taken:
    """Host batches to be sent.

    Attributes:
        batches: of one buffer; none after the last.
        buffer: of the slots, that they lie in; None for memory of torch's own.
        was_ready: whether they were ready when they were asked for.
    """

    batches: Sequence[Batch] = ()
    buffer: Tensor | None = None
    was_ready: bool = True


def sent(
    transfer: DeviceTransfer, take: Callable[[], Taken], is_wanted: Callable[[int], bool]
) -> Generator[Batch, None, None]:
    """Yield batches on the device; an error comes after those that are on their way.

    Args:
        transfer: sends them; it is closed at the end.
        take: returns the next host batches.
        is_wanted: told how many batches are under way, whether more shall be sent now.
    """
    waiting: deque[Batch] = deque()
    is_over, failure = False, None
    try:
        while True:
            was_ready = True
            while not is_over and is_wanted(len(waiting)):
                try:
                    taken = take()
                except Exception as error:
                    taken, failure = Taken(was_ready=False), error
                was_ready = was_ready and taken.was_ready
                is_over = not taken.batches
                if not is_over:
                    transfer.submit([(batch.values, len(batch.positions)) for batch in taken.batches], taken.buffer)
                    waiting.extend(taken.batches)
                del taken
            if not waiting and failure is not None:
                raise failure
            if not waiting:
                return
            batch = waiting.popleft()
            (batch.values, batch.marks), batch.was_ready = transfer.take(), was_ready
            yield batch
    finally:
        transfer.close()

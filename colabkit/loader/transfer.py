"""Batches go to a GPU on a stream of their own, while the model computes on the current one.

Guarded both ways. Device memory is allocated on the user's stream, so the caching allocator hands it out in that
stream's order, and the copy stream first waits for what that stream still has to do: the memory's former content may be
in use there. The user's stream then waits for the copy. There is one copy stream for each device and process, since
every new one would keep memory of its own.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
from torch import Tensor

from colabkit.loader.gather import Group, Transform
from colabkit.loader.slots import PinnedSlots
from colabkit.meters import LoaderMeters

__all__ = ["DeviceTransfer"]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class DeviceTransfer:
    """Copies host batches to a GPU ahead of their use and hands them out in order.

    Args:
        device: the GPU.
        slots: where the host batches lie; they get their buffers back.
        transform: applied on the GPU, in the user's stream, or None.
        meters: counts the part `transfer`.
    """

    def __init__(
        self, device: torch.device, slots: PinnedSlots, transform: Transform | None, meters: LoaderMeters
    ) -> None:
        self._device = device
        self._slots = slots
        self._transform = transform
        self._meters = meters
        self._stream = _copy_stream(device)
        self._in_flight: deque[tuple[Tensor, Tensor, torch.cuda.Event, torch.cuda.Event]] = deque()

    def __len__(self) -> int:
        """Return how many batches are under way or waiting on the device."""
        return len(self._in_flight)

    def submit(self, group: Group) -> None:
        """Start copying all batches of a group; returns at once."""
        copied = torch.cuda.Event(blocking=True)  # waiting for it must not spin one of few cores
        for images, labels in group.batches:
            current = torch.cuda.current_stream(self._device)
            on_device = torch.empty_like(images, device=self._device)
            labels_on_device = torch.empty_like(labels, device=self._device)
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                started.record(self._stream)
                on_device.copy_(images, non_blocking=True)
                labels_on_device.copy_(labels, non_blocking=True)
                ended.record(self._stream)
            self._in_flight.append((on_device, labels_on_device, started, ended))
        copied.record(self._stream)
        self._slots.give_back(group.buffer, copied)

    def close(self) -> None:
        """Let batches go that were never taken: their memory may be handed out again only after their copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._in_flight.clear()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the oldest batch; the current stream waits for its copy, the host does not."""
        images, labels, started, ended = self._in_flight.popleft()
        torch.cuda.current_stream(self._device).wait_event(ended)
        if ended.query():
            self._meters.add("transfer", len(images), images.nbytes, started.elapsed_time(ended) / 1000)
        if self._transform is not None:
            images = self._transform(images)
        return images, labels

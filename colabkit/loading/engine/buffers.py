"""Host buffers that are used again, each only when nobody can see its last content any more."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger("colabkit")

_CACHE_LINE = 64
_HUGE_PAGE = 2 << 20
_LARGE = 1 << 20

_is_warned = threading.Event()


def warn_unpinned(error: RuntimeError) -> None:
    """Warn that memory cannot be page-locked, once in this process."""
    if not _is_warned.is_set():
        _is_warned.set()
        reason = str(error).partition("\n")[0]
        logger.warning("memory for copies to the GPU cannot be pinned (%s); they will be slower", reason)


def aligned(size: int, step: int = _CACHE_LINE) -> int:
    """Return a size rounded up to whole steps, so that what follows begins at one."""
    return -(-size // step) * step


def empty_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return new memory, `uint8 [size]`, that begins with a cache line, or with a huge page where it fills one.

    Rows are copied into it up to a sixth faster than to where `numpy.empty` begins, 16 bytes behind a page. NumPy asks
    the kernel for huge pages for arrays of 4 MiB and more.
    """
    step = _HUGE_PAGE if size >= _HUGE_PAGE else _CACHE_LINE
    memory = np.empty(aligned(size, step) + step, np.uint8)
    start = -memory.ctypes.data % step
    return memory[start : start + size]


class PageableSlots:
    """Pageable buffers, for batches that the user receives without a copy.

    A buffer comes back by itself when the last tensor that shares its memory is gone: torch keeps the NumPy view that
    it was made from alive exactly that long. Fresh memory would cost a page fault for every 4 KiB of every batch. The
    buffer that came back last is lent first, while it is still in the processor's cache.

    Args:
        slot_bytes: bytes of a buffer; it grows with the requested sizes.
        keep: how many idle buffers to keep.
    """

    def __init__(self, slot_bytes: int, keep: int) -> None:
        self._slot_bytes = slot_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}

    def lend(self, size: int) -> Tensor:
        """Return `size` bytes as a `uint8` tensor; they are the caller's until all tensors over them are gone."""
        self._slot_bytes = max(size, self._slot_bytes)
        buffer = None
        while buffer is None or buffer.nbytes < size:  # idle buffers that are too small now are dropped
            try:
                buffer = self._idle.pop()
            except IndexError:
                buffer = empty_bytes(self._slot_bytes)
        view = buffer[:size]
        # `weakref.finalize` would take ten times as long.
        ended = weakref.ref(view, self._take_back)
        self._lent[id(ended)] = ended, buffer
        return torch.from_numpy(view)

    def _take_back(self, ended: weakref.ref[Any]) -> None:
        self._idle.append(self._lent.pop(id(ended))[1])


class PinnedSlots:
    """Page-locked buffers, from which a GPU copies while the host goes on; pageable ones if locking fails.

    Args:
        slot_bytes: bytes of a buffer; a larger one is made once and not kept.
        device: the GPU, whose driver locks the pages.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        self._device = device
        self._idle: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._can_pin = True

    def lend(self, size: int) -> Tensor:
        """Return at least `size` bytes as a `uint8` tensor, waiting until the copy out of them has ended."""
        if size > self._slot_bytes:
            return self._new_buffer(size)
        try:
            buffer, copied = self._idle.popleft()
        except IndexError:
            return self._new_buffer(self._slot_bytes)
        copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        """Take a buffer back, to be used again once `copied` has happened. One that is never given back is freed."""
        if buffer.nbytes == self._slot_bytes:
            self._idle.append((buffer, copied))

    def _new_buffer(self, size: int) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in that mode cannot be filled again outside
            if self._can_pin:
                try:
                    with torch.cuda.device(self._device):
                        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                except RuntimeError as error:
                    self._can_pin = False
                    warn_unpinned(error)
            return torch.empty(size, dtype=torch.uint8, device="cpu")


class FieldBuffers:
    """Lends memory for the fields of a group of batches, to any thread.

    Batches on the CPU have a pageable buffer for each field, because users keep labels longer than images. Batches for
    a GPU have one pinned buffer for all fields.

    Args:
        field_bytes: usual bytes of each field.
        keep: how many idle pageable buffers of each field to keep.
        device: where batches go.

    Attributes:
        pinned: the pinned buffers, None for batches on the CPU.
    """

    def __init__(self, field_bytes: Sequence[int], keep: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.pinned = PinnedSlots(sum(map(aligned, field_bytes)), device) if is_pinned else None
        # Small fields are not worth keeping.
        self._pageable = [
            PageableSlots(size, keep) if place == 0 or size >= _LARGE else None
            for place, size in enumerate(field_bytes)
        ]

    def lend(self, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor | None]:
        """Return so many bytes for each field, `uint8`, and the pinned buffer that they lie in, if any."""
        if self.pinned is None:
            return [
                torch.empty(size, dtype=torch.uint8, device="cpu") if slots is None else slots.lend(size)
                for slots, size in zip(self._pageable, sizes, strict=True)
            ], None
        stops = [*itertools.accumulate(map(aligned, sizes))]
        buffer = self.pinned.lend(stops[-1])
        return [buffer[start : start + size] for start, size in zip([0, *stops], sizes, strict=False)], buffer

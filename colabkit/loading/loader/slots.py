"""Host buffers that are used again and again, each only when nobody can see its last content any more."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger("colabkit")

_ALIGNED = 64  # bytes of a cache line
_HUGE_PAGE = 2 << 20
_LARGE = 1 << 20

_is_warned = threading.Event()


def warn_unpinned(error: RuntimeError) -> None:
    """Say why memory cannot be page-locked, the first time in this process."""
    if not _is_warned.is_set():
        _is_warned.set()
        reason = str(error).partition("\n")[0]
        logger.warning("memory for copies to the GPU cannot be pinned (%s); they will be slower", reason)


class Memory(Protocol):
    """Lends host memory for the fields of a group of batches; may be asked from any thread."""

    def lend(self, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor | None]:
        """Return so many bytes for each field, `uint8`, and the buffer that they lie in, if it is to be given back."""


class RecycledFields:
    """Pageable memory, a buffer for each field: users keep labels longer than images, whose buffer they would hold.

    Args:
        slot_bytes: of each field's buffer.
        keep: how many idle buffers of each to keep.
    """

    def __init__(self, slot_bytes: Sequence[int], keep: int) -> None:
        self._slots = [
            RecycledSlots(size, keep) if place == 0 or size >= _LARGE else None for place, size in enumerate(slot_bytes)
        ]

    def lend(self, sizes: Sequence[int]) -> tuple[list[Tensor], None]:
        """Return so many bytes for each field; small ones are not worth keeping."""
        lent = [
            torch.empty(size, dtype=torch.uint8, device="cpu") if slots is None else slots.lend(size)
            for slots, size in zip(self._slots, sizes, strict=True)
        ]
        return lent, None


class PinnedFields:
    """Page-locked memory, one buffer for all fields.

    Args:
        slots: of such buffers.
    """

    def __init__(self, slots: PinnedSlots) -> None:
        self._slots = slots

    def lend(self, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return so many bytes for each field, each beginning aligned, and the buffer."""
        stops = [*itertools.accumulate(map(aligned, sizes))]
        buffer = self._slots.lend(stops[-1])
        return [buffer[start : start + size] for start, size in zip([0, *stops], sizes, strict=False)], buffer


def empty_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Return new memory, `uint8 [size]`, that begins with a cache line, or with a huge page where it fills one.

    Rows are copied into it up to a sixth faster than to where `numpy.empty` begins, 16 bytes behind a page. NumPy asks
    the kernel for huge pages for arrays of 4 MiB and more.
    """
    step = _HUGE_PAGE if size >= _HUGE_PAGE else _ALIGNED
    memory = np.empty(aligned(size, step) + step, np.uint8)
    start = -memory.ctypes.data % step
    return memory[start : start + size]


def aligned(size: int, step: int = _ALIGNED) -> int:
    """Return a size in bytes after which the next field may begin, or the next thing that begins at such steps."""
    return -(-size // step) * step


class RecycledSlots:
    """Pageable buffers, for batches that the user receives without a copy.

    A buffer comes back by itself when the last tensor that shares its memory is gone: torch keeps the NumPy view that
    it was made from alive exactly that long. Fresh memory would cost a page fault for every 4 KiB of every batch; NumPy
    asks for huge pages for large arrays.

    Args:
        slot_bytes: bytes of a buffer; it grows with what is asked for.
        keep: how many idle buffers to keep.
    """

    def __init__(self, slot_bytes: int, keep: int) -> None:
        self._slot_bytes = slot_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)

    def lend(self, size: int) -> Tensor:
        """Return `size` bytes as a `uint8` tensor; they are the caller's until all tensors over them are gone."""
        self._slot_bytes = max(size, self._slot_bytes)
        buffer = None
        while buffer is None or buffer.nbytes < size:  # those that are too small now are let go of
            try:
                buffer = self._idle.pop()
            except IndexError:
                buffer = empty_bytes(self._slot_bytes)
        view = buffer[:size]
        weakref.finalize(view, self._idle.append, buffer).atexit = False
        return torch.from_numpy(view)


class PinnedSlots:
    """Page-locked buffers, from which a GPU copies while the host goes on; pageable ones where the pages stay unlocked.

    Args:
        slot_bytes: bytes of a buffer; one that has to be larger is made for once.
        device: the GPU, whose driver locks the pages.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        self._device = device
        self._idle: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._pins = True

    def lend(self, size: int) -> Tensor:
        """Return at least `size` bytes as a `uint8` tensor, waiting until the copy out of them has ended."""
        if size > self._slot_bytes:
            return self._made(size)
        try:
            buffer, copied = self._idle.popleft()
        except IndexError:
            return self._made(self._slot_bytes)
        copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        """Take a buffer back, to be used again once `copied` has happened. One that is never given back is freed."""
        if buffer.nbytes == self._slot_bytes:
            self._idle.append((buffer, copied))

    def _made(self, size: int) -> Tensor:
        with torch.inference_mode(False):  # what is made in that mode cannot be filled again outside
            if self._pins:
                try:
                    with torch.cuda.device(self._device):
                        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                except RuntimeError as error:
                    self._pins = False
                    warn_unpinned(error)
            return torch.empty(size, dtype=torch.uint8, device="cpu")

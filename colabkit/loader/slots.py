"""Host buffers that are used again and again, each only when nobody can see its last content any more."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PinnedSlots", "RecycledSlots"]


class RecycledSlots:
    """Pageable buffers of one size, for batches that the user receives without a copy.

    A buffer comes back by itself when the last tensor that shares its memory is gone: torch keeps the NumPy view that
    it was made from alive exactly that long. Fresh memory would cost a page fault for every 4 KiB of every batch.

    Args:
        slot_bytes: bytes of a buffer.
        keep: how many idle buffers to keep.
    """

    def __init__(self, slot_bytes: int, keep: int) -> None:
        self._slot_bytes = slot_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)

    def lend(self, size: int) -> Tensor:
        """Return `size` bytes as a `uint8` tensor; they are the caller's until all tensors over them are gone."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = np.empty(self._slot_bytes, np.uint8)
        view = buffer[:size]
        weakref.finalize(view, self._idle.append, buffer).atexit = False
        return torch.from_numpy(view)


class PinnedSlots:
    """Page-locked buffers of one size, from which a GPU copies while the host goes on.

    Args:
        slot_bytes: bytes of a buffer.
        device: the GPU, whose driver locks the pages.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes = slot_bytes
        self._device = device
        self._idle: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def lend(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes as a `uint8` tensor, waiting until the copy out of it has ended."""
        assert size <= self._slot_bytes
        try:
            buffer, copied = self._idle.popleft()
        except IndexError:
            with torch.cuda.device(self._device):
                return torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True)
        copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        """Take a buffer back, to be used again once `copied` has happened. One that is never given back is freed."""
        self._idle.append((buffer, copied))

"""Rows are gathered into host buffers, which are used again only when nobody can see their content any more."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
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


_KEPT_SLOTS = 4


class RowGather:
    """Gathers rows of maps into a buffer by the fastest branch of `torch.index_select`.

    That is a parallel memcpy of rows, taken when a row has fewer than 32,768 elements; so rows are viewed as the widest
    integers that divide them. Source: `index_select_out_cpu_` in ATen's TensorAdvancedIndexing.cpp. Rows that lie in
    several files are gathered file by file, then put in order: two copies instead of one.

    Args:
        maps: rows of each file, contiguous `[N, ...]`, of one shape and dtype, on one device.
        numbers: the rows, counted through all files, that a view has; None for all.
        are_images: whether rows are `[H, W, C]`.
    """

    def __init__(self, maps: Sequence[Tensor], numbers: Tensor | None, are_images: bool) -> None:
        self.shape = maps[0].shape[1:]
        self.dtype = maps[0].dtype
        self.are_images = are_images
        self.maps = tuple(maps)
        self.numbers = numbers
        self.row_bytes = self.shape.numel() * self.dtype.itemsize
        as_bytes = [rows.reshape(-1).view(torch.uint8).view(len(rows), self.row_bytes) for rows in maps]
        self._wide = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if self.row_bytes % dtype.itemsize == 0 and all(rows.data_ptr() % dtype.itemsize == 0 for rows in as_bytes)
        )
        self._wide_maps = [rows.view(self._wide) for rows in as_bytes]
        if self.row_bytes == self._wide.itemsize:  # of one number: a vector is gathered three times as fast
            self._wide_maps = [rows.view(-1) for rows in self._wide_maps]
        self._stops = torch.tensor([len(rows) for rows in maps], device="cpu").cumsum(0)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.maps)) if self.numbers is None else len(self.numbers)

    @property
    def are_images_of_bytes(self) -> bool:
        """Whether rows are `uint8 [H, W, C]`."""
        return self.are_images and self.dtype == torch.uint8 and len(self.shape) == 3

    def gather_new(self, indices: Tensor) -> Tensor:
        """Return the rows at `indices` in new memory, images as `[B, C, H, W]`, channels last.

        They are gathered as integers, since `index_select` does not know all types of elements.

        Args:
            indices: `int64 [B]`.
        """
        if len(self.maps) > 1:
            return self.gather(indices, torch.empty(len(indices) * self.row_bytes, dtype=torch.uint8, device="cpu"))
        rows = self._wide_maps[0].index_select(0, self._rows_of(indices))
        return self.shaped(rows.view(-1), len(indices))

    def gather(self, indices: Tensor, buffer: Tensor) -> Tensor:
        """Copy the rows at `indices` into `buffer` and return them, images as `[B, C, H, W]`, channels last.

        Args:
            indices: `int64 [B]`.
            buffer: `uint8`, as many bytes as the rows have together, aligned as the rows are.
        """
        self.gather_wide(indices, self.wide(buffer, len(indices)))
        return self.shaped(buffer, len(indices))

    def wide(self, buffer: Tensor, count: int) -> Tensor:
        """Return `count` rows of a buffer as what `gather_wide` fills."""
        wide = buffer.view(self._wide)
        return wide.view(count, -1) if self._wide_maps[0].ndim > 1 else wide

    def gather_wide(self, indices: Tensor, wide: Tensor) -> None:
        """Copy the rows at `indices` into what `wide` returned for a buffer."""
        rows = self._rows_of(indices)
        if len(self._wide_maps) == 1:
            torch.index_select(self._wide_maps[0], 0, rows, out=wide)
        else:
            self._gather_by_file(rows, wide)

    def shaped(self, buffer: Tensor, count: int) -> Tensor:
        """Return `count` rows of a buffer, images as `[count, C, H, W]`, channels last."""
        rows = buffer.view(self.dtype).view(count, *self.shape)
        return rows.movedim(-1, 1) if self.are_images else rows

    def shaped_array(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any] | None:
        """Return rows of bytes as `shaped` does; None if NumPy does not know their type."""
        try:
            typed = rows.view(torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype)
        except TypeError:
            return None
        shaped = typed.reshape(len(rows), *self.shape)
        return np.moveaxis(shaped, -1, 1) if self.are_images else shaped

    def _rows_of(self, indices: Tensor) -> Tensor:
        """Return the rows of samples, counted through all files."""
        return indices if self.numbers is None else self.numbers[indices]

    def on(self, device: torch.device, step_bytes: int) -> RowGather:
        """Return the same rows in the memory of a device, copied in steps; rows that a view leaves out stay behind."""
        count = self.count
        rows = torch.empty((count, *self.shape), dtype=self.dtype, device=device)
        step = max(1, step_bytes // max(1, self.row_bytes))
        for start in range(0, count, step):
            some = torch.arange(start, min(start + step, count), device="cpu")
            gathered = self.gather_new(some)
            rows[start : start + len(some)] = gathered.movedim(1, -1) if self.are_images else gathered
        return RowGather((rows,), None, self.are_images)

    def pixels(self, numbers: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
        """Yield the row of each sample as it lies in its map, `[...]`."""
        rows = self._rows_of(torch.from_numpy(numbers))
        if len(self.maps) == 1:
            yield from map(self._arrays[0].__getitem__, rows.tolist())
            return
        owners = torch.bucketize(rows, self._stops, right=True).tolist()
        for row, owner in zip(rows.tolist(), owners, strict=True):
            yield self._arrays[owner][row - int(self._stops[owner]) + len(self.maps[owner])]

    @functools.cached_property
    def _arrays(self) -> list[npt.NDArray[Any]]:
        return [rows.numpy() for rows in self.maps]

    def _gather_by_file(self, rows: Tensor, wide: Tensor) -> None:
        owner = torch.bucketize(rows, self._stops, right=True)
        for number in owner.unique().tolist():
            places = (owner == number).nonzero().flatten()
            start = int(self._stops[number]) - len(self._wide_maps[number])
            wide.index_copy_(0, places, self._wide_maps[number].index_select(0, rows[places] - start))


class GatherSlots:
    """Buffers that rows are gathered into, each used again when no tensor shares its memory any more.

    They save what `PageableSlots` does for each buffer that it lends, 4% of an epoch of small images.
    """

    def __init__(self, rows: RowGather, samples: int) -> None:
        self._rows = rows
        self._samples = samples
        self._slots: deque[_GatherSlot] = deque(maxlen=_KEPT_SLOTS)
        self._lock = threading.Lock()

    def gather(self, indices: Tensor, sizes: tuple[int, ...]) -> Sequence[Tensor]:
        """Return the rows of some samples, split into batches."""
        with self._lock:  # two threads may iterate one loader
            for slot in self._slots:
                if slot.is_free:
                    break
            else:
                slot = _GatherSlot(self._rows, max(self._samples, len(indices)))
                self._slots.append(slot)
            wide, found = slot.rows(len(indices))
        self._rows.gather_wide(indices, wide)
        return (found,) if len(sizes) == 1 else found.split_with_sizes(sizes)


class _GatherSlot:
    """A buffer that knows whether any tensor shares it.

    torch keeps the array that a tensor was made from alive as long as any tensor has its storage. Each of these arrays
    refers to the one that owns the memory, so the references to that one show whether the buffer is in use.
    """

    def __init__(self, rows: RowGather, samples: int) -> None:
        self._rows = rows
        self._allocate(samples)

    def _allocate(self, samples: int) -> None:
        memory = empty_bytes(samples * self._rows.row_bytes).reshape(samples, -1)
        self._samples = samples
        with torch.inference_mode(False):  # a tensor made in that mode cannot be filled again outside
            self._wide = self._rows.wide(torch.from_numpy(memory).view(-1), samples)
        shaped = self._rows.shaped_array(memory)
        self._is_shaped = shaped is not None
        self._array = memory if shaped is None else shaped
        del memory, shaped
        self._owner = self._array.base
        self._own_references = sys.getrefcount(self._owner)

    @property
    def is_free(self) -> bool:
        """Whether nobody sees its content."""
        return sys.getrefcount(self._owner) == self._own_references

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return its first `count` rows as what to fill, and as the user gets them; only while it is free."""
        if count > self._samples:  # as the last batch of several ranks may be, and any of a custom sampler
            self._allocate(count)
        wide = self._wide if count == self._samples else self._wide[:count]
        found = torch.from_numpy(self._array[:count])
        return wide, found if self._is_shaped else self._rows.shaped(found.view(-1), count)

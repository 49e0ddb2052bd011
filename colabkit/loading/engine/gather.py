"""Gather rows into host buffers, which are reused only when no tensor refers to their content anymore."""

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
_MOST_PINNED_TOGETHER = 5

_is_warned = threading.Event()


def warn_unpinned(error: RuntimeError) -> None:
    """Warn, once per process, that memory cannot be page-locked."""
    if not _is_warned.is_set():
        _is_warned.set()
        reason = str(error).partition("\n")[0]
        logger.warning("memory cannot be pinned (%s), so copies to the GPU are slower", reason)


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in page-locked memory, or the tensor itself if it is on a GPU or locking fails."""
    if tensor.device.type != "cpu":
        return tensor
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        warn_unpinned(error)
        return tensor


def aligned(size: int, step: int = _CACHE_LINE) -> int:
    """Return a size rounded up to a multiple of `step`."""
    return -(-size // step) * step


def empty_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Allocate `uint8 [size]`, aligned to a cache line, or to a huge page if the array is at least as large as one.

    Copying rows into this memory is up to a sixth faster than into memory from `numpy.empty`, which starts 16 bytes
    after a page boundary. NumPy requests huge pages from the kernel for arrays of 4 MiB and more.
    """
    step = _HUGE_PAGE if size >= _HUGE_PAGE else _CACHE_LINE
    memory = np.empty(aligned(size, step) + step, np.uint8)
    start = -memory.ctypes.data % step
    return memory[start : start + size]


class PageableSlots:
    """A pool of pageable buffers, for batches that the user receives without a copy.

    A buffer returns to the pool automatically when the last tensor that shares its memory is freed, because torch keeps
    the NumPy view under a tensor alive exactly that long. New memory would cost a page fault for every 4 KiB of every
    batch. The buffer returned last is lent first, while it is still in the processor's cache.

    Args:
        slot_bytes: initial size of a new buffer in bytes; it grows with the requested sizes.
        keep: maximum number of idle buffers to keep.
    """

    def __init__(self, slot_bytes: int, keep: int) -> None:
        self._slot_bytes = slot_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)
        self._lent: dict[int, tuple[weakref.ref[Any], npt.NDArray[np.uint8]]] = {}

    def lend(self, size: int) -> Tensor:
        """Lend `size` bytes as a `uint8` tensor, until all tensors that share them are freed."""
        self._slot_bytes = max(size, self._slot_bytes)
        buffer = None
        # Drop idle buffers that are too small.
        while buffer is None or buffer.nbytes < size:
            try:
                buffer = self._idle.pop()
            except IndexError:
                # Between these lines, another thread may change the size for a smaller request.
                buffer = empty_bytes(max(size, self._slot_bytes))
        view = buffer[:size]
        # `weakref.finalize` is ten times as slow.
        ended = weakref.ref(view, self._take_back)
        self._lent[id(ended)] = ended, buffer
        return torch.from_numpy(view)

    def _take_back(self, ended: weakref.ref[Any]) -> None:
        self._idle.append(self._lent.pop(id(ended))[1])


class PinnedSlots:
    """A pool of page-locked buffers, from which a GPU copies asynchronously; if locking fails, buffers are pageable.

    Torch rounds each allocation of page-locked memory up to a power of two, so buffers are allocated several at a time
    if they then take less memory.

    Args:
        slot_bytes: size of a buffer in bytes; larger buffers are allocated on request, but not kept.
        device: the GPU, whose driver locks the pages.
        count: expected number of buffers; more are allocated when requested.
    """

    def __init__(self, slot_bytes: int, device: torch.device, count: int = 1) -> None:
        self._expected = count
        self._slot_bytes = slot_bytes
        self._device = device
        self._idle: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._unused: list[Tensor] = []
        # Two threads may iterate over the same loader.
        self._lock = threading.Lock()
        self._can_pin = True

    def lend(self, size: int) -> Tensor:
        """Lend at least `size` bytes as a `uint8` tensor, after waiting for the last copy from that buffer."""
        # In a thread that has not chosen a GPU, CUDA would create a context on the first one, too.
        with torch.cuda.device(self._device):
            return self._lent(size)

    def _lent(self, size: int) -> Tensor:
        if size > self._slot_bytes:
            return self._allocated(size)
        with self._lock:
            if not self._idle and not self._unused:
                self._unused = self._new_slots()
            if self._unused and not (self._idle and self._idle[0][1].query()):
                return self._unused.pop()
            buffer, copied = self._idle.popleft()
        # Events cannot be used while another thread captures a CUDA graph, unless it does so with
        # `capture_error_mode="thread_local"`, as `torch.compile` does. Python cannot set the mode of this thread.
        copied.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        """Return a buffer to the pool, to be lent again after `copied`; a buffer that is never returned is freed."""
        if buffer.nbytes == self._slot_bytes:
            self._idle.append((buffer, copied))

    def _new_slots(self) -> list[Tensor]:
        # Groups whose fields are all on the GPU need an empty buffer.
        step = aligned(max(1, self._slot_bytes))
        most = min(self._expected, _MOST_PINNED_TOGETHER) if self._can_pin else 1
        # If several numbers waste equally little memory, `min` returns the first and smallest.
        count = min(range(1, max(1, most) + 1), key=lambda count: (1 << (count * step - 1).bit_length()) / count)
        self._expected -= count
        block = self._allocated(count * step)
        return [block[start : start + self._slot_bytes] for start in range(0, count * step, step)]

    def _allocated(self, size: int) -> Tensor:
        # A tensor made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            if self._can_pin:
                try:
                    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                except RuntimeError as error:
                    self._can_pin = False
                    warn_unpinned(error)
            return torch.empty(size, dtype=torch.uint8, device="cpu")


class FieldBuffers:
    """Buffers for the fields of a group of batches; thread-safe.

    Batches on the CPU use one pageable buffer per field, because users keep labels longer than images. Batches for a
    GPU use one pinned buffer for all fields.

    Args:
        field_bytes: usual size of each field in bytes.
        keep: maximum number of idle pageable buffers to keep per field, and expected number of pinned buffers.
        device: device of the batches.

    Attributes:
        pinned: pool of pinned buffers; None for batches on the CPU.
    """

    def __init__(self, field_bytes: Sequence[int], keep: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self.pinned = PinnedSlots(sum(map(aligned, field_bytes)), device, keep) if is_pinned else None
        # The first field is usually large; pooling the buffers of other fields is worth it only if they are large.
        self._pageable = [
            PageableSlots(size, keep) if place == 0 or size >= _LARGE else None
            for place, size in enumerate(field_bytes)
        ]

    def lend(self, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor | None]:
        """Lend one `uint8` tensor per field, of the given sizes in bytes; also return their pinned buffer, if any."""
        if self.pinned is None:
            return [
                torch.empty(size, dtype=torch.uint8, device="cpu") if slots is None else slots.lend(size)
                for slots, size in zip(self._pageable, sizes, strict=True)
            ], None
        stops = [*itertools.accumulate(map(aligned, sizes))]
        buffer = self.pinned.lend(stops[-1])
        return [buffer[start : start + size] for start, size in zip([0, *stops], sizes, strict=False)], buffer


_KEPT_SLOTS = 4
_STEP_BYTES = 4 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_pixels(images: Tensor, out: Tensor) -> None:
    """Copy images `[B, C, H, W]` into memory that may have another memory format.

    Between two formats, NumPy is twice as fast as torch with one thread, and as fast as torch with two threads.
    """
    integer = _INTEGERS.get(images.dtype.itemsize)
    is_same = (images.dtype, images.shape) == (out.dtype, out.shape)
    if is_same and integer is not None and images.stride() != out.stride():
        np.copyto(out.view(integer).numpy(), images.view(integer).numpy())
    else:
        out.copy_(images)


class RowGather:
    """Rows of tensors or mapped files, gathered into a buffer with the fastest branch of `torch.index_select`.

    This branch copies rows in parallel with memcpy, and is used for rows of fewer than 32,768 elements. Rows are
    therefore viewed as the widest integers that divide their size. Source: `index_select_out_cpu_` in ATen's
    TensorAdvancedIndexing.cpp. Rows of several files are gathered file by file and then copied again into their order.

    Args:
        maps: rows of each file, contiguous `[N, ...]`, of one shape and dtype, on one device.
        numbers: row numbers of a view's samples, counted through all files; None for all rows.
        are_images: whether rows are images `[H, W, C]`.
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
        # Rows of a single integer are gathered three times as fast from a 1-D tensor.
        if self.row_bytes == self._wide.itemsize:
            self._wide_maps = [rows.view(-1) for rows in self._wide_maps]
        self._stops = torch.tensor([len(rows) for rows in maps], device="cpu").cumsum(0)
        # Temporary memory for rows that are then copied to another memory format.
        self._stored = PageableSlots(0, 1)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.maps)) if self.numbers is None else len(self.numbers)

    @property
    def are_images_of_bytes(self) -> bool:
        """Whether rows are `uint8 [H, W, C]`."""
        return self.are_images and self.dtype == torch.uint8 and len(self.shape) == 3

    def gather_new(self, indices: Tensor) -> Tensor:
        """Gather the rows at `indices` into new memory; images become `[B, C, H, W]` in channels-last memory format.

        Rows are gathered as integers, because `index_select` does not support all dtypes.

        Args:
            indices: `int64 [B]`.
        """
        if len(self.maps) > 1:
            return self.gather(indices, torch.empty(len(indices) * self.row_bytes, dtype=torch.uint8, device="cpu"))
        rows = self._wide_maps[0].index_select(0, self._rows_of(indices))
        return self.shaped(rows.view(-1), len(indices))

    def gather(self, indices: Tensor, buffer: Tensor) -> Tensor:
        """Gather the rows at `indices` into `buffer` and return them; images become channels-last `[B, C, H, W]`.

        Args:
            indices: `int64 [B]`.
            buffer: `uint8`, of exactly the size of the rows, with the same alignment as the rows.
        """
        self.gather_wide(indices, self.wide(buffer, len(indices)))
        return self.shaped(buffer, len(indices))

    def gather_contiguous(self, indices: Tensor, buffer: Tensor) -> Tensor:
        """Gather as `gather` does, but images become contiguous `[B, C, H, W]`."""
        out = self.shaped(buffer, len(indices), is_contiguous=True)
        # A single channel is already contiguous.
        if not self.are_images or self.shape[-1] == 1:
            self.gather_wide(indices, self.wide(buffer, len(indices)))
            return out
        step = max(1, _STEP_BYTES // self.row_bytes)
        stored = self._stored.lend(min(step, len(indices)) * self.row_bytes)
        for some, place in zip(indices.split(step), out.split(step), strict=True):
            copy_pixels(self.gather(some, stored[: len(some) * self.row_bytes]), place)
        return out

    def wide(self, buffer: Tensor, count: int) -> Tensor:
        """View a buffer as `count` rows of wide integers, as `gather_wide` needs."""
        wide = buffer.view(self._wide)
        return wide.view(count, -1) if self._wide_maps[0].ndim > 1 else wide

    def gather_wide(self, indices: Tensor, wide: Tensor) -> None:
        """Gather the rows at `indices` into a view returned by `wide`."""
        rows = self._rows_of(indices)
        if len(self._wide_maps) == 1:
            torch.index_select(self._wide_maps[0], 0, rows, out=wide)
        else:
            self._gather_by_file(rows, wide)

    def shaped(self, buffer: Tensor, count: int, is_contiguous: bool = False) -> Tensor:
        """View a buffer as `count` rows of the original dtype; images become channels-last `[count, C, H, W]`.

        Args:
            is_contiguous: whether images in the buffer are contiguous instead.
        """
        rows = buffer.view(self.dtype)
        if self.are_images and is_contiguous:
            return rows.view(count, self.shape[-1], *self.shape[:-1])
        rows = rows.view(count, *self.shape)
        return rows.movedim(-1, 1) if self.are_images else rows

    def shaped_array(self, rows: npt.NDArray[np.uint8], is_contiguous: bool) -> npt.NDArray[Any] | None:
        """View rows of bytes as `shaped` does, but in NumPy; None if NumPy does not support their dtype."""
        try:
            typed = rows.view(torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype)
        except TypeError:
            return None
        if self.are_images and is_contiguous:
            return typed.reshape(len(rows), self.shape[-1], *self.shape[:-1])
        shaped = typed.reshape(len(rows), *self.shape)
        return np.moveaxis(shaped, -1, 1) if self.are_images else shaped

    def _rows_of(self, indices: Tensor) -> Tensor:
        """Return the row numbers of samples, counted through all files."""
        return indices if self.numbers is None else self.numbers[indices]

    def on(self, device: torch.device, step_bytes: int) -> RowGather:
        """Copy the rows to a device in steps of `step_bytes`, and return a `RowGather` over the copies."""
        count = self.count
        rows = torch.empty((count, *self.shape), dtype=self.dtype, device=device)
        step = max(1, step_bytes // max(1, self.row_bytes))
        for start in range(0, count, step):
            some = torch.arange(start, min(start + step, count), device="cpu")
            gathered = self.gather_new(some)
            rows[start : start + len(some)] = gathered.movedim(1, -1) if self.are_images else gathered
        return RowGather((rows,), None, self.are_images)

    def pixels(self, numbers: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
        """Yield the mapped row of each sample, without a copy."""
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
    """Buffers to gather rows into, each reused once no tensor shares its memory.

    They avoid the overhead of `PageableSlots` per buffer, which is 4% of the epoch time with small images.
    """

    def __init__(self, rows: RowGather, samples: int, is_contiguous: bool) -> None:
        self._rows = rows
        self._samples = samples
        self._is_contiguous = is_contiguous
        self._slots: deque[_GatherSlot] = deque(maxlen=_KEPT_SLOTS)
        self._lock = threading.Lock()

    def gather(self, indices: Tensor, sizes: tuple[int, ...]) -> Sequence[Tensor]:
        """Gather the rows of the planned samples and split them into batches, each with its own version counter."""
        # Two threads may iterate over the same loader.
        with self._lock:
            for slot in self._slots:
                if slot.is_free:
                    break
            else:
                slot = _GatherSlot(self._rows, max(self._samples, len(indices)), self._is_contiguous)
                self._slots.append(slot)
            wide, found = slot.rows(len(indices))
        if self._is_contiguous:
            self._rows.gather_contiguous(indices, wide.view(-1).view(torch.uint8))
        else:
            self._rows.gather_wide(indices, wide)
        return (found,) if len(sizes) == 1 else found.unsafe_split_with_sizes(sizes)


class _GatherSlot:
    """A buffer that detects whether any tensor shares its memory.

    torch keeps the array under a tensor alive as long as any tensor uses its storage. Each of these arrays refers to
    the array that owns the memory, so the reference count of the owner shows whether the buffer is in use.
    """

    def __init__(self, rows: RowGather, samples: int, is_contiguous: bool) -> None:
        self._rows = rows
        self._is_contiguous = is_contiguous
        self._allocate(samples)

    def _allocate(self, samples: int) -> None:
        memory = empty_bytes(samples * self._rows.row_bytes).reshape(samples, -1)
        self._samples = samples
        # A tensor made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            self._wide = self._rows.wide(torch.from_numpy(memory).view(-1), samples)
        shaped = self._rows.shaped_array(memory, self._is_contiguous)
        self._is_shaped = shaped is not None
        self._array = memory if shaped is None else shaped
        del memory, shaped
        self._owner = self._array.base
        self._own_references = sys.getrefcount(self._owner)

    @property
    def is_free(self) -> bool:
        return sys.getrefcount(self._owner) == self._own_references

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first `count` rows twice: as wide integers to fill, and as returned to the user.

        Call this only while the buffer is free.
        """
        # The last batch of several ranks, or a batch of a custom sampler, may have more samples than usual.
        if count > self._samples:
            self._allocate(count)
        wide = self._wide if count == self._samples else self._wide[:count]
        found = torch.from_numpy(self._array[:count])
        return wide, found if self._is_shaped else self._rows.shaped(found.view(-1), count, self._is_contiguous)

"""Choose where samples live during training (GPU memory, RAM or disk) from the free space; cache decoded images."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import uuid
import weakref
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from colabkit.foundation import InvalidOption, call, cannot, file_changes, format_bytes, memory_limits, read_file
from colabkit.loading.engine.gather import RowGather, empty_bytes
from colabkit.packs import Pixels

Keep: TypeAlias = Literal["auto", "gpu", "ram", "disk"]
KEEPS = ("auto", "gpu", "ram", "disk")

# Shares of the free space that samples may use. The rest of the RAM is for the model, the notebook and the batches.
_RAM_SHARE = 0.7
# Share of free GPU memory that samples may use before the model, which needs the rest, is on the GPU.
_GPU_SHARE = 0.4
# Share of free GPU memory that samples may use once the model is on the GPU.
_LATE_GPU_SHARE = 0.7
_DISK_SHARE = 0.8

_ram_caches: weakref.WeakSet[RowCache] = weakref.WeakSet()
_ram_caches_lock = threading.Lock()


@dataclass(frozen=True)
class Tier:
    """The storage tier of the samples, and the reason for the choice.

    Attributes:
        name: `"gpu"`, `"ram"` or `"disk"`; `"source"` if each epoch decodes samples or calls the dataset again.
        reason: the sizes that led to this choice, as text.
        rows: number of decoded samples that are cached; 0 if nothing is decoded or cached.
    """

    name: Literal["gpu", "ram", "disk", "source"]
    reason: str
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def fits_on(device: torch.device, needed: int, processes: int) -> bool:
    """Return whether a GPU that already holds the model has room for `needed` bytes of samples of each process."""
    return needed <= _LATE_GPU_SHARE * _free_on(device, processes)


def _free_on(device: torch.device, processes: int) -> int:
    """Return the free bytes of a GPU, divided among the processes on this machine that share it.

    The bytes that torch's caching allocator holds without using them are free, too, but only for this process.
    """
    sharing = -(-_on_this_machine(processes) // torch.cuda.device_count())
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] // sharing + cached


def _on_this_machine(processes: int) -> int:
    """Return how many of the processes are on this machine: `LOCAL_WORLD_SIZE`, which `torchrun` sets, or all."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(processes, int(local) if local.isdecimal() else processes))


def shortages(device: torch.device) -> int:
    """Return the number of times that this process has run out of memory on a GPU."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


@dataclass(frozen=True)
class Room:
    """The space that is free for samples, in bytes.

    Attributes:
        gpu_bytes: free memory of the batches' GPU; None if batches stay on the CPU.
        ram_bytes: RAM available under all limits.
        disk_bytes: free space of the local disk.
        promised_bytes: part of `ram_bytes` that the caches of this process's other loaders will fill.
    """

    gpu_bytes: int | None
    ram_bytes: int
    disk_bytes: int
    promised_bytes: int = 0

    @classmethod
    def measure(cls, device: torch.device, folder: Path, processes: int) -> Room:
        """Measure free GPU memory, RAM, and disk space of `folder`, divided among the processes that share them."""
        gpu = _free_on(device, processes) if device.type == "cuda" else None
        ram, sharing = memory_limits(read_file).available_bytes, _on_this_machine(processes)
        return cls(gpu, ram // sharing, file_changes.free_bytes(folder) // sharing, promised_bytes())


def choose_tier(
    act: str,
    keep: Keep,
    room: Room,
    *,
    row_bytes: int | None,
    other_bytes: int = 0,
    count: int,
    is_decoded: bool,
    is_on_disk: bool,
) -> Tier:
    """Choose the tier of the samples.

    Args:
        act: verb and object of error messages.
        keep: the requested tier; `"gpu"` only with a GPU.
        room: the free space.
        row_bytes: size of a decoded sample's first field; None if sizes differ, or samples are not kept in memory.
        other_bytes: size of its other fields, which are not decoded.
        count: number of samples.
        is_decoded: whether samples have to be decoded first.
        is_on_disk: whether rows are in a mapped file, whose pages the kernel caches while there is room.

    Raises:
        InvalidOption: if `keep` is impossible.
    """
    if row_bytes is None:
        read = "read from their files in every epoch" if is_on_disk else "loaded one by one"
        if keep != "auto" and is_decoded:
            unequal = f"keep={keep!r}, but the samples differ in size"
            raise InvalidOption(cannot(act, unequal, "samples of one size", "Use keep='auto', or pass size="))
        if keep != "auto":
            found = f"keep={keep!r}, but the samples are {read}"
            expected = "samples that can be memory-mapped" if is_on_disk else "a pack, image files or arrays"
            raise InvalidOption(cannot(act, found, expected, "Omit keep="))
        why = "samples differ in size; size= makes them cacheable" if is_decoded else read
        return Tier("source", why)
    needed = (row_bytes if is_decoded else row_bytes + other_bytes) * count
    shown = format_bytes(needed)
    gpu = None if room.gpu_bytes is None else int(_GPU_SHARE * room.gpu_bytes)
    # With keep='ram' or keep='gpu', the user takes responsibility for the caches of other loaders.
    promised = room.promised_bytes if keep in ("auto", "disk") else 0
    free = max(0, room.ram_bytes - promised)
    ram, disk = int(_RAM_SHARE * free), int(_DISK_SHARE * room.disk_bytes)
    if keep in ("auto", "gpu") and gpu is not None:
        # Decoded samples are cached in RAM first.
        on_the_way, total = ram if is_decoded else needed, (row_bytes + other_bytes) * count
        if total <= gpu and needed <= on_the_way:
            reason = f"{format_bytes(total)} of {format_bytes(room.gpu_bytes or 0)} free"
            return Tier("gpu", reason, count if is_decoded else 0)
        if keep == "gpu" and total > gpu:
            raise _too_much(act, keep, format_bytes(total), f"{format_bytes(gpu)} on the GPU")
        if keep == "gpu":
            raise _too_much(act, keep, shown, f"{format_bytes(ram)} in RAM, where samples are decoded first")
    if not is_decoded:
        return _of_rows(act, keep, shown, needed, ram, is_on_disk)
    if keep in ("auto", "ram") and (needed <= ram or (keep == "auto" and ram >= disk)):
        return _cached("ram", needed, ram, row_bytes, count)
    if keep in ("auto", "disk"):
        tier = _cached("disk", needed, disk, row_bytes, count)
        if keep == "auto" and needed <= int(_RAM_SHARE * room.ram_bytes):
            tier = replace(tier, reason=f"{tier.reason}; {format_bytes(promised)} of RAM are reserved by other loaders")
        return tier
    raise _too_much(act, keep, shown, f"{format_bytes(ram)} in RAM")


def _of_rows(act: str, keep: Keep, shown: str, needed: int, ram: int, is_on_disk: bool) -> Tier:
    if not is_on_disk:
        if keep == "disk":
            found = "keep='disk', but arrays are already in memory"
            next_step = ("Omit keep=, or write the arrays to a file with ", call("pack"))
            raise InvalidOption(cannot(act, found, "a pack or image files", next_step))
        return Tier("ram", f"{shown}, already in memory")
    if keep == "disk":
        return Tier("disk", "requested with keep='disk'")
    if needed <= ram:
        return Tier("ram", f"{shown} fit in {format_bytes(ram)} of RAM for samples")
    if keep == "ram":
        raise _too_much(act, keep, shown, f"{format_bytes(ram)} in RAM")
    return Tier("disk", f"{shown} exceed {format_bytes(ram)} of RAM for samples")


def _cached(where: Literal["ram", "disk"], needed: int, budget: int, row_bytes: int, count: int) -> Tier:
    rows = min(count, budget // max(1, row_bytes))
    if not rows:
        return Tier("source", f"no room to cache {format_bytes(needed)} of decoded samples")
    what = "RAM" if where == "ram" else "disk"
    shown = f"{format_bytes(needed)} decoded" if rows == count else f"{rows:,} of {count:,} decoded samples"
    return Tier(where, f"{shown} fit in {format_bytes(budget)} of {what} for samples", rows)


def _too_much(act: str, keep: Keep, shown: str, room: str) -> InvalidOption:
    found = f"keep={keep!r}, but the samples take {shown}"
    return InvalidOption(cannot(act, found, f"at most {room}", "Use keep='auto'"))


def promised_bytes() -> int:
    """Return the bytes of RAM that this process's caches will still fill, and that therefore still look free."""
    with _ram_caches_lock:
        return sum((cache.capacity - len(cache)) * prod(cache.shape) for cache in _ram_caches)


class RowCache:
    """A thread-safe cache of decoded rows of one shape, by sample index.

    RAM is used only as rows are added. On disk, all space is reserved immediately, in an unnamed file that the kernel
    frees together with the cache, or when the process ends.

    Args:
        count: number of samples.
        shape: shape of a row, `[H, W, C]`.
        capacity: largest number of rows to cache.
        where: `"ram"` or `"disk"`.
        folder: folder of the file on disk.

    Raises:
        NotEnoughSpace: if the disk has no room for the file.
    """

    def __init__(
        self, count: int, shape: tuple[int, int, int], capacity: int, where: Literal["ram", "disk"], folder: Path
    ) -> None:
        self.shape = shape
        self.capacity = min(count, capacity)
        size = self.capacity * prod(shape)
        flat = np.frombuffer(_nameless_map(folder, size), np.uint8) if where == "disk" else empty_bytes(size)
        self._rows: Pixels = flat.reshape(self.capacity, *shape)
        self._tensor = torch.from_numpy(self._rows)
        self._slots = np.full(count, -1, np.int64)
        self._owner = os.getpid()
        self._is_shared = where == "disk"
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = 0
        self._count = 0
        if where == "ram":
            with _ram_caches_lock:
                _ram_caches.add(self)

    def __len__(self) -> int:
        """Return the number of cached rows."""
        return self._count

    def __getitem__(self, index: int) -> Pixels:
        """Return the row of a cached sample."""
        return self.at(self._slots.item(index))

    @property
    def is_full(self) -> bool:
        """Whether every sample is cached."""
        return self._count == len(self._slots)

    def gather(self) -> RowGather:
        """Return a `RowGather` over the rows of a full cache."""
        return RowGather((self._tensor,), torch.from_numpy(self._slots), are_images=True)

    def row(self, index: int) -> Pixels | None:
        """Return the row of a sample, or None if it is not cached."""
        slot = self._slots.item(index)
        return self.at(slot) if slot >= 0 else None

    def holds(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether each sample is cached, `bool [B]`."""
        return self._slots[indices] >= 0

    def claim(self) -> int | None:
        """Claim and return a free slot, or return None if there is none; end each claim with `settle` or `release`."""
        # A forked process shares the memory of the file, so both processes would fill the same slots.
        if self._is_shared and os.getpid() != self._owner:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._next == self.capacity:
                return None
            self._next += 1
            return self._next - 1

    def at(self, slot: int) -> Pixels:
        """Return the memory of a slot."""
        row: Pixels = self._rows[slot]
        return row

    def settle(self, slot: int, index: int) -> None:
        """Use the completed row of a claimed slot for a sample, or free the slot if the sample already has a row."""
        with self._lock:
            # Two threads may decode a sample at the same time.
            if self._slots[index] >= 0:
                self._free.append(slot)
            else:
                self._slots[index] = slot
                self._count += 1

    def release(self, slot: int) -> None:
        """Free a claimed slot without storing a row."""
        with self._lock:
            self._free.append(slot)


def _nameless_map(folder: Path, size: int) -> mmap.mmap:
    """Create a file with reserved space, map it and remove its name, so that unmapping frees the space."""
    path = folder / f".colabkit-cache-{uuid.uuid4().hex}"
    with file_changes.translated(f"cache decoded images in {str(folder)!r}"):
        file_changes.make_folder(folder)
        fd = file_changes.create(path)
        try:
            file_changes.reserve(fd, max(size, 1), path, is_mapped=True)
            return mmap.mmap(fd, max(size, 1))
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                file_changes.remove(path)

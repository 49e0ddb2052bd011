"""Decoded images are kept, in RAM or in a file without a name, so that no image is decoded twice."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import uuid
import weakref
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from colabkit.foundation import file_changes
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.slots import empty_bytes

Pixels = npt.NDArray[np.uint8]

_in_ram: weakref.WeakSet[KeptRows] = weakref.WeakSet()
_in_ram_lock = threading.Lock()


def promised_bytes() -> int:
    """Return the bytes of RAM that this process's kept rows may still take, which look free until then."""
    with _in_ram_lock:
        return sum((rows.capacity - len(rows)) * int(np.prod(rows.shape)) for rows in _in_ram)


class KeptRows:
    """Rows of one shape by the number of their sample, as many as fit; safe to use from any thread.

    Memory is taken as rows come. A file is reserved whole at once, and has no name: it is gone with the process.

    Args:
        count: samples of the data set.
        shape: of a row, `[H, W, C]`.
        capacity: rows to keep at most.
        where: `"ram"` or `"disk"`.
        folder: for the file.

    Raises:
        NotEnoughSpace: if the disk has no room for the file.
    """

    def __init__(
        self, count: int, shape: tuple[int, int, int], capacity: int, where: Literal["ram", "disk"], folder: Path
    ) -> None:
        self.shape = shape
        self.capacity = min(count, capacity)
        size = self.capacity * int(np.prod(shape))
        flat = np.frombuffer(_nameless(folder, size), np.uint8) if where == "disk" else empty_bytes(size)
        self._rows: Pixels = flat.reshape(self.capacity, *shape)
        self._tensor = torch.from_numpy(self._rows)
        self._places = np.full(count, -1, np.int64)
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = 0
        self._kept = 0
        if where == "ram":
            with _in_ram_lock:
                _in_ram.add(self)

    def __len__(self) -> int:
        """Return how many rows are kept."""
        return self._kept

    @property
    def is_whole(self) -> bool:
        """Whether every sample is kept."""
        return self._kept == len(self._places)

    def gather(self) -> RowGather:
        """Return what gathers kept rows; its numbers are as they are now."""
        return RowGather((self._tensor,), torch.from_numpy(self._places), are_images=True)

    def row(self, number: int) -> Pixels | None:
        """Return the row of a sample, None if it is not kept."""
        place = self._places.item(number)
        return self.at(place) if place >= 0 else None

    def claim(self) -> int | None:
        """Return a free place, None if there is none; give it back by `settle` or `release`."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._next == self.capacity:
                return None
            self._next += 1
            return self._next - 1

    def at(self, place: int) -> Pixels:
        """Return the memory of a claimed place."""
        row: Pixels = self._rows[place]
        return row

    def settle(self, place: int, number: int) -> None:
        """Make the row at a claimed place, which is whole now, that of a sample."""
        with self._lock:
            if self._places[number] >= 0:  # two threads decoded it at the same time
                self._free.append(place)
            else:
                self._places[number] = place
                self._kept += 1

    def release(self, place: int) -> None:
        """Give a claimed place back, unused."""
        with self._lock:
            self._free.append(place)


def _nameless(folder: Path, size: int) -> mmap.mmap:
    """Return a map of a new file of reserved space that is already removed."""
    path = folder / f".colabkit-kept-{uuid.uuid4().hex}"
    with file_changes.translated(f"keep decoded images below {str(folder)!r}"):
        file_changes.make_folder(folder)
        fd = file_changes.create(path)
        try:
            file_changes.reserve(fd, max(size, 1), path)
            return mmap.mmap(fd, max(size, 1))
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                file_changes.remove(path)

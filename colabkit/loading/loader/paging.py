"""The pages of mapped rows come into memory before they are needed: all in order, or those of the coming batches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.portions import Numbers, Portion, told_early
from colabkit.packs import PackedDataset

_STEP_BYTES = 32 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14; Python's mmap does not have it


@dataclass(frozen=True)
class MappedRows:
    """Rows of a file that is mapped.

    Attributes:
        path: the file.
        offset: of the first row in it.
        rows: how many.
        row_bytes: of each.
    """

    path: Path
    offset: int
    rows: int
    row_bytes: int


def mapped_rows(dataset: PackedDataset, rows: RowGather) -> tuple[MappedRows, ...] | None:
    """Return where the rows of a packed split lie; None if that is not known."""
    files = dataset.mapped_files()
    if files is None or len(files) != len(rows.maps):
        return None
    return tuple(
        MappedRows(path, offset, len(some), rows.row_bytes)
        for (path, offset), some in zip(files, rows.maps, strict=True)
    )


def looked_ahead(
    portions: Iterator[Portion], files: Sequence[MappedRows], rows_of: Numbers | None, depth: int
) -> Iterator[Portion]:
    """Yield portions, after asking the kernel to read the rows of the next ones from disk.

    Args:
        portions: of the epoch.
        files: where rows lie, counted through all of them.
        rows_of: row of each sample; None for the samples' own numbers.
        depth: samples that are asked for before they are needed.
    """
    if not hasattr(os, "posix_fadvise"):  # as on macOS
        yield from portions
        return
    stops = np.cumsum([file.rows for file in files])
    opened: list[int] = []

    def ask(portion: Portion) -> None:
        rows = np.sort(portion.numbers if rows_of is None else rows_of[portion.numbers])
        owners = np.searchsorted(stops, rows, side="right")
        for owner, row in zip(owners.tolist(), rows.tolist(), strict=True):
            file = files[owner]
            first = row - (int(stops[owner]) - file.rows)
            place = file.offset + first * file.row_bytes
            os.posix_fadvise(opened[owner], place, file.row_bytes, os.POSIX_FADV_WILLNEED)

    try:
        with contextlib.suppress(OSError):  # a file whose name is gone can be read through its map, unasked for
            opened.extend(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) for file in files)
        yield from told_early(portions, ask, depth) if len(opened) == len(files) else portions
    finally:
        for fd in opened:
            os.close(fd)


class Populating:
    """Brings pages of mapped rows into memory, in order, in a thread of its own, while there is nothing better to do.

    Without it the first epoch would fetch them one page fault at a time, in random order. The kernel is asked through
    `madvise`, which leaves the interpreter's lock alone when called by ctypes; where it is too old, nothing happens.

    Args:
        maps: tensors over memory maps.
        numbers: the rows, counted through all maps, that are needed; None for all.
    """

    def __init__(self, maps: Sequence[Tensor], numbers: Tensor | None = None) -> None:
        self._maps = maps
        self._numbers = numbers
        self._ranges: Numbers | None = None
        self._reached: tuple[int, int] | None = (0, 0)  # range, and bytes of it; None when all are done
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a pass may be collected, and stop it, wherever memory is asked for
        self._users = 0

    def start(self) -> None:
        """Go on where it stopped, unless it is at work; call `stop` once for each time."""
        with self._lock:
            self._users += 1
            if self._thread is None and self._reached is not None and (madvise := _madvise()) is not None:
                self._is_over = threading.Event()  # of this thread alone: an earlier one may still wait for a slow disk
                self._thread = threading.Thread(
                    target=self._run, args=(madvise, self._is_over), name="colabkit-loader-populating", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread if nobody else has started it; one that waits for the disk ends a step later."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._is_over.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self, madvise: Callable[[int, int, int], int], is_over: threading.Event) -> None:
        if self._ranges is None:
            self._ranges = _ranges_of(self._maps, self._numbers)
        number, place = self._reached or (0, 0)
        while number < len(self._ranges):
            first, stop = self._ranges[number].tolist()
            size = stop - first
            while place < size:
                if is_over.is_set() or madvise(first + place, min(_STEP_BYTES, size - place), _POPULATE_READ):
                    self._reached = (number, place) if is_over.is_set() else None
                    return
                place += _STEP_BYTES
            number, place = number + 1, 0
        self._reached = None


def _ranges_of(maps: Sequence[Tensor], numbers: Tensor | None) -> Numbers:
    """Return from which address, where a page begins, to which some rows lie, `int64 [N, 2]`, in order."""
    is_needed = np.full(sum(map(len, maps)), numbers is None)
    if numbers is not None:
        is_needed[numbers.numpy()] = True
    found, stop = [np.empty((0, 2), np.int64)], 0
    for rows in maps:
        start, stop = stop, stop + len(rows)
        framed = np.pad(is_needed[start:stop], 1)
        edges = np.flatnonzero(framed[1:] != framed[:-1])  # where a run of rows begins, and where it ends
        if not len(edges):
            continue
        places = rows.data_ptr() + edges * (rows.nbytes // len(rows))
        pages, ends = places[::2] // mmap.PAGESIZE, places[1::2]
        is_apart = pages[1:] > -(-ends[:-1] // mmap.PAGESIZE)
        firsts, lasts = np.append(True, is_apart), np.append(is_apart, True)
        found.append(np.stack([pages[firsts] * mmap.PAGESIZE, ends[lasts]], 1))
    return np.concatenate(found)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found.restype = ctypes.c_int
    return found

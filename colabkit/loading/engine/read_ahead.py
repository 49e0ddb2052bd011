"""Read samples before they are needed: pages of mapped rows, and image files of remote sources."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from colabkit.foundation import ColabkitError, LoaderMeters, has_started, start_thread
from colabkit.loading.engine.batches import BatchPlan, announce_plans
from colabkit.loading.engine.gather import RowGather
from colabkit.packs import LABELS, POPULATE_READ, FileDataset, Indices, PackedDataset, find_madvise
from colabkit.storage import STALLED_S, Calls, Item, Level, Retries, read_item

_STEP_BYTES = 32 << 20
_HELD_BYTES = 256 << 20
_TICK_S = 0.25


class Cancellation(BaseException):
    """The caller has abandoned the work of this thread, so the thread ends without an error."""


@dataclass(frozen=True)
class RowFile:
    """A mapped file: its path, the offset of its first row, the number of rows, and the bytes per row."""

    path: Path
    offset: int
    rows: int
    row_bytes: int


def row_files_of(dataset: PackedDataset, name: str, rows: RowGather) -> tuple[RowFile, ...] | None:
    """Return the files that hold the rows of a field of a packed split; None if they are unknown, or are in RAM."""
    # Labels were copied when the pack was opened.
    files = None if name == LABELS else dataset.mapped_files(name)
    if files is None or len(files) != len(rows.maps):
        return None
    return tuple(
        RowFile(path, offset, len(some), rows.row_bytes) for (path, offset), some in zip(files, rows.maps, strict=True)
    )


def read_rows_ahead(
    plans: Iterator[BatchPlan], files: Sequence[RowFile], numbers: Indices | None, depth: int
) -> Iterator[BatchPlan]:
    """Yield plans, after advising the kernel to read the rows of the following plans from disk.

    Args:
        plans: plans of the batches.
        files: files with the rows; row numbers count through all files.
        numbers: row number of each sample; None if it equals the sample's index.
        depth: number of samples to read ahead.
    """
    # macOS has no `posix_fadvise`.
    if not hasattr(os, "posix_fadvise"):
        yield from plans
        return
    stops = np.cumsum([file.rows for file in files])
    opened: list[int] = []

    def advise(plan: BatchPlan) -> None:
        rows = np.sort(plan.indices if numbers is None else numbers[plan.indices])
        owners = np.searchsorted(stops, rows, side="right")
        for owner, row in zip(owners.tolist(), rows.tolist(), strict=True):
            file = files[owner]
            first = row - (int(stops[owner]) - file.rows)
            place = file.offset + first * file.row_bytes
            os.posix_fadvise(opened[owner], place, file.row_bytes, os.POSIX_FADV_WILLNEED)

    try:
        # Ignore a removed file, which can still be read through its map, but without advice to the kernel.
        with contextlib.suppress(OSError):
            opened.extend(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) for file in files)
        # If some cannot be opened, close the others: the process may have no more descriptors.
        while len(opened) < len(files) and opened:
            os.close(opened.pop())
        yield from announce_plans(plans, advise, depth) if opened else plans
    finally:
        for fd in opened:
            os.close(fd)


class PagePopulator:
    """A background thread that reads the pages of mapped rows into memory, in order.

    Otherwise the first epoch would load the pages one page fault at a time, in random order. The thread calls `madvise`
    through ctypes, which releases the GIL. If an old kernel rejects the call, the thread ends.

    Args:
        maps: mapped rows of each file.
        numbers: numbers of the needed rows, counted through all maps; None for all.
    """

    def __init__(self, maps: Sequence[Tensor], numbers: Tensor | None = None) -> None:
        self._maps = maps
        self._numbers = numbers
        self._ranges: Indices | None = None
        # Index of the current range, and the number of its bytes that have been read; None if nothing is left to read.
        self._reached: tuple[int, int] | None = (0, 0)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        # The lock is reentrant, because the garbage collector may call `stop` in a thread that holds it.
        self._lock = threading.RLock()
        self._users = 0

    def start(self) -> None:
        """Start or resume the thread if it is not running; call `stop` once for each call."""
        with self._lock:
            self._users += 1
            if self._thread is None and self._reached is not None and (madvise := find_madvise()) is not None:
                # Each thread has its own event, because an earlier thread may still wait for a slow disk.
                self._is_over = threading.Event()
                thread = threading.Thread(
                    target=self._run, args=(madvise, self._is_over), name="colabkit-loader-populating", daemon=True
                )
                # Without the thread, each page is read when it is needed.
                self._thread = thread if has_started(thread) else None

    def stop(self) -> None:
        """Stop the thread if no iteration uses it; if it waits for the disk, it ends after the current step."""
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
                if is_over.is_set() or madvise(first + place, min(_STEP_BYTES, size - place), POPULATE_READ):
                    self._reached = (number, place) if is_over.is_set() else None
                    return
                place += _STEP_BYTES
            number, place = number + 1, 0
        self._reached = None


def _ranges_of(maps: Sequence[Tensor], numbers: Tensor | None) -> Indices:
    """Return the address ranges of the pages that hold the needed rows, `int64 [N, 2]`, ascending within each map."""
    is_needed = np.full(sum(map(len, maps)), numbers is None)
    if numbers is not None:
        is_needed[numbers.numpy()] = True
    found, stop = [np.empty((0, 2), np.int64)], 0
    for rows in maps:
        start, stop = stop, stop + len(rows)
        framed = np.pad(is_needed[start:stop], 1)
        # Start and stop of each run of needed rows.
        edges = np.flatnonzero(framed[1:] != framed[:-1])
        if not len(edges):
            continue
        places = rows.data_ptr() + edges * (rows.nbytes // len(rows))
        pages, ends = places[::2] // mmap.PAGESIZE, places[1::2]
        is_apart = pages[1:] > -(-ends[:-1] // mmap.PAGESIZE)
        firsts, lasts = np.append(True, is_apart), np.append(is_apart, True)
        found.append(np.stack([pages[firsts] * mmap.PAGESIZE, ends[lasts]], 1))
    return np.concatenate(found)


class FileReadAhead:
    """A background thread that reads the files of upcoming samples and adapts the number of concurrent requests.

    Args:
        files: the dataset.
        is_cached: function that returns whether a sample is cached and need not be read.
        counts: meters of the loader; `read` counts the sum of the seconds of all requests.
    """

    def __init__(self, files: FileDataset, is_cached: Callable[[int], bool], counts: LoaderMeters) -> None:
        self._retries = Retries(counts.retried)
        self._files = files
        self._is_cached = is_cached
        self._counts = counts
        # This condition protects the attributes below.
        self._changed = threading.Condition()
        # Sample indices by position, in the order of use.
        self._coming: OrderedDict[int, int] = OrderedDict()
        self._found: dict[int, bytes | BaseException] = {}
        # Positions that have been requested from the source, but not yet fetched by the loader.
        self._requested: set[int] = set()
        self._forgotten: set[int] = set()
        # Bytes that have been read, but not yet fetched by the loader.
        self._held_bytes = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="colabkit-loader-reading", daemon=True)
        start_thread(self._thread, "read the files of the dataset")

    def announce(self, plan: BatchPlan) -> None:
        """Queue the samples of a plan, in the order in which they will be fetched."""
        with self._changed:
            self._coming.update(zip(plan.positions.tolist(), plan.indices.tolist(), strict=True))
            self._changed.notify_all()

    def forget(self, position: int) -> None:
        """Drop the sample at a position, because it is cached."""
        with self._changed:
            data = self._found.pop(position, None)
            if position in self._requested and data is None:
                self._forgotten.add(position)
            self._requested.discard(position)
            if isinstance(data, bytes):
                self._held_bytes -= len(data)
                self._changed.notify_all()

    def fetch(self, position: int) -> bytes | None:
        """Return and drop the bytes of the announced sample at a position; None if it has been cached meanwhile.

        Raises:
            SourceChanged, BadArchive, FileFailed, TimedOut: if the file cannot be read.
        """
        with self._changed:
            while position not in self._found:
                if self._is_over:
                    raise Cancellation
                if position not in self._requested and position not in self._coming:
                    # Another thread cached the sample before it was requested.
                    return None
                if self._error is not None:
                    raise self._error
                self._changed.wait(_TICK_S)
            data = self._found.pop(position)
            self._requested.discard(position)
            if isinstance(data, BaseException):
                raise data
            self._held_bytes -= len(data)
            self._changed.notify_all()
            return data

    def close(self) -> None:
        """Stop reading; a read that hangs is abandoned."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        # The garbage collector may close an abandoned iteration in this object's own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S + 2.0)

    def _run(self) -> None:
        try:
            with Calls(self._read, Level(), STALLED_S, lambda: self._tick(calls)) as calls:
                while not self._is_over:
                    self._start_calls(calls)
                    if calls.under_way:
                        self._put(*calls.take())
                    else:
                        with self._changed:
                            if not self._is_over and (not self._coming or self._held_bytes >= _HELD_BYTES):
                                self._changed.wait(_TICK_S)
        except Cancellation:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _start_calls(self, calls: Calls[tuple[int, Item], Any]) -> None:
        while calls.room > 0 and calls.may_begin and self._held_bytes < _HELD_BYTES:
            with self._changed:
                if not self._coming:
                    return
                position, index = self._coming.popitem(last=False)
                if self._is_cached(index):
                    self._changed.notify_all()
                    continue
                self._requested.add(position)
            item = self._files.item(index)
            calls.make((position, item), item.size)

    def _read(self, request: tuple[int, Item]) -> tuple[int, bytes | BaseException]:
        position, item = request
        began = time.perf_counter()
        try:
            found = read_item(self._files.source, item, self._retries)
        except ColabkitError as error:
            return position, error
        self._counts.add("read", 1, len(found), time.perf_counter() - began)
        return position, found

    def _put(self, position: int, found: bytes | BaseException) -> None:
        with self._changed:
            if position in self._forgotten:
                self._forgotten.discard(position)
                return
            self._found[position] = found
            if isinstance(found, bytes):
                self._held_bytes += len(found)
            self._changed.notify_all()

    def _tick(self, calls: Calls[tuple[int, Item], Any]) -> None:
        """Start reading newly announced samples while other calls are in progress; raise `Cancellation` if closed."""
        if self._is_over:
            raise Cancellation
        self._start_calls(calls)

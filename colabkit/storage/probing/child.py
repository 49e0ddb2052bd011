"""The part of a probe that accesses the path, run as a script in a separate process with only the standard library.

The script prints each result immediately, as one line of JSON, since a later operation may hang. In records of the kind
`facts`, the keys are fields of the report. Only other threads access the path, so that the main thread can report an
operation that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import stat
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

SMALL_BYTES = 1 << 20
LARGE_BYTES = 16 << 20
BLOCK_BYTES = 8 << 20
SMALL_LEVELS = (1, 4, 16, 32)
LARGE_LEVELS = (1, 2, 4, 8)
QUICK_S = 0.001
"""Seconds. A file that a FUSE mount delivers in less time did not come over a network."""

# Size in bytes of the pieces in which blocks are read, so that the probe of a slow mount ends on time.
_PIECE_BYTES = 1 << 20
# Weights for dividing the remaining time among the phases.
_WEIGHTS = {"list": 0.2, "size": 0.1, "small": 0.1, "open": 0.05, "large": 0.065}
_STAT_THREADS = 16
_KEPT_FILES = 200_000
_ENOUGH_FILES = 5
# Number of files up to which listing may take half of the time.
_ENOUGH_LISTED = 500
_TICK_S = 0.02
# Extra seconds for operations that are still running at the end.
_OVERTIME_S = 0.7
_LEAST_STALL_S = 2.0

now = time.perf_counter


class Op(NamedTuple):
    """A finished operation: its start and end times in seconds, and the number of bytes read or entries listed."""

    start: float
    end: float
    bytes: int


T = TypeVar("T")
Work: TypeAlias = Callable[[], Op | None]
# Path and size in bytes.
SizedFile: TypeAlias = tuple[str, int]


def rates(done: Sequence[Op], start: float, threads: int) -> tuple[float, float] | None:
    """Return the operations per second and the bytes per second from `start` on, or None if nothing finished.

    At the end, some threads are idle while others finish. The last operations, up to `threads - 1` and at most half of
    all, are therefore left out if that raises the rate.
    """
    ended = sorted(done, key=lambda op: op.end)
    total_bytes = list(accumulate(op.bytes for op in ended))
    least = max((len(ended) + 1) // 2, len(ended) - threads + 1)
    found = [(count / max(ended[count - 1].end - start, 1e-9), count) for count in range(max(1, least), len(ended) + 1)]
    if not found:
        return None
    rate, count = max(found)
    return rate, rate * total_bytes[count - 1] / count


def portions(count: int, levels: Sequence[int], least: Callable[[int], int], most: Callable[[int], int]) -> list[int]:
    """Split `count` items among the levels; each level gets between `least(level)` and `most(level)` items.

    Once too few items are left for a level, it and all later levels get 0.
    """
    given: list[int] = []
    for level in levels:
        given.append(least(level) if sum(given) + least(level) <= count and 0 not in given else 0)
    rest, weights = count - sum(given), sum(level for level, own in zip(levels, given, strict=True) if own)
    return [
        min(most(level), own + rest * level // weights) if own else 0 for level, own in zip(levels, given, strict=True)
    ]


class Probe:
    """A probe of a path, in phases within a time limit.

    Args:
        path: a folder or a file.
        seconds: time limit in seconds.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self.path = path
        self.start = now()
        self.end = self.start + seconds
        self.last_end = self.end + _OVERTIME_S
        self.patience_s = seconds / 2
        # The hanging operation, its path, and the seconds waited for it.
        self.stalled: tuple[str, str, float] | None = None
        self.is_over = False
        # Names of errors, appended by threads.
        self.errors: list[str] = []
        self.files: list[str] = []
        self.opens: list[float] = []
        self.small_bytes = SMALL_BYTES
        self._running: dict[int, tuple[str, str, float]] = {}
        self._plan = ["list", "size", *["small"] * len(SMALL_LEVELS), "open", *["large"] * len(LARGE_LEVELS)]

    def run(self) -> None:
        """Run all phases that apply and fit within the time limit, and print the results."""
        kind = self._look()
        if kind not in ("folder", "file"):
            return
        until = self._slice()
        if kind == "folder":
            self._list(until)
        sized = self._size(self._slice())
        small = [file for file in sized if file[1] <= self.small_bytes]
        others = sorted((file for file in sized if file[1] > self.small_bytes), key=lambda file: file[1])
        blocks = others[-1][1] // BLOCK_BYTES if others and others[-1][1] >= LARGE_BYTES else 0
        of_small = portions(
            len(small), SMALL_LEVELS, lambda c: min(_ENOUGH_FILES, len(small)) if c == 1 else 2 * c, lambda c: 100 * c
        )
        of_large = portions(blocks, LARGE_LEVELS, lambda c: c, lambda c: 4 * c + 4)
        self._plan = ["small"] * sum(map(bool, of_small)) + ["open"] + ["large"] * sum(map(bool, of_large))
        self._read_small(small, of_small)
        self._open([path for path, _ in others], self._slice())
        if blocks:
            self._read_large(others[-1][0], blocks, of_large)

    def write_record(self, kind: str, **values: Any) -> None:
        """Print a record as one line of JSON."""
        sys.stdout.write(json.dumps({"kind": kind, "errors": Counter(list(self.errors)), "values": values}) + "\n")
        sys.stdout.flush()

    def _slice(self) -> float:
        weights = [_WEIGHTS[phase] for phase in self._plan]
        del self._plan[0]
        return now() + (self.end - now()) * weights[0] / sum(weights)

    @contextlib.contextmanager
    def _touch(self, operation: str, path: str) -> Iterator[None]:
        thread = threading.get_ident()
        self._running[thread] = (operation, path, now())
        try:
            yield
        finally:
            del self._running[thread]

    def _together(self, threads: int, work: Work, until: float) -> tuple[list[Op], float]:
        """Run `work` on threads until it returns None or time is up; return the finished operations and the start."""
        done: list[Op] = []
        go, is_done = threading.Event(), threading.Event()

        def loop() -> None:
            go.wait()
            while now() < until and not is_done.is_set() and not self.is_over:
                try:
                    op = work()
                except OSError as error:
                    self.errors.append(errno.errorcode.get(error.errno or 0, type(error).__name__))
                    continue
                if op is None:
                    # End the other threads too, because the rate is measured for a fixed number of threads.
                    is_done.set()
                else:
                    done.append(op)

        running = [threading.Thread(target=loop, daemon=True) for _ in range(0 if self.is_over else threads)]
        for thread in running:
            thread.start()
        start = now()
        go.set()
        for thread in running:
            while thread.is_alive() and not self.is_over:
                thread.join(_TICK_S)
                self._watch()
        return list(done), start

    def _watch(self) -> None:
        """End the probe if its time is over or an operation has been hanging for too long."""
        moment = now()
        is_late = moment > self.last_end
        patience_s = self.patience_s if is_late else max(self.patience_s, _LEAST_STALL_S)
        running = list(self._running.values())
        operation, path, start = min(running, key=lambda one: one[2], default=("", "", moment))
        if moment - start > patience_s:
            self.stalled = (operation, path, moment - start)
        self.is_over = is_late or self.stalled is not None

    def _look(self) -> str:
        """Access the path for the first time; return its type, or an empty string if that is unknown."""
        kind = ""

        def look() -> None:
            nonlocal kind
            try:
                with self._touch("look at", self.path):
                    self.path = os.path.realpath(self.path)
                    mode = os.stat(self.path).st_mode
                if stat.S_ISDIR(mode):
                    with self._touch("list", self.path), os.scandir(self.path) as entries:
                        next(entries, None)
                kind = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special file"
            except OSError as error:
                self.write_record("failed", errno=error.errno, path=self.path)

        self._together(1, look, self.end)
        if kind:
            self.write_record("found", path=self.path, type=kind)
        if kind == "file":
            self.files = [self.path]
            self.write_record("facts", files=1, is_complete=True)
        return kind

    def _list(self, until: float) -> None:
        folders = deque([self.path])
        entries = files = 0
        start = last = now()
        half_time = self.start + (self.end - self.start) / 2

        def has_time() -> bool:
            return now() < (until if len(self.files) >= _ENOUGH_LISTED else half_time)

        def list_next() -> Op | None:
            nonlocal entries, files, last
            if not folders or not has_time():
                return None
            started, before, folder = now(), entries, folders.popleft()
            with self._touch("list", folder), os.scandir(folder) as found:
                for entry in found:
                    last = now()
                    self._running[threading.get_ident()] = ("list", folder, last)
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        files += 1
                        if len(self.files) < _KEPT_FILES:
                            self.files.append(entry.path)
                    if not has_time():
                        # Put the folder back, so that the listing counts as incomplete.
                        folders.appendleft(folder)
                        break
            last = now()
            return Op(started, last, entries - before)

        self._together(1, list_next, self.end)
        is_complete = not folders and not self.errors and not self.is_over
        rate = entries / (last - start) if entries and last > start else None
        self.write_record("facts", listed_entries=entries, files=files, listing_rate=rate, is_complete=is_complete)
        # Shuffle, so that a second probe reads other files, which are probably not cached.
        random.shuffle(self.files)

    def _size(self, until: float) -> list[SizedFile]:
        sized: list[SizedFile] = []
        waiting = deque(self.files)

        def look_at_next() -> Op | None:
            path = _next(waiting)
            if path is None:
                return None
            start = now()
            with self._touch("look at", path):
                about = os.stat(path, follow_symlinks=False)
            if stat.S_ISREG(about.st_mode):
                sized.append((path, about.st_size))
            return Op(start, now(), 0)

        self._together(min(_STAT_THREADS, len(waiting)), look_at_next, until)
        found = list(sized)
        if sum(size <= SMALL_BYTES for _, size in found) < _ENOUGH_FILES:
            self.small_bytes = LARGE_BYTES - 1
        small = [size for _, size in found if size <= self.small_bytes]
        largest = max((size for _, size in found), default=0)
        counts = {"sized_files": len(found), "sized_bytes": sum(size for _, size in found)}
        self.write_record("facts", **counts, small_files=len(small), small_bytes=sum(small), largest_bytes=largest)
        return found

    def _read_small(self, small: list[SizedFile], given: list[int]) -> None:
        """Read small files with each number of threads, each file once; with one thread, also time the opens."""
        for threads, portion in zip(SMALL_LEVELS, given, strict=True):
            if not portion:
                break
            files = deque(small[:portion])
            del small[:portion]

            def read_next(files: deque[SizedFile] = files, threads: int = threads) -> Op | None:
                file = _next(files)
                if file is None:
                    return None
                path, size = file
                start = now()
                descriptor = self._opened(path)
                if threads == 1:
                    self.opens.append(now() - start)
                try:
                    _forget(descriptor)
                    bytes_read = len(block := self._read(descriptor, path, size))
                    while block and bytes_read < size:
                        bytes_read += len(block := self._read(descriptor, path, size - bytes_read))
                finally:
                    os.close(descriptor)
                return Op(start, now(), bytes_read)

            self._write_rates("small", read_next, threads)

    def _open(self, paths: list[str], until: float) -> None:
        """If few files have been opened, open more, one at a time, without reading them; report the latencies."""
        waiting = deque(paths[: max(0, _ENOUGH_FILES - len(self.opens))])

        def open_next() -> Op | None:
            path = _next(waiting)
            if path is None:
                return None
            start = now()
            descriptor = self._opened(path)
            self.opens.append(now() - start)
            os.close(descriptor)
            return Op(start, now(), 0)

        self._together(1, open_next, until)
        if times := sorted(self.opens):
            p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
            self.write_record("facts", open_s=statistics.median(times), open_p95_s=p95)

    def _read_large(self, path: str, count: int, given: list[int]) -> None:
        """Read blocks of one file with each number of concurrent ranges, each block once."""
        # Use random order, since data read ahead for one level must not speed up the next.
        blocks = random.sample(range(count), count)
        descriptors: list[int] = []
        levels = [(ranges, portion) for ranges, portion in zip(LARGE_LEVELS, given, strict=True) if portion]
        unopened = deque(range(levels[-1][0]))

        def open_next() -> Op | None:
            if _next(unopened) is None:
                return None
            start = now()
            descriptors.append(self._opened(path))
            _forget(descriptors[-1])
            return Op(start, now(), 0)

        self._together(levels[-1][0], open_next, self.end)
        for ranges, portion in levels:
            if len(descriptors) < ranges:
                break
            waiting = deque(blocks[:portion])
            del blocks[:portion]
            free = deque(descriptors[:ranges])
            own = threading.local()

            def read_next(waiting: deque[int] = waiting, free: deque[int] = free, own: Any = own) -> Op | None:
                if not hasattr(own, "descriptor"):
                    own.descriptor, own.offset, own.end = free.popleft(), 0, 0
                    # Use a page-aligned buffer, so that no request is split.
                    own.buffer = mmap.mmap(-1, _PIECE_BYTES)
                if own.offset >= own.end:
                    block = _next(waiting)
                    if block is None:
                        return None
                    own.offset, own.end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
                start, offset = now(), own.offset
                # Advance before the read, so that a failed read is not repeated.
                own.offset += _PIECE_BYTES
                with self._touch("read", path):
                    bytes_read = os.preadv(own.descriptor, [own.buffer], offset)
                return Op(start, now(), bytes_read)

            self._write_rates("large", read_next, ranges)

    def _opened(self, path: str) -> int:
        with self._touch("open", path):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def _read(self, descriptor: int, path: str, size: int) -> bytes:
        with self._touch("read", path):
            return os.read(descriptor, min(size, _PIECE_BYTES))

    def _write_rates(self, kind: str, work: Work, threads: int) -> None:
        done, start = self._together(threads, work, self._slice())
        if found := rates(done, start, threads):
            counts = {"reads": len(done), "read_bytes": sum(op.bytes for op in done)}
            quick = sum(op.end - op.start < QUICK_S for op in done)
            self.write_record(
                kind, concurrency=threads, quick_reads=quick, reads_per_s=found[0], bytes_per_s=found[1], **counts
            )


def _next(waiting: deque[T]) -> T | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _forget(descriptor: int) -> None:
    # Drop the file from the page cache, so that the disk is measured.
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Probe the path in the first argument, for the number of seconds in the second argument."""
    probe = Probe(sys.argv[1], float(sys.argv[2]))
    probe.run()
    if probe.stalled is not None:
        operation, path, seconds = probe.stalled
        probe.write_record("stalled", operation=operation, path=path, seconds=seconds)
    probe.write_record("end")
    # Skip the interpreter's finalization, since threads may still be hanging.
    os._exit(0)


if __name__ == "__main__":
    main()

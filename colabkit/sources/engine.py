"""The one reading engine that staging and packing share: concurrency that is measured, retries that are counted."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import random
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeVar, cast

from colabkit._files import translated
from colabkit.environment import usable_cpus
from colabkit.errors import SourceChanged, cannot, check_whole_number
from colabkit.sources.items import Item, Source, broken_archive, changed_item

__all__ = [
    "READ_THREADS",
    "Retries",
    "Threads",
    "check_threads",
    "concurrently",
    "read_blocks",
    "read_item",
    "read_range",
]

Threads: TypeAlias = int | Literal["auto"]
T = TypeVar("T")
R = TypeVar("R")

READ_THREADS = 32
"""Reads in flight where each is waited for: a mount answers a small file in tens of milliseconds."""

_MEASURED_CALLS = 8
_LONG_CALL_S = 1e-3  # decoders that run this long release the interpreter's lock long enough to pay for threads
_TRANSIENT = frozenset({errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN})
_TRIES = 4
_BACK_OFF_S = 0.2


class Retries:
    """Counts the reads that were tried again, from any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        """Count one more."""
        with self._lock:
            self.count += 1

    def pause(self, error: OSError, tries: int) -> None:
        """Count a retry and wait before it, longer each time; raise `error` if it is no use to try again."""
        if error.errno not in _TRANSIENT or tries >= _TRIES:
            raise error
        self.add()
        time.sleep(_BACK_OFF_S * 2**tries * random.uniform(0.5, 1.0))


def check_threads(act: str, threads: Threads) -> None:
    """Raise `InvalidOption` unless `threads` is `"auto"` or a positive whole number."""
    if threads != "auto":
        check_whole_number(act, "threads", threads, 1)


def read_item(source: Source, item: Item, retries: Retries) -> bytes:
    """Return all bytes of an item, exactly as many as listed.

    Errors that mounts recover from (EIO, ENOTCONN, ETIMEDOUT, ESTALE) are tried again, four times in all, with growing
    jittered pauses; each retry is counted.

    Raises:
        SourceChanged: if there are fewer or more bytes than listed.
        BadArchive: if a member of an archive is broken.
        FileFailed: if the file cannot be read.
    """
    return b"".join(read_blocks(source, item, item.size + 1, retries))


def read_blocks(source: Source, item: Item, block_bytes: int, retries: Retries) -> Iterator[bytes]:
    """Yield the bytes of an item in blocks; errors and retries as in `read_item`, resumed at the offset reached."""
    done = 0
    tries = 0
    with translated(f"read {item.path!r} of {source.name!r}"):
        while True:
            try:
                with source.open(item) as file:
                    if done:
                        file.seek(done)
                    while True:
                        wanted = min(block_bytes, item.size + 1 - done)  # one byte too many, to see the file's end
                        block = _read_full(file, wanted)
                        done += len(block)
                        if done > item.size:
                            raise changed_item(source.name, item, done)
                        if block:
                            tries = 0
                            yield block
                        if len(block) < wanted:
                            break
                break
            except zipfile.BadZipFile as error:
                raise broken_archive(source.name, f"{item.path!r}: {error}") from error
            except SourceChanged:
                raise
            except OSError as error:
                tries += 1
                retries.pause(error, tries)
    if done != item.size:
        raise changed_item(source.name, item, done)


def read_range(path: Path, listed: os.stat_result, offset: int, size: int, retries: Retries) -> bytes:
    """Return `size` bytes of a big file from `offset` on; errors and retries as in `read_item`.

    Args:
        path: the file.
        listed: what `stat` said of it before.
        offset: of the first byte.
        size: how many.
        retries: counts them.

    Raises:
        SourceChanged: if size or time of the file are not those listed.
        FileFailed: if it cannot be read.
    """
    tries = 0
    with translated(f"read {str(path)!r}"):
        while True:
            try:
                with path.open("rb", buffering=0) as file:
                    found = os.fstat(file.fileno())
                    file.seek(offset)
                    block = _read_full(cast(BinaryIO, file), size)
                if (found.st_size, found.st_mtime_ns, len(block)) != (listed.st_size, listed.st_mtime_ns, size):
                    raise SourceChanged(
                        cannot(f"read {str(path)!r}", "another size or time", "those found before", "Run it again")
                    )
                return block
            except SourceChanged:
                raise
            except OSError as error:
                tries += 1
                retries.pause(error, tries)


def _read_full(file: BinaryIO, size: int) -> bytes:
    block = file.read(size)
    if len(block) == size or not block:
        return block
    pieces = [block]
    missing = size - len(block)
    while missing and (block := file.read(missing)):
        pieces.append(block)
        missing -= len(block)
    return b"".join(pieces)


def concurrently(function: Callable[[T], R], tasks: Iterable[T], threads: Threads) -> Iterator[R]:
    """Yield `function(task)` for every task as results come, with at most `threads` calls at once.

    `"auto"` measures the first calls: where they mostly wait, as on a mount, there are 32 threads; where each computes
    for long, as many as CPUs; else none but the caller's, since tiny calls only get in each other's way.

    At most two tasks a thread are under way or wait their turn. The first error stops the rest and is raised here;
    leaving the generator early, by an error or Ctrl-C, waits only for the calls under way.
    """
    remaining = iter(tasks)
    if threads == "auto":
        first = list(itertools.islice(remaining, _MEASURED_CALLS))
        wall, cpu = time.perf_counter(), time.thread_time()
        results = [function(task) for task in first]
        threads = _suited_threads(time.perf_counter() - wall, time.thread_time() - cpu, len(first))
        yield from results
    if threads == 1:
        yield from map(function, remaining)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="colabkit-read")
    done: queue.SimpleQueue[Future[R]] = queue.SimpleQueue()
    under_way = 0
    try:
        while True:
            for task in itertools.islice(remaining, 2 * threads - under_way):
                pool.submit(function, task).add_done_callback(done.put)
                under_way += 1
            if not under_way:
                return
            yield done.get().result()
            under_way -= 1
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _suited_threads(wall_s: float, cpu_s: float, calls: int) -> int:
    """Return how many threads suit calls that took this long together in one thread."""
    if not calls or cpu_s < wall_s / 2:
        return READ_THREADS
    return max(1, round(usable_cpus())) if cpu_s / calls >= _LONG_CALL_S else 1

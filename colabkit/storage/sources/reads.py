"""Read one item in one piece, block by block or from several threads, with retries."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from colabkit.foundation import SourceChanged, format_things, translated
from colabkit.storage.sources.concurrency import still_moving
from colabkit.storage.sources.items import Item, Source, broken_archive, changed_item

T = TypeVar("T")

# Maximum number of bytes per read, so that a slow mount answers before the read counts as stalled.
_CHUNK_BYTES = 1 << 20
_TRANSIENT = frozenset({errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN})
_TRIES = 4
_BACK_OFF_S = 0.2
_SHARED_OPEN_S = 2.0
# Coarse clocks, such as those of FAT and of some SMB and FUSE mounts, tick every 2 s or less, at multiples of 0.1 s.
# Those of other file systems tick with the kernel's timer, at least 100 times a second.
_TICK_NS, _COARSE_TICK_NS, _COARSE_UNIT_NS = 10_000_000, 2_000_000_000, 100_000_000
# A modification time further in the future than this was set by a program, since no clock is so far ahead.
_MOST_AHEAD_NS = 86_400 * 10**9


class Retries:
    """A thread-safe counter of retries; `on_retry` is called at each retry."""

    def __init__(self, on_retry: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.on_retry = on_retry
        self._lock = threading.Lock()

    def add(self) -> None:
        """Count one retry."""
        with self._lock:
            self.count += 1
        if (on_retry := self.on_retry) is not None:
            on_retry()

    def pause(self, error: OSError, tries: int) -> None:
        """Count a retry and wait before it, longer each time; raise `error` if it is permanent or no tries are left."""
        if error.errno not in _TRANSIENT or tries >= _TRIES:
            raise error
        self.add()
        time.sleep(_BACK_OFF_S * 2**tries * random.uniform(0.5, 1.0))

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeated after transient errors."""
        tries = 0
        while True:
            try:
                return call()
            except OSError as error:
                tries += 1
                self.pause(error, tries)


def read_ahead(paths: Iterable[str]) -> None:
    """Let Linux read local files in the background, unless it has the first one in memory; skip unreadable files."""
    if not hasattr(os, "RWF_NOWAIT"):
        return
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not number and _is_in_memory(fd):
                    return
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)


def _is_in_memory(fd: int) -> bool:
    """Return whether the system has the start of a file in memory; True if its file system cannot say."""
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def read_item(source: Source, item: Item, retries: Retries) -> bytes:
    """Return all bytes of an item, exactly as many as listed.

    After a transient error of a mount (EIO, ENOTCONN, ETIMEDOUT, ESTALE or EAGAIN), the read is retried from the offset
    reached, with growing, jittered pauses, until four attempts in a row have failed. Each retry is counted. A file that
    ends early although it has the listed size counts as a transient error.

    If the source has `read_at_once()`, a local item of up to 1 MiB is first read with that.

    Raises:
        SourceChanged: if the number of bytes differs from the listing, or the file has changed.
        BadArchive: if a member of an archive is damaged.
        FileFailed: if the file cannot be read.
    """
    at_once: Callable[[Item], bytes | None] | None = getattr(source, "read_at_once", None)
    if at_once is not None and item.size <= _CHUNK_BYTES and not source.can_hang:
        data = at_once(item)
        if data is not None:
            return data
    blocks = list(read_blocks(source, item, _CHUNK_BYTES, retries))
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def read_blocks(source: Source, item: Item, block_bytes: int, retries: Retries) -> Generator[bytes, None, None]:
    """Yield the bytes of an item in consecutive blocks; errors and retries as in `read_item`."""
    done = 0
    tries = 0
    with translated(f"read {item.path!r} of {source.name!r}"):
        while True:
            try:
                with source.open(item) as file:
                    if done:
                        file.seek(done)
                    while True:
                        # Request one more byte, to detect the end of the file.
                        wanted = min(block_bytes, item.size + 1 - done)
                        block = _read_full(file, wanted, item.size - done)
                        done += len(block)
                        if done > item.size:
                            raise changed_item(source.name, item, done)
                        if block:
                            tries = 0
                            still_moving()
                            yield block
                        if len(block) < wanted or (done == item.size and _fd(file) is not None):
                            break
                    check_end(source.name, item, file, done)
                return
            except zipfile.BadZipFile as error:
                raise broken_archive(source.name, f"{item.path!r}: {error}") from error
            except SourceChanged:
                raise
            except OSError as error:
                tries += 1
                retries.pause(error, tries)


def blocks_passed(source: str, item: Item, file: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of an item from `walk()` in blocks; an empty item yields one empty block.

    Raises:
        SourceChanged: if the number of bytes differs from the listing.
    """
    done = 0
    with translated(f"read {item.path!r} of {source!r}"):
        while True:
            wanted = min(block_bytes, item.size - done)
            block = _read_full(file, wanted, wanted)
            done += len(block)
            # Yield the last block only if no data follows it.
            excess = len(file.read(1)) if done == item.size else 0
            if len(block) < wanted or excess:
                raise changed_item(source, item, done + excess)
            yield block
            if done == item.size:
                return


class SharedFile:
    """A large item, opened once for all blocks at `offsets`: the first read opens it, and the last read closes it."""

    def __init__(self, source: Source, item: Item, offsets: Iterable[int]) -> None:
        self._source = source
        self._item = item
        self._left = set(offsets)
        self._lock = threading.Condition()
        self._readers = 0
        self._is_opening = False
        self._file: BinaryIO | None = None
        self._dropped: list[BinaryIO] = []

    @property
    def is_open(self) -> bool:
        """Whether any file is open."""
        return self._file is not None or bool(self._dropped)

    def close(self) -> None:
        """Close all open files."""
        with self._lock:
            files, self._file, self._dropped = [self._file, *self._dropped], None, []
        for file in files:
            if file is not None:
                # Errors on close do not matter, since the file was only read.
                with contextlib.suppress(OSError):
                    file.close()

    def read_into(self, block: memoryview, offset: int, retries: Retries) -> None:
        """Fill `block` with the item's bytes from `offset` on; errors and retries as in `read_item`."""
        with self._lock:
            self._readers += 1
        try:
            with translated(f"read {self._item.path!r} of {self._source.name!r}"):
                self._fill(block, offset, retries)
        finally:
            with self._lock:
                self._readers -= 1
                # An abandoned read may still use the file, so count the readers as well.
                is_done = not self._left and not self._readers
            if is_done:
                self.close()

    def _fill(self, block: memoryview, offset: int, retries: Retries) -> None:
        done = 0
        tries = 0
        while True:
            file = None
            try:
                file = self._opened()
                while done < len(block):
                    got = self._read_some(block[done:], offset + done, file)
                    if not got:
                        check_end(self._source.name, self._item, file, offset + done)
                    done += got
                    tries = 0
                    still_moving()
                self._check_if_last(offset, file)
                return
            except SourceChanged:
                raise
            except OSError as error:
                self._drop(file)
                tries += 1
                retries.pause(error, tries)

    def _opened(self) -> BinaryIO:
        with self._lock:
            if self._file is None and self._is_opening:
                # Wait with a timeout, since the opening thread may hang.
                self._lock.wait(_SHARED_OPEN_S)
            if self._file is not None:
                return self._file
            self._is_opening = True
        try:
            file = self._source.open(self._item)
        finally:
            with self._lock:
                self._is_opening = False
                self._lock.notify_all()
        with self._lock:
            if self._file is None:
                self._file = file
            else:
                self._dropped.append(file)
            return self._file

    def _read_some(self, part: memoryview, offset: int, file: BinaryIO) -> int:
        if (fd := _fd(file)) is not None:
            return os.preadv(fd, [part[:_CHUNK_BYTES]], offset)
        # A file without a descriptor has only one position, so each read opens the item separately.
        with self._source.open(self._item) as own:
            own.seek(offset)
            data = own.read(len(part))
        part[: len(data)] = data
        return len(data)

    def _drop(self, file: BinaryIO | None) -> None:
        """Discard a file, so that the next attempt reopens it: open files do not survive a mount's recovery."""
        with self._lock:
            if file is not None and file is self._file:
                self._file = None
                # Other threads may still be reading from this file, so close it later.
                self._dropped.append(file)

    def _check_if_last(self, offset: int, file: BinaryIO) -> None:
        with self._lock:
            self._left.discard(offset)
            is_last = not self._left
        if is_last:
            check_end(self._source.name, self._item, file, self._item.size)


def check_end(source: str, item: Item, file: BinaryIO, done: int) -> None:
    """Check after the last read that an open file still matches the listing; `done` is the number of bytes read.

    Raises:
        SourceChanged: if its size or time has changed, or, without a descriptor, if `done` is not the listed size.
        OSError: EIO, if it ended early although it has the listed size, as happens on mounts that lost their server.
    """
    fd = _fd(file)
    if fd is None:
        if done != item.size:
            raise changed_item(source, item, done)
        return
    found = os.fstat(fd)
    if not is_as_listed(found, item):
        raise changed_item(source, item, found.st_size)
    if done != item.size:
        raise OSError(errno.EIO, f"it ended after {done:,} of {format_things(item.size, 'byte')}")


def _fd(file: BinaryIO) -> int | None:
    """Return the descriptor of a file made by `open()`; None for others, whose `fileno()` may refer to other data."""
    raw = file.raw if isinstance(file, io.BufferedReader) else file
    return raw.fileno() if isinstance(raw, io.FileIO) else None


def _read_full(file: BinaryIO, size: int, enough: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the file; also accept exactly `enough` bytes from the first read."""
    block = _read_some(file, size)
    if len(block) in (size, enough) or not block:
        return block
    pieces = [block]
    missing = size - len(block)
    while missing and (block := _read_some(file, missing)):
        pieces.append(block)
        missing -= len(block)
    return b"".join(pieces)


def _read_some(file: BinaryIO, size: int) -> bytes:
    block: bytes | None = file.read(size)
    if block is None:
        # An unbuffered file returns None instead of raising if the system call fails with EAGAIN.
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return block


def pread_all(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes of a file from `offset` on, fewer only at its end."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


# Use O_NONBLOCK, so that opening does not block if a pipe has replaced the file.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def open_listed(path: Path, source: str, item: Item, flags: int = 0) -> BinaryIO:
    """Open a file, with additional `flags` for `os.open`; raise `SourceChanged` if it differs from the listing."""
    fd = os.open(path, _FLAGS | flags)
    try:
        found = os.fstat(fd)
        if not is_as_listed(found, item):
            raise changed_item(source, item, found.st_size)
        let_tick_pass(item)
        return cast(BinaryIO, open(fd, "rb", buffering=0))
    except BaseException:
        os.close(fd)
        raise


def read_listed(path: str, item: Item, flags: int = 0) -> bytes | None:
    """Return all bytes of a small local file with few system calls; None if it is unreadable or has changed."""
    let_tick_pass(item)
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError:
        return None
    try:
        data = os.read(fd, item.size + 1)
        return data if len(data) == item.size and is_as_listed(os.fstat(fd), item) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def let_tick_pass(item: Item) -> None:
    """Wait until another change to the file would give it a different modification time.

    Changes within one tick of the file system's clock have the same time, so a file that is read and changed in the
    tick of an earlier change would seem unchanged. The time itself shows whether the clock may be a coarse one.
    """
    age_ns = time.time_ns() - item.mtime_ns
    if age_ns >= _COARSE_TICK_NS or age_ns < -_MOST_AHEAD_NS:
        return
    # Do not wait for a time in the future that a program has set, such as unzip in another time zone.
    if age_ns < 0 < item.ctime_ns < item.mtime_ns - _COARSE_TICK_NS:
        return
    tick_ns = _TICK_NS if item.mtime_ns % _COARSE_UNIT_NS else _COARSE_TICK_NS
    if age_ns < tick_ns:
        # The clock of a remote file system may be ahead.
        time.sleep(min(tick_ns - age_ns, tick_ns) / 1e9)


def is_as_listed(found: os.stat_result, item: Item) -> bool:
    """Return whether an open file is a regular file with the listed size and, if known, modification time."""
    same_time = not item.mtime_ns or found.st_mtime_ns == item.mtime_ns
    return stat.S_ISREG(found.st_mode) and found.st_size == item.size and same_time

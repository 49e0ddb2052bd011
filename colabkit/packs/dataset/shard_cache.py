"""A folder on the local disk with the shards of a remote pack that are needed soonest, within a budget of bytes.

All processes of a machine that open the same pack share the folder. It holds the index and complete, verified shards
under their own names, so it is itself a pack of shards, most of which may be missing. A shard that is being downloaded
is in a separate folder, `NAME.loading`, whose lock the downloading process holds. After a kill, the next process that
needs this shard resumes the download there, and any process that needs the space removes it.

Decisions are made under the lock of the cache folder, which no process holds during a download. A process holds a
shared lock on each shard that it reads, and shards that any process holds are never removed. Therefore, no two
processes download the same shard, and the files never exceed the budget.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from colabkit.foundation import (
    PYTHON,
    BadSource,
    ColabkitError,
    Corrupt,
    FileFailed,
    NotEnoughSpace,
    NotSealed,
    TimedOut,
    cannot,
    file_changes,
    format_bytes,
    format_seconds,
    hold_file,
    is_held,
    is_locked,
    lock_folder,
    locks,
    option,
    translated,
    unlock,
    wait_while_busy,
)
from colabkit.packs.dataset.samples import file_samples
from colabkit.packs.format.layout import PackInfo, Shard
from colabkit.packs.format.pack_file import read_pack
from colabkit.storage import STALLED_S, Address, FileTooLarge, download, sibling_of

DOWNLOADS = 4
"""Number of shards that are downloaded at the same time, so that others arrive while one is requested or verified."""

LOADING_BYTES = 64 << 10
"""Space for the files with which a download resumes."""

_LOADING = ".loading"
# Seconds that a process waits for room before it asks the others to close the shards that they do not read.
_ASK_S = 2.0
_PAGE_BYTES = 4096
# Interval in seconds at which threads check whether a thread of any process has released a lock or fetched a shard.
_POLL_S = 0.01
# Number of samples that are verified between two calls of `on_wait`.
_VERIFIED = 1024


def nothing() -> None:
    """Do nothing: the default of `on_wait`."""


class ShardReader(Protocol):
    """A reader of shards.

    Attributes:
        ranks: for each shard that it needs, by name, its place in the order in which it needs them.
    """

    ranks: Mapping[str, int]

    def close_shards(self) -> None:
        """Close the open shards, so that the cache can remove them."""


class ShardCache:
    """The cache of one remote pack.

    Args:
        info: description of the pack, whose path is that of the index in the cache folder.
        address: address of the remote index.
        most_bytes: the budget in bytes.
    """

    def __init__(self, info: PackInfo, address: Address, most_bytes: int) -> None:
        self.folder = info.path.parent
        self.most_bytes = most_bytes
        self._readers: list[weakref.ref[ShardReader]] = []
        self.address = address
        self._index_bytes = info.path.stat().st_size
        self._lengths = {shard.name: shard.length for shard in info.shards}
        self._failures: dict[str, ColabkitError] = {}

    def least_bytes(self, shards: int) -> int:
        """Return the result of `least_cache_bytes` for this pack."""
        return least_cache_bytes(self._index_bytes, self._lengths.values(), shards)

    def fitting_shards(self) -> int:
        """Return the result of `fitting_shards` for this cache."""
        return fitting_shards(self._index_bytes, self._lengths.values(), self.most_bytes)

    def add(self, reader: ShardReader) -> None:
        """Add a reader of this process, which the cache does not keep alive."""
        self._readers.append(weakref.ref(reader, self._readers.remove))

    def has(self, shard: Shard) -> bool:
        """Return whether the cache holds a shard."""
        return os.path.exists(self.folder / shard.name)

    def hold(self, shard: Shard, on_wait: Callable[[], None]) -> int:
        """Download a shard if necessary, and lock it, so that it is not removed until the descriptor is unlocked.

        Raises:
            NotEnoughSpace: if the disk is full, or other processes hold so many shards that there is no room.
            FetchFailed, TimedOut, Corrupt: if the shard cannot be downloaded.
            FileFailed: if the cache folder cannot be used.
        """
        with translated(f"fetch {shard.name!r}"):
            return self._hold(shard, on_wait)

    def _hold(self, shard: Shard, on_wait: Callable[[], None]) -> int:
        full_since = time.monotonic()
        while True:
            with self._locked(on_wait):
                fd = hold_file(self.folder / shard.name)
            failure = self._failures.pop(shard.name, None)
            if fd is not None:
                # Another thread or process has downloaded the shard since the failure.
                return fd
            if failure is not None:
                raise failure
            outcome = self.fetch(shard, on_wait, is_needed=True)
            if outcome == "full":
                for reader in self._living_readers():
                    reader.close_shards()
                if (waited_s := time.monotonic() - full_since) > STALLED_S:
                    self._check_disk(shard)
                    raise self._full(shard)
                if waited_s > _ASK_S:
                    file_changes.touch(self.folder / locks.LOCK)
                on_wait()
                time.sleep(_POLL_S)
                continue
            if outcome == "busy":
                self._wait_for_download(shard, on_wait)
            full_since = time.monotonic()

    def _wait_for_download(self, shard: Shard, on_wait: Callable[[], None]) -> None:
        """Wait until the thread or process that downloads a shard has finished or failed."""

        def is_busy() -> bool:
            with self._locked(on_wait):
                return is_locked(loading)

        loading = self._loading(shard)
        if not wait_while_busy(loading, is_busy, on_wait, _POLL_S):
            act, stalled = f"fetch {shard.name!r}", "the process that fetches it makes no progress"
            limit = f"data within {format_seconds(locks.FOLDER_STALLED_S)}"
            raise TimedOut(cannot(act, stalled, limit, "End that process"))

    def fetch(
        self, shard: Shard, on_wait: Callable[[], None], *, spared: int = 0, is_needed: bool = False
    ) -> Literal["fetched", "busy", "full"]:
        """Download a shard unless the cache has it; remove shards that are needed later, if necessary.

        Args:
            shard: the shard.
            on_wait: called often; an exception that it raises ends the download, which the next call resumes.
            spared: number of the shards needed soonest, which are not removed unless a reader waits.
            is_needed: whether a reader waits for the shard, so that any shard that is not held may be removed. If not,
                an error is also raised when the shard is needed.

        Returns:
            `"busy"` if another process or thread downloads the shard, `"full"` if there is no room.
        """
        try:
            with translated(f"fetch {shard.name!r}"):
                outcome = self._fetch(shard, on_wait, spared, is_needed)
        except ColabkitError as error:
            if not is_needed:
                self._failures[shard.name] = error
            raise
        if outcome == "fetched":
            self._failures.pop(shard.name, None)
        return outcome

    def _fetch(
        self, shard: Shard, on_wait: Callable[[], None], spared: int, is_needed: bool
    ) -> Literal["fetched", "busy", "full"]:
        loading, fd = self._loading(shard), None
        try:
            with self._locked(on_wait):
                if self.has(shard):
                    return "fetched"
                try:
                    fd = lock_folder(loading)
                except BlockingIOError:
                    return "busy"
                if fd is None:
                    raise _no_locks(self.folder)
                if not self._make_room(shard, spared, is_needed):
                    self._remove_if_empty(loading)
                    return "full"
            self._download(shard, loading, on_wait)
        finally:
            if fd is not None:
                unlock(fd)
        return "fetched"

    def forget_failures(self) -> None:
        """Forget downloads that failed before a reader needed them, so that they are tried again."""
        self._failures.clear()

    def asked_ns(self) -> int:
        """Return a time in nanoseconds that changes when a process asks the others to close shards."""
        try:
            return (self.folder / locks.LOCK).stat().st_mtime_ns
        except OSError:
            return 0

    def discard(self, shard: Shard) -> None:
        """Remove a shard whose local copy is damaged, so that it is downloaded again."""
        with translated(f"remove the damaged {shard.name!r} from the cache"), self._locked(nothing):
            file_changes.remove(self.folder / shard.name)

    def _download(self, shard: Shard, loading: Path, on_wait: Callable[[], None]) -> None:
        path, remote = loading / shard.name, sibling_of(self.address, shard.name)
        act, fault = f"fetch {remote.shown!r}", ""
        # An earlier call may have been interrupted while it verified the file.
        if not path.exists():
            try:
                download(remote, path, shard.length, on_wait)
            except FileTooLarge:
                # Another pack may have been uploaded with the same names.
                fault = "it is larger"
        if fault := fault or self._fault_of(shard, path, on_wait):
            file_changes.remove(path)
            found = f"the file is damaged or a different one ({fault})"
            expected, next_step = f"the shard with the seal {shard.seal[:16]}", "Try again, or upload the pack again"
            raise Corrupt(cannot(act, found, expected, next_step))
        with translated(act), self._locked(on_wait):
            file_changes.rename(path, self.folder / shard.name)
            self._remove_if_empty(loading)

    def _fault_of(self, shard: Shard, path: Path, on_wait: Callable[[], None]) -> str:
        """Check the seal and all samples of a downloaded file; return the reason to reject it, if any."""
        try:
            info = read_pack(path)
            if info.seal != shard.seal:
                return "it has another seal"
            for split in info.splits:
                samples = file_samples(info, split)
                for start in range(0, info.count(split), _VERIFIED):
                    rows = np.arange(start, min(start + _VERIFIED, info.count(split)))
                    if not (matches := samples.matches(rows)).all():
                        return f"sample {start + int(matches.argmin())} of {split} does not match its CRC32"
                    on_wait()
        except (Corrupt, NotSealed, BadSource) as error:
            return str(error) if error.message is None else PYTHON.render(error.message.found)
        return ""

    def _make_room(self, shard: Shard, spared: int, is_needed: bool) -> bool:
        """Remove shards that are needed later until a shard fits in the cache and on the disk; return whether it fits.

        Raises:
            NotEnoughSpace: if the disk lacks space that neither removing shards nor waiting for downloads can free.
        """
        present: dict[str, int] = {}
        used, arriving = _disk_bytes(shard.length) + LOADING_BYTES, 0
        own = self._loading(shard).name
        for entry in os.scandir(self.folder):
            if entry.name in self._lengths:
                present[entry.name] = _disk_bytes(entry.stat().st_size)
            elif not entry.name.endswith(_LOADING):
                used += _disk_bytes(entry.stat().st_size)
            elif entry.name != own and is_locked(Path(entry.path)):
                length = self._lengths[entry.name.removesuffix(_LOADING)]
                used += _disk_bytes(length) + LOADING_BYTES
                arriving += max(0, length - file_changes.disk_bytes(Path(entry.path)))
            elif entry.name != own:
                # The process that downloaded the shard was killed or gave up.
                file_changes.remove(Path(entry.path))
        used += sum(present.values())
        ranks = {name: self._rank(name) for name in (*present, shard.name)}
        kept = -math.inf if is_needed else max(spared - 1, ranks[shard.name])
        latest = sorted((name for name in present if ranks[name] > kept), key=ranks.__getitem__, reverse=True)
        for place, name in enumerate(latest):
            if used <= self.most_bytes:
                rest_bytes = sum(map(present.__getitem__, latest[place:]))
                if not self._can_gain_space(shard, arriving, rest_bytes):
                    break
            if not is_held(self.folder / name):
                file_changes.remove(self.folder / name)
                used -= present.pop(name)
        if used > self.most_bytes or self._has_space(shard, arriving):
            return used <= self.most_bytes
        if not arriving and not self._has_space(shard, -sum(present.values())):
            self._check_disk(shard)
        return False

    def _can_gain_space(self, shard: Shard, arriving: int, removable_bytes: int) -> bool:
        """Return whether the disk lacks space for a shard, and removing so many bytes would be enough."""
        return not self._has_space(shard, arriving) and self._has_space(shard, arriving - removable_bytes)

    def _check_disk(self, shard: Shard, arriving: int = 0) -> None:
        """Raise `NotEnoughSpace` if the disk has no space for a shard and the rest of other downloads."""
        file_changes.check_space(f"fetch {shard.name!r}", shard.length + arriving, self.folder / shard.name)

    def _has_space(self, shard: Shard, arriving: int) -> bool:
        try:
            self._check_disk(shard, arriving)
        except NotEnoughSpace:
            return False
        return True

    def _rank(self, name: str) -> float:
        return min((reader.ranks.get(name, math.inf) for reader in self._living_readers()), default=math.inf)

    def _living_readers(self) -> list[ShardReader]:
        return [reader for reference in tuple(self._readers) if (reader := reference()) is not None]

    def _full(self, shard: Shard) -> NotEnoughSpace:
        found = f"shards in use fill the cache of {format_bytes(self.most_bytes)}"
        next_step = ("Open the pack with a larger ", option("cache"), ", or use it in fewer processes")
        room = f"room for {format_bytes(shard.length)}"
        return NotEnoughSpace(cannot(f"fetch {shard.name!r}", found, room, next_step))

    def _loading(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{_LOADING}"

    def _remove_if_empty(self, loading: Path) -> None:
        # On NFS, the folder remains, because its lock is open.
        with contextlib.suppress(OSError):
            if len(os.listdir(loading)) == 1:
                file_changes.remove(loading)

    @contextmanager
    def _locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        until = time.monotonic() + STALLED_S
        while True:
            try:
                fd = lock_folder(self.folder)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    act, found = f"use the cache {str(self.folder)!r}", "another process does not release its lock"
                    limit = f"a free lock within {format_seconds(STALLED_S)}"
                    raise TimedOut(cannot(act, found, limit, "End that process")) from None
                on_wait()
                time.sleep(_POLL_S)
        if fd is None:
            raise _no_locks(self.folder)
        try:
            yield
        finally:
            unlock(fd)


def cache_bytes(index: int, complete: Iterable[int], loading: Iterable[int]) -> int:
    """Return the size of a cache that holds an index, complete shards and downloads, given the bytes of each."""
    downloads = sum(_disk_bytes(length) + LOADING_BYTES for length in loading)
    return downloads + sum(map(_disk_bytes, complete)) + _disk_bytes(index) + _PAGE_BYTES


def least_cache_bytes(index: int, lengths: Iterable[int], shards: int) -> int:
    """Return the bytes of a cache that can hold any `shards` shards while some of them are being downloaded."""
    largest = sorted(lengths, reverse=True)[:shards]
    return cache_bytes(index, largest[DOWNLOADS:], largest[:DOWNLOADS])


def fitting_shards(index: int, lengths: Collection[int], most_bytes: int) -> int:
    """Return the largest number of shards for which a cache of `most_bytes` is large enough, whichever they are."""
    numbers = range(1, len(lengths) + 1)
    return bisect_right(numbers, most_bytes, key=lambda shards: least_cache_bytes(index, lengths, shards))


def _disk_bytes(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _no_locks(folder: Path) -> FileFailed:
    act, found = f"use the cache {str(folder)!r}", "its file system does not support locks"
    next_step = "Set the environment variable COLABKIT_LOCAL to a folder on a local disk"
    return FileFailed(cannot(act, found, "", next_step))

"""Packs of shards on a remote: `open_remote()` copies the index, and `RemoteSamples` fetches shards into a cache."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from colabkit.foundation import (
    BadSource,
    Corrupt,
    InvalidOption,
    NotSealed,
    call,
    cannot,
    check_bytes,
    file_changes,
    format_bytes,
    format_things,
    is_held,
    local_root,
    lock_folder,
    option,
    partials,
    unlock,
)
from colabkit.packs.dataset.open_split import OpenSplit, read_labels
from colabkit.packs.dataset.samples import JoinedSamples, ShardedSamples, SingleFileSamples
from colabkit.packs.dataset.shard_cache import ShardCache, nothing
from colabkit.packs.format.layout import Indices, PackInfo
from colabkit.packs.format.pack_file import is_pack, read_pack
from colabkit.storage import Address, FileTooLarge, download, file_address

T = TypeVar("T")

_caches: weakref.WeakValueDictionary[tuple[Path, int], ShardCache] = weakref.WeakValueDictionary()
_readers: weakref.WeakSet[RemoteSamples] = weakref.WeakSet()


class RemotePart(NamedTuple):
    """The samples of a remote pack in a dataset, which may be a `Mixture` of several packs.

    Attributes:
        number: place of the pack in the mixture; 0 if the dataset is not a mixture.
        first: row of the first of these samples in the dataset's storage.
        samples: their reader.
        counts: number of samples in each shard, by number, in the order of the samples; None if they are in no such
            order.
    """

    number: int
    first: int
    samples: RemoteSamples
    counts: dict[int, int] | None

    def rows_of(self, rows: Indices) -> Indices:
        """Return those of the dataset's rows that are samples of this pack, counted from its first sample."""
        own = rows - self.first
        return own[(own >= 0) & (own < self.samples.count)]


class RemoteSamples(ShardedSamples):
    """The samples of one split of a remote pack; shards are downloaded into the cache when they are needed.

    Open shards are held, so that no process removes them. Each is released once it is closed and no thread reads it
    anymore.

    Attributes:
        cache: the cache of the pack.
        ranks: for each shard that is needed next, by name, its place in the order in which they are needed.
    """

    def __init__(self, info: PackInfo, split: str, cache: ShardCache) -> None:
        super().__init__(info, split)
        self.cache = cache
        self.ranks: Mapping[str, int] = {}
        cache.add(self)
        _readers.add(self)

    @property
    def count(self) -> int:
        """Number of samples of this split."""
        return self._starts[-1]

    @property
    def count_of_shards(self) -> int:
        """Number of shards with samples of this split."""
        return len(self._shards)

    def need(self, numbers: Iterable[int]) -> None:
        """Announce the order in which the shards will be needed; the cache first removes those needed last."""
        self.ranks = {self._shards[number].name: rank for rank, number in enumerate(numbers)}

    def fetch(self, number: int, on_wait: Callable[[], None], spared: int) -> str:
        """Download a shard ahead of need; see `ShardCache.fetch`."""
        return self.cache.fetch(self._shards[number], on_wait, spared=spared)

    def has(self, number: int) -> bool:
        """Return whether the cache holds a shard."""
        return self.cache.has(self._shards[number])

    def open_for(self, rows: Indices, on_wait: Callable[[], None]) -> None:
        """Open the shards of the given rows after waiting for them; an exception raised by `on_wait` ends the wait."""
        for number in np.unique(self._numbers_of(rows)).tolist():
            if number not in self._opened:
                self._opened[number] = self._opened_and_held(number, on_wait)

    def close_shards(self, but: frozenset[int] = frozenset()) -> None:
        """Close all shards except those in `but`; they are opened again when they are needed."""
        for number in [number for number in tuple(self._opened) if number not in but]:
            self._opened.pop(number, None)

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample; if its CRC does not match, its shard is removed from the cache."""
        return self._read(row, lambda part, at: part.one(at))

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample; if its CRC does not match, its shard is removed."""
        return self._read(row, lambda part, at: part.encoded(at))

    def _read(self, row: int, read: Callable[[SingleFileSamples | JoinedSamples, int], T]) -> T:
        part, start = self._part_of(row)
        try:
            return read(part, row - start)
        except Corrupt as error:
            raise self.damage_error(row) from error

    def maps(self, name: str) -> None:
        """Return None: shards may be removed at any time, so their rows are copied when they are read."""

    def damage_error(self, row: int) -> Corrupt:
        """Return the error for a sample that does not match its CRC; its shard is removed from the cache."""
        number = self._number_of(row)
        self.close_shards()
        self.cache.discard(self._shards[number])
        act = f"read {self._split}[{row}] of {str(self._info.path)!r}"
        found = f"the copy of {self._shards[number].name!r} in the cache was damaged"
        return Corrupt(cannot(act, found, "", "Try again; this fetches the shard again"))

    def forget_shards(self) -> None:
        """Forget the parent's open shards in a forked process, which does not hold them."""
        self._opened.clear()

    def _one_part(self) -> list[int]:
        # Do not download another shard for this. Look for the files only if no shard is open.
        here = itertools.chain(tuple(self._opened), filter(self.has, range(self.count_of_shards)))
        return [next(here, 0)][: self.count_of_shards]

    def _open_shard(self, number: int) -> SingleFileSamples:
        return self._opened_and_held(number, nothing)

    def _opened_and_held(self, number: int, on_wait: Callable[[], None]) -> SingleFileSamples:
        fd = self.cache.hold(self._shards[number], on_wait)
        try:
            found = super()._open_shard(number)
        except (Corrupt, NotSealed, BadSource) as error:
            unlock(fd)
            # The seal was valid after the download, so the shard was damaged later.
            raise self.damage_error(self._starts[number]) from error
        except BaseException:
            unlock(fd)
            raise
        weakref.finalize(found, unlock, fd)
        return found


def _forget_all() -> None:
    for reader in tuple(_readers):
        reader.forget_shards()


os.register_at_fork(after_in_child=_forget_all)


def open_remote(path: str | os.PathLike[str], cache: int | str) -> tuple[PackInfo, partial[OpenSplit]]:
    """Copy the index of a remote pack into the folder of its cache.

    Returns:
        The description of the pack, and the function that opens a split.

    Raises:
        InvalidOption: if `cache` is invalid or smaller than a shard, or the address cannot be used.
        BadSource: if the pack is one file instead of shards.
    """
    address = file_address(path)
    # The path itself may hold a password.
    act = f"open {address.shown!r}"
    most_bytes = check_bytes(act, "cache", cache, "20GiB")
    # The name of the folder must not contain the address, which may hold a password.
    folder = local_root(os.environ).absolute() / "shards" / address.digest()[:16]
    name = address.text.rpartition("/")[2]
    with file_changes.translated(act), partials.Partial(folder / "index") as fetched:
        file_changes.make_folder(fetched.path)
        copy = fetched.path / name
        try:
            download(address, copy, most_bytes)
        except FileTooLarge:
            small = f"the file is larger than the cache of {format_bytes(most_bytes)}"
            larger = ("Use a larger ", option("cache"), ", or download a pack in a single file with ", call("fetch"))
            raise InvalidOption(cannot(act, small, "room for the index and a shard", larger)) from None
        info = read_pack(copy)
        if not info.shards:
            next_step = ("Pack it with ", option("shard_bytes", "256MiB"), ", or download it with ", call("fetch"))
            raise BadSource(cannot(act, "the pack is a single file", "the index of a pack of shards", next_step))
        if missing := [shard.name for shard in info.shards if shard.length <= 0]:
            raise BadSource(cannot(act, f"the index lists no size for {missing[0]!r}", "", "Pack the data again"))
        home = folder / info.seal[:16]
        _remove_others(folder, home)
        file_changes.make_folder(home)
        file_changes.rename(copy, home / name)
    info = read_pack(home / name)
    shards = _cache_of(info, address, most_bytes)
    if most_bytes < (least := shards.least_bytes(1)):
        raise _small_cache(act, most_bytes, least, "one shard")
    return info, partial(_open_split, address, home / name, info.seal, most_bytes)


def check_cache(act: str, cache: ShardCache, shards: int, why: str) -> None:
    """Raise `InvalidOption` unless a cache can hold `shards` shards and those that are being downloaded.

    Args:
        act: verb and object of the message.
        cache: the cache.
        shards: number of shards.
        why: end of the message, which explains the number of shards.
    """
    if cache.most_bytes < (least := cache.least_bytes(shards)):
        raise _small_cache(act, cache.most_bytes, least, f"{format_things(shards, 'shard')}, {why}")


def _small_cache(act: str, most_bytes: int, least: int, what: str) -> InvalidOption:
    found = f"the cache has {format_bytes(most_bytes)}"
    expected = f"at least {format_things(least, 'byte')}, for {what}"
    return InvalidOption(cannot(act, found, expected, ("Open the pack with ", option("cache", least), " or more")))


def _cache_of(info: PackInfo, address: Address, most_bytes: int) -> ShardCache:
    """Return the cache of this process for a pack, which all splits share."""
    key = (info.path, most_bytes)
    if (found := _caches.get(key)) is None:
        found = _caches[key] = ShardCache(info, address, most_bytes)
    return found


def _open_split(address: Address, path: Path, seal: str, most_bytes: int, split: str) -> OpenSplit:
    info = read_pack(path)
    samples = RemoteSamples(info, split, _cache_of(info, address, most_bytes))
    reopen = partial(_open_split, address, path, seal, most_bytes, split)
    return OpenSplit(info, split, samples, read_labels(info, split), reopen)


def _remove_others(folder: Path, home: Path) -> None:
    """Remove the caches of earlier packs at the same address, except those whose shards a process reads."""
    for other in folder.iterdir():
        if other == home or other.name.startswith("."):
            continue
        # Another process may hold the lock. On NFS, an empty folder remains, because its lock is open.
        with suppress(OSError):
            if (fd := lock_folder(other)) is None:
                continue
            try:
                if not any(is_held(path) for path in other.iterdir() if is_pack(path)):
                    file_changes.remove(other)
            finally:
                unlock(fd)

"""Writing what was read: block by block, each noted in a journal once it is there, so that a kill costs one at most."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias
from zlib import crc32

from colabkit.foundation import BadSource, Corrupt, cannot, file_changes
from colabkit.storage.sources.concurrency import Threads
from colabkit.storage.sources.engine import BLOCK_BYTES, Block, Reading, Wanted, block_offsets
from colabkit.storage.sources.items import Item, Source
from colabkit.storage.sources.reads import Retries, SharedFile, read_blocks
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource
from colabkit.storage.staging.local_copy import Crcs, good_blocks, sealed_crcs

Known: TypeAlias = dict[tuple[str, int, int], dict[int, int]]
"""CRC32 by offset of what is written, by path, size and time of the file."""


class Copy:
    """A folder that is being filled with a source's items, in a kept partial.

    A block counts once its line stands in the journal, after its bytes; the next process checks what is noted by its
    CRC32 and goes on from there. Used as a context that closes its files.

    Args:
        source: its name, for messages.
        folder: to fill.
        journal: the file that remembers what is done.
    """

    def __init__(self, source: str, folder: Path, journal: Path) -> None:
        self.folder = folder
        self.crcs: dict[str, dict[int, int]] = {}
        self._source = source
        self._journal = journal
        self._open: dict[str, int] = {}  # descriptors of files that are half written
        self._opening = threading.Lock()
        self._folders: set[str] = set()
        self._journal_end = 0
        self._journal_fd = -1
        self._known: Known = {}

    def __enter__(self) -> Self:
        file_changes.make_folder(self.folder)
        self._journal_fd = (
            file_changes.reopen(self._journal) if self._journal.exists() else file_changes.create(self._journal)
        )
        self._known, self._journal_end = journalled(self._journal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        os.close(self._journal_fd)

    def go_on(self, items: Iterable[Item]) -> list[Item]:
        """Keep what an earlier process wrote and noted of these items, if its bytes are as noted; remove all else.

        Returns:
            The items that are there already, whole; of half-written ones the blocks that are there are in `crcs`.
        """
        wanted = {item.path: item for item in items}
        for path in list(_files_below(self.folder)):
            item = wanted.get(path)
            noted = self._known.get((item.path, item.size, item.mtime_ns)) if item else None
            good = good_blocks(self.folder / path, item, noted) if item and noted else {}
            if good:
                self.crcs[path] = good
            else:
                file_changes.remove(self.folder / path)
        for here, folders, _ in os.walk(self.folder, topdown=False):
            for name in folders:
                with suppress(OSError):  # those with files in them stay
                    file_changes.remove_empty_folder(Path(here, name))
        return [wanted[path] for path in self.crcs if self._is_whole(wanted[path])]

    def take(self, old: Path, items: Iterable[tuple[Item, list[int]]]) -> list[Item]:
        """Give files of an older near copy, if their bytes are as they were sealed, a second name in this one.

        Returns:
            The items that were taken.
        """
        taken = []
        for item, sealed in items:
            crcs = sealed_crcs(item, sealed)
            if item.path in self.crcs or good_blocks(old / item.path, item, crcs) != crcs:
                continue
            self._make_parent(item.path)
            try:
                file_changes.link(old / item.path, self.folder / item.path)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                continue  # it is read again instead
            self._note(item, crcs)
            taken.append(item)
        return taken

    def wanted(self, source: Source, items: Iterable[Item]) -> Iterator[Wanted]:
        """Yield what is still to be read of the items, the large ones in blocks."""
        return _wanted(source, items, self.crcs)

    def again(self, source: Source, items: Iterable[Item]) -> Iterator[Wanted]:
        """Yield all of the items, to be read once more and compared by `check`."""
        return _wanted(source, items, {})

    def place(self, block: Block) -> None:
        """Put the bytes of a block of a large item at their place, from any thread; it counts when it is noted."""
        assert block.data is not None
        file_changes.write_at(self._fd(block.item), block.data, block.offset, self.folder / block.item.path)

    def write(self, block: Block) -> bool:
        """Put a block at its place, if it is not, and note it; return whether its file is whole now."""
        item = block.item
        if block.offset in self.crcs.get(item.path, {}):
            return False
        if item.size <= BLOCK_BYTES:
            assert block.data is not None
            fd = self._create(item)
            try:
                file_changes.write_at(fd, block.data, 0, self.folder / item.path)
            finally:
                os.close(fd)
        elif block.data is not None:
            self.place(block)
        self._note(item, {block.offset: block.crc})
        return item.size <= BLOCK_BYTES or self._ended(item)

    def write_whole(self, item: Item, blocks: Iterable[bytes]) -> None:
        """Write an item from its blocks, in order, all of `BLOCK_BYTES` but the last; it is noted when it is whole."""
        path = self.folder / item.path
        crcs: dict[int, int] = {}
        offset = 0
        fd = self._create(item)
        try:
            for block in blocks:
                file_changes.write_at(fd, block, offset, path)
                crcs[offset] = crc32(block)
                offset += len(block)
        finally:
            os.close(fd)
        self._note(item, crcs)

    def check(self, block: Block) -> None:
        """Compare a block that was read a second time with what lies near.

        Raises:
            Corrupt: if they differ.
        """
        with (self.folder / block.item.path).open("rb", buffering=0) as file:
            near = os.pread(file.fileno(), block.size, block.offset)
        if crc32(near) != block.crc:
            act = f"verify {block.item.path!r} of {self._source!r}"
            found = f"other bytes at offset {block.offset} when read again"
            raise Corrupt(cannot(act, found, "the same bytes twice", "Run it again; if it stays, check the source"))

    def _fd(self, item: Item) -> int:
        with self._opening:
            if item.path not in self._open:
                path = self.folder / item.path
                there = self.crcs.get(item.path, {})
                fd = file_changes.reopen(path) if there else self._create(item)
                self._open[item.path] = fd
                if not there:
                    file_changes.reserve(fd, item.size, path)
            return self._open[item.path]

    def _ended(self, item: Item) -> bool:
        if not self._is_whole(item):
            return False
        os.close(self._open.pop(item.path))
        return True

    def _is_whole(self, item: Item) -> bool:
        return len(self.crcs.get(item.path, {})) == len(block_offsets(item.size))

    def _make_parent(self, path: str) -> None:
        inside = path.rpartition("/")[0]
        if inside not in self._folders:
            file_changes.make_folder(self.folder / inside)
            self._folders.add(inside)

    def _create(self, item: Item) -> int:
        self._make_parent(item.path)
        try:
            return file_changes.create(self.folder / item.path)
        except FileExistsError as error:
            act = f"stage {item.path!r} of {self._source!r}"
            found = "the target's file system takes its name for that of another file"
            raise BadSource(
                cannot(act, found, "names that differ by more than case and accents", "Choose another target")
            ) from error

    def _note(self, item: Item, crcs: Crcs) -> None:
        self.crcs.setdefault(item.path, {}).update(crcs)
        line = json.dumps([item.path, item.size, item.mtime_ns, *(pair for pair in crcs.items())]).encode() + b"\n"
        file_changes.write_at(self._journal_fd, line, self._journal_end, self._journal)
        self._journal_end += len(line)


def _wanted(source: Source, items: Iterable[Item], known: Mapping[str, Crcs]) -> Iterator[Wanted]:
    for item in items:
        there = known.get(item.path, {})
        if item.size <= BLOCK_BYTES:
            if not there:
                yield Wanted(item, 0, item.size)
            continue
        missing = [offset for offset in block_offsets(item.size) if offset not in there]
        file = SharedFile(source, item, missing)
        for offset in missing:
            yield Wanted(item, offset, min(BLOCK_BYTES, item.size - offset), file)


def journalled(journal: Path) -> tuple[Known, int]:
    """Return what a journal says is written, and the length of its whole lines: a kill may have cut the last one."""
    known: Known = {}
    end = 0
    with suppress(OSError, ValueError, TypeError), journal.open("rb") as file:
        for line in file:
            path, size, mtime_ns, *crcs = json.loads(line)
            if not line.endswith(b"\n"):
                break
            known.setdefault((path, size, mtime_ns), {}).update((offset, crc) for offset, crc in crcs)
            end += len(line)
    return known, end


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files in a folder, and of all links."""
    for here, folders, names in os.walk(folder):
        inside = os.path.relpath(here, folder)
        links = (name for name in folders if os.path.islink(os.path.join(here, name)))
        yield from (name if inside == "." else f"{inside}/{name}" for name in (*names, *links))


Archive = ZipSource | TarSource


def extracted(archive: Archive, missing: list[Item], copy: Copy, threads: Threads, retries: Retries) -> Iterator[Item]:
    """Write members of an archive, and yield each when it is whole."""
    if isinstance(archive, TarSource) and archive.is_sequential:
        for item, file in archive.walk({item.path for item in missing}):
            copy.write_whole(item, _blocks_of(file))
            yield item
        return
    with Reading(archive, threads, retries) as reading:
        small = [item for item in missing if item.size <= BLOCK_BYTES]
        for block in reading.blocks(copy.wanted(archive, small)):
            copy.write(block)
            yield block.item
    for item in missing:
        if item.size > BLOCK_BYTES:
            copy.write_whole(item, read_blocks(archive, item, BLOCK_BYTES, retries))
            yield item


def check_extracted(archive: Archive, items: list[Item], copy: Copy, retries: Retries) -> Iterator[Item]:
    """Read all members a second time, compare them with what was written, and yield each.

    Raises:
        Corrupt: if they differ.
    """
    for item, blocks in _all_blocks(archive, items, retries):
        for offset, data in zip(block_offsets(item.size), blocks, strict=False):
            copy.check(Block(item, offset, len(data), crc32(data), data))
        yield item


def _all_blocks(archive: Archive, items: list[Item], retries: Retries) -> Iterator[tuple[Item, Iterator[bytes]]]:
    if isinstance(archive, TarSource) and archive.is_sequential:
        for item, file in archive.walk({item.path for item in items}):
            yield item, _blocks_of(file)
    else:
        for item in items:
            yield item, read_blocks(archive, item, BLOCK_BYTES, retries)


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block

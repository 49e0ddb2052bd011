"""An unfinished local copy: a journal records each block after it is written, so that a later run can resume."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias
from zlib import crc32

from colabkit.foundation import BadSource, Corrupt, cannot, file_changes
from colabkit.storage.sources.concurrency import Threads
from colabkit.storage.sources.engine import BLOCK_BYTES, Block, ConcurrentReader, ReadRequest, block_offsets
from colabkit.storage.sources.items import ArchiveSource, Item, Source
from colabkit.storage.sources.reads import Retries, SharedFile, blocks_passed, read_blocks
from colabkit.storage.staging.local_copy import Crcs, LocalCopy, block_crcs, files_below, good_blocks
from colabkit.storage.staging.places import Target

JOURNAL, ARCHIVE_JOURNAL = "journal", "archive-journal"


class KnownFile(NamedTuple):
    """A file's change time at the source, and the CRC32s of its written blocks by offset."""

    ctime_ns: int
    crcs: dict[int, int]


KnownFiles: TypeAlias = dict[tuple[str, int, int], KnownFile]
"""Known files by path, size and modification time."""


class PartialCopy:
    """A folder that is being filled with a source's items, as a context manager that closes its files.

    A block counts as written once the journal records it. The next process checks the recorded blocks by their CRC32
    and writes only missing and invalid blocks. `source` is the source's name in messages.
    """

    def __init__(self, source: str, folder: Path, journal: Path) -> None:
        self.folder = folder
        self.crcs: dict[str, dict[int, int]] = {}
        self._source = source
        self._journal = journal
        # Descriptors of unfinished large files, by path.
        self._open: dict[str, int] = {}
        self._opening = threading.Lock()
        self._folders: set[str] = set()

    def __enter__(self) -> Self:
        file_changes.make_folder(self.folder)
        make = file_changes.reopen if self._journal.exists() else file_changes.create
        self._journal_fd = make(self._journal)
        self._known, self._journal_end = read_journal(self._journal)
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (*self._open.values(), self._journal_fd):
            os.close(fd)

    def changed(self, items: Iterable[Item], *, is_mount: bool) -> set[str]:
        """Return the paths of recorded items that may have changed since they were recorded; see `changed_paths()`."""
        return changed_paths(items, self._known, is_mount=is_mount)

    def resume(
        self, items: Iterable[Item], changed: Container[str] = (), on_block: Callable[[], None] = lambda: None
    ) -> list[Item]:
        """Keep the valid blocks of these items that an earlier process recorded; remove all other files.

        Args:
            items: all items of the source.
            changed: paths of items that have changed although their sizes and modification times are as recorded.
            on_block: called after each block that is checked.

        Returns:
            The complete items; `crcs` holds the CRC32s of all valid blocks.
        """
        wanted = {item.path: item for item in items}
        for path in [path for path, _ in files_below(self.folder)]:
            item = wanted.get(path)
            noted = self._known.get((item.path, item.size, item.mtime_ns)) if item and path not in changed else None
            good = good_blocks(self.folder / path, item, noted.crcs, on_block) if item and noted else {}
            if good:
                self.crcs[path] = good
            else:
                file_changes.remove(self.folder / path)
        folders = [
            Path(entry) for entry in file_changes.entries_below(self.folder) if entry.is_dir(follow_symlinks=False)
        ]
        for folder in reversed(folders):
            # Keep folders that still contain files; removing these fails.
            with suppress(OSError):
                file_changes.remove_empty_folder(folder)
        return [wanted[path] for path in self.crcs if self._is_complete(wanted[path])]

    def link_from(
        self, old: LocalCopy, items: Iterable[Item], changed: Container[str], on_block: Callable[[], None]
    ) -> list[Item]:
        """Hard-link unchanged, valid files of an earlier local copy into this one; return the linked items.

        The arguments `changed` and `on_block` are those of `resume()`.
        """
        # A file without a modification time may have changed.
        unchanged = {item: item for item in items if item.mtime_ns and item.path not in changed}
        linked = []
        for sealed_item, sealed in old.manifest():
            item = unchanged.get(sealed_item)
            if item is None or item.path in self.crcs or not old.has_good(item, sealed, on_block):
                continue
            self._make_parent(item.path)
            try:
                file_changes.link(old.folder / item.path, self.folder / item.path)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # If hard links are impossible here, the file is read again.
                if error.errno == errno.EXDEV:
                    # The earlier copy is in another file system, so do not check its other files.
                    break
                continue
            self._note(item, block_crcs(item, sealed))
            linked.append(item)
        return linked

    def place(self, block: Block) -> None:
        """Write a block of a large item, from any thread, without recording the block."""
        assert block.data is not None
        file_changes.write_at(self._fd(block.item), block.data, block.offset, self.folder / block.item.path)

    def write(self, block: Block) -> bool:
        """Write a block, unless `place()` has written it, and record it; return whether it completes its file."""
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
        if item.size > BLOCK_BYTES and self._is_complete(item):
            os.close(self._open.pop(item.path))
        return self._is_complete(item)

    def write_blocks(self, item: Item, blocks: Iterable[bytes]) -> None:
        """Write an item from consecutive blocks of `BLOCK_BYTES`, of which the last may be shorter, then record it."""
        path = self.folder / item.path
        crcs: dict[int, int] = {}
        offset = 0
        with file_changes.descriptor(self._create(item)) as fd:
            for block in blocks:
                file_changes.write_at(fd, block, offset, path)
                crcs[offset] = crc32(block)
                offset += len(block)
        self._note(item, crcs)

    def check(self, block: Block, earlier: Container[str] = ()) -> bool:
        """Return whether a block that was read a second time equals the written block.

        Raises:
            Corrupt: if it differs, unless its path is in `earlier`; the written item is then removed.
        """
        with (self.folder / block.item.path).open("rb", buffering=0) as file:
            written = os.pread(file.fileno(), block.size, block.offset)
        is_equal = crc32(written) == block.crc
        if not is_equal and block.item.path not in earlier:
            # It is unknown which of the two reads is right, so remove the item; the next run reads it again.
            self.drop([block.item])
            act = f"verify {block.item.path!r} of {self._source!r}"
            found = f"the bytes at offset {block.offset} were different in the second read"
            raise Corrupt(cannot(act, found, "the same bytes twice", "Try again; if it fails again, check the source"))
        return is_equal

    def drop(self, items: Iterable[Item]) -> None:
        """Remove complete items, so that they can be written again."""
        for item in items:
            file_changes.remove(self.folder / item.path)
            del self.crcs[item.path]

    def _fd(self, item: Item) -> int:
        with self._opening:
            if item.path not in self._open:
                path = self.folder / item.path
                is_begun = bool(self.crcs.get(item.path))
                self._open[item.path] = fd = file_changes.reopen(path) if is_begun else self._create(item)
                if not is_begun:
                    file_changes.reserve(fd, item.size, path)
            return self._open[item.path]

    def _is_complete(self, item: Item) -> bool:
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
        except FileExistsError:
            act = f"stage {item.path!r} of {self._source!r}"
            found = "the target's file system cannot distinguish its name from that of another file"
            expected = "names that differ by more than case and accents"
            raise BadSource(cannot(act, found, expected, "Choose another target")) from None

    def _note(self, item: Item, crcs: Crcs) -> None:
        self.crcs.setdefault(item.path, {}).update(crcs)
        line = json.dumps([item.path, item.size, item.mtime_ns, item.ctime_ns, *crcs.items()]).encode() + b"\n"
        file_changes.write_at(self._journal_fd, line, self._journal_end, self._journal)
        self._journal_end += len(line)


def requests(source: Source, items: Iterable[Item], written: Mapping[str, Crcs]) -> Iterator[ReadRequest]:
    """Yield a request for each small item and for each block of a large item, except those already written."""
    for item in items:
        there = written.get(item.path, {})
        if item.size <= BLOCK_BYTES:
            if not there:
                yield ReadRequest(item, 0, item.size)
            continue
        missing = [offset for offset in block_offsets(item.size) if offset not in there]
        file = SharedFile(source, item, missing)
        for offset in missing:
            yield ReadRequest(item, offset, min(BLOCK_BYTES, item.size - offset), file)


def read_journal(journal: Path) -> tuple[KnownFiles, int]:
    """Return the blocks that a journal records, and the size of its valid lines; a kill may truncate the last line."""
    known: KnownFiles = {}
    end = 0
    with suppress(OSError, ValueError, TypeError), journal.open("rb") as file:
        for line in file:
            path, size, mtime_ns, ctime_ns, *crcs = json.loads(line)
            if not line.endswith(b"\n"):
                break
            key = path, size, mtime_ns
            if key not in known or known[key].ctime_ns != ctime_ns:
                known[key] = KnownFile(ctime_ns, {})
            known[key].crcs.update((offset, crc) for offset, crc in crcs)
            end += len(line)
    return known, end


def changed_paths(items: Iterable[Item], known: KnownFiles, *, is_mount: bool) -> set[str]:
    """Return the paths of known files that may have changed, although size and modification time are equal.

    These are files whose change time differs, and files without any time, which have no known version.
    A different change time shows that a file may have been rewritten and given its earlier modification time, as by
    `rsync -t` or an archive program. With `is_mount`, change times are ignored if those of all known files differ:
    some mounts give files new change times when mounted again.
    """
    pairs = [(item, known[key]) for item in items if (key := (item.path, item.size, item.mtime_ns)) in known]
    changed = {item.path for item, file in pairs if item.ctime_ns != file.ctime_ns and item.ctime_ns and file.ctime_ns}
    unversioned = {item.path for item, _ in pairs if not item.has_version}
    return unversioned if is_mount and len(changed) == len(pairs) else unversioned | changed


@dataclass(frozen=True, slots=True)
class PriorCopy:
    """Files of a source that already exist locally.

    Attributes:
        place: the location of the files; None if there are no files.
        sealed: the finished copy, which `StagingRun.find()` did not accept; None for an interrupted run.
        known: the existing blocks of each file.
        archive_bytes: number of bytes of an archive that were already copied, rounded up to full blocks.
    """

    place: Target | None = None
    sealed: LocalCopy | None = None
    known: KnownFiles = field(default_factory=dict)
    archive_bytes: int = 0

    def lacks(self, item: Item) -> bool:
        """Return whether no data of this file exists locally."""
        return (item.path, item.size, item.mtime_ns) not in self.known

    def without(self, paths: Container[str]) -> PriorCopy:
        """Return a copy that lacks the data of the files at the given paths."""
        return replace(self, known={key: file for key, file in self.known.items() if key[0] not in paths})

    @classmethod
    def find(cls, places: Sequence[Target]) -> Self:
        """Return the sealed copy at one of the targets, or else the data of an interrupted run, if any."""
        for place in places:
            copy = LocalCopy.at(place.path)
            if copy is not None and copy.seal.key == place.key:
                with suppress(Corrupt):
                    known: KnownFiles = {
                        (item.path, item.size, item.mtime_ns): KnownFile(item.ctime_ns, block_crcs(item, crcs))
                        for item, crcs in copy.manifest()
                        if item.mtime_ns
                    }
                    return cls(place, copy, known)
        for place in places:
            folder = place.kept().kept_folder
            if folder.is_dir():
                blocks = sum(len(file.crcs) for file in read_journal(folder / ARCHIVE_JOURNAL)[0].values())
                return cls(place, None, read_journal(folder / JOURNAL)[0], blocks * BLOCK_BYTES)
        return cls()


def extract(
    archive: ArchiveSource, missing: list[Item], copy: PartialCopy, threads: Threads, retries: Retries
) -> Iterator[Item]:
    """Write members of an archive, and yield each member when it is complete."""
    rest = missing
    if not archive.is_sequential:
        rest = [item for item in missing if item.size > BLOCK_BYTES]
        small = [item for item in missing if item.size <= BLOCK_BYTES]
        with ConcurrentReader(archive, threads, retries) as reader:
            for block in reader.blocks(requests(archive, small, copy.crcs)):
                copy.write(block)
                yield block.item
    for item, blocks in _member_blocks(archive, rest, retries):
        copy.write_blocks(item, blocks)
        yield item


def check_extracted(archive: ArchiveSource, items: list[Item], copy: PartialCopy, retries: Retries) -> Iterator[Item]:
    """Read all members a second time, and yield each; raise `Corrupt` if a member differs from the written file."""
    for item, blocks in _member_blocks(archive, items, retries):
        for offset, data in zip(block_offsets(item.size), blocks, strict=False):
            copy.check(Block(item, offset, len(data), crc32(data), data))
        yield item


def _member_blocks(
    archive: ArchiveSource, items: list[Item], retries: Retries
) -> Iterator[tuple[Item, Iterator[bytes]]]:
    if archive.is_sequential:
        for item, file in archive.walk({item.path for item in items}):
            yield item, blocks_passed(archive.name, item, file, BLOCK_BYTES)
    else:
        for item in items:
            yield item, read_blocks(archive, item, BLOCK_BYTES, retries)

"""One staging from plan to publication."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from colabkit import _files, _partials
from colabkit.errors import BadArchive, BadSource, NotEnoughSpace, SourceChanged, TargetExists, cannot
from colabkit.progress import ProgressBar
from colabkit.sources import (
    BLOCK_BYTES,
    STALLED_S,
    Block,
    BucketSource,
    FileSource,
    FolderSource,
    Item,
    Listing,
    ManifestSource,
    Reading,
    Retries,
    Source,
    TarSource,
    Threads,
    ZipSource,
    check_outside,
    read_blocks,
)
from colabkit.staging.copying import Copy, Known, journalled
from colabkit.staging.reports import StagePlan
from colabkit.staging.seal import Crcs, Seal, is_complete, read_manifest, read_seal, write_seal
from colabkit.staging.targets import Target, cache_bytes, check_room, choose, mount_tmpfs

__all__ = ["Job", "find_staged", "origin_of"]

Archive = ZipSource | TarSource

_JOURNAL, _ARCHIVE, _ARCHIVE_JOURNAL = "journal", "archive", "archive-journal"
_INFLATION = 4  # what a compressed archive is taken to grow to until it is near and can be asked
_BUSY_S = 0.2


@dataclass
class Job:
    """What `stage()` was asked for, and how far it is.

    Attributes:
        act: verb and object for messages.
        name: of the source.
        key: tells the source and the way it is staged from all others.
        source: opened.
        places: where the near copy may be, from `candidates`.
        is_asked: whether the user chose the target.
        threads: reads in flight, or `"auto"`.
        verify: `"size"` or `"full"`.
        refresh: look for changes although a near copy is there.
        progress: show a progress bar.
        origin: size and time of a source that is one file on this machine.
        resumed_bytes: what was there already.
        plan: once it is made.
        is_reused: whether a near copy that was there is what was asked for.
    """

    act: str
    name: str
    key: str
    source: Source
    places: list[Target]
    is_asked: bool
    threads: Threads
    verify: Literal["size", "full"]
    refresh: bool
    progress: bool
    origin: tuple[int, int] | None = None
    resumed_bytes: int = 0
    plan: StagePlan | None = None
    is_reused: bool = True
    _retries: Retries = field(default_factory=Retries)
    _bar: ProgressBar | None = None

    def run(self, dry_run: bool) -> tuple[Path, Seal] | None:
        """Stage and return the near copy and its seal; only plan, and return None, if `dry_run`."""
        with Reading(self.source, self.threads, self._retries, self._wait, self._place) as reading:
            left = self._left_by_others()
            if left is not None and not self.refresh and (found := find_staged(self.places, self.key, self.origin)):
                return found
            known = {} if left is None else journalled(left / _JOURNAL)[0]
            is_ahead = not dry_run and not self.refresh
            listing, begun = self._list(reading if is_ahead else None, known)
            target = self._plan(listing, left, known)
            assert self.plan is not None
            check_target(self.act, self.source, target.path, self.key, self.refresh)
            present = self.plan.present_bytes
            check_room(self.act, target, max(0, self.plan.peak_bytes - present), self.plan.cache_bytes)
            if dry_run:
                return None
            mount_tmpfs(self.act, target, self.plan.peak_bytes)
            with _partials.KeptPartial(target.path.parent, self.key, self._on_busy) as kept:
                self._end_bar()
                if not self.refresh and (found := find_staged(self.places, self.key, self.origin)):
                    return found  # another process was faster
                try:
                    return self._fill(kept, target, reading, listing, begun)
                except (OSError, BadArchive) as error:
                    if isinstance(error, NotEnoughSpace | BadArchive) or error.errno in (errno.ENOSPC, errno.EDQUOT):
                        kept.start_over()  # to go on would not help: the space is worth more
                    raise

    def _left_by_others(self) -> Path | None:
        """Return the kept partial of this work, if there is one, once no other process has it."""
        for place in self.places:
            kept = _partials.KeptPartial(place.path.parent, self.key, self._on_busy)
            if kept.kept_folder.is_dir():
                kept.wait_while_busy()
                self._end_bar()
                return kept.kept_folder
        return None

    def _on_busy(self, folder: Path) -> bool:
        """Wait a moment for another process that stages the same; give up on it when nothing moves any more."""
        newest = max((path.stat().st_mtime for path in (folder / _JOURNAL, folder) if path.exists()), default=0.0)
        if time.time() - newest > 2 * STALLED_S:
            return False
        if self._bar is None:
            self._bar = ProgressBar("wait for another stage()", None, " s", self.progress)
        self._bar.wait()
        time.sleep(_BUSY_S)
        return True

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _wait(self) -> None:
        if self._bar is not None:
            self._bar.retried(self._retries.count)
            self._bar.wait()

    def _list(self, ahead: Reading | None, known: Known) -> tuple[Listing, set[str]]:
        """Return the listing, and which items are being read already: those of folders listed early."""
        begun: set[str] = set()

        def on_found(items: list[Item]) -> None:
            bar.advance(len(items))
            if ahead is None:
                return
            for item in items:
                if (item.path, item.size, item.mtime_ns) not in known and ahead.begin(item):
                    begun.add(item.path)

        with ProgressBar("list", None, " files", self.progress) as bar:
            self._bar = bar
            source = self.source
            if isinstance(source, TarSource) and source.can_hang:
                listing = Listing((), ())  # to walk through it is to read all of it
            elif isinstance(source, FolderSource):
                listing = source.list(on_found, self._wait)
            else:
                listing = source.list()
            self._bar = None
        if not listing.items and not isinstance(source, TarSource):
            raise BadSource(cannot(self.act, "no files in it", "at least one", "Check the path"))
        self._check_names(listing.items)
        return listing, begun

    def _check_names(self, items: Iterable[Item]) -> None:
        for item in items:
            if not {"", ".", ".."}.isdisjoint(item.path.split("/")):
                outside = f"a file named {item.path!r}"
                raise BadSource(cannot(self.act, outside, "names inside the source", "Do not use a source like this"))

    def _plan(self, listing: Listing, left: Path | None, known: Known) -> Target:
        source = self.source
        items = _unique(listing)
        staged = sum(item.size for item in items)
        is_archive = isinstance(source, Archive)
        archived = source.archive_bytes if isinstance(source, Archive) else 0
        if is_archive and not listing.items:
            staged = archived * (_INFLATION if isinstance(source, TarSource) and source.is_sequential else 1)
        peak = staged + (archived if source.can_hang else 0)
        target = next((place for place in self.places if left and left.parent == place.path.parent), None)
        target = target and Target(target.name, "an interrupted run began there", target.path, target.mounted_at)
        target = target or choose(self.places, peak, self.is_asked)
        self.plan = StagePlan(
            source=self.name,
            kind=_kind(source),
            files=len(items) or None,
            read_bytes=archived or staged,
            staged_bytes=staged,
            peak_bytes=peak,
            cache_bytes=cache_bytes(source.name, archived or staged),
            present_bytes=_files.disk_bytes(left) if left else 0,
            target=target.name,
            why=target.why,
            path=target.path,
            skipped=listing.skipped,
        )
        return target

    def _fill(
        self, kept: _partials.KeptPartial, target: Target, reading: Reading, listing: Listing, begun: set[str]
    ) -> tuple[Path, Seal]:
        kept.note(key=self.key)
        origin = self.origin
        if origin is None and isinstance(self.source, Archive | FileSource):
            origin = origin_of(self.source.path)
        if isinstance(self.source, Archive):
            if self.refresh and (unchanged := self._unchanged(target, origin)):
                return unchanged
            listing, manifest = self._extract(kept, target)
            if origin_of(self.source.path) != origin:
                found = "the archive was written to meanwhile"
                raise SourceChanged(cannot(self.act, found, "an archive that stays as it is", "Run it again"))
        else:
            items = _unique(listing)
            old = target.path if self.refresh and read_seal(target.path) else None
            with Copy(self.name, kept.data, kept.folder / _JOURNAL) as copy:
                self._copy = copy
                there = copy.go_on(items)
                if old and (seal := read_seal(old)):
                    taken = self._take(copy, old, items)
                    if len(taken) == len(items) == seal.files:
                        kept.start_over()
                        return old, seal  # nothing changed
                    there += taken
                self._copy_items(copy, self.source, reading, items, there, begun)
                if self.verify == "full":
                    self._read_again(copy, self.source, items)
                manifest = [(item, copy.crcs[item.path]) for item in items]
        seal = Seal(
            key=self.key,
            source=self.name,
            target=target.name,
            why=target.why,
            file=listing.items[0].path if isinstance(self.source, FileSource) else "",
            files=len(manifest),
            staged_bytes=sum(item.size for item, _ in manifest),
            retries=listing.retries + self._retries.count,
            skipped=listing.skipped,
            verify=self.verify,
            origin=origin,
            tmpfs=os.fspath(target.mounted_at or ""),
        )
        write_seal(kept.data, seal, manifest)
        check_target(self.act, self.source, target.path, self.key, self.refresh)  # copying took its time
        kept.publish_as(kept.data, target.path, replace=True)
        self.is_reused = False
        return target.path, seal

    def _unchanged(self, target: Target, origin: tuple[int, int] | None) -> tuple[Path, Seal] | None:
        seal = read_seal(target.path)
        is_same = seal is not None and seal.key == self.key and seal.origin == origin
        return (target.path, seal) if seal and is_same and is_complete(target.path, seal) else None

    def _take(self, copy: Copy, old: Path, items: list[Item]) -> list[Item]:
        """Take what did not change from the near copy that is refreshed; an item without a time may have changed."""
        same = {item for item in items if item.mtime_ns}
        return copy.take(old, ((item, crcs) for item, crcs in read_manifest(old) if item in same))

    def _copy_items(
        self, copy: Copy, source: Source, reading: Reading, items: list[Item], there: list[Item], begun: set[str]
    ) -> None:
        self.resumed_bytes += sum(item.size for item in there)
        total = sum(item.size for item in items)
        with ProgressBar("stage", total, "B", self.progress, files=len(items)) as bar:
            self._bar = bar
            bar.advance(sum(item.size for item in there), len(there))
            rest = (item for item in items if item.path not in begun)
            for block in reading.blocks(copy.wanted(source, rest)):
                is_whole = copy.write(block)
                bar.advance(block.size, is_whole)
            self._bar = None

    def _read_again(self, copy: Copy, source: Source, items: list[Item]) -> None:
        """Read the source a second time and compare."""
        total = sum(item.size for item in items)
        with (
            ProgressBar("verify", total, "B", self.progress) as bar,
            Reading(source, self.threads, self._retries, self._wait) as reading,
        ):
            self._bar = bar
            for block in reading.blocks(copy.again(source, items)):
                copy.check(block)
                bar.advance(block.size)
            self._bar = None

    def _extract(self, kept: _partials.KeptPartial, target: Target) -> tuple[Listing, list[tuple[Item, Crcs]]]:
        """Fill the near copy with an archive's members; one that can hang is brought near first, whole."""
        source = self.source
        assert isinstance(source, Archive)
        with closing(type(source)(self._near_archive(kept, source))) as near:
            listing = near.list()
            if not listing.items:
                raise BadSource(cannot(self.act, "no files in it", "at least one", "Check the archive"))
            self._check_names(listing.items)
            items = list(listing.items)
            with Copy(self.name, kept.data, kept.folder / _JOURNAL) as copy:
                there = {item.path for item in copy.go_on(items)}
                missing = sum(item.size for item in items if item.path not in there)
                check_room(self.act, target, missing, 0)
                with ProgressBar("extract", missing, "B", self.progress, files=len(items)) as bar:
                    for size in _extracted(near, items, there, copy, self.threads, self._retries):
                        bar.advance(size, 1)
                return listing, [(item, copy.crcs[item.path]) for item in items]

    def _near_archive(self, kept: _partials.KeptPartial, source: Archive) -> Path:
        if not source.can_hang:
            return source.path
        file = FileSource(source.path)
        items = list(file.list().items)
        with (
            Copy(self.name, kept.folder / _ARCHIVE, kept.folder / _ARCHIVE_JOURNAL) as copy,
            Reading(file, self.threads, self._retries, self._wait) as reading,
        ):
            self._copy_items(copy, file, reading, items, copy.go_on(items), set())
            if self.verify == "full":
                self._read_again(copy, file, items)
        return kept.folder / _ARCHIVE / items[0].path

    def _place(self, block: Block) -> None:
        self._copy.place(block)


def _extracted(
    archive: Archive, items: list[Item], there: set[str], copy: Copy, threads: Threads, retries: Retries
) -> Iterator[int]:
    """Write the members that are not there, and yield their sizes as they are written."""
    missing = [item for item in items if item.path not in there]
    if isinstance(archive, TarSource) and archive.is_sequential:
        for item, file in archive.walk({item.path for item in missing}):
            copy.write_whole(item, _blocks_of(file))
            yield item.size
        return
    with Reading(archive, threads, retries) as reading:
        small = [item for item in missing if item.size <= BLOCK_BYTES]
        for block in reading.blocks(copy.wanted(archive, small)):
            copy.write(block)
            yield block.size
    for item in missing:
        if item.size > BLOCK_BYTES:
            copy.write_whole(item, read_blocks(archive, item, BLOCK_BYTES, retries))
            yield item.size


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def find_staged(places: Iterable[Target], key: str, origin: tuple[int, int] | None = None) -> tuple[Path, Seal] | None:
    """Return the near copy of a source, if there is a whole one in one of these places.

    Args:
        places: where it may be.
        key: of the source and the way it is staged.
        origin: size and time of the source if it is one file on this machine, to tell one that was replaced.
    """
    for place in places:
        seal = read_seal(place.path)
        is_same = seal is not None and seal.key == key and (origin is None or seal.origin in (None, origin))
        if seal and is_same and is_complete(place.path, seal):
            return place.path, seal
    return None


def origin_of(path: Path) -> tuple[int, int]:
    """Return size and time of a file, which tell whether it is still the same."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def check_target(act: str, source: Source, final: Path, key: str, refresh: bool) -> None:
    """Refuse a target that lies inside the source, or holds anything but this near copy.

    Raises:
        BadSource, TargetExists: naming the target.
    """
    check_outside(act, source, final)
    if not os.path.lexists(final):
        return
    seal = read_seal(final)
    is_ours = seal is not None and (seal.key == key or (refresh and seal.source == source.name))
    is_empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
    if not is_ours and not is_empty:
        found = f"{str(final)!r} holds {f'a copy of {seal.source!r}' if seal else 'something else'}"
        raise TargetExists(cannot(act, found, "a free path", "Choose another target or remove it"))


def _unique(listing: Listing) -> list[Item]:
    """Return the files to copy, each once: the rows of a table may name one several times."""
    return list({item.path: item for item in (*listing.items, *listing.extras)}.values())


def _kind(source: Source) -> str:
    kinds = {FileSource: "file", ManifestSource: "table", BucketSource: "bucket", ZipSource: "archive"}
    return kinds.get(type(source), "archive" if isinstance(source, TarSource) else "folder")

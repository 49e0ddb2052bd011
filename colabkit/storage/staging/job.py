"""One staging, from what is near already to publication."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from colabkit.foundation import (
    BadArchive,
    BadSource,
    KeptPartial,
    NotEnoughSpace,
    ProgressBar,
    SourceChanged,
    cannot,
    discard,
    discard_kept,
    wait_while_busy,
)
from colabkit.storage.sources.concurrency import Threads
from colabkit.storage.sources.engine import Block, Reading
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import Item, Listing, Source
from colabkit.storage.sources.reads import Retries
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.staging.local_copy import (
    Crcs,
    Seal,
    carry_over,
    good_blocks,
    is_complete,
    read_manifest,
    read_seal,
    sealed_crcs,
    write_seal,
)
from colabkit.storage.staging.planning import (
    ARCHIVE_JOURNAL,
    JOURNAL,
    Begun,
    begun_at,
    check_listing,
    check_target,
    files_of,
    find_staged,
    kept_identity,
    look_at,
    make_plan,
    origin_of,
)
from colabkit.storage.staging.reports import StagePlan
from colabkit.storage.staging.targets import Target, check_room, choose, give_back_tmpfs, prepare_place, room_of
from colabkit.storage.staging.writer import Archive, Copy, check_extracted, extracted

_ARCHIVE = "archive"
_SIGN_S = 1.0


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
    _kept: KeptPartial | None = None
    _copy: Copy | None = None
    _signed: float = 0.0

    def run(self, dry_run: bool) -> tuple[Path, Seal] | None:
        """Stage and return the near copy and its seal; only plan, and return None, if `dry_run`."""
        if len(self.places) == 1:  # a listing may take minutes
            check_target(self.act, self.source, self.places[0].path, self.key, self.refresh)
        with Reading(self.source, self.threads, self._retries, self._wait, self._place) as reading:
            if not dry_run:
                for place in self.places:
                    wait_for_others(place.path, self.key, self.progress)
                if found := self._found():
                    return found
            begun = begun_at(self.places, self.key)
            listing, ahead = self._list(reading if not dry_run and not begun.is_sealed else None, begun)
            if unchanged := self._unchanged(begun, listing):
                discard_kept(unchanged[0], kept_identity(self.key, unchanged[0]))  # of a run that was killed at its end
                return unchanged
            self.plan, target = make_plan(self.name, self.source, listing, self.places, begun, is_asked=self.is_asked)
            check_target(self.act, self.source, target.path, self.key, self.refresh)
            check_room(self.act, target, self.plan.peak_bytes, self.plan.cache_bytes)
            if dry_run:
                return None
            target = self._prepared(target)
            try:
                with KeptPartial(target.path.parent, kept_identity(self.key, target.path), self._wait) as kept:
                    if found := self._found():
                        return found  # another process was faster
                    return self._fill(kept, target, reading, listing, ahead, begun)
            finally:
                give_back_tmpfs(self.act, target.mounted_at)  # if nothing is in it

    def _found(self) -> tuple[Path, Seal] | None:
        return None if self.refresh else find_staged(self.places, self.key, self.origin, self.verify)

    def _prepared(self, target: Target) -> Target:
        """Make the place ready; where a tmpfs cannot be mounted after all, and none was asked for, take disk."""
        assert self.plan is not None
        try:
            prepare_place(self.act, target, self.plan.peak_bytes)
        except NotEnoughSpace:
            if self.is_asked:
                raise
            target = choose(self.places[-1:], self.plan.peak_bytes, is_asked=True)
            check_room(self.act, target, self.plan.peak_bytes, self.plan.cache_bytes)
        return target

    def _list(self, ahead: Reading | None, begun: Begun) -> tuple[Listing, set[str]]:
        """Return the listing, and which items are being read already: those that were found early."""
        reading: set[str] = set()
        source = self.source

        def on_found(items: list[Item]) -> None:
            self._advance(len(items))
            if ahead is None:
                return
            for item in items:
                if (item.path, item.size, item.mtime_ns) not in begun.known and ahead.begin(item):
                    reading.add(item.path)

        with self._showing("list", None, " files"):
            if isinstance(source, TarSource) and source.can_hang:
                listing = Listing((), ())  # to walk through it is to read all of it
            elif isinstance(source, FolderSource):
                listing = source.list(on_found, self._wait)
            else:
                listing = source.list()
        check_listing(self.act, source, listing)
        look_at(listing)
        return listing, reading

    def _unchanged(self, begun: Begun, listing: Listing) -> tuple[Path, Seal] | None:
        """Return the near copy that is to be refreshed, if the source is as it was and the copy as it was sealed."""
        if not begun.is_sealed or begun.place is None or self.verify == "full":
            return None
        path = begun.place.path
        seal = read_seal(path)
        if seal is None or not is_complete(path, seal):
            return None
        if isinstance(self.source, Archive):
            return (path, seal) if seal.origin == origin_of(self.source.path) else None
        manifest = read_manifest(path)
        items = set(files_of(listing))
        if items != {item for item, _ in manifest} or not all(item.mtime_ns for item in items):
            return None
        is_good = all(len(good_blocks(path / item.path, item, sealed_crcs(item, crcs))) for item, crcs in manifest)
        return (path, seal) if is_good else None

    def _fill(
        self,
        kept: KeptPartial,
        target: Target,
        reading: Reading,
        listing: Listing,
        ahead: set[str],
        begun: Begun,
    ) -> tuple[Path, Seal]:
        self._kept = kept
        try:
            kept.note(path=os.fspath(target.path), identity=kept_identity(self.key, target.path))
            if isinstance(self.source, Archive):
                listing, manifest, origin = self._extract(kept, target)
            else:
                manifest = self._copied(kept, reading, listing, ahead, begun)
                origin = self.origin
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
            for old in self._replaced(target):
                carry_over(self.act, old, kept.data)
            write_seal(kept.data, seal, manifest)
            check_target(self.act, self.source, target.path, self.key, self.refresh)  # copying took its time
            if found := self._found():
                kept.start_over()
                return found  # another process, which was taken for dead, was faster
            kept.publish_as(kept.data, target.path, replace=True)
        except (OSError, BadArchive, BadSource) as error:
            number = error.errno if isinstance(error, OSError) else None
            if isinstance(error, NotEnoughSpace | BadArchive | BadSource) or number in (errno.ENOSPC, errno.EDQUOT):
                kept.start_over()  # to go on would not help: the space is worth more
            raise
        self._tidy(target)
        self.is_reused = False
        return target.path, seal

    def _replaced(self, target: Target) -> list[Path]:
        """Return the near copies that this one takes the place of."""
        paths = dict.fromkeys([*(place.path for place in self.places), target.path])
        return [path for path in paths if (seal := read_seal(path)) and (seal.key == self.key or path == target.path)]

    def _tidy(self, target: Target) -> None:
        """Remove near copies and interrupted runs of the same source in other places: one is enough."""
        for place in self.places:
            if place.path == target.path:
                continue
            discard_kept(place.path, kept_identity(self.key, place.path))
            if (seal := read_seal(place.path)) and seal.key == self.key:
                discard(place.path)
            give_back_tmpfs(self.act, place.mounted_at)

    def _copied(
        self, kept: KeptPartial, reading: Reading, listing: Listing, ahead: set[str], begun: Begun
    ) -> list[tuple[Item, Crcs]]:
        items = files_of(listing)
        with Copy(self.name, kept.data, kept.folder / JOURNAL) as copy:
            self._copy = copy
            there = copy.go_on(items)
            if begun.is_sealed and begun.place is not None:
                there += self._taken(copy, begun.place.path, items)
            self._copy_items(copy, self.source, reading, items, there, ahead)
            if self.verify == "full":
                self._read_again(copy, self.source, items)
            return [(item, copy.crcs[item.path]) for item in items]

    def _taken(self, copy: Copy, old: Path, items: list[Item]) -> list[Item]:
        """Take what did not change from the near copy that is refreshed; an item without a time may have changed."""
        same = {item for item in items if item.mtime_ns}
        return copy.take(old, ((item, crcs) for item, crcs in read_manifest(old) if item in same))

    def _copy_items(
        self, copy: Copy, source: Source, reading: Reading, items: list[Item], there: list[Item], ahead: set[str]
    ) -> None:
        self.resumed_bytes += sum(item.size for item in there)
        with self._showing("stage", sum(item.size for item in items), "B", len(items)):
            self._advance(sum(item.size for item in there), len(there))
            rest = (item for item in items if item.path not in ahead)
            for block in reading.blocks(copy.wanted(source, rest)):
                self._advance(block.size, int(copy.write(block)))

    def _read_again(self, copy: Copy, source: Source, items: list[Item]) -> None:
        """Read the source a second time and compare."""
        with (
            self._showing("verify", sum(item.size for item in items), "B"),
            Reading(source, self.threads, self._retries, self._wait) as reading,
        ):
            for block in reading.blocks(copy.again(source, items)):
                copy.check(block)
                self._advance(block.size)

    def _extract(
        self, kept: KeptPartial, target: Target
    ) -> tuple[Listing, list[tuple[Item, Crcs]], tuple[int, int] | None]:
        """Fill the near copy with an archive's members; one that can hang is brought near first, whole."""
        source = self.source
        assert isinstance(source, Archive)
        path, origin = (source.path, self.origin) if not source.can_hang else self._near_archive(kept, source)
        with closing(type(source)(path)) as near:
            listing = near.list()
            if not listing.items:
                raise BadSource(cannot(self.act, "no files in it", "at least one", "Check the archive"))
            check_listing(self.act, source, listing)
            items = files_of(listing)
            with Copy(self.name, kept.data, kept.folder / JOURNAL) as copy:
                there = {item.path: item for item in copy.go_on(items)}
                missing = [item for item in items if item.path not in there]
                self.resumed_bytes += sum(item.size for item in there.values())
                check_room(self.act, target, room_of(missing), 0)
                with self._showing("extract", sum(item.size for item in missing), "B", len(missing)):
                    for item in extracted(near, missing, copy, self.threads, self._retries):
                        self._advance(item.size, 1)
                if self.verify == "full":
                    with self._showing("verify", sum(item.size for item in items), "B", len(items)):
                        for item in check_extracted(near, items, copy, self._retries):
                            self._advance(item.size, 1)
                manifest: list[tuple[Item, Crcs]] = [(item, copy.crcs[item.path]) for item in items]
        if not source.can_hang and origin is not None and origin_of(source.path) != origin:
            found = "the archive was written to meanwhile"
            raise SourceChanged(cannot(self.act, found, "an archive that stays as it is", "Run it again"))
        return listing, manifest, origin

    def _near_archive(self, kept: KeptPartial, source: Archive) -> tuple[Path, tuple[int, int]]:
        """Bring an archive near; return where it is, and size and time of the one that was read."""
        file = FileSource(source.path)
        (item,) = file.list().items
        with (
            Copy(self.name, kept.folder / _ARCHIVE, kept.folder / ARCHIVE_JOURNAL) as copy,
            Reading(file, self.threads, self._retries, self._wait) as reading,
        ):
            self._copy_items(copy, file, reading, [item], copy.go_on([item]), set())
            if self.verify == "full":
                self._read_again(copy, file, [item])
        return kept.folder / _ARCHIVE / item.path, (item.size, item.mtime_ns)

    def _place(self, block: Block) -> None:
        assert self._copy is not None
        self._copy.place(block)

    @contextlib.contextmanager
    def _showing(self, action: str, total: int | None, unit: str, files: int = 0) -> Iterator[None]:
        with ProgressBar(action, total, unit, self.progress, files) as self._bar:
            yield
        self._bar = None

    def _advance(self, count: int, files: int = 0) -> None:
        assert self._bar is not None
        self._bar.advance(count, files)
        self._sign()

    def _wait(self) -> None:
        if self._bar is not None:
            self._bar.retried(self._retries.count)
            self._bar.wait()
        self._sign()

    def _sign(self) -> None:
        """Show other processes, once a second, that this one goes on."""
        if self._kept is not None and time.monotonic() - self._signed > _SIGN_S:
            self._signed = time.monotonic()
            self._kept.show_life()


def wait_for_others(path: Path, key: str, progress: bool) -> None:
    """Return once no other process stages the same to the same place, or nothing moves there any more."""
    kept = KeptPartial(path.parent, kept_identity(key, path))
    if kept.is_busy():
        with ProgressBar("wait for another stage()", None, " s", progress) as bar:
            wait_while_busy(kept.kept_folder, kept.is_busy, bar.wait)

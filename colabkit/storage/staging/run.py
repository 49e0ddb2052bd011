"""Run `stage()`: check existing local copies, list the source, plan, copy or extract, verify and publish."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Container, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from colabkit.foundation import (
    BadArchive,
    BadSource,
    Corrupt,
    KeptPartial,
    NotEnoughSpace,
    Partial,
    ProgressBar,
    SourceChanged,
    TargetExists,
    cannot,
)
from colabkit.storage.sources.concurrency import Threads
from colabkit.storage.sources.engine import Block, ConcurrentReader
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import STAGE_SEAL, ArchiveSource, Item, Listing, Source, SourceKind
from colabkit.storage.sources.reads import Retries, let_tick_pass
from colabkit.storage.sources.registry import check_outside
from colabkit.storage.staging.local_copy import Crcs, LocalCopy, Origin, Seal, origin_of
from colabkit.storage.staging.partial_copy import (
    ARCHIVE_JOURNAL,
    JOURNAL,
    PartialCopy,
    PriorCopy,
    changed_paths,
    check_extracted,
    extract,
    requests,
)
from colabkit.storage.staging.places import Target, choose, mount_cache_bytes, room_of
from colabkit.storage.staging.reports import StagePlan

_ARCHIVE = "archive"
# Assumed growth of a compressed archive whose members are unknown.
_INFLATION = 4
_SIGN_S = 1.0


@dataclass
class StagingRun:
    """The options and the progress of a `stage()` call.

    Attributes:
        act: verb and object for messages.
        name: name of the source.
        places: possible targets of the local copy, from `candidates`.
        is_requested: whether the user chose the target.
        threads: number of concurrent reads, or `"auto"`.
        verify: `"size"` or `"full"`.
        refresh: whether to look for changes even if a local copy exists.
        progress: whether to show a progress bar.
        origin: result of `origin_of()` for a source that is a single local file.
        resumed_bytes: size of the complete files that were already local.
        plan: the plan, once it is made.
        is_reused: whether the result is an existing local copy.
    """

    act: str
    name: str
    places: list[Target]
    is_requested: bool
    threads: Threads
    verify: Literal["size", "full"]
    refresh: bool
    progress: bool
    origin: Origin | None = None
    resumed_bytes: int = 0
    plan: StagePlan | None = None
    is_reused: bool = True
    _retries: Retries = field(default_factory=Retries)
    _bar: ProgressBar | None = None
    _kept: KeptPartial | None = None
    _copy: PartialCopy | None = None
    _signed: float = 0.0
    _changed: Collection[str] = ()
    _is_mount: bool = False

    @property
    def key(self) -> str:
        """Digest that identifies the source and the options it is staged with."""
        return self.places[0].key

    def find(self) -> LocalCopy | None:
        """Return a complete local copy that can be reused unchanged, or None; always None with `refresh`."""
        for place in () if self.refresh else self.places:
            copy = LocalCopy.at(place.path)
            if copy is None or copy.seal.key != self.key:
                continue
            is_same = self.origin is None or copy.seal.origin in (None, self.origin)
            is_enough = self.verify == "size" or copy.seal.verify == "full"
            if is_same and is_enough and copy.is_complete():
                return copy
        return None

    def run(self, source: Source, dry_run: bool) -> LocalCopy | None:
        """Stage the source and return its local copy; with `dry_run`, None unless an existing copy is unchanged."""
        # Check the target before the listing, which may take minutes.
        if len(self.places) == 1:
            self._check_target(source, self.places[0])
        with ConcurrentReader(source, self.threads, self._retries, self._wait, self._place) as reader:
            if not dry_run:
                for place in self.places:
                    place.wait_for_others(self.progress)
                    # A previous run may have been killed while it replaced the copy.
                    Partial(place.path).reclaim()
                if found := self.find():
                    return found
            prior = PriorCopy.find(self.places)
            listing, ahead = self._list(source, None if dry_run or prior.sealed else reader, prior)
            self._is_mount = source.can_hang and _kind_of(source) != "bucket"
            if not isinstance(source, ArchiveSource):
                # The version of an archive is that of all its members.
                self._changed = changed_paths(_files_of(listing), prior.known, is_mount=self._is_mount)
            prior = prior.without(self._changed)
            if prior.place and (unchanged := self._find_unchanged(source, prior, listing)):
                # A previous run may have been killed before its cleanup.
                prior.place.discard_kept()
                return unchanged
            if prior.sealed and isinstance(source, ArchiveSource):
                # All members are extracted again, so the existing files save no space.
                prior = replace(prior, known={})
            self.plan, target = self._make_plan(source, listing, prior)
            self._check_target(source, target)
            target.check_room(self.act, self.plan.peak_bytes, self.plan.cache_bytes)
            if dry_run:
                return None
            target = self._prepare(target, self.plan)
            try:
                with target.kept(self._wait) as self._kept:
                    # Another process may have finished the copy meanwhile.
                    return self.find() or self._fill(self._kept, target, source, reader, listing, ahead, prior)
            finally:
                # If the run failed, the separate tmpfs may be empty.
                target.give_back_tmpfs(self.act)

    def _check_target(self, source: Source, target: Target) -> None:
        """Refuse a target that is inside the source, or holds anything but a local copy that this run may replace."""
        final = target.path
        check_outside(self.act, source, final)
        if not os.path.lexists(final):
            return
        if os.path.ismount(final):
            point = f"{str(final)!r} is a mount point, which cannot be replaced"
            raise TargetExists(cannot(self.act, point, "a path inside it", f"For example, use {str(final / 'data')!r}"))
        seal = found.seal if (found := LocalCopy.at(final)) else None
        is_ours = seal is not None and (seal.key == self.key or (self.refresh and seal.source == self.name))
        is_empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
        if not is_ours and not is_empty:
            contents = f"a copy of {seal.source!r}" if seal else "other data"
            holds = f"{str(final)!r} holds {contents}"
            raise TargetExists(cannot(self.act, holds, "an unused path", "Choose another target"))

    def _prepare(self, target: Target, plan: StagePlan) -> Target:
        try:
            target.prepare(self.act, plan.peak_bytes)
        except OSError:
            # For example, `/dev/shm` is not writable, `mount` is not installed, or it does not end.
            with suppress(OSError):
                target.give_back_tmpfs(self.act)
            if self.is_requested:
                raise
            why = "a separate tmpfs cannot be mounted" if target.mounted_at else "tmpfs is not writable"
            target = replace(self.places[-1], why=why)
            target.check_room(self.act, plan.peak_bytes, plan.cache_bytes)
            self.plan = replace(plan, target=target.name, why=target.why, path=target.path)
        return target

    def _list(self, source: Source, ahead: ConcurrentReader | None, prior: PriorCopy) -> tuple[Listing, set[str]]:
        """Return the listing, and the paths of items whose reading began before the listing was complete."""
        reading: set[str] = set()

        def on_found(items: list[Item]) -> None:
            self._advance(len(items))
            if ahead is not None:
                reading.update(item.path for item in items if prior.lacks(item) and ahead.begin(item))

        with self._showing("list", None, " files"):
            if _is_listed_later(source):
                listing = Listing((), ())
            elif isinstance(source, FolderSource):
                listing = source.list(on_found, self._wait)
            else:
                listing = source.list()
        self._check_listing(source, listing)
        return listing, reading

    def _check_listing(self, source: Source, listing: Listing) -> None:
        """Refuse a source without files, unless it is listed later, and paths with an empty, `.` or `..` part."""
        if not listing.items and not _is_listed_later(source):
            raise BadSource(cannot(self.act, "it contains no files", "at least one", "Check the path"))
        for item in listing.items:
            if not {"", ".", ".."}.isdisjoint(item.path.split("/")):
                outside = f"it contains a file named {item.path!r}"
                next_step = "Rename the file, or use another source"
                raise BadSource(cannot(self.act, outside, "paths inside the source", next_step))

    def _find_unchanged(self, source: Source, prior: PriorCopy, listing: Listing) -> LocalCopy | None:
        """Return the existing copy if it is valid and the source is unchanged; always None with `verify="full"`."""
        copy = prior.sealed
        if copy is None or self.verify == "full" or not copy.is_complete():
            return None
        items, manifest = set(_files_of(listing)), copy.manifest()
        if isinstance(source, ArchiveSource):
            is_same = copy.seal.origin == origin_of(source.path, can_hang=source.can_hang)
        else:
            is_same = not self._changed and items == {item for item, _ in manifest}
            is_same = is_same and all(item.mtime_ns for item in items)
        return copy if is_same and all(copy.has_good(item, crcs, self._sign) for item, crcs in manifest) else None

    def _make_plan(self, source: Source, listing: Listing, prior: PriorCopy) -> tuple[StagePlan, Target]:
        files = _files_of(listing)
        missing = [item for item in files if prior.lacks(item)]
        staged_bytes, read_bytes = (sum(item.size for item in items) for items in (files, missing))
        present_bytes = staged_bytes - read_bytes if files else prior.archive_bytes
        room = room_of(missing)
        if isinstance(source, ArchiveSource):
            read_bytes = max(0, source.archive_bytes - prior.archive_bytes)
            if not files:
                staged_bytes = room = source.archive_bytes * (_INFLATION if source.is_sequential else 1)
            room += read_bytes if source.can_hang else 0
        if prior.place is None:
            target = choose(self.places, room, self.is_requested)
        elif self.is_requested or prior.place.fits(room):
            why = "the copy to refresh is there" if prior.sealed else "the data of an interrupted run is there"
            target = replace(prior.place, why=why)
        else:
            # The existing data is of no use at another place, where all files need space.
            return self._make_plan(source, listing, PriorCopy())
        plan = StagePlan(
            source=self.name,
            kind=_kind_of(source),
            files=len(files) or None,
            read_bytes=read_bytes,
            staged_bytes=staged_bytes,
            peak_bytes=room,
            cache_bytes=mount_cache_bytes(source, read_bytes),
            present_bytes=present_bytes,
            target=target.name,
            why=target.why,
            path=target.path,
            skipped=listing.skipped,
        )
        return plan, target

    def _fill(
        self,
        kept: KeptPartial,
        target: Target,
        source: Source,
        reader: ConcurrentReader,
        listing: Listing,
        ahead: Collection[str],
        prior: PriorCopy,
    ) -> LocalCopy:
        try:
            if isinstance(source, ArchiveSource):
                listing, manifest, origin = self._extract(kept, target, source)
            else:
                kept.note(path=os.fspath(target.path), identity=target.identity)
                with PartialCopy(self.name, kept.data, kept.folder / JOURNAL) as copy:
                    manifest = self._copy_files(copy, source, reader, _files_of(listing), ahead, prior.sealed)
                origin = self.origin
            seal = Seal(
                key=self.key,
                source=self.name,
                target=target.name,
                why=target.why,
                file=listing.items[0].path if _kind_of(source) == "file" else "",
                files=len(manifest),
                staged_bytes=sum(item.size for item, _ in manifest),
                retries=listing.retries + self._retries.count,
                skipped=listing.skipped,
                verify=self.verify,
                origin=origin,
                tmpfs=os.fspath(target.mounted_at or ""),
            )
            for path in dict.fromkeys([*(place.path for place in self.places), target.path]):
                if (old := LocalCopy.at(path)) and (old.seal.key == self.key or path == target.path):
                    old.carry_over(self.act, kept.data)
            seal.write(kept.data, manifest)
            # Check again, since something may have appeared there during the copy.
            self._check_target(source, target)
            if found := self.find():
                kept.start_over()
                # Another process that had seemed dead has finished first.
                return found
            kept.publish_as(kept.data, target.path, replace=True)
        except (OSError, BadArchive, BadSource, Corrupt) as error:
            number = error.errno if isinstance(error, OSError) else None
            is_corrupt = isinstance(error, Corrupt) and isinstance(source, ArchiveSource)
            is_useless = is_corrupt or isinstance(error, NotEnoughSpace | BadArchive | BadSource)
            if is_useless or number in (errno.ENOSPC, errno.EDQUOT):
                # Resuming would fail again, so free the space.
                kept.start_over()
            raise
        for place in self.places:
            # Keep only one local copy of this source, so remove copies in the other places.
            if place.path != target.path:
                place.clear(self.act, has_moved=True)
        self.is_reused = False
        return LocalCopy(target.path, seal)

    def _copy_files(
        self,
        copy: PartialCopy,
        source: Source,
        reader: ConcurrentReader,
        items: list[Item],
        ahead: Collection[str] = (),
        old: LocalCopy | None = None,
    ) -> list[tuple[Item, Crcs]]:
        self._copy = copy
        # The journal may be newer than the copy with which `self._changed` was found.
        there = copy.resume(items, copy.changed(items, is_mount=self._is_mount), self._sign)
        there += copy.link_from(old, items, self._changed, self._sign) if old else []
        there_bytes, total_bytes = (sum(item.size for item in some) for some in (there, items))
        self.resumed_bytes += there_bytes
        with self._showing("stage", total_bytes, "B", len(items)):
            self._advance(there_bytes, len(there))
            rest = (item for item in items if item.path not in ahead)
            for block in reader.blocks(requests(source, rest, copy.crcs)):
                self._advance(block.size, int(copy.write(block)))
        if self.verify == "full" and (stale := self._find_stale(copy, source, items, {item.path for item in there})):
            copy.drop(stale)
            self.resumed_bytes -= sum(item.size for item in stale)
            with self._showing("stage", sum(item.size for item in stale), "B", len(stale)):
                for block in reader.blocks(requests(source, stale, copy.crcs)):
                    self._advance(block.size, int(copy.write(block)))
            self._find_stale(copy, source, stale)
        return [(item, copy.crcs[item.path]) for item in items]

    def _find_stale(
        self, copy: PartialCopy, source: Source, items: list[Item], earlier: Container[str] = ()
    ) -> list[Item]:
        """Read items a second time, and return those of an earlier run (`earlier`) that differ from the written files.

        Raises:
            Corrupt: if an item that this run has read differs.
        """
        stale: dict[str, Item] = {}
        with (
            self._showing("verify", sum(item.size for item in items), "B"),
            ConcurrentReader(source, self.threads, self._retries, self._wait) as second,
        ):
            for block in second.blocks(requests(source, items, {})):
                if not copy.check(block, earlier):
                    stale[block.item.path] = block.item
                self._advance(block.size)
        return list(stale.values())

    def _extract(
        self, kept: KeptPartial, target: Target, source: ArchiveSource
    ) -> tuple[Listing, list[tuple[Item, Crcs]], Origin | None]:
        """Extract an archive into the local copy; copy it as one file first if the source can hang."""
        file = FileSource(source.path)
        (item,) = file.list().items
        # A mount may give the archive a new change time when it is mounted again.
        origin = (item.size, item.mtime_ns, 0) if source.can_hang else self.origin
        if kept.record and not (item.has_version and kept.record.get("origin") == (origin and list(origin))):
            # The archive may have changed, so discard the files kept from its earlier version.
            kept.start_over()
        kept.note(path=os.fspath(target.path), identity=target.identity, origin=origin)
        path = source.path
        if source.can_hang:
            path = kept.folder / _ARCHIVE / item.path
            with (
                PartialCopy(self.name, kept.folder / _ARCHIVE, kept.folder / ARCHIVE_JOURNAL) as copy,
                ConcurrentReader(file, self.threads, self._retries, self._wait) as reader,
            ):
                self._copy_files(copy, file, reader, [item])
        else:
            let_tick_pass(item)
        with closing(type(source)(path)) as archive:
            listing = archive.list()
            if not listing.items:
                raise BadSource(cannot(self.act, "it contains no files", "at least one", "Check the archive"))
            self._check_listing(source, listing)
            items = _files_of(listing)
            with PartialCopy(self.name, kept.data, kept.folder / JOURNAL) as copy:
                there = {item.path: item for item in copy.resume(items, on_block=self._sign)}
                missing = [item for item in items if item.path not in there]
                self.resumed_bytes += sum(item.size for item in there.values())
                target.check_room(self.act, room_of(missing), 0)
                with self._showing("extract", sum(item.size for item in missing), "B", len(missing)):
                    for item in extract(archive, missing, copy, self.threads, self._retries):
                        self._advance(item.size, 1)
                if self.verify == "full":
                    with self._showing("verify", sum(item.size for item in items), "B", len(items)):
                        for item in check_extracted(archive, items, copy, self._retries):
                            self._advance(item.size, 1)
                manifest: list[tuple[Item, Crcs]] = [(item, copy.crcs[item.path]) for item in items]
        if not source.can_hang and origin is not None and origin_of(source.path) != origin:
            found = "the archive was modified during the extraction"
            raise SourceChanged(cannot(self.act, found, "", "Try again when no program writes to the archive"))
        return listing, manifest, origin

    def _place(self, block: Block) -> None:
        assert self._copy is not None
        self._copy.place(block)

    @contextmanager
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
        """Signal to other processes, at most once a second, that this process is alive."""
        if self._kept is not None and time.monotonic() - self._signed > _SIGN_S:
            self._signed = time.monotonic()
            self._kept.show_life()


def _files_of(listing: Listing) -> list[Item]:
    """Return the files to copy: without a seal, and without duplicates, since table rows may repeat a file."""
    files = {item.path: item for item in (*listing.items, *listing.extras)}
    files.pop(STAGE_SEAL, None)
    return list(files.values())


def _kind_of(source: Source) -> SourceKind:
    return getattr(source, "kind", "folder")


def _is_listed_later(source: Source) -> bool:
    """Return whether listing would read an entire remote archive; if so, its local copy is listed instead."""
    return isinstance(source, ArchiveSource) and source.can_hang and not source.has_directory

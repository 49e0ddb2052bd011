"""A folder tree or a single file as a source, and a wrapper that simulates a slow mount."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, TypeAlias

from colabkit.foundation import DRIVEFS, SHORTCUT_TARGETS, mount_holding, mounts, translated
from colabkit.storage.sources.concurrency import STALLED_S, Calls, answer_of, concurrently, still_moving
from colabkit.storage.sources.items import (
    MOST_LISTINGS,
    STAGE_SEAL,
    Item,
    Listing,
    PathSource,
    Source,
    SourceKind,
    unsteady_listing,
)
from colabkit.storage.sources.level import Level
from colabkit.storage.sources.reads import Retries, open_listed, read_ahead, read_listed

# The source's resolved root folder, followed by the resolved targets of the shortcuts along a path.
_Chain: TypeAlias = tuple[str, ...]
_SHORTCUT_DEPTH = 8
# Number of files whose sizes are read in one call; small, so that the first files can be read while others are
# examined.
_STATS_AT_ONCE = 10
_LISTED_AT_ONCE = 16


class _Folder(NamedTuple):
    """A folder to list, perhaps again.

    Attributes:
        inside: its path inside the source.
        chain: its chain, empty for the root.
        earlier: the names in each of its earlier listings.
    """

    inside: str
    chain: _Chain
    earlier: tuple[frozenset[str], ...] = ()


class _Files(NamedTuple):
    """Files before their sizes are read: paths inside the source, and directory entries or paths."""

    paths: list[str]
    entries: Sequence[os.DirEntry[str] | Path]


class _ListingResult(NamedTuple):
    """The result of listing a folder or of reading file sizes.

    Attributes:
        items: files with their sizes.
        next: further steps.
        skipped: skipped paths, with the reasons.
        is_different: whether the folder was listed before, and every listing had different names.
    """

    items: list[Item]
    next: list[_Folder | _Files]
    skipped: list[tuple[str, str]]
    is_different: bool = False


class FolderSource(PathSource):
    """A folder tree. Drive shortcuts are followed; other links and special files are listed in `skipped`."""

    kind: ClassVar[SourceKind] = "folder"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        holding = mount_holding(os.path.abspath(path), mounts())
        is_drive = holding is not None and holding.fstype == DRIVEFS
        self._shortcut_targets = f"{holding.point}/{SHORTCUT_TARGETS}/" if holding and is_drive else ""

    def list(
        self,
        on_found: Callable[[list[Item]], None] | None = None,
        on_wait: Callable[[], None] | None = None,
        *,
        has_sizes: bool = True,
    ) -> Listing:
        """Return every regular file below the folder; list many folders concurrently if the source can hang.

        A mount can leave names out of a listing. Therefore, if the source can hang, each folder is listed until two of
        its listings agree, and the files of all its listings are returned. Listings that differ count as retries.

        Args:
            on_found: called with each batch of files as soon as they are found.
            on_wait: called several times a second while a source that can hang does not answer.
            has_sizes: False leaves all sizes and times at 0, since a mount takes a request per file to read them.

        Raises:
            SourceChanged: if all listings of a folder differ.
        """
        items: list[Item] = []
        skipped: list[tuple[str, str]] = []
        level = Level(_LISTED_AT_ONCE)
        retries = Retries(level.refused)

        def look(at: _Folder | _Files) -> _ListingResult:
            if isinstance(at, _Folder):
                return retries.run(lambda: self._list_folder(at, has_sizes=has_sizes))
            return retries.run(lambda: _stats_of(at))

        with translated(f"list {self.name!r}"):
            for found in self._walk(look, level, on_wait):
                items += found.items
                skipped += found.skipped
                if found.is_different:
                    retries.add()
                if on_found is not None and found.items:
                    on_found(found.items)
        return Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)), retries.count)

    def completed(self, listing: Listing) -> Listing:
        """Return a listing of this folder with the sizes and times of the files that lack them.

        Args:
            listing: result of `list(has_sizes=False)`, perhaps with the sizes of some files.
        """
        unknown = [item.path for item in listing.items if not item.mtime_ns]
        starts = range(0, len(unknown), _STATS_AT_ONCE)
        batches = [
            _Files(some := unknown[at : at + _STATS_AT_ONCE], [self.path / path for path in some]) for at in starts
        ]
        retries = Retries()
        stalled_s = STALLED_S if self.can_hang else None
        items = [item for item in listing.items if item.mtime_ns]
        skipped = [*listing.skipped]
        with translated(f"list {self.name!r}"):
            for found in concurrently(
                lambda one: retries.run(lambda: _stats_of(one)), batches, "auto", stalled_s=stalled_s
            ):
                items += found.items
                skipped += found.skipped
        return replace(
            listing,
            items=tuple(sorted(items, key=lambda item: item.path)),
            skipped=tuple(sorted(skipped)),
            retries=listing.retries + retries.count,
        )

    def _walk(
        self, look: Callable[[_Folder | _Files], _ListingResult], level: Level, on_wait: Callable[[], None] | None
    ) -> Iterator[_ListingResult]:
        root = _Folder("", ())
        if not self.can_hang:
            waiting: list[_Folder | _Files] = [root]
            while waiting:
                found = look(waiting.pop())
                waiting += found.next
                yield found
            return
        with Calls(look, level, STALLED_S, on_wait) as calls:
            calls.make(root)
            while calls.under_way:
                found = calls.take()
                for at in found.next:
                    calls.make(at)
                yield found

    def _list_folder(self, folder: _Folder, *, has_sizes: bool) -> _ListingResult:
        inside = folder.inside
        # Resolve the path here, where a timeout applies, since the mount may hang.
        chain = folder.chain or (os.path.realpath(self.path),)
        names: list[str] = []
        files: list[os.DirEntry[str]] = []
        folders: list[_Folder | _Files] = []
        skipped: list[tuple[str, str]] = []
        seen = frozenset[str]().union(*folder.earlier)
        entry_names: set[str] = set()
        with self._scanned(inside) as entries:
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                if self.can_hang:
                    # A mount may need longer than the timeout for a folder, although it returns entry after entry.
                    still_moving()
                    entry_names.add(entry.name)
                if path == STAGE_SEAL or entry.name in seen:
                    continue
                # Nearly all entries are files, so test for these first.
                if entry.is_file(follow_symlinks=False):
                    names.append(path)
                    files.append(entry)
                    continue
                is_shortcut = entry.is_symlink() and self._is_shortcut(self.path / path)
                if entry.is_symlink() and not is_shortcut:
                    skipped.append((path, "link"))
                elif entry.is_dir():
                    target = os.path.realpath(self.path / path) if is_shortcut else ""
                    if target in chain or len(chain) > _SHORTCUT_DEPTH:
                        skipped.append((path, "shortcut to a folder that contains it, or nested too deeply"))
                    else:
                        folders.append(_Folder(path, (*chain, target) if is_shortcut else chain))
                elif entry.is_file():
                    names.append(path)
                    files.append(entry)
                elif is_shortcut:
                    skipped.append((path, "shortcut to a missing file or folder"))
                else:
                    skipped.append((path, "special file"))
            if not self.can_hang and has_sizes:
                found = _stats_of(_Files(names, files))
                return _ListingResult(found.items, folders, skipped + found.skipped)
        items = [] if has_sizes else [Item(path, 0) for path in names]
        step = _STATS_AT_ONCE
        starts = range(0, len(names), step) if has_sizes else ()
        batches = [_Files(names[at : at + step], files[at : at + step]) for at in starts]
        # Start another listing before the sizes are read, so that both run concurrently.
        again = self._another_listing(folder, chain, frozenset(entry_names))
        steps = [*folders, *batches] if again is None else [again, *folders, *batches]
        return _ListingResult(items, steps, skipped, is_different=bool(again and folder.earlier))

    def _another_listing(self, folder: _Folder, chain: _Chain, names: frozenset[str]) -> _Folder | None:
        """Return the step that lists a folder on a mount once more.

        Return None for a local folder, or if an earlier listing had the same names.
        """
        if not self.can_hang or names in folder.earlier:
            return None
        earlier = (*folder.earlier, names)
        if len(earlier) == MOST_LISTINGS:
            raise unsteady_listing(f"list {os.path.join(self.name, folder.inside)!r}")
        return _Folder(folder.inside, chain, earlier)

    @contextlib.contextmanager
    def _scanned(self, inside: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Yield a folder's entries. Scanning a local folder by descriptor halves the cost of reading sizes."""
        if self.can_hang:
            with os.scandir(self.path / inside) as entries:
                yield entries
            return
        fd = os.open(self.path / inside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(fd) as local:
                yield local
        finally:
            os.close(fd)

    def open(self, item: Item) -> BinaryIO:
        """Open the item's file without following links other than Drive shortcuts."""
        path = self.path / item.path
        try:
            return open_listed(path, self.name, item, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP or not self._is_shortcut(path):
                raise
            return open_listed(path, self.name, item)

    def read_at_once(self, item: Item) -> bytes | None:
        """Return a small local item's bytes, or None if the file is unreadable or has changed."""
        return read_listed(f"{self.name}/{item.path}", item, os.O_NOFOLLOW)

    def read_ahead(self, items: Sequence[Item]) -> None:
        """Let the system read items in the background, unless it has them in memory."""
        read_ahead(f"{self.name}/{item.path}" for item in items)

    def _is_shortcut(self, link: str | Path) -> bool:
        """Return whether a link is a Drive shortcut: DriveFS shows shortcuts as links into a hidden folder."""
        target = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        return bool(self._shortcut_targets) and target.startswith(self._shortcut_targets)


def _stats_of(files: _Files) -> _ListingResult:
    items: list[Item] = []
    skipped: list[tuple[str, str]] = []
    for path, entry in zip(*files, strict=True):
        try:
            stats = entry.stat()
        except FileNotFoundError:
            skipped.append((path, "removed while the folder was listed"))
        else:
            items.append(Item.of(path, stats))
    return _ListingResult(items, [], skipped)


class FileSource(PathSource):
    """A single file; its item has the file's name."""

    kind: ClassVar[SourceKind] = "file"

    def list(self) -> Listing:
        """Return the file with its current size and times."""
        with translated(f"read {self.name!r}"):
            found = answer_of(self.path.stat, self.can_hang)
        return Listing((Item.of(self.path.name, found),), ())

    def open(self, item: Item) -> BinaryIO:
        """Open the file."""
        return open_listed(self.path, self.name, item)


class SlowSource:
    """A source on a simulated slow mount: `list()` and `open()` first wait `latency_s` seconds."""

    def __init__(self, source: Source, latency_s: float) -> None:
        self.source = source
        self.latency_s = latency_s
        self.name = source.name
        self.can_hang = True

    def list(self) -> Listing:
        """Return the inner source's listing after one latency period."""
        time.sleep(self.latency_s)
        return self.source.list()

    def open(self, item: Item) -> BinaryIO:
        """Open the item after one latency period."""
        time.sleep(self.latency_s)
        return self.source.open(item)

    def close(self) -> None:
        """Close the inner source."""
        self.source.close()

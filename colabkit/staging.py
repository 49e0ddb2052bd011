"""`stage()` brings a far source near: read concurrently, checked, published whole or not at all.

A staged folder holds exactly the source's files, and one more, `.colabkit-stage.json`: its seal, written last. Files
are read many at once, since a mount answers each after a latency; an archive is read in a few big blocks at once, then
extracted from the near copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from colabkit import _files
from colabkit._reports import Report
from colabkit._units import format_bytes, format_count, format_rate, format_seconds
from colabkit.environment import memory_limits, near_folder
from colabkit.errors import (
    BadSource,
    InvalidOption,
    NotSealed,
    SourceMissing,
    TargetExists,
    cannot,
)
from colabkit.mounts import read_file, user_path
from colabkit.progress import ProgressBar
from colabkit.sources import (
    STAGE_SEAL,
    FolderSource,
    Item,
    Retries,
    Source,
    Threads,
    ZipSource,
    check_outside,
    check_threads,
    concurrently,
    open_source,
    read_blocks,
    read_item,
    read_range,
)

__all__ = ["StageReport", "UnstageReport", "stage", "unstage"]

TMPFS = Path("/dev/shm")
RESERVE_BYTES = 2 << 30
"""RAM that staging to tmpfs leaves for training, or a quarter of what is available where that is more."""

_FORMAT = 1
_SMALL_BYTES = 8 << 20  # larger files are copied block by block, so that memory stays bounded
_RANGE_THREADS = 4  # concurrent big reads; two to four fill a mount's bandwidth


@dataclass(frozen=True, repr=False)
class StageReport(Report):
    """What `stage()` did.

    Attributes:
        path: the near copy, ready to be used.
        source: where it came from.
        target: `"tmpfs"`, `"disk"` or `"path"`, with the reason in `why`.
        files: files in the near copy.
        staged_bytes: their bytes.
        seconds: how long it took.
        retries: reads and listings that failed and were tried again.
        skipped: links and special files that were passed over, with the reason.
        reused: whether the near copy was there already.
    """

    path: Path
    source: str
    target: str
    why: str
    files: int
    staged_bytes: int
    seconds: float
    retries: int
    skipped: tuple[tuple[str, str], ...]
    reused: bool

    def _summary(self) -> str:
        size = f"{format_count(self.files)} files, {format_bytes(self.staged_bytes)}"
        if self.reused:
            return f"Already staged at {str(self.path)!r}: {size}; refresh=True copies it again"
        rate = format_rate(self.files / max(self.seconds, 1e-9), "files")
        notes = f", {self.retries} retries" if self.retries else ""
        notes += f", {len(self.skipped)} links or special files skipped" if self.skipped else ""
        return f"Staged {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("target", f"{self.target}: {self.why}"),
            ("retries", str(self.retries)),
            ("skipped", "; ".join(f"{name!r} ({why})" for name, why in self.skipped[:5]) or "nothing"),
        ]


@dataclass(frozen=True, repr=False)
class UnstageReport(Report):
    """What `unstage()` gave back."""

    path: Path
    freed_bytes: int

    def _summary(self) -> str:
        return f"Removed {str(self.path)!r}: {format_bytes(self.freed_bytes)} given back"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("path", str(self.path)), ("freed", format_bytes(self.freed_bytes))]


def stage(
    source: str | os.PathLike[str] | Source,
    to: str | os.PathLike[str] = "auto",
    *,
    threads: Threads = "auto",
    extract: bool = True,
    refresh: bool = False,
    progress: bool = True,
) -> StageReport:
    """Copy a folder or a zip archive to near storage and return where it is.

    Every file's byte count is checked against the listing; the copy appears at its path only when it is whole. A copy
    of the same source that is there already is used again without touching the source.

    Args:
        source: a folder, a zip archive, `samples:digits`, or a `Source`.
        to: `"auto"` takes tmpfs where the bytes fit with room for training, else disk; `"tmpfs"` and `"disk"` insist;
            anything else is the path of the copy.
        threads: reads in flight; `"auto"` measures what the source rewards: up to 32 where each file is waited for.
        extract: false keeps an archive as it is.
        refresh: copy again even if a near copy is there.
        progress: show a progress bar.

    Raises:
        SourceMissing: if nothing is at the source's path.
        BadSource: if the source holds no files, or the target lies inside it.
        BadArchive: if an archive is broken or cut short.
        TargetExists: if something else is at the target's path.
        NotEnoughSpace: before anything is written, where that can be known.
        SourceChanged: if a file's size changed between listing and reading.
    """
    started = time.monotonic()
    opened = open_source(source)
    act = f"stage {opened.name!r}"
    check_threads(act, threads)
    if not isinstance(to, str | os.PathLike):
        needed = "'auto', 'tmpfs', 'disk' or a path"
        raise InvalidOption(cannot(act, f"to={to!r}", needed, "Use to='auto'"))
    keep_archive = isinstance(opened, ZipSource) and not extract
    with _files.translated(act), closing(opened):
        key = _key(opened, keep_archive)
        if not refresh and (found := _find_staged(opened, to, key)):
            return _report(found, started, reused=True)
        listing = opened.list()
        if not listing.items:
            raise BadSource(cannot(act, "no files in it", "at least one", "Check the path"))
        for item in listing.items:
            if not {"", ".", ".."}.isdisjoint(item.path.split("/")):
                outside = f"a file named {item.path!r}"
                raise BadSource(cannot(act, outside, "names inside the source", "Do not use a source like this"))
        archive_bytes = opened.path.stat().st_size if isinstance(opened, ZipSource) else 0
        needed = archive_bytes + (0 if keep_archive else listing.total_bytes)
        target, why, final = _choose(opened, to, key, needed)
        _check_target(act, opened, final, key, refresh)
        _files.check_space(act, needed, final, _tmpfs_room() if target == "tmpfs" else None)
        retries = Retries()
        with _files.Partial(final) as partial:
            _files.make_folder(partial.path)
            if keep_archive:
                assert isinstance(opened, ZipSource)
                files, staged_bytes = 1, archive_bytes
                _copy_in_ranges(opened.path, partial.path / opened.path.name, retries, progress)
            else:
                files, staged_bytes = len(listing.items), listing.total_bytes
                _copy_items(opened, listing.items, partial.path, threads, retries, progress)
            seal = _Seal(
                key=key,
                source=opened.name,
                target=target,
                why=why,
                archive=opened.path.name if keep_archive and isinstance(opened, ZipSource) else "",
                files=files,
                staged_bytes=staged_bytes,
                retries=listing.retries + retries.count,
                skipped=listing.skipped,
            )
            _files.write_file(partial.path / STAGE_SEAL, json.dumps(dataclasses.asdict(seal)).encode())
            _check_target(act, opened, final, key, refresh)  # copying took its time
            partial.publish(replace=True)
    return _report((final, seal), started, reused=False)


def unstage(path: str | os.PathLike[str] | StageReport) -> UnstageReport:
    """Remove a near copy that `stage()` made, and give its space back.

    Args:
        path: the copy's path or the report of `stage()`.

    Raises:
        SourceMissing: if nothing is there.
        NotSealed: if `stage()` did not make it; then it is left alone.
    """
    folder = path.path if isinstance(path, StageReport) else user_path(path, "unstage")
    act = f"unstage {str(folder)!r}"
    if folder.is_file() and (seal := _read_seal(folder.parent)) and seal.archive == folder.name:
        folder = folder.parent  # an archive that was kept as it is
    if not folder.exists():
        raise SourceMissing(cannot(act, "nothing is there", "a staged folder", "Check the path"))
    seal = _read_seal(folder)
    if seal is None:
        raise NotSealed(cannot(act, "no seal of stage() in it", "a staged folder", "Remove it yourself if you mean it"))
    with _files.translated(act):
        _files.discard(folder)
    return UnstageReport(folder, seal.staged_bytes)


@dataclass(frozen=True, slots=True)
class _Seal:
    key: str
    source: str
    target: str
    why: str
    archive: str
    files: int
    staged_bytes: int
    retries: int
    skipped: tuple[tuple[str, str], ...]
    format: int = _FORMAT


def _read_seal(folder: Path) -> _Seal | None:
    try:
        values = json.loads((folder / STAGE_SEAL).read_bytes())
        if values["format"] != _FORMAT:
            return None
        values["skipped"] = tuple((name, why) for name, why in values["skipped"])
        return _Seal(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _report(found: tuple[Path, _Seal], started: float, reused: bool) -> StageReport:
    folder, seal = found
    return StageReport(
        path=folder / seal.archive if seal.archive else folder,
        source=seal.source,
        target=seal.target,
        why=seal.why,
        files=seal.files,
        staged_bytes=seal.staged_bytes,
        seconds=time.monotonic() - started,
        retries=seal.retries,
        skipped=seal.skipped,
        reused=reused,
    )


def _key(source: Source, keep_archive: bool) -> str:
    """Return what tells this source from others; an archive that was replaced is another one."""
    parts = [type(source).__name__, os.path.realpath(source.name), str(keep_archive)]
    if isinstance(source, ZipSource):
        stats = source.path.stat()
        parts += [str(stats.st_size), str(stats.st_mtime_ns)]
    return hashlib.sha256(os.fsencode("\0".join(parts))).hexdigest()


def _places(source: Source, key: str) -> dict[str, Path]:
    name = f"{Path(source.name).stem[:60] or 'root'}-{key[:8]}"  # at most 255 bytes, also of 4 a character
    return {"tmpfs": TMPFS / f"colabkit-{os.getuid()}" / name, "disk": near_folder(os.environ) / name}


def _find_staged(source: Source, to: str | os.PathLike[str], key: str) -> tuple[Path, _Seal] | None:
    places = _places(source, key)
    if to == "auto":
        candidates = list(places.values())
    else:
        candidates = [places[to] if isinstance(to, str) and to in places else user_path(to, f"stage {source.name!r}")]
    for folder in candidates:
        if (seal := _read_seal(folder)) and seal.key == key and _is_complete(folder, seal):
            return folder, seal
    return None


def _is_complete(folder: Path, seal: _Seal) -> bool:
    """Return whether a near copy still has as many files and bytes as it was sealed with."""
    if seal.archive:
        kept = folder / seal.archive
        return kept.is_file() and kept.stat().st_size == seal.staged_bytes
    listing = FolderSource(folder).list()
    return (len(listing.items), listing.total_bytes) == (seal.files, seal.staged_bytes)


def _choose(source: Source, to: str | os.PathLike[str], key: str, needed: int) -> tuple[str, str, Path]:
    """Return the target, the reason and the path of the near copy."""
    places = _places(source, key)
    if to == "auto":
        room = _tmpfs_room()
        target = "tmpfs" if needed <= room else "disk"
        verdict = "fit" if target == "tmpfs" else "do not fit"
        why = f"{format_bytes(needed)} {verdict} in the {format_bytes(room)} of tmpfs that training can spare"
        return target, why, places[target]
    if isinstance(to, str) and to in places:
        return to, "as asked", places[to]
    return "path", "as asked", user_path(to, f"stage {source.name!r}")


def _tmpfs_room() -> int:
    """Return the bytes that staging may put in tmpfs: they are RAM, and training needs some of that too."""
    if not TMPFS.is_dir():
        return 0
    available = memory_limits(read_file).available_bytes
    return max(0, min(_files.free_bytes(TMPFS), available - max(RESERVE_BYTES, available // 4)))


def _check_target(act: str, source: Source, final: Path, key: str, refresh: bool) -> None:
    check_outside(act, source, final)
    if not os.path.lexists(final):
        return
    seal = _read_seal(final)
    is_ours = seal is not None and (seal.key == key or (refresh and seal.source == source.name))
    is_empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
    if not is_ours and not is_empty:
        found = f"{str(final)!r} holds {f'a copy of {seal.source!r}' if seal else 'something else'}"
        raise TargetExists(cannot(act, found, "a free path", "Choose another target or remove it"))


def _copy_items(
    source: Source, items: tuple[Item, ...], folder: Path, threads: Threads, retries: Retries, progress: bool
) -> None:
    """Copy all items into `folder`; an archive is brought near first, in big blocks, and inflated from there."""
    if isinstance(source, ZipSource):
        near = folder / STAGE_SEAL  # the one name that no item has; the seal takes it afterwards
        _copy_in_ranges(source.path, near, retries, progress)
        with closing(ZipSource(near)) as archive:
            _copy_items_as_they_are(archive, items, folder, threads, retries, progress)
        _files.remove(near)
    else:
        _copy_items_as_they_are(source, items, folder, threads, retries, progress)


def _copy_items_as_they_are(
    source: Source, items: tuple[Item, ...], folder: Path, threads: Threads, retries: Retries, progress: bool
) -> None:
    for inside in sorted({item.path.rpartition("/")[0] for item in items}):
        _files.make_folder(folder / inside)

    def copy(item: Item) -> int:
        path = folder / item.path
        if item.size <= _SMALL_BYTES:
            _files.write_file(path, read_item(source, item, retries))
            return 1
        fd = _files.create(path)
        try:
            offset = 0
            for block in read_blocks(source, item, _SMALL_BYTES, retries):
                _files.write_at(fd, block, offset, path)
                offset += len(block)
        finally:
            os.close(fd)
        return 1

    with ProgressBar("stage", len(items), " files", progress) as bar:
        for done in concurrently(copy, items, threads):
            bar.advance(done)


def _copy_in_ranges(source: Path, target: Path, retries: Retries, progress: bool) -> None:
    """Copy one big file by several concurrent ranges; it must not change meanwhile."""
    listed = source.stat()
    fd = _files.create(target)

    def copy(offset: int) -> int:
        size = min(_SMALL_BYTES, listed.st_size - offset)
        _files.write_at(fd, read_range(source, listed, offset, size, retries), offset, target)
        return size

    try:
        _files.reserve(fd, listed.st_size, target)
        with ProgressBar("stage", listed.st_size, "B", progress) as bar:
            for done in concurrently(copy, range(0, listed.st_size, _SMALL_BYTES), _RANGE_THREADS):
                bar.advance(done)
    finally:
        os.close(fd)

"""Publish finished files and folders to slow mounts.

`publish()` and checkpoints write a file to a mount in three steps: `write_blocks()` under a hidden name,
`check_written()`, and a rename.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    Corrupt,
    ProgressBar,
    Report,
    SourceChanged,
    SourceMissing,
    TargetExists,
    call,
    can_hang,
    cannot,
    check_one_of,
    checked_call,
    file_changes,
    format_bytes,
    format_seconds,
    format_things,
    interruptible,
    mounts,
    partials,
    user_path,
)
from colabkit.storage.addresses import local_target
from colabkit.storage.shard_index import listed_shards
from colabkit.storage.slow_mount import MoveCallback, SlowMount
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import Item, mode_of
from colabkit.storage.sources.reads import Retries, read_blocks
from colabkit.storage.staging.reports import first_skipped

MOVED_BLOCK_BYTES = 4 << 20
"""Block size, in bytes, for copying files."""

PUBLISH_STALLED_S = 600.0
"""Seconds to wait for each operation of a mount; `SlowMount.call()` adds time for large and for many files."""


@dataclass(frozen=True, repr=False)
class PublishReport(Report):
    """The report of `publish()`.

    Attributes:
        path: the published file or folder.
        published_bytes: total size of the published files.
        seconds: duration of the call.
        replaced: whether an earlier version was replaced.
        is_sent: False on a remote mount, which may upload the bytes later; otherwise True.
        checked: the check after writing: `"all bytes read back"` or `"sizes compared"`.
        skipped: pairs of a skipped path and the reason.
        retries: number of retries of reads and listings.
    """

    path: Path
    published_bytes: int
    seconds: float
    replaced: bool
    is_sent: bool
    checked: str
    skipped: tuple[tuple[str, str], ...]
    retries: int

    def _summary(self) -> str:
        size, rate = map(format_bytes, (self.published_bytes, self.published_bytes / max(self.seconds, 1e-9)))
        action = f"{'Replaced' if self.replaced else 'Published'} {str(self.path)!r}: {size}"
        later = "" if self.is_sent else f"; on Drive, {self._words.render(call('flush'))} waits for the upload"
        notes = f", {format_things(self.retries, 'retry')}" if self.retries else ""
        notes += f", {format_things(len(self.skipped), 'path')} skipped" if self.skipped else ""
        return f"{action} in {format_seconds(self.seconds)} ({rate}/s, {self.checked}{notes}{later})"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("bytes", format_bytes(self.published_bytes)),
            ("checked", self.checked),
            ("uploaded", "yes" if self.is_sent else "perhaps later"),
            ("retries", str(self.retries)),
            ("skipped", first_skipped(self.skipped)),
        ]


@interruptible("Publishing", "Run the same call again to finish.")
@checked_call()
def publish(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    verify: Literal["size", "full"] = "full",
    progress: bool = True,
) -> PublishReport:
    """Copy a finished file or folder to a slow mount, such as `drive:`, and report its final path.

    The copy is written under a hidden name in the destination folder, synced, compared and renamed. If the process is
    killed at any time, the final path of a file holds the complete old or the complete new file. Replacing a folder
    takes two renames: a kill between them leaves the old folder under a hidden name in the same directory, and the next
    call first restores it. For the index of a pack of shards, the shards are copied to the same folder, one after the
    other, and the index last; a kill between them can leave an old index beside new shards. Special files and links
    (except Drive shortcuts) inside a folder are skipped and reported. Empty folders are skipped. Drive mounts upload
    files later: call `flush()` to wait for the upload.

    Args:
        path: a file, for example a pack, or a folder.
        to: the final path or, with a slash at its end, the folder in which the copy keeps the name of `path`. A file
            also keeps its name in an existing folder. A folder also keeps its name if `to` is the root of a mount or a
            link to a folder. An existing file at the final path is replaced. An existing folder is replaced only by a
            folder, and only if each of its files has the path of a published file, so no other file is removed.
        verify: `"full"` reads the copy back and compares all bytes; `"size"` compares only the sizes.
        progress: show a progress bar.

    Returns:
        The final path, the size, and the check that was made.

    Raises:
        InvalidOption: if an argument is invalid.
        NotMounted: if a path begins with `drive:` and Drive is not mounted.
        SourceMissing: if `path`, or a shard of a pack, does not exist.
        BadSource: if `path` is neither a file nor a folder.
        SourceChanged: if the source changes during the copy.
        TargetExists: if the target is a folder and the source is a file or vice versa, if the target is a folder with
            other files, or if source and target are the same or one contains the other.
        NotEnoughSpace: if the copy does not fit; raised before any file is written if the free space is known.
        FileFailed: if the source cannot be read or the target cannot be written.
        Corrupt: if the size of a copied file, or the bytes read back, are wrong.
        TimedOut: if the source does not respond, or the target does not respond for ten minutes, plus one second for
            every 10 MB of the largest file and for every 10 files. The unfinished copy then stays under a hidden name
            until the target responds again.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> published = colabkit.publish(packed.path, "saved/")
        >>> published.published_bytes == packed.pack_bytes
        True
    """
    return publish_watched(path, to, lambda _: None, verify=verify, progress=progress)


def publish_watched(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    watch: Callable[[int], None],
    *,
    verify: Literal["size", "full"] = "full",
    progress: bool = False,
) -> PublishReport:
    """Do the work of `publish()`, and call `watch` with the number of bytes that were written or read back.

    `watch` is also called with 0 several times a second while the target does not answer. It may raise an error to stop
    the work; nothing is then left at the target. It may be called in other threads.
    """
    started = time.monotonic()
    act = f"publish {str(path)!r}"
    check_one_of(act, "verify", verify, ("size", "full"))
    table, retries = mounts(), Retries()
    with file_changes.translated(act):
        local = Path(os.path.abspath(user_path(path, act)))
        target = Path(os.path.abspath(local_target(to, act)))
        source = answer_of(lambda: _source_at(act, local), can_hang(str(local), table))
        listing = source.list()
        shards = answer_of(lambda: listed_shards(act, local), source.can_hang) if isinstance(source, FileSource) else []
        items = [*listing.items, *(item for shard in shards for item in shard.list().items)]
        published_bytes = sum(item.size for item in items)
        moved_bytes = published_bytes * (2 if verify == "full" else 1)
        with ProgressBar("publish", moved_bytes, "B", progress, files=len(items)) as bar:

            def advance(size: int, files: int) -> None:
                bar.advance(size, files)
                watch(size)

            def wait() -> None:
                bar.wait()
                watch(0)

            is_inside = os.fspath(to).endswith(("/", ":"))
            work = _Publication(act, source, listing.items, verify == "full", is_inside, advance, retries, shards)
            final, is_replaced = SlowMount(str(target), PUBLISH_STALLED_S).call(
                act,
                lambda moved: work.run(target, moved),
                largest_bytes=max((item.size for item in items), default=0),
                files=len(items),
                on_wait=wait,
            )
    return PublishReport(
        path=final,
        published_bytes=published_bytes,
        seconds=time.monotonic() - started,
        replaced=is_replaced,
        is_sent=not can_hang(str(final), table),
        checked="all bytes read back" if verify == "full" else "sizes compared",
        skipped=listing.skipped,
        retries=listing.retries + retries.count,
    )


def _source_at(act: str, local: Path) -> FileSource | FolderSource:
    mode = mode_of(local)
    if stat.S_ISDIR(mode):
        return FolderSource(local)
    if stat.S_ISREG(mode):
        return FileSource(local)
    if os.path.lexists(local):
        found = "it is a special file or a broken link"
        raise BadSource(cannot(act, found, "a file or a folder", "Pass the path of a file or folder"))
    raise SourceMissing(cannot(act, "this path does not exist", "", "Check the path"))


@dataclass(frozen=True, slots=True)
class _Publication:
    act: str
    source: FileSource | FolderSource
    items: tuple[Item, ...]
    is_full: bool
    is_inside: bool
    advance: Callable[[int, int], None]
    retries: Retries
    shards: Sequence[FileSource] = ()

    def run(self, target: Path, answered: MoveCallback) -> tuple[Path, bool]:
        """Copy and compare all files, then rename the copy; return its path and whether it replaced an old version."""

        def moved(size: int = 0) -> None:
            answered()
            self.advance(size, 0)

        is_folder = isinstance(self.source, FolderSource)
        final = self._final(target, is_folder, moved)
        # Publish the index last, so that it appears only when all its shards are there.
        for shard in self.shards:
            one = replace(self, source=shard, items=shard.list().items, is_inside=False, shards=())
            one.run(final.parent / shard.path.name, answered)
        file_changes.make_folder(final.parent)
        file_changes.check_space(self.act, sum(item.size for item in self.items), final)
        try:
            with partials.Partial(final) as partial:
                if is_folder:
                    file_changes.make_folder(partial.path)
                copies = {item: partial.path / item.path if is_folder else partial.path for item in self.items}
                crcs = {item: self._copy(item, path, moved) for item, path in copies.items()}
                for item, path in copies.items():
                    check_written(self.act, item.path, path, item.size, crcs[item] if self.is_full else None, moved)
                if self.source.list().items != self.items:
                    next_step = "Try again when no program writes to it"
                    raise SourceChanged(cannot(self.act, "it changed while it was copied", "", next_step))
                # Check again, since other files may have appeared there during the copy.
                self._check_replaceable(final, is_folder, moved)
                is_replaced = os.path.lexists(final)
                partial.publish(replace=True)
        except OSError as error:
            if not isinstance(error, ColabkitError):
                # Errors name the hidden partial, so report the final path.
                error.filename = str(final)
            raise
        return final, is_replaced

    def _copy(self, item: Item, path: Path, moved: MoveCallback) -> int:
        moved()
        file_changes.make_folder(path.parent)
        crc = write_blocks(path, read_blocks(self.source, item, MOVED_BLOCK_BYTES, self.retries), moved)
        self.advance(0, 1)
        return crc

    def _final(self, target: Path, is_folder: bool, moved: MoveCallback) -> Path:
        local = self.source.path
        # A mount point or a link to a folder, such as a Drive shortcut, cannot be replaced by a rename.
        is_fixed = not is_folder or os.path.ismount(target) or target.is_symlink()
        is_inside = self.is_inside or (target.is_dir() and is_fixed)
        final = target / local.name if is_inside else target
        real, place = Path(os.path.realpath(local)), Path(os.path.realpath(final))
        if place.is_relative_to(real) or real.is_relative_to(place):
            relation = "inside the source" if place.is_relative_to(real) else "a folder that contains the source"
            found = f"the target {str(final)!r} is {'the source itself' if place == real else relation}"
            raise TargetExists(cannot(self.act, found, "", "Choose another target"))
        self._check_replaceable(final, is_folder, moved)
        return final

    def _check_replaceable(self, final: Path, is_folder: bool, moved: MoveCallback) -> None:
        moved()
        if os.path.lexists(final) and final.is_dir() != is_folder:
            types = "not a folder, but the source is a folder" if is_folder else "a folder, but the source is a file"
            raise TargetExists(cannot(self.act, f"the target {str(final)!r} is {types}", "", "Choose another target"))
        if final.is_dir() and (other := self._other_file(final, moved)):
            found = f"the folder {str(final)!r} has a file that the source lacks, {other!r}"
            path = "a new path" if self.is_inside else f"{str(final / self.source.path.name)!r} with a slash at the end"
            next_step = f"Publish to {path}, or remove the folder if it is an earlier copy of the source"
            raise TargetExists(cannot(self.act, found, "a new path, or a folder without other files", next_step))

    def _other_file(self, folder: Path, moved: MoveCallback) -> str:
        """Return the path, in a folder, of a file or link that no published file would replace; empty if none."""
        own = {item.path for item in self.items}

        def refuse(error: OSError) -> None:
            # An unreadable folder may contain such files, so raise the error.
            raise error

        for at, inner, names in os.walk(folder, onerror=refuse):
            moved()
            links = [name for name in inner if os.path.islink(os.path.join(at, name))]
            for path in (os.path.relpath(os.path.join(at, name), folder) for name in (*names, *links)):
                if path not in own:
                    return path
        return ""


def write_blocks(path: Path, blocks: Generator[bytes, None, None], moved: MoveCallback) -> int:
    """Write blocks to a new file, sync it to storage, and return the CRC32 of all bytes."""
    crc = offset = 0
    with file_changes.descriptor(file_changes.create(path)) as fd:
        # Close the generator, since it holds the source file open, and a stored exception can keep it alive.
        with closing(blocks):
            for block in blocks:
                file_changes.write_at(fd, block, offset, path)
                moved(len(block))
                crc = crc32(block, crc)
                offset += len(block)
        file_changes.sync(fd, path)
        moved()
    moved()
    return crc


def check_written(act: str, name: str, path: Path, size: int, crc: int | None, moved: MoveCallback) -> None:
    """Raise `Corrupt` unless a file has the expected size and, if `crc` is not None, the expected CRC32.

    `act` and `name` are for the message; `moved` is called with the size of each block that is read back.
    """
    moved()
    if (copied := path.stat().st_size) != size:
        found = f"the copy of {name!r} has {format_things(copied, 'byte')}"
        raise Corrupt(cannot(act, found, format_things(size, "byte"), "Try again"))
    if crc is None:
        return
    seen = read = 0
    for block in _blocks_of_medium(path, size):
        moved(len(block))
        seen = crc32(block, seen)
        read += len(block)
    if (seen, read) != (crc, size):
        found = f"the bytes of {name!r} that were read back differ from those written"
        raise Corrupt(cannot(act, found, "", "Try again; if the file is on Drive, mount Drive again first"))


def _blocks_of_medium(path: Path, size: int) -> Iterator[bytes]:
    """Drop a file from the page cache where possible, then yield its blocks; stop at most one block after `size`."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = 0
        while read <= size and (block := file.read(MOVED_BLOCK_BYTES)):
            yield block
            read += len(block)

"""`publish()` copies a finished file or folder to a slow mount, atomically; `SlowMount` bounds work on such a mount.

`publish()` and the checkpoints bring a file to a mount in three steps: `write_blocks()` under a hidden name,
`check_written()`, and a rename.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar
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
    TimedOut,
    can_hang,
    cannot,
    check_one_of,
    file_changes,
    format_bytes,
    format_seconds,
    format_things,
    mounts,
    partials,
    user_path,
)
from colabkit.storage.sources.concurrency import Calls, Level, answer_of, still_moving
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_blocks

T = TypeVar("T")

MOVED_BLOCK_BYTES = 4 << 20
"""Files are moved in blocks of this size."""

SLOWEST_BYTES_S = 10e6
"""A slow rate: some mounts send a whole file when it is closed, and answer nothing meanwhile."""

_SLOWEST_FILES_S = 10.0  # a former folder is removed in one go
_MOST_ABANDONED = 3  # each abandoned thread holds memory for as long as the mount hangs


STALLED_S = 600.0
"""Seconds in which a mount has to answer each operation."""


@dataclass(frozen=True, repr=False)
class PublishReport(Report):
    """The report of `publish()`.

    Attributes:
        path: the finished file or folder.
        published_bytes: its bytes.
        seconds: how long it took.
        replaced: whether a former one was there.
        is_sent: whether the bytes lie where they stay; on a mount that sends later they are on their way.
        checked: what was compared after writing.
    """

    path: Path
    published_bytes: int
    seconds: float
    replaced: bool
    is_sent: bool
    checked: str

    def _summary(self) -> str:
        rate = format_bytes(self.published_bytes / max(self.seconds, 1e-9))
        done = f"{'Replaced' if self.replaced else 'Published'} {str(self.path)!r}"
        later = "" if self.is_sent else "; the mount sends it later, colabkit.flush() waits for that"
        size = format_bytes(self.published_bytes)
        return f"{done}: {size} in {format_seconds(self.seconds)} ({rate}/s, {self.checked}{later})"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("bytes", format_bytes(self.published_bytes)),
            ("checked", self.checked),
            ("sent", "yes" if self.is_sent else self._worded("later; colabkit.flush() waits for it")),
        ]


def publish(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    verify: Literal["size", "full"] = "full",
    progress: bool = True,
) -> PublishReport:
    """Copy a finished file or folder to a slow mount, such as `drive:`, and return where it is.

    The copy is written under a hidden name beside the final one, synced, compared and renamed. After a kill at any
    instant, the final path of a file holds the complete old or the complete new file. Replacing a folder takes two
    renames: a kill between them leaves the old folder hidden beside its path, and the next run puts it back first.
    Links, special files and empty folders inside a folder are left out. Drive's mounts send files later: `flush()`
    waits for that.

    Args:
        path: a file, as a pack, or a folder.
        to: an existing folder, or one named with a slash behind it, in which the name is kept; else the final path. An
            existing folder of the same name as the one that is published is its former version, and is replaced.
        verify: `"full"` reads back what was written and compares all bytes; `"size"` compares the byte counts.
        progress: show a progress bar.

    Raises:
        SourceMissing: if nothing is at `path`.
        BadSource: if it is neither a file nor a folder.
        SourceChanged: if it is written to meanwhile.
        TargetExists: if a folder is where a file should go, or the reverse, or the place is in what is published.
        NotEnoughSpace: before anything is written, where that can be known.
        FileFailed: if the target cannot be written.
        Corrupt: if other bytes are read back than were written.
        TimedOut: if the mount answers nothing for ten minutes, and a second more for each 10 MB of the largest file and
            for each 10 files; the unfinished copy stays hidden there.
    """
    started = time.monotonic()
    act = f"publish {str(path)!r}"
    local = Path(os.path.abspath(user_path(path, act)))
    check_one_of(act, "verify", verify, ("size", "full"))
    target = Path(os.path.abspath(user_path(to, act)))
    table = mounts()
    with file_changes.translated(act):
        source = answer_of(lambda: _source_at(act, local), can_hang(str(local), table))
        items = source.list().items
        total_bytes = sum(item.size for item in items)
        moved_bytes = total_bytes * (2 if verify == "full" else 1)
        with ProgressBar("publish", moved_bytes, "B", progress, files=len(items)) as bar:
            is_inside = os.fspath(to).endswith(("/", ":"))
            work = _Publication(act, source, items, verify == "full", is_inside, bar.advance)
            final, is_replaced = SlowMount(str(target), STALLED_S).call(
                act,
                lambda moved: work.run(target, moved),
                largest_bytes=max((item.size for item in items), default=0),
                files=len(items),
                on_wait=bar.wait,
            )
    return PublishReport(
        path=final,
        published_bytes=total_bytes,
        seconds=time.monotonic() - started,
        replaced=is_replaced,
        is_sent=not can_hang(str(final), table),
        checked="all bytes read back" if verify == "full" else "byte counts",
    )


def _source_at(act: str, local: Path) -> FileSource | FolderSource:
    if local.is_dir():
        return FolderSource(local)
    if local.is_file():
        return FileSource(local)
    if os.path.lexists(local):
        found = "a special file or broken link"
        raise BadSource(cannot(act, found, "a file or a folder", "Name the file that it should be"))
    raise SourceMissing(cannot(act, "nothing is there", "a file or a folder", "Check the path"))


@dataclass(frozen=True, slots=True)
class _Publication:
    """The copying; `advance` is called with the bytes and files that are done."""

    act: str
    source: FileSource | FolderSource
    items: tuple[Item, ...]
    is_full: bool
    is_inside: bool
    advance: Callable[[int, int], None]

    def run(self, target: Path, answered: MoveCallback) -> tuple[Path, bool]:
        """Copy, compare and rename; return the final path and whether something was replaced."""

        def moved(size: int = 0) -> None:
            answered()
            self.advance(size, 0)

        is_folder = isinstance(self.source, FolderSource)
        final = self._final(target, is_folder)
        file_changes.make_folder(final.parent)
        file_changes.check_space(self.act, sum(item.size for item in self.items), final)
        try:
            with partials.Partial(final) as partial:
                if is_folder:
                    file_changes.make_folder(partial.path)
                copies = {item: partial.path / item.path if is_folder else partial.path for item in self.items}
                crcs = {item: self._copy(item, path, moved) for item, path in copies.items()}
                for item, path in copies.items():
                    crc = crcs[item] if self.is_full else None
                    check_written(self.act, item.path, path, item.size, crc, moved)
                if self.source.list().items != self.items:
                    found = "it was written to meanwhile"
                    raise SourceChanged(cannot(self.act, found, "a finished file or folder", "Run it again"))
                moved()
                is_replaced = os.path.lexists(final)
                partial.publish(replace=True)
        except ColabkitError:
            raise
        except OSError as error:
            error.filename = str(final)  # writes name no file, others the hidden one
            raise
        return final, is_replaced

    def _copy(self, item: Item, path: Path, moved: MoveCallback) -> int:
        moved()
        file_changes.make_folder(path.parent)
        crc = write_blocks(path, read_blocks(self.source, item, MOVED_BLOCK_BYTES, Retries()), moved)
        self.advance(0, 1)
        return crc

    def _final(self, target: Path, is_folder: bool) -> Path:
        local = self.source.path
        is_former = is_folder and target.name == local.name
        final = target / local.name if self.is_inside or (target.is_dir() and not is_former) else target
        real, place = Path(os.path.realpath(local)), Path(os.path.realpath(final))
        if place.is_relative_to(real) or real.is_relative_to(place):
            found = f"{str(final)!r} is the same place, or lies in it or around it"
            raise TargetExists(cannot(self.act, found, "a place elsewhere", "Choose another path"))
        if os.path.lexists(final) and final.is_dir() != is_folder:
            found = f"{str(final)!r} is {'a folder' if final.is_dir() else 'no folder'}"
            raise TargetExists(cannot(self.act, found, "the like of what is published", "Choose another path"))
        return final


class MoveCallback(Protocol):
    """Called by the work whenever the mount has answered, with the bytes that it took or gave."""

    def __call__(self, size: int = 0) -> None:
        """Note an answer; raises `AbandonedError` if the caller has abandoned the work."""


class AbandonedError(Exception):
    """The caller has abandoned this work."""


class SlowMount:
    """A folder whose mount may hang.

    Args:
        name: of the folder, for messages.
        stalled_s: seconds in which the mount has to answer each operation.
    """

    def __init__(self, name: str, stalled_s: float) -> None:
        self.name = name
        self.stalled_s = stalled_s
        self._abandoned: list[threading.Event] = []

    def call(
        self,
        act: str,
        work: Callable[[MoveCallback], T],
        *,
        largest_bytes: int = 0,
        files: int = 0,
        on_wait: Callable[[], None] | None = None,
    ) -> T:
        """Return what `work` returns; it runs in a thread, and no longer than the mount answers.

        Abandoned work ends by an exception at the mount's next answer, so it can remove what it had begun.

        Args:
            act: verb and object for messages.
            work: is given a function to call whenever the mount has answered.
            largest_bytes: of the largest file that it moves; each 10 MB add a second to the deadline.
            files: that it moves; each 10 add a second to the deadline.
            on_wait: called some times a second meanwhile; may raise to abandon the work.

        Raises:
            TimedOut: if the mount answers nothing.
        """
        stop, ended = threading.Event(), threading.Event()

        def moved(size: int = 0) -> None:  # noqa: ARG001 - for callers that count
            still_moving()
            if stop.is_set():
                raise AbandonedError

        def run(_: None) -> T:
            try:
                with file_changes.translated(act):
                    return work(moved)
            finally:
                ended.set()

        needed = "a mount that answers"
        next_step = "Run colabkit.mount(force=True) if it is Drive, then run this again"
        self._abandoned = [event for event in self._abandoned if not event.is_set()]
        if len(self._abandoned) >= _MOST_ABANDONED:
            found = f"{self.name!r} has yet to answer {format_things(len(self._abandoned), 'earlier call')}"
            raise TimedOut(cannot(act, found, needed, next_step))
        stalled_s = self.stalled_s + largest_bytes / SLOWEST_BYTES_S + files / _SLOWEST_FILES_S
        with Calls(run, Level(1, is_fixed=True), stalled_s, on_wait, tries=1) as calls:
            try:
                calls.make(None)
                return calls.take()
            except TimedOut as error:
                found = f"{self.name!r} has answered nothing for {stalled_s:.0f} s"
                raise TimedOut(cannot(act, found, needed, next_step)) from error
            finally:
                stop.set()
                if not ended.is_set():
                    self._abandoned.append(ended)


def write_blocks(path: Path, blocks: Generator[bytes, None, None], moved: MoveCallback) -> int:
    """Write blocks to a new file, bring them to the medium as far as the mount does that, and return their CRC32."""
    crc = offset = 0
    fd = file_changes.create(path)
    try:
        # An error that somebody keeps must not keep the file open that the blocks come from.
        with closing(blocks):
            for block in blocks:
                file_changes.write_at(fd, block, offset, path)
                moved(len(block))
                crc = crc32(block, crc)
                offset += len(block)
        file_changes.sync(fd, path)
        moved()
    finally:
        os.close(fd)
    moved()
    return crc


def check_written(act: str, name: str, path: Path, size: int, crc: int | None, moved: MoveCallback) -> None:
    """Raise `Corrupt` unless a file has the size and, if `crc` is not None, the CRC32 of the bytes written to it.

    `act` and `name` are for the message; `moved` is called with the bytes of each block that is read back.
    """
    moved()
    arrived = path.stat().st_size
    if arrived != size:
        raise Corrupt(cannot(act, f"{arrived} bytes of {name!r} arrived", f"all {size}", "Run it again"))
    if crc is None:
        return
    seen = read = 0
    for block in _blocks_of_medium(path, size):
        moved(len(block))
        seen = crc32(block, seen)
        read += len(block)
    if (seen, read) != (crc, size):
        found = f"other bytes of {name!r} were read back than were written"
        raise Corrupt(cannot(act, found, "the same", "Run it again, or mount Drive again"))


def _blocks_of_medium(path: Path, size: int) -> Iterator[bytes]:
    """Yield a file's bytes, read from the medium where the system can drop its cache, and at most a block too many."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = 0
        while read <= size and (block := file.read(MOVED_BLOCK_BYTES)):
            yield block
            read += len(block)

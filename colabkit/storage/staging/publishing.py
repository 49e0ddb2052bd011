"""`publish()` brings a finished file or folder to a slow mount: whole or not at all."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    Corrupt,
    InvalidOption,
    ProgressBar,
    SourceChanged,
    SourceMissing,
    TargetExists,
    TimedOut,
    can_hang,
    cannot,
    file_changes,
    mounts,
    partials,
    user_path,
)
from colabkit.storage.sources.answering import answer_of
from colabkit.storage.sources.concurrency import Calls, still_moving
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.level import Level
from colabkit.storage.sources.one_file import FileSource
from colabkit.storage.sources.reads import Retries, read_blocks
from colabkit.storage.staging.reports import PublishReport

STALLED_S = 600.0
"""Seconds in which a mount has to take something, or give it back."""

_SLOWEST_BYTES_S = 10e6  # some mounts send a whole file when it is closed, and answer nothing meanwhile
_SLOWEST_FILES_S = 10.0  # a former folder is removed in one go
_BLOCK_BYTES = 4 << 20


def publish(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    verify: Literal["size", "full"] = "full",
    progress: bool = True,
) -> PublishReport:
    """Bring a finished file or folder to its place on a slow mount, as `drive:`, and return where it is.

    It is copied to a hidden name beside the final one, in large blocks, brought to the medium as far as the mount does
    that, compared, and renamed. Until then what was there before stays: after any kill the place of a file has the old
    or the new one whole. To replace a folder takes two renames: a kill between these leaves the old one hidden beside
    its place, until this is run again, which puts it back first. Links, special files and empty folders inside a folder
    are left out. Drive's mounts send files later: `flush()` waits for that.

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
        TimedOut: if the mount takes nothing for ten minutes, and a second more for each 10 MB of the largest file and
            for each 10 files; what it had begun stays hidden there.
    """
    started = time.monotonic()
    act = f"publish {str(path)!r}"
    near = Path(os.path.abspath(user_path(path, act)))
    if verify not in ("size", "full"):
        raise InvalidOption(cannot(act, f"verify={verify!r}", "'size' or 'full'", "Use verify='full'"))
    target = Path(os.path.abspath(user_path(to, act)))
    table = mounts()
    with file_changes.translated(act):
        source = answer_of(lambda: _source_at(act, near), can_hang(str(near), table))
        work = _Publication(act, source, verify, is_inside=os.fspath(to).endswith(("/", ":")))
        with ProgressBar("publish", work.moved_bytes, "B", progress, files=len(work.items)) as bar:
            work.advance = bar.advance
            final, is_replaced = _in_thread(work, target, bar)
    return PublishReport(
        path=final,
        published_bytes=work.total_bytes,
        seconds=time.monotonic() - started,
        replaced=is_replaced,
        is_sent=not can_hang(str(final), table),
        checked="all bytes read back" if verify == "full" else "byte counts",
    )


def _source_at(act: str, near: Path) -> FileSource | FolderSource:
    if near.is_dir():
        return FolderSource(near)
    if near.is_file():
        return FileSource(near)
    if os.path.lexists(near):
        found = "a special file or broken link"
        raise BadSource(cannot(act, found, "a file or a folder", "Name the file that it should be"))
    raise SourceMissing(cannot(act, "nothing is there", "a file or a folder", "Check the path"))


def _in_thread(work: _Publication, target: Path, bar: ProgressBar) -> tuple[Path, bool]:
    """Return what `work.run` returns; in a thread, so that a mount that hangs holds neither the caller nor Ctrl-C."""
    largest = max((item.size for item in work.items), default=0)
    stalled_s = STALLED_S + largest / _SLOWEST_BYTES_S + len(work.items) / _SLOWEST_FILES_S
    with Calls(work.run, Level(1, is_fixed=True), stalled_s, bar.wait, tries=1) as calls:
        try:
            calls.make(target)
            return calls.take()
        except TimedOut as error:
            found = f"the mount has taken nothing for {stalled_s:.0f} s"
            next_step = "Run colabkit.mount(force=True) if it is Drive, then run this again"
            raise TimedOut(cannot(work.act, found, "a mount that answers", next_step)) from error
        finally:
            work.stop.set()


class _Left(Exception):
    """Nobody waits for the work any more."""


class _Publication:
    """The copying itself, which may be left behind in its thread: when the mount answers again it takes back its own.

    Args:
        act: verb and object for messages.
        source: what is published.
        verify: `"size"` or `"full"`.
        is_inside: whether it goes into the target, whatever is there.

    Attributes:
        items: the files to bring.
        total_bytes: their bytes.
        moved_bytes: of all that is written and read back.
        advance: told of bytes and files as they are done.
        stop: set when nobody waits for the work any more.
    """

    advance: Callable[[int, int], None]

    def __init__(self, act: str, source: FileSource | FolderSource, verify: str, *, is_inside: bool) -> None:
        self.act = act
        self.items = source.list().items
        self.total_bytes = sum(item.size for item in self.items)
        self.moved_bytes = 2 * self.total_bytes if verify == "full" else self.total_bytes
        self.stop = threading.Event()
        self._source = source
        self._verify = verify
        self._is_inside = is_inside

    def run(self, target: Path) -> tuple[Path, bool]:
        """Copy, compare and rename; return where it is and whether something was replaced."""
        is_folder = isinstance(self._source, FolderSource)
        final = self._final(target, is_folder)
        file_changes.make_folder(final.parent)
        file_changes.check_space(self.act, self.total_bytes, final)
        try:
            with partials.Partial(final) as partial:
                if is_folder:
                    file_changes.make_folder(partial.path)
                copies = {item: partial.path / item.path if is_folder else partial.path for item in self.items}
                crcs = {item: self._copy(item, path) for item, path in copies.items()}
                for item, path in copies.items():
                    self._check(item, path, crcs[item])
                if self._source.list().items != self.items:
                    found = "it was written to meanwhile"
                    raise SourceChanged(cannot(self.act, found, "a finished file or folder", "Run it again"))
                self._go_on()
                is_replaced = os.path.lexists(final)
                partial.publish(replace=True)
        except ColabkitError:
            raise
        except OSError as error:
            error.filename = str(final)  # writes name no file, others the hidden one
            raise
        return final, is_replaced

    def _final(self, target: Path, is_folder: bool) -> Path:
        near = self._source.path
        is_former = is_folder and target.name == near.name
        final = target / near.name if self._is_inside or (target.is_dir() and not is_former) else target
        real, place = Path(os.path.realpath(near)), Path(os.path.realpath(final))
        if place.is_relative_to(real) or real.is_relative_to(place):
            found = f"{str(final)!r} is the same place, or lies in it or around it"
            raise TargetExists(cannot(self.act, found, "a place elsewhere", "Choose another path"))
        if os.path.lexists(final) and final.is_dir() != is_folder:
            found = f"{str(final)!r} is {'a folder' if final.is_dir() else 'no folder'}"
            raise TargetExists(cannot(self.act, found, "the like of what is published", "Choose another path"))
        return final

    def _copy(self, item: Item, path: Path) -> int:
        """Copy a file, and return its CRC32."""
        self._go_on()
        file_changes.make_folder(path.parent)
        crc = offset = 0
        fd = file_changes.create(path)
        try:
            for block in read_blocks(self._source, item, _BLOCK_BYTES, Retries()):
                self._go_on()
                file_changes.write_at(fd, block, offset, path)
                crc = zlib.crc32(block, crc)
                offset += len(block)
                self.advance(len(block), 0)
            self._go_on()
            file_changes.sync(fd, path)
        finally:
            os.close(fd)
        self.advance(0, 1)
        return crc

    def _check(self, item: Item, path: Path, crc: int) -> None:
        self._go_on()
        arrived = path.stat().st_size
        if arrived != item.size:
            found = f"{arrived} bytes of {item.path!r} arrived"
            raise Corrupt(cannot(self.act, found, f"all {item.size}", "Run it again"))
        if self._verify == "size":
            return
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seen = size = 0
            while size <= item.size and (block := file.read(_BLOCK_BYTES)):
                self._go_on()
                seen = zlib.crc32(block, seen)
                size += len(block)
                self.advance(len(block), 0)
        if (seen, size) != (crc, item.size):
            found = f"other bytes of {item.path!r} were read back than were written"
            raise Corrupt(cannot(self.act, found, "the same", "Run it again, or mount Drive again"))

    def _go_on(self) -> None:
        """Say that the mount has answered; end the work if it was left behind."""
        still_moving()
        if self.stop.is_set():
            raise _Left

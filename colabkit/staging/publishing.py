"""`publish()` brings a finished file or folder to a slow mount: whole or not at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from zlib_ng.zlib_ng import crc32

from colabkit import _files, _partials
from colabkit.environment import can_hang
from colabkit.errors import Corrupt, InvalidOption, SourceChanged, SourceMissing, TargetExists, TimedOut, cannot
from colabkit.mounts import mount_holding, mounts, user_path
from colabkit.progress import ProgressBar
from colabkit.sources import FileSource, FolderSource, Item, Retries, read_blocks
from colabkit.sources.concurrency import Calls, still_moving
from colabkit.sources.level import Level
from colabkit.staging.reports import PublishReport

__all__ = ["publish"]

_BLOCK_BYTES = 4 << 20
_SLOW_STEP_S = 600.0  # a mount may hold a sync until all is sent


def publish(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    verify: Literal["size", "full"] = "full",
    progress: bool = True,
) -> PublishReport:
    """Bring a finished file or folder to its place on a slow mount, as `drive:`, and return where it is.

    It is copied to a hidden name beside the final one, in large blocks, brought to the medium as far as the mount does
    that, compared, and renamed. Until then what was there before stays; after any kill the place holds the old or the
    new thing whole. Drive's mounts send files later: `flush()` waits for that.

    Args:
        path: a file, as a pack, or a folder.
        to: an existing folder, or one named with a slash behind it, in which the name is kept; else the final path.
        verify: `"full"` reads back what was written and compares all bytes; `"size"` compares the byte counts.
        progress: show a progress bar.

    Raises:
        SourceMissing: if nothing is at `path`.
        SourceChanged: if it is written to meanwhile.
        TargetExists: if a folder is where a file should go, or the reverse.
        NotEnoughSpace: before anything is written, where that can be known.
        Corrupt: if other bytes are read back than were written.
        TimedOut: if the mount takes nothing for ten minutes; what it had begun stays hidden there.
    """
    started = time.monotonic()
    near = user_path(path, f"publish {os.fspath(path)!r}")
    act = f"publish {str(near)!r}"
    if verify not in ("size", "full"):
        raise InvalidOption(cannot(act, f"verify={verify!r}", "'size' or 'full'", "Use verify='full'"))
    table = mounts()
    wanted = os.path.abspath(user_path(to, act))
    is_far = can_hang(wanted, table)
    with _files.translated(act):
        if not near.exists():
            raise SourceMissing(cannot(act, "nothing is there", "a file or a folder", "Check the path"))
        source = FolderSource(near) if near.is_dir() else FileSource(near)
        items = source.list().items
        total = sum(item.size for item in items)
        stop = threading.Event()
        with ProgressBar("publish", total, "B", progress, files=len(items)) as bar:
            work = _Publication(act, source, near, items, verify, stop, bar.advance)
            final, replaced = _in_thread(act, lambda: work.run(to), stop, bar, _SLOW_STEP_S if is_far else None)
    holding = mount_holding(wanted, table)
    return PublishReport(
        path=final,
        published_bytes=total,
        seconds=time.monotonic() - started,
        replaced=replaced,
        is_sent=holding is None or not holding.is_remote,
        checked="all bytes read back" if verify == "full" else "byte counts",
    )


def _in_thread(
    act: str, work: Callable[[], tuple[Path, bool]], stop: threading.Event, bar: ProgressBar, stalled_s: float | None
) -> tuple[Path, bool]:
    """Return what `work` returns; in a thread, so that a mount that hangs holds neither the caller nor Ctrl-C."""
    calls: Calls[None, tuple[Path, bool]]
    with Calls(lambda _: work(), Level(1, is_fixed=True), stalled_s, bar.wait, tries=1) as calls:
        try:
            calls.make(None)
            return calls.take()
        except TimedOut as error:
            found = f"the mount has taken nothing for {_SLOW_STEP_S:g} s"
            next_step = "Run colabkit.mount(force=True) if it is Drive, then run this again"
            raise TimedOut(cannot(act, found, "a mount that answers", next_step)) from error
        finally:
            stop.set()


def _final(act: str, near: Path, to: str | os.PathLike[str]) -> Path:
    final = user_path(to, act)
    if os.fspath(to).endswith("/") or (final.is_dir() != near.is_dir() and final.is_dir()):
        final /= near.name
    real, target = os.path.realpath(near), os.path.realpath(final)
    if target == real or Path(target).is_relative_to(real):
        found = f"{str(final)!r} is the same place, or lies in it"
        raise TargetExists(cannot(act, found, "a place elsewhere", "Choose another path"))
    if os.path.lexists(final) and final.is_dir() != near.is_dir():
        found = f"{str(final)!r} is {'a folder' if final.is_dir() else 'no folder'}"
        raise TargetExists(cannot(act, found, "the like of what is published", "Choose another path"))
    return final


class _Publication:
    """The copying itself, which may be left behind in its thread: it stops by itself when told to."""

    def __init__(
        self,
        act: str,
        source: FileSource | FolderSource,
        near: Path,
        items: tuple[Item, ...],
        verify: str,
        stop: threading.Event,
        advance: Callable[[int, int], None],
    ) -> None:
        self._act = act
        self._source = source
        self._near = near
        self._items = items
        self._verify = verify
        self._stop = stop
        self._advance = advance

    def run(self, to: str | os.PathLike[str]) -> tuple[Path, bool]:
        """Copy, compare and rename; return where it is and whether something was replaced."""
        final = _final(self._act, self._near, to)
        _files.make_folder(final.parent)
        _files.check_space(self._act, sum(item.size for item in self._items), final)
        with _files.translated(self._act), _partials.Partial(final) as partial:
            is_folder = self._near.is_dir()
            if is_folder:
                _files.make_folder(partial.path)
            copies = {item: partial.path / item.path if is_folder else partial.path for item in self._items}
            crcs = {item: self._copy(item, path) for item, path in copies.items()}
            for item, path in copies.items():
                self._check(item, path, crcs[item])
            self._check_going_on()
            replaced = os.path.lexists(final)
            partial.publish(replace=True)
        return final, replaced

    def _copy(self, item: Item, path: Path) -> int:
        _files.make_folder(path.parent)
        crc = offset = 0
        fd = _files.create(path)
        try:
            for block in read_blocks(self._source, item, _BLOCK_BYTES, Retries()):
                self._check_going_on()
                _files.write_at(fd, block, offset, path)
                crc = crc32(block, crc)
                offset += len(block)
                self._advance(len(block), 0)
            _files.sync(fd, path)
            still_moving()
        finally:
            os.close(fd)
        self._advance(0, 1)
        return crc

    def _check(self, item: Item, path: Path, crc: int) -> None:
        found = path.stat().st_size
        if found != item.size:
            said = f"{found} bytes of {item.path!r} arrived"
            raise Corrupt(cannot(self._act, said, f"all {item.size}", "Run it again"))
        if self._verify == "full":
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                seen = 0
                while block := file.read(_BLOCK_BYTES):
                    self._check_going_on()
                    seen = crc32(block, seen)
            if seen != crc:
                said = f"other bytes of {item.path!r} were read back than were written"
                raise Corrupt(cannot(self._act, said, "the same", "Run it again, or mount Drive again"))

    def _check_going_on(self) -> None:
        still_moving()
        if self._stop.is_set():
            raise SourceChanged(cannot(self._act, "it was interrupted", "time", "Run it again"))

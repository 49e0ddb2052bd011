"""`publish()` copies a finished file or folder to a slow mount, atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    ProgressBar,
    Report,
    SourceChanged,
    SourceMissing,
    TargetExists,
    can_hang,
    cannot,
    check_one_of,
    file_changes,
    format_bytes,
    format_seconds,
    mounts,
    partials,
    user_path,
)
from colabkit.storage.slow_mount import MOVED_BLOCK_BYTES, Moved, SlowMount, check_written, write_blocks
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_blocks

STALLED_S = 600.0
"""Seconds in which a mount has to answer each operation."""


@dataclass(frozen=True, repr=False)
class PublishReport(Report):
    """What `publish()` brought to its place.

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
        work = _Publication(act, source, verify, is_inside=os.fspath(to).endswith(("/", ":")))
        moved_bytes = work.total_bytes * (2 if verify == "full" else 1)
        with ProgressBar("publish", moved_bytes, "B", progress, files=len(work.items)) as bar:
            work.advance = bar.advance
            final, is_replaced = SlowMount(str(target), STALLED_S).call(
                act,
                lambda moved: work.run(target, moved),
                largest_bytes=max((item.size for item in work.items), default=0),
                files=len(work.items),
                on_wait=bar.wait,
            )
    return PublishReport(
        path=final,
        published_bytes=work.total_bytes,
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


class _Publication:
    """The copying itself.

    Attributes:
        advance: called with the bytes and files that are done.
    """

    advance: Callable[[int, int], None]

    def __init__(self, act: str, source: FileSource | FolderSource, verify: str, *, is_inside: bool) -> None:
        self.items = source.list().items
        self.total_bytes = sum(item.size for item in self.items)
        self._act = act
        self._source = source
        self._verify = verify
        self._is_inside = is_inside

    def run(self, target: Path, answered: Moved) -> tuple[Path, bool]:
        """Copy, compare and rename; return the final path and whether something was replaced."""

        def moved(size: int = 0) -> None:
            answered()
            self.advance(size, 0)

        is_folder = isinstance(self._source, FolderSource)
        final = self._final(target, is_folder)
        file_changes.make_folder(final.parent)
        file_changes.check_space(self._act, self.total_bytes, final)
        try:
            with partials.Partial(final) as partial:
                if is_folder:
                    file_changes.make_folder(partial.path)
                copies = {item: partial.path / item.path if is_folder else partial.path for item in self.items}
                crcs = {item: self._copy(item, path, moved) for item, path in copies.items()}
                for item, path in copies.items():
                    crc = crcs[item] if self._verify == "full" else None
                    check_written(self._act, item.path, path, item.size, crc, moved)
                if self._source.list().items != self.items:
                    found = "it was written to meanwhile"
                    raise SourceChanged(cannot(self._act, found, "a finished file or folder", "Run it again"))
                moved()
                is_replaced = os.path.lexists(final)
                partial.publish(replace=True)
        except ColabkitError:
            raise
        except OSError as error:
            error.filename = str(final)  # writes name no file, others the hidden one
            raise
        return final, is_replaced

    def _copy(self, item: Item, path: Path, moved: Moved) -> int:
        moved()
        file_changes.make_folder(path.parent)
        crc = write_blocks(path, read_blocks(self._source, item, MOVED_BLOCK_BYTES, Retries()), moved)
        self.advance(0, 1)
        return crc

    def _final(self, target: Path, is_folder: bool) -> Path:
        local = self._source.path
        is_former = is_folder and target.name == local.name
        final = target / local.name if self._is_inside or (target.is_dir() and not is_former) else target
        real, place = Path(os.path.realpath(local)), Path(os.path.realpath(final))
        if place.is_relative_to(real) or real.is_relative_to(place):
            found = f"{str(final)!r} is the same place, or lies in it or around it"
            raise TargetExists(cannot(self._act, found, "a place elsewhere", "Choose another path"))
        if os.path.lexists(final) and final.is_dir() != is_folder:
            found = f"{str(final)!r} is {'a folder' if final.is_dir() else 'no folder'}"
            raise TargetExists(cannot(self._act, found, "the like of what is published", "Choose another path"))
        return final

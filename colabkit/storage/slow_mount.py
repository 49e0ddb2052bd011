"""Work on a mount that may hang: in a thread that is abandoned when the mount stops answering, and copies checked back.

`publish()` and the checkpoints share it. A file is brought to a mount in three steps: `write_blocks()` under a hidden
name, `check_written()`, and a rename, which is the caller's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar
from zlib import crc32

from colabkit.foundation import Corrupt, TimedOut, cannot, file_changes, format_things
from colabkit.storage.sources.concurrency import Calls, Level, still_moving

T = TypeVar("T")

MOVED_BLOCK_BYTES = 4 << 20
"""Files are moved in blocks of this size."""

SLOWEST_BYTES_S = 10e6
"""A slow rate: some mounts send a whole file when it is closed, and answer nothing meanwhile."""

_SLOWEST_FILES_S = 10.0  # a former folder is removed in one go
_MOST_ABANDONED = 3  # each abandoned thread holds memory for as long as the mount hangs


class Moved(Protocol):
    """Called by the work whenever the mount has answered, with the bytes that it took or gave."""

    def __call__(self, size: int = 0) -> None:
        """Note an answer.

        Raises:
            AbandonedError: if the caller has abandoned the work.
        """


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
        work: Callable[[Moved], T],
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


def write_blocks(path: Path, blocks: Generator[bytes, None, None], moved: Moved) -> int:
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


def check_written(act: str, name: str, path: Path, size: int, crc: int | None, moved: Moved) -> None:
    """Compare a file with what was written to it.

    Args:
        act: verb and object for messages.
        name: of the file, for messages.
        path: where it was written.
        size: bytes that were written.
        crc: their CRC32, to read all bytes back; None to compare only the byte counts.
        moved: called with the bytes of each block that was read back.

    Raises:
        Corrupt: if they differ.
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

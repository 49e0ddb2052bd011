"""The folder of checkpoints behind a slow mount: every touch in a thread that is left behind when the mount hangs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import TypeVar

from colabkit.foundation import Corrupt, NotMounted, can_hang, cannot, mounts
from colabkit.storage import MOVED_BLOCK_BYTES, Moved, SlowMount, check_written, write_blocks
from colabkit.training.checkpoints.files import give_way
from colabkit.training.checkpoints.seals import DamagedCheckpoint, SealedCheckpoint, prune, put, readable, sealed_in

T = TypeVar("T")

STALLED_S = 120.0
"""Seconds in which a mount or a disk has to answer, or to take or give something."""


class RemoteFolder:
    """A folder behind a mount that may hang or die.

    Args:
        folder: where the checkpoints go in the end.
        timeout_s: seconds in which the mount has to answer; None for `STALLED_S`.
    """

    def __init__(self, folder: Path, timeout_s: float | None) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._mount = SlowMount(str(folder), STALLED_S)

    def ask(self, act: str, work: Callable[[Moved], T], size: int = 0, on_wait: Callable[[], None] | None = None) -> T:
        """Return what `work` returns; it runs in a thread, and no longer than the mount answers.

        Args:
            act: verb and object for messages.
            work: is given a function to call when the mount has answered something, which ends it when it is late.
            size: bytes of the file that it copies.
            on_wait: called some times a second meanwhile; may raise to leave the work.

        Raises:
            TimedOut: if the mount answers nothing.
            NotMounted: if it is not there any more, and the folder would be one of this machine.
        """
        if not can_hang(str(self.folder), mounts()):
            found = f"the mount that held {str(self.folder)!r} is gone"
            raise NotMounted(cannot(act, found, "the mount", "Run colabkit.mount() if it is Drive, or mount it again"))
        self._mount.stalled_s = self._timeout_s or STALLED_S
        return self._mount.call(act, work, largest_bytes=size, on_wait=on_wait)

    def publish(
        self,
        sealed: SealedCheckpoint,
        step: int,
        keep_last: int,
        judge: str,
        damaged: Collection[Path],
        on_wait: Callable[[], None],
    ) -> list[SealedCheckpoint]:
        """Bring a near checkpoint here, remove old ones, and return those that are here, newest first.

        Args:
            sealed: the near one.
            step: of the newest near one.
            keep_last: how many of the newest stay.
            judge: by what the best is.
            damaged: files that are known to be so.
            on_wait: see `ask`.
        """
        act = f"publish {str(sealed.path)!r} to {str(self.folder)!r}"

        def fill(path: Path, moved: Moved) -> tuple[int, str]:
            give_way()
            try:
                crc = write_blocks(path, _blocks(sealed), moved)
            except DamagedCheckpoint as error:
                needed, next_step = "the bytes that were sealed", "See to the disk it is on"
                raise Corrupt(cannot(act, str(error), needed, next_step)) from error
            check_written(act, sealed.path.name, path, sealed.size, crc, moved)
            return sealed.size, sealed.digest

        def work(moved: Moved) -> list[SealedCheckpoint]:
            is_there = any(one.digest == sealed.digest and one.is_whole() for one in sealed_in(self.folder))
            if not is_there:
                put(self.folder, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, moved), act)
            moved()
            return prune(self.folder, step, keep_last, judge, damaged)

        return self.ask(act, work, sealed.size, on_wait)

    def fetch(self, sealed: SealedCheckpoint, near: Path, act: str) -> SealedCheckpoint:
        """Bring a checkpoint from here near, and return it as it is there.

        Raises:
            DamagedCheckpoint: if it is not what was sealed.
        """

        def fill(path: Path, moved: Moved) -> tuple[int, str]:
            write_blocks(path, _blocks(sealed), moved)
            return sealed.size, sealed.digest

        def work(moved: Moved) -> SealedCheckpoint | DamagedCheckpoint:
            try:
                sealed.check_size()
                return put(near, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, moved), act)
            except DamagedCheckpoint as error:
                return error

        found = self.ask(act, work, sealed.size)
        if isinstance(found, DamagedCheckpoint):
            raise found
        return found


def _blocks(sealed: SealedCheckpoint) -> Generator[bytes, None, None]:
    """Yield the bytes of a checkpoint's file; raises `DamagedCheckpoint`, at the end, unless they are as sealed."""
    sha256, size = hashlib.sha256(), 0
    with readable(sealed.path):
        file = sealed.path.open("rb", buffering=0)
    with file:
        while True:
            with readable(sealed.path):
                block = file.read(MOVED_BLOCK_BYTES)
            if not block:
                break
            sha256.update(block)
            size += len(block)
            yield block
    if size != sealed.size:
        raise DamagedCheckpoint(f"{size} of {sealed.size} bytes")
    if sha256.hexdigest() != sealed.digest:
        raise DamagedCheckpoint("its bytes are not the sealed ones")

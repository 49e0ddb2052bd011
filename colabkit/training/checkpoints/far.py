"""The folder of checkpoints behind a slow mount: every touch in a thread that is left behind when the mount hangs."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from colabkit.foundation import Corrupt, NotMounted, TimedOut, can_hang, cannot, file_changes, format_things, mounts
from colabkit.storage import Calls, Level, still_moving
from colabkit.training.checkpoints.sealed import Damaged, Sealed, prune, put, readable, sealed_in
from colabkit.training.checkpoints.writing import give_way

T = TypeVar("T")
GoOn = Callable[[], None]

STALLED_S = 120.0
"""Seconds in which a mount has to answer, or to take or give something."""

_SLOWEST_BYTES_S = 10e6  # some mounts send a whole file when it is closed, and answer nothing meanwhile
_BLOCK_BYTES = 4 << 20
_MOST_LEFT = 3  # each thread that is left behind holds memory for as long as the mount hangs


class _Left(Exception):
    """Nobody waits for the work any more."""


class Far:
    """A folder behind a mount that may hang or die.

    Args:
        folder: where the checkpoints go in the end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left: list[threading.Event] = []

    def ask(self, act: str, work: Callable[[GoOn], T], size: int = 0, on_wait: Callable[[], None] | None = None) -> T:
        """Return what `work` returns; it runs in a thread, and no longer than the mount moves.

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
        stop, ended = threading.Event(), threading.Event()

        def go_on() -> None:
            still_moving()
            if stop.is_set():
                raise _Left

        def run(_: None) -> T:
            try:
                with file_changes.translated(act):
                    return work(go_on)
            finally:
                ended.set()

        self._left = [event for event in self._left if not event.is_set()]
        stalled_s = STALLED_S + size / _SLOWEST_BYTES_S
        needed = "a mount that answers"
        next_step = "Run colabkit.mount(force=True) if it is Drive, then run this again"
        if len(self._left) >= _MOST_LEFT:
            found = f"{str(self.folder)!r} still has {format_things(len(self._left), 'earlier call')} to answer"
            raise TimedOut(cannot(act, found, needed, next_step))
        with Calls(run, Level(1, is_fixed=True), stalled_s, on_wait, tries=1) as calls:
            try:
                calls.make(None)
                return calls.take()
            except TimedOut as error:
                found = f"{str(self.folder)!r} has answered nothing for {stalled_s:.0f} s"
                raise TimedOut(cannot(act, found, needed, next_step)) from error
            finally:
                stop.set()
                if not ended.is_set():
                    self._left.append(ended)

    def publish(
        self,
        sealed: Sealed,
        step: int,
        keep_last: int,
        judge: str,
        damaged: Collection[Path],
        on_wait: Callable[[], None],
    ) -> list[Sealed]:
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

        def fill(path: Path, go_on: GoOn) -> tuple[int, str]:
            give_way()
            try:
                _copy(sealed, path, go_on)
            except Damaged as error:
                needed, next_step = "the bytes that were sealed", "See to the disk it is on"
                raise Corrupt(cannot(act, str(error), needed, next_step)) from error
            if _digest(path, go_on) != sealed.digest:
                found = "other bytes were read back than were written"
                raise Corrupt(cannot(act, found, "the same", "Mount Drive again if this is Drive"))
            return sealed.size, sealed.digest

        def work(go_on: GoOn) -> list[Sealed]:
            is_there = any(one.digest == sealed.digest and one.is_whole() for one in sealed_in(self.folder))
            if not is_there:
                put(
                    self.folder,
                    sealed.step,
                    sealed.rated,
                    sealed.size,
                    lambda path: fill(path, go_on),
                    act,
                )
            go_on()
            return prune(self.folder, step, keep_last, judge, damaged)

        return self.ask(act, work, sealed.size, on_wait)

    def fetch(self, sealed: Sealed, near: Path, act: str) -> Sealed:
        """Bring a checkpoint from here near, and return it as it is there.

        Raises:
            Damaged: if it is not what was sealed.
        """

        def fill(path: Path, go_on: GoOn) -> tuple[int, str]:
            _copy(sealed, path, go_on)
            return sealed.size, sealed.digest

        def work(go_on: GoOn) -> Sealed | Damaged:
            try:
                sealed.check_size()
                return put(near, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, go_on), act)
            except Damaged as error:
                return error

        found = self.ask(act, work, sealed.size)
        if isinstance(found, Damaged):
            raise found
        return found


def _copy(sealed: Sealed, path: Path, go_on: GoOn) -> None:
    """Copy a checkpoint's file to a new one, on the medium when it returns; raises `Damaged` if it is another."""
    sha256 = hashlib.sha256()
    size = 0
    fd = file_changes.create(path)
    try:
        with readable(sealed.path):
            source = sealed.path.open("rb", buffering=0)
        with source:
            while True:
                with readable(sealed.path):
                    block = source.read(_BLOCK_BYTES)
                go_on()
                if not block:
                    break
                file_changes.write_at(fd, block, size, path)
                sha256.update(block)
                size += len(block)
        file_changes.sync(fd, path)
    finally:
        os.close(fd)
    go_on()
    if size != sealed.size:
        raise Damaged(f"{size} of {sealed.size} bytes")
    if sha256.hexdigest() != sealed.digest:
        raise Damaged("its bytes are not the sealed ones")


def _digest(path: Path, go_on: GoOn) -> str:
    """Return the SHA-256 of a file as the medium gives it back."""
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK_BYTES):
            go_on()
            sha256.update(block)
    return sha256.hexdigest()

"""The file of a checkpoint: written with its digest while training goes on, copied to and from a mount, and loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar, cast

import torch

from colabkit.foundation import Corrupt, NotMounted, can_hang, cannot, file_changes, mounts
from colabkit.storage import MOVED_BLOCK_BYTES, MoveCallback, SlowMount, check_written, write_blocks
from colabkit.training.checkpoints.seals import (
    DamagedCheckpoint,
    SealedCheckpoint,
    is_marked,
    marker,
    prune,
    put,
    readable,
    sealed_in,
)
from colabkit.training.checkpoints.snapshots import ContentCopy, unsafe

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

THREAD_NAME = "colabkit-checkpoint"

STALLED_S = 120.0
"""Seconds in which a mount or a disk has to answer, or to take or give something."""

TICK_S = 0.5
"""The longest wait for a lock: a signal that arrives just before one would be noticed only after it."""

_BLOCK_BYTES = 16 << 20
_GATHERED_BYTES = 1 << 20
_NICE = 10  # a tenth of a CPU when training wants all; at 19 a busy machine would hardly ever write


class WriteAborted(Exception):
    """The file is not wanted any more."""


@dataclass(slots=True)
class SaveJob:
    """A checkpoint to write.

    Attributes:
        limit_s: seconds that the file system may leave one operation unanswered.
        is_given_up: whether it left one unanswered for longer, which is noted.
    """

    step: int
    copied: ContentCopy | None
    score: float | None
    started: float
    is_awaited: bool
    is_raised: bool
    limit_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    moved_at: float = field(default_factory=time.monotonic)
    is_given_up: bool = False

    @property
    def left_s(self) -> float:
        """The seconds until the file system has to answer."""
        return self.moved_at + self.limit_s - time.monotonic()

    def moved(self) -> None:
        """Note that the file system has answered; raises `WriteAborted` if nobody wants the checkpoint any more."""
        if self.stop.is_set():
            raise WriteAborted
        self.moved_at = time.monotonic()


def give_way() -> None:
    """Give this thread a lower priority than all others, if the system has priorities of threads.

    Such a thread may be stopped at any point for long, so it should have little to do with the interpreter's lock.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def write(content: Mapping[str, Any], path: Path, act: str, job: SaveJob) -> tuple[int, str]:
    """Write content to a new file, on the medium when it returns, and return its bytes and their SHA-256.

    Digest and writes are made in large blocks, without the interpreter's lock, in a thread that gives way to all
    others. The file is then loaded once, mapped, so that what cannot be loaded is found now, not when it is needed.

    Raises:
        InvalidOption: if `content` holds objects that only an unsafe load would bring back.
        WriteAborted: if the file is not wanted any more.
    """
    fd = file_changes.create(path)
    try:
        with _CheckpointSink(fd, path, job) as sink:
            try:
                with _without_crc(sink):
                    torch.save({"made_by": marker(), "content": content}, cast(IO[bytes], sink))
            except Exception as error:
                if sink.error is not None:
                    raise sink.error from None
                raise unsafe(act, _named(error)) from error
            sink.end()
        file_changes.sync(fd, path)
    finally:
        os.close(fd)
    job.moved()
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise unsafe(act, _named(error)) from error
    return sink.size, sink.digest


def _named(error: Exception) -> str:
    """Return an error of torch in one line; its own text has several, and colours."""
    if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"an object of the type {match[1]}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class _CheckpointSink:
    """The file that `torch.save` writes to: gathers small pieces, digests and writes large ones in another thread.

    Attributes:
        size: bytes that were written.
        error: what a write raised; torch turns errors that pass through it into others.
        was_opened: closed when the first bytes come.
    """

    def __init__(self, fd: int, path: Path, job: SaveJob) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self.was_opened = contextlib.ExitStack()
        self._fd = fd
        self._path = path
        self._job = job
        self._sha256 = hashlib.sha256()
        self._gathered = bytearray()
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        # No executor: the interpreter would wait for its thread at exit, for ever if the disk hangs.
        self._thread = threading.Thread(target=self._put_pieces, name=THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pieces.put(None)
        self._thread.join()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: Buffer) -> int:
        self.was_opened.close()
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        if len(view) + len(self._gathered) < _GATHERED_BYTES:
            self._gathered += view
        else:
            self.end()
            self._hand_over(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch calls it last, and `end` comes after it."""

    def end(self) -> None:
        """Write what was gathered."""
        if self._gathered:
            self._hand_over(memoryview(bytes(self._gathered)))
            self._gathered.clear()

    def _hand_over(self, piece: memoryview) -> None:
        self._pieces.put(piece)
        self.error = self._results.get()
        if self.error is not None:
            raise self.error

    def _put_pieces(self) -> None:
        if not self._job.is_awaited:
            give_way()
        while (piece := self._pieces.get()) is not None:
            error: BaseException | None = None
            try:
                self._put(piece)
            except BaseException as raised:
                error = raised
            self._results.put(error)
            # Neither holds the caller's memory, nor itself through its traceback, until the next piece comes.
            del piece, error

    def _put(self, view: memoryview) -> None:
        for start in range(0, len(view), _BLOCK_BYTES):
            self._job.moved()
            block = view[start : start + _BLOCK_BYTES]
            self._sha256.update(block)
            file_changes.write_at(self._fd, block, self.size, self._path)
            self.size += len(block)
        self._job.moved()


@contextmanager
def _without_crc(sink: _CheckpointSink) -> Iterator[None]:
    """Let `torch.save` leave out its CRCs, which take as long as the writing: the seal has a better digest.

    The option may hold for the whole process, and is read when the file is opened: it is set back with the first bytes.
    """
    former = torch.serialization.get_crc32_options()
    sink.was_opened.callback(torch.serialization.set_crc32_options, former)
    torch.serialization.set_crc32_options(False)
    with sink.was_opened:
        yield


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: its file.
        step: after which it was taken.
        content: what was saved, with all tensors on the CPU.
        passed_over: newer checkpoints that are damaged, with the reason.
    """

    path: Path
    step: int
    content: Mapping[str, Any]
    passed_over: tuple[tuple[Path, str], ...]


def load(sealed: SealedCheckpoint) -> dict[str, Any]:
    """Return the content of a checkpoint; nothing in it is executed.

    Raises:
        DamagedCheckpoint: if it is not what was sealed, or something else.
    """
    sealed.check()
    try:
        found = torch.load(sealed.path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds for files that it did not write
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise
        raise DamagedCheckpoint(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    if not isinstance(found, dict) or not is_marked(found.get("made_by")) or not isinstance(found.get("content"), dict):
        raise DamagedCheckpoint("it is no checkpoint of colabkit")
    content: dict[str, Any] = found["content"]
    return content


class RemoteFolder:
    """A folder of checkpoints on a mount that may hang or die: each access runs in a thread that can be abandoned.

    The mount has to answer in `timeout_s` seconds, None for `STALLED_S`.
    """

    def __init__(self, folder: Path, timeout_s: float | None) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._mount = SlowMount(str(folder), STALLED_S)

    def ask(
        self, act: str, work: Callable[[MoveCallback], T], size: int = 0, on_wait: Callable[[], None] | None = None
    ) -> T:
        """Return what `work` returns; see `SlowMount.call`.

        Raises:
            TimedOut: if the mount answers nothing.
            NotMounted: if the mount is gone, and the folder would be one of this machine.
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
        """Copy a local checkpoint here, remove old ones (see `prune`), and return those that are here, newest first.

        `step` is that of the newest local one; `on_wait` is called some times a second, and may raise to leave it.
        """
        act = f"publish {str(sealed.path)!r} to {str(self.folder)!r}"

        def fill(path: Path, moved: MoveCallback) -> tuple[int, str]:
            give_way()
            try:
                crc = write_blocks(path, _blocks(sealed), moved)
            except DamagedCheckpoint as error:
                needed = "the bytes that were sealed"
                raise Corrupt(cannot(act, str(error), needed, "See to the disk it is on")) from error
            check_written(act, sealed.path.name, path, sealed.size, crc, moved)
            return sealed.size, sealed.digest

        def work(moved: MoveCallback) -> list[SealedCheckpoint]:
            is_there = any(one.digest == sealed.digest and one.is_whole() for one in sealed_in(self.folder))
            if not is_there:
                put(self.folder, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, moved), act)
            moved()
            return prune(self.folder, step, keep_last, judge, damaged)

        return self.ask(act, work, sealed.size, on_wait)

    def fetch(self, sealed: SealedCheckpoint, near: Path, act: str) -> SealedCheckpoint:
        """Copy a checkpoint from here to the folder `near`, and return the copy.

        Raises:
            DamagedCheckpoint: if it is not what was sealed.
        """

        def fill(path: Path, moved: MoveCallback) -> tuple[int, str]:
            write_blocks(path, _blocks(sealed), moved)
            return sealed.size, sealed.digest

        def work(moved: MoveCallback) -> SealedCheckpoint | DamagedCheckpoint:
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

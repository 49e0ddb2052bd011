"""Checkpoint files: write them with a digest in the background, copy them to and from a mount, and load them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar, cast

import torch

from colabkit.foundation import (
    Corrupt,
    NotMounted,
    call,
    can_hang,
    cannot,
    file_changes,
    format_things,
    has_started,
    mounts,
)
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
from colabkit.training.checkpoints.snapshots import ContentCopy, lacks_memory, unsavable

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

THREAD_NAME = "colabkit-checkpoint"

CHECKPOINT_STALLED_S = 120.0
"""Default number of seconds within which a mount or a disk must answer or transfer data."""

TICK_S = 0.5
"""Maximum seconds of one wait for a condition: a signal that arrives just before it is handled only after it."""

_BLOCK_BYTES = 16 << 20
_GATHERED_BYTES = 1 << 20
# Niceness of the writer, which then gets about a tenth of a core if training uses all cores; with 19, hardly any time.
_NICE = 10


class WriteAborted(Exception):
    """The checkpoint is no longer needed."""


@dataclass(slots=True)
class SaveJob:
    """A checkpoint to write.

    Attributes:
        is_awaited: whether the caller waits until the checkpoint is written.
        is_raised: whether the caller receives the error if the write fails.
        limit_s: time limit in seconds for one operation of the file system.
        is_given_up: whether an operation exceeded `limit_s` and the failure is already recorded.
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
        """Seconds left for the file system to answer."""
        return self.moved_at + self.limit_s - time.monotonic()

    def moved(self) -> None:
        """Record that the file system has answered; raise `WriteAborted` if the checkpoint is no longer needed."""
        if self.stop.is_set():
            raise WriteAborted
        self.moved_at = time.monotonic()


def give_way() -> None:
    """Lower the priority of this thread on Linux; do nothing on other systems.

    The system may suspend a low-priority thread for a long time at any point, so such a thread should rarely hold the
    GIL.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def write(content: Mapping[str, Any], path: Path, act: str, job: SaveJob) -> tuple[int, str]:
    """Write content to a new file, flush it to disk, and return its size in bytes and its SHA-256.

    Another thread hashes and writes large blocks without holding the GIL, at low priority unless the caller waits. The
    file is then loaded once, memory-mapped, so that content that cannot be loaded raises now instead of on resuming.

    Raises:
        InvalidOption: if `content` holds objects that cannot be loaded with `weights_only=True`.
        FileFailed: if there is not enough memory.
        WriteAborted: if the checkpoint is no longer needed.
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
                raise unsavable(act, error) from error
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
        raise unsavable(act, error) from error
    return sink.size, sink.digest


class _CheckpointSink:
    """A file object for `torch.save` that buffers small writes, and hashes and writes large blocks in another thread.

    Attributes:
        size: bytes written so far.
        error: the error of a write, kept here because torch replaces errors of the file object with its own.
        at_first_write: exit stack that is closed at the first write.
    """

    def __init__(self, fd: int, path: Path, job: SaveJob) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self.at_first_write = contextlib.ExitStack()
        self._fd = fd
        self._path = path
        self._job = job
        self._sha256 = hashlib.sha256()
        self._gathered = bytearray()
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        # Do not use an executor: the interpreter would wait for its thread at exit, forever if the disk hangs.
        self._thread = threading.Thread(target=self._put_pieces, name=THREAD_NAME, daemon=True)

    def __enter__(self) -> Self:
        has_started(self._thread)
        return self

    def __exit__(self, *error: object) -> None:
        self._pieces.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()

    def write(self, data: Buffer) -> int:
        self.at_first_write.close()
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
        """Do nothing: torch calls this last, and `end`, which is called next, writes the buffered bytes."""

    def end(self) -> None:
        if self._gathered:
            self._hand_over(memoryview(bytes(self._gathered)))
            self._gathered.clear()

    def _hand_over(self, piece: memoryview) -> None:
        self._pieces.put(piece)
        if self._thread.ident is None:
            # The system cannot start another thread, so write in this one.
            self._pieces.put(None)
            self._put_pieces()
        self.error = self._results.get()
        if self.error is not None:
            raise self.error

    def _put_pieces(self) -> None:
        if not self._job.is_awaited and threading.current_thread() is self._thread:
            give_way()
        while (piece := self._pieces.get()) is not None:
            error: BaseException | None = None
            try:
                self._put(piece)
            except BaseException as raised:
                error = raised
            self._results.put(error)
            # Drop references to the caller's memory, and to the error with its traceback, before waiting for the next
            # piece.
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
    """Make `torch.save` skip the CRC32, which takes as long as writing; the seal holds a SHA-256 instead.

    The option may apply to all threads. Torch reads it on opening the file, so it can be restored at the first write.
    """
    former = torch.serialization.get_crc32_options()
    sink.at_first_write.callback(torch.serialization.set_crc32_options, former)
    torch.serialization.set_crc32_options(False)
    with sink.at_first_write:
        yield


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A loaded checkpoint.

    Attributes:
        path: path of the `.pt` file.
        step: step after which the checkpoint was taken.
        content: the saved content, with all tensors on the CPU.
        skipped_checkpoints: checkpoints tried before this one that are damaged or have a flaw, each with the reason.
    """

    path: Path
    step: int
    content: Mapping[str, Any]
    skipped_checkpoints: tuple[tuple[Path, str], ...]


def load(sealed: SealedCheckpoint) -> dict[str, Any]:
    """Return the content of a checkpoint, without executing code from it.

    Raises:
        DamagedCheckpoint: if the file does not match its seal or is not a colabkit checkpoint.
    """
    sealed.check()
    try:
        found = torch.load(sealed.path, map_location="cpu", weights_only=True)
    # For files that it did not write, torch raises errors of many types.
    except Exception as error:
        if lacks_memory(error):
            raise
        raise DamagedCheckpoint(_flaw_of(error)) from error
    if not isinstance(found, dict) or not is_marked(found.get("made_by")) or not isinstance(found.get("content"), dict):
        raise DamagedCheckpoint("the file is not a colabkit checkpoint")
    content: dict[str, Any] = found["content"]
    return content


def _flaw_of(error: Exception) -> str:
    """Return the reason why torch cannot load a file, without torch's advice to load it unsafely."""
    if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in str(error):
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    unsafe_object = re.search(r"GLOBAL ([\w.]+)", str(error))
    found = f"it contains {unsafe_object[1]!r}" if unsafe_object else "it contains more than tensors and plain values"
    return f"{found}, so loading it could run code; do not load it unless you trust its origin"


def load_first(
    candidates: Iterable[SealedCheckpoint],
    read: Callable[[SealedCheckpoint], Mapping[str, Any]],
    flaw_of: Callable[[Mapping[str, Any]], str] | None,
) -> tuple[LoadedCheckpoint | None, dict[Path, str], Collection[str]]:
    """Return the first checkpoint without damage or flaw, the reason for each skipped one, and the flawed digests.

    If all undamaged checkpoints have a flaw, the first of them is returned; if all checkpoints are damaged, None.

    Args:
        candidates: checkpoints, newest first.
        read: function that returns the content of a checkpoint, or raises `DamagedCheckpoint`.
        flaw_of: function that returns the flaw of a checkpoint's content, or an empty text; None for no check.
    """
    skipped: dict[Path, str] = {}
    flaws: dict[str, str] = {}
    candidates = list(candidates)
    for sealed in candidates:
        # Skip the other copy of a flawed checkpoint, local or remote, because it has the same content.
        if sealed.digest in flaws:
            continue
        try:
            content = read(sealed)
        except DamagedCheckpoint as error:
            skipped[sealed.path] = str(error)
            continue
        if flaw_of is not None and (flaw := flaw_of(content)):
            skipped[sealed.path] = flaws[sealed.digest] = flaw
            continue
        return LoadedCheckpoint(sealed.path, sealed.step, content, tuple(skipped.items())), skipped, flaws
    if flaws:
        return load_first(candidates, read, None)
    return None, skipped, flaws


class RemoteFolder:
    """A checkpoint folder on a mount that may hang or die: each access runs in a thread that can be abandoned.

    The mount must answer within `timeout_s` seconds; None means `CHECKPOINT_STALLED_S`.
    """

    def __init__(self, folder: Path, timeout_s: float | None) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._mount = SlowMount(str(folder), CHECKPOINT_STALLED_S)

    def ask(
        self, act: str, work: Callable[[MoveCallback], T], size: int = 0, on_wait: Callable[[], None] | None = None
    ) -> T:
        """Run `work` on the mount and return its result; see `SlowMount.call`.

        Raises:
            TimedOut: if the mount does not answer.
            NotMounted: if the mount no longer exists, so that the path would be on the local disk.
        """
        if not can_hang(str(self.folder), mounts()):
            found = f"the mount of {str(self.folder)!r} is gone"
            next_step = ("If it was Google Drive, run ", call("mount"), "; otherwise mount it again")
            raise NotMounted(cannot(act, found, "", next_step))
        self._mount.stalled_s = self._timeout_s or CHECKPOINT_STALLED_S
        return self._mount.call(act, work, largest_bytes=size, on_wait=on_wait)

    def publish(
        self,
        sealed: SealedCheckpoint,
        step: int,
        keep_last: int,
        metric: str,
        damaged: Collection[Path],
        on_wait: Callable[[], None],
    ) -> list[SealedCheckpoint]:
        """Copy a local checkpoint to this folder, remove old checkpoints, and return the remaining ones, newest first.

        `step` is the step of the newest local checkpoint. `keep_last`, `metric` and `damaged` are arguments of `prune`.
        `on_wait` is called a few times a second and may raise to abort.
        """
        act = f"publish {str(sealed.path)!r} to {str(self.folder)!r}"

        def fill(path: Path, moved: MoveCallback) -> tuple[int, str]:
            give_way()
            try:
                crc = write_blocks(path, _blocks(sealed), moved)
            except DamagedCheckpoint as error:
                raise Corrupt(cannot(act, str(error), "", "Check the local disk")) from error
            check_written(act, sealed.path.name, path, sealed.size, crc, moved)
            return sealed.size, sealed.digest

        def work(moved: MoveCallback) -> list[SealedCheckpoint]:
            is_there = any(one.digest == sealed.digest and one.is_whole() for one in sealed_in(self.folder))
            if not is_there:
                put(self.folder, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, moved), act)
            moved()
            return prune(self.folder, step, keep_last, metric, damaged)

        return self.ask(act, work, sealed.size, on_wait)

    def fetch(self, sealed: SealedCheckpoint, local: Path, act: str) -> SealedCheckpoint:
        """Copy a checkpoint from this folder to the local folder `local`, and return the copy.

        Raises:
            DamagedCheckpoint: if the checkpoint does not match its seal.
        """

        def fill(path: Path, moved: MoveCallback) -> tuple[int, str]:
            write_blocks(path, _blocks(sealed), moved)
            return sealed.size, sealed.digest

        def work(moved: MoveCallback) -> SealedCheckpoint | DamagedCheckpoint:
            try:
                sealed.check_size()
                return put(local, sealed.step, sealed.rated, sealed.size, lambda path: fill(path, moved), act)
            except DamagedCheckpoint as error:
                return error

        found = self.ask(act, work, sealed.size)
        if isinstance(found, DamagedCheckpoint):
            raise found
        return found


def _blocks(sealed: SealedCheckpoint) -> Generator[bytes, None, None]:
    """Yield the bytes of a checkpoint's file; at the end, raise `DamagedCheckpoint` if they do not match the seal."""
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
        raise DamagedCheckpoint(f"the file has {format_things(size, 'byte')} instead of {sealed.size:,}")
    if sha256.hexdigest() != sealed.digest:
        raise DamagedCheckpoint("the file does not match its SHA-256")

"""The only place that changes files.

Every artefact of colabkit comes to be in one way: a private partial beside its final path (`_partials`), filled, then
renamed. So a final path is absent, the complete old thing or the complete new thing, at every instant and after any
kill.

Each operation that changes the file system first passes `_step`. Tests put a hook there that counts the operations,
fails the n-th with any error, or kills the process at it; nothing else in the package writes, so the count is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from colabkit.foundation.environment.limits import is_tmpfs, memory_limits
from colabkit.foundation.errors import ColabkitError, FileFailed, NotEnoughSpace, cannot
from colabkit.foundation.mount_table import read_file, trouble
from colabkit.foundation.units import format_bytes

if TYPE_CHECKING:
    import h5py
    from typing_extensions import Buffer

HDF5_USER_BLOCK_BYTES = 4096
_COPY_BYTES = 1 << 20
_SENT_BYTES = 16 << 20
hook: Callable[[str, Path], None] | None = None
"""Called before each change with the operation's name and path; only tests set it."""


def _step(operation: str, path: Path) -> None:
    if hook is not None:
        hook(operation, path)


@contextmanager
def translated(act: str) -> Iterator[None]:
    """Turn an `OSError` of the block into the family's error, in one line that names `act` and the cause."""
    try:
        yield
    except ColabkitError:
        raise
    except OSError as error:
        if known := trouble(error):
            kind = NotEnoughSpace if error.errno == errno.ENOSPC else FileFailed
            raise kind(cannot(act, known[0], "a mount that works", known[1])) from error
        name = f" ({os.fspath(error.filename)!r})" if isinstance(error.filename, str | os.PathLike) else ""
        reason = f"{error.strerror or error}{name}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(
                cannot(act, reason, "room for all of it", "Free some space or choose another target")
            ) from error
        needed, next_step = "a file system that allows it", "Check the path and its permissions, or mount it again"
        if error.errno == errno.ENOENT:
            needed, next_step = "a path that is there", "Check the path, or mount it again"
        raise FileFailed(cannot(act, reason, needed, next_step)) from error


def make_folder(path: Path) -> None:
    """Create a folder and its parents where they are missing."""
    if not path.is_dir():
        _step("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)


def make_private_folder(path: Path) -> None:
    """Create a folder, in a place that is open to all, that only this user may enter."""
    make_folder(path.parent)
    if not path.is_dir():
        _step("mkdir", path)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def create(path: Path) -> int:
    """Create a file that did not exist and return its descriptor, open for reading and writing."""
    _step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def reopen(path: Path) -> int:
    """Return the descriptor of a file that is there, open for reading and writing."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def open_lock(path: Path) -> int:
    """Return the descriptor of a file that serves as a lock; it is made where it is missing."""
    _step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def reserve(fd: int, size: int, path: Path) -> None:
    """Reserve `size` bytes, so that later writes, also through a mapping, cannot run out of space."""
    _step("reserve", path)
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def write_at(fd: int, data: Buffer, offset: int, path: Path) -> None:
    """Write all of `data` at `offset`."""
    _step("write", path)
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def copy_range(fd: int, offset: int, size: int, to_fd: int, to_offset: int, path: Path) -> None:
    """Copy bytes from one open file to another, in the kernel where it can."""
    _step("write", path)
    while size:
        try:
            copied = os.copy_file_range(fd, to_fd, size, offset, to_offset)
        except (AttributeError, OSError):  # another platform, or file systems that cannot together
            block = os.pread(fd, min(size, _COPY_BYTES), offset)
            copied = os.pwrite(to_fd, block, to_offset)
        if not copied:
            raise OSError(errno.EIO, "the file ended while it was copied")
        offset, to_offset, size = offset + copied, to_offset + copied, size - copied


def link(path: Path, to: Path) -> None:
    """Give a file another name on the same file system; its bytes are there once."""
    _step("link", to)
    os.link(path, to, follow_symlinks=False)


def link_or_copy(path: Path, to: Path) -> None:
    """Give a file, or a link, another name; on another file system a copy."""
    try:
        link(path, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _step("create", to)
        shutil.copy2(path, to, follow_symlinks=False)


def sync(fd: int, path: Path) -> None:
    """Wait until the file's bytes are on the medium."""
    _step("sync", path)
    os.fsync(fd)


class BackgroundSync:
    """Sends what is written to a file to the medium while more is made, so that the last `sync` waits for little.

    It changes nothing that could be lost, so it is no step; errors are left to `sync`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._unsent = 0
        self._thread: threading.Thread | None = None

    def written(self, size: int) -> None:
        """Note that so many bytes more were written."""
        self._unsent += size
        if self._unsent >= _SENT_BYTES and (self._thread is None or not self._thread.is_alive()):
            self._unsent = 0
            self._thread = threading.Thread(target=self._send, name="colabkit-sync", daemon=True)
            self._thread.start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            os.close(self._fd)


def write_file(path: Path, data: Buffer, durable: bool = False) -> None:
    """Create `path` with `data`; on the medium when it returns if `durable`. Not atomic: use it inside a partial."""
    fd = create(path)
    try:
        write_at(fd, data, 0, path)
        if durable:
            sync(fd, path)
    finally:
        os.close(fd)


@contextmanager
def create_hdf5(path: Path) -> Iterator[h5py.File]:
    """Create an HDF5 file; its first page is a user block, which HDF5 leaves alone."""
    import h5py

    os.close(create(path))  # so that a refusal is the system's own, which says less and tells more than HDF5's
    # Data sets of a page and more start on a page, so that maps and int64 views of them are aligned.
    page = HDF5_USER_BLOCK_BYTES
    with h5py.File(
        path, "w", locking=False, alignment_threshold=page, alignment_interval=page, userblock_size=page
    ) as file:
        yield file


def touch(path: Path) -> None:
    """Give a file the time of now; this changes no content, so it is no step."""
    os.utime(path)


def remove(path: Path) -> None:
    """Remove a file or a whole folder; nothing happens where there is none."""
    _step("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_empty_folder(path: Path) -> None:
    """Remove a folder if it is there and empty."""
    _step("remove", path)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def rename(path: Path, to: Path) -> None:
    """Give a file or folder another name; a file that has it is replaced."""
    _step("rename", path)
    os.replace(path, to)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system that holds, or will hold, `path`."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize


def used_bytes(path: Path) -> int:
    """Return the bytes that are taken of the file system that holds a folder."""
    stats = os.statvfs(path)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def disk_bytes(path: Path) -> int:
    """Return the disk space that a file, or all files of a folder, take; files that vanish meanwhile count nothing."""
    total = 0
    for file in (
        [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    ):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_blocks * 512
    return total


def check_space(act: str, needed: int, path: Path, available: int | None = None) -> None:
    """Refuse, before anything is written, what will not fit at `path`.

    Args:
        act: verb and object for the message.
        needed: bytes that will be written.
        path: where they go.
        available: a tighter limit than the file system's own, in bytes.

    Raises:
        NotEnoughSpace: naming both numbers.
    """
    free = free_bytes(path)
    if is_tmpfs(path):  # its bytes are RAM, of which a cgroup may allow less than the file system says
        free = min(free, memory_limits(read_file).available_bytes)
    if available is not None:
        free = min(free, available)
    if needed > free:
        where = f"{format_bytes(free)} free at {str(path.parent)!r}"
        raise NotEnoughSpace(
            cannot(act, where, f"{format_bytes(needed)} needed", "Free some space or choose another target")
        )

"""All changes to the file system.

Every output file or folder is created atomically: it is written to a private partial next to its final path (see
`partials`) and then renamed. At any time, even after a kill, the final path is missing, or holds either the complete
old version or the complete new one.

Each operation that changes files or folders, and not only their times, first calls `_step`; so does opening a file to
change it. Tests set a hook there to count the operations, or to raise an error or kill the process at the n-th. No
other module changes files; tests/system/test_file_change_seam.py checks this with `strace`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Self

from colabkit.foundation.environment.limits import is_tmpfs, memory_limits
from colabkit.foundation.errors import ColabkitError, FileFailed, NotEnoughSpace
from colabkit.foundation.messages import cannot
from colabkit.foundation.mount_table import WriteError, mount_holding, mounts, read_file, trouble
from colabkit.foundation.processes import has_started
from colabkit.foundation.units import format_bytes

if TYPE_CHECKING:
    import h5py
    from typing_extensions import Buffer

HDF5_USER_BLOCK_BYTES = 4096
_COPY_BYTES = 1 << 20
_RECURSION = 100
_SENT_BYTES = 16 << 20
# RAM to keep free for the buffers of this process while it writes to a tmpfs; otherwise, the kernel could kill it.
_OWN_BYTES = 64 << 20
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOTDIR)
# A file system without hard links, or a file of another user, allows only copies.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
hook: Callable[[str, Path], None] | None = None
"""Called before each change with the name of the operation and the path; set only by tests."""


def _step(operation: str, path: Path) -> None:
    if hook is not None:
        hook(operation, path)


def _foreign(error: OSError) -> OSError | None:
    """Return an error if the user's code, another package or a worker process raised it, otherwise None."""
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    is_own = modules <= {__name__.partition(".")[0], *sys.stdlib_module_names}
    # Errors of worker processes have their traceback as a note or as their cause.
    return None if is_own and error.__cause__ is None and not hasattr(error, "__notes__") else error


@contextmanager
def translated(act: str) -> Iterator[None]:
    """Convert an `OSError` in the block to a colabkit error that names `act` and the cause; keep colabkit errors."""
    try:
        yield
    except ColabkitError:
        raise
    except OSError as error:
        if known := trouble(error):
            kind = NotEnoughSpace if error.errno == errno.ENOSPC else FileFailed
            cause, advice = known
            raise kind(cannot(act, cause, "", advice)) from error
        path = Path(error.filename) if isinstance(error.filename, str | os.PathLike) else None
        if path is not None and error.errno in _REFUSALS:
            found, next_step = _refusal(error.errno, path)
            raise FileFailed(cannot(act, found, "", next_step)) from _foreign(error)
        reason = f"{error.strerror or error}{'' if path is None else f' ({str(_visible(path))!r})'}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            space = "Free some space or choose another target"
            raise NotEnoughSpace(cannot(act, reason, "", space)) from _foreign(error)
        next_step = "Check the path and its permissions, and that its disk or mount works"
        if error.errno == errno.ENOENT:
            next_step = "Check the path, and that its disk is mounted"
        elif error.errno == errno.EIO:
            next_step = "Try again; if the error persists, check that the disk or mount works"
        raise FileFailed(cannot(act, reason, "", next_step)) from error


def _visible(path: Path) -> Path:
    """Return the folder in which a hidden partial is, or a path outside of partials unchanged."""
    hidden = (one for one in (*reversed(path.parents), path) if one.name.startswith(".colabkit-"))
    return next((one.parent for one in hidden), path)


def _refusal(number: int, path: Path) -> tuple[str, str]:
    """Return the finding and the advice for a path that the file system refuses to access.

    The finding names the path itself or, if it does not exist, its deepest existing parent.
    """
    at = next((one for one in (path, *path.parents) if one.name and os.path.lexists(one)), path)
    shown = repr(str(at))
    if number == errno.ENOTDIR:
        return f"{shown} is a file, not a folder", "Choose another path"
    kind = "folder" if at.is_dir() else "file"
    return f"permission denied for the {kind} {shown}", f"Check its permissions with ls -ld {shlex.quote(str(at))}"


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist."""
    if not path.is_dir():
        _step("mkdir", path)
        # Do not use `parents=True`, which recurses into each missing parent.
        missing = itertools.takewhile(lambda parent: not parent.is_dir(), (path, *path.parents))
        for folder in reversed([*missing]):
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError:
                if not folder.exists():
                    # It is a link to a missing folder.
                    raise
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def make_private_folder(path: Path) -> None:
    """Create a folder, unless it exists, with access for this user only; for use in shared folders such as `/tmp`."""
    make_folder(path.parent)
    if not path.is_dir():
        _step("mkdir", path)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def create(path: Path) -> int:
    """Create a new file and return its descriptor, open for reading and writing; fail if the path exists."""
    _step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def reopen(path: Path) -> int:
    """Open an existing file for reading and writing and return its descriptor."""
    _step("open", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


@contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """Yield the descriptor of an open file, and close it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_lock(path: Path) -> int:
    """Open a lock file, which is created if missing, and return its descriptor."""
    _step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def open_existing_lock(path: Path) -> int:
    """Open a lock file to test its lock, and return its descriptor, without calling `_step`, since nothing changes."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def reserve(fd: int, size: int, path: Path, *, is_mapped: bool = False) -> None:
    """Reserve `size` bytes, so that later writes cannot run out of space.

    On a platform without `posix_fallocate`, the file only gets this size, as it does on a remote mount unless it
    `is_mapped`: a write to a memory map without space would end the process.
    """
    _step("reserve", path)
    if size == 0:
        return
    mount = None if is_mapped else mount_holding(os.path.realpath(path), mounts())
    if hasattr(os, "posix_fallocate") and (mount is None or not mount.is_remote):
        os.posix_fallocate(fd, 0, size)
    else:
        # Many remote mounts cannot reserve space. The C library would then write a byte per 4 KiB, which takes minutes.
        os.ftruncate(fd, max(size, os.fstat(fd).st_size))


def write_at(fd: int, data: Buffer, offset: int, path: Path) -> None:
    """Write all of `data` at `offset`."""
    _step("write", path)
    view = memoryview(data).cast("B")
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view = view[written:]
            offset += written
    except OSError as error:
        raise WriteError(error.errno, error.strerror, str(path)) from error


def copy_range(fd: int, offset: int, size: int, to_fd: int, to_offset: int, path: Path) -> None:
    """Copy bytes between open files, inside the kernel if supported."""
    _step("write", path)
    while size:
        try:
            copied = os.copy_file_range(fd, to_fd, size, offset, to_offset)
        except (AttributeError, OSError):
            # The platform or one of the file systems does not support `copy_file_range`.
            block = os.pread(fd, min(size, _COPY_BYTES), offset)
            copied = os.pwrite(to_fd, block, to_offset)
        if not copied:
            raise OSError(errno.EIO, "the file became shorter while it was being copied")
        offset, to_offset, size = offset + copied, to_offset + copied, size - copied


def link(path: Path, to: Path) -> None:
    """Create a hard link to a file."""
    _step("link", to)
    os.link(path, to, follow_symlinks=False)


def link_or_copy(path: Path, to: Path) -> None:
    """Create a hard link to a file or symlink, or a copy if that is not possible."""
    try:
        link(path, to)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _step("create", to)
        shutil.copy2(path, to, follow_symlinks=False)


def sync(fd: int, path: Path) -> None:
    """Flush a file to the storage device."""
    _step("sync", path)
    try:
        os.fsync(fd)
    except OSError as error:
        raise WriteError(error.errno, error.strerror, str(path)) from error


class BackgroundSync:
    """A context manager that flushes a file in the background during writes, so that the final `sync` is short.

    It does not call `_step`, since it does not change the file. It ignores errors, which the final `sync` reports.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._unsent = 0
        self._thread: threading.Thread | None = None

    def written(self, size: int) -> None:
        """Count `size` more written bytes, and start a flush if 16 MiB have accumulated and none is running."""
        self._unsent += size
        if self._unsent >= _SENT_BYTES and (self._thread is None or not self._thread.is_alive()):
            self._unsent = 0
            self._thread = threading.Thread(target=self._send, name="colabkit-sync", daemon=True)
            # If no thread can be started, the final `sync` flushes everything.
            has_started(self._thread)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            # macOS has no `fdatasync`.
            getattr(os, "fdatasync", os.fsync)(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join()
        finally:
            os.close(self._fd)


def append(path: Path, data: Buffer) -> None:
    """Append `data` to a file, which is created if missing."""
    _step("append", path)
    with open(path, "ab") as file:
        file.write(data)


def write_file(path: Path, data: Buffer, durable: bool = False) -> None:
    """Create a file with `data`, flushed to the device if `durable`. Not atomic: use it inside a partial."""
    with descriptor(create(path)) as fd:
        write_at(fd, data, 0, path)
        if durable:
            sync(fd, path)


@contextmanager
def create_hdf5(path: Path) -> Iterator[h5py.File]:
    """Yield a new HDF5 file whose first 4 KiB are a user block, which HDF5 itself ignores.

    Raises:
        OSError: at the end of the block, if a write failed, for example because the disk is full.
    """
    import h5py

    # Let datasets of a page or more start at a page boundary, so that memory maps and int64 views are aligned.
    page = HDF5_USER_BLOCK_BYTES
    with _Hdf5Writes(create(path), path) as writes:
        try:
            with h5py.File(writes, "w", alignment_threshold=page, alignment_interval=page, userblock_size=page) as file:
                yield file
        finally:
            if writes.error is not None:
                raise writes.error


class _Hdf5Writes(io.FileIO):
    """A file for HDF5 that stores the first write error in `error` instead of raising it.

    HDF5 raises an unrelated `RuntimeError`, or crashes, if a write of its metadata fails.
    """

    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd, "rb+")
        self.error: BaseException | None = None
        self._path = path

    def write(self, data: Buffer) -> int:
        try:
            if self.error is None:
                write_at(self.fileno(), data, self.tell(), self._path)
        except BaseException as error:
            self.error = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.error is None:
                _step("truncate", self._path)
                return super().truncate(size)
        except BaseException as error:
            self.error = error
        return size or 0


def touch(path: Path) -> None:
    """Set the modification time of a file to now, without calling `_step`: the number of calls depends on time."""
    os.utime(path)


def remove(path: Path) -> None:
    """Remove a file or a folder with its contents; a missing path is ignored."""
    _step("remove", path)
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except (RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EMFILE:
            raise
        # `rmtree` recurses into each folder and keeps it open, so first remove every 100th folder, children first.
        folders = [entry.path for entry in entries_below(path) if entry.is_dir(follow_symlinks=False)]
        for folder in folders[::-_RECURSION]:
            shutil.rmtree(folder)
        shutil.rmtree(path)


def remove_empty_folder(path: Path) -> None:
    """Remove an empty folder; a missing folder is ignored."""
    _step("remove", path)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()


def rename(path: Path, to: Path) -> None:
    """Rename a file or folder; an existing file with the new name is replaced."""
    _step("rename", path)
    os.replace(path, to)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as a hex string."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Return the free bytes for this user on the file system of `path`, which need not exist."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize


def used_bytes(path: Path) -> int:
    """Return the used bytes of the file system that holds a folder."""
    stats = os.statvfs(path)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def disk_bytes(path: Path) -> int:
    """Return the bytes that a file, or all files in a folder, take on disk; missing files count as 0."""
    files = (entry for entry in entries_below(path) if not entry.is_dir(follow_symlinks=False))
    total = 0
    for file in [path] if path.is_file() else files:
        with contextlib.suppress(FileNotFoundError):
            total += file.stat(follow_symlinks=False).st_blocks * 512
    return total


def entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder, each folder before its contents, however deep; follow no links.

    Folders that disappear or cannot be listed are ignored.
    """
    # Before Python 3.12, `os.walk` recurses into each folder.
    waiting = [os.fspath(folder)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield entry


def check_space(act: str, needed: int, path: Path, available: int | None = None) -> None:
    """Check, before writing, that there is enough free space.

    Args:
        act: verb and object for the message.
        needed: number of bytes that will be written.
        path: path that will be written.
        available: additional limit in bytes, apart from the free space of the file system.

    Raises:
        NotEnoughSpace: if there is too little space; the message contains both sizes.
    """
    free = free_bytes(path)
    # Files on tmpfs take RAM, and a cgroup may allow less of it than the file system reports as free.
    if is_tmpfs(path):
        free = min(free, max(0, memory_limits(read_file).available_bytes - _OWN_BYTES))
    if available is not None:
        free = min(free, available)
    if needed > free:
        found, expected = f"{str(path.parent)!r} has {format_bytes(free)} free", f"at least {format_bytes(needed)}"
        raise NotEnoughSpace(cannot(act, found, expected, "Free some space or choose another target"))

"""Locks on folders, made with `flock`, for use by several processes. The kernel releases them when a process ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from colabkit.foundation import file_changes

LOCK = "lock"
FOLDER_STALLED_S = 120.0
"""If a process has not changed its folder for this many seconds, other processes stop waiting for it."""
_BUSY_S = 0.2
# Maximum number of attempts to lock a folder, since other processes may remove the folder during each attempt.
_LOCK_TRIES = 100
_locks: set[int] = set()


def wait_while_busy(
    folder: Path, is_busy: Callable[[], bool], on_wait: Callable[[], None], poll_s: float | None = None
) -> bool:
    """Wait until another process has finished, or has stopped changing files in its folder.

    Args:
        folder: folder that the other process works in.
        is_busy: function that returns whether the other process still holds the lock.
        on_wait: function that is called after each check.
        poll_s: seconds between two checks; by default 0.2.

    Returns:
        Whether the other process has finished.
    """
    while is_busy():
        if not is_changing(folder):
            return False
        on_wait()
        time.sleep(_BUSY_S if poll_s is None else poll_s)
    return True


def is_changing(folder: Path, seconds: float | None = None, own: str = "") -> bool:
    """Return whether a folder or its contents changed in the last seconds, or the folder does not exist.

    Args:
        folder: the folder.
        seconds: number of seconds; by default `FOLDER_STALLED_S`.
        own: name of an entry that the caller has created, which therefore does not count, and neither does the folder.
    """
    since = time.time() - (FOLDER_STALLED_S if seconds is None else seconds)
    entries: Iterator[Path | os.DirEntry[str]] = itertools.chain([folder], file_changes.entries_below(folder))
    for entry in entries:
        if own and (entry == folder or entry.name == own):
            continue
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime > since:
                return True
    return not folder.exists()


def try_lock(fd: int) -> bool | None:
    """Try to lock an open file; return whether it succeeded, or None if the file system does not support locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def release_lock(fd: int) -> None:
    """Release the lock of an open file, also if forked children have inherited its descriptor."""
    # A file system without locks raises an error.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    try:
        fd = file_changes.open_existing_lock(folder / LOCK)
    except OSError:
        return False
    with file_changes.descriptor(fd):
        return try_lock(fd) is False


def lock_folder(folder: Path) -> int | None:
    """Create and lock a folder; forked children do not inherit the lock.

    Returns:
        A descriptor for `unlock`, or None if the file system does not support locks or the folder keeps disappearing.

    Raises:
        BlockingIOError: if another process holds the lock.
    """
    _watch_forks()
    for _ in range(_LOCK_TRIES):
        file_changes.make_folder(folder)
        path = folder / LOCK
        try:
            fd = file_changes.open_lock(path)
        except FileNotFoundError:
            # The owner has finished and removed the folder in the meantime.
            continue
        except BaseException:
            with contextlib.suppress(OSError):
                file_changes.remove_empty_folder(folder)
            raise
        is_ours = try_lock(fd)
        if is_ours:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    _locks.add(fd)
                    return fd
        os.close(fd)
        if is_ours is False:
            raise BlockingIOError(f"another process holds the lock of {folder}")
        if is_ours is None:
            remove_unused(folder)
            return None
    return None


def hold_file(path: Path) -> int | None:
    """Mark a file as in use until `unlock`; several processes may do so, and forked children do not inherit the mark.

    Returns:
        A descriptor for `unlock`, or None if the file does not exist.
    """
    _watch_forks()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    _locks.add(fd)
    return fd


def is_held(path: Path) -> bool:
    """Return whether a process holds a file; the caller must prevent concurrent calls of `hold_file`."""
    # NFS grants an exclusive lock only to those who may write.
    mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
    with file_changes.descriptor(os.open(path, mode | os.O_CLOEXEC)) as fd:
        return not try_lock(fd)


def remove_unused(folder: Path) -> None:
    """Remove a folder that contains nothing but its lock."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            file_changes.remove(folder / LOCK)
            file_changes.remove_empty_folder(folder)


def unlock(fd: int) -> None:
    """Release the lock of a folder."""
    _locks.discard(fd)
    os.close(fd)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Drop inherited locks in a forked process, which may outlive its parent; their descriptors become `/dev/null`."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd in _locks:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _locks.clear()

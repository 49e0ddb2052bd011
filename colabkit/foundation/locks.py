"""Locks between processes: `flock` on a file, which ends with its process, and the wait for another's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from colabkit.foundation import file_changes

LOCK = "lock"
STALLED_S = 120.0
"""A process that changes nothing in its folder for so many seconds is not waited for any longer."""
_BUSY_S = 0.2
_LOCK_TRIES = 100  # others may come and go in between; a file system that answers wrongly must not hold us
_locks: set[int] = set()


def wait_while_busy(folder: Path, is_busy: Callable[[], bool], on_wait: Callable[[], None]) -> bool:
    """Wait for another process, until it is done or no longer changes any file in its folder.

    Args:
        folder: in which the other process works.
        is_busy: returns whether the other process still has the lock.
        on_wait: called about five times a second.

    Returns:
        Whether the other process is done.
    """
    while is_busy():
        if not _is_changing(folder):
            return False
        on_wait()
        time.sleep(_BUSY_S)
    return True


def _is_changing(folder: Path) -> bool:
    """Return whether a folder, or anything in it, changed lately or has just been removed by its owner."""
    since = time.time() - STALLED_S
    for root, _, names in os.walk(folder):
        for name in ("", *names):
            with contextlib.suppress(OSError):
                if os.lstat(os.path.join(root, name)).st_mtime > since:
                    return True
    return not folder.exists()


def try_lock(fd: int) -> bool | None:
    """Lock an open file; return whether it is ours now, None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_locked(folder: Path) -> bool:
    """Return whether another process has the lock of a folder."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return try_lock(fd) is False
    finally:
        os.close(fd)


def lock_folder(folder: Path) -> int | None:
    """Make a folder and return the descriptor that locks it until `unlock`; None where there are no locks.

    Forked children do not have the lock.

    Raises:
        BlockingIOError: while another process has it.
    """
    _watch_forks()
    for _ in range(_LOCK_TRIES):
        file_changes.make_folder(folder)
        path = folder / LOCK
        try:
            fd = file_changes.open_lock(path)
        except FileNotFoundError:
            continue  # its owner finished and removed the folder meanwhile
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
            raise BlockingIOError(f"another process has {folder}")
        if is_ours is None:
            with contextlib.suppress(OSError):  # others may be in it
                file_changes.remove(path)
                file_changes.remove_empty_folder(folder)
            return None
    return None


def unlock(fd: int) -> None:
    """Give up the lock of a folder."""
    _locks.discard(fd)
    os.close(fd)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Give up a parent's locks in a forked process, which may outlive it; their numbers stay taken."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd in _locks:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _locks.clear()

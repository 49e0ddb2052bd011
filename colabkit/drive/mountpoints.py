"""What holds for every type of mount: whether it is alive, asked by a child; taking it away; who serves it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colabkit import _processes
from colabkit.errors import MountFailed, TimedOut, cannot
from colabkit.mounts import Mount, mounts

__all__ = [
    "Daemon",
    "daemons",
    "detach",
    "is_mounted",
    "liveness",
    "mount_failed",
    "serving",
    "wait_until",
]

Liveness = Literal["alive", "dead", "hung"]

PROBE_S = 15.0
"""A mount that does not list its top folder in this time hangs: alive ones answer in milliseconds, slow ones in 2 s."""

NOTHING_WAITS = "nothing waits to be sent; that it reached Drive cannot be seen from here"

_POLL_S = 0.25
_PROBE = """
import os, sys
try:
    for folder in sys.argv[1:]:
        with os.scandir(folder) as entries:
            next(entries, None)
    print("alive")
except OSError as error:
    print(error.errno)
"""


def mount_failed(cause: str, found: str, needed: str, next_step: str, act: str = "mount Drive") -> MountFailed:
    """Return the error of `mount()` with its cause."""
    error = MountFailed(cannot(act, found, needed, next_step))
    error.cause = cause
    return error


def liveness(folders: tuple[str, ...], timeout: float = PROBE_S) -> tuple[Liveness, str]:
    """Return whether a mount answers, and the reason where it does not.

    A child asks, since a mount whose program hangs keeps every process that touches it, beyond the reach of signals.

    Args:
        folders: which must be there and answer.
        timeout: seconds after which it hangs.
    """
    command = _processes.python(_PROBE, *folders)
    try:
        answer = _processes.run(command, f"list {folders[0]!r}", min(timeout, PROBE_S)).output.split()
    except TimedOut:
        return "hung", f"no answer in {min(timeout, PROBE_S):g} s"
    if answer == ["alive"]:
        return "alive", ""
    number = int(answer[-1]) if answer and answer[-1].isdigit() else errno.EIO
    return "dead", f"Errno {number}, {os.strerror(number)}"


def is_mounted(point: str) -> bool:
    """Return whether anything is mounted at a folder."""
    return any(mount.point == point for mount in mounts())


def detach(mount: Mount, timeout: float, lazily: bool = False) -> None:
    """Take a mount away.

    Args:
        mount: which.
        timeout: seconds it may take.
        lazily: at once, also where files are open or its program does not answer; for dead mounts.

    Raises:
        MountFailed: if it is in use, or not this user's.
        TimedOut: if it takes too long.
    """
    act = f"unmount {mount.point!r}"
    commands = [
        *([name, "-u", *(["-z"] if lazily else [])] for name in ("fusermount3", "fusermount")),
        ["umount", *(["-l"] if lazily else [])],
    ]
    said = "none of fusermount3, fusermount and umount is installed"
    before = _count(mount.point)
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        finished = _processes.run([*command, mount.point], act, timeout)
        if _count(mount.point) < before:
            return
        said = " ".join(finished.output.split()) or f"{command[0]} ended with status {finished.status}"
    next_step = "Close the files that are open there, also notebooks' working folders, and try again"
    raise mount_failed("in use", said, "a mount that is not in use", next_step, act)


def _count(point: str) -> int:
    return sum(mount.point == point for mount in mounts())


@dataclass(frozen=True, slots=True)
class Daemon:
    """The program that serves a mount: its process number, its name, its arguments, its environment."""

    pid: int
    program: str
    arguments: tuple[str, ...]
    environ: dict[str, str]


def daemons(name: str) -> Iterator[Daemon]:
    """Yield the running programs of a name, also those that an interpreter runs."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = tuple(os.fsdecode(word) for word in (entry / "cmdline").read_bytes().split(b"\0")[:-1])
            start = 1 if words and os.path.basename(words[0]).startswith("python") else 0
            if len(words) > start and os.path.basename(words[start]) == name:
                yield Daemon(int(entry.name), words[start], words[start + 1 :], _environ(entry))


def serving(name: str, point: str) -> Daemon | None:
    """Return the program of a name that serves the mount at a folder, where it can be seen."""
    return next((daemon for daemon in daemons(name) if point in map(os.path.abspath, daemon.arguments)), None)


def _environ(process: Path) -> dict[str, str]:
    try:
        pairs = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's
        return dict(os.environ)
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def wait_until(is_done: Callable[[], bool], timeout: float, tick: Callable[[float], None] | None = None) -> bool:
    """Return whether a condition came true before the deadline, asking some times a second."""
    started = time.monotonic()
    while not is_done():
        passed = time.monotonic() - started
        if passed >= timeout:
            return False
        if tick is not None:
            tick(passed)
        time.sleep(min(_POLL_S, timeout - passed))
    return True

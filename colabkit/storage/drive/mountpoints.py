"""What holds for every type of mount: whether it is alive, asked by a child; taking it away; who serves it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from colabkit.foundation import Mount, MountFailed, TimedOut, cannot, format_things, mounts, processes

Liveness = Literal["alive", "failing", "dead", "hung"]

PROBE_S = 15.0
"""A mount that does not answer for its size in this time hangs; that answer is never cached, and lists no folder."""

GIVE_UP = "give up what is unsent with colabkit.unmount(force=True)"
NOTHING_WAITS = "nothing waits to be sent; that it reached Drive cannot be seen from here"

_DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})  # what the kernel answers for a program that is gone
_POLL_S = 0.25
_PROBE = """
import os, sys
try:
    os.statvfs(sys.argv[1])
    for folder in sys.argv[1:]:
        os.stat(folder)
    print("alive")
except OSError as error:
    print(error.errno)
"""


def counted_files(count: int | None) -> str:
    """Return a number of files as text; None is one that is not known."""
    return "an unknown number of files" if count is None else format_things(count, "file")


def mount_failed(cause: str, found: str, needed: str, next_step: str, act: str = "mount Drive") -> MountFailed:
    """Return the error of `mount()` with its cause."""
    error = MountFailed(cannot(act, found, needed, next_step))
    error.cause = cause
    return error


def liveness(folders: tuple[str, ...], timeout: float = PROBE_S) -> tuple[Liveness, str]:
    """Return whether a mount answers, and the reason where it does not: its program is dead, hangs, or answers errors.

    A child asks, since a mount whose program hangs keeps every process that touches it, beyond the reach of signals.

    Args:
        folders: which must be there and answer.
        timeout: seconds after which it hangs.
    """
    command = processes.python(_PROBE, *folders)
    try:
        answer = processes.run(command, f"ask {folders[0]!r}", min(timeout, PROBE_S)).output.split()
    except TimedOut:
        return "hung", f"no answer in {min(timeout, PROBE_S):g} s"
    if answer == ["alive"]:
        return "alive", ""
    if not answer or not answer[-1].isdigit():
        return "failing", "the child that asked it ended early"
    number = int(answer[-1])
    state: Liveness = "dead" if number in _DEAD else "failing"
    return state, f"Errno {number}, {os.strerror(number)}"


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
    deadline = time.monotonic() + timeout
    for name, *options in commands:
        program = processes.program(name)
        if program is None:
            continue
        left = max(0.1, deadline - time.monotonic())
        finished = processes.run([program, *options, mount.point], act, left)
        if _count(mount.point) < before:
            return
        said = " ".join(finished.output.split()) or f"{name} ended with status {finished.status}"
    next_step = "Close the files that are open there, also notebooks' working folders, and try again"
    raise mount_failed("in use", said, "a mount that is not in use", next_step, act)


def _count(point: str) -> int:
    return sum(mount.point == point for mount in mounts())


@dataclass(frozen=True, slots=True)
class Daemon:
    """The program that serves a mount: its process number, its name, its arguments, its environment, its folder."""

    pid: int
    program: str
    arguments: tuple[str, ...] = field(repr=False)  # both can hold secrets
    environ: dict[str, str] = field(repr=False)
    folder: str = "/"


def daemons(name: str) -> Iterator[Daemon]:
    """Yield this user's running programs of a name, also those that Python runs."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = tuple(os.fsdecode(word) for word in (entry / "cmdline").read_bytes().split(b"\0")[:-1])
            start = 1 if words and os.path.basename(words[0]).startswith("python") else 0
            if len(words) > start and os.path.basename(words[start]) == name:
                environ, folder = _environ(entry), os.readlink(entry / "cwd")
                yield Daemon(int(entry.name), words[start], words[start + 1 :], environ, folder)


def serving(name: str, point: str) -> Iterator[Daemon]:
    """Yield the programs of a name that have a folder among their arguments, of those that can be seen."""
    for daemon in daemons(name):
        if any(os.path.normpath(os.path.join(daemon.folder, word)) == point for word in daemon.arguments):
            yield daemon


def _environ(process: Path) -> dict[str, str]:
    pairs = (process / "environ").read_bytes().split(b"\0")
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

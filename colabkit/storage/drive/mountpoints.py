"""Find, check and unmount Drive mounts of any type, and find the programs that serve them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from colabkit.foundation import (
    DRIVE_TYPES,
    DRIVEFS,
    InvalidOption,
    Mount,
    MountFailed,
    NotMounted,
    Place,
    TimedOut,
    call,
    cannot,
    drive_mounts,
    file_changes,
    format_things,
    heartbeat,
    mount_holding,
    mounts,
    option,
    processes,
    user_path,
)

Liveness = Literal["alive", "failing", "dead", "hung"]

PROBE_S = 15.0
"""Seconds within which a mount must answer a check; otherwise it counts as hanging."""

NO_UPLOADS = "no pending uploads; whether all writes reached Drive cannot be checked from here"
"""State of the writes once the program that serves the mount reports no pending uploads."""

# The kernel returns these errors when the program that serves the mount has ended.
_DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
_POLL_S = 0.25
_PROBE = """
import os, sys
try:
    # The kernel caches the result of `stat`, but not that of `statvfs`.
    os.statvfs(sys.argv[1])
    for folder in sys.argv[1:]:
        os.stat(folder)
    print("alive")
except OSError as error:
    print(error.errno)
"""


def counted_files(count: int | None) -> str:
    """Return a number of files as text; None stands for an unknown number."""
    return "an unknown number of files" if count is None else format_things(count, "file")


def liveness(folders: tuple[str, ...], timeout: float = PROBE_S) -> tuple[Liveness, str]:
    """Return a mount's state and, unless it is alive, the reason.

    A mount is `"dead"` if its program has ended, `"hung"` if it does not answer in time, and `"failing"` if it returns
    other errors. A child process accesses the mount, since a process that touches a hanging mount blocks, and Ctrl-C
    does not interrupt it. The first of `folders` is the mount point; all of them must exist.
    """
    command = processes.python(_PROBE, *folders)
    try:
        answer = processes.run(command, f"check {folders[0]!r}", min(timeout, PROBE_S)).output.split()
    except TimedOut:
        return "hung", f"no answer within {min(timeout, PROBE_S):g} s"
    if answer == ["alive"]:
        return "alive", ""
    if not answer or not answer[-1].isdigit():
        return "failing", "the process that checked it ended early"
    number = int(answer[-1])
    state: Liveness = "dead" if number in _DEAD else "failing"
    return state, f"Errno {number}, {os.strerror(number)}"


def mounts_at(point: str) -> int:
    """Return the number of mounts stacked on a folder."""
    return sum(mount.point == point for mount in mounts())


def detach(mount: Mount, timeout: float, lazily: bool = False) -> None:
    """Unmount a file system; with `lazily`, even if files on it are open or its program does not answer.

    Raises:
        MountFailed: if the mount is in use or belongs to another user, or if no unmount program is installed.
        TimedOut: if unmounting takes longer than `timeout` seconds.
    """
    act = f"unmount {mount.point!r}"
    commands = [
        *([name, "-u", *(["-z"] if lazily else [])] for name in ("fusermount3", "fusermount")),
        ["umount", *(["-l"] if lazily else [])],
    ]
    reasons = []
    before = mounts_at(mount.point)
    deadline = time.monotonic() + timeout
    for name, *options in commands:
        program = processes.program(name)
        if program is None:
            continue
        left = max(0.1, deadline - time.monotonic())
        finished = processes.run([program, *options, mount.point], act, left)
        if mounts_at(mount.point) < before:
            return
        reasons.append(" ".join(finished.output.split()) or f"{name} ended with status {finished.status}")
    if not reasons:
        missing = "none of fusermount3, fusermount and umount is installed"
        raise MountFailed(cannot(act, missing, "", "Install fuse3"), cause="in use")
    next_step = "Close the files that are open on it, leave its folders in all notebooks and terminals, and try again"
    raise MountFailed(cannot(act, reasons[-1], "", next_step), cause="in use")


@dataclass(frozen=True, slots=True)
class Daemon:
    """The program that serves a mount: process ID, path, arguments, environment and working folder."""

    pid: int
    program: str
    # Arguments and environment can hold secrets, so the repr omits them.
    arguments: tuple[str, ...] = field(repr=False)
    environ: dict[str, str] = field(repr=False)
    folder: str = "/"


def daemons(name: str) -> Iterator[Daemon]:
    """Yield the running programs with the given name that this user may inspect, including Python scripts."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = tuple(os.fsdecode(word) for word in (entry / "cmdline").read_bytes().split(b"\0")[:-1])
            start = 1 if words and os.path.basename(words[0]).startswith("python") else 0
            if len(words) > start and os.path.basename(words[start]) == name:
                pairs = (entry / "environ").read_bytes().split(b"\0")
                environ = dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
                yield Daemon(int(entry.name), words[start], words[start + 1 :], environ, os.readlink(entry / "cwd"))


def serving(name: str, point: str) -> Iterator[Daemon]:
    """Yield the visible programs with the given name that have the folder `point` among their arguments."""
    for daemon in daemons(name):
        if any(os.path.normpath(os.path.join(daemon.folder, word)) == point for word in daemon.arguments):
            yield daemon


def wait_until(is_done: Callable[[], bool], timeout: float, tick: Callable[[float], None] | None = None) -> bool:
    """Poll a condition several times a second; return whether it came true before the deadline."""
    started = time.monotonic()
    while not is_done():
        passed = time.monotonic() - started
        if passed >= timeout:
            return False
        if tick is not None:
            tick(passed)
        time.sleep(min(_POLL_S, timeout - passed))
    return True


class DriveMount(ABC):
    """A mount of Drive and the program that serves it.

    Attributes:
        mount: the mount's entry in the mount table.
        steps: the steps of `clear`, for the report.
        is_remounted: whether `send` unmounts Drive and mounts it again.
        frees_contents: whether `clear` removes file contents from the disk.
    """

    mount: Mount
    steps: ClassVar[tuple[str, ...]]
    is_remounted: ClassVar[bool] = False
    frees_contents: ClassVar[bool] = True

    @abstractmethod
    def unsent(self) -> int | None:
        """Return the number of files waiting to be uploaded; None if unknown."""

    @abstractmethod
    def cache_folder(self) -> Path | None:
        """Return the cache folder; None if unknown."""

    def cached(self) -> list[Path]:
        """Return the files and folders that `clear` removes."""
        return []

    def cache_bytes(self) -> int:
        """Return the disk space that the cache takes up, in bytes."""
        return sum(map(file_changes.disk_bytes, self.cached()))

    @abstractmethod
    def send(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes and return their known state.

        Raises:
            TimedOut: if the writes are not sent in time; sending continues.
            UnsentWrites: if the writes cannot be sent, or their state is unknown.
            MountFailed: if Drive cannot be mounted again, or rclone's remote control fails.
        """

    @abstractmethod
    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes, unmount, and return the known state of the writes; raise the errors of `send`."""

    @abstractmethod
    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str:
        """Clear the cache and return a description of lost writes, `""` for none; without `force`, none are lost.

        Raises the errors of `send`.
        """

    def wait_for_uploads(self, act: str, timeout: float, progress: bool) -> None:
        """Wait until no file is left to upload.

        Raises:
            TimedOut: if files are or may be left at the deadline; the message gives their number, if known.
        """
        with heartbeat("upload", timeout, progress) as tick:
            if wait_until(lambda: self.unsent() == 0, timeout, tick):
                return
        found = f"the upload of {counted_files(self.unsent())} did not finish within {timeout:g} s"
        raise TimedOut(cannot(act, found, "", ("Allow more time with ", option("timeout"))))


def find_drive(act: str, place: Place, point: str | None) -> Mount | None:
    """Return the existing mount for `mount()`, or None; where `google.colab` works, consider only DriveFS mounts."""
    table = mounts()
    table = [mount for mount in table if mount.point == point and mount.fstype in DRIVE_TYPES] or table
    if place.can_mount_drive:
        table = [mount for mount in table if mount.fstype == DRIVEFS]
    return _only_drive(act, table)


def find_mount(path: str | os.PathLike[str] | None, act: str) -> Mount:
    """Return the Drive mount that holds a path; without a path, that of `COLABKIT_DRIVE`, or else the only one.

    Raises:
        NotMounted: if Drive is not mounted, if there are several Drive mounts and no path, or if the path is not on a
            remote mount.
        InvalidOption: if the path is on another type of remote mount.
    """
    table = mounts()
    if path is None and not os.environ.get("COLABKIT_DRIVE"):
        if only := _only_drive(act, table):
            return only
        raise NotMounted(cannot(act, "Drive is not mounted", "", ("Run ", call("mount"), " first")))
    path = "drive:" if path is None else path
    holding = mount_holding(os.path.abspath(user_path(path, act)), table)
    if holding is None or not holding.is_remote:
        act = f"{act.partition(' Drive')[0]} {os.fspath(path)!r}"
        next_step = ("Pass a path on the Drive mount, which ", call("runtime"), " shows")
        raise NotMounted(cannot(act, "this path is not on a Drive mount", "", next_step))
    if holding.fstype not in DRIVE_TYPES:
        found = f"the mount at {holding.point!r} is of type {holding.fstype}"
        expected = f"one of {', '.join(DRIVE_TYPES)}"
        raise InvalidOption(cannot(act, found, expected, "Use the program that mounted it"))
    return holding


def _only_drive(act: str, table: list[Mount]) -> Mount | None:
    found = drive_mounts(table)
    if len(found) > 1:
        points = ", ".join(repr(mount.point) for mount in found)
        several = f"{len(found)} Drive mounts were found ({points})"
        raise NotMounted(cannot(act, several, "", "Pass the path of one of them"))
    return found[0] if found else None


def check_unused(found: Mount, act: str, force: bool) -> None:
    """Raise `MountFailed` if this process's working folder or, without `force`, a file that it writes is on a mount.

    Data that is still in the file's buffer would be lost with the mount.
    """
    here = None
    with contextlib.suppress(FileNotFoundError):
        here = os.getcwd()
    if here is not None and mount_holding(here, [found]):
        state = f"the working folder {here!r} is on this mount"
        next_step = "Change to another folder first (in a notebook, %cd /content)"
    elif not force and (written := [path for path in _files_being_written() if mount_holding(path, [found])]):
        state = f"this process has {written[0]!r} open for writing"
        next_step = "Close the file first"
    else:
        return
    raise MountFailed(cannot(act, state, "", next_step), cause="in use")


def _files_being_written() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        # Another thread may have closed the descriptor meanwhile.
        with contextlib.suppress(OSError):
            flags = re.search(r"^flags:\s*([0-7]+)", Path("/proc/self/fdinfo", descriptor).read_text(), re.MULTILINE)
            if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                yield os.readlink(f"/proc/self/fd/{descriptor}")


def check_alive(found: Mount, act: str, timeout: float) -> None:
    """Raise `MountFailed` if a mount is dead or hangs; a mount that returns errors may still send its writes."""
    state, reason = liveness((found.point,), timeout)
    if state == "dead":
        repair = ("Run ", call("mount"), ", which repairs or removes it")
        raise MountFailed(cannot(act, f"the mount is dead ({reason})", "", repair), cause=state)
    if state == "hung":
        discard = ("Wait and try again, or discard unsent writes with ", call("unmount", force=True))
        raise MountFailed(cannot(act, f"the mount does not respond ({reason})", "", discard), cause=state)

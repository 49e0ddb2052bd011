"""The mounts of this machine, read from the kernel's mount table without accessing the mounts themselves.

At the start of any path that colabkit accepts, `drive:` stands for Google Drive: `drive:datasets/birds` is in My Drive
and, if DriveFS serves the mount, `drive:Shareddrives/Team/birds` is in a shared drive.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation.errors import InvalidOption, NotMounted
from colabkit.foundation.messages import Message, Text, call, cannot, shown

Reader = Callable[[str], str]

DRIVEFS = "fuse.drive"
OCAMLFUSE = "fuse.google-drive-ocamlfuse"
RCLONE = "fuse.rclone"
DRIVE_TYPES: Mapping[str, str] = {DRIVEFS: "DriveFS", OCAMLFUSE: "google-drive-ocamlfuse", RCLONE: "rclone"}
"""File system types that can serve Google Drive, in the order in which `drive:` searches for them."""

DRIVEFS_FOLDER = ".config/Google/DriveFS"
DRIVEFS_LOG = f"{DRIVEFS_FOLDER}/Logs/drive_fs.txt"

SHORTCUT_TARGETS = ".shortcut-targets-by-id"
"""The folder of a DriveFS mount that holds the targets of Drive shortcuts; the shortcuts appear as symlinks."""

_SHORT_NAME = "drive:"
_SHARED_DRIVES = "Shareddrives"
_NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs"})
_LOCAL_FUSE_TYPES = frozenset({"fuseblk", "fusectl", "fuse.lxcfs", "fuse.fuse-overlayfs", "fuse.portal"})
_LOG_CAUSES = {"QUOTA_EXCEEDED": "quota", "QueryManager timed out": "root folder"}
_DEAD = frozenset({errno.ENOTCONN, errno.ESTALE})
_LOG_TAIL_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_LOG_RECENT_S = 600.0


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the kernel's mount table.

    Attributes:
        point: absolute path of the mount point, unescaped.
        fstype: file system type as reported by the kernel, for example `"fuse.drive"`.
        source: the device or remote.
        options: mount options, for example `("rw", "nosuid")`.
    """

    point: str
    fstype: str
    source: str
    options: tuple[str, ...]

    @property
    def is_remote(self) -> bool:
        """Whether another program or machine serves the mount, so that any access can hang."""
        is_fuse = self.fstype.split(".")[0] == "fuse" and self.fstype not in _LOCAL_FUSE_TYPES
        return is_fuse or self.fstype in _NETWORK_TYPES

    @property
    def readonly(self) -> bool:
        """Whether the kernel rejects writes. The separate read-only mode of DriveFS is not visible here."""
        return "ro" in self.options


def read_file(path: str) -> str:
    """Return the text of a small file unchanged; raise `OSError` if it cannot be read."""
    # `open()` makes twice as many system calls. Each gives up the GIL, and waits for it if another thread computes.
    fd = os.open(path, os.O_RDONLY)
    try:
        # The kernel may return less than is left of a file in /proc, so only an empty part is the end.
        return b"".join(iter(lambda: os.read(fd, _READ_BYTES), b"")).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


def mounts(read: Reader = read_file) -> list[Mount]:
    """Return all mounts in the kernel's order, none without `/proc`; a mount hides earlier ones at its mount point."""
    try:
        lines = read("/proc/mounts").rstrip("\n").split("\n")
    except OSError:
        return []
    found = []
    for fields in (line.split(" ") for line in lines):
        # Sandboxes may emulate this file with lines in another format.
        if len(fields) < 4:
            continue
        source, point, fstype, options, *_ = fields
        found.append(Mount(_unescaped(point), fstype, _unescaped(source), tuple(options.split(","))))
    return found


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def mount_holding(path: str, table: Iterable[Mount]) -> Mount | None:
    """Return the mount that contains an absolute path, without accessing the path."""
    holding = [
        (len(mount.point), number, mount)
        for number, mount in enumerate(table)
        if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
    ]
    return max(holding)[2] if holding else None


def drive_mounts(table: Iterable[Mount]) -> list[Mount]:
    """Return the possible Drive mounts: those of DriveFS if any, else of google-drive-ocamlfuse, else of rclone."""
    table = list(table)
    for fstype in DRIVE_TYPES:
        if found := {mount.point: mount for mount in table if mount.fstype == fstype}:
            return list(found.values())
    return []


def drive_mount(table: Iterable[Mount]) -> Mount | None:
    """Return the only mount of Google Drive; None if there is none or more than one."""
    found = drive_mounts(table)
    return found[0] if len(found) == 1 else None


def drive_root(mount: Mount) -> str:
    """Return the path of My Drive in a Drive mount."""
    return f"{mount.point}/MyDrive" if mount.fstype == DRIVEFS else mount.point


def user_path(path: str | os.PathLike[str], act: str, table: list[Mount] | None = None) -> Path:
    """Expand `drive:` to the value of `COLABKIT_DRIVE`, else to the Drive mount, and `~` to the home folder.

    Args:
        path: path given by the user.
        act: verb and object for the message.
        table: the mounts; by default the current ones.

    Raises:
        NotMounted: if the path begins with `drive:`, and `COLABKIT_DRIVE` is a missing local folder or, if this
            variable is not set, Drive is not mounted, or is mounted more than once.
        InvalidOption: if `path` is not a valid path, or starts with the home folder of an unknown user.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not text or not isinstance(text, str) or "\0" in text:
        invalid = f"{shown(path)} is not a valid path"
        raise InvalidOption(cannot(act, invalid, "a non-empty str or os.PathLike", "Pass the path as a str"))
    if not text.startswith(_SHORT_NAME):
        try:
            return Path(path).expanduser()
        except RuntimeError:
            unknown = f"{text!r} starts with the home folder of an unknown user"
            raise InvalidOption(cannot(act, unknown, "", "Check the user name after ~")) from None
    table = mounts() if table is None else table
    if chosen := os.environ.get("COLABKIT_DRIVE"):
        point = root = chosen = os.path.expanduser(chosen)
        holding = mount_holding(os.path.abspath(chosen), table)
        # Check this, because a typo would otherwise create a new folder.
        if (holding is None or not holding.is_remote) and not os.path.isdir(chosen):
            found = f"the environment variable COLABKIT_DRIVE is {chosen!r}, which is not a folder"
            raise NotMounted(cannot(act, found, "", "Mount that folder, or set COLABKIT_DRIVE to another one"))
    elif mount := drive_mount(table):
        point, root = mount.point, drive_root(mount)
    else:
        raise NotMounted(_no_single_drive(act, text, drive_mounts(table)))
    inside = text.removeprefix(_SHORT_NAME).lstrip("/")
    is_shared = point != root and inside.split("/")[0] == _SHARED_DRIVES
    return Path(point if is_shared else root, inside)


def _no_single_drive(act: str, text: str, found: list[Mount]) -> Message:
    if found:
        points = " and ".join(repr(mount.point) for mount in found)
        several = f"Google Drive is mounted at {points}, so {text!r} is ambiguous"
        return cannot(act, several, "one Drive mount", "Set the environment variable COLABKIT_DRIVE to one of them")
    next_step = ("Run ", call("mount"), " first, or set COLABKIT_DRIVE to the folder that drive: stands for")
    return cannot(act, "Google Drive is not mounted", "", next_step)


def log_causes(start: int = 0) -> frozenset[str]:
    """Return the causes of failures found in the DriveFS log: any of `"quota"` and `"root folder"`.

    Args:
        start: byte offset at which to start reading; if the log is shorter, it was restarted and is read from its
            beginning. With 0, the log is read only if it was written in the last ten minutes. At most the last 256 KiB
            are read.
    """
    try:
        with open(_log_path(), "rb") as log:
            if not start and time.time() - os.fstat(log.fileno()).st_mtime > _LOG_RECENT_S:
                return frozenset()
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start if start <= size else 0, size - _LOG_TAIL_BYTES))
            text = log.read(_LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return frozenset()
    return frozenset(cause for words, cause in _LOG_CAUSES.items() if words in text)


def log_size() -> int:
    """Return the current size of the DriveFS log in bytes, as `start` for a later `log_causes`; 0 without a log."""
    try:
        return os.stat(_log_path()).st_size
    except OSError:
        return 0


def _log_path() -> str:
    return os.path.join(os.path.expanduser("~"), DRIVEFS_LOG)


class WriteError(OSError):
    """A failure of a write or flush, which is never caused by the number of files in a folder."""


def trouble(error: OSError, table: list[Mount] | None = None) -> tuple[Text, Text] | None:
    """Explain an error for a file on a remote mount.

    Args:
        error: the error, with the file name.
        table: the mounts; by default the current ones.

    Returns:
        The cause and advice for a message; None if the file is unknown or not on a remote mount, or the cause is
            unknown.
    """
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    try:
        path = os.path.abspath(os.fsdecode(error.filename))
    except OSError:
        # The working folder no longer exists.
        return None
    mount = mount_holding(path, mounts() if table is None else table)
    if mount is None or not mount.is_remote:
        return None
    name = DRIVE_TYPES.get(mount.fstype, mount.fstype)
    where = f"the {name} mount at {mount.point!r}"
    if error.errno in _DEAD:
        repair: Text = ("Run ", call("mount"), " to repair it") if mount.fstype == DRIVEFS else "Mount it again"
        return f"{where} is dead", repair
    if error.errno == errno.ENOSPC and mount.fstype == DRIVEFS:
        return (
            f"the local disk that holds the cache of {where} is full, regardless of the free space on Drive",
            ("Run ", call("clear_cache"), ", and write large files to local storage first"),
        )
    if error.errno in (errno.EIO, errno.ETIMEDOUT):
        if mount.fstype == DRIVEFS and "quota" in log_causes():
            return (
                f"Drive reports QUOTA_EXCEEDED for {where}",
                "Wait a few hours, or copy the file to your own Drive and read the copy; "
                "one archive requires far fewer requests than many files",
            )
        if isinstance(error, WriteError):
            found = f"{where} did not store the written data ({error.strerror})"
            return found, "Try again; if the error persists, check the free space and the permissions at its other end"
        return (
            f"{where} returned an input/output error" if error.errno == errno.EIO else f"{where} timed out",
            "Try again; if the error persists, split folders of more than a few thousand files, or store them as one "
            "archive",
        )
    return None

"""Flush and unmount rclone mounts of Drive, and make rclone forget cached directory listings.

The remote control (`--rc`) is called over HTTP with a deadline; without a remote control, SIGHUP still makes rclone
forget its listings. rclone itself evicts file contents that `--vfs-cache-mode` caches, according to its options
`--vfs-cache-max-size` and `--vfs-cache-max-age`.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colabkit.foundation import Mount, MountFailed, NotMounted, UnsentWrites, call, cannot
from colabkit.storage.drive.mountpoints import NO_UPLOADS, Daemon, DriveMount, detach, serving

_MOUNTING = frozenset({"mount", "mount2", "cmount", "nfsmount"})
_RC_ADDRESS = "localhost:5572"
_RC_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Rclone(DriveMount):
    """An rclone mount with its program and its remote control; `control` is None if no remote control responds."""

    mount: Mount
    daemon: Daemon
    control: Control | None

    steps = (
        "make rclone forget its directory listings",
        "leave file contents to rclone, which evicts them by --vfs-cache-max-size and --vfs-cache-max-age",
    )
    frees_contents = False

    @classmethod
    def of(cls, mount: Mount, act: str) -> Rclone:
        """Return the mount with its program; raise `NotMounted` if the program is not found."""
        daemon = next((one for one in serving("rclone", mount.point) if _is_mount(one.arguments)), None)
        if daemon is None:
            found = f"no rclone process of this user serves {mount.point!r}"
            raise NotMounted(cannot(act, found, "", "Run this as the user who mounted it"))
        control = control_of(daemon)
        return cls(mount, daemon, control if control and control.answers(mount) else None)

    def _stats(self) -> dict[str, Any]:
        if self.control is None:
            return {}
        answer = self.control.ask("vfs/stats", self.control.named(self.mount)).get("diskCache")
        return answer if isinstance(answer, dict) else {}

    def unsent(self) -> int | None:
        """Return the number of files that are queued or uploading; None without a remote control."""
        if self.control is None:
            return None
        stats = self._stats()
        return int(stats.get("uploadsQueued", 0)) + int(stats.get("uploadsInProgress", 0))

    def send(self, act: str, timeout: float, progress: bool) -> str:
        """Wait for all uploads, and return the known state of the writes.

        Raises:
            UnsentWrites: if rclone has no remote control, so that the state of the writes is unknown.
        """
        if self.control is None:
            found = "rclone's remote control does not answer, so its pending uploads are unknown"
            next_step = ("Start rclone with --rc, or discard unsent writes with ", call("unmount", force=True))
            raise UnsentWrites(cannot(act, found, "", next_step))
        self.wait_for_uploads(act, timeout, progress)
        return f"rclone reports {NO_UPLOADS}"

    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Wait for all uploads, unmount, and return the known state of the writes."""
        sent = self.send(act, timeout, progress)
        detach(self.mount, timeout)
        return sent

    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str:
        """Make rclone forget its listings, through its remote control or with SIGHUP; nothing is lost."""
        if self.control is not None:
            self.control.ask("vfs/forget", self.control.named(self.mount))
        else:
            try:
                os.kill(self.daemon.pid, signal.SIGHUP)
            except OSError as error:
                found = f"the signal SIGHUP could not be sent to rclone ({error.strerror})"
                raise MountFailed(cannot(act, found, "", "Start rclone with --rc")) from error
        return ""

    def cache_folder(self) -> Path | None:
        """Return the folder of cached file contents; None if rclone does not report it."""
        path = self._stats().get("path")
        return Path(path) if isinstance(path, str) else None

    def cache_bytes(self) -> int:
        """Return the size in bytes of the file contents that rclone caches on disk; 0 if unknown."""
        return int(self._stats().get("bytesUsed", 0))


@dataclass(frozen=True, slots=True)
class Control:
    """An rclone remote control: host, port, and the Authorization header made from its user and password."""

    host: str
    port: int
    authorization: str = field(repr=False)

    def ask(self, command: str, values: dict[str, str]) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            MountFailed: if no answer arrives within five seconds, or rclone refuses.
        """
        headers = {"Content-Type": "application/json"}
        if self.authorization:
            headers["Authorization"] = self.authorization
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_RC_TIMEOUT_S)
        act = f"send {command} to rclone at {self.host}:{self.port}"
        try:
            connection.request("POST", f"/{command}", json.dumps(values).encode(), headers)
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            found = f"its remote control does not answer ({error})"
            raise MountFailed(cannot(act, found, "", "Check that rclone is still running")) from error
        finally:
            connection.close()
        if reply.status != 200 or not isinstance(answer, dict):
            reason = answer.get("error") if isinstance(answer, dict) else answer
            found = f"rclone refused with status {reply.status} ({reason})"
            raise MountFailed(cannot(act, found, "", "Check rclone's log"))
        return answer

    def answers(self, mount: Mount) -> bool:
        """Return whether the remote control answers for a mount."""
        try:
            self.ask("vfs/stats", self.named(mount))
        except MountFailed:
            return False
        return True

    def named(self, mount: Mount) -> dict[str, str]:
        """Return the parameter that selects a mount's file system; empty unless the program serves several mounts."""
        names = [str(name) for name in self.ask("vfs/list", {}).get("vfses", [])]
        mine = [name for name in names if name.rstrip(":/") == mount.source.rstrip(":/")]
        return {"fs": mine[0]} if len(names) > 1 and mine else {}


def control_of(daemon: Daemon) -> Control | None:
    """Return the plain-HTTP remote control that a program's arguments and environment set up, or None."""
    given = dict(_flags(daemon.arguments))

    def value(flag: str, default: str = "") -> str:
        return given.get(flag) or daemon.environ.get("RCLONE_" + flag.upper().replace("-", "_")) or default

    if value("rc", "false").lower() not in ("true", "1") or value("rc-cert"):
        return None
    host, colon, port = value("rc-addr", _RC_ADDRESS).rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return None
    user, password = value("rc-user"), value("rc-pass")
    secret = base64.b64encode(f"{user}:{password}".encode()).decode()
    return Control(host.strip("[]") or "localhost", int(port), f"Basic {secret}" if user or password else "")


def _is_mount(arguments: tuple[str, ...]) -> bool:
    """Return whether the subcommand is `mount`; SIGHUP would kill other commands, such as `rclone copy`."""
    for number, word in enumerate(arguments):
        if word in _MOUNTING:
            return True
        if not word.startswith("-") and not (number and arguments[number - 1].startswith("-")):
            return False
    return False


def _flags(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            plain = "true" if not following or following.startswith("-") or name == "rc" else following
            found.append((name, value if equals else plain))
    return found

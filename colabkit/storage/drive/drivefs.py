"""Mount, flush and unmount DriveFS, Colab's built-in Drive mount, through `google.colab.drive`.

Four properties of `google.colab.drive.mount` shape this module: it asks for consent in the browser before it checks
whether Drive is mounted; only a signal can interrupt its wait for the answer; it must run in the kernel's main thread;
and with `force_remount` it kills DriveFS, so all unsent writes are lost. `flush_and_unmount` blocks without any output,
so it runs in a child process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    DRIVEFS_FOLDER,
    Mount,
    MountFailed,
    Place,
    Text,
    TimedOut,
    UnsentWrites,
    call,
    cannot,
    current_place,
    drive_root,
    file_changes,
    format_seconds,
    heartbeat,
    log_causes,
    log_size,
    mount_holding,
    mounts,
    option,
    processes,
)
from colabkit.storage.drive.mountpoints import (
    DriveMount,
    daemons,
    detach,
    liveness,
    mounts_at,
    wait_until,
    with_cause,
)

_PUSH = "import sys; from google.colab import drive; drive.flush_and_unmount(timeout_ms=int(sys.argv[1]))"
# Number of times that google.colab waits for `timeout`: for the consent and for DriveFS.
_WAITS = 2
# Extra time for google.colab to report its own timeout before colabkit's deadline interrupts it.
_GRACE_S = 30.0
# Default timeout of google.colab.
_TIMEOUT_S = 120.0
# Time limit for the DriveFS process and its mount to disappear after `flush_and_unmount` returns.
_END_S = 15.0
_ANYWHERE: Text = (
    "Mount Drive with 'rclone mount REMOTE: FOLDER --vfs-cache-mode full --rc', so that paths such as drive:birds "
    "work, or download a share link with ",
    call("fetch"),
)
_AGAIN: Text = (
    "Look for a consent dialog in the browser and run ",
    call("mount"),
    " again; if that fails, use Runtime > Disconnect and delete runtime",
)
# Printed lines with these prefixes are dropped, since the report gives the same information in more detail.
_EXPECTED = ("Mounted at", "Drive already mounted at")


def check_can_mount(place: Place, act: str = "mount Drive") -> None:
    """Raise `MountFailed` if `google.colab` cannot mount Drive here; the message gives the next step."""
    if not place.can_mount_drive:
        raise with_cause("place", _not_here(place, act))
    if threading.current_thread() is not threading.main_thread():
        failure = MountFailed(
            cannot(act, "the call is in a background thread", "a call in the kernel's main thread", "Run it in a cell")
        )
        raise with_cause("thread", failure)


def _not_here(place: Place, act: str) -> MountFailed:
    if place.name == "Kaggle":
        return MountFailed(
            cannot(
                act,
                "Kaggle cannot mount Drive",
                "",
                (
                    "Attach the data as a Kaggle dataset, which appears in /kaggle/input, "
                    "or download a share link with ",
                    call("fetch"),
                ),
            )
        )
    if place.name == "Colab Enterprise":
        return MountFailed(
            cannot(
                act,
                "google.colab cannot mount Drive in Colab Enterprise",
                "",
                ("Keep the data in Cloud Storage and download it with ", call("fetch", "gs://BUCKET/FOLDER")),
            )
        )
    if place.name == "Colab, local runtime":
        return MountFailed(
            cannot(
                act,
                "google.colab can mount Drive on hosted runtimes only",
                "",
                (
                    "Use Drive for desktop or 'rclone mount' on this machine, or download a share link with ",
                    call("fetch"),
                ),
            )
        )
    if place.name.startswith("Colab"):
        return MountFailed(
            cannot(act, "this process is not the notebook's kernel", "", "Run %mount in a cell of the notebook")
        )
    return MountFailed(cannot(act, "google.colab can mount Drive in hosted Colab notebooks only", "", _ANYWHERE))


def mount_in_colab(point: str, readonly: bool, timeout: float, force: bool) -> Mount:
    """Mount Drive through `google.colab` and return the working mount; raise `MountFailed` with its cause."""
    check_can_mount(current_place())
    holding = mount_holding(point, mounts())
    # google.colab would access the folder, which hangs if the folder is on a hanging remote mount.
    if holding is not None and holding.is_remote:
        mountpoint = holding.point
        failure = MountFailed(
            cannot(
                "mount Drive",
                f"{point!r} is on the mount at {mountpoint!r} ({holding.fstype})",
                "an empty local folder",
                "Choose another path, or unmount that file system first",
            )
        )
        raise with_cause("folder", failure)
    drive = importlib.import_module("google.colab.drive")
    log_start = log_size()
    printed = io.StringIO()
    try:
        with alarm(_WAITS * timeout + _GRACE_S), contextlib.redirect_stdout(printed):
            drive.mount(point, force_remount=force, timeout_ms=math.ceil(timeout * 1000), readonly=readonly)
    except Exception as error:
        raise explain(error, timeout, log_causes(log_start)) from error
    finally:
        lines = printed.getvalue().splitlines(True)
        sys.stdout.write("".join(line for line in lines if not line.startswith(_EXPECTED)))
    mount = next((mount for mount in reversed(mounts()) if mount.point == point), None)
    if mount is None:
        text = " ".join(printed.getvalue().split())
        output = f"; it printed {text!r}" if text else ""
        failure = MountFailed(
            cannot("mount Drive", f"google.colab ended without an error and mounted nothing{output}", "", _AGAIN)
        )
        raise with_cause("unknown", failure)
    _options[point] = (readonly, timeout)
    state, reason = liveness((mount.point, drive_root(mount)), timeout)
    if state != "alive":
        found = f"Drive is mounted at {point!r} but does not work ({reason})"
        raise with_cause(state, MountFailed(cannot("mount Drive", found, "", _AGAIN)))
    return mount


# Options that Drive was mounted with, by mount point: read-only, timeout in seconds.
_options: dict[str, tuple[bool, float]] = {}


def options_of(mount: Mount) -> tuple[bool | None, float | None]:
    """Return whether a mount is read-only, and its timeout in seconds for listing a folder; None if unknown.

    The mount table does not show these options of DriveFS. For mounts made by this process, they are recorded; for
    others, they are parsed from DriveFS's command line.
    """
    if mount.point in _options:
        return _options[mount.point]
    words = " ".join(word for daemon in daemons("drive") for word in daemon.arguments)
    limit = re.search(r"opendir_timeout_ms:(\d+)", words)
    mode = re.search(r"read_only_mode(?::(\w+))?", words)
    readonly = None if not words else mode is not None and mode[1] != "false"
    return readonly, int(limit[1]) / 1000 if limit else None


def explain(error: Exception, timeout: float, logged: frozenset[str]) -> MountFailed:
    """Translate an exception of `google.colab`, with the causes found in DriveFS's log, into the error of `mount()`."""
    cause, failure = _explained(error, timeout, logged)
    return with_cause(cause, failure)


def _explained(error: Exception, timeout: float, logged: frozenset[str]) -> tuple[str, MountFailed]:
    name = type(error).__name__
    is_timeout = isinstance(error, TimeoutError) or name == "TIMEOUT"
    # Ignore the text of pexpect.TIMEOUT, which lists all expected messages although none of them has arrived.
    text = "" if is_timeout else " ".join(str(error).split())
    if name == "MessageError":
        return "consent", MountFailed(
            cannot(
                "mount Drive",
                f"access was not granted in the browser ({text})",
                "",
                (
                    "Run ",
                    call("mount"),
                    " again, choose the account that this notebook runs under and grant all permissions; "
                    "to use another account's Drive, share its folder with this account",
                ),
            )
        )
    if isinstance(error, NotImplementedError):
        return "place", MountFailed(
            cannot("mount Drive", "google.colab cannot mount Drive in this environment", "", _ANYWHERE)
        )
    if "domain policy" in text:
        return "policy", MountFailed(
            cannot(
                "mount Drive",
                "the organization of this account has disabled Drive for desktop",
                "",
                "Ask the administrator (https://support.google.com/a/answer/7496409), or use another account",
            )
        )
    if "quota" in logged:
        return "quota", MountFailed(
            cannot(
                "mount Drive",
                "Drive reports QUOTA_EXCEEDED (too many requests or downloads)",
                "",
                "Wait a few hours, then read one archive instead of many files, or a copy in your own Drive",
            )
        )
    if "root folder" in text or "root folder" in logged:
        return "root folder", MountFailed(
            cannot(
                "mount Drive",
                f"My Drive's root folder holds too many items to be listed within {format_seconds(timeout)}",
                "",
                (
                    "Run ",
                    call("mount", timeout=max(600, round(2 * timeout))),
                    ", since each attempt lists more items; then move items to folders and empty the Trash",
                ),
            )
        )
    if text.startswith("Mountpoint") or "must be a directory" in text:
        return "folder", MountFailed(
            cannot("mount Drive", f"google.colab reports {text!r}", "an empty folder", "Choose another path")
        )
    if is_timeout:
        return "timeout", MountFailed(
            cannot(
                "mount Drive",
                f"the consent dialog or DriveFS did not answer within {format_seconds(timeout)}",
                "",
                ("Look for a dialog in the browser and run ", call("mount", timeout=max(300, round(2 * timeout)))),
            )
        )
    return "unknown", MountFailed(cannot("mount Drive", f"google.colab reports {text or name!r}", "", _AGAIN))


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block, which must run in the main thread, takes longer than `seconds`."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"google.colab did not end within {seconds:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        # Restart a timer that was already running.
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


@dataclass(frozen=True)
class DriveFs(DriveMount):
    """Colab's built-in Drive mount."""

    mount: Mount

    steps = (
        "send all writes and end DriveFS",
        "remove its cache but not its logs",
        "mount Drive again, which may ask for consent",
    )
    is_remounted = True

    def unsent(self) -> int | None:
        """Return None: DriveFS does not report unsent files."""
        return None

    def cache_folder(self) -> Path:
        """Return DriveFS's folder, which holds its cache, state and logs."""
        return Path.home() / DRIVEFS_FOLDER

    def cached(self) -> list[Path]:
        """Return the contents of the cache folder except the logs, which are needed to explain failures."""
        folder = self.cache_folder()
        return [path for path in sorted(folder.iterdir()) if path.name != "Logs"] if folder.is_dir() else []

    def send(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes and end DriveFS, mount Drive again, and return the known state of the writes."""
        check_can_mount(current_place(), act)
        before = options_of(self.mount)
        sent = self.unmount(act, timeout, progress)
        self._mount_again(before, act, "all writes were sent")
        return sent

    def _mount_again(self, before: tuple[bool | None, float | None], act: str, done: str) -> None:
        """Mount with the former options, and retry once: DriveFS may fail if it is restarted immediately."""
        readonly, timeout = before
        for again in (True, False):
            try:
                mount_in_colab(self.mount.point, bool(readonly), timeout or _TIMEOUT_S, force=False)
                return
            except MountFailed as error:
                if again and error.cause == "unknown":
                    continue
                if error.message is None:
                    raise
                failure = MountFailed(
                    cannot(
                        act,
                        (f"{done}, but Drive could not be mounted again: ", error.message.found),
                        error.message.expected,
                        error.message.next_step,
                    )
                )
                raise with_cause(error.cause, failure) from error

    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes, end DriveFS, and return the known state of the writes."""
        with heartbeat("send writes", timeout, progress) as tick:
            finished = processes.run(
                processes.python(_PUSH, str(math.ceil(timeout * 1000)), isolated=False),
                act,
                # Pass DriveFS the deadline without the extra time, so that its more precise error is raised first.
                timeout + _GRACE_S,
                next_step=(
                    "Allow more time with ",
                    option("timeout"),
                    ", or try again later; DriveFS may still be sending",
                ),
                on_tick=tick,
            )
        last_line = (finished.output.strip().splitlines() or [""])[-1]
        if last_line.startswith(("NotImplementedError", "ModuleNotFoundError", "ImportError")):
            failure = MountFailed(
                cannot(act, f"google.colab reports {last_line!r}", "a hosted Colab notebook", _ANYWHERE)
            )
            raise with_cause("place", failure)
        if finished.status or not wait_until(lambda: not mounts_at(self.mount.point), _END_S):
            output = f" (google.colab reports {last_line!r})" if last_line else ""
            raise UnsentWrites(
                cannot(
                    act,
                    f"DriveFS did not send all writes{output}",
                    "",
                    (
                        "Allow more time with ",
                        option("timeout"),
                        ", or discard unsent writes with ",
                        call("unmount", force=True),
                    ),
                )
            )
        return "DriveFS reports that it sent all writes; whether they reached Drive cannot be checked from here"

    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str:
        """Send all writes, end DriveFS, remove its cache, mount again, and return a description of lost writes."""
        check_can_mount(current_place(), act)
        before = options_of(self.mount)
        loss = ""
        try:
            if force and liveness((self.mount.point,), timeout)[0] in ("dead", "hung"):
                loss = self.drop(timeout)
            else:
                self.unmount(act, timeout, progress)
        except (TimedOut, UnsentWrites):
            if not force:
                raise
            loss = self.drop(timeout)
        if not wait_until(lambda: not list(daemons("drive")), _END_S):
            found = "Drive is unmounted, but DriveFS is still running and may be writing to its cache"
            raise TimedOut(cannot(act, found, "", ("Run ", call("mount"), " and try again")))
        done = "a part of the cache is removed"
        try:
            with file_changes.translated(act):
                for path in self.cached():
                    file_changes.remove(path)
            done = "the cache is removed"
        finally:
            self._mount_again(before, act, done)
        return loss

    def drop(self, timeout: float) -> str:
        """Kill DriveFS, unmount immediately, and return a description of lost writes."""
        for daemon in daemons("drive"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(daemon.pid, signal.SIGKILL)
        if mounts_at(self.mount.point):
            detach(self.mount, timeout, lazily=True)
        return "writes that DriveFS had not sent"

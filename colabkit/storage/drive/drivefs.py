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
        raise _not_here(place, act)
    if threading.current_thread() is not threading.main_thread():
        found, expected = "the call is in a background thread", "a call in the kernel's main thread"
        raise MountFailed(cannot(act, found, expected, "Run it in a cell"), cause="thread")


def _not_here(place: Place, act: str) -> MountFailed:
    if place.name == "Kaggle":
        attach = "Attach the data as a Kaggle dataset, which appears in /kaggle/input, or download a share link with "
        return MountFailed(cannot(act, "Kaggle cannot mount Drive", "", (attach, call("fetch"))), cause="place")
    if place.name == "Colab Enterprise":
        keep = ("Keep the data in Cloud Storage and download it with ", call("fetch", "gs://BUCKET/FOLDER"))
        return MountFailed(cannot(act, "google.colab cannot mount Drive in Colab Enterprise", "", keep), cause="place")
    if place.name == "Colab, local runtime":
        use = "Use Drive for desktop or 'rclone mount' on this machine, or download a share link with "
        found = "google.colab can mount Drive on hosted runtimes only"
        return MountFailed(cannot(act, found, "", (use, call("fetch"))), cause="place")
    if place.name.startswith("Colab"):
        run = "Run %mount in a cell of the notebook"
        return MountFailed(cannot(act, "this process is not the notebook's kernel", "", run), cause="place")
    found = "google.colab can mount Drive in hosted Colab notebooks only"
    return MountFailed(cannot(act, found, "", _ANYWHERE), cause="place")


def mount_in_colab(point: str, readonly: bool, timeout: float, force: bool) -> Mount:
    """Mount Drive through `google.colab` and return the working mount; raise `MountFailed` with its cause."""
    check_can_mount(current_place())
    holding = mount_holding(point, mounts())
    # google.colab would access the folder, which hangs if the folder is on a hanging remote mount.
    if holding is not None and holding.is_remote:
        mountpoint = holding.point
        found = f"{point!r} is on the mount at {mountpoint!r} ({holding.fstype})"
        next_step = "Choose another path, or unmount that file system first"
        raise MountFailed(cannot("mount Drive", found, "an empty local folder", next_step), cause="folder")
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
        found = f"google.colab ended without an error and mounted nothing{output}"
        raise MountFailed(cannot("mount Drive", found, "", _AGAIN))
    _options[point] = (readonly, timeout)
    state, reason = liveness((mount.point, drive_root(mount)), timeout)
    if state != "alive":
        found = f"Drive is mounted at {point!r} but does not work ({reason})"
        raise MountFailed(cannot("mount Drive", found, "", _AGAIN), cause=state)
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
    act, name = "mount Drive", type(error).__name__
    is_timeout = isinstance(error, TimeoutError) or name == "TIMEOUT"
    # Ignore the text of pexpect.TIMEOUT, which lists all expected messages although none of them has arrived.
    text = "" if is_timeout else " ".join(str(error).split())
    if name == "MessageError":
        grant = " again, choose the account that this notebook runs under and grant all permissions; "
        share = "to use another account's Drive, share its folder with this account"
        found = f"access was not granted in the browser ({text})"
        return MountFailed(cannot(act, found, "", ("Run ", call("mount"), grant, share)), cause="consent")
    if isinstance(error, NotImplementedError):
        found = "google.colab cannot mount Drive in this environment"
        return MountFailed(cannot(act, found, "", _ANYWHERE), cause="place")
    if "domain policy" in text:
        ask = "Ask the administrator (https://support.google.com/a/answer/7496409), or use another account"
        found = "the organization of this account has disabled Drive for desktop"
        return MountFailed(cannot(act, found, "", ask), cause="policy")
    if "quota" in logged:
        wait = "Wait a few hours, then read one archive instead of many files, or a copy in your own Drive"
        found = "Drive reports QUOTA_EXCEEDED (too many requests or downloads)"
        return MountFailed(cannot(act, found, "", wait), cause="quota")
    if "root folder" in text or "root folder" in logged:
        found = f"My Drive's root folder holds too many items to be listed within {format_seconds(timeout)}"
        move = ", since each attempt lists more items; then move items to folders and empty the Trash"
        longer = call("mount", timeout=max(600, round(2 * timeout)))
        return MountFailed(cannot(act, found, "", ("Run ", longer, move)), cause="root folder")
    if text.startswith("Mountpoint") or "must be a directory" in text:
        found = f"google.colab reports {text!r}"
        return MountFailed(cannot(act, found, "an empty folder", "Choose another path"), cause="folder")
    if is_timeout:
        found = f"the consent dialog or DriveFS did not answer within {format_seconds(timeout)}"
        look = ("Look for a dialog in the browser and run ", call("mount", timeout=max(300, round(2 * timeout))))
        return MountFailed(cannot(act, found, "", look), cause="timeout")
    return MountFailed(cannot(act, f"google.colab reports {text or name!r}", "", _AGAIN))


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
                found = (f"{done}, but Drive could not be mounted again: ", error.message.found)
                next_step, expected = error.message.next_step, error.message.expected
                raise MountFailed(cannot(act, found, expected, next_step), cause=error.cause) from error

    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes, end DriveFS, and return the known state of the writes."""
        more_time = ("Allow more time with ", option("timeout"), ", or try again later; DriveFS may still be sending")
        with heartbeat("send writes", timeout, progress) as tick:
            finished = processes.run(
                processes.python(_PUSH, str(math.ceil(timeout * 1000)), isolated=False),
                act,
                # Pass DriveFS the deadline without the extra time, so that its more precise error is raised first.
                timeout + _GRACE_S,
                next_step=more_time,
                on_tick=tick,
            )
        last_line = (finished.output.strip().splitlines() or [""])[-1]
        if last_line.startswith(("NotImplementedError", "ModuleNotFoundError", "ImportError")):
            found = f"google.colab reports {last_line!r}"
            raise MountFailed(cannot(act, found, "a hosted Colab notebook", _ANYWHERE), cause="place")
        if finished.status or not wait_until(lambda: not mounts_at(self.mount.point), _END_S):
            output = f" (google.colab reports {last_line!r})" if last_line else ""
            discard = (", or discard unsent writes with ", call("unmount", force=True))
            next_step = ("Allow more time with ", option("timeout"), discard)
            raise UnsentWrites(cannot(act, f"DriveFS did not send all writes{output}", "", next_step))
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

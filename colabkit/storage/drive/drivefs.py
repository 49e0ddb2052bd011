"""Mount, flush and unmount DriveFS, Colab's own Drive mount, through `google.colab.drive`.

Four properties of `google.colab.drive.mount` shape this module: it asks the browser for consent before it checks
whether Drive is mounted, it waits for the answer without a way to cancel, it must run in the kernel's main thread, and
with `force_remount` it kills DriveFS, which loses all unsent writes. `flush_and_unmount` blocks silently, so it runs in
a child process.
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
    TimedOut,
    UnsentWrites,
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
    processes,
)
from colabkit.storage.drive.mountpoints import (
    GIVE_UP,
    DriveMount,
    daemons,
    detach,
    liveness,
    mount_failed,
    mounts_at,
    wait_until,
)

_PUSH = "import sys; from google.colab import drive; drive.flush_and_unmount(timeout_ms=int(sys.argv[1]))"
# google.colab applies `timeout` twice: to the consent and to DriveFS.
_WAITS = 2
# Extra time for google.colab's shell before our own deadline interrupts it.
_GRACE_S = 30.0
# The default of google.colab.
_TIMEOUT_S = 120.0
# Time limit for DriveFS and its mount to disappear after it reports its end.
_END_S = 15.0
_ELSEWHERE = {
    "Kaggle": (
        "Kaggle has no Drive mount",
        "Attach the data as a Kaggle dataset, which appears in /kaggle/input, or colabkit.fetch() a share link",
    ),
    "Colab Enterprise": (
        "google.colab mounts no Drive in Colab Enterprise",
        "Keep the data in Cloud Storage and colabkit.fetch('gs://...') it",
    ),
    "Colab, local runtime": (
        "google.colab mounts Drive on hosted runtimes only",
        "Use Drive for desktop or 'rclone mount' on this machine, or colabkit.fetch() a share link",
    ),
}
_ANYWHERE = (
    "no Drive mount here, and google.colab is not there to make one",
    "Mount it with 'rclone mount REMOTE: FOLDER --vfs-cache-mode full --rc', after which drive: works, "
    "or colabkit.fetch() a share link",
)


def check_can_mount(place: Place, act: str = "mount Drive") -> None:
    """Raise `MountFailed` if `google.colab` cannot mount Drive here; the message names an alternative."""
    if not place.can_mount_drive:
        if place.name.startswith("Colab") and place.name not in _ELSEWHERE:
            found, next_step = "this runs outside the notebook's kernel", "Run %mount in a cell of the notebook"
            raise mount_failed("place", found, "a cell", next_step, act)
        found, next_step = _ELSEWHERE.get(place.name, _ANYWHERE)
        raise mount_failed("place", found, "a hosted Colab notebook", next_step, act)
    if threading.current_thread() is not threading.main_thread():
        raise mount_failed("thread", "this is a thread", "the kernel's main thread", "Call it in a cell", act)


def mount_in_colab(point: str, readonly: bool, timeout: float, force: bool) -> Mount:
    """Mount Drive through `google.colab` and return the working mount; raises `MountFailed` with its cause."""
    check_can_mount(current_place())
    holding = mount_holding(point, mounts())
    # google.colab would access this folder, and could hang there.
    if holding is not None and holding.is_remote:
        found = f"{point!r} lies on the mount at {holding.point!r} ({holding.fstype})"
        raise mount_failed("folder", found, "an empty folder of its own", "Choose another path, or unmount that first")
    drive = importlib.import_module("google.colab.drive")
    log_start = log_size()
    said = io.StringIO()
    try:
        with alarm(_WAITS * timeout + _GRACE_S), contextlib.redirect_stdout(said):
            drive.mount(point, force_remount=force, timeout_ms=math.ceil(timeout * 1000), readonly=readonly)
    except Exception as error:
        raise explain(error, timeout, log_causes(log_start)) from error
    finally:
        sys.stdout.write("".join(line for line in said.getvalue().splitlines(True) if not line.startswith(_EXPECTED)))
    made = next((mount for mount in reversed(mounts()) if mount.point == point), None)
    if made is None:
        words = " ".join(said.getvalue().split()) or "nothing"
        raise mount_failed("unknown", f"google.colab said {words!r} and mounted nothing", "a mount", _AGAIN)
    _options[point] = (readonly, timeout)
    state, reason = liveness((made.point, drive_root(made)), timeout)
    if state != "alive":
        raise mount_failed(state, f"mounted, but not usable: {reason}", "a mount that answers", _AGAIN)
    return made


# The report gives the same information in more detail.
_EXPECTED = ("Mounted at", "Drive already mounted at")
_AGAIN = (
    "Look for a dialog in the browser that asks for access and try again; if it stays, use Runtime > Disconnect and "
    "delete runtime"
)
# Options that Drive was mounted with, by mount point: read-only, timeout in seconds.
_options: dict[str, tuple[bool, float]] = {}


def options_of(mount: Mount) -> tuple[bool | None, float | None]:
    """Return whether a mount is read-only and its limit in seconds for listing a folder; None for what is unknown.

    DriveFS keeps both to itself, so the mount table does not show them. They are known for mounts of this process; for
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
    name, text = type(error).__name__, " ".join(str(error).split())
    if name == "MessageError":
        return mount_failed(
            "consent",
            f"the browser did not give access ({text})",
            "consent, given with the account that this notebook runs under",
            "Run it again, choose that account and allow all that is asked; another account's Drive cannot be mounted, "
            "so have its folder shared with this one",
        )
    if isinstance(error, NotImplementedError):
        return mount_failed("place", "google.colab mounts no Drive here", "a hosted Colab notebook", _ANYWHERE[1])
    if "domain policy" in text:
        return mount_failed(
            "policy",
            "the account's organisation has switched Drive for desktop off",
            "an account that may use it",
            "Ask its administrator (https://support.google.com/a/answer/7496409), or use another account",
        )
    if "quota" in logged:
        return mount_failed(
            "quota",
            "Drive says QUOTA_EXCEEDED: too many requests or downloads",
            "quota left",
            "Wait some hours; then read one archive instead of many files, or a copy in your own Drive",
        )
    if "root folder" in text or "top folder" in logged:
        return mount_failed(
            "top folder",
            f"Drive's top folder was not listed in {format_seconds(timeout)}, it holds too many items",
            "fewer items directly in My Drive",
            f"Run mount(timeout={max(600, round(2 * timeout))}), each try gets further; then move them into folders "
            "and empty the Trash",
        )
    if text.startswith("Mountpoint") or "must be a directory" in text:
        return mount_failed(
            "folder", f"google.colab says {text!r}", "an empty folder of its own", "Choose another path"
        )
    if isinstance(error, TimeoutError) or name == "TIMEOUT":
        return mount_failed(
            "timeout",
            f"no answer in {format_seconds(timeout)}",
            "consent in the browser, and DriveFS's answer",
            f"Look for a dialog in the browser and run mount(timeout={max(300, round(2 * timeout))})",
        )
    return mount_failed("unknown", f"google.colab says {text or name!r}", "a mount", _AGAIN)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block, which must run in the main thread, when its time is up."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:g} s")

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
    """Colab's own mount of Drive."""

    mount: Mount

    steps = ("send all writes and end DriveFS", "remove its folder but the logs", "mount Drive again, with consent")
    is_remounted = True

    def unsent(self) -> int | None:
        """Return None: DriveFS does not report unsent files."""
        return None

    def cache_folder(self) -> Path:
        """Return the folder of DriveFS, with its cache, its state and its logs."""
        return Path.home() / DRIVEFS_FOLDER

    def cached(self) -> list[Path]:
        """Return the contents of the cache folder except the logs, which show why something failed."""
        folder = self.cache_folder()
        return [path for path in sorted(folder.iterdir()) if path.name != "Logs"] if folder.is_dir() else []

    def send(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes, which ends DriveFS, and mount Drive again."""
        check_can_mount(current_place(), act)
        before = options_of(self.mount)
        said = self.unmount(act, timeout, progress)
        self._mount_again(before, act, "all writes were sent")
        return said

    def _mount_again(self, before: tuple[bool | None, float | None], act: str, done: str) -> None:
        """Mount with the former options; try twice, since DriveFS sometimes fails right after it ended."""
        readonly, timeout = before
        for again in (True, False):
            try:
                mount_in_colab(self.mount.point, bool(readonly), timeout or _TIMEOUT_S, force=False)
                return
            except MountFailed as error:
                if again and error.cause == "unknown":
                    continue
                reason = str(error).removeprefix("Cannot mount Drive: ").rstrip(".")
                found = f"{done}, but Drive could not be mounted again: {reason}"
                raise mount_failed(error.cause, found, "Drive mounted again", "Run colabkit.mount()", act) from error

    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Send all writes and end DriveFS."""
        with heartbeat("send writes", timeout, progress) as tick:
            finished = processes.run(
                processes.python(_PUSH, str(math.ceil(timeout * 1000)), isolated=False),
                act,
                # DriveFS has the same deadline, and its own error is more precise, so let it fail first.
                timeout + _GRACE_S,
                next_step="DriveFS may go on sending: allow more with timeout=, or try again later",
                on_tick=tick,
            )
        said = (finished.output.strip().splitlines() or ["nothing"])[-1]
        if said.startswith(("NotImplementedError", "ModuleNotFoundError", "ImportError")):
            raise mount_failed("place", f"google.colab says {said!r}", "a hosted Colab notebook", _ANYWHERE[1], act)
        if finished.status or not wait_until(lambda: not mounts_at(self.mount.point), _END_S):
            found = f"DriveFS did not send all writes (google.colab says {said!r})"
            raise UnsentWrites(cannot(act, found, "all writes sent", f"Try again with a longer timeout=, or {GIVE_UP}"))
        return "DriveFS says that it sent all writes; that they reached Drive cannot be seen from here"

    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str:
        """Send all writes, end DriveFS, remove its cache and mount Drive again; return the data that was lost."""
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
            found, needed = "Drive is unmounted, but DriveFS still runs", "its end, as it writes to its cache"
            raise TimedOut(cannot(act, found, needed, "Try again"))
        with file_changes.translated(act):
            for path in self.cached():
                file_changes.remove(path)
        self._mount_again(before, act, "the cache is removed")
        return loss

    def drop(self, timeout: float) -> str:
        """Kill DriveFS and unmount at once; return the data that was lost."""
        for daemon in daemons("drive"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(daemon.pid, signal.SIGKILL)
        if mounts_at(self.mount.point):
            detach(self.mount, timeout, lazily=True)
        return "what DriveFS had not sent"

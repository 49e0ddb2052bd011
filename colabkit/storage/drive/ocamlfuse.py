"""Flush and unmount google-drive-ocamlfuse mounts, and clear their cache without losing unsent files by accident.

`google-drive-ocamlfuse -cc` removes every file in the cache folder, including `cache.db` with the upload queue, and
does not coordinate with a running mount. Therefore, the order is: wait for the uploads, unmount, check the queue again,
run `-cc`, and mount again with the same arguments. The queue in `cache.db` is exact only after unmounting, since the
program may keep entries in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    ColabkitError,
    Mount,
    MountFailed,
    NotMounted,
    TimedOut,
    UnsentWrites,
    cannot,
    format_things,
    option,
    processes,
)
from colabkit.storage.drive.mountpoints import (
    NO_UPLOADS,
    Daemon,
    DriveMount,
    counted_files,
    detach,
    liveness,
    mounts_at,
    serving,
    wait_until,
)

PROGRAM = "google-drive-ocamlfuse"
_UNSENT = (
    "SELECT count(*) FROM (SELECT resource_id AS id FROM upload_queue"
    " UNION SELECT id FROM resource WHERE state IN ('ToUpload', 'Uploading'))"
)


@dataclass(frozen=True)
class Ocamlfuse(DriveMount):
    """A google-drive-ocamlfuse mount with its program, configuration file and cache folder."""

    mount: Mount
    daemon: Daemon
    config: Path
    cache: Path

    steps = ("wait for uploads", "unmount", f"run {PROGRAM} -cc", "mount again with the same arguments")

    @classmethod
    def of(cls, mount: Mount, act: str) -> Ocamlfuse:
        """Return the mount with its program; raise `NotMounted` if the program is not found."""
        daemon = next(serving(PROGRAM, mount.point), None)
        if daemon is None:
            found = f"no {PROGRAM} process of this user serves {mount.point!r}"
            raise NotMounted(cannot(act, found, "", "Run this as the user who mounted it"))
        config, cache = folders(daemon)
        return cls(mount, daemon, config, cache)

    def unsent(self) -> int | None:
        """Return the number of files waiting to be uploaded; None if the database cannot be read."""
        database = self.cache / "cache.db"
        try:
            with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
                return int(connection.execute(_UNSENT).fetchone()[0])
        except sqlite3.Error:
            return None

    def cache_folder(self) -> Path:
        """Return the cache folder."""
        return self.cache

    def cached(self) -> list[Path]:
        """Return the files that `-cc` removes."""
        return [path for path in self.cache.iterdir() if path.is_file()] if self.cache.is_dir() else []

    def send(self, act: str, timeout: float, progress: bool) -> str:
        """Wait for all uploads, and return the known state of the writes."""
        self.wait_for_uploads(act, timeout, progress)
        return f"its database lists no pending uploads; those that {PROGRAM} keeps in memory are unknown"

    def unmount(self, act: str, timeout: float, progress: bool) -> str:
        """Wait for all uploads, unmount, wait for the program to end, and return the known state of the writes."""
        self.send(act, timeout, progress)
        self._unmount_and_wait(act, timeout)
        if unsent := self.unsent():
            queued = format_things(unsent, "file")
            return f"its queue still holds {queued}, to upload after the next mount; do not clear its cache before"
        return f"{PROGRAM} reports {NO_UPLOADS}"

    def _unmount_and_wait(self, act: str, timeout: float) -> None:
        detach(self.mount, timeout)
        if not wait_until(lambda: not os.path.exists(f"/proc/{self.daemon.pid}"), timeout):
            found = f"{PROGRAM} is still running {timeout:g} s after unmounting"
            next_step = ("Wait until it has uploaded all files, or allow more time with ", option("timeout"))
            raise TimedOut(cannot(act, found, "", next_step))

    def _mount_again(self, timeout: float) -> None:
        act = f"mount {self.mount.point!r} again"
        finished = self._run(list(self.daemon.arguments), act, timeout)
        state, reason = liveness((self.mount.point,), timeout)
        if finished.status or state != "alive":
            found = _last_line(finished) if finished.status else f"the mount does not work ({reason})"
            command = shlex.join([PROGRAM, *_without_secrets(self.daemon.arguments)])
            next_step = f"Run the program again with the same arguments: {command}"
            raise MountFailed(cannot(act, found, "", next_step))

    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str:
        """Clear the cache and return a description of lost writes, `""` for none.

        Without `force`, raise an error if files are unsent or their number is unknown.
        """
        try:
            self.wait_for_uploads(act, timeout, progress)
        except TimedOut:
            if not force:
                raise
        try:
            self._unmount_and_wait(act, timeout)
            unsent = self.unsent()
            if unsent != 0 and not force:
                found = f"the cache holds unsent writes to {counted_files(unsent)}"
                raise UnsentWrites(cannot(act, found, "", ("Try again, or discard them with ", option("force", True))))
            finished = self._run(["-cc", *self._identity()], act, timeout)
            # Without stored consent, `-cc` exits with status 1 although it has cleared the cache, so check which files
            # remain.
            if left := [path for path in self.cached() if not path.name.startswith("cache.db")]:
                files = format_things(len(left), "file")
                found = f"{PROGRAM} -cc left {files} in the cache; {_last_line(finished)}"
                raise MountFailed(cannot(act, found, "", f"Check the folder {str(self.cache)!r}"))
        except ColabkitError:
            if not mounts_at(self.mount.point):
                with contextlib.suppress(ColabkitError):
                    self._mount_again(timeout)
            raise
        self._mount_again(timeout)
        return "" if unsent == 0 else f"{counted_files(unsent)} not uploaded"

    def _identity(self) -> list[str]:
        """Return the arguments that select the cache, and `-headless`."""
        selected: list[str] = []
        words = iter(self.daemon.arguments)
        for word in words:
            if word in ("-label", "-config"):
                selected += [word, next(words, "")]
            elif word == "-o" and (roots := [o for o in next(words, "").split(",") if o.startswith("gdfroot=")]):
                selected += ["-o", ",".join(roots)]
            elif word in ("-xdgbd", "-headless"):
                selected.append(word)
        return selected

    def _run(self, arguments: list[str], act: str, timeout: float) -> processes.ProcessResult:
        try:
            return processes.run([self.daemon.program, *arguments], act, timeout, environ=self.daemon.environ)
        except OSError as error:
            found = f"{self.daemon.program!r} cannot be started ({error.strerror})"
            raise MountFailed(cannot(act, found, "", f"Check that {PROGRAM} is installed")) from error


def folders(daemon: Daemon) -> tuple[Path, Path]:
    """Return a program's configuration file and cache folder, derived from its arguments and environment.

    The label is `default` unless `-label` sets another. The files are in `~/.gdfuse/LABEL`; the option `gdfroot=`
    replaces `~/.gdfuse`. With `-xdgbd`, or if there is a configuration file in the XDG folders and no `gdfroot=`, the
    files are in the XDG folders. `-config` and the configuration's `cache_directory` have priority. See
    doc/Configuration.md and src/appDir.ml in google-drive-ocamlfuse.
    """
    arguments = list(daemon.arguments)
    options = ",".join(value for word, value in itertools.pairwise(arguments) if word == "-o").split(",")
    label = _after(arguments, "-label") or "default"
    home = Path(daemon.environ.get("HOME") or Path.home())
    root = next((Path(option.removeprefix("gdfroot=")) for option in options if option.startswith("gdfroot=")), None)
    xdg_config = Path(daemon.environ.get("XDG_CONFIG_HOME") or home / ".config") / "gdfuse" / label / "config"
    if "-xdgbd" in arguments or (root is None and xdg_config.exists()):
        config = xdg_config
        cache = Path(daemon.environ.get("XDG_CACHE_HOME") or home / ".cache") / "gdfuse" / label
    else:
        config = (root or home / ".gdfuse") / label / "config"
        cache = config.parent / "cache"
    if named := _after(arguments, "-config"):
        config = Path(named)
    with contextlib.suppress(OSError):
        for line in config.read_text(errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "cache_directory" and value.strip():
                cache = Path(value.strip())
    return config, cache


def _last_line(finished: processes.ProcessResult) -> str:
    """Return a clause with a program's last line without addresses, which can hold tokens, or its exit status."""
    lines = finished.output.strip().splitlines()
    if not lines:
        return f"the program ended with status {finished.status}"
    shown = re.sub(r"\w+://\S+", "(address)", lines[-1])
    return f"the program printed {shown!r}"


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    shown: list[str] = []
    for word in arguments:
        is_secret = bool(shown) and shown[-1] in ("-id", "-secret")
        shown.append("..." if is_secret else word)
    return shown


def _after(words: list[str], flag: str) -> str:
    return next((value for word, value in itertools.pairwise(words) if word == flag), "")

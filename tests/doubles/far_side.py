"""Fakes of hosted Colab and of google-drive-ocamlfuse that create real mounts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from far_mounts import FuseMount, mounted_at, wait_for

from colabkit.foundation import Place
from colabkit.foundation import mount_table as mounts
from colabkit.storage.drive import api as drive
from colabkit.storage.drive import drivefs, mountpoints
from colabkit.storage.drive.mountpoints import daemons

DOUBLE = Path(__file__).parent / "colab_double"
PROGRAMS = Path(__file__).parent / "ocamlfuse_double"


class Colab:
    """A fake hosted Colab: `plan` sets its behavior, and `events` returns its calls."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.root = folder / "drive-content"
        self.point = str(folder / "content" / "drive")
        self._file = folder / "double.json"
        for made in (self.home, self.root / "MyDrive", self.root / "Shareddrives" / "Team", folder / "content"):
            made.mkdir(parents=True)
        (self.root / "My Drive").symlink_to("MyDrive")
        self.plan()

    def plan(self, **wanted: Any) -> None:
        self._file.write_text(json.dumps({"root": str(self.root), "point": self.point, **wanted}))

    def events(self) -> list[str]:
        path = Path(f"{self._file}.events")
        return path.read_text().splitlines() if path.exists() else []

    def count(self, event: str) -> int:
        return sum(line.split()[0] == event for line in self.events())

    @property
    def served(self) -> FuseMount:
        return served()[-1]


def served() -> list[FuseMount]:
    double = sys.modules.get("google.colab.drive")
    return double.served if double else []


def forget_double(patch: pytest.MonkeyPatch) -> None:
    """Forget all modules of `google`, so that the fake is imported again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "google"]:
        patch.delitem(sys.modules, name)


def see_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Hide remote mounts outside a folder, such as those of other tests on this machine."""
    # Import these packages before patching, because they import functions of `mount_table` by name and need the
    # original functions.
    for room in ("fetching", "probing", "staging"):
        importlib.import_module(f"colabkit.storage.{room}.api")
    real = mounts.mounts

    def own(read: mounts.Reader = mounts.read_file) -> list[mounts.Mount]:
        return [mount for mount in real(read) if not mount.is_remote or mount.point.startswith(f"{folder}/")]

    for patched in (mounts, drivefs, mountpoints):
        patch.setattr(patched, "mounts", own)


def be_at(place: Place, patch: pytest.MonkeyPatch) -> None:
    """Make the Drive functions detect the given platform."""
    for module in (drive, drivefs):
        patch.setattr(module, "current_place", lambda: place)


@contextmanager
def hosted_colab(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Colab]:
    """Make this process look like a kernel of hosted Colab, with the fake `google.colab` on the path."""
    colab = Colab(folder)
    see_only(folder, patch)
    be_at(Place("Colab", "kernel", True), patch)
    patch.setattr(drive, "COLAB_POINT", colab.point)
    patch.setenv("HOME", str(colab.home))
    patch.setenv("COLAB_DOUBLE", str(colab._file))
    patch.setenv("PYTHONPATH", str(DOUBLE))
    patch.syspath_prepend(str(DOUBLE))
    forget_double(patch)
    try:
        yield colab
    finally:
        for mount in served():
            mount.__exit__(None, None, None)
        forget_double(patch)


class Ocamlfuse:
    """A mount of the fake google-drive-ocamlfuse."""

    def __init__(self, folder: Path, label: str = "default", options: tuple[str, ...] = ()) -> None:
        self.home, self.root, self.point = folder / "home", folder / "content", folder / "my drive"
        self.label, self._arguments = label, [*options, *(["-label", label] if label != "default" else [])]
        for made in (self.home, self.root, self.point):
            made.mkdir(parents=True)
        self.config = self.home / ".gdfuse" / label / "config"
        self.config.parent.mkdir(parents=True)
        (self.config.parent / "state").touch()
        self.cache = self.config.parent / "cache"
        self.environ = {
            "HOME": str(self.home),
            "OCAMLFUSE_ROOT": str(self.root),
            "OCAMLFUSE_PYTHON": sys.executable,
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        }

    def __enter__(self) -> Self:
        command = [str(PROGRAMS / "google-drive-ocamlfuse"), *self._arguments, str(self.point)]
        subprocess.run(command, env={**os.environ, **self.environ}, check=True, capture_output=True)
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        while mounted_at(self.point):
            subprocess.run(["umount", "-l", str(self.point)], check=True)

    def pids(self) -> list[int]:
        return [daemon.pid for daemon in daemons("google-drive-ocamlfuse") if str(self.point) in daemon.arguments]

    def kill(self) -> None:
        """Kill the program; the dead mount remains."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), "the end of the program")

    def calls(self) -> list[str]:
        """Return the arguments of each start of the program so far."""
        return (self.home / "ocamlfuse.calls").read_text().splitlines()

    def queue(self, *states: str) -> None:
        """Replace the program's upload queue with files in the given states."""
        with closing(sqlite3.connect(self.cache / "cache.db")) as database, database:
            database.execute("DELETE FROM upload_queue")
            database.execute("DELETE FROM resource")
            for number, state in enumerate(states):
                database.execute("INSERT INTO resource (id, state) VALUES (?, ?)", (number, state))
                database.execute("INSERT INTO upload_queue (resource_id, state) VALUES (?, ?)", (number, state))

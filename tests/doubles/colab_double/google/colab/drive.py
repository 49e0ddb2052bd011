"""A fake of hosted Colab's Drive mount: it asks for consent, checks for an existing mount, then starts DriveFS."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from google.colab import _message

served: list[Any] = []
"""The mounts so far; tests unmount the remaining ones."""

LOG = ".config/Google/DriveFS/Logs/drive_fs.txt"


class TIMEOUT(Exception):
    """A stand-in for `pexpect.TIMEOUT`, which Colab does not catch while it waits for DriveFS."""


def plan() -> dict[str, Any]:
    """Return the behavior that the test requests.

    The keys are `hosted`, `consent`, `mount`, `push`, `log`, `prints`, `point`, `root` (the folder to show) and
    `drive` (the arguments of the `FuseMount`).
    """
    return json.loads(Path(os.environ["COLAB_DOUBLE"]).read_text())


def note(event: str) -> None:
    with open(os.environ["COLAB_DOUBLE"] + ".events", "a") as file:
        file.write(event + "\n")


def mount(mountpoint: str, force_remount: bool = False, timeout_ms: int = 120000, readonly: bool = False) -> None:
    wanted = plan()
    note(f"mount force_remount={force_remount} timeout_ms={timeout_ms} readonly={readonly}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("blocking_request is not thread-safe")
    if not wanted.get("hosted", True):
        raise NotImplementedError("Mounting drive is unsupported in this environment. Use PyDrive2 instead.")
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    _ask_for_consent(wanted)
    mountpoint = os.path.expanduser(mountpoint)
    if not force_remount and os.path.isdir(os.path.join(mountpoint, "My Drive")):
        print(f"Drive already mounted at {mountpoint}; to attempt to forcibly remount, call drive.mount(...).")
        return
    config = Path.home() / ".config/Google"
    if config.is_file():
        raise ValueError(f"{config} must be a directory if present")
    subprocess.run(["umount", "-l", mountpoint], stderr=subprocess.DEVNULL, check=False)
    if os.path.islink(mountpoint):
        raise ValueError("Mountpoint must not be a symlink")
    if os.path.isdir(mountpoint) and os.listdir(mountpoint):
        raise ValueError("Mountpoint must not already contain files")
    if not os.path.isdir(mountpoint) and os.path.exists(mountpoint):
        raise ValueError("Mountpoint must either be a directory or not exist")
    if not os.path.exists(os.path.dirname(os.path.normpath(mountpoint))):
        raise ValueError("Mountpoint must be in a directory that exists")
    _log(wanted.get("log", ""))
    _start(wanted, mountpoint)
    if "prints" in wanted:
        print(wanted["prints"])
    print(f"Mounted at {mountpoint}")


def _ask_for_consent(wanted: dict[str, Any]) -> None:
    note("consent")
    answer = wanted.get("consent", "given")
    if answer == "hangs":
        time.sleep(3600)
    if answer == "never comes":
        # If the browser does not answer, Colab's request returns None, and `mount()` continues.
        return
    if answer == "refused":
        raise _message.MessageError("Error: credential propagation was unsuccessful")


def _log(text: str) -> None:
    path = Path.home() / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def _start(wanted: dict[str, Any], mountpoint: str) -> None:
    how = "fails" if wanted.get("consent") == "never comes" else wanted.get("mount", "works")
    if how == "policy":
        raise ValueError("The domain policy has disabled Drive File Stream: https://support.google.com/a/answer/74")
    if how == "root folder":
        raise ValueError("mount failed: timeout during initial read of root folder; for more info: https://research...")
    if how == "fails":
        raise ValueError("mount failed")
    if how == "pexpect":
        raise TIMEOUT(
            "Timeout exceeded.\nsearcher: searcher_re:\n    0: re.compile('google.colab.drive MOUNTED')\n"
            "    1: re.compile('root_alert: failed to read the root folder')\n"
            "    2: re.compile('The domain policy has disabled Drive File Stream')"
        )
    if how == "hangs":
        time.sleep(3600)
    if how == "nothing":
        return
    from far_mounts import FuseMount

    drive = FuseMount(Path(mountpoint), Path(wanted["root"]), **wanted.get("drive", {}))
    served.append(drive.__enter__())


def flush_and_unmount(timeout_ms: int = 24 * 60 * 60 * 1000) -> None:
    wanted = plan()
    note(f"flush_and_unmount timeout_ms={timeout_ms}")
    if not wanted.get("hosted", True):
        raise NotImplementedError
    if b"type fuse.drive" not in subprocess.check_output(["mount"]):
        print("Drive not mounted, so nothing to flush and unmount.")
        return
    how = wanted.get("push", "works")
    if how == "hangs":
        time.sleep(3600)
    if how == "fails":
        raise ValueError("flush_and_unmount failed")
    subprocess.run(["umount", "-l", wanted["point"]], stderr=subprocess.DEVNULL, check=False)

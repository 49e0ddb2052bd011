"""The tools that the scoreboard compares: colabkit's calls, and plain tools that do the same work."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import colabkit
from colabkit.errors import ColabkitError

from .board import COLABKIT


@dataclass(frozen=True)
class Copier:
    """A tool that copies a folder; `copy(source, target)` makes `target`, and `refusals` are its orderly errors."""

    copy: Callable[[Path, Path], object]
    refusals: type[Exception]


def _command(*words: str) -> Callable[[Path, Path], object]:
    """Return a function that runs a command with the source, ending with a slash, and the target."""
    return lambda source, target: subprocess.run(
        [*words, f"{source}/", str(target)], check=True, capture_output=True, timeout=50
    )


def _cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True, capture_output=True, timeout=50)


COPIERS = {
    COLABKIT: Copier(lambda source, target: colabkit.stage(source, target, progress=False), ColabkitError),
    "cp -r": Copier(_cp, subprocess.CalledProcessError),
    "shutil.copytree": Copier(shutil.copytree, Exception),
}
if shutil.which("rsync"):
    COPIERS["rsync"] = Copier(_command("rsync", "-a"), subprocess.CalledProcessError)
if shutil.which("rclone"):
    COPIERS["rclone"] = Copier(_command("rclone", "copy", "--config", ""), subprocess.CalledProcessError)

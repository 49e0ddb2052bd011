"""The tools that the scoreboard compares: colabkit's calls, and plain tools that do the same work."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import fsspec

import colabkit
from colabkit.errors import ColabkitError

from .board import COLABKIT

_TIMEOUT_S = 20


@dataclass(frozen=True)
class Copier:
    """A tool that copies or extracts a source.

    Args:
        copy: called with the source and the path of the copy.
        update: the same, to bring an existing copy up to date.
        refusals: the exceptions by which the tool refuses work.
        kinds: the kinds of sources that the tool supports.
        remotes: the kinds of remote sources that the tool supports: "bucket" and "web".
        is_program: whether it runs in another process, in which the scoreboard cannot cause faults.
    """

    copy: Callable[[Any, Path], object]
    update: Callable[[Any, Path], object]
    refusals: type[Exception]
    kinds: tuple[str, ...] = ("folder",)
    remotes: tuple[str, ...] = ()
    is_program: bool = False


def _command(*words: str) -> Callable[[Path, Path], object]:
    """Return a function that runs a command with the source, ending with a slash, and the target."""
    return lambda source, target: subprocess.run(
        [*words, f"{source}/", str(target)], check=True, capture_output=True, timeout=_TIMEOUT_S
    )


def _cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-rT", str(source), str(target)], check=True, capture_output=True, timeout=_TIMEOUT_S)


def _unzip(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as archive:
        archive.extractall(target)


def _untar(source: Path, target: Path) -> None:
    with tarfile.open(source) as archive:
        archive.extractall(target, filter="data")


def _get(source: str, target: Path) -> None:
    files, root = fsspec.core.url_to_fs(source)
    files.get(f"{root}/", f"{target}/", recursive=True)


def _download(source: str, target: Path) -> None:
    with urlopen(source, timeout=_TIMEOUT_S) as answer, zipfile.ZipFile(io.BytesIO(answer.read())) as archive:
        archive.extractall(target)


COPIERS = {
    COLABKIT: Copier(
        lambda source, target: colabkit.stage(source, target, progress=False),
        lambda source, target: colabkit.stage(source, target, progress=False, refresh=True),
        ColabkitError,
        ("folder", "zip", "tar", "tar.gz", "table"),
        ("bucket", "web"),
    ),
    "cp -r": Copier(_cp, _cp, subprocess.CalledProcessError, is_program=True),
    "shutil.copytree": Copier(shutil.copytree, partial(shutil.copytree, dirs_exist_ok=True), Exception),
    "zipfile.extractall": Copier(_unzip, _unzip, Exception, ("zip",)),
    "tarfile.extractall": Copier(_untar, _untar, Exception, ("tar", "tar.gz")),
    "fsspec get": Copier(_get, _get, Exception, (), ("bucket",)),
    "urlopen": Copier(_download, _download, Exception, (), ("web",)),
}
if shutil.which("rsync"):
    _rsync = _command("rsync", "-a")
    COPIERS["rsync"] = Copier(_rsync, _rsync, subprocess.CalledProcessError, is_program=True)
if shutil.which("rclone"):
    _rclone = _command("rclone", "copy", "--config", "")
    COPIERS["rclone"] = Copier(_rclone, _rclone, subprocess.CalledProcessError, is_program=True)

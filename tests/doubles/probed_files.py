"""Files to probe, and a probe without a progress bar."""

from __future__ import annotations

import os
from pathlib import Path

from colabkit.storage.probing.api import probe
from colabkit.storage.probing.report import ProbeReport


def fill(folder: Path, files: int, folders: int = 1, size: int = 5000) -> Path:
    """Write files of the given size in bytes into class folders; those above 1 MiB are sparse."""
    for number in range(files):
        path = folder / f"class{number % folders}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size)) if size <= 1 << 20 else truncate(path, size)
    return folder


def add_large(folder: Path, mebibytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    return truncate(folder / "large.bin", mebibytes << 20)


def truncate(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def probe_quietly(path: Path | str, seconds: float) -> ProbeReport:
    return probe(path, seconds=seconds, progress=False)

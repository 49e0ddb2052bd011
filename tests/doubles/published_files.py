"""Files and folders to publish, in an old and a new version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reader_threads import reader_threads

from colabkit.storage.publishing import PublishReport, publish

OLD, NEW = {"": b"old"}, {"": b"new" * 5000}
OLD_FOLDER = {"a.png": b"old", "deep/er/d.png": b"old too"}
NEW_FOLDER = {"a.png": b"new" * 900, "deep/er/d.png": b"newer", "e.txt": b""}


def write(place: Path, files: dict[str, bytes]) -> Path:
    """Write a folder of files, given by path, or a single file, given under the key ""."""
    for name, data in files.items():
        path = place / name if name else place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place


def content(place: Path) -> dict[str, bytes] | None:
    """Return the bytes of a folder's files by path, or of a file under the key ""; None if the path does not exist."""
    if place.is_file():
        return {"": place.read_bytes()}
    if not place.exists():
        return None
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def bring(path: Path, to: object, **options: Any) -> PublishReport:
    return publish(path, to, progress=False, **options)  # type: ignore[arg-type]


def assert_nothing_is_open(folder: Path) -> None:
    """Assert that no reader thread is running and no file of a folder is open."""
    assert reader_threads() == []
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    assert [name for name in names if name.startswith(str(folder))] == []

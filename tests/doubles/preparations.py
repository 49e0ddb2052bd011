"""Call `prepare()` and check its report, and start sessions without local data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from reader_threads import reader_threads
from trees import leftovers

from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.api import prepare
from colabkit.packs.preparing.prepared_pack import PreparedPack


def ready(source: object, **options: Any) -> PreparedPack:
    """Call `prepare()` without progress bars, and check that the files in the report exist."""
    prepared = prepare(source, progress=False, **options)
    report = prepared.report
    assert verify(report.path, progress=False).is_good
    assert report.path == prepared.path
    assert report.pack_bytes == report.path.stat().st_size
    assert (report.saved_path is None) == bool(report.unsaved)
    if report.saved_path is not None:
        assert report.saved_path.read_bytes() == report.path.read_bytes()
    return prepared


def samples(prepared: PreparedPack) -> int:
    return sum(len(prepared[split]) for split in prepared)


def forget_local(near_storage: Path) -> None:
    for path in near_storage.iterdir():
        shutil.rmtree(path)


def left_over(near_storage: Path) -> list[str]:
    """Return the reader threads that are still running, and the unfinished files."""
    return [*map(str, reader_threads()), *leftovers(near_storage), *map(str, near_storage.rglob("*.staged"))]

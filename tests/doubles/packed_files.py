"""Folders of photos to pack, ways to pack them, and what the packs then hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import photo, saved

from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing import sample_writer
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify

WAYS = {
    "inline": {"threads": 1},
    "threads": {"threads": 3},
    "processes": {"threads": "auto"},
}
"""Options of `pack()` by what makes the samples; `fork` has to be called for processes."""


def photos(
    folder: Path, per_class: int = 4, size: tuple[int, int] = (24, 32), kind: str = "JPEG", **options: Any
) -> Path:
    """Write class folders of photos, height x width as in `size`, and return the folder."""
    for label, name in enumerate(("ants", "bees", "cats")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            data = saved(photo(*size, seed=100 * label + number), kind, **options)
            (folder / name / f"{number:03d}.{'jpg' if kind == 'JPEG' else kind.lower()}").write_bytes(data)
    return folder


def files_of(folder: Path) -> list[Path]:
    """Return all files below a folder, in the order of their samples."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def packed(source: Any, out: Path, **options: Any) -> Path:
    """Pack a source, check every sample against its CRC, and return the pack."""
    path = pack(source, out, progress=False, **options).path
    assert verify(path, progress=False).damaged == ()
    return path


def stored(path: Path, split: str = "train", field: str = "X") -> list[Any]:
    """Return what is stored of each sample: rows, or bytes."""
    info = read_pack(path)
    if not info.fields[field].is_ragged:
        return list(np.array(info.map(f"{field}_{split}")))
    flat = info.map(f"{field}_{split}").tobytes()
    return [flat[start : start + size] for start, size in info.table(f"{field}_{split}_index").tolist()]


def labels_of(path: Path, split: str = "train") -> list[Any]:
    """Return the labels of a split."""
    return read_pack(path).table(f"Y_{split}").tolist()


def fork(monkeypatch: pytest.MonkeyPatch, chunk_samples: int = 2, cpus: int = 2) -> None:
    """Let samples be made by forked processes however few and slow they are, so many of them in a task."""
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 0.0)
    monkeypatch.setattr(sample_writer, "_TINY_S", float("inf"))
    monkeypatch.setattr(sample_writer, "_FORKING_S", -1.0)
    monkeypatch.setattr(sample_writer, "_CHUNK_SAMPLES", chunk_samples)
    monkeypatch.setattr(sample_writer, "usable_cpus", lambda: float(cpus))

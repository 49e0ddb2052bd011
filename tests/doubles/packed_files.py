"""Write folders of photos, pack them, and read the content of the packs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import photo, saved

from colabkit.packs.dataset.opened_pack import Pack, open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing import sample_writer
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.pack_report import PackReport
from colabkit.packs.packing.verification import verify

ROW = 6 * 5 * 3
"""Size in bytes of an image of `make_tree()`."""

META: dict[str, Any] = {
    "source": "made",
    "encoding": "raw",
    "fields": {"X": ["image", False], "Y": ["labels", False]},
    "classes": ["a"],
    "label_kind": "class",
    "splits": {"train": 2},
    "sample_shape": [2, 2, 3],
    "channels": 3,
}
"""Description of a raw pack of two images of 2x2 pixels, as `create_pack` takes it."""

ENCODINGS: list[dict[str, Any]] = [{"encoding": "raw"}, {"encoding": "source"}, {"encoding": "jpeg"}]

WORKS: dict[str, dict[str, Any]] = {
    "raw": {"encoding": "raw"},
    "source": {"encoding": "source"},
    "jpeg": {"encoding": "jpeg"},
    "raw, one left out": {"encoding": "raw", "on_bad": "skip"},
    "source, one left out": {"encoding": "source", "on_bad": "skip"},
    "jpeg, one black": {"encoding": "jpeg", "on_bad": "blank", "fields": {"name": os.fspath}},
}
"""Options of packs that are written in different ways: directly, with lengths known late, and with gaps."""

WAYS = {
    "inline": {"threads": 1},
    "threads": {"threads": 3},
    "processes": {"threads": "auto"},
}
"""Options of `pack()` by the kind of worker; call `fork` to use processes."""


def photos(
    folder: Path, per_class: int = 4, size: tuple[int, int] = (24, 32), kind: str = "JPEG", **options: Any
) -> Path:
    """Write photos of the given (height, width) into class folders below `folder`, and return `folder`."""
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
    """Pack a source, check every sample against its CRC, and return the path of the pack."""
    path = pack(source, out, progress=False, **options).path
    assert verify(path, progress=False).damaged == ()
    return path


def assert_refused(error: Any, match: str, source: Any, out: Path, **options: Any) -> None:
    """Assert that packing raises a matching one-line error and leaves no other files next to the target."""
    before = out.parent.exists() and names_in(out.parent)
    with pytest.raises(error, match=match) as caught:
        pack(source, out, progress=False, **options)
    assert "\n" not in str(caught.value)
    assert (out.parent.exists() and names_in(out.parent)) == before


def opened(source: Any, out: Path, **options: Any) -> Pack:
    return open_pack(packed(source, out, **options))


def sharded(source: Any, out: Path, shard_bytes: int | None = 4 * ROW, **options: Any) -> PackReport:
    """Pack a source into shards, by default in one thread."""
    return pack(source, out, **{"shard_bytes": shard_bytes, "threads": 1, "progress": False, **options})


def shards_beside(index: Path) -> list[Path]:
    return sorted(index.parent.glob(f"{index.stem}-0*.h5"))


def kept_shards(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the identities of the shards that an interrupted call left in hidden folders, by file name."""
    return {path.name: identity(path) for path in folder.glob(".colabkit-*/data/p-*.h5")}


def identity(path: Path) -> tuple[int, int]:
    """Return two numbers, at least one of which changes when a file is rewritten."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def photos_for(options: dict[str, Any], folder: Path) -> Path:
    """Write six photos and return their folder; the fourth is broken if the options allow bad files."""
    photos(folder, per_class=2)
    if "on_bad" in options:
        files_of(folder)[3].write_bytes(b"no image")
    return folder


def content(path: Path) -> dict[str, list[tuple[bytes, ...]]]:
    """Return all samples of each split, read through the datasets of `open_pack()`."""
    found = {}
    for split, data in open_pack(path).items():
        samples = [data[number] for number in range(len(data))]
        fields = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
        found[split] = [tuple(np.asarray(value).tobytes() for value in values) for values in fields]
    return found


def assert_same(path: Path, other: Path) -> None:
    """Assert that a pack of shards holds the same samples, labels, fields and metadata as another pack."""
    assert content(path) == content(other)
    info, expected = read_pack(path), read_pack(other)
    assert sorted(info.meta["bad"], key=str) == sorted(expected.meta["bad"], key=str)
    for name in ("splits", "classes", "fields", "left_out", "encoding", "plan"):
        assert info.meta[name] == expected.meta[name], name
    for split in info.splits:
        labels = [read_pack(info.path.with_name(one.name)) for one in info.shards if split in one.splits]
        if "Y" in info.fields:
            whole = np.concatenate([one.table(f"Y_{split}") for one in labels])
            assert np.array_equal(info.table(f"Y_{split}"), whole)
            assert np.array_equal(whole, expected.table(f"Y_{split}"))
    assert verify(path, progress=False).is_good


def flip_byte(path: Path, at: int, bits: int = 1) -> None:
    """Flip the given bits of one byte in a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def stored(path: Path, split: str = "train", field: str = "X") -> list[Any]:
    """Return the stored samples of a split: rows of an array, or bytes if the field is ragged."""
    info = read_pack(path)
    if not info.fields[field].is_ragged:
        return list(np.array(info.map(f"{field}_{split}")))
    flat = info.map(f"{field}_{split}").tobytes()
    return [flat[start : start + size] for start, size in info.table(f"{field}_{split}_index").tolist()]


def labels_of(path: Path, split: str = "train") -> list[Any]:
    return read_pack(path).table(f"Y_{split}").tolist()


def fork(monkeypatch: pytest.MonkeyPatch, chunk_samples: int = 2, cpus: int = 2) -> None:
    """Make `pack()` use forked processes even for few or fast samples, with the given number of samples per task."""
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 0.0)
    monkeypatch.setattr(sample_writer, "_TINY_S", float("inf"))
    monkeypatch.setattr(sample_writer, "_FORKING_S", -1.0)
    monkeypatch.setattr(sample_writer, "_CHUNK_SAMPLES", chunk_samples)
    monkeypatch.setattr(sample_writer, "usable_cpus", lambda: float(cpus))

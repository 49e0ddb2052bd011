"""The same 24 pictures in three classes: in folders, archives, tables, WebDataset shards, TFRecord files and LMDB."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
from pictures import saved
from record_files import example, framed, lmdb_of, shards_of

PIXELS = np.random.default_rng(2).integers(0, 256, (24, 7, 5, 3), dtype=np.uint8)
NAMES = ("ant", "bee", "cat")


def png(number: int) -> bytes:
    return saved(PIXELS[number], "PNG")


def class_folders(place: Path) -> Path:
    """Write the pictures into one folder for each class."""
    for n in range(24):
        path = place / NAMES[n % 3] / f"{n:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(n))
    return place


def archive_of(tree: Path, path: Path) -> Path:
    """Write a tree to an archive in the format of the path's suffix, with the files sorted by number, not by class."""
    files = sorted(tree.rglob("*.png"), key=lambda file: file.name)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in files:
                archive.write(file, file.relative_to(tree))
    else:
        with tarfile.open(path, f"w:{'gz' if path.suffix in ('.gz', '.tgz') else ''}") as tar:
            for file in files:
                tar.add(file, file.relative_to(tree))
    return path


def path_table(folder: Path, root: str = "") -> pd.DataFrame:
    """Return a table of the pictures, written below `folder`, with `root` before each relative path."""
    paths = sorted(class_folders(folder / "tree").glob("*/*.png"))
    names = [f"{root}{path.relative_to(folder)}" for path in paths]
    return pd.DataFrame({"path": names, "label": [path.parent.name for path in paths]})


def web_shards(place: Path) -> Path:
    """Write the pictures in four WebDataset shards; those of the last shard are named as test samples."""
    place.mkdir()
    rows = [
        {"__key__": f"{n:06d}", "png": png(n), "cls": n % 3, "txt": f"word {n}", "json": {"age": n / 2}}
        for n in range(24)
    ]
    shards_of(str(place / "train-%06d.tar"), rows[:18], 6)
    shards_of(str(place / "test-%06d.tar"), rows[18:], 6)
    return place


def tf_records(place: Path) -> Path:
    """Write the pictures in two files; the second is named as the test split."""
    place.mkdir()
    for split, numbers in (("train", range(18)), ("test", range(18, 24))):
        records = (
            example(
                image__encoded=[png(n)], image__class__label=[n % 3], name=[b"word %d" % n], age=[n / 2], box=[n, n + 1]
            )
            for n in numbers
        )
        (place / f"{split}.tfrecord").write_bytes(framed(*records))
    return place


def database(place: Path) -> Path:
    """Write the pictures as an LMDB in the layout of scene text recognition datasets."""
    values = {}
    for n in range(24):
        values[b"image-%09d" % n] = png(n)
        values[b"label-%09d" % n] = NAMES[n % 3].encode()
    return lmdb_of(place, {**values, b"num-samples": b"24"})

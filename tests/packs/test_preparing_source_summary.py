"""`describe_source()` describes sources of all kinds, and reads only a little of them."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import BinaryIO

import pytest
from PIL import Image

from colabkit.errors import BadSource, SourceMissing
from colabkit.packs import describe_source
from colabkit.storage import FolderSource, Item


class CountedFolder(FolderSource):
    """A folder that counts the bytes that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.opened: list[str] = []

    def open(self, item: Item) -> BinaryIO:
        self.opened.append(item.path)
        return super().open(item)


def make_images(folder: Path, count: int, size: tuple[int, int] = (40, 30)) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", size, (number % 256, 0, 0)).save(folder / f"{number}.png")


def test_a_folder_is_described_in_one_line(tmp_path: Path) -> None:
    for split in ("train", "test"):
        make_images(tmp_path / split / "cats", 3)
        make_images(tmp_path / split / "dogs", 2, (50, 50))
    found = describe_source(tmp_path)
    assert repr(found) == "10 images, 2 classes, median 40×30, train/test folders found"
    assert (found.classes, dict(found.splits or {})) == (("cats", "dogs"), {"train": 5, "test": 5})
    assert found.median_size == (30, 40)
    assert not found.has_one_size


def test_equal_images_are_said_to_be_equal(tmp_path: Path) -> None:
    make_images(tmp_path / "cats", 3, (8, 8))
    make_images(tmp_path / "dogs", 3, (8, 8))
    assert repr(describe_source(tmp_path)) == "6 images, 2 classes, 8×8, not split yet"


def test_at_most_32_images_are_opened(tmp_path: Path) -> None:
    make_images(tmp_path / "cats", 70)
    make_images(tmp_path / "dogs", 70)
    source = CountedFolder(tmp_path)
    assert describe_source(source).samples == 140
    assert len(source.opened) == 32
    assert {path.split("/")[0] for path in source.opened} == {"cats", "dogs"}


def test_unreadable_images_are_counted_with_the_reason(tmp_path: Path) -> None:
    make_images(tmp_path / "cats", 3)
    make_images(tmp_path / "dogs", 3)
    (tmp_path / "dogs" / "1.png").write_bytes(b"nothing")
    found = describe_source(tmp_path)
    assert repr(found).endswith("not split yet, 1 of 6 sampled files unreadable")
    assert found.unreadable[0][0] == "dogs/1.png"
    assert not found.is_good


def test_a_compressed_tar_is_described_like_its_folder(tmp_path: Path) -> None:
    make_images(tmp_path / "data" / "cats", 3)
    make_images(tmp_path / "data" / "dogs", 3)
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "data", "data")
    assert repr(describe_source(tmp_path / "data.tar.gz")) == repr(describe_source(tmp_path / "data"))


def test_a_web_address_is_not_fetched_unless_asked() -> None:
    found = describe_source("https://example.com/birds.zip?token=secret")
    assert found.samples is None
    assert "must be copied" in repr(found)
    assert "secret" not in repr(found)


def test_a_missing_and_an_empty_source_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match="no such file or folder"):
        describe_source(tmp_path / "missing")
    with pytest.raises(BadSource, match="the source has no files"):
        describe_source(tmp_path)

"""Fixtures: folders of images to pack."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_files import photos
from trees import make_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of twelve photos of one size in three classes."""
    return photos(tmp_path / "tree")


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """Return a folder of only six images, so that packing takes few file operations."""
    return make_tree(tmp_path / "small", 2)


@pytest.fixture
def split_tree(tmp_path: Path) -> Path:
    """Return a folder with three splits of 6, 6 and 3 images."""
    for prefix, count in (("train", 2), ("val", 2), ("test", 1)):
        make_tree(tmp_path / "tree", count, prefix=prefix)
    return tmp_path / "tree"

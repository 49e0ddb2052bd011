"""Write image trees, find colabkit's unfinished files, and skip tests whose tools are missing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def make_tree(folder: Path, images_per_class: int, size: tuple[int, int] = (6, 5), prefix: str = "") -> Path:
    """Write random but reproducible PNG images of the given (height, width) into class folders."""
    random = np.random.default_rng(7)
    for name in ("ants", "bees", "cats"):
        target = folder / prefix / name
        target.mkdir(parents=True)
        for number in range(images_per_class):
            pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(target / f"{number:03d}.png")
    return folder


def leftovers(folder: Path) -> list[str]:
    """Return the unfinished files that colabkit left below a folder."""
    return [path for path in map(str, folder.rglob("*")) if ".partial" in path]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file below a folder, keyed by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def needs(tool: str, available: bool) -> None:
    """Skip a test whose tool is missing; with COLABKIT_CI=1 fail instead, because CI installs all tools."""
    if available:
        return
    if os.environ.get("COLABKIT_CI") == "1":
        pytest.fail(f"{tool} is missing, and COLABKIT_CI=1 requires every test")
    pytest.skip(f"{tool} is missing")

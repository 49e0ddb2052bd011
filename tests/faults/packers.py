"""Tools that pack images into one file, and the check of a pack that was made while faults occurred."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from contract import whole_content
from PIL import Image

from colabkit.errors import ColabkitError
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify

from .board import COLABKIT, Result
from .copies import checked_work

_SHAPE = (48, 40, 3)
_CLASSES = ("ants", "bees", "cats")

VARIANTS: dict[str, dict[str, Any]] = {
    "raw": {"encoding": "raw"},
    "source": {"encoding": "source"},
    "jpeg": {"encoding": "jpeg"},
    "shards": {"encoding": "raw", "shard_bytes": 4 * 48 * 40 * 3},
}
"""Options of `pack()` for packs that are written in different ways."""


@dataclass(frozen=True)
class Packer:
    """A tool that packs the images of a folder.

    Args:
        pack: called with the folder, the path of the pack, and the name of a variant.
        read: returns the content of a finished pack, which can be compared.
        refusals: the exceptions by which the tool refuses work.
        variants: the variants that the tool supports.
    """

    pack: Callable[[Path, Path, str], object]
    read: Callable[[Path], object]
    refusals: type[Exception]
    variants: tuple[str, ...] = ("raw",)


def write_images(folder: Path, per_class: int = 4) -> Path:
    generator = np.random.default_rng(3)
    for label in _CLASSES:
        (folder / label).mkdir(parents=True)
        for number in range(per_class):
            pixels = generator.integers(0, 256, _SHAPE, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number:03}.png")
    return folder


def _pack(source: Path, out: Path, variant: str, **options: Any) -> None:
    pack(source, out, progress=False, threads=1, **VARIANTS[variant], **options)


def _read(path: Path) -> object:
    assert verify(path, progress=False).is_good
    shards = sorted(path.parent.glob(f"{path.stem}-0*.h5"))
    return [whole_content(one) for one in (path, *shards)]


def _images(source: Path) -> list[Path]:
    return sorted(source.rglob("*.png"))


def _pack_with_h5py(source: Path, out: Path, variant: str) -> None:
    paths = _images(source)
    with h5py.File(out, "w") as file:
        images = file.create_dataset("X", (len(paths), *_SHAPE), "u1")
        labels = file.create_dataset("Y", (len(paths),), "i8")
        for number, path in enumerate(paths):
            images[number] = np.asarray(Image.open(path))
            labels[number] = _CLASSES.index(path.parent.name)


def _read_with_h5py(path: Path) -> object:
    with h5py.File(path) as file:
        return [file[name][:].tobytes() for name in ("X", "Y")]


def _pack_with_memmap(source: Path, out: Path, variant: str) -> None:
    paths = _images(source)
    images = np.lib.format.open_memmap(out, "w+", np.uint8, (len(paths), *_SHAPE))
    for number, path in enumerate(paths):
        images[number] = np.asarray(Image.open(path))
    images.flush()


def _read_with_numpy(path: Path) -> object:
    return np.load(path).tobytes()


PACKERS = {
    COLABKIT: Packer(_pack, _read, ColabkitError, tuple(VARIANTS)),
    "h5py": Packer(_pack_with_h5py, _read_with_h5py, OSError),
    "numpy.memmap": Packer(_pack_with_memmap, _read_with_numpy, OSError),
}


def expected_packs(packer: Packer, source: Path, folder: Path) -> dict[str, object]:
    contents = {}
    for variant in packer.variants:
        (folder / variant).mkdir(parents=True)
        packer.pack(source, folder / variant / "pack.h5", variant)
        contents[variant] = packer.read(folder / variant / "pack.h5")
    return contents


def checked_pack(
    case: str,
    packer: Packer,
    source: Path,
    variant: str,
    expected: object,
    folder: Path,
    repair: Callable[[], object] | None = lambda: None,
    **options: Any,
) -> Result:
    """Pack images while a fault occurs, and score the outcome as `checked_copy` does."""
    target = folder / "pack.h5"

    def check() -> None:
        try:
            found = packer.read(target)
        except Exception as error:
            raise AssertionError(f"an incomplete pack is at the final path: {error}") from error
        assert found == expected, "the pack differs"

    make = partial(packer.pack, source, target, variant)
    return checked_work(case, make, target, check, repair, refusals=packer.refusals, **options)  # type: ignore[arg-type]


def size_of(path: Path) -> int:
    """Return the bytes of all files in the folder of a pack."""
    return sum(os.stat(one).st_size for one in path.parent.iterdir())

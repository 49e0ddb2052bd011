"""HDF5 files as other programs write them, with several storage options, and with unusual or malicious entries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

IMAGES = np.random.default_rng(5).integers(0, 256, (30, 6, 5, 3)).astype("|u1")
LABELS = np.arange(30) % 4
STORED = {
    "contiguous": {},
    "chunked": {"chunks": (4, 6, 5, 3)},
    "gzip": {"chunks": (7, 3, 5, 1), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": (1, 6, 5, 3), "compression": "lzf"},
}


def write_hdf5(path: Path, images: np.ndarray = IMAGES, labels: np.ndarray | None = LABELS, **stored: object) -> Path:
    """Write images and labels under common dataset names; `stored` is passed to `create_dataset` for the images."""
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, **stored)
        if labels is not None:
            file.create_dataset("labels", data=labels)
    return path


def add_virtual(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout(IMAGES.shape, np.uint8)
    layout[:] = h5py.VirtualSource(str(other), "images", IMAGES.shape)
    file.create_virtual_dataset("e/images", layout)


def add_filter(file: h5py.File, other: Path) -> None:
    """Add a dataset with an unknown filter. HDF5 may skip this filter because it is optional."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1, 6))
    properties.set_filter(32099, h5py.h5z.FLAG_OPTIONAL, ())
    space = h5py.h5s.create_simple((4, 6))
    h5py.h5d.create(file.create_group("e").id, b"images", h5py.h5t.NATIVE_UINT8, space, dcpl=properties)


LINKS: dict[str, Callable[[h5py.File, Path], object]] = {
    "external link": lambda file, other: file.update({"e": h5py.ExternalLink(str(other), "/")}),
    "soft link": lambda file, other: file.update({"real/images": IMAGES, "e": h5py.SoftLink("/real")}),
    "virtual": add_virtual,
}
HOSTILE: dict[str, Callable[[h5py.File, Path], object]] = {
    **LINKS,
    "external": lambda file, other: file.create_dataset("e/images", (40,), "|u1", external=[(str(other), 0, 40)]),
    "varying": lambda file, other: file.create_dataset("e/images", (3,), h5py.vlen_dtype(np.uint8)),
    "objects": lambda file, other: file.create_dataset("e/images", (3,), h5py.ref_dtype),
    "bomb": lambda file, other: file.create_dataset("e/images", (1 << 36,), "|u1", chunks=(4096,), compression="gzip"),
    "unfilled": lambda file, other: file.create_dataset("e/images", (1 << 30, 1024), np.uint8),
    "filter": add_filter,
}
"""Functions that add a hostile dataset `e/images` to an open file; the path is that of another HDF5 file."""


def _virtual(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout((2, 2, 2, 3), np.uint8)
    layout[:] = h5py.VirtualSource(str(other), "X_train", (2, 2, 2, 3))
    file.create_virtual_dataset("Z_train", layout)


ODD: dict[str, Callable[[h5py.File, Path], object]] = {
    "external link": lambda file, other: file.update({"Z_train": h5py.ExternalLink(str(other), "X_train")}),
    "soft link": lambda file, other: file.update({"Z_train": h5py.SoftLink("/X_train")}),
    "virtual": _virtual,
    "external storage": lambda file, other: file.create_dataset("Z_train", (4,), "|u1", external=[(str(other), 0, 4)]),
    "chunked": lambda file, other: file.create_dataset("Z_train", (100,), "|u1", chunks=(10,), compression="gzip"),
    "text": lambda file, other: file.update({"Z_train": ["text"]}),
    "group": lambda file, other: file.create_group("Z_train"),
}
"""Functions that add an entry `Z_train`, which no pack has, to an open pack; the path is that of another pack."""

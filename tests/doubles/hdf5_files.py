"""HDF5 files as other programs write them, with several storage options."""

from __future__ import annotations

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

"""Fault 34: several workers that read one pack."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from colabkit.packs.dataset.opened_pack import open_pack

from .board import COLABKIT, Result, attempt, fault, spread
from .copies import new_folder
from .packers import PACKERS, write_images
from .processes import in_processes


def _read_pack(how: str, path: Path, expected: list[bytes], is_own: bool) -> None:
    """Read random rows in several workers at once, from one object that is opened before they start."""
    data = open_pack(path)["train"] if is_own else h5py.File(path)["X"]

    def read(number: int) -> None:
        rows = np.random.default_rng(number).integers(0, len(expected), 300)
        for row in rows:
            assert _row(data, int(row)) == expected[row], "a worker reads a wrong row"

    if how == "threads":
        failed: list[BaseException] = []

        def read_or_keep(number: int) -> None:
            try:
                read(number)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=read_or_keep, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
    else:
        read(99)
        assert in_processes(4, read) == [0] * 4, "a worker reads a wrong row"


@fault(34, "several workers read one pack", {COLABKIT: True, "h5py": False})
def many_readers(is_own: bool, folder: Path, limit: int) -> Iterator[Result]:
    packer = PACKERS[COLABKIT if is_own else "h5py"]
    source = write_images(folder / "images", per_class=20)
    variants = ("raw", "shards") if is_own else ("raw",)
    for variant in variants:
        with new_folder(folder / variant) as made:
            path = made / "pack.h5"
            packer.pack(source, path, variant)
            if is_own:
                data = open_pack(path)["train"]
                expected = [_row(data, number) for number in range(len(data))]
            else:
                with h5py.File(path) as file:
                    expected = [image.tobytes() for image in file["X"]]
            assert sorted(expected) == sorted(_pixels(one) for one in source.rglob("*.png"))
            for how, run in spread([*itertools.product(("threads", "fork"), range(15))], limit // len(variants)):
                yield attempt(f"{variant}: {how}, run {run}", partial(_read_pack, how, path, expected, is_own))


def _pixels(path: Path) -> bytes:
    return np.asarray(Image.open(path)).tobytes()


def _row(data: Any, number: int) -> bytes:
    """Return the pixels of a sample, by rows, then columns, then channels."""
    sample = data[number]
    return (np.moveaxis(np.asarray(sample[0]), 0, -1) if isinstance(sample, tuple) else sample).tobytes()

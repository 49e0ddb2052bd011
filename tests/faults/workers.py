"""Faults 34 and 41: several workers that read one pack, and workers of a loader that fail."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, get_worker_info

import colabkit
from colabkit.errors import LoaderFailed
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
    """Return the pixels of a sample in the order of rows, columns and channels."""
    sample = data[number]
    return (np.moveaxis(np.asarray(sample[0]), 0, -1) if isinstance(sample, tuple) else sample).tobytes()


class FailingSamples:
    """Numbers as samples; a worker fails at one of them: it raises, is killed or exits."""

    def __init__(self, count: int, at: int, how: str) -> None:
        self.count = count
        self.at = at
        self.how = how

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        if number == self.at and get_worker_info() is not None:
            if self.how == "raises":
                raise ValueError(f"sample {number} is bad")
            if self.how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        return number


def _close_probes() -> None:
    """Close temporary files that torch may leave open.

    After an error, `DataLoader` opens ten of them to find a shortage of file descriptors. If the signal of a dead
    worker interrupts it just then, one stays open.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith(f"{tempfile.gettempdir()}/tmp") and os.path.getsize(path) == 0:
                os.close(int(name))
                os.unlink(path)


@fault(41, "a worker of a loader raises or dies", {COLABKIT: colabkit.Loader, "DataLoader": DataLoader})
def a_failing_worker(loader: Any, folder: Path, limit: int) -> Iterator[Result]:
    refusals = LoaderFailed if loader is colabkit.Loader else (RuntimeError, ValueError)
    cases = itertools.product(("raises", "is killed", "exits"), (1, 2), (0, 3, 5, 11), (2, 3))
    # Limit the cases, each of which starts worker processes.
    for how, workers, at, size in spread([*cases], min(limit, 12)):

        def load(how: str = how, workers: int = workers, at: int = at, size: int = size) -> None:
            try:
                batches = loader(FailingSamples(12, at, how), batch_size=size, num_workers=workers)
                numbers = [int(number) for batch in batches for number in batch]
            finally:
                _close_probes()
            raise AssertionError(f"no error is raised: {numbers}")

        case = f"a worker {how} at sample {at}, {workers} workers, batches of {size}"
        yield attempt(case, load, refusals=refusals, seconds=20.0)

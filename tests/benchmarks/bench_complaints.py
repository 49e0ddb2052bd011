"""Reproduce five complaints about slow data, then measure each remedy that articles suggest, and colabkit.

    python tests/benchmarks/bench_complaints.py --photos photos-400.zip

1. `drive`: an epoch over images on Drive (5,981 road images of 1242x375) is eight times as slow as from a local disk.
   Drive is a FUSE mount (tests/doubles/slow_drive.py) that takes 40 ms to open a file, serves 16 requests at once and
   reads 20 MB/s. The first table has later epochs, the second one the time until the first batch, per 1,000 images:
   250 images for ways that copy them one after another, and all for colabkit.
2. `blocks`: 18,000 images of 224x224 in HDF5 chunks of 512, read one by one or in blocks. The article's file is
   compressed; a second one is not, so that it holds the same bytes as the pack.
3. `memory`: 60,000 digits of 28x28 for a small vision transformer, read from files or memory, at three batch sizes.
4. `idle`: the device is idle between batches. Without a GPU, a step sleeps for 40 ms and uses no CPU.
5. `stream`: more data than memory, read by an asynchronous generator over a shuffled DataFrame. The mount takes 5 ms
   for each open and reads 100 MB/s; only first epochs, which find nothing in memory, are measured.

In each table, colabkit must be at least as fast as every other way that does the same work. Ways that only shuffle
blocks, and the images within each block, do less than a full shuffle; the table of `blocks` shows them, and they have
a requirement of their own. In `stream`, the generator shuffles all files. So does `colabkit.Loader over the files`; the
shards are packed beforehand in random order, and colabkit shuffles blocks of them. Both must be at
least as fast as the other ways.

Each way to read the data runs in a separate process, in interleaved rounds. The benchmark needs root or `fusermount3`,
mfusepy and pandas, and takes about half an hour.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import h5py
import numpy as np
import torch
from complaint_systems import BLOCK, BLOCKS, COLABKIT, COMPRESSED, FILES, PLAIN_BLOCKS, ROAD, SHARDS, UNCOMPRESSED, WAYS
from far_mounts import FuseMount
from PIL import Image
from rounds import HERE, Bench, Found, child, extract_photos

import colabkit

DEADLINE_S = 1800
FEW = 250
"""Number of images that slow ways copy from the drive."""

DRIVE = {"open_s": 0.04, "list_s": 0.04, "at_once": 16, "bandwidth": 20e6}
SHARE = {"open_s": 0.005, "list_s": 0.005, "at_once": 32, "bandwidth": 100e6}
SIZES = (100, 1000, 10_000)
SHARD_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", help="zip archive of photos; by default generated")
    parser.add_argument("--road", type=int, default=5981, help="images on the drive")
    parser.add_argument("--leaves", type=int, default=18_000, help="images in blocks")
    parser.add_argument("--digits", type=int, default=60_000)
    parts = {"drive": drive, "blocks": blocks, "memory": memory, "idle": idle, "stream": stream}
    quick = {"road": 48, "leaves": 1100, "digits": 1797}
    ComplaintBench.main(parser, parts, rounds=3, quick=quick)


@dataclass
class ComplaintBench(Bench):
    """The benchmark's photos and folders."""

    def __post_init__(self) -> None:
        if self.options.quick:
            os.environ["BENCH_QUICK"] = "1"

    @cached_property
    def photos(self) -> Path:
        return extract_photos(self.photo_archive, self.folder / "photos")

    @cached_property
    def images(self) -> list[Image.Image]:
        """The photos, decoded."""
        paths = sorted(path for path in self.photos.rglob("*") if path.is_file())
        return [Image.open(path).convert("RGB") for path in paths]

    @cached_property
    def root(self) -> Path:
        """The content of the mount: photos of the size of road images, the first `FEW` of them again, and shards."""
        root = self.folder / "root"
        encoded = []
        for image in self.images:
            image.resize((1242, 375)).save(data := BytesIO(), "jpeg", quality=90)
            encoded.append(data.getvalue())
        for number in range(self.options.road):
            for name in ("images", "few") if number < FEW else ("images",):
                target = root / name / f"class{number % 4}" / f"{number:05}.jpg"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(encoded[number % len(encoded)])
        return root

    def mounted(self, **options: Any) -> FuseMount:
        """Return a new mount of `root`, without cached data."""
        return FuseMount(self.folder / "drive", self.root, read_s=0.0, attr_s=60.0, direct_io=False, **options)

    def run(
        self,
        mounted: Callable[[], AbstractContextManager[Any]],
        missing: dict[str, str],
        *more: str,
    ) -> Iterator[tuple[str, Found]]:
        """Run all ways to read in interleaved rounds; yield the results of each, and record those that fail."""
        for _ in range(self.rounds):
            for name in WAYS[self.part]:
                if name in missing:
                    continue
                local = self.folder / "local"
                local.mkdir()
                with mounted():
                    words = [sys.executable, HERE / "complaint_systems.py", self.part, name, self.folder, *more]
                    found = child(words, DEADLINE_S)
                shutil.rmtree(local)
                if "missing" in found:
                    missing[name] = found["missing"]
                    self.failed.append(f"{self.part}, {name}: {found['missing']}")
                else:
                    yield name, found

    def rates(
        self, title: str, base: str, mounted: Callable[[], AbstractContextManager[Any]], *more: str
    ) -> tuple[dict[str, float], dict[str, list[Found]]]:
        """Show images per second of all ways to read; return the medians and all results."""
        missing: dict[str, str] = {}
        found: dict[str, list[Found]] = {name: [] for name in WAYS[self.part]}
        for name, one in self.run(mounted, missing, *more):
            found[name].append(one)
        rates = {name: [one["samples"] / one["seconds"] for one in some] for name, some in found.items()}
        return self.show(title, "images/s", rates, [base], missing), found

    def show_ready(self, title: str, found: Mapping[str, list[Found]]) -> None:
        ready = {name: [one["ready_s"] for one in some] for name, some in found.items()}
        values = {name: some for name, some in ready.items() if any(some)}
        self.show(f"{title}: once, before the epochs", "s per 1,000 images", values)

    def need_first(
        self, title: str, middle: Mapping[str, float], name: str = COLABKIT, less: Sequence[str] = ()
    ) -> None:
        """Require that colabkit is at least as fast as the best other way; the ways in `less` do less work."""
        others = [other for other in middle if not other.startswith("colabkit") and other not in less]
        best = max(others, key=lambda other: middle[other], default="the others")
        self.need_ratio(f"{title}, the best other way", middle, name, best, 1)


def drive(bench: ComplaintBench) -> None:
    first, *_ = WAYS["drive"]
    title = f"{bench.options.road:,} images of 1242x375 on a slow drive, resized to {ROAD[1]}x{ROAD[0]}"
    middle, found = bench.rates(title, first, lambda: bench.mounted(**DRIVE))
    bench.show_ready(title, found)
    bench.need_ratio("drive", middle, COLABKIT, first, 40)
    bench.need_first("drive", middle)


def blocks(bench: ComplaintBench) -> None:
    count = bench.options.leaves
    draws = random.Random(0)
    with h5py.File(bench.folder / COMPRESSED, "w") as first, h5py.File(bench.folder / UNCOMPRESSED, "w") as second:
        shape = (BLOCK, 224, 224, 3)
        stored = [
            file.create_dataset("X", (count, *shape[1:]), np.uint8, chunks=shape, compression=compression)
            for file, compression in ((first, "lzf"), (second, None))
        ]
        first["Y"] = second["Y"] = np.arange(count) % 10
        for start in range(0, count, BLOCK):
            images = np.stack([crop(draws.choice(bench.images), draws) for _ in range(min(BLOCK, count - start))])
            for rows in stored:
                rows[start : start + BLOCK] = images
    one, *_ = WAYS["blocks"]
    title = f"{count:,} images of 224x224 in an HDF5 file"
    middle, found = bench.rates(title, PLAIN_BLOCKS, nullcontext)
    bench.show_ready(title, found)
    bench.need_ratio("blocks", middle, COLABKIT, PLAIN_BLOCKS, 3)
    bench.need_ratio("blocks", middle, BLOCKS, one, 1)
    bench.need_first("blocks", middle, less=(BLOCKS, PLAIN_BLOCKS))


def crop(image: Image.Image, draws: random.Random) -> np.ndarray:
    left, top = (draws.randrange(max(1, length - 224)) for length in image.size)
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


def memory(bench: ComplaintBench) -> None:
    make_digits(bench.folder, bench.options.digits)
    dataset = "in memory, TensorDataset"
    shares: dict[str, list[float]] = {}
    for size in SIZES:
        title = f"{bench.options.digits:,} digits of 28x28, batch {size:,}"
        middle, found = bench.rates(title, dataset, nullcontext, str(size))
        shares |= {f"{name}, batch {size:,}": [100 * one["data_share"] for one in some] for name, some in found.items()}
        bench.need_ratio(f"memory, batch {size:,}", middle, COLABKIT, dataset, 10)
        bench.need_first(f"memory, batch {size:,}", middle)
    waits = bench.show("Waiting for data while a vision transformer trains on digits", "% of an epoch", shares)
    for size in SIZES:
        what = f"memory, batch {size:,}: % of an epoch that waits for colabkit"
        bench.need(what, waits.get(f"{COLABKIT}, batch {size:,}"), 2, "{:.2f}", at_most=True)


def make_digits(folder: Path, count: int) -> None:
    """Write digits, enlarged to 28x28 and shifted by a few pixels, as PNG files, as HDF5 and as tensors."""
    paths = sorted(colabkit.stage("samples:digits", folder / "samples", progress=False).path.rglob("*.png"))
    draws = random.Random(0)
    images, labels = np.zeros((count, 1, 28, 28), np.uint8), np.zeros(count, np.int64)
    for number in range(count):
        path = paths[number % len(paths)]
        whole = Image.new("L", (28, 28))
        whole.paste(Image.open(path).convert("L").resize((24, 24)), (draws.randrange(5), draws.randrange(5)))
        target = folder / "digits" / path.parent.name / f"{number:05}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        whole.save(target)
        images[number, 0], labels[number] = np.asarray(whole), int(path.parent.name)
    with h5py.File(folder / "digits.h5", "w") as file:
        file["X"], file["Y"] = images, labels
    torch.save((torch.from_numpy(images), torch.from_numpy(labels)), folder / "digits.pt")


def idle(bench: ComplaintBench) -> None:
    assert bench.photos.is_dir()
    missing: dict[str, str] = {}
    shares: dict[str, list[float]] = {name: [] for name in WAYS["idle"]}
    for name, found in bench.run(nullcontext, missing):
        shares[name].append(100 * found["busy_share"])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a simulated device"
    middle = bench.show(f"Random crops of photos for {device}", "% busy", shares, missing=missing)
    bench.need_first("idle", middle)


def stream(bench: ComplaintBench) -> None:
    source, shards = bench.root / "images", bench.root / "shards.h5"
    if not shards.exists():
        paths = [str(path) for path in sorted(source.rglob("*.jpg"))]
        random.Random(0).shuffle(paths)
        options = {"size": ROAD, "encoding": "raw", "shard_bytes": SHARD_BYTES, "progress": False}
        colabkit.pack(paths, shards, labels=lambda path: path.split("/")[-2], **options)
    first, *_ = WAYS["stream"]
    title = f"{bench.options.road:,} images on a mount, first epoch"
    middle, _ = bench.rates(title, first, lambda: bench.mounted(**SHARE))
    for name in (FILES, SHARDS):
        bench.need_first("stream", middle, name)


if __name__ == "__main__":
    main()

"""Check that colabkit has not become slower: `python tests/benchmarks/guard.py`.

Each workload is compared with plain code for the same work, which does not use colabkit, in the same process and in
paired rounds. The figure is the speed relative to the plain code, which depends little on the machine; `floors.json`
holds the minimum permitted figure of each workload, far below the figures on a busy machine. Noise does not fail the
check: a workload fails if the entire 95% confidence interval of its figure is below the floor, twice in a row.

- `loader`: shuffled epochs of a pack of 32x32 images, compared with `index_select` into one buffer
- `decode`: random 224x224 crops of photos, compared with decoding the photos in a thread pool
- `packing`: packing small JPEG files, compared with a loop that reads and decodes them
- `staging`: copying small files from a slow FUSE mount, compared with a thread pool that reads them; needs FUSE
- `training`: steps of a small network with `train()`, compared with a hand-written loop over a list of batches
- `opening`: from opening a pack to the first batch, compared with h5py
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import h5py
import numpy as np
import simplejpeg
import torch
from far_mounts import FuseMount, has_fuse
from rounds import HERE, interleaved, machine, timed, write_images
from tables import compared
from torch import nn

import colabkit

FLOORS = HERE / "floors.json"
ROUNDS = 7
BATCH = 512
ROWS, EPOCHS, OPENINGS = 20_000, 30, 20
"""Images of the pack, and epochs and openings of a round. A round of each workload takes a few tenths of a second, so
that a short delay by another process changes it little."""

PHOTOS, FILES, STEPS = 192, 6000, 600
REMOTE_FILES, LATENCY_S, AT_ONCE = 400, 0.04, 16
"""Files of the mount, the latency of an open, and concurrent requests. A round takes at least a second, in which the
processor has little to do."""


Work: TypeAlias = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default=",".join(WORKLOADS), help=f"some of {', '.join(WORKLOADS)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    floors = json.loads(FLOORS.read_text())
    began = time.monotonic()
    print(machine(), flush=True)
    failed = check(options.only.split(","), floors, options.rounds)
    if failed:
        print(f"\nThe whole interval is below the floor. Measuring again: {', '.join(failed)}", flush=True)
        failed = check(failed, floors, options.rounds)
    print(f"\n({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        sys.exit(f"Slower than the floors in {FLOORS.name}: {', '.join(failed)}")


def check(names: list[str], floors: dict[str, float], rounds: int) -> list[str]:
    """Print the figures of workloads, and return the names of those whose entire interval is below the floor."""
    failed = []
    for name in names:
        if name == "staging" and not has_fuse():
            if os.environ.get("COLABKIT_CI"):
                sys.exit("Cannot check staging: FUSE is missing. Install fuse3 and mfusepy.")
            print(f"{name}: not run, FUSE is missing", flush=True)
            continue
        began = time.monotonic()
        ratio, low, high = compared(*measure(name, rounds))
        is_slow = high < floors[name]
        failed += [name] if is_slow else []
        figures = f"{ratio:.2f} times the plain code (95% interval {low:.2f} to {high:.2f}), floor {floors[name]:.2f}"
        print(f"{name}: {figures}{', SLOW' if is_slow else ''} ({time.monotonic() - began:.0f} s)", flush=True)
    return failed


def measure(name: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of the plain code and of colabkit in paired rounds, after a warm-up."""
    with tempfile.TemporaryDirectory(prefix="guard-") as folder, ExitStack() as stack:
        plain, ours = WORKLOADS[name](Path(folder), stack)
        figures = interleaved({"plain": lambda: timed(plain), "colabkit": lambda: timed(ours)}, rounds)
    return figures["plain"], figures["colabkit"]


def make_pack(folder: Path) -> tuple[Path, np.ndarray]:
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, 32, 32, 3), np.uint8)
    path = folder / "rows.h5"
    colabkit.pack({"X_train": rows, "Y_train": np.arange(ROWS) % 10}, path, progress=False)
    return path, rows


def loader(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    path, rows = make_pack(folder)
    wide = torch.from_numpy(rows.reshape(ROWS, -1)).view(torch.int64)
    buffer = torch.empty(BATCH, wide.shape[1], dtype=torch.int64)
    batches = colabkit.Loader(colabkit.open_pack(path)["train"], BATCH, shuffle=True, channels_last=True)

    def plain() -> None:
        for _ in range(EPOCHS):
            for some in torch.randperm(ROWS).split(BATCH):
                torch.index_select(wide, 0, some, out=buffer[: len(some)])

    def ours() -> None:
        for _ in range(EPOCHS):
            for _ in batches:
                pass

    return plain, ours


def decode(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    files = write_images(folder / "photos", PHOTOS, (500, 375), 2)
    paths = sorted(files.rglob("*.jpg"))
    crop = colabkit.augment.RandomResizedCrop(224)
    batches = colabkit.Loader(colabkit.FileDataset(files), 32, shuffle=True, transform=crop, channels_last=True)
    pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0))))

    def plain() -> None:
        list(pool.map(lambda path: simplejpeg.decode_jpeg(path.read_bytes()).shape, paths))

    return plain, lambda: [None for _ in batches]


def packing(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    files = write_images(folder / "small", FILES, (32, 32), 10)
    paths = [str(path) for path in sorted(files.rglob("*.jpg"))]

    def plain() -> None:
        for path in paths:
            with open(path, "rb") as file:
                simplejpeg.decode_jpeg(file.read())

    return plain, lambda: colabkit.pack(files, folder / "out.h5", encoding="raw", overwrite=True, progress=False)


def staging(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    root = write_images(folder / "root", REMOTE_FILES, (32, 32), 4)
    paths = [str(path.relative_to(root)) for path in root.rglob("*.jpg")]
    # Nothing on this mount is cached, so every round reads all files from it.
    drive = stack.enter_context(FuseMount(folder / "drive", root, latency_s=0.0, open_s=LATENCY_S, at_once=AT_ONCE))
    pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
    target = folder / "target"

    def read(path: str) -> int:
        with io.FileIO(drive.point / path) as file:
            return len(file.readall())

    def ours() -> None:
        colabkit.stage(drive.point, target, progress=False)
        shutil.rmtree(target)

    return lambda: list(pool.map(read, paths)), ours


def training(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    torch.manual_seed(1)
    samples = torch.randn(32 * STEPS, 64), torch.randint(0, 10, (32 * STEPS,))
    batches = list(zip(samples[0].split(32), samples[1].split(32), strict=True))
    own, other = (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)) for _ in range(2))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    step = colabkit.supervised_step(other, torch.optim.SGD(other.parameters(), lr=0.01))
    data = colabkit.Loader(samples, 32)

    def plain() -> None:
        for rows, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(own(rows), labels).backward()
            optimizer.step()

    return plain, lambda: colabkit.train(step, data)


def opening(folder: Path, stack: ExitStack) -> tuple[Work, Work]:
    path, _ = make_pack(folder)
    some = np.sort(np.random.default_rng(0).permutation(ROWS)[:BATCH])

    def plain() -> None:
        for _ in range(OPENINGS):
            with h5py.File(path) as file:
                torch.from_numpy(file["X_train"][some])

    def ours() -> None:
        for _ in range(OPENINGS):
            batches = iter(colabkit.Loader(colabkit.open_pack(path)["train"], BATCH, shuffle=True))
            next(batches)
            batches.close()

    return plain, ours


WORKLOADS: dict[str, Callable[[Path, ExitStack], tuple[Work, Work]]] = {
    "loader": loader,
    "decode": decode,
    "packing": packing,
    "staging": staging,
    "training": training,
    "opening": opening,
}

if __name__ == "__main__":
    main()

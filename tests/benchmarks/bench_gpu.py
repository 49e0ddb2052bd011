"""Measure GPU copies, training compared with cached batches, samples in GPU memory, and memory growth.

    python tests/benchmarks/bench_gpu.py

Without a GPU, the script only prints a line. Samples are random 224x224x3 images, packed at the start. The model is a
ResNet-18 in bfloat16. The last table shows the requirements.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rounds import interleaved, needs_table, report, verdict
from torch import nn

import colabkit

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from models import resnet18

IMAGES, SIDE, BATCH = 2048, 224, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the memory check")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU found; there is nothing to measure.")
        return
    with tempfile.TemporaryDirectory() as name:
        dataset = make_dataset(Path(name))
        loader = colabkit.Loader(dataset, BATCH, shuffle=True, drop_last=True, device="cuda", keep="ram")
        copies = {"plain pinned copy": bare_copy(), "colabkit.Loader": epoch_bytes(loader)}
        figures = interleaved(copies, options.rounds)
        report("Host to device, uint8", "MB/s", figures, "plain pinned copy", None)
        needed = [("copy to the device, share of a plain pinned copy", ratio(figures, *copies), 0.90)]
        resident = colabkit.Loader(dataset, BATCH, shuffle=True, drop_last=True, device="cuda", keep="gpu")
        gathers = {"plain index_select on the device": bare_gather(dataset), "keep='gpu'": epochs_of(resident)}
        figures = interleaved(gathers, options.rounds)
        report("Gather in GPU memory", "images/s", figures, "plain index_select on the device", None)
        needed.append(("keep='gpu', share of a plain index_select", ratio(figures, *gathers), 0.90))
        step = make_step()
        cached = [batch for batch, _ in zip(loader, range(8), strict=False)]
        loops = {
            "cached batches": lambda: images_per_s(step, [cached[i % 8] for i in range(len(loader))]),
            "colabkit.Loader": lambda: images_per_s(step, loader),
        }
        figures = interleaved(loops, options.rounds)
        report("Training, ResNet-18, bf16", "images/s", figures, "cached batches", None)
        needed.append(("training, share of the loop over cached batches", ratio(figures, *loops), 0.97))
        grown_mb = memory_growth(step, loader, options.epochs)
        rows = [verdict(what, found, least, "{:.2f}", at_most=False) for what, found, least in needed]
        what = f"growth of reserved memory over {options.epochs} epochs, MB"
        needs_table([*rows, verdict(what, grown_mb, 0, "{:,.0f}", at_most=True)])


def make_dataset(folder: Path) -> colabkit.PackedDataset:
    random = np.random.default_rng(0)
    for label in range(2):
        target = folder / "files" / str(label)
        target.mkdir(parents=True)
        for number in range(IMAGES // 2):
            coarse = Image.fromarray(random.integers(0, 256, (28, 28, 3), dtype=np.uint8))
            coarse.resize((SIDE, SIDE)).save(target / f"{number}.bmp")
    return colabkit.open_pack(colabkit.pack(folder / "files", folder / "pack.h5").path)["train"]


def ratio(figures: dict[str, list[float]], bare: str, ours: str) -> float:
    return statistics.median(figures[ours]) / statistics.median(figures[bare])


def bare_gather(dataset: colabkit.PackedDataset) -> Callable[[], float]:
    """Return a function that gathers rows on the device in random order, and returns the images per second.

    This rate is an upper limit for the `gpu` tier: each batch takes only one operation, into a reused buffer.
    """
    rows = dataset.rows.cuda()
    wide = rows.view(len(rows), -1).view(torch.int64)
    buffer = torch.empty(BATCH, wide.shape[1], dtype=torch.int64, device="cuda")

    def run() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for some in torch.randperm(len(wide), device="cuda").split(BATCH):
            torch.index_select(wide, 0, some, out=buffer[: len(some)])
        torch.cuda.synchronize()
        return len(wide) / (time.perf_counter() - started)

    return run


def epochs_of(loader: colabkit.Loader) -> Callable[[], float]:
    return lambda: images_per_s(lambda batch: None, loader)


def bare_copy() -> Callable[[], float]:
    host = torch.empty(BATCH, SIDE, SIDE, 3, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def run() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(IMAGES // BATCH):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return IMAGES // BATCH * host.nbytes / (time.perf_counter() - started) / 1e6

    return run


def epoch_bytes(loader: colabkit.Loader) -> Callable[[], float]:
    """Return a function that runs an epoch and returns the rate at which batches are copied to the GPU, in MB/s."""

    def run() -> float:
        before = loader.meters.snapshot()
        for _ in loader:
            pass
        torch.cuda.synchronize()
        part = next(part for part in (loader.meters.snapshot() - before).parts if part.name == "transfer")
        return part.handled_bytes / max(part.busy_s, 1e-9) / 1e6

    return run


def make_step() -> Callable[[tuple[torch.Tensor, torch.Tensor]], None]:
    model = resnet18().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    normalize = colabkit.augment.Normalize()

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        images, labels = batch
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(normalize(images)), labels)
        loss.backward()
        optimizer.step()

    return step


def images_per_s(step: Callable, batches) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    images = 0
    for batch in batches:
        step(batch)
        images += len(batch[1])
    torch.cuda.synchronize()
    return images / (time.perf_counter() - started)


def memory_growth(step: Callable, loader: colabkit.Loader, epochs: int) -> float:
    """Return the growth of the GPU's reserved memory after the second epoch, in megabytes."""
    reserved = []
    for _ in range(epochs):
        images_per_s(step, loader)
        reserved.append(torch.cuda.memory_reserved() / 1e6)
    return reserved[-1] - reserved[1]


if __name__ == "__main__":
    main()

"""What only a GPU can show: the copy's rate, the loop's distance from cached batches, and memory over many epochs.

    python tests/benchmarks/bench_gpu.py

Says so and ends where there is no GPU. Samples are random 224x224x3 images, packed on the spot; they are only moved,
never looked at.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rounds import interleaved, report
from torch import nn

import colabkit

IMAGES, SIDE, BATCH = 2048, 224, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="for the memory check")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU here: nothing to measure.")
        return
    with tempfile.TemporaryDirectory() as name:
        dataset = make_dataset(Path(name))
        loader = colabkit.Loader(dataset, BATCH, shuffle=True, drop_last=True, device="cuda")
        copies = {"a bare pinned copy": bare_copy(), "colabkit.Loader": epoch_bytes(loader)}
        figures = interleaved(copies, options.rounds)
        report("Host to device, uint8", "MB/s", figures, "a bare pinned copy", None)
        step = make_step()
        cached = [batch for batch, _ in zip(loader, range(8), strict=False)]
        loops = {
            "cached batches": lambda: images_per_s(step, [cached[i % 8] for i in range(len(loader))]),
            "colabkit.Loader": lambda: images_per_s(step, loader),
        }
        report("Training, bf16", "images/s", interleaved(loops, options.rounds), "cached batches", None)
        print(f"\n{memory_growth(step, loader, options.epochs)}")


def make_dataset(folder: Path) -> colabkit.PackedDataset:
    random = np.random.default_rng(0)
    for label in range(2):
        target = folder / "files" / str(label)
        target.mkdir(parents=True)
        for number in range(IMAGES // 2):
            coarse = Image.fromarray(random.integers(0, 256, (28, 28, 3), dtype=np.uint8))
            coarse.resize((SIDE, SIDE)).save(target / f"{number}.bmp")
    return colabkit.open_pack(colabkit.pack(folder / "files", folder / "pack.h5").path)["train"]


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
    """Return a run that gives the copies' own rate: bytes by the seconds that the copy stream was busy."""

    def run() -> float:
        before = loader.meters.snapshot()
        for _ in loader:
            pass
        torch.cuda.synchronize()
        part = next(part for part in (loader.meters.snapshot() - before).parts if part.name == "transfer")
        return part.handled_bytes / max(part.busy_s, 1e-9) / 1e6

    return run


def make_step() -> Callable[[tuple[torch.Tensor, torch.Tensor]], None]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 128, 256, 512):
        layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    model = model.to("cuda", memory_format=torch.channels_last)
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


def memory_growth(step: Callable, loader: colabkit.Loader, epochs: int) -> str:
    reserved = []
    for _ in range(epochs):
        images_per_s(step, loader)
        reserved.append(torch.cuda.memory_reserved() / 1e6)
    return f"Reserved memory after epoch 2: {reserved[1]:,.0f} MB, after epoch {epochs}: {reserved[-1]:,.0f} MB"


if __name__ == "__main__":
    main()

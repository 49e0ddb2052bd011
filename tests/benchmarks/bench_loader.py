"""Images a second of the loader alone, without a model: a pack against the usual loader over the same files.

    python tests/benchmarks/bench_loader.py --data cifar10-images.zip

Both give shuffled uint8 batches of the training split, full epochs, in one run. The files are extracted to a temporary
folder first; everything is warm in the page cache. Needs torchvision.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rounds import interleaved, report
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

import colabkit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="samples:digits", help="zip archive with one folder of images a class")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = colabkit.stage(options.data, folder / "files").path
        packed = colabkit.pack(files, folder / "pack.h5")
        print(packed)
        dataset = colabkit.open_pack(packed.path)["train"]
        systems = {
            "ImageFolder + DataLoader(num_workers=2)": usual(files, options.batch_size, len(dataset)),
            "a bare index_select loop into one buffer": bare(dataset.rows, options.batch_size),
            "colabkit.Loader": one_epoch(colabkit.Loader(dataset, options.batch_size, shuffle=True)),
        }
        figures = interleaved(systems, options.rounds)
    shape = "x".join(map(str, packed.sample_shape))
    title = f"Loader alone: {len(dataset):,} images {shape}, batch {options.batch_size}, shuffled"
    report(title, "images/s", figures, next(iter(systems)), options.json)


def usual(files: Path, batch_size: int, expected: int) -> Callable[[], float]:
    """Return a run of what most people write; its workers live as long as it does."""
    inner = next((folder for folder in (files / "train", files / "digits") if folder.is_dir()), files)
    dataset = ImageFolder(inner, transform=PILToTensor())
    assert len(dataset) == expected, (len(dataset), expected)
    return one_epoch(DataLoader(dataset, batch_size, shuffle=True, num_workers=2, persistent_workers=True))


def one_epoch(loader: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        images = sum(len(labels) for _, labels in loader)
        return images / (time.perf_counter() - started)

    return run


def bare(rows: torch.Tensor, batch_size: int) -> Callable[[], float]:
    """Return the limit: the gather of a whole epoch's rows, with no thread, no labels and one reused buffer."""
    flat = rows.view(len(rows), -1)
    wide = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat
    buffer = torch.empty(batch_size, wide.shape[1], dtype=wide.dtype)

    def run() -> float:
        started = time.perf_counter()
        order = torch.randperm(len(wide))
        for some in order.split(batch_size):
            torch.index_select(wide, 0, some, out=buffer[: len(some)])
        return len(wide) / (time.perf_counter() - started)

    return run


if __name__ == "__main__":
    main()

"""Run one way to read the data of a complaint in a separate process.

    python complaint_systems.py COMPLAINT WAY FOLDER

The script prints one line of JSON: the samples and seconds of epochs, and in `ready_s` the seconds per 1,000 samples of
everything that has to happen once before, such as copying. Only the ways whose names begin with `colabkit` use it.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import h5py
import numpy as np
import torch
from loader_peers import EpochIterable
from models import resnet18, small_vit
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

Found: TypeAlias = dict[str, float]
Batches: TypeAlias = Iterable[Any]

LEAST_S, MOST_S, TRAIN_S = (0.2, 1.0, 0.2) if os.environ.get("BENCH_QUICK") else (3.0, 10.0, 5.0)
"""Epochs are repeated for at least `LEAST_S`; a slow way stops after `MOST_S`, and training after `TRAIN_S`, in the
middle of an epoch.
"""

ROAD = (192, 640)
"""Height and width to which the drive's images are resized."""

COMPRESSED, UNCOMPRESSED = "blocks.h5", "blocks-uncompressed.h5"
"""Names of two HDF5 files with the same images."""

BATCH, ROAD_BATCH, BLOCK, PHOTO_BATCH = 64, 16, 512, 64
STEP_S = 0.04
"""Seconds of a step on the simulated device."""


def main() -> None:
    complaint, way, folder, *more = sys.argv[1:]
    print("\n" + json.dumps(WAYS[complaint][way](Path(folder), *more)), flush=True)
    # Some ways stop in the middle of an epoch, so do not wait for their workers to end.
    os._exit(0)


def rate(batches: Batches, ready_s: float = 0.0, is_repeated: bool = True) -> Found:
    """Read epochs and count samples; without `is_repeated`, read at most one epoch, without a warm-up."""
    if is_repeated:
        for _ in batches:
            pass
    samples, began = 0, time.perf_counter()
    while True:
        for batch in batches:
            samples += len(batch[-1])
            if time.perf_counter() - began > MOST_S:
                break
        seconds = time.perf_counter() - began
        if not is_repeated or seconds > LEAST_S:
            return {"samples": samples, "seconds": seconds, "ready_s": ready_s}


class FirstBatches:
    """The first batches of each epoch, so that warm-ups and epochs of slow ways stay short."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        until = time.perf_counter() + MOST_S
        for batch in self.batches:
            yield batch
            if time.perf_counter() > until:
                return


def per_thousand(began: float, count: int) -> float:
    """Return the seconds since `began` for each 1,000 of `count` samples."""
    return 1000 * (time.perf_counter() - began) / count


# 1. Images on Drive, read again in each epoch.


def road_files(folder: Path) -> DataLoader[Any]:
    height, width = ROAD
    steps = transforms.Compose([transforms.Resize((height, width)), transforms.PILToTensor()])
    return DataLoader(ImageFolder(folder, steps), ROAD_BATCH, shuffle=True, num_workers=2)


def from_drive(folder: Path) -> Found:
    return rate(road_files(folder / "drive" / "images"), is_repeated=False)


def copied(folder: Path, target: Path | None = None) -> Found:
    """Copy only some images, because copying all would take minutes; the images per second are the same."""
    began = time.perf_counter()
    batches = road_files(shutil.copytree(folder / "drive" / "few", (target or folder / "local") / "few"))
    ready_s = per_thousand(began, len(batches.dataset))  # type: ignore[arg-type]
    return rate(FirstBatches(batches), ready_s)


def to_tmpfs(folder: Path) -> Found:
    target = Path("/dev/shm") / folder.name
    try:
        return copied(folder, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


class HDF5Samples(Dataset[Any]):
    """Reads one sample of an HDF5 file at a time; each worker opens the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: tuple[h5py.Dataset, h5py.Dataset] | None = None
        with h5py.File(path) as file:
            self.count = len(file["X"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self.stored is None:
            file = h5py.File(self.path)
            self.stored = file["X"], file["Y"]
        images, labels = self.stored
        return torch.from_numpy(images[row]), int(labels[row])


def road_hdf5(folder: Path) -> Found:
    began = time.perf_counter()
    data = ImageFolder(folder / "drive" / "few")
    path = folder / "local" / "road.h5"
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("X", (len(data), *ROAD, 3), np.uint8, chunks=(1, *ROAD, 3))
        file["Y"] = data.targets
        for row, (image, _) in enumerate(data):
            rows[row] = image.resize(ROAD[::-1])
    ready_s = per_thousand(began, len(data))
    return rate(FirstBatches(DataLoader(HDF5Samples(path), ROAD_BATCH, shuffle=True, num_workers=2)), ready_s)


def road_colabkit(folder: Path) -> Found:
    import colabkit

    os.environ["COLABKIT_LOCAL"] = str(folder / "local")
    began = time.perf_counter()
    data = colabkit.prepare(folder / "drive" / "images", size=ROAD, encoding="raw", to=None, progress=False)["train"]
    loader = colabkit.Loader(data, ROAD_BATCH, shuffle=True)
    return rate(loader, per_thousand(began, len(data)))


# 2. An HDF5 file whose chunks hold 512 images, read one image at a time.


def one_by_one(folder: Path, workers: int, name: str = COMPRESSED) -> Found:
    # At a few images per second, large batches would arrive too rarely to measure the rate.
    size = 2 if name == COMPRESSED else BATCH
    return rate(DataLoader(HDF5Samples(folder / name), size, shuffle=True, num_workers=workers), is_repeated=False)


def blocks(folder: Path, name: str = COMPRESSED) -> Found:
    """Read blocks in random order, and shuffle only within a block."""

    def epoch() -> Iterator[Any]:
        with h5py.File(folder / name) as file:
            starts = range(0, len(file["X"]), BLOCK)
            for number in torch.randperm(len(starts)).tolist():
                start = starts[number]
                images, labels = (torch.from_numpy(file[key][start : start + BLOCK]) for key in ("X", "Y"))
                order = torch.randperm(len(labels))
                for some in order.split(BATCH):
                    yield images[some], labels[some]

    return rate(FirstBatches(EpochIterable(epoch)))


def block_tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with h5py.File(folder / COMPRESSED) as file:
        return torch.from_numpy(file["X"][:]), torch.from_numpy(file["Y"][:])


def blocks_in_memory(folder: Path) -> Found:
    began = time.perf_counter()
    data = TensorDataset(*block_tensors(folder))
    ready_s = per_thousand(began, len(data))
    return rate(FirstBatches(DataLoader(data, BATCH, shuffle=True)), ready_s)


def blocks_colabkit(folder: Path) -> Found:
    """Pack the same bytes, and read them in a full shuffle."""
    import colabkit

    began = time.perf_counter()
    images, labels = block_tensors(folder)
    colabkit.pack({"X_train": images.numpy(), "Y_train": labels.numpy()}, folder / "blocks-pack.h5", progress=False)
    ready_s = per_thousand(began, len(labels))
    del images
    data = colabkit.open_pack(folder / "blocks-pack.h5")["train"]
    # Keep the stored order of the bytes, as the other ways do.
    return rate(colabkit.Loader(data, BATCH, shuffle=True, channels_last=True), ready_s)


# 3. Digits of 28x28 for a vision transformer, from files or from memory, at several batch sizes.


def digit_files(folder: Path, size: int) -> DataLoader[Any]:
    steps = transforms.Compose([transforms.Grayscale(), transforms.PILToTensor()])
    return DataLoader(ImageFolder(folder / "digits", steps), size, shuffle=True, num_workers=2)


def digit_hdf5(folder: Path, size: int) -> DataLoader[Any]:
    return DataLoader(HDF5Samples(folder / "digits.h5"), size, shuffle=True, num_workers=2)


def digit_tensors(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.load(folder / "digits.pt")


def digit_dataset(folder: Path, size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digit_tensors(folder)), size, shuffle=True)


def digit_loader(folder: Path, size: int) -> Any:
    import colabkit

    return colabkit.Loader(digit_tensors(folder), size, shuffle=True)


def digits(make: Callable[[Path, int], Any], is_repeated: bool = True) -> Callable[..., Found]:
    def run(folder: Path, size: str) -> Found:
        batches = make(folder, int(size))
        return rate(batches, is_repeated=is_repeated) | {"data_share": data_share(batches)}

    return run


def data_share(batches: Any) -> float:
    """Train a vision transformer for `TRAIN_S` or an epoch; return the share of an epoch's time that it waits for data.

    The wait for the first batch of an epoch counts once; the mean of the later waits stands for the remaining batches.
    """
    model = small_vit()
    optimizer = torch.optim.AdamW(model.parameters())
    waits: list[float] = []
    began = given = time.perf_counter()
    for images, labels in batches:
        waits.append(time.perf_counter() - given)
        loss = torch.nn.functional.cross_entropy(model(images.float() / 255), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        given = time.perf_counter()
        if given - began > TRAIN_S and len(waits) > 2:
            break
    first, *later = waits
    count = len(batches)
    waited = first + (count - 1) * sum(later) / max(1, len(later))
    return waited / (waited + count * (given - began - sum(waits)) / len(waits))


# 4. A device that is idle between batches.


def photo_files(folder: Path, workers: int) -> Batches:
    steps = transforms.Compose([transforms.RandomResizedCrop(224), transforms.PILToTensor()])
    data = ImageFolder(folder / "photos", steps)
    return DataLoader(data, PHOTO_BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def photo_tensors(folder: Path, workers: int) -> Batches:
    """Hold all photos in memory, resized once, as `Loader(size=256)` does, and crop them sample by sample."""
    steps = transforms.Compose([transforms.Resize((256, 256)), transforms.PILToTensor()])
    images, labels = zip(*ImageFolder(folder / "photos", steps), strict=True)
    crop = transforms.RandomResizedCrop(224)

    def cropped(some: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([crop(image) for image, _ in some]), torch.stack([label for _, label in some])

    data = TensorDataset(torch.stack(images), torch.tensor(labels))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": cropped}
    return DataLoader(data, PHOTO_BATCH, shuffle=True, **options)


def prefetched(batches: Batches) -> Batches:
    """Fetch the next batch ahead in a thread; on a GPU, copy it on a separate stream."""
    is_cuda = torch.cuda.is_available()
    stream = torch.cuda.Stream() if is_cuda else None

    def copied(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            return [part.pin_memory().cuda(non_blocking=True) for part in batch]

    def epoch() -> Iterator[Any]:
        ahead: queue.Queue[Any] = queue.Queue(1)

        def take() -> None:
            for batch in batches:
                ahead.put(copied(batch) if is_cuda else batch)
            ahead.put(None)

        threading.Thread(target=take, daemon=True).start()
        while (batch := ahead.get()) is not None:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            yield batch

    return EpochIterable(epoch)


def photo_colabkit(folder: Path) -> Batches:
    import colabkit

    crop = colabkit.augment.RandomResizedCrop(224)
    data = colabkit.FileDataset(folder / "photos")
    return colabkit.Loader(data, PHOTO_BATCH, shuffle=True, size=256, transform=crop)


def busy(make: Callable[[Path], Batches]) -> Callable[..., Found]:
    """Return a function that measures the share of an epoch in which the device works, from the second epoch on."""

    def run(folder: Path) -> Found:
        batches = make(folder)
        step = device_step()
        # Read the whole first epoch, because the next one must not begin while a thread still fetches batches.
        first, *_ = batches
        step(first)
        began = time.perf_counter()
        step(first)
        step_s = time.perf_counter() - began
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < LEAST_S:
            for batch in batches:
                step(batch)
                steps += 1
        return {"busy_share": min(1.0, steps * step_s / (time.perf_counter() - began))}

    return run


def device_step() -> Callable[[Any], None]:
    """Return a step of ResNet-18 on the GPU; without a GPU, a step that sleeps, as if a device were computing."""
    if not torch.cuda.is_available():
        return lambda batch: time.sleep(STEP_S)
    model = resnet18(10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        images, labels = (part.cuda(non_blocking=True) for part in batch)
        loss = torch.nn.functional.cross_entropy(model(images.float() / 255), labels % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


# 5. More data than memory, read by an asynchronous generator over a shuffled DataFrame.


def generated(folder: Path, at_once: int) -> Found:
    import pandas as pd

    paths = sorted((folder / "drive" / "images").rglob("*.jpg"))
    table = pd.DataFrame({"path": map(str, paths), "label": [int(path.parent.name[-1]) for path in paths]})

    def load(path: str) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize(ROAD[::-1]))

    async def batches() -> AsyncIterator[Any]:
        shuffled = table.sample(frac=1)
        for start in range(0, len(shuffled), ROAD_BATCH):
            rows = shuffled.iloc[start : start + ROAD_BATCH]
            images: list[np.ndarray] = []
            for first in range(0, len(rows), at_once):
                some = rows["path"].iloc[first : first + at_once]
                images += await asyncio.gather(*(asyncio.to_thread(load, path) for path in some))
            yield np.stack(images), rows["label"].to_numpy()

    def epoch() -> Iterator[Any]:
        loop = asyncio.new_event_loop()
        coming = batches()
        while True:
            try:
                yield loop.run_until_complete(anext(coming))
            except StopAsyncIteration:
                return

    return rate(EpochIterable(epoch), is_repeated=False)


def streamed_files(folder: Path) -> Found:
    """Read the files in the order of a full shuffle, as the generator does."""
    import colabkit

    data = colabkit.FileDataset(folder / "drive" / "images")
    loader = colabkit.Loader(data, ROAD_BATCH, shuffle=True, size=ROAD, channels_last=True)
    return rate(loader, is_repeated=False)


def streamed_shards(folder: Path) -> Found:
    """Read the first epoch of shards that were packed beforehand in random order, and shuffle blocks of them."""
    import colabkit

    data = colabkit.open_pack(folder / "drive" / "shards.h5")["train"]
    loader = colabkit.Loader(data, ROAD_BATCH, shuffle="block", keep="disk", channels_last=True)
    return rate(loader, is_repeated=False)


COLABKIT, FILES, SHARDS = "colabkit.Loader", "colabkit.Loader over the files", "colabkit.Loader over shards"
BLOCKS = "blocks of 512, shuffled within"
PLAIN_BLOCKS = "blocks of 512, shuffled within, uncompressed"
WAYS: dict[str, dict[str, Callable[..., Found]]] = {
    "drive": {
        "DataLoader over files on the drive": from_drive,
        "copied to the local disk": copied,
        "copied to tmpfs": to_tmpfs,
        "HDF5 by sample, DataLoader": road_hdf5,
        COLABKIT: road_colabkit,
    },
    "blocks": {
        "one by one": lambda folder: one_by_one(folder, 0),
        "one by one, 2 workers": lambda folder: one_by_one(folder, 2),
        "one by one, 2 workers, uncompressed": lambda folder: one_by_one(folder, 2, UNCOMPRESSED),
        BLOCKS: blocks,
        PLAIN_BLOCKS: lambda folder: blocks(folder, UNCOMPRESSED),
        "in memory, TensorDataset": blocks_in_memory,
        COLABKIT: blocks_colabkit,
    },
    "memory": {
        "files, DataLoader": digits(digit_files, is_repeated=False),
        "HDF5 by sample, DataLoader": digits(digit_hdf5, is_repeated=False),
        "in memory, TensorDataset": digits(digit_dataset),
        COLABKIT: digits(digit_loader),
    },
    "idle": {
        "DataLoader": busy(lambda folder: photo_files(folder, 0)),
        "DataLoader, 2 workers": busy(lambda folder: photo_files(folder, 2)),
        "DataLoader, next batch prefetched": busy(lambda folder: prefetched(photo_files(folder, 0))),
        "DataLoader, 2 workers, prefetched": busy(lambda folder: prefetched(photo_files(folder, 2))),
        "in memory, TensorDataset, 2 workers, prefetched": busy(lambda folder: prefetched(photo_tensors(folder, 2))),
        COLABKIT: busy(photo_colabkit),
    },
    "stream": {
        "asynchronous generator, one file at a time": lambda folder: generated(folder, 1),
        "asynchronous generator, a batch at once": lambda folder: generated(folder, ROAD_BATCH),
        "DataLoader, 2 workers": from_drive,
        FILES: streamed_files,
        SHARDS: streamed_shards,
    },
}

if __name__ == "__main__":
    main()

"""`demo()` compares training straight from a slow drive with staging, packing and training, on real images.

All reported figures are measured during the call. The slow drive is simulated by a delay for each opened file, so the
demo needs neither FUSE nor root. The baseline is a `DataLoader` with two workers that open and decode the files one by
one.
"""

from __future__ import annotations

import io
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colabkit.foundation import (
    BadImage,
    BadSource,
    Report,
    TargetExists,
    cannot,
    check_number,
    check_whole_number,
    checked_call,
    file_changes,
    format_count,
    format_seconds,
    format_share,
    format_things,
    user_path,
)
from colabkit.loading import Loader, Normalize
from colabkit.monitoring import dashboard
from colabkit.packs import (
    LabelledSamples,
    PackedDataset,
    decode_image,
    height_and_width,
    label_samples,
    open_pack,
    pack,
)
from colabkit.storage import ArchiveSource, FolderSource, Item, SlowSource, Source, open_source, stage
from colabkit.training import TrainReport, small_network, supervised_step, train

_NAIVE_BATCHES = 8
_NAIVE_WORKERS = 2
_NAIVE_S = 10.0
_PEEKED = 32
# Maximum side of images that keep their size; larger images, or those of different sizes, are resized to 64x64 to save
# time.
_LARGEST_KEPT = 96
_SIZE = (64, 64)
_FRACTIONS = {"train": 0.8, "test": 0.2}


@dataclass(frozen=True, repr=False)
class DemoReport(Report):
    """Result of `demo()`.

    Attributes:
        source: source of the images.
        samples: number of images in all splits.
        classes: number of classes.
        sample_shape: height, width and channels of the images in the pack.
        latency_s: simulated time to open a file on the slow drive, in seconds.
        naive_images_per_s: images per second when training straight from the files.
        naive_wait_share: fraction of time spent waiting for data when training from the files, in [0, 1].
        packed_images_per_s: images per second when training from the pack.
        packed_wait_share: fraction of time spent waiting for data when training from the pack, in [0, 1].
        part_s: seconds spent on staging, packing and training, and on the loader's background work, by name.
        epochs: number of epochs trained from the pack.
        accuracy: fraction of correctly classified images in the held-out split, in [0, 1].
        accuracy_on: name of the held-out split: `"test"` if it exists, otherwise `"val"`.
        path: folder of the local copy, pack and checkpoints, or None if they were removed.
    """

    source: str
    samples: int
    classes: int
    sample_shape: tuple[int, ...]
    latency_s: float
    naive_images_per_s: float
    naive_wait_share: float
    packed_images_per_s: float
    packed_wait_share: float
    part_s: Mapping[str, float]
    epochs: int
    accuracy: float
    accuracy_on: str
    path: Path | None

    def _title(self) -> str:
        shape = "x".join(map(str, self.sample_shape))
        return (
            f"{format_count(self.samples)} images {shape} in {self.classes} classes, "
            f"on a drive that takes {format_seconds(self.latency_s)} to open a file"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        ratio = self.packed_images_per_s / max(self.naive_images_per_s, 1e-9)
        rates = format_count(self.naive_images_per_s), format_count(self.packed_images_per_s)
        waits = format_share(self.naive_wait_share), format_share(self.packed_wait_share)
        after = f"after {format_things(self.epochs, 'epoch', 'epochs')}"
        return [
            ("", "from the files", "staged and packed", ""),
            ("training, images/s", *rates, f"{ratio:,.0f} times as many"),
            ("waiting for data", *waits, "of the time"),
            *((name, "", format_seconds(seconds), _PART_NOTES.get(name, "")) for name, seconds in self.part_s.items()),
            (f"{self.accuracy_on} accuracy", "", f"{100 * self.accuracy:.1f}%", after),
        ]

    def _summary(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        kept = [f"Files saved in {str(self.path)!r}"] if self.path else []
        return "\n".join([self._title(), *lines, *kept])


_PART_NOTES = {
    "stage": "once",
    "pack": "once",
    "train": "all epochs, with evaluation",
    "gather": "part of train, in the background",
    "augment": "part of train, in the background",
    "transfer": "part of train, on a separate stream",
}


@checked_call()
def demo(
    data: str | os.PathLike[str] | None = None,
    *,
    epochs: int = 3,
    size: int | tuple[int, int] | None = None,
    latency_s: float = 0.02,
    to: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> DemoReport:
    """Train a small network on images on a simulated slow drive, first straight from the files, then from a pack.

    Args:
        data: folder or archive with one folder of images per class, with or without train and test folders. None uses
            the UCI handwritten digits included in the package.
        epochs: number of epochs to train from the pack.
        size: height and width to resize images to. None keeps small images of one size, and resizes others to 64x64.
        latency_s: seconds that the slow drive takes to open a file.
        to: empty or new folder in which to keep the local copy, the pack and the checkpoints; None removes them.
        progress: print each stage of the demo, and show the live panel.

    Returns:
        A report of the throughput, the fraction of time spent waiting for data, and the accuracy.

    Raises:
        InvalidOption: if an argument is invalid.
        SourceMissing, BadSource, BadArchive, BadImage: if the data does not exist, has no classes, or is damaged.
        TargetExists: if `to` is not empty.
        NotEnoughSpace: if the local copy or the pack does not fit.

    Example:
        >>> import colabkit
        >>> report = colabkit.demo(epochs=1, latency_s=0.001, progress=False)
        >>> report.samples, report.classes
        (1797, 10)
        >>> report.packed_images_per_s > 0
        True
    """
    act = "run the demo"
    check_whole_number(act, "epochs", epochs, 1)
    sides = None if size is None else height_and_width(act, size)
    check_number(act, "latency_s", latency_s, 0, example=0.02)
    say: Callable[[str], object] = print if progress else str
    source = open_source("samples:digits" if data is None else data)
    with _workplace(to) as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(source, ArchiveSource):
            say("0/4  Extracting the archive to the slow drive")
        drive = SlowSource(_as_files(source, folder / "drive", progress), latency_s)
        labelled = label_samples(drive.list(), source.name)
        if labelled.kind != "class":
            kind = f"the labels are of kind {labelled.kind!r}"
            if labelled.kind == "none":
                kind = "the images have no labels"
            advice = "Use images in one folder per class"
            raise BadSource(cannot(f"train on {source.name!r}", kind, "one class per image", advice))
        if "train" not in labelled.splits:
            found = f"the only splits are {', '.join(labelled.splits)}"
            next_step = "Rename one of the folders to 'train'"
            raise BadSource(cannot(f"train on {source.name!r}", found, "a folder named 'train'", next_step))
        shape = sides or _shape(drive.source, labelled)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch_size = 32 if sum(map(len, labelled.splits.values())) < 10_000 else 128

        say(f"1/4  Training directly from the slow drive with DataLoader(num_workers={_NAIVE_WORKERS})")
        naive_rate, naive_share = _train_naively(drive, labelled, shape, batch_size, device)
        say(f"     {naive_rate:,.0f} images/s, {format_share(naive_share)} of the time waiting for data")

        say("2/4  Staging: copying all files concurrently to local storage")
        staged = stage(drive, folder / "local", progress=progress)
        say(f"     {staged}")

        say("3/4  Packing: storing all images in one sealed HDF5 file")
        splits = _FRACTIONS if set(labelled.splits) == {"train"} else None
        packed = pack(staged.path, folder / "pack.h5", size=shape, splits=splits, overwrite=True, progress=progress)
        say(f"     {packed}")

        say("4/4  Training from the memory-mapped pack")
        splits_of = open_pack(packed.path)
        test = splits_of["test" if "test" in splits_of else "val"]
        started = time.monotonic()
        report = _train_packed(splits_of["train"], test, batch_size, epochs, device, folder / "checkpoints", progress)
        train_s = time.monotonic() - started
        say("")
    return DemoReport(
        source=source.name,
        samples=sum(packed.splits.values()),
        classes=len(packed.classes),
        sample_shape=packed.sample_shape,
        latency_s=latency_s,
        naive_images_per_s=naive_rate,
        naive_wait_share=naive_share,
        packed_images_per_s=report.samples_per_s,
        packed_wait_share=report.wait_share,
        part_s={"stage": staged.seconds, "pack": packed.seconds, "train": train_s, **report.parts},
        epochs=epochs,
        accuracy=report.epochs[-1].validation["accuracy"],
        accuracy_on=test.split_name,
        path=None if to is None else folder,
    )


@contextmanager
def _workplace(to: str | os.PathLike[str] | None) -> Iterator[Path]:
    if to is not None:
        folder = user_path(to, "run the demo")
        act = f"keep the demo's files in {str(folder)!r}"
        with file_changes.translated(act):
            file_changes.make_folder(folder)
            if any(folder.iterdir()):
                raise TargetExists(cannot(act, "the folder is not empty", "", "Choose another folder"))
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="colabkit-demo-") as name:
        yield Path(name)


def _as_files(source: Source, folder: Path, progress: bool) -> Source:
    if isinstance(source, ArchiveSource):
        return FolderSource(stage(source, folder, progress=progress).path)
    return source


def _shape(source: Source, labelled: LabelledSamples) -> tuple[int, int]:
    """Return the height and width of about 32 images if they are small and of one size, else the default size."""
    some = labelled.items[:: max(1, len(labelled.items) // _PEEKED)]
    peeked = {_image_shape(source, item) for item in some}
    if len(peeked) == 1 and max(own := peeked.pop()) <= _LARGEST_KEPT:
        return own
    return _SIZE


def _image_shape(source: Source, item: Item) -> tuple[int, int]:
    with source.open(item) as file:
        try:
            height, width, _ = decode_image(file.read()).shape
        except BadImage as error:
            act, found = f"read {item.path!r} of {source.name!r}", error.message or str(error)
            raise BadImage(cannot(act, found, "", "Repair or remove this file")) from error.__cause__
    return height, width


class _NaiveDataset(Dataset[tuple[Tensor, int]]):
    """A typical dataset, which opens a file, decodes it with Pillow and resizes the image.

    A file that is not an image gets the label `-1 - index`, so that the main process can report its name.
    """

    def __init__(self, source: Source, samples: tuple[tuple[Item, int], ...], shape: tuple[int, int]) -> None:
        self._source = source
        self._samples = samples
        self._shape = shape

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        item, label = self._samples[index]
        with self._source.open(item) as file:
            data = file.read()
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except OSError:
            return torch.zeros(3, *self._shape, dtype=torch.uint8), -1 - index
        fitted = ImageOps.fit(image, (self._shape[1], self._shape[0]), method=Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(fitted)).permute(2, 0, 1), label


def _train_naively(
    drive: Source, labelled: LabelledSamples, shape: tuple[int, int], batch_size: int, device: str
) -> tuple[float, float]:
    """Train on a few batches; return images per second and the share of time spent waiting, without the first batch."""
    assert labelled.values is not None
    samples = tuple((labelled.items[number], int(labelled.values[number])) for number in labelled.splits["train"])
    dataset = _NaiveDataset(drive, samples, shape)
    loader = DataLoader(dataset, batch_size, shuffle=True, num_workers=_NAIVE_WORKERS)
    model = small_network(len(labelled.classes), (*shape, 3)).to(device)
    step = supervised_step(model, torch.optim.AdamW(model.parameters()))
    images = 0
    wait_s = 0.0
    # A small dataset may have fewer batches than are measured, so repeat it.
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    batches = map(partial(_checked, drive, samples), endless)
    step(_moved(next(batches), device))
    started = time.perf_counter()
    for _ in range(_NAIVE_BATCHES):
        asked = time.perf_counter()
        batch = next(batches)
        wait_s += time.perf_counter() - asked
        step(_moved(batch, device))
        images += len(batch[1])
        if time.perf_counter() - started > _NAIVE_S:
            break
    seconds = time.perf_counter() - started
    return images / max(seconds, 1e-9), wait_s / max(seconds, 1e-9)


def _checked(
    drive: Source, samples: tuple[tuple[Item, int], ...], batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    lowest = int(batch[1].min())
    if lowest < 0:
        path = samples[-1 - lowest][0].path
        act = f"train on {path!r} of {drive.name!r}"
        raise BadImage(cannot(act, "the file cannot be decoded as an image", "", "Repair or remove this file"))
    return batch


def _moved(batch: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    normalize = Normalize()
    return normalize(batch[0].to(device)), batch[1].to(device)


def _train_packed(
    training: PackedDataset,
    test: PackedDataset,
    batch_size: int,
    epochs: int,
    device: str,
    checkpoints: Path,
    progress: bool,
) -> TrainReport:
    options: dict[str, Any] = {"device": device, "transform": Normalize()}
    drop_last = len(training) >= batch_size
    loader = Loader(training, batch_size, shuffle=True, drop_last=drop_last, **options)
    model = small_network(len(training.classes), training.rows.shape[1:]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=epochs * len(loader))
    step = supervised_step(model, optimizer, scheduler=scheduler)
    with dashboard() if progress else nullcontext():
        validate = Loader(test, 256, **options)
        return train(step, loader, epochs=epochs, to=checkpoints, resume=False, validate=validate)

"""Loaders of other packages, which `loader_systems.py` also runs in environments without colabkit."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["CROP", "PEERS", "EpochIterable", "Make", "arrays", "own_temporary_folder"]

Make = Callable[[int], Iterable[Any]]
"""A function that makes a loader for a batch size; the length of a batch's last element is its number of samples."""

WORKERS = 2
CROP = 224


@contextmanager
def own_temporary_folder(beside: Path) -> Iterator[None]:
    """Use a new temporary folder, because litdata deletes the folders `data` and `chunks` in the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="own-", dir=beside) as own:
        os.environ["TMPDIR"] = tempfile.tempdir = own
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{own}/litdata/chunks"
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{own}/litdata/data"
        os.environ["HF_HOME"] = f"{own}/hf"
        yield


class EpochIterable:
    """An iterable that calls a function for each epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Any]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()


def tensors(source: str) -> Make:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = arrays(source)
    dataset = TensorDataset(torch.tensor(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))
    return lambda size: DataLoader(dataset, size, shuffle=True)


def arrays(source: str) -> tuple[Any, Any]:
    """Return the memory-mapped images and the labels of a raw pack's training split."""
    import h5py
    import numpy as np

    with h5py.File(source) as file:
        images = file["X_train"]
        place = images.id.get_offset()
        return np.memmap(source, images.dtype, "r", place, images.shape), file["Y_train"][:]


class SingleReadDataset:
    """The dataset of a common recipe: each worker opens the HDF5 file and reads one sample at a time."""

    def __init__(self, path: str) -> None:
        self._path, self._file = path, None
        self._count = len(arrays(path)[1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import h5py
        import torch

        if self._file is None:
            self._file = h5py.File(self._path)
        return torch.from_numpy(self._file["X_train"][index]).permute(2, 0, 1), int(self._file["Y_train"][index])


def h5py_samples(source: str) -> Make:
    from torch.utils.data import DataLoader

    return lambda size: DataLoader(
        SingleReadDataset(source), size, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )


def image_folder(source: str) -> Make:
    from torchvision.transforms import PILToTensor

    return folder_of(source, PILToTensor())


def image_folder_crops(source: str) -> Make:
    from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, RandomResizedCrop

    return folder_of(source, Compose([RandomResizedCrop(CROP), RandomHorizontalFlip(), PILToTensor()]))


def folder_of(source: str, transform: Any) -> Make:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(source, transform=transform)
    return lambda size: DataLoader(dataset, size, shuffle=True, num_workers=WORKERS, persistent_workers=True)


def ffcv(source: str) -> Make:
    from ffcv.fields.decoders import SimpleRGBImageDecoder
    from ffcv.transforms import ToTensor

    return ffcv_of(source, lambda: [SimpleRGBImageDecoder(), ToTensor()])


def ffcv_crops(source: str) -> Make:
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    return ffcv_of(source, lambda: [RandomResizedCropRGBImageDecoder((CROP, CROP)), RandomHorizontalFlip(), ToTensor()])


def ffcv_of(source: str, operations: Callable[[], list[Any]]) -> Make:
    from ffcv.fields.decoders import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor

    def make(size: int) -> Iterable[Any]:
        return Loader(
            source,
            batch_size=size,
            num_workers=WORKERS,
            order=OrderOption.RANDOM,
            os_cache=True,
            drop_last=False,
            pipelines={"image": operations(), "label": [IntDecoder(), ToTensor(), Squeeze()]},
        )

    return make


def webdataset(source: str) -> Make:
    import webdataset as wds
    from torchvision.transforms.functional import pil_to_tensor

    shards = sorted(map(str, Path(source).glob("*.tar")))

    def make(size: int) -> Iterable[Any]:
        dataset = (
            wds.WebDataset(shards, shardshuffle=len(shards))
            .shuffle(1000)
            .decode("pil")
            .to_tuple("jpg", "cls")
            .map_tuple(pil_to_tensor)
            .batched(size)
        )
        return wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)

    return make


def streaming(source: str) -> Make:
    from io import BytesIO

    from PIL import Image
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader
    from torchvision.transforms.functional import pil_to_tensor

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return pil_to_tensor(Image.open(BytesIO(sample["image"]))), sample["label"]

    clean_stale_shared_memory()

    def make(size: int) -> Iterable[Any]:
        dataset = Images(local=source, shuffle=True, batch_size=size)
        return DataLoader(dataset, size, num_workers=WORKERS, persistent_workers=True)

    return make


def litdata(source: str) -> Make:
    from litdata import StreamingDataLoader, StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample["image"], sample["label"]

    return lambda size: StreamingDataLoader(
        Images(source, shuffle=True), batch_size=size, num_workers=WORKERS, persistent_workers=True
    )


def hf_datasets(source: str) -> Make:
    from datasets import load_from_disk
    from torch.utils.data import DataLoader

    dataset = load_from_disk(source).with_format("torch")

    def make(size: int) -> Iterable[Any]:
        loader = DataLoader(dataset, size, shuffle=True, num_workers=WORKERS, persistent_workers=True)
        return EpochIterable(lambda: ((batch["image"], batch["label"]) for batch in loader))

    return make


def spdl(source: str) -> Make:
    """Gather batches by indexing the array of rows in two threads."""
    import numpy as np
    import torch

    images, labels = arrays(source)

    def load(numbers: Any) -> tuple[Any, Any]:
        return torch.from_numpy(images[numbers]).permute(0, 3, 1, 2), torch.from_numpy(labels[numbers])

    def make(size: int) -> Iterable[Any]:
        def epoch() -> Iterator[Any]:
            numbers = np.random.default_rng().permutation(len(labels))
            batches = (numbers[start : start + size] for start in range(0, len(numbers), size))
            return spdl_epoch(batches, lambda builder: builder.pipe(load, concurrency=WORKERS))

        return EpochIterable(epoch)

    return make


def shuffled(count: int) -> list[int]:
    return random.sample(range(count), count)


def spdl_epoch(source: Iterable[Any], parts: Callable[[Any], Any]) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    pipeline = parts(PipelineBuilder().add_source(source)).add_sink(4).build(num_threads=WORKERS)
    with pipeline.auto_stop():
        yield from pipeline


def spdl_crops(source: str) -> Make:
    """Decode photos with simplejpeg, crop and flip them in two threads, and stack them into batches."""
    import torch
    from simplejpeg import decode_jpeg
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.functional import resized_crop

    files = ImageFolder(source).samples
    # Otherwise, each of the two threads would use two more threads for every photo.
    torch.set_num_threads(1)

    def load(file: tuple[str, int]) -> tuple[Any, int]:
        image = torch.from_numpy(decode_jpeg(Path(file[0]).read_bytes(), fastdct=True, fastupsample=True))
        image = image.permute(2, 0, 1)
        box = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        image = resized_crop(image, *box, [CROP, CROP], antialias=True)
        return image.flip(-1) if random.random() < 0.5 else image, file[1]

    def stack(samples: list[Any]) -> tuple[Any, Any]:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def make(size: int) -> Iterable[Any]:
        def epoch() -> Iterator[Any]:
            chosen = [files[number] for number in shuffled(len(files))]
            return spdl_epoch(
                chosen, lambda builder: builder.pipe(load, concurrency=WORKERS).aggregate(size).pipe(stack)
            )

        return EpochIterable(epoch)

    return make


def dali(source: str) -> Make:
    from nvidia.dali import fn

    return dali_of(source, lambda files: fn.decoders.image(files, device="cpu"))


def dali_crops(source: str) -> Make:
    from nvidia.dali import fn

    def crops(files: Any) -> Any:
        area, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
        images = fn.decoders.image_random_crop(files, device="cpu", random_area=area, random_aspect_ratio=ratio)
        images = fn.resize(images, size=(CROP, CROP))
        return fn.flip(images, horizontal=fn.random.coin_flip())

    return dali_of(source, crops)


def dali_of(source: str, decoded: Callable[[Any], Any]) -> Make:
    """Build a DALI pipeline that runs without a GPU and yields torch tensors."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def
    def described() -> Any:
        files, labels = fn.readers.file(file_root=source, random_shuffle=True, name="reader")
        return decoded(files), labels

    def make(size: int) -> Iterable[Any]:
        built = described(batch_size=size, num_threads=WORKERS, device_id=None)
        loader = DALIGenericIterator(
            [built],
            ["image", "label"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )
        return EpochIterable(lambda: ((batch["image"], batch["label"]) for [batch] in loader))

    return make


PEERS: dict[str, Callable[[str], Make]] = {
    "tensors": tensors,
    "h5py": h5py_samples,
    "ImageFolder": image_folder,
    "ImageFolder crops": image_folder_crops,
    "FFCV": ffcv,
    "FFCV crops": ffcv_crops,
    "WebDataset": webdataset,
    "Streaming": streaming,
    "litdata": litdata,
    "HF datasets": hf_datasets,
    "SPDL": spdl,
    "SPDL crops": spdl_crops,
    "DALI": dali,
    "DALI crops": dali_crops,
}

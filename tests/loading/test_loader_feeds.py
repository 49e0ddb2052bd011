"""What a `Loader` takes for rows in memory, and what it asks sample by sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack
from packed_files import photos
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from colabkit.augment import Compose, Cutout, Normalize, RandomCrop, RandomHorizontalFlip
from colabkit.loading import Loader
from colabkit.packs import FileDataset, PackedDataset, open_pack

SEVEN = torch.full((3, 8, 8), 7, dtype=torch.uint8)


class OwnTensors(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (-super().__getitem__(index)[0] - 100,)


class OwnSubset(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return SEVEN, super().__getitem__(index)[1]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class OwnFiles(FileDataset):
    def __getitem__(self, index: Any) -> Any:
        return SEVEN, super().__getitem__(index)[1]


class SubsetOfLists(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> Any:
        return [(SEVEN, 0) for _ in indices]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("feeds") / "f", 3)


@pytest.fixture
def pack(tmp_path: Path) -> PackedDataset:
    return open_pack(make_pack(tmp_path / "p.h5", (8, 8, 3), train=6))["train"]


def images_of(dataset: Any) -> Tensor:
    return torch.cat([batch[0] for batch in Loader(dataset, 2, num_workers=0)])


def kind_of(dataset: Any) -> str:
    facts = Loader(dataset, 2).meters.facts
    assert facts is not None
    return facts.kind


def test_a_class_of_the_users_own_that_changes_samples_gives_these(folder: Path, pack: PackedDataset) -> None:
    rows = torch.arange(4)
    assert images_of(OwnTensors(rows)).tolist() == (-rows - 100).tolist()
    files = FileDataset(folder)
    for dataset in (OwnSubset(files, [0, 2]), OwnSubset(pack, [0, 2]), OwnFiles(folder), Subset(OwnFiles(folder), [1])):
        found = images_of(dataset)
        assert torch.equal(found, SEVEN.expand(len(dataset), *SEVEN.shape))


def test_only_a_class_that_changes_samples_costs_the_way_by_rows(pack: PackedDataset) -> None:
    class Named(TensorDataset):
        """Adds a name only."""

        name = "mine"

    for dataset in (Named(torch.zeros(4, 2)), Subset(pack, [0, 1])):
        assert kind_of(dataset) == "gathered"
    assert kind_of(OwnTensors(torch.zeros(4, 2))) == "processes"


def test_a_batch_size_far_beyond_the_samples_costs_no_memory(folder: Path) -> None:
    images = torch.arange(4 * 3 * 64 * 64).view(4, 3, 64, 64).to(torch.uint8)
    for transform in (None, RandomHorizontalFlip(0.0)):
        (found,) = Loader(images, 10**8, transform=transform)
        assert torch.equal(found, images)
    ((found, _),) = Loader(FileDataset(folder), 10**8)
    assert len(found) == len(FileDataset(folder))


@pytest.mark.parametrize("values", [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag])
def test_conjugate_and_negative_views_load_as_their_values(values: Tensor) -> None:
    assert torch.equal(torch.cat([*Loader(values, 1)]), values.resolve_conj().resolve_neg())


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 8, 8), index, np.uint8), np.int64(index)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Make tensors elsewhere by default, as `torch.set_default_device("cuda")` does."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *itertools.product(("rows", "small rows", "pack", "files"), (0, 1)),
        ("samples", 1),  # without a worker process torch's own collate asks for the default
    ],
)
def test_batches_are_on_the_loaders_device_whatever_the_default(
    kind: str, num_workers: int, folder: Path, tmp_path: Path
) -> None:
    steps = Compose([RandomCrop(8, padding=1), RandomHorizontalFlip(), Cutout(2), Normalize()])
    dataset = {
        "rows": lambda: (np.ones((6, 3, 8, 8), np.uint8), np.arange(6)),
        "small rows": lambda: (np.ones((6, 4), np.uint8), np.arange(6)),
        "pack": lambda: open_pack(make_pack(tmp_path / "p.h5", (8, 8, 3), train=6))["train"],
        "files": lambda: FileDataset(folder),
        "samples": Numbers,
    }[kind]()
    transform = None if kind == "small rows" else steps
    for images, _ in Loader(dataset, 2, shuffle=True, transform=transform, num_workers=num_workers, device="cpu"):
        assert images.device.type == "cpu"
        assert torch.isfinite(images.float()).all()

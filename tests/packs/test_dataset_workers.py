"""Datasets of every kind in forked and spawned workers of a `DataLoader`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from hdf5_files import IMAGES, STORED, write_hdf5
from packed_files import photos
from pictures import png
from torch.utils.data import DataLoader, Dataset, default_collate

from colabkit.packs.dataset.datasets import LabelledDataset
from colabkit.packs.dataset.file_dataset import FileDataset
from colabkit.packs.dataset.opened_pack import open_pack


class Batches(Dataset):
    """A dataset whose item i holds all batches of dataset i, fetched and collated as by a DataLoader worker."""

    def __init__(self, datasets: list[LabelledDataset]) -> None:
        self.datasets = datasets

    def __len__(self) -> int:
        return len(self.datasets)

    def __getitem__(self, number: int) -> list[list[torch.Tensor]]:
        data = self.datasets[number]
        fetch = getattr(data, "__getitems__", lambda numbers: [data[row] for row in numbers])
        starts = range(0, len(data), 4)
        return [default_collate(fetch([*range(len(data))[start : start + 4]])) for start in starts]


@pytest.fixture
def datasets(tmp_path: Path) -> dict[str, LabelledDataset]:
    """Return a dataset of every kind, after a sample of each has been read."""
    shards = ({"train": 9, "test": 2}, {"train": 4}, {"test": 3}, {"train": 8, "test": 1})
    files = {"X": {"train": [png(image) for image in IMAGES[:10]]}, "Y": {"train": np.arange(10) % 3}}
    pack = make_pack(tmp_path / "made.h5", (6, 5, 3), train=60)
    found = {
        "pack": open_pack(pack)["train"],
        "shards": open_pack(make_shards(tmp_path / "birds.h5", *shards))["train"],
        "view": open_pack(pack)["train"].subset(np.arange(60)[::7]),
        "image files": open_pack(seal_fields(tmp_path / "p.h5", files, {"X": "image"}, "class"))["train"],
        "plain files": FileDataset(photos(tmp_path / "tree")),
        "HDF5": open_pack(write_hdf5(tmp_path / "foreign.h5", **STORED["gzip"]))["train"],
    }
    assert [data[len(data) - 1][1] for data in found.values()] == [2, 1, 2, 0, 2, 1]
    return found


@pytest.mark.full
def test_a_spawned_worker_loads_every_kind_of_dataset(datasets):
    """One worker gets all datasets, because each spawned worker takes time to import torch."""
    loader = DataLoader(Batches([*datasets.values()]), None, num_workers=1, multiprocessing_context="spawn")
    for (kind, data), batches in zip(datasets.items(), loader, strict=True):
        assert_batches(kind, data, batches)


@pytest.mark.full
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork")])
def test_a_data_loader_loads_every_kind_of_dataset(datasets, workers, context):
    for kind, data in datasets.items():
        loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=context)
        assert_batches(kind, data, list(loader))


def assert_batches(kind: str, data: LabelledDataset, batches: list[list[torch.Tensor]]) -> None:
    assert [len(labels) for _, labels in batches] == [min(4, len(data) - start) for start in range(0, len(data), 4)]
    for number, fields in enumerate(zip(*batches, strict=True)):
        expected = torch.stack([torch.as_tensor(data[row][number]) for row in range(len(data))])
        assert torch.equal(torch.cat(fields), expected), kind

"""`Loader` over all kinds of data: views, shards, arrays and labels of any shape, and custom subclasses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from loader_batches import LoaderContract, epoch
from packed_files import photos
from pictures import saved
from sampling import sampled
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from colabkit.augment import Compose, Cutout, Normalize, RandomCrop, RandomHorizontalFlip
from colabkit.errors import InvalidOption, SourceMissing
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import FileDataset, PackedDataset, open_pack


@pytest.fixture(scope="module")
def view(folder: Path) -> PackedDataset:
    return open_pack(make_pack(folder / "one.h5", train=40))["train"].subset(range(39, 0, -2))


@pytest.fixture(scope="module")
def sharded(folder: Path) -> PackedDataset:
    return open_pack(make_shards(folder / "s.h5", {"train": 9}, {"train": 1, "test": 4}, {"train": 12}))["train"]


@pytest.mark.parametrize("what", sampled(["view", "sharded", "view of sharded"], 2))
class TestPackStream(LoaderContract):
    @pytest.fixture(autouse=True)
    def _stream_of(self, view, sharded, what):
        self.data = {"view": view, "sharded": sharded, "view of sharded": sharded.subset(range(20, 2, -1))}[what]
        self.options = {"shuffle": True, "seed": 2}


def test_views_and_shards_come_in_their_order(view, sharded):
    for data in (view, sharded, sharded.subset([20, 9, 0]), view.subset([3, 3, 1])):
        images, labels = epoch(Loader(data, 3))
        assert torch.equal(images, data[:][0])
        assert torch.equal(labels, data.labels)
        order = epoch_order(len(data), 7, 0, 0, len(data))
        assert torch.equal(epoch(Loader(data, 3, shuffle=True, seed=7))[0], data[order][0])


def test_a_state_of_another_view_or_pack_raises_an_error(view, tmp_path):
    state = Loader(view, 4).state_dict()
    for other in (view.subset(range(5)), open_pack(make_pack(tmp_path / "p.h5", seed=12, train=len(view)))["train"]):
        with pytest.raises(InvalidOption, match="another dataset"):
            Loader(other, 4).load_state_dict(state)


def test_a_state_of_an_unseeded_random_split_names_the_generator_and_a_seeded_one_resumes(view):
    def loader(seed):
        parts = random_split(view, [0.5, 0.5], generator=torch.Generator().manual_seed(seed))
        return Loader(parts[0], 4)

    state = loader(0).state_dict()
    with pytest.raises(InvalidOption, match=r"random_split\(\) with a seeded generator="):
        loader(1).load_state_dict(state)
    loader(0).load_state_dict(state)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (3, 4, 5, 2)])
@pytest.mark.parametrize("dtype", sampled(["|u1", "|b1", "<u2", "<f4", "<c8"], 2))
def test_arrays_keep_their_shape_and_dtype(tmp_path, shape, dtype):
    arrays = (np.random.default_rng(1).normal(size=(11, *shape)) * 50).astype(dtype)
    fields = {"X": {"train": arrays}, "Y": {"train": np.arange(11)}}
    data = open_pack(seal_fields(tmp_path / "p.h5", fields, {"X": "array"}, "class"))["train"]
    samples, labels = epoch(Loader(data, 4))
    assert torch.equal(samples, torch.from_numpy(arrays))
    assert labels.tolist() == list(range(11))


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("multilabel", np.eye(11, 5, dtype="|u1")),
        ("regression", np.linspace(0, 1, 11, dtype="<f4")),
        ("regression", np.linspace(0, 1, 33, dtype="<f4").reshape(11, 3)),
    ],
)
def test_labels_keep_their_shape_and_dtype(tmp_path, kind, labels):
    images = np.random.default_rng(1).integers(0, 256, (11, 3, 3, 3)).astype("|u1")
    path = seal_fields(tmp_path / "p.h5", {"X": {"train": images}, "Y": {"train": labels}}, {"X": "image"}, kind)
    order = epoch_order(11, 4, 0, 0, 11)
    found = epoch(Loader(open_pack(path)["train"], 4, shuffle=True, seed=4))[1]
    assert torch.equal(found, torch.from_numpy(labels)[order])
    assert found.dtype == torch.from_numpy(labels).dtype


def test_image_files_of_one_size_and_samples_without_labels_are_loaded(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (4, 3, 5, 3)).astype("|u1")
    blobs = {"X": {"train": [saved(image, "PNG") for image in images]}, "Y": {"train": np.arange(4)}}
    encoded = open_pack(seal_fields(tmp_path / "e.h5", blobs, {"X": "image"}, "class"))["train"]
    found, labels = epoch(Loader(encoded, 3))
    assert torch.equal(found, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert labels.tolist() == [0, 1, 2, 3]
    bare = open_pack(seal_fields(tmp_path / "u.h5", {"X": {"train": images}}, {"X": "image"}, "none"))["train"]
    assert torch.equal(torch.cat([*Loader(bare, 3)]), found)


def test_a_missing_shard_is_named_before_training_starts(tmp_path):
    data = open_pack(make_shards(tmp_path / "s.h5", {"train": 3}, {"train": 3}))["train"]
    (tmp_path / "s-00001.h5").unlink()
    with pytest.raises(SourceMissing, match=r"s-00001\.h5"):
        Loader(data, 2)


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
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_a_custom_subclass_that_changes_samples_yields_the_changed_samples(pictures: Path, pack: PackedDataset) -> None:
    rows = torch.arange(4)
    assert images_of(OwnTensors(rows)).tolist() == (-rows - 100).tolist()
    files = FileDataset(pictures)
    for dataset in (
        OwnSubset(files, [0, 2]),
        OwnSubset(pack, [0, 2]),
        OwnFiles(pictures),
        Subset(OwnFiles(pictures), [1]),
    ):
        found = images_of(dataset)
        assert torch.equal(found, SEVEN.expand(len(dataset), *SEVEN.shape))


def test_only_a_subclass_that_changes_samples_disables_gathering_rows(pack: PackedDataset) -> None:
    class NamedDataset(TensorDataset):
        name = "mine"

    for dataset in (NamedDataset(torch.zeros(4, 2)), Subset(pack, [0, 1])):
        assert kind_of(dataset) == "gathered"
    assert kind_of(OwnTensors(torch.zeros(4, 2))) == "processes"


def test_a_batch_size_far_above_the_number_of_samples_costs_no_memory(pictures: Path) -> None:
    images = torch.arange(4 * 3 * 64 * 64).view(4, 3, 64, 64).to(torch.uint8)
    for transform in (None, RandomHorizontalFlip(0.0)):
        (found,) = Loader(images, 10**8, transform=transform)
        assert torch.equal(found, images)
    ((found, _),) = Loader(FileDataset(pictures), 10**8)
    assert len(found) == len(FileDataset(pictures))


@pytest.mark.parametrize("values", [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j, 3 - 4j]).conj().imag])
def test_conjugate_and_negative_views_load_with_their_values(values: Tensor) -> None:
    assert torch.equal(torch.cat([*Loader(values, 1)]), values.resolve_conj().resolve_neg())


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 8, 8), index, np.uint8), np.int64(index)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Create tensors on another device by default, like `torch.set_default_device("cuda")`."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *itertools.product(("rows", "small rows", "pack", "shards", "files"), (0, 1)),
        # Without a worker process, torch's collate function uses the default device.
        ("samples", 1),
    ],
)
def test_batches_are_on_the_device_of_the_loader_for_any_default_device(
    kind: str, num_workers: int, pictures: Path, tmp_path: Path
) -> None:
    steps = Compose([RandomCrop(8, padding=1), RandomHorizontalFlip(), Cutout(2), Normalize()])
    dataset = {
        "rows": lambda: (np.ones((6, 3, 8, 8), np.uint8), np.arange(6)),
        "small rows": lambda: (np.ones((6, 4), np.uint8), np.arange(6)),
        "pack": lambda: open_pack(make_pack(tmp_path / "p.h5", (8, 8, 3), train=6))["train"],
        "shards": lambda: open_pack(make_shards(tmp_path / "s.h5", {"train": 3}, {"train": 3}, shape=(8, 8, 3)))[
            "train"
        ],
        "files": lambda: FileDataset(pictures),
        "samples": Numbers,
    }[kind]()
    transform = None if kind == "small rows" else steps
    for images, _ in Loader(dataset, 2, shuffle=True, transform=transform, num_workers=num_workers, device="cpu"):
        assert images.device.type == "cpu"
        assert torch.isfinite(images.float()).all()

"""`Loader` over everything that is rows: views, shards, arrays of any rank, labels of any kind; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contract import StreamContract, make_pack, make_shards, seal_fields
from loader_batches import epoch
from pictures import saved
from sampling import sampled

from colabkit.errors import InvalidOption, SourceMissing
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack


@pytest.fixture(scope="module")
def view(folder: Path) -> PackedDataset:
    return open_pack(make_pack(folder / "one.h5", train=40))["train"].subset(range(39, 0, -2))


@pytest.fixture(scope="module")
def sharded(folder: Path) -> PackedDataset:
    return open_pack(make_shards(folder / "s.h5", {"train": 9}, {"train": 1, "test": 4}, {"train": 12}))["train"]


@pytest.mark.parametrize("what", sampled(["view", "sharded", "view of sharded"], 2))
class TestLoaderStream(StreamContract):
    @pytest.fixture(autouse=True)
    def _stream_of(self, view, sharded, what):
        self.data = {"view": view, "sharded": sharded, "view of sharded": sharded.subset(range(20, 2, -1))}[what]

    def make(self, fail_at=None):
        calls = iter(range(10**6))

        def transform(images):
            if next(calls) == fail_at:
                raise ValueError("planned")
            return images

        return Loader(self.data, 4, shuffle=True, seed=2, transform=None if fail_at is None else transform)

    def samples(self, batch):
        return [(image.numpy().tobytes(), int(label)) for image, label in zip(*batch, strict=True)]

    def everything(self):
        return self.samples(self.data[:])


def test_views_and_shards_come_in_their_order(view, sharded):
    for data in (view, sharded, sharded.subset([20, 9, 0]), view.subset([3, 3, 1])):
        images, labels = epoch(Loader(data, 3))
        assert torch.equal(images, data[:][0])
        assert torch.equal(labels, data.labels)
        order = epoch_order(len(data), 7, 0, 0, len(data))
        assert torch.equal(epoch(Loader(data, 3, shuffle=True, seed=7))[0], data[order][0])


def test_a_state_of_another_view_is_refused(view):
    state = Loader(view, 4).state_dict()
    with pytest.raises(InvalidOption, match="another data set"):
        Loader(view.subset(range(5)), 4).load_state_dict(state)


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

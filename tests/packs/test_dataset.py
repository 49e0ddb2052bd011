"""Packs as PyTorch datasets: samples, copies, pickling and threads. No dataset returns samples of another pack."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from contract import make_pack

import colabkit
from colabkit.errors import BadSource, Corrupt, InvalidOption, NotSealed, SourceMissing
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.dataset.opened_pack import Pack, open_pack
from colabkit.packs.format.pack_file import read_pack


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return make_pack(tmp_path / "made.h5", (6, 5, 3), train=20, test=7)


@pytest.fixture
def train(packed: Path) -> PackedDataset:
    return open_pack(packed)["train"]


def images(path: Path, split: str) -> torch.Tensor:
    return torch.from_numpy(np.array(read_pack(path).map(f"X_{split}"))).permute(0, 3, 1, 2)


def test_a_pack_is_a_mapping_of_its_splits(packed):
    opened = open_pack(str(packed))
    assert isinstance(opened, Pack)
    assert (list(opened), len(opened)) == (["train", "test"], 2)
    assert {split: len(data) for split, data in opened.items()} == {"train": 20, "test": 7}
    assert (opened.path, opened.classes, opened.source) == (packed, ("a", "b", "c"), "made")
    assert opened["train"] is opened["train"]


@pytest.mark.parametrize("name", ["dev", "val", "valid"])
def test_val_valid_and_dev_are_one_split_that_keeps_its_name(tmp_path, name):
    own = make_pack(tmp_path / "own.h5", train=4, **{name: 2})
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["X_train"], file[f"X_{name}"] = np.zeros((4, 2, 2, 3), np.uint8), np.ones((2, 2, 2, 3), np.uint8)
    arrays = {"train": {"X": np.zeros((4, 3))}, name: {"X": np.ones((2, 3))}}
    packed = colabkit.pack(arrays, tmp_path / "packed.h5", progress=False)
    shared = colabkit.pack(np.zeros((6, 3)), tmp_path / "s.h5", splits=f"train=0.5,{name}=0.5", progress=False)
    for pack in map(open_pack, (own, tmp_path / "foreign.h5", packed, shared)):
        assert list(pack.splits) == ["train", name]
        assert pack["val"] is pack["valid"] is pack["dev"]
        assert pack["dev"].split_name == name


def test_an_unknown_split_raises_key_error_with_the_given_name(packed):
    opened = open_pack(packed)
    with pytest.raises(KeyError, match=r"'valid'; expected 'train' or 'test'"):
        opened["valid"]
    assert "dev" not in opened
    assert opened.get("dev") is None


@pytest.mark.parametrize("split", ["train", "test"])
def test_samples_and_labels_equal_the_stored_ones(packed, split):
    data = open_pack(packed)[split]
    for index, image in enumerate(images(packed, split)):
        sample, label = data[index]
        assert torch.equal(sample, image)
        assert (sample.dtype, tuple(sample.shape)) == (torch.uint8, (3, 6, 5))
        assert (label, type(label)) == (index % 3, int)
    assert torch.equal(data.labels, torch.arange(len(data)) % 3)
    assert torch.equal(data.rows.permute(0, 3, 1, 2), images(packed, split))


def test_negative_indices_count_from_the_end_and_others_raise(train):
    for index in range(1, 21):
        assert torch.equal(train[-index][0], train[20 - index][0])
    for index in (20, -21, 10**12):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 20 samples"):
            train[index]
    for index in (np.int64(3), torch.tensor(3)):
        assert torch.equal(train[index][0], train[3][0])
    assert sum(1 for _ in train) == 20


def test_changing_a_sample_changes_neither_the_dataset_nor_the_file(packed, train):
    before = packed.read_bytes()
    train[3][0].zero_()
    train[3][0].fill_(9)
    assert torch.equal(train[3][0], images(packed, "train")[3])
    assert packed.read_bytes() == before


def test_getitems_returns_the_same_samples_as_getitem(train):
    for (image, label), index in zip(train.__getitems__([5, -1, 0]), (5, 19, 0), strict=True):
        assert torch.equal(image, train[index][0])
        assert label == train[index][1]


def test_deleted_datasets_leave_no_open_file_descriptors(packed):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list open descriptors")
    before = len(os.listdir("/proc/self/fd"))
    held = [open_pack(packed)["train"] for _ in range(5)]
    assert held[0][0][1] == 0
    del held
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pickled_dataset_or_pack_is_small_and_reopens(packed, train):
    data = pickle.dumps(train)
    again = pickle.loads(data)
    assert len(data) < 1000
    assert again.fingerprint == train.fingerprint
    assert torch.equal(again.rows, train.rows)
    assert torch.equal(again.labels, train.labels)
    pack = pickle.loads(pickle.dumps(open_pack(packed)))
    assert list(pack) == ["train", "test"]
    assert torch.equal(pack["test"].rows, open_pack(packed)["test"].rows)


def test_fingerprints_differ_between_splits_and_packs(tmp_path, packed):
    other = open_pack(make_pack(tmp_path / "other.h5", (6, 5, 3), train=20, test=8))
    prints = [data.fingerprint for pack in (open_pack(packed), other) for data in pack.values()]
    assert len(set(prints)) == 4
    same = open_pack(shutil.copy(packed, tmp_path / "copy.h5"))
    assert [data.fingerprint for data in same.values()] == prints[:2]


@pytest.fixture
def replaced(packed: Path) -> Path:
    """Return another pack with the same layout, lengths and labels, but different samples."""
    return make_pack(packed.with_name("other.h5"), (6, 5, 3), seed=12, train=20, test=7)


def test_an_open_dataset_keeps_its_samples_if_its_file_is_replaced(packed, train, replaced):
    expected = images(packed, "train")
    os.replace(replaced, packed)
    assert torch.equal(train.rows.permute(0, 3, 1, 2), expected)


def test_unpickling_or_opening_a_split_raises_if_the_file_was_replaced(packed, train, replaced):
    opened, data = open_pack(packed), pickle.dumps(train)
    os.replace(replaced, packed)
    for take in (lambda: pickle.loads(data), lambda: opened["train"], lambda: opened["test"]):
        with pytest.raises(InvalidOption, match="the path now holds another pack"):
            take()


def test_missing_and_damaged_packs_raise(tmp_path, packed):
    (tmp_path / "text.h5").write_text("text")
    for path, error in ((tmp_path / "none.h5", SourceMissing), (tmp_path / "text.h5", BadSource)):
        with pytest.raises(error):
            open_pack(path)
    data = packed.read_bytes()
    packed.write_bytes(data[:-1])
    with pytest.raises(Corrupt):
        open_pack(packed)
    packed.write_bytes(bytes(4096) + data[4096:])
    with pytest.raises(NotSealed):
        open_pack(packed)


def test_damaged_labels_of_one_split_leave_the_others_readable(packed):
    with packed.open("r+b") as file:
        file.seek(read_pack(packed).data_sets["Y_test"].offset)
        file.write(b"\1")
    opened = open_pack(packed)
    assert len(opened["train"]) == 20
    with pytest.raises(Corrupt, match="Y_test"):
        opened["test"]


def test_a_tilde_in_the_path_is_expanded(packed, monkeypatch):
    monkeypatch.setenv("HOME", str(packed.parent))
    assert open_pack("~/made.h5").path == packed


def test_repr_describes_the_contents_and_html_is_escaped(tmp_path, packed):
    opened = open_pack(packed)
    for part in ("train 20", "test 7", "images 6x5x3", "3 classes", str(packed)):
        assert part in repr(opened)
    assert "PackedDataset 'train': 20 images 6x5x3, 3 classes" in repr(opened["train"])
    boxes = {"X": np.zeros((4, 2, 2, 3), np.uint8), "box": np.zeros((4, 2))}
    assert "X, box" in repr(open_pack(colabkit.pack(boxes, tmp_path / "boxes.h5", progress=False).path))
    odd = make_pack(tmp_path / "<b>odd.h5", train=3)
    assert "<b>" not in open_pack(odd)._repr_html_()
    assert "&lt;b&gt;" in open_pack(odd)._repr_html_()


def test_threads_can_read_one_dataset_concurrently(packed, train):
    expected = images(packed, "train")
    indices = list(itertools.islice(itertools.cycle(range(20)), 400))
    with ThreadPoolExecutor(4) as pool:
        for index, (image, label) in zip(indices, pool.map(train.__getitem__, indices), strict=True):
            assert torch.equal(image, expected[index])
            assert label == index % 3

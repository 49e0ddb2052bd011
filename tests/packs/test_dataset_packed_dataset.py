"""Views of a split: subsets, splits by shares, and folds, including those of scikit-learn's splitters."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields

from colabkit.errors import InvalidOption
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.dataset.opened_pack import open_pack


@pytest.fixture
def data(tmp_path: Path) -> PackedDataset:
    """Return 60 samples: 20 in each of three classes, and 4 of each of 15 patients."""
    random = np.random.default_rng(1)
    fields = {
        "X": {"train": random.integers(0, 256, (60, 2, 2, 3)).astype("|u1")},
        "Y": {"train": np.arange(60) % 3},
        "patient": {"train": np.arange(60) // 4},
        "ward": {"train": [f"ward {number // 12}".encode() for number in range(60)]},
    }
    contents = {"X": "image", "patient": "array", "ward": "text"}
    return open_pack(seal_fields(tmp_path / "p.h5", fields, contents, "class", tables=("patient",)))["train"]


def numbers(view: PackedDataset) -> list[int]:
    """Return the row numbers of a view's samples, found by comparing images."""
    images = view.info.map("X_train")
    whole = {image.tobytes(): number for number, image in enumerate(images)}
    return [whole[sample[0].permute(1, 2, 0).numpy().tobytes()] for sample in view]


@pytest.mark.parametrize(
    "indices", [[5, 2, 2, -1], range(4), slice(50, None, 4), np.array([7]), torch.tensor([1, 0]), np.arange(60) > 57]
)
def test_a_subset_has_the_chosen_samples_in_order(data, indices):
    expected = np.arange(60)[indices if not isinstance(indices, torch.Tensor) else indices.numpy()].tolist()
    view = data.subset(indices)
    assert numbers(view) == expected
    assert view.labels.tolist() == [number % 3 for number in expected]
    assert (len(view), view.classes, view.fields) == (len(expected), data.classes, data.fields)
    assert f"{len(expected)} of 60" in repr(view)


def test_a_view_of_a_view_refers_to_rows_of_the_split(data):
    inner = data.subset(range(10, 40)).subset([0, 5, -1]).subset([2, 1])
    assert numbers(inner) == [39, 15]
    assert inner[:][1].tolist() == [0, 0]
    assert inner.numbers.tolist() == [39, 15]
    with pytest.raises(IndexError, match="index 2 is out of range for 2 samples"):
        inner[2]
    with pytest.raises(IndexError, match="for 2 samples"):
        inner.subset([0, 2])


def test_indices_above_the_range_of_int64_raise(data):
    for read in (data.subset, data.__getitem__, data.__getitems__):
        with pytest.raises(IndexError, match=f"index {2**64 - 1} is out of range for 60 samples"):
            read(np.array([2**64 - 1], np.uint64))


def test_views_have_different_fingerprints_and_can_be_pickled(data):
    views = [data, data.subset([1, 2]), data.subset([2, 1]), data.subset([1, 2]).subset([0])]
    assert len({view.fingerprint for view in views}) == 4
    assert data.subset(range(9)).subset([1, 2]).fingerprint == data.subset([1, 2]).fingerprint
    view = pickle.loads(pickle.dumps(data.subset([7, 3])))
    assert numbers(view) == [7, 3]
    assert view.fingerprint == data.subset([7, 3]).fingerprint
    empty = data.subset([])
    assert (len(empty), list(empty), empty.labels.tolist()) == (0, [], [])


def test_splitting_assigns_every_sample_once_and_keeps_class_proportions(data):
    first, second, third = data.split((0.5, 0.25, 0.25), seed=4)
    assert sorted(numbers(first) + numbers(second) + numbers(third)) == list(range(60))
    assert [view.labels.bincount().tolist() for view in (first, second, third)] == [[10] * 3, [5] * 3, [5] * 3]
    assert numbers(data.split((0.5, 0.25, 0.25), seed=4)[1]) == numbers(second)
    assert numbers(data.split((0.5, 0.25, 0.25), seed=5)[1]) != numbers(second)


def test_named_shares_return_a_dict_and_the_default_is_80_to_20(data):
    parts = data.split({"train": 0.9, "dev": 0.1})
    assert {name: len(view) for name, view in parts.items()} == {"train": 54, "dev": 6}
    assert [len(view) for view in data.split()] == [48, 12]
    ordered = data.subset(np.argsort(data.labels.numpy(), kind="stable"))
    first, _ = ordered.split((0.5, 0.5), stratify=False)
    assert len(first) == 30
    assert first.labels.bincount().tolist() != [10, 10, 10]


@pytest.mark.parametrize("shares", [(0.5, 0.4), (), 0.8, "x", (0.5, -0.5, 1.0), (0.999, 0.001)])
def test_invalid_shares_raise(data, shares):
    with pytest.raises(InvalidOption, match="Cannot split"):
        data.split(shares, stratify=False)


@pytest.mark.parametrize("stratify", [True, False])
def test_folds_hold_out_every_sample_once(data, stratify):
    held = []
    for k in range(4):
        training, test = data.fold(k, 4, stratify=stratify)
        assert sorted(numbers(training) + numbers(test)) == list(range(60))
        assert len(test) == 15
        if stratify:
            assert test.labels.bincount().tolist() == [5, 5, 5]
        held += numbers(test)
    assert sorted(held) == list(range(60))


@pytest.mark.parametrize("groups", ["patient", "ward", np.arange(60) // 4])
def test_groups_are_never_divided_between_folds(data, groups):
    field = {"patient": 2, "ward": 3}.get(groups, 2) if isinstance(groups, str) else 2
    for k in range(3):
        training, test = data.fold(k, 3, groups=groups)
        of_training, of_test = ({str(sample[field]) for sample in view} for view in (training, test))
        assert of_test
        assert not of_training & of_test
    training, test = data.subset(range(20, 60)).fold(1, 5, groups="patient")
    assert sorted(numbers(training) + numbers(test)) == list(range(20, 60))


def test_invalid_folds_raise(data):
    numbers_refused = [(3, 3), (-1, 3), (0, 1), (0.5, 3), (0, 61), (0, 10**12)]
    groups = {"nothing": 3, (1, 2): 3, "X": 3, "patient": 16}
    calls = [(k, n, {}) for k, n in numbers_refused] + [(0, n, {"groups": group}) for group, n in groups.items()]
    for k, n, options in calls:
        with pytest.raises(InvalidOption, match="fold"):
            data.fold(k, n, **options)


def test_multi_label_samples_are_stratified_by_their_combinations(tmp_path):
    images = np.zeros((40, 2, 2, 3), "|u1")
    several = np.tile(np.array([[1, 0], [0, 1]], "|u1"), (20, 1))
    path = seal_fields(
        tmp_path / "m.h5", {"X": {"train": images}, "Y": {"train": several}}, {"X": "image"}, "multilabel"
    )
    first, second = open_pack(path)["train"].split((0.5, 0.5))
    assert first.labels.sum(0).tolist() == second.labels.sum(0).tolist() == [10, 10]
    alone = open_pack(seal_fields(tmp_path / "x.h5", {"X": {"train": images}}, {"X": "image"}, "none"))["train"]
    assert [len(view) for view in alone.split((0.5, 0.5))] == [20, 20]


@pytest.mark.full
def test_scikit_learn_splitters_accept_it_and_their_indices_select_views(data):
    selection = pytest.importorskip("sklearn.model_selection")
    folds = list(selection.KFold(4, shuffle=True, random_state=0).split(data))
    folds += selection.StratifiedKFold(4).split(data, data.labels)
    folds += selection.GroupKFold(3).split(data, groups=np.arange(60) // 4)
    for training, test in folds:
        assert numbers(data.subset(training)) == training.tolist()
        assert data.subset(test).labels.tolist() == (test % 3).tolist()
    training, test = selection.train_test_split(np.arange(60), stratify=data.labels, random_state=1)
    assert len(data.subset(training)) + len(data.subset(test)) == 60


def test_views_of_a_sharded_pack_return_the_right_samples(tmp_path):
    whole = open_pack(make_shards(tmp_path / "s.h5", {"train": 9}, {"train": 4}, {"train": 8}))["train"]
    view = whole.subset([20, 0, 9, 12, 13])
    for place, number in enumerate([20, 0, 9, 12, 13]):
        assert torch.equal(view[place][0], whole[number][0])
        assert torch.equal(view[:][0][place], whole[number][0])


@pytest.mark.parametrize("what", ["view", "shards"])
def test_rows_of_views_and_shards_raise_and_the_message_suggests_indexing(tmp_path, what):
    whole = open_pack(make_pack(tmp_path / "p.h5", train=4))["train"]
    sharded = make_shards(tmp_path / "s.h5", {"train": 2}, {"train": 2})
    other = whole.subset([1]) if what == "view" else open_pack(sharded)["train"]
    assert whole.rows.shape == (4, 4, 3, 3)
    with pytest.raises(InvalidOption, match=r"dataset\[:100\]"):
        other.rows  # noqa: B018

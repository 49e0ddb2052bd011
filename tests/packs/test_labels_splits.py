"""Seeded splits and folds keep every sample, class proportions and groups, and are the same on every machine."""

from __future__ import annotations

import importlib.util
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listings import listing_of, table_of
from trees import needs

from colabkit.errors import InvalidOption
from colabkit.packs.labels.labelling import label_samples
from colabkit.packs.labels.splits import fold_numbers, shares_of, split_shares, strata_of

SHARES = st.sampled_from(
    [
        {"train": 0.8, "test": 0.2},
        {"train": 0.7, "val": 0.2, "test": 0.1},
        {"test": 0.5, "train": 0.5},
        {"train": 1 / 3, "val": 1 / 3, "test": 1 / 3},
        {"val": 1.0},
    ]
)
COUNTS = st.dictionaries(st.integers(0, 5), st.integers(10, 60), min_size=1)
SEEDS = st.integers(0, 2**40)


def strata_with(counts: dict[int, int], seed: int = 0) -> np.ndarray:
    cells = [stratum for stratum, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(cells)
    return np.array(cells)


@given(counts=COUNTS, shares=SHARES, seed=SEEDS)
@settings(max_examples=60)
def test_every_sample_is_assigned_once_and_each_stratum_keeps_its_shares(counts, shares, seed):
    strata = strata_with(counts, seed)
    parts = split_shares(strata, len(strata), shares, seed)
    assert list(parts) == list(shares)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(strata)))
    for name, numbers in parts.items():
        assert numbers.dtype == np.int64
        assert (np.diff(numbers) > 0).all()
        for stratum, count in counts.items():
            assert abs((strata[numbers] == stratum).sum() - shares[name] * count) <= 1


@given(counts=COUNTS, shares=SHARES, seed=SEEDS)
@settings(max_examples=30)
def test_strata_are_shuffled_by_seed_and_number_and_divided_at_rounded_shares(counts, shares, seed):
    """Packing compares an existing pack with the requested samples, so this rule must never change."""
    paths = [f"{stratum}/{number:03}.jpg" for stratum, count in sorted(counts.items()) for number in range(count)]
    shares = {name: shares[name] for name in ("train", "val", "test") if name in shares}
    dealt: dict[str, list[str]] = {name: [] for name in shares}
    for label, stratum in enumerate(sorted(counts)):
        members = [path for path in paths if path.startswith(f"{stratum}/")]
        random.Random(f"{seed}/{label}").shuffle(members)
        start, share = 0, 0.0
        for name in shares:
            share += shares[name] / sum(shares.values())
            stop = round(share * len(members))
            dealt[name] += members[start:stop]
            start = stop
    found = label_samples(listing_of(*paths), "source", splits=shares, seed=seed)
    assert {split: [found.items[n].path for n in numbers] for split, numbers in found.splits.items()} == {
        name: sorted(members) for name, members in dealt.items()
    }


@given(counts=COUNTS, seed=SEEDS)
@settings(max_examples=30)
def test_the_order_of_shares_does_not_matter(counts, seed):
    listing = listing_of(*(f"{stratum}/{number}.jpg" for stratum in counts for number in range(counts[stratum])))
    one = label_samples(listing, "source", splits={"train": 0.6, "val": 0.2, "test": 0.2}, seed=seed)
    other = label_samples(listing, "source", splits={"test": 0.2, "train": 0.6, "val": 0.2}, seed=seed)
    assert {split: numbers.tolist() for split, numbers in one.splits.items()} == {
        split: numbers.tolist() for split, numbers in other.splits.items()
    }


def test_the_shuffle_depends_on_seed_and_stratum_and_not_on_other_strata():
    strata = np.repeat([0, 1], 40)
    tests = [split_shares(strata, 80, {"a": 0.5, "b": 0.5}, seed)["b"] for seed in range(10)]
    assert len({tuple(numbers.tolist()) for numbers in tests}) == 10
    for numbers in tests:
        assert numbers[numbers < 40].tolist() != (numbers[numbers >= 40] - 40).tolist()
    more = split_shares(np.repeat([0, 1, 2], 40), 120, {"a": 0.5, "b": 0.5}, 1)["b"]
    assert tests[1].tolist() == more[more < 80].tolist()


def test_shares_that_add_up_to_almost_1_lose_no_sample():
    parts = split_shares(None, 600_000, {"a": 0.5, "b": 0.5 - 9e-7}, 0)
    assert sum(map(len, parts.values())) == 600_000


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ({}, "add up to 0"),
        ({"train": 0.8}, "add up to 0.8"),
        ({"train": 0.8, "test": 0.3}, "add up to 1.1"),
        ({"train": 1.2, "test": -0.2}, r"\['test'\]=-0.2; expected a finite number above 0"),
        ({"train": 1.0, "test": 0.0}, r"\['test'\]=0.0"),
        ({"train": math.nan}, r"\['train'\]=nan"),
        ({"train": math.inf}, r"\['train'\]=inf"),
        ({"train": "all"}, r"\['train'\]='all'"),
        ({"train": True}, r"\['train'\]=True"),
    ],
)
def test_invalid_shares_raise(shares, found):
    with pytest.raises(InvalidOption, match=found):
        split_shares(None, 10, shares, 0)
    with pytest.raises(InvalidOption, match=found):
        shares_of("split", shares)


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ({"train": 0.5, "holdout": 0.5}, "'holdout' is not the name of a split; expected one of train, val, test"),
        ({"train": 0.5, 3: 0.5}, "3 is not the name of a split"),
        ({"train": 0.5, "val": 0.25, "dev": 0.25}, "several shares for one split"),
        ([0.5, 0.5], r"splits=\[0.5, 0.5\]; expected a share for each split"),
        (0.5, r"splits=0.5"),
    ],
)
def test_shares_of_unknown_splits_raise(shares, found):
    with pytest.raises(InvalidOption, match=found):
        shares_of("split", shares)


def test_shares_accept_common_names_and_are_in_the_standard_order():
    shares = shares_of("split", {"Testing": 0.2, "validation": 0.1, "TRAIN": 0.7})
    assert list(shares.items()) == [("train", 0.7), ("val", 0.1), ("test", 0.2)]


def test_shares_are_given_as_text_as_in_a_magic():
    listing = listing_of(*(f"{kind}/{number}.jpg" for kind in "ab" for number in range(4)))
    found = label_samples(listing, "source", splits="train=0.5, dev=0.5").splits
    assert {split: numbers.tolist() for split, numbers in found.items()} == {
        split: numbers.tolist()
        for split, numbers in label_samples(listing, "source", splits={"train": 0.5, "dev": 0.5}).splits.items()
    }
    for text in ("train=half", "train=0.5,train=0.5", "train=0.5,"):
        with pytest.raises(InvalidOption, match=f"splits='{text}'; expected a number for each split, named once"):
            label_samples(listing, "source", splits=text)


@pytest.mark.parametrize("n", [0, 2])
def test_an_empty_split_raises(n):
    with pytest.raises(InvalidOption, match=f"none of {n} samples; expected at least one"):
        split_shares(np.zeros(n, np.int64), n, {"train": 0.9, "test": 0.1}, 0)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=40, max_size=200), SHARES)
@settings(max_examples=40)
def test_frequent_combinations_of_labels_keep_their_shares(rows, shares):
    values = np.array(rows, np.uint8)
    parts = split_shares(strata_of("multilabel", values, shares), len(rows), shares, 0)
    fewest = math.ceil(1 / min(shares.values()))
    for combination, count in Counter(rows).items():
        for name, numbers in parts.items():
            if count >= fewest:
                found = sum(rows[number] == combination for number in numbers)
                assert abs(found - shares[name] * count) <= 1


def test_rare_combinations_of_labels_form_one_stratum():
    values = np.eye(50, dtype=np.uint8)
    shares = {"train": 0.8, "test": 0.2}
    parts = split_shares(strata_of("multilabel", values, shares), 50, shares, 0)
    assert {name: len(numbers) for name, numbers in parts.items()} == {"train": 40, "test": 10}


def test_classes_too_small_for_every_split_are_divided_together_and_others_as_without_them():
    shares = {"train": 0.8, "val": 0.2}
    rare = np.repeat(np.arange(200), 2)
    assert len(split_shares(rare, 400, shares, 0)["val"]) == 80
    both = split_shares(np.append(rare, np.full(50, 200)), 450, shares, 0)["val"]
    alone = split_shares(np.full(50, 200), 50, shares, 0)["val"]
    assert (both < 400).sum() == 80
    assert both[both >= 400].tolist() == (alone + 400).tolist()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=30, max_size=300), SEEDS)
@settings(max_examples=40)
def test_bins_of_a_single_target_keep_their_shares(cells, seed):
    shares = {"train": 0.8, "test": 0.2}
    test = label_samples(table_of(y=cells), "source", splits=shares, seed=seed).splits["test"]
    ranks = np.argsort(np.argsort(np.array(cells, np.float32), kind="stable"))
    bins = min(10, len(cells) // 5)
    for number in range(bins):
        members = np.flatnonzero(ranks * bins // len(cells) == number)
        assert abs(np.isin(members, test).sum() - 0.2 * len(members)) <= 1


@given(
    n=st.integers(30, 400),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda parts: [one / sum(parts) for one in parts]),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_splits_of_a_single_target_have_their_shares_rounded(n, shares, seed):
    named = dict(zip(("train", "val", "test"), shares, strict=False))
    cells = [*map(float, random.Random(seed).sample(range(1000), n))]
    found = label_samples(table_of(y=cells), "source", splits=named, seed=seed).splits
    assert sorted(np.concatenate(list(found.values())).tolist()) == list(range(n))
    assert all(abs(len(numbers) - named[name] * n) <= 1 for name, numbers in found.items())


def test_several_targets_and_no_labels_are_not_stratified():
    shares = {"train": 0.5, "test": 0.5}
    assert strata_of("regression", np.zeros((4, 2), np.float32), shares) is None
    assert strata_of("none", None, shares) is None
    assert strata_of("class", np.array([1, 0]), shares).tolist() == [1, 0]
    assert strata_of("regression", np.zeros(1, np.float32), shares).tolist() == [0]
    assert strata_of("multilabel", np.zeros((3, 0), np.uint8), shares).tolist() == [0, 0, 0]


@given(n=st.integers(2, 200), k=st.integers(2, 12), seed=SEEDS)
def test_folds_are_never_empty_and_differ_by_at_most_one_sample(n, k, seed):
    if n < k:
        with pytest.raises(InvalidOption, match=rf"only {n} samples?; expected at least one for each fold"):
            fold_numbers(n, k, seed=seed)
        return
    sizes = np.bincount(fold_numbers(n, k, seed=seed), minlength=k)
    assert len(sizes) == k
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1


@given(strata=st.lists(st.sampled_from("abcd"), min_size=12, max_size=150), k=st.integers(2, 12), seed=SEEDS)
def test_stratified_folds_differ_by_at_most_one_sample_of_each_class(strata, k, seed):
    folds = fold_numbers(len(strata), k, strata=strata, seed=seed)
    sizes = np.bincount(folds, minlength=k)
    assert sizes.max() - sizes.min() <= 1
    for stratum in set(strata):
        counts = np.bincount(folds[np.array(strata) == stratum], minlength=k)
        assert counts.max() - counts.min() <= 1


@given(
    samples=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), min_size=2, max_size=200),
    k=st.integers(2, 8),
    has_strata=st.booleans(),
    seed=SEEDS,
)
def test_no_group_is_in_two_folds_and_no_fold_is_empty(samples, k, has_strata, seed):
    groups, strata = [list(column) for column in zip(*samples, strict=True)]
    options = {"groups": groups, "strata": strata if has_strata else None, "seed": seed}
    if len(set(groups)) < k:
        least = min(len(groups), len(set(groups)))
        with pytest.raises(InvalidOption, match=rf"only ({least} groups?|{len(groups)} samples?);"):
            fold_numbers(len(samples), k, **options)
        return
    folds = fold_numbers(len(samples), k, **options)
    assert set(folds.tolist()) == set(range(k))
    assert len(set(zip(groups, folds.tolist(), strict=True))) == len(set(groups))


def unevenness(folds: np.ndarray, strata: np.ndarray) -> float:
    """Return the standard deviation of the five folds' shares of a stratum, averaged over all strata."""
    counts = np.array([np.bincount(folds[strata == stratum], minlength=5) for stratum in np.unique(strata)])
    return float((counts / counts.sum(1, keepdims=True)).std(1).mean())


@pytest.mark.full
@pytest.mark.parametrize("has_strata", [False, True])
def test_folds_of_groups_are_as_balanced_as_those_of_scikit_learn(has_strata):
    needs("scikit-learn", importlib.util.find_spec("sklearn") is not None)
    selection = importlib.import_module("sklearn.model_selection")
    ours, theirs = [], []
    for seed in range(20):
        some = np.random.RandomState(seed)
        groups = np.repeat(np.arange(60), some.geometric(0.05, 60))
        strata = (
            (some.rand(60)[groups] * 3 + some.rand(len(groups))).astype(int) if has_strata else np.zeros_like(groups)
        )
        ours.append(unevenness(fold_numbers(len(groups), 5, strata=strata, groups=groups, seed=seed), strata))
        name = "StratifiedGroupKFold" if has_strata else "GroupKFold"
        folds = np.empty(len(groups), int)
        for number, (_, held_out) in enumerate(getattr(selection, name)(5).split(groups, strata, groups)):
            folds[held_out] = number
        theirs.append(unevenness(folds, strata))
    assert np.mean(ours) <= 1.1 * np.mean(theirs)


def test_folds_depend_only_on_the_seed():
    strata, groups = [0, 0, 0, 1, 1, 1, 0, 1], list("aabbccdd")
    assert fold_numbers(8, 3, seed=1).tolist() == [1, 2, 0, 0, 0, 1, 2, 1]
    assert fold_numbers(8, 2, strata=strata, seed=1).tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    assert fold_numbers(8, 2, groups=groups, seed=1).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert len({tuple(fold_numbers(50, 5, seed=seed).tolist()) for seed in range(10)}) == 10
    many = np.repeat(np.arange(50), 2)
    assert len({tuple(fold_numbers(100, 5, groups=many, seed=seed).tolist()) for seed in range(10)}) == 10


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"k": 1}, "k=1; expected a whole number of 2 or more"),
        ({"k": 2.0}, "k=2.0"),
        ({"seed": -1}, "seed=-1"),
        ({"strata": [0, 1]}, r"strata has shape \(2,\); expected one value for each of 6 samples"),
        ({"strata": np.zeros((6, 2))}, r"strata has shape \(6, 2\)"),
        ({"groups": [0] * 5}, r"groups has shape \(5,\)"),
        ({"groups": [0] * 6}, "only 1 group; expected at least one for each fold"),
        (
            {"groups": np.array([0, "a", None, 1, 2, 3], object)},
            "groups contains values of the types NoneType, int, str",
        ),
    ],
)
def test_invalid_folds_raise(options, found):
    with pytest.raises(InvalidOption, match=found):
        fold_numbers(**({"n": 6, "k": 2} | options))

"""The balanced order: every class once in each run, and each class in shuffled passes through its samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_even, assert_unlike
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.errors import InvalidOption
from colabkit.sampler import Balanced

SKEWED = np.repeat(np.arange(4), [1, 6, 50, 900])


def draws_of(labels: np.ndarray, epochs: range, **options: int) -> np.ndarray:
    order = Balanced(labels, **options)
    return np.concatenate([order.indices(epoch, 0, len(order)) for epoch in epochs])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 90), min_size=1, max_size=300), st.integers(1, 2000), st.integers(0, 2**40))
def test_each_run_of_all_classes_holds_every_class_once(labels, num_samples, epoch):
    kinds, classes = np.unique(labels, return_inverse=True)
    drawn = classes[Balanced(labels, num_samples=num_samples).indices(epoch, 0, num_samples)]
    for start in range(0, num_samples, kinds.size):
        run = drawn[start : start + kinds.size]
        assert np.unique(run).size == run.size


def test_every_class_comes_equally_often_whatever_its_size():
    drawn = SKEWED[draws_of(SKEWED, range(3), num_samples=1000)]
    assert np.bincount(drawn).tolist() == [750] * 4


@pytest.mark.parametrize("sizes", [[1, 6, 50, 900], [33, 32, 31], [1] * 80, [40, 1, 2000]])
def test_a_sample_comes_again_only_after_all_others_of_its_class(sizes):
    """Over epochs, too: each stretch of a class's draws that is one pass long holds each of its samples once."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    drawn = draws_of(labels, range(7), num_samples=len(sizes) * 300)
    for number, size in enumerate(sizes):
        of_class = drawn[labels[drawn] == number]
        passes = of_class[: of_class.size // size * size].reshape(-1, size)
        assert (np.sort(passes, axis=1) == np.flatnonzero(labels == number)).all()
        assert of_class.size == 7 * 300
        assert np.unique(of_class[: min(size, 2100)]).size == min(size, 2100)


@pytest.mark.parametrize("count", [5, 64, 65])
def test_every_class_is_equally_likely_at_every_place_of_a_run(count):
    runs = 40 * count
    drawn = Balanced(np.arange(count), num_samples=runs * count, seed=2).indices(1, 0, runs * count)
    counts = np.zeros((count, count), np.int64)
    np.add.at(counts, (np.tile(np.arange(count), runs), drawn), 1)
    assert_even(counts)


@pytest.mark.parametrize("size", [4, 32, 33, 150])
def test_every_sample_of_a_class_is_equally_likely_at_every_place_of_a_pass(size):
    passes = 30 * size
    drawn = draws_of(np.zeros(size, np.int64), range(3), num_samples=passes * size).reshape(-1, size)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (np.arange(size), drawn), 1)
    assert_even(counts)


@pytest.mark.parametrize("size", [32, 33, 500])
def test_neighbours_in_a_pass_are_no_neighbours_in_the_data(size):
    """The step from one sample to the next, modulo the size of the class, takes each value but 0 equally often."""
    drawn = draws_of(np.zeros(size, np.int64), range(1), num_samples=size * 200).reshape(-1, size)
    counts = np.bincount((np.diff(drawn, axis=1) % size).ravel(), minlength=size)
    assert counts[0] == 0
    assert_even(counts[1:])


def test_all_orders_of_four_samples_are_equally_likely():
    drawn = draws_of(np.zeros(4, np.int64), range(1), num_samples=20_000).reshape(-1, 4)
    ranks = np.bincount(drawn @ 4 ** np.arange(4), minlength=256)
    assert np.count_nonzero(ranks) == math.factorial(4)
    assert_even(ranks[ranks > 0])


def test_classes_do_not_move_together():
    """Two classes of one size have the same place of a pass at the same sample as often as by chance."""
    drawn = draws_of(np.arange(80) % 2, range(1), num_samples=80 * 300)
    places = [drawn[drawn % 2 == number] // 2 for number in (0, 1)]
    counts = np.bincount((places[0] - places[1]) % 40, minlength=40)
    assert_even(counts)


def test_epochs_and_seeds_differ():
    labels = np.arange(3000) % 10
    assert_unlike([Balanced(labels, seed=seed).indices(epoch, 0, 3000) for seed in (0, 1, 2**33) for epoch in range(4)])


def test_far_epochs_are_balanced_too():
    for epoch in (2**62, 2**64 + 3):
        drawn = Balanced(SKEWED, num_samples=400).indices(epoch, 0, 400)
        assert np.bincount(SKEWED[drawn]).tolist() == [100] * 4


@pytest.mark.parametrize("as_type", [list, np.asarray, torch.as_tensor, lambda labels: np.asarray(labels, np.uint8)])
def test_lists_tensors_and_arrays_of_any_whole_type_are_labels(as_type):
    labels = [3, 1, 1, 0, 3, 3]
    assert np.array_equal(draws_of(as_type(labels), range(2)), draws_of(np.array(labels), range(2)))


GOLDEN = [
    ([0, 1, 1, 0, 1, 1, 1], 7, [0, 4, 3, 2, 5, 3, 5]),
    ([number % 100 % 30 for number in range(3000)], 3000, [2828, 795, 2197, 1536, 212, 639, 760, 1114]),
    ([number % 700 for number in range(30_000)], 30000, [19825, 29161, 6322, 1203, 4947, 17795, 21729, 23474]),
]


@pytest.mark.parametrize(("labels", "num_samples", "expected"), GOLDEN)
def test_orders_never_change_between_versions(labels, num_samples, expected):
    """Checkpoints of earlier versions rely on these values: a change here breaks every resumed run."""
    order = Balanced(labels, num_samples=num_samples, seed=7)
    assert order.indices(3, 0, len(expected)).tolist() == expected


REFUSED = [
    ([], {}, "shape (0,)"),
    ([[1]], {}, "shape (1, 1)"),
    ([1.0], {}, "type float64"),
    (["cat"], {}, "type <U3"),
    ([[1], [1, 2]], {}, "in a list that NumPy cannot read"),
    ([1], {"num_samples": 0}, "num_samples=0"),
    ([1], {"seed": -3}, "seed=-3"),
]


@pytest.mark.parametrize(("labels", "options", "found"), REFUSED, ids=[found for *_, found in REFUSED])
def test_labels_that_are_no_classes_are_refused(labels, options, found):
    with pytest.raises(InvalidOption, match="Cannot make a Balanced order") as raised:
        Balanced(labels, **options)
    assert found in str(raised.value)

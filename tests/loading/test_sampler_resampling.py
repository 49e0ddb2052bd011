"""Balanced orders draw all classes equally often; weighted orders draw samples in proportion to their weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_as_likely, assert_chi_square, assert_even
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.loading.sampler import resampling
from colabkit.loading.sampler.resampling import BalancedOrder, WeightedOrder

WEIGHTS = np.array([3.0, 0, 1, 0.25, 0, 8, 2, 0])
SKEWED = np.repeat(np.arange(4), [1, 6, 50, 900])


def draws_of(labels: np.ndarray, epochs: range, **options: int) -> np.ndarray:
    order = BalancedOrder(labels, **options)
    return np.concatenate([order.indices(epoch, 0, len(order)) for epoch in epochs])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 90), min_size=1, max_size=300), st.integers(1, 2000), st.integers(0, 2**40))
def test_each_run_of_all_classes_holds_every_class_once(labels, num_samples, epoch):
    kinds, classes = np.unique(labels, return_inverse=True)
    drawn = classes[BalancedOrder(labels, num_samples=num_samples).indices(epoch, 0, num_samples)]
    for start in range(0, num_samples, kinds.size):
        run = drawn[start : start + kinds.size]
        assert np.unique(run).size == run.size


def test_every_class_comes_equally_often_for_any_size():
    drawn = SKEWED[draws_of(SKEWED, range(3), num_samples=1000)]
    assert np.bincount(drawn).tolist() == [750] * 4


@pytest.mark.parametrize("sizes", [[1, 6, 50, 900], [33, 32, 31], [1] * 80, [40, 1, 2000]])
def test_a_sample_repeats_only_after_all_others_of_its_class(sizes):
    """Even across epochs, each pass through a class contains each of its samples once."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    drawn = draws_of(labels, range(7), num_samples=len(sizes) * 300)
    for number, size in enumerate(sizes):
        of_class = drawn[labels[drawn] == number]
        passes = of_class[: of_class.size // size * size].reshape(-1, size)
        assert (np.sort(passes, axis=1) == np.flatnonzero(labels == number)).all()
        assert of_class.size == 7 * 300
        assert np.unique(of_class[: min(size, 2100)]).size == min(size, 2100)


@pytest.mark.parametrize("count", [5, 64, 65])
def test_every_class_is_equally_likely_at_every_position_of_a_run(count):
    runs = 40 * count
    drawn = BalancedOrder(np.arange(count), num_samples=runs * count, seed=2).indices(1, 0, runs * count)
    counts = np.zeros((count, count), np.int64)
    np.add.at(counts, (np.tile(np.arange(count), runs), drawn), 1)
    assert_even(counts)


@pytest.mark.parametrize("size", [4, 32, 33, 150])
def test_every_sample_of_a_class_is_equally_likely_at_every_position_of_a_pass(size):
    passes = 30 * size
    drawn = draws_of(np.zeros(size, np.int64), range(3), num_samples=passes * size).reshape(-1, size)
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (np.arange(size), drawn), 1)
    assert_even(counts)


@pytest.mark.parametrize("size", [32, 33, 500])
def test_neighbors_in_a_pass_are_not_neighbors_in_the_data(size):
    """The difference of consecutive samples, modulo the class size, takes each value except 0 equally often."""
    drawn = draws_of(np.zeros(size, np.int64), range(1), num_samples=size * 200).reshape(-1, size)
    counts = np.bincount((np.diff(drawn, axis=1) % size).ravel(), minlength=size)
    assert counts[0] == 0
    assert_even(counts[1:])


def test_all_orders_of_four_samples_are_equally_likely():
    drawn = draws_of(np.zeros(4, np.int64), range(1), num_samples=20_000).reshape(-1, 4)
    ranks = np.bincount(drawn @ 4 ** np.arange(4), minlength=256)
    assert np.count_nonzero(ranks) == math.factorial(4)
    assert_even(ranks[ranks > 0])


def test_classes_are_shuffled_independently():
    """At any position of a pass, two classes of equal size have samples with the same index only by chance."""
    drawn = draws_of(np.arange(80) % 2, range(1), num_samples=80 * 300)
    places = [drawn[drawn % 2 == number] // 2 for number in (0, 1)]
    counts = np.bincount((places[0] - places[1]) % 40, minlength=40)
    assert_even(counts)


def test_late_epochs_are_balanced_too():
    for epoch in (2**62, 2**64 + 3):
        drawn = BalancedOrder(SKEWED, num_samples=400).indices(epoch, 0, 400)
        assert np.bincount(SKEWED[drawn]).tolist() == [100] * 4


@pytest.mark.parametrize("epoch", [0, 1, 2**40])
def test_samples_come_in_proportion_to_their_weights(epoch):
    order = WeightedOrder(WEIGHTS, num_samples=100_000, seed=4)
    counts = np.bincount(order.indices(epoch, 0, 100_000), minlength=8)
    assert (counts[WEIGHTS == 0] == 0).all()
    assert_as_likely(counts[WEIGHTS > 0], WEIGHTS[WEIGHTS > 0])


def test_pairs_of_neighbors_come_in_proportion_to_the_product_of_their_weights():
    weights = np.array([1.0, 2, 3])
    draws = WeightedOrder(weights, num_samples=90_001).indices(0, 0, 90_001)
    counts = np.bincount(draws[:-1] * 3 + draws[1:], minlength=9)
    expected = 90_000 * np.outer(weights, weights).ravel() / 36
    # The pairs overlap, so use the serial test: subtracting the statistic of single draws leaves 9 - 3 degrees of
    # freedom.
    singles = np.bincount(draws[:-1], minlength=3)
    alone = 90_000 * weights / 6
    serial = ((counts - expected) ** 2 / expected).sum() - ((singles - alone) ** 2 / alone).sum()
    assert_chi_square(serial, 6)


@pytest.mark.parametrize("scale", [1, 1e-300, 1e300, 5e-324])
def test_only_the_ratios_of_weights_matter(scale):
    weights = np.array([0, 1.0, 0, 2, 0]) * scale
    draws = WeightedOrder(weights, num_samples=30_000).indices(0, 0, 30_000)
    assert np.array_equal(draws, WeightedOrder([0, 1, 0, 2, 0], num_samples=30_000).indices(0, 0, 30_000))


def test_samples_of_weight_0_at_the_ends_are_never_drawn():
    weights = np.zeros(1000)
    weights[500] = 1e-9
    assert set(WeightedOrder(weights, num_samples=10_000).indices(0, 0, 10_000).tolist()) == {500}
    assert WeightedOrder(weights, replacement=False).indices(0, 0, 1).tolist() == [500]


def test_a_draw_on_a_border_takes_the_sample_above_it(monkeypatch):
    """If a border belonged to the sample below, a draw of exactly 0 would return a first sample of weight 0."""
    monkeypatch.setattr(resampling, "uniforms", lambda words: np.array([0, 0.25, 0.5, 1 - 2.0**-53]))
    assert WeightedOrder([0, 1, 0, 1, 2, 0], num_samples=4).indices(0, 0, 4).tolist() == [1, 3, 4, 4]


def test_equal_weights_draw_all_samples_equally_often():
    draws = WeightedOrder(np.ones(777), num_samples=100_000).indices(3, 0, 100_000)
    assert_even(np.bincount(draws, minlength=777))


def test_without_replacement_every_sample_above_0_comes_once():
    order = WeightedOrder(WEIGHTS, replacement=False)
    assert len(order) == 5
    for epoch in range(20):
        assert sorted(order.indices(epoch, 0, 5).tolist()) == [0, 2, 3, 5, 6]


@pytest.mark.full
def test_without_replacement_pairs_are_as_likely_as_drawing_from_the_remaining_samples():
    weights = np.array([1.0, 2, 3, 6])
    counts = np.zeros((4, 4))
    for epoch in range(12_000):
        first, second = WeightedOrder(weights, num_samples=2, seed=epoch % 3, replacement=False).indices(epoch, 0, 2)
        counts[first, second] += 1
    chances = np.outer(weights / 12, weights) / (12 - weights)[:, None]
    others = ~np.eye(4, dtype=bool)
    assert not counts.diagonal().any()
    assert_as_likely(counts[others], chances[others])


def test_weights_too_small_to_divide_by_are_still_above_0():
    order = WeightedOrder([5e-324, 0, 1, 0, 1e-320], replacement=False)
    assert sorted(order.indices(0, 0, 3).tolist()) == [0, 2, 4]


def test_the_logarithm_agrees_with_the_library_to_a_few_last_bits():
    """The package computes logarithms with operations that return the same bits on every machine."""
    words = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    expected = -np.log((words >> np.uint64(11)) * 2.0**-53 + 2.0**-54)
    assert np.allclose(resampling._exponential(words), expected, rtol=2e-15, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda values: BalancedOrder(values, seed=1),
        lambda values: WeightedOrder(values, seed=1),
        lambda values: WeightedOrder(values, seed=1, replacement=False),
    ],
)
def test_lists_tensors_and_arrays_of_any_type_are_labels_and_weights(make):
    values = [3, 1, 1, 0, 3, 3]
    expected = make(values).indices(1, 0, 5).tolist()
    for given_as in (np.array(values), torch.tensor(values), np.array(values, np.uint8)):
        assert make(given_as).indices(1, 0, 5).tolist() == expected
    if "WeightedOrder" in repr(make(values)):
        assert make(torch.tensor(values, dtype=torch.float32)).indices(1, 0, 5).tolist() == expected


def test_later_changes_of_the_weights_change_nothing():
    weights = np.array([1.0, 2, 3])
    order = WeightedOrder(weights, num_samples=100)
    weights[:] = 0, 0, 1
    assert len(set(order.indices(0, 0, 100).tolist())) == 3
    with pytest.raises(ValueError, match="read-only"):
        order.weights[0] = 7

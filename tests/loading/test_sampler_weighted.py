"""Draws by weight: as often as weights say, never at weight 0, and the same for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_as_likely, assert_chi_square, assert_even

from colabkit.errors import InvalidOption
from colabkit.loading.sampler import resampling
from colabkit.loading.sampler.resampling import Weighted

WEIGHTS = np.array([3.0, 0, 1, 0.25, 0, 8, 2, 0])


@pytest.mark.parametrize("epoch", [0, 1, 2**40])
def test_samples_come_as_often_as_their_weights_say(epoch):
    order = Weighted(WEIGHTS, num_samples=100_000, seed=4)
    counts = np.bincount(order.indices(epoch, 0, 100_000), minlength=8)
    assert (counts[WEIGHTS == 0] == 0).all()
    assert_as_likely(counts[WEIGHTS > 0], WEIGHTS[WEIGHTS > 0])


def test_pairs_of_neighbours_come_as_often_as_the_product_of_their_weights():
    weights = np.array([1.0, 2, 3])
    draws = Weighted(weights, num_samples=90_001).indices(0, 0, 90_001)
    counts = np.bincount(draws[:-1] * 3 + draws[1:], minlength=9)
    expected = 90_000 * np.outer(weights, weights).ravel() / 36
    # Overlapping pairs: the statistic of serial tests has 9 - 3 degrees of freedom after that of single draws.
    singles = np.bincount(draws[:-1], minlength=3)
    alone = 90_000 * weights / 6
    serial = ((counts - expected) ** 2 / expected).sum() - ((singles - alone) ** 2 / alone).sum()
    assert_chi_square(serial, 6)


@pytest.mark.parametrize("scale", [1, 1e-300, 1e300, 5e-324])
def test_only_the_ratios_of_weights_count(scale):
    weights = np.array([0, 1.0, 0, 2, 0]) * scale
    draws = Weighted(weights, num_samples=30_000).indices(0, 0, 30_000)
    assert np.array_equal(draws, Weighted([0, 1, 0, 2, 0], num_samples=30_000).indices(0, 0, 30_000))


def test_samples_of_weight_0_at_the_ends_are_never_drawn():
    weights = np.zeros(1000)
    weights[500] = 1e-9
    assert set(Weighted(weights, num_samples=10_000).indices(0, 0, 10_000).tolist()) == {500}
    assert Weighted(weights, replacement=False).indices(0, 0, 1).tolist() == [500]


def test_a_draw_on_a_border_takes_the_sample_above_it(monkeypatch):
    """Or a draw of exactly 0 would take a first sample of weight 0."""
    monkeypatch.setattr(resampling, "uniforms", lambda words: np.array([0, 0.25, 0.5, 1 - 2.0**-53]))
    assert Weighted([0, 1, 0, 1, 2, 0], num_samples=4).indices(0, 0, 4).tolist() == [1, 3, 4, 4]


def test_equal_weights_draw_all_samples_equally_often():
    draws = Weighted(np.ones(777), num_samples=100_000).indices(3, 0, 100_000)
    assert_even(np.bincount(draws, minlength=777))


def test_without_replacement_every_sample_above_0_comes_once():
    order = Weighted(WEIGHTS, replacement=False)
    assert len(order) == 5
    for epoch in range(20):
        assert sorted(order.indices(epoch, 0, 5).tolist()) == [0, 2, 3, 5, 6]


def test_without_replacement_pairs_are_as_likely_as_drawing_from_what_is_left():
    weights = np.array([1.0, 2, 3, 6])
    counts = np.zeros((4, 4))
    for epoch in range(12_000):
        first, second = Weighted(weights, num_samples=2, seed=epoch % 3, replacement=False).indices(epoch, 0, 2)
        counts[first, second] += 1
    chances = np.outer(weights / 12, weights) / (12 - weights)[:, None]
    others = ~np.eye(4, dtype=bool)
    assert not counts.diagonal().any()
    assert_as_likely(counts[others], chances[others])


def test_weights_too_small_to_divide_by_are_still_above_0():
    order = Weighted([5e-324, 0, 1, 0, 1e-320], replacement=False)
    assert sorted(order.indices(0, 0, 3).tolist()) == [0, 2, 4]


def test_the_logarithm_is_that_of_the_library_to_a_few_last_bits():
    """It is made of operations that are exact to the last bit on every machine."""
    words = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    expected = -np.log((words >> np.uint64(11)) * 2.0**-53 + 2.0**-54)
    assert np.allclose(resampling._exponential(words), expected, rtol=2e-15, atol=0)


@pytest.mark.parametrize("replacement", [True, False])
def test_lists_tensors_and_arrays_of_any_type_are_weights(replacement):
    orders = [
        Weighted(given, seed=1, replacement=replacement).indices(0, 0, 3).tolist()
        for given in (
            [1, 2, 0, 4],
            torch.tensor([1, 2, 0, 4]),
            torch.tensor([1.0, 2, 0, 4]),
            np.array([1, 2, 0, 4.0]),
        )
    ]
    assert all(order == orders[0] for order in orders)


def test_later_changes_of_the_weights_change_nothing():
    weights = np.array([1.0, 2, 3])
    order = Weighted(weights, num_samples=100)
    weights[:] = 0, 0, 1
    assert len(set(order.indices(0, 0, 100).tolist())) == 3
    with pytest.raises(ValueError, match="read-only"):
        order.weights[0] = 7


GOLDEN = [
    ([1, 0, 2, 5], 100, True, [2, 3, 3, 3, 3, 3, 3, 3]),
    (list(range(1, 2001)), 2000, True, [840, 1885, 1685, 1908, 1485, 1797, 1227, 1910]),
    ([1, 0, 2, 5], 3, False, [3, 0, 2]),
    (list(range(1, 2001)), 2000, False, [1252, 1508, 1185, 899, 1491, 1511, 824, 1762]),
]


@pytest.mark.parametrize(("weights", "num_samples", "replacement", "expected"), GOLDEN)
def test_orders_never_change_between_versions(weights, num_samples, replacement, expected):
    """Checkpoints of earlier versions rely on these values: a change here breaks every resumed run."""
    order = Weighted(weights, num_samples=num_samples, seed=7, replacement=replacement)
    assert order.indices(3, 0, len(expected)).tolist() == expected


REFUSED = [
    ([], {}, "shape (0,)"),
    ([[1.0]], {}, "shape (1, 1)"),
    ([1, -1], {}, "from -1.0 to 1.0"),
    ([1, math.nan], {}, "nan"),
    ([1, math.inf], {}, "inf"),
    ([1e308, 1e308], {}, "add up to inf"),
    ([0, 0], {}, "add up to 0.0"),
    (["a"], {}, "NumPy cannot read"),
    (torch.ones(2, requires_grad=True), {}, "in a Tensor that NumPy cannot read"),
    ([1, 1], {"num_samples": 0}, "num_samples=0"),
    ([1, 1], {"seed": 1.5}, "seed=1.5"),
    ([1, 0, 1], {"num_samples": 3, "replacement": False}, "num_samples=3, a whole number from 1 to 2"),
]


@pytest.mark.parametrize(("weights", "options", "found"), REFUSED, ids=[found for *_, found in REFUSED])
def test_weights_that_cannot_be_meant_are_refused(weights, options, found):
    with pytest.raises(InvalidOption, match="Cannot make a Weighted order") as raised:
        Weighted(weights, **options)
    assert found in str(raised.value)

"""The order of an epoch: a permutation, pure, the same on every machine for ever, and as even as chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.errors import InvalidOption
from colabkit.foundation import permutation as network
from colabkit.foundation.permutation import epoch_order
from colabkit.foundation.random_numbers import key_of, round_keys

SIZES = st.one_of(st.integers(0, 40), st.integers(1000, 6000), st.integers(2**16 - 20, 2**16 + 2000))
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)


@pytest.fixture(params=["sorted", "network"])
def way(request, monkeypatch):
    """Makes orders of 1,500 samples both as those of few and as those of many are made."""
    if request.param == "network":
        monkeypatch.setattr(network, "_SORTED_UP_TO", 1024)


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return epoch_order(n, seed, epoch, 0, n)


def assert_even(counts: np.ndarray) -> None:
    """Hold counts of equally likely cells to 4.5 standard deviations of chi-square: by chance 1 fails in 100,000."""
    expected = counts.sum() / counts.size
    assert expected >= 5
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    free = counts.size - 1
    assert abs(chi_square - free) < 4.5 * math.sqrt(2 * free)


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_every_sample_comes_exactly_once(n, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))
    with pytest.MonkeyPatch.context() as patch:  # on the small grids that have many shapes, too
        patch.setattr(network, "_SORTED_UP_TO", 1024)
        assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, EPOCHS, st.data())
def test_any_range_is_a_slice_of_the_whole(n, seed, epoch, data):
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    part = epoch_order(n, seed, epoch, start, stop)
    assert part.dtype == np.int64
    assert np.array_equal(part, whole(n, seed, epoch)[start:stop])


@settings(max_examples=30, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_the_order_depends_on_its_arguments_alone(n, seed, epoch):
    first = whole(n, seed, epoch)
    np.random.seed(1)
    whole(n, seed + 1, epoch)
    expected = first.copy()
    first[:] = -1  # the result is the caller's own
    assert np.array_equal(whole(n, seed, epoch), expected)


@pytest.mark.parametrize("n", [7, 1500])
def test_numpy_integers_are_integers(n):
    for kind in (np.int64, np.uint64, np.int32):
        assert np.array_equal(epoch_order(kind(n), np.int64(-3), np.int32(5), 0, n), whole(n, -3, 5))


GOLDEN = [
    (5, 0, 0, 0, [0, 3, 2, 1, 4]),
    (5, 0, 1, 0, [0, 3, 1, 4, 2]),
    (10, 1, 0, 0, [9, 2, 7, 1, 3, 8, 0, 6]),
    (1024, 3, 3, 1016, [572, 382, 977, 832, 23, 383, 387, 668]),
    (2**16, 3, 3, 2**16 - 8, [3544, 27301, 7618, 4679, 28194, 58141, 50199, 25879]),
    (2**16 + 1, 3, 3, 2**16 - 7, [21993, 47601, 37330, 56285, 35070, 25587, 9301, 47470]),
    (100_000, 42, 3, 0, [30121, 57186, 81690, 25261, 73801, 62847, 71061, 2540]),
    (10**9, 7, 1, 123, [834652412, 649681639, 951183028, 500400603, 882087491, 133851038, 138306631, 788352070]),
    (2**40, -7, 1, 2**39, [660197456513, 539735056498, 293223557066, 931232089667]),
]


@pytest.mark.parametrize(("n", "seed", "epoch", "start", "expected"), GOLDEN)
def test_orders_never_change_between_versions(n, seed, epoch, start, expected):
    """Checkpoints of earlier versions rely on these values: a change here breaks every resumed run."""
    assert epoch_order(n, seed, epoch, start, start + len(expected)).tolist() == expected


@pytest.mark.parametrize("n", [30, 1024, 1025, 5000])
def test_epochs_and_seeds_differ(n, way):
    orders = [whole(n, seed, epoch) for seed in (0, 1, 2**33) for epoch in range(4)]
    orders.append(np.arange(n))
    matches = [float((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(matches) <= 8  # two random orders agree at 1 place on average
    assert 0.5 < np.mean(matches) < 1.6


def test_epochs_share_no_round_keys():
    keys = [key for epoch in range(200) for key in round_keys(key_of(5, epoch), 8)]
    assert len(set(keys)) == len(keys)


def test_all_orders_of_five_samples_are_equally_likely():
    ranks = np.zeros(5**5, np.int64)
    for seed in range(6000):
        ranks[int(whole(5, seed, seed % 3) @ 5 ** np.arange(5))] += 1
    assert np.count_nonzero(ranks) == math.factorial(5)
    assert_even(ranks[ranks > 0])


@pytest.mark.parametrize("epochs", [False, True])
def test_every_one_of_fifty_samples_is_equally_likely_at_every_place(epochs):
    counts = np.zeros((50, 50), np.int64)
    for number in range(1500):
        counts[np.arange(50), whole(50, 0, number) if epochs else whole(50, number)] += 1
    assert_even(counts)


def test_samples_of_a_large_set_are_equally_likely_at_every_place(way):
    """Places and samples of 1,500 in 30 x 30 cells over 300 orders."""
    counts = np.zeros((30, 30), np.int64)
    for number in range(300):
        order = whole(1500, number % 7, number)
        np.add.at(counts, (np.arange(1500) // 50, order // 50), 1)
    assert_even(counts)


@pytest.mark.parametrize("n", [50, 1500])
def test_neighbours_in_an_order_are_no_neighbours_in_the_data(n, way):
    """The step from one sample to the next, modulo n, takes each value but 0 equally often."""
    counts = np.zeros(n, np.int64)
    for number in range(20_000 // n + 20):
        order = whole(n, number, 1)
        np.add.at(counts, np.diff(order) % n, 1)
    assert counts[0] == 0
    assert_even(counts[1:])


@pytest.mark.parametrize("apart", [1, 2])
def test_an_epoch_tells_nothing_about_the_next(apart, way):
    """How far each sample of 1,500 moves from one epoch to a later one takes each value equally often."""
    counts = np.zeros(1500, np.int64)
    for epoch in range(20):
        places = np.argsort(whole(1500, 1, epoch))
        later = np.argsort(whole(1500, 1, epoch + apart))
        np.add.at(counts, (later - places) % 1500, 1)
    assert_even(counts)


@pytest.mark.parametrize("n", [10**9, 2**40, 2**62])
def test_huge_sets_are_ordered_in_the_time_of_the_range(n):
    for start in (0, n // 3, n - 1000):
        order = epoch_order(n, 1, 2, start, start + 1000)
        assert np.unique(order).size == 1000
        assert 0 <= order.min() < n // 50
        assert n - n // 50 < order.max() < n
        assert np.array_equal(order[10:20], epoch_order(n, 1, 2, start + 10, start + 20))


@pytest.mark.parametrize(
    ("n", "start", "stop"), [(5, -1, 3), (5, 3, 2), (5, 0, 6), (-1, 0, 0), (0, 0, 1), (2**62 + 1, 0, 1)]
)
def test_a_range_outside_is_refused(n, start, stop):
    with pytest.raises(InvalidOption, match=f"Cannot order positions {start} to {stop}"):
        epoch_order(n, 0, 0, start, stop)


def test_empty_and_single_sets_have_one_order():
    assert whole(0).tolist() == []
    assert whole(1, 9, 9).tolist() == [0]

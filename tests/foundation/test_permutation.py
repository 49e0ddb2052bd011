"""The order of an epoch: a pure, uniform permutation that is the same on every machine and in every version.

The order is computed by sorting, by tables or by hashing. `permute_each` uses a separate permutation for each position.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from distributions import assert_even, assert_unlike
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.errors import InvalidOption
from colabkit.foundation import permutation as network
from colabkit.foundation.permutation import epoch_order
from colabkit.foundation.random_numbers import hashed, key_of, round_keys, uniforms

SIZES = st.one_of(st.integers(0, 40), st.integers(1000, 6000), st.integers(2**16 - 20, 2**16 + 2000))
SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)


@pytest.fixture(params=["sorted", "network"])
def way(request, monkeypatch):
    """Compute orders of 1,500 samples by sorting, as for small sets, and by the network, as for large ones."""
    if request.param == "network":
        monkeypatch.setattr(network, "_SORTED_UP_TO", 1024)


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return epoch_order(n, seed, epoch, 0, n)


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_every_sample_comes_exactly_once(n, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))
    # Also test small grids, whose shapes vary most.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_SORTED_UP_TO", 1024)
        assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(SIZES, SEEDS, EPOCHS, st.data())
def test_any_range_is_a_slice_of_the_whole_order(n, seed, epoch, data):
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    part = epoch_order(n, seed, epoch, start, stop)
    assert part.dtype == np.int64
    assert np.array_equal(part, whole(n, seed, epoch)[start:stop])


@settings(max_examples=30, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_the_order_depends_only_on_its_arguments(n, seed, epoch):
    first = whole(n, seed, epoch)
    np.random.seed(1)
    whole(n, seed + 1, epoch)
    expected = first.copy()
    # Modifying a result must not affect later results.
    first[:] = -1
    assert np.array_equal(whole(n, seed, epoch), expected)


def test_numpy_integers_are_integers_and_empty_and_single_sets_have_one_order():
    assert whole(0).tolist() == []
    assert whole(1, 9, 9).tolist() == [0]
    for n in (7, 1500):
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
    (1_281_167, 1, 2, 700_000, [1091743, 925237, 940566, 486698, 679443, 1017214]),
    (4096**2, 1, 2, 5, [14195495, 7893552, 1151636, 5813495, 7176806, 8088104]),
    (4096**2 + 1, 1, 2, 5, [5656845, 7893552, 6569704, 15321667, 9892788, 8088104]),
    (10**9, 7, 1, 123, [834652412, 649681639, 951183028, 500400603, 882087491, 133851038, 138306631, 788352070]),
    (2**40, -7, 1, 2**39, [660197456513, 539735056498, 293223557066, 931232089667]),
]


def test_orders_never_change_between_versions():
    """Checkpoints of earlier versions rely on these values, so a change breaks every resumed run."""
    for n, seed, epoch, start, expected in GOLDEN:
        assert epoch_order(n, seed, epoch, start, start + len(expected)).tolist() == expected


@pytest.mark.parametrize("n", [30, 1024, 1025, 5000])
def test_epochs_and_seeds_differ(n, way):
    orders = [whole(n, seed, epoch) for seed in (0, 1, 2**33) for epoch in range(4)]
    assert_unlike([*orders, np.arange(n)])


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
def test_each_of_fifty_samples_is_equally_likely_at_every_position(epochs):
    counts = np.zeros((50, 50), np.int64)
    for number in range(1500):
        counts[np.arange(50), whole(50, 0, number) if epochs else whole(50, number)] += 1
    assert_even(counts)


def test_samples_of_a_large_set_are_equally_likely_at_every_position(way):
    """Count positions and samples in 30 x 30 cells over 300 orders of 1,500 samples."""
    counts = np.zeros((30, 30), np.int64)
    for number in range(300):
        order = whole(1500, number % 7, number)
        np.add.at(counts, (np.arange(1500) // 50, order // 50), 1)
    assert_even(counts)


@pytest.mark.parametrize("n", [50, 1500])
def test_neighbors_in_an_order_are_independent_of_neighbors_in_the_data(n, way):
    """The difference of consecutive samples, modulo n, takes each value except 0 equally often."""
    counts = np.zeros(n, np.int64)
    for number in range(20_000 // n + 20):
        order = whole(n, number, 1)
        np.add.at(counts, np.diff(order) % n, 1)
    assert counts[0] == 0
    assert_even(counts[1:])


@pytest.mark.parametrize("apart", [1, 2])
def test_epochs_are_independent(apart, way):
    """The distances by which 1,500 samples move between two epochs are evenly distributed."""
    counts = np.zeros(1500, np.int64)
    for epoch in range(20):
        places = np.argsort(whole(1500, 1, epoch))
        later = np.argsort(whole(1500, 1, epoch + apart))
        np.add.at(counts, (later - places) % 1500, 1)
    assert_even(counts)


@pytest.mark.parametrize("n", [10**9, 2**40, 2**62])
def test_the_time_for_a_range_does_not_depend_on_the_size_of_the_set(n):
    for start in (0, n // 3, n - 1000):
        order = epoch_order(n, 1, 2, start, start + 1000)
        assert np.unique(order).size == 1000
        assert 0 <= order.min() < n // 50
        assert n - n // 50 < order.max() < n
        assert np.array_equal(order[10:20], epoch_order(n, 1, 2, start + 10, start + 20))


def test_an_invalid_range_is_rejected():
    for n, start, stop in ((5, -1, 3), (5, 3, 2), (5, 0, 6), (-1, 0, 0), (0, 0, 1), (2**62 + 1, 0, 1)):
        with pytest.raises(InvalidOption, match=f"Cannot order positions {start} to {stop}"):
            epoch_order(n, 0, 0, start, stop)


@pytest.mark.parametrize("n", [2**16 + 1, 256 * 257, 257**2, 100_000, 2**20, 4096**2 - 5, 4096**2, 4096**2 + 1])
def test_tables_contain_the_values_of_the_hash(n, monkeypatch):
    starts = (0, (n - 1000) // 2, n - 1000)
    by_tables = [epoch_order(n, 5, 6, start, start + 1000) for start in starts]
    monkeypatch.setattr(network, "_TABLES_UP_TO", 0)
    for start, order in zip(starts, by_tables, strict=True):
        assert np.array_equal(epoch_order(n, 5, 6, start, start + 1000), order)


def permutations(size: int, count: int, key: int = 1) -> np.ndarray:
    """Return `count` permutations of `range(size)`, `[count, size]`."""
    positions = np.tile(np.arange(size), count)
    network.permute_each(positions, np.full_like(positions, size), hashed(key, np.arange(count)).repeat(size))
    return positions.reshape(count, size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=30), st.integers(0, 2**63))
def test_permutations_computed_together_equal_those_computed_alone(sizes, key):
    keys = hashed(key, np.arange(len(sizes)))
    positions = np.concatenate([np.arange(size) for size in sizes])
    network.permute_each(positions, np.repeat(sizes, sizes), keys.repeat(sizes))
    start = 0
    for size, own_key in zip(sizes, keys, strict=True):
        alone = np.arange(size)
        network.permute_each(alone, np.full_like(alone, size), np.full(size, own_key))
        assert np.array_equal(positions[start : start + size], alone)
        assert np.array_equal(np.sort(alone), np.arange(size))
        start += size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_samples_are_equally_likely(size):
    ranks = np.bincount(permutations(size, 20_000) @ size ** np.arange(size), minlength=size**size)
    assert np.count_nonzero(ranks) == math.factorial(size)
    assert_even(ranks[ranks > 0])


@pytest.mark.parametrize("size", [31, 7, 36, 37, 64, 100, 32, 33])
@pytest.mark.parametrize("apart", [1, 2, 3])
def test_pairs_of_positions_contain_all_pairs_equally_often(size, apart):
    """Count the pairs at positions 0 and `apart`, with 10 times as many pairs as cells."""
    found = permutations(size, 10 * size * size, key=apart)
    pairs = np.bincount(found[:, 0] * size + found[:, apart], minlength=size * size).reshape(size, size)
    assert not pairs.diagonal().any()
    assert_even(pairs[~np.eye(size, dtype=bool)])


def test_random_words_equal_those_of_splitmix64():
    """Compare with the reference implementation's first outputs for seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hashed(1234567, np.arange(1, 5)).tolist() == expected
    assert [hashed(1234567, np.array(number)).item() for number in range(1, 5)] == expected


def test_keys_depend_on_each_number_and_their_order():
    keys = {key_of(*numbers) for numbers in [(5,), (5, 1), (1, 5), (5, 0, 1), (5, 1, 0), (-1,), (-1, 2**63)]}
    assert len(keys) == 7


def test_uniform_numbers_are_evenly_distributed_below_1():
    numbers = uniforms(hashed(3, np.arange(100_000)))
    assert_even(np.bincount((numbers * 1000).astype(int), minlength=1000))
    assert uniforms(np.array([2**64 - 1, 0], np.uint64)).tolist() == [1 - 2.0**-53, 0.0]

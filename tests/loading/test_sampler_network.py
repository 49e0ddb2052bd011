"""The networks of the sampler: one permutation by tables and by words, and one of its own at each position."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sampled
from test_sampler import assert_even

from colabkit.foundation import permutation as network
from colabkit.foundation.permutation import epoch_order
from colabkit.foundation.random_numbers import hashed, key_of, uniforms


@pytest.mark.parametrize("n", [2**16 + 1, 256 * 257, 257**2, 100_000, 2**20, 4096**2 - 5, 4096**2, 4096**2 + 1])
def test_tables_hold_what_words_would_give(n, monkeypatch):
    """Up to the largest grid that has tables, and with cells beyond n, none, and as many as there can be."""
    starts = (0, (n - 1000) // 2, n - 1000)
    by_tables = [epoch_order(n, 5, 6, start, start + 1000) for start in starts]
    monkeypatch.setattr(network, "_TABLES_UP_TO", 0)
    for start, order in zip(starts, by_tables, strict=True):
        assert np.array_equal(epoch_order(n, 5, 6, start, start + 1000), order)


GOLDEN = [
    (1_281_167, 1, 2, 700_000, [1091743, 925237, 940566, 486698, 679443, 1017214]),
    (4096**2, 1, 2, 5, [14195495, 7893552, 1151636, 5813495, 7176806, 8088104]),
    (4096**2 + 1, 1, 2, 5, [5656845, 7893552, 6569704, 15321667, 9892788, 8088104]),
]


@pytest.mark.parametrize(("n", "seed", "epoch", "start", "expected"), GOLDEN)
def test_orders_on_both_sides_of_the_largest_table_never_change(n, seed, epoch, start, expected):
    assert epoch_order(n, seed, epoch, start, start + len(expected)).tolist() == expected


def permutations(size: int, count: int, key: int = 1) -> np.ndarray:
    """Return permutations of [0, size), `[count, size]`."""
    positions = np.tile(np.arange(size), count)
    network.permute_each(positions, np.full_like(positions, size), hashed(key, np.arange(count)).repeat(size))
    return positions.reshape(count, size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=30), st.integers(0, 2**63))
def test_permutations_of_any_sizes_side_by_side_are_those_of_each_alone(sizes, key):
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
def test_all_permutations_of_few_are_equally_likely(size):
    ranks = np.bincount(permutations(size, 20_000) @ size ** np.arange(size), minlength=size**size)
    assert np.count_nonzero(ranks) == math.factorial(size)
    assert_even(ranks[ranks > 0])


@pytest.mark.parametrize("size", sampled([7, 31, 32, 33, 36, 37, 64, 100], 3))
@pytest.mark.parametrize("apart", sampled([1, 2, 3], 1))
def test_pairs_of_places_hold_all_pairs_equally_often(size, apart):
    """Places 0 and `apart`, and so each of them alone; the bound is that of 10 times more pairs than cells."""
    found = permutations(size, 10 * size * size, key=apart)
    pairs = np.bincount(found[:, 0] * size + found[:, apart], minlength=size * size).reshape(size, size)
    assert not pairs.diagonal().any()
    assert_even(pairs[~np.eye(size, dtype=bool)])


def test_words_are_those_of_splitmix64():
    """The first outputs for seed 1234567, as the reference implementation prints them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hashed(1234567, np.arange(1, 5)).tolist() == expected
    assert [hashed(1234567, np.array(number)).item() for number in range(1, 5)] == expected


def test_keys_differ_by_each_number_and_their_order():
    keys = {key_of(*numbers) for numbers in [(5,), (5, 1), (1, 5), (5, 0, 1), (5, 1, 0), (-1,), (-1, 2**63)]}
    assert len(keys) == 7


def test_uniform_numbers_are_even_and_below_1():
    numbers = uniforms(hashed(3, np.arange(100_000)))
    assert_even(np.bincount((numbers * 1000).astype(int), minlength=1000))
    assert uniforms(np.array([2**64 - 1, 0], np.uint64)).tolist() == [1 - 2.0**-53, 0.0]

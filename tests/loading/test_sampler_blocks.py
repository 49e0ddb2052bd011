"""The block shuffle: every sample once, few blocks at a time, and as even as chance inside those bounds."""

from __future__ import annotations

import numpy as np
import pytest
from distributions import assert_even
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.sampler import BlockShuffled

SMALL = st.integers(1, 40)


def whole(n: int, seed: int = 0, epoch: int = 0, block: int = 10, window: int = 4) -> np.ndarray:
    return BlockShuffled(n, seed, block_samples=block, window_blocks=window).indices(epoch, 0, n)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), SMALL, SMALL, st.integers(0, 2**70), st.integers(0, 2**40))
def test_every_sample_comes_exactly_once(n, block, window, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed, epoch, block, window)), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), SMALL, SMALL, st.integers(0, 100))
def test_reading_touches_a_window_of_blocks_at_a_time(n, block, window, epoch):
    """Once a block of the next window is touched, no block of the last one is; a window has all of its blocks."""
    order = whole(n, 1, epoch, block, window) // block
    firsts = np.full(-(-n // block), n)
    lasts = np.zeros_like(firsts)
    np.minimum.at(firsts, order, np.arange(n))
    np.maximum.at(lasts, order, np.arange(n))
    by_place = np.argsort(firsts, kind="stable")
    for start in range(0, len(by_place), window):
        blocks = by_place[start : start + window]
        held = lasts[blocks].max() + 1 - firsts[blocks].min()
        assert held == np.minimum(n - blocks * block, block).sum()


@pytest.mark.parametrize("n", [2**62, 2**62 - 1, 10**9 + 7])
def test_huge_sets_are_ordered_in_the_time_of_the_range(n):
    order = BlockShuffled(n, 1, block_samples=100, window_blocks=50)
    for start in (0, n // 3, n - 20_000):
        samples = order.indices(2, start, start + 20_000)
        assert np.unique(samples).size == 20_000
        assert samples.min() >= 0
        assert samples.max() < n
        assert 200 <= np.unique(samples // 100).size <= 250


GOLDEN = [
    (7, 3, 2, 0, 0, [5, 3, 6, 4, 0, 2, 1]),
    (1000, 64, 4, 42, 3, [639, 340, 588, 355, 157, 374, 351]),
    (3000, 3, 2, 1, 1, [2552, 2551, 1665, 2550, 1667, 565, 167]),
    (1000000007, 64, 32, 7, 500000000, [594129190, 802586673, 686926229, 217378475, 550326876, 270448860, 8457220]),
    (
        1125899906842624,
        1000,
        1000,
        4611686018427387904,
        562949953421312,
        [
            275042510566962,
            955167394313210,
            604914988196761,
            838940717476653,
            1089404072143237,
            777208783627786,
            21462814279379,
        ],
    ),
]


@pytest.mark.parametrize(("n", "block", "window", "seed", "start", "expected"), GOLDEN)
def test_orders_never_change_between_versions(n, block, window, seed, start, expected):
    """Checkpoints of earlier versions rely on these values: a change here breaks every resumed run."""
    order = BlockShuffled(n, seed, block_samples=block, window_blocks=window)
    assert order.indices(2, start, start + len(expected)).tolist() == expected


def test_every_block_is_equally_likely_in_every_window():
    """The last block of 25 has 3 of 10 samples, and stands in every window as often as the others."""
    counts = np.zeros((25, 25), np.int64)
    for epoch in range(1500):
        blocks = whole(243, 3, epoch, window=1) // 10
        counts[np.arange(25), blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]] += 1
    assert_even(counts)


@pytest.mark.parametrize(("block", "window"), [(10, 5), (4, 4), (30, 50)])
def test_samples_of_a_window_are_equally_likely_at_every_place_of_it(block, window):
    """Ranks of samples among those of their window over windows, epochs and seeds; of many, in 10 x 10 cells."""
    size = block * window
    cells = size if size % 10 else 10
    counts = np.zeros((cells, cells), np.int64)
    for number in range(40_000 // size // 8 + 20):
        order = whole(size * 8, number % 5, number, block, window).reshape(8, size)
        ranks = np.argsort(np.argsort(order, axis=1), axis=1)
        np.add.at(counts, (np.arange(size) * cells // size, ranks * cells // size), 1)
    assert_even(counts)


def test_neighbours_in_a_window_are_no_neighbours_in_the_data():
    """The step from one sample to the next in a single window, modulo n, takes each value but 0 equally often."""
    counts = np.zeros(500, np.int64)
    for number in range(100):
        np.add.at(counts, np.diff(whole(500, number, 1, block=50, window=10)) % 500, 1)
    assert counts[0] == 0
    assert_even(counts[1:])


def test_windows_have_orders_of_their_own():
    """Two windows of one epoch agree in the rank of a sample at one place on average, as random orders do."""
    order = whole(100_000, block=50, window=20).reshape(100, 1000)
    ranks = np.argsort(np.argsort(order, axis=1), axis=1)
    agreed = (ranks[1:] == ranks[:-1]).sum(axis=1)
    assert agreed.max() <= 8
    assert 0.5 < agreed.mean() < 1.6


def test_epochs_and_seeds_differ():
    orders = [whole(3000, seed, epoch) for seed in (0, 1, 2**33) for epoch in range(4)]
    matches = [float((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(matches) <= 60  # a shared window of 40 samples that holds a shared block adds more than one place
    assert np.mean(matches) < 2


def test_an_epoch_tells_nothing_about_the_next():
    """How far each sample of a single window moves from one epoch to the next takes each value equally often."""
    counts = np.zeros(600, np.int64)
    for epoch in range(60):
        places, later = (np.argsort(whole(600, 1, number, block=60, window=10)) for number in (epoch, epoch + 1))
        np.add.at(counts, (later - places) % 600, 1)
    assert_even(counts)

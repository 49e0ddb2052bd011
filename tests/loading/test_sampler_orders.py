"""Every order of `colabkit.sampler` keeps its guarantees; the block shuffle touches few blocks at a time."""

from __future__ import annotations

import math
import pickle
import re
import tracemalloc

import numpy as np
import pytest
import torch
from distributions import assert_even, assert_unlike
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit import sampler
from colabkit.errors import InvalidOption
from colabkit.foundation import epoch_order
from colabkit.loading.sampler.orders import BlockShuffledOrder, Order, SequentialOrder, ShuffledOrder
from colabkit.loading.sampler.resampling import BalancedOrder, WeightedOrder
from colabkit.loading.sampler.shard_order import ShardShuffledOrder

LABELS = np.random.default_rng(5).integers(0, 9, 3000) ** 2
WEIGHTS = np.where(np.arange(3000) % 5, np.random.default_rng(6).random(3000), 0)
SMALL = st.integers(1, 40)

ORDERS = {
    "sequential": SequentialOrder(3000),
    "shuffled": ShuffledOrder(3000, 3),
    "shuffled few": ShuffledOrder(700, 3),
    "shuffled many": ShuffledOrder(10**9, 3),
    "blocks": BlockShuffledOrder(3000, 3, block_samples=37, window_blocks=5),
    "full blocks": BlockShuffledOrder(3000, 3, block_samples=50, window_blocks=7),
    "small windows": BlockShuffledOrder(3000, 3, block_samples=3, window_blocks=2),
    "one block": BlockShuffledOrder(3000, 3, block_samples=10**9, window_blocks=10**9),
    "shards": ShardShuffledOrder((90, 40, 1, 7, 500, 61, 301, 1000, 1000), 3, window_shards=2),
    "streams": ShardShuffledOrder((90, 40, 1, 7, 500, 61, 301, 1000, 1000), 3, 2, streams=4),
    "one window": ShardShuffledOrder((1000, 2000), 3, window_shards=10),
    "many blocks": BlockShuffledOrder(10**9 + 7, 3, block_samples=100, window_blocks=30),
    "weighted": WeightedOrder(WEIGHTS, seed=3),
    "weighted more": WeightedOrder([1, 0, 2], num_samples=50_000, seed=3),
    "weighted once": WeightedOrder(WEIGHTS, seed=3, replacement=False),
    "balanced": BalancedOrder(LABELS, seed=3),
    "balanced more": BalancedOrder(LABELS, num_samples=40_000, seed=3),
    "balanced many classes": BalancedOrder(np.arange(3000) % 701, seed=3),
}

all_orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


@all_orders
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_range_is_a_slice_of_any_range_around_it(order, data):
    n = len(order)
    epoch = data.draw(st.integers(0, 3))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, min(n, start + 20_000)))
    first = data.draw(st.integers(max(0, start - 20_000), start))
    last = data.draw(st.integers(stop, min(n, stop + 20_000)))
    part = order.indices(epoch, start, stop)
    assert part.dtype == np.int64
    assert part.shape == (stop - start,)
    assert np.array_equal(part, order.indices(epoch, first, last)[start - first : stop - first])


@all_orders
def test_an_order_depends_only_on_its_arguments(order):
    stop = min(len(order), 2000)
    first = order.indices(1, 100, stop)
    before = first.copy()
    # Modifying a result must not affect later results.
    first[:] = -1
    np.random.seed(1)
    order.indices(2, 100, stop)
    copied = pickle.loads(pickle.dumps(order))
    assert np.array_equal(order.indices(1, 100, stop), before)
    assert np.array_equal(copied.indices(np.int64(1), 100, stop), before)
    assert copied.policy == order.policy
    assert copied.seed == order.seed
    assert repr(copied) == repr(order)


def test_every_class_implements_the_protocol_and_is_immutable():
    for order in ORDERS.values():
        assert isinstance(order, Order)
        assert order.policy.split(" ")[0] in {"sequential", "shuffle", "block", "shards", "weighted", "balanced"}
        assert len(order.policy) < 40
        assert repr(order).startswith(f"{type(order).__name__}(")
        assert len(repr(order)) < 120
        with pytest.raises(AttributeError):
            order.seed = 4


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "sequential"])
def test_epochs_differ(name):
    order = ORDERS[name]
    stop = min(len(order), 2000)
    first, second = (order.indices(epoch, 0, stop) for epoch in (0, 1))
    likely = 5 / 9 if name == "weighted more" else 0.1
    assert (first == second).mean() < likely + 0.05


def test_epochs_and_seeds_agree_only_by_chance():
    labels = np.arange(3000) % 10
    for make in (lambda seed: BalancedOrder(labels, seed=seed), lambda seed: ShuffledOrder(3000, seed)):
        assert_unlike([make(seed).indices(epoch, 0, 3000) for seed in (0, 1, 2**33) for epoch in range(4)])


def test_a_range_outside_the_epoch_raises_an_error():
    for order in ORDERS.values():
        for start, stop in ((-1, 3), (0, len(order) + 1)):
            with pytest.raises(InvalidOption, match=f"Cannot order positions {start} to {stop}"):
                order.indices(0, start, stop)


GOLDEN = [
    (BlockShuffledOrder(7, 0, 3, 2), 2, 0, [5, 3, 6, 4, 0, 2, 1]),
    (BlockShuffledOrder(1000, 42, 64, 4), 2, 3, [639, 340, 588, 355, 157, 374, 351]),
    (BlockShuffledOrder(3000, 1, 3, 2), 2, 1, [2552, 2551, 1665, 2550, 1667, 565, 167]),
    (
        BlockShuffledOrder(10**9 + 7, 7),
        2,
        5 * 10**8,
        [594129190, 802586673, 686926229, 217378475, 550326876, 270448860],
    ),
    (BlockShuffledOrder(2**50, 2**62, 1000, 1000), 2, 2**49, [275042510566962, 955167394313210, 604914988196761]),
    (BalancedOrder([0, 1, 1, 0, 1, 1, 1], seed=7), 3, 0, [0, 4, 3, 2, 5, 3, 5]),
    (BalancedOrder([n % 100 % 30 for n in range(3000)], seed=7), 3, 0, [2828, 795, 2197, 1536, 212, 639, 760, 1114]),
    (
        BalancedOrder([n % 700 for n in range(30_000)], seed=7),
        3,
        0,
        [19825, 29161, 6322, 1203, 4947, 17795, 21729, 23474],
    ),
    (WeightedOrder([1, 0, 2, 5], num_samples=100, seed=7), 3, 0, [2, 3, 3, 3, 3, 3, 3, 3]),
    (WeightedOrder([*range(1, 2001)], seed=7), 3, 0, [840, 1885, 1685, 1908, 1485, 1797, 1227, 1910]),
    (WeightedOrder([1, 0, 2, 5], seed=7, replacement=False), 3, 0, [3, 0, 2]),
    (WeightedOrder([*range(1, 2001)], seed=7, replacement=False), 3, 0, [1252, 1508, 1185, 899, 1491, 1511, 824, 1762]),
]


def test_orders_do_not_change_between_versions():
    """Checkpoints of earlier versions rely on these values, so a change breaks every resumed run."""
    for order, epoch, start, expected in GOLDEN:
        assert order.indices(epoch, start, start + len(expected)).tolist() == expected, order


POLICIES = [
    (SequentialOrder(5), "sequential"),
    (ShuffledOrder(5, 1), "shuffle"),
    (BlockShuffledOrder(5, 1, 64, 32), "block 64x32"),
    (ShardShuffledOrder((2, 3), 1, 4), "shards 2x4"),
    (ShardShuffledOrder((2, 3), 1, 4, 2), "shards 2x4x2"),
    (WeightedOrder([1, 0, 2]), "weighted 1991f38fa1a977a2"),
    (BalancedOrder([0, 1, 1]), "balanced 033525359a381166"),
]


def test_policies_do_not_change_between_versions():
    """Saved states contain the policies, so after a change no run could resume."""
    for order, policy in POLICIES:
        assert order.policy == policy


def test_policies_differ_exactly_if_the_orders_differ():
    orders = [
        WeightedOrder([1, 0, 2]),
        WeightedOrder([1, 0, 3]),
        WeightedOrder([1, 0, 2], num_samples=4),
        WeightedOrder([1, 0, 2], num_samples=2),
        WeightedOrder([1, 0, 2], replacement=False),
        BalancedOrder([0, 1, 1]),
        BalancedOrder([1, 0, 0], num_samples=4),
        BalancedOrder([1, 0, 1]),
    ]
    assert len({order.policy for order in orders}) == len(orders)
    assert WeightedOrder([1, 0, 2], seed=8).policy == WeightedOrder(np.array([1, 0, 2], np.int8)).policy
    assert BalancedOrder([0, 1, 1], seed=8).policy == BalancedOrder(np.array([-5, 70, 70])).policy


def test_shuffled_equals_epoch_order():
    assert np.array_equal(ShuffledOrder(5000, 9).indices(4, 100, 4900), epoch_order(5000, 9, 4, 100, 4900))


def test_sequential_is_the_stored_order_in_every_epoch():
    order = SequentialOrder(10)
    assert order.seed == 0
    assert order.indices(3, 2, 9).tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_empty_data_sets_have_empty_orders():
    for order in (SequentialOrder(0), ShuffledOrder(0), BlockShuffledOrder(0)):
        assert len(order) == 0
        assert order.indices(0, 0, 0).tolist() == []


REFUSED = [
    (lambda: SequentialOrder(-1), "n=-1"),
    (lambda: SequentialOrder(2**62 + 1), "Use n=4611686018427387904 or less"),
    (lambda: ShuffledOrder(2.5), "n=2.5"),
    (lambda: ShuffledOrder(5, seed=-1), "seed=-1"),
    (lambda: BlockShuffledOrder(5, block_samples=0), "block_samples=0"),
    (lambda: BlockShuffledOrder(5, window_blocks=True), "window_blocks=True"),
    (lambda: BlockShuffledOrder(5, seed="1"), "seed='1'"),
    (lambda: ShardShuffledOrder((5, 0)), "counts=0"),
    (lambda: ShardShuffledOrder((5,), window_shards=0), "window_shards=0"),
    (lambda: ShardShuffledOrder((5, 6), streams=3), "streams=3"),
    (lambda: BalancedOrder([]), "shape (0,)"),
    (lambda: BalancedOrder([[1]]), "shape (1, 1)"),
    (lambda: BalancedOrder([1.0]), "dtype float64"),
    (lambda: BalancedOrder(["cat"]), "dtype <U3"),
    (lambda: BalancedOrder([[1], [1, 2]]), "NumPy cannot convert the labels (a list)"),
    (lambda: BalancedOrder([1], num_samples=0), "num_samples=0"),
    (lambda: BalancedOrder([1], seed=-3), "seed=-3"),
    (lambda: WeightedOrder([]), "shape (0,)"),
    (lambda: WeightedOrder([[1.0]]), "shape (1, 1)"),
    (lambda: WeightedOrder([1, -1]), "from -1.0 to 1.0"),
    (lambda: WeightedOrder([1, math.nan]), "nan"),
    (lambda: WeightedOrder([1, math.inf]), "inf"),
    (lambda: WeightedOrder([1e308, 1e308]), "a sum of inf"),
    (lambda: WeightedOrder([0, 0]), "a sum of 0.0"),
    (lambda: WeightedOrder(["a"]), "NumPy cannot convert the weights"),
    (lambda: WeightedOrder(torch.ones(2, requires_grad=True)), "NumPy cannot convert the weights (a Tensor)"),
    (lambda: WeightedOrder([1, 1], num_samples=0), "num_samples=0"),
    (lambda: WeightedOrder([1, 1], seed=1.5), "seed=1.5"),
    (
        lambda: WeightedOrder([1, 0, 1], num_samples=3, replacement=False),
        "num_samples=3; expected a whole number from 1 to 2",
    ),
]


def test_invalid_arguments_raise_an_error():
    for make, found in REFUSED:
        with pytest.raises(InvalidOption, match=rf"^Cannot make a \w+Order: .*{re.escape(found)}"):
            make()


@pytest.mark.parametrize("name", ["shuffled many", "many blocks"])
@pytest.mark.parametrize("start", [0, 500_000_000])
def test_a_billion_samples_need_only_the_memory_of_the_range(name, start):
    """Computing 512 of 10^9 positions needs 4 KB for indices, scratch arrays, and tables of about 4,000 entries."""
    order = ORDERS[name]
    tracemalloc.start()
    try:
        order.indices(7, start, start + 512)
        order.indices(7, start, start + 512)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        order.indices(7, start, start + 512)
        again = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.reset_peak()
        order.indices(8, start, start + 512)
        peak_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert again < 150_000
    assert peak_bytes < 3_000_000


def test_the_package_exports_only_the_orders():
    names = {
        "BalancedOrder",
        "BlockShuffledOrder",
        "Order",
        "SequentialOrder",
        "ShardShuffledOrder",
        "ShuffledOrder",
        "WeightedOrder",
        "epoch_order",
    }
    assert set(sampler.__all__) == names


def whole(n: int, seed: int = 0, epoch: int = 0, block: int = 10, window: int = 4) -> np.ndarray:
    return BlockShuffledOrder(n, seed, block_samples=block, window_blocks=window).indices(epoch, 0, n)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), SMALL, SMALL, st.integers(0, 2**70), st.integers(0, 2**40))
def test_every_sample_comes_exactly_once(n, block, window, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed, epoch, block, window)), np.arange(n))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), SMALL, SMALL, st.integers(0, 100))
def test_reading_touches_a_window_of_blocks_at_a_time(n, block, window, epoch):
    """No block of a window is touched after the next window has begun, and a window contains all of its blocks."""
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
def test_the_time_for_huge_data_sets_depends_only_on_the_range(n):
    order = BlockShuffledOrder(n, 1, block_samples=100, window_blocks=50)
    for start in (0, n // 3, n - 20_000):
        samples = order.indices(2, start, start + 20_000)
        assert np.unique(samples).size == 20_000
        assert samples.min() >= 0
        assert samples.max() < n
        assert 200 <= np.unique(samples // 100).size <= 250


@pytest.mark.full
def test_every_block_is_equally_likely_in_every_window():
    """The last of 25 blocks has only 3 of 10 samples, and is in each window as often as the others."""
    counts = np.zeros((25, 25), np.int64)
    for epoch in range(1500):
        blocks = whole(243, 3, epoch, window=1) // 10
        counts[np.arange(25), blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]] += 1
    assert_even(counts)


@pytest.mark.parametrize(("block", "window"), [(10, 5), (4, 4), (30, 50)])
def test_samples_of_a_window_are_equally_likely_at_every_position_in_it(block, window):
    """Count the occurrences of each rank of a window's samples at each position, grouped into cells."""
    size = block * window
    cells = size if size % 10 else 10
    counts = np.zeros((cells, cells), np.int64)
    for number in range(40_000 // size // 8 + 20):
        order = whole(size * 8, number % 5, number, block, window).reshape(8, size)
        ranks = np.argsort(np.argsort(order, axis=1), axis=1)
        np.add.at(counts, (np.arange(size) * cells // size, ranks * cells // size), 1)
    assert_even(counts)


def test_neighbors_in_a_window_are_not_neighbors_in_the_data():
    """The difference of consecutive samples in a single window, modulo n, takes each value except 0 equally often."""
    counts = np.zeros(500, np.int64)
    for number in range(100):
        np.add.at(counts, np.diff(whole(500, number, 1, block=50, window=10)) % 500, 1)
    assert counts[0] == 0
    assert_even(counts[1:])


def test_each_window_has_its_own_order():
    """On average, two windows of an epoch have one rank at the same position, as two random orders do."""
    order = whole(100_000, block=50, window=20).reshape(100, 1000)
    ranks = np.argsort(np.argsort(order, axis=1), axis=1)
    agreed = (ranks[1:] == ranks[:-1]).sum(axis=1)
    assert agreed.max() <= 8
    assert 0.5 < agreed.mean() < 1.6


def test_blocks_of_epochs_and_seeds_differ():
    orders = [whole(3000, seed, epoch) for seed in (0, 1, 2**33) for epoch in range(4)]
    matches = [float((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    # Windows at the same position that share a block add more than the one match expected by chance.
    assert max(matches) <= 60
    assert np.mean(matches) < 2


def test_an_epoch_does_not_predict_the_next():
    """The distance that a sample moves between two epochs takes each value equally often."""
    counts = np.zeros(600, np.int64)
    for epoch in range(60):
        places, later = (np.argsort(whole(600, 1, number, block=60, window=10)) for number in (epoch, epoch + 1))
        np.add.at(counts, (later - places) % 600, 1)
    assert_even(counts)


def test_each_window_of_shards_holds_all_samples_of_its_shards_and_no_others():
    order = ShardShuffledOrder((90, 40, 1, 7, 500, 61, 301), 5, window_shards=3)
    firsts = np.cumsum((0, *order.counts))
    for epoch in range(3):
        start, seen = 0, []
        for stop, shards in order.windows(epoch):
            expected = np.concatenate([np.arange(firsts[shard], firsts[shard + 1]) for shard in shards])
            found = order.indices(epoch, start, stop)
            assert np.array_equal(np.sort(found), np.sort(expected))
            assert len(found) < 9 or not np.array_equal(found, expected)
            start, seen = stop, [*seen, *shards]
        assert start == len(order)
        assert sorted(seen) == list(range(7))
    assert len({tuple(shards for _, shards in order.windows(epoch)) for epoch in range(5)}) > 1


@pytest.mark.parametrize("streams", [2, 3, 7])
def test_a_stream_needs_the_same_shards_in_every_epoch_and_shares_at_most_its_ends(streams):
    order = ShardShuffledOrder((90, 40, 1, 7, 500, 61, 301), 5, 2, streams)
    firsts = np.cumsum((0, *order.counts))
    owners: dict[int, set[int]] = {}
    for stream in range(streams):
        orders = []
        for epoch in range(4):
            samples = order.indices(epoch, stream, len(order), streams)
            assert np.array_equal(samples, order.indices(epoch, 0, len(order))[stream::streams])
            orders.append(samples.tolist())
            start = 0
            for stop, shards in order.windows(epoch, stream):
                assert set(np.searchsorted(firsts, samples[start:stop], side="right") - 1) == set(shards)
                start = stop
            assert start == len(samples)
            owners[stream] = owners.get(stream, set()) | {
                shard for _, shards in order.windows(epoch, stream) for shard in shards
            }
        assert all(sorted(samples) == sorted(orders[0]) for samples in orders)
        assert len({tuple(samples) for samples in orders}) == 4
    assert sum(map(len, owners.values())) <= len(order.counts) + streams - 1

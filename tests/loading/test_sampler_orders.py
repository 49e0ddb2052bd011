"""What every order of the sampler promises, whatever it mixes; and the orders as classes."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit import sampler
from colabkit.errors import InvalidOption
from colabkit.foundation import epoch_order
from colabkit.loading.sampler.orders import BlockShuffled, Order, Sequential, Shuffled
from colabkit.loading.sampler.resampling import Balanced, Weighted

LABELS = np.random.default_rng(5).integers(0, 9, 3000) ** 2
WEIGHTS = np.where(np.arange(3000) % 5, np.random.default_rng(6).random(3000), 0)

ORDERS = {
    "sequential": Sequential(3000),
    "shuffled": Shuffled(3000, 3),
    "shuffled few": Shuffled(700, 3),
    "shuffled many": Shuffled(10**9, 3),
    "blocks": BlockShuffled(3000, 3, block_samples=37, window_blocks=5),
    "full blocks": BlockShuffled(3000, 3, block_samples=50, window_blocks=7),
    "small windows": BlockShuffled(3000, 3, block_samples=3, window_blocks=2),
    "one block": BlockShuffled(3000, 3, block_samples=10**9, window_blocks=10**9),
    "many blocks": BlockShuffled(10**9 + 7, 3, block_samples=100, window_blocks=30),
    "weighted": Weighted(WEIGHTS, seed=3),
    "weighted more": Weighted([1, 0, 2], num_samples=50_000, seed=3),
    "weighted once": Weighted(WEIGHTS, seed=3, replacement=False),
    "balanced": Balanced(LABELS, seed=3),
    "balanced more": Balanced(LABELS, num_samples=40_000, seed=3),
    "balanced many classes": Balanced(np.arange(3000) % 701, seed=3),
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
def test_an_order_depends_on_its_arguments_alone(order):
    stop = min(len(order), 2000)
    first = order.indices(1, 100, stop)
    kept = first.copy()
    first[:] = -1  # the result is the caller's own
    np.random.seed(1)
    order.indices(2, 100, stop)
    copied = pickle.loads(pickle.dumps(order))
    assert np.array_equal(order.indices(1, 100, stop), kept)
    assert np.array_equal(copied.indices(np.int64(1), 100, stop), kept)
    assert copied.policy == order.policy
    assert copied.seed == order.seed
    assert repr(copied) == repr(order)


@all_orders
def test_every_class_keeps_to_the_protocol(order):
    assert isinstance(order, Order)
    assert order.policy.split(" ")[0] in {"sequential", "shuffle", "block", "weighted", "balanced"}
    assert len(order.policy) < 40
    assert repr(order).startswith(f"{type(order).__name__}(")
    assert len(repr(order)) < 120


@all_orders
def test_an_order_cannot_be_changed(order):
    with pytest.raises(AttributeError):
        order.seed = 4


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "sequential"])
def test_epochs_differ(name):
    order = ORDERS[name]
    stop = min(len(order), 2000)
    first, second = (order.indices(epoch, 0, stop) for epoch in (0, 1))
    likely = 5 / 9 if name == "weighted more" else 0.1
    assert (first == second).mean() < likely + 0.05


@all_orders
@pytest.mark.parametrize("name", ["start", "length"])
def test_a_range_outside_is_refused(order, name):
    start, stop = (-1, 3) if name == "start" else (0, len(order) + 1)
    with pytest.raises(InvalidOption, match=f"Cannot order positions {start} to {stop}"):
        order.indices(0, start, stop)


POLICIES = [
    (Sequential(5), "sequential"),
    (Shuffled(5, 1), "shuffle"),
    (BlockShuffled(5, 1, 64, 32), "block 64x32"),
    (Weighted([1, 0, 2]), "weighted 1991f38fa1a977a2"),
    (Balanced([0, 1, 1]), "balanced 033525359a381166"),
]


@pytest.mark.parametrize(("order", "policy"), POLICIES)
def test_policies_never_change_between_versions(order, policy):
    """Saved states hold them: a change here refuses every resumed run."""
    assert order.policy == policy


def test_policies_tell_apart_what_gives_other_orders_and_nothing_else():
    told = [
        Weighted([1, 0, 2]),
        Weighted([1, 0, 3]),
        Weighted([1, 0, 2], num_samples=4),
        Weighted([1, 0, 2], num_samples=2),
        Weighted([1, 0, 2], replacement=False),
        Balanced([0, 1, 1]),
        Balanced([1, 0, 0], num_samples=4),
        Balanced([1, 0, 1]),
    ]
    assert len({order.policy for order in told}) == len(told)
    assert Weighted([1, 0, 2], seed=8).policy == Weighted(np.array([1, 0, 2], np.int8)).policy
    assert Balanced([0, 1, 1], seed=8).policy == Balanced(np.array([-5, 70, 70])).policy


def test_shuffled_is_the_order_of_an_epoch():
    assert np.array_equal(Shuffled(5000, 9).indices(4, 100, 4900), epoch_order(5000, 9, 4, 100, 4900))


def test_sequential_is_as_stored_in_every_epoch():
    order = Sequential(10)
    assert order.seed == 0
    assert order.indices(3, 2, 9).tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_empty_sets_have_empty_orders():
    for order in (Sequential(0), Shuffled(0), BlockShuffled(0)):
        assert len(order) == 0
        assert order.indices(0, 0, 0).tolist() == []


REFUSED = [
    (lambda: Sequential(-1), "n=-1"),
    (lambda: Sequential(2**62 + 1), "Use n=4611686018427387904 or less"),
    (lambda: Shuffled(2.5), "n=2.5"),
    (lambda: Shuffled(5, seed=-1), "seed=-1"),
    (lambda: BlockShuffled(5, block_samples=0), "block_samples=0"),
    (lambda: BlockShuffled(5, window_blocks=True), "window_blocks=True"),
    (lambda: BlockShuffled(5, seed="1"), "seed='1'"),
]


@pytest.mark.parametrize(("make", "found"), REFUSED, ids=[found for _, found in REFUSED])
def test_arguments_that_cannot_be_meant_are_refused(make, found):
    with pytest.raises(InvalidOption, match="Cannot make a ") as raised:
        make()
    assert found in str(raised.value)


@pytest.mark.parametrize("name", ["shuffled many", "many blocks"])
@pytest.mark.parametrize("start", [0, 500_000_000])
def test_a_billion_samples_take_the_memory_of_the_range(name, start):
    """512 of 10^9 positions: 4 KB of samples, their scratch arrays, and at most tables of some 4,000 entries."""
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
        anew = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert again < 150_000
    assert anew < 3_000_000


def test_the_package_has_the_orders_and_nothing_else():
    names = {"Balanced", "BlockShuffled", "Order", "Sequential", "Shuffled", "Weighted", "epoch_order"}
    assert set(sampler.__all__) == names

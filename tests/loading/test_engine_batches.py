"""Batch plans can be split anywhere. Device batches arrive in order; an error is raised after earlier batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from colabkit.loading.engine.batches import Batch, BatchPlan, OrderPlanner, split_plans
from colabkit.loading.engine.device import send
from colabkit.loading.engine.share import Share
from colabkit.sampler import ShardShuffledOrder, ShuffledOrder

PLANNER = OrderPlanner(ShuffledOrder(1000, 3), 7, False, Share())


def joined(plans: list[BatchPlan]) -> tuple[list[int], list[int], list[int], list[int]]:
    return (
        np.concatenate([plan.indices for plan in plans]).tolist(),
        np.concatenate([plan.positions for plan in plans]).tolist(),
        [size for plan in plans for size in plan.sizes],
        [end for plan in plans for end in plan.ends],
    )


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1] * 6),
        (3, [1, 2, 3, 3, 3, 3]),
        (8, [1, 2, 4, 8, 8, 8]),
        (32, [1, 3, 9, 27, 32, 32]),
        (128, [1, 128, 14]),
    ],
)
def test_the_first_plan_has_one_batch_and_later_plans_grow_up_to_a_limit(most, expected):
    plans = [*PLANNER.plans(0, 0, most)]
    assert [len(plan.sizes) for plan in plans][:6] == expected
    assert joined(plans) == joined([*PLANNER.plans(0, 0, 1000)])


@pytest.mark.parametrize("most", [1, 2, 5, 128])
def test_split_plans_hold_the_same_batches(most):
    whole = [*PLANNER.plans(2, 0, 128)]
    parts = [*split_plans(iter(whole), most)]
    assert all(len(part.sizes) <= most for part in parts)
    assert joined(parts) == joined(whole)


@pytest.mark.parametrize("first", [0, 1, 60, 127])
def test_a_part_of_a_plan_extends_to_the_end_by_default(first):
    whole = [*PLANNER.plans(2, 0, 128)][1]
    before, after = whole.slice(0, first), whole.slice(first)
    assert (len(before.sizes), len(after.sizes)) == (first, 128 - first)
    assert joined([before, after]) == joined([whole])


class Transfer:
    """A fake transfer that copies batches immediately and records the largest number in flight."""

    def __init__(self) -> None:
        self.on_device: deque[Any] = deque()
        self.most, self.is_closed = 0, False

    def __len__(self) -> int:
        return len(self.on_device)

    def submit(self, batches: list[tuple[Any, int]], buffer: Any) -> None:
        self.on_device.extend(("sent", values) for values, _ in batches)
        self.most = max(self.most, len(self.on_device))

    def take(self) -> tuple[Any, None]:
        return self.on_device.popleft(), None

    def close(self) -> None:
        self.is_closed = True


def groups_of(*groups: list[int] | Exception) -> Iterator[tuple[list[Batch], None]]:
    for group in groups:
        if isinstance(group, Exception):
            raise group
        yield [Batch(number, np.arange(2), 0, was_ready=False) for number in group], None


@pytest.mark.parametrize("ahead", [1, 2, 3, 10])
def test_batches_come_in_order_with_a_limited_number_in_flight(ahead):
    transfer = Transfer()
    found = list(send(transfer, groups_of([0], [1], [2], [3], [4]), lambda under_way: under_way >= ahead))
    assert [batch.values for batch in found] == [("sent", number) for number in range(5)]
    assert transfer.most == min(ahead, 5)
    assert sum(not batch.was_ready for batch in found) == max(1, 6 - ahead)
    assert transfer.is_closed


@pytest.mark.parametrize("good", range(5))
@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_an_error_is_raised_after_the_batches_in_flight(good, ahead):
    transfer, got = Transfer(), []
    groups: list[Any] = [[2 * number, 2 * number + 1] for number in range(good)]
    with pytest.raises(ValueError, match="planned"):
        got.extend(send(transfer, groups_of(*groups, ValueError("planned")), lambda under_way: under_way >= ahead))
    assert [batch.values[1] for batch in got] == list(range(2 * good))
    assert transfer.is_closed


def test_leaving_early_closes_the_transfer():
    transfer = Transfer()
    batches = send(transfer, groups_of([0], [1]), lambda under_way: under_way >= 2)
    next(batches)
    batches.close()
    assert transfer.is_closed


@pytest.mark.parametrize(("world_size", "machines"), [(1, 1), (2, 2), (3, 1), (4, 2), (6, 3), (8, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_machine_takes_its_streams_and_all_ranks_take_each_sample_once(world_size, machines, drop_last):
    order = ShardShuffledOrder((30, 50, 7, 40, 41, 35), 3, 2, streams=machines)
    everything = order.indices(1, 0, len(order))
    for start, batch_size in ((0, 5), (17, 3), (40, 8), (100, 2)):
        planners = [
            OrderPlanner(order, batch_size, drop_last, Share(rank, world_size, machines)) for rank in range(world_size)
        ]
        ranks = [joined([*planner.plans(1, start, 4)]) for planner in planners]
        assert [planner.samples(start) for planner in planners] == [len(indices) for indices, *_ in ranks]
        assert len({tuple(ends) for *_, ends in ranks}) == 1
        assert all(1 <= size <= batch_size for _, _, sizes, _ in ranks for size in sizes)
        stop = ranks[0][3][-1]
        assert sorted(place for _, positions, *_ in ranks for place in positions) == [*range(start, stop)]
        for rank, (indices, positions, *_) in enumerate(ranks):
            assert indices == everything[positions].tolist()
            machine = rank * machines // world_size
            assert machines == 1 or {place % machines for place in positions} == {machine}

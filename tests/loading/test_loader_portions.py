"""Plans of an epoch: how many batches they hold, and that splitting them changes no batch."""

from __future__ import annotations

import numpy as np
import pytest

from colabkit.loading.engine.batches import BatchPlan, OrderPlanner, Share, split_plans
from colabkit.sampler import Shuffled

PLANNER = OrderPlanner(Shuffled(1000, 3), 7, False, Share())


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
def test_the_first_portion_is_one_batch_and_the_others_grow_up_to_a_limit(most, expected):
    plans = [*PLANNER.plans(0, 0, most)]
    assert [len(plan.sizes) for plan in plans][:6] == expected
    assert joined(plans) == joined([*PLANNER.plans(0, 0, 1000)])


@pytest.mark.parametrize("most", [1, 2, 5, 128])
def test_parts_of_portions_hold_the_same_batches(most):
    whole = [*PLANNER.plans(2, 0, 128)]
    parts = [*split_plans(iter(whole), most)]
    assert all(len(part.sizes) <= most for part in parts)
    assert joined(parts) == joined(whole)


@pytest.mark.parametrize("first", [0, 1, 60, 127])
def test_a_part_goes_on_to_the_end_unless_it_is_told_where_to_stop(first):
    whole = [*PLANNER.plans(2, 0, 128)][1]
    before, after = whole.slice(0, first), whole.slice(first)
    assert (len(before.sizes), len(after.sizes)) == (first, 128 - first)
    assert joined([before, after]) == joined([whole])

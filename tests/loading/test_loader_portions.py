"""Portions of an epoch: how large they grow, and that their parts are together what they are."""

from __future__ import annotations

import numpy as np
import pytest

from colabkit.loading.loader.portions import OrderedPlan, Portion, Share, parted
from colabkit.sampler import Shuffled

PLAN = OrderedPlan(Shuffled(1000, 3), 7, False, Share())


def joined(portions: list[Portion]) -> tuple[list[int], list[int], list[int], list[int]]:
    return (
        np.concatenate([portion.numbers for portion in portions]).tolist(),
        np.concatenate([portion.positions for portion in portions]).tolist(),
        [size for portion in portions for size in portion.sizes],
        [reached for portion in portions for reached in portion.reached],
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
    portions = [*PLAN.portions(0, 0, most)]
    assert [len(portion.sizes) for portion in portions][:6] == expected
    assert joined(portions) == joined([*PLAN.portions(0, 0, 1000)])


@pytest.mark.parametrize("most", [1, 2, 5, 128])
def test_parts_of_portions_hold_the_same_batches(most):
    whole = [*PLAN.portions(2, 0, 128)]
    parts = [*parted(iter(whole), most)]
    assert all(len(part.sizes) <= most for part in parts)
    assert joined(parts) == joined(whole)


@pytest.mark.parametrize("first", [0, 1, 60, 127])
def test_a_part_goes_on_to_the_end_unless_it_is_told_where_to_stop(first):
    whole = [*PLAN.portions(2, 0, 128)][1]
    before, after = whole.part(0, first), whole.part(first)
    assert (len(before.sizes), len(after.sizes)) == (first, 128 - first)
    assert joined([before, after]) == joined([whole])

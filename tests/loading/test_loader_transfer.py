"""Batches on their way to a device: in order, a few ahead, and an error only after those that are good."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from colabkit.loading.engine.batches import Batch
from colabkit.loading.engine.device import send


class Transfer:
    """A device that takes batches at once, and notes what it has."""

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
    """Yield groups of numbered batches, none of them ready, or fail."""
    for group in groups:
        if isinstance(group, Exception):
            raise group
        yield [Batch(number, np.arange(2), 0, was_ready=False) for number in group], None


@pytest.mark.parametrize("ahead", [1, 2, 3, 10])
def test_batches_come_in_order_with_no_more_on_the_way_than_wanted(ahead):
    transfer = Transfer()
    found = list(send(transfer, groups_of([0], [1], [2], [3], [4]), lambda under_way: under_way >= ahead))
    assert [batch.values for batch in found] == [("sent", number) for number in range(5)]
    assert transfer.most == min(ahead, 5)
    assert sum(not batch.was_ready for batch in found) == max(1, 6 - ahead)
    assert transfer.is_closed


@pytest.mark.parametrize("good", range(5))
@pytest.mark.parametrize("ahead", [1, 2, 10])
def test_an_error_comes_after_the_batches_that_are_on_their_way(good, ahead):
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

"""Batches on their way to a device: in order, a few ahead, and an error only after those that are good."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from colabkit.loading.loader.transfer import Taken, sent
from colabkit.loading.loader.workers import Batch


class Transfer:
    """A device that takes batches at once, and notes what it has."""

    def __init__(self) -> None:
        self.on_device: deque[Any] = deque()
        self.most, self.is_closed = 0, False

    def submit(self, batches: list[tuple[Any, int]], buffer: Any) -> None:
        self.on_device.extend(("sent", values) for values, _ in batches)
        self.most = max(self.most, len(self.on_device))

    def take(self) -> tuple[Any, None]:
        return self.on_device.popleft(), None

    def close(self) -> None:
        self.is_closed = True


def taking(*groups: list[int] | Exception) -> Callable[[], Taken]:
    """Return what gives groups of numbered batches, none of them ready, or fails."""
    left = deque(groups)

    def take() -> Taken:
        if not left:
            return Taken()
        group = left.popleft()
        if isinstance(group, Exception):
            raise group
        return Taken([Batch(number, np.arange(2), 0) for number in group], None, was_ready=False)

    return take


@pytest.mark.parametrize("ahead", [1, 2, 3, 10])
def test_batches_come_in_order_with_no_more_on_the_way_than_wanted(ahead):
    transfer = Transfer()
    found = list(sent(transfer, taking([0], [1], [2], [3], [4]), lambda count: count < ahead))
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
        got.extend(sent(transfer, taking(*groups, ValueError("planned")), lambda count: count < ahead))
    assert [batch.values[1] for batch in got] == list(range(2 * good))
    assert transfer.is_closed


def test_leaving_early_closes_the_transfer():
    transfer = Transfer()
    batches = sent(transfer, taking([0], [1]), lambda count: count < 2)
    next(batches)
    batches.close()
    assert transfer.is_closed

"""One call to a source that may not answer, with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from colabkit.storage.sources.concurrency import STALLED_S, concurrently

T = TypeVar("T")


def answer_of(ask: Callable[[], T], can_hang: bool, stalled_s: float | None = None) -> T:
    """Return what `ask` returns; where it can hang, in a thread that is given up when it stalls, and asked once more.

    Args:
        ask: changes nothing.
        can_hang: whether it may never return.
        stalled_s: seconds without a sign of life (`still_moving`) after which it stalls; by default a minute.

    Raises:
        TimedOut: if it stalled twice.
    """
    limit = (STALLED_S if stalled_s is None else stalled_s) if can_hang else None
    (answer,) = concurrently(lambda _: ask(), [None], 1, stalled_s=limit)
    return answer

"""What was trained or looped over last in this process, for who asks without naming it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

from colabkit.meters.counts import LoaderMeters

__all__ = ["finished", "latest", "used"]

_noted: deque[Callable[[], object | None]] = deque(maxlen=4)  # newest first


def used(counts: LoaderMeters) -> None:
    """Note that a loop over a loader begins; its meters are forgotten when the loader is gone."""
    _noted.appendleft(weakref.ref(counts))


def finished(report: object) -> None:
    """Note the report of a training."""
    _noted.appendleft(lambda: report)


def latest() -> object | None:
    """Return what was noted last and is still there: a training's report or a loader's meters; None without either."""
    return next((found for ask in _noted if (found := ask()) is not None), None)

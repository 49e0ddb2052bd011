"""Rates from running totals."""

from __future__ import annotations

from collections.abc import Callable


class Rate:
    """What a running total gains in a second, between two looks.

    Each total has a time of its own: reading them all takes a while when another thread holds the interpreter.

    Args:
        clock: tells seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: tuple[float, float] | None = None

    def of(self, total: float | None) -> float | None:
        """Return the gain a second since the last look; None without one, and where the total is unknown or fell."""
        now = self._clock()
        before, self._before = self._before, None if total is None else (now, total)
        if total is None or before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])

"""When the panel is painted again, so that it never costs much."""

from __future__ import annotations

import sys
from collections.abc import Callable

_COSTLY_S = 0.005
_COSTLY_SHARE = 0.005
_SLOWEST_S = 8.0


class Pace:
    """Counts what frames cost and tells when the next one is due.

    A frame that takes more than 5 ms, or a share of the time above 0.5%, doubles the time to the next frame, up to 8 s;
    each frame after which neither holds halves it again. The first frame loads what it is shown by, and comes before
    the run; it counts for neither.

    A frame lets others have the interpreter: the thread that sends it, and those that load data. What they do in up to
    two of its turns, 5 ms each by default, is theirs; a frame that is longer away than that waits for a front end.

    Args:
        refresh_s: seconds between frames that cost little.
        clock: tells seconds.
    """

    def __init__(self, refresh_s: float, clock: Callable[[], float]) -> None:
        self._least_s = refresh_s
        self._clock = clock
        self._began_s: float | None = None
        self._next_s = 0.0
        self._spent_s = 0.0
        self.interval_s = refresh_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a frame."""
        return self._clock() >= self._next_s

    @property
    def cost_share(self) -> float | None:
        """Share of the time since the first frame that went into frames; None before the second."""
        if self._began_s is None or not self._spent_s:
            return None
        return self._spent_s / max(self._clock() - self._began_s, 1e-9)

    def painted(self, wall_s: float, cpu_s: float) -> None:
        """A frame has taken so long by the clock, and so much of this thread's CPU time."""
        now_s = self._clock()
        cost_s = max(cpu_s, wall_s - 2 * sys.getswitchinterval())
        if self._began_s is None:
            self._began_s = now_s
        else:
            self._spent_s += cost_s
            share = self._spent_s / max(now_s - self._began_s, 1e-9)
            if cost_s > _COSTLY_S or share > _COSTLY_SHARE:
                self.interval_s = min(2 * self.interval_s, max(_SLOWEST_S, self._least_s))
            else:
                self.interval_s = max(self._least_s, self.interval_s / 2)
        self._next_s = now_s + self.interval_s

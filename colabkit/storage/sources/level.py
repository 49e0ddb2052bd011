"""How many reads to have in flight, found by measuring."""

from __future__ import annotations

import math
import threading

FIRST = 64  # a mount answers a small file in tens of milliseconds: beginning lower costs more than it saves
MOST_IN_FLIGHT = 128
_GAIN = 1.08  # a doubling that gives less than this has met the source's own limit
_LOSS = 0.95  # of the best rate; a step down may cost no more
_BUSY = 0.85  # cores that the calls kept busy, above which more of them only get in each other's way
_SETTLED_WINDOWS = 24  # what was true may change: then one step up is tried again
_WINDOW_S = 0.01


class Level:
    """The number of requests in flight: it climbs while throughput climbs, and halves on errors.

    Calls are counted in windows, each as long as about one round of the calls in flight. From 64 on the number doubles
    as long as the rate rises by 8%; else it returns to the best one and stays for 24 windows. Where the first calls
    compute more than they wait, it falls by steps instead, for as long as the rate holds. An error halves it at once,
    as a drive that refuses wants to be asked less, but only once a window: what is in flight often fails together. (The
    scheme is that of TCP's congestion window: slow start, then multiplicative decrease; D. Chiu and R. Jain, 1989.)
    Its methods may be called from any thread.

    Attributes:
        now: the level.
        is_fixed: whether it stays, whatever is noted.
    """

    def __init__(self, now: int = FIRST, is_fixed: bool = False) -> None:
        self.now = now
        self.is_fixed = is_fixed
        self._best = (now, 0.0)
        self._direction = 1
        self._settled = 0
        self._was_refused = False
        self._lock = threading.Lock()
        self._since: float | None = None
        self._weight = 0.0
        self._cpu_s = 0.0

    def begin(self, time: float) -> None:
        """Note when the first call was made, in seconds of a monotonic clock."""
        if self._since is None:
            self._since = time

    def note(self, time: float, weight: float, cpu_s: float) -> None:
        """Note that a call ended.

        Args:
            time: when, in seconds of a monotonic clock.
            weight: how much work it was, in requests.
            cpu_s: seconds that it computed.
        """
        with self._lock:
            if self.is_fixed or self._since is None:
                return
            self._weight += weight
            self._cpu_s += cpu_s
            elapsed = time - self._since
            if self._weight < self.now or elapsed < _WINDOW_S:
                return
            rate, busy = self._weight / elapsed, self._cpu_s / elapsed
            self._since, self._weight, self._cpu_s = time, 0.0, 0.0
            self._step(rate, busy)

    def refused(self) -> None:
        """Note that the source failed a call: half as many from now on."""
        with self._lock:
            if self.is_fixed or self._was_refused:
                return
            self._was_refused = True
            self._settle(max(1, self.now // 2), 0.0)
            self._weight = self._cpu_s = 0.0  # the window begins anew

    def _step(self, rate: float, busy: float) -> None:
        self._was_refused = False
        best_level, best_rate = self._best
        if self._settled:
            self._settled -= 1
            self._best = (self.now, best_rate + (rate - best_rate) / 4 if best_rate else rate)  # windows are noisy
            if not self._settled:
                self._direction = 1
                self._move(busy)
        elif not best_rate:
            self._best = (self.now, rate)
            self._direction = -1 if busy > _BUSY else 1
            self._move(busy)
        elif rate > best_rate * (_GAIN if self._direction > 0 else _LOSS):
            self._best = (self.now, rate)
            self._move(busy)
        else:
            self._settle(best_level, best_rate)

    def _move(self, busy: float) -> None:
        level = self.now * 2 if self._direction > 0 else math.ceil(self.now / 4)
        if (self._direction > 0 and busy > _BUSY) or not 1 <= level <= MOST_IN_FLIGHT or level == self.now:
            self._settle(*self._best)
        else:
            self.now = level

    def _settle(self, level: int, rate: float) -> None:
        self.now = level
        self._best = (level, rate)
        self._settled = _SETTLED_WINDOWS

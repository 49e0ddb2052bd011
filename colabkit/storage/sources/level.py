"""An adaptive number of concurrent requests."""

from __future__ import annotations

import math
import threading

# Initial number of requests; it is high, since a mount takes tens of milliseconds per small file.
FIRST = 64
MOST_IN_FLIGHT = 128
# The rate must grow by this factor when the level doubles; otherwise the source has reached its limit.
_GAIN = 1.08
# A lower level is kept while its rate is above this share of the best rate.
_LOSS = 0.95
# Number of busy cores above which more threads only compete for Python's global interpreter lock.
_BUSY = 0.85
# Number of windows after which a higher level is tried again, because conditions may have changed.
_SETTLED_WINDOWS = 24
_WINDOW_S = 0.01


class Level:
    """Adaptive number of concurrent requests: it grows while throughput grows, and halves on errors.

    Calls are measured in windows of about one round of calls. From 64 by default, the number doubles, up to 128, while
    the rate rises by over 8%; then it keeps the best value for 24 windows. If the first calls keep over 0.85 cores
    busy, the number is divided by 4 instead, while the rate stays above 95% of the best. An error halves the number,
    but only once per window, since concurrent calls often fail together. `note()` and `refused()` are thread-safe.

    Attributes:
        now: the current number of requests.
        is_fixed: whether the number never changes.
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
        """Record the time of the first call, in seconds of a monotonic clock."""
        if self._since is None:
            self._since = time

    def note(self, time: float, weight: float, cpu_s: float) -> None:
        """Record the end of a call: its time, its weight in requests, and its CPU seconds."""
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
        """Record a failed call: unless the number of requests is fixed, halve it, at most once per window."""
        with self._lock:
            if self.is_fixed or self._was_refused:
                return
            self._was_refused = True
            self._settle(max(1, self.now // 2), 0.0)
            self._weight = self._cpu_s = 0.0

    def _step(self, rate: float, busy: float) -> None:
        self._was_refused = False
        best_level, best_rate = self._best
        if self._settled:
            self._settled -= 1
            # Smooth the rate, since windows are noisy.
            self._best = (self.now, best_rate + (rate - best_rate) / 4 if best_rate else rate)
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

"""A thread that regularly takes a snapshot of the machine and stores the recent ones.

The thread draws nothing and never initializes CUDA. Panels and reports read its snapshots from their own threads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from colabkit.foundation.telemetry.host import HostSnapshot, Telemetry

logger = logging.getLogger("colabkit")

_STOP_S = 1.0
# Maximum share of one CPU that snapshots use; if they would use more, they are taken less often. The first 0.04 CPU
# seconds do not count, so that short runs are observed closely.
_MOST_COST, _FREE_S = 0.001, 0.04
# Mean time between two samples of a stack, during the first CPU seconds and later; it varies, so that samples do not
# follow the rhythm of the steps. Later, samples use at most half of the share of snapshots; if they would use more,
# they are taken less often, too.
_FREE_STACK_S, _STACK_S, _MOST_STACK_COST = 0.1, 0.2, _MOST_COST / 2
# Drawing from Python's global generator in the sampler's thread would change the results of a run that uses it.
_random = random.Random()
# Number of snapshots of earlier samplers to keep.
_EARLIER = 600
# Passes are observed from this many seconds on, over all passes of a loader, because shorter ones end before two
# snapshots of the machine have been taken. In shorter passes than the second number, starting the thread would be slow.
_LONG_PASS_S, _LEAST_PASS_S = 1.0, 0.1
# Maximum time between two passes whose snapshots are taken as those of one.
_GAP_S = 1.0
# At its end, the thread takes a last snapshot beyond its limit if the newest one is this old.
_OLD_S = 5.0


class Sampler:
    """A daemon thread that takes snapshots during a `with` block, or from `start()` to `stop()`, once or repeatedly.

    Args:
        telemetry: takes the snapshots; by default a new `Telemetry`, opened and closed in the thread because drivers
            can be slow.
        period_s: minimum seconds between snapshots.
        points: maximum number of newest snapshots to keep, and of snapshots in `curve()`.
        clock: returns the current time in seconds, on the scale of `HostSnapshot.at_s`.
        cpu_clock: returns the CPU seconds of the calling thread.
    """

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        period_s: float = 1.0,
        points: int = 600,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._telemetry = telemetry
        self._is_own = telemetry is None
        self._period_s = period_s
        self._points = points
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._recent: deque[HostSnapshot] = deque(maxlen=points)
        self._whole: list[HostSnapshot] = []
        self._taken = 0
        self._spacing = 1
        self._cost_s = 0.0
        self._counted_s = 0.0
        self._stack_cost_s = 0.0
        self._due_s = -math.inf
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self._has_failed = False
        self._is_over = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> Self:
        """Start the thread without waiting for the first snapshot. After `stop()`, it continues."""
        idle_s = 0.0 if self._ended_s is None else self._clock() - self._ended_s
        # The time in which the thread did not run does not allow more CPU time.
        self._started_s = self._clock() if self._started_s is None else self._started_s + idle_s
        self._ended_s, self._pid, self._stopping = None, os.getpid(), threading.Event()
        thread = threading.Thread(target=self._run, args=(self._stopping,), name="colabkit-telemetry", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            # The process has reached its limit on threads.
            self._say(error)
        return self

    def stop(self) -> None:
        """Stop the thread, waiting at most 1 s; the snapshots are kept. A second call does nothing."""
        thread, self._thread = self._thread, None
        # A forked process does not have its parent's threads.
        if thread is None or self._pid != os.getpid():
            return
        self._stopping.set()
        # The garbage collector may end the last user in the sampler's own thread, which cannot join itself.
        if thread is not threading.current_thread():
            thread.join(_STOP_S)
        self._ended_s = self._clock()
        self._is_over = not thread.is_alive()

    @property
    def can_continue(self) -> bool:
        """Whether the thread ended at most a second ago in this process, so that `start()` may continue it."""
        is_over = self._is_over and self._ended_s is not None and self._pid == os.getpid()
        return is_over and self._clock() - (self._ended_s or 0.0) <= _GAP_S

    @property
    def latest(self) -> HostSnapshot | None:
        """The newest snapshot; None before the first one."""
        return self._recent[-1] if self._recent else None

    def recent(self, seconds: float) -> tuple[HostSnapshot, ...]:
        """Return the snapshots of the last `seconds` seconds, oldest first."""
        now_s = self._clock()
        return self.between(now_s - seconds, now_s)

    def between(self, since_s: float, until_s: float) -> tuple[HostSnapshot, ...]:
        """Return the snapshots between two times, on the scale of `HostSnapshot.at_s`, oldest first."""
        return tuple(snapshot for snapshot in self._recent.copy() if since_s <= snapshot.at_s <= until_s)

    def curve(self) -> tuple[HostSnapshot, ...]:
        """Return at most `points` snapshots, oldest first: some spread evenly over the run, and the newest."""
        whole, latest = tuple(self._whole), self.latest
        return whole if latest is None or (whole and whole[-1] is latest) else (*whole, latest)

    @property
    def cost_share(self) -> float:
        """CPU seconds of the thread divided by the elapsed time."""
        if self._started_s is None:
            return 0.0
        passed_s = (self._clock() if self._ended_s is None else self._ended_s) - self._started_s
        return self._cost_s / passed_s if passed_s > 0 else 0.0

    def _run(self, stopping: threading.Event) -> None:
        telemetry, self._counted_s = self._telemetry, self._cpu_clock()
        try:
            if telemetry is None:
                telemetry = self._telemetry = Telemetry()
            while not self._wait(telemetry, self._pause_s(), stopping):
                self._take(telemetry)
            old_s = math.inf if self.latest is None else self._clock() - self.latest.at_s
            if self._recent and old_s >= self._period_s and (old_s >= _OLD_S or self._overdrawn_s() <= 0):
                # Without this snapshot, the stacks sampled since the last one would be lost.
                self._take(telemetry)
        except Exception as error:
            # Monitoring must not stop a run.
            self._say(error)
        finally:
            if telemetry is not None and self._is_own:
                with contextlib.suppress(Exception):
                    # Ignore errors, because the driver may no longer be available.
                    telemetry.close()

    def _pause_s(self) -> float:
        """Return the seconds until the next snapshot is due."""
        return max(0.0, self._due_s - self._clock(), self._overdrawn_s())

    def _overdrawn_s(self) -> float:
        """Return the seconds after which the CPU time spent so far is again within its limits."""
        passed_s = self._clock() - (self._started_s or 0.0)
        return max(0.0, self._cost_s - _FREE_S) / _MOST_COST - passed_s

    def _wait(self, telemetry: Telemetry, pause_s: float, stopping: threading.Event) -> bool:
        """Wait for the next snapshot, and sample stacks meanwhile if requested; return whether to stop."""
        while telemetry.samples_stacks and pause_s > (one_s := _random.uniform(0.5, 1.5) * self._between_stacks_s()):
            if stopping.wait(one_s):
                return True
            pause_s -= one_s
            telemetry.sample_stack()
            self._stack_cost_s = self._count()
        return stopping.wait(pause_s)

    def _between_stacks_s(self) -> float:
        """Return the mean seconds until the next sample of a stack, from the CPU time of the newest one."""
        return _FREE_STACK_S if self._cost_s <= _FREE_S else max(_STACK_S, self._stack_cost_s / _MOST_STACK_COST)

    def _count(self) -> float:
        """Count and return the CPU seconds since the last call, including those of waiting for the GIL."""
        before_s, self._counted_s = self._counted_s, self._cpu_clock()
        self._cost_s += self._counted_s - before_s
        return self._counted_s - before_s

    def _take(self, telemetry: Telemetry) -> None:
        try:
            self._keep(telemetry.snapshot())
        except Exception as error:
            # Continue after an error, because the next snapshot may succeed.
            self._say(error)
        self._due_s = self._clock() + self._period_s
        self._count()

    def _keep(self, snapshot: HostSnapshot) -> None:
        self._recent.append(snapshot)
        if self._taken % self._spacing == 0:
            self._whole.append(snapshot)
        self._taken += 1
        if len(self._whole) == self._points:
            self._whole = self._whole[::2]
            self._spacing *= 2

    def _say(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("the state of the machine cannot be read; the run continues", exc_info=error)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


class _SamplerUsers:
    def __init__(self) -> None:
        # Reentrant, since the garbage collector may end an abandoned `sampled()` while this thread holds the lock.
        self.lock = threading.RLock()
        self.sampler: Sampler | None = None
        self.users = 0
        # The most recent sampler, which is kept after it has stopped, and the snapshots of those before it.
        self.last: Sampler | None = None
        self.earlier: deque[HostSnapshot] = deque(maxlen=_EARLIER)


_shared = _SamplerUsers()


def _forget() -> None:
    # The old lock may have been held at the time of the fork.
    global _shared  # noqa: PLW0603
    _shared = _SamplerUsers()


os.register_at_fork(after_in_child=_forget)


def seen(since_s: float, until_s: float) -> tuple[HostSnapshot, ...]:
    """Return the snapshots between two times from the samplers of this process, oldest first."""
    shared = _shared
    earlier = tuple(snapshot for snapshot in shared.earlier.copy() if since_s <= snapshot.at_s <= until_s)
    return earlier if shared.last is None else (*earlier, *shared.last.between(since_s, until_s))


@contextmanager
def sampled(*, continues: bool = False) -> Iterator[Sampler]:
    """Return a context manager for the shared sampler of this process.

    The first user starts the sampler, and the last one stops it. A forked process has a separate sampler.

    Args:
        continues: whether to continue the latest sampler if it ended at most a second ago.
    """
    shared = _shared
    with shared.lock:
        # Count this user first, so that another user that ends at the same time does not stop the sampler.
        shared.users += 1
    try:
        with shared.lock:
            if shared.sampler is None:
                if continues and shared.last is not None and shared.last.can_continue:
                    shared.sampler = shared.last.start()
                else:
                    if shared.last is not None:
                        shared.earlier.extend(shared.last.recent(_EARLIER))
                    shared.sampler = shared.last = Sampler().start()
            sampler = shared.sampler
        yield sampler
    finally:
        over = None
        with shared.lock:
            shared.users -= 1
            if not shared.users:
                over, shared.sampler = shared.sampler, None
        if over is not None:
            over.stop()


class LongPass:
    """Starts the shared sampler during the passes over a loader once they have taken a second, without a `with` block.

    Args:
        is_observed: whether the pass is observed at all.
        earlier_s: seconds of the loader's earlier passes.
        earlier: number of these passes.

    Attributes:
        due_s: time by `time.perf_counter` from which the loader should call `observe()`, which sets it to infinity.
    """

    __slots__ = ("_observing", "due_s")

    def __init__(self, is_observed: bool = True, earlier_s: float = 0.0, earlier: int = 0) -> None:
        counted_s = earlier_s if earlier_s >= _LEAST_PASS_S * earlier else 0.0
        self.due_s = time.perf_counter() + max(0.0, _LONG_PASS_S - counted_s) if is_observed else math.inf
        self._observing = contextlib.ExitStack()

    def observe(self) -> None:
        """Start the sampler, or continue that of the previous pass."""
        self.due_s = math.inf
        self._observing.enter_context(sampled(continues=True))

    def end(self) -> None:
        """Stop the sampler, unless others use it."""
        self._observing.close()

"""A thread that takes a snapshot of the machine every second, and what it has seen.

It touches nothing but numbers: no display, no CUDA. Panels and reports read it from their own threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from colabkit.foundation.telemetry.host import HostSnapshot, Telemetry

logger = logging.getLogger("colabkit")

_STOP_S = 1.0
_MOST_COST = 0.01  # of one CPU; where snapshots take longer than that allows, there are fewer


class Sampler:
    """Takes snapshots in a daemon thread from entering a `with` block, or `start()`, to leaving it, or `stop()`.

    Args:
        telemetry: takes them; by default one of its own, opened and closed by the thread, since drivers can be slow.
        period_s: seconds from one to the next.
        points: how many are kept: the newest ones, and as many of the whole run.
        clock: tells seconds, on the scale of `HostSnapshot.at_s`.
        cpu_clock: tells the CPU seconds of the calling thread.
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
        self._period_s = period_s
        self._points = points
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._recent: deque[HostSnapshot] = deque(maxlen=points)
        self._whole: list[HostSnapshot] = []
        self._taken = 0
        self._spacing = 1
        self._cost_s = 0.0
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self._has_failed = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> Self:
        """Start the thread and return at once; the first snapshot comes a little later. Once for each sampler."""
        self._started_s, self._pid = self._clock(), os.getpid()
        thread = threading.Thread(target=self._run, name="colabkit-telemetry", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # no more threads are allowed
            self._say(error)
        return self

    def stop(self) -> None:
        """End the thread, within a second; what was seen stays. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():  # a forked process has none of its parent's threads
            return
        self._stopping.set()
        if thread is not threading.current_thread():  # in which the garbage collector may end the last user
            thread.join(_STOP_S)
        self._ended_s = self._clock()

    @property
    def latest(self) -> HostSnapshot | None:
        """The newest snapshot, None before the first."""
        return self._recent[-1] if self._recent else None

    def recent(self, seconds: float) -> tuple[HostSnapshot, ...]:
        """Return the snapshots of the last seconds, oldest first."""
        now_s = self._clock()
        return self.between(now_s - seconds, now_s)

    def between(self, since_s: float, until_s: float) -> tuple[HostSnapshot, ...]:
        """Return the newest snapshots as far as they lie between two instants, oldest first."""
        return tuple(snapshot for snapshot in self._recent.copy() if since_s <= snapshot.at_s <= until_s)

    def curve(self) -> tuple[HostSnapshot, ...]:
        """Return the whole run, oldest first: at most `points` snapshots evenly apart, and the newest."""
        whole, latest = tuple(self._whole), self.latest
        return whole if latest is None or (whole and whole[-1] is latest) else (*whole, latest)

    @property
    def cost_share(self) -> float:
        """CPU seconds that the thread took, over the time that passed."""
        if self._started_s is None:
            return 0.0
        passed_s = (self._clock() if self._ended_s is None else self._ended_s) - self._started_s
        return self._cost_s / passed_s if passed_s > 0 else 0.0

    def _run(self) -> None:
        telemetry: Telemetry | None = None
        pause_s = 0.0
        try:
            telemetry = Telemetry() if self._telemetry is None else self._telemetry
            while not self._stopping.wait(pause_s):
                pause_s = max(self._period_s, self._take(telemetry) / _MOST_COST)
        except Exception as error:  # watching never harms a run
            self._say(error)
        finally:
            if telemetry is not None and self._telemetry is None:
                with contextlib.suppress(Exception):  # the driver may be gone
                    telemetry.close()

    def _take(self, telemetry: Telemetry) -> float:
        """Take a snapshot and return the CPU seconds that it took."""
        began_s = self._cpu_clock()
        try:
            self._keep(telemetry.snapshot())
        except Exception as error:  # one that cannot be taken is left out
            self._say(error)
        cost_s = self._cpu_clock() - began_s
        self._cost_s += cost_s
        return cost_s

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
            logger.warning("figures of the machine are missing; the run goes on", exc_info=error)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _SamplerUsers:
    """The one sampler of a process, and how many use it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a forgotten `sampled()` may be ended by the garbage collector wherever it runs
        self.sampler: Sampler | None = None
        self.users = 0
        self.last: Sampler | None = None  # also when it is over


_shared = _SamplerUsers()


def _forget() -> None:
    global _shared  # noqa: PLW0603  # the lock may have been held when the process was forked
    _shared = _SamplerUsers()


os.register_at_fork(after_in_child=_forget)


def seen(since_s: float, until_s: float) -> tuple[HostSnapshot, ...]:
    """Return the snapshots between two instants, as far as the sampler of this process, or the last one, has any."""
    sampler = _shared.last
    return () if sampler is None else sampler.between(since_s, until_s)


@contextmanager
def sampled() -> Iterator[Sampler]:
    """Return a context manager that gives the one sampler of this process: the first user starts it, the last stops it.

    A forked process has none of its parent's; it gets its own if it asks.
    """
    shared = _shared
    with shared.lock:
        shared.users += 1  # first, so that no other user that ends meanwhile, in this thread too, is the last
    try:
        with shared.lock:
            if shared.sampler is None:
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

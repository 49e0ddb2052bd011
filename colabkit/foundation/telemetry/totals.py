"""Running totals of this process and its children, and their rates.

When a process waits for an ended child, the kernel adds the child's CPU time and I/O to the totals of the parent.
Therefore the sum over the process, its ended children and its live children does not jump when a child ends. Children
in a separate session are servers, for example of mounts, and are not part of the work, so their totals are subtracted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil

from colabkit.foundation.mount_table import Reader

# Interval between searches for children, each of which reads the table of all processes in 2 ms or more.
_LOOK_EVERY_S = 5.0


class Rate:
    """The increase of a running total per second, between two calls.

    Each total has its own timestamp, since reading all totals takes a while if another thread holds the GIL.

    Args:
        clock: returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: tuple[float, float] | None = None

    def of(self, total: float | None) -> float | None:
        """Return the increase per second since the last call; None if either total is unknown or the total fell."""
        now = self._clock()
        before, self._before = self._before, None if total is None else (now, total)
        if total is None or before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])


class Totals(NamedTuple):
    """Running totals; unknown values are None.

    Attributes:
        cpu_s: CPU seconds of the process and its children.
        children_cpu_s: CPU seconds of the children.
        read_bytes: bytes read from storage.
        asked_bytes: bytes requested by read calls.
    """

    cpu_s: float | None
    children_cpu_s: float | None
    read_bytes: int | None
    asked_bytes: int | None


class Family:
    """A process and its children, whose totals are read together.

    Args:
        process: the process, as a `psutil.Process`.
        clock: returns the current time in seconds.
        read: returns the text of a file.
    """

    def __init__(self, process: Any, clock: Callable[[], float], read: Reader) -> None:
        self._process = process
        self._clock = clock
        self._read = read
        self._children: list[Any] = []
        self._started = ""
        self._due_s = clock()
        # Totals of servers so far, which are subtracted.
        self._servers: dict[Any, Totals] = {}
        self._uncounted: tuple[float, ...] = (0.0, 0.0, 0, 0)

    @property
    def children_ids(self) -> set[int]:
        """The process IDs of the children, as of the last search."""
        return {child.pid for child in self._children}

    def totals(self) -> Totals:
        """Return the totals. The work of a child counts only from the call that first finds the child."""
        started = self._started_children()
        if self._clock() >= self._due_s or started != self._started:
            self._started = started
            self._look()
        own = _totals(self._process)
        live = []
        for child in tuple(self._children):
            try:
                live.append(_totals(child))
            except psutil.NoSuchProcess:
                self._children.remove(child)
                self._servers.pop(child, None)
            else:
                if (before := self._servers.get(child)) is not None:
                    # Use the last totals of a zombie, which cannot be read.
                    if live[-1].cpu_s is None:
                        live[-1] = before
                    self._leave_out(live[-1], before)
                    self._servers[child] = live[-1]

        def sum_of(place: int) -> Any:
            mine = own[place]
            # Count all CPU time of a child, and of its children, as children's time of this process.
            theirs = sum(one[0 if place == 1 else place] or 0 for one in live)
            return None if mine is None else mine + theirs - self._uncounted[place]

        return Totals(*(sum_of(place) for place in range(4)))

    def _started_children(self) -> str:
        """Return the kernel's list of children of the main thread, which starts most workers; this is fast."""
        try:
            return self._read(f"/proc/self/task/{os.getpid()}/children")
        except (OSError, ValueError):
            return ""

    def _look(self) -> None:
        self._due_s = self._clock() + _LOOK_EVERY_S
        found: list[Any] = []
        with contextlib.suppress(psutil.Error, OSError):
            found = self._process.children(recursive=True)
        kept = [child for child in self._children if child in found]
        for child in found:
            if child not in kept:
                with contextlib.suppress(psutil.NoSuchProcess):
                    totals = _totals(child)
                    self._leave_out(totals)
                    kept.append(child)
                    if _is_server(child):
                        self._servers[child] = totals
        self._children = kept
        self._servers = {child: totals for child, totals in self._servers.items() if child in kept}

    def _leave_out(self, done: Totals, before: Totals | None = None) -> None:
        """Exclude the work of a child since `before`, or all of its work so far, from the totals."""
        cpu_s, _, *read = (
            (now or 0) - (then or 0) for now, then in zip(done, before or Totals(0.0, 0.0, 0, 0), strict=True)
        )
        added = (cpu_s, cpu_s, *read)
        self._uncounted = tuple(sum(pair) for pair in zip(self._uncounted, added, strict=True))


def _is_server(child: Any) -> bool:
    try:
        return os.getsid(child.pid) != os.getsid(0)
    except (AttributeError, OSError):
        # The platform may have no sessions, or the process may have ended.
        return False


def _totals(process: Any) -> Totals:
    cpu_s = children_cpu_s = read_bytes = asked_bytes = None
    with _unreadable():
        times = process.cpu_times()
        children_cpu_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        cpu_s = times.user + times.system + children_cpu_s
    # macOS does not report I/O per process.
    with _unreadable(), contextlib.suppress(AttributeError, NotImplementedError):
        counters = process.io_counters()
        read_bytes, asked_bytes = counters.read_bytes, getattr(counters, "read_chars", None)
    return Totals(cpu_s, children_cpu_s, read_bytes, asked_bytes)


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Ignore values that cannot be read, for example of a zombie, but not that the process no longer exists."""
    try:
        yield
    except (psutil.Error, OSError) as error:
        if isinstance(error, psutil.NoSuchProcess) and not isinstance(error, psutil.ZombieProcess):
            raise

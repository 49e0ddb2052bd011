"""Running totals: what they gain in a second, and those of this process and its children.

The kernel adds what a child has used to its parent's totals when the child is waited for, CPU time and IO alike. So
the sum of the process, of what it has waited for, and of the children that live goes on evenly when a child ends.
Children in a session of their own are servers, as those of mounts, and no part of its work: what they do is taken off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from colabkit.foundation.mount_table import Reader

_LOOK_EVERY_S = 5.0  # finding children reads the table of all processes: 2 ms and more


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


class Totals(NamedTuple):
    """Running totals; those that cannot be read are None.

    Attributes:
        cpu_s: CPU seconds of all.
        children_cpu_s: of the children alone.
        read_bytes: bytes fetched from storage.
        asked_bytes: bytes asked for by reads.
    """

    cpu_s: float | None
    children_cpu_s: float | None
    read_bytes: int | None
    asked_bytes: int | None


class Family:
    """Reads the totals of a process and of its children.

    Args:
        process: as `psutil.Process` has it.
        clock: tells seconds.
        read: returns a file's text.
    """

    def __init__(self, process: Any, clock: Callable[[], float], read: Reader) -> None:
        self._process = process
        self._clock = clock
        self._read = read
        self._children: list[Any] = []
        self._started = ""
        self._due_s = clock()
        self._servers: dict[Any, Totals] = {}  # what they have done so far
        self._uncounted: tuple[float, ...] = (0.0, 0.0, 0, 0)

    def totals(self) -> Totals:
        """Return the totals; what a child did before it was found, at most five seconds, is not in them."""
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
                    if live[-1].cpu_s is None:  # it waits to be waited for, and is then counted as before
                        live[-1] = before
                    self._leave_out(live[-1], before)
                    self._servers[child] = live[-1]

        def sum_of(place: int) -> Any:
            mine = own[place]
            # All that a child used is its parent's children's.
            theirs = sum(one[0 if place == 1 else place] or 0 for one in live)
            return None if mine is None else mine + theirs - self._uncounted[place]

        return Totals(*(sum_of(place) for place in range(4)))

    def _started_children(self) -> str:
        """Return what the kernel lists as children of the main thread, which starts most workers: a cheap look."""
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
        """Take off what a child has done since `before`."""
        cpu_s, _, *read = (
            (now or 0) - (then or 0) for now, then in zip(done, before or Totals(0.0, 0.0, 0, 0), strict=True)
        )
        added = (cpu_s, cpu_s, *read)
        self._uncounted = tuple(sum(pair) for pair in zip(self._uncounted, added, strict=True))


def _is_server(child: Any) -> bool:
    """Return whether a child leads or belongs to another session than this process."""
    try:
        return os.getsid(child.pid) != os.getsid(0)
    except (AttributeError, OSError):  # where there are no sessions, or it has ended
        return False


def _totals(process: Any) -> Totals:
    cpu_s = children_cpu_s = read_bytes = asked_bytes = None
    try:
        times = process.cpu_times()
        children_cpu_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        cpu_s = times.user + times.system + children_cpu_s
    except psutil.ZombieProcess:  # it has ended, and waits to be waited for
        pass
    except psutil.NoSuchProcess:
        raise
    except (psutil.Error, OSError):
        pass
    try:
        counters = process.io_counters()
        read_bytes, asked_bytes = counters.read_bytes, getattr(counters, "read_chars", None)
    except psutil.ZombieProcess:
        pass
    except psutil.NoSuchProcess:
        raise
    except (psutil.Error, OSError, AttributeError, NotImplementedError):  # macOS counts no IO of processes
        pass
    return Totals(cpu_s, children_cpu_s, read_bytes, asked_bytes)

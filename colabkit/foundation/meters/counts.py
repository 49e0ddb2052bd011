"""Running totals of a loader, what they are at one instant, and the facts that a verdict needs beside them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from colabkit.foundation.meters.steps import Clock, StepTimes, StepTotals

_EARLIER = 4  # passes that a GPU may be behind
_RECENT_CALLS = 256
# Names of the running totals, in several records alike.
_PART_SUMS = ("samples", "handled_bytes", "busy_s", "wait_s", "calls", "cpu_s")
_LOADER_SUMS = ("batches", "samples", "passes", "ready", "queued", "queue_room", "retries")
_STEP_SUMS = ("wait_s", "copy_s", "compute_s", "other_s", "first_s", "steps")


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What a loader loads, and how. None is what is not known.

    Attributes:
        kind: how batches are made: rows `"gathered"` or images `"decoded"` in threads, samples one by one in
            `"processes"`, rows gathered on the `"device"`, or a `"foreign"` loader.
        samples: of an epoch of all processes.
        batch_size: of this process.
        device: where batches go, as in `"cpu"` and `"cuda:0"`.
        workers: threads or processes that make them.
        sample_bytes: of a sample as it is stored, on average.
        path: where the samples lie.
        source: where the files lie that a pack was made of.
        is_far: whether that is behind a mount or a network.
        files: how many files they are.
        encoding: `"raw"` rows, `"encoded"` image files, or `"python"` objects.
        tier: where samples live while training, as `Tier.name` has it.
        transform: name of what is done to them.
        is_pinned: whether batches are in page-locked memory before they are sent.
        keeps_workers: whether worker processes outlive an epoch.
    """

    kind: Literal["gathered", "decoded", "processes", "device", "foreign"]
    samples: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    workers: int | None = None
    sample_bytes: float | None = None
    path: str | None = None
    source: str | None = None
    is_far: bool | None = None
    files: int | None = None
    encoding: Literal["raw", "encoded", "python"] | None = None
    tier: str | None = None
    transform: str | None = None
    is_pinned: bool | None = None
    keeps_workers: bool | None = None


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """What one part of the loader has done so far.

    Attributes:
        name: the part, as in `"gather"`.
        samples: samples it has handled.
        handled_bytes: bytes it has handled.
        busy_s: seconds it was at work, of all threads together.
        wait_s: seconds it waited: for data from the part before it, or for room for what it makes.
        calls: how often it was at work.
        p95_s: 95th percentile of the seconds of its last 256 calls; 0 where there was none.
        cpu_s: seconds of a CPU that its threads got while they were at work; 0 where that was not measured.
    """

    name: str
    samples: int
    handled_bytes: int
    busy_s: float
    wait_s: float = 0.0
    calls: int = 0
    p95_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second of one thread at work on nothing else; 0 where nothing was timed."""
        return self.samples / self.busy_s if self.busy_s else 0.0

    def __sub__(self, earlier: PartSnapshot) -> PartSnapshot:
        """Return what happened since `earlier`."""
        return replace(self, **_differences(self, earlier, _PART_SUMS))


@dataclass(frozen=True, slots=True)
class MetersSnapshot:
    """The loader's meters at one instant.

    Attributes:
        batches: batches handed to the user.
        samples: samples in them.
        wait_s: seconds of whole steps that went to waiting for data; see `StepTimes`.
        copy_s: to copies that nothing hid.
        compute_s: to the steps themselves.
        other_s: to other work of the host.
        first_s: seconds until the first batch of each pass, summed; part of `wait_s`.
        passes: passes over the loader that began.
        steps: whole steps that were timed.
        ready: how many of the batches were ready when asked for.
        parts: the loader's parts in order.
        queued: groups of batches that were ready and waiting, summed over the times that one was asked for.
        queue_room: groups that could have waited, summed likewise.
        retries: reads of a far source that were tried again.
        recent: the newest steps, up to 512, oldest first.
        first_pass: what this was when the second pass began, without `recent`; None before.
    """

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0
    first_s: float = 0.0
    passes: int = 0
    steps: int = 0
    ready: int = 0
    parts: tuple[PartSnapshot, ...] = ()
    queued: int = 0
    queue_room: int = 0
    retries: int = 0
    recent: tuple[StepTimes, ...] = field(default=(), repr=False)
    first_pass: MetersSnapshot | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of all whole steps."""
        return self.wait_s + self.copy_s + self.compute_s + self.other_s

    @property
    def wait_share(self) -> float:
        """Share of the time spent waiting for data, in [0, 1]."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def occupancy_rate(self) -> float:
        """Share of batches that were ready when asked for, in [0, 1]; near 0 the loader is too slow."""
        return self.ready / self.batches if self.batches else 0.0

    @property
    def queue_rate(self) -> float:
        """How full the queue of ready batches was on average, in [0, 1]; near 1 the loader is faster than the step."""
        return self.queued / self.queue_room if self.queue_room else 0.0

    def __sub__(self, earlier: MetersSnapshot) -> MetersSnapshot:
        """Return what happened between `earlier` and this snapshot of the same meters."""
        before = {part.name: part for part in earlier.parts}
        parts = tuple(part - before[part.name] if part.name in before else part for part in self.parts)
        sums = _differences(self, earlier, (*_LOADER_SUMS, *_STEP_SUMS))
        recent = self.recent[max(0, len(self.recent) - sums["steps"]) :]
        first_pass = None if earlier.passes or self.first_pass is None else self.first_pass - earlier
        return MetersSnapshot(**sums, parts=parts, recent=recent, first_pass=first_pass)


def _differences(later: object, earlier: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(later, name) - getattr(earlier, name) for name in names}


@dataclass(slots=True)
class _PartCounts:
    samples: int = 0
    handled_bytes: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0
    calls: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_CALLS))


@dataclass(slots=True, weakref_slot=True)
class LoaderMeters:
    """Running totals of one loader. Parts may be written and all may be read from any thread.

    `spent` has the seconds of steps; `facts` are what is known of the loader; `clock` is that of its newest pass, which
    `train()` tells how long a step took.
    """

    batches: int = 0
    samples: int = 0
    passes: int = 0
    ready: int = 0
    queued: int = 0
    queue_room: int = 0
    retries: int = 0
    spent: StepTotals = field(default_factory=StepTotals)
    facts: LoaderFacts | None = field(default=None, repr=False)
    clock: Clock | None = field(default=None, repr=False)
    _earlier: deque[Clock] = field(default_factory=lambda: deque(maxlen=_EARLIER), repr=False)
    _parts: dict[str, _PartCounts] = field(default_factory=dict, repr=False)
    _first_pass: MetersSnapshot | None = field(default=None, repr=False)
    # Both are taken again by the same thread where the garbage collector ends a pass that was left: within a call.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _settling: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def timed_s(self) -> float:
        """When the newest step that was counted was over, on the scale of `time.monotonic()`; 0 before the first."""
        if not self.spent.left_s:
            return 0.0
        return time.monotonic() - (time.perf_counter() - self.spent.left_s)

    @contextmanager
    def busy(self, part: str, samples: int, handled_bytes: int) -> Iterator[None]:
        """Count the block as work of `part`."""
        started, cpu_started = time.perf_counter(), time.thread_time()
        yield
        cpu_s = time.thread_time() - cpu_started
        self.add(part, samples, handled_bytes, time.perf_counter() - started, cpu_s=cpu_s)

    def add(
        self,
        part: str,
        samples: int,
        handled_bytes: int,
        busy_s: float,
        wait_s: float = 0.0,
        *,
        cpu_s: float = 0.0,
    ) -> None:
        """Count work of `part` that was timed elsewhere."""
        meter = self._parts.get(part) or self._parts.setdefault(part, _PartCounts())
        with self._lock:
            meter.busy_s += busy_s
            meter.wait_s += wait_s
            meter.cpu_s += cpu_s
            meter.samples += samples
            meter.handled_bytes += handled_bytes
            if busy_s:
                meter.calls += 1
                meter.recent.append(busy_s)

    def retried(self) -> None:
        """Count a read that was tried again."""
        with self._lock:
            self.retries += 1

    def begin_pass(self, clock: Clock) -> None:
        """Count a pass, which `clock` times; what the one before has not told yet is taken in later."""
        if self.passes == 1:
            self._first_pass = replace(self.snapshot(), recent=())
        self.passes += 1
        if self.clock is not None:
            self._earlier.append(self.clock)
        self.clock = clock

    def settle(self, clock: Clock) -> None:
        """Count the steps that a clock has timed since it was asked before, if it does not count them itself."""
        with self._settling:
            newest = clock.settled()
            if not newest:
                return
            self.spent.add(newest)
            self.spent.left_s = max(self.spent.left_s, clock.left_s)  # a stream may have come by long before

    def snapshot(self) -> MetersSnapshot:
        """Return the totals at this instant."""
        for clock in tuple(self._earlier):
            self.settle(clock)
            if not clock.is_behind and clock in self._earlier:
                self._earlier.remove(clock)
        if self.clock is not None:
            self.settle(self.clock)
        parts = tuple(
            PartSnapshot(name, p95_s=_p95(part.recent), **{total: getattr(part, total) for total in _PART_SUMS})
            for name, part in list(self._parts.items())
        )
        sums: dict[str, Any] = {name: getattr(self, name) for name in _LOADER_SUMS}
        sums |= {name: getattr(self.spent, name) for name in _STEP_SUMS}
        recent = tuple(map(StepTimes._make, self.spent.newest.copy()))
        return MetersSnapshot(**sums, parts=parts, recent=recent, first_pass=self._first_pass)


def _p95(seconds: deque[float]) -> float:
    ordered = sorted(seconds.copy())
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0

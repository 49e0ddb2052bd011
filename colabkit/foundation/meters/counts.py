"""Running totals of a loader, snapshots of them, and facts about the loader that the doctor needs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from colabkit.foundation.meters.steps import Clock, Mark, StepTimes, StepTotals, Stretch, taken
from colabkit.foundation.telemetry.threads import train_in_this_thread

# Maximum number of earlier passes that are kept because the GPU may not have finished their steps.
_EARLIER = 4
_RECENT_CALLS = 256
# Names of running totals that several classes share.
_PART_SUMS = ("samples", "handled_bytes", "busy_s", "wait_s", "calls", "cpu_s")
_LOADER_SUMS = (
    "batches", "samples", "passes", "ready", "queued", "queue_room", "retries", "validate_s", "save_s", "save_apart_s",
)  # fmt: skip
_STEP_SUMS = ("wait_s", "copy_s", "compute_s", "other_s", "first_s", "steps")


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """Facts about a loader and its data. Unknown values are None.

    Attributes:
        kind: how batches are made: threads gather rows (`"gathered"`) or decode images (`"decoded"`), worker processes
            make one sample at a time (`"processes"`), the device gathers rows (`"device"`), or a third-party loader
            makes the batches (`"foreign"`).
        samples: number of samples per epoch, over all processes.
        batch_size: batch size of this process.
        device: device of the batches, for example `"cpu"` or `"cuda:0"`.
        workers: number of threads or processes that make batches.
        sample_bytes: mean stored size of a sample in bytes; for a third-party loader, its size in the first batch.
        path: path of the samples.
        source: path of the files that a pack was made from.
        is_remote: whether the samples are on a remote mount or a network.
        is_arriving: whether the samples were still being packed when the loader was made.
        files: number of image files that hold the samples.
        encoding: `"raw"` rows, `"encoded"` image files, or `"python"` objects.
        tier: storage tier of the samples, a `Tier.name`.
        transform: name of the transform.
        is_pinned: whether batches are in pinned memory before they are copied to the device.
        keeps_workers: whether worker processes persist between epochs.
        split: split of the pack or of the files.
        image_height: height in pixels of the images in the first batch; also None if samples are not images.
        image_width: width in pixels of these images.
        shuffle: whether samples are shuffled, or `"block"`.
        prefetch: number of batches to make ahead; for a `DataLoader`, per worker.
        is_stream: whether the dataset is an `IterableDataset`, of which each worker yields all samples by default.
        has_mappings: whether the first batch was a dict or another mapping.
        settable: options that the user can change, if a call such as `train_on()` made the loader; empty means all.
    """

    kind: Literal["gathered", "decoded", "processes", "device", "foreign"]
    samples: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    workers: int | None = None
    sample_bytes: float | None = None
    path: str | None = None
    source: str | None = None
    is_remote: bool | None = None
    is_arriving: bool = False
    files: int | None = None
    encoding: Literal["raw", "encoded", "python"] | None = None
    tier: str | None = None
    transform: str | None = None
    is_pinned: bool | None = None
    keeps_workers: bool | None = None
    split: str | None = None
    image_height: int | None = None
    image_width: int | None = None
    shuffle: bool | str | None = None
    prefetch: int | None = None
    is_stream: bool = False
    has_mappings: bool = False
    settable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """Totals of one part of a loader.

    Attributes:
        name: name of the part, for example `"gather"`.
        samples: number of processed samples.
        handled_bytes: number of processed bytes.
        busy_s: busy seconds, summed over all threads or processes.
        wait_s: seconds spent waiting for input or for space in the output queue.
        calls: number of calls.
        p95_s: 95th percentile of the duration of the last 256 calls, in seconds; 0 without calls.
        cpu_s: CPU seconds of these threads or processes while busy; 0 if not measured.
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
        """Samples per busy second of one thread or process; 0 if nothing was timed."""
        return self.samples / self.busy_s if self.busy_s else 0.0

    def __sub__(self, earlier: PartSnapshot) -> PartSnapshot:
        """Return the difference from an earlier snapshot; `p95_s` is that of this snapshot."""
        return replace(self, **_differences(self, earlier, _PART_SUMS))


@dataclass(frozen=True, slots=True)
class MetersSnapshot:
    """A snapshot of a loader's meters.

    Attributes:
        batches: number of batches that the user received.
        samples: number of samples in them.
        wait_s: seconds that steps spent waiting for data; see `StepTimes`.
        copy_s: seconds that steps spent on copies that do not overlap with compute.
        compute_s: seconds of compute.
        other_s: seconds of other work on the host.
        first_s: seconds until the first batch of each pass, summed; included in `wait_s`.
        passes: number of passes over the loader that have begun.
        steps: number of complete steps that were timed.
        ready: number of batches that were ready when requested.
        parts: the loader's parts in order.
        queued: number of batches, or groups of batches, in the ready queue, summed over all requests.
        queue_room: capacity of the ready queue in the same unit, summed over all requests.
        retries: number of retried reads of a remote source.
        validate_s: seconds of validations of `train()`, which do not count as time of steps.
        save_s: seconds for which `train()` waited for checkpoints.
        save_apart_s: the part of `save_s` after the last step of an epoch, which does not count as time of steps.
        recent: the newest steps, up to 512, oldest first.
        first_pass: snapshot at the start of the second pass, without `recent`; None before that.
        stretches: the whole run in at most 120 stretches of a second or more, oldest first.
        rank_waits: share of the newest epoch that each rank of `train()` waited for data, in [0, 1]; empty before its
            end, and for a single rank.
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
    validate_s: float = 0.0
    save_s: float = 0.0
    save_apart_s: float = 0.0
    recent: tuple[StepTimes, ...] = field(default=(), repr=False)
    first_pass: MetersSnapshot | None = field(default=None, repr=False)
    stretches: tuple[Stretch, ...] = field(default=(), repr=False)
    rank_waits: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of all complete steps."""
        return self.wait_s + self.copy_s + self.compute_s + self.other_s

    @property
    def wait_share(self) -> float:
        """Share of `seconds` spent waiting for data, in [0, 1]."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def occupancy_rate(self) -> float:
        """Share of batches that were ready when requested, in [0, 1]; near 0, the loader is too slow."""
        return self.ready / self.batches if self.batches else 0.0

    @property
    def queue_rate(self) -> float:
        """Mean fill level of the queue of ready batches, in [0, 1]; near 1, the loader is faster than the step."""
        return self.queued / self.queue_room if self.queue_room else 0.0

    def __sub__(self, earlier: MetersSnapshot) -> MetersSnapshot:
        before = {part.name: part for part in earlier.parts}
        parts = tuple(part - before[part.name] if part.name in before else part for part in self.parts)
        sums = _differences(self, earlier, (*_LOADER_SUMS, *_STEP_SUMS))
        recent = self.recent[max(0, len(self.recent) - sums["steps"]) :]
        first_pass = None if earlier.passes or self.first_pass is None else self.first_pass - earlier
        stretches = _stretches_after(self.stretches, earlier.steps)
        more: dict[str, Any] = {"first_pass": first_pass, "stretches": stretches, "rank_waits": self.rank_waits}
        return MetersSnapshot(**sums, parts=parts, recent=recent, **more)


def _stretches_after(stretches: tuple[Stretch, ...], steps: int) -> tuple[Stretch, ...]:
    """Return the stretches that begin after the given number of steps."""
    done = 0
    for number, stretch in enumerate(stretches):
        if done >= steps:
            return stretches[number:]
        done += stretch.steps
    return ()


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
    """Running totals of one loader. Any thread may update parts and take snapshots.

    Attributes:
        batches: number of batches that the user received.
        samples: number of samples in them.
        passes: number of passes over the loader that have begun.
        ready: number of batches that were ready when requested.
        queued: number of batches, or groups of batches, in the ready queue, summed over all requests.
        queue_room: capacity of the ready queue in the same unit, summed over all requests.
        retries: number of retried reads of a remote source.
        validate_s: seconds of validations of `train()`.
        save_s: seconds for which `train()` waited for checkpoints.
        save_apart_s: the part of `save_s` after the last step of an epoch, which does not count as time of steps.
        rank_waits: share of the newest epoch that each rank of `train()` waited for data; empty for a single rank.
        spent: totals of the step times.
        facts: facts about the loader; None if unknown.
        clock: clock of the newest pass, to which `train()` reports the duration of each step.
        has_trained: whether gradients were enabled when a pass began.
    """

    batches: int = 0
    samples: int = 0
    passes: int = 0
    ready: int = 0
    queued: int = 0
    queue_room: int = 0
    retries: int = 0
    validate_s: float = 0.0
    save_s: float = 0.0
    save_apart_s: float = 0.0
    rank_waits: tuple[float, ...] = ()
    spent: StepTotals = field(default_factory=StepTotals)
    facts: LoaderFacts | None = field(default=None, repr=False)
    clock: Clock | None = field(default=None, repr=False)
    has_trained: bool = False
    _earlier: deque[Clock] = field(default_factory=lambda: deque(maxlen=_EARLIER), repr=False)
    _copies: deque[tuple[int, int, Mark, Mark]] = field(default_factory=deque, repr=False)
    _parts: dict[str, _PartCounts] = field(default_factory=dict, repr=False)
    _first_pass: MetersSnapshot | None = field(default=None, repr=False)
    # Reentrant, since the garbage collector may end an abandoned pass while this thread holds a lock.
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _settling: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def timed_s(self) -> float:
        """End of the newest counted step, on the scale of `time.monotonic()`; 0 before the first step."""
        if not self.spent.left_s:
            return 0.0
        return time.monotonic() - (time.perf_counter() - self.spent.left_s)

    @contextmanager
    def busy(self, part: str, samples: int, handled_bytes: int) -> Iterator[None]:
        """Time the block and count its work for `part`."""
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
        """Count work for `part` that the caller has timed."""
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

    def copied(self, samples: int, copied_bytes: int, started: Mark, ended: Mark) -> None:
        """Count a copy to a device, between two marks in the stream, as `transfer` once it has ended."""
        self._copies.append((samples, copied_bytes, started, ended))
        self._count_copies()

    def _count_copies(self) -> None:
        """Count the copies that have ended, without waiting for the others."""
        with self._settling:
            for copy in taken(self._copies):
                samples, size, started, ended = copy
                if not ended.query():
                    self._copies.appendleft(copy)
                    return
                self.add("transfer", samples, size, started.elapsed_time(ended) / 1000)

    def retried(self) -> None:
        """Count a retried read."""
        with self._lock:
            self.retries += 1

    def saved(self, seconds: float, *, is_apart: bool) -> None:
        """Count a wait of `train()` for a checkpoint, either within a step or apart from the steps."""
        self.save_s += seconds
        self.save_apart_s += seconds * is_apart

    def begin_pass(self, clock: Clock) -> None:
        """Start a pass timed by `clock`; unfinished steps of the previous pass are counted later."""
        if self.passes == 1:
            self._first_pass = replace(self.snapshot(), recent=(), stretches=())
        self.passes += 1
        if self.clock is not None:
            self._earlier.append(self.clock)
        self.clock = clock
        train_in_this_thread()

    def settle(self, clock: Clock) -> None:
        """Count the copies that have ended, and a clock's new steps unless the clock counts them itself."""
        self._count_copies()
        with self._settling:
            newest = clock.settled()
            if not newest:
                return
            self.spent.add(newest)
            # Compare the times, because steps of an earlier pass may be counted after newer ones.
            self.spent.left_s = max(self.spent.left_s, clock.left_s)
            if self.spent.left_s >= self.spent.due_s:
                self.spent.end_stretch(self.spent.left_s)

    def snapshot(self) -> MetersSnapshot:
        """Return a snapshot of the totals."""
        self._count_copies()
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
        stretches = tuple(self.spent.stretches)
        more: dict[str, Any] = {"first_pass": self._first_pass, "stretches": stretches, "rank_waits": self.rank_waits}
        return MetersSnapshot(**sums, parts=parts, recent=recent, **more)


def _p95(seconds: deque[float]) -> float:
    ordered = sorted(seconds.copy())
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0

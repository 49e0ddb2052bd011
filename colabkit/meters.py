"""Counts and seconds of each part of the work, and the events that loader and training publish.

Loader and training publish here and know nothing of who listens; panels and other listeners subscribe. A listener that
raises is taken off the list and named once in the log: watching never stops a run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "BatchTaken",
    "EpochStarted",
    "Event",
    "LoaderMeters",
    "MetersSnapshot",
    "PartSnapshot",
    "RunEnded",
    "RunStarted",
    "StepDone",
    "Waiting",
    "is_heard",
    "publish",
    "subscribe",
]

logger = logging.getLogger("colabkit")


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """What one part of the loader has done so far.

    Attributes:
        name: the part, as in `"gather"`.
        samples: samples it has handled.
        handled_bytes: bytes it has handled.
        busy_s: seconds it was at work, of all threads together.
        wait_s: seconds it waited: for data from the part before it, or for room for what it makes.
    """

    name: str
    samples: int
    handled_bytes: int
    busy_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MetersSnapshot:
    """The loader's meters at one instant.

    Attributes:
        batches: batches handed to the user.
        samples: samples in them.
        wait_s: seconds the user waited for batches.
        user_s: seconds between batches, spent outside the loader.
        ready: how many of the batches were ready when asked for.
        parts: the loader's parts in order.
        queued: groups of batches that were ready and waiting, summed over the times that one was asked for.
        queue_room: groups that could have waited, summed likewise.
        retries: reads of a far source that were tried again.
    """

    batches: int
    samples: int
    wait_s: float
    user_s: float
    ready: int
    parts: tuple[PartSnapshot, ...]
    queued: int = 0
    queue_room: int = 0
    retries: int = 0

    @property
    def wait_share(self) -> float:
        """Share of the time spent waiting for data, in [0, 1]."""
        total = self.wait_s + self.user_s
        return self.wait_s / total if total else 0.0

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
        zero = PartSnapshot("", 0, 0, 0.0)
        parts = tuple(
            PartSnapshot(
                part.name,
                part.samples - before.get(part.name, zero).samples,
                part.handled_bytes - before.get(part.name, zero).handled_bytes,
                part.busy_s - before.get(part.name, zero).busy_s,
                part.wait_s - before.get(part.name, zero).wait_s,
            )
            for part in self.parts
        )
        return MetersSnapshot(
            self.batches - earlier.batches,
            self.samples - earlier.samples,
            self.wait_s - earlier.wait_s,
            self.user_s - earlier.user_s,
            self.ready - earlier.ready,
            parts,
            self.queued - earlier.queued,
            self.queue_room - earlier.queue_room,
            self.retries - earlier.retries,
        )


@dataclass(slots=True)
class _Part:
    samples: int = 0
    handled_bytes: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class LoaderMeters:
    """Running totals of one loader. Parts may be written and all may be read from any thread."""

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    user_s: float = 0.0
    ready: int = 0
    queued: int = 0
    queue_room: int = 0
    retries: int = 0
    _parts: dict[str, _Part] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def busy(self, part: str, samples: int, handled_bytes: int) -> Iterator[None]:
        """Count the block as work of `part`."""
        started = time.perf_counter()
        yield
        self.add(part, samples, handled_bytes, time.perf_counter() - started)

    def add(self, part: str, samples: int, handled_bytes: int, busy_s: float, wait_s: float = 0.0) -> None:
        """Count work of `part` that was timed elsewhere."""
        with self._lock:
            meter = self._parts.setdefault(part, _Part())
            meter.busy_s += busy_s
            meter.wait_s += wait_s
            meter.samples += samples
            meter.handled_bytes += handled_bytes

    def retried(self) -> None:
        """Count a read that was tried again."""
        with self._lock:
            self.retries += 1

    def snapshot(self) -> MetersSnapshot:
        """Return the totals at this instant."""
        parts = tuple(
            PartSnapshot(name, part.samples, part.handled_bytes, part.busy_s, part.wait_s)
            for name, part in list(self._parts.items())
        )
        return MetersSnapshot(
            self.batches,
            self.samples,
            self.wait_s,
            self.user_s,
            self.ready,
            parts,
            self.queued,
            self.queue_room,
            self.retries,
        )


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """A pass over a loader begins: its number from 0, and how many batches and samples it has left."""

    meters: LoaderMeters
    epoch: int
    batches: int
    samples: int


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """The user has received a batch."""

    meters: LoaderMeters


@dataclass(frozen=True, slots=True)
class Waiting:
    """The user is waiting for a batch and has been for `wait_s` seconds; sent a few times a second while it lasts."""

    meters: LoaderMeters
    wait_s: float


@dataclass(frozen=True, slots=True)
class RunStarted:
    """`train()` begins: epochs in all, steps of a whole epoch."""

    meters: LoaderMeters
    epochs: int
    steps_per_epoch: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is over: its number in all, its number in this epoch, both from 1.

    `values` are what the step returned, not yet read from the device: `float(value)` reads them.
    """

    epoch: int
    step: int
    step_in_epoch: int
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """`train()` ends; `error` is the exception's name when it did not end by itself."""

    error: str | None


Event: TypeAlias = EpochStarted | BatchTaken | Waiting | RunStarted | StepDone | RunEnded
Listener: TypeAlias = Callable[[Event], None]

_listeners: list[Listener] = []
os.register_at_fork(after_in_child=_listeners.clear)  # a panel is its own process's


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event, in the thread that causes it; return the function that ends this."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return unsubscribe


def is_heard() -> bool:
    """Return whether anybody listens; where events are many, none need be made else."""
    return bool(_listeners)


def publish(event: Event) -> None:
    """Tell every listener. One that raises an `Exception` is dropped and logged."""
    for listener in tuple(_listeners):
        try:
            listener(event)
        except Exception:
            if listener in _listeners:
                _listeners.remove(listener)
            logger.warning("a listener of the meters failed and was dropped; the run goes on", exc_info=True)

"""Step times: how each step splits into waiting for data, exposed copy, compute and other work on the host.

On the CPU, the host's clock measures these times directly. A GPU runs asynchronously, so three events per step are
recorded in its stream. They are read a few steps later, when they have completed, so that reading does not block. In
this diagram, events are in brackets, and the times between them are not:

    [end of step i-1] idle [start of the wait for the batch] exposed copy [batch ready] compute [end of step i]

The stream is idle while the host waits for data or does other work. The idle time counts as waiting for data, up to the
time that the host waited; the rest is other work.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

_Noted = TypeVar("_Noted")

_RECENT_STEPS = 512
# Maximum number of unfinished steps in a stream; older ones are not counted.
_UNREAD = 256
# Reading the CPU time of a thread takes a microsecond, and up to 7 us if caches are cold. Therefore only some of the
# shorter steps are measured: one in 17 of under 1 ms, and one in 7 of under 20 ms. Neither divides usual intervals, so
# the measured steps do not always include, or never include, those that update the weights or log.
_SHORT_S, _OF_SHORT = 1e-3, 17
_LONG_S, _OF_MEDIUM = 20e-3, 7
# A stretch of the run takes at least this long; once there are too many, adjacent ones are joined.
_STRETCH_S, _STRETCHES = 1.0, 120


class StepTimes(NamedTuple):
    """The duration of one step, split into four parts.

    Attributes:
        wait_s: seconds waiting for data.
        copy_s: seconds waiting for a copy of the batch to the device, not overlapped by compute.
        compute_s: seconds of the step itself; in loops that do not mark the step, all work on a batch.
        other_s: seconds of other work on the host, such as logging, checkpoints and the panel.
        samples: number of samples in the batch.
        is_first: whether the step is the first of a pass, whose wait includes the start of the loader.
        cpu_s: CPU seconds of the training thread during `compute_s` and `other_s`; None if not measured.
    """

    wait_s: float
    copy_s: float
    compute_s: float
    other_s: float
    samples: int = 0
    is_first: bool = False
    cpu_s: float | None = None

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return self.wait_s + self.copy_s + self.compute_s + self.other_s


# The fields of `StepTimes` as a plain tuple, which is faster to create.
_StepFields: TypeAlias = tuple[float, float, float, float, int, bool, float | None]


class Stretch(NamedTuple):
    """Totals of successive steps of a run, about a second or more.

    Attributes:
        steps: number of steps.
        samples: number of samples in them.
        seconds: duration of these steps, without the first wait of a pass.
        wait_s: seconds of them spent waiting for data, without the first wait of a pass.
    """

    steps: int
    samples: int
    seconds: float
    wait_s: float

    def joined(self, later: Stretch) -> Stretch:
        """Return this stretch and a later one as one stretch."""
        return Stretch(*map(operator.add, self, later))

    def after(self, earlier: Stretch) -> Stretch:
        """Return the rest of this stretch after an earlier one with the same start."""
        return Stretch(*map(operator.sub, self, earlier))


@dataclass(slots=True)
class StepTotals:
    """Totals of complete steps, and the newest steps; `left_s` is the end of the last step, by `time.perf_counter`.

    Clocks refer to this object instead of the meters, so that no reference cycle keeps the meters alive.
    `stretches` divides the whole run into at most 120 stretches, oldest first.
    """

    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0
    first_s: float = 0.0
    steps: int = 0
    samples: int = 0
    left_s: float = field(default=0.0, repr=False)
    newest: deque[_StepFields] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS), repr=False)
    stretches: list[Stretch] = field(default_factory=list, repr=False)
    due_s: float = field(default=0.0, repr=False)
    _before: Stretch = field(default=Stretch(0, 0, 0.0, 0.0), init=False, repr=False)
    _span_s: float = field(default=_STRETCH_S, init=False, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of all complete steps."""
        return self.wait_s + self.copy_s + self.compute_s + self.other_s

    def end_stretch(self, now_s: float) -> None:
        """End a stretch of the run if enough time has passed; call this once `now_s` has reached `due_s`."""
        wait_s = self.wait_s - self.first_s
        totals = Stretch(self.steps, self.samples, self.seconds - self.first_s, wait_s)
        passed = totals.after(self._before)
        # The time between two passes is not counted, so a stretch that is due may still be too short.
        self.due_s = now_s + max(self._span_s - passed.seconds, 0.1 * self._span_s)
        if passed.seconds < self._span_s:
            return
        self._before, self.due_s = totals, now_s + self._span_s
        self.stretches.append(passed)
        if len(self.stretches) >= _STRETCHES:
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches[:] = [earlier.joined(later) for earlier, later in pairs]
            self._span_s *= 2

    def add(self, steps: Sequence[StepTimes]) -> None:
        """Add one or more steps."""
        waits, copies, computes, others, samples, are_first, _ = zip(*steps, strict=True)
        first_s = sum(itertools.compress(waits, are_first))
        self.steps += len(steps)
        self.samples += sum(samples)
        self.wait_s += sum(waits)
        self.copy_s += sum(copies)
        self.compute_s += sum(computes)
        self.other_s += sum(others)
        self.first_s += first_s
        self.newest.extend(steps)


class Mark(Protocol):
    """A point in a device's stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the stream has reached this point."""

    def synchronize(self) -> None:
        """Wait until the stream has reached this point."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds until a later mark."""


class HostClock:
    """A clock for steps on the CPU, which uses the host's clock and counts each step when it ends.

    The loader calls `given` and `stepped` for each batch; training calls `worked` and `apart` in between. The class
    accesses little memory, since fast loaders yield 10,000 batches per second and fill the CPU caches.

    Args:
        totals: totals to which steps are added.
    """

    __slots__ = ("_apart_s", "_compute_s", "_cpu_s", "_is_first", "_is_measured", "_totals")

    def __init__(self, totals: StepTotals) -> None:
        self._totals = totals
        self._compute_s: float | None = None
        self._apart_s = 0.0
        self._is_first = True
        # The CPU time of the thread when it received the batch, if the CPU time of this step is measured.
        self._cpu_s: float | None = None
        self._is_measured = True

    def given(self, marks: tuple[Mark, Mark] | None) -> None:
        """Read the CPU time of the thread; `stepped` receives the time at which the loop received the batch."""
        if self._is_measured:
            self._cpu_s = thread_time()

    def worked(self, compute_s: float) -> None:
        """Record the duration of the step on this batch, in seconds."""
        self._compute_s = compute_s

    def apart(self, seconds: float) -> None:
        """Exclude the given number of seconds since `given` from the step."""
        self._apart_s += seconds

    def stepped(self, asked: float, given: float, left: float, samples: int) -> None:
        """Record the end of a step, given the times of its batch's request and arrival, and of its end."""
        totals, told_s, is_first = self._totals, self._compute_s, self._is_first
        wait_s, compute_s, other_s = given - asked, left - given, 0.0
        # If some time is excluded from the step, its CPU time is unknown: the thread may have computed in that time.
        began_s, self._cpu_s = self._cpu_s, None
        cpu_s = None if began_s is None or self._apart_s else thread_time() - began_s
        every = 1 if compute_s > _LONG_S else _OF_MEDIUM if compute_s > _SHORT_S else _OF_SHORT
        self._is_measured = totals.steps % every == 0
        if told_s is not None or self._apart_s:
            user_s = max(0.0, compute_s - self._apart_s)
            compute_s = user_s if told_s is None else min(told_s, user_s)
            other_s = user_s - compute_s
            totals.other_s += other_s
            self._compute_s, self._apart_s = None, 0.0
        if is_first:
            totals.first_s += wait_s
            self._is_first = False
        totals.steps += 1
        totals.wait_s += wait_s
        totals.compute_s += compute_s
        totals.samples += samples
        totals.left_s = left
        totals.newest.append((wait_s, 0.0, compute_s, other_s, samples, is_first, cpu_s))
        if left >= totals.due_s:
            totals.end_stretch(left)

    def settled(self) -> Sequence[StepTimes]:
        """Return no steps, since this clock counts steps itself."""
        return ()

    def finish(self) -> None:
        """Do nothing: steps on the CPU end before they are counted."""

    @property
    def is_behind(self) -> bool:
        """Whether some steps are still pending; always false, since steps are counted when they end."""
        return False

    @property
    def left_s(self) -> float:
        """The end of the newest step on the host, by `time.perf_counter`."""
        return self._totals.left_s


class DeviceClock:
    """A clock for steps on a GPU, which records events in the GPU's stream.

    Args:
        mark: function that records an event in the stream.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._marks: tuple[Mark, Mark] | None = None
        self._end: Mark | None = None
        self._former_end: Mark | None = None
        self._apart_s = 0.0
        self._former_apart_s = 0.0
        self.left_s = 0.0
        self._noted: deque[_DeviceStep] = deque()

    def given(self, marks: tuple[Mark, Mark] | None) -> None:
        """Record that the loop received a batch, which is ready at the second mark or, if there are no marks, now."""
        if marks is None:
            here = self._mark()
            marks = here, here
        self._marks = marks

    def worked(self, compute_s: float) -> None:
        """Record that all work of the step has been queued in the stream."""
        self._end = self._mark()

    def apart(self, seconds: float) -> None:
        """Exclude the given number of seconds after the step, such as those of a validation, from all step times."""
        self._apart_s += seconds

    def stepped(self, asked: float, given: float, left: float, samples: int) -> None:
        """Record the end of a step on the host, given the times of its batch's request and arrival, and of its end."""
        end = self._end or self._mark()
        if self._marks is not None:
            before, after = self._marks
            step = _DeviceStep(self._former_end, before, after, end, given - asked, self._former_apart_s, samples)
            self._noted.append(step)
            if len(self._noted) > _UNREAD:
                self._noted.popleft()
        self._former_end, self._end, self._marks = end, None, None
        self.left_s = left
        self._former_apart_s, self._apart_s = self._apart_s, 0.0

    def settled(self) -> list[StepTimes]:
        """Return the steps that the stream has finished, each once; may be called from any thread."""
        found = []
        for step in taken(self._noted):
            # Consecutive steps may use different streams, so the end of a step does not imply the other marks.
            if not all(mark.query() for mark in step[:4] if mark is not None):
                self._noted.appendleft(step)
                break
            # Ignore errors, because the time between marks on two GPUs is undefined and must not stop training.
            with suppress(RuntimeError):
                found.append(step.times())
        return found

    def finish(self) -> None:
        """Wait until the stream has finished the newest step."""
        if (end := self._end or self._former_end) is not None:
            end.synchronize()

    @property
    def is_behind(self) -> bool:
        """Whether some steps are still pending in the stream."""
        return bool(self._noted)


Clock: TypeAlias = HostClock | DeviceClock


class _DeviceStep(NamedTuple):
    """The marks of one step in a stream.

    Attributes:
        former_end: end of the previous step; None for the first step.
        before: start of the stream's wait for the batch.
        after: point at which the batch is ready.
        end: end of the step.
        wait_s: seconds that the host waited for the batch.
        apart_s: seconds between the previous step and this one that count for neither.
        samples: number of samples in the batch.
    """

    former_end: Mark | None
    before: Mark
    after: Mark
    end: Mark
    wait_s: float
    apart_s: float
    samples: int

    def times(self) -> StepTimes:
        """Return the step times; requires that the stream has reached all marks."""
        starved_s = self.wait_s
        if self.former_end is not None:
            # In different streams, a step may begin before the previous one ends.
            starved_s = max(0.0, self.former_end.elapsed_time(self.before) / 1000)
        data_s = min(self.wait_s, starved_s)
        copy_s = 0.0 if self.before is self.after else self.before.elapsed_time(self.after) / 1000
        compute_s = max(0.0, self.after.elapsed_time(self.end) / 1000)
        other_s = max(0.0, starved_s - data_s - self.apart_s)
        return StepTimes(data_s, copy_s, compute_s, other_s, self.samples, self.former_end is None)


def taken(noted: deque[_Noted]) -> Iterator[_Noted]:
    """Yield and remove the items; other threads, or the garbage collector, may add or take items meanwhile."""
    while True:
        try:
            yield noted.popleft()
        except IndexError:
            return

"""Where the time of each step goes: waiting for data, an exposed copy, the step itself, other work of the host.

On the CPU the host's clock tells it exactly. A GPU works behind the host's back, so there three events are recorded in
its stream for each step, and read when they have happened, a few steps later, without waiting for any. With `asked`
and `given` from the host's clock:

    end of step i-1 │ starved │ the batch is to be there │ exposed copy │ it is │ the step │ end of step i

The stream is starved of work while the host waits for data, and while it does something else; the former is what the
host has waited, as far as the stream was starved.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

_Noted = TypeVar("_Noted")

_RECENT_STEPS = 512
_UNREAD = 256  # steps that a stream may be behind; older ones are not counted


class StepTimes(NamedTuple):
    """Where the seconds of one step went; the four add up to it.

    Attributes:
        wait_s: waiting for data.
        copy_s: waiting for a batch on its way to the device, which nothing hid.
        compute_s: the step itself; all that the user does with a batch, where nobody tells what is the step.
        other_s: other work of the host: logging, checkpoints, the panel.
        samples: of its batch.
        is_first: whether it is the first one of a pass, whose wait has the loader's start in it.
    """

    wait_s: float
    copy_s: float
    compute_s: float
    other_s: float
    samples: int = 0
    is_first: bool = False

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.wait_s + self.copy_s + self.compute_s + self.other_s


_Step: TypeAlias = tuple[float, float, float, float, int, bool]  # as `StepTimes`, which takes longer to make


@dataclass(slots=True)
class StepTotals:
    """What all whole steps came to, and the newest ones; `left_s` is when these were over, by `time.perf_counter`.

    Clocks refer to it, and not to the meters that refer to them: so these are gone as soon as their loader is.
    """

    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0
    first_s: float = 0.0
    steps: int = 0
    left_s: float = field(default=0.0, repr=False)
    newest: deque[_Step] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS), repr=False)

    def add(self, steps: Sequence[StepTimes]) -> None:
        """Count some steps, one or more."""
        waits, copies, computes, others, _, are_first = zip(*steps, strict=True)
        first_s = sum(itertools.compress(waits, are_first))
        self.steps += len(steps)
        self.wait_s += sum(waits)
        self.copy_s += sum(copies)
        self.compute_s += sum(computes)
        self.other_s += sum(others)
        self.first_s += first_s
        self.newest.extend(steps)


class Mark(Protocol):
    """A point in a device's stream, as `torch.cuda.Event` is."""

    def query(self) -> bool:
        """Return whether the stream has come by."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds until a later one."""


class HostClock:
    """Times the steps of a CPU by the host's clock, and counts each when it is over.

    A loader calls `given` and `stepped` for each batch, what trains calls `worked` and `apart` between the two. It is
    asked after every batch, of which fast loaders give 10,000 a second, when their rows have filled the caches:
    so it touches little memory.

    Args:
        totals: where steps are counted.
    """

    __slots__ = ("_apart_s", "_compute_s", "_is_first", "_totals")

    def __init__(self, totals: StepTotals) -> None:
        self._totals = totals
        self._compute_s: float | None = None
        self._apart_s = 0.0
        self._is_first = True

    def given(self, marks: tuple[Mark, Mark] | None) -> None:
        """A batch is there."""

    def worked(self, compute_s: float) -> None:
        """The step on this batch took so long."""
        self._compute_s = compute_s

    def apart(self, seconds: float) -> None:
        """So many seconds since the batch was given belong to no step."""
        self._apart_s += seconds

    def stepped(self, asked: float, given: float, left: float, samples: int) -> None:
        """A step is over."""
        totals, told_s, is_first = self._totals, self._compute_s, self._is_first
        wait_s, compute_s, other_s = given - asked, left - given, 0.0
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
        totals.left_s = left
        totals.newest.append((wait_s, 0.0, compute_s, other_s, samples, is_first))

    def settled(self) -> Sequence[StepTimes]:
        """Return no steps: all are counted."""
        return ()

    @property
    def is_behind(self) -> bool:
        """Whether there are steps that are not over yet: never."""
        return False

    @property
    def left_s(self) -> float:
        """When the host was done with the newest step, by `time.perf_counter`."""
        return self._totals.left_s


class DeviceClock:
    """Times the steps of a GPU by events in its stream.

    Args:
        mark: sets a mark in the stream.
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
        """A batch is there, or will be when the stream has come by the second mark."""
        if marks is None:
            here = self._mark()
            marks = here, here
        self._marks = marks

    def worked(self, compute_s: float) -> None:
        """All work of the step is in the stream."""
        self._end = self._mark()

    def apart(self, seconds: float) -> None:
        """So many seconds since the batch was given belong to no step."""
        self._apart_s += seconds

    def stepped(self, asked: float, given: float, left: float, samples: int) -> None:
        """The host is done with a step."""
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
        """Return the steps that the stream has come by, each once; any thread may call it."""
        found = []
        for step in _taken(self._noted):
            if not step.end.query():
                self._noted.appendleft(step)
                break
            found.append(step.times())
        return found

    @property
    def is_behind(self) -> bool:
        """Whether there are steps that are not over yet."""
        return bool(self._noted)


Clock: TypeAlias = HostClock | DeviceClock


class _DeviceStep(NamedTuple):
    """A step as it lies in a stream.

    Attributes:
        former_end: of the step before; None if there was none.
        before: when the stream began to wait for the batch.
        after: when the batch was there.
        end: of the step.
        wait_s: seconds that the host waited for the batch.
        apart_s: seconds of what came between the steps and is none of either.
        samples: of the batch.
    """

    former_end: Mark | None
    before: Mark
    after: Mark
    end: Mark
    wait_s: float
    apart_s: float
    samples: int

    def times(self) -> StepTimes:
        """Return where the time went: all of them are in the past of the stream."""
        starved_s = self.wait_s if self.former_end is None else self.former_end.elapsed_time(self.before) / 1000
        data_s = min(self.wait_s, starved_s)
        copy_s = 0.0 if self.before is self.after else self.before.elapsed_time(self.after) / 1000
        compute_s = self.after.elapsed_time(self.end) / 1000
        other_s = max(0.0, starved_s - data_s - self.apart_s)
        return StepTimes(data_s, copy_s, compute_s, other_s, self.samples, self.former_end is None)


def _taken(noted: deque[_Noted]) -> Iterator[_Noted]:
    """Yield and remove what is noted; another thread may note more, or take some, meanwhile."""
    while True:
        try:
            yield noted.popleft()
        except IndexError:
            return

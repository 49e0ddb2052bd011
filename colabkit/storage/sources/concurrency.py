"""Run calls in concurrent threads, with a timeout for stalled calls."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, Self, TypeAlias, TypeVar

from colabkit.foundation import FileFailed, TimedOut, call, cannot, check_whole_number, start_thread, usable_cpus
from colabkit.storage.sources.level import Level

Threads: TypeAlias = int | Literal["auto"]
T = TypeVar("T")
R = TypeVar("R")

STALLED_S = 60.0
"""Default number of seconds without data after which a read that can hang is abandoned and repeated."""

REQUEST_BYTES = 512 << 10
"""A call counts as one request, plus its result's size divided by this, so that fewer large calls run at once."""

_TRIES = 2
_HELD_BYTES = 64 << 20
_HELD_CALLS = 4096
_MEASURED_CALLS = 8
_MEASURED_S = 3e-3
# Seconds of computing from which calls usually release the global interpreter lock, so that threads speed them up.
_LONG_CALL_S = 1e-3
_TICK_S = 0.25
# Seconds to wait on exit for running calls that may hang; slower calls continue in their daemon threads.
_GRACE_S = 1.5
_THREADS = "colabkit-read"

_current = threading.local()


def check_threads(act: str, threads: Threads) -> None:
    """Raise `InvalidOption` unless `threads` is `"auto"` or a positive integer."""
    if threads != "auto":
        check_whole_number(act, "threads", threads, 1, or_text="auto")


def still_moving() -> None:
    """Report, from inside a long call, that data has arrived, so that the call does not count as stalled."""
    if (call := getattr(_current, "call", None)) is not None:
        call.moved = time.monotonic()


@dataclass(slots=True, eq=False)
class _Call(Generic[T, R]):
    task: T
    size: int
    weight: float
    tries: int = 1
    moved: float | None = None
    result: R = field(init=False)
    error: BaseException | None = None
    is_given_up: bool = False


class Calls(Generic[T, R]):
    """Concurrent calls of one function, as many as a `Level` allows; results arrive in order of completion.

    A stalled call is abandoned in its daemon thread and repeated in another thread. With `stalled_s`, the function
    therefore must have no side effects.

    Args:
        function: called with each task.
        level: number of concurrent calls; it is updated after each call.
        stalled_s: seconds without `still_moving()` after which a call is abandoned; None waits forever.
        on_wait: called several times a second while no call ends.
        tries: number of attempts before a stalled call raises `TimedOut`.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        level: Level,
        stalled_s: float | None = None,
        on_wait: Callable[[], None] | None = None,
        tries: int = _TRIES,
    ) -> None:
        self._tries = tries
        self._function = function
        self._level = level
        self._stalled_s = stalled_s
        self._on_wait = on_wait
        self._tasks: queue.SimpleQueue[_Call[T, R] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Call[T, R]] = queue.SimpleQueue()
        self._under_way: set[_Call[T, R]] = set()
        # Bytes of results that have not been taken yet, including those of queued and running calls.
        self._held_bytes = 0
        self._looked = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._is_over = False
        # This lock protects the attributes below, and `is_given_up` of the calls.
        self._lock = threading.Lock()
        self._unended = 0
        self._unended_weight = 0.0
        # Number of threads, excluding abandoned ones.
        self._running = 0
        # Number of threads that the system allows.
        self._most_threads = math.inf

    @property
    def under_way(self) -> int:
        """Number of calls whose results have not been taken."""
        return len(self._under_way)

    @property
    def may_begin(self) -> bool:
        """Whether the limits on untaken results allow one more call."""
        return self._held_bytes < _HELD_BYTES and self.under_way < _HELD_CALLS

    @property
    def room(self) -> float:
        """Number of requests to queue now, so that no thread has to wait for its next call."""
        return 2 * self._level.now - self._unended_weight

    def make(self, task: T, size: int = 0) -> None:
        """Queue a call; `size` is the size of its result in bytes."""
        self._begin(_Call(task, size, self._weight(size)))

    def _begin(self, call: _Call[T, R]) -> None:
        self._under_way.add(call)
        self._held_bytes += call.size
        with self._lock:
            self._unended += 1
            self._unended_weight += call.weight
        self._level.begin(time.monotonic())
        self._tasks.put(call)
        self._start_threads()

    def _weight(self, size: int) -> float:
        return 1.0 if self._level.is_fixed else 1 + size / REQUEST_BYTES

    def _wanted_threads(self) -> int:
        weight = self._unended_weight / self._unended if self._unended else 1.0
        return max(1, round(self._level.now / weight))

    def _start_threads(self) -> None:
        """Start missing threads. Only the caller's thread does this, so `__exit__` knows all of them.

        Raises:
            FileFailed: if the system cannot start even one thread.
        """
        with self._lock:
            missing = min(self._wanted_threads(), self._unended, self._most_threads) - self._running
        if missing <= 0:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while missing > 0:
            missing -= 1
            thread = threading.Thread(target=self._work, name=_THREADS, daemon=True)
            self._threads.append(thread)
            with self._lock:
                self._running += 1
            try:
                start_thread(thread, "read the source")
            except FileFailed:
                self._threads.pop()
                with self._lock:
                    self._running -= 1
                    self._most_threads = max(1, self._running)
                if self._threads:
                    return
                raise

    def _work(self) -> None:
        while (call := self._tasks.get()) is not None:
            if not self._is_over and not self._goes_on_after(call):
                return
            # Drop the reference to the result while the thread waits for its next call.
            del call
        # Pass the end marker to the next thread.
        self._tasks.put(None)

    def _goes_on_after(self, call: _Call[T, R]) -> bool:
        cpu = time.thread_time()
        call.moved = time.monotonic()
        _current.call = call
        try:
            call.result = self._function(call.task)
        except BaseException as error:
            call.error = error
        _current.call = None
        with self._lock:
            if call.is_given_up:
                # The caller has abandoned this call and no longer counts its thread.
                return False
            call.moved = None
            del call.task
            self._unended -= 1
            self._unended_weight -= call.weight
            self._level.note(time.monotonic(), call.weight, time.thread_time() - cpu)
            goes_on = self._running <= self._wanted_threads()
            self._running -= not goes_on
        self._done.put(call)
        return goes_on

    def take(self) -> R:
        """Wait for the next call that finishes, and return its result or raise its error.

        Raises:
            TimedOut: if a call stalled in all its attempts.
        """
        while True:
            now = time.monotonic()
            if now - self._looked >= _TICK_S:
                self._looked = now
                self._give_up_stalled(now)
            self._start_threads()
            try:
                call = self._done.get(timeout=_TICK_S)
            except queue.Empty:
                if self._on_wait is not None:
                    self._on_wait()
                continue
            self._drop(call)
            if call.error is not None:
                raise call.error
            return call.result

    def _drop(self, call: _Call[T, R]) -> None:
        self._under_way.discard(call)
        self._held_bytes -= call.size

    def _give_up_stalled(self, now: float) -> None:
        if self._stalled_s is None:
            return
        for one in list(self._under_way):
            with self._lock:
                if one.moved is None or now - one.moved <= self._stalled_s:
                    continue
                one.is_given_up = True
                self._unended -= 1
                self._unended_weight -= one.weight
                self._running -= 1
            self._level.refused()
            self._drop(one)
            if one.tries >= self._tries:
                found = f"it sent no data for {self._stalled_s:g} s{' in two attempts' if self._tries > 1 else ''}"
                next_step = ("Run ", call("mount", force=True), " if it is on Drive, then try again")
                raise TimedOut(cannot("read the source", found, "", next_step))
            self._begin(_Call(one.task, one.size, one.weight, one.tries + 1))

    def results(self, tasks: Iterable[T], size_of: Callable[[T], int]) -> Iterator[R]:
        """Run a call for every task, as capacity allows, and yield the results in order of completion."""
        remaining = iter(tasks)
        while True:
            room = self.room
            while room > 0 and self.may_begin and (task := next(remaining, _END)) is not _END:
                size = size_of(task)  # type: ignore[arg-type]
                self.make(task, size)  # type: ignore[arg-type]
                room -= self._weight(size)
            if not self.under_way:
                return
            yield self.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop queued calls and wait for running calls, but only briefly if they may hang."""
        self._is_over = True
        self._tasks.put(None)
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            # Joining raises an error if Ctrl-C arrived before the thread was started.
            with contextlib.suppress(RuntimeError):
                thread.join(None if self._stalled_s is None else max(0.0, deadline - time.monotonic()))


def concurrently(
    function: Callable[[T], R],
    tasks: Iterable[T],
    threads: Threads,
    *,
    stalled_s: float | None = None,
    size_of: Callable[[T], int] = lambda _: 0,
    level: Level | None = None,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[R]:
    """Yield `function(task)` for every task, in order of completion.

    `"auto"` adapts to the calls. If they may hang (`stalled_s`), 64 run at once, and more while throughput grows.
    Otherwise a few calls are measured: if they mostly wait, as on a hard disk, the rest run as above; long
    computations run in as many threads as CPUs, and tiny calls in the caller's thread.

    At most two tasks per thread are queued or running, and at most 4096 results or 64 MiB wait to be taken. The first
    error drops queued calls and is raised here. Closing waits for running calls, with `stalled_s` for at most 1.5 s.

    Args:
        function: called with each task; with `stalled_s` it must have no side effects.
        tasks: the tasks, consumed as capacity allows.
        threads: number of concurrent calls, or `"auto"`.
        stalled_s: seconds without data after which a call is repeated in another thread; None for never.
        size_of: returns the size of a task's result in bytes; fewer calls run at once if their results are large.
        level: a level for `"auto"`, if the caller reports errors to it.
        on_wait: called several times a second while the caller waits for other threads.

    Raises:
        TimedOut: if a call stalled twice.
    """
    remaining = iter(tasks)
    if threads != "auto":
        level = Level(threads, is_fixed=True)
    elif stalled_s is None:
        results: list[R] = []
        wall, cpu = time.perf_counter(), time.thread_time()
        for task in itertools.islice(remaining, _MEASURED_CALLS):
            results.append(function(task))
            if time.perf_counter() - wall > _MEASURED_S:
                break
        suited = _suited_threads(time.perf_counter() - wall, time.thread_time() - cpu, len(results))
        if suited is not None:
            level = Level(suited, is_fixed=True)
        yield from results
    level = level or Level()
    if level.is_fixed and level.now == 1 and stalled_s is None:
        yield from map(function, remaining)
        return
    with Calls(function, level, stalled_s, on_wait) as calls:
        yield from calls.results(remaining, size_of)


_END = object()


def _suited_threads(wall_s: float, cpu_s: float, calls: int) -> int | None:
    """Return the number of threads, given the total times of calls in one thread; None if the calls mostly waited."""
    if not calls or cpu_s < wall_s / 2:
        return None
    return max(1, round(usable_cpus())) if cpu_s / calls >= _LONG_CALL_S else 1


def answer_of(ask: Callable[[], T], can_hang: bool, stalled_s: float | None = None, tries: int = _TRIES) -> T:
    """Return the result of `ask`; if it can hang, run it in a thread, and repeat it when it stalls.

    Args:
        ask: a function without side effects.
        can_hang: whether `ask` may never return.
        stalled_s: seconds without `still_moving()` after which `ask` counts as stalled; None for 60 seconds.
        tries: number of attempts.

    Raises:
        TimedOut: if all attempts stalled.
    """
    if not can_hang:
        return ask()
    calls: Calls[None, T] = Calls(lambda _: ask(), Level(1, is_fixed=True), stalled_s or STALLED_S, None, tries)
    with calls:
        calls.make(None)
        return calls.take()

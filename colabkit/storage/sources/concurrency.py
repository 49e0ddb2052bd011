"""Calls made many at once, as many as pay, each with a deadline."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Literal, Self, TypeAlias, TypeVar

from colabkit.foundation import TimedOut, cannot, check_whole_number, usable_cpus

FIRST = 64  # a mount answers a small file in tens of milliseconds: beginning lower costs more than it saves
MOST_IN_FLIGHT = 128
_GAIN = 1.08  # a doubling that gives less than this has met the source's own limit
_LOSS = 0.95  # of the best rate; a step down may cost no more
_BUSY = 0.85  # cores that the calls kept busy, above which more of them only get in each other's way
_SETTLED_WINDOWS = 24  # what was true may change: then one step up is tried again
_WINDOW_S = 0.01


class Level:
    """The number of requests in flight: it climbs while throughput climbs, and halves on errors.

    Calls are counted in windows, each as long as about one round of the calls in flight. From 64 on the number doubles
    as long as the rate rises by 8%; else it returns to the best one and stays for 24 windows. If the first calls
    compute more than they wait, it falls by steps instead, for as long as the rate holds. An error halves it, once a
    window: what is in flight often fails together. (The scheme is that of TCP's congestion window: slow start, then
    multiplicative decrease; D. Chiu and R. Jain, 1989.) Its methods may be called from any thread.

    Attributes:
        now: the level.
        is_fixed: whether it stays, whatever is noted.
    """

    def __init__(self, now: int = FIRST, is_fixed: bool = False) -> None:
        self.now = now
        self.is_fixed = is_fixed
        self._best = (now, 0.0)
        self._direction = 1
        self._settled = 0
        self._was_refused = False
        self._lock = threading.Lock()
        self._since: float | None = None
        self._weight = 0.0
        self._cpu_s = 0.0

    def begin(self, time: float) -> None:
        """Note when the first call was made, in seconds of a monotonic clock."""
        if self._since is None:
            self._since = time

    def note(self, time: float, weight: float, cpu_s: float) -> None:
        """Note when a call ended, how much work it was, in requests, and the seconds that it computed."""
        with self._lock:
            if self.is_fixed or self._since is None:
                return
            self._weight += weight
            self._cpu_s += cpu_s
            elapsed = time - self._since
            if self._weight < self.now or elapsed < _WINDOW_S:
                return
            rate, busy = self._weight / elapsed, self._cpu_s / elapsed
            self._since, self._weight, self._cpu_s = time, 0.0, 0.0
            self._step(rate, busy)

    def refused(self) -> None:
        """Note that the source failed a call: half as many from now on."""
        with self._lock:
            if self.is_fixed or self._was_refused:
                return
            self._was_refused = True
            self._settle(max(1, self.now // 2), 0.0)
            self._weight = self._cpu_s = 0.0  # the window begins anew

    def _step(self, rate: float, busy: float) -> None:
        self._was_refused = False
        best_level, best_rate = self._best
        if self._settled:
            self._settled -= 1
            self._best = (self.now, best_rate + (rate - best_rate) / 4 if best_rate else rate)  # windows are noisy
            if not self._settled:
                self._direction = 1
                self._move(busy)
        elif not best_rate:
            self._best = (self.now, rate)
            self._direction = -1 if busy > _BUSY else 1
            self._move(busy)
        elif rate > best_rate * (_GAIN if self._direction > 0 else _LOSS):
            self._best = (self.now, rate)
            self._move(busy)
        else:
            self._settle(best_level, best_rate)

    def _move(self, busy: float) -> None:
        level = self.now * 2 if self._direction > 0 else math.ceil(self.now / 4)
        if (self._direction > 0 and busy > _BUSY) or not 1 <= level <= MOST_IN_FLIGHT or level == self.now:
            self._settle(*self._best)
        else:
            self.now = level

    def _settle(self, level: int, rate: float) -> None:
        self.now = level
        self._best = (level, rate)
        self._settled = _SETTLED_WINDOWS


Threads: TypeAlias = int | Literal["auto"]
T = TypeVar("T")
R = TypeVar("R")

STALLED_S = 60.0
"""Seconds without a byte after which a read is given up and made anew."""

REQUEST_BYTES = 512 << 10
"""What counts as one request: a call for more counts as several, so that fewer such calls run at once."""

_TRIES = 2
_HELD_BYTES = 64 << 20
_HELD_CALLS = 4096
_MEASURED_CALLS = 8
_MEASURED_S = 3e-3
_LONG_CALL_S = 1e-3  # decoders that run this long release the interpreter's lock long enough to pay for threads
_TICK_S = 0.25
_GRACE_S = 1.5  # for calls under way when the work is left: they only read, and end by themselves
_THREADS = "colabkit-read"

_current = threading.local()


def check_threads(act: str, threads: Threads) -> None:
    """Raise `InvalidOption` unless `threads` is `"auto"` or a positive whole number."""
    if threads != "auto":
        check_whole_number(act, "threads", threads, 1)


def still_moving() -> None:
    """Say, from inside a call that may take long, that it has just got some bytes: it has not stalled."""
    if (call := getattr(_current, "call", None)) is not None:
        call.moved = time.monotonic()


@dataclass(slots=True, eq=False)
class _Call(Generic[T, R]):
    """One call: when it began and last moved, and how it ended."""

    task: T
    size: int
    weight: float
    tries: int = 1
    moved: float | None = None
    result: R = field(init=False)
    error: BaseException | None = None
    is_given_up: bool = False


class Calls(Generic[T, R]):
    """Calls of one function in threads, as many at once as the level says; results come in the order they end.

    A call that stalls is left behind in its thread, which is a daemon, and made once more in another. So with
    `stalled_s` the function must change nothing: it reads.

    Args:
        function: called with each task.
        level: how many at once; it is told of each call's end.
        stalled_s: seconds without `still_moving()` after which a call is given up; None waits for ever.
        on_wait: called some times a second while nothing ends.
        tries: how often a call is made until it is an error that it stalls.
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
        self._held_bytes = 0  # of results that were not taken, and of calls that will give such
        self._looked = time.monotonic()  # when stalled calls were last looked for
        self._threads: list[threading.Thread] = []
        self._is_over = False
        self._lock = threading.Lock()  # guards what follows, and the calls' `is_given_up`
        self._unended = 0
        self._unended_weight = 0.0
        self._running = 0  # threads, but those left behind

    @property
    def under_way(self) -> int:
        """Calls whose results have not been taken."""
        return len(self._under_way)

    @property
    def may_begin(self) -> bool:
        """Whether memory allows one more call."""
        return self._held_bytes < _HELD_BYTES and self.under_way < _HELD_CALLS

    @property
    def room(self) -> float:
        """How much more work, in requests, to make now so that each thread finds a next call when it ends one."""
        return 2 * self._level.now - self._unended_weight

    def make(self, task: T, size: int = 0) -> None:
        """Make a call as soon as a thread is free; `size` is how many bytes its result has."""
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
        """Return how many threads the level asks for, of the weight that the calls have now."""
        weight = self._unended_weight / self._unended if self._unended else 1.0
        return max(1, round(self._level.now / weight))

    def _start_threads(self) -> None:
        """Start the threads that are missing; only the caller's thread does, so `__exit__` knows all of them."""
        with self._lock:
            missing = min(self._wanted_threads(), self._unended) - self._running
        if missing <= 0:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(missing):
            thread = threading.Thread(target=self._work, name=_THREADS, daemon=True)
            self._threads.append(thread)
            with self._lock:
                self._running += 1
            thread.start()

    def _work(self) -> None:
        while (call := self._tasks.get()) is not None:
            if not self._is_over and not self._goes_on_after(call):
                return
            del call  # its result is not held while the thread waits for the next
        self._tasks.put(None)  # for the next thread

    def _goes_on_after(self, call: _Call[T, R]) -> bool:
        """Make a call; return whether its thread shall take another."""
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
                return False  # another thread has taken its place
            call.moved = None
            del call.task  # it may hold much
            self._unended -= 1
            self._unended_weight -= call.weight
            self._level.note(time.monotonic(), call.weight, time.thread_time() - cpu)
            goes_on = self._running <= self._wanted_threads()
            self._running -= not goes_on
        self._done.put(call)
        return goes_on

    def take(self) -> R:
        """Return the result of a call that ended, or raise its error.

        Raises:
            TimedOut: if a call stalled as often as calls are made.
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
        for call in list(self._under_way):
            with self._lock:
                if call.moved is None or now - call.moved <= self._stalled_s:
                    continue
                call.is_given_up = True
                self._unended -= 1
                self._unended_weight -= call.weight
                self._running -= 1
            self._level.refused()
            self._drop(call)
            if call.tries >= self._tries:
                found = f"no byte in {self._stalled_s:g} s{', twice' if self._tries > 1 else ''}"
                next_step = "See colabkit.runtime() and run colabkit.mount(force=True) for Drive, then run it again"
                raise TimedOut(cannot("read the source", found, "a source that answers", next_step))
            self._begin(_Call(call.task, call.size, call.weight, call.tries + 1))

    def results(self, tasks: Iterable[T], size_of: Callable[[T], int]) -> Iterator[R]:
        """Make a call for every task as there is room, and yield all results as they come."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop what has not begun, and wait for what has; where that may never end, for a moment."""
        self._is_over = True
        self._tasks.put(None)
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
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
    """Yield `function(task)` for every task as results come.

    `"auto"` measures. Where a call may never return (`stalled_s`), calls begin 64 at once and their number climbs while
    throughput climbs. Elsewhere the first calls, eight or a few milliseconds of them, are made one by one: where they
    mostly wait, as on a disk that seeks, it goes on as where a call may never return; where each computes for long,
    there are as many threads as CPUs; else none but the caller's, since tiny calls only get in each other's way.

    At most two tasks a thread are under way; of results that are not taken at once, 4096 or 64 MiB are held. The first
    error stops the rest and is raised here; leaving the generator early waits only for the calls under way, with
    `stalled_s` for 1.5 s at most.

    Args:
        function: called with each task; with `stalled_s` it must change nothing.
        tasks: taken when there is room.
        threads: calls at once, or `"auto"`.
        stalled_s: seconds without a sign of life after which a call is made again in another thread; None: never.
        size_of: the bytes of a task's result; large ones are fewer at once.
        level: for `"auto"`, where a caller wants to tell it of refusals.
        on_wait: called some times a second while nothing ends.

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
    """Return how many threads suit calls that took this long together in one thread; None where they waited."""
    if not calls or cpu_s < wall_s / 2:
        return None
    return max(1, round(usable_cpus())) if cpu_s / calls >= _LONG_CALL_S else 1


def answer_of(ask: Callable[[], T], can_hang: bool, stalled_s: float | None = None, tries: int = _TRIES) -> T:
    """Return what `ask` returns; where it can hang, in a thread that is given up when it stalls, and asked once more.

    Args:
        ask: changes nothing.
        can_hang: whether it may never return.
        stalled_s: seconds without a sign of life (`still_moving`) after which it stalls; by default a minute.
        tries: how often it is asked.

    Raises:
        TimedOut: if it stalled as often.
    """
    if not can_hang:
        return ask()
    calls: Calls[None, T] = Calls(lambda _: ask(), Level(1, is_fixed=True), stalled_s or STALLED_S, None, tries)
    with calls:
        calls.make(None)
        return calls.take()

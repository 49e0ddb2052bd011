"""Concurrent calls: each result is returned once, the number of calls is bounded, and a hang does not block the end."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from reader_threads import no_reader_threads, reader_threads
from waiting import LONG_S, comes_true

from colabkit.errors import BadSource, FileFailed, TimedOut
from colabkit.storage.sources import concurrency
from colabkit.storage.sources.concurrency import Calls, concurrently, still_moving
from colabkit.storage.sources.level import Level


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(concurrency, "_TICK_S", 0.005)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)
    yield
    assert no_reader_threads()


@pytest.mark.parametrize("stalled_s", [None, LONG_S])
@pytest.mark.parametrize("threads", [1, 2, 7, "auto"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_every_task_returns_its_result_exactly_once(threads, count, stalled_s):
    results = list(concurrently(lambda task: task * 2, iter(range(count)), threads, stalled_s=stalled_s))
    assert sorted(results) == [2 * task for task in range(count)]


@pytest.mark.parametrize("stalled_s", [None, LONG_S])
def test_exactly_the_requested_number_of_calls_run_at_once(stalled_s):
    lock, most, running, together = threading.Lock(), 0, 0, threading.Barrier(4)

    def work(task: int) -> int:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        together.wait(LONG_S)
        with lock:
            running -= 1
        return task

    assert len(list(concurrently(work, range(16), 4, stalled_s=stalled_s))) == 16
    assert most == 4


def test_few_tasks_are_queued_ahead_even_if_calls_end_as_fast_as_tasks_arrive():
    ended = threading.Semaphore(0)
    started = []

    def tasks() -> Iterator[int]:
        for task in itertools.count():
            if task:
                ended.acquire(timeout=LONG_S)
            started.append(task)
            yield task

    def work(task: int) -> int:
        ended.release()
        return task

    results = concurrently(work, tasks(), 2)
    for number in range(1, 20):
        next(results)
        assert len(started) <= 4 * number
    results.close()


def test_tasks_are_taken_in_the_callers_thread():
    tasks = (threading.current_thread() for _ in range(50))
    assert set(concurrently(lambda task: task, tasks, 4)) == {threading.current_thread()}


@pytest.mark.parametrize("threads", [7, "auto"])
@pytest.mark.parametrize(("limit", "most", "held"), [("_HELD_BYTES", 10, 3), ("_HELD_CALLS", 5, 5)])
def test_untaken_results_are_limited_in_number_and_bytes(monkeypatch, limit, most, held, threads):
    monkeypatch.setattr(concurrency, limit, most)
    begun = []
    tasks = (begun.append(task) or task for task in range(100))
    results = concurrently(lambda task: task, tasks, threads, stalled_s=LONG_S, size_of=lambda _: 4)
    for number, _ in enumerate(results):
        assert len(begun) - number <= held


def test_waiting_threads_hold_neither_results_nor_tasks():
    class LargeObject:
        pass

    with Calls(lambda _: LargeObject(), Level(2, is_fixed=True)) as calls:
        task = LargeObject()
        calls.make(task)
        result = calls.take()
        held = [weakref.ref(task), weakref.ref(result)]
        del task, result
        assert comes_true(lambda: all(one() is None for one in held))
        assert len(reader_threads()) == 1


@pytest.mark.parametrize("stalled_s", [None, LONG_S])
@pytest.mark.parametrize("threads", [1, 4, "auto"])
def test_the_first_error_stops_the_rest_and_is_raised(threads, stalled_s):
    done = []

    def work(task: int) -> int:
        if task == 20:
            raise BadSource("twenty")
        done.append(task)
        return task

    with pytest.raises(BadSource, match="twenty"):
        list(concurrently(work, range(100_000), threads, stalled_s=stalled_s))
    assert len(done) < 10_000
    assert no_reader_threads()


def test_queued_calls_are_dropped_after_an_error():
    started, failed = [], threading.Event()

    def work(task: int) -> None:
        started.append(task)
        if task == 0:
            failed.set()
            raise BadSource("zero")
        failed.wait(LONG_S)

    with pytest.raises(BadSource):
        list(concurrently(work, range(100), 2))
    assert len(started) < 100
    assert no_reader_threads()


@pytest.mark.parametrize("stalled_s", [None, LONG_S])
@pytest.mark.parametrize("threads", [1, 4, "auto"])
def test_leaving_early_leaves_no_threads(threads, stalled_s):
    def interrupt() -> None:
        for _ in concurrently(lambda task: task, range(1000), threads, stalled_s=stalled_s):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert no_reader_threads()
    results = concurrently(lambda task: task, range(1000), threads, stalled_s=stalled_s)
    next(results)
    results.close()
    assert no_reader_threads()


@pytest.mark.parametrize("stalled_s", [None, LONG_S])
def test_ctrl_c_during_a_wait_leaves_no_threads(stalled_s):
    interrupted = threading.Event()

    def work(task: int) -> None:
        if task == 10:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.set()
        if task >= 10:
            interrupted.wait(LONG_S)

    with pytest.raises(KeyboardInterrupt):
        list(concurrently(work, itertools.count(), 4, stalled_s=stalled_s))
    assert comes_true(no_reader_threads)


def test_an_error_of_the_tasks_themselves_is_raised():
    def tasks() -> Iterator[int]:
        yield 1
        raise BadSource("no more")

    with pytest.raises(BadSource, match="no more"):
        list(concurrently(lambda task: task, tasks(), 4))
    assert no_reader_threads()


def test_on_wait_is_called_while_no_call_ends():
    waited = threading.Semaphore(0)
    results = concurrently(
        lambda task: [waited.acquire(timeout=LONG_S) for _ in range(3)], [1], 1, stalled_s=60.0, on_wait=waited.release
    )
    assert list(results) == [[True] * 3]


class ScriptedLevel(Level):
    def __init__(self, now: int, then: int, after: int) -> None:
        super().__init__(now)
        self.then = then
        self.after = after

    def note(self, time: float, weight: float, cpu_s: float) -> None:
        self.after -= 1
        if not self.after:
            self.now = self.then


def test_threads_follow_the_level_up():
    together = threading.Barrier(8)

    def work(task: int) -> int:
        if task:
            together.wait(LONG_S)
        return task

    results = concurrently(work, range(1 + 8 * 4), "auto", stalled_s=LONG_S, level=ScriptedLevel(1, 8, after=1))
    assert sorted(results) == list(range(33))


def test_threads_follow_the_level_down():
    lock, running, together = threading.Lock(), [0], []

    def work(task: int) -> None:
        with lock:
            running[0] += 1
            together.append(running[0])
        comes_true(lambda: task > 20 or max(together) == 8)
        with lock:
            running[0] -= 1

    list(concurrently(work, range(100), "auto", stalled_s=LONG_S, level=ScriptedLevel(8, 1, after=20)))
    assert max(together) == 8
    assert set(together[40:]) == {1}


def test_large_calls_are_fewer_at_once():
    lock, running, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    large = concurrency.REQUEST_BYTES * 3
    list(
        concurrently(
            work, range(200), "auto", stalled_s=LONG_S, size_of=lambda _: large, level=ScriptedLevel(16, 16, 0)
        )
    )
    assert most <= 4


@pytest.mark.parametrize("allowed", [0, 1, 3])
@pytest.mark.parametrize("stalled_s", [None, LONG_S])
def test_a_system_that_allows_few_threads_gets_fewer_or_one_typed_error(allow_threads, allowed, stalled_s):
    allow_threads(allowed)
    results = concurrently(lambda task: task, range(100), 64, stalled_s=stalled_s)
    if allowed:
        assert sorted(results) == list(range(100))
    else:
        with pytest.raises(FileFailed, match="cannot start another thread"):
            list(results)


def test_tiny_calls_run_in_the_callers_thread(monkeypatch):
    monkeypatch.setattr(concurrency, "_suited_threads", lambda wall_s, cpu_s, calls: 1)
    names = set(concurrently(lambda task: threading.current_thread().name, range(50), "auto"))
    assert names == {threading.current_thread().name}


@pytest.mark.parametrize(("measured_s", "calls"), [(LONG_S, 8), (0.0, 1)], ids=["quick", "slow"])
def test_auto_measures_fewer_calls_if_they_are_slow(monkeypatch, measured_s, calls):
    measured = []
    monkeypatch.setattr(concurrency, "_MEASURED_S", measured_s)
    monkeypatch.setattr(concurrency, "_suited_threads", lambda wall_s, cpu_s, calls: measured.append(calls) or 3)
    names = list(concurrently(lambda task: threading.current_thread().name, range(50), "auto"))
    assert measured == [calls]
    assert names[:calls] == [threading.current_thread().name] * calls
    assert len(names) == 50
    assert all(name.startswith("colabkit-read") for name in names[calls:])


def test_waiting_calls_get_many_threads_long_ones_one_per_cpu_and_tiny_ones_none(monkeypatch):
    for wall_s, cpu_s, calls, cpus, expected in (
        (0.0, 0.0, 0, 6.4, None),
        (1.0, 0.1, 10, 6.4, None),
        (1.0, 0.49, 10, 6.4, None),
        (0.010, 0.010, 100, 6.4, 1),
        (0.100, 0.090, 10, 6.4, 6),
        (5.0, 5.0, 1, 6.4, 6),
        (1.0, 1.0, 1, 0.3, 1),
    ):
        monkeypatch.setattr(concurrency, "usable_cpus", lambda cpus=cpus: cpus)
        assert concurrency._suited_threads(wall_s, cpu_s, calls) == expected


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Return an event that hanging calls wait for; the calls and their threads end with the test."""
    event = threading.Event()
    yield event
    event.set()
    for thread in reader_threads():
        thread.join(LONG_S)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stalled_call_is_repeated_once_and_its_late_result_is_dropped(stuck, is_late):
    made: list[threading.Thread] = []

    def work(task: int) -> str:
        if task:
            return "other"
        made.append(threading.current_thread())
        if len(made) == 1:
            stuck.wait(LONG_S)
            return "late"
        # End the first call while the second call runs.
        if is_late:
            stuck.set()
            made[0].join(LONG_S)
        return "repeated"

    assert sorted(concurrently(work, range(20), 3, stalled_s=0.1)) == ["other"] * 19 + ["repeated"]
    assert len(set(made)) == 2


@pytest.mark.parametrize("threads", [1, 3, "auto"])
def test_a_call_that_stalls_twice_raises_in_bounded_time_while_others_hang(stuck, threads):
    made = []

    def work(task: int) -> None:
        made.append(task)
        stuck.wait(LONG_S)

    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"Cannot read the source: it sent no data for 0\.05 s in two attempts"):
        list(concurrently(work, range(5), threads, stalled_s=0.05))
    assert time.monotonic() - began < LONG_S / 3
    assert max(made.count(task) for task in range(5)) == 2


def test_a_call_with_one_attempt_raises_when_it_stalls(stuck):
    with Calls(lambda _: stuck.wait(LONG_S), Level(1, is_fixed=True), 0.05, tries=1) as calls:
        calls.make(None)
        with pytest.raises(TimedOut, match=r"no data for 0\.05 s\."):
            calls.take()


def test_a_stalled_call_is_noticed_while_others_keep_ending(stuck, monkeypatch):
    # Make the time between two checks longer than that between two results.
    monkeypatch.setattr(concurrency, "_TICK_S", 0.2)
    repeated = threading.Event()
    made = []
    deadline = time.monotonic() + LONG_S

    def tasks() -> Iterator[int]:
        yield 0
        while not repeated.is_set() and time.monotonic() < deadline:
            yield 1

    def work(task: int) -> None:
        if task == 0:
            made.append(task)
            if len(made) == 2:
                repeated.set()
            else:
                stuck.wait(LONG_S)

    for _ in concurrently(work, tasks(), 2, stalled_s=0.05):
        pass
    assert repeated.is_set()


def test_all_calls_may_stall_together_once(stuck):
    made: list[int] = []

    def work(task: int) -> int:
        made.append(task)
        if made.count(task) == 1:
            stuck.wait(LONG_S)
        return task

    level = Level(8)
    results = concurrently(work, range(8), "auto", stalled_s=0.2, level=level)
    assert sorted(results) == list(range(8))
    assert sorted(made) == sorted([*range(8), *range(8)])
    assert level.now < 8


def test_leaving_waits_only_briefly_for_hanging_calls(stuck):
    begun = threading.Event()

    def work(task: int) -> int:
        if task == 1:
            begun.set()
            stuck.wait(LONG_S)
        return task

    results = concurrently(work, range(2), 2, stalled_s=LONG_S)
    assert next(results) == 0
    assert begun.wait(LONG_S)
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < LONG_S / 3
    assert len(reader_threads()) == 1


@pytest.mark.parametrize("is_moving", [True, False])
def test_a_slow_call_continues_while_it_receives_data(monkeypatch, is_moving):
    now = 0.0
    looked = threading.Semaphore(0)
    clock = SimpleNamespace(monotonic=lambda: now, thread_time=time.thread_time)
    made = []

    def work(task: int) -> int:
        nonlocal now
        made.append(task)
        for _ in range(4):
            now += 40.0
            # Wait for several checks, so that the last check began after the clock moved.
            for _ in range(3):
                looked.acquire(timeout=LONG_S)
            if is_moving:
                still_moving()
        return task

    monkeypatch.setattr(concurrency, "time", clock)
    results = concurrently(work, [5], 1, stalled_s=60.0, on_wait=looked.release)
    if is_moving:
        assert list(results) == [5]
        assert made == [5]
    else:
        with pytest.raises(TimedOut):
            list(results)
        assert made == [5, 5]
        for _ in range(1000):
            looked.release()
    monkeypatch.undo()
    assert comes_true(no_reader_threads)

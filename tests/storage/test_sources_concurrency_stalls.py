"""Calls that hang: given up, made anew once in another thread, and never waited for without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from reader_threads import no_reader_threads, reader_threads
from waiting import LONG_S, comes_true

from colabkit.errors import TimedOut
from colabkit.storage.sources import concurrency
from colabkit.storage.sources.concurrency import Calls, Level, concurrently, still_moving


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(concurrency, "_TICK_S", 0.005)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)
    yield
    assert no_reader_threads()


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Return what calls that hang wait for; they end, and their threads, when the test does."""
    event = threading.Event()
    yield event
    event.set()
    for thread in reader_threads():
        thread.join(LONG_S)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stalled_call_is_made_anew_once_in_another_thread_and_its_late_result_is_dropped(stuck, is_late):
    made: list[threading.Thread] = []

    def work(task: int) -> str:
        if task:
            return "other"
        made.append(threading.current_thread())
        if len(made) == 1:
            stuck.wait(LONG_S)
            return "late"
        if is_late:  # the first ends while the second is under way
            stuck.set()
            made[0].join(LONG_S)
        return "anew"

    assert sorted(concurrently(work, range(20), 3, stalled_s=0.1)) == ["anew"] + ["other"] * 19
    assert len(set(made)) == 2


@pytest.mark.parametrize("threads", [1, 3, "auto"])
def test_a_call_that_stalls_twice_is_an_error_in_bounded_time_while_others_hang_too(stuck, threads):
    made = []

    def work(task: int) -> None:
        made.append(task)
        stuck.wait(LONG_S)

    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"Cannot read the source: no byte in 0\.05 s, twice"):
        list(concurrently(work, range(5), threads, stalled_s=0.05))
    assert time.monotonic() - began < LONG_S / 3
    assert max(made.count(task) for task in range(5)) == 2


def test_a_call_that_may_be_made_once_only_is_an_error_when_it_stalls(stuck):
    with Calls(lambda _: stuck.wait(LONG_S), Level(1, is_fixed=True), 0.05, tries=1) as calls:
        calls.make(None)
        with pytest.raises(TimedOut, match=r"no byte in 0\.05 s,"):
            calls.take()


def test_a_stalled_call_is_noticed_while_others_keep_ending(stuck, monkeypatch):
    monkeypatch.setattr(concurrency, "_TICK_S", 0.2)  # longer than between two results
    anew = threading.Event()
    made = []
    deadline = time.monotonic() + LONG_S

    def tasks() -> Iterator[int]:
        yield 0
        while not anew.is_set() and time.monotonic() < deadline:
            yield 1

    def work(task: int) -> None:
        if task == 0:
            made.append(task)
            if len(made) == 2:
                anew.set()
            else:
                stuck.wait(LONG_S)

    for _ in concurrently(work, tasks(), 2, stalled_s=0.05):
        pass
    assert anew.is_set()


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


def test_leaving_waits_but_a_moment_for_calls_that_hang(stuck):
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
def test_a_slow_call_goes_on_as_long_as_it_moves(monkeypatch, is_moving):
    now = 0.0
    looked = threading.Semaphore(0)
    clock = SimpleNamespace(monotonic=lambda: now, thread_time=time.thread_time)
    made = []

    def work(task: int) -> int:
        nonlocal now
        made.append(task)
        for _ in range(4):
            now += 40.0
            for _ in range(3):  # the last of these looks was certainly begun after the clock moved
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

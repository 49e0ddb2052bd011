"""The reading engine: every result once, a bounded number of calls at once, clean ends."""

from __future__ import annotations

import threading

import pytest

from colabkit.errors import BadSource
from colabkit.sources import concurrency as engine
from colabkit.sources import concurrently


@pytest.mark.parametrize("threads", [1, 2, 7, "auto"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_every_task_gives_its_result_exactly_once(threads, count):
    results = list(concurrently(lambda task: task * 2, iter(range(count)), threads))
    assert sorted(results) == [2 * task for task in range(count)]


def test_at_most_so_many_calls_run_at_once_and_that_many_do():
    lock, most, running, together = threading.Lock(), 0, 0, threading.Barrier(4)

    def work(task: int) -> int:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        together.wait(30)
        with lock:
            running -= 1
        return task

    assert len(list(concurrently(work, range(16), 4))) == 16
    assert most == 4


def test_few_tasks_are_taken_ahead():
    taken = []
    tasks = (taken.append(task) or task for task in range(1000))
    results = concurrently(lambda task: task, tasks, 2)
    next(results)
    assert len(taken) <= 2 * 2 + 1
    results.close()


@pytest.mark.parametrize("threads", [1, 4, "auto"])
def test_the_first_error_stops_the_rest_and_is_raised(threads):
    done = []

    def work(task: int) -> int:
        if task == 20:
            raise BadSource("twenty")
        done.append(task)
        return task

    with pytest.raises(BadSource, match="twenty"):
        list(concurrently(work, range(10_000), threads))
    assert len(done) < 1000
    assert no_reader_threads()


def test_calls_that_wait_their_turn_are_dropped_after_an_error():
    started, failed = [], threading.Event()

    def work(task: int) -> None:
        started.append(task)
        if task == 0:
            failed.set()
            raise BadSource("zero")
        failed.wait(30)

    with pytest.raises(BadSource):
        list(concurrently(work, range(100), 2))
    assert len(started) < 100
    assert no_reader_threads()


@pytest.mark.parametrize("threads", [1, 4, "auto"])
def test_leaving_early_leaves_no_threads(threads):
    results = concurrently(lambda task: task, range(1000), threads)
    next(results)
    results.close()
    assert no_reader_threads()


def test_an_interrupt_of_the_consumer_leaves_no_threads():
    def consume() -> None:
        for _ in concurrently(lambda task: task, range(1000), 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert no_reader_threads()


def test_an_error_of_the_tasks_themselves_is_raised():
    def tasks():
        yield 1
        raise BadSource("no more")

    with pytest.raises(BadSource, match="no more"):
        list(concurrently(lambda task: task, tasks(), 4))
    assert no_reader_threads()


def test_tiny_calls_run_in_the_callers_thread(monkeypatch):
    monkeypatch.setattr(engine, "_suited_threads", lambda wall_s, cpu_s, calls: 1)
    names = set(concurrently(lambda task: threading.current_thread().name, range(50), "auto"))
    assert names == {threading.current_thread().name}


def test_auto_measures_only_the_first_calls(monkeypatch):
    measured = []
    monkeypatch.setattr(engine, "_suited_threads", lambda wall_s, cpu_s, calls: measured.append(calls) or 3)
    names = list(concurrently(lambda task: threading.current_thread().name, range(50), "auto"))
    assert measured == [8]
    assert names[:8] == [threading.current_thread().name] * 8
    assert all(name.startswith("colabkit-read") for name in names[8:])


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "calls", "expected"),
    [
        (0.0, 0.0, 0, None),
        (1.0, 0.1, 10, None),
        (1.0, 0.49, 10, None),
        (0.010, 0.010, 100, 1),
        (0.100, 0.090, 10, 6),
        (5.0, 5.0, 1, 6),
    ],
)
def test_waiting_gets_many_threads_long_work_one_a_cpu_and_tiny_work_none(monkeypatch, wall_s, cpu_s, calls, expected):
    monkeypatch.setattr(engine, "usable_cpus", lambda: 6.4)
    assert engine._suited_threads(wall_s, cpu_s, calls) == expected


def test_a_fraction_of_a_cpu_is_still_one_thread(monkeypatch):
    monkeypatch.setattr(engine, "usable_cpus", lambda: 0.3)
    assert engine._suited_threads(1.0, 1.0, 1) == 1


def no_reader_threads() -> bool:
    """Return whether every thread of the engine has ended."""
    return not [thread for thread in threading.enumerate() if thread.name.startswith("colabkit-read")]

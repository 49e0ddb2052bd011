"""Worker threads of the loader, tested with a fake builder: order, pieces, errors, closing and limits."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from loader_batches import loader_threads
from waiting import wait_until

from colabkit.augment import Normalize
from colabkit.loading import Loader
from colabkit.loading.engine import thread_pool
from colabkit.loading.engine.batches import Batch, BatchGroup, BatchPlan
from colabkit.loading.engine.read_ahead import Cancellation
from colabkit.loading.engine.thread_pool import ThreadPool

DEADLINE_S = 20.0
BATCH_SIZE = 4
# This is not a divisor of `BATCH_SIZE`, so some pieces span two batches.
PIECE_SIZE = 3


def plans(count: int, batches: int = 2) -> Iterator[BatchPlan]:
    """Yield `count` plans of `batches` batches each. The index of each sample is its position."""
    samples = batches * BATCH_SIZE
    for start in range(0, count * samples, samples):
        numbers = np.arange(start, start + samples)
        reached = tuple(range(start + BATCH_SIZE, start + samples + 1, BATCH_SIZE))
        yield BatchPlan(numbers, numbers, (BATCH_SIZE,) * batches, reached)


class FakeBuilder:
    """A builder that computes 2 * index + 1 for each sample.

    Each step first calls `at(step, first sample)`, which may wait or raise.
    """

    def __init__(
        self, at: Callable[[str, int], object] = lambda step, sample: None, piece: int | None = PIECE_SIZE
    ) -> None:
        self.at = at
        self.piece = piece
        self.begun = 0
        self.filled: list[tuple[int, int]] = []

    def begin(self, plan: BatchPlan) -> BatchGroup:
        self.begun += 1
        self.at("begin", int(plan.indices[0]))
        group = BatchGroup(plan)
        count = len(plan.indices)
        if self.piece is None:
            group.values = [2 * plan.indices + 1]
        else:
            group.values = [np.full(count, -1)]
            group.pieces = [(start, min(start + self.piece, count)) for start in range(0, count, self.piece)]
        return group

    def fill(self, group: BatchGroup, start: int, stop: int) -> None:
        numbers = group.plan.indices[start:stop]
        self.at("fill", int(numbers[0]))
        group.values[0][start:stop] = 2 * numbers + 1
        self.filled.append((int(numbers[0]), int(numbers[-1])))

    def finish(self, group: BatchGroup, samples: int) -> Iterator[Batch]:
        for stop, reached in zip(itertools.accumulate(group.plan.sizes), group.plan.ends, strict=True):
            if stop <= samples:
                self.at("finish", int(group.plan.indices[stop - BATCH_SIZE]))
                positions = group.plan.positions[stop - BATCH_SIZE : stop]
                yield Batch([group.values[0][stop - BATCH_SIZE : stop]], positions, reached)


@pytest.fixture
def start() -> Iterator[Callable[..., ThreadPool]]:
    """Return a function that starts a thread pool. After the test, close all pools and check that no thread is left."""
    started: list[ThreadPool] = []

    def make(
        plan: Iterable[BatchPlan], builder: FakeBuilder, threads: int = 1, ahead: int = 3, waited: Any = lambda _: None
    ) -> ThreadPool:
        started.append(ThreadPool(iter(plan), builder, threads, ahead, waited))
        started[-1].start()
        return started[-1]

    yield make
    for each in started:
        each.close()
    assert loader_threads() == []


def taken(running: ThreadPool) -> Iterator[Batch]:
    while (group := running.take(DEADLINE_S)) is not None:
        yield from group.batches
        running.make_room()


def raises_at(step: str, sample: int, error: BaseException) -> Callable[[str, int], None]:
    def act(now: str, first: int) -> None:
        if (now, first) == (step, sample):
            raise error

    return act


@pytest.mark.parametrize("piece", [None, 1, PIECE_SIZE, BATCH_SIZE, 100])
@pytest.mark.parametrize("threads", [0, 1, 2, 16])
@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_batches_are_complete_and_in_order_with_any_number_of_threads(start, threads, ahead, piece):
    builder = FakeBuilder(piece=piece)
    batches = list(taken(start(plans(30), builder, threads, ahead)))
    assert [batch.end for batch in batches] == list(range(BATCH_SIZE, 241, BATCH_SIZE))
    assert np.concatenate([batch.positions for batch in batches]).tolist() == list(range(240))
    assert np.concatenate([batch.values[0] for batch in batches]).tolist() == list(range(1, 481, 2))
    spans = sorted(builder.filled)
    assert piece is None or [number for first, last in spans for number in range(first, last + 1)] == list(range(240))


@pytest.mark.full
def test_many_threads_over_many_epochs_neither_lose_nor_repeat_samples(start):
    for round_ in range(30):
        plan = list(plans(12, batches=1 + round_ % 3))
        running = start(plan, FakeBuilder(piece=1 + round_ % 4), threads=24, ahead=1 + round_ % 7)
        positions = np.concatenate([batch.positions for batch in taken(running)])
        assert positions.tolist() == list(range(12 * BATCH_SIZE * (1 + round_ % 3)))
        running.close()


def test_an_epoch_without_plans_ends_at_once(start):
    assert start([], FakeBuilder(), threads=3).take(DEADLINE_S) is None


def test_a_group_that_ends_early_waits_for_those_before_it(start):
    second_done = threading.Event()

    def at(step: str, sample: int) -> None:
        if (step, sample) == ("fill", 0):
            assert second_done.wait(DEADLINE_S)
        # This sample starts the last batch of the second group.
        if (step, sample) == ("finish", 3 * BATCH_SIZE):
            second_done.set()

    running = start(plans(3), FakeBuilder(at), threads=2)
    assert [batch.end for batch in taken(running)] == list(range(BATCH_SIZE, 6 * BATCH_SIZE + 1, BATCH_SIZE))
    assert second_done.is_set()


def test_all_threads_build_the_pieces_of_one_group_at_once(start):
    together = threading.Barrier(3, timeout=DEADLINE_S)
    builder = FakeBuilder(lambda step, sample: together.wait() if step == "fill" else None)
    # The eight samples make three pieces, one for each thread.
    running = start(plans(1), builder, threads=3)
    assert len(list(taken(running))) == 2
    assert not together.broken


def test_the_pieces_of_the_oldest_group_come_first(start):
    builder = FakeBuilder()
    list(taken(start(plans(6), builder, threads=1, ahead=6)))
    assert builder.filled == sorted(builder.filled)


def test_only_one_thread_at_a_time_requests_a_plan(start):
    inside = threading.Lock()

    class Plan:
        def __init__(self) -> None:
            self.left = plans(100, batches=1)

        def __iter__(self) -> Plan:
            return self

        def __next__(self) -> BatchPlan:
            assert inside.acquire(blocking=False), "two threads requested a plan at once"
            try:
                return next(self.left)
            finally:
                inside.release()

    assert len(list(taken(start(Plan(), FakeBuilder(), threads=8, ahead=20)))) == 100


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_allowed_number_of_groups_is_built_ahead_and_never_more(start, threads, ahead):
    given_back, most = [], []
    builder = FakeBuilder(
        lambda step, sample: most.append(builder.begun - len(given_back)) if step == "begin" else None
    )
    running = start(plans(20), builder, threads, ahead)
    for group in iter(lambda: running.take(DEADLINE_S), None):
        wait_until(lambda: builder.begun >= min(20, len(given_back) + ahead))
        assert group.batches
        given_back.append(group.plan.positions[0])
        running.make_room()
    assert max(most) == ahead


def test_ready_groups_are_counted_and_a_timeout_raises_an_error(start):
    gate = threading.Event()
    running = start(plans(2), FakeBuilder(lambda *_: gate.wait(DEADLINE_S)))
    assert running.ready() == 0
    with pytest.raises(queue.Empty):
        running.take(0.001)
    gate.set()
    # Two groups and the end mark of the epoch are ready.
    wait_until(lambda: running.ready() == 3)
    list(taken(running))
    assert running.ready() == 0


def test_the_idle_seconds_of_a_thread_are_reported(start):
    waits: list[float] = []
    running = start(plans(4), FakeBuilder(), ahead=1, waited=waits.append)
    wait_until(lambda: running.ready() == 1)
    list(taken(running))
    running.close()
    assert waits
    assert all(wait_s >= 0 for wait_s in waits)


@pytest.mark.parametrize("threads", [0, 1, 2, 8])
@pytest.mark.parametrize(
    ("step", "sample", "whole"),
    [
        # The third group fails when it begins, after four batches.
        ("begin", 2 * BATCH_SIZE * 2, 4),
        ("begin", 0, 0),
        # The first piece of the third group fails.
        ("fill", 2 * BATCH_SIZE * 2, 4),
        # A piece that spans both batches of the third group fails.
        ("fill", 2 * BATCH_SIZE * 2 + PIECE_SIZE, 4),
        # The last piece of the third group fails, so the group's first batch is complete.
        ("fill", 2 * BATCH_SIZE * 2 + 2 * PIECE_SIZE, 5),
        ("fill", 0, 0),
        ("finish", 2 * BATCH_SIZE * 2, 4),
        ("finish", 2 * BATCH_SIZE * 2 + BATCH_SIZE, 5),
    ],
)
def test_an_error_is_raised_after_the_batches_before_it_and_ends_the_epoch(start, threads, step, sample, whole):
    error = ValueError("planned")
    running = start(plans(8), FakeBuilder(raises_at(step, sample, error)), threads, ahead=6)
    got: list[Batch] = []
    with pytest.raises(ValueError, match="planned") as caught:
        got.extend(taken(running))
    running.close()
    assert caught.value is error
    assert np.concatenate([np.empty(0), *(batch.positions for batch in got)]).tolist() == list(
        range(whole * BATCH_SIZE)
    )
    assert not running.ready()


@pytest.mark.parametrize("threads", [1, 8])
def test_a_system_exit_in_a_thread_is_raised_after_the_batches_before_it(start, threads):
    for step, sample, whole in (("begin", 16, 4), ("fill", 16 + 2 * PIECE_SIZE, 5), ("finish", 16 + BATCH_SIZE, 5)):
        running = start(plans(8), FakeBuilder(raises_at(step, sample, SystemExit(3))), threads, ahead=6)
        got: list[Batch] = []
        with pytest.raises(SystemExit):
            got.extend(taken(running))
        assert [batch.end for batch in got] == [BATCH_SIZE * number for number in range(1, whole + 1)]


@pytest.mark.parametrize("threads", [0, 3])
def test_an_error_of_the_plans_is_raised_after_the_batches_before_it(start, threads):
    def plan() -> Iterator[BatchPlan]:
        yield from plans(2)
        raise LookupError("planned")

    got: list[Batch] = []
    with pytest.raises(LookupError, match="planned"):
        got.extend(taken(start(plan(), FakeBuilder(), threads)))
    assert [batch.end for batch in got] == [4, 8, 12, 16]


def test_of_several_errors_in_a_group_the_one_of_the_first_sample_is_raised(start):
    """The pieces that begin at samples 0, 3 and 6 run together. The piece at 6 fails first, then the piece at 3."""
    together, late_failed = threading.Barrier(3, timeout=DEADLINE_S), threading.Event()

    def at(step: str, sample: int) -> None:
        if step != "fill":
            return
        together.wait()
        if sample == 6:
            late_failed.set()
            raise ValueError("late")
        if sample == 3:
            assert late_failed.wait(DEADLINE_S)
            raise ValueError("early")

    running = start(plans(1), FakeBuilder(at), threads=3)
    with pytest.raises(ValueError, match="early"):
        list(taken(running))


def test_an_error_of_a_later_group_waits_for_the_groups_before_it(start):
    failed = threading.Event()

    def at(step: str, sample: int) -> None:
        if (step, sample) == ("fill", 0):
            assert failed.wait(DEADLINE_S)
        if (step, sample) == ("fill", 2 * BATCH_SIZE):
            failed.set()
            raise ValueError("planned")

    got: list[Batch] = []
    with pytest.raises(ValueError, match="planned"):
        got.extend(taken(start(plans(2), FakeBuilder(at), threads=2)))
    assert [batch.end for batch in got] == [4, 8]


@pytest.mark.parametrize("fails_too", [False, True])
def test_a_group_that_ends_after_an_earlier_one_failed_is_dropped(start, fails_too):
    first_failed, go_on = threading.Event(), threading.Event()

    def at(step: str, sample: int) -> None:
        if (step, sample) == ("fill", 2 * BATCH_SIZE):
            first_failed.set()
            assert go_on.wait(DEADLINE_S)
            if fails_too:
                raise ValueError("another")
        if (step, sample) == ("fill", 0):
            assert first_failed.wait(DEADLINE_S)
            raise ValueError("planned")

    running = start(plans(2), FakeBuilder(at, piece=100), threads=2)
    with pytest.raises(ValueError, match="planned"):
        running.take(DEADLINE_S)
    go_on.set()
    running.close()
    assert running.ready() == 0


def test_no_further_pieces_of_a_group_are_built_after_its_first_error(start):
    builder = FakeBuilder(raises_at("fill", 0, ValueError("planned")))
    with pytest.raises(ValueError, match="planned"):
        list(taken(start(plans(5), builder, threads=1)))
    assert builder.filled == []


def test_an_error_that_is_not_an_exception_is_raised_too(start):
    running = start(plans(2), FakeBuilder(raises_at("fill", 0, SystemExit(3))))
    with pytest.raises(SystemExit):
        list(taken(running))


@pytest.mark.parametrize("threads", [1, 4])
def test_close_ends_threads_that_wait_for_room_or_work(start, threads):
    running = start(plans(10), FakeBuilder(), threads, ahead=1)
    wait_until(lambda: running.ready() == 1)
    running.close()
    running.close()
    assert loader_threads() == []
    done = start(plans(1), FakeBuilder(), threads)
    list(taken(done))
    done.close()
    assert loader_threads() == []


def test_a_worker_thread_may_close_the_pool_without_waiting_for_itself(start):
    """The garbage collector may close an abandoned iteration in any thread, including a worker thread."""
    running: list[ThreadPool] = []
    is_made, is_closed = threading.Event(), threading.Event()

    def at(now: str, sample: int) -> None:
        assert is_made.wait(DEADLINE_S)
        running[0].close()
        is_closed.set()

    running.append(start(plans(5), FakeBuilder(at), threads=2))
    is_made.set()
    assert is_closed.wait(DEADLINE_S)
    running[0].close()
    assert loader_threads() == []


@pytest.mark.parametrize("step", ["begin", "fill"])
def test_cancelled_work_ends_quietly(start, step):
    entered, is_closing = threading.Event(), threading.Event()

    def at(now: str, sample: int) -> None:
        if now == step:
            entered.set()
            assert is_closing.wait(DEADLINE_S)
            raise Cancellation

    running = start(plans(5), FakeBuilder(at), threads=3)
    assert entered.wait(DEADLINE_S)
    is_closing.set()
    running.close()
    assert loader_threads() == []
    assert running.ready() == 0


def test_close_abandons_threads_that_hang_and_logs_a_warning(start, monkeypatch, caplog):
    monkeypatch.setattr(thread_pool, "_CLOSE_S", 0.05)
    entered, release = threading.Event(), threading.Event()

    def at(step: str, sample: int) -> None:
        entered.set()
        assert release.wait(DEADLINE_S)

    running = start(plans(3), FakeBuilder(at), threads=2)
    try:
        assert entered.wait(DEADLINE_S)
        began = time.monotonic()
        running.close()
        assert time.monotonic() - began < DEADLINE_S / 2
        assert "are abandoned" in caplog.text
    finally:
        release.set()
        wait_until(lambda: not loader_threads())


def test_an_error_in_finishing_a_batch_precedes_an_error_of_a_later_piece(start):
    planned = {("fill", 2 * PIECE_SIZE): "fill", ("finish", 0): "finish"}

    def at(step: str, sample: int) -> None:
        if (step, sample) in planned:
            raise ValueError(planned[step, sample])

    for threads in (0, 1, 2):
        with pytest.raises(ValueError, match="finish"):
            start(plans(1), FakeBuilder(at), threads).take(DEADLINE_S)


def test_without_threads_the_caller_builds_each_group_when_it_takes_it(start):
    threads: set[str] = set()
    builder = FakeBuilder(lambda *_: threads.add(threading.current_thread().name))
    running = start(plans(3), builder, threads=0, ahead=3)
    assert (builder.begun, running.ready()) == (0, 0)
    for number, _ in enumerate(iter(lambda: running.take(DEADLINE_S), None), 1):
        assert (builder.begun, running.ready()) == (number, 0)
        running.make_room()
    assert threads == {threading.current_thread().name}


def test_an_interrupt_while_the_caller_builds_is_raised_at_once(start):
    running = start(plans(2), FakeBuilder(raises_at("fill", PIECE_SIZE, KeyboardInterrupt())), threads=0)
    with pytest.raises(KeyboardInterrupt):
        running.take(DEADLINE_S)


def test_an_interrupt_while_the_threads_start_leaves_none_of_them(monkeypatch):
    starts: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> bool:
        thread.start()
        starts.append(thread)
        if len(starts) == 2:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(thread_pool, "has_started", interrupted)
    rows = np.zeros((600, 4, 4, 3), np.uint8)
    loader = Loader((rows, np.zeros(600, np.int64)), 50, transform=Normalize(), num_workers=4)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert loader_threads() == []
    assert len(starts) == 2

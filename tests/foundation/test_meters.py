"""Meters: counting in several threads, snapshots, and their differences."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from colabkit.foundation.meters import counts as totals
from colabkit.foundation.meters.counts import LoaderMeters, MetersSnapshot, PartSnapshot
from colabkit.foundation.meters.steps import HostClock, StepTimes, StepTotals


def test_parts_add_up_in_order_and_a_snapshot_does_not_change():
    counts = LoaderMeters()
    before = counts.snapshot()
    for number in range(1, 4):
        counts.add("gather", number, 10 * number, 0.25)
        counts.add("transform", 1, 1, 0.5)
    counts.batches += 1
    assert before == MetersSnapshot()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.batches = 5
    assert counts.snapshot().parts == (
        PartSnapshot("gather", 6, 60, 0.75, calls=3, p95_s=0.25),
        PartSnapshot("transform", 3, 3, 1.5, calls=3, p95_s=0.5),
    )


def test_snapshots_can_be_subtracted():
    counts = LoaderMeters(
        batches=2, samples=20, ready=1, passes=1, spent=StepTotals(wait_s=1.0, compute_s=3.0, steps=1)
    )
    counts.add("gather", 20, 200, 0.5)
    before = counts.snapshot()
    counts.batches, counts.samples, counts.ready, counts.passes = 5, 50, 3, 2
    counts.spent = StepTotals(wait_s=1.5, copy_s=0.125, compute_s=3.5, other_s=0.25, first_s=0.5, steps=4)
    counts.add("gather", 30, 300, 0.25)
    # The earlier snapshot does not contain this part.
    counts.add("transform", 30, 300, 4.0)
    parts = (
        PartSnapshot("gather", 30, 300, 0.25, calls=1, p95_s=0.5),
        PartSnapshot("transform", 30, 300, 4.0, calls=1, p95_s=4.0),
    )
    assert counts.snapshot() - before == MetersSnapshot(
        batches=3,
        samples=30,
        wait_s=0.5,
        copy_s=0.125,
        compute_s=0.5,
        other_s=0.25,
        first_s=0.5,
        passes=1,
        steps=3,
        ready=2,
        parts=parts,
    )
    nothing = counts.snapshot() - counts.snapshot()
    assert (nothing.batches, nothing.samples, nothing.seconds, nothing.ready) == (0, 0, 0, 0)


def test_a_difference_contains_the_recent_steps_since_the_older_snapshot():
    counts = LoaderMeters()
    counts.clock = clock = HostClock(counts.spent)
    for number in range(3):
        clock.stepped(number, number + 0.5, number + 1, 4)
    before = counts.snapshot()
    for number in range(3, 5):
        clock.stepped(number, number + 0.25, number + 1, 4)
    later = counts.snapshot()
    assert [step.wait_s for step in later.recent] == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert [step.wait_s for step in (later - before).recent] == [0.25, 0.25]
    assert (later - later).recent == ()
    for number in range(5, 1000):
        clock.stepped(number, number + 0.25, number + 1, 1)
    found = counts.snapshot()
    assert (found.steps, found.wait_s, found.compute_s, len(found.recent)) == (1000, 250.75, 749.25, 512)


def test_the_first_wait_of_each_pass_is_also_counted_separately():
    counts = LoaderMeters()
    for _ in range(2):
        counts.clock = clock = HostClock(counts.spent)
        clock.stepped(0, 5, 6, 4)
        clock.stepped(6, 7, 8, 4)
        counts.settle(clock)
    found = counts.snapshot()
    assert (found.first_s, found.wait_s, found.steps) == (10.0, 12.0, 4)
    assert [step.is_first for step in found.recent] == [True, False, True, False]


def test_the_totals_of_the_first_pass_are_saved_when_the_second_begins():
    counts = LoaderMeters()
    assert counts.snapshot().first_pass is None
    counts.begin_pass(HostClock(counts.spent))
    counts.add("decode", 10, 100, 0.5)
    begun = counts.snapshot()
    assert begun.first_pass is None
    for _ in range(2):
        counts.begin_pass(HostClock(counts.spent))
        counts.add("decode", 1, 1, 0.25)
    spent = counts.snapshot()
    assert spent.first_pass is not None
    assert spent.first_pass.parts == begun.parts
    assert (spent - spent.first_pass).parts[0].samples == 2
    assert (spent - LoaderMeters().snapshot()).first_pass == spent.first_pass
    # The first pass belongs to another loader.
    assert (spent - begun).first_pass is None


def test_work_before_the_first_pass_does_not_count_as_part_of_it():
    counts = LoaderMeters()
    # `peek()` counts work without beginning a pass.
    counts.add("decode", 5, 50, 0.5)
    before = counts.snapshot()
    for _ in range(2):
        counts.begin_pass(HostClock(counts.spent))
        counts.add("decode", 1, 1, 0.25)
    spent = counts.snapshot() - before
    assert spent.first_pass is not None
    assert [part.samples for part in (*spent.parts, *spent.first_pass.parts)] == [2, 1]


def test_a_part_reports_its_typical_worst_call_and_its_cpu_time():
    counts = LoaderMeters()
    for number in range(100):
        counts.add("decode", 1, 1, number / 100, cpu_s=0.25)
    # A wait does not count as a call.
    counts.add("decode", 0, 0, 0.0, 3.0)
    (part,) = counts.snapshot().parts
    assert (part.calls, part.p95_s, part.cpu_s, part.wait_s) == (99, 0.95, 25.0, 3.0)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_pass_that_ends_during_another_count_is_counted_exactly_once(is_same):
    """The garbage collector may end an abandoned pass in the middle of counting, in the thread that counts."""
    counts = LoaderMeters()

    class PendingSteps:
        left_s = 3.0

        def __init__(self, wait_s: float, compute_s: float) -> None:
            self.steps = [StepTimes(wait_s, 0.0, compute_s, 0.0)]

        def settled(self) -> list[StepTimes]:
            found, self.steps = self.steps, []
            return found

    class EndingSteps(PendingSteps):
        def settled(self) -> list[StepTimes]:
            if self.steps:
                found = super().settled()
                counts.settle(self if is_same else PendingSteps(1.0, 2.0))
                counts.add("transfer", 1, 1, 0.5)
                return found
            return []

    counting = threading.Thread(target=counts.settle, args=(EndingSteps(2.0, 1.0),), daemon=True)
    counting.start()
    counting.join(20.0)
    assert not counting.is_alive()
    expected = (1, 2.0, 1.0) if is_same else (2, 3.0, 3.0)
    assert (counts.spent.steps, counts.spent.wait_s, counts.spent.compute_s) == expected


def test_shares_are_correct_and_defined_without_any_events():
    taken = MetersSnapshot(batches=4, samples=40, wait_s=1.0, compute_s=2.0, other_s=0.5, copy_s=0.5, ready=3)
    assert (taken.wait_share, taken.occupancy_rate, taken.seconds) == (0.25, 0.75, 4.0)
    nothing = LoaderMeters().snapshot()
    assert (nothing.wait_share, nothing.occupancy_rate) == (0.0, 0.0)


def test_busy_counts_a_block_unless_it_fails(monkeypatch):
    clock, cpu = iter([5.0, 10.0, 12.5]), iter([0.5, 1.0, 2.0])
    monkeypatch.setattr(totals.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(totals.time, "thread_time", lambda: next(cpu))
    counts = LoaderMeters()
    with pytest.raises(ValueError, match="planned"), counts.busy("gather", 3, 30):
        raise ValueError("planned")
    with counts.busy("gather", 3, 30):
        assert counts.snapshot().parts == ()
    assert counts.snapshot().parts == (PartSnapshot("gather", 3, 30, 2.5, calls=1, p95_s=2.5, cpu_s=1.0),)


def test_snapshots_may_be_taken_while_threads_count():
    counts = LoaderMeters()
    stop = threading.Event()

    def work(name: str) -> None:
        while not stop.is_set():
            counts.add(name, 1, 1, 1.0)

    threads = [threading.Thread(target=work, args=(f"part {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        earlier = counts.snapshot()
        for _ in range(200):
            later = counts.snapshot()
            assert all(part.samples >= 0 for part in (later - earlier).parts)
            earlier = later
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_copies_are_counted_while_they_end_and_each_once_even_if_the_garbage_collector_counts_meanwhile():
    counts = LoaderMeters()

    class Mark:
        """A mark that is reached at its second query; the query also takes a snapshot, as a garbage collection may."""

        queries = 0

        def query(self) -> bool:
            self.queries += 1
            if self.queries == 2:
                counts.snapshot()
            return self.queries > 1

        def elapsed_time(self, later: Mark) -> float:
            assert later.queries > 1
            return 500.0

    for _ in range(5):
        mark = Mark()
        counts.copied(4, 40, mark, mark)
    # During a pass in `aside()`, no snapshots are taken, but its uncounted copies must not accumulate.
    assert counts._parts["transfer"].samples >= 4 * 3
    counts.snapshot()
    counts.snapshot()
    assert [(part.name, part.samples, part.busy_s) for part in counts.snapshot().parts] == [("transfer", 20, 2.5)]

"""Meters add up, and a listener that fails never stops the work."""

from __future__ import annotations

import dataclasses
import logging
import threading

import pytest

from colabkit import meters
from colabkit.meters import BatchTaken, LoaderMeters, MetersSnapshot, PartSnapshot, publish, subscribe


@pytest.fixture(autouse=True)
def no_other_listeners(monkeypatch):
    monkeypatch.setattr(meters, "_listeners", [])


EVENT = BatchTaken(LoaderMeters())


def test_a_snapshot_is_frozen_and_stays_as_it_was():
    counts = LoaderMeters()
    counts.add("gather", 10, 100, 0.5)
    before = counts.snapshot()
    counts.add("gather", 1, 1, 1)
    counts.batches += 1
    assert before == MetersSnapshot(0, 0, 0.0, 0.0, 0, (PartSnapshot("gather", 10, 100, 0.5),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.batches = 5


def test_parts_add_up_and_keep_their_order():
    counts = LoaderMeters()
    for number in range(1, 4):
        counts.add("gather", number, 10 * number, 0.25)
        counts.add("transform", 1, 1, 0.5)
    assert counts.snapshot().parts == (PartSnapshot("gather", 6, 60, 0.75), PartSnapshot("transform", 3, 3, 1.5))


def test_snapshots_subtract():
    counts = LoaderMeters(batches=2, samples=20, wait_s=1.0, user_s=3.0, ready=1)
    counts.add("gather", 20, 200, 0.5)
    before = counts.snapshot()
    counts.batches, counts.samples, counts.wait_s, counts.user_s, counts.ready = 5, 50, 1.5, 3.5, 3
    counts.add("gather", 30, 300, 0.25)
    counts.add("transform", 30, 300, 4.0)  # a part that did not exist before
    parts = (PartSnapshot("gather", 30, 300, 0.25), PartSnapshot("transform", 30, 300, 4.0))
    assert counts.snapshot() - before == MetersSnapshot(3, 30, 0.5, 0.5, 2, parts)
    nothing = counts.snapshot() - counts.snapshot()
    assert (nothing.batches, nothing.samples, nothing.wait_s, nothing.user_s, nothing.ready) == (0, 0, 0, 0, 0)


def test_shares_are_right_and_defined_where_nothing_happened():
    taken = MetersSnapshot(4, 40, 1.0, 3.0, 3, ())
    assert (taken.wait_share, taken.occupancy_rate) == (0.25, 0.75)
    nothing = LoaderMeters().snapshot()
    assert (nothing.wait_share, nothing.occupancy_rate) == (0.0, 0.0)


def test_busy_counts_the_block(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(meters.time, "perf_counter", lambda: next(clock))
    counts = LoaderMeters()
    with counts.busy("gather", 3, 30):
        assert counts.snapshot().parts == ()
    assert counts.snapshot().parts == (PartSnapshot("gather", 3, 30, 2.5),)


def test_work_that_failed_is_not_counted_as_done():
    counts = LoaderMeters()
    with pytest.raises(ValueError, match="planned"), counts.busy("gather", 3, 30):
        raise ValueError("planned")
    assert counts.snapshot().parts == ()


def test_every_listener_hears_every_event_in_order():
    heard: list[tuple[str, object]] = []
    subscribe(lambda event: heard.append(("one", event)))
    subscribe(lambda event: heard.append(("two", event)))
    events = [EVENT, meters.RunEnded(None)]
    for event in events:
        publish(event)
    assert heard == [(name, event) for event in events for name in ("one", "two")]


def test_after_unsubscribing_nothing_is_heard_and_twice_is_once():
    heard, kept = [], []
    unsubscribe = subscribe(heard.append)
    subscribe(kept.append)
    unsubscribe()
    unsubscribe()
    publish(EVENT)
    assert (heard, kept) == ([], [EVENT])


def test_a_listener_that_fails_is_dropped_and_logged_once_and_the_others_go_on(caplog):
    heard: list[object] = []

    def broken(event: object) -> None:
        heard.append("broken")
        raise RuntimeError("planned")

    unsubscribe = subscribe(broken)
    subscribe(heard.append)
    with caplog.at_level(logging.WARNING, "colabkit"):
        publish(EVENT)
        publish(EVENT)
    unsubscribe()
    assert heard == ["broken", EVENT, EVENT]
    assert [record.name for record in caplog.records] == ["colabkit"]
    assert "planned" in caplog.text
    assert "the run goes on" in caplog.text


def test_a_listener_may_unsubscribe_itself_and_others_while_it_is_called():
    heard: list[str] = []

    def once(event: object) -> None:
        heard.append("once")
        for end in ends:
            end()

    ends = [subscribe(once), subscribe(lambda event: heard.append("second"))]
    publish(EVENT)
    publish(EVENT)
    assert heard == ["once", "second"]


def test_ctrl_c_in_a_listener_is_not_swallowed():
    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(EVENT)


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

"""All listeners get all events, and a failing listener never stops the work."""

from __future__ import annotations

import logging

import pytest

from colabkit.foundation import meters
from colabkit.foundation.meters import events
from colabkit.foundation.meters.counts import LoaderMeters
from colabkit.foundation.meters.events import BatchTaken, publish, subscribe

EVENT = BatchTaken(LoaderMeters())


@pytest.fixture(autouse=True)
def no_other_listeners(monkeypatch):
    monkeypatch.setattr(events, "listeners", [])


def test_every_listener_gets_every_event_in_order():
    heard: list[tuple[str, object]] = []
    subscribe(lambda event: heard.append(("one", event)))
    subscribe(lambda event: heard.append(("two", event)))
    events = [EVENT, meters.RunEnded(None)]
    for event in events:
        publish(event)
    assert heard == [(name, event) for event in events for name in ("one", "two")]


def test_an_unsubscribed_listener_gets_no_events_and_may_unsubscribe_twice():
    heard, kept = [], []
    unsubscribe = subscribe(heard.append)
    subscribe(kept.append)
    unsubscribe()
    unsubscribe()
    publish(EVENT)
    assert (heard, kept) == ([], [EVENT])


def test_a_failing_listener_is_removed_and_logged_once_and_the_others_continue(caplog):
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
    assert "was removed; the run continues" in caplog.text


def test_a_listener_may_unsubscribe_itself_and_others_during_an_event():
    heard: list[str] = []

    def once(event: object) -> None:
        heard.append("once")
        for end in ends:
            end()

    ends = [subscribe(once), subscribe(lambda event: heard.append("second"))]
    publish(EVENT)
    publish(EVENT)
    assert heard == ["once", "second"]


def test_ctrl_c_in_a_listener_is_not_suppressed():
    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(EVENT)

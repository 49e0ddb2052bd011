"""In the trace of a run, the time shares add up to those in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainings import stop_after, train

from colabkit.foundation import MetersSnapshot, StepTimes
from colabkit.loading import Loader
from colabkit.training.records import EpochRecord
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.trace import trace_of

SHARES = {"data wait": "wait_s", "copy": "copy_s", "compute": "compute_s", "other": "other_s"}


def totals(events: list[dict[str, object]]) -> dict[str, float]:
    """Return the seconds of each share, and check that slices follow each other without gaps."""
    found, ends_us = dict.fromkeys(SHARES, 0.0), 0.0
    for event in events:
        if event["name"] in SHARES:
            assert event["ts"] == pytest.approx(ends_us)
            ends_us = event["ts"] + event["dur"]
            found[event["name"]] += event["dur"] / 1e6
    return found


def assert_adds_up(report: TrainReport, path: Path) -> list[str]:
    events = json.loads(report.to_trace(path).read_text())["traceEvents"]
    expected = {name: getattr(report.spent, share) for name, share in SHARES.items()}
    assert totals(events) == pytest.approx(expected, rel=0.01, abs=1e-9)
    assert sum(expected.values()) > 0
    return [event["name"] for event in events if event["ph"] == "X" and event["name"] not in SHARES]


def test_the_shares_of_a_trace_add_up_to_those_of_the_report(tmp_path, data):
    report = train(lambda batch: 1.0, Loader(data, 4), epochs=2)
    assert assert_adds_up(report, tmp_path / "run.json") == [f"step {number}" for number in range(1, 13)]


def test_a_long_run_has_a_block_for_each_earlier_epoch(tmp_path, data):
    report = train(lambda batch: 1.0, Loader(data, 1), epochs=26)
    names = assert_adds_up(report, tmp_path / "run.json")
    assert names[0] == "epoch 1"
    assert names[-512:] == [f"step {number}" for number in range(61, 573)]


def test_perfetto_reads_every_slice_inside_the_slice_of_its_step(tmp_path, data):
    report = train(lambda batch: 1.0, Loader(data, 1), epochs=26)
    trace = json.loads(report.to_trace(tmp_path / "run.json").read_text())
    assert {*trace} == {"traceEvents", "displayTimeUnit"}
    block_ends, ends = 0, 0
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            continue
        # Perfetto stores whole nanoseconds, and drops slices that overlap the end of another.
        start, end = int(event["ts"] * 1000), int(event["ts"] * 1000) + int(event["dur"] * 1000)
        if event["name"] in SHARES:
            assert ends <= start < end <= block_ends
            ends = end
        else:
            assert start == ends == block_ends
            block_ends = end
    assert block_ends == pytest.approx(report.spent.seconds * 1e9, rel=0.01)


@pytest.mark.full
def test_a_stopped_and_resumed_run_adds_up(tmp_path, data):
    def run(**options: object) -> TrainReport:
        return train(lambda batch: 1.0, Loader(data, 1), epochs=60, to=tmp_path / "run", **options)

    for step in (700, 1310):
        with pytest.raises(TrainingInterrupted) as caught:
            run(on_step=stop_after(step))
        assert_adds_up(caught.value.report, tmp_path / "run.json")


def test_without_steps_the_trace_is_empty(tmp_path, data):
    report = train(lambda batch: 1.0, Loader(data, 4), epochs=0)
    assert totals(json.loads(report.to_trace(tmp_path / "run.json").read_text())["traceEvents"]) == dict.fromkeys(
        SHARES, 0.0
    )


def test_blocks_and_steps_are_nested_in_the_order_of_time():
    record = EpochRecord(0, 2, 8, 10.0, 4.0, {}, {}, 1.0, 3.0, 2.0)
    steps = StepTimes(1.0, 0.0, 1.0, 0.0, 4), StepTimes(0.5, 0.25, 0.25, 0.0, 4)
    spent = MetersSnapshot(wait_s=5.0, copy_s=1.25, compute_s=4.0, other_s=2.0, steps=3, recent=steps)
    events = [event for event in trace_of([record], 3, spent)["traceEvents"] if event["ph"] == "X"]
    found = [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events]
    assert found == [
        ("epoch 1", 0.0, 9.25),
        ("data wait", 0.0, 3.5),
        ("copy", 3.5, 1.0),
        ("compute", 4.5, 2.75),
        ("other", 7.25, 2.0),
        ("step 2", 9.25, 2.0),
        ("data wait", 9.25, 1.0),
        ("compute", 10.25, 1.0),
        ("step 3", 11.25, 1.0),
        ("data wait", 11.25, 0.5),
        ("copy", 11.75, 0.25),
        ("compute", 12.0, 0.25),
    ]

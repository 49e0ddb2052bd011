"""The recorder turns events, host snapshots and diagnoses into the panel's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import time as now

import pytest
import torch
from panel_states import DIAGNOSIS, HOST, STATES, FakeTime, Machine, render, took
from simulated_gpu import SimulatedGpu

from colabkit.foundation import HostSnapshot, LoaderFacts, LoaderMeters, MetersSnapshot, Progress, meters
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.content import PanelState
from colabkit.monitoring.panel.recorder import RunRecorder


class AskedDoctor:
    def __init__(self) -> None:
        self.spent: list[MetersSnapshot] = []
        self.facts: LoaderFacts | None = None
        self.hosts: Sequence[HostSnapshot] = ()
        self.cost_share: float | None = None
        self.diagnosis = DIAGNOSIS

    def look(
        self,
        spent: MetersSnapshot,
        facts: LoaderFacts | None,
        hosts: Sequence[HostSnapshot],
        cost_share: float | None,
        is_over: bool,
    ) -> Diagnosis:
        self.spent.append(spent)
        self.is_over = is_over
        self.facts, self.hosts, self.cost_share = facts, hosts, cost_share
        return self.diagnosis


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def doctor() -> AskedDoctor:
    return AskedDoctor()


@pytest.fixture
def recorder(doctor: AskedDoctor, time: FakeTime) -> RunRecorder:
    return RunRecorder(doctor, time)


def seen(recorder: RunRecorder, hosts: Sequence[HostSnapshot] = (HOST,), cost_share: float | None = None) -> PanelState:
    return recorder.state(Machine(hosts), cost_share)


def test_the_state_follows_a_run(recorder: RunRecorder, time: FakeTime) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 2, 10))
    recorder.note(meters.EpochStarted(counts, 1, 10, 40))
    time.now_s += 26
    took(counts, 13, 0.5, 1.5)
    for step in range(1, 14):
        recorder.note(meters.BatchTaken(counts))
        recorder.note(meters.StepDone((step - 1) // 10, step, (step - 1) % 10 + 1, {"loss": 0.5}))
    state = seen(recorder)
    assert (state.phase, state.epoch, state.epochs, state.step, state.steps_per_epoch) == ("running", 2, 2, 3, 10)
    assert state.samples_per_s == pytest.approx(2.0)
    assert state.elapsed_s == 26
    assert state.values == {"loss": 0.5}
    assert state.diagnosis is DIAGNOSIS
    recorder.note(meters.RunEnded("ValueError"))
    assert (seen(recorder).phase, seen(recorder).stopped_by) == ("stopped", "ValueError")


def test_a_state_carries_its_time_and_after_the_run_the_time_of_its_end(recorder: RunRecorder, time: FakeTime) -> None:
    first = seen(recorder).at_s
    assert first == pytest.approx(now(), abs=5)
    recorder.note(meters.RunEnded(None))
    ended = seen(recorder).at_s
    time.now_s += 3600
    assert seen(recorder).at_s == ended


def test_before_the_first_event_only_the_machine_is_known(recorder: RunRecorder) -> None:
    state = seen(recorder)
    assert state == replace(PanelState("starting"), host=HOST, hosts=(HOST,), at_s=state.at_s)
    assert seen(recorder, ()).host is None


def test_the_loader_of_the_validation_is_ignored(recorder: RunRecorder) -> None:
    counts, other = LoaderMeters(), LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 10))
    recorder.note(meters.StepDone(0, 4, 4, {}))
    recorder.note(meters.EpochStarted(other, 7, 99, 99))
    recorder.note(meters.BatchTaken(other))
    recorder.note(meters.DataWait(other, 5.0))
    state = seen(recorder)
    assert (state.phase, state.epoch, state.step, state.steps_per_epoch) == ("starting", 1, 4, 10)
    assert state.waiting_s == 0.0


def test_the_state_follows_each_pass_of_a_plain_loop(recorder: RunRecorder) -> None:
    counts = LoaderMeters()
    recorder.note(meters.EpochStarted(counts, 3, 6, 24))
    recorder.note(meters.BatchTaken(counts))
    recorder.note(meters.BatchTaken(counts))
    recorder.note(meters.DataWait(counts, 2.0))
    state = seen(recorder)
    assert (state.phase, state.epoch, state.epochs, state.step, state.waiting_s) == ("waiting", 4, None, 2, 2.0)
    recorder.note(meters.BatchTaken(counts))
    assert (seen(recorder).phase, seen(recorder).waiting_s) == ("running", 0.0)
    recorder.note(meters.EpochStarted(counts, 4, 6, 24))
    assert (seen(recorder).epoch, seen(recorder).step) == (5, 0)


def test_time_and_rates_leave_out_a_later_loop_over_another_loader(recorder: RunRecorder, time: FakeTime) -> None:
    counts, other = LoaderMeters(), LoaderMeters()
    for _ in range(2):
        # The second epoch of this loop continues after the other loop, which may have been a validation.
        recorder.note(meters.EpochStarted(counts, 0, 2, 8))
        time.now_s += 3
        recorder.note(meters.BatchTaken(counts))
        assert seen(recorder).elapsed_s in (3, 10)
        recorder.note(meters.EpochStarted(other, 0, 2, 8))
        time.now_s += 4
        recorder.note(meters.BatchTaken(other))
        assert seen(recorder).elapsed_s in (3, 10)
    recorder.end(None)
    assert seen(recorder).elapsed_s == 10


def test_a_loader_without_a_length_has_no_remaining_time(recorder: RunRecorder) -> None:
    counts = LoaderMeters(facts=LoaderFacts("foreign"))
    recorder.note(meters.EpochStarted(counts, 0, None, None))
    recorder.note(meters.BatchTaken(counts))
    state = seen(recorder)
    assert (state.steps_per_epoch, state.remaining_s, state.step) == (None, None, 1)
    assert "epoch 1 · step 1 · 0 s so far" in render(state)[1]


def test_after_the_end_nothing_changes(recorder: RunRecorder, time: FakeTime) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 10))
    recorder.note(meters.StepDone(0, 4, 4, {}))
    time.now_s += 8
    recorder.note(meters.RunEnded(None))
    time.now_s += 60
    recorder.note(meters.StepDone(0, 5, 5, {}))
    recorder.note(meters.EpochStarted(LoaderMeters(), 0, 5, 5))
    recorder.end("KeyboardInterrupt")
    state = seen(recorder)
    assert (state.phase, state.stopped_by, state.step, state.elapsed_s) == ("finished", None, 4, 8)


def test_the_doctor_gets_only_the_run_and_the_known_facts(
    recorder: RunRecorder, doctor: AskedDoctor, time: FakeTime
) -> None:
    facts = LoaderFacts("decoded", device="cuda:0")
    counts = LoaderMeters(facts=facts)
    took(counts, 5, 9.0, 9.0)
    recorder.note(meters.RunStarted(counts, 1, 10))
    took(counts, 3, 1.0, 2.0)
    began_s = time.now_s
    time.now_s += 3
    seen(recorder, (HOST, *(replace(HOST, at_s=began_s + second) for second in (1, 2))), 0.004)
    (spent,) = doctor.spent
    assert (spent.steps, spent.wait_s, spent.compute_s, len(spent.recent)) == (3, 3.0, 6.0, 3)
    assert doctor.facts is facts
    assert [host.at_s - began_s for host in doctor.hosts] == [1.0, 2.0]
    assert doctor.cost_share == 0.004


def test_the_doctor_looks_every_two_seconds_and_at_the_end(
    recorder: RunRecorder, doctor: AskedDoctor, time: FakeTime
) -> None:
    recorder.note(meters.RunStarted(LoaderMeters(), 1, 10))
    for _ in range(20):
        assert seen(recorder).diagnosis is DIAGNOSIS
        time.now_s += 0.5
    assert len(doctor.spent) == 5
    assert not doctor.is_over
    recorder.note(meters.RunEnded(None))
    seen(recorder)
    assert (len(doctor.spent), doctor.is_over) == (6, True)


def test_the_doctor_counts_the_steps_of_every_frame_until_its_first_verdict(
    recorder: RunRecorder, doctor: AskedDoctor, time: FakeTime
) -> None:
    doctor.diagnosis = STATES["measuring"].diagnosis
    recorder.note(meters.RunStarted(LoaderMeters(), 2, 100))
    for _ in range(3):
        seen(recorder)
        time.now_s += 0.5
    assert len(doctor.spent) == 3
    doctor.diagnosis = DIAGNOSIS
    for _ in range(4):
        seen(recorder)
        time.now_s += 0.5
    assert len(doctor.spent) == 4


def test_a_real_doctor_accepts_the_recorded_run(time: FakeTime) -> None:
    recorder, counts = RunRecorder(Doctor(), time), LoaderMeters(facts=LoaderFacts("decoded", samples=4000))
    recorder.note(meters.RunStarted(counts, 1, 1000))
    took(counts, 400, 0.03, 0.01)
    diagnosis = seen(recorder).diagnosis
    assert diagnosis.verdict == "data"
    assert diagnosis.shares.wait == pytest.approx(0.75)


def test_the_speed_is_that_of_the_newest_steps_and_drops_during_a_wait_for_data(
    recorder: RunRecorder, time: FakeTime
) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 1000))
    assert seen(recorder).samples_per_s is None
    took(counts, 100, 0.0, 1.0)
    took(counts, 40, 0.0, 0.125)
    assert seen(recorder).samples_per_s == pytest.approx(32)
    recorder.note(meters.DataWait(counts, 15.0))
    assert seen(recorder).samples_per_s == pytest.approx(4 / 15.125)
    recorder.note(meters.RunEnded(None))
    assert seen(recorder).samples_per_s == pytest.approx(560 / 105), "of the whole run when it is over"


@pytest.mark.parametrize(("part", "size"), [("read", 3000), ("gather", 3000), ("decode", 0)])
def test_bytes_are_read_or_gathered_bytes_or_unknown(
    recorder: RunRecorder, time: FakeTime, part: str, size: int
) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 10))
    assert seen(recorder).data_bytes_per_s is None
    time.now_s += 1
    counts.add("read", 1, 0, 0.1)
    counts.add(part, 1, size, 0.1)
    assert seen(recorder).data_bytes_per_s == (3000 if size else None)
    time.now_s += 30
    seen(recorder)
    time.now_s += 30
    assert seen(recorder).data_bytes_per_s == (0.0 if size else None), "nothing was read lately"


def test_the_fill_level_of_the_queue_is_that_of_the_last_seconds(recorder: RunRecorder, time: FakeTime) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 10))
    assert seen(recorder).queue_rate is None
    for queued, rate in ((0, 0.0), (8, 1.0)):
        time.now_s += 20
        seen(recorder)
        time.now_s += 20
        counts.queued += queued
        counts.queue_room += 8
        assert seen(recorder).queue_rate == rate


def test_losses_that_are_not_finite_do_not_break_the_curve(recorder: RunRecorder) -> None:
    for loss in (1.0, float("nan"), float("inf"), 2.0):
        recorder.note(meters.StepDone(0, 1, 1, {"loss": loss}))
        state = seen(recorder)
        render(state)
    assert state.loss_curve == (1.0, 2.0)


def test_the_gpu_is_the_one_that_the_batches_go_to(recorder: RunRecorder) -> None:
    counts = LoaderMeters(facts=LoaderFacts("decoded", device="cuda:1"))
    recorder.note(meters.RunStarted(counts, 1, 10))
    assert seen(recorder).gpu_number == 1


def test_after_the_end_the_curves_cover_the_whole_run(recorder: RunRecorder, time: FakeTime) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 1000))
    hosts = [replace(HOST, at_s=time.now_s + second, gpus=()) for second in range(-5, 100)]
    for _ in range(100):
        time.now_s += 1
        took(counts, 1, 0.0, 1.0)
        assert len(seen(recorder, hosts).speed_curve) <= 60
    assert len(seen(recorder, hosts).hosts) == 3
    recorder.note(meters.RunEnded(None))
    state = seen(recorder, hosts)
    assert len(state.speed_curve) == 100
    assert len(state.hosts) == 100, "what was before the run does not count"


def test_the_doctor_sees_the_machine_only_during_the_run(
    recorder: RunRecorder, doctor: AskedDoctor, time: FakeTime
) -> None:
    counts = LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 1000))
    time.now_s += 2
    took(counts, 1, 0.0, 1.0)
    before, during, after = (replace(HOST, at_s=time.now_s + second) for second in (-10, 0, 10))
    recorder.note(meters.RunEnded(None))
    seen(recorder, (before, during, after))
    assert [*doctor.hosts] == [during]


def test_epochs_are_kept_also_in_long_runs_with_the_best_one(recorder: RunRecorder) -> None:
    recorder.note(meters.RunStarted(LoaderMeters(), 5000, 10))
    for epoch in range(5000):
        recorder.note(meters.EpochDone(epoch, 40, 1.0, 0.5, {"loss": 1.0, "val_loss": abs(epoch - 1233) + 1.0}))
    found = seen(recorder).epoch_values
    assert len(found) <= 600
    assert min(values["val_loss"] for _, values in found) == 1.0
    assert (found[0][0], found[-1][0]) == (1, 5000)


def trained(recorder: RunRecorder, time: FakeTime, epochs: int, step_s: float, validation_s: float) -> list[PanelState]:
    """Record a run of epochs with 20 steps each, and return the states after each step and each validation."""
    counts, states = LoaderMeters(), []
    recorder.note(meters.RunStarted(counts, epochs, 20))
    # The first batch takes a long time.
    time.now_s += 30
    for step in range(20 * epochs):
        time.now_s += step_s
        recorder.note(meters.BatchTaken(counts))
        recorder.note(meters.StepDone(step // 20, step + 1, step % 20 + 1, {}))
        states.append(seen(recorder))
        if step % 20 == 19:
            time.now_s += validation_s
            states.append(seen(recorder))
    return states


def test_the_remaining_time_includes_validations_and_appears_once_it_is_stable(
    recorder: RunRecorder, time: FakeTime
) -> None:
    states = trained(recorder, time, 10, 1.0, 20.0)
    first = states[:20]
    assert all(state.remaining_s is None for state in first), "the time of a validation is still unknown"
    assert [state.epoch_remaining_s is None for state in first[:14]] == [True] * 14
    assert first[17].epoch_remaining_s == pytest.approx(2, abs=0.5)
    known = [(number, state.remaining_s) for number, state in enumerate(states) if state.remaining_s is not None]
    assert known[0][0] < 2 * 21 - 5, "early in the second epoch"
    for number, remaining_s in known:
        epoch, within = divmod(number, 21)
        true_s = (9 - epoch) * 40 + (20 - 1 - within + 20 if within < 20 else 0)
        assert remaining_s == pytest.approx(true_s, abs=2)


def test_no_remaining_time_is_shown_while_estimates_disagree(recorder: RunRecorder, time: FakeTime) -> None:
    counts = LoaderMeters()
    recorder.note(meters.EpochStarted(counts, 0, 1000, 4000))
    for step in range(200):
        # Steps become faster and faster.
        time.now_s += 20 / (step + 1)
        recorder.note(meters.BatchTaken(counts))
        assert seen(recorder).epoch_remaining_s is None, step


def test_an_operation_is_recorded_with_its_speed_until_a_run_begins(recorder: RunRecorder, time: FakeTime) -> None:
    for done in range(12):
        recorder.note_work(Progress("stage", done * 1000, 24_000, "B", f"{done}/24 files", float(done)))
        state = seen(recorder)
        time.now_s += 1
    assert (state.phase, state.work.done, state.work_per_s) == ("running", 11_000, 1000)
    assert state.remaining_s == pytest.approx(13)
    assert state.work_curve == (1000.0,) * 11
    recorder.note_work(Progress("verify", 0, 24_000, "B", "", 0.0))
    assert (seen(recorder).work_per_s, seen(recorder).remaining_s) == (None, None)
    recorder.note(meters.RunStarted(LoaderMeters(), 2, 10))
    recorder.note_work(Progress("publish", 5, 9, "B", "", 0.0))
    assert (seen(recorder).work, seen(recorder).phase) == (None, "starting")


def test_the_doctor_gets_the_epochs_and_the_newest_values(recorder: RunRecorder, doctor: AskedDoctor) -> None:
    recorder.note(meters.RunStarted(LoaderMeters(), 2, 10))
    recorder.note(meters.StepDone(0, 1, 1, {"loss": 0.25}))
    recorder.note(meters.EpochDone(0, 40, 1.0, 0.5, {"loss": 0.5, "val_loss": 0.75}))
    seen(recorder)
    assert doctor.epochs == [(1, {"loss": 0.5, "val_loss": 0.75})]
    assert doctor.values == {"loss": 0.25}


def test_a_series_holds_the_newest_minute_and_a_bounded_summary_of_the_whole_run() -> None:
    series = meters.TimeSeries()
    for number in range(10_000):
        series.add(float(number))
    assert series.newest == tuple(map(float, range(9940, 10_000)))
    assert 120 <= len(series.whole) <= 241
    assert series.whole[0] < 100
    assert series.whole[-1] > 9900
    assert list(series.whole) == sorted(series.whole)


def test_values_on_a_gpu_are_read_after_they_have_arrived_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, readings = SimulatedGpu(), meters.StepValues()
    gpu.install(monkeypatch)

    def step(loss: float) -> None:
        # The step takes a second in a stream that is not the current one when the value is read.
        with gpu.stream(side):
            value = torch.tensor([loss]).to("cuda", non_blocking=True)
            gpu.current.run(1.0, writes=[value])
            readings.note({"loss": value, "lr": 0.1})

    with gpu:
        side = torch.cuda.Stream()
        step(1.0)
        assert (readings.read(), readings.values) == (False, {})
        step(2.0)
        assert not readings.read()
        gpu.host.now = 1.0
        assert (readings.read(), readings.values) == (True, {"loss": 1.0, "lr": 0.1})
        assert (readings.read(), gpu.host.now) == (False, 1.0)
        gpu.host.now = 2.0
        assert (readings.read(), readings.values["loss"]) == (True, 2.0)
        assert not readings.read(), "there is nothing new"
        step(3.0)
        assert not readings.read()
        assert (readings.read_all(), readings.values["loss"], gpu.host.now) == (True, 3.0, 3.0)


def test_the_last_values_are_always_read_unless_the_device_has_failed(recorder: RunRecorder) -> None:
    class BrokenNumber:
        def __float__(self) -> float:
            raise RuntimeError("CUDA error")

    recorder.note(meters.StepDone(0, 1, 1, {"loss": 1.0}))
    seen(recorder)
    recorder.note(meters.StepDone(0, 2, 2, {"loss": 0.5}))
    recorder.end(None)
    assert seen(recorder).values == {"loss": 0.5}
    other = RunRecorder(AskedDoctor())
    other.note(meters.StepDone(0, 1, 1, {"loss": 1.0}))
    seen(other)
    other.note(meters.StepDone(0, 2, 2, {"loss": BrokenNumber()}))
    other.end("RuntimeError")
    assert seen(other).values == {"loss": 1.0}

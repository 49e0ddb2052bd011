"""Signals, deadlines, patience and `on_step` end `train()` after a step, with a final checkpoint."""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trainings import train

from colabkit.augment import PerBatch
from colabkit.errors import InvalidOption
from colabkit.foundation import check_duration, meters
from colabkit.loading import Loader
from colabkit.training import schedule
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.schedule import moment

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def pressed(numbers: int | list[int], at_step: int, times: int = 1) -> Callable[[object], None]:
    """Return a training step that raises signals during call number `at_step`."""
    raised = [numbers] * times if isinstance(numbers, int) else numbers
    steps: list[object] = []

    def step(batch: object) -> None:
        steps.append(batch)
        if len(steps) == at_step:
            for number in raised:
                signal.raise_signal(number)
            whole.append(True)

    whole: list[bool] = []
    step.whole = whole  # type: ignore[attr-defined]
    return step


def test_ctrl_c_ends_the_training_after_the_step_with_a_checkpoint_and_a_report(tmp_path, data, heard):
    step = pressed(signal.SIGINT, 3)
    with pytest.raises(TrainingInterrupted, match=r"stopped after step 3: checkpoint '.*checkpoint-0*3\.pt'") as caught:
        train(step, Loader(data, 4), epochs=2, to=tmp_path)
    assert step.whole == [True]
    report = caught.value.report
    assert (report.stopped, report.steps, report.trained) == ("Ctrl-C", 3, 0)
    assert report.checkpoint == tmp_path / "checkpoint-00000003.pt"
    assert not report.is_good
    assert "Stopped by Ctrl-C after step 3" in repr(report)
    assert heard[-1] == meters.RunEnded("KeyboardInterrupt")
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value._render_traceback_() == [f"TrainingInterrupted: {caught.value}"]
    again = train(lambda batch: None, Loader(data, 4), epochs=2, to=tmp_path)
    assert (again.steps, again.trained, again.resumed_from) == (12, 2, report.checkpoint)
    assert [record.samples for record in again.epochs] == [22, 22]


def test_ctrl_c_without_a_folder_returns_the_report_and_saves_nothing(data, caplog):
    with pytest.raises(TrainingInterrupted, match=r"step 2: nothing is saved\. Name a folder with to=") as caught:
        train(pressed(signal.SIGINT, 2), Loader(data, 4))
    assert caught.value.report.checkpoint is None
    assert caplog.messages == ["stopping after this step without saving; press Ctrl-C again to stop immediately"]


def test_ctrl_c_with_a_folder_announces_a_final_checkpoint(tmp_path, data, caplog):
    with pytest.raises(TrainingInterrupted):
        train(pressed(signal.SIGINT, 2), Loader(data, 4), to=tmp_path)
    expected = "stopping after this step with a final checkpoint; press Ctrl-C again to stop immediately"
    assert caplog.messages == [expected]


def test_a_key_bounce_counts_as_one_ctrl_c(tmp_path, data):
    with pytest.raises(TrainingInterrupted):
        train(pressed(signal.SIGINT, 3, times=3), Loader(data, 4), to=tmp_path)


@pytest.mark.parametrize(("bounce_s", "is_kept"), [(DEADLINE_S, True), (0.0, False)])
def test_a_key_bounce_while_the_last_checkpoint_is_written_does_not_drop_it(
    tmp_path, data, monkeypatch, bounce_s, is_kept
):
    finish = CheckpointFolder.finish

    def press_and_finish(checkpoints: CheckpointFolder) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(checkpoints)

    monkeypatch.setattr(schedule, "BOUNCE_S", bounce_s)
    monkeypatch.setattr(CheckpointFolder, "finish", press_and_finish)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(pressed(signal.SIGINT, 3), Loader(data, 4), to=tmp_path)
    assert isinstance(caught.value, TrainingInterrupted) == is_kept
    if is_kept:
        assert caught.value.report.checkpoint == tmp_path / "checkpoint-00000003.pt"


def test_a_process_forked_by_a_step_ends_by_sigterm_and_the_training_goes_on(data):
    codes: list[int | None] = []
    context = multiprocessing.get_context("fork")
    is_running = context.Event()

    def wait_for_signals() -> None:
        # Python drops signals that a forked process receives before it runs, and `pause()` misses one just before it.
        is_running.set()
        while True:
            time.sleep(0.01)

    def step(batch: object) -> None:
        child = context.Process(target=wait_for_signals)
        child.start()
        assert is_running.wait(DEADLINE_S)
        child.terminate()
        child.join(DEADLINE_S)
        codes.append(child.exitcode)
        child.kill()

    report = train(step, Loader(data, 22))
    assert codes == [-signal.SIGTERM]
    assert report.stopped is None


def test_a_second_ctrl_c_ends_immediately_and_keeps_the_previous_checkpoint(tmp_path, data, monkeypatch):
    monkeypatch.setattr(schedule, "BOUNCE_S", 0.0)
    step = pressed(signal.SIGINT, 3, times=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(step, Loader(data, 4), to=tmp_path)
    assert not isinstance(caught.value, TrainingInterrupted)
    assert step.whole == []
    again = train(lambda batch: None, Loader(data, 4), to=tmp_path)
    assert again.resumed_from == tmp_path / "checkpoint-00000000.pt"


def test_ctrl_c_while_waiting_for_data_ends_the_wait(tmp_path, data):
    gate = threading.Event()
    taken: list[int] = []

    def transform(images: Tensor) -> Tensor:
        assert len(taken) < 2 or gate.wait(DEADLINE_S)
        return images

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.DataWait) and len(taken) == 2:
            gate.set()
            signal.raise_signal(signal.SIGINT)

    loader = Loader(data, 4, transform=PerBatch(transform), prefetch_batches=1, num_workers=1)
    unsubscribe = meters.subscribe(listen)
    try:
        with pytest.raises(TrainingInterrupted) as caught:
            train(lambda batch: taken.append(1), loader, to=tmp_path)
    finally:
        gate.set()
        unsubscribe()
    assert caught.value.report.steps == 2
    numbers: list[int] = []
    train(lambda batch: numbers.extend(batch[1].tolist()), Loader(data, 4), to=tmp_path)
    assert numbers == data.labels[8:].tolist()


def test_a_validation_interrupted_by_ctrl_c_is_repeated_after_a_resume(tmp_path, data):
    def run(folder, stop=False):
        torch.manual_seed(5)

        def validate():
            drawn = float(torch.rand(()))
            if stop:
                signal.raise_signal(signal.SIGINT)
            return {"drawn": drawn}

        return train(lambda batch: None, Loader(data, 4), epochs=2, to=folder, validate=validate)

    expected = run(tmp_path / "whole")
    with pytest.raises(TrainingInterrupted) as caught:
        run(tmp_path / "run", stop=True)
    assert caught.value.report.steps == 6
    torch.manual_seed(99)
    report = run(tmp_path / "run")
    assert [dict(r.validation) for r in report.epochs] == [dict(r.validation) for r in expected.epochs]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_stop_waits_until_accumulated_gradients_are_applied(data, accumulate):
    class AccumulationStep:
        steps = 0
        is_whole = True

        def __call__(self, batch: object) -> None:
            self.steps += 1
            self.is_whole = self.steps % accumulate == 0
            if self.steps == 1:
                signal.raise_signal(signal.SIGINT)

        def flush(self) -> None:
            self.is_whole = True

    with pytest.raises(TrainingInterrupted) as caught:
        train(AccumulationStep(), Loader(data, 4))
    assert caught.value.report.steps == accumulate


def test_custom_signal_handlers_stay_in_place(data):
    heard: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        report = train(pressed(signal.SIGINT, 2), Loader(data, 4))
    finally:
        signal.signal(signal.SIGINT, former)
    assert (heard, report.stopped, report.trained) == ([signal.SIGINT], None, 1)


def test_training_in_another_thread_does_not_handle_signals(data):
    reports = []
    thread = threading.Thread(target=lambda: reports.append(train(lambda batch: None, Loader(data, 4))))
    thread.start()
    thread.join(DEADLINE_S)
    assert reports[0].trained == 1


def test_a_deadline_reserves_time_for_the_final_checkpoint(tmp_path, data):
    with pytest.raises(InvalidOption, match=r"deadline= leaves 4\.0 s; expected more than 5\.0 s, which are"):
        train(lambda batch: None, Loader(data, 4), epochs=9, to=tmp_path, deadline="4s")
    report = train(lambda batch: None, Loader(data, 4), epochs=1, to=tmp_path, deadline="12h")
    assert (report.stopped, report.steps) == (None, 6)


def test_a_deadline_stops_the_training_in_the_middle_of_an_epoch(tmp_path, data, monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    # Keep the clock of checkpoints: one that is saved in the background during a step must not seem to take 100 s.
    monkeypatch.setattr("colabkit.training.schedule.time", clock)
    monkeypatch.setattr("colabkit.training.trainer.time", clock)

    def step(batch: object) -> None:
        now[0] += 100

    report = train(step, Loader(data, 4), epochs=9, to=tmp_path, deadline=timedelta(seconds=850), timeout="1h")
    assert report.stopped == "deadline"
    assert report.steps == 9
    assert report.checkpoint == tmp_path / "checkpoint-00000009.pt"


@pytest.mark.parametrize(("epochs", "stopped"), [(2, None), (9, "patience")])
def test_a_deadline_that_is_reached_in_the_last_validation_does_not_make_the_run_incomplete(
    data, monkeypatch, epochs, stopped
):
    now, found = [1000.0], iter([0.0, 1000.0])
    monkeypatch.setattr("colabkit.training.schedule.time.monotonic", lambda: now[0])

    def validate() -> dict[str, float]:
        now[0] += next(found)
        return {"loss": 0.5}

    options = {"epochs": epochs, "validate": validate, "patience": 1, "deadline": "900s"}
    report = train(lambda batch: None, Loader(data, 4), **options)
    assert (report.trained, report.stopped) == (2, stopped)


def test_a_deadline_too_soon_for_the_first_save_leaves_no_checkpoint_and_publishes_no_event(
    tmp_path, data, monkeypatch, file_hook, heard
):
    now = [1000.0]
    monkeypatch.setattr("colabkit.training.schedule.time.monotonic", lambda: now[0])

    def wait(operation: str, path: Path) -> None:
        now[0] += 10

    file_hook(wait)
    with pytest.raises(InvalidOption, match=r"deadline= leaves"):
        train(lambda batch: None, Loader(data, 4), to=tmp_path, deadline="100s", timeout="1h")
    assert now[0] > 1000
    assert list(tmp_path.iterdir()) == []
    assert heard == []


def test_invalid_deadlines_are_refused(data):
    dates = datetime(2020, 1, 1, tzinfo=UTC), datetime(1, 1, 1)  # noqa: DTZ001 - without a time zone, as users write it
    for deadline in ("soon", "5 weeks", "", 11, 11.0, -3, 0, True, *dates, 10**5000):
        with pytest.raises(InvalidOption, match=r"Cannot train: deadline=.+; expected (a time|a duration .+ unit)"):
            train(lambda batch: None, Loader(data, 4), deadline=deadline)


def test_durations_are_numbers_or_text_with_units():
    seconds = {"5min": 300, "1h 30min": 5400, "90s": 90, 12: 12, timedelta(hours=2): 7200, "1.5h": 5400, "2m": 120}
    for text, expected in {**seconds, "90 seconds": 90, "1 day": 86400}.items():
        assert check_duration("train", "save_every", text) == expected


def test_a_deadline_may_be_a_datetime():
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    assert moment("train", in_an_hour) == pytest.approx(time.monotonic() + 3600, abs=5)


def test_stop_iteration_from_on_step_ends_the_training_normally_with_a_checkpoint(tmp_path, data, heard):
    def stop(done: meters.StepDone) -> None:
        if done.step == 9:
            raise StopIteration

    report = train(lambda batch: 1.0, Loader(data, 4), epochs=3, to=tmp_path, on_step=stop)
    assert (report.stopped, report.steps, report.trained, report.is_good) == ("on_step", 9, 1, True)
    assert report.checkpoint == tmp_path / "checkpoint-00000009.pt"
    assert "Stopped by on_step after step 9; checkpoint" in repr(report)
    assert heard[-1] == meters.RunEnded("on_step")
    again = train(lambda batch: 1.0, Loader(data, 4), epochs=3, to=tmp_path)
    assert (again.stopped, again.steps, again.resumed_from) == (None, 18, report.checkpoint)


def test_stop_iteration_at_the_last_step_of_an_epoch_completes_the_epoch(data):
    def stop(done: meters.StepDone) -> None:
        if done.step_in_epoch == 6:
            raise StopIteration

    report = train(lambda batch: 1.0, Loader(data, 4), epochs=3, validate=lambda: {"loss": 2.0}, on_step=stop)
    assert (report.stopped, report.steps, len(report.epochs), len(report.validations)) == ("on_step", 6, 1, 1)


def train_with_losses(data, losses: list[float], **options: object) -> TrainReport:
    left = iter(losses)
    options = {"epochs": len(losses), "validate": lambda: {"loss": next(left)}, **options}
    return train(lambda batch: None, Loader(data, 4), **options)


@pytest.mark.parametrize(
    ("losses", "options", "epochs"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0], {"patience": 2}, 4),
        ([3.0, 2.0, 2.5, 1.9, 1.0], {"patience": 2}, 5),
        ([0.1, 0.2, 0.2, 0.9, 0.3], {"patience": 1, "mode": "max"}, 3),
        ([3.0, 2.9, 2.8, 2.7, 2.6], {"patience": 2, "min_delta": 0.15}, 5),
        ([3.0, 2.9, 2.8, 2.7, 2.6], {"patience": 2, "min_delta": 0.5}, 3),
        ([3.0, math.nan, math.inf, 1.0, 1.0], {"patience": 2}, 3),
    ],
)
def test_training_stops_after_validations_without_improvement(data, losses, options, epochs):
    report = train_with_losses(data, losses, **options)
    assert len(report.epochs) == epochs
    assert (report.stopped, report.is_good) == ("patience" if epochs < 5 else None, True)


def test_patience_counts_validations_within_an_epoch_and_across_a_resume(tmp_path, data):
    losses = iter([3.0, 3.5, 3.6, 3.7, 2.0, 2.0])

    def run(**options: object) -> TrainReport:
        options = {"validate": lambda: {"loss": next(losses)}, "validate_every": 4, "to": tmp_path, **options}
        return train(lambda batch: None, Loader(data, 4), **options)

    run(epochs=1, patience=3)
    report = run(epochs=9, patience=3)
    assert (report.stopped, report.steps, report.best_value) == ("patience", 16, 3.0)
    assert report.checkpoint == tmp_path / "checkpoint-00000016.pt"
    again = run(epochs=9, patience=3)
    assert (again.stopped, again.steps, again.trained) == ("patience", 16, 0)
    assert "nothing was left to do" in repr(again)
    assert run(epochs=3, patience=4).stopped is None


def test_validation_without_numbers_does_not_rate_a_state_by_the_training_loss(data):
    def validate() -> dict[str, float]:
        return {}

    assert train(lambda batch: 1.0, Loader(data, 4), validate=validate).best_value is None
    message = r"monitor='loss' is not among .*; expected at least one number\. Return a dict of numbers from validate"
    with pytest.raises(InvalidOption, match=message):
        train(lambda batch: 1.0, Loader(data, 4), validate=validate, patience=2)


def test_patience_does_not_compare_validations_with_the_training_loss_of_an_earlier_run(tmp_path, data):
    train(lambda batch: 0.05, Loader(data, 4), to=tmp_path)
    losses = iter([0.5, 0.4, 0.3])
    options = {"validate": lambda: {"loss": next(losses)}, "patience": 2}
    report = train(lambda batch: 0.05, Loader(data, 4), epochs=4, to=tmp_path, **options)
    assert (report.stopped, report.best_value) == (None, 0.3)
    assert report.changed_settings == ("the best checkpoint was selected by min loss, now by min val_loss",)


def test_patience_without_validation_counts_epochs_of_the_training_loss(data):
    report = train(lambda batch: 1.0, Loader(data, 4), epochs=9, patience=2)
    assert (report.stopped, len(report.epochs)) == ("patience", 3)
    with pytest.raises(InvalidOption, match=r"monitor='loss' is not among the returned numbers.*\. Return a loss"):
        train(lambda batch: None, Loader(data, 4), epochs=9, patience=2)
    with pytest.raises(InvalidOption, match=r"min_delta=0\.1 is given without patience="):
        train(lambda batch: None, Loader(data, 4), min_delta=0.1)

"""`train()` validates and saves checkpoints on schedule, and keeps the best checkpoint."""

from __future__ import annotations

import errno
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling import sampled
from trainings import train

import colabkit
from colabkit.errors import InvalidOption, LoaderFailed
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training.checkpoints import folder as checkpoint_folder
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.schedule import SaveSchedule
from colabkit.training.step_factory import supervised_step


def nothing(batch: object) -> None:
    """Do nothing with a batch."""


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("checkpoint-*.pt"))


def stop_here() -> None:
    signal.raise_signal(signal.SIGINT)


def train_with_losses(data: PackedDataset, folder: Path, losses: list[float], **options: object) -> TrainReport:
    left = iter(losses)
    options = {"validate": lambda: {"loss": next(left)}, "epochs": len(losses), **options}
    return train(nothing, Loader(data, 4), to=folder, **options)


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path, data):
    report = train_with_losses(data, tmp_path, [3.0, 1.0, 2.0, 2.5, 4.0])
    assert steps_in(tmp_path) == [12, 24, 30]
    assert (report.best, report.best_value) == (tmp_path / "checkpoint-00000012.pt", 1.0)
    assert report.checkpoint == tmp_path / "checkpoint-00000030.pt"
    assert "best" in report._repr_html_()
    report = train_with_losses(data, tmp_path, [0.5, 6.0], epochs=7, keep_last=1)
    assert (report.best_value, report.best) == (0.5, tmp_path / "checkpoint-00000036.pt")
    assert steps_in(tmp_path) == [36, 42]


def test_the_highest_value_may_be_best_and_nan_never_is(tmp_path, data):
    report = train_with_losses(data, tmp_path, [0.2, 0.9, float("nan"), 0.5], mode="max", monitor="loss")
    assert (report.best_value, report.best) == (0.9, tmp_path / "checkpoint-00000012.pt")
    report = train_with_losses(data, tmp_path / "nan", [float("nan")] * 2)
    assert (report.best_value, report.best) == (None, None)


@pytest.mark.parametrize("monitor", ["accuracy", "val_accuracy"])
def test_the_highest_accuracy_is_best_unless_mode_says_otherwise(tmp_path, data, monitor):
    validations = [0.2, 0.9, 0.5]
    for mode, best in ((None, 0.9), ("min", 0.2)):
        values = iter([{"accuracy": value} for value in validations])
        options = {} if mode is None else {"mode": mode}
        found = train(
            nothing,
            Loader(data, 4),
            epochs=3,
            to=tmp_path / str(mode),
            validate=lambda values=values: next(values),
            monitor=monitor,
            **options,
        )
        assert found.best_value == best


def test_the_weights_of_the_best_checkpoint_load_into_a_model(tmp_path, data):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(data[0][0].numel(), 10))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.1))
    report = train(step, Loader(data, 4), to=tmp_path)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model[1].reset_parameters()
    model.load_state_dict(torch.load(report.best)["content"]["state"]["model"])
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_without_validation_the_training_loss_selects_the_best(tmp_path, data):
    losses = iter([3.0, 1.0, 2.0])
    now = [0.0]

    def step(batch: object) -> float:
        return now[0]

    def next_loss(done: meters.StepDone) -> None:
        if done.step_in_epoch == 6:
            now[0] = next(losses, 9.0)

    now[0] = next(losses)
    report = train(step, Loader(data, 4), epochs=3, to=tmp_path, on_step=next_loss)
    assert (report.best_value, report.best) == (1.0, tmp_path / "checkpoint-00000012.pt")


def test_an_unknown_monitor_is_refused_after_a_checkpoint(tmp_path, data):
    with pytest.raises(InvalidOption, match=r"monitor='accuracy' is not among .*; expected 'loss'"):
        train_with_losses(data, tmp_path, [1.0, 2.0], monitor="accuracy")
    report = train_with_losses(data, tmp_path, [1.0, 2.0], epochs=2)
    assert (report.steps, len(report.epochs)) == (12, 2)


def test_validations_run_every_n_steps_and_the_best_one_is_saved(tmp_path, data):
    found = iter([5.0, 4.0, 6.0, 3.0])
    report = train(
        nothing,
        Loader(data, 4),
        epochs=2,
        to=tmp_path,
        keep_last=1,
        validate=lambda: {"loss": next(found)},
        validate_every=3,
    )
    assert [(one.step, one.values["loss"]) for one in report.validations] == [(3, 5.0), (6, 4.0), (9, 6.0), (12, 3.0)]
    assert [dict(record.validation) for record in report.epochs] == [{"loss": 4.0}, {"loss": 3.0}]
    assert (report.best_value, report.best) == (3.0, tmp_path / "checkpoint-00000012.pt")


def test_a_validation_loader_is_evaluated_by_supervised_step(data):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    report = train(step, Loader(data, 4, shuffle=True), validate=Loader(data, 5))
    record = report.epochs[0]
    assert record.validation["loss"] == pytest.approx(record.values["loss"], rel=1e-4)
    assert record.validation["accuracy"] == pytest.approx(record.values["accuracy"])
    with pytest.raises(InvalidOption, match="validate is a Loader, but step is custom"):
        train(nothing, Loader(data, 4), validate=Loader(data, 5))


def test_checkpoints_are_saved_every_n_steps(tmp_path, data):
    train(nothing, Loader(data, 4), epochs=2, to=tmp_path, save_every=4, keep_last=99)
    found = steps_in(tmp_path)
    assert found[0] == 0
    assert found[-1] == 12
    # A checkpoint that becomes due while another is being written is postponed.
    assert 2 <= len(found) <= 5


def test_checkpoints_are_saved_by_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("colabkit.training.schedule.time.monotonic", lambda: now[0])
    schedule = SaveSchedule("5min")
    now[0] += 299
    assert not schedule.is_late()
    now[0] += 1
    assert schedule.is_late()
    schedule.saved(7)
    assert not schedule.is_late()
    assert not schedule.is_due(10_000)
    assert not schedule.is_by_epoch


def test_a_schedule_of_steps_counts_from_the_last_checkpoint():
    schedule = SaveSchedule(4)
    assert [step for step in range(9) if schedule.is_due(step)] == [4, 5, 6, 7, 8]
    schedule.saved(5)
    assert [step for step in range(5, 13) if schedule.is_due(step)] == [8, 9, 10, 11, 12]


def test_a_full_disk_in_the_middle_does_not_stop_the_training(tmp_path, data, monkeypatch):
    calls = []
    written = checkpoint_folder.write

    def write(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(*arguments, **options)

    monkeypatch.setattr(checkpoint_folder, "write", write)
    report = train(nothing, Loader(data, 4), epochs=4, to=tmp_path)
    assert report.trained == 4
    assert len(report.failed_saves) == 2
    assert "Not saved at step" in repr(report)
    assert not report.is_good
    assert steps_in(tmp_path)[-1] == 24


def full_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Make all writes of checkpoints fail after the first `writes` ones, as on a full disk."""
    calls: list[None] = []
    written = checkpoint_folder.write

    def write(*arguments: object, **options: object) -> object:
        calls.append(None)
        if len(calls) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(*arguments, **options)

    monkeypatch.setattr(checkpoint_folder, "write", write)


@pytest.mark.parametrize("save_every", ["epoch", 100])
def test_without_room_for_the_last_checkpoint_the_report_warns_and_the_earlier_one_loads(
    tmp_path, data, monkeypatch, caplog, heard, save_every
):
    with monkeypatch.context() as patches:
        full_after(patches, 1)
        report = train(nothing, Loader(data, 4), epochs=1, to=tmp_path, save_every=save_every)
    assert (report.trained, report.steps, report.checkpoint) == (1, 6, tmp_path / "checkpoint-00000000.pt")
    assert [step for step, _ in report.failed_saves] == [6]
    assert not report.is_good
    assert heard[-1] == meters.RunEnded("NotEnoughSpace")
    warning = "the state after step 6 is not saved, and the newest checkpoint is"
    assert f"\nWarning: {warning}" in repr(report)
    assert warning in report._repr_html_()
    assert "the last checkpoint is not saved, and the newest one is" in caplog.text
    again = train(nothing, Loader(data, 4), epochs=1, to=tmp_path)
    assert (again.resumed_from, again.steps) == (report.checkpoint, 6)


def test_a_stop_without_room_for_a_checkpoint_does_not_claim_that_one_is_saved(tmp_path, data, monkeypatch):
    full_after(monkeypatch, 1)
    with pytest.raises(TrainingInterrupted, match=r"step 3: the state after step 3 is not saved, and the newest"):
        train(nothing, Loader(data, 4), to=tmp_path, on_step=lambda done: done.step == 3 and stop_here())


def test_a_failed_save_does_not_replace_the_outcome_of_a_validation(tmp_path, data, monkeypatch):
    def fail() -> dict[str, float]:
        raise ValueError("planned")

    def stop() -> dict[str, float]:
        stop_here()
        return {}

    full_after(monkeypatch, 1)
    with pytest.raises(TrainingInterrupted, match="the state after step 6 is not saved") as caught:
        train(nothing, Loader(data, 4), to=tmp_path, validate=stop)
    assert [step for step, _ in caught.value.report.failed_saves] == [6]
    with pytest.raises(ValueError, match="planned"):
        train(nothing, Loader(data, 4), to=tmp_path, validate=fail)


@pytest.mark.parametrize("at", ["step", "loader"])
def test_a_run_that_fails_at_its_first_batch_leaves_no_checkpoint(tmp_path, data, at):
    def fail(_: object) -> None:
        raise ValueError("planned")

    with pytest.raises((ValueError, LoaderFailed), match="planned"):
        train(fail, Loader(data, 4, transform=fail if at == "loader" else None), to=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_checkpoint_before_the_first_step_does_not_prevent_a_run_with_other_data(tmp_path, data):
    train(nothing, Loader(data, 4), epochs=0, to=tmp_path)
    report = train(nothing, Loader((torch.zeros(8, 3),), 4), to=tmp_path)
    assert report.steps == 2
    assert report.changed_settings == ("the data or the order of the Loader, before the first step",)
    with pytest.raises(InvalidOption, match="belongs to another dataset"):
        train(nothing, Loader(data, 4), to=tmp_path)


def test_the_state_of_a_custom_step_is_saved(tmp_path, data):
    class Counts:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, batch: object) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    train(Counts(), Loader(data, 4), epochs=1, to=tmp_path)
    again = Counts()
    train(again, Loader(data, 4), epochs=2, to=tmp_path)
    assert again.count == 12
    step, part = Counts(), Counts()
    part.count = 40
    train(step, Loader(data, 4), state={"step": part}, to=tmp_path / "same name")
    step, part = Counts(), Counts()
    train(step, Loader(data, 4), state={"step": part}, to=tmp_path / "same name")
    assert (step.count, part.count) == (6, 40)


def test_supervised_step_needs_no_state(tmp_path, data):
    def run(epochs: int) -> tuple[torch.nn.Module, TrainReport]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = supervised_step(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        report = train(step, Loader(data, 4, shuffle=True), epochs=epochs, to=tmp_path / str(epochs == 9))
        return model, report

    run(1)
    resumed, report = run(3)
    assert report.trained == 2
    (tmp_path / "False").rename(tmp_path / "set aside")
    whole, _ = run(3)
    assert torch.equal(resumed[1].weight, whole[1].weight)


def test_epoch_times_exclude_validation(data):
    def validate() -> dict[str, float]:
        began = time.perf_counter()
        while time.perf_counter() - began < 0.05:
            pass
        return {}

    report = train(nothing, Loader(data, 4), epochs=2, validate=validate)
    assert report.seconds >= 0.1
    assert sum(record.seconds for record in report.epochs) < report.seconds - 0.1


def test_saving_a_custom_step_without_state_is_refused(tmp_path, data):
    with pytest.raises(InvalidOption, match=r"state= is missing; expected the objects that the step changes\."):
        colabkit.train(nothing, Loader(data, 4), to=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_partly_iterated_loader_starts_with_a_new_epoch(tmp_path, data):
    loader = Loader(data, 4)
    next(iter(loader))

    def stop(done: meters.StepDone) -> None:
        if done.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted):
        train(nothing, loader, to=tmp_path, save_every=2, on_step=stop)
    assert steps_in(tmp_path)[-1] == 5
    report = train(nothing, Loader(data, 4), to=tmp_path)
    assert [(record.steps, record.samples) for record in report.epochs] == [(6, 22)]


def test_the_training_loader_cannot_be_used_for_validation(data):
    loader = Loader(data, 4)
    with pytest.raises(InvalidOption, match="validate is the training Loader"):
        train(nothing, loader, validate=loader)
    with pytest.raises(InvalidOption, match="took batches from the training Loader"):
        train(nothing, loader, validate=lambda: {"count": sum(1 for _ in loader)})


class AccumulatingStep:
    """A step that accumulates sums of three batches; its saved state has no pending sums."""

    def __init__(self) -> None:
        self.sum, self.applied, self.seen = 0.0, 0.0, 0

    @property
    def is_whole(self) -> bool:
        return self.seen % 3 == 0

    def __call__(self, batch: Any) -> None:
        self.sum += float(batch[1].sum())
        self.seen += 1
        if self.is_whole:
            self.flush()

    def flush(self) -> None:
        self.applied, self.sum, self.seen = 2 * self.applied + self.sum, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        assert self.is_whole
        return {"applied": self.applied}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.applied = state["applied"]


@pytest.mark.parametrize("every", sampled([1, 2, 4, 5, 6], 3))
@pytest.mark.parametrize("stop_in", sampled(range(1, 7), 2))
def test_validations_see_no_pending_gradients_and_interrupted_ones_are_repeated(tmp_path, data, every, stop_in):
    def run(folder: Path, stop_in: int = 0) -> tuple[AccumulatingStep, TrainReport]:
        torch.manual_seed(1)
        step, calls = AccumulatingStep(), []

        def validate() -> dict[str, float]:
            assert step.is_whole
            calls.append(1)
            found = {"loss": -step.applied, "drawn": float(torch.rand(()))}
            if len(calls) == stop_in:
                signal.raise_signal(signal.SIGINT)
            return found

        report = train(step, Loader(data, 4), epochs=2, to=folder, validate=validate, validate_every=every)
        return step, report

    whole, expected = run(tmp_path / "whole")
    try:
        resumed, report = run(tmp_path / "run", stop_in)
    except TrainingInterrupted:
        resumed, report = run(tmp_path / "run")
    assert resumed.applied == whole.applied
    assert report.validations == expected.validations
    assert report.best_value == expected.best_value
    # A checkpoint that replaced another one has "-2" after its step.
    assert report.best.stem[:19] == expected.best.stem[:19]


def test_a_signal_in_a_validation_that_trains_stops_the_run_that_it_validates(tmp_path, data):
    def validate() -> dict[str, float]:
        train(lambda batch: stop_here(), Loader(data, 11), epochs=3)
        return {"loss": 1.0}

    with pytest.raises(TrainingInterrupted) as stopped:
        train(nothing, Loader(data, 4), to=tmp_path, validate=validate)
    assert (stopped.value.report.validations, stopped.value.report.epochs) == ((), ())


def test_an_error_in_a_validation_loses_no_training(tmp_path, data):
    def fails() -> dict[str, float]:
        raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        train(nothing, Loader(data, 4), to=tmp_path, validate=fails)
    report = train(nothing, Loader(data, 4), to=tmp_path, validate=lambda: {"loss": 1.0})
    assert report.resumed_from == tmp_path / "checkpoint-00000006.pt"
    assert [dict(record.validation) for record in report.epochs] == [{"loss": 1.0}]


def test_another_monitor_resets_the_best_value(tmp_path, data):
    train_with_losses(data, tmp_path, [2.0, 3.0])
    found = iter([0.5, 0.4])
    report = train(
        nothing,
        Loader(data, 4),
        epochs=4,
        to=tmp_path,
        validate=lambda: {"accuracy": next(found)},
        monitor="accuracy",
        mode="max",
    )
    assert (report.best_value, report.best.name) == (0.5, "checkpoint-00000018.pt")
    assert report.changed_settings == ("the best checkpoint was selected by min val_loss, now by max val_accuracy",)


def test_settings_that_a_checkpoint_overrides_are_reported(tmp_path, data):
    def run(rate: float, **options: Any) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=rate))
        return train(step, Loader(data, 4, **options), epochs=2, to=tmp_path)

    run(0.1, shuffle=True)
    assert run(0.1, shuffle=True).changed_settings == ()
    changed = "\n".join(run(0.5, shuffle=True, seed=3).changed_settings)
    assert "learning rates 0.5 of 'optimizer' are ignored because the checkpoint has 0.1" in changed
    assert "seed=3 of the Loader is ignored because the checkpoint has 0" in changed


def test_a_saved_state_of_the_step_that_the_resumed_run_does_not_restore_is_reported(tmp_path, data):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(step, Loader(data, 4), to=tmp_path)

    def inner(batch: object) -> object:
        return step(batch)

    report = train(inner, Loader(data, 4), state=step.parts, to=tmp_path)
    assert report.changed_settings == (
        "the saved state of the step is ignored because the step of this run has no state",
    )


def test_a_supervised_step_in_a_function_is_resumed_with_its_scheduler(tmp_path, data):
    def run(epochs: int) -> tuple[TrainReport, list[float], int]:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step = supervised_step(model, optimizer, scheduler=scheduler)
        state = {"model": model, "optimizer": optimizer, "step": step}

        def inner(batch: object) -> object:
            return step(batch)

        report = train(inner, Loader(data, 4), epochs=epochs, state=state, to=tmp_path)
        return report, scheduler.get_last_lr(), step.updates

    run(1)
    report, rates, updates = run(2)
    assert (report.trained, rates, updates) == (1, [pytest.approx(0.1**13)], 12)


def test_an_object_of_another_class_is_refused(tmp_path, data):
    def run(kind: Any) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        return train(supervised_step(model, kind(model.parameters(), lr=0.1)), Loader(data, 4), to=tmp_path)

    run(torch.optim.AdamW)
    with pytest.raises(InvalidOption, match="it was saved as AdamW and is now SGD"):
        run(torch.optim.SGD)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_an_optimizer_without_a_learning_rate_is_resumed(tmp_path, data, defaults):
    class OptimizerWithoutRate(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            pass

    def run(epochs: int) -> TrainReport:
        optimizer = OptimizerWithoutRate(torch.nn.Linear(1, 1).parameters(), defaults)
        return train(nothing, Loader(data, 4), epochs=epochs, state={"optimizer": optimizer}, to=tmp_path)

    run(1)
    assert (run(2).trained, run(2).changed_settings) == (1, ())


def test_a_numpy_learning_rate_is_saved(tmp_path, data):
    def run(epochs: int) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 100)))
        step = supervised_step(model, optimizer, scheduler=scheduler)
        return train(step, Loader(data, 4), epochs=epochs, to=tmp_path)

    run(1)
    assert (run(2).trained, run(2).changed_settings) == (1, ())


def test_the_best_value_is_kept_if_training_stops_after_the_last_validation_of_an_epoch(tmp_path, data, monkeypatch):
    now, found = [1000.0], iter([0.5, 0.9])

    def validate() -> dict[str, float]:
        now[0] += 1000
        return {"loss": next(found)}

    def run(**options: Any) -> TrainReport:
        options = {"validate": validate, "validate_every": 6, "keep_last": 1, **options}
        return train(nothing, Loader(data, 4), epochs=2, to=tmp_path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("colabkit.training.schedule.time.monotonic", lambda: now[0])
        stopped = run(deadline="900s", timeout="1h")
    assert (stopped.stopped, stopped.steps, stopped.trained) == ("deadline", 6, 0)
    report = run()
    assert report.best_value == 0.5
    assert report.best is not None
    assert report.best.name.startswith("checkpoint-00000006")


def test_a_value_that_the_step_modifies_in_place_is_recorded_unchanged(data):
    total = torch.zeros(())

    def step(batch: object) -> torch.Tensor:
        return total.add_(1)

    report = train(step, Loader(data, 4))
    assert report.curve["loss"] == [(step, float(step)) for step in range(1, 7)]

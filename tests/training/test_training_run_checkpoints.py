"""When `train()` saves and judges: by steps, by the clock, by epochs; the best checkpoint stays."""

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
from colabkit.errors import InvalidOption
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training.checkpoints import folder as checkpoint_folder
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.schedule import SaveSchedule
from colabkit.training.steps import supervised_step


def nothing(batch: object) -> None:
    """Be a step that does nothing."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a folder."""
    return sorted(int(path.stem.partition("-")[2]) for path in folder.glob("checkpoint-*.pt"))


def judged(data: PackedDataset, folder: Path, losses: list[float], **options: object) -> TrainReport:
    """Train one epoch for each loss that a validation is to find."""
    left = iter(losses)
    options = {"validate": lambda: {"loss": next(left)}, "epochs": len(losses), **options}
    return train(nothing, Loader(data, 4), save_to=folder, **options)


def test_the_last_ones_and_the_best_stay(tmp_path, data):
    report = judged(data, tmp_path, [3.0, 1.0, 2.0, 2.5, 4.0])
    assert steps_in(tmp_path) == [12, 24, 30]
    assert (report.best, report.best_value) == (tmp_path / "checkpoint-00000012.pt", 1.0)
    assert report.checkpoint == tmp_path / "checkpoint-00000030.pt"
    assert "best" in report._repr_html_()
    report = judged(data, tmp_path, [0.5, 6.0], epochs=7, keep_last=1)
    assert (report.best_value, report.best) == (0.5, tmp_path / "checkpoint-00000036.pt")
    assert steps_in(tmp_path) == [36, 42]


def test_the_highest_may_be_best_and_what_is_no_number_never_is(tmp_path, data):
    report = judged(data, tmp_path, [0.2, 0.9, float("nan"), 0.5], mode="max", monitor="loss")
    assert (report.best_value, report.best) == (0.9, tmp_path / "checkpoint-00000012.pt")
    report = judged(data, tmp_path / "nan", [float("nan")] * 2)
    assert (report.best_value, report.best) == (None, None)


def test_without_a_validation_the_loss_of_the_training_judges(tmp_path, data):
    losses = iter([3.0, 1.0, 2.0])
    now = [0.0]

    def step(batch: object) -> float:
        return now[0]

    def next_loss(done: meters.StepDone) -> None:
        if done.step_in_epoch == 6:
            now[0] = next(losses, 9.0)

    now[0] = next(losses)
    report = train(step, Loader(data, 4), epochs=3, save_to=tmp_path, on_step=next_loss)
    assert (report.best_value, report.best) == (1.0, tmp_path / "checkpoint-00000012.pt")


def test_a_monitor_that_is_not_there_is_said_and_nothing_is_lost(tmp_path, data):
    with pytest.raises(InvalidOption, match=r"monitor='accuracy' is not among .*; expected one of 'loss'"):
        judged(data, tmp_path, [1.0, 2.0], monitor="accuracy")
    report = judged(data, tmp_path, [1.0, 2.0], epochs=2)
    assert (report.steps, len(report.epochs)) == (12, 2)


def test_validations_come_every_n_steps_and_the_best_of_them_is_saved(tmp_path, data):
    found = iter([5.0, 4.0, 6.0, 3.0])
    report = train(
        nothing,
        Loader(data, 4),
        epochs=2,
        save_to=tmp_path,
        keep_last=1,
        validate=lambda: {"loss": next(found)},
        validate_every=3,
    )
    assert [(one.step, one.values["loss"]) for one in report.validations] == [(3, 5.0), (6, 4.0), (9, 6.0), (12, 3.0)]
    assert [dict(record.validation) for record in report.epochs] == [{"loss": 4.0}, {"loss": 3.0}]
    assert (report.best_value, report.best) == (3.0, tmp_path / "checkpoint-00000012.pt")


def test_a_loader_is_evaluated_by_the_usual_step(data):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    report = train(step, Loader(data, 4, shuffle=True), validate=Loader(data, 5))
    record = report.epochs[0]
    assert record.validation["loss"] == pytest.approx(record.values["loss"], rel=1e-4)
    assert record.validation["accuracy"] == pytest.approx(record.values["accuracy"])
    with pytest.raises(InvalidOption, match=r"validate is a Loader, .* and step is custom"):
        train(nothing, Loader(data, 4), validate=Loader(data, 5))


def test_checkpoints_come_every_n_steps(tmp_path, data):
    train(nothing, Loader(data, 4), epochs=2, save_to=tmp_path, save_every=4, keep_last=99)
    found = steps_in(tmp_path)
    assert found[0] == 0
    assert found[-1] == 12
    assert 2 <= len(found) <= 5  # one that is due while another is written comes later


def test_checkpoints_come_by_the_clock(monkeypatch):
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


def test_a_full_disk_in_the_middle_costs_no_training(tmp_path, data, monkeypatch):
    calls = []
    written = checkpoint_folder.write

    def write(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(*arguments, **options)

    monkeypatch.setattr(checkpoint_folder, "write", write)
    report = train(nothing, Loader(data, 4), epochs=4, save_to=tmp_path)
    assert report.trained == 4
    assert len(report.failed_saves) == 2
    assert "Not saved at step" in repr(report)
    assert not report.is_good
    assert steps_in(tmp_path)[-1] == 24


def test_a_step_with_a_state_of_its_own_is_saved_too(tmp_path, data):
    class Counts:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, batch: object) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    train(Counts(), Loader(data, 4), epochs=1, save_to=tmp_path)
    again = Counts()
    train(again, Loader(data, 4), epochs=2, save_to=tmp_path)
    assert again.count == 12
    step, part = Counts(), Counts()
    part.count = 40
    train(step, Loader(data, 4), state={"step": part}, save_to=tmp_path / "named alike")
    step, part = Counts(), Counts()
    train(step, Loader(data, 4), state={"step": part}, save_to=tmp_path / "named alike")
    assert (step.count, part.count) == (6, 40)


def test_the_usual_step_needs_no_state(tmp_path, data):
    def run(epochs: int) -> tuple[torch.nn.Module, TrainReport]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = supervised_step(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        report = train(step, Loader(data, 4, shuffle=True), epochs=epochs, save_to=tmp_path / str(epochs == 9))
        return model, report

    run(1)
    resumed, report = run(3)
    assert report.trained == 2
    (tmp_path / "False").rename(tmp_path / "set aside")
    whole, _ = run(3)
    assert torch.equal(resumed[1].weight, whole[1].weight)


def test_time_is_told_without_validations(data):
    def validate() -> dict[str, float]:
        began = time.perf_counter()
        while time.perf_counter() - began < 0.05:
            pass
        return {}

    report = train(nothing, Loader(data, 4), epochs=2, validate=validate)
    assert report.seconds >= 0.1
    assert sum(record.seconds for record in report.epochs) < report.seconds - 0.1


def test_a_step_whose_state_is_unknown_is_not_saved_without_a_word(tmp_path, data):
    with pytest.raises(InvalidOption, match=r"state= is missing; expected the objects that the step changes\."):
        colabkit.train(nothing, Loader(data, 4), save_to=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_loader_that_was_looked_into_before_begins_its_epochs_anew(tmp_path, data):
    loader = Loader(data, 4)
    next(iter(loader))

    def stop(done: meters.StepDone) -> None:
        if done.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted):
        train(nothing, loader, save_to=tmp_path, save_every=2, on_step=stop)
    assert steps_in(tmp_path)[-1] == 5
    report = train(nothing, Loader(data, 4), save_to=tmp_path)
    assert [(record.steps, record.samples) for record in report.epochs] == [(6, 22)]


def test_the_trainings_loader_is_no_loader_to_validate_on(data):
    loader = Loader(data, 4)
    with pytest.raises(InvalidOption, match="validate is the training Loader"):
        train(nothing, loader, validate=loader)
    with pytest.raises(InvalidOption, match="took batches from the training Loader"):
        train(nothing, loader, validate=lambda: {"count": sum(1 for _ in loader)})


class Accumulating:
    """A step that sums numbers, and applies every third sum; what is saved must be whole."""

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
def test_validations_see_whole_states_and_an_interrupted_one_is_made_good(tmp_path, data, every, stop_in):
    def run(folder: Path, stop_in: int = 0) -> tuple[Accumulating, TrainReport]:
        torch.manual_seed(1)
        step, calls = Accumulating(), []

        def validate() -> dict[str, float]:
            assert step.is_whole
            calls.append(1)
            found = {"loss": -step.applied, "drawn": float(torch.rand(()))}
            if len(calls) == stop_in:
                signal.raise_signal(signal.SIGINT)
            return found

        report = train(step, Loader(data, 4), epochs=2, save_to=folder, validate=validate, validate_every=every)
        return step, report

    whole, expected = run(tmp_path / "whole")
    try:
        resumed, report = run(tmp_path / "run", stop_in)
    except TrainingInterrupted:
        resumed, report = run(tmp_path / "run")
    assert resumed.applied == whole.applied
    assert report.validations == expected.validations
    assert report.best_value == expected.best_value
    assert report.best.stem[:19] == expected.best.stem[:19]  # one that was saved anew has "-2" behind its step


def test_an_error_in_a_validation_costs_no_training(tmp_path, data):
    def fails() -> dict[str, float]:
        raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        train(nothing, Loader(data, 4), save_to=tmp_path, validate=fails)
    report = train(nothing, Loader(data, 4), save_to=tmp_path, validate=lambda: {"loss": 1.0})
    assert report.resumed_from == tmp_path / "checkpoint-00000006.pt"
    assert [dict(record.validation) for record in report.epochs] == [{"loss": 1.0}]


def test_another_judge_forgets_the_best_of_the_one_before(tmp_path, data):
    judged(data, tmp_path, [2.0, 3.0])
    found = iter([0.5, 0.4])
    report = train(
        nothing,
        Loader(data, 4),
        epochs=4,
        save_to=tmp_path,
        validate=lambda: {"accuracy": next(found)},
        monitor="accuracy",
        mode="max",
    )
    assert (report.best_value, report.best.name) == (0.5, "checkpoint-00000018.pt")
    assert report.not_kept == ("the best checkpoint was selected by min loss, now by max accuracy",)


def test_what_a_checkpoint_overrides_is_said(tmp_path, data):
    def run(rate: float, **options: Any) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=rate))
        return train(step, Loader(data, 4, **options), epochs=2, save_to=tmp_path)

    run(0.1, shuffle=True)
    assert run(0.1, shuffle=True).not_kept == ()
    said = "\n".join(run(0.5, shuffle=True, seed=3).not_kept)
    assert "learning rates 0.5 of 'optimizer' are ignored, the checkpoint has 0.1" in said
    assert "seed=3 of the Loader is ignored, the checkpoint has 0" in said


def test_another_kind_of_object_is_refused(tmp_path, data):
    def run(kind: Any) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        return train(supervised_step(model, kind(model.parameters(), lr=0.1)), Loader(data, 4), save_to=tmp_path)

    run(torch.optim.AdamW)
    with pytest.raises(InvalidOption, match="it was saved as AdamW and is now SGD"):
        run(torch.optim.SGD)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_an_optimizer_without_a_learning_rate_is_resumed(tmp_path, data, defaults):
    class FindsItself(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            pass

    def run(epochs: int) -> TrainReport:
        optimizer = FindsItself(torch.nn.Linear(1, 1).parameters(), defaults)
        return train(nothing, Loader(data, 4), epochs=epochs, state={"optimizer": optimizer}, save_to=tmp_path)

    run(1)
    assert (run(2).trained, run(2).not_kept) == (1, ())


def test_a_rate_of_numpy_is_saved(tmp_path, data):
    def run(epochs: int) -> TrainReport:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 100)))
        step = supervised_step(model, optimizer, scheduler=scheduler)
        return train(step, Loader(data, 4), epochs=epochs, save_to=tmp_path)

    run(1)
    assert (run(2).trained, run(2).not_kept) == (1, ())


def test_the_best_stays_the_best_if_a_stop_follows_its_validation_at_the_end_of_an_epoch(tmp_path, data, monkeypatch):
    now, found = [1000.0], iter([0.5, 0.9])

    def validate() -> dict[str, float]:
        now[0] += 1000
        return {"loss": next(found)}

    def run(**options: Any) -> TrainReport:
        options = {"validate": validate, "validate_every": 6, "keep_last": 1, **options}
        return train(nothing, Loader(data, 4), epochs=2, save_to=tmp_path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("colabkit.training.schedule.time.monotonic", lambda: now[0])
        stopped = run(deadline=900.0, timeout="1h")
    assert (stopped.stopped, stopped.steps, stopped.trained) == ("deadline", 6, 0)
    report = run()
    assert report.best_value == 0.5
    assert report.best is not None
    assert report.best.name.startswith("checkpoint-00000006")


def test_a_value_that_a_step_adds_to_is_kept_as_it_was(data):
    total = torch.zeros(())

    def step(batch: object) -> torch.Tensor:
        return total.add_(1)

    report = train(step, Loader(data, 4))
    assert report.curve["loss"] == [(step, float(step)) for step in range(1, 7)]

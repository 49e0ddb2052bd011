"""`train()` stopped at any step and resumed: the same samples, history and weights bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import nn
from torch.optim import lr_scheduler
from trainings import EPOCHS, NotedTraining, history, make_packs, nothing, stop_after, train

from colabkit.errors import InvalidOption
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.step_factory import supervised_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PackedDataset]:
    return make_packs(tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, packs):
    folder = tmp_path_factory.mktemp("whole")
    whole = NotedTraining(packs["images"], folder, folder / "log")
    return whole, whole.train(save_every="epoch")


@pytest.mark.parametrize(
    ("at_step", "options"),
    sampled(
        [
            (49, {"num_workers": 2}),
            (1, {}),
            (2, {"num_workers": 0}),
            (3, {"prefetch_batches": 1}),
            (50, {}),
            (51, {"num_workers": 0}),
            (52, {"num_workers": 2}),
            (100, {"prefetch_batches": 7}),
            (153, {}),
            (199, {"num_workers": 2}),
        ],
        1,
    ),
)
def test_stopped_after_any_step_and_resumed_with_other_threads_equals_uninterrupted(
    tmp_path, packs, uninterrupted, at_step, options
):
    whole, expected = uninterrupted
    stopped = NotedTraining(packs["images"], tmp_path / "run", tmp_path / "run.log")

    def stop(done: meters.StepDone) -> None:
        stopped.note(done)
        if done.step == at_step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted) as caught:
        stopped.train(on_step=stop, save_every="epoch")
    # The gradients of two steps are applied together, so training may stop one step later.
    assert caught.value.report.steps in (at_step, at_step + 1)
    resumed = NotedTraining(packs["images"], tmp_path / "run", tmp_path / "run.log", **options)
    report = resumed.train(save_every="epoch")
    assert history(report) == history(expected)
    assert resumed.came_to()[1] == whole.came_to()[1]
    pairs = zip(resumed.came_to()[0], whole.came_to()[0], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert report.changed_settings == ()


def test_a_run_resumes_with_another_batch_size_and_reports_the_change(tmp_path, packs):
    data = packs["images"]
    first = Loader(data, 20, shuffle=True)
    with pytest.raises(TrainingInterrupted):
        train(nothing, first, to=tmp_path, on_step=stop_after(9))
    seen: list[int] = []
    report = train(lambda batch: seen.append(len(batch[1])), Loader(data, 30, shuffle=True), to=tmp_path)
    assert sum(seen) == len(data) - 180
    assert report.changed_settings == ("batches had 20 samples, now 30",)
    assert "Changed: batches had 20 samples, now 30" in repr(report)


def test_a_folder_with_checkpoints_of_other_data_is_named_with_the_ways_out(tmp_path):
    train(nothing, Loader((torch.zeros(8, 3),), 4), to=tmp_path)
    found = r"Cannot resume from '.*\.pt': the state belongs to another dataset"
    with pytest.raises(InvalidOption, match=rf"{found}.*, or save to another folder with to="):
        train(nothing, Loader((torch.ones(9, 3),), 4), to=tmp_path)


def test_shuffled_validations_after_a_resume_equal_uninterrupted_ones(tmp_path, packs):
    data = packs["digits"]

    def trained(folder: Path, **options: Any) -> TrainReport:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
        # With `shuffle` and `drop_last`, each pass omits different samples.
        validate = Loader(data, 500, shuffle=True, drop_last=True)
        return train(step, Loader(data, 300), validate=validate, to=folder, epochs=EPOCHS, **options)

    whole = trained(tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        trained(tmp_path / "stopped", on_step=stop_after(whole.steps // 2 + 1))
    assert trained(tmp_path / "stopped").validations == whole.validations


def test_a_validation_is_a_full_pass_at_any_position_of_its_loader(packs):
    data, seen = packs["digits"], list[list[int]]()
    for samples in (0, 500):
        validate = Loader(data, 500)
        validate.load_state_dict({**validate.state_dict(), "samples": samples})
        model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
        train(step, Loader(data, 300), validate=validate, epochs=2)
        seen.append([validate.meters.samples, validate.next_epoch])
    assert seen == [[2 * len(data), 2]] * 2


def schedule(name: str, optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.LRScheduler:
    if name == "SequentialLR":
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])
    if name == "LambdaLR":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    if name == "OneCycleLR":
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    return lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train_longer(folder: Path, name: str, epochs: int, *, is_custom: bool) -> TrainReport:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader((torch.ones(12, 4), torch.arange(12) % 2), 4)
    scheduler = schedule(name, optimizer, epochs * len(loader))
    if not is_custom:
        return train(supervised_step(model, optimizer, scheduler=scheduler), loader, epochs=epochs, to=folder)
    state = {"model": model, "scheduler": scheduler}

    def step(batch: object) -> None:
        optimizer.step()
        scheduler.step()

    return train(step, loader, epochs=epochs, to=folder, state=state)


@pytest.mark.parametrize("is_custom", [False, True])
@pytest.mark.parametrize(
    ("name", "changed"),
    [("CosineAnnealingLR", ("T_max=12", "6")), ("SequentialLR", ("T_max=10", "4")), ("LambdaLR", ())],
)
def test_settings_of_a_scheduler_that_a_checkpoint_replaces_are_reported(tmp_path, name, changed, is_custom):
    assert train_longer(tmp_path, name, 2, is_custom=is_custom).changed_settings == ()
    assert train_longer(tmp_path, name, 2, is_custom=is_custom).changed_settings == ()
    report = train_longer(tmp_path, name, 4, is_custom=is_custom)
    expected = [f"{changed[0]} of the scheduler is ignored because the checkpoint has {changed[1]}"] if changed else []
    assert [*report.changed_settings] == expected


def test_a_scheduler_at_its_end_raises_one_error_with_the_ways_to_train_longer(tmp_path):
    train_longer(tmp_path, "OneCycleLR", 2, is_custom=False)
    with pytest.raises(
        InvalidOption, match=r"Cannot update the learning rate: OneCycleLR fails with .* another folder"
    ):
        train_longer(tmp_path, "OneCycleLR", 4, is_custom=False)

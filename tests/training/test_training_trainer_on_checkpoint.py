"""The function `on_checkpoint` of `train()` is called once for each complete checkpoint, between two steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainings import nothing, train

from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training.checkpoints import folder as checkpoint_folder
from colabkit.training.report import TrainReport
from colabkit.types import SavedCheckpoint


@pytest.fixture
def run(tmp_path: Path, data: PackedDataset) -> Callable[..., TrainReport]:
    def run(on_checkpoint: Callable[[SavedCheckpoint], object], to: str = "run", **options: Any) -> TrainReport:
        return train(nothing, Loader(data, 4), to=tmp_path / to, on_checkpoint=on_checkpoint, **options)

    return run


def test_it_gets_each_trained_checkpoint_once_and_copies_of_the_files_resume(tmp_path, run):
    steps = []

    def copy(saved: SavedCheckpoint) -> None:
        steps.append(saved.step)
        folder = tmp_path / f"copy-{saved.step}"
        folder.mkdir()
        for file in saved.files:
            shutil.copy(file, folder)

    # With `keep_last=1`, each save removes the checkpoint before it.
    run(copy, epochs=3, keep_last=1)
    assert steps == [6, 12, 18]
    for step in (6, 12, 18):
        report = run(lambda saved: steps.append(saved.step), f"copy-{step}", epochs=4)
        assert (report.resumed_from.name, report.skipped_checkpoints) == (f"checkpoint-{step:08d}.pt", ())
    assert steps[3:] == [6, 12, 18, 24, 12, 18, 24, 18, 24]


def test_it_is_called_during_an_epoch_as_soon_as_a_checkpoint_is_complete(run):
    at: list[tuple[int, int]] = []
    now = []

    def note(saved: SavedCheckpoint) -> None:
        at.append((saved.step, now[-1]))

    run(note, save_every=2, on_step=lambda done: now.append(done.step), epochs=8)
    assert [step for step, _ in at] == sorted({step for step, _ in at})
    assert at[-1] == (48, 48)
    assert all(step < later for step, later in at[:-1])
    assert any(step % 6 for step, _ in at)


def test_it_is_called_for_the_checkpoint_of_a_complete_run_that_starts_again(run):
    steps: list[int] = []
    for _ in range(2):
        run(lambda saved: steps.append(saved.step))
    assert steps == [6, 6]


def test_it_is_not_called_for_a_checkpoint_that_cannot_be_written(run, monkeypatch):
    steps: list[int] = []
    write = checkpoint_folder.write

    def fail(content: Any, path: Path, act: str, job: Any) -> tuple[int, str]:
        if job.step == 12:
            raise OSError(28, "No space left on device")
        return write(content, path, act, job)

    monkeypatch.setattr(checkpoint_folder, "write", fail)
    report = run(lambda saved: steps.append(saved.step), epochs=3)
    assert steps == [6, 18]
    assert [step for step, _ in report.failed_saves] == [12]


def test_its_errors_end_training_and_the_checkpoint_stays(run):
    def fail(saved: SavedCheckpoint) -> None:
        raise ConnectionError("planned")

    with pytest.raises(ConnectionError, match="planned"):
        run(fail, epochs=3)
    steps: list[int] = []
    report = run(lambda saved: steps.append(saved.step), epochs=3)
    assert (report.resumed_from.name, steps[0], report.steps) == ("checkpoint-00000006.pt", 6, 18)


def test_stop_iteration_ends_the_training_normally_with_a_checkpoint(run, heard):
    def stop(saved: SavedCheckpoint) -> None:
        raise StopIteration

    report = run(stop, epochs=50)
    assert (report.stopped, report.is_good, report.checkpoint.name) == (
        "on_checkpoint",
        True,
        f"checkpoint-{report.steps:08d}.pt",
    )
    assert 6 < report.steps < 300

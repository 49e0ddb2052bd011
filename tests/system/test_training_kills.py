"""Training in processes that are killed or terminated: a resumed run equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from sampling import sampled
from trainings import (
    EPOCHS,
    PROCESSES,
    NotedTraining,
    SmallTraining,
    history,
    make_packs,
    nothing,
    same,
    statuses_of,
    train,
)

import colabkit
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training import read_status, status_writer

KILLS = 20
DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("one_thread")


def train_until_killed(data: PackedDataset, folder: Path, at_step: int) -> None:
    def kill(done: meters.StepDone) -> None:
        if done.step == at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    SmallTraining(data).train(4, to=folder, on_step=kill)


@pytest.mark.parametrize("at_step", sampled([7, 1, 6, 15, 23], 1))
def test_a_run_that_is_killed_in_any_step_and_resumed_equals_an_uninterrupted_one(tmp_path, data, at_step):
    whole = SmallTraining(data)
    expected = whole.train(4)
    assert statuses_of([(train_until_killed, data, tmp_path, at_step)]) == [-signal.SIGKILL]
    resumed = SmallTraining(data)
    report = resumed.train(4, to=tmp_path)
    assert history(report) == history(expected)
    assert same(resumed.weights(), whole.weights())
    # A checkpoint is saved in the background, so the kill may come before it is sealed.
    saved = (at_step - 1) // 6 * 6
    assert report.resumed_from.name in {f"checkpoint-{step:08d}.pt" for step in (saved, max(0, saved - 6))}


def train_noted(data: PackedDataset, folder: Path, log: Path) -> None:
    torch.set_num_threads(1)
    NotedTraining(data, folder, log).train()


@pytest.mark.full
@pytest.mark.parametrize("name", ["digits", "images"])
def test_a_run_that_is_killed_at_twenty_random_times_equals_an_uninterrupted_one(tmp_path, name):
    data = make_packs(tmp_path)[name]
    whole = NotedTraining(data, tmp_path / "whole", tmp_path / "whole.log")
    expected = whole.train()
    weights, samples = whole.came_to()
    for epoch in range(EPOCHS):
        assert sorted(number for step in samples[epoch] for number in step) == list(range(len(data)))
    draws, killed = random.Random(7), 0
    folder, log = tmp_path / "run", tmp_path / "run.log"
    while killed < KILLS:
        begun = len(log.read_bytes()) if log.exists() else 0
        process = PROCESSES.Process(target=train_noted, args=(data, folder, log))
        process.start()
        moment = time.monotonic() + DEADLINE_S
        # Let each attempt complete some steps, so that training makes progress and ends.
        while not log.exists() or log.stat().st_size <= begun:
            assert time.monotonic() < moment
            assert process.is_alive()
        process.join(draws.uniform(0, 0.05))
        process.kill()
        process.join()
        # If the process finished before the kill, start again from the beginning.
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            shutil.rmtree(folder)
            log.unlink()
            continue
        killed += 1
    resumed = NotedTraining(data, folder, log)
    report = resumed.train()
    found, received = resumed.came_to()
    assert history(report) == history(expected)
    assert received == samples
    assert same(found, weights)
    assert report.curve == expected.curve


def train_until_told_to_end(data: PackedDataset, folder: Path | None, signals: list[int], is_failing: bool) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Reset the signal handler, because SIGHUP is ignored under nohup.
        signal.signal(number, signal.SIG_DFL)
    steps: list[object] = []

    def step(batch: object) -> None:
        steps.append(batch)
        if len(steps) == 4:
            for number in signals:
                signal.raise_signal(number)
            if is_failing:
                raise RuntimeError("the step fails")

    train(step, Loader(data, 4), epochs=9, to=folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_process_saves_before_it_ends(tmp_path, data, number):
    for signals in ([number], [number, signal.SIGINT]):
        folder = tmp_path / str(len(signals))
        assert statuses_of([(train_until_told_to_end, data, folder, signals, False)]) == [-number]
        again = train(nothing, Loader(data, 4), to=folder)
        assert again.resumed_from == folder / "checkpoint-00000004.pt"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_process_ends_even_if_the_training_fails(data, number):
    assert statuses_of([(train_until_told_to_end, data, None, [number], True)]) == [-number]


def train_until_status(data: PackedDataset, folder: Path) -> None:
    def kill(done: meters.StepDone) -> None:
        if (saved := read_status(folder).saved) is not None and saved.checkpoint_step:
            os.kill(os.getpid(), signal.SIGKILL)

    status_writer.LOCAL_S, status_writer._VALUES_S = 0.02, 0.01
    train(nothing, Loader(data, 4), epochs=1_000_000, to=folder, on_step=kill, save_every=10)


@pytest.mark.full
def test_the_status_of_a_run_that_was_killed_is_readable_and_says_that_it_is_dead(tmp_path, data):
    assert statuses_of([(train_until_status, data, tmp_path)]) == [-signal.SIGKILL]
    (run,) = colabkit.status(tmp_path).runs
    assert run.state == "dead"
    assert run.age_s < 30
    assert f"to resume from step {run.checkpoint_step:,}" in run.advice

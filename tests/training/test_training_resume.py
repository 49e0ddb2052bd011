"""`train()` killed at any moment and resumed: the same samples, the same history, the same weights bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import colabkit
from colabkit.augment import Compose, Cutout, Normalize, RandomCrop, RandomHorizontalFlip
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.steps import supervised_step
from colabkit.training.trainer import train

KILLS = 20
EPOCHS = 4
DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PackedDataset]:
    """Return the digits, and coloured images like CIFAR's; `COLABKIT_CIFAR` may name its archive of JPEG files."""
    folder = tmp_path_factory.mktemp("packs")
    digits = folder / "digits.h5"
    colabkit.stage("samples:digits", folder / "digits", progress=False)
    colabkit.pack(folder / "digits", digits, progress=False)
    images = folder / "images.h5"
    if archive := os.environ.get("COLABKIT_CIFAR"):
        colabkit.pack(archive, images, splits={"train": 0.02, "test": 0.98}, progress=False)
    else:
        draws = np.random.default_rng(5)
        labels = draws.integers(0, 10, 1_000)
        classes = draws.integers(0, 255, (10, 32, 32, 3))
        noisy = np.clip(classes[labels] + draws.normal(0, 40, (1_000, 32, 32, 3)), 0, 255).astype(np.uint8)
        colabkit.pack({"X": noisy, "Y": labels}, images, progress=False)
    return {"digits": _split(digits), "images": _split(images)}


def _split(path: Path) -> PackedDataset:
    pack = open_pack(path)
    return pack[next(iter(pack))]


class Training:
    """A step and its surroundings, with dropout, momentum, a scheduler, augmentation and accumulated gradients.

    Each step notes the numbers of its samples in a file, which outlives the process.
    """

    def __init__(self, data: PackedDataset, folder: Path, log: Path, **options: Any) -> None:
        torch.manual_seed(3)
        random.seed(1)
        images, self._labels = (torch.from_numpy(np.asarray(field)) for field in data[:][:2])
        images = images.reshape(len(data), *images.shape[1:3], -1).permute(0, 3, 1, 2)
        side, channels = images.shape[2], images.shape[1]
        changed = Compose([RandomCrop(side, padding=2), RandomHorizontalFlip(), Cutout(4), Normalize()])
        columns = images, torch.arange(len(data))
        self.loader = Loader(columns, len(data) // 50, shuffle=True, seed=4, transform=changed, **options)
        self.model = nn.Sequential(
            nn.Conv2d(channels, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(128, 10),
        )
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.7)
        self._usual = supervised_step(self.model, optimizer, scheduler=scheduler, accumulate=2, clip=1.0)
        self._folder, self._log = folder, log
        self.flush, self.state_dict = self._usual.flush, self._usual.state_dict
        self.load_state_dict = self._usual.load_state_dict

    @property
    def is_whole(self) -> bool:
        return self._usual.is_whole

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Any:
        images, self._numbers = batch
        return self._usual((images + 0.01 * random.random(), self._labels[self._numbers]))

    def _note(self, done: meters.StepDone) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps([done.epoch, done.step, self._numbers.tolist()]) + "\n")

    def train(self, **options: Any) -> TrainReport:
        arguments = {"epochs": EPOCHS, "save_every": 3, "on_step": self._note, **options}
        return train(self, self.loader, state=self._usual.parts, save_to=self._folder, **arguments)

    def came_to(self) -> tuple[list[Tensor], dict[int, list[list[int]]]]:
        """Return the weights, and for each epoch the samples of its steps; a repeated step counts as it was last."""
        steps: dict[tuple[int, int], list[int]] = {}
        for line in self._log.read_text().splitlines():
            epoch, step, numbers = json.loads(line)
            steps[epoch, step] = numbers
        by_epoch = {epoch: [steps[key] for key in sorted(steps) if key[0] == epoch] for epoch in range(EPOCHS)}
        return list(self.model.state_dict().values()), by_epoch


def history(report: TrainReport) -> list[tuple[object, ...]]:
    """Return what does not depend on the clock."""
    return [(r.epoch, r.steps, r.samples, dict(r.values), dict(r.validation)) for r in report.epochs]


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(["digits", "images"], 1))
def test_killed_at_twenty_random_moments_equals_uninterrupted(tmp_path, packs, name):
    whole = Training(packs[name], tmp_path / "whole", tmp_path / "whole.log")
    expected = whole.train()
    weights, samples = whole.came_to()
    for epoch in range(EPOCHS):
        assert sorted(number for step in samples[epoch] for number in step) == list(range(len(packs[name])))
    draws, killed = random.Random(7), 0
    folder, log = tmp_path / "run", tmp_path / "run.log"
    while killed < KILLS:
        begun = len(log.read_bytes()) if log.exists() else 0
        pid = forked(lambda: Training(packs[name], folder, log).train())
        moment = time.monotonic() + DEADLINE_S
        while not log.exists() or log.stat().st_size <= begun:  # some steps further each time, so that it ends
            assert time.monotonic() < moment
            assert os.waitpid(pid, os.WNOHANG)[0] == 0
        alive = draws.uniform(0, 0.05)
        moment = time.monotonic() + alive
        while time.monotonic() < moment:
            os.sched_yield()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):  # it came to its end before: once more from the start
            assert os.WEXITSTATUS(status) == 0
            shutil.rmtree(folder)
            log.unlink()
            continue
        killed += 1
    resumed = Training(packs[name], folder, log)
    report = resumed.train()
    found, received = resumed.came_to()
    assert history(report) == history(expected)
    assert received == samples
    assert all(torch.equal(one, other) for one, other in zip(found, weights, strict=True))
    assert report.curve == expected.curve


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, packs):
    """Return a training that was not interrupted, and its report."""
    folder = tmp_path_factory.mktemp("whole")
    whole = Training(packs["images"], folder, folder / "log")
    return whole, whole.train(save_every="epoch")


@pytest.mark.parametrize(
    ("at_step", "options"),
    sampled(
        [
            (1, {}),
            (2, {"num_workers": 0}),
            (3, {"prefetch_batches": 1}),
            (49, {"num_workers": 2}),
            (50, {}),
            (51, {"num_workers": 0}),
            (52, {"num_workers": 2}),
            (100, {"prefetch_batches": 7}),
            (153, {}),
            (199, {"num_workers": 2}),
        ],
        3,
    ),
)
def test_stopped_after_any_step_and_resumed_with_other_threads_equals_uninterrupted(
    tmp_path, packs, uninterrupted, at_step, options
):
    whole, expected = uninterrupted
    stopped = Training(packs["images"], tmp_path / "run", tmp_path / "run.log")

    def stop(done: meters.StepDone) -> None:
        stopped._note(done)
        if done.step == at_step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(TrainingInterrupted) as caught:
        stopped.train(on_step=stop, save_every="epoch")
    assert caught.value.report.steps in (at_step, at_step + 1)  # gradients of two steps are applied together
    resumed = Training(packs["images"], tmp_path / "run", tmp_path / "run.log", **options)
    report = resumed.train(save_every="epoch")
    assert history(report) == history(expected)
    assert resumed.came_to()[1] == whole.came_to()[1]
    pairs = zip(resumed.came_to()[0], whole.came_to()[0], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert report.not_kept == ()


def test_another_batch_size_goes_on_and_says_what_it_cannot_keep(tmp_path, packs):
    data = packs["images"]
    first = Loader(data, 20, shuffle=True)
    with pytest.raises(TrainingInterrupted):
        train(nothing, first, state={}, save_to=tmp_path, on_step=stop_after(9))
    seen: list[int] = []
    report = train(lambda batch: seen.append(len(batch[1])), Loader(data, 30, shuffle=True), state={}, save_to=tmp_path)
    assert sum(seen) == len(data) - 180
    assert report.not_kept == ("batches of 20 samples, now 30",)
    assert "Not kept: batches of 20 samples, now 30" in repr(report)


def test_shuffled_validations_go_on_after_a_stop_as_if_nothing_had_been(tmp_path, packs):
    data = packs["digits"]

    def trained(folder: Path, **options: Any) -> TrainReport:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
        validate = Loader(data, 500, shuffle=True, drop_last=True)  # each pass leaves other samples out
        return train(step, Loader(data, 300), validate=validate, save_to=folder, epochs=EPOCHS, **options)

    whole = trained(tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        trained(tmp_path / "stopped", on_step=stop_after(whole.steps // 2 + 1))
    assert trained(tmp_path / "stopped").validations == whole.validations


def test_a_validation_is_a_whole_pass_wherever_its_loader_stands(packs):
    data, seen = packs["digits"], list[list[int]]()
    for samples in (0, 500):
        validate = Loader(data, 500)
        validate.load_state_dict({**validate.state_dict(), "samples": samples})
        model = nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10))
        step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
        train(step, Loader(data, 300), validate=validate, epochs=2)
        seen.append([validate.meters.samples, validate.next_epoch])
    assert seen == [[2 * len(data), 2]] * 2


def nothing(batch: object) -> None:
    """Be a step that does nothing."""


def stop_after(step: int) -> Callable[[meters.StepDone], None]:
    """Return what presses Ctrl-C after a step."""

    def stop(done: meters.StepDone) -> None:
        if done.step == step:
            signal.raise_signal(signal.SIGINT)

    return stop

"""Training runs for tests: with steps that do nothing, with real models, and in processes that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import colabkit
from colabkit.augment import Compose, Cutout, Normalize, RandomCrop, RandomHorizontalFlip
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack
from colabkit.training.report import TrainReport
from colabkit.training.step_factory import supervised_step

EPOCHS = 4
"""Number of epochs of a `NotedTraining`."""

DEADLINE_S = 100.0

# A fork server has no threads, and imports modules once for all children. The first update of an optimizer imports
# `torch._dynamo`, which takes seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "pytest", "colabkit.augment", "colabkit.training.trainer"])


def train(step: Any, loader: Any, **options: Any) -> TrainReport:
    """Train; pass an empty `state` for a step that has no `state_dict`."""
    if not hasattr(step, "state_dict"):
        options = {"state": {}, **options}
    return colabkit.train(step, loader, **options)


def nothing(batch: object) -> None:
    """A training step that does nothing."""


def statuses_of(works: Iterable[tuple[Any, ...]]) -> list[int]:
    """Call importable functions in concurrent processes; return their exit codes, negative after a signal.

    Args:
        works: a function and its arguments for each process.
    """
    processes = [PROCESSES.Process(target=_alone, args=work) for work in works]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE_S)
        assert None not in [process.exitcode for process in processes], "the processes did not end"
        return [process.exitcode or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _alone(work: Callable[..., object], *arguments: object) -> None:
    torch.set_num_threads(1)
    work(*arguments)


class SmallTraining:
    """A new model whose training depends on the random generators of Python, NumPy and torch."""

    def __init__(self, data: PackedDataset, **options: Any) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.loader = Loader(data, 4, **{"shuffle": True, "seed": 4, "transform": Normalize(), **options})
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.usual = supervised_step(self.model, self.optimizer, scheduler=self.scheduler)

    def step(self, batch: tuple[Tensor, Tensor]) -> Any:
        images, labels = batch
        noise = random.random() + np.random.rand()
        return self.usual((images + 0.01 * noise, labels))

    def validate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            return {"score": float(self.model(torch.ones(2, 3, 4, 3)).sum()) + random.random()}

    def train(self, epochs: int, **options: Any) -> TrainReport:
        return train(self.step, self.loader, epochs=epochs, state=self.state, validate=self.validate, **options)

    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def history(report: TrainReport) -> list[tuple[object, ...]]:
    """Return the values of a report's epochs that do not depend on the clock."""
    return [(r.epoch, r.steps, r.samples, dict(r.values), dict(r.validation)) for r in report.epochs]


def make_packs(folder: Path) -> dict[str, PackedDataset]:
    """Return datasets of the digits and of 32x32 color images, both from new packs.

    The color images are random, or from the archive of CIFAR-10 JPEG files at `COLABKIT_CIFAR`.
    """
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


class NotedTraining:
    """A training run with dropout, momentum, a scheduler, augmentation and gradient accumulation.

    Each step records its sample numbers in a file, which outlives the process.
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

    def note(self, done: meters.StepDone) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps([done.epoch, done.step, self._numbers.tolist()]) + "\n")

    def train(self, **options: Any) -> TrainReport:
        arguments = {"epochs": EPOCHS, "save_every": 3, "on_step": self.note, **options}
        return colabkit.train(self, self.loader, state=self._usual.parts, to=self._folder, **arguments)

    def came_to(self) -> tuple[list[Tensor], dict[int, list[list[int]]]]:
        """Return the weights, and for each epoch the samples of its steps; for a repeated step, the last run counts."""
        steps: dict[tuple[int, int], list[int]] = {}
        for line in self._log.read_text().splitlines():
            epoch, step, numbers = json.loads(line)
            steps[epoch, step] = numbers
        by_epoch = {epoch: [steps[key] for key in sorted(steps) if key[0] == epoch] for epoch in range(EPOCHS)}
        return list(self.model.state_dict().values()), by_epoch


def stop_after(step: int) -> Callable[[meters.StepDone], None]:
    """Return a callback that interrupts training after a step, like Ctrl-C."""

    def stop(done: meters.StepDone) -> None:
        if done.step == step:
            signal.raise_signal(signal.SIGINT)

    return stop

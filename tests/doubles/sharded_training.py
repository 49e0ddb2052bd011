"""Training of models that are sharded over processes (FSDP2): with `train()`, and in a loop with other checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import colabkit

ROWS = torch.arange(96, dtype=torch.float32).reshape(24, 4) / 96
LABELS = torch.arange(24) % 3


def train_model(folder: Path, epochs: int, *, is_sharded: bool) -> tuple[list[float], list[int], Path | None]:
    """Train a model in batches of four over all processes, or resume.

    Returns:
        The losses of training and validation by epoch, the samples of this process, and the resumed checkpoint.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    if is_sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inner = colabkit.supervised_step(model, optimizer, accumulate=2, clip=0.5)
    seen: list[int] = []

    def step(batch: Any) -> Any:
        seen.extend(batch[2].tolist())
        return inner(batch[:2])

    batch_size = 4 // (distributed.get_world_size() if distributed.is_initialized() else 1)
    loader = colabkit.Loader((ROWS, LABELS, torch.arange(24)), batch_size, shuffle=True, seed=5)
    held_out = colabkit.Loader((ROWS[:16], LABELS[:16]), batch_size)
    state = {"model": model, "optimizer": optimizer, "step": inner}
    report = colabkit.train(
        step, loader, epochs=epochs, state=state, to=folder, validate=lambda: inner.evaluate(held_out)
    )
    losses = [found for one in report.epochs for found in (one.values["loss"], one.validation["loss"])]
    return losses, seen, report.resumed_from


class Loop:
    """A custom training loop, with a model, an optimizer and a loader that take global batches of four samples."""

    def __init__(self, processes: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if processes > 1:
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        rows = torch.arange(80, dtype=torch.float32).reshape(20, 4) / 80
        self.loader = colabkit.Loader((rows, torch.arange(20)), 4 // processes, shuffle=True, seed=5)

    def run(self, steps: int) -> tuple[list[int], list[float]]:
        """Train for some steps, and return the numbers of this process's samples and the losses."""
        order, losses = [], []
        while len(losses) < steps:
            for rows, numbers in itertools.islice(self.loader, steps - len(losses)):
                self.optimizer.zero_grad()
                loss = (self.model(rows)[:, 0] - numbers / 20).pow(2).mean()
                loss.backward()
                self.optimizer.step()
                order += numbers.tolist()
                losses.append(loss.item())
        return order, losses

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer, "loader": self.loader}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "loader": self.loader}
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def save_shards(folder: Path, steps: int) -> list[int]:
    """Train in this process group, save a checkpoint, and return the numbers of all samples, step by step."""
    loop = Loop(distributed.get_world_size())
    order, _ = loop.run(steps)
    loop.save(folder)
    of_all: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_all, order)
    per_step = len(order) // steps
    return [number for at in range(0, len(order), per_step) for one in of_all for number in one[at : at + per_step]]


def train_and_save(folder: Path, steps: int) -> tuple[list[float], list[int], list[int]]:
    """Run `train_model` and `save_shards` in one process group, because starting it takes most of the time."""
    losses, seen, _ = train_model(folder / "trained", 1, is_sharded=True)
    of_all: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_all, seen)
    return losses, sorted(itertools.chain.from_iterable(of_all)), save_shards(folder / "saved", steps)

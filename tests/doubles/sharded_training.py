"""Training of models that are sharded over processes (FSDP2): with `train()`, and in a loop with other checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import colabkit
from colabkit.errors import InvalidOption

_WHOLE = StateDictOptions(full_state_dict=True)


class WholeModel:
    """The complete weights of a sharded model; both methods communicate with the other processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, options=_WHOLE)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=_WHOLE)


def train_shards(folder: Path) -> tuple[list[list[str]], list[Any]]:
    """Train for one epoch, or resume; return each process's errors, the resumed checkpoint and rank 0's weights."""
    model = nn.Linear(4, 2)
    fully_shard(model)
    whole = WholeModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(48, dtype=torch.float32).reshape(12, 4) / 48
    loader = colabkit.Loader((rows, torch.arange(12)), 3)

    def step(batch: Any) -> None:
        model(batch[0]).pow(2).mean().backward()
        optimizer.step()

    refusals = []
    for work in (
        lambda: colabkit.supervised_step(model, optimizer),
        lambda: colabkit.train(step, loader, epochs=1, state={"model": model}, to=folder / "shards"),
    ):
        try:
            work()
        except InvalidOption as error:
            refusals.append(str(error))
    of_all: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_all, refusals)
    report = colabkit.train(step, loader, epochs=1, state={"model": whole}, to=folder)
    return of_all, [report.resumed_from, whole.state_dict()["weight"].tolist()]


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


def train_and_save(folder: Path, steps: int) -> tuple[Any, list[int]]:
    """Run `train_shards` and `save_shards` in one process group, because starting it takes most of the time."""
    return train_shards(folder / "trained"), save_shards(folder / "saved", steps)

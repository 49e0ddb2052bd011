"""Training of a model that is sharded over processes (FSDP2), with checkpoints of its complete weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
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

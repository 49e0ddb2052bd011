"""`train()` refuses models that are sharded over processes (FSDP, DTensor); torch's checkpoints also hold a loader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sharded_training
import torch
from forks import in_fork
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from warm_python import warm_launches

import colabkit
from colabkit.errors import InvalidOption


def test_a_model_with_sharded_tensors_is_refused(tmp_path: Path) -> None:
    # With a device mesh, autograd starts threads, after which a process forked by a later test could not train.
    assert in_fork(lambda: train_sharded_tensors(tmp_path)) == 0


def train_sharded_tensors(tmp_path: Path) -> None:
    """Check the refusals, in a process group of this process only."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = distribute_module(torch.nn.Linear(4, 2), init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = colabkit.Loader((torch.zeros(6, 4), torch.arange(6)), 2)
    with pytest.raises(InvalidOption, match=r"Cannot create a supervised step: 'weight' of the model is sharded over"):
        colabkit.supervised_step(model, optimizer)

    def train(part: object, folder: Path | None) -> int:
        return colabkit.train(lambda batch: None, loader, epochs=1, state={"part": part}, to=folder).steps

    for part in (model, optimizer):
        with pytest.raises(InvalidOption, match=r"Cannot train: state\['part'\] cannot be saved: .* sharded over"):
            train(part, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    # An object may contain a sharded model without being one.
    holder = SimpleNamespace(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    with pytest.raises(InvalidOption, match="the state has a tensor that is sharded over processes"):
        train(holder, tmp_path / "folder")
    assert train(model, None) == 3


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[int]]:
    """Return a folder with checkpoints of two processes, the results of `train()`, and the samples of three steps."""
    folder = tmp_path_factory.mktemp("sharded")
    with warm_launches():
        return folder, *colabkit.notebook_launch(sharded_training.train_and_save, (folder, 3), processes=2)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_the_gathered_weights_of_a_sharded_model_are_saved_and_restored(launched: tuple[Path, Any, list[int]]) -> None:
    folder, (refusals, (resumed, weights)), _ = launched
    assert refusals[0] == refusals[1]
    supervised, saved = refusals[0]
    assert "is sharded over processes" in supervised
    assert "get_model_state_dict() with full_state_dict=True" in saved
    assert resumed is None
    trained = folder / "trained"
    _, (resumed, restored) = colabkit.notebook_launch(sharded_training.train_shards, (trained,), processes=2)
    assert resumed == trained / "checkpoint-00000002.pt"
    assert restored == weights


@pytest.mark.full
def test_a_sharded_loop_saved_on_two_processes_resumes_on_one_with_the_same_order_and_loss(
    launched: tuple[Path, Any, list[int]],
) -> None:
    folder, _, before = launched
    whole, resumed = sharded_training.Loop(1), sharded_training.Loop(1)
    # An epoch has five steps.
    order, losses = whole.run(9)
    resumed.load(folder / "saved")
    after, losses_after = resumed.run(6)
    assert before + after == order
    assert losses_after == pytest.approx(losses[3:], abs=1e-6)

"""Models that FSDP2 shards over processes: training, checkpoints, resuming; refusals of other kinds of shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharded_training
import torch
from forks import in_fork
from sharded_training import train_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from warm_python import warm_launches

import colabkit
from colabkit.errors import InvalidOption


def alone(work: object) -> int:
    """Run a function in a process group of one process, in a fork.

    With a device mesh, autograd starts threads, after which a process forked by a later test could not train.
    """

    def run() -> None:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        work()  # type: ignore[operator]

    return in_fork(run)


def test_only_models_that_fully_shard_has_sharded_as_a_whole_can_be_trained_by_a_supervised_step() -> None:
    assert alone(refuse_steps) == 0


def refuse_steps() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2))
    fully_shard(model[0])
    with pytest.raises(InvalidOption, match=r"parts of the model, but not to '1\.weight'\. Apply it to the model, too"):
        make_step(model)
    fully_shard(model)
    for options, message in (({"amp": "fp16"}, "amp='fp16' with a sharded"), ({"channels_last": True}, "contiguous")):
        with pytest.raises(InvalidOption, match=message):
            make_step(model, **options)
    assert "amp=False (the policy of fully_shard sets the precision)" in repr(make_step(model))
    with pytest.raises(InvalidOption, match=r"'weight' of the model is sharded; .* Use fully_shard\(model\)"):
        make_step(distribute_module(torch.nn.Linear(4, 2), init_device_mesh("cpu", (1,))))
    with pytest.raises(InvalidOption, match=r"sharded by FullyShardedDataParallel; .* Use .*fully_shard\(model\)"):
        make_step(with_fsdp1())


def make_step(model: torch.nn.Module, **options: object) -> object:
    return colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def with_fsdp1() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(torch.nn.Linear(4, 2), device_id=torch.device("cpu"))


def test_checkpoints_hold_the_complete_tensors_of_sharded_models_and_refuse_other_shards(tmp_path: Path) -> None:
    assert alone(lambda: save_shards(tmp_path)) == 0


def save_shards(folder: Path) -> None:
    model = distribute_module(torch.nn.Linear(4, 2), init_device_mesh("cpu", (1,)))
    loader = colabkit.Loader((torch.zeros(6, 4), torch.arange(6)), 2)

    def train(part: object, to: Path | None) -> colabkit.TrainReport:
        return colabkit.train(lambda batch: None, loader, epochs=1, state={"part": part}, to=to)

    report = train(model, folder / "complete")
    saved = torch.load(report.checkpoint, weights_only=True)["content"]["state"]["part"]
    assert {name: type(value) for name, value in saved.items()} == {"weight": torch.Tensor, "bias": torch.Tensor}
    assert torch.equal(saved["weight"], model.weight.full_tensor())
    # An object may contain a sharded model without being one.
    holder = SimpleNamespace(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    wrapped = with_fsdp1()
    for part, message in (
        (holder, "the state has a tensor that is sharded over processes"),
        (wrapped, "the parameters are sharded by FullyShardedDataParallel"),
        (torch.optim.SGD(wrapped.parameters(), 0.1), "the parameters are sharded by FullyShardedDataParallel"),
    ):
        with pytest.raises(InvalidOption, match=message):
            train(part, folder / "refused")
    assert train(wrapped, None).steps == 3


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[int], list[int]]:
    """Return a folder with checkpoints of two processes, and the results of `train_and_save` in them."""
    folder = tmp_path_factory.mktemp("sharded")
    with warm_launches():
        return folder, *colabkit.notebook_launch(sharded_training.train_and_save, (folder, 3), processes=2)


@pytest.mark.full
def test_a_sharded_run_equals_one_without_shards_and_resumes_in_one_process(
    launched: tuple[Path, list[float], list[int], list[int]], tmp_path: Path
) -> None:
    folder, losses, seen, _ = launched
    assert seen == list(range(24))
    expected, order, _ = train_model(tmp_path / "whole", 2, is_sharded=False)
    assert losses == pytest.approx(expected[:2], abs=1e-6)
    resumed, order_after, checkpoint = train_model(folder / "trained", 2, is_sharded=False)
    assert checkpoint is not None
    assert order_after == order[24:]
    assert resumed == pytest.approx(expected, abs=1e-6)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.full
def test_a_run_without_shards_resumes_on_the_shards_of_two_processes(tmp_path: Path) -> None:
    expected, _, _ = train_model(tmp_path / "whole", 2, is_sharded=False)
    train_model(tmp_path / "resumed", 1, is_sharded=False)

    def resume(folder: Path) -> tuple[list[float], list[int], Path | None]:
        return train_model(folder, 2, is_sharded=True)

    losses, seen, checkpoint = colabkit.notebook_launch(resume, (tmp_path / "resumed",), processes=2)
    assert checkpoint is not None
    assert len(seen) == 12
    assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
def test_a_sharded_loop_saved_on_two_processes_resumes_on_one_with_the_same_order_and_loss(
    launched: tuple[Path, list[float], list[int], list[int]],
) -> None:
    folder, _, _, before = launched
    whole, resumed = sharded_training.Loop(1), sharded_training.Loop(1)
    # An epoch has five steps.
    order, losses = whole.run(9)
    resumed.load(folder / "saved")
    after, losses_after = resumed.run(6)
    assert before + after == order
    assert losses_after == pytest.approx(losses[3:], abs=1e-6)

"""`supervised_step()` in two processes: combined gradients, names of the unwrapped model, and equal results."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
import torch
from models import Batches, batches, close, make_step, same, small_cnn
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from trainings import nothing, statuses_of, train

from colabkit.loading import Loader
from colabkit.packs import PackedDataset
from colabkit.training import steps


def all_of(some: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([images for images, _ in some]), torch.cat([labels for _, labels in some])


def update(rank: int, folder: str) -> None:
    """Train two epochs on every second batch, starting at `rank`, and write the results.

    Train first a plain model, which the step wraps, then a model that is already wrapped.
    """
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=60))
    try:
        for is_wrapped in (False, True):
            # Each process creates a different plain model, but all must train with the weights of rank 0.
            model = small_cnn(width=8, seed=0 if is_wrapped else rank)
            model.register_buffer("unsaved", torch.ones(1), persistent=False)
            _, step = make_step(DistributedDataParallel(model) if is_wrapped else model, accumulate=2)
            exchanges: list[int] = []
            for epoch in (batches(10), batches(10)[:4]):
                for batch in epoch[rank::2]:
                    step(batch)
                    exchanges.append(step.updates)
                step.flush()
            # Evaluate different numbers of batches: two in the first process, one in the second.
            found = step.evaluate(batches(3)[: 2 - rank])
            if rank == 0:
                # A single process may predict.
                step.outputs(batches(1))
            assert step.parts["model"] is model
            record = {"model": model.state_dict(), "found": found, "updates": step.updates, "exchanges": exchanges}
            torch.save(record, f"{folder}/{rank}-{is_wrapped}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes_make_the_same_updates_as_one_with_all_batches(tmp_path):
    reference, step = make_step()
    some = batches(10)
    for start, stop in ((0, 4), (4, 8), (8, 10), (0, 4)):
        step(all_of(some[start:stop]))
    expected = step.evaluate([*batches(3)[:2], *batches(3)[:1]])
    assert statuses_of([(update, rank, str(tmp_path)) for rank in range(2)]) == [0, 0]
    for is_wrapped in (False, True):
        first, second = (torch.load(tmp_path / f"{rank}-{is_wrapped}.pt", weights_only=True) for rank in range(2))
        models = [small_cnn(width=8, seed=5), small_cnn(width=8, seed=6)]
        for model, record in zip(models, (first, second), strict=True):
            model.load_state_dict(record["model"])
            assert (record["updates"], record["exchanges"]) == (4, [0, 1, 1, 2, 2, 3, 4])
        assert same(*models)
        assert close(models[0], reference)
        assert first["found"] == second["found"] == pytest.approx(expected, abs=1e-3)


def train_with_checkpoints(rank: int, data: PackedDataset, folder: str) -> None:
    """Train an epoch of 11 steps with a checkpoint after every second step."""
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=60))
    try:
        train(nothing, Loader(data, 1), to=f"{folder}/run", save_every=2, keep_last=99)
    finally:
        distributed.destroy_process_group()


@pytest.mark.full
def test_several_processes_save_checkpoints_in_the_middle_of_an_epoch(tmp_path, data):
    works = [(train_with_checkpoints, rank, data, str(tmp_path)) for rank in range(2)]
    assert statuses_of(works) == [0, 0]
    found = {int(path.stem.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-*.json")}
    # A checkpoint that is due while another one is being written comes after a later step, so any step is possible.
    assert {0, 11} < found


def fail_in_one(rank: int, data: PackedDataset, folder: str) -> None:
    """Train with a step that fails in one of two processes, and record the error in each process."""
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=dt.timedelta(minutes=30))
    steps: list[object] = []

    def step(batch: object) -> None:
        steps.append(batch)
        if rank == 1 and len(steps) == 3:
            raise ValueError("planned")

    try:
        train(step, Loader(data, 1), to=f"{folder}/run")
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")


@pytest.mark.full
def test_a_step_that_fails_in_one_process_does_not_wait_for_the_other(tmp_path, data):
    assert statuses_of([(fail_in_one, rank, data, str(tmp_path)) for rank in range(2)]) == [0, 0]
    assert (tmp_path / "1").read_text() == "ValueError: planned"
    assert (tmp_path / "0").exists()


def test_a_group_of_one_process_does_not_wrap_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "DistributedDataParallel", None)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _, step = make_step(accumulate=2)
        for batch in batches():
            step(batch)
        assert step.updates == 2
        assert step.evaluate(batches())["loss"] > 0
    finally:
        distributed.destroy_process_group()

"""`supervised_step()` in two processes: the gradients of both, one set of names, the same figures."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Any

import torch
from models import Batches, batches, close, make_step, same, small_cnn
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from colabkit.training import steps

DEADLINE_S = 100


def all_of(some: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([images for images, _ in some]), torch.cat([labels for _, labels in some])


def train(rank: int, folder: str, is_wrapped: bool) -> None:
    """Train two epochs on every second batch, the first of an odd number of them, and write what came of it."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=60))
    try:
        model = small_cnn(width=8, seed=0 if is_wrapped else rank)  # the first process's weights hold
        given: nn.Module = DistributedDataParallel(model) if is_wrapped else model
        _, step = make_step(given, accumulate=2)
        exchanges: list[int] = []
        for epoch in (batches(10), batches(10)[:4]):
            for batch in epoch[rank::2]:
                step(batch)
                exchanges.append(step.updates)
            step.flush()
        found = step.evaluate(batches(3)[: 2 - rank])  # unequally many: two here, one there
        assert step.parts["model"] is model
        record = {"model": model.state_dict(), "found": found, "updates": step.updates, "exchanges": exchanges}
        torch.save(record, f"{folder}/{rank}.pt")
    finally:
        distributed.destroy_process_group()


def in_two_processes(folder: Path, is_wrapped: bool) -> list[dict[str, Any]]:
    context = torch.multiprocessing.start_processes(
        train, (str(folder), is_wrapped), nprocs=2, join=False, start_method="forkserver"
    )
    ends = time.monotonic() + DEADLINE_S
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < ends, "the processes did not end"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_make_the_updates_of_one_on_all_their_batches(tmp_path):
    reference, step = make_step()
    some = batches(10)
    for start, stop in ((0, 4), (4, 8), (8, 10), (0, 4)):
        step(all_of(some[start:stop]))
    expected = step.evaluate([*batches(3)[:2], *batches(3)[:1]])
    for is_wrapped in (False, True):
        folder = tmp_path / str(is_wrapped)
        folder.mkdir()
        first, second = in_two_processes(folder, is_wrapped)
        models = [small_cnn(width=8, seed=5), small_cnn(width=8, seed=6)]
        for model, record in zip(models, (first, second), strict=True):
            model.load_state_dict(record["model"])
            assert (record["updates"], record["exchanges"]) == (4, [0, 1, 1, 2, 2, 3, 4])
        assert same(*models)
        assert close(models[0], reference)
        assert first["found"] == second["found"]
        assert set(first["found"]) == set(expected)
        assert abs(first["found"]["loss"] - expected["loss"]) < 1e-3
        assert abs(first["found"]["accuracy"] - expected["accuracy"]) < 1e-6


def test_a_group_of_one_process_wraps_nothing(tmp_path, monkeypatch):
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

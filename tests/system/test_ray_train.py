"""`train()` in workers of Ray Train: a worker is killed, and Ray resumes with fewer and with more workers."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_rank
from contract import seal_fields

from colabkit.types import SavedCheckpoint

COUNT = 2401
BATCH = 6
STEPS = 401
"""Steps of an epoch."""

CPUS = 3
SAVE_EVERY = 40
KILLS = {2: (1, 2 * SAVE_EVERY), 1: (0, STEPS + 2 * SAVE_EVERY)}
"""By number of workers: the rank that kills itself, and the least step of the last checkpoint that it reports before.

Ray takes a report when it next polls the worker, and the next report waits for that. So an earlier checkpoint of the
same epoch has reached Ray.
"""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = pytest.importorskip("ray")
    pytest.importorskip("ray.train")
    # Workers of Ray inherit these variables, and import only from `PYTHONPATH`.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    found.init(address="local", num_cpus=CPUS, object_store_memory=100 << 20, **quiet)
    yield found
    found.shutdown()


def occupy(cpus: int) -> None:
    """Reserve logical CPUs for another job, so that Ray Train uses the others."""
    import ray
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordinator

    asked = {"requester_id": "another job", "resources": [{"CPU": 1}] * cpus, "expire_after_s": 600}
    priority = coordinator.ResourceRequestPriority.HIGH
    ray.get(coordinator.get_or_create_autoscaling_coordinator().request_resources.remote(**asked, priority=priority))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ray_resumes_on_one_and_three_workers_after_kills_and_each_sample_is_used_once(tmp_path, ray):
    from ray import train
    from ray.train.torch import TorchTrainer

    rows = np.arange(COUNT, dtype=np.int64).reshape(-1, 1)
    pack = seal_fields(tmp_path / "numbers.h5", {"X": {"train": rows}}, {"X": "array"}, None)

    def report(saved: SavedCheckpoint, victim: Path | None, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for file in saved.files:
                shutil.copy(file, folder)
            checkpoint = train.Checkpoint.from_directory(folder) if saved.files else None
            train.report({"step": saved.step}, checkpoint=checkpoint)
        if victim is not None and saved.step >= step:
            victim.unlink()

    def run() -> None:
        workers, rank = train.get_context().get_world_size(), train.get_context().get_world_rank()
        # Each worker has its own folder, so only Ray keeps checkpoints between two attempts.
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        if rank == 0:
            if (checkpoint := train.get_checkpoint()) is not None:
                checkpoint.to_directory(folder)
            (tmp_path / f"attempt-{workers}").write_text(" ".join(path.stem for path in folder.glob("*.pt")))
            # After a kill on two workers, Ray finds one CPU, and later three.
            occupy(CPUS - 1 if workers == 2 else 0)
        killed_rank, step = KILLS.get(workers, (-1, 0))
        victim = tmp_path / f"victim-{workers}" if rank == killed_rank else None
        if victim is not None:
            victim.touch()
        os.environ["KILLED_RANK"] = f"{killed_rank} 0 {victim}"
        hook = partial(report, victim=victim, step=step)
        options = {"on_checkpoint": hook, "save_every": SAVE_EVERY}
        training_rank.trained(str(pack), str(folder), str(BATCH // workers), "2", "-1", **options)

    occupy(CPUS - 2)
    failures = train.FailureConfig(max_failures=2)
    done = TorchTrainer(
        run,
        scaling_config=train.ScalingConfig(num_workers=(1, 3)),
        run_config=train.RunConfig(storage_path=str(tmp_path / "ray"), failure_config=failures),
    ).fit()
    resumed = [int((tmp_path / f"attempt-{workers}").read_text().rpartition("-")[2] or 0) for workers in (2, 1, 3)]
    assert [0 < resumed[1] < STEPS, STEPS < resumed[2] < 2 * STEPS] == [True, True], resumed
    content = torch.load(next(Path(done.checkpoint.path).glob("*.pt")))["content"]
    assert content["state"]["history"]["counts"].tolist() == [[1] * COUNT] * 2
    assert done.metrics["step"] == content["run"]["steps"] == 2 * STEPS

"""One process of a `torchrun` job: it trains with DDP on a pack of numbers and records its samples.

Called as `training_rank.py PACK FOLDER BATCH_SIZE EPOCHS STOP_AFTER`: it trains for EPOCHS epochs with checkpoints in
FOLDER, or until a signal to only one process stops it after STOP_AFTER steps, and writes `FOLDER/RANK-STEP.json`.

If `KILLED_RANK` is set to `RANK STEP FILE`, this rank creates the file and kills itself with SIGKILL after this step,
or after the first later one at which the file does not exist. The checkpoints hold a history: how often the weights
were trained on each sample in each epoch.
"""

from __future__ import annotations

import datetime as dt
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import colabkit
from colabkit.foundation import meters
from colabkit.training.report import TrainingInterrupted

DEADLINE_S = 90


def main(pack: str, folder: str, batch_size: str, epochs: str, stop_after: str) -> None:
    # End this process even if the launcher is killed and cannot end it.
    signal.alarm(2 * DEADLINE_S)
    torch.set_num_threads(1)
    is_launched = distributed.is_initialized()
    if "RANK" in os.environ and not is_launched:
        distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=DEADLINE_S))
    trained(pack, folder, batch_size, epochs, stop_after)
    # Free the DDP wrapper, which holds the process group: the group's threads must end before the process.
    gc.collect()
    if distributed.is_initialized() and not is_launched:
        distributed.destroy_process_group()


def trained(pack: str, folder: str, batch_size: str, epochs: str, stop_after: str, **options: Any) -> None:
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    # Different seeds on the ranks must not matter, because DDP copies the weights of rank 0.
    torch.manual_seed(rank)
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    usual = colabkit.supervised_step(model, optimizer)
    loader = colabkit.Loader(colabkit.open_pack(pack)["train"], int(batch_size), shuffle=True, seed=1)
    seen: list[tuple[int, list[int]]] = []
    last: list[int] = []
    history = nn.Module()
    history.register_buffer("counts", torch.zeros(int(epochs), len(loader.dataset), dtype=torch.int64))
    killed_rank, killed_step, killed = os.environ.get("KILLED_RANK", "-1 -1 .").split(" ", 2)

    class Step:
        state_dict, load_state_dict = usual.state_dict, usual.load_state_dict

        def __call__(self, batch: Tensor) -> object:
            last[:] = batch.flatten().tolist()
            return usual((batch.float().reshape(-1, 1) / 100, batch.flatten().long() % 2))

    def note(done: meters.StepDone) -> None:
        seen.append((done.epoch, list(last)))
        new = torch.zeros_like(history.counts)
        new[done.epoch, last] = 1
        if distributed.is_initialized():
            distributed.all_reduce(new)
        history.counts += new
        if rank == int(killed_rank) and done.step >= int(killed_step) and not Path(killed).exists():
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # Only rank 0 receives the signal; the other ranks must learn of it from rank 0.
        if done.step == int(stop_after) and rank == 0:
            signal.raise_signal(signal.SIGINT)

    try:
        report = colabkit.train(
            Step(),
            loader,
            epochs=int(epochs),
            state={**usual.parts, "history": history},
            to=folder,
            on_step=note,
            **{"save_every": 2, **options},
        )
    except TrainingInterrupted as stopped:
        report = stopped.report
    record = {
        "seen": seen,
        "steps": report.steps,
        "trained": report.trained,
        "stopped": report.stopped,
        "changed_settings": report.changed_settings,
        "samples": [epoch.samples for epoch in report.epochs],
        "loss": [epoch.values["loss"] for epoch in report.epochs],
        "history": history.counts.tolist(),
        "weights": model.weight.flatten().tolist(),
        "checkpoint": str(report.checkpoint),
    }
    Path(folder, f"{rank}-{report.steps}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])

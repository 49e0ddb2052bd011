"""One process of a `torchrun` job: it loads its share of a pack of numbers and records the samples that it received.

Called as `loader_rank.py PACK STATE FOLDER BATCH_SIZE BATCHES`: it resumes from the state, takes the rest of that
epoch, then BATCHES batches of the next one, and writes `FOLDER/RANK.json`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import signal
import sys
from pathlib import Path

import torch.distributed

from colabkit.loading import Loader
from colabkit.packs.dataset.opened_pack import open_pack

DEADLINE_S = 60


def main(pack: str, state: str, folder: str, batch_size: str, batches: str) -> None:
    # End this process even if the launcher is killed and cannot end it.
    signal.alarm(2 * DEADLINE_S)
    loader = Loader(open_pack(pack)["train"], int(batch_size), shuffle=True)
    batches_alone = len(loader)
    torch.distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=DEADLINE_S))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches_here = len(loader)
    loader.load_state_dict(json.loads(Path(state).read_text()))
    epochs = []
    for most in (None, int(batches)):
        taken = [samples.tolist() for samples, _ in itertools.islice(loader, most)]
        everyones: list[list[list[int]]] = [[] for _ in range(world_size)]
        torch.distributed.all_gather_object(everyones, taken)
        assert len({len(rank_batches) for rank_batches in everyones}) == 1, (
            "the ranks received different numbers of batches"
        )
        everything = [sample for rank_batches in everyones for batch in rank_batches for sample in batch]
        assert len(set(everything)) == len(everything), "a sample was repeated"
        epochs.append(taken)
    torch.distributed.destroy_process_group()
    record = {
        "world_size": world_size,
        "batches_alone": batches_alone,
        "batches": batches_here,
        "epochs": epochs,
        "state": loader.state_dict(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Loaders in programs: several torchrun processes, and scripts that end in the middle of an epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm_python
import warm_torchrun
from contract import seal_fields
from rank_steps import in_order, state_of, steps
from sampling import sampled

from colabkit.foundation.permutation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import open_pack

TORCHRUN_S = 100.0


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loopback interface is called lo on Linux")
def test_two_processes_of_torchrun_resume_from_the_state_of_three_and_one_from_that_of_two(tmp_path):
    n = 44
    numbers = {"X": {"train": np.arange(n)}, "Y": {"train": np.arange(n) % 3}}
    pack = seal_fields(tmp_path / "numbers.h5", numbers, {"X": "array"}, "class")
    data = open_pack(pack)["train"]
    orders = [epoch_order(n, 4, number, 0, n).tolist() for number in range(2)]
    options = {"shuffle": True, "seed": 4, "fields": ["X"]}
    three = [Loader(data, 4, rank=rank, world_size=3, **options) for rank in range(3)]
    assert in_order(steps(three, 2)) == orders[0][:24]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(state_of(three)))

    script = str(Path(__file__).parents[1] / "doubles" / "loader_rank.py")
    launch = [sys.executable, warm_torchrun.__file__, "--standalone", "--nproc-per-node", "2", script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launch, str(pack), str(state), str(tmp_path), "3", "4"]
    done = warm_python.run(command, timeout=TORCHRUN_S, env=environ, text=True, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout

    records = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for record in records:
        assert (record["world_size"], record["batches_alone"], record["batches"]) == (2, 15, 8)
        assert record["state"] == records[0]["state"]
    first, second = ([*zip(*taken, strict=True)] for taken in zip(*(r["epochs"] for r in records), strict=True))
    assert (len(first), len(second)) == (4, 4)
    assert in_order(first) == orders[0][24:]
    assert in_order(second) == orders[1][:24]
    alone = Loader(data, 5, **options)
    alone.load_state_dict(records[0]["state"])
    assert in_order(steps([alone])) == orders[1][24:]


LEFT_OPEN = """
import torch
from colabkit import Loader
from colabkit.augment import RandomResizedCrop

images = torch.zeros(4096, 3, 64, 64, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
coming = iter(Loader(images, 32, num_workers=2, transform=RandomResizedCrop(48)))
print(tuple(next(coming).shape))
"""


@pytest.mark.full
@pytest.mark.parametrize(("ending", "status"), sampled([("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)], 1))
def test_a_script_can_end_in_the_middle_of_an_iteration(ending: str, status: int) -> None:
    command = [sys.executable, "-c", LEFT_OPEN + ending]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (status, "(32, 3, 48, 48)\n"), done.stderr
        assert "terminate called" not in done.stderr

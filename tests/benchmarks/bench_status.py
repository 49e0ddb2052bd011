"""Measure the cost of the status file, and its age when it is read: `python tests/benchmarks/bench_status.py`.

Two training runs alternate, with and without `status.json`. Their steps only use CPU time. The cost is the difference
of the shortest times per step, and the CPU time of the thread that writes. A second process reads the status every
50 ms. Both rows save to a local disk and to a simulated Drive mount that takes 25 ms for each operation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

from far_mounts import FuseMount

import colabkit
from colabkit.training import status_writer

READER = """
import json, sys, time
oldest = 0.0
while True:
    try:
        oldest = max(oldest, time.time() - json.load(open(sys.argv[1]))["written_s"])
    except (OSError, ValueError):
        pass
    print(oldest, flush=True)
    time.sleep(0.05)
"""


def burn(batch: object) -> dict[str, float]:
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    return {"loss": 0.5}


def train(folder: Path, seconds: float) -> float:
    """Train for some seconds and return the seconds per step."""
    until = time.monotonic() + seconds

    def check(done: object) -> None:
        if time.monotonic() > until:
            raise StopIteration

    loader = colabkit.Loader([[1.0]] * 1_000, 1)
    report = colabkit.train(burn, loader, epochs=10_000, to=folder, state={}, on_step=check, save_every=10**9)
    return seconds / report.steps


def measure(name: str, parent: Path, seconds: float, rounds: int) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    shares, ages = [], []
    for number in range(rounds):
        for is_written in (True, False):
            folder = parent / f"{number}-{is_written}"
            if not is_written:
                with mock.patch.object(status_writer.StatusWriter, "begin"):
                    times[False].append(train(folder, seconds))
                continue
            reader = subprocess.Popen(
                [sys.executable, "-c", READER, str(folder / "status.json")], stdout=subprocess.PIPE, text=True
            )
            times[True].append(train(folder, seconds))
            reader.kill()
            ages.append(float(reader.communicate()[0].split()[-2]))
            shares.append(json.loads((folder / "status.json").read_bytes())["cost_share"])
    steps = ", ".join(f"{1e3 * min(times[kind]):.3f} ms" for kind in (True, False))
    print(
        f"{name}: step with and without {steps}; CPU of the thread {min(shares):.3%}; oldest status {min(ages):.1f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        measure("local disk", Path(root) / "local", options.seconds, options.rounds)
        (Path(root) / "shown").mkdir()
        with FuseMount(Path(root) / "drive", Path(root) / "shown", latency_s=0.025) as drive:
            measure("slow drive", drive.point, options.seconds, options.rounds)

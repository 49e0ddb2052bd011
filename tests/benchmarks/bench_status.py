"""Measure the cost and the age of the status file, and its content after a kill.

    python tests/benchmarks/bench_status.py

Two training runs alternate, with and without `status.json`. Their steps only use CPU time. The cost is the difference
between the shortest times per step, and the CPU time of the thread that writes. A second process reads the status
every 50 ms.

Then processes that write their status continuously are killed with SIGKILL. Every read of the status, before and after
the kill, must find a complete file, and `colabkit status` must report that the run is dead, and the step to resume
from.

All runs save to a local disk, and to a simulated Drive mount that takes 25 ms for each operation.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import torch
from far_mounts import FuseMount
from rounds import Bench

import colabkit
from colabkit.notebook.command_line import main as run_command
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
    """Train for a few seconds and return the seconds per step."""
    until = time.monotonic() + seconds

    def check(done: object) -> None:
        if time.monotonic() > until:
            raise StopIteration

    loader = colabkit.Loader(torch.ones(1_000, 1), 1)
    report = colabkit.train(burn, loader, epochs=10_000, to=folder, state={}, on_step=check, save_every=10**9)
    return seconds / report.steps


def cost(bench: Bench) -> None:
    """Compare steps with and without a status file, in alternating runs."""
    for name, parent in folders(bench):
        times: dict[bool, list[float]] = {True: [], False: []}
        shares, ages = [], []
        for number in range(bench.rounds):
            for is_written in (True, False):
                folder = parent / f"{number}-{is_written}"
                if not is_written:
                    with mock.patch.object(status_writer.StatusWriter, "begin"):
                        times[False].append(1e3 * train(folder, bench.options.seconds))
                    continue
                reader = subprocess.Popen(
                    [sys.executable, "-c", READER, str(folder / "status.json")], stdout=subprocess.PIPE, text=True
                )
                times[True].append(1e3 * train(folder, bench.options.seconds))
                reader.kill()
                ages.append(float(reader.communicate()[0].split()[-2]))
                shares.append(json.loads((folder / "status.json").read_bytes())["cost_share"])
        bench.show(
            f"A step, {name}", "ms", {"colabkit": times[True], "without status": times[False]}, ["without status"]
        )
        bench.figures[name] = {"cost_share": shares, "age_s": ages}
        print(f"{name}: CPU of the thread {min(shares):.3%}; oldest status {min(ages):.1f} s")


def train_until_killed(folder: Path) -> None:
    """Train, and write the status as often as possible."""
    # On the slow mount, more frequent writes would leave no time for checkpoints.
    status_writer.LOCAL_S, status_writer.REMOTE_S = 0.02, 0.5
    loader = colabkit.Loader(torch.ones(1_000, 1), 1)
    colabkit.train(burn, loader, epochs=10_000, to=folder, state={}, save_every=50)


def kills(bench: Bench) -> None:
    """Kill training processes, and count incomplete reads of their status, and runs that are not reported as dead."""
    draws = random.Random(0)
    for name, parent in folders(bench):
        reads = torn = reported = 0
        for number in range(bench.options.kills):
            folder = parent / f"killed-{number}"
            with subprocess.Popen([sys.executable, __file__, "--killed", str(folder)]) as child:
                kill_at = None
                while kill_at is None or time.monotonic() < kill_at:
                    # Continuous reads would keep a slow mount too busy to save checkpoints.
                    time.sleep(0.05)
                    try:
                        text = (folder / "status.json").read_bytes()
                    except OSError:
                        continue
                    reads, torn = reads + 1, torn + is_torn(text)
                    # Wait for a later checkpoint, since the first one holds the state before the first step.
                    if kill_at is None and not is_torn(text) and is_later(json.loads(text)["checkpoint"]):
                        kill_at = time.monotonic() + draws.uniform(0.1, 1)
                child.kill()
            reads, torn = reads + 1, torn + is_torn((folder / "status.json").read_bytes())
            with redirect_stdout(io.StringIO()) as shown:
                run_command(["status", str(folder)])
            reported += "dead: process" in shown.getvalue() and "to resume from step" in shown.getvalue()
        bench.figures[f"kills, {name}"] = {"reads": reads, "torn": torn, "reported": reported}
        bench.need(f"torn reads of {reads:,}, {name}", torn, 0, "{:.0f}", at_most=True)
        bench.need(f"kills reported as dead and how to resume, {name}", reported, bench.options.kills, "{:.0f}")


def folders(bench: Bench) -> Iterator[tuple[str, Path]]:
    """Return the names of a local disk and of a mounted slow drive, each with a folder for runs."""
    local, remote = (bench.folder / bench.part / name for name in ("local", "remote"))
    remote.mkdir(parents=True)
    yield "local disk", local
    with FuseMount(bench.folder / bench.part / "drive", remote, latency_s=0.025) as drive:
        yield "slow drive", drive.point


def is_later(checkpoint: str | None) -> bool:
    return checkpoint is not None and int("".join(filter(str.isdigit, checkpoint))) > 0


def is_torn(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of each run")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--killed", type=Path, help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args()
    if known.killed:
        train_until_killed(known.killed)
    else:
        Bench.main(parser, {"cost": cost, "kills": kills}, rounds=3, quick={"seconds": 3.0, "kills": 1})


if __name__ == "__main__":
    main()

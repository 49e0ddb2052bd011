"""Measure how much a 500 MB checkpoint slows training: the blocking call, and the steps while it is written.

    python tests/benchmarks/bench_checkpoint.py --folder /content

1. The time that `CheckpointFolder.save()` blocks its caller, compared with a plain copy of the same tensors into
   new memory and into reused memory, and with `torch.save` in the caller's thread, as in a hand-written loop.
2. The rate of small steps while the checkpoint is written, compared with the rate just before and after, and with
   `torch.save` in a plain thread.

The content resembles the states of a model and Adam: 60 layers with three large tensors each. The steps train a small
CNN with batches of 64.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import Bench, interleaved, table, timed
from tables import spread

from colabkit.training.checkpoints.folder import CheckpointFolder

LAYERS = 60
ALONE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="folder for the checkpoints; by default the system's temporary folder")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of torch's threads for the steps"
    )
    Bench.main(parser, {"call": the_call, "steps": the_steps}, rounds=7, quick={"megabytes": 20})


def folder_of(bench: Bench) -> Path:
    return Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=bench.options.folder or bench.folder))


def made(megabytes: int) -> dict[str, Any]:
    """Return tensors like the states of a model and of Adam, with the given total size."""
    sizes = [1 + number % 6 for number in range(LAYERS)]
    unit = megabytes * 1_000_000 // (4 * 3 * sum(sizes))
    model = {f"layer{number}.weight": torch.randn(size * unit) for number, size in enumerate(sizes)}
    states = {
        number: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(w), "exp_avg_sq": torch.rand_like(w)}
        for number, w in enumerate(model.values())
    }
    return {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 1e-3, "params": list(states)}]}}


def tensors_of(content: dict[str, Any]) -> list[torch.Tensor]:
    states = content["optimizer"]["state"].values()
    return [*content["model"].values(), *(tensor for state in states for tensor in state.values())]


def the_call(bench: Bench) -> None:
    """Measure how long `save()` blocks its caller."""
    content, folder = made(bench.options.megabytes), folder_of(bench)
    tensors = tensors_of(content)
    memory = [torch.empty_like(tensor) for tensor in tensors]

    def kept_copy() -> None:
        for into, tensor in zip(memory, tensors, strict=True):
            into.copy_(tensor)

    def saved() -> float:
        held_s = timed(lambda: kept.save(1, content))
        kept.finish()
        return 1e3 * held_s

    with CheckpointFolder(folder / "kept", keep_last=1) as kept:
        systems = {
            "copy, reused memory": lambda: 1e3 * timed(kept_copy),
            "copy, fresh": lambda: 1e3 * timed(lambda: [tensor.clone() for tensor in tensors]),
            "save()": saved,
            "torch.save": lambda: 1e3 * timed(lambda: torch.save(content, folder / "own.pt")),
        }
        figures = interleaved(systems, bench.rounds)
    shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in tensors)
    title = f"Time for which a checkpoint of {size / 1e6:.0f} MB in {len(tensors)} tensors blocks the caller"
    middle = bench.show(title, "ms", figures, ["copy, reused memory"])
    for system, most in (("copy, reused memory", 1.15), ("copy, fresh", 1.0)):
        bench.need(f"save() to {system}", middle["save()"] / middle[system], most, "{:.2f} times", at_most=True)


def the_steps(bench: Bench) -> None:
    """Measure steps per second while a checkpoint is written, and without one."""
    torch.set_num_threads(bench.options.threads)
    content, folder = made(bench.options.megabytes), folder_of(bench)
    step = small_step()
    for _ in range(20):
        step()

    def rate(until: Callable[[], bool]) -> tuple[float, float]:
        """Run steps until a condition holds; return the steps per second, and the seconds taken."""
        count, started = 0, time.perf_counter()
        while not until():
            step()
            count += 1
        seconds = time.perf_counter() - started
        return count / seconds, seconds

    def alone() -> float:
        end = time.perf_counter() + ALONE_S
        return rate(lambda: time.perf_counter() >= end)[0]

    def beside_colabkit() -> tuple[float, float]:
        with CheckpointFolder(folder / "kept", keep_last=1) as kept:
            kept.save(2, content)
            return rate(lambda: kept.is_free)

    def beside_torch() -> tuple[float, float]:
        copy = {"tensors": [tensor.clone() for tensor in tensors_of(content)]}
        thread = threading.Thread(target=torch.save, args=(copy, folder / "own.pt"))
        thread.start()
        try:
            return rate(lambda: not thread.is_alive())
        finally:
            thread.join()

    systems = {"colabkit": beside_colabkit, "torch.save in a thread": beside_torch}
    shares: dict[str, list[float]] = {name: [] for name in systems}
    lasted: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(bench.rounds + 1):
        for name, run in systems.items():
            before = alone()
            found, seconds = run()
            if number:
                shares[name].append(2 * found / (before + alone()))
                lasted[name].append(seconds)
        shutil.rmtree(folder / "kept")
    shutil.rmtree(folder)
    rows = []
    for name, values in shares.items():
        median, seconds = statistics.median(values), statistics.median(lasted[name])
        lost = f"{1e3 * seconds * (1 - median):.0f} ms"
        rows.append((name, *spread(values, "{:.0%}"), f"{seconds:.2f} s", lost))
    title = (
        f"Steps per second while a checkpoint is written, relative to without; {torch.get_num_threads()} torch threads"
    )
    table(title, ("", "median", "min", "max", "written in", "lost per checkpoint"), rows)
    bench.figures["steps"] = {"shares": shares, "seconds": lasted}
    share = statistics.median(shares["colabkit"])
    bench.need("steps per second while writing, relative to without", share, 0.5, "{:.0%}")


def small_step() -> Callable[[], None]:
    layers = torch.nn
    model = layers.Sequential(
        layers.Conv2d(1, 8, 3, 2), layers.ReLU(), layers.Conv2d(8, 16, 3, 2), layers.ReLU(), layers.Flatten(),
        layers.LazyLinear(10),
    )  # fmt: skip
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    model(images)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        layers.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

"""What a checkpoint of 500 MB takes from training: the call itself, and the steps beside the writer.

    python tests/benchmarks/bench_checkpoint.py --folder /content

1. How long `CheckpointFolder.save()` holds its caller, beside a bare copy of the same tensors into fresh memory and
   into memory that is kept, and `torch.save` in the caller's thread, which is what a loop of one's own does.
2. How many small steps a second are made while the checkpoint is written, against the same loop alone, just before and
   after; beside `torch.save` in a plain thread.

The content is that of a model and Adam: three tensors of each of 60 sizes. Steps are of a small CNN, batches of 64.
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
from rounds import Bench, interleaved, report, spread, table, timed

from colabkit.training.checkpoints.folder import CheckpointFolder

LAYERS = 60
ALONE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the checkpoints go; by default the system's temporary folder")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for the steps")
    Bench.main(parser, {"call": the_call, "steps": the_steps}, rounds=7)


def folder_of(bench: Bench) -> Path:
    """Return a new folder for checkpoints."""
    return Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=bench.options.folder or bench.folder))


def made(megabytes: int) -> dict[str, Any]:
    """Return the states of a model and of Adam, so large together."""
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
    """Measure how long the caller is held."""
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
            "copy, kept memory": lambda: 1e3 * timed(kept_copy),
            "copy, fresh": lambda: 1e3 * timed(lambda: [tensor.clone() for tensor in tensors]),
            "save()": saved,
            "torch.save": lambda: 1e3 * timed(lambda: torch.save(content, folder / "own.pt")),
        }
        figures = interleaved(systems, bench.rounds)
    shutil.rmtree(folder)
    size = sum(tensor.nbytes for tensor in tensors)
    title = f"Milliseconds that a checkpoint of {size / 1e6:.0f} MB in {len(tensors)} tensors holds the caller"
    report(title, "ms", figures, "copy, kept memory", None)
    bench.figures["call"] = figures
    middle = {name: statistics.median(values) for name, values in figures.items()}
    for system, most in (("copy, kept memory", 1.15), ("copy, fresh", 1.0)):
        bench.need(f"save() to {system}", middle["save()"] / middle[system], most, "{:.2f} times", at_most=True)


def the_steps(bench: Bench) -> None:
    """Measure steps a second beside the writer, in comparison with those alone."""
    torch.set_num_threads(bench.options.threads)
    content, folder = made(bench.options.megabytes), folder_of(bench)
    step = small_step()
    for _ in range(20):
        step()

    def rate(until: Callable[[], bool]) -> tuple[float, float]:
        """Return steps a second, and seconds, of a loop that goes on until something holds."""
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
    title = f"Steps a second beside the writer, to those alone; {torch.get_num_threads()} threads of torch"
    table(title, ("", "median", "min", "max", "written in", "lost a checkpoint"), rows)
    bench.figures["steps"] = {"shares": shares, "seconds": lasted}
    share = statistics.median(shares["colabkit"])
    bench.need("steps a second beside the writer, to alone", share, 0.5, "{:.0%}")


def small_step() -> Callable[[], None]:
    """Return a step of a small CNN, a few milliseconds long."""
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

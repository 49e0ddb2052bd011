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
from rounds import interleaved, machine, report, verdict

from colabkit.training.checkpoints.folder import CheckpointFolder

LAYERS = 60
ALONE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="where the checkpoints go; by default the system's temporary folder")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for the steps")
    parser.add_argument("--json", help="file for the figures of the calls")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content = made(options.megabytes)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as name:
        folder = Path(name)
        calls = the_call(content, folder, options.rounds, options.json)
        beside = the_steps(content, folder, options.rounds)
    kept, fresh, call = (statistics.median(calls[system]) for system in ("copy, kept memory", "copy, fresh", "save()"))
    print()
    for what, found, bound, holds in (
        verdict("save() to a copy into kept memory", call / kept, 1.15, "{:.2f} times", at_most=True),
        verdict("save() to a copy into fresh memory", call / fresh, 1.0, "{:.2f} times", at_most=True),
        verdict("steps a second beside the writer, to alone", beside, 0.5, "{:.0%}", at_most=False),
    ):
        print(f"{what:<45}{found:>12}   {bound:<22}{holds}")


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


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def the_call(content: dict[str, Any], folder: Path, rounds: int, json_path: str | None) -> dict[str, list[float]]:
    """Measure how long the caller is held."""
    tensors = tensors_of(content)
    memory = [torch.empty_like(tensor) for tensor in tensors]

    def kept_copy() -> None:
        for into, tensor in zip(memory, tensors, strict=True):
            into.copy_(tensor)

    def saved() -> float:
        held = timed(lambda: kept.save(1, content))
        kept.finish()
        return held

    with CheckpointFolder(folder / "kept", keep_last=1) as kept:
        systems = {
            "copy, kept memory": lambda: timed(kept_copy),
            "copy, fresh": lambda: timed(lambda: [tensor.clone() for tensor in tensors]),
            "save()": saved,
            "torch.save": lambda: timed(lambda: torch.save(content, folder / "own.pt")),
        }
        figures = interleaved(systems, rounds)
    size = sum(tensor.nbytes for tensor in tensors)
    title = f"Milliseconds that a checkpoint of {size / 1e6:.0f} MB in {len(tensors)} tensors holds the caller"
    report(title, "ms", figures, "copy, kept memory", json_path)
    return figures


def the_steps(content: dict[str, Any], folder: Path, rounds: int) -> float:
    """Measure steps a second beside the writer; return their median share of those alone."""
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
    for number in range(rounds + 1):
        for name, run in systems.items():
            before = alone()
            found, seconds = run()
            if number:
                shares[name].append(2 * found / (before + alone()))
                lasted[name].append(seconds)
        shutil.rmtree(folder / "kept")
    print(
        f"\nSteps a second beside the writer, to those alone\n{machine()}, {torch.get_num_threads()} threads of torch\n"
    )
    print(f"{'':<24}{'median':>8}{'min':>8}{'max':>8}   written in   lost a checkpoint")
    for name, values in shares.items():
        median, seconds = statistics.median(values), statistics.median(lasted[name])
        lost = f"{1e3 * seconds * (1 - median):.0f} ms"
        print(f"{name:<24}{median:>8.0%}{min(values):>8.0%}{max(values):>8.0%}   {seconds:>8.2f} s   {lost:>17}")
    return statistics.median(shares["colabkit"])


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

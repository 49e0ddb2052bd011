"""What `train()` costs beside a loop written by hand, and how long checkpoints hold it up.

    python tests/benchmarks/bench_training.py

The same small convolutional network and the same batches of 64 images of 32x32, on the CPU: a loop in plain torch over
a list of batches, and `train(supervised_step(...), Loader(...))` over the same samples in memory, in interleaved
epochs; then the same with a checkpoint after every 6 steps. `bench_checkpoint.py` measures checkpoints of 500 MB. The
last table says what is needed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rounds import interleaved, machine, report, verdict
from torch import nn

import colabkit

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from models import small_cnn

BATCH, STEPS = 64, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    images = torch.randn(BATCH * STEPS, 3, 32, 32)
    labels = torch.randint(0, 10, (BATCH * STEPS,))
    with tempfile.TemporaryDirectory() as folder:
        systems = {
            "by hand": by_hand(images, labels),
            "train()": by_train(images, labels),
            "train(), a checkpoint every 6 steps": by_train(images, labels, save_to=Path(folder), save_every=6),
        }
        figures = interleaved(systems, options.rounds)
    report(f"Microseconds of a step: small CNN, batch {BATCH}, CPU", "us", figures, "by hand", None)
    # Each round's ratio is of neighbours in time, so that what slows the machine for a while slows both.
    ratios = [ours / bare for ours, bare in zip(figures["train()"], figures["by hand"], strict=True)]
    print(f"\nWhat is needed\n{machine()}\n")
    rows = [verdict("a step of train(), times one by hand", statistics.median(ratios), 1.02, "{:.3f}", True)]
    for row in rows:
        print("  ".join(row))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and its optimizer."""
    model = small_cnn(seed=1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(images: torch.Tensor, labels: torch.Tensor) -> Callable[[], float]:
    """Return what trains an epoch in plain torch and returns the microseconds of a step."""
    model, optimizer = network()
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))

    def run() -> float:
        model.train()
        total = torch.zeros(())
        right = torch.zeros(())
        began = time.perf_counter()
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            right += (scores.detach().argmax(1) == targets).float().mean()
        return (time.perf_counter() - began) / len(batches) * 1e6

    return run


def by_train(images: torch.Tensor, labels: torch.Tensor, **options: object) -> Callable[[], float]:
    """Return what trains an epoch by `train()` and returns the microseconds of a step."""
    model, optimizer = network()
    step = colabkit.supervised_step(model, optimizer)
    loader = colabkit.Loader((images, labels), BATCH)
    epochs = 0

    def run() -> float:
        nonlocal epochs
        epochs += 1
        done = colabkit.train(step, loader, epochs=epochs if options else 1, **options)
        record = done.epochs[-1]
        return record.seconds / record.steps * 1e6

    return run


if __name__ == "__main__":
    main()

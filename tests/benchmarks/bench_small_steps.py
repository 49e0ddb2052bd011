"""Measure the time that `train()` adds to small steps, compared with a hand-written loop over the same `Loader`.

    python tests/benchmarks/bench_small_steps.py

All systems train the same small network on batches of 32 rows on the CPU, in interleaved epochs of 100 steps, and are
timed by the loader's own clock. A round's figure is the lower quartile of its steps, which other processes on the
machine hardly affect. The table below the figures lists differences between the systems in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from rounds import Bench, interleaved, interval, table
from torch import Tensor, nn

import colabkit

BATCH, STEPS, WARM_UP = 32, 100, 10
MOST_US = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Bench.main(parser, {"steps": steps}, rounds=200, quick={"rounds": 5})


def steps(bench: Bench) -> None:
    torch.set_num_threads(1)
    hand, counting = "by hand", "by hand, with mean loss and accuracy"
    custom, supervised = "train(step)", "train(supervised_step(...))"
    systems = {hand: by_hand(False), counting: by_hand(True), custom: by_train(False), supervised: by_train(True)}
    figures = interleaved(systems, bench.rounds)
    bench.show(f"A step: two linear layers, batch {BATCH}, CPU", "us", figures, [hand])
    pairs = ((custom, hand), (supervised, hand), (supervised, counting))
    found = [
        (one, other, *interval(value - base for value, base in zip(figures[one], figures[other], strict=True)))
        for one, other in pairs
    ]
    rows = [(f"{one}, above {other}", *(f"{value:.1f}" for value in values)) for one, other, *values in found]
    table("Differences in the same round", ("", "us, median", "95% from", "to"), rows)
    for one, other, median, _, _ in found:
        bench.need(f"us of {one} above {other}", median, MOST_US, "{:.1f}", True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, colabkit.Loader]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    samples = torch.randn(BATCH * STEPS, 64), torch.randint(0, 10, (BATCH * STEPS,))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), colabkit.Loader(samples, BATCH)


def step_us(loader: colabkit.Loader) -> float:
    """Return the lower quartile of the microseconds of the loader's last steps."""
    newest = loader.meters.snapshot().recent[WARM_UP - STEPS :]
    return statistics.quantiles(times.seconds for times in newest)[0] * 1e6


def by_hand(counts_values: bool) -> Callable[[], float]:
    model, optimizer, loader = parts()

    def run() -> float:
        total, right = torch.zeros(()), torch.zeros(())
        for rows, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            scores = model(rows)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            if counts_values:
                total += loss.detach()
                right += (scores.detach().argmax(1) == labels).float().mean()
        return step_us(loader)

    return run


def by_train(is_supervised: bool) -> Callable[[], float]:
    model, optimizer, loader = parts()

    def custom(batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, labels = batch
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        return loss

    step = colabkit.supervised_step(model, optimizer) if is_supervised else custom

    def run() -> float:
        colabkit.train(step, loader)
        return step_us(loader)

    return run


if __name__ == "__main__":
    main()

"""Measure the cost of `train()`, the live panel and checkpoints, compared with a hand-written loop.

    python tests/benchmarks/bench_training.py

All systems train small convolutional networks with batches of 64 images, 32x32 unless stated otherwise, on the CPU, in
interleaved epochs:

- a loop in plain torch over a list of batches, `train(supervised_step(...), Loader(...))` over the same samples in
  memory, and that call with a checkpoint after every 6 steps (`bench_checkpoint.py` measures checkpoints of 500 MB);
- epochs of `train()` with `small_network` over images of 32x32, 64x64 and 128x128 pixels, contiguous (the default on
  the CPU) and with `channels_last=True`;
- first epochs of `train()` with `small_network` over raw packs, which check each sample against its CRC, and first
  epochs over samples that are already checked;
- longer epochs of `train()` with and without a panel, which is shown as in a notebook, through IPython's display
  publisher; a fake front end counts the bytes and discards them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from rounds import Bench, interleaved, paired
from tables import compared
from torch import nn

import colabkit
from colabkit.foundation import meters

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from models import small_cnn

BATCH, STEPS = 64, 12
SIDES = (32, 64, 128)
# Epochs with the panel are longer, so their number of rounds is divided by this.
PANEL_ROUNDS_SHARE = 4
# Approximate size of a message without its content, in bytes.
ENVELOPE_BYTES = 650


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate time of an epoch with the panel")
    Bench.main(
        parser, {"steps": steps, "layout": layout, "first": first, "panel": panel}, rounds=80, quick={"seconds": 1.0}
    )


def steps(bench: Bench) -> None:
    samples = samples_of(STEPS)
    figures = interleaved(
        {
            "by hand": by_hand(*samples),
            "train()": by_train(samples),
            "train() with a checkpoint every 6 steps": by_train(samples, to=bench.folder, save_every=6),
        },
        bench.rounds,
    )
    bench.show(f"A step: small CNN, batch {BATCH}, CPU", "us", figures, ["by hand"])
    bench.need(
        "a step of train() relative to a hand-written one", paired(figures, "train()", "by hand"), 1.02, "{:.3f}", True
    )


def layout(bench: Bench) -> None:
    last = "channels_last=True"
    for side in SIDES:
        figures = interleaved({"contiguous": by_layout(side, None), last: by_layout(side, True)}, bench.rounds)
        bench.show(f"A step: small_network, {side}x{side} images, batch {BATCH}, CPU", "us", figures, [last])
        ratio, low, high = compared(figures["contiguous"], figures[last])
        print(f"\nTime of contiguous relative to {last}: {ratio:.3f} (95% interval {low:.3f} to {high:.3f})")
        bench.need(f"an epoch over contiguous {side}x{side} images relative to {last}", ratio, 1.05, "{:.3f}", True)


def by_layout(side: int, channels_last: bool | None) -> Callable[[], float]:
    model = colabkit.small_network(10, (side, side, 3))
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    images = torch.randint(0, 256, (BATCH * STEPS, side, side, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.randint(0, 10, (len(images),))
    loader = colabkit.Loader((images, labels), BATCH, shuffle=True, channels_last=channels_last)

    def run() -> float:
        record = colabkit.train(step, loader).epochs[-1]
        return record.seconds / record.steps * 1e6

    return run


def first(bench: Bench) -> None:
    """Compare first epochs of `small_network` over a raw pack with and without the checks of its samples."""
    for side in SIDES[:2]:
        images = np.random.default_rng(0).integers(0, 256, (BATCH * STEPS, side, side, 3), np.uint8)
        path = bench.folder / f"{side}.h5"
        colabkit.pack({"X": images, "Y": np.arange(len(images)) % 10}, path, progress=False)
        systems = {"with checks": by_pack(path, side, False), "without": by_pack(path, side, True)}
        figures = interleaved(systems, bench.rounds)
        title = f"A step of a first epoch: small_network, {side}x{side} images, batch {BATCH}, CPU"
        bench.show(title, "us", figures, ["without"])
        ratio, low, high = compared(figures["with checks"], figures["without"])
        print(f"\nTime with checks relative to without: {ratio:.3f} (95% interval {low:.3f} to {high:.3f})")
        bench.need(
            f"a first epoch over {side}x{side} images relative to one without checks", ratio, 1.05, "{:.3f}", True
        )


def by_pack(path: Path, side: int, is_checked: bool) -> Callable[[], float]:
    """Return a function that trains an epoch over a newly opened pack and returns the microseconds per step."""
    model = colabkit.small_network(10, (side, side, 3))
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def run() -> float:
        data = colabkit.open_pack(path)["train"]
        if is_checked:
            data.check(np.arange(len(data)))
        record = colabkit.train(step, colabkit.Loader(data, BATCH, shuffle=True)).epochs[-1]
        return record.seconds / record.steps * 1e6

    return run


def panel(bench: Bench) -> None:
    InteractiveShell.instance().display_pub = CountingPublisher()
    run = by_train(samples_of(20))
    run()
    count = max(20, round(bench.options.seconds / (run() / 1e6)))
    samples = samples_of(count)
    shown_s: list[float] = []
    systems = {
        "panel off": by_train(samples, beside=nullcontext),
        "panel on": by_train(samples, beside=lambda: shown(shown_s)),
    }
    figures = interleaved(systems, max(1, bench.rounds // PANEL_ROUNDS_SHARE))
    title = f"A step: small CNN, batch {BATCH}, CPU, {count} steps per round"
    bench.show(title, "us", figures, ["panel off"])
    frames, sent_bytes = CountingPublisher.frames, CountingPublisher.sent_bytes
    print(f"\n{frames / sum(shown_s):.1f} frames/s, {sent_bytes / frames:,.0f} bytes each")
    bench.need(
        "a step with the panel relative to one without", paired(figures, "panel on", "panel off"), 1.005, "{:.4f}", True
    )
    bench.need("bytes per second to the front end", sent_bytes / sum(shown_s), 20_000, "{:,.0f}", True)


class CountingPublisher(CapturingDisplayPublisher):
    """A fake front end that counts the bytes and frames it receives."""

    sent_bytes = 0
    frames = 0

    def publish(self, data: object, *arguments: object, **options: object) -> None:
        type(self).sent_bytes += len(json.dumps(data).encode()) + ENVELOPE_BYTES
        type(self).frames += 1


@contextmanager
def shown(shown_s: list[float]) -> Iterator[None]:
    """Show the panel within a block, and record the block's seconds."""
    began = time.perf_counter()
    with colabkit.dashboard(screen="notebook"):
        yield
    shown_s.append(time.perf_counter() - began)


def samples_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH * count, 3, 32, 32), torch.randint(0, 10, (BATCH * count,))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_cnn(seed=1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def by_hand(images: torch.Tensor, labels: torch.Tensor) -> Callable[[], float]:
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


def by_train(
    samples: tuple[torch.Tensor, torch.Tensor],
    beside: Callable[[], AbstractContextManager[None]] | None = None,
    **options: object,
) -> Callable[[], float]:
    """Return a function that trains an epoch with `train()` and returns the microseconds per step.

    If `beside` is given, training runs within its context manager, and steps are timed from event to event, without the
    first step.
    """
    model, optimizer = network()
    step = colabkit.supervised_step(model, optimizer)
    loader = colabkit.Loader(samples, BATCH)
    epochs = 0

    def run() -> float:
        nonlocal epochs
        epochs += 1
        at_s: list[float] = []
        unsubscribe = meters.subscribe(lambda event: note(event, at_s)) if beside else None
        try:
            with beside() if beside else nullcontext():
                done = colabkit.train(step, loader, epochs=epochs if options else 1, **options)
        finally:
            if unsubscribe:
                unsubscribe()
        if at_s:
            return (at_s[-1] - at_s[0]) / (len(at_s) - 1) * 1e6
        record = done.epochs[-1]
        return record.seconds / record.steps * 1e6

    return run


def note(event: meters.Event, at_s: list[float]) -> None:
    if isinstance(event, meters.StepDone):
        at_s.append(time.perf_counter())


if __name__ == "__main__":
    main()

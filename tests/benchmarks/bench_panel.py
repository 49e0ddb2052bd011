"""What the live panel costs a training, and what it sends to the front end.

    python tests/benchmarks/bench_panel.py

The same small convolutional network on the same batches of 64 images of 32x32, on the CPU: epochs without a panel, and
with one that is shown as a notebook shows it, by IPython's display publisher, which counts the bytes and drops them.
The epochs are interleaved; each round's ratio is of neighbours in time. The last table says what is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from rounds import interleaved, machine, report, verdict

import colabkit
from colabkit.foundation import meters

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from models import small_cnn

BATCH = 64
ENVELOPE_BYTES = 650  # of a message beside its content


class Counted(CapturingDisplayPublisher):
    """Takes the place of a front end: counts bytes, and the seconds in which they came."""

    sent_bytes = 0
    frames = 0

    def publish(self, data: object, *arguments: object, **options: object) -> None:
        type(self).sent_bytes += len(json.dumps(data).encode()) + ENVELOPE_BYTES
        type(self).frames += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0, help="of an epoch, more or less")
    parser.add_argument("--json", help="write all figures here")
    options = parser.parse_args()
    InteractiveShell.instance().display_pub = Counted()
    steps = steps_in(options.seconds)
    images, labels = torch.randn(BATCH * steps, 3, 32, 32), torch.randint(0, 10, (BATCH * steps,))
    shown_s: list[float] = []
    systems = {
        "panel off": epoch(images, labels, None),
        "panel on": epoch(images, labels, shown_s),
    }
    figures = interleaved(systems, options.rounds)
    title = f"Microseconds of a step, median: small CNN, batch {BATCH}, CPU, {steps} steps a round"
    report(title, "us", figures, "panel off", options.json)
    ratios = [on / off for on, off in zip(figures["panel on"], figures["panel off"], strict=True)]
    print(f"\n{Counted.frames / sum(shown_s):.1f} frames/s, {Counted.sent_bytes / Counted.frames:,.0f} bytes each")
    print(f"\nWhat is needed\n{machine()}\n")
    rows = [
        verdict("a step beside the panel, times one without", statistics.median(ratios), 1.005, "{:.4f}", True),
        verdict("bytes a second to the front end", Counted.sent_bytes / sum(shown_s), 20_000, "{:,.0f}", True),
    ]
    for row in rows:
        print("  ".join(row))


def steps_in(seconds: float) -> int:
    """Return how many steps take about so long."""
    images, labels = torch.randn(BATCH * 20, 3, 32, 32), torch.randint(0, 10, (BATCH * 20,))
    run = epoch(images, labels, None)
    run()
    return max(20, round(seconds / (run() / 1e6)))


def epoch(images: torch.Tensor, labels: torch.Tensor, shown_s: list[float] | None) -> Callable[[], float]:
    """Return a function that trains an epoch and returns the microseconds of a step; `shown_s` gets its seconds."""
    model = small_cnn(seed=1)
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    loader = colabkit.Loader((images, labels), BATCH)

    def run() -> float:
        at_s: list[float] = []

        def note(event: meters.Event) -> None:
            if isinstance(event, meters.StepDone):
                at_s.append(time.perf_counter())

        unsubscribe = meters.subscribe(note)  # in both, so that events are published in both
        try:
            began = time.perf_counter()
            with nullcontext() if shown_s is None else colabkit.dashboard(screen="notebook"):
                colabkit.train(step, loader)
            if shown_s is not None:
                shown_s.append(time.perf_counter() - began)
        finally:
            unsubscribe()
        return (at_s[-1] - at_s[0]) / (len(at_s) - 1) * 1e6

    return run


if __name__ == "__main__":
    main()

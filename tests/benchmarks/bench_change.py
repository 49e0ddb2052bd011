"""Compare the speed of this checkout with that of another one, for example from before a change.

    git worktree add ../before REVISION
    python tests/benchmarks/bench_change.py ../before

Each round starts one new process for each checkout, and the two take turns. New processes are needed because two
processes with the same code can differ by 10% for their entire run, due to their memory layout. The table shows the
ratio of medians over the rounds with a bootstrapped 95% interval; above 1, this checkout is faster. Without a folder,
this checkout is compared with itself, which shows how far the machine's noise alone moves the ratio. The workloads use
only public calls that both checkouts have:

- `loader`: epochs of 50,000 shuffled 32x32 images from a pack, batch size 512, without a copy to contiguous memory
- `decode`: an epoch of random 224x224 crops from 300 photos, batch size 32
- `packing`: packing 3,000 small JPEG files as raw images; `packing photos`: packing 300 photos as 128x128 images
- `staging`: copying 3,000 small files
- `training`: steps of a small network with `train()`, batch size 64
- `first batch`: from `open_pack()` to the first batch in a new process; `import`: the import of the main functions
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rounds import Bench, take_turns, timed, write_images
from tables import compared

CHECKOUT = Path(__file__).parents[2]
NEEDED = 0.97
BEFORE, AFTER = "before", "colabkit, this checkout"
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", default=CHECKOUT, help="folder of the other checkout")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS, metavar=("WORKLOAD", "FOLDER"))
    known, _ = parser.parse_known_args()
    if known.child:
        serve(*known.child)
    else:
        ChangeBench.main(parser, {name: partial(compare, name=name) for name in WORKLOADS}, rounds=15)


@dataclass
class ChangeBench(Bench):
    """The benchmark's data, created when the benchmark starts."""

    def __post_init__(self) -> None:
        write_data(self.folder)


def compare(bench: ChangeBench, name: str) -> None:
    """Compare the seconds of a workload in both checkouts.

    Each value is the median of several turns after a warm-up. Workloads in `IN_NEW_PROCESSES` take only one turn.
    """
    checkouts = {BEFORE: os.path.abspath(bench.options.before), AFTER: str(CHECKOUT)}
    local = str(bench.folder / "near")
    words = ("--child", name, str(bench.folder))
    commands = {which: [sys.executable, __file__, path, *words] for which, path in checkouts.items()}
    environments = {which: {"PYTHONPATH": path, "COLABKIT_LOCAL": local} for which, path in checkouts.items()}
    figures: dict[str, list[float]] = {BEFORE: [], AFTER: []}
    for number in range(bench.rounds):
        order = (BEFORE, AFTER)[:: -1 if number % 2 else 1]
        turns = 0 if name in IN_NEW_PROCESSES else TURNS
        found = take_turns({which: commands[which] for which in order}, turns, environments=environments)
        for which, seconds in found.items():
            figures[which].append(1e3 * statistics.median(seconds))
    bench.show(f"{name}, each round with new processes that take turns", "ms", figures, [AFTER])
    bench.need(f"{name}: speed relative to before", compared(figures[BEFORE], figures[AFTER])[0], NEEDED, "{:.3f}")


def write_data(folder: Path) -> None:
    """Write small images, photos, and an array of 50,000 images, identical in each run."""
    write_images(folder / "small", 3000, (32, 32), 10)
    write_images(folder / "photos", 300, (480, 480), 3)
    rows = np.random.default_rng(0).integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    np.save(folder / "X.npy", rows)


def serve(name: str, folder: str) -> None:
    """Run a workload once for each line of input, and print the seconds of each run."""
    run = WORKLOADS[name](Path(folder))
    for _ in sys.stdin:
        print(run(), flush=True)


def loader(folder: Path) -> Callable[[], float]:
    import colabkit

    data = colabkit.open_pack(rows(folder))["train"]
    batches = colabkit.Loader(data, 512, shuffle=True, **channels_last(colabkit.Loader))

    def run() -> None:
        for _ in range(10):
            for _ in batches:
                pass

    return lambda: timed(run)


def rows(folder: Path) -> Path:
    """Return the path of a pack of 50,000 images, which the first process creates."""
    import colabkit

    out = folder / "rows.h5"
    if not out.exists():
        images = np.load(folder / "X.npy")
        colabkit.pack({"X_train": images, "Y_train": np.arange(len(images)) % 10}, out, progress=False)
    return out


def channels_last(function: Callable[..., object]) -> dict[str, bool]:
    """Return the option for channels-last images; checkouts without this option always return such images."""
    return {"channels_last": True} if "channels_last" in inspect.signature(function).parameters else {}


def decode(folder: Path) -> Callable[[], float]:
    import colabkit

    crop = colabkit.augment.RandomResizedCrop(224)
    data = colabkit.FileDataset(str(folder / "photos"))
    batches = colabkit.Loader(data, 32, shuffle=True, transform=crop, **channels_last(colabkit.Loader))
    return lambda: timed(lambda: [None for _ in batches])


def packing(folder: Path, source: str = "small", size: int | None = None) -> Callable[[], float]:
    import colabkit

    def run() -> float:
        out = folder / f"{os.getpid()}.h5"
        seconds = timed(lambda: colabkit.pack(folder / source, out, size=size, encoding="raw", progress=False))
        out.unlink()
        return seconds

    return run


def packing_photos(folder: Path) -> Callable[[], float]:
    return packing(folder, "photos", 128)


def staging(folder: Path) -> Callable[[], float]:
    import colabkit

    def run() -> float:
        out = folder / f"staged-{os.getpid()}"
        seconds = timed(lambda: colabkit.stage(folder / "small", to=out, progress=False))
        shutil.rmtree(out)
        return seconds

    return run


def training(folder: Path) -> Callable[[], float]:
    import torch

    import colabkit

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    )
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    images = torch.randn(64 * 40, 3, 16, 16)
    batches = colabkit.Loader((images, torch.randint(0, 10, (len(images),))), 64)
    return lambda: timed(lambda: colabkit.train(step, batches, epochs=2))


def first_batch(folder: Path) -> Callable[[], float]:
    import colabkit

    out = rows(folder)
    _ = colabkit.Loader, colabkit.open_pack

    def run() -> None:
        batches = iter(colabkit.Loader(colabkit.open_pack(out)["train"], 512, shuffle=True))
        next(batches)

    return lambda: timed(run)


def importing(folder: Path) -> Callable[[], float]:
    # Import torch first, so that its import time does not count as colabkit's.
    import torch

    assert torch

    def run() -> None:
        import colabkit

        _ = colabkit.Loader, colabkit.pack, colabkit.stage, colabkit.train

    return lambda: timed(run)


WORKLOADS = {
    "loader": loader,
    "decode": decode,
    "packing": packing,
    "packing photos": packing_photos,
    "staging": staging,
    "training": training,
    "first batch": first_batch,
    "import": importing,
}
IN_NEW_PROCESSES = ("first batch", "import")


if __name__ == "__main__":
    main()

"""Compare the speed of this checkout with that of another one, for example from before a change.

    git worktree add ../before REVISION
    python tests/benchmarks/bench_change.py ../before

Each round starts one new process for each checkout, and the two take turns. New processes are needed because two
processes with the same code can differ by 10% for their entire run, due to their memory layout. The table shows the
ratio of medians over the rounds with a bootstrapped 95% interval; above 1, this checkout is faster. The workloads use
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
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from rounds import compared, machine, take_turns, timed, verdict

CHECKOUT = Path(__file__).parents[2]
NEEDED = 0.97
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="workloads to run, separated by commas")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS, metavar=("WORKLOAD", "FOLDER"))
    options = parser.parse_args()
    if options.child:
        serve(*options.child)
        return
    wanted = options.only.split(",") if options.only else list(WORKLOADS)
    print(f"{machine()}; {options.rounds} rounds, each with new processes that take turns\n")
    print(f"{'':<15} {'before':>10} {'after':>10}          ratio (95% interval)")
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for name in wanted:
            before, after = measure(name, options.before, folder, options.rounds)
            ratio, low, high = compared(before, after)
            _, _, bound, holds = verdict(name, ratio, NEEDED, "{:.3f}", at_most=False)
            medians = f"{statistics.median(before) * 1e3:>7.1f} ms {statistics.median(after) * 1e3:>7.1f} ms"
            print(f"{name:<15} {medians}   {ratio:>10.3f} ({low:.3f} to {high:.3f})   {bound}: {holds}", flush=True)


def measure(name: str, before: str, folder: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round for both checkouts.

    Each value is the median of several turns after a warm-up. Workloads in `IN_NEW_PROCESSES` take only one turn.
    """
    checkouts = {"before": os.path.abspath(before), "after": str(CHECKOUT)}
    local = os.path.join(folder, "near")
    commands = {which: [sys.executable, __file__, path, "--child", name, folder] for which, path in checkouts.items()}
    environments = {which: {"PYTHONPATH": path, "COLABKIT_LOCAL": local} for which, path in checkouts.items()}
    figures: dict[str, list[float]] = {"before": [], "after": []}
    for number in range(rounds):
        order = ("before", "after")[:: -1 if number % 2 else 1]
        turns = 0 if name in IN_NEW_PROCESSES else TURNS
        found = take_turns({which: commands[which] for which in order}, turns, environments=environments)
        for which, seconds in found.items():
            figures[which].append(statistics.median(seconds))
    return figures["before"], figures["after"]


def write_data(folder: Path) -> None:
    """Write small images, photos, and an array of 50,000 images, identical in each run."""
    chance = np.random.default_rng(0)
    for name, count, side, classes in (("small", 3000, 32, 10), ("photos", 300, 480, 3)):
        for number in range(count):
            coarse = chance.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
            target = folder / name / f"class{number % classes}" / f"{number:05}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(target, quality=90)
    np.save(folder / "X.npy", chance.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8))


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
    # Import torch first, because the time of that import is not colabkit's.
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

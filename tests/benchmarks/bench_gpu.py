"""Measure how well the Loader feeds a GPU: copies, training loops, augmentation, decoding and memory growth.

    python tests/benchmarks/bench_gpu.py --json gpu.json

The script takes less than 10 minutes. The last table shows each requirement with its figure; the JSON file also holds
the individual rounds. Samples are random images, packed at the start. After a warm-up, whose time counts as start-up,
each loop runs for 200 steps and 2 seconds, but at most for 2,000 steps or 10 seconds. Models train with
`supervised_step(amp="auto")`. A part that fails does not stop the others. Without a GPU, the script ends with status 1
and a message. `--device cpu --quick` runs all parts for a few steps, to check the script only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from rounds import Bench, Found, table
from tables import spread
from torch import Tensor, nn

import colabkit
from colabkit import augment

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from models import resnet18, small_cnn

Batch: TypeAlias = tuple[Tensor, Tensor]
Loops: TypeAlias = Mapping[str, tuple[Callable[[], Iterable[Batch]], Callable[[Batch], object]]]
"""By name: a function that returns batches, and the work for each batch."""

CLASSES = 10
CACHED = 8
"""Number of batches on the device that the baseline repeats."""

FEED = 0.97
"""Required share of the speed of a loop over batches that are already on the device."""


@dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        images: number of images, of `side` x `side` pixels.
        small_images: number of images of 32x32 pixels.
        jpegs: number of JPEG files of twice the side.
        batch: samples per batch.
        warm_up: number of steps before each measurement.
        steps: minimum and maximum number of steps of a measurement.
        seconds: minimum and maximum duration of a measurement, which ends at either maximum.
        epochs: epochs of the memory check.
    """

    images: int = 2048
    side: int = 224
    small_images: int = 50_000
    jpegs: int = 1024
    batch: int = 128
    warm_up: int = 20
    steps: tuple[int, int] = 200, 2000
    seconds: tuple[float, float] = 2.0, 10.0
    epochs: int = 20


QUICK = Scale(24, side=32, small_images=64, jpegs=20, batch=4, warm_up=1, steps=(2, 2), seconds=(0.0, 1.0), epochs=3)


@dataclass
class GpuBench(Bench):
    """The benchmark with its device, sizes and datasets."""

    def __post_init__(self) -> None:
        self.figures["GPUs"] = gpus(self.device)

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

    @cached_property
    def scale(self) -> Scale:
        return QUICK if self.options.quick else Scale()

    @cached_property
    def photos(self) -> colabkit.PackedDataset:
        """A pack of random images of `side` x `side` pixels."""
        return colabkit.open_pack(make_pack(self.folder, self.scale))["train"]

    @cached_property
    def small(self) -> tuple[np.ndarray, np.ndarray]:
        """Random images of 32x32 pixels and their labels, in memory."""
        random = np.random.default_rng(0)
        count = self.scale.small_images
        return random.integers(0, 256, (count, 3, 32, 32), np.uint8), random.integers(0, CLASSES, count)

    def loader(self, dataset: Any, keep: str, **options: Any) -> colabkit.Loader:
        """Return a shuffling loader whose epoch takes longer than a measurement."""
        scale = self.scale
        drawn = scale.batch * (scale.warm_up + scale.steps[1] + 1) * options.get("world_size", 1)
        count = len(dataset[0] if isinstance(dataset, tuple) else dataset)
        order = colabkit.sampler.WeightedOrder(np.ones(count), num_samples=drawn)
        keep = keep if self.device.type == "cuda" else "auto"
        return colabkit.Loader(dataset, scale.batch, sampler=order, device=self.device, keep=keep, **options)

    def cached(self, dataset: Any) -> Iterator[Batch]:
        """Yield a few batches that are already on the device, again and again."""
        return itertools.cycle(list(itertools.islice(self.loader(dataset, "auto"), CACHED)))

    def network(self) -> nn.Module:
        return small_cnn(CLASSES) if self.options.quick else resnet18(CLASSES)

    def step(self, model: nn.Module, amp: Any = "auto", **options: Any) -> Callable[[Batch], object]:
        model = model.to(self.device)
        return colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.01, **options), amp=amp)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def compare_loops(self, title: str, loops: Loops, needed: Mapping[str, float]) -> None:
        """Measure loops in interleaved rounds, and require shares of the speed of the first one."""
        runs: dict[str, list[Found]] = {name: [] for name in loops}
        for _ in range(self.rounds):
            for name, (batches, work) in loops.items():
                runs[name].append(self.measure(batches, work))
        base, rates = next(iter(loops)), {}
        rows = []
        for name, found in runs.items():
            rates[name] = [one["images"] / one["seconds"] for one in found]
            shares = [f"{median(one[key] for one in found):,.3f}" for key in ("start_s", "copy_ms", "wait_ms")]
            wall = f"{median(one['bytes'] / one['seconds'] for one in found) / 1e6:,.0f}"
            ratio = median(rates[name]) / median(rates[base])
            rows.append((name, *spread(rates[name]), f"{ratio:.3f}", wall, *shares))
        head = ("", "images/s, median", "min", "max", f"times {base}", "MB/s", "start-up s", "copy ms", "wait ms")
        table(f"{title}; {self.rounds} rounds, milliseconds per step", head, rows)
        self.figures[title] = runs
        self.record(title, "images/s", rates, [base])
        for name, least in needed.items():
            self.need_ratio(title, {name: median(values) for name, values in rates.items()}, name, base, least)

    def measure(
        self,
        batches: Callable[[], Iterable[Batch]],
        work: Callable[[Batch], object],
        on_warm: Callable[[], object] = lambda: None,
    ) -> Found:
        """Run a loop and return its figures; `copy_ms` and `wait_ms` are those that the loader's meters report.

        `on_warm` is called after the warm-up, before the measurement starts.
        """
        scale = self.scale
        self.synchronize()
        began = time.perf_counter()
        source = batches()
        coming = iter(source)
        for batch in itertools.islice(coming, scale.warm_up):
            work(batch)
        self.synchronize()
        start_s = time.perf_counter() - began
        on_warm()
        started = time.perf_counter()
        meters = getattr(source, "meters", None)
        before = meters and meters.snapshot()
        steps = images = size = 0
        for batch in itertools.islice(coming, scale.steps[1]):
            work(batch)
            steps, images, size = steps + 1, images + len(batch[1]), size + batch[0].nbytes
            least_s, most_s = scale.seconds
            passed_s = time.perf_counter() - started
            if (steps >= scale.steps[0] and passed_s >= least_s) or passed_s > most_s:
                break
        self.synchronize()
        found: Found = {"start_s": start_s, "seconds": time.perf_counter() - started}
        found |= {"steps": steps, "images": images, "bytes": size, "copy_ms": 0.0, "wait_ms": 0.0, "busy_mb_s": None}
        if meters:
            spent = meters.snapshot() - before
            per_step = 1000 / max(1, spent.steps)
            found |= {"copy_ms": spent.copy_s * per_step, "wait_ms": spent.wait_s * per_step}
            for part in spent.parts:
                if part.name == "transfer" and part.busy_s:
                    found["busy_mb_s"] = part.handled_bytes / part.busy_s / 1e6
        return found


def gpus(device: torch.device) -> list[str]:
    """Describe the GPUs of a benchmark on a device."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    return [
        f"{one.name}, compute capability {one.major}.{one.minor}, {one.total_memory / 2**30:.0f} GiB" for one in found
    ]


def make_pack(folder: Path, scale: Scale) -> Path:
    make_files(folder / "files", scale.images, (scale.side, scale.side))
    return colabkit.pack(folder / "files", folder / "pack.h5").path


def make_files(folder: Path, count: int, size: tuple[int, int]) -> Path:
    random = np.random.default_rng(0)
    for number in range(count):
        target = folder / str(number % CLASSES)
        target.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (28, 28, 3), dtype=np.uint8))
        coarse.resize(size).save(target / f"{number}.jpg", quality=90)
    return folder


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def copies(bench: GpuBench) -> None:
    scale, is_cuda = bench.scale, bench.device.type == "cuda"
    pixels = torch.zeros(scale.batch, 3, scale.side, scale.side, dtype=torch.uint8, pin_memory=is_cuda)
    host, place = (pixels, torch.zeros(scale.batch, dtype=torch.int64)), torch.empty_like(pixels, device=bench.device)
    loops: Loops = {
        "plain pinned copy": (lambda: itertools.repeat(host), lambda batch: place.copy_(batch[0], non_blocking=True)),
        "keep='ram'": (lambda: bench.loader(bench.photos, "ram"), lambda batch: None),
    }
    title = "Host to device, uint8"
    bench.compare_loops(title, loops, {})
    plain, ours = bench.figures[title].values()
    wall = median(one["bytes"] / one["seconds"] / 1e6 for one in plain)
    busy = [one["busy_mb_s"] for one in ours if one["busy_mb_s"]]
    bench.need(
        "copies of the loader, share of a plain pinned copy", median(busy) / wall if busy else None, 0.9, "{:.2f}"
    )


def training(bench: GpuBench) -> None:
    compare_feeds(bench, "Training, ResNet-18", bench.photos, bench.network())


def small_training(bench: GpuBench) -> None:
    """Compare ways to feed a small network, whose steps take as long as launching their kernels."""
    compare_feeds(bench, "Training, small network, 32x32", bench.small, small_cnn(CLASSES))


def compare_feeds(bench: GpuBench, title: str, dataset: Any, model: nn.Module) -> None:
    step = bench.step(model)
    loops: Loops = {
        "cached batches": (lambda: bench.cached(dataset), step),
        "keep='ram'": (lambda: bench.loader(dataset, "ram"), step),
        "keep='gpu'": (lambda: bench.loader(dataset, "gpu"), step),
    }
    bench.compare_loops(title, loops, {"keep='ram'": FEED, "keep='gpu'": FEED})


def augmented(bench: GpuBench) -> None:
    crop, flip = augment.RandomResizedCrop(bench.scale.side), augment.RandomHorizontalFlip()
    steps = augment.Compose([crop, flip, augment.MixUp(CLASSES)])
    step = bench.step(bench.network())
    loops: Loops = {
        "cached batches": (lambda: bench.cached(bench.photos), step),
        "RandomResizedCrop, MixUp": (lambda: bench.loader(bench.photos, "gpu", transform=steps), step),
    }
    bench.compare_loops("Training, ResNet-18, augmented", loops, {"RandomResizedCrop, MixUp": 0.95})


def decoding(bench: GpuBench) -> None:
    """Compare decoding random crops of JPEG files on the GPU with decoding on all CPUs, and without decoding."""
    scale, title = bench.scale, "Training, ResNet-18, JPEG files"
    data = colabkit.FileDataset(make_files(bench.folder / "jpegs", scale.jpegs, (2 * scale.side, 2 * scale.side)))
    crop, step = augment.RandomResizedCrop(scale.side), bench.step(bench.network())
    if bench.device.type == "cuda":
        try:
            bench.figures["decode='auto'"] = str(bench.loader(data, "auto", transform=crop, decode="auto").decoder)
            bench.loader(data, "auto", transform=crop, decode="gpu")
        except colabkit.errors.InvalidOption as error:
            print(error)
            bench.need(f"{title}: decode='gpu' relative to decode='cpu'", None, 1, "{:.2f}")
            return

    def loader(decode: str) -> colabkit.Loader:
        return bench.loader(data, "auto", transform=crop, decode=decode if bench.device.type == "cuda" else "auto")

    loops: Loops = {
        "decode='cpu'": (lambda: loader("cpu"), step),
        "decode='gpu'": (lambda: loader("gpu"), step),
        "decode='cpu', no step": (lambda: loader("cpu"), lambda batch: None),
        "decode='gpu', no step": (lambda: loader("gpu"), lambda batch: None),
    }
    bench.compare_loops(title, loops, {"decode='gpu'": 1.0})


def optimizers(bench: GpuBench) -> None:
    """Compare optimizers in fp16: only those that are not fused make the gradient scaler wait for the GPU."""
    # colabkit does not train in fp16 on the CPU.
    amp = "fp16" if bench.device.type == "cuda" else False
    loops: Loops = {
        "fused": (lambda: bench.cached(bench.photos), bench.step(bench.network(), amp, fused=True)),
        "not fused": (lambda: bench.cached(bench.photos), bench.step(bench.network(), amp, fused=False)),
    }
    bench.compare_loops("Training, ResNet-18, fp16, by optimizer", loops, {"not fused": 0.95})


def memory(bench: GpuBench) -> None:
    """Measure the growth of GPU memory and of pinned memory after the second epoch."""
    step, held, options = bench.step(bench.network()), [], {"shuffle": True, "device": bench.device}
    keeps = ("ram", "gpu") if bench.device.type == "cuda" else ("ram",)
    loaders = [colabkit.Loader(bench.photos, bench.scale.batch, keep=keep, **options) for keep in keeps]
    for _ in range(bench.scale.epochs):
        for batch in itertools.chain(*loaders):
            step(batch)
        bench.synchronize()
        held.append(held_mb(bench.device))
    bench.figures["Memory, MB"] = held
    for name, last in held[-1].items():
        what = f"growth of {name} over {bench.scale.epochs} epochs, MB"
        is_measured = bench.device.type == "cuda"
        bench.need(what, last - held[1][name] if is_measured else None, 0, "{:,.0f}", at_most=True)


def held_mb(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {
            "resident memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
        }
    found = {"reserved GPU memory": torch.cuda.memory_reserved(device) / 1e6}
    if hasattr(torch.cuda, "host_memory_stats"):
        found["pinned memory"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 1e6
    return found


def cards(bench: GpuBench) -> None:
    """Compare training in one process per GPU with training on one GPU."""
    count = torch.cuda.device_count() if bench.device.type == "cuda" else 2
    if count < 2:
        bench.need("training on several GPUs, share of one GPU per GPU", None, 0.9, "{:.2f}")
        return
    assert bench.photos
    rates: dict[str, list[float]] = {"one GPU": [], f"{count} GPUs": []}
    for _ in range(bench.rounds):
        for name, number in zip(rates, (1, count), strict=True):
            rates[name].append(rate_of_processes(bench, number))
    bench.show("Training, ResNet-18, one process per GPU", "images/s", rates, ["one GPU"])
    alone, together = map(median, rates.values())
    bench.need("training on several GPUs, share of one GPU per GPU", together / alone / count, 0.9, "{:.2f}")


def rate_of_processes(bench: GpuBench, count: int) -> float:
    """Return the images per second of all processes, which start their loops at the same time."""
    with ExitStack() as living:
        running = []
        for rank in range(count):
            words = [sys.executable, __file__, "--rank", f"{rank}/{count}", "--folder", str(bench.folder)]
            words += ["--device", f"cuda:{rank}" if bench.device.type == "cuda" else "cpu"]
            words += ["--quick"] if bench.options.quick else []
            process = subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            running.append(living.enter_context(process))
            living.callback(process.kill)
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a process of the benchmark failed"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate()[0]) for process in running]
    return sum(one["images"] / one["seconds"] for one in found)


def run_rank(options: argparse.Namespace) -> None:
    """Train on one of several GPUs, and print the figures as JSON."""
    rank, count = map(int, options.rank.split("/"))
    bench = GpuBench(Path(options.folder), options)
    dataset = colabkit.open_pack(bench.folder / "pack.h5")["train"]
    step = bench.step(bench.network())

    def wait_for_others() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    loader = bench.loader(dataset, "ram", rank=rank, world_size=count)
    print(json.dumps(bench.measure(lambda: loader, step, wait_for_others)))


PARTS = {
    "copies": copies,
    "training": training,
    "small": small_training,
    "augmented": augmented,
    "decoding": decoding,
    "optimizers": optimizers,
    "memory": memory,
    "cards": cards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to check the script")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    options.quick = "--quick" in more
    if options.quick:
        torch.set_num_threads(1)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no usable GPU, so there is nothing to measure.")
    if options.rank:
        run_rank(options)
    else:
        print(*gpus(torch.device(options.device)), sep="\n")
        GpuBench.main(parser, PARTS, rounds=2)


if __name__ == "__main__":
    main()

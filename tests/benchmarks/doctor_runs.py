"""Real runs with a planted bottleneck, and the same runs with a fix, for bench_doctor.py; one run per process.

    python tests/benchmarks/doctor_runs.py "decoding, a light step"

This trains with and without the bottleneck in alternating rounds. It prints JSON with the median speeds before and
after the fix, and the doctor's diagnoses with and without a measurement of the step alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import numpy as np
import torch

# The first optimizer imports this, which takes seconds.
import torch._dynamo
from doctor_host_work import (
    become_slow,
    block,
    compute_freely,
    hold_gil,
    hold_lock,
    in_python,
    in_thread,
    log_in_loop,
    save_often,
    take_lock,
)
from far_mounts import FuseMount, has_fuse
from pictures import photo, saved
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import colabkit
from colabkit.foundation import OptionRef, sampled
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis, Verdict, set_subject
from colabkit.monitoring.diagnosing.run_profile import settled_steps, typical_step
from colabkit.monitoring.diagnosing.trial_loaders import copy_of, references_of

__all__ = ["RUNS", "Run", "results_of"]

LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 9, 20.0
SECONDS, ALONE_S, TRIAL_S, ENOUGH = 2.5, 1.5, 3.0, 80
SIDE, CLASSES = 64, 10


@dataclass(frozen=True)
class Run:
    """A training run with a planted bottleneck, and its fix.

    Attributes:
        name: description of the bottleneck.
        verdict: the correct verdict.
        rules: rules, at least one of which must give advice; empty if no advice is expected.
        before: function that writes data to a folder once, and returns the slow loader of this data.
        after: the same for the fixed loader; None if the fix does not change the loader.
        width: number of channels of the model, which determines the time of a step.
        elsewhere_s: seconds that each step sleeps instead of using the CPU, like a step on a GPU; 0 trains a model on
            the CPU.
        seconds: duration of the slow run.
        beside: function that returns a context manager that does other work during the slow run.
        on_step: called after each step of the slow run.
        in_step: called within each step of the slow run, with the number of seconds since the run began.
        is_mended_by_ending: whether the fix is to end the work of `beside`.
    """

    name: str
    verdict: Verdict
    rules: tuple[str, ...]
    before: Callable[[Path], Any]
    after: Callable[[Path], Any] | None = None
    width: int = 8
    elsewhere_s: float = 0.0
    seconds: float = SECONDS
    beside: Callable[[Path], contextlib.AbstractContextManager[Any]] | None = None
    on_step: Callable[[], None] | None = None
    in_step: Callable[[float], None] | None = None
    is_mended_by_ending: bool = False


def step_of(width: int) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()

    def step(batch: Any) -> float:
        images, labels = batch
        images = images.float().div_(255) if images.dtype == torch.uint8 else images
        # Convert the memory format, so that the step takes equally long with every loader.
        images = images.contiguous(memory_format=torch.channels_last)
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, {"model": model, "optimizer": optimizer}


def elsewhere(step_s: float) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Return a step that does not use the CPU, as on a GPU, and its empty state."""

    def step(batch: Any) -> None:
        time.sleep(step_s)

    return step, {}


def trained(
    loader: Any, step: Callable[[Any], Any], on_step: Callable[[], None] | None, seconds: float = SECONDS
) -> float:
    """Train for a few seconds, and return the wall-clock seconds of all complete steps, including waits for data."""
    until = time.perf_counter() + seconds
    clocked, is_over = 0.0, False
    with sampled():
        while not is_over:
            began = ended = time.perf_counter()
            for batch in loader:
                is_over = time.perf_counter() > until and loader.meters.batches > ENOUGH
                if is_over:
                    break
                started = time.perf_counter()
                step(batch)
                loader.meters.clock.worked(time.perf_counter() - started)
                if on_step is not None:
                    on_step()
                ended = time.perf_counter()
            clocked += ended - began
    return clocked


def slowed(step: Callable[[Any], Any], in_step: Callable[[float], None] | None) -> Callable[[Any], Any]:
    """Return a step that also calls `in_step` with the seconds since its first call."""
    if in_step is None:
        return step
    began: list[float] = []

    def slow_step(batch: Any) -> Any:
        began.append(time.perf_counter())
        del began[1:]
        in_step(time.perf_counter() - began[0])
        return step(batch)

    return slow_step


def watched(loader: Any) -> Any:
    return loader if isinstance(loader, colabkit.Loader) else colabkit.watch(loader)


def speed_of(spent: Any) -> float:
    step = typical_step(settled_steps(spent.recent))
    return step.samples / step.seconds


def result_of(run: Run, folder: Path) -> dict[str, Any]:
    """Train with and without the bottleneck in alternating rounds, and return the results."""
    step, parts = elsewhere(run.elsewhere_s) if run.elsewhere_s else step_of(run.width)
    is_mended = run.after is not None or run.is_mended_by_ending or run.on_step is not None or run.in_step is not None
    diagnoses: list[Diagnosis] = []
    confirmed: list[Diagnosis] = []
    counted: list[float] = []
    mended: list[float] = []
    until = time.perf_counter() + ROUNDS_S
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > until:
            break
        with run.beside(folder) if run.beside is not None else contextlib.nullcontext():
            loader = watched(run.before(folder))
            clocked = trained(loader, slowed(step, run.in_step), run.on_step, run.seconds)
        counted.append(loader.meters.snapshot().seconds / clocked)
        if run.elsewhere_s:
            loader.meters.facts = replace(loader.meters.facts, device="cuda:0")
        diagnoses.append(colabkit.doctor(loader))
        if is_mended:
            alone = colabkit.headspace(step, loader, state=parts, seconds=ALONE_S)
            confirmed.append(colabkit.doctor(loader, headspace=alone))
        unmount()
        if is_mended:
            later = watched((run.after or run.before)(folder))
            trained(later, step, None)
            mended.append(speed_of(later.meters.snapshot()))
    verdicts = [found.verdict for found in diagnoses]
    rules = {advice.rule: None for found in diagnoses for advice in found.advice}
    predicted, expected = ([s for one in found if (s := predicted_by(run, one))] for found in (diagnoses, confirmed))
    return {
        "name": run.name,
        "verdict": statistics.mode(verdicts),
        "verdicts": verdicts,
        "right": run.verdict,
        "shares": [asdict(found.shares) for found in diagnoses],
        "advice": list(rules),
        "is_advised": not run.rules or any(rule in rules for rule in run.rules),
        "steps": [found.steps for found in diagnoses],
        "speed": statistics.median(found.samples_per_s for found in diagnoses),
        "predicted": statistics.median(predicted) if predicted else None,
        "mended": statistics.median(mended) if mended else None,
        "expected": statistics.median(expected) if expected else None,
        "limits": [limits for found in (*diagnoses, *confirmed) if (limits := limits_by(run, found))],
        "rounds": {"predicted": predicted, "expected": expected, "mended": mended},
        "counted": counted,
        "text": repr(diagnoses[0]),
    }


def advice_of(run: Run, folder: Path) -> dict[str, Any]:
    """Train with the bottleneck, follow each piece of advice, and return the gains."""
    step, parts = elsewhere(run.elsewhere_s) if run.elsewhere_s else step_of(run.width)
    rows: list[dict[str, Any]] = []
    with run.beside(folder) if run.beside is not None else contextlib.nullcontext():
        loader = watched(run.before(folder))
        trained(loader, slowed(step, run.in_step), run.on_step, run.seconds)
        if run.elsewhere_s:
            loader.meters.facts = replace(loader.meters.facts, device="cuda:0")
        found = colabkit.doctor(loader)
        # Work between steps belongs to the run, too.
        does = with_work(slowed(step, run.in_step), run.on_step)
        for one in found.advice:
            single = set_subject(replace(found, advice=(one,)), vars(found)["_subject"])
            limits = [(speed or 0.0) / found.samples_per_s for speed in (one.low_samples_per_s, one.high_samples_per_s)]
            row = {"rule": one.rule, "limits": limits if one.samples_per_s else None, "gain": None, "how": ""}
            rows.append(row)
            with contextlib.suppress(colabkit.errors.InvalidOption):
                row |= {"gain": single.apply(step=does, state=parts, seconds=TRIAL_S).gain, "how": "apply()"}
            if row["gain"] is None and one.rule not in run.rules:
                row |= followed(one, loader, does, folder, found.samples_per_s)
    unmount()
    for row in rows:
        if row["gain"] is None:
            row |= {"gain": fixed_gain(run, folder, step, found.samples_per_s), "how": "the fixed run"}
    return {"advice": rows, "text": repr(found)}


def followed(
    advice: Advice, loader: Any, step: Callable[[Any], Any], folder: Path, slow_speed: float
) -> dict[str, Any]:
    """Follow the printed code of advice that is not about the planted bottleneck, and return the gain.

    The work that such advice would remove does not exist, so advice without code is wrong.
    """
    if not advice.call:
        return {"gain": 1.0, "how": "nothing to change", "is_wrong": True}
    references = references_of(advice)
    if all(isinstance(one, OptionRef) for one in references):
        # The options concern the start of an epoch and rare waits, so compare the time of all steps.
        changed = copy_of(loader, **{one.name: one.value for one in references})
        pairs = [[whole_speed(watched(one), step) for one in (copy_of(loader), changed)] for _ in range(LEAST_ROUNDS)]
        return {"gain": statistics.median(new / old for old, new in pairs), "how": "the printed option"}
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as parent,
        contextlib.chdir(parent),
        mock.patch.dict(os.environ, {"COLABKIT_LOCAL": parent}),
    ):
        names = {"colabkit": colabkit, "loader": loader}
        # The GPU is imitated.
        exec(str(advice.call).replace(", device='cuda'", ""), names)
        if names["loader"] is loader:
            raise RuntimeError(f"the printed code makes no loader: {advice.call}")
        gains = []
        for _ in range(LEAST_ROUNDS):
            trained(names["loader"], step, None, SECONDS / 2)
            gains.append(speed_of(names["loader"].meters.snapshot()) / slow_speed)
    return {"gain": statistics.median(gains), "how": "the printed code"}


def whole_speed(loader: Any, step: Callable[[Any], Any]) -> float:
    """Return the samples per second of all steps, starts of epochs included."""
    seconds = trained(loader, step, None)
    return float(loader.meters.snapshot().samples / seconds)


def with_work(step: Callable[[Any], Any], on_step: Callable[[], None] | None) -> Callable[[Any], Any]:
    """Return a step that also calls `on_step`."""
    if on_step is None:
        return step

    def does(batch: Any) -> Any:
        result = step(batch)
        on_step()
        return result

    return does


def fixed_gain(run: Run, folder: Path, step: Callable[[Any], Any], slow_speed: float) -> float:
    """Return the speed of the fixed run divided by that of the slow run: the median of alternating rounds.

    A long slow run, or one that reads from a slow drive, is not repeated.
    """
    gains = []
    is_repeated = run.seconds == SECONDS and not is_on_drive(run)
    for number in range(LEAST_ROUNDS):
        if number and is_repeated:
            with run.beside(folder) if run.beside is not None else contextlib.nullcontext():
                again = watched(run.before(folder))
                trained(again, slowed(step, run.in_step), run.on_step, run.seconds)
            slow_speed = speed_of(again.meters.snapshot())
        fixed = watched((run.after or run.before)(folder))
        trained(fixed, step, None, SECONDS / 2)
        gains.append(speed_of(fixed.meters.snapshot()) / slow_speed)
    return statistics.median(gains)


def predicted_by(run: Run, found: Diagnosis) -> float | None:
    """Return the speed that a diagnosis predicts for the fix; None if it predicts none."""
    given = {advice.rule: advice.samples_per_s for advice in found.advice}
    return next((given[rule] for rule in run.rules if given.get(rule)), None)


def limits_by(run: Run, found: Diagnosis) -> tuple[float, float] | None:
    """Return the limits of the speed predicted for the fix; None if there are none."""
    given = {one.rule: (one.low_samples_per_s, one.high_samples_per_s) for one in found.advice if one.samples_per_s}
    return next((given[rule] for rule in run.rules if rule in given), None)


# Datasets and loaders.


def photos(folder: Path, count: int = 640, size: tuple[int, int] = (256, 256)) -> Path:
    """Return a folder of JPEG files, written once."""
    target = folder / f"photos-{count}-{size[0]}"
    if not target.is_dir():
        different = [saved(photo(*size, seed=seed), "JPEG") for seed in range(32)]
        for number in range(count):
            path = target / f"class{number % CLASSES}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(different[number % len(different)])
    return target


def packed(folder: Path, count: int = 640, encoding: str = "raw", size: int | None = SIDE) -> Any:
    out = folder / f"{encoding}-{count}-{size}.h5"
    if not out.exists():
        colabkit.pack(photos(folder, count), out, size=size, encoding=encoding, progress=False)
    return colabkit.open_pack(out)["train"]


def rows(count: int = 4096, side: int = SIDE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, CLASSES, (count,), generator=generator)


class Files(Dataset[Any]):
    """A dataset that reads image files one by one with Pillow."""

    def __init__(self, folder: Path, work: int = 0) -> None:
        self.root = str(folder)
        self.paths = sorted(str(path) for path in folder.rglob("*.jpg"))
        self.work = work

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[number]) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)))
        in_python(self.work)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), number % CLASSES


class SlowRows(Dataset[Any]):
    """A dataset of samples in memory with a transform in pure Python."""

    def __init__(self, work: int) -> None:
        self.images, self.labels = rows(1024)
        self.work = work

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        in_python(self.work)
        return self.images[number], self.labels[number]


def slow(make: Callable[[Path], Any], **behavior: Any) -> Callable[[Path], Any]:
    """Return a function like `make`, whose loader reads the folder through a slow drive."""

    def made(folder: Path) -> Any:
        # Create the data first, because creating it through the drive would be slow.
        make(folder)
        # The CPU time of a child would count as that of the loader's workers.
        mount = FuseMount(folder.parent / f"{folder.name}-drive", folder, is_child=False, **behavior)
        mount.__enter__()
        MOUNTED.append(mount)
        return make(mount.point)

    return made


MOUNTED: list[FuseMount] = []


def unmount() -> None:
    """Unmount the drives, so that the kernel also drops their data from its cache."""
    while MOUNTED:
        MOUNTED.pop().__exit__(None, None, None)


@contextlib.contextmanager
def busy_processes(folder: Path, count: int = 2) -> Iterator[None]:
    """Keep CPUs busy with processes that are not children of this one."""
    busy = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!;"
    started = subprocess.run(["sh", "-c", busy * count], stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield
    finally:
        for pid in started.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def little_memory(folder: Path) -> Iterator[None]:
    """Fill the RAM until only a tenth of it is available."""
    from colabkit.foundation import memory_limits
    from colabkit.foundation.mount_table import read_file

    limits = memory_limits(read_file)
    size = int(limits.available_bytes - 0.1 * limits.total_bytes)
    held = np.empty(size, np.uint8)
    held[::4096] = 1
    yield
    del held


def file_loader(folder: Path, batch: int = 16, count: int = 2400) -> Any:
    crop = colabkit.augment.CenterCrop(SIDE)
    return colabkit.Loader(colabkit.FileDataset(photos(folder, count)), batch, shuffle=True, transform=crop)


def cached_files(folder: Path, batch: int = 32, count: int = 320) -> Any:
    """Return a `Loader` of image files that caches decoded images."""
    return colabkit.Loader(colabkit.FileDataset(photos(folder, count)), batch, shuffle=True, size=SIDE)


def torch_files(folder: Path, workers: int, batch: int = 16, count: int = 2400, work: int = 0) -> Any:
    return DataLoader(
        Files(photos(folder, count), work), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


def crops(folder: Path, batch: int = 32, count: int = 640, size: tuple[int, int] = (400, 500), **options: Any) -> Any:
    """Return a `Loader` that decodes large photos and takes small crops in every epoch."""
    out = folder / f"large-{count}.h5"
    if not out.exists():
        colabkit.pack(photos(folder, count, size), out, encoding="source", progress=False)
    crop = colabkit.augment.CenterCrop(SIDE)
    return colabkit.Loader(
        colabkit.open_pack(out)["train"], batch, shuffle=True, transform=crop, keep="auto", **options
    )


def raw(batch: int, count: int = 640, **options: Any) -> Callable[[Path], Any]:
    return lambda folder: colabkit.Loader(packed(folder, count), batch, shuffle=True, **options)


def large_rows(folder: Path, batch: int = 16) -> Any:
    """Return a `Loader` of a raw pack that is too large to be read from a slow drive during a run."""
    out = folder / "large-rows.h5"
    if not out.exists():
        images, labels = rows(8000, 2 * SIDE)
        colabkit.pack({"X": images.permute(0, 2, 3, 1).numpy(), "Y": labels.numpy()}, out, progress=False)
    return colabkit.Loader(colabkit.open_pack(out)["train"], batch, shuffle=True, keep="disk", prefetch_batches=2)


def arrays(batch: int) -> Callable[[Path], Any]:
    return lambda folder: colabkit.Loader(rows(), batch, shuffle=True)


def tensors(batch: int, workers: int = 0) -> Callable[[Path], Any]:
    return lambda folder: DataLoader(
        TensorDataset(*rows()), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


def logging() -> None:
    """Do Python work on the host, outside the step."""
    in_python(300_000)


COPY_NEAR = ("remote_files", "throttled")
RUNS: Sequence[Run] = (
    Run("files on a slow drive", "data", COPY_NEAR, slow(file_loader, open_s=0.1, at_once=8), file_loader),
    Run("files on a slow drive, a longer step", "data", COPY_NEAR, slow(file_loader, open_s=0.15, at_once=8),
        file_loader, width=24),
    Run("files on a drive with low bandwidth", "data", COPY_NEAR, slow(file_loader, bandwidth=3e6), file_loader),
    Run("files on a slow drive, the step elsewhere", "data", COPY_NEAR, slow(file_loader, open_s=0.1, at_once=8),
        file_loader, elsewhere_s=0.004),
    Run("files on a drive with low bandwidth, the step elsewhere", "data", COPY_NEAR, slow(file_loader, bandwidth=3e6),
        file_loader, elsewhere_s=0.004),
    Run("torch's DataLoader of a slow drive", "data", COPY_NEAR, slow(lambda f: torch_files(f, 2), open_s=0.03),
        lambda f: torch_files(f, 2)),
    Run("torch's DataLoader of a slow drive, the step elsewhere", "data", COPY_NEAR,
        slow(lambda f: torch_files(f, 2), open_s=0.03), lambda f: torch_files(f, 2), elsewhere_s=0.004),
    Run("samples from a slow drive in processes", "data", COPY_NEAR,
        slow(lambda f: colabkit.Loader(Files(photos(f, 2400)), 16, shuffle=True), open_s=0.03),
        lambda f: colabkit.Loader(Files(photos(f, 2400)), 16, shuffle=True)),
    Run("samples from a slow drive in processes, the step elsewhere", "data", COPY_NEAR,
        slow(lambda f: colabkit.Loader(Files(photos(f, 2400)), 16, shuffle=True), open_s=0.03),
        lambda f: colabkit.Loader(Files(photos(f, 2400)), 16, shuffle=True), elsewhere_s=0.004),
    Run("a pack on a slow drive", "data", COPY_NEAR, slow(large_rows, bandwidth=12e6, direct_io=False), large_rows),
    Run("a pack on a slow drive, the step elsewhere", "data", COPY_NEAR,
        slow(large_rows, bandwidth=12e6, direct_io=False), large_rows, elsewhere_s=0.004),
    Run("decoding, a light step", "data", ("slow_decoding",), crops, raw(32)),
    Run("decoding, a longer step", "data", ("slow_decoding",), crops, raw(32), width=24),
    Run("decoding by one worker", "data", ("slow_decoding",), lambda f: crops(f, num_workers=1), raw(32)),
    Run("decoding by one worker, the step elsewhere", "data", ("more_workers",), lambda f: crops(f, num_workers=1),
        lambda f: crops(f, num_workers=2), elsewhere_s=0.005),
    Run("decoding, the step elsewhere", "data", ("slow_decoding",), crops, raw(32), elsewhere_s=0.002),
    Run("torch's DataLoader decodes", "data", ("slow_foreign",), lambda f: torch_files(f, 2), raw(16, 2400)),
    Run("torch's DataLoader decodes in the loop", "data", ("slow_foreign",), lambda f: torch_files(f, 0),
        raw(16, 2400)),
    Run("torch's DataLoader decodes, the step elsewhere", "data", ("slow_foreign",), lambda f: torch_files(f, 2),
        raw(16, 2400), elsewhere_s=0.004),
    Run("torch's DataLoader decodes in the loop, the step elsewhere", "data", ("slow_foreign",),
        lambda f: torch_files(f, 0), raw(16, 2400), elsewhere_s=0.004),
    Run("a transform in Python, in processes", "data", ("slow_transform",),
        lambda f: colabkit.Loader(SlowRows(30_000), 16, shuffle=True), arrays(16)),
    Run("a transform in Python, torch's DataLoader", "data", ("slow_foreign",),
        lambda f: DataLoader(SlowRows(30_000), 16, shuffle=True, num_workers=2, persistent_workers=True), arrays(16)),
    Run("a transform in Python, in processes, the step elsewhere", "data", ("slow_transform",),
        lambda f: colabkit.Loader(SlowRows(30_000), 16, shuffle=True), arrays(16), elsewhere_s=0.004),
    Run("a transform in Python, torch's DataLoader, the step elsewhere", "data", ("slow_foreign",),
        lambda f: DataLoader(SlowRows(30_000), 16, shuffle=True, num_workers=2, persistent_workers=True), arrays(16),
        elsewhere_s=0.004),
    Run("a transform in Python in the loop", "data", ("slow_foreign",),
        lambda f: DataLoader(SlowRows(30_000), 16, shuffle=True), arrays(16), width=24),
    Run("work between steps", "other", ("host_work",), arrays(32), on_step=logging, width=16),
    Run("work between steps, a pack", "other", ("host_work",), raw(32), on_step=logging, width=24),
    Run("tiny batches", "compute", ("tiny_batches",), arrays(2), arrays(16), width=2),
    Run("a slow step", "compute", (), raw(32), width=48),
    Run("a slow step, decoding beside it", "compute", (), lambda f: crops(f, num_workers=1), width=96),
    Run("other processes on the CPU", "host", ("others_on_the_cpu",), arrays(32), width=32,
        beside=busy_processes, is_mended_by_ending=True),
    Run("many other processes on the CPU", "host", ("others_on_the_cpu",), arrays(32), width=16,
        beside=lambda folder: busy_processes(folder, 6), is_mended_by_ending=True),
    Run("a thread that holds the GIL", "host", ("busy_thread",), arrays(32), width=8,
        beside=lambda folder: in_thread(hold_gil), is_mended_by_ending=True),
    Run("a thread that holds the GIL, torch's DataLoader", "host", ("busy_thread",), tensors(32), width=8,
        beside=lambda folder: in_thread(hold_gil), is_mended_by_ending=True),
    Run("a step that blocks", "host", ("blocked_step",), arrays(32), width=8, in_step=block),
    Run("a step that blocks, torch's DataLoader", "host", ("blocked_step",), tensors(32), width=8, in_step=block),
    Run("a lock held by another thread", "host", ("blocked_step",), arrays(32), width=8, in_step=take_lock,
        beside=lambda folder: in_thread(hold_lock)),
    Run("slow logging in the loop", "other", ("code_beside_torch",), arrays(32), width=8, in_step=log_in_loop),
    Run("a run that becomes slow", "host", ("slower_than_before",), arrays(32), width=8, in_step=become_slow,
        seconds=3 * SECONDS),
    Run("slow checkpoints in the loop", "host", ("long_pauses", "blocked_step"), arrays(32), width=8,
        in_step=save_often),
    Run("little memory", "compute", ("full_ram",), arrays(32), width=24, beside=little_memory),
    Run("clean: a thread that computes without the GIL", "compute", (), arrays(64), width=48,
        beside=lambda folder: in_thread(compute_freely)),
    Run("clean: threads of the loader", "compute", (), cached_files, width=48),
    Run("clean: tensors", "compute", (), arrays(64), width=24),
    Run("clean: a raw pack", "compute", (), raw(64), width=24),
    Run("clean: torch's DataLoader of tensors", "compute", (), tensors(64), width=32),
    Run("clean: files decoded once", "compute", (), cached_files, width=32),
)  # fmt: skip


def results_of(name: str, folder: Path, is_advice: bool = False) -> dict[str, Any]:
    """Return the results of a run or, with `is_advice`, of following its advice.

    Args:
        name: name of the run.
        folder: folder for data, which several runs may share.
        is_advice: whether to follow the advice.
    """
    run = next(run for run in RUNS if run.name == name)
    if is_on_drive(run) and not has_fuse():
        return {"name": run.name, "missing": "FUSE"}
    folder.mkdir(exist_ok=True)
    try:
        return (advice_of if is_advice else result_of)(run, folder)
    finally:
        unmount()


def is_on_drive(run: Run) -> bool:
    return "drive" in run.name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="bench-doctor-") as parent:
        print(json.dumps(results_of(sys.argv[1], Path(parent) / "data", "--advice" in sys.argv)))

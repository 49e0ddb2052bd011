"""Traces of runs with known bottlenecks for bench_doctor.py, as values of meters and telemetry."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from colabkit.foundation import HostSnapshot, LoaderFacts, MetersSnapshot, StepTimes
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis, Verdict
from colabkit.monitoring.diagnosing.verdict import Doctor

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from doctor_cases import FOREIGN, GATHERED, GIB, ON_GPU, QUIET, T4, part, spent_of

__all__ = ["TRACES", "Trace"]

STEPS = 400
HOST = replace(QUIET, cpus=2.0, cpu_rate=0.5, own_cpu_rate=0.45, busiest_core_rate=0.6)
FULL = replace(HOST, cpu_rate=0.99, own_cpu_rate=0.97, busiest_core_rate=1.0)


@dataclass(frozen=True)
class Trace:
    """A simulated run.

    Attributes:
        name: description of the bottleneck.
        verdict: the correct verdict.
        rule: the rule that must give advice; empty if none is expected.
        times: mean seconds that a step spends on waiting, copying, computing and other work.
        facts: facts about the loader.
        parts: name of each part of the loader, with its busy, waiting and CPU seconds and its bytes per sample.
        host: state of the machine.
        noise: standard deviation of each step's times, relative to their means.
        batches_at_once: number of batches that a loader yields together, so that only the first one is waited for.
        shape: function of a step's number and times that returns changed times.
        steps: number of steps.
        precision: precision of the step.
        passes: number of passes over the data.
        first_s: seconds to the first batch of each pass.
    """

    name: str
    verdict: Verdict
    rule: str
    times: tuple[float, float, float, float]
    facts: LoaderFacts = GATHERED
    parts: tuple[tuple[str, float, float, float, int], ...] = ()
    host: HostSnapshot = HOST
    noise: float = 0.1
    batches_at_once: int = 1
    shape: Callable[[int, StepTimes], StepTimes] = field(default=lambda _, step: step)
    steps: int = STEPS
    precision: str | None = None
    passes: int = 1
    first_s: float = 0.0

    def judge(self) -> Diagnosis:
        """Return the doctor's diagnosis after several observations."""
        doctor = Doctor(precision=self.precision)
        steps = [*self._steps()]
        found = None
        for stop in range(len(steps) // 4, len(steps) + 1, len(steps) // 4):
            found = doctor.look(self._spent(steps[:stop]), self.facts, [self.host] * 5)
        assert found is not None
        return found

    def _steps(self) -> Iterable[StepTimes]:
        draw = random.Random(self.name)
        batch = self.facts.batch_size or 64
        for number in range(self.steps):
            wait, copy, compute, other = (max(0.0, draw.gauss(mean, self.noise * mean)) for mean in self.times)
            wait = wait * self.batches_at_once if number % self.batches_at_once == 0 else 0.0
            is_first = number % (self.steps // self.passes) == 0
            wait += self.first_s if is_first else 0.0
            yield self.shape(number, StepTimes(wait, copy, compute, other, batch, is_first))

    def _spent(self, steps: list[StepTimes]) -> MetersSnapshot:
        samples = sum(step.samples for step in steps)
        parts = [
            replace(part(name, busy, cpu, wait, size, samples), calls=len(steps))
            for name, busy, wait, cpu, size in self.parts
        ]
        return spent_of(steps, passes=self.passes, ready=len(steps) // 2, parts=tuple(parts))


DECODED = LoaderFacts(
    "decoded", samples=50_000, batch_size=64, workers=2, encoding="encoded", tier="source", files=50_000
)
DRIVE = replace(DECODED, path="/content/drive/MyDrive/photos", is_remote=True)
WITH_T4 = replace(HOST, gpus=(T4,))


def late_every(steps: int, seconds: float) -> Callable[[int, StepTimes], StepTimes]:
    """Return a `shape` function that makes one of this many steps wait for this many seconds."""
    return lambda number, step: step._replace(wait_s=seconds) if number % steps == steps // 2 else step


TRACES = (
    Trace("clean, on the CPU", "compute", "", (0.0005, 0, 0.1, 0.001)),
    Trace("clean, with one slow step", "compute", "", (0.001, 0, 0.1, 0.001), noise=0.6),
    Trace("clean, on a GPU", "compute", "", (0.001, 0.0005, 0.1, 0.002), ON_GPU, host=WITH_T4, precision="fp16"),
    Trace("clean, a loader that yields 16 batches at once", "compute", "", (0.002, 0, 0.1, 0), batches_at_once=16),
    Trace("clean, with a checkpoint every 50 steps", "compute", "", (0.001, 0, 0.1, 0.001),
          shape=lambda number, step: step._replace(other_s=0.3) if number % 50 == 25 else step),
    Trace("not enough steps", "unknown", "", (0.09, 0, 0.01, 0), DRIVE, steps=40),
    Trace("Drive, many small files", "data", "remote_files_to_pack", (0.9, 0, 0.1, 0), DRIVE,
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000))),
    Trace("Drive, on a GPU", "data", "remote_files_to_pack", (0.5, 0.01, 0.1, 0.01), replace(DRIVE, device="cuda:0"),
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000)),
          replace(HOST, gpus=(replace(T4, utilization_rate=0.2),))),
    Trace("Drive, read by torch's DataLoader", "data", "remote_files", (0.9, 0, 0.1, 0),
          replace(FOREIGN, path="/content/drive/MyDrive/photos", is_remote=True)),
    Trace("Drive slows down", "data", "throttled", (0.4, 0, 0.1, 0), DRIVE,
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000)),
          shape=lambda number, step: step._replace(wait_s=step.wait_s * (1 + number / 50))),
    Trace("decoding on a full CPU", "data", "slow_decoding", (0.2, 0, 0.1, 0), DECODED,
          (("read", 0.0001, 0, 0, 100_000), ("decode", 0.009, 0, 0.005, 150_000)), FULL),
    Trace("decoding by one worker of two", "data", "more_workers", (0.2, 0, 0.1, 0), replace(DECODED, workers=1),
          (("decode", 0.0045, 0, 0.0044, 150_000),)),
    Trace("a transform in Python", "data", "slow_transform", (0.3, 0, 0.1, 0),
          replace(DECODED, kind="processes", encoding="python"), (("samples", 0.012, 0, 0.006, 0),), FULL),
    Trace("torch's DataLoader on a full CPU", "data", "slow_foreign", (0.3, 0, 0.1, 0), FOREIGN, host=FULL),
    Trace("a slow disk", "data", "slow_disk", (0.3, 0, 0.1, 0),
          replace(ON_GPU, device="cpu", sample_bytes=150_528.0, tier="disk"), (("gather", 0.004, 0, 0, 150_528),),
          replace(HOST, storage_read_bytes_per_s=24e6, io_stall_rate=0.7, cpu_rate=0.3)),
    Trace("each epoch starts slowly", "compute", "slow_start", (0.001, 0, 0.1, 0),
          replace(FOREIGN, keeps_workers=False), passes=8, first_s=3.0),
    Trace("a few long waits", "compute", "bursts", (0.0, 0, 0.1, 0), shape=late_every(100, 2.0)),
    Trace("copies out of pageable memory", "copy", "pageable_copies", (0.005, 0.05, 0.1, 0.002),
          replace(ON_GPU, is_pinned=False), host=WITH_T4, precision="fp16"),
    Trace("logging in every step", "other", "host_work", (0.001, 0, 0.1, 0.06)),
    Trace("float32 on tensor cores", "compute", "no_mixed_precision", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=WITH_T4, precision="fp32"),
    Trace("kernels too short", "compute", "launches", (0.0001, 0, 0.004, 0.0001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, utilization_rate=0.3),)), precision="fp16"),
    Trace("the GPU is not used", "compute", "wrong_device", (0.001, 0, 0.5, 0.001),
          host=replace(FULL, gpus=(replace(T4, utilization_rate=0.0, torch_bytes=None, used_bytes=GIB),))),
    Trace("a hot GPU", "compute", "slowed_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, slowed_by=("heat",)),)), precision="fp16"),
    Trace("RAM nearly full", "compute", "full_ram", (0.001, 0, 0.1, 0.001),
          host=replace(HOST, ram_used_bytes=11 * GIB, tmpfs_bytes=6 * GIB)),
    Trace("other processes on the CPU", "compute", "others_on_the_cpu", (0.001, 0, 0.1, 0.001),
          host=replace(FULL, own_cpu_rate=0.5)),
)  # fmt: skip
"""Each trace is diagnosed separately; about half are GPU runs."""

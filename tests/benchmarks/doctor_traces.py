"""Traces of runs with known bottlenecks for bench_doctor.py, as values of meters and telemetry."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colabkit.foundation import BusyProcess, HostSnapshot, LoaderFacts, MetersSnapshot, StepTimes
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis, Verdict
from colabkit.monitoring.diagnosing.verdict import Doctor

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
from doctor_cases import (
    ASLEEP,
    COMPUTES,
    FOREIGN,
    GATHERED,
    GIB,
    HELD_BY_THREAD,
    LOGS,
    ON_GPU,
    QUIET,
    SLEEPS,
    T4,
    THREADS,
    epochs_of,
    part,
    spent_of,
    stretches_of,
    with_threads,
)

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
        parts: for each part of the loader, its name, its busy, waiting and CPU seconds, and its bytes per sample.
        host: state of the machine.
        noise: standard deviation of each step's times, relative to their means.
        batches_at_once: number of batches that a loader yields together, so that only the first one is waited for.
        shape: function of a step's number and times that returns changed times.
        steps: number of steps.
        precision: precision of the step.
        passes: number of passes over the data.
        first_s: seconds to the first batch of each pass.
        cpu: share of the step and of other work in which the training thread is on a CPU; None if not measured.
        more: other meters.
        epochs: values of the complete epochs.
        values: newest values of a step.
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
    cpu: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    epochs: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    values: Mapping[str, float] = field(default_factory=dict)

    def judge(self) -> Diagnosis:
        """Return the doctor's diagnosis after several observations."""
        doctor = Doctor(precision=self.precision)
        doctor.epochs, doctor.values = self.epochs, self.values
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
            cpu_s = None if self.cpu is None else self.cpu * (compute + other)
            yield self.shape(number, StepTimes(wait, copy, compute, other, batch, is_first, cpu_s))

    def _spent(self, steps: list[StepTimes]) -> MetersSnapshot:
        samples = sum(step.samples for step in steps)
        parts = [
            replace(part(name, busy, cpu, wait, size, samples), calls=len(steps))
            for name, busy, wait, cpu, size in self.parts
        ]
        return spent_of(steps, passes=self.passes, ready=len(steps) // 2, parts=tuple(parts), **self.more)


DECODED = LoaderFacts(
    "decoded", samples=50_000, batch_size=64, workers=2, encoding="encoded", tier="source", files=50_000
)
DRIVE = replace(DECODED, path="/content/drive/MyDrive/photos", is_remote=True)
WITH_T4 = replace(HOST, gpus=(T4,))


def late_every(steps: int, seconds: float) -> Callable[[int, StepTimes], StepTimes]:
    """Return a `shape` function that makes one step out of `steps` wait for `seconds` seconds."""
    return lambda number, step: step._replace(wait_s=seconds) if number % steps == steps // 2 else step


def long_every(steps: int, seconds: float) -> Callable[[int, StepTimes], StepTimes]:
    """Return a `shape` function that makes one step out of `steps` take `seconds` seconds."""
    return lambda number, step: step._replace(compute_s=seconds) if number % steps == steps // 2 else step


# In a user's own loop on a CPU, all work on a batch counts as the step.
LOOP = (0.0005, 0, 0.1, 0)
SHARED = replace(FULL, own_cpu_rate=0.4)
FALLING = [0.8**epoch for epoch in range(8)]

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
    Trace("torch's DataLoader with pageable memory", "compute", "pageable_copies", (0.001, 0, 0.1, 0.002),
          replace(FOREIGN, device="cuda:0", is_pinned=False), host=WITH_T4, precision="fp16"),
    Trace("logging in every step", "other", "host_work", (0.001, 0, 0.1, 0.06)),
    Trace("float32 on tensor cores", "compute", "no_mixed_precision", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=WITH_T4, precision="fp32"),
    Trace("kernels too short", "compute", "launches", (0.0001, 0, 0.004, 0.0001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, utilization_rate=0.3),)), precision="fp16", steps=800),
    Trace("the GPU is not used", "compute", "wrong_device", (0.001, 0, 0.5, 0.001),
          host=replace(FULL, gpus=(replace(T4, utilization_rate=0.0, torch_bytes=None, used_bytes=GIB),))),
    Trace("a hot GPU", "compute", "slowed_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, slowed_by=("heat",)),)), precision="fp16"),
    Trace("RAM nearly full", "compute", "full_ram", (0.001, 0, 0.1, 0.001),
          host=replace(HOST, ram_used_bytes=11 * GIB, tmpfs_bytes=6 * GIB)),
    Trace("other processes on the CPU", "host", "others_on_the_cpu", (0.001, 0, 0.1, 0.001),
          host=replace(FULL, own_cpu_rate=0.5)),
    # Data bottlenecks.
    Trace("Drive, few large files", "data", "remote_files", (0.5, 0, 0.1, 0), replace(DRIVE, files=4),
          (("read", 0.02, 0, 0, 900_000), ("decode", 0.001, 0.02, 0.001, 150_000))),
    Trace("Drive, barely too slow", "data", "remote_files_to_pack", (0.04, 0, 0.1, 0), DRIVE,
          (("read", 0.02, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000))),
    Trace("Drive, fast enough", "compute", "", (0.002, 0, 0.1, 0), DRIVE,
          (("read", 0.002, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000))),
    Trace("decoding on a full CPU, beside a GPU", "data", "slow_decoding", (0.2, 0.001, 0.05, 0),
          replace(DECODED, device="cuda:0"),
          (("read", 0.0001, 0, 0, 100_000), ("decode", 0.009, 0, 0.005, 150_000)),
          replace(FULL, gpus=(replace(T4, utilization_rate=0.3),))),
    Trace("decoding, with batches in bursts", "data", "slow_decoding", (0.1, 0, 0.1, 0), DECODED,
          (("decode", 0.009, 0, 0.005, 150_000),), FULL, batches_at_once=8),
    Trace("decoding, while the loop is also asleep for data", "data", "slow_decoding", (0.3, 0, 0.1, 0), DECODED,
          (("decode", 0.009, 0, 0.005, 150_000),),
          with_threads(THREADS, FULL, training_cpu_rate=0.25, busiest_thread="colabkit-loader-0",
                       busiest_thread_rate=0.95), cpu=0.95),
    Trace("threads of the loader hold the GIL", "data", "slow_decoding", (0.2, 0, 0.1, 0), DECODED,
          (("decode", 0.009, 0, 0.009, 150_000),),
          with_threads(HELD_BY_THREAD, FULL, busiest_thread="colabkit-loader-0"), cpu=0.3),
    Trace("torch's DataLoader with too many workers", "data", "too_many_workers", (0.3, 0, 0.1, 0),
          replace(FOREIGN, workers=16), host=FULL),
    Trace("torch's DataLoader without workers", "data", "slow_foreign", (0.3, 0, 0.1, 0), replace(FOREIGN, workers=0),
          host=with_threads(THREADS), cpu=0.98),
    Trace("torch's DataLoader, fast enough", "compute", "", (0.003, 0, 0.1, 0), FOREIGN, host=with_threads(THREADS),
          cpu=0.98),
    Trace("samples made in Python, on a GPU", "data", "slow_transform", (0.3, 0.001, 0.05, 0),
          replace(DECODED, kind="processes", encoding="python", device="cuda:0"), (("samples", 0.012, 0, 0.006, 0),),
          replace(FULL, gpus=(replace(T4, utilization_rate=0.2),))),
    Trace("a cache that is too small", "data", "cache_too_small", (0.3, 0, 0.1, 0),
          replace(ON_GPU, device="cpu", path="/data/p.h5", is_remote=False, sample_bytes=300_000.0, tier="disk",
                  shuffle=True),
          (("gather", 0.004, 0, 0, 300_000),),
          replace(HOST, storage_read_bytes_per_s=48e6, io_stall_rate=0.7, cpu_rate=0.3), passes=2),
    # Copies, the step and the GPU.
    Trace("slow copies from pinned memory", "copy", "slow_copies", (0.005, 0.05, 0.1, 0.002), ON_GPU,
          (("transfer", 0.001, 0, 0, 150_528),), WITH_T4, precision="fp16"),
    Trace("copies that overlap", "compute", "", (0.001, 0.002, 0.1, 0.001), ON_GPU,
          (("transfer", 0.001, 0, 0, 150_528),), WITH_T4, precision="fp16"),
    Trace("tiny batches", "compute", "tiny_batches", (0.00005, 0, 0.002, 0), replace(GATHERED, batch_size=4)),
    Trace("a full GPU", "compute", "full_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, used_bytes=15 * GIB),)), precision="fp16"),
    Trace("room on the GPU", "compute", "room_on_the_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, used_bytes=4 * GIB, utilization_rate=0.7),)), precision="fp16"),
    Trace("a lost GPU", "compute", "lost_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, is_lost=True),)), precision="fp16"),
    Trace("others on the GPU", "compute", "others_on_the_gpu", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=replace(HOST, gpus=(replace(T4, torch_bytes=GIB, torch_reserved_bytes=2 * GIB),)), precision="fp16"),
    Trace("reading values on a GPU in every step", "other", "host_work", (0.001, 0, 0.05, 0.03), ON_GPU,
          host=WITH_T4, precision="fp16"),
    Trace("the disk is nearly full", "compute", "full_disk", (0.001, 0, 0.1, 0.001),
          host=replace(HOST, disk_free_bytes=GIB)),
    Trace("/dev/shm is nearly full", "compute", "full_shm", (0.001, 0, 0.1, 0.001), FOREIGN,
          host=replace(HOST, shm_free_bytes=GIB // 10)),
    # Host bottlenecks.
    Trace("clean, torch computes in several threads", "compute", "", LOOP, host=with_threads(THREADS, FULL), cpu=0.97),
    Trace("clean, the thread that trains waits for torch's other threads", "compute", "", LOOP,
          host=with_threads(THREADS, FULL, training_cpu_rate=0.6, compute_cpus=1.3), cpu=0.6),
    Trace("clean, the GPU computes while the thread sleeps", "compute", "", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=with_threads(ASLEEP, WITH_T4), precision="fp16"),
    Trace("clean, another thread is busy without the GIL", "compute", "", LOOP,
          host=with_threads(THREADS, HOST, busiest_thread="prefetcher", busiest_thread_rate=0.9), cpu=0.96),
    Trace("clean, threads of the loader are busy", "compute", "", LOOP,
          host=with_threads(THREADS, HOST, busiest_thread="colabkit-loader-0", busiest_thread_rate=0.9), cpu=0.96),
    Trace("clean, other processes on idle CPUs", "compute", "", LOOP,
          host=with_threads(THREADS, replace(HOST, cpus=16.0, cpu_rate=0.6, own_cpu_rate=0.1)), cpu=0.97),
    Trace("clean, logging in every hundredth step", "compute", "", LOOP,
          host=with_threads(THREADS, spots=(COMPUTES, LOGS._replace(samples=1))), cpu=0.97),
    Trace("clean, nothing is known of the threads", "compute", "", LOOP, cpu=0.97),
    Trace("clean, a run that has become faster", "compute", "", LOOP, cpu=0.97,
          more={"stretches": stretches_of(0.4, 0.2, 0.1)}),
    Trace("clean, the speed varies", "compute", "", LOOP, cpu=0.97, noise=0.3,
          more={"stretches": stretches_of(0.08, 0.12, 0.09, 0.11)}),
    Trace("clean, short validations and checkpoints", "compute", "", LOOP, cpu=0.97,
          more={"validate_s": 5.0, "save_s": 1.0}),
    Trace("a thread holds the GIL", "host", "busy_thread", LOOP, host=with_threads(HELD_BY_THREAD), cpu=0.2),
    Trace("a thread holds the GIL, half of the time", "host", "busy_thread", LOOP,
          host=with_threads(HELD_BY_THREAD, training_cpu_rate=0.5), cpu=0.5),
    Trace("a thread holds the GIL in a loop over torch's DataLoader", "host", "busy_thread", LOOP, FOREIGN,
          host=with_threads(HELD_BY_THREAD), cpu=0.3),
    Trace("a step sleeps", "host", "blocked_step", LOOP, host=with_threads(ASLEEP), cpu=0.2),
    Trace("a step sleeps, without samples of its stack", "host", "blocked_step", LOOP,
          host=with_threads(ASLEEP, spots=()), cpu=0.2),
    Trace("a step sleeps, and nothing is known of the threads", "host", "blocked_step", LOOP, cpu=0.2),
    Trace("a step sleeps a quarter of the time", "host", "blocked_step", LOOP,
          host=with_threads(ASLEEP, training_cpu_rate=0.7), cpu=0.7),
    Trace("a step beside an idle GPU sleeps", "host", "blocked_step", (0.001, 0, 0.1, 0.001), ON_GPU,
          host=with_threads(ASLEEP, replace(HOST, gpus=(replace(T4, utilization_rate=0.1),))), precision="fp16"),
    Trace("a lock that another thread holds", "host", "blocked_step", LOOP,
          host=with_threads(ASLEEP, spots=(SLEEPS._replace(place="train.py:40 in step", text="with lock:"),)), cpu=0.3),
    Trace("on_step sleeps", "other", "host_work", (0.001, 0, 0.05, 0.05), host=with_threads(ASLEEP), cpu=0.6),
    Trace("logging in the loop", "other", "code_beside_torch", LOOP, host=with_threads(THREADS, spots=(LOGS, COMPUTES)),
          cpu=0.97),
    Trace("Python code in the loop", "other", "code_beside_torch", LOOP,
          host=with_threads(THREADS, spots=(LOGS._replace(kind="python"), COMPUTES)), cpu=0.97),
    Trace("logging in the loop, a third of the time", "other", "code_beside_torch", LOOP,
          host=with_threads(THREADS, spots=(COMPUTES, LOGS._replace(samples=10))), cpu=0.97),
    Trace("other processes, seen by waits for a CPU", "host", "others_on_the_cpu", LOOP,
          host=with_threads(THREADS, SHARED, training_cpu_rate=0.5, training_held_rate=0.5, held_rate=0.5), cpu=0.5),
    Trace("other processes hold torch's threads up", "host", "others_on_the_cpu", LOOP,
          host=with_threads(THREADS, SHARED, held_rate=0.4), cpu=0.97),
    Trace("one named other process", "host", "others_on_the_cpu", LOOP,
          host=replace(SHARED, other_process=BusyProcess("python other.py, PID 4711", 1.9)), cpu=0.4),
    Trace("a used CPU quota", "host", "lost_cpu", LOOP, host=replace(HOST, throttled_rate=0.5), cpu=0.5),
    Trace("a hypervisor takes the CPU", "host", "lost_cpu", LOOP, host=replace(HOST, steal_rate=0.35), cpu=0.6),
    Trace("long pauses in the loop", "host", "long_pauses", LOOP, cpu=0.97, shape=long_every(50, 4.0)),
    Trace("checkpoints in every tenth step", "host", "slow_checkpoints", (0.001, 0, 0.1, 0.001), cpu=0.97,
          shape=lambda number, step: step._replace(other_s=0.6) if number % 10 == 5 else step,
          more={"save_s": 24.0}),
    Trace("validation longer than training", "host", "slow_validation", LOOP, cpu=0.97, more={"validate_s": 90.0}),
    Trace("three times slower than at first", "host", "slower_than_before", LOOP, cpu=0.97,
          more={"stretches": stretches_of(0.033, 0.033, 0.1, 0.1)}),
    Trace("ever slower", "host", "slower_than_before", LOOP, cpu=0.97,
          more={"stretches": stretches_of(0.02, 0.03, 0.04, 0.06, 0.08, 0.1)}),
    Trace("slower since other processes run", "host", "others_on_the_cpu", LOOP,
          host=with_threads(THREADS, SHARED, held_rate=0.5), cpu=0.5,
          more={"stretches": stretches_of(0.04, 0.04, 0.1)}),
    Trace("slower since Drive became slow", "data", "throttled", (0.4, 0, 0.1, 0), DRIVE,
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000)),
          shape=lambda number, step: step._replace(wait_s=step.wait_s * (1 + number / 50)),
          more={"stretches": stretches_of(0.5, 1.5)}),
    Trace("slower since a mount became slow long ago", "data", "throttled", (0.4, 0, 0.1, 0), DRIVE,
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000)),
          more={"stretches": stretches_of(0.1, 0.1, 0.5, 0.5)}),
    Trace("a mount that is equally slow all the time", "data", "remote_files_to_pack", (0.4, 0, 0.1, 0), DRIVE,
          (("read", 0.05, 0, 0, 20_000), ("decode", 0.001, 0.02, 0.001, 150_000)),
          more={"stretches": stretches_of(0.5, 0.5, 0.5)}),
    Trace("another rank waits for its data", "host", "straggler", LOOP, cpu=0.5,
          more={"rank_waits": (0.01, 0.02, 0.5, 0.01)}),
    Trace("another of two ranks waits for its data", "host", "straggler", LOOP, cpu=0.97,
          more={"rank_waits": (0.01, 0.4)}),
    Trace("the slowest rank itself", "data", "slow_decoding", (0.2, 0, 0.1, 0), DECODED,
          (("decode", 0.009, 0, 0.005, 150_000),), FULL, more={"rank_waits": (0.66, 0.01)}),
    Trace("clean, ranks wait equally little", "compute", "", LOOP, cpu=0.97, more={"rank_waits": (0.01, 0.04)}),
    # Training curves.
    Trace("clean, the losses fall", "compute", "", LOOP, epochs=epochs_of(loss=FALLING, val_loss=FALLING)),
    Trace("clean, a noisy loss", "compute", "", LOOP, epochs=epochs_of(loss=[1.0, 0.6, 0.7, 0.5, 0.55, 0.45, 0.4])),
    Trace("a loss of NaN", "compute", "not_finite", LOOP, values={"loss": float("nan")}),
    Trace("a validation loss of NaN", "compute", "not_finite", LOOP,
          epochs=epochs_of(loss=FALLING, val_loss=[*FALLING[:-1], float("nan")])),
    Trace("the loss diverges", "compute", "divergence", LOOP,
          epochs=epochs_of(loss=[1.0, 0.5, 0.3, 0.5, 0.9, 1.7, 3.0, 9.0])),
    Trace("overfitting", "compute", "overfitting", LOOP,
          epochs=epochs_of(loss=FALLING, val_loss=[1.0, 0.8, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2])),
    Trace("a plateau", "compute", "plateau", LOOP, epochs=epochs_of(loss=[1.0, 0.5] + [0.499] * 10)),
)  # fmt: skip
"""Each trace is diagnosed separately; about half are GPU runs."""

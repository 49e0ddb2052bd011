"""Predict the speed after a fix, which is at most the speed of the slowest remaining part.

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021). The
costs of the step and of the loader's workers come from the run itself. Costs that a fix adds are measured on this
machine when they are first needed: gathering rows, and opening a cached file.

On the CPU, a step competes with its loader. A multithreaded step stalls while a worker occupies one of its cores,
threads that need the GIL run one at a time, and worker processes get the cores that the step leaves idle. The model
therefore assumes that the step and the loader take turns on the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from colabkit.monitoring.diagnosing.diagnosis import HIGH
from colabkit.monitoring.diagnosing.run_profile import RunProfile, settled_steps

_LEAST_SHARE = 0.2
# Relative error of the loader's measured costs.
_COST_ERROR = 0.25
# Relative error of `headspace()` measurements of a step on the CPU.
_STEP_ERROR = 0.1
_STRETCHES, _LEAST_SPREAD, _MOST_SPREAD = 16, 0.1, 0.5
_PROBE_BYTES, _PROBE_ROWS, _PROBES = 16 << 20, 1 << 16, 5
_PROBE_FILES = 16
# Size in bytes of an int64 value; rows are gathered as int64 values.
_WORD = 8


@dataclass(frozen=True)
class Forecast:
    """The costs of a step and of its loader, each without the other.

    Attributes:
        samples: samples per step.
        step_s: seconds of the step and its other host work, without a loader.
        held_s: seconds of `step_s` during which the step needs the CPU.
        cpu_s: CPU seconds that the loader's workers take per sample.
        wall_s: seconds that a worker takes per sample, without a step.
        workers: number of workers.
        cpus: number of CPUs that this process may use.
        are_threads: whether the workers are threads of the process that runs the step.
        local_read_s: CPU seconds to read a sample's file once it is local; 0 if `cpu_s` includes reading.
        turns: share of the CPU work of the step and the loader that cannot overlap, in [0, 1].
        scale: factor by which the loader's costs are multiplied.
    """

    samples: int
    step_s: float
    held_s: float
    cpu_s: float
    wall_s: float
    workers: int
    cpus: float
    are_threads: bool = False
    local_read_s: float = 0.0
    turns: float = 1.0
    scale: float = 1.0

    def samples_per_s(
        self,
        *,
        cpu_s: float | None = None,
        wall_s: float | None = None,
        workers: int | None = None,
        here_s: float = 0.0,
        saved_s: float = 0.0,
    ) -> float:
        """Predict the samples per second after some of the costs change.

        Args:
            cpu_s: new CPU seconds per sample; None for the current value.
            wall_s: new seconds that a worker takes per sample; None for the current value.
            workers: new number of workers; None for the current value.
            here_s: seconds per batch that the loader works in the step's thread.
            saved_s: seconds by which each step becomes shorter.
        """
        cpu_s = (self.cpu_s if cpu_s is None else cpu_s) * self.scale
        wall_s = max(cpu_s, (self.wall_s if wall_s is None else wall_s) * self.scale)
        workers = max(1, self.workers if workers is None else workers)
        alone_s = max(self.step_s - saved_s, 1e-9) + here_s
        held_s = min(max(0.0, self.held_s - saved_s) + here_s, alone_s)
        lanes = min(workers, self.cpus)
        if self.are_threads and lanes > 1:
            lanes = 1 + (lanes - 1) * (1 - held_s / alone_s)
        elif lanes > 1:
            lanes = min(lanes, max(1.0, self.cpus - held_s / alone_s))
        in_turns_s = self.turns * held_s + self.samples * cpu_s / lanes
        return self.samples / max(alone_s, self.samples * wall_s / workers, in_turns_s if cpu_s else 0.0)

    def without_loader(self) -> float:
        """Return the samples per second if data were always ready."""
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0)

    def from_rows(self, row_bytes: float | None) -> float:
        """Return the samples per second with rows in memory, at the measured gathering speed."""
        gather_s = self.samples * row_bytes / gather_bytes_per_s(row_bytes) if row_bytes else 0.0
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0, here_s=gather_s)

    def from_local_files(self) -> float:
        """Return the samples per second with files on the local disk, in the page cache.

        The prediction uses the measured CPU time per sample, which may be too high, since workers that wait for each
        file run with cold CPU caches.
        """
        near_s = self.cpu_s + self.local_read_s
        return self.samples_per_s(cpu_s=near_s, wall_s=near_s)


Prediction: TypeAlias = tuple[float, float, float]
"""A predicted speed in samples per second: expected, lower limit and upper limit."""


def predict_speed(run: RunProfile, speed_of: Callable[[Forecast], float]) -> Prediction:
    """Return the speed of a run after a fix.

    Args:
        run: profile of the run.
        speed_of: function that returns the speed after the fix for given costs.
    """
    usual, noise = forecast_run(run), spread(run)
    least_s, most_s = _limits_of_step(run)
    fastest = replace(
        usual,
        step_s=min(usual.step_s, least_s),
        held_s=min(usual.held_s, least_s),
        scale=1 - _COST_ERROR,
        turns=0.0,
    )
    slowest = replace(usual, step_s=max(usual.step_s, most_s), scale=1 + _COST_ERROR)
    expected = speed_of(usual)
    low, high = speed_of(slowest) / (1 + noise), speed_of(fastest) * (1 + noise)
    return expected, min(expected, low), max(expected, high)


def _limits_of_step(run: RunProfile) -> tuple[float, float]:
    """Return the shortest and the longest seconds that the step may take without its loader."""
    others_s = run.step.other_s + run.step.copy_s + run.at_last_s * run.step.samples
    if run.is_on_gpu:
        return run.alone_s + others_s, run.alone_s + others_s
    if run.measured_alone_s is not None:
        return run.alone_s * (1 - _STEP_ERROR) + others_s, run.alone_s * (1 + _STEP_ERROR) + others_s
    least_s = min(run.quick_s, run.alone_s) / cold_factor(run.shares.wait)
    return least_s + others_s, max(run.step.compute_s, run.alone_s) + others_s


def cold_factor(waiting: float) -> float:
    """Return the maximum factor by which waits slow the rest of a step down, since they leave the CPU's caches cold.

    In measurements, steps that waited for nearly all of their time were up to twice as fast without waits.

    Args:
        waiting: share of the time of a step that it waits, in [0, 1].
    """
    return 1 + waiting if waiting >= HIGH else 1.0


def spread(run: RunProfile) -> float:
    """Return the relative variation of the speed of similar steps, including the effect of other processes."""
    others = min(_MOST_SPREAD, (run.machine.foreign_cpus or 0.0) / run.machine.cpus)
    steps = settled_steps(run.spent.recent)
    size = max(1, len(steps) // _STRETCHES)
    starts = range(0, len(steps) - size + 1, size)
    stretches = sorted(sum(step.seconds for step in steps[at : at + size]) for at in starts)
    if len(stretches) < _STRETCHES // 2 or not stretches[0]:
        return _LEAST_SPREAD + others
    low, high = stretches[len(stretches) // 10], stretches[-1 - len(stretches) // 10]
    return min(_MOST_SPREAD, max(_LEAST_SPREAD, math.sqrt(high / low) - 1)) + others


def forecast_run(run: RunProfile) -> Forecast:
    """Estimate the separate costs of the step and the loader from a run in which both were active."""
    step, cpus = run.step, max(run.machine.cpus, 1e-3)
    loader_cpu_s = run.cpu_s or 0.0
    own_s = run.alone_s + step.other_s + run.at_last_s * step.samples
    held_s = step.other_s if run.is_on_gpu else own_s
    if run.machine.own_cpu_rate is not None and not run.is_on_gpu:
        own_cpu_s = run.machine.own_cpu_rate * cpus * step.seconds
        held_s = min(own_s, max(0.0, own_cpu_s - step.samples * loader_cpu_s))
    return Forecast(
        samples=step.samples,
        step_s=own_s + step.copy_s,
        held_s=held_s,
        cpu_s=loader_cpu_s,
        wall_s=max(loader_cpu_s, run.worker_s * _share_of_cpu(run)),
        workers=run.facts.workers or 1,
        cpus=cpus,
        are_threads=run.facts.kind in ("decoded", "gathered"),
        local_read_s=file_read_s() if run.facts.kind == "decoded" and run.facts.is_remote else 0.0,
    )


def _share_of_cpu(run: RunProfile) -> float:
    """Return the share of a core that a runnable thread got, in (0, 1]."""
    if not run.is_cpu_full:
        return 1.0
    busy_s = sum(part.busy_s for part in run.spent.parts if part.cpu_s)
    cpu_s = sum(part.cpu_s for part in run.spent.parts)
    return min(1.0, max(_LEAST_SHARE, cpu_s / busy_s)) if busy_s else 1.0


def gather_bytes_per_s(row_bytes: float) -> float:
    """Return the bytes per second at which this machine gathers rows of about this size in random order.

    The first call for a size measures the rate, which takes about 10 ms.
    """
    words = max(1, -(-int(row_bytes) // _WORD))
    return _gathered_bytes_per_s(min(1 << (words - 1).bit_length(), _PROBE_BYTES // _WORD // 4))


@cache
def _gathered_bytes_per_s(words: int) -> float:
    # Import torch here, since the panel loads this module without torch.
    import torch

    rows = torch.ones((min(_PROBE_ROWS, _PROBE_BYTES // _WORD // words), words), dtype=torch.int64, device="cpu")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")
    batch = torch.empty_like(rows)
    took_s = []
    for _ in range(_PROBES):
        began_s = time.perf_counter()
        torch.index_select(rows, 0, order, out=batch)
        took_s.append(time.perf_counter() - began_s)
    return batch.numel() * _WORD / max(min(took_s), 1e-9)


@cache
def file_read_s() -> float:
    """Return the CPU seconds for opening and reading a small file in the page cache, measured once."""
    took_s = []
    for _ in range(_PROBES):
        began_s = time.thread_time()
        for _ in range(_PROBE_FILES):
            try:
                Path(__file__).read_bytes()
            except OSError:
                # The package is not in a folder; it may have been imported from a zip file.
                return 0.0
        took_s.append((time.thread_time() - began_s) / _PROBE_FILES)
    return min(took_s)

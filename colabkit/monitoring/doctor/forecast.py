"""Predict the speed after a fix: at most that of the slowest part which remains.

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021). What
the step and the loader's workers cost comes from the run itself. What a fix adds is measured on this machine when a
rule first needs it: how fast rows are gathered, and what opening a cached file costs. Caches and memory bandwidth that
step and loader share are not modelled, so a prediction is an upper bound, and users read "up to".

A step on the CPU competes with its own loader: a step of several threads stands still while a worker has one of its
cores, threads that need Python's lock run one at a time beside it, and worker processes get the cores that the step
leaves. So on the CPU the two take turns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from colabkit.monitoring.doctor.run_profile import RunProfile

_LEAST_SHARE = 0.2
_PROBE_BYTES, _PROBE_ROWS, _PROBES = 16 << 20, 1 << 16, 5
_PROBE_FILES = 16
_WORD = 8  # bytes


@dataclass(frozen=True)
class Forecast:
    """What a step takes alone, and what its loader costs.

    Attributes:
        samples: of a step.
        step_s: seconds of the step with its other work, alone on the machine.
        held_s: of these, seconds in which it needs the CPU.
        cpu_s: seconds of a CPU that the loader's workers take for a sample.
        wall_s: seconds of a worker for a sample, alone on the machine.
        workers: how many there are.
        cpus: how many CPUs may be used.
        are_threads: whether the workers are threads of the step's process.
        near_read_s: seconds of a CPU to read a sample's file once it is local; 0 where workers read it already.
    """

    samples: int
    step_s: float
    held_s: float
    cpu_s: float
    wall_s: float
    workers: int
    cpus: float
    are_threads: bool = False
    near_read_s: float = 0.0

    def samples_per_s(
        self,
        *,
        cpu_s: float | None = None,
        wall_s: float | None = None,
        workers: int | None = None,
        here_s: float = 0.0,
        saved_s: float = 0.0,
    ) -> float:
        """Return the speed with a loader that costs something else.

        Args:
            cpu_s: seconds of a CPU for a sample; None for as much as now.
            wall_s: seconds of a worker for a sample; None likewise.
            workers: how many; None likewise.
            here_s: seconds for a batch in the thread of the step.
            saved_s: seconds that the step itself gets shorter.
        """
        cpu_s = self.cpu_s if cpu_s is None else cpu_s
        wall_s = max(cpu_s, self.wall_s if wall_s is None else wall_s)
        workers = max(1, self.workers if workers is None else workers)
        alone_s = max(self.step_s - saved_s, 1e-9) + here_s
        held_s = min(max(0.0, self.held_s - saved_s) + here_s, alone_s)
        lanes = min(workers, self.cpus)
        if self.are_threads and lanes > 1:
            lanes = 1 + (lanes - 1) * (1 - held_s / alone_s)
        elif lanes > 1:
            lanes = min(lanes, max(1.0, self.cpus - held_s / alone_s))
        in_turns_s = held_s + self.samples * cpu_s / lanes
        return self.samples / max(alone_s, self.samples * wall_s / workers, in_turns_s if cpu_s else 0.0)

    def without_loader(self) -> float:
        """Return the speed if data were always ready."""
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0)

    def from_rows(self, row_bytes: float | None) -> float:
        """Return the speed from rows in memory, which this machine gathers as fast as it was measured to."""
        gather_s = self.samples * row_bytes / gather_bytes_per_s(row_bytes) if row_bytes else 0.0
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0, here_s=gather_s)

    def from_near_files(self) -> float:
        """Return the speed when files are read from the local disk, which is cached.

        The workers' CPU time for a sample is the measured one. Workers that wait for each file run with cold CPU
        caches, so local files may cost them less.
        """
        near_s = self.cpu_s + self.near_read_s
        return self.samples_per_s(cpu_s=near_s, wall_s=near_s)


def forecast_run(run: RunProfile) -> Forecast:
    """Return what a step takes alone, by what was measured while a loader ran beside it."""
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
        near_read_s=file_read_s() if run.facts.kind == "decoded" and run.facts.is_far else 0.0,
    )


def _share_of_cpu(run: RunProfile) -> float:
    """Return the share of a core that a thread got when it wanted one, in (0, 1]."""
    if not run.is_cpu_full:
        return 1.0
    busy_s = sum(part.busy_s for part in run.spent.parts if part.cpu_s)
    cpu_s = sum(part.cpu_s for part in run.spent.parts)
    return min(1.0, max(_LEAST_SHARE, cpu_s / busy_s)) if busy_s else 1.0


def gather_bytes_per_s(row_bytes: float) -> float:
    """Return how fast this machine gathers rows of about this size in a random order: measured once, in some 10 ms."""
    words = max(1, -(-int(row_bytes) // _WORD))
    return _gathered_bytes_per_s(min(1 << (words - 1).bit_length(), _PROBE_BYTES // _WORD // 4))


@cache
def _gathered_bytes_per_s(words: int) -> float:
    import torch  # a panel is loaded without it

    rows = torch.ones((min(_PROBE_ROWS, _PROBE_BYTES // _WORD // words), words), dtype=torch.int64)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    batch = torch.empty_like(rows)
    took_s = []
    for _ in range(_PROBES):
        began_s = time.perf_counter()
        torch.index_select(rows, 0, order, out=batch)
        took_s.append(time.perf_counter() - began_s)
    return batch.numel() * _WORD / max(min(took_s), 1e-9)


@cache
def file_read_s() -> float:
    """Return the seconds of a CPU that opening and reading a small cached file takes on this machine: measured once."""
    took_s = []
    for _ in range(_PROBES):
        began_s = time.thread_time()
        for _ in range(_PROBE_FILES):
            try:
                Path(__file__).read_bytes()
            except OSError:  # the package lies in no folder
                return 0.0
        took_s.append((time.thread_time() - began_s) / _PROBE_FILES)
    return min(took_s)

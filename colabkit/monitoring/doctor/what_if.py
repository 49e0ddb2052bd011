"""How fast it would be if: a step is as long as the longest of what it consists of and of what limits it.

After DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021): the speed after a
fix is the least of the remaining parts' speeds. A step on the CPU is held up by its own loader as well: measured on two
cores, a step of two threads stands still while a worker has one of them, threads that need Python's lock get on one at
a time beside it, and worker processes get about one CPU, since a thread of the step that waits for another one spins.
So there the two take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from colabkit.monitoring.doctor.case import Case

_GATHER_BYTES_PER_S = 4e9  # of rows in memory, measured on two slow cores
_NEAR_READ_S = 5e-5  # of a CPU, for opening and reading a small local file: measured, 25 µs alone, 55 beside another
_LEAST_SHARE = 0.2
_PAUSE_S = 0.01
_COLD_S = 0.8e-3
"""CPU that a worker process takes more for a sample when it pauses for each, as caches are cold then.

Measured with a picture of 256 x 256: 1.85 ms instead of 1.0. To read and decode it alone takes 0.64 ms in a row, 1.05
after a pause of 1 ms, 1.4 after 10, 1.6 after 30 to 60."""
_LEAST_WARM = 0.4  # of what a sample takes after a pause


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
        near_read_s: seconds of a CPU that they would take to read a sample's file, were it near; 0 where they read it
            already.
        cold_s: seconds of a CPU that a sample takes them since they wait for each one's file, and then go on with cold
            caches.
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
    cold_s: float = 0.0

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
        """Return the speed if data were always there."""
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0)

    def from_rows(self, row_bytes: float | None) -> float:
        """Return the speed from rows in memory."""
        gather_s = self.samples * (row_bytes or 0.0) / _GATHER_BYTES_PER_S
        return self.samples_per_s(cpu_s=0.0, wall_s=0.0, here_s=gather_s)

    def from_near_files(self) -> float:
        """Return the speed when files are read from the local disk, which is cached."""
        near_s = self.cpu_s - self.cold_s + self.near_read_s
        return self.samples_per_s(cpu_s=near_s, wall_s=near_s)


def forecast_of(case: Case) -> Forecast:
    """Return what a step takes alone, by what was measured while a loader ran beside it."""
    step, cpus = case.step, max(case.machine.cpus, 1e-3)
    loader_cpu_s = case.cpu_s or 0.0
    own_s = case.alone_s + step.other_s + case.at_last_s * step.samples
    held_s = step.other_s if case.is_on_gpu else own_s
    if case.machine.own_cpu_rate is not None and not case.is_on_gpu:
        own_cpu_s = case.machine.own_cpu_rate * cpus * step.seconds
        held_s = min(own_s, max(0.0, own_cpu_s - step.samples * loader_cpu_s))
    wall_s = max(loader_cpu_s, case.worker_s * _share_of_cpu(case))
    return Forecast(
        samples=step.samples,
        step_s=own_s + step.copy_s,
        held_s=held_s,
        cpu_s=loader_cpu_s,
        wall_s=wall_s,
        workers=case.facts.workers or 1,
        cpus=cpus,
        are_threads=case.facts.kind in ("decoded", "gathered"),
        near_read_s=_NEAR_READ_S if case.facts.kind == "decoded" and case.facts.is_far else 0.0,
        cold_s=_cold_s(case, loader_cpu_s),
    )


def _cold_s(case: Case, cpu_s: float) -> float:
    """Return the CPU that a sample takes a worker process since it pauses for each; threads read ahead."""
    workers, speed = case.facts.workers or 0, case.samples_per_s
    if (
        case.facts.kind not in ("foreign", "processes")
        or not case.facts.is_far
        or not speed
        or workers / speed - cpu_s < _PAUSE_S
    ):
        return 0.0
    return min(_COLD_S, (1 - _LEAST_WARM) * cpu_s)


def _share_of_cpu(case: Case) -> float:
    """Return the share of a core that a thread got when it wanted one, in (0, 1]."""
    if not case.is_cpu_full:
        return 1.0
    busy_s = sum(part.busy_s for part in case.spent.parts if part.cpu_s)
    cpu_s = sum(part.cpu_s for part in case.spent.parts)
    return min(1.0, max(_LEAST_SHARE, cpu_s / busy_s)) if busy_s else 1.0

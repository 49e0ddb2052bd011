"""What the doctor looks at: one run of a loader, its typical step, and the machine meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colabkit.foundation import HostSnapshot, LoaderFacts, MetersSnapshot, PartSnapshot, StepTimes
from colabkit.monitoring.doctor.diagnosis import HIGH, MODERATE, Shares
from colabkit.monitoring.doctor.machine import SNAPSHOT_S, Machine, machine_of
from colabkit.monitoring.doctor.timing import enough, late_share, quick_compute_s, settled_steps, typical

_GREEDY = 0.15  # of the CPUs: what a loader has to take to slow a step
_SATURATED = 0.85  # of the CPUs
_STORAGE_BOUND = 0.6  # of its time a worker has a CPU, where one was free: the rest it waits for storage
_NO_PART = PartSnapshot("", 0, 0, 0.0)


@dataclass(frozen=True)
class Case:
    """A run as the rules see it.

    Attributes:
        step: the typical step.
        steps: how many steps it is judged by.
        is_enough: whether they are enough.
        quick_s: seconds that the step itself takes when nothing disturbs it.
        late: share of the time that a few long waits take.
        slowdown: seconds of the newest third of the steps over those of the oldest.
        spent: what the loader counted while these steps were taken.
        passes: over the loader that began, of all.
        facts: what is known of the loader.
        machine: what the machine was like.
        cost_share: share of the time that the panel took; None where there is none.
        precision: of the step: `"fp32"`, `"bf16"`, `"fp16"`; None if not known.
        measured_alone_s: seconds a sample that the step took with nothing beside it, if that was measured.
    """

    step: StepTimes
    steps: int
    is_enough: bool
    quick_s: float
    late: float
    slowdown: float
    spent: MetersSnapshot
    passes: int
    facts: LoaderFacts
    machine: Machine
    cost_share: float | None = None
    precision: str | None = None
    measured_alone_s: float | None = None

    @property
    def shares(self) -> Shares:
        """Shares of the typical step."""
        total = self.step.seconds
        if not total:
            return Shares()
        step = self.step
        return Shares(step.wait_s / total, step.copy_s / total, step.compute_s / total, step.other_s / total)

    @property
    def stolen_s(self) -> float:
        """Seconds by which the step takes longer since the loader's workers take the CPU from it."""
        if self.is_on_gpu or not self.is_cpu_full or self.loader_cpus < _GREEDY * self.machine.cpus:
            return 0.0
        return max(0.0, self.step.compute_s - self.quick_s)

    @property
    def alone_s(self) -> float:
        """Seconds of the step itself, were it not disturbed: on the CPU long pauses slow it as well, as caches cool.

        It is what was measured, else told by the quickest steps. On a GPU the step is timed beside the loader as well,
        and what was measured has to be waited for.
        """
        if self.measured_alone_s is not None:
            measured_s = self.measured_alone_s * self.step.samples
            return min(measured_s, self.step.compute_s) if self.is_on_gpu else measured_s
        is_disturbed = self.stolen_s > 0 or (not self.is_on_gpu and self.shares.wait + self.shares.other >= HIGH)
        return min(self.quick_s, self.step.compute_s) if is_disturbed else self.step.compute_s

    @property
    def input_share(self) -> float:
        """Share of the step that its data costs: waiting, and the CPU that making it takes from the step."""
        return (self.step.wait_s + self.stolen_s) / self.step.seconds if self.step.seconds else 0.0

    @property
    def loader_cpus(self) -> float:
        """CPUs that the loader's workers use."""
        return (self.cpu_s or 0.0) * self.samples_per_s

    @property
    def samples_per_s(self) -> float:
        """Samples a second of the typical step."""
        return self.step.samples / self.step.seconds if self.step.seconds else 0.0

    @property
    def is_starved(self) -> bool:
        """Whether data costs a share that is worth mending."""
        return self.input_share >= MODERATE

    @property
    def is_on_gpu(self) -> bool:
        """Whether batches go to a GPU."""
        return self.facts.device.startswith("cuda")

    @property
    def is_cpu_full(self) -> bool:
        """Whether the CPUs that may be used are busy, or were wanted by more threads than there are."""
        rate = self.machine.cpu_rate
        return rate is not None and rate >= _SATURATED

    def part(self, name: str) -> PartSnapshot:
        """Return a part of the loader; one that did nothing if there is none of the name."""
        return next((part for part in self.spent.parts if part.name == name), _NO_PART)

    @property
    def worker_s(self) -> float:
        """Seconds of one worker that a sample took, reads of a far source by others apart."""
        others = ("gather", "transfer", "augment") if self.facts.kind == "processes" else ("gather", "transfer")
        own = [part for part in self.spent.parts if part.name not in others and not self._is_ahead(part)]
        return sum(part.busy_s for part in own) / self._handled if self._handled else 0.0

    @property
    def at_last_s(self) -> float:
        """Seconds that a sample takes where its batch is handed over, after worker processes have made it."""
        if self.facts.kind != "processes" or not self._handled:
            return 0.0
        return self.part("augment").busy_s / self._handled

    @property
    def cpu_s(self) -> float | None:
        """Seconds of a CPU that a sample took in the loader's workers; None if that was not measured.

        Workers of a foreign loader are this process's children.
        """
        if self.facts.kind == "foreign":
            rate = self.machine.children_cpu_rate
            if rate is None or not self.facts.workers or not self.samples_per_s:
                return None
            return rate * self.machine.cpus / self.samples_per_s
        measured = sum(part.cpu_s for part in self.spent.parts)
        return measured / self._handled if measured and self._handled else None

    @property
    def _handled(self) -> int:
        """Samples that went through the loader."""
        return max((part.samples for part in self.spent.parts), default=0)

    @property
    def bottleneck(self) -> str | None:
        """The part that the loader spends most on where it is too slow: None if data is not late, or nothing tells."""
        if not self.is_starved:
            return None
        if self.facts.kind == "foreign":
            return "read" if self.facts.is_far and not self.is_cpu_full else None
        if self.facts.kind == "processes":
            if self.at_last_s > self.worker_s / max(1, self.facts.workers or 1):  # what is at last, one thread does
                return "augment"
            return "read" if self._waits_for_storage else "samples"
        decode = self.part("decode")
        if self.facts.is_far and decode.wait_s > decode.busy_s:  # for files that are read ahead by others
            return "read"
        busiest = max(self.spent.parts, key=lambda part: 0.0 if self._is_ahead(part) else part.busy_s, default=None)
        return busiest.name if busiest is not None and busiest.busy_s else None

    @property
    def _waits_for_storage(self) -> bool:
        """Whether worker processes have no CPU most of their time although one is free."""
        part = self.part("samples")
        if not part.busy_s or not part.cpu_s:
            return bool(self.facts.is_far)
        return part.cpu_s / part.busy_s < _STORAGE_BOUND and not self.is_cpu_full

    def _is_ahead(self, part: PartSnapshot) -> bool:
        return part.name == "read" and bool(self.facts.is_far)


def case_of(
    spent: MetersSnapshot,
    facts: LoaderFacts | None,
    hosts: Sequence[HostSnapshot],
    *,
    cost_share: float | None = None,
    precision: str | None = None,
) -> Case:
    """Return what the doctor sees of a run.

    Args:
        spent: what its loader counted; the newest steps are judged by, without those of the first pass as soon as there
            are enough.
        facts: what is known of the loader.
        hosts: snapshots of the machine meanwhile.
        cost_share: of the panel.
        precision: of the step.
    """
    passes, first = spent.passes, spent.first_pass
    if first is not None and enough(settled_steps((spent - first).recent, 0)):
        spent = spent - first  # the first pass is not like the others: it fills caches
        hosts = [host for host in hosts if host.at_s >= hosts[-1].at_s - spent.seconds - SNAPSHOT_S]
    is_whole = spent.passes == passes and spent.steps <= len(spent.recent)  # the run's first steps are among them
    steps = settled_steps(spent.recent) if is_whole else settled_steps(spent.recent, 0)
    third = len(steps) // 3
    slowdown = 1.0
    if third:
        oldest, newest = typical(steps[:third]).seconds, typical(steps[-third:]).seconds
        slowdown = newest / oldest if oldest else 1.0
    return Case(
        typical(steps),
        len(steps),
        enough(steps),
        quick_compute_s(steps),
        late_share(steps),
        slowdown,
        spent,
        passes,
        facts or LoaderFacts("foreign"),
        machine_of(hosts),
        cost_share,
        precision,
    )

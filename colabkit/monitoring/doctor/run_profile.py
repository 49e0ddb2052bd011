"""The profile of a run that the rules read: its typical step, what its loader counted, and the machine meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from colabkit.foundation import (
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    MetersSnapshot,
    PartSnapshot,
    StepTimes,
    usable_cpus,
)
from colabkit.monitoring.doctor.diagnosis import HIGH, MODERATE, Shares

ENOUGH_STEPS = 50
_FEW_STEPS, _LONG_S = 8, 5.0  # slow steps are judged sooner
_WARM_UP_STEPS, _WARM_UP_SHARE = 20, 0.2  # SPDL drops 20 steps: caches, cuDNN's trials, compilation
_BLOCKS = 24
_BURST = 32  # batches that a loader gives together at most
_LATE = 3.0
_QUICK = 0.01
_GREEDY = 0.15  # of the CPUs: what a loader has to take to slow a step
_SATURATED = 0.85  # of the CPUs
_STORAGE_BOUND = 0.6  # of its time a worker has a CPU, where one was free: the rest it waits for storage
_NO_PART = PartSnapshot("", 0, 0, 0.0)
_MEAN_RATES = ("cpu_rate", "own_cpu_rate", "children_cpu_rate", "busiest_core_rate", "io_stall_rate")
SNAPSHOT_S = 1.0
"""Seconds that a snapshot of the machine tells of, or a little more."""


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """The machine over a window; None is what is not known.

    Rates are shares in [0, 1]: `own_cpu_rate` is that of this process and its children, `io_stall_rate` the share of
    the time that some task waited for storage. RAM, disk and `/dev/shm` are those at the end. `gpu` is the GPU that
    this process uses most.
    """

    cpus: float = 1.0
    cpu_rate: float | None = None
    own_cpu_rate: float | None = None
    children_cpu_rate: float | None = None
    busiest_core_rate: float | None = None
    ram_used: float | None = None
    ram_total_bytes: int | None = None
    ram_free_bytes: int | None = None
    tmpfs_bytes: int | None = None
    read_bytes_per_s: float | None = None
    disk_free_bytes: int | None = None
    shm_free: float | None = None
    io_stall_rate: float | None = None
    gpu: GpuProfile | None = None

    @property
    def foreign_cpus(self) -> float | None:
        """CPUs that other processes used."""
        if self.cpu_rate is None or self.own_cpu_rate is None:
            return None
        return max(0.0, self.cpu_rate - self.own_cpu_rate) * self.cpus


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A GPU over a window: its median utilisation, its memory at the end, and how often its clocks were held down."""

    name: str | None = None
    utilization_rate: float | None = None
    used: float | None = None
    torch_bytes: int | None = None
    other_bytes: int | None = None
    slowed: float = 0.0
    slowed_by: tuple[str, ...] = ()
    is_lost: bool = False


@dataclass(frozen=True)
class RunProfile:
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
    machine: MachineProfile
    cost_share: float | None = None
    precision: str | None = None
    measured_alone_s: float | None = None

    @property
    def shares(self) -> Shares:
        """Shares of the typical step."""
        total = self.step.seconds
        return Shares(*(seconds / total for seconds in self.step[:4])) if total else Shares()

    @property
    def stolen_s(self) -> float:
        """Seconds by which the loader's workers slow the step down by taking the CPU from it."""
        if self.is_on_gpu or not self.is_cpu_full or self.loader_cpus < _GREEDY * self.machine.cpus:
            return 0.0
        return max(0.0, self.step.compute_s - self.quick_s)

    @property
    def alone_s(self) -> float:
        """Seconds of the step itself if nothing disturbed it: what was measured, else what the quickest steps took.

        On the CPU long pauses disturb it too, since caches cool. On a GPU events time the step beside the loader, and a
        longer measurement includes the wait for the result.
        """
        if self.measured_alone_s is not None:
            measured_s = self.measured_alone_s * self.step.samples
            return min(measured_s, self.step.compute_s) if self.is_on_gpu else measured_s
        is_disturbed = self.stolen_s > 0 or (not self.is_on_gpu and self.shares.wait + self.shares.other >= HIGH)
        return min(self.quick_s, self.step.compute_s) if is_disturbed else self.step.compute_s

    @property
    def input_share(self) -> float:
        """Share of the step that its data costs: waiting, and the CPU that the workers take from the step."""
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
        """The loader's most expensive part if data is late; None if it is not, or if the part is unknown."""
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


def profile_run(
    spent: MetersSnapshot,
    facts: LoaderFacts | None,
    hosts: Sequence[HostSnapshot],
    *,
    cost_share: float | None = None,
    precision: str | None = None,
) -> RunProfile:
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
    if first is not None and has_enough_steps(settled_steps((spent - first).recent, 0)):
        spent = spent - first  # the first pass is not like the others: it fills caches
        hosts = [host for host in hosts if host.at_s >= hosts[-1].at_s - spent.seconds - SNAPSHOT_S]
    is_whole = spent.passes == passes and spent.steps <= len(spent.recent)  # the run's first steps are among them
    steps = settled_steps(spent.recent) if is_whole else settled_steps(spent.recent, 0)
    third = len(steps) // 3
    slowdown = 1.0
    if third:
        oldest, newest = typical_step(steps[:third]).seconds, typical_step(steps[-third:]).seconds
        slowdown = newest / oldest if oldest else 1.0
    return RunProfile(
        typical_step(steps),
        len(steps),
        has_enough_steps(steps),
        quick_compute_s(steps),
        late_share(steps),
        slowdown,
        spent,
        passes,
        facts or LoaderFacts("foreign"),
        _machine_over(hosts),
        cost_share,
        precision,
    )


def _machine_over(hosts: Sequence[HostSnapshot]) -> MachineProfile:
    """Return the means of some snapshots, and the newest of what changes slowly."""
    if not hosts:
        return MachineProfile(cpus=usable_cpus())
    last = hosts[-1]
    return MachineProfile(
        cpus=last.cpus,
        **{name: _mean(getattr(host, name) for host in hosts) for name in _MEAN_RATES},
        ram_used=_share(last.ram_used_bytes, last.ram_total_bytes),
        ram_total_bytes=last.ram_total_bytes or None,
        ram_free_bytes=last.ram_total_bytes - last.ram_used_bytes if last.ram_total_bytes else None,
        tmpfs_bytes=last.tmpfs_bytes,
        read_bytes_per_s=_mean(host.storage_read_bytes_per_s for host in hosts),
        disk_free_bytes=last.disk_free_bytes,
        shm_free=_share(last.shm_free_bytes, last.shm_total_bytes),
        gpu=_gpu_of([host.gpus for host in hosts]),
    )


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _gpu_of(snapshots: Sequence[Sequence[GpuSnapshot]]) -> GpuProfile | None:
    """Return the state of the GPU that this process uses most, by its tensors, else by its utilisation."""
    last = snapshots[-1]
    if not last:
        return None
    place = max(range(len(last)), key=lambda place: (last[place].torch_bytes or 0, last[place].utilization_rate or 0))
    own = [gpus[place] for gpus in snapshots if len(gpus) > place]
    gpu, known = own[-1], [one.utilization_rate for one in own if one.utilization_rate is not None]
    held = gpu.torch_reserved_bytes or gpu.torch_bytes
    slowed = [one for one in own if one.slowed_by]
    return GpuProfile(
        name=gpu.name,
        utilization_rate=median(known) if known else None,
        used=_share(gpu.used_bytes, gpu.total_bytes),
        torch_bytes=gpu.torch_bytes,
        other_bytes=None if gpu.used_bytes is None else max(0, gpu.used_bytes - (held or 0)),
        slowed=len(slowed) / len(own),
        slowed_by=slowed[-1].slowed_by if slowed else (),
        is_lost=gpu.is_lost,
    )


def settled_steps(steps: Sequence[StepTimes], warm: int = _WARM_UP_STEPS) -> list[StepTimes]:
    """Return the steps to judge by: without the first ones of a run and of each pass, whose waiting is a start.

    Args:
        steps: oldest first.
        warm: steps at the run's beginning to leave out, though no more than a fifth of all.
    """
    skipped = min(warm, int(_WARM_UP_SHARE * len(steps)))
    settled = [step for step in steps[skipped:] if not step.is_first]
    return settled or [*steps[skipped:]]  # passes of one step each


def has_enough_steps(steps: Sequence[StepTimes]) -> bool:
    """Return whether so many steps tell anything: 50, or fewer that took several seconds."""
    return len(steps) >= ENOUGH_STEPS or (len(steps) >= _FEW_STEPS and sum(step.seconds for step in steps) >= _LONG_S)


def typical_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean step of the middle half of blocks of steps, by their length, so that stragglers do not count.

    Blocks, since a loader gives several batches at once: of single steps the median would wait for nothing. The mean,
    since it adds up.
    """
    size = max(1, -(-len(steps) // _BLOCKS), min(_BURST, len(steps) // 8))
    blocks = [steps[start : start + size] for start in range(0, len(steps) - size + 1, size)]
    blocks.sort(key=lambda block: sum(step.seconds for step in block))
    quarter = len(blocks) // 4
    middle = [step for block in blocks[quarter : len(blocks) - quarter] for step in block]
    count = max(1, len(middle))
    wait_s, copy_s, compute_s, other_s, samples = (sum(step[place] for step in middle) / count for place in range(5))
    return StepTimes(wait_s, copy_s, compute_s, other_s, round(samples))


def quick_compute_s(steps: Sequence[StepTimes]) -> float:
    """Return the seconds that the step itself takes among its quickest hundredth, for a batch of the usual size.

    On a CPU that loader and step share, a step now and then goes through undisturbed: measured beside decoding, which
    made the usual step two to six times as long, the quickest took what steps take alone, within a tenth.
    """
    sized = sorted(step.compute_s / step.samples for step in steps if step.samples)
    return sized[int(_QUICK * len(sized))] * typical_step(steps).samples if sized else 0.0


def late_share(steps: Sequence[StepTimes]) -> float:
    """Return the share of all time that waiting took in steps that waited for more than three usual steps."""
    usual_s = typical_step(steps).seconds
    total_s = sum(step.seconds for step in steps)
    late_s = sum(step.wait_s for step in steps if step.wait_s > _LATE * usual_s)
    return late_s / total_s if total_s else 0.0

"""The profile of a run that the rules read: its typical step, its loader's meters, and the state of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from colabkit.foundation import HostSnapshot, LoaderFacts, MetersSnapshot, PartSnapshot, StepTimes, Stretch
from colabkit.monitoring.diagnosing.diagnosis import HIGH, MODERATE, Shares
from colabkit.monitoring.diagnosing.host_profile import FOREIGN, HostProfile, profile_host
from colabkit.monitoring.diagnosing.machine_profile import SNAPSHOT_S, MachineProfile, profile_machine

ENOUGH_STEPS = 50
# Minimum number and total seconds of long steps that are enough for a verdict.
_FEW_STEPS, _LONG_S = 8, 5.0
# Number of first steps to drop, and their maximum share: they fill caches, run cuDNN's benchmarks and compile.
_WARM_UP_STEPS, _WARM_UP_SHARE = 20, 0.2
# The start of an epoch counts if it takes at least these seconds, and as many steps as each worker may take for its
# first batch.
_LEAST_START_S, _LEAST_START = 0.05, 2
# Number of passes after the first that show how long a pass takes, although the newest one may be incomplete.
_ENOUGH_PASSES = 3
_BLOCKS = 24
# Maximum number of batches that a loader delivers as one group.
_BURST = 32
_LATE = 3.0
_QUICK = 0.01
# Share of the CPUs that a loader must use before it counts as slowing the step.
_GREEDY = 0.15
# Share of the CPUs above which the CPU counts as full.
_SATURATED = 0.85
# A worker that uses a smaller share of a CPU, although CPUs are free, counts as waiting for storage.
_STORAGE_BOUND = 0.6
_NO_PART = PartSnapshot("", 0, 0, 0.0)
WINDOW_S = 10.0
"""Minimum seconds covered by the snapshots that are compared with the newest steps; shorter ones hold few samples."""
SLOWER = 2.0
"""A run counts as slowed down if it is this many times as slow as in its fastest stretch."""


@dataclass(frozen=True)
class RunProfile:
    """The summary of a run that the rules read.

    Attributes:
        step: the typical step.
        steps: number of steps that the profile is based on.
        is_enough: whether these steps are enough for a verdict.
        quick_s: compute seconds of one of the fastest steps, which ran undisturbed, for a batch of typical size.
        late: share of the time taken by a few long waits, in [0, 1].
        slowdown: duration of the newest third of the steps divided by that of the oldest third.
        spent: the loader's meters, without the first pass once there are enough later steps.
        passes: number of passes over the loader that have begun in the whole run.
        facts: facts about the loader.
        machine: state of the machine during the run.
        cost_share: share of the time that the panel took, in [0, 1]; None without a panel.
        precision: precision of the step: `"fp32"`, `"bf16"` or `"fp16"`; None if unknown.
        measured_alone_s: seconds per sample of the step without a loader; None if not measured.
        epochs: for each complete epoch, its number, from 1, and its values by label.
        values: the newest values of a step, by name; empty if unknown.
        start_s: mean seconds until the first batch of an epoch after the first one; 0 if that is brief.
        start_share: share of such an epoch that its start takes, in [0, 1].
        host: causes of delays on the host.
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
    epochs: Sequence[tuple[int, Mapping[str, float]]] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    start_share: float = 0.0
    host: HostProfile = field(default_factory=HostProfile)

    @property
    def shares(self) -> Shares:
        """The shares of the typical step's time."""
        total = self.step.seconds
        return Shares(*(seconds / total for seconds in self.step[:4])) if total else Shares()

    @property
    def stolen_s(self) -> float:
        """Seconds by which the loader's workers slow the step down by competing for the CPU."""
        if self.is_on_gpu or not self.is_cpu_full or self.loader_cpus < _GREEDY * self.machine.cpus:
            return 0.0
        return max(0.0, self.step.compute_s - self.quick_s)

    @property
    def alone_s(self) -> float:
        """Seconds of the step without a loader: measured by `headspace()`, else estimated.

        The estimate is the time of the typical step or, if the loader disturbs it, of the fastest steps. On the CPU,
        long pauses also disturb the step, since caches become cold. On a GPU, a measured time counts only if it is
        below that of the typical step: events time the step correctly next to the loader, and a measurement includes
        the wait for the result.
        """
        if self.measured_alone_s is not None:
            measured_s = self.measured_alone_s * self.step.samples
            return min(measured_s, self.step.compute_s) if self.is_on_gpu else measured_s
        is_disturbed = self.stolen_s > 0 or (not self.is_on_gpu and self.shares.wait + self.shares.other >= HIGH)
        return min(self.quick_s, self.step.compute_s) if is_disturbed else self.step.compute_s

    @property
    def input_share(self) -> float:
        """Share of the step time lost to data: waiting, plus the slowdown by workers that compete for the CPU."""
        return (self.step.wait_s + self.stolen_s) / self.step.seconds if self.step.seconds else 0.0

    @property
    def save_share(self) -> float:
        """Share of the time of steps and checkpoints that `train()` spent waiting for checkpoints."""
        total_s = self.spent.seconds + self.spent.save_apart_s
        return min(1.0, self.spent.save_s / total_s) if total_s else 0.0

    @property
    def has_foreign_load(self) -> bool:
        """Whether other processes use many of the CPUs."""
        return (self.machine.foreign_cpus or 0.0) >= FOREIGN * self.machine.cpus

    @property
    def host_share(self) -> float:
        """Share of the time lost on the host, or by waiting for another rank."""
        validate_s, train_s = self.spent.validate_s, self.spent.seconds
        validated = validate_s / (validate_s + train_s) if validate_s and validate_s >= train_s else 0.0
        host = self.host
        return max(host.held, host.waiting, host.pauses.share, self.save_share, validated, host.straggling)

    @property
    def lost_to_thread(self) -> float:
        """Share of the time that the step waits for another Python thread, which then also slows down other code.

        It is 0 if it is too small to be reported.
        """
        if self.host.busy_thread is None:
            return 0.0
        lost = self.host.off if self.host.is_gil_held else 0.0
        lost = max(lost, 0.0 if self.has_foreign_load else self.host.held)
        return lost if lost >= HIGH else 0.0

    @property
    def other_share(self) -> float:
        """Share of the step time spent on other work on the host, measured between steps or found by samples."""
        return max(self.shares.other, self.host.aside)

    @property
    def loader_cpus(self) -> float:
        """Number of CPUs used by the loader's workers."""
        return (self.cpu_s or 0.0) * self.samples_per_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second at the typical step."""
        return self.step.samples / self.step.seconds if self.step.seconds else 0.0

    @property
    def is_starved(self) -> bool:
        """Whether data takes a share of the step that is worth fixing."""
        return self.input_share >= MODERATE

    @property
    def is_on_gpu(self) -> bool:
        """Whether batches go to a GPU."""
        return self.facts.device.startswith("cuda")

    @property
    def is_cpu_full(self) -> bool:
        """Whether the CPUs that this process may use are saturated."""
        rate = self.machine.cpu_rate
        return rate is not None and rate >= _SATURATED

    def part(self, name: str) -> PartSnapshot:
        """Return the meters of a loader part by name; all zero if there is no such part."""
        return next((part for part in self.spent.parts if part.name == name), _NO_PART)

    @property
    def worker_s(self) -> float:
        """Seconds per sample that workers spend on reading, decoding and transforms.

        Reads of a remote source that other threads perform in advance, and the final transform of batches from worker
        processes, are excluded.
        """
        others = ("gather", "transfer", "augment") if self.facts.kind == "processes" else ("gather", "transfer")
        own = [part for part in self.spent.parts if part.name not in others and not self._is_ahead(part)]
        return sum(part.busy_s for part in own) / self._handled if self._handled else 0.0

    @property
    def at_last_s(self) -> float:
        """Seconds per sample of the final transform, which runs on the batches that worker processes have made."""
        if self.facts.kind != "processes" or not self._handled:
            return 0.0
        return self.part("augment").busy_s / self._handled

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds per sample in the loader's workers; None if not measured.

        For a third-party loader, the child processes count as its workers.
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
        return max((part.samples for part in self.spent.parts), default=0)

    @property
    def bottleneck(self) -> str | None:
        """The loader's slowest part; None if data is not the bottleneck or the part is unknown."""
        if not self.is_starved:
            return None
        if self.facts.kind == "foreign":
            # If other processes fill the CPUs, that says nothing about the loader.
            is_busy = self.is_cpu_full and not self.has_foreign_load
            return "read" if self.facts.is_remote and not is_busy else None
        if self.facts.kind == "processes":
            if self.at_last_s > self.worker_s / max(1, self.facts.workers or 1):
                # The final transform is the slowest part, since one thread applies it to the batches of all workers.
                return "augment"
            return "read" if self._waits_for_storage else "samples"
        decode = self.part("decode")
        if self.facts.is_remote and decode.wait_s > decode.busy_s:
            # Report reading instead of decoding, which waits for files that other threads read ahead.
            return "read"
        busiest = max(self.spent.parts, key=lambda part: 0.0 if self._is_ahead(part) else part.busy_s, default=None)
        return busiest.name if busiest is not None and busiest.busy_s else None

    @property
    def _waits_for_storage(self) -> bool:
        """Whether worker processes wait for storage: they use little CPU time although CPUs are free.

        If their CPU time is unknown, they count as waiting if the samples are remote.
        """
        part = self.part("samples")
        if not part.busy_s or not part.cpu_s:
            return bool(self.facts.is_remote)
        return part.cpu_s / part.busy_s < _STORAGE_BOUND and not self.is_cpu_full

    def _is_ahead(self, part: PartSnapshot) -> bool:
        return part.name == "read" and bool(self.facts.is_remote)


def profile_run(
    spent: MetersSnapshot,
    facts: LoaderFacts | None,
    hosts: Sequence[HostSnapshot],
    *,
    cost_share: float | None = None,
    precision: str | None = None,
) -> RunProfile:
    """Summarize a run for the rules.

    Args:
        spent: meters of the loader. The newest steps are used, without those of the first pass once there are enough
            others.
        facts: facts about the loader; None if unknown.
        hosts: snapshots of the machine during the run.
        cost_share: share of the time that the panel took, in [0, 1].
        precision: precision of the step.
    """
    passes, first, whole = spent.passes, spent.first_pass, spent
    if first is not None and has_enough_steps(settled_steps((spent - first).recent, 0)):
        # The first pass differs from the others, since it fills caches.
        spent = spent - first
        hosts = [host for host in hosts if host.at_s >= hosts[-1].at_s - spent.seconds - SNAPSHOT_S]
    # If the steps include the first ones of the run, drop the warm-up.
    is_whole = spent.passes == passes and spent.steps <= len(spent.recent)
    steps = settled_steps(spent.recent) if is_whole else settled_steps(spent.recent, 0)
    third = len(steps) // 3
    slowdown = 1.0
    if third:
        oldest, newest = typical_step(steps[:third]).seconds, typical_step(steps[-third:]).seconds
        slowdown = newest / oldest if oldest else 1.0
    settled, steps = steps, _present_steps(steps, whole.stretches)
    typical, facts = typical_step(steps), facts or LoaderFacts("foreign")
    window_s = max(WINDOW_S, sum(step.seconds for step in spent.recent))
    if steps is not settled:
        window_s = sum(step.seconds for step in steps)
    recent = [host for host in hosts if host.at_s >= hosts[-1].at_s - window_s - SNAPSHOT_S]
    start_s, start_share = _start_of_epochs(whole, _LEAST_START * max(1, facts.workers or 0) * typical.seconds)
    return RunProfile(
        typical,
        len(steps),
        has_enough_steps(steps),
        quick_compute_s(settled),
        late_share(steps),
        slowdown,
        spent,
        passes,
        facts,
        profile_machine(hosts, spent.recent),
        cost_share,
        precision,
        start_s=start_s,
        start_share=start_share,
        host=profile_host(steps, typical, whole, recent, facts.device.startswith("cuda")),
    )


def settled_steps(steps: Sequence[StepTimes], warm: int = _WARM_UP_STEPS) -> list[StepTimes]:
    """Return the steps without the warm-up of the run and the first step of each pass, which includes startup.

    Args:
        steps: all steps, oldest first.
        warm: number of warm-up steps to drop, at most a fifth of all steps.
    """
    skipped = min(warm, int(_WARM_UP_SHARE * len(steps)))
    settled = [step for step in steps[skipped:] if not step.is_first]
    # If each pass has only one step, all steps are first steps, so keep them.
    return settled or [*steps[skipped:]]


def _start_of_epochs(spent: MetersSnapshot, least_s: float) -> tuple[float, float]:
    """Return the mean seconds until the first batch of an epoch, and their share of the epoch; 0 if it is brief.

    The first pass is left out, since its start includes work that is done only once.

    Args:
        spent: meters of the whole run.
        least_s: seconds below which a start is brief.
    """
    first = spent.first_pass
    later = spent if first is None else spent - first
    # A first pass without a complete step was a look at a batch, so the next start is the first one.
    least_passes = 2 if first is None or not first.steps else 1
    if later.passes < least_passes:
        return 0.0, 0.0
    start_s = later.first_s / later.passes
    rest_s = (later.seconds - later.first_s) / later.passes
    if first is not None and later.passes < _ENOUGH_PASSES:
        # The newest pass may have just begun.
        rest_s = max(rest_s, first.seconds - first.first_s)
    if start_s < max(_LEAST_START_S, least_s):
        return 0.0, 0.0
    return start_s, start_s / (start_s + rest_s)


def _present_steps(steps: list[StepTimes], stretches: Sequence[Stretch]) -> list[StepTimes]:
    """Return the steps of the last seconds if the run has become much slower, otherwise all steps.

    Args:
        steps: the newest steps, oldest first.
        stretches: stretches of the whole run. If it was as slow before, and not only at the start, it alternates
            between slow and fast steps, and all of them are typical.
    """
    left_s, first = _LONG_S, len(steps)
    while first and (left_s > 0 or len(steps) - first < _FEW_STEPS):
        first -= 1
        left_s -= steps[first].seconds
    newest = steps[first:]
    step_s = typical_step(newest).seconds
    if step_s < SLOWER * typical_step(steps).seconds or not has_enough_steps(newest):
        return steps
    # Between slow and fast steps, so that neither is mistaken for the other if their times vary.
    limit_s = step_s / SLOWER**0.5
    phases = [is_slow for is_slow, _ in groupby(one.seconds > limit_s * one.steps for one in stretches)]
    return newest if sum(phases[1:]) <= 1 else steps


def has_enough_steps(steps: Sequence[StepTimes]) -> bool:
    """Return whether the steps are enough for a verdict: 50, or at least 8 that took 5 seconds in total."""
    return len(steps) >= ENOUGH_STEPS or (len(steps) >= _FEW_STEPS and sum(step.seconds for step in steps) >= _LONG_S)


def typical_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean step over the middle half of blocks of steps, sorted by duration, to exclude stragglers.

    Steps are grouped into blocks because a loader delivers several batches at once, so that the median single step
    would show no wait. The mean is used because its parts add up to the total.
    """
    size = max(1, -(-len(steps) // _BLOCKS), min(_BURST, len(steps) // 8))
    blocks = [steps[start : start + size] for start in range(0, len(steps) - size + 1, size)]
    blocks.sort(key=lambda block: sum(step.seconds for step in block))
    quarter = len(blocks) // 4
    middle = [step for block in blocks[quarter : len(blocks) - quarter] for step in block]
    count = max(1, len(middle))
    wait_s, copy_s = sum(step.wait_s for step in middle) / count, sum(step.copy_s for step in middle) / count
    compute_s, other_s = sum(step.compute_s for step in middle) / count, sum(step.other_s for step in middle) / count
    samples = sum(step.samples for step in middle) / count
    return StepTimes(wait_s, copy_s, compute_s, other_s, round(samples))


def quick_compute_s(steps: Sequence[StepTimes]) -> float:
    """Return the first percentile of the compute seconds, scaled to a batch of typical size.

    On a CPU shared by the loader and the step, a few steps run undisturbed. In measurements with concurrent decoding,
    typical steps took two to six times as long, but the fastest were within 10% of their time without a loader.
    """
    sized = sorted(step.compute_s / step.samples for step in steps if step.samples)
    return sized[int(_QUICK * len(sized))] * typical_step(steps).samples if sized else 0.0


def late_share(steps: Sequence[StepTimes]) -> float:
    """Return the share of the total time spent on waits longer than three typical steps, in [0, 1]."""
    usual_s = typical_step(steps).seconds
    total_s = sum(step.seconds for step in steps)
    late_s = sum(step.wait_s for step in steps if step.wait_s > _LATE * usual_s)
    return late_s / total_s if total_s else 0.0

"""Causes of delays on the host: other processes and threads, calls that block, pauses, and gradual slowdown."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

from colabkit.foundation import BusyProcess, HostSnapshot, LoopSpot, MetersSnapshot, StepTimes, Stretch, ThreadsSnapshot
from colabkit.monitoring.diagnosing.machine_profile import mean_of_known, own_gpu

# Steps that take this many times as long as a typical step contain pauses, if there are at least two of them.
_PAUSE, _LEAST_PAUSES = 3.0, 2
# Minimum seconds of a pause; shorter ones are caused by the scheduler's time slices or the garbage collector.
_LEAST_PAUSE_S = 0.02
# Pauses with a shorter total than these seconds, for example between a few short epochs, are not worth a fix.
_LEAST_PAUSED_S = 0.2
# The speed is compared with that of earlier stretches of at least this many seconds and steps.
_STRETCH_S, _STRETCH_STEPS = 2.0, 8
# A run counts as fast while its speed is at least this share of the speed of its fastest stretch.
_STILL_FAST = 0.67
LEAST_SAMPLES = 10
"""Minimum number of stack samples to evaluate; fewer are ignored."""
# Distance of the limits of a share from its estimate by stack samples, in standard errors.
_STANDARD_ERRORS = 2.0
# Share of the CPUs that other processes use, and share of the time lost to other machines or a quota, that delay a
# step.
FOREIGN, _LOST = 0.25, 0.1
# A thread that uses this share of a CPU, or of the time in which threads have one, may delay the training thread.
_BUSY_THREAD = 0.4
# Seconds above which acquiring the GIL counts as waiting; it takes about 5 ms while another thread runs Python code.
_GIL_WAIT_S = 1e-3
_OWN = "colabkit-"
_READS_VALUES = re.compile(r"\.(item|tolist|cpu|numpy)\(\)")
_RATES = ("training_cpu_rate", "training_held_rate", "held_rate", "compute_cpus", "gil_wait_s")


@dataclass(frozen=True, slots=True)
class Pauses:
    """Steps of a run that took much longer than a typical one although their data was ready.

    Attributes:
        share: total excess of these steps over typical ones, as a share of the total time, in [0, 1].
        seconds: mean excess of such a step.
        steps: mean number of steps from one of these steps to the next.
    """

    share: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The slowdown of a run, compared with its fastest stretch.

    Attributes:
        times: speed of the fastest stretch divided by the present speed; 1 if unknown.
        since_step: number of steps before the run became slow.
        since_s: seconds since then.
    """

    times: float = 1.0
    since_step: int = 0
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostProfile:
    """The training thread's activity besides waiting for data. Shares of the step time are in [0, 1].

    Attributes:
        computing: share in which it was on a CPU; None if unknown.
        held: share in which it, or torch's compute threads, were ready to run but had no CPU.
        waiting: share in which it slept, although it had its data and no thread computed for it.
        off: share in which it was not on a CPU, although it had its data.
        aside: share in which it ran code that does not use torch, such as logging, according to stack samples; 0 if
            it is about the share of `pauses`, which this code then causes.
        pauses: long pauses between or within steps.
        slowdown: slowdown of the run.
        threads: means of the threads' rates; None if unknown.
        spots: the lines of code where samples found the thread, the most frequent first.
        data_samples: number of samples that found it waiting for data, which `spots` leave out.
        other_process: the busiest other process, if known.
        straggler: rank that waits longest for data, if this process and most ranks wait less; otherwise None.
        straggling: share by which it waits longer than this process and than most ranks.
    """

    computing: float | None = None
    held: float = 0.0
    waiting: float = 0.0
    off: float = 0.0
    aside: float = 0.0
    pauses: Pauses = Pauses()
    slowdown: Slowdown = Slowdown()
    threads: ThreadsSnapshot | None = None
    spots: tuple[LoopSpot, ...] = ()
    data_samples: int = 0
    other_process: BusyProcess | None = None
    straggler: int | None = None
    straggling: float = 0.0

    @property
    def busy_thread(self) -> str | None:
        """Another Python thread of the user that uses much of a CPU; None if there is none."""
        return None if self.threads is None else _busy_thread(self.threads)

    @property
    def is_gil_held(self) -> bool:
        """Whether threads wait for the GIL."""
        return self.threads is not None and _is_gil_held(self.threads)

    @property
    def knows_waits(self) -> bool:
        """Whether the kernel counts the waits of threads for a CPU, so that `waiting` excludes them."""
        return self.threads is not None and self.threads.training_held_rate is not None

    @property
    def samples(self) -> int:
        """Number of stack samples, excluding those in which the thread waited for data."""
        return sum(spot.samples for spot in self.spots)

    def share_of(self, spot: LoopSpot) -> float:
        """Return the share of the time, waiting for data included, that goes to a line."""
        return spot.samples / max(1, self.samples + self.data_samples)

    @property
    def reading_spot(self) -> LoopSpot | None:
        """The most frequent line that reads values of tensors, for example with `.item()`; None if there is none."""
        return next((spot for spot in self.spots if _READS_VALUES.search(spot.text)), None)

    @property
    def waiting_spot(self) -> LoopSpot | None:
        """The line at which the thread sleeps most often; None if unknown."""
        return max((one for one in self.spots if one.asleep), key=lambda one: one.asleep, default=None)

    @property
    def aside_spot(self) -> LoopSpot | None:
        """The line that called code without torch in the most samples; None if unknown."""
        found = [spot for spot in self.spots if spot.kind in ("aside", "python")]
        return max(found, key=lambda spot: spot.samples, default=None)


def profile_host(
    steps: Sequence[StepTimes],
    typical: StepTimes,
    spent: MetersSnapshot,
    hosts: Sequence[HostSnapshot],
    is_on_gpu: bool = False,
) -> HostProfile:
    """Summarize the delays of the steps on the host.

    Args:
        steps: the newest steps without those of a warm-up.
        typical: the typical step.
        spent: meters of the loader for the whole run.
        hosts: snapshots of the machine during these steps.
        is_on_gpu: whether the steps run on a GPU, for which the training thread may wait.
    """
    threads = _threads_over([host.threads for host in hosts if host.threads is not None])
    spots = _joined(host.threads.spots for host in hosts if host.threads is not None)
    wait = typical.wait_s / typical.seconds if typical.seconds else 0.0
    if is_on_gpu:
        computing = None if threads is None else threads.training_cpu_rate
        loads = [_load(host) for host in hosts]
        # Exclude the time in which the GPU computes, since the thread may then wait for it.
        off = 0.0 if computing is None or not loads else max(0.0, 1.0 - computing - wait - fmean(loads))
    else:
        computing, off = _on_and_off(steps, typical)
    own_held = 0.0 if threads is None else min(off, threads.training_held_rate or 0.0)
    helped = 0.0 if threads is None else _helped(threads, spots, off - own_held, is_on_gpu)
    waiting = max(0.0, off - own_held - helped)
    pauses = _pauses(steps, typical)
    return HostProfile(
        computing=computing,
        held=_held(hosts, threads, own_held, 1.0 - wait, is_on_gpu),
        waiting=waiting,
        off=off,
        aside=_aside(hosts, pauses.share),
        pauses=pauses,
        slowdown=_slowdown(spent.stretches, typical),
        threads=threads,
        spots=spots,
        data_samples=sum(
            spot.samples for host in hosts if host.threads for spot in host.threads.spots if spot.kind == "data"
        ),
        other_process=next((host.other_process for host in reversed(hosts) if host.other_process), None),
        **_straggler(spent.rank_waits, wait),
    )


def _straggler(waits: Sequence[float], own: float) -> dict[str, Any]:
    if not waits:
        return {}
    slowest = max(waits)
    lost = slowest - max(own, median_low(waits))
    return {"straggler": waits.index(slowest), "straggling": lost} if lost > 0 else {}


def _load(host: HostSnapshot) -> float:
    """Return the utilization of the GPU that this process uses most; 1 if unknown, since waits may be for that GPU."""
    own = own_gpu(host.gpus)
    return 1.0 if own is None or own.utilization_rate is None else own.utilization_rate


def _on_and_off(steps: Sequence[StepTimes], typical: StepTimes) -> tuple[float | None, float]:
    """Return the shares of the time in which the thread was on a CPU and off it, excluding data waits and pauses."""
    usual = [step for step in steps if step.cpu_s is not None and step.seconds <= _PAUSE * typical.seconds]
    total_s = sum(step.seconds for step in usual)
    if not total_s:
        return None, 0.0
    work_s = sum(step.compute_s + step.other_s for step in usual)
    cpu_s = min(work_s, sum(step.cpu_s or 0.0 for step in usual))
    return cpu_s / total_s, (work_s - cpu_s) / total_s


def _held(
    hosts: Sequence[HostSnapshot],
    threads: ThreadsSnapshot | None,
    own_held: float,
    work: float,
    is_on_gpu: bool,
) -> float:
    """Return the share of the step in which programs outside this process used the CPUs that it needs."""
    cpus = fmean(host.cpus for host in hosts) if hosts else 1.0
    cpu_rate, own_rate = (mean_of_known(getattr(host, name) for host in hosts) for name in ("cpu_rate", "own_cpu_rate"))
    foreign = 0.0 if cpu_rate is None or own_rate is None else max(0.0, cpu_rate - own_rate)
    lost = max(mean_of_known(getattr(host, name) for host in hosts) or 0.0 for name in ("steal_rate", "throttled_rate"))
    busy = 0.0 if threads is None or _is_of_loader(threads) else threads.busiest_thread_rate or 0.0
    is_caused = foreign >= FOREIGN or lost >= _LOST or (busy >= _BUSY_THREAD and cpus < 1.5)
    if not is_caused or is_on_gpu:
        return lost if lost >= _LOST and not is_on_gpu else 0.0
    if threads is None or threads.held_rate is None:
        # Without the kernel's counters, assume that the processes share a busy CPU evenly.
        is_full = cpu_rate is not None and cpu_rate >= 0.85
        return max(lost, foreign * work if is_full else 0.0)
    # If several threads compute together, all wait for the one that has no CPU.
    return max(lost, own_held, threads.held_rate * work)


def _helped(threads: ThreadsSnapshot, spots: Sequence[LoopSpot], asleep: float, is_on_gpu: bool) -> float:
    """Return the share of the time in which other threads work for the training thread, which is asleep meanwhile.

    Args:
        threads: means of the threads' rates.
        spots: the lines where samples found the thread.
        asleep: share in which the thread sleeps although it has its data.
        is_on_gpu: whether the steps run on a GPU.
    """
    if _is_gil_held(threads):
        if _is_of_loader(threads):
            # If the loader's threads hold the GIL, that is a data bottleneck.
            return asleep
        if _busy_thread(threads) is not None:
            return 0.0
    samples = sum(spot.samples for spot in spots)
    if not is_on_gpu and samples >= LEAST_SAMPLES and any(spot.kind == "compute" for spot in spots):
        # torch's threads spin between its operations, so their CPU time does not show that they compute meanwhile.
        found = min(1.0, sum(spot.asleep for spot in spots if spot.kind != "compute") / samples)
        return max(0.0, asleep - found - error_of_share(found, samples))
    return threads.compute_cpus or 0.0


def error_of_share(share: float, samples: int) -> float:
    """Return the distance of the limits of a share, in [0, 1], from its estimate by a number of stack samples."""
    return _STANDARD_ERRORS * math.sqrt(share * (1 - share) / samples)


def _busy_thread(threads: ThreadsSnapshot) -> str | None:
    name = threads.busiest_thread
    if name is None or name.startswith(_OWN):
        return None
    is_busy = (threads.busiest_thread_rate or 0.0) >= _BUSY_THREAD * (1.0 - (threads.held_rate or 0.0))
    return name if is_busy else None


def _is_gil_held(threads: ThreadsSnapshot) -> bool:
    return (threads.gil_wait_s or 0.0) >= _GIL_WAIT_S


def _is_of_loader(threads: ThreadsSnapshot) -> bool:
    return (threads.busiest_thread or "").startswith(_OWN)


def _aside(hosts: Sequence[HostSnapshot], paused: float) -> float:
    shares, samples = [], 0
    for host in hosts:
        if host.threads is not None:
            total = sum(spot.samples for spot in host.threads.spots)
            aside = sum(spot.samples for spot in host.threads.spots if spot.kind in ("aside", "python"))
            shares.append(aside / total if total else 0.0)
            samples += total
    found = fmean(shares) if samples >= LEAST_SAMPLES else 0.0
    return found if found and abs(found - paused) > error_of_share(found, samples) else 0.0


def _pauses(steps: Sequence[StepTimes], typical: StepTimes) -> Pauses:
    usual_s = typical.compute_s + typical.other_s
    excess = [step.compute_s + step.other_s - usual_s for step in steps]
    long = [one for one in excess if one > max((_PAUSE - 1) * typical.seconds, _LEAST_PAUSE_S)]
    if len(long) < _LEAST_PAUSES or sum(long) < _LEAST_PAUSED_S or not usual_s:
        return Pauses()
    total_s = sum(step.seconds for step in steps)
    return Pauses(sum(long) / total_s, sum(long) / len(long), len(steps) / len(long))


def _slowdown(stretches: Sequence[Stretch], typical: StepTimes) -> Slowdown:
    """Compare the typical step with the fastest stretch of the run, per sample or, without samples, per step."""
    if not typical.seconds or not stretches:
        return Slowdown()
    by_step = not typical.samples or any(not stretch.samples for stretch in stretches)
    now = (1.0 if by_step else typical.samples) / typical.seconds
    speeds: list[tuple[float, int]] = []
    for first in range(len(stretches)):
        joined, last = stretches[first], first
        while last + 1 < len(stretches) and (joined.seconds < _STRETCH_S or joined.steps < _STRETCH_STEPS):
            last += 1
            joined = joined.joined(stretches[last])
        if joined.seconds >= _STRETCH_S and joined.steps >= _STRETCH_STEPS:
            speeds.append(((joined.steps if by_step else joined.samples) / joined.seconds, last))
    if not speeds:
        return Slowdown()
    fastest = max(speeds)[0]
    last_fast = max(last for speed, last in speeds if speed >= _STILL_FAST * fastest)
    before, after = stretches[: last_fast + 1], stretches[last_fast + 1 :]
    return Slowdown(fastest / now, sum(one.steps for one in before), sum(one.seconds for one in after))


def _threads_over(threads: Sequence[ThreadsSnapshot]) -> ThreadsSnapshot | None:
    if not threads:
        return None
    used: defaultdict[str, float] = defaultdict(float)
    for one in threads:
        used[one.busiest_thread or ""] += one.busiest_thread_rate or 0.0
    busiest = max(used, key=lambda name: used[name])
    rates: dict[str, Any] = {name: mean_of_known(getattr(one, name) for one in threads) for name in _RATES}
    return ThreadsSnapshot(
        **rates,
        busiest_thread=busiest or None,
        busiest_thread_rate=used[busiest] / len(threads) if busiest else None,
        torch_threads=threads[-1].torch_threads,
    )


def _joined(found: Iterable[Iterable[LoopSpot]]) -> tuple[LoopSpot, ...]:
    joined: dict[tuple[str, str], LoopSpot] = {}
    for spots in found:
        for spot in spots:
            if spot.kind != "data":
                key = spot.place, spot.kind
                before = joined.get(key)
                counts = (
                    (spot.samples, spot.asleep)
                    if before is None
                    else (before.samples + spot.samples, before.asleep + spot.asleep)
                )
                joined[key] = LoopSpot(spot.place, spot.text, spot.kind, *counts)
    return tuple(sorted(joined.values(), key=lambda spot: -spot.samples))

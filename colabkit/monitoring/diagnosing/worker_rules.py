"""Rules about the loader's workers: their number, their startup, and their prefetching."""

from __future__ import annotations

import math

from colabkit.foundation import format_seconds, format_share, format_things
from colabkit.monitoring.diagnosing.diagnosis import HIGH, Advice
from colabkit.monitoring.diagnosing.forecast import Prediction, forecast_run, predict_speed
from colabkit.monitoring.diagnosing.remedies import options, packing, packing_s
from colabkit.monitoring.diagnosing.run_profile import RunProfile

# CPUs count as idle if less than this share of them is used.
_IDLE = 0.6
_SLOW_START = 0.1
_BURSTY = 0.1
# Minimum share of the time that is assumed to remain after a fix.
_LEAST_LEFT = 0.1
# Workers count as waiting for storage if each uses less than this share of a CPU.
_WAITING = 0.6
# If all processes together use less than this number of CPUs, several threads do not compute at the same time.
_ONE_CORE = 1.5
# The advised workers should load this many times as fast as the step consumes, but there are at most 16 of them.
_RESERVE, _MOST_WORKERS = 1.25, 16
_PREFETCH = {"foreign": ("prefetch_factor", 8)}


def more_workers(run: RunProfile) -> Advice | None:
    """Advise more workers if CPUs are idle: up to the number of CPUs, or beyond it if workers wait for storage."""
    facts, rate = run.facts, run.machine.cpu_rate
    # More workers would yield more copies of a stream's samples.
    if not run.is_starved or facts.workers is None or facts.is_remote or facts.is_stream:
        return None
    # The final transform runs in the single thread that delivers batches, so more workers do not speed it up.
    one_transforms = facts.kind == "processes" and run.bottleneck == "augment"
    if facts.kind in ("gathered", "device") or one_transforms:
        return None
    # Each worker makes one batch per `workers` steps. Without workers, making a batch takes as long as the wait.
    a_batch_s = run.step.seconds * facts.workers if facts.workers else run.step.wait_s
    a_sample_s = (facts.kind == "processes" and run.worker_s) or a_batch_s / max(1, run.step.samples)
    cpu_s = _worker_cpu_s(run)
    waits = facts.kind != "decoded" and cpu_s is not None and not run.is_cpu_full and cpu_s < _WAITING * a_sample_s
    if not waits and (rate is None or rate >= _IDLE):
        return None
    most, usual = round(run.machine.cpus), forecast_run(run)
    if facts.kind == "decoded":
        # Import it here, so that the magics load without torch.
        from colabkit.loading import MOST_THREADS

        most = min(most, MOST_THREADS)
    target_s = max(usual.step_s / max(1, run.step.samples), (cpu_s or 0.0) / run.machine.cpus, 1e-9)
    wanted = math.ceil(_RESERVE * a_sample_s / target_s)
    if waits and cpu_s is not None:
        most = max(most, min(_MOST_WORKERS, wanted))
    else:
        most = min(most, max(facts.workers + 1, wanted))
    if facts.workers >= most:
        return None
    cpus, action = format_things(round(run.machine.cpus), "CPU"), f"Use {format_things(most, 'worker')}"
    if waits and cpu_s is not None:
        found = f"loading a sample takes {format_seconds(a_sample_s)}, but only {format_seconds(cpu_s)} of CPU time"
        action += ", more than CPUs, since workers mostly wait" if most > round(run.machine.cpus) else ""
    else:
        found = (
            f"{format_things(facts.workers, 'worker')} on {cpus}, which are busy {format_share(rate or 0)} of the time"
        )
    return Advice(
        found,
        action,
        options(num_workers=most),
        *predict_speed(
            run,
            lambda costs: min(
                costs.samples_per_s(workers=most, wall_s=a_sample_s, cpu_s=cpu_s if waits else None),
                most / max(a_sample_s * costs.scale, 1e-9),
            ),
        ),
        check="the CPU utilization rises",
    )


def _worker_cpu_s(run: RunProfile) -> float | None:
    """Return the CPU seconds that a sample takes where batches are made; None if unknown."""
    if run.cpu_s is not None or run.facts.workers or run.machine.own_cpu_rate is None or not run.step.samples:
        return run.cpu_s
    # Without workers, the step and the loader share the thread. A step on the CPU uses at least one CPU.
    own_s = run.machine.own_cpu_rate * run.machine.cpus * run.step.seconds
    return max(0.0, own_s - (0.0 if run.is_on_gpu else run.step.compute_s)) / run.step.samples


def held_by_python(run: RunProfile) -> Advice | None:
    """Advise worker processes if only one core is busy, since threads then wait for the GIL."""
    machine = run.machine
    if not run.is_starved or machine.cpus < 2 or machine.busiest_core_rate is None or machine.cpu_rate is None:
        return None
    # Two threads that decode at the same time keep two cores busy, however many there are.
    is_alone = machine.busiest_core_rate > 0.9 and machine.cpu_rate * machine.cpus < _ONE_CORE
    if not is_alone or (run.facts.workers or 1) < 2 or run.facts.kind != "decoded":
        # The rule applies only to loaders that decode images, since only these run Python code in several threads.
        return None
    return Advice(
        "one core is busy and the others are not, so threads wait for Python's global interpreter lock",
        "Store decoded images, which threads load with little Python code",
        packing(run),
        cost_s=packing_s(run),
        confidence="low",
    )


def too_many_workers(run: RunProfile) -> Advice | None:
    """Advise fewer workers if there are more than two per CPU and all CPUs are busy."""
    facts = run.facts
    if not run.is_starved or facts.workers is None or not run.is_cpu_full or facts.is_remote:
        return None
    most = max(1, round(run.machine.cpus))
    if facts.workers <= 2 * most:
        return None
    return Advice(
        f"{facts.workers} workers share {format_things(most, 'CPU')}",
        "Use as many workers as CPUs; more workers will not help",
        options(num_workers=most),
        confidence="low",
    )


def slow_start(run: RunProfile) -> Advice | None:
    """Advise persistent workers, or less work in the dataset, if each epoch starts with a long wait."""
    facts, share = run.facts, run.start_share
    is_alone = facts.kind in ("processes", "foreign") and not facts.workers
    if share < _SLOW_START or not (is_alone or facts.keeps_workers is False):
        return None
    found = f"the first batch of each epoch takes {format_seconds(run.start_s)}"
    action = "Keep the workers between epochs"
    if is_alone:
        action = "Do work of the dataset or sampler at the start of an epoch, such as reading an index, only once"
    call = "" if is_alone else options(persistent_workers=True)
    return Advice(found, action, call, *_without(run, share), saved_s=run.start_s)


def bursts(run: RunProfile) -> Advice | None:
    """Advise more prefetching if data is usually ready but a few steps wait a long time."""
    facts = run.facts
    if (
        run.shares.wait >= HIGH
        or run.late < max(_BURSTY, run.lost_to_thread)
        or facts.is_remote
        or facts.kind == "device"
    ):
        return None
    if facts.kind == "foreign" and facts.workers is None:
        # A generator, for example, has no workers, and does not prefetch.
        return None
    name, most = _PREFETCH.get(facts.kind, ("prefetch_batches", 64))
    if (facts.prefetch or 0) >= most:
        return None
    call = options(**{name: most})
    if facts.kind == "foreign" and not facts.workers:
        # Without workers, nothing is prefetched, and several workers would yield several copies of a stream's samples.
        if facts.is_stream:
            return None
        call = options(num_workers=max(1, round(run.machine.cpus)))
    return Advice(
        f"a few long waits take {format_share(run.late)} of the time, although data is usually ready",
        "Prefetch more batches; check for single large files, garbage collection and checkpoints",
        call,
        *_without(run, run.late),
        confidence="low",
        check="loader.meters.snapshot().recent contains the longest waits",
    )


def _without(run: RunProfile, share: float) -> Prediction:
    """Return the speed after removing a share of the time, and its limits, since the fix may remove only a part."""
    most = run.samples_per_s / max(_LEAST_LEFT, 1 - share)
    return most, run.samples_per_s, most

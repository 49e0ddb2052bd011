"""Rules about the host: threads and calls that delay the step, a CPU lost to others, pauses, and gradual slowdown."""

from __future__ import annotations

from typing import TypeAlias

from colabkit.foundation import (
    LoopSpot,
    Phrase,
    current_place,
    format_count,
    format_seconds,
    format_share,
    format_things,
    in_python,
    option,
)
from colabkit.monitoring.diagnosing.diagnosis import HIGH, Advice
from colabkit.monitoring.diagnosing.forecast import Prediction, cold_factor, spread
from colabkit.monitoring.diagnosing.host_profile import LEAST_SAMPLES, error_of_share
from colabkit.monitoring.diagnosing.run_profile import SLOWER, RunProfile

# Share of the time that a hypervisor or a quota takes, or that pauses take, before the doctor reports it.
_LOST, _PAUSES = 0.1, 0.1
_TRAINS = 0.3
# Minimum number of torch threads per CPU that counts as too many.
_MANY_THREADS = 2
# The largest upper limit of a share that stack samples show.
_MOST_SHARE = 0.98
# A predicted speed and its limits, if known.
_Speeds: TypeAlias = tuple[float | None, float | None, float | None]
_UNKNOWN: _Speeds = (None, None, None)


def busy_thread(run: RunProfile) -> Advice | None:
    """Report that another Python thread holds the GIL, or the only CPU, while the step waits for it."""
    host = run.host
    name, threads = host.busy_thread, host.threads
    lost = run.lost_to_thread
    if name is None or threads is None or not lost:
        return None
    why = "there are too few CPUs for both"
    action = "Reduce the work of this thread, or let it pause between its checks"
    if host.is_gil_held:
        why = "only one thread at a time runs Python code"
        action = "Move the work of this thread to another process, or let it pause between its checks"
    return Advice(
        f"the thread {name!r} runs {format_share(threads.busiest_thread_rate or 0.0)} of the time, and delays the step"
        f" {format_share(lost)} of the time, since {why}",
        action,
        "",
        *_undisturbed(run, _without(run, lost)),
    )


def blocked_step(run: RunProfile) -> Advice | None:
    """Report that the step sleeps, for example in a lock or a network call, although its data is ready."""
    host = run.host
    if host.waiting < HIGH or (host.is_gil_held and host.busy_thread is not None):
        return None
    seconds, spot = format_seconds(host.waiting * run.step.seconds), host.waiting_spot
    does = "sleeps" if host.knows_waits else "sleeps or has no CPU for"
    found = f"the step {does} {seconds}, {format_share(host.waiting)} of its time, although its data is ready"
    if spot is None:
        action = (
            "Remove the wait from the step; to see its line of code, train for some more seconds with the panel, and"
            " diagnose again"
        )
        return Advice(found, action, "", *_without_waiting(run), confidence="low")
    return Advice(
        f"{found}, most often at {spot.place}",
        "Remove the wait from the step, or wait in another thread",
        "",
        *_without_waiting(run),
        confidence="high",
        check=_line(spot),
    )


def straggler(run: RunProfile) -> Advice | None:
    """Report that another rank waits much longer for data, so that all ranks wait for it in each step."""
    host = run.host
    if host.straggler is None or host.straggling < HIGH:
        return None
    return Advice(
        f"rank {host.straggler} waits for data {format_share(max(run.spent.rank_waits))} of the time, which is"
        f" {format_share(host.straggling)} more than most ranks, and all ranks wait for it",
        f"Diagnose the loader of rank {host.straggler} in its process, and compare the storage and the CPUs of its"
        " machine with those of the others",
        "",
        *_without(run, host.straggling),
    )


def code_beside_torch(run: RunProfile) -> Advice | None:
    """Report that much of the time goes to code that does not use torch, such as logging or plotting."""
    aside, spot = run.host.aside, run.host.aside_spot
    if aside < HIGH or spot is None:
        return None
    return Advice(
        f"code that does not use torch takes {format_share(aside)} of the time, most of it at {spot.place}",
        "Do this work less often, for example every 50 steps, or make it faster",
        "",
        *_without(run, aside, run.host.samples),
        check=_line(spot),
    )


def reading_values(run: RunProfile) -> Advice | None:
    """Advise reading the values of tensors less often if a line such as `loss.item()` takes much of the time."""
    host, spot = run.host, run.host.reading_spot
    # On a GPU, the thread waits there for work that the GPU has to do anyway.
    if spot is None or run.is_on_gpu or host.samples < LEAST_SAMPLES or (share := host.share_of(spot)) < HIGH:
        return None
    return Advice(
        f"{format_share(share)} of the time goes to {spot.place}, which reads values of tensors one at a time",
        "Compute with whole tensors, without loops over their elements, and read the result, for example with"
        " .item(), only every 50 steps",
        "",
        *_without(run, share, host.samples),
        check=_line(spot),
    )


def too_many_threads(run: RunProfile) -> Advice | None:
    """Advise fewer torch threads if there are many more of them than CPUs, and threads wait for a CPU."""
    threads, cpus = run.host.threads, max(1, round(run.machine.cpus))
    if threads is None or threads.torch_threads is None or threads.torch_threads < _MANY_THREADS * cpus:
        return None
    if run.is_on_gpu or (threads.held_rate or 0.0) < HIGH:
        return None
    return Advice(
        f"torch computes with {threads.torch_threads} threads on {format_things(cpus, 'CPU')}, and threads wait for a"
        f" CPU {format_share(threads.held_rate or 0.0)} of the time",
        "At the start of the program, limit torch to as many threads as there are CPUs",
        f"torch.set_num_threads({cpus})",
        confidence="high",
    )


def lost_cpu(run: RunProfile) -> Advice | None:
    """Report that the CPU quota of the container is used up, or that a hypervisor gives the CPUs to other machines."""
    throttled, stolen = run.machine.throttled_rate or 0.0, run.machine.steal_rate or 0.0
    if run.is_on_gpu or max(throttled, stolen) < _LOST:
        return None
    if throttled >= stolen:
        most, threads = max(1, int(run.machine.cpus)), run.host.threads
        fewer = "Use fewer worker processes" if run.facts.workers else "Stop other programs in this container"
        if threads is None or threads.torch_threads is None or threads.torch_threads > most:
            fewer = f"Compute with fewer threads, torch.set_num_threads({most})"
        found = f"the CPU quota of this container is used up {format_share(throttled)} of the time"
        return Advice(found, f"{fewer}, or raise the quota")
    return Advice(
        f"the host of this virtual machine gives {format_share(stolen)} of its CPU time to other machines",
        "Restart the runtime to get another machine"
        if current_place().is_for_one_notebook
        else "Use a machine with CPUs of its own",
        confidence="low",
    )


def long_pauses(run: RunProfile) -> Advice | None:
    """Report that a few steps take much longer than the others although their data is ready."""
    pauses = run.host.pauses
    # Checkpoints of `train()` have a separate rule.
    if pauses.share < max(_PAUSES, run.lost_to_thread) or run.save_share >= pauses.share / 2:
        return None
    every = format_count(max(2, round(pauses.steps)))
    spot = run.host.aside_spot or run.host.waiting_spot
    if spot is not None and spot.samples < pauses.share / 2 * run.host.samples:
        # The pauses take more time than this line, so it does not cause them.
        spot = None
    if spot is None and run.has_foreign_load:
        return None
    where = f", most often at {spot.place}" if spot is not None else ""
    return Advice(
        f"one in {every} steps takes {format_seconds(pauses.seconds)} longer than the others, which costs"
        f" {format_share(pauses.share)} of the time{where}",
        "Save, validate and log less often, or in the background",
        "",
        *_without(run, pauses.share),
        check="" if spot is None else _line(spot),
    )


def slow_checkpoints(run: RunProfile) -> Advice | None:
    """Advise fewer checkpoints if they delay `train()`."""
    if run.save_share < _PAUSES:
        return None
    return Advice(
        f"checkpoints hold up training {format_share(run.save_share)} of the time, for"
        f" {format_seconds(run.spent.save_s)} in total",
        Phrase(("Save less often, for example with ", option("save_every", "10min"), in_python(" in train()"))),
        "",
        *(_without(run, run.save_share) if run.save_share >= HIGH else _UNKNOWN),
        confidence="high",
    )


def slow_validation(run: RunProfile) -> Advice | None:
    """Advise a shorter validation if validations take longer than the training between them."""
    validate_s, train_s = run.spent.validate_s, run.spent.seconds
    if not validate_s or validate_s < train_s:
        return None
    passes = max(1, run.spent.passes)
    fewer = "Validate on fewer samples, with larger batches, or less often with "
    validating, training = format_seconds(validate_s / passes), format_seconds(train_s / passes)
    return Advice(
        f"validations take {validating} per epoch, and the training between them {training}",
        Phrase((fewer, option("validate_every"), in_python(" in train()"))),
        confidence="high",
    )


def slower_than_before(run: RunProfile) -> Advice | None:
    """Report that the run is much slower than in its fastest stretch."""
    slowdown = run.host.slowdown
    if slowdown.times < SLOWER or not run.is_enough:
        return None
    busiest = next((spot for spot in run.host.spots if run.host.share_of(spot) >= _TRAINS), None)
    where = f". Now, it spends most time at {busiest.place}" if busiest is not None else ""
    since = f", {format_seconds(slowdown.since_s)} ago" if slowdown.since_s else ""
    return Advice(
        f"a step takes {format_seconds(run.step.seconds)}, {slowdown.times:.1f} times as long as until step"
        f" {format_count(slowdown.since_step)}{since}{where}",
        "Look for what grows with the run, such as lists of tensors, or what has started since, such as other programs",
        "",
        *_limits(run, run.samples_per_s * slowdown.times),
        confidence="low",
        check="" if busiest is None else _line(busiest),
    )


def _line(spot: LoopSpot) -> str:
    seen = format_things(spot.samples, "sample")
    return f"{seen} found the loop at the line {spot.text!r}" if spot.text else f"{seen} found the loop there"


def _without(run: RunProfile, share: float, samples: int | None = None) -> _Speeds:
    """Return the speed after removing work that takes the given share of the time.

    Args:
        run: profile of the run.
        share: share of the time, in [0, 1].
        samples: number of stack samples from which the share was estimated; None if it was measured.
    """
    if share >= 1:
        return _UNKNOWN
    error = error_of_share(share, samples) if samples else 0.0
    now = run.samples_per_s
    _, low, _ = _limits(run, now / (1 - max(0.0, share - error)))
    _, _, high = _limits(run, now / (1 - min(_MOST_SHARE, share + error)))
    return now / (1 - share), low, max(high, now / (1 - share))


def _without_waiting(run: RunProfile) -> _Speeds:
    """Return the speeds without waits within the step; computing may also become faster."""
    expected, low, high = _without(run, run.host.waiting)
    return expected, low, None if high is None else high * cold_factor(run.host.waiting)


def _undisturbed(run: RunProfile, speeds: _Speeds) -> _Speeds:
    """Return the speeds after ending other work; the fastest steps, which ran undisturbed, set the upper limit."""
    expected, low, high = speeds
    fastest = _limits(run, run.step.samples / run.quick_s)[2] if run.quick_s else 0.0
    return expected, low, None if high is None else max(high, fastest)


def _limits(run: RunProfile, speed: float) -> Prediction:
    noise = 1 + spread(run)
    return speed, speed / noise, speed * noise

"""`diagnose()`: the verdict about a report, a loader that was used, or any loader that is timed for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

from colabkit.foundation import (
    HostSnapshot,
    InvalidOption,
    LoaderFacts,
    MetersSnapshot,
    Telemetry,
    cannot,
    format_rate,
    format_seconds,
    is_finite_number,
    kind_of,
    meters,
    sampled,
    seen,
)
from colabkit.loading import Loader
from colabkit.monitoring.doctor.case import Case, case_of
from colabkit.monitoring.doctor.diagnosis import Diagnosis, Shares
from colabkit.monitoring.doctor.judging import judged
from colabkit.monitoring.doctor.machine import SNAPSHOT_S
from colabkit.monitoring.doctor.watching import Watched, watch
from colabkit.training import HeadspaceReport, TrainReport, may_be_loader, read_run

_RECENT_S = 60.0
_WARM_UP = 3
_OF_A_STEP = ("wrong_device",)  # rules about steps, of which a loader by itself knows nothing


def diagnose(
    of: TrainReport | Iterable[Any] | str | os.PathLike[str] | None = None,
    *,
    seconds: float = 5.0,
    headspace: HeadspaceReport | None = None,
) -> Diagnosis:
    """Return what training waits for, where the time of a step goes, and at most three pieces of advice.

    Args:
        of: a `TrainReport`, or the path of one that was saved; a `Loader`, or another loader wrapped by `watch()`, that
            a loop has used; or any loader, as torch's `DataLoader`, which is then iterated by itself for a while: that
            tells how fast it is, and what would make it faster. None for what was trained or looped over last in this
            process; of loaders used in turn, as for training and validation, for the first.
        seconds: how long to iterate it, if it was not used before.
        headspace: what `headspace()` returned for the same step, which has to do all that a watched loop does with a
            batch: the speeds after each fix are then foretold by what the step takes alone. Else they go by the steps
            that went through least disturbed, which are few, and not undisturbed, where loader and step share a CPU.

    Raises:
        InvalidOption: if it is none of these, gives no batch, or nothing was trained yet; if `seconds` is no number or
            never ends; if `headspace` is something else, or no step was taken with the loader.
        SourceMissing, BadSource: if a path is not that of a saved report.
    """
    if headspace is not None and not isinstance(headspace, HeadspaceReport):
        found, needed = f"headspace is {kind_of(headspace)}", "what headspace() returned"
        raise InvalidOption(cannot("diagnose", found, needed, "Pass headspace=colabkit.headspace(step, loader)"))
    subject: Any = meters.latest() if of is None else of
    if subject is None:
        found, needed = "nothing that was trained or looped over in this process", "a TrainReport, or a loader"
        raise InvalidOption(cannot("diagnose", found, needed, "Train first, or name what to diagnose"))
    if isinstance(subject, meters.LoaderMeters):
        return _of_meters(subject, headspace)
    if isinstance(subject, TrainReport):
        return judged(_case(subject.spent, subject.facts, subject.hosts, subject.precision, headspace))
    if isinstance(of, str | os.PathLike):
        return judged(_case(*read_run(of), headspace))
    if not isinstance(subject, Loader | Watched) and not may_be_loader(subject):
        found, needed = f"{type(subject).__name__!r} is no loader", "a TrainReport, or what gives batches"
        raise InvalidOption(cannot("diagnose", found, needed, "Pass what train() returned, or a DataLoader"))
    loader = subject if isinstance(subject, Loader) else watch(subject)
    if loader.meters.snapshot().steps:
        return _of_meters(loader.meters, headspace)
    if headspace is not None:
        found, needed = "headspace beside a loader that no step was taken with", "one that was trained with"
        raise InvalidOption(cannot("diagnose", found, needed, "Pass the one that train() or a loop used"))
    return _by_itself(loader if isinstance(loader, Loader) else loader.anew(), seconds)


def _of_meters(counts: meters.LoaderMeters, headspace: HeadspaceReport | None) -> Diagnosis:
    spent = counts.snapshot()
    recent_s = min(_RECENT_S, sum(step.seconds for step in spent.recent))
    hosts = seen(counts.timed_s - recent_s - SNAPSHOT_S, counts.timed_s + SNAPSHOT_S) or (_host_now(),)
    return judged(_case(spent, counts.facts, hosts, headspace=headspace))


def _case(
    spent: MetersSnapshot,
    facts: LoaderFacts | None,
    hosts: Iterable[HostSnapshot],
    precision: str | None = None,
    headspace: HeadspaceReport | None = None,
) -> Case:
    case = case_of(spent, facts, [*hosts], precision=precision)
    return case if headspace is None else replace(case, measured_alone_s=1 / headspace.samples_per_s)


def _host_now() -> HostSnapshot:
    """Return the machine as it is where nothing has watched it."""
    with closing(Telemetry()) as telemetry:
        return telemetry.snapshot()


def _by_itself(loader: Loader | Watched[Any], seconds: float) -> Diagnosis:
    """Iterate a loader, and tell how fast it is."""
    if not is_finite_number(seconds):
        given_s = f"seconds={seconds!r}"
        raise InvalidOption(cannot("diagnose the loader", given_s, "a number of seconds", "Use seconds=5, say"))
    before = loader.meters.snapshot()
    aside = loader.aside() if isinstance(loader, Loader) else nullcontext(loader.meters)
    with sampled() as sampler, aside as counts:
        until = time.monotonic() + seconds
        for passes in count():
            given = 0
            batches: Any = iter(loader)
            with closing(batches):
                for _ in batches:
                    given += 1
                    if time.monotonic() > until and given + passes > _WARM_UP:
                        break
            if not given and not passes:
                raise InvalidOption(cannot("diagnose the loader", "no batches", "one at least", "Give it samples"))
            if not given or time.monotonic() > until:
                break
        hosts = sampler.recent(seconds)
    parts = (loader.meters.snapshot() - before).parts
    spent = replace(counts.snapshot(), parts=parts, first_pass=None)
    case = replace(_case(spent, loader.meters.facts, hosts), is_enough=True)
    found = judged(case, "unknown")
    rate = format_rate(case.samples_per_s, "images")
    a_batch = f"{format_seconds(case.step.seconds)} a batch of {case.step.samples} on average"
    return replace(
        found,
        sentence=f"The loader alone: {rate}, {a_batch}; faster steps wait for it",
        shares=Shares(),
        ceiling_samples_per_s=None,
        advice=tuple(
            replace(advice, samples_per_s=None, saved_s=None)
            for advice in found.advice
            if advice.rule not in _OF_A_STEP
        ),
    )

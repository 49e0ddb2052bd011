"""The verdict about a run and the most useful advice.

During a run, the verdict changes only if the run has clearly changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from colabkit.foundation import (
    HostSnapshot,
    LoaderFacts,
    MetersSnapshot,
    OptionRef,
    format_count,
    format_share,
    parts_of,
)
from colabkit.monitoring.diagnosing.diagnosis import HIGH, MODERATE, Advice, Diagnosis, Verdict
from colabkit.monitoring.diagnosing.forecast import forecast_run
from colabkit.monitoring.diagnosing.rules import RULES
from colabkit.monitoring.diagnosing.run_profile import ENOUGH_STEPS, SLOWER, RunProfile, profile_run

_THRESHOLDS: dict[Verdict, float] = {"data": HIGH, "copy": 0.10, "other": HIGH, "host": HIGH}
_HYSTERESIS = 0.03
# Number of consecutive diagnoses that must agree before the verdict changes.
_CONVINCED = 2
_MOST_ADVICE = 3
# Minimum predicted gain of advice, and of advice that may also have no effect.
_LEAST_GAIN, _LEAST_UNSURE_GAIN = 1.03, 1.15
# Number of epochs over whose total time pieces of advice are compared.
_EPOCHS = 10
_PARTS = {
    "read": "reading",
    "decode": "decoding",
    "augment": "transforming",
    "gather": "gathering rows",
    "samples": "loading samples in Python",
    "transfer": "copying",
}


class Doctor:
    """Diagnoses an active run; once given, a verdict changes only if two consecutive diagnoses agree on another.

    Args:
        precision: precision of the step: `"fp32"`, `"bf16"` or `"fp16"`; None if unknown.

    Attributes:
        epochs: values of the complete epochs, as in `RunProfile`.
        values: the newest values of a step, by name.
    """

    def __init__(self, *, precision: str | None = None) -> None:
        self.precision = precision
        self.epochs: Sequence[tuple[int, Mapping[str, float]]] = ()
        self.values: Mapping[str, float] = {}
        self._verdict: Verdict = "unknown"
        self._other: tuple[Verdict, int] = ("unknown", 0)

    def look(
        self,
        spent: MetersSnapshot,
        facts: LoaderFacts | None,
        hosts: Sequence[HostSnapshot] = (),
        cost_share: float | None = None,
        is_over: bool = False,
    ) -> Diagnosis:
        """Return the current diagnosis.

        Args:
            spent: the loader's meters for the run so far.
            facts: facts about the loader; None if unknown.
            hosts: the newest snapshots of the machine, oldest first.
            cost_share: share of the run time that the panel took, in [0, 1]; None if unknown.
            is_over: whether the run has ended.
        """
        run = profile_run(spent, facts, hosts, cost_share=cost_share, precision=self.precision)
        run = replace(run, epochs=self.epochs, values=self.values)
        settled = self._settled(run)
        # At the end, give the same verdict as `doctor()`, even if it is new.
        return judge(run, None if is_over else settled, is_over=is_over)

    def _settled(self, run: RunProfile) -> Verdict:
        if not run.is_enough:
            return self._verdict
        now = find_verdict(run, self._verdict)
        if self._verdict in ("unknown", now):
            self._verdict, self._other = now, (now, 0)
            return now
        name, times = self._other
        self._other = now, times + 1 if now == name else 1
        if self._other[1] >= _CONVINCED:
            self._verdict = now
        return self._verdict


def find_verdict(run: RunProfile, standing: Verdict = "unknown") -> Verdict:
    """Return the bottleneck: the largest of the avoidable shares that reach their thresholds.

    Without one, it is the host if the run has become much slower, else the step itself.
    """
    found: list[tuple[float, Verdict]] = [
        (max(run.input_share, run.start_share), "data"),
        (run.shares.copy, "copy"),
        (run.other_share, "other"),
        (run.host_share, "host"),
    ]
    large = [
        (share, name) for share, name in found if share >= _THRESHOLDS[name] - (_HYSTERESIS if name == standing else 0)
    ]
    if large:
        return max(large)[1]
    return "host" if run.host.slowdown.times >= SLOWER else "compute"


def judge(run: RunProfile, verdict: Verdict | None = None, *, is_over: bool = True) -> Diagnosis:
    """Return the diagnosis of a run.

    Args:
        run: profile of the run.
        verdict: verdict to report; None to derive it from the profile.
        is_over: whether the run has ended.
    """
    if verdict is None:
        verdict = find_verdict(run) if run.is_enough else "unknown"
    forecast = forecast_run(run)
    rules = RULES if run.is_enough else [rule for rule in RULES if rule.headline]
    given = [advice for rule in rules if (advice := rule(run)) is not None and _can_be_followed(run, advice)]
    best = _best(run, given)
    headlines = [rule.headline for rule in RULES if rule.headline and any(one.rule == rule.name for one in best)]
    return Diagnosis(
        verdict=verdict,
        sentence=". ".join([*headlines, _sentence(run, verdict, is_over)]),
        shares=run.shares,
        step_s=run.step.seconds,
        samples_per_s=run.samples_per_s,
        ceiling_samples_per_s=forecast.without_loader() if run.is_enough else None,
        bottleneck=run.bottleneck if run.is_enough else None,
        advice=best,
        steps=run.steps,
    )


def _can_be_followed(run: RunProfile, advice: Advice) -> bool:
    """Return whether the user can set all options that the advice names, if another call than the user's set them."""
    if not run.facts.settable or not advice.call:
        return True
    return all(isinstance(one, OptionRef) and one.name in run.facts.settable for one in parts_of(advice.call))


def _best(run: RunProfile, given: list[Advice]) -> tuple[Advice, ...]:
    now = run.samples_per_s
    useful: dict[str, Advice] = {}
    for advice in given:
        is_unsure = (advice.low_samples_per_s or now) < now
        least = _LEAST_UNSURE_GAIN if is_unsure else _LEAST_GAIN
        if advice.samples_per_s is not None and advice.samples_per_s < least * now:
            continue
        if advice.saved_s is None and advice.samples_per_s is not None and run.facts.samples and now:
            saved_s = run.facts.samples / now - run.facts.samples / advice.samples_per_s
            advice = replace(advice, saved_s=saved_s)  # noqa: PLW2901
        useful[advice.rule] = advice
    silenced = {name for rule in RULES if rule.name in useful for name in rule.silences}
    fitting = [advice for advice in useful.values() if advice.rule not in silenced]
    urgent = {rule.name for rule in RULES if rule.is_urgent}

    def rank(advice: Advice) -> tuple[int, float]:
        urgency = 0 if advice.rule in urgent else 1 if advice.samples_per_s else 2
        if advice.samples_per_s and advice.cost_s and run.facts.samples:
            # Compare the total time of some epochs, including the time that the fix itself takes.
            total = _EPOCHS * run.facts.samples
            return urgency, -total / (total / advice.samples_per_s + advice.cost_s)
        return urgency, -(advice.samples_per_s or 0.0)

    once: dict[str, Advice] = {}
    for advice in sorted(fitting, key=rank):
        once.setdefault(advice.call or advice.rule, advice)
    return (*once.values(),)[:_MOST_ADVICE]


def _sentence(run: RunProfile, verdict: Verdict, is_over: bool) -> str:
    shares = run.shares
    slowest = f": {_PARTS[run.bottleneck]} is the slowest part" if run.bottleneck in _PARTS else ""
    match verdict:
        case "unknown":
            steps = f"{format_count(run.steps)} of {ENOUGH_STEPS}"
            return f"Too few steps for a diagnosis: {steps}" if is_over else f"Measuring the first steps: {steps}"
        case "data" if run.start_share > run.input_share:
            return f"The start of each epoch takes {format_share(run.start_share)} of the time"
        case "data":
            if run.stolen_s < run.step.wait_s:
                return f"Training waits for data {format_share(shares.wait)} of the time{slowest}"
            taken = format_share(run.stolen_s / run.step.seconds)
            waits = f", and waiting for data {format_share(shares.wait)}" if shares.wait >= MODERATE else ""
            return f"Sharing the CPU with the loader costs {taken} of the time{waits}{slowest}"
        case "copy":
            return f"Training waits for copies to the GPU {format_share(shares.copy)} of the time"
        case "other" if shares.other >= run.host.aside:
            return f"Other work between steps takes {format_share(shares.other)} of the time"
        case "other":
            return f"Work that does not use torch takes {format_share(run.host.aside)} of the time"
        case "host":
            return _host_sentence(run)
    if shares.wait >= MODERATE:
        return f"Training waits for data only {format_share(shares.wait)} of the time{slowest}"
    return f"Data keeps up: the step itself takes {format_share(shares.compute)} of the time"


def _host_sentence(run: RunProfile) -> str:
    host, share = run.host, format_share(run.host_share)
    if run.host_share < _THRESHOLDS["host"] - _HYSTERESIS:
        return f"Training is {host.slowdown.times:.1f} times as slow as in its fastest stretch"
    if host.straggling >= HIGH:
        return f"All ranks wait for rank {host.straggler} {format_share(host.straggling)} of the time"
    if run.host_share == host.waiting:
        if host.is_gil_held and host.busy_thread is not None:
            return f"Another thread holds the step up {share} of the time"
        where = "" if host.waiting_spot is None else f", at {host.waiting_spot.place}"
        does = "sleeps" if host.knows_waits else "sleeps or has no CPU"
        return f"The step {does} {share} of the time, although its data is ready{where}"
    if run.host_share == host.held:
        return f"The step waits for a free CPU {share} of the time"
    if run.host_share == run.save_share:
        return f"Checkpoints hold up training {share} of the time"
    if run.host_share == host.pauses.share:
        return f"Long pauses take {share} of the time"
    return f"Validations take {share} of the time"

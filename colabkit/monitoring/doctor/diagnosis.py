"""The doctor's report: a verdict, where the time of a step goes, and at most three pieces of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from colabkit.foundation import Report, format_rate, format_seconds, format_share

MODERATE, HIGH = 0.05, 0.20
"""Shares of a step that waiting for data may take. Source: TensorFlow's profiler, input_pipeline_analysis.py."""

Verdict: TypeAlias = Literal["data", "copy", "compute", "other", "unknown"]
_MOST_TIMES = 100  # as fast: more than that is a loop that does nothing else
Confidence: TypeAlias = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step's time in [0, 1]; they add up to 1, or are all 0 where nothing was timed.

    Attributes:
        wait: waiting for data.
        copy: waiting for a copy to the device that nothing hid.
        compute: the step itself.
        other: other work of the host.
    """

    wait: float = 0.0
    copy: float = 0.0
    compute: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What would make a run faster, or safer.

    Attributes:
        found: what was found, with its numbers.
        action: what to do, one sentence in the imperative.
        call: the line of Python that does it; empty if there is none.
        samples_per_s: speed after it at most: that of the slowest part which remains; None where it is not about speed.
        saved_s: seconds that it saves in an epoch; None where not known.
        confidence: in the prediction.
        check: how to check it.
        rule: name of the rule that gave it.
    """

    found: str
    action: str
    call: str = ""
    samples_per_s: float | None = None
    saved_s: float | None = None
    confidence: Confidence = "medium"
    check: str = ""
    rule: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(Report):
    """What training waits for, and what would fix it.

    Attributes:
        verdict: what limits the speed: `"data"`, `"copy"`, `"compute"` (the step itself), `"other"` (work of the host
            beside it), or `"unknown"`.
        sentence: the verdict in words, with its numbers.
        shares: where the time of a typical step goes: the mean of the middle half, so that a few stragglers, starts of
            epochs and pauses for checkpoints, which are part of a `TrainReport`'s averages, do not count.
        step_s: seconds of such a step.
        samples_per_s: samples a second of such steps.
        ceiling_samples_per_s: samples a second if data were always there; None where not known.
        bottleneck: the loader's part that limits it, as in `"decode"`; None where data does not, or it is not known.
        advice: what would help, the best first, at most three.
        steps: how many steps this is judged by.
    """

    verdict: Verdict
    sentence: str
    shares: Shares
    step_s: float
    samples_per_s: float
    ceiling_samples_per_s: float | None
    bottleneck: str | None
    advice: tuple[Advice, ...]
    steps: int

    @property
    def is_good(self) -> bool:
        """Whether nothing holds training up but the step itself."""
        return self.verdict in ("compute", "unknown")

    @property
    def needs_nothing(self) -> bool:
        """Whether data keeps up, so that without advice there is nothing to fix in how it is loaded."""
        return self.verdict == "compute" and self.shares.wait < MODERATE

    def _summary(self) -> str:
        lines = [self.sentence]
        if self.samples_per_s and self.verdict != "unknown":
            lines[0] += f"; {format_rate(self.samples_per_s, 'images')} in a typical step"
            if self.ceiling_samples_per_s and self.ceiling_samples_per_s > 1.05 * self.samples_per_s:
                ceiling = format_rate(min(self.ceiling_samples_per_s, _MOST_TIMES * self.samples_per_s), "images")
                over = "over " * (self.ceiling_samples_per_s > _MOST_TIMES * self.samples_per_s)
                lines[0] += f", {over}{ceiling} if data were always there"
        if not self.advice and self.verdict != "unknown":
            lines.append("Nothing to fix in how data is loaded" if self.needs_nothing else "No advice")
        for number, advice in enumerate(self.advice, 1):
            lines.append(f"{number}. {advice.action}{_gain(advice, self.samples_per_s)}: {advice.found}")
            if advice.call:
                lines.append(f"   {advice.call}")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        shares = self.shares
        named = {"waiting for data": shares.wait, "copying": shares.copy, "the step": shares.compute}
        rows: list[tuple[str, ...]] = []
        if any((shares.wait, shares.copy, shares.compute, shares.other)):
            for name, share in {**named, "other work": shares.other}.items():
                rows.append((name, format_share(share), format_seconds(self.step_s * share) if share else ""))
        for number, advice in enumerate(self.advice, 1):
            gain = _gain(advice, self.samples_per_s).strip(" ()")
            rows.append((f"advice {number}", advice.action, advice.call))
            rows.append(("", advice.found, " · ".join(filter(None, [gain, f"confidence {advice.confidence}"]))))
            if advice.check:
                rows.append(("", f"to check: {advice.check}", ""))
        return rows


def _gain(advice: Advice, now: float) -> str:
    if advice.samples_per_s is None or not now:
        return ""
    saved = "" if advice.saved_s is None else f", {format_seconds(advice.saved_s)} less an epoch"
    times = advice.samples_per_s / now
    # A prediction is a bound: the speed of the slowest part that remains.
    return f" ({f'up to {times:.1f}' if times <= _MOST_TIMES else f'over {_MOST_TIMES}'} times as fast{saved})"

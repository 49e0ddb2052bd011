"""The doctor's report: a verdict, the shares of the step time, and up to three pieces of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from colabkit.foundation import Report, format_rate, format_seconds, format_share

MODERATE, HIGH = 0.05, 0.20
"""Thresholds for the share of the step time spent waiting for data, as in TensorFlow's input_pipeline_analysis.py."""

Verdict: TypeAlias = Literal["data", "copy", "compute", "other", "host", "unknown"]
# Speedups above this are reported as "over 100"; they occur in loops that do no work.
_MOST_TIMES = 100


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the step time, in [0, 1]. They add up to 1, or are all 0 if no training was timed.

    Attributes:
        wait: waiting for data.
        copy: copies to the device that do not overlap with compute.
        compute: the step itself.
        other: other work on the host.
    """

    wait: float = 0.0
    copy: float = 0.0
    compute: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """A way to make a run faster or safer.

    Attributes:
        found: the observation, with its numbers.
        action: the recommended action, one imperative sentence.
        call: Python code for the action, one statement per line; empty if there is none. Names such as `dataset`,
            `loader` and `model` stand for your objects. A line such as `num_workers=8` is a new value of an option.
        samples_per_s: expected speed after the fix; None if no speed is predicted.
        low_samples_per_s: lower limit of that speed.
        high_samples_per_s: upper limit of that speed.
        cost_s: seconds that the action itself takes once, such as packing; None if unknown or if it takes no time.
        saved_s: seconds saved per epoch; None if unknown.
        confidence: confidence in the prediction.
        check: how to verify the effect; may be empty.
        rule: name of the rule that gave the advice.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> diagnosis = colabkit.doctor(colabkit.Loader(data, batch_size=64), seconds=0.5)
        >>> actions = [advice.action for advice in diagnosis.advice]
        >>> len(actions) <= 3
        True
    """

    found: str
    action: str
    call: str = ""
    samples_per_s: float | None = None
    low_samples_per_s: float | None = None
    high_samples_per_s: float | None = None
    cost_s: float | None = None
    saved_s: float | None = None
    confidence: Literal["high", "medium", "low"] = "medium"
    check: str = ""
    rule: str = ""


@dataclass(frozen=True, repr=False)
class Diagnosis(Report):
    """The bottleneck of a training run and how to fix it.

    Attributes:
        verdict: the bottleneck: `"data"`, `"copy"`, `"compute"` (the step itself), `"other"` (other work in the loop,
            such as logging), `"host"` (the step is delayed by other processes or threads, by a call that blocks, or by
            pauses, or the run has become much slower), or `"unknown"`.
        sentence: the verdict as a sentence, with its numbers.
        shares: how the time of a typical step is split. A typical step is the mean of the middle half of the steps, so
            that stragglers, starts of epochs and pauses for checkpoints are excluded, unlike in the averages of a
            `TrainReport`.
        step_s: seconds of a typical step.
        samples_per_s: samples per second at typical steps.
        ceiling_samples_per_s: samples per second if data were always ready; None if unknown.
        bottleneck: the loader part that limits the speed, for example `"decode"`; None if data is not the bottleneck
            or the part is unknown.
        advice: up to three pieces of advice, the best first.
        steps: number of steps that the diagnosis is based on.
    """

    verdict: Literal["data", "copy", "compute", "other", "host", "unknown"]
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
        """Whether no bottleneck was found outside the step: the verdict is `"compute"` or `"unknown"`."""
        return self.verdict in ("compute", "unknown")

    @property
    def needs_nothing(self) -> bool:
        """Whether the bottleneck is the step itself, and waiting for data takes little of the time."""
        return self.verdict == "compute" and self.shares.wait < MODERATE

    def _summary(self) -> str:
        lines = [self.sentence]
        if self.samples_per_s and self.verdict != "unknown":
            lines[0] += f"; {format_rate(self.samples_per_s, 'images')} in a typical step"
            if self.ceiling_samples_per_s and self.ceiling_samples_per_s > 1.05 * self.samples_per_s:
                ceiling = format_rate(min(self.ceiling_samples_per_s, _MOST_TIMES * self.samples_per_s), "images")
                over = "over " * (self.ceiling_samples_per_s > _MOST_TIMES * self.samples_per_s)
                lines[0] += f", {over}{ceiling} if data were always ready"
        if not self.advice and self.verdict != "unknown":
            lines.append("Data loading needs no fix" if self.needs_nothing else "No advice")
        for number, advice in enumerate(self.advice, 1):
            action = self._words.render(advice.action)
            lines.append(f"{number}. {action}{_effect(advice, self.samples_per_s)}: {advice.found}")
            lines += [f"   {line}" for line in self._words.render(advice.call).splitlines()]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        shares = self.shares
        named = {"waiting for data": shares.wait, "copying": shares.copy, "the step": shares.compute}
        rows: list[tuple[str, ...]] = []
        if any((shares.wait, shares.copy, shares.compute, shares.other)):
            for name, share in {**named, "other work": shares.other}.items():
                rows.append((name, format_share(share), format_seconds(self.step_s * share) if share else ""))
        for number, advice in enumerate(self.advice, 1):
            effect = _effect(advice, self.samples_per_s).strip(" ()")
            call = "; ".join(self._words.render(advice.call).splitlines())
            rows.append((f"advice {number}", self._words.render(advice.action), call))
            rows.append(("", advice.found, " · ".join(filter(None, [effect, f"confidence {advice.confidence}"]))))
            if advice.check:
                rows.append(("", f"to check: {self._words.render(advice.check)}", ""))
        return rows


def gain_text(advice: Advice, now: float) -> str:
    """Return the predicted speedup as text, such as `"1.8–2.4"`; an empty string without a prediction."""
    if advice.samples_per_s is None or not now:
        return ""
    low = (advice.low_samples_per_s or advice.samples_per_s) / now
    high = (advice.high_samples_per_s or advice.samples_per_s) / now
    if low > _MOST_TIMES:
        return f"over {_MOST_TIMES}"
    few, many = f"{low:.1f}", f"{high:.1f}" if high <= _MOST_TIMES else f"over {_MOST_TIMES}"
    return few if few == many else f"{few}–{many}"


def _effect(advice: Advice, now: float) -> str:
    times = gain_text(advice, now)
    effects = [f"{times} times as fast"] if times else []
    effects += [f"saving {format_seconds(advice.saved_s)} per epoch"] if times and advice.saved_s is not None else []
    effects += [f"takes {format_seconds(advice.cost_s)} once"] if advice.cost_s is not None else []
    return f" ({', '.join(effects)})" if effects else ""

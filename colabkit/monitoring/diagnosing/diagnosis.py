"""The doctor's report: a verdict, the shares of the step time, and up to three pieces of advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from colabkit.foundation import (
    Code,
    InvalidOption,
    Report,
    call,
    cannot,
    format_rate,
    format_seconds,
    format_share,
    format_things,
)

if TYPE_CHECKING:
    from colabkit.training import Stateful

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
    """The bottleneck of a training run, and the fixes for it.

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
    _subject: ClassVar[Subject | None] = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the loader, for a pickle."""
        return {name: value for name, value in vars(self).items() if name != "_subject"}

    def apply(
        self,
        *,
        step: Callable[[Any], object] | None = None,
        state: Mapping[str, Stateful] | None = None,
        seconds: float | str = 10.0,
    ) -> TrialReport:
        """Try the first piece of advice that can be tried without you, and measure its gain.

        These can be tried: other options of a `Loader` or of torch's `DataLoader`, such as `num_workers=`, and packing,
        for which some of the samples are packed into a temporary folder. Rounds with and without the change
        alternate. Your loader, your model, the random generators and your files stay unchanged. A custom sampler is
        replaced by a random order.

        Args:
            step: step function, as for `train()`. None replaces it by a computation that takes as long as your step
                does without a loader, or by nothing if the loader was measured alone.
            state: objects that the step changes, by name, so that they can be restored. None means the model and
                optimizer of `supervised_step`.
            seconds: how long to measure, in seconds or as text such as `"1min"`. Slow loaders take longer, since each
                round has at least three steps.

        Returns:
            The measured gain with its limits, and the prediction.

        Raises:
            InvalidOption: if the loader is unknown, since a report was diagnosed; if there is no advice, or none that
                can be tried; or if an argument is invalid. The message describes how to try the advice yourself.

        Example:
            >>> import colabkit, time, torch
            >>> class Slow(torch.utils.data.Dataset):
            ...     def __len__(self):
            ...         return 400
            ...     def __getitem__(self, number):
            ...         time.sleep(0.002)
            ...         return torch.zeros(3, 8, 8), number % 2
            >>> loader = torch.utils.data.DataLoader(Slow(), batch_size=8)
            >>> trial = colabkit.doctor(loader, seconds=0.5).apply(seconds=1)
            >>> trial.gain > 1
            True
        """
        if self._subject is None:
            next_step = ("Pass the loader that you trained with: ", call("doctor", Code("loader")))
            raise InvalidOption(cannot("try the advice", "the diagnosis is not of a loader", "", next_step))
        return self._subject.try_advice(self, step, state, seconds)

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


class Subject(Protocol):
    """A loader, on which advice can be tried."""

    def try_advice(
        self,
        diagnosis: Diagnosis,
        step: Callable[[Any], object] | None,
        state: Mapping[str, Stateful] | None,
        seconds: float | str,
    ) -> TrialReport:
        """Try the first piece of advice that can be tried; see `Diagnosis.apply()`."""


@dataclass(frozen=True, repr=False)
class TrialReport(Report):
    """The measured gain of a piece of advice.

    Attributes:
        advice: the advice.
        gain: how many times as fast the run is with the advice: the median of the rounds.
        low_gain: lower limit of the gain: the lowest of the rounds.
        high_gain: upper limit of the gain: the highest of the rounds.
        predicted_gain: predicted gain; None if the doctor predicted none.
        low_predicted_gain: lower limit of the predicted gain.
        high_predicted_gain: upper limit of the predicted gain.
        samples_per_s: samples per second without the advice, in the trial.
        new_samples_per_s: samples per second with the advice, in the trial.
        rounds: number of rounds, each with and without the advice.
        step: what was done with each batch: `"given"` for the step that you passed, `"imitated"` for a computation of
            the same duration, or `"none"` if the loaders were measured alone.
        packed_samples: number of samples that were packed for the trial; None if none were.
        untried: the advice before this one, each with the reason why it cannot be tried automatically.

    Example:
        >>> import colabkit, torch
        >>> data = torch.utils.data.TensorDataset(torch.rand(4000, 3, 32, 32), torch.zeros(4000))
        >>> diagnosis = colabkit.doctor(torch.utils.data.DataLoader(data, batch_size=16), seconds=0.5)
        >>> trial = diagnosis.apply(seconds=0.5)
        >>> trial.low_gain <= trial.gain <= trial.high_gain
        True
    """

    advice: Advice
    gain: float
    low_gain: float
    high_gain: float
    predicted_gain: float | None
    low_predicted_gain: float | None
    high_predicted_gain: float | None
    samples_per_s: float
    new_samples_per_s: float
    rounds: int
    step: Literal["given", "imitated", "none"]
    packed_samples: int | None = None
    untried: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the run was faster with the advice in every round."""
        return self.low_gain > 1

    @property
    def is_as_predicted(self) -> bool | None:
        """Whether the gain is within the limits of the prediction; None without a prediction."""
        if self.low_predicted_gain is None or self.high_predicted_gain is None:
            return None
        return self.low_predicted_gain <= self.gain <= self.high_predicted_gain

    def _summary(self) -> str:
        measured = f"{_times(self.low_gain, self.high_gain)} times as fast in {format_things(self.rounds, 'round')}"
        lines = [f"{self._words.render(self.advice.action)}: {measured}{self._prediction(', predicted ')}"]
        lines += [f"   {line}" for line in self._words.render(self.advice.call).splitlines()]
        lines += [f"Not tried: {one}" for one in self.untried]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        done = {"given": "your step", "imitated": "computes as long as your step", "none": "loaders alone"}[self.step]
        packed = [] if self.packed_samples is None else [format_things(self.packed_samples, "packed sample")]
        return [
            ("before", format_rate(self.samples_per_s, "images"), done),
            ("after", format_rate(self.new_samples_per_s, "images"), ", ".join([done, *packed])),
            ("gain", f"{self.gain:.2f} times", self._prediction("predicted ")),
        ]

    def _prediction(self, before: str) -> str:
        if self.low_predicted_gain is None or self.high_predicted_gain is None:
            return ""
        return f"{before}{_times(self.low_predicted_gain, self.high_predicted_gain)}"


def gain_text(advice: Advice, now: float) -> str:
    """Return the predicted speedup as text, such as `"1.8–2.4"`; an empty string without a prediction.

    If the advice may have no effect, only the upper limit is given, such as `"up to 1.4"`.
    """
    if (limits := _gain_limits(advice, now)) is None:
        return ""
    low, high = limits
    return _times(low, high) if low >= 1 else f"up to {_times(high, high)}"


def _gain_limits(advice: Advice, now: float) -> tuple[float, float] | None:
    if advice.samples_per_s is None or not now:
        return None
    speeds = (advice.low_samples_per_s or advice.samples_per_s, advice.high_samples_per_s or advice.samples_per_s)
    return speeds[0] / now, speeds[1] / now


def _times(low: float, high: float) -> str:
    if low > _MOST_TIMES:
        return f"over {_MOST_TIMES}"
    few, many = f"{low:.1f}", f"{high:.1f}" if high <= _MOST_TIMES else f"over {_MOST_TIMES}"
    return few if few == many else f"{few}–{many}"


def _effect(advice: Advice, now: float) -> str:
    effects = []
    if (limits := _gain_limits(advice, now)) is not None:
        effects.append(f"{gain_text(advice, now)} times as fast{', or no faster' if limits[0] < 1 else ''}")
        effects += [f"saving {format_seconds(advice.saved_s)} per epoch"] if advice.saved_s is not None else []
    effects += [f"takes {format_seconds(advice.cost_s)} once"] if advice.cost_s is not None else []
    return f" ({', '.join(effects)})" if effects else ""


def set_subject(diagnosis: Diagnosis, subject: Subject) -> Diagnosis:
    """Set the loader on which `diagnosis.apply()` tries the advice; return the diagnosis."""
    object.__setattr__(diagnosis, "_subject", subject)
    return diagnosis

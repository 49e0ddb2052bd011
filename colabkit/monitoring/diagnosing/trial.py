"""Trials of advice: measure a loader with and without a change, in alternating rounds, and restore everything."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from colabkit.foundation import (
    InvalidOption,
    StepTimes,
    cannot,
    check_duration,
    file_changes,
    local_root,
    partials,
)
from colabkit.loading import Loader, samples_in
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis, TrialReport
from colabkit.monitoring.diagnosing.forecast import forecast_run
from colabkit.monitoring.diagnosing.run_profile import RunProfile, settled_steps, typical_step
from colabkit.monitoring.diagnosing.trial_loaders import (
    NotTriable,
    changes_of,
    check_is_copyable,
    copy_of,
    is_packing,
    packed_copy_of,
    references_of,
    stop_workers,
)
from colabkit.training import Stateful, check_step, restored_training

_ACT = "try the advice"
# All five gains lie on the same side of the true one in only one of 16 trials.
_ROUNDS = 5
# A measurement has at least this many steps, even if it then takes longer.
_LEAST_STEPS = 3
# Limits of the number of samples that are packed for a trial.
_LEAST_BATCHES, _MOST_SAMPLES, _MOST_BYTES = 4, 4096, 256 << 20
# Side of the matrices whose products imitate a step, number of timed products, and the shortest sleep of the step.
_SIDE, _CALIBRATIONS, _LEAST_SLEEP_S = 128, 50, 1e-4

Step = Callable[[Any], object]


@dataclass(frozen=True)
class LoaderOnTrial:
    """A loader on which the advice about its run can be tried.

    Attributes:
        loader: the loader.
        run: profile of the run; its step is imitated.
        is_alone: whether the run had no step.
    """

    loader: Any
    run: RunProfile
    is_alone: bool

    def try_advice(
        self, diagnosis: Diagnosis, step: Step | None, state: Mapping[str, Stateful] | None, seconds: float | str
    ) -> TrialReport:
        """Try the first piece of advice that can be tried; see `Diagnosis.apply()`."""
        duration_s = check_duration(_ACT, "seconds", seconds, example=10)
        if step is not None:
            check_step(_ACT, "headspace", step, self.loader, is_any_loader=True)
        if not diagnosis.advice:
            next_step = "Diagnose again after more steps, or when training has become slow"
            raise InvalidOption(cannot(_ACT, "the diagnosis contains none", "", next_step))
        refused: list[NotTriable] = []
        with restored_training(_ACT, step, state), ExitStack() as stack:
            for advice in diagnosis.advice:
                try:
                    before, after = self._loaders(advice, duration_s, stack)
                except NotTriable as error:
                    refused.append(error)
                    continue
                does: Step = self._imitated() if step is None else step
                pairs = _measured(before, after, does, duration_s)
                return self._report(diagnosis, advice, pairs, step, after, refused)
        first = refused[0]
        found = (repr(str(diagnosis.advice[0].action)), f" cannot be tried automatically, since {first.reason}")
        raise InvalidOption(cannot(_ACT, found, "", first.next_step))

    def _loaders(self, advice: Advice, seconds: float, stack: ExitStack) -> tuple[Iterable[Any], Iterable[Any]]:
        references = references_of(advice)
        packs = is_packing(references)
        changes = {} if packs else changes_of(references, self.loader)
        check_is_copyable(self.loader)
        before = copy_of(self.loader)
        stack.callback(stop_workers, before)
        if not packs:
            after = copy_of(self.loader, **changes)
            stack.callback(stop_workers, after)
            return before, after
        partial = stack.enter_context(partials.Partial(local_root(os.environ).absolute() / "trial"))
        with file_changes.translated(_ACT):
            file_changes.make_folder(partial.path)
        samples = self._samples(advice, seconds)
        return before, packed_copy_of(self.loader, references, partial.path, samples)

    def _samples(self, advice: Advice, seconds: float) -> int:
        """Return the number of samples that can be packed in half of the time, within limits."""
        run, batch = self.run, max(1, self.run.step.samples)
        samples = run.facts.samples or _MOST_SAMPLES
        a_sample_s = (advice.cost_s or 0.0) / samples or (1 / run.samples_per_s if run.samples_per_s else 0.0)
        most = min(_MOST_SAMPLES, seconds / 2 / a_sample_s if a_sample_s else _MOST_SAMPLES)
        most = min(most, _MOST_BYTES / max(1.0, run.facts.sample_bytes or 1.0))
        return max(_LEAST_BATCHES * batch, int(most))

    def _imitated(self) -> Step:
        """Return a step that computes and waits for as long as the run's step does without a loader."""
        if self.is_alone:
            return lambda _: None
        costs = forecast_run(self.run)
        factor = torch.ones(_SIDE, _SIDE, device="cpu")
        products = round(costs.held_s / _product_s(factor))
        sleep_s = costs.step_s - costs.held_s

        def step(_: Any) -> None:
            for _ in range(products):
                torch.mm(factor, factor)
            if sleep_s >= _LEAST_SLEEP_S:
                time.sleep(sleep_s)

        return step

    def _report(
        self,
        diagnosis: Diagnosis,
        advice: Advice,
        pairs: Sequence[tuple[float, float]],
        step: Step | None,
        after: Iterable[Any],
        refused: Sequence[NotTriable],
    ) -> TrialReport:
        gains = [new / old for old, new in pairs]
        now = diagnosis.samples_per_s
        speeds = (advice.samples_per_s, advice.low_samples_per_s, advice.high_samples_per_s)
        predicted, low, high = (speed / now if speed and now else None for speed in speeds)
        done: Literal["given", "imitated", "none"] = "none" if self.is_alone else "imitated"
        return TrialReport(
            advice,
            median(gains),
            min(gains),
            max(gains),
            predicted,
            low,
            high,
            median(old for old, _ in pairs),
            median(new for _, new in pairs),
            len(pairs),
            "given" if step is not None else done,
            packed_samples=len(after.dataset) if is_packing(references_of(advice)) else None,  # type: ignore[attr-defined]
            untried=tuple(
                f"{one.action}, since {error.reason}" for one, error in zip(diagnosis.advice, refused, strict=False)
            ),
        )


def _product_s(factor: torch.Tensor) -> float:
    """Return the seconds that a product of matrices takes without interference from other programs."""
    took_s = []
    for _ in range(_CALIBRATIONS):
        began_s = time.perf_counter()
        torch.mm(factor, factor)
        took_s.append(time.perf_counter() - began_s)
    return max(min(took_s), 1e-9)


def _measured(before: Iterable[Any], after: Iterable[Any], step: Step, seconds: float) -> list[tuple[float, float]]:
    """Return the samples per second of both loaders in each round; the first round, a warm-up, does not count."""
    pairs = []
    for number in range(_ROUNDS + 1):
        speeds: dict[int, float] = {}
        # The second loader of a round may profit from data that the first one has read.
        for place in (0, 1) if number % 2 else (1, 0):
            speeds[place] = _speed_of((before, after)[place], step, seconds / 2 / (_ROUNDS + 1), number)
        pairs.append((speeds[0], speeds[1]))
    return pairs[1:]


def _speed_of(loader: Any, step: Step, seconds: float, epoch: int) -> float:
    """Return the samples per second of a typical step, measured for a few seconds from the first batch on."""
    steps: list[StepTimes] = []
    until_s = math.inf
    if isinstance(loader, Loader):
        loader.set_epoch(epoch)
    with loader.aside() if isinstance(loader, Loader) else nullcontext():
        asked_s = time.perf_counter()
        while len(steps) < _LEAST_STEPS or asked_s < until_s:
            asked_s, is_first = time.perf_counter(), True
            batches: Any = iter(loader)
            with closing(batches) if isinstance(batches, Generator) else nullcontext():
                for batch in batches:
                    given_s = time.perf_counter()
                    step(batch)
                    left_s = time.perf_counter()
                    steps.append(StepTimes(given_s - asked_s, 0.0, left_s - given_s, 0.0, samples_in(batch), is_first))
                    asked_s, is_first = left_s, False
                    until_s = min(until_s, left_s + seconds)
                    if left_s > until_s and len(steps) >= _LEAST_STEPS:
                        break
            if is_first:
                raise InvalidOption(
                    cannot(_ACT, "the loader yields no batches", "", "Check that its dataset is not empty")
                )
    typical = typical_step(settled_steps(steps))
    return max(1, typical.samples) / typical.seconds

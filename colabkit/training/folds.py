"""`k_fold()`: cross-validation over one pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy.typing as npt
from torch import nn

from colabkit.foundation import (
    Code,
    InvalidOption,
    Report,
    call,
    cannot,
    check_callable,
    check_type,
    check_whole_number,
    checked_call,
    format_things,
    kind_of,
    meters,
)
from colabkit.packs import PackedDataset
from colabkit.training.records import is_number
from colabkit.training.report import TrainReport


@dataclass(frozen=True, repr=False)
class KFoldReport(Report):
    """Results of a cross-validation.

    Attributes:
        folds: return value of `run` for each complete fold: the report of `train()`, or a dict of numbers.
        values: final numbers of each complete fold: those of its last epoch, with those of its last validation. A
            validation number whose name training also uses gets a prefix, as in `val_loss`.
        mean: mean of each number over the folds that have it.
        spread: sample standard deviation of each number over these folds; 0 for a single fold, NaN if a value is not
            finite.
        stopped: reason why training of the next fold stopped early, such as `"deadline"`; None if all folds are
            complete.
    """

    folds: tuple[TrainReport | Mapping[str, float], ...]
    values: tuple[Mapping[str, float], ...]
    mean: Mapping[str, float]
    spread: Mapping[str, float]
    stopped: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether all folds are complete."""
        return self.stopped is None

    def _summary(self) -> str:
        means = ", ".join(f"{name} {value:.4g} ± {self.spread[name]:.2g}" for name, value in self.mean.items())
        stopped = f"; stopped by {self.stopped}; make the same call again to continue" if self.stopped else ""
        return f"{format_things(len(self.folds), 'fold')}: {means or 'no numbers'}{stopped}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (f"fold {number + 1}", *(f"{name} {value:.4g}" for name, value in values.items()))
            for number, values in enumerate(self.values)
        ]
        rows.append(("mean", *(f"{name} {value:.4g}" for name, value in self.mean.items())))
        return rows


@checked_call()
def k_fold(
    run: Callable[[PackedDataset, PackedDataset, int], TrainReport | Mapping[str, float]],
    dataset: PackedDataset,
    *,
    folds: int = 5,
    stratify: bool = True,
    groups: str | Sequence[Any] | npt.NDArray[Any] | None = None,
    seed: int = 0,
) -> KFoldReport:
    """Run a k-fold cross-validation: call `run(train, held_out, fold)` for each fold and average the results.

    `run` should create a new model and call `train()`. With a separate `to` for each fold, repeating an interrupted
    call resumes from the last checkpoint. All folds are views of the same open pack; nothing is copied.

    Args:
        run: function that takes the training view, the held-out view and the fold number, from 0. It returns the report
            of `train()`, or a dict of numbers.
        dataset: a split of a pack.
        folds: number of folds, at least 2.
        stratify: whether to keep the proportions of the labels about equal in all folds.
        groups: groups of samples that must not be split across folds, as in `PackedDataset.fold`.
        seed: seed of the assignment of samples to folds.

    Returns:
        The numbers of each fold, with their mean and standard deviation.

    Raises:
        InvalidOption: if an argument is invalid, there are fewer samples or groups than folds, or the result of `run`
            is neither a report of `train()` nor a dict of numbers.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> def run(train, held_out, fold):
        ...     return {"share": len(held_out) / len(data)}
        >>> result = colabkit.k_fold(run, data, folds=3)
        >>> round(result.mean["share"], 2)
        0.33
    """
    act = "cross-validate"
    usage = ("Use ", call("k_fold", Code("run"), Code("dataset")))
    example = "For example, define it as def run(train, held_out, fold)"
    if isinstance(run, nn.Module):
        expected = "a function that creates and trains a model for one fold"
        raise InvalidOption(cannot(act, f"run is {kind_of(run)}, a model", expected, example))
    check_callable(act, "run", run, usage, optional=False)
    check_callable(act, "run", run, example, takes="the training view, the held-out view and the fold number", count=3)
    of_pack = ("For example, pass ", call("open_pack", Code("path")), "['train']")
    check_type(act, "dataset", dataset, PackedDataset, "a split of a pack", of_pack)
    check_whole_number(act, "folds", folds, 2)
    done: list[TrainReport | Mapping[str, float]] = []
    values: list[Mapping[str, float]] = []
    stopped: str | None = None
    for fold in range(folds):
        train, held_out = dataset.fold(fold, folds, stratify=stratify, groups=groups, seed=seed)
        report = run(train, held_out, fold)
        if isinstance(report, TrainReport) and not report.is_finished:
            stopped = report.stopped
            break
        values.append(_numbers(report))
        done.append(report)
    names = dict.fromkeys(name for found in values for name in found)
    columns = {name: [found[name] for found in values if name in found] for name in names}
    return KFoldReport(
        tuple(done),
        tuple(values),
        {name: mean(column) for name, column in columns.items()},
        {name: _spread(column) for name, column in columns.items()},
        stopped,
    )


def _spread(column: Sequence[float]) -> float:
    if len(column) == 1:
        return 0.0
    return stdev(column) if all(map(math.isfinite, column)) else math.nan


def _numbers(report: Any) -> Mapping[str, float]:
    if isinstance(report, TrainReport):
        last = report.epochs[-1] if report.epochs else None
        values = {} if last is None else last.shown
        # Training may stop within an epoch, after a validation that no record of an epoch holds.
        if report.validations and report.validations[-1].step > sum(epoch.steps for epoch in report.epochs):
            names = report.curve if last is None else last.values
            values |= meters.label_validation(report.validations[-1].values, names)
        return values
    if isinstance(report, Mapping) and all(is_number(value) for value in report.values()):
        return {str(name): float(value) for name, value in report.items()}
    found = f"run returned {kind_of(report)}"
    if isinstance(report, Mapping):
        name, value = next((name, value) for name, value in report.items() if not is_number(value))
        found = f"run returned {name!r} as {kind_of(value)}"
    expected = "the report of colabkit.train(), or a dict of numbers"
    raise InvalidOption(cannot("cross-validate", found, expected, "Change what it returns"))

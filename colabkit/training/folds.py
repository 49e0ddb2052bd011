"""`k_fold()`: train on all folds but one, in turn, over one pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy.typing as npt

from colabkit.foundation import (
    InvalidOption,
    Report,
    cannot,
    check_callable,
    check_type,
    check_whole_number,
    format_things,
    kind_of,
)
from colabkit.packs import PackedDataset
from colabkit.training.records import is_number
from colabkit.training.report import TrainReport

RunFold = Callable[[PackedDataset, PackedDataset, int], TrainReport | Mapping[str, float]]


@dataclass(frozen=True, repr=False)
class KFoldReport(Report):
    """What came of each fold.

    Attributes:
        folds: for each fold what was returned for it: the report of `train()`, or numbers.
        values: for each fold its numbers: the last of the training, and of the validation as `val_loss` where both
            have a number of that name.
        mean: of each number over the folds that have it.
        spread: standard deviation of each number over these folds (of a sample); 0 for a single one, NaN where one
            of them is not finite.
        stopped: what ended the training of the fold after these, as `"deadline"`; None if all folds are here.
    """

    folds: tuple[TrainReport | Mapping[str, float], ...]
    values: tuple[Mapping[str, float], ...]
    mean: Mapping[str, float]
    spread: Mapping[str, float]
    stopped: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether all folds are in it."""
        return self.stopped is None

    def _summary(self) -> str:
        found = ", ".join(f"{name} {value:.4g} ± {self.spread[name]:.2g}" for name, value in self.mean.items())
        ended = f"; stopped by {self.stopped}, the same call goes on" if self.stopped else ""
        return f"{format_things(len(self.folds), 'fold')}: {found or 'no numbers'}{ended}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (f"fold {number + 1}", *(f"{name} {value:.4g}" for name, value in values.items()))
            for number, values in enumerate(self.values)
        ]
        rows.append(("mean", *(f"{name} {value:.4g}" for name, value in self.mean.items())))
        return rows


def k_fold(
    run: RunFold,
    dataset: PackedDataset,
    *,
    folds: int = 5,
    stratify: bool = True,
    groups: str | Sequence[Any] | npt.NDArray[Any] | None = None,
    seed: int = 0,
) -> KFoldReport:
    """Call `run(train, held_out, fold)` for each fold and return the numbers with mean and spread.

    `run` makes a new model and calls `train()`, with a `save_to` of its own for each fold, if any: a call that is
    interrupted then goes on in the fold and at the step where it was. All folds are views of one pack, which is neither
    copied nor opened again.

    Args:
        run: takes the views for training and for testing and the number of the fold, from 0; returns the report of
            `train()`, or a dict of numbers.
        dataset: a split of a pack.
        folds: how many.
        stratify: keep the shares of the labels in each fold.
        groups: which samples are never parted, as in `PackedDataset.fold`.
        seed: of the order in which samples are dealt.

    Raises:
        InvalidOption: if there are fewer samples or groups than folds, or `run` is no function or returns something
            else.
    """
    act = "train on folds"
    check_callable(act, "run", run, "Pass k_fold(run, dataset)", optional=False)
    check_type(act, "dataset", dataset, PackedDataset, "a split of a pack", "Pass open_pack(path)['train']")
    check_whole_number(act, "folds", folds, 2)
    done: list[TrainReport | Mapping[str, float]] = []
    values: list[Mapping[str, float]] = []
    stopped: str | None = None
    for fold in range(folds):
        train, held_out = dataset.fold(fold, folds, stratify=stratify, groups=groups, seed=seed)
        report = run(train, held_out, fold)
        if isinstance(report, TrainReport) and report.stopped:
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
        return report.epochs[-1].shown if report.epochs else {}
    if isinstance(report, Mapping) and all(is_number(value) for value in report.values()):
        return {str(name): float(value) for name, value in report.items()}
    found = f"run returned {kind_of(report)}"
    raise InvalidOption(
        cannot("compare the folds", found, "it has to be the report of train(), or a dict of numbers", "Return one")
    )

"""The figure of a training: its values over the steps, its speed and waiting over the epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from colabkit.errors import InvalidOption, MissingPackage, cannot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colabkit.training.report import TrainReport

__all__ = ["plot_run"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito: told apart by all eyes
_FAINT = "#8a8a8a"
_VISIBLE, _LABELLED = 0.005, 20
_TURNS = 30  # a line over so many means can still turn


def plot_run(report: TrainReport) -> Figure:
    """Return the figure; see `TrainReport.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(
            cannot("plot the training", "no matplotlib", "it to draw", "Run pip install matplotlib")
        ) from error
    if not report.curve and not report.epochs:
        raise InvalidOption(cannot("plot the training", "no steps yet", "at least one", "Train first"))
    names = list(dict.fromkeys([*report.curve, *(name for v in report.validations for name in v.values)]))
    rows = max(1, len(names)) + (1 if report.epochs else 0)
    figure = Figure(figsize=(8, 1.2 + 2.0 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for place, name in enumerate(names):
        _draw_value(axes[place], report, name)
    if report.epochs:
        _draw_speed(axes[-1], report)
    return figure


def _draw_value(axes: Axes, report: TrainReport, name: str) -> None:
    if points := report.curve.get(name):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=_COLOURS[0], linewidth=0.8, alpha=0.3)
        axes.plot(steps, _smoothed(values), color=_COLOURS[0], linewidth=1.6, label="training")
    if judged := [(v.step, v.values[name]) for v in report.validations if name in v.values]:
        axes.plot(*zip(*judged, strict=True), "o-", color=_COLOURS[1], markersize=4, linewidth=1.5, label="validation")
    _plain(axes, name)
    axes.set_xlabel("step")
    axes.legend(frameon=False)


def _draw_speed(axes: Axes, report: TrainReport) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [record.epoch + 1 for record in report.epochs]
    speeds = [record.samples / max(record.seconds, 1e-9) for record in report.epochs]
    waited = [min(1.0, record.wait_s / max(record.seconds, 1e-9)) for record in report.epochs]
    lost = [speed * share for speed, share in zip(speeds, waited, strict=True)]
    axes.bar(numbers, speeds, width=0.6, color=_COLOURS[2], label="images/s")
    if max(waited) >= _VISIBLE:
        axes.bar(numbers, lost, width=0.6, color=_COLOURS[1], label="share of the time that it waited for data")
    for number, speed, share in zip(numbers, speeds, waited, strict=True):
        if share >= _VISIBLE and len(numbers) <= _LABELLED:
            axes.annotate(f"{share:.0%}", (number, speed), ha="center", va="bottom", color=_FAINT, fontsize=8)
    _plain(axes, "images/s")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.2)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving means of values, those of the first ones over fewer."""
    kept = 1 - min(1.0, _TURNS / max(1, len(values)))
    found: list[float] = []
    total = weight = 0.0
    for value in values:
        total, weight = kept * total + value, kept * weight + 1
        found.append(total / weight)
    return found


def _plain(axes: Axes, title: str) -> None:
    axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)

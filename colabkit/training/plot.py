"""The figure of a training run: time per epoch, throughput, machine utilization, and the values of the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import InvalidOption, cannot, format_count, plotting, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colabkit.foundation import HostSnapshot
    from colabkit.training.records import EpochRecord, Validation

Floats: TypeAlias = npt.NDArray[np.float64]

# Parts of a step's time: field, label, color, hatch, and a text color that is legible on the color.
_PARTS = (
    ("wait_s", "waiting for data", plotting.VERMILLION, "//", "white"),
    ("copy_s", "copy", plotting.PURPLE, "...", "black"),
    ("compute_s", "step", plotting.BLUE, "", "white"),
    ("other_s", "other", plotting.GREY, r"\\", "white"),
)
_UNTIMED = ("not timed", "#dddddd", "", "black")

_VISIBLE = 0.02
"""Smallest untimed fraction of the total time that is drawn."""

_BARS, _WRITTEN_ON = 40, 6
"""Maximum number of epochs that are drawn as bars, and of bars that are labeled with numbers."""

_TALL = 0.09
"""Minimum height of a bar segment with a number on it, as a fraction of the highest bar."""

_SLOTS = 4
"""Minimum number of bar widths on the axis, so that few bars do not become too wide."""

_FOLLOWED = 150
"""Maximum number of points in a line of machine utilization, so that it stays legible."""

_TITLE = 32
"""Maximum number of characters of a title, so that it does not cover the legend or the title of the next axes."""

_TURNS = 30
"""A smoothed point averages 1/30 of the curve on each side of it; curves of fewer points are drawn with markers."""


def plot_run(
    headline: str,
    epochs: Sequence[EpochRecord],
    curve: Mapping[str, list[tuple[int, float]]],
    validations: Sequence[Validation],
    hosts: Sequence[HostSnapshot],
) -> Figure:
    """Plot a run below a headline; all arguments except the headline are fields of `TrainReport`."""
    if not curve and not epochs:
        raise InvalidOption(cannot("plot the run", "the report has no steps", "", "Train at least one step first"))
    rows: list[list[Callable[[Axes], None]]] = []
    if epochs:
        rows.append([partial(_draw_time, epochs=epochs), partial(_draw_speed, epochs=epochs)])
    if len(hosts) > 1:
        rows.append([partial(_draw_machine, hosts=hosts)])
    names = list(dict.fromkeys([*curve, *(name for v in validations for name in v.values)]))
    values = [partial(_draw_value, curve=curve, validations=validations, name=name) for name in names]
    rows += [list(values[first : first + 2]) for first in range(0, len(values), 2)]
    figure = plotting.new_figure("plot the run", 10, 0.6 + 2.6 * len(rows), headline)
    # A common grid aligns the edges of the axes in all rows.
    grid = figure.add_gridspec(len(rows), 2)
    for row, drawings in enumerate(rows):
        for column, draw in enumerate(drawings):
            draw(figure.add_subplot(grid[row, column] if len(drawings) > 1 else grid[row, :]))
    return figure


def _draw_time(axes: Axes, *, epochs: Sequence[EpochRecord]) -> None:
    numbers = [record.epoch + 1 for record in epochs]
    durations = np.array([record.seconds for record in epochs], float)
    unit, unit_s = _unit(durations.max())
    layers = [(np.array([getattr(record, part[0]) for record in epochs], float), *part[1:]) for part in _PARTS]
    untimed = np.maximum(0.0, durations - sum(layer[0] for layer in layers))
    # The parts cover only the steps, and an epoch takes longer, for example to close the loader.
    if untimed.sum() >= _VISIBLE * durations.sum():
        layers.append((untimed, *_UNTIMED))
    layers = [layer for layer in layers if layer[0].any()] or layers
    totals = np.maximum(1e-9, sum(layer[0] for layer in layers))
    bottoms = np.zeros(len(epochs))
    for seconds, name, colour, hatch, ink in layers:
        tops = bottoms + seconds / unit_s
        label = f"{name} {_percent(seconds.sum() / totals.sum())}"
        _fill(axes, numbers, bottoms, tops, facecolor=colour, hatch=hatch, label=label)
        for place in np.flatnonzero(seconds >= _TALL * totals.max()) if len(epochs) <= _WRITTEN_ON else ():
            middle, share = (bottoms[place] + tops[place]) / 2, _percent(seconds[place] / totals[place])
            text = axes.text(numbers[place], middle, share, ha="center", va="center", color=ink, fontsize=8)
            text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.2})
        bottoms = tops
    plotting.style_axes(axes, "Time per epoch", unit, lines=2)
    _number_epochs(axes, numbers)
    axes.set_ylim(0, 1.04 * bottoms.max() or 1)
    plotting.add_legend(axes, "left")


def _draw_speed(axes: Axes, *, epochs: Sequence[EpochRecord]) -> None:
    numbers = [record.epoch + 1 for record in epochs]
    speeds = [record.samples / max(record.seconds, 1e-9) for record in epochs]
    _fill(axes, numbers, np.zeros(len(epochs)), np.array(speeds), facecolor=plotting.GREEN)
    if len(epochs) <= _WRITTEN_ON:
        for number, speed in zip(numbers, speeds, strict=True):
            axes.annotate(_rate(speed), (number, speed), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    plotting.style_axes(axes, "Throughput", "images/s", lines=2)
    axes.yaxis.set_major_formatter(lambda value, _: _rate(value))
    _number_epochs(axes, numbers)
    axes.set_ylim(0, 1.15 * max(speeds) or 1)


def _draw_machine(axes: Axes, *, hosts: Sequence[HostSnapshot]) -> None:
    start_s = hosts[0].at_s
    unit, unit_s = _unit(hosts[-1].at_s - start_s)
    times = [(at_s - start_s) / unit_s for at_s in _means([host.at_s for host in hosts])]
    gpus = [
        _rates([host.gpus[place].utilization_rate if place < len(host.gpus) else None for host in hosts])
        for place in range(max(len(host.gpus) for host in hosts))
    ]
    gpus = [rates for rates in gpus if np.isfinite(rates).any()]
    if gpus:
        means = [_mean(rates) for rates in zip(*gpus, strict=True)]
        name = "GPU" if len(gpus) == 1 else f"GPUs, mean of {len(gpus)} and range"
        axes.plot(times, means, color=plotting.BLUE, linewidth=2, label=name)
        if len(gpus) > 1:
            axes.fill_between(
                times, np.fmin.reduce(gpus), np.fmax.reduce(gpus), color=plotting.BLUE, alpha=0.15, linewidth=0
            )
    ram = [host.ram_used_bytes / host.ram_total_bytes if host.ram_total_bytes else None for host in hosts]
    for name, values, dashes, colour in (
        ("CPU", [host.cpu_rate for host in hosts], "-", plotting.DARK),
        ("CPU of this process", [host.own_cpu_rate for host in hosts], ":", plotting.DARK),
        ("RAM", ram, "--", plotting.ORANGE),
    ):
        rates = _rates(values)
        if np.isfinite(rates).any():
            axes.plot(times, rates, dashes, color=colour, linewidth=1.4, label=name)
    plotting.style_axes(axes, "Machine utilization", "%")
    axes.set(xlabel=f"{unit} since the start", ylim=(-2, 102), xlim=(0, max(times[-1], 1e-9)))
    axes.set_yticks(range(0, 101, 25))
    plotting.add_legend(axes)


def _draw_value(
    axes: Axes, *, curve: Mapping[str, list[tuple[int, float]]], validations: Sequence[Validation], name: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    points = curve.get(name, [])
    judged = [(found.step, found.values[name]) for found in validations if name in found.values]
    if np.isfinite([value for _, value in points]).any():
        steps, values = zip(*points, strict=True)
        if len(points) > _TURNS:
            axes.plot(steps, _finite(values), color=plotting.GREEN, linewidth=0.8, alpha=0.3)
        axes.plot(steps, _smoothed(values), color=plotting.GREEN, linewidth=1.8, label="training", **_marks(values))
    if np.isfinite([value for _, value in judged]).any():
        steps, values = zip(*judged, strict=True)
        axes.plot(
            steps, _finite(values), "--", color=plotting.BLUE, linewidth=1.4, label="validation", **_marks(values)
        )
    known = [*points, *judged]
    broken = [step for step, value in known if not math.isfinite(value)]
    title = shortened(name, _TITLE)
    plotting.style_axes(axes, title[:1].upper() + title[1:], "", lines=2 if broken else 1)
    axes.set(xlabel="step", xlim=(0, 1.02 * max(step for step, _ in known)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    if len(broken) == len(known):
        axes.set_yticks([])
    if broken:
        label = f"not finite at step {format_count(min(broken))}"
        axes.axvline(min(broken), color=plotting.VERMILLION, linewidth=1.2, linestyle=":", label=label)
    if broken or (points and judged):
        plotting.add_legend(axes, "left" if broken else "right")


def _fill(axes: Axes, numbers: Sequence[int], bottoms: Floats, tops: Floats, **style: Any) -> None:
    """Fill between two heights for each epoch: with bars, or with one area if there are too many epochs for bars."""
    if len(numbers) <= _BARS:
        axes.bar(numbers, tops - bottoms, 0.7, bottom=bottoms, edgecolor="white", linewidth=0, **style)
    else:
        edges = [*(number - 0.5 for number in numbers), numbers[-1] + 0.5]
        heights = np.append(bottoms, bottoms[-1]), np.append(tops, tops[-1])
        axes.fill_between(edges, *heights, step="post", edgecolor="white", linewidth=0, **style)


def _number_epochs(axes: Axes, numbers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    spare = max(0, _SLOTS - len(numbers)) / 2
    axes.set(xlabel="epoch", xlim=(numbers[0] - 0.6 - spare, numbers[-1] + 0.6 + spare))
    if len(numbers) <= 2 * _WRITTEN_ON:
        axes.set_xticks(numbers)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _rates(shares: Sequence[float | None]) -> list[float]:
    return _means([math.nan if share is None else 100 * share for share in shares])


def _means(values: Sequence[float]) -> list[float]:
    width = -(-len(values) // _FOLLOWED)
    return [_mean(values[first : first + width]) for first in range(0, len(values), width)]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return centered moving averages, which follow a trend without delay; NaN where a value is not finite."""
    found, most = [], len(values) // _TURNS
    for place, value in enumerate(values):
        # A third of the window remains at the ends, where a single value would be noisy.
        near = max(most // 3, min(most, place, len(values) - 1 - place))
        found.append(_mean(values[max(0, place - near) : place + near + 1]) if math.isfinite(value) else math.nan)
    return found


def _finite(values: Sequence[float]) -> Floats:
    return np.where(np.isfinite(values), values, math.nan)


def _marks(values: Sequence[float]) -> dict[str, Any]:
    """Return marker options for a line of few points, else none; a single point without a marker would be invisible."""
    return {"marker": "o", "markersize": 4} if len(values) <= _TURNS else {}


def _unit(seconds: float) -> tuple[str, float]:
    return ("seconds", 1.0) if seconds < 180 else ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _rate(per_second: float) -> str:
    return format_count(per_second) if per_second >= 9.95 else f"{per_second:.2g}"

"""The figure of a training: where its time went, how fast it was, what the machine did, and its values."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from colabkit.foundation import (
    InvalidOption,
    Partial,
    cannot,
    file_changes,
    format_count,
    import_optional,
    user_path,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from colabkit.foundation import HostSnapshot
    from colabkit.training.records import EpochRecord, Validation


# Of Okabe and Ito's palette, told apart by all eyes; hatches and dashes tell them apart without colour.
_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
_GREY, _FAINT, _DARK = "#767676", "#8a8a8a", "#333333"
_PARTS = (  # of a step's time: name, field, colour, hatch, and the colour that is read on it
    ("waiting for data", "wait_s", _VERMILLION, "//", "white"),
    ("copy", "copy_s", _PURPLE, "...", "black"),
    ("step", "compute_s", _BLUE, "", "white"),
    ("other", "other_s", _GREY, r"\\", "white"),
)
_UNTIMED = ("not timed", "#dddddd", "", "black")
_VISIBLE = 0.02  # a share of time that was not timed is passed over below this
_BARS, _WRITTEN_ON = 40, 6  # epochs that are drawn as bars, and bars with room for numbers
_TALL = 0.09  # share of the highest bar that has room for a number
_SLOTS = 4  # fewer bars than this are no wider
_FOLLOWED = 150  # points of a line about the machine that the eye can follow
_TURNS = 30  # a line over so many means can still turn


def plot_run(
    headline: str,
    epochs: Sequence[EpochRecord],
    curve: Mapping[str, list[tuple[int, float]]],
    validations: Sequence[Validation],
    hosts: Sequence[HostSnapshot],
) -> Figure:
    """Return the figure of a run; see `TrainReport` for the arguments."""
    import_optional("matplotlib.figure", "plot the training", "to draw")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not curve and not epochs:
        raise InvalidOption(cannot("plot the training", "no steps yet", "at least one", "Train first"))
    rows: list[list[Callable[[Axes], None]]] = []
    if epochs:
        rows.append([partial(_draw_time, epochs=epochs), partial(_draw_speed, epochs=epochs)])
    if len(hosts) > 1:
        rows.append([partial(_draw_machine, hosts=hosts)])
    names = list(dict.fromkeys([*curve, *(name for v in validations for name in v.values)]))
    values = [partial(_draw_value, curve=curve, validations=validations, name=name) for name in names]
    rows += [list(values[first : first + 2]) for first in range(0, len(values), 2)]
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(rows)), layout=layout)
    figure.suptitle(headline, x=0.012, ha="left", fontsize=12, fontweight="bold")
    grid = figure.add_gridspec(len(rows), 2)  # whose columns are those of all rows, so that edges are in line
    for row, drawings in enumerate(rows):
        for column, draw in enumerate(drawings):
            draw(figure.add_subplot(grid[row, column] if len(drawings) > 1 else grid[row, :]))
    return figure


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, which is replaced in one rename; see `TrainReport.plot`."""
    act = f"save the figure as {os.fspath(path)!r}"
    target = user_path(path, act).absolute()
    formats = figure.canvas.get_supported_filetypes()
    if (ending := target.suffix[1:].lower()) not in formats:
        found = f"{target.suffix!r} is no format of a picture" if ending else "its name has no ending"
        raise InvalidOption(cannot(act, found, f"one of {', '.join(formats)} is needed", "Name it run.png, say"))
    drawn = io.BytesIO()
    figure.savefig(drawn, format=ending)
    with file_changes.translated(act), Partial(target) as partial:
        file_changes.write_file(partial.path, drawn.getvalue(), durable=True)
        partial.publish(replace=True)


def _draw_time(axes: Axes, *, epochs: Sequence[EpochRecord]) -> None:
    unit, unit_s = _unit(max(record.seconds for record in epochs))
    numbers = [record.epoch + 1 for record in epochs]
    layers = [
        ([float(getattr(record, seconds)) for record in epochs], name, colour, hatch, ink)
        for name, seconds, colour, hatch, ink in _PARTS
    ]
    timed = [sum(seconds) for seconds in zip(*(layer[0] for layer in layers), strict=True)]
    untimed = [max(0.0, record.seconds - steps_s) for record, steps_s in zip(epochs, timed, strict=True)]
    if sum(untimed) >= _VISIBLE * sum(record.seconds for record in epochs):  # of an earlier version's checkpoint, say
        layers.append((untimed, *_UNTIMED))
    layers = [layer for layer in layers if any(layer[0])] or layers
    totals = [max(1e-9, sum(seconds)) for seconds in zip(*(layer[0] for layer in layers), strict=True)]
    bottoms = [0.0] * len(epochs)
    for layer, name, colour, hatch, ink in layers:
        tops = [low + seconds / unit_s for low, seconds in zip(bottoms, layer, strict=True)]
        _fill(axes, numbers, bottoms, tops, colour, hatch, f"{name} {_percent(sum(layer) / sum(totals))}")
        for number, low, high, seconds, total in zip(numbers, bottoms, tops, layer, totals, strict=True):
            if len(epochs) <= _WRITTEN_ON and seconds >= _TALL * max(totals):
                text = axes.text(number, (low + high) / 2, _percent(seconds / total), ha="center", va="center")
                text.set(color=ink, fontsize=8, bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2})
        bottoms = tops
    _plain(axes, "Where the time went", unit, lines=2)
    _number_epochs(axes, numbers)
    axes.set_ylim(0, 1.04 * max(bottoms) or 1)
    _legend(axes, "left")


def _draw_speed(axes: Axes, *, epochs: Sequence[EpochRecord]) -> None:
    numbers = [record.epoch + 1 for record in epochs]
    speeds = [record.samples / max(record.seconds, 1e-9) for record in epochs]
    _fill(axes, numbers, [0.0] * len(epochs), speeds, _GREEN)
    if len(epochs) <= _WRITTEN_ON:
        for number, speed in zip(numbers, speeds, strict=True):
            axes.annotate(_rate(speed), (number, speed), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    _plain(axes, "Throughput", "images/s", lines=2)
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
    gpus = [rates for rates in gpus if any(map(math.isfinite, rates))]
    if gpus:
        at_once = [[rate for rate in rates if math.isfinite(rate)] for rates in zip(*gpus, strict=True)]
        means = [sum(rates) / len(rates) if rates else math.nan for rates in at_once]
        name = "GPU" if len(gpus) == 1 else f"GPUs, mean of {len(gpus)} and range"
        axes.plot(times, means, color=_BLUE, linewidth=2, label=name)
        if len(gpus) > 1:
            lowest = [min(rates, default=math.nan) for rates in at_once]
            highest = [max(rates, default=math.nan) for rates in at_once]
            axes.fill_between(times, lowest, highest, color=_BLUE, alpha=0.15, linewidth=0)
    ram = [host.ram_used_bytes / host.ram_total_bytes if host.ram_total_bytes else None for host in hosts]
    for name, values, dashes, colour in (
        ("CPU", [host.cpu_rate for host in hosts], "-", _DARK),
        ("CPU of this process", [host.own_cpu_rate for host in hosts], ":", _DARK),
        ("RAM", ram, "--", _ORANGE),
    ):
        rates = _rates(values)
        if any(map(math.isfinite, rates)):
            axes.plot(times, rates, dashes, color=colour, linewidth=1.4, label=name)
    _plain(axes, "Use of the machine", "%")
    axes.set(xlabel=f"{unit} since the start", ylim=(-2, 102), xlim=(0, max(times[-1], 1e-9)))
    axes.set_yticks(range(0, 101, 25))
    _legend(axes)


def _draw_value(
    axes: Axes, *, curve: Mapping[str, list[tuple[int, float]]], validations: Sequence[Validation], name: str
) -> None:
    points = curve.get(name, [])
    judged = [(found.step, found.values[name]) for found in validations if name in found.values]
    if any(math.isfinite(value) for _, value in points):
        steps, values = zip(*points, strict=True)
        if len(points) > _TURNS:
            axes.plot(steps, _shown(values), color=_BLUE, linewidth=0.8, alpha=0.3)
        axes.plot(steps, _smoothed(values), color=_BLUE, linewidth=1.8, label="training", **_marks(values))
    if any(math.isfinite(value) for _, value in judged):
        steps, values = zip(*judged, strict=True)
        axes.plot(steps, _shown(values), "--", color=_DARK, linewidth=1.4, label="validation", **_marks(values))
    known = [*points, *judged]
    broken = [step for step, value in known if not math.isfinite(value)]
    _plain(axes, name, "", lines=2 if broken else 1)
    axes.set(xlabel="step", xlim=(0, 1.02 * max(step for step, _ in known)))
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    if len(broken) == len(known):
        axes.set_yticks([])
    if broken:
        label = f"not finite at step {format_count(min(broken))}"
        axes.axvline(min(broken), color=_VERMILLION, linewidth=1.2, linestyle=":", label=label)
    if broken or (points and judged):
        _legend(axes, "left" if broken else "right")


def _fill(
    axes: Axes,
    numbers: Sequence[int],
    bottoms: Sequence[float],
    tops: Sequence[float],
    colour: str,
    hatch: str = "",
    label: str | None = None,
) -> None:
    """Fill between two heights of each epoch: with bars, or with one area where bars would be hairs."""
    style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0, "label": label}
    if len(numbers) <= _BARS:
        heights = [top - bottom for top, bottom in zip(tops, bottoms, strict=True)]
        axes.bar(numbers, heights, 0.7, bottom=bottoms, **style)
    else:
        edges = [number - 0.5 for number in numbers] + [numbers[-1] + 0.5]
        axes.fill_between(edges, [*bottoms, bottoms[-1]], [*tops, tops[-1]], step="post", **style)


def _number_epochs(axes: Axes, numbers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    spare = max(0, _SLOTS - len(numbers)) / 2
    axes.set(xlabel="epoch", xlim=(numbers[0] - 0.6 - spare, numbers[-1] + 0.6 + spare))
    if len(numbers) <= 2 * _WRITTEN_ON:
        axes.set_xticks(numbers)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _rates(shares: Sequence[float | None]) -> list[float]:
    """Return shares in per cent, thinned; gaps where they are not known."""
    return _means([math.nan if share is None else 100 * share for share in shares])


def _means(values: Sequence[float]) -> list[float]:
    """Return the means of groups of neighbours, of which there are at most 150."""
    width = -(-len(values) // _FOLLOWED)
    groups = [values[first : first + width] for first in range(0, len(values), width)]
    known = [[value for value in group if math.isfinite(value)] for group in groups]
    return [sum(group) / len(group) if group else math.nan for group in known]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving means of values, those of the first ones over fewer; gaps where they broke."""
    kept = 1 - min(1.0, _TURNS / max(1, len(values)))
    found: list[float] = []
    total = weight = 0.0
    for value in _shown(values):
        if not math.isnan(value):
            total, weight = kept * total + value, kept * weight + 1
        found.append(value if math.isnan(value) else total / weight)
    return found


def _shown(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _marks(values: Sequence[float]) -> dict[str, Any]:
    """Return the marks of a line with few points, of which a single one would not show without."""
    return {"marker": "o", "markersize": 4} if len(values) <= _TURNS else {}


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit that a duration reads best in, and its seconds."""
    return ("seconds", 1.0) if seconds < 180 else ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _rate(per_second: float) -> str:
    return format_count(per_second) if per_second >= 9.95 else f"{per_second:.2g}"


def _legend(axes: Axes, side: Literal["left", "right"] = "right") -> None:
    """Name what is drawn, above it: in the line of the title, or in one of its own on the left."""
    legend = axes.legend(
        loc="lower left" if side == "left" else "lower right",
        bbox_to_anchor=(0 if side == "left" else 1, 1),
        ncols=5,
        frameon=False,
        fontsize=8,
        borderaxespad=0.1,
        borderpad=0.4 if side == "right" else 0.2,
        columnspacing=1.0,
        handlelength=1.6,
    )
    legend.set_in_layout(False)  # room is made by the title; a long one may reach beyond its axes


def _plain(axes: Axes, title: str, unit: str, lines: int = 1) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=6 + 15 * (lines - 1))
    axes.set_ylabel(unit)
    axes.tick_params(labelsize=8, color=_FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)

"""The charts of the panel and its details row: speed, learning, utilization of the machine, memory and storage.

Content without data is omitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from colabkit.foundation import GpuSnapshot, format_bytes, format_count, format_fill, format_things
from colabkit.monitoring.panel.content import PanelState, clipped, cost

_MOST_VALUES = 6
# Maximum number of GPUs with a chart each; for more GPUs, one chart shows their mean.
_MOST_GPUS = 4
# Maximum number of points per line of a chart over epochs.
_MOST_EPOCHS = 60
_ALMOST_FULL = 0.9
# Minimum share of RAM or `/dev/shm` that is shown.
_LEAST_SHARE = 0.005
# Minimum traffic that is shown as a chart, in bytes per second.
_LEAST_TRAFFIC = 10_000


class Line(NamedTuple):
    """A line of a chart: its name, its newest value as text, its points, and their ascending places from 0."""

    name: str
    text: str
    points: Sequence[float]
    places: Sequence[int] = ()


class Chart(NamedTuple):
    """A chart of one or two lines.

    Attributes:
        name: name of the quantity.
        lines: the lines.
        unit: function that formats the limits of the axis.
        low: lower limit of the axis; None for the lowest point.
        high: upper limit of the axis; None for the highest point.
        note: additional text.
        first: text at the left end of the horizontal axis.
        last: text at its right end.
        marked: place of the best point; None if there is none.
        end: place of the right end of the horizontal axis; None for that of the last point.
        value: name of the training value that the chart shows; empty for other charts.
    """

    name: str
    lines: tuple[Line, ...]
    unit: Callable[[float], str]
    low: float | None = 0.0
    high: float | None = None
    note: str = ""
    first: str = ""
    last: str = ""
    marked: int | None = None
    value: str = ""
    end: int | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The limits of the vertical axis."""
        points = [point for line in self.lines for point in line.points]
        low = min(points, default=0.0) if self.low is None else self.low
        return low, max(points, default=0.0) if self.high is None else self.high


def speed(state: PanelState) -> Chart | None:
    """Return the speed of the run, or of the operation; None if unknown."""
    if state.work is not None:
        if state.work_per_s is None:
            return None
        is_bytes = state.work.unit == "B"
        unit, name = (_per_second, "copied") if is_bytes else (_counted, f"{state.work.unit.strip()}/s")
        return Chart(name, (Line("", unit(state.work_per_s), state.work_curve),), unit)
    if state.samples_per_s is None:
        return None
    return Chart("images/s", (Line("", _counted(state.samples_per_s), state.speed_curve),), _counted)


def machine(state: PanelState) -> tuple[Chart, ...]:
    """Return the utilization of GPUs and CPUs, and the rates of disks, network and loader, if known."""
    host, found = state.host, []
    if host is None:
        return ()
    for number, gpu in enumerate(host.gpus if len(host.gpus) <= _MOST_GPUS else ()):
        name = f"GPU {number}" if len(host.gpus) > 1 else "GPU"
        points = _known(one.gpus[number].utilization_rate for one in state.hosts if number < len(one.gpus))
        rate = _now_or_mean(state, gpu.utilization_rate, points)
        found += _shares(name, rate, points, _gpu_memory(gpu), is_kept=True)
    if len(host.gpus) > _MOST_GPUS:
        busy = [[gpu.utilization_rate or 0.0 for gpu in one.gpus] for one in state.hosts if one.gpus]
        now = [gpu.utilization_rate or 0.0 for gpu in host.gpus]
        note = f"from {_percent(min(now))} to {_percent(max(now))}"
        means = [fmean(rates) for rates in busy]
        found += _shares(f"{len(now)} GPUs, mean", _now_or_mean(state, fmean(now), means), means, note)
    cpu = _known(one.cpu_rate for one in state.hosts)
    found += _shares("CPU", _now_or_mean(state, host.cpu_rate, cpu), cpu, f"of {format_things(host.cpus, 'CPU')}")
    rates = ("disk_read_bytes_per_s", "disk_written_bytes_per_s"), ("network_bytes_per_s", "network_sent_bytes_per_s")
    for name, fields, words in zip(("Disk", "Network"), rates, (("read", "write"), ("in", "out")), strict=True):
        lines = []
        for rate_name, word in zip(fields, words, strict=True):
            points = _known(getattr(one, rate_name) for one in state.hosts)
            if (value := _now_or_mean(state, getattr(host, rate_name), points)) is not None:
                lines.append(Line(word, _per_second(value), points))
        # Omit the chart if the only traffic is between the notebook and its kernel.
        is_used = name == "Disk" or any(max(line.points, default=0) >= _LEAST_TRAFFIC for line in lines)
        found += [Chart(name, tuple(lines), _per_second)] if lines and is_used else []
    if state.data_bytes_per_s is not None:
        line = Line("", _per_second(state.data_bytes_per_s), state.data_curve)
        queue = "" if state.queue_rate is None else f"queue {_percent(state.queue_rate)} full"
        found.append(Chart("Remote data" if state.is_remote else "Loader", (line,), _per_second, note=queue))
    return tuple(found)


def learning(state: PanelState) -> tuple[Chart, ...]:
    """Return the charts of the loss and of one more value over the epochs; before two epochs, the loss over the steps.

    The other value is preferably one that both training and validation have, such as the accuracy.
    """
    epochs = state.epoch_values
    if len(epochs) > 1:
        return over_epochs(epochs, state.values)
    if len(state.loss_curve) < 2 or "loss" not in state.values:
        return ()
    lines = [Line("this batch", _number(state.values["loss"]), state.loss_curve)]
    if (validation := state.validation.get("val_loss")) is not None:
        lines.append(Line("validation", _number(validation), ()))
    return (Chart("Loss", tuple(lines), _number, None, first="first step", last="now", value="loss"),)


def over_epochs(epochs: Sequence[tuple[int, Mapping[str, float]]], training: Iterable[str] = ()) -> tuple[Chart, ...]:
    """Return the charts of the loss and of one more value over at least two epochs.

    Args:
        epochs: number of each epoch, from 1, and its values by label.
        training: names of values that the step returned.
    """
    names = [*dict.fromkeys(label.removeprefix("val_") for _, values in epochs for label in values)]
    names = sorted((name for name in names if name != "loss"), key=lambda name: f"val_{name}" not in epochs[-1][1])
    charts = (_over_epochs(name, epochs, training) for name in ["loss", *names[:1]])
    return tuple(chart for chart in charts if chart.lines)


def details(state: PanelState, charts: Sequence[Chart]) -> tuple[tuple[str, bool], ...]:
    """Return texts for the details row, and whether each is urgent, as for storage that is almost full.

    The texts are about memory, storage, the newest values that the charts do not show, the period of the small charts,
    the panel's share of the time, and the time of the state.
    """
    found: list[tuple[str, bool]] = []
    host = state.host
    if host is not None:
        found += _filled("RAM", host.ram_used_bytes, host.ram_total_bytes)
        if (host.tmpfs_bytes or 0) > _LEAST_SHARE * host.ram_total_bytes:
            found[-1] = (f"{found[-1][0]}, {format_bytes(host.tmpfs_bytes or 0)} of it tmpfs", found[-1][1])
        found += _filled("disk", _used(host.disk_free_bytes, host.disk_total_bytes), host.disk_total_bytes)
        shm = _used(host.shm_free_bytes, host.shm_total_bytes)
        if (shm or 0) > _LEAST_SHARE * (host.shm_total_bytes or 0):
            found += _filled("/dev/shm", shm, host.shm_total_bytes)
    shown = {label for chart in charts for label in (chart.value, f"val_{chart.value}")}
    newest = {name: value for name, value in {**state.values, **state.validation}.items() if name not in shown}
    found += [(f"{clipped(name, 24)} {_number(value)}", False) for name, value in newest.items()][:_MOST_VALUES]
    if len(state.hosts) > 1 or len(state.speed_curve) > 1:
        said = "numbers and small charts: whole run" if state.is_over else "small charts: last minute"
        found.append((said, False))
    return (*found, (cost(state), False))


def averaged(points: Sequence[float], most: int) -> tuple[float, ...]:
    """Reduce a curve to at most `most` points by averaging neighbors, from the oldest to the newest."""
    if len(points) <= most:
        return tuple(points)
    edges = [round(number * len(points) / most) for number in range(most + 1)]
    return tuple(sum(points[a:b]) / (b - a) for a, b in itertools.pairwise(edges))


def _over_epochs(name: str, epochs: Sequence[tuple[int, Mapping[str, float]]], training: Iterable[str]) -> Chart:
    lines, marked, note = [], None, ""
    first = epochs[0][0]
    # A validation value has the prefix only if the step returns a value of the same name; see `label_validation`.
    is_trained = name in {"loss", "accuracy", *training}
    for label, word in ((name, "training" if is_trained else "validation"), (f"val_{name}", "validation")):
        given = [(epoch, values[label]) for epoch, values in epochs if label in values]
        known = [pair for pair in given if math.isfinite(pair[1])]
        if not known:
            continue
        places = averaged([epoch - first for epoch, _ in known], _MOST_EPOCHS)
        points = averaged([value for _, value in known], _MOST_EPOCHS)
        lines.append(Line(word, _number(given[-1][1]), points, tuple(map(round, places))))
        # For other values, it is unknown whether low or high ones are better.
        if name == "loss" or name.startswith("acc"):
            epoch, best = (min if name == "loss" else max)(known, key=lambda pair: pair[1])
            marked, note = epoch - first, f"best {word}: {_number(best)} in epoch {epoch}"
    title = clipped(name[:1].upper() + name[1:], 24)
    # The note already contains the word "epoch".
    left = str(first) if note else f"epoch {first}"
    last = epochs[-1][0]
    return Chart(title, tuple(lines), _number, None, None, note, left, str(last), marked, name, last - first)


def _shares(
    name: str, rate: float | None, points: Sequence[float], note: str = "", is_kept: bool = False
) -> list[Chart]:
    """Return a chart of shares in [0, 1]; if the newest is unknown, return None, or, with `is_kept`, only the note."""
    if rate is None:
        return [Chart(name, (), _percent, note=note)] if is_kept and note else []
    return [Chart(name, (Line("", _percent(rate), points),), _percent, 0.0, 1.0, note)]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _now_or_mean(state: PanelState, now: float | None, points: Sequence[float]) -> float | None:
    """Return the newest value during a run, and the mean after it."""
    return fmean(points) if state.is_over and points else now


def _gpu_memory(gpu: GpuSnapshot) -> str:
    if gpu.is_lost:
        return "GPU lost"
    if gpu.used_bytes is None or not gpu.total_bytes:
        return ""
    return format_fill(gpu.used_bytes, gpu.total_bytes)


def _used(free_bytes: int | None, total_bytes: int | None) -> int | None:
    return None if free_bytes is None or total_bytes is None else max(0, total_bytes - free_bytes)


def _filled(name: str, used_bytes: int | None, total_bytes: int | None) -> list[tuple[str, bool]]:
    if used_bytes is None or not total_bytes:
        return []
    return [(f"{name} {format_fill(used_bytes, total_bytes)}", used_bytes > _ALMOST_FULL * total_bytes)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _counted(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 9.95 else format_count(per_second)


def _per_second(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _number(value: float) -> str:
    return f"{value:.4g}"

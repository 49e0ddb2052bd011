"""The content of the panel: its state at one instant, and the texts, bars, curves and gauges derived from it.

HTML and text show the same content.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from colabkit.foundation import (
    GpuSnapshot,
    HostSnapshot,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    printable,
)
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis

Phase: TypeAlias = Literal["starting", "running", "waiting", "finished", "stopped"]

UNKNOWN = "n/a"
# Larger speedup factors are not shown.
_MOST_TIMES = 100
# Shorter waits are not shown, since they end before the text can be read.
_LONG_WAIT_S = 1.0
_MOST_VALUES = 6
# Longest code line that is shown, in characters.
_MOST_OF_A_CALL = 240
_CLIPPED = "colabkit.supervised_step(..., clip=1.0)"


@dataclass(frozen=True, slots=True)
class PanelState:
    """The state that the panel shows. Unknown values are None, and unknown curves are empty.

    Curves are ordered from the oldest point to the newest. During the run they cover the last minute, afterwards the
    whole run. The loss curve always covers the whole run. Rates cover the last seconds during the run, afterwards the
    whole run.

    Attributes:
        phase: phase of the run; `"waiting"` means waiting for a batch.
        stopped_by: name of the error that stopped the run.
        epoch: number of the epoch, from 1.
        epochs: total number of epochs.
        step: number of finished steps in this epoch; in a plain loop, of received batches.
        steps_per_epoch: number of steps per epoch.
        elapsed_s: seconds since the start.
        remaining_s: estimated seconds to the end of the run, or of the epoch if `epochs` is unknown.
        waiting_s: seconds that the loop has been waiting for a batch.
        diagnosis: the doctor's diagnosis.
        samples_per_s: samples per second.
        data_bytes_per_s: bytes per second that the loader read, or gathered if it does not count reads.
        queue_rate: mean fill level of the queue of ready batches, in [0, 1].
        values: values returned by a recent step.
        validation: values returned by the last validation, by label, for example `"val_loss"`.
        host: the newest snapshot of the machine.
        gpu_number: index of the GPU that the batches go to.
        load_curve: utilization of that GPU, or of the CPUs if there is no GPU, in [0, 1].
        speed_curve: samples per second.
        data_curve: bytes per second.
        queue_curve: fill level of the queue, in [0, 1].
        loss_curve: training loss.
        cost_share: share of the time that the panel takes, including its measurements, in [0, 1].
        at_s: time of the state in seconds since 1970, which shows whether a frame is old; after the run, that of its
            end.
        headline: text shown in place of the verdict, for example because the run no longer exists.
    """

    phase: Phase
    stopped_by: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps_per_epoch: int | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    waiting_s: float = 0.0
    diagnosis: Diagnosis | None = None
    samples_per_s: float | None = None
    data_bytes_per_s: float | None = None
    queue_rate: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    host: HostSnapshot | None = None
    gpu_number: int = 0
    load_curve: tuple[float, ...] = ()
    speed_curve: tuple[float, ...] = ()
    data_curve: tuple[float, ...] = ()
    queue_curve: tuple[float, ...] = ()
    loss_curve: tuple[float, ...] = ()
    cost_share: float | None = None
    at_s: float | None = None
    headline: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase in ("finished", "stopped")

    @property
    def gpu(self) -> GpuSnapshot | None:
        """The GPU that the batches go to; None without a GPU."""
        gpus = self.host.gpus if self.host else ()
        return gpus[self.gpu_number if self.gpu_number < len(gpus) else 0] if gpus else None


class Segment(NamedTuple):
    """A segment of the step time and its share in [0, 1]; None if nothing was timed."""

    name: str
    share: float | None

    @property
    def text(self) -> str:
        """The share as text."""
        return UNKNOWN if self.share is None else format_share(self.share)


class Curve(NamedTuple):
    """A curve: its name, its newest value as text, its points, the formatter of its unit, and fixed axis limits."""

    name: str
    text: str
    points: Sequence[float]
    unit: Callable[[float], str]
    low: float | None = 0.0
    high: float | None = None


class Gauge(NamedTuple):
    """A fill level in [0, 1], None if unknown. `apart` is a portion of it that is drawn separately."""

    name: str
    text: str
    share: float | None
    apart: float = 0.0
    apart_text: str = ""


class AdviceText(NamedTuple):
    """The action, the reason, the predicted gain and the Python code of a piece of advice; empty if missing."""

    action: str
    found: str = ""
    gain: str = ""
    call: str = ""


def clipped(text: object, most: int) -> str:
    """Return a text as one line without control characters, cut to at most `most` characters."""
    line = printable(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def verdict(state: PanelState) -> tuple[str, str]:
    """Return the verdict, and a suffix, possibly empty, that changes with every frame."""
    if state.headline:
        return clipped(state.headline, 140), ""
    if state.phase == "waiting" and state.waiting_s >= _LONG_WAIT_S:
        return "Waiting for data", f"since {format_seconds(state.waiting_s)}"
    sentence = clipped(state.diagnosis.sentence, 140) if state.diagnosis else ""
    early = {"starting": "Starting", "finished": "Finished", "stopped": "Stopped"}
    return sentence or early.get(state.phase, "Warming up"), ""


def position(state: PanelState) -> str:
    """Return the position in the run: the error that stopped it, epoch, step and time."""
    parts = [f"stopped by {clipped(state.stopped_by, 60)}"] if state.phase == "stopped" else []
    if state.epoch is not None:
        parts.append(f"epoch {_of(state.epoch, state.epochs)}")
        parts.append(f"step {_of(state.step, state.steps_per_epoch)}")
    if state.is_over:
        parts.append(f"{format_seconds(state.elapsed_s)} in total")
    elif state.remaining_s is not None:
        parts.append(f"{_whole_seconds(state.remaining_s)} left")
    else:
        parts.append(f"{_whole_seconds(state.elapsed_s)} so far")
    return " · ".join(parts)


def done_share(state: PanelState) -> float | None:
    """Return the finished share of the run, or of the epoch if the number of epochs is unknown."""
    if not state.steps_per_epoch or state.epoch is None:
        return 1.0 if state.phase == "finished" else None
    done = state.step / state.steps_per_epoch
    return min(1.0, (state.epoch - 1 + done) / state.epochs if state.epochs else done)


def segments(state: PanelState) -> tuple[Segment, ...]:
    """Return the segments of the step time, one for each part."""
    shares = state.diagnosis.shares if state.diagnosis else None
    is_known = shares is not None and shares.wait + shares.copy + shares.compute + shares.other > 0
    return tuple(
        Segment(name, getattr(shares, part) if is_known else None)
        for name, part in (("waiting for data", "wait"), ("copy", "copy"), ("step", "compute"), ("other", "other"))
    )


def curves(state: PanelState) -> tuple[Curve, ...]:
    """Return the curves: load, speed, data, queue, loss."""
    gpu, host = state.gpu, state.host
    many = host is not None and len(host.gpus) > 1
    name = f"GPU {state.gpu_number}" if many else "GPU" if gpu else "CPU"
    load = gpu.utilization_rate if gpu else host.cpu_rate if host else None
    return (
        _curve(name, load, state.load_curve, _percent, 0.0, 1.0),
        _curve("Images/s", state.samples_per_s, state.speed_curve, _counted),
        _curve("Data", state.data_bytes_per_s, state.data_curve, _per_second),
        _curve("Ready queue", state.queue_rate, state.queue_curve, _percent, 0.0, 1.0),
        _curve("Loss", state.values.get("loss"), state.loss_curve, _number, None),
    )


def gauges(state: PanelState) -> tuple[Gauge, ...]:
    """Return the fill levels of GPU memory, RAM, disk and tmpfs."""
    host, gpu = state.host, state.gpu
    if host is None:
        return tuple(Gauge(name, UNKNOWN, None) for name in ("GPU memory", "RAM", "Disk", "tmpfs"))
    if gpu is None:
        memory = Gauge("GPU memory", "no GPU", None)
    elif gpu.is_lost:
        memory = Gauge("GPU memory", "GPU lost", None)
    else:
        memory = _filled("GPU memory", gpu.used_bytes, gpu.total_bytes)
    ram = _filled("RAM", host.ram_used_bytes, host.ram_total_bytes)
    if host.tmpfs_bytes and ram.share:
        tmpfs = min(host.tmpfs_bytes / host.ram_total_bytes, ram.share)
        ram = ram._replace(apart=tmpfs, apart_text=f"tmpfs {format_bytes(host.tmpfs_bytes)}")
    return (
        memory,
        ram,
        _filled("Disk", _used(host.disk_free_bytes, host.disk_total_bytes), host.disk_total_bytes),
        _filled("tmpfs", _used(host.shm_free_bytes, host.shm_total_bytes), host.shm_total_bytes),
    )


def advice_text(state: PanelState) -> AdviceText:
    """Return the best piece of advice, or advice about the loss if it is not finite."""
    loss = state.values.get("loss")
    if loss is not None and not math.isfinite(loss):
        return AdviceText("Lower the learning rate, or clip gradients", f"the loss is {_number(loss)}", "", _CLIPPED)
    diagnosis = state.diagnosis
    if diagnosis is None or not diagnosis.advice:
        if diagnosis is not None and diagnosis.needs_nothing:
            return AdviceText("Nothing to fix")
        is_early = diagnosis is None or diagnosis.verdict == "unknown"
        return AdviceText("No advice yet" if is_early and not state.is_over else "No advice")
    advice = diagnosis.advice[0]
    gain = ""
    if advice.samples_per_s is not None:
        gain = f"about {_counted(advice.samples_per_s)} images/s"
        if 0 < advice.samples_per_s <= _MOST_TIMES * diagnosis.samples_per_s:
            gain += f" ({advice.samples_per_s / diagnosis.samples_per_s:.1f}×)"
    return AdviceText(
        clipped(advice.action, 100).rstrip("."), clipped(advice.found, 110), gain, clipped(advice.call, _MOST_OF_A_CALL)
    )


def values(state: PanelState) -> str:
    """Return the values shown next to the loss; each validation value follows its training value."""
    found = {**state.values, **state.validation}
    names = [label for name in ("loss", *found) for label in (name, f"val_{name}") if label in found]
    rest = [name for name in dict.fromkeys(names) if name != "loss"]
    return " · ".join(f"{clipped(name, 24)} {_number(found[name])}" for name in rest[:_MOST_VALUES])


def cost(state: PanelState) -> str:
    """Return the share of the time that the panel takes, and the time of the state, as text."""
    share = f"panel {UNKNOWN if state.cost_share is None else format_share(state.cost_share)}"
    return share if state.at_s is None else f"{share} · {time.strftime('%H:%M:%S UTC', time.gmtime(state.at_s))}"


def thinned(points: Sequence[float], most: int) -> tuple[float, ...]:
    """Reduce a curve to at most `most` points by averaging neighbors, from the oldest to the newest."""
    if len(points) <= most:
        return tuple(points)
    edges = [round(number * len(points) / most) for number in range(most + 1)]
    return tuple(sum(points[a:b]) / (b - a) for a, b in itertools.pairwise(edges))


def _of(count: int, total: int | None) -> str:
    return f"{format_count(count)}/{format_count(total)}" if total else format_count(count)


def _whole_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)


def _curve(
    name: str,
    value: float | None,
    points: Sequence[float],
    unit: Callable[[float], str],
    low: float | None = 0.0,
    high: float | None = None,
) -> Curve:
    return Curve(name, UNKNOWN if value is None else unit(value), points, unit, low, high)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _counted(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 9.95 else format_count(per_second)


def _per_second(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _used(free_bytes: int | None, total_bytes: int | None) -> int | None:
    return None if free_bytes is None or total_bytes is None else total_bytes - free_bytes


def _filled(name: str, used_bytes: int | None, total_bytes: int | None) -> Gauge:
    if used_bytes is None or not total_bytes:
        return Gauge(name, UNKNOWN, None)
    share = min(1.0, max(0.0, used_bytes / total_bytes))
    number, _, unit = format_bytes(total_bytes).partition(" ")
    # Show the used amount in the same unit as the total.
    used = share * float(number)
    return Gauge(name, f"{used:.{0 if used >= 99.95 else 1}f}/{number} {unit}", share)

"""The content of the panel: what is known at one instant, and the texts, bars, curves and gauges that show it.

HTML and terminal show the same content.
"""

from __future__ import annotations

import itertools
import math
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
from colabkit.monitoring.doctor.diagnosis import Diagnosis

Phase: TypeAlias = Literal["starting", "running", "waiting", "finished", "stopped"]

UNKNOWN = "n/a"
_MOST_TIMES = 100  # beyond, a factor says nothing
_LONG_WAIT_S = 1.0  # shorter ones come and go too fast to be read
_MOST_VALUES = 6
_MOST_OF_A_CALL = 240  # characters; half a call is of no use
_CLIPPED = "colabkit.supervised_step(..., clip=1.0)"


@dataclass(frozen=True, slots=True)
class PanelState:
    """Everything that `render` draws; what is not known is None, and a curve without points is empty.

    Curves run from the oldest point to the newest: over the last minute while a run goes on, over all of it afterwards.
    That of the losses is always over all of it.

    Attributes:
        phase: where the run stands; `"waiting"` is for a batch.
        stopped_by: name of the error that stopped the run.
        epoch: number of the epoch, from 1.
        epochs: how many there will be.
        step: steps done in this epoch.
        steps_per_epoch: steps of an epoch.
        elapsed_s: seconds since the start.
        remaining_s: seconds that are left at the pace so far.
        waiting_s: for how long the loop has been waiting for a batch.
        diagnosis: what the doctor says.
        samples_per_s: samples a second, of the last seconds while running, else of all; the next ones likewise.
        data_bytes_per_s: bytes a second that the loader read or, where it counts no reads, gathered.
        queue_rate: how full the queue of ready batches was, in [0, 1].
        values: what a step returned lately.
        validation: what the last validation returned, by label, as in `"val_loss"`.
        host: the machine.
        gpu_number: which of the machine's GPUs the batches go to.
        load_curve: utilisation of that GPU or, without one, of the CPUs, in [0, 1].
        speed_curve: samples a second.
        data_curve: bytes a second.
        queue_curve: how full the queue was.
        loss_curve: the losses.
        cost_share: share of the time that the panel itself takes, its measuring included.
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

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase in ("finished", "stopped")

    @property
    def gpu(self) -> GpuSnapshot | None:
        """The GPU that the batches go to; None where there is none."""
        gpus = self.host.gpus if self.host else ()
        return gpus[self.gpu_number if self.gpu_number < len(gpus) else 0] if gpus else None


class Segment(NamedTuple):
    """A part of a step's time: its share in [0, 1], None if nothing was timed."""

    name: str
    share: float | None

    @property
    def text(self) -> str:
        """Share as text."""
        return UNKNOWN if self.share is None else format_share(self.share)


class Curve(NamedTuple):
    """A curve: its name, what its newest value is and was as text, its points, the ends of its axis that are fixed."""

    name: str
    text: str
    points: Sequence[float]
    unit: Callable[[float], str]
    low: float | None = 0.0
    high: float | None = None


class Gauge(NamedTuple):
    """How full something is: its share in [0, 1], of which `apart` is shown apart; None is not known."""

    name: str
    text: str
    share: float | None
    apart: float = 0.0
    apart_text: str = ""


class AdviceText(NamedTuple):
    """The action, the reason, the predicted gain and the line of Python that does it; empty where there is none."""

    action: str
    found: str = ""
    gain: str = ""
    call: str = ""


def clipped(text: object, most: int) -> str:
    """Return a text in one line, without control characters, of at most so many characters."""
    line = printable(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def verdict(state: PanelState) -> tuple[str, str]:
    """Return the one sentence that matters, and what in it changes all the time."""
    if state.phase == "waiting" and state.waiting_s >= _LONG_WAIT_S:
        return "Waiting for data", f"since {format_seconds(state.waiting_s)}"
    sentence = clipped(state.diagnosis.sentence, 140) if state.diagnosis else ""
    early = {"starting": "Starting", "finished": "Finished", "stopped": "Stopped"}
    return sentence or early.get(state.phase, "Warming up"), ""


def position(state: PanelState) -> str:
    """Return what stopped the run, epoch, step and time."""
    parts = [f"stopped by {clipped(state.stopped_by, 60)}"] if state.phase == "stopped" else []
    if state.epoch is not None:
        parts.append(f"epoch {_of(state.epoch, state.epochs)}")
        parts.append(f"step {_of(state.step, state.steps_per_epoch)}")
    if state.is_over:
        parts.append(f"{format_seconds(state.elapsed_s)} in all")
    elif state.remaining_s is not None:
        parts.append(f"{_whole_seconds(state.remaining_s)} left")
    else:
        parts.append(f"{_whole_seconds(state.elapsed_s)} so far")
    return " · ".join(parts)


def done_share(state: PanelState) -> float | None:
    """Return how much of the run is done, of the epoch where nobody tells how many there will be."""
    if not state.steps_per_epoch or state.epoch is None:
        return 1.0 if state.phase == "finished" else None
    done = state.step / state.steps_per_epoch
    return min(1.0, (state.epoch - 1 + done) / state.epochs if state.epochs else done)


def segments(state: PanelState) -> tuple[Segment, ...]:
    """Return where the time of a step goes."""
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
    """Return how full GPU memory, RAM, disk and tmpfs are."""
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
    """Return the best piece of advice; where the loss is no number, more speed is of no use."""
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
    """Return what stands beside the loss: each number of a validation follows its counterpart of training."""
    found = {**state.values, **state.validation}
    names = [label for name in ("loss", *found) for label in (name, f"val_{name}") if label in found]
    rest = [name for name in dict.fromkeys(names) if name != "loss"]
    return " · ".join(f"{clipped(name, 24)} {_number(found[name])}" for name in rest[:_MOST_VALUES])


def cost(state: PanelState) -> str:
    """Return what the panel itself costs."""
    return f"panel {UNKNOWN if state.cost_share is None else format_share(state.cost_share)}"


def thinned(points: Sequence[float], most: int) -> tuple[float, ...]:
    """Return at most so many points: means of neighbours, from the oldest to the newest."""
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
    used = share * float(number)  # in the unit of the whole
    return Gauge(name, f"{used:.{0 if used >= 99.95 else 1}f}/{number} {unit}", share)

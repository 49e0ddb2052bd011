"""The content of the panel: its state at one instant, and the texts derived from it; `charts` derives the rest.

HTML and text show the same content. Content without data is omitted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from colabkit.foundation import (
    HostSnapshot,
    Progress,
    caller_words,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    printable,
    shortened,
)
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis, gain_text

Phase: TypeAlias = Literal["starting", "running", "waiting", "finished", "stopped"]

# Minimum seconds of a wait that is shown; shorter ones end before the text can be read.
_LONG_WAIT_S = 1.0
_ACTIVITIES = {
    "list": "Listing files",
    "stage": "Copying files to this machine",
    "pack": "Packing samples into one file",
    "verify": "Verifying checksums",
}
# A stop button and Ctrl-C both raise KeyboardInterrupt, so name neither the key nor the error.
_INTERRUPTS = ("KeyboardInterrupt", "Ctrl-C")
# Longest headline that is shown, in characters: the state of a run on a host with a long name, and how to resume it.
_MOST_OF_A_HEADLINE = 300
# Longest code line that is shown, in characters.
_MOST_OF_A_LINE = 200


@dataclass(frozen=True, slots=True)
class PanelState:
    """The state that the panel shows. Unknown values are None, and unknown curves are empty.

    Curves are ordered from the oldest point to the newest. During the run they cover the last minute, afterwards the
    whole run. The loss curve and the epochs always cover the whole run. Rates cover the last seconds during the run,
    afterwards the whole run.

    Attributes:
        phase: phase of the run; `"waiting"` means waiting for a batch.
        stopped_by: name of the error that stopped the run.
        epoch: number of the epoch, from 1.
        epochs: total number of epochs.
        step: number of finished steps in this epoch; in a plain loop, of received batches.
        steps_per_epoch: number of steps per epoch.
        elapsed_s: seconds since the start.
        remaining_s: estimated seconds to the end of the run, or of the operation in `work`; None until stable.
        epoch_remaining_s: estimated seconds to the end of the epoch; None until stable.
        waiting_s: seconds that the loop has been waiting for a batch.
        diagnosis: the doctor's diagnosis.
        samples_per_s: samples per second.
        data_bytes_per_s: bytes per second that the loader read, or gathered if it does not count reads.
        is_remote: whether the loader reads from a remote mount or a network.
        queue_rate: mean fill level of the queue of ready batches, in [0, 1].
        values: values returned by a recent step.
        validation: values returned by the last validation, by label, for example `"val_loss"`.
        epoch_values: for each complete epoch, its number, from 1, and its values by label.
        work: the operation before the run, such as staging; None during a run.
        work_per_s: units of this operation per second.
        work_curve: units of this operation per second.
        host: the newest snapshot of the machine.
        hosts: snapshots of the machine.
        gpu_number: index of the GPU that the batches go to.
        speed_curve: samples per second.
        data_curve: bytes per second.
        loss_curve: training loss of individual batches.
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
    epoch_remaining_s: float | None = None
    waiting_s: float = 0.0
    diagnosis: Diagnosis | None = None
    samples_per_s: float | None = None
    data_bytes_per_s: float | None = None
    is_remote: bool = False
    queue_rate: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    epoch_values: tuple[tuple[int, Mapping[str, float]], ...] = ()
    work: Progress | None = None
    work_per_s: float | None = None
    work_curve: tuple[float, ...] = ()
    host: HostSnapshot | None = None
    hosts: tuple[HostSnapshot, ...] = ()
    gpu_number: int = 0
    speed_curve: tuple[float, ...] = ()
    data_curve: tuple[float, ...] = ()
    loss_curve: tuple[float, ...] = ()
    cost_share: float | None = None
    at_s: float | None = None
    headline: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase in ("finished", "stopped")


class Segment(NamedTuple):
    """A segment of the step time and its share in [0, 1]."""

    name: str
    share: float

    @property
    def text(self) -> str:
        """The share as text."""
        return format_share(self.share)


class AdviceText(NamedTuple):
    """The action, the reason, the predicted gain and the code of a piece of advice; empty if missing."""

    action: str = ""
    found: str = ""
    gain: str = ""
    call: str = ""


def clipped(text: object, most: int) -> str:
    """Return text as one line without control characters, cut to at most `most` characters."""
    return shortened(printable(text), most)


def verdict(state: PanelState) -> tuple[str, str]:
    """Return the verdict, and a suffix, possibly empty, that changes with every frame."""
    if state.headline:
        return clipped(state.headline, _MOST_OF_A_HEADLINE), ""
    if state.work is not None and not state.is_over:
        return _activity(state.work.action), ""
    if state.phase == "waiting" and state.waiting_s >= _LONG_WAIT_S:
        return "Waiting for data", f"for {_whole_seconds(state.waiting_s)}"
    found, ended = state.diagnosis, state.phase.capitalize() if state.is_over else ""
    if found is None or (state.phase == "starting" and not found.steps) or (ended and found.verdict == "unknown"):
        early = "Starting: loading the first batch" if state.phase == "starting" else "Measuring the first steps"
        return ended or early, ""
    return clipped(f"{ended}. {found.sentence}" if ended else found.sentence, 140), ""


def position(state: PanelState) -> list[str]:
    """Return the position in the run or the operation: the error that stopped it, the epoch, the step and the time."""
    parts = []
    if state.phase == "stopped":
        parts.append(
            "interrupted" if state.stopped_by in _INTERRUPTS else f"stopped by {clipped(state.stopped_by, 60)}"
        )
    if state.work is not None:
        parts.append(state.work.count)
        parts += [clipped(state.work.note, 80)] if state.work.note else []
    elif state.epoch is not None:
        parts.append(f"epoch {_of(state.epoch, state.epochs)}")
        parts.append(f"step {_of(state.step, state.steps_per_epoch)}")
    if state.is_over:
        parts.append(f"{format_seconds(state.elapsed_s)} in total")
    elif state.remaining_s is not None and not state.headline:
        parts.append(f"about {_coarsely(state.remaining_s)} left")
    elif state.epoch_remaining_s is not None and not state.headline:
        parts.append(f"about {_coarsely(state.epoch_remaining_s)} left in this epoch")
    else:
        parts.append(f"{_whole_seconds(state.elapsed_s)} so far")
    return parts


def done_share(state: PanelState) -> float | None:
    """Return the finished share of the run or operation, or of the epoch if the number of epochs is unknown."""
    if state.work is not None:
        return state.work.share
    if not state.steps_per_epoch or state.epoch is None:
        return 1.0 if state.phase == "finished" else None
    done = state.step / state.steps_per_epoch
    return min(1.0, (state.epoch - 1 + done) / state.epochs if state.epochs else done)


def segments(state: PanelState) -> tuple[Segment, ...]:
    """Return the segments of the step time, one for each part; empty before there are enough steps for a verdict."""
    shares = state.diagnosis.shares if state.diagnosis and state.diagnosis.verdict != "unknown" else None
    if shares is None or not shares.wait + shares.copy + shares.compute + shares.other > 0:
        return ()
    named = (("waiting for data", shares.wait), ("copy", shares.copy), ("step", shares.compute))
    return (*itertools.starmap(Segment, named), Segment("other", shares.other))


def advice_text(state: PanelState) -> AdviceText:
    """Return the best piece of advice; empty if there is none yet."""
    diagnosis = state.diagnosis
    if diagnosis is None or state.work is not None:
        return AdviceText()
    if not diagnosis.advice:
        return AdviceText("Data loading needs no fix") if diagnosis.needs_nothing else AdviceText()
    advice = diagnosis.advice[0]
    gain = ""
    if advice.samples_per_s is not None:
        gain = f"about {format_rate(advice.samples_per_s, 'images')}"
        if times := gain_text(advice, diagnosis.samples_per_s):
            gain += f" ({times}×)"
    words = caller_words()
    code = "\n".join(clipped(line, _MOST_OF_A_LINE) for line in words.render(advice.call).split("\n"))
    return AdviceText(clipped(words.render(advice.action), 130).rstrip("."), clipped(advice.found, 130), gain, code)


def cost(state: PanelState) -> str:
    """Return the time of the state, and the share of the time that the panel takes, as text."""
    parts = [] if state.cost_share is None else [f"panel: {format_share(state.cost_share)} of the time"]
    if state.at_s is not None:
        said = "ended" if state.is_over else "updated"
        parts.append(f"{said} {time.strftime('%-d %b %H:%M:%S UTC', time.gmtime(state.at_s))}")
    return " · ".join(parts)


def _activity(action: str) -> str:
    """Return an action such as `"publish"` as an activity, `"Publishing"`."""
    if action in _ACTIVITIES:
        return _ACTIVITIES[action]
    first, _, rest = action.partition(" ")
    return clipped(f"{first.removesuffix('e').capitalize()}ing {rest}".strip(), 140)


def _of(count: int, total: int | None) -> str:
    return f"{format_count(count)}/{format_count(total)}" if total else format_count(count)


def _whole_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)


def _coarsely(seconds: float) -> str:
    """Return a duration rounded to five seconds or one minute, to avoid false precision."""
    if seconds < 57.5:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min" if seconds < 3570 else format_seconds(60 * round(seconds / 60))

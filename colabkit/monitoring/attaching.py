"""`status()` shows training runs in other processes and on other machines, and how to resume those that have ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from colabkit.foundation import (
    ColabkitError,
    Report,
    SourceMissing,
    cannot,
    check_duration,
    checked_call,
    format_count,
    format_seconds,
    meters,
    partials,
    printable,
    user_path,
)

if TYPE_CHECKING:
    from colabkit.training import SavedStatus

StateSeen: TypeAlias = Literal["running", "silent", "dead", "finished", "stopped", "failed", "unknown"]

# A run counts as silent when its status is overdue by this many writes and this many more seconds.
_MISSED, _GRACE_S = 3, 5.0
# Seconds by which Drive may delay a new file on another machine.
_DELAY_S = 60.0
_LOOK_S = 1.0
_SHOWN_VALUES = 4


@dataclass(frozen=True, repr=False)
class RunStatus(Report):
    """The state of a training run, read from its folder.

    Attributes:
        folder: folder of its checkpoints.
        state: `"running"`; `"silent"` if the run should have written its status, but has not; `"dead"` if its process
            ended without a final status; `"finished"`; `"stopped"`, for example by Ctrl-C; `"failed"` by an error; or
            `"unknown"` if there is no readable status.
        message: the state as a sentence, with its cause.
        advice: how to resume the run; empty while it runs and after it has finished.
        age_s: seconds since the status was written; None if unknown. For a run on another machine, it depends on both
            clocks.
        epoch: number of the current epoch, from 1.
        epochs: total number of epochs.
        step: number of finished steps in this epoch.
        steps_per_epoch: number of steps per full epoch.
        remaining_s: predicted seconds until the end; None if unknown.
        values: newest values of a step, and of the last validation.
        checkpoint_step: step of the newest checkpoint; None without one.
        host: name of the machine.
        pid: ID of the process.

    Example:
        >>> import colabkit
        >>> report = colabkit.train(lambda batch: 0.5, colabkit.Loader([[1.0]], 1), to="runs/one", state={})
        >>> colabkit.status("runs/one").runs[0].state
        'finished'
    """

    folder: Path
    state: StateSeen
    message: str
    advice: str = ""
    age_s: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps_per_epoch: int | None = None
    remaining_s: float | None = None
    values: dict[str, float] | None = None
    checkpoint_step: int | None = None
    host: str | None = None
    pid: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether the run is running or has finished."""
        return self.state in ("running", "finished")

    @property
    def is_over(self) -> bool:
        """Whether the run has finished, stopped, failed or died."""
        return self.state not in ("running", "silent")

    def _position(self) -> str:
        parts = []
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}/{self.epochs}, step {self.step}/{self.steps_per_epoch}")
        parts += [f"{printable(name)} {value:.4g}" for name, value in [*(self.values or {}).items()][:_SHOWN_VALUES]]
        if self.remaining_s is not None and self.state == "running":
            parts.append(f"{format_seconds(self.remaining_s)} left")
        return ", ".join(parts)

    def _summary(self) -> str:
        lines = [f"{str(self.folder)!r}: {'; '.join(filter(None, [self.message, self._position()]))}"]
        return "\n".join([*lines, *filter(None, [self.advice])])

    def _rows(self) -> list[tuple[str, ...]]:
        process = f"{self.pid} on {self.host}" if self.pid is not None else ""
        age = "" if self.age_s is None else f"{format_seconds(max(0.0, self.age_s))} ago"
        checkpoint = "" if self.checkpoint_step is None else f"step {format_count(self.checkpoint_step)}"
        rows = [("position", self._position()), ("process", process), ("last report", age), ("checkpoint", checkpoint)]
        return [row for row in [*rows, ("next", self.advice)] if row[1]]


@dataclass(frozen=True, repr=False)
class StatusReport(Report):
    """The runs in a folder.

    Attributes:
        folder: the folder that was searched.
        runs: its runs, sorted by folder.

    Example:
        >>> import colabkit
        >>> for name in ("one", "two"):
        ...     loader = colabkit.Loader([[1.0]], 1)
        ...     report = colabkit.train(lambda batch: 0.5, loader, to=f"runs/{name}", state={})
        >>> [run.folder.name for run in colabkit.status("runs").runs]
        ['one', 'two']
    """

    folder: Path
    runs: tuple[RunStatus, ...]

    @property
    def is_good(self) -> bool:
        """Whether each run is running or has finished."""
        return all(run.is_good for run in self.runs)

    def _summary(self) -> str:
        return "\n".join(str(run) for run in self.runs)

    def _rows(self) -> list[tuple[str, ...]]:
        if len(self.runs) == 1:
            return self.runs[0]._rows()  # noqa: SLF001 - a report of the same module
        return [(str(run.folder), run.message, run._position(), run.advice) for run in self.runs]  # noqa: SLF001


@checked_call()
def status(path: str | os.PathLike[str] = ".", *, seconds: float | str = 0.0) -> StatusReport:
    """Show training runs in any process on any machine: position, values, and whether they are alive.

    `train(to=)` writes the status next to its checkpoints. On the machine of the run, its process is looked up. On
    another machine, the run is alive if its status changes.

    Args:
        path: folder of the checkpoints, a folder of such folders, or the folder to which `train_on()` saves; may be on
            Drive.
        seconds: how long to wait for a change of the status of runs whose process cannot be looked up, in seconds or as
            text such as `"2min"`. 0 compares the time of the last report with the clock of this machine, which is
            wrong if the clocks differ.

    Returns:
        The runs, each with its state and, if it has ended early, how to resume it.

    Raises:
        InvalidOption: if `seconds` is not a duration.
        SourceMissing: if there is no run in the folder or its subfolders.
        NotMounted, TimedOut, FileFailed: if the folder cannot be read.

    Example:
        >>> import colabkit
        >>> loader = colabkit.Loader([[1.0], [2.0]], 1)
        >>> report = colabkit.train(lambda batch: 0.5, loader, to="runs/digits", state={})
        >>> colabkit.status("runs/digits")
        'runs/digits': finished; epoch 1/1, step 2/2, loss 0.5
    """
    act = "show the status"
    wait_s = 0.0 if seconds == 0 else check_duration(act, "seconds", seconds, example=60)
    folder = user_path(path, act)
    watches = [RunWatch(one) for one in runs_in(folder)]
    found = [watch.look() for watch in watches]
    until = time.monotonic() + wait_s
    while any(not run.is_over and not watch.is_certain for run, watch in zip(found, watches, strict=True)):
        if time.monotonic() >= until:
            break
        time.sleep(_LOOK_S)
        found = [watch.look() for watch in watches]
    return StatusReport(folder, tuple(found))


def runs_in(folder: Path) -> list[Path]:
    """Return the folder if it holds a run, otherwise its subfolders that do.

    Raises:
        SourceMissing: if there are none.
    """
    # Reading runs imports torch, which loading the extension must not do.
    from colabkit.training import folders_with_status

    found = folders_with_status(folder)
    if not found:
        act, expected = (
            f"show the status of {str(folder)!r}",
            "a folder with the checkpoints of a run",
        )
        next_step = "Pass the folder to which the run saves its checkpoints"
        raise SourceMissing(cannot(act, "there is no run in this folder or its subfolders", expected, next_step))
    return found


class RunWatch:
    """Watches one run: it is alive if its process exists, or if its status changes.

    Args:
        folder: folder of the checkpoints.
        clock: returns the current time in seconds.
        wall_clock: returns the time in seconds since 1970.

    Attributes:
        saved: the newest readable status; None before one is found.
        is_certain: whether the state does not depend on the clocks of two machines.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.saved: SavedStatus | None = None
        self.is_certain = False
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._first_s = self._changed_s = clock()
        self._has_changed = False

    def look(self) -> RunStatus:
        """Read the status and return the state of the run."""
        from colabkit.training import FoundStatus, read_status

        trouble: ColabkitError | None = None
        found = FoundStatus(None, None)
        try:
            found = read_status(self._folder)
        except ColabkitError as error:
            trouble = error
        if found.saved is not None:
            before, self.saved = self.saved, found.saved
            if before is not None and (before.run, before.beat) != (found.saved.run, found.saved.beat):
                self._changed_s, self._has_changed = self._clock(), True
        saved = self.saved
        if saved is None:
            self.is_certain = True
            message = str(trouble) if trouble else "trained by a program that writes no status"
            return RunStatus(self._folder, "unknown", message, checkpoint_step=found.step)
        state, message = self._state_of(saved)
        if trouble is not None and not saved.is_over:
            message += f"; its folder cannot be read now ({trouble})"
        step = found.step if found.step is not None else saved.checkpoint_step
        return RunStatus(
            self._folder,
            state,
            message,
            advice=_advice(state, step),
            age_s=self._wall_clock() - saved.written_s,
            epoch=min(saved.epoch + 1, saved.epoch_count),
            epochs=saved.epoch_count,
            step=saved.step_in_epoch if saved.epoch < saved.epoch_count else saved.steps_per_epoch,
            steps_per_epoch=saved.steps_per_epoch,
            remaining_s=saved.remaining_s,
            values=_values(saved),
            checkpoint_step=step,
            host=saved.host,
            pid=saved.pid,
        )

    def _state_of(self, saved: SavedStatus) -> tuple[StateSeen, str]:
        if saved.is_over:
            self.is_certain = True
            reason = f" by {saved.reason}" if saved.state == "stopped" else f": {saved.reason}"
            state: StateSeen = "finished" if saved.state == "finished" else "stopped"
            state = "failed" if saved.state == "failed" else state
            return state, saved.state + (printable(reason) if saved.reason else "")
        alive = partials.is_running(saved.owner)
        process = f"process {saved.pid} on {printable(saved.host)}"
        if alive is False:
            self.is_certain = True
            return "dead", f"dead: {process} ended without a final report, so it was killed or crashed"
        limit_s = _MISSED * saved.every_s + _GRACE_S + (0.0 if alive else _DELAY_S)
        age_s = self._wall_clock() - saved.written_s
        if alive:
            self.is_certain = True
            if age_s <= limit_s:
                return "running", _doing(saved)
            return "silent", f"silent: {process} exists, but has not reported for {format_seconds(age_s)}"
        still_s = self._clock() - self._changed_s
        self.is_certain = self._has_changed or still_s > limit_s
        if self._has_changed and still_s <= limit_s:
            return "running", _doing(saved)
        if still_s > limit_s:
            return "silent", f"silent: {process} has not reported for {format_seconds(still_s)}, so it is probably dead"
        ago = f"{format_seconds(abs(age_s))} {'ago' if age_s >= 0 else 'in the future'} by the clock of this machine"
        if -limit_s <= age_s <= limit_s:
            return "running", f"{_doing(saved)} on {printable(saved.host)}; last report {ago}"
        return "silent", f"silent: {process} last reported {ago}"


def _doing(saved: SavedStatus) -> str:
    if saved.state == "validating":
        return "running, validating"
    waits = saved.waiting_s >= saved.every_s
    return f"running, waiting for data for {format_seconds(saved.waiting_s)}" if waits else "running"


def _advice(state: StateSeen, step: int | None) -> str:
    if state in ("running", "finished"):
        return ""
    resume = (
        f"start the same training again to resume from step {format_count(step)}"
        if step
        else "start the same training again; there is no checkpoint to resume from"
    )
    if state == "silent":
        return f"If its process no longer exists, {resume}"
    return resume[0].upper() + resume[1:]


def _values(saved: SavedStatus) -> dict[str, float]:
    values = {name: value for name, value in saved.values.items() if not math.isnan(value)} or dict(
        saved.records[-1].values if saved.records else {}
    )
    last = saved.validations[-1].values if saved.validations else {}
    return {**values, **meters.label_validation(last, values)}

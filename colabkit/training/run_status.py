"""The status file of a run: its format, and reading it in other processes and on other machines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from colabkit.foundation import BadSource, cannot, file_changes, partials
from colabkit.training.checkpoints.files import RemoteFolder
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.checkpoints.seals import steps_in
from colabkit.training.records import EpochRecord, Validation
from colabkit.training.saved_run import SavedRun, from_plain, record_of, run_of

STATUS_FILE = "status.json"
FORMAT = 1
ANSWER_S = 20.0
"""Seconds within which the file system must answer; otherwise a read or write of the status is given up."""

# Locations of runs relative to the searched folder; the last two are used by `train_on()`.
_PLACES = ("*/", "run-*/checkpoints/", "*/run-*/checkpoints/")

RunState: TypeAlias = Literal["training", "validating", "finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStatus:
    """The content of a status file.

    Attributes:
        run: identifier of the `train()` call.
        owner: identifier of the process, as `partials.owner()` returns it.
        host: name of the machine.
        pid: ID of the process.
        beat: number of this write; it increases as long as the process is alive.
        every_s: longest time in seconds until the next write.
        written_s: time of the write in seconds since 1970, by the clock of that machine.
        state: `"training"`, `"validating"`, `"finished"`, `"stopped"` or `"failed"`.
        reason: reason why the run stopped, or the error that ended it; without text that looks like a secret.
        epoch: current epoch, from 0.
        epoch_count: total number of epochs.
        step_in_epoch: number of finished steps in this epoch.
        steps_per_epoch: number of steps of a full epoch.
        step: number of all finished steps.
        elapsed_s: seconds since the start of the call.
        remaining_s: predicted seconds until the end; None if unknown.
        waiting_s: seconds that the run has been waiting for a batch.
        cost_share: CPU seconds spent on this file divided by the elapsed time.
        checkpoint: name of the newest checkpoint, if any.
        values: newest values of a step.
        loss_curve: training loss over the whole run, oldest first.
        speed_curve: samples per second in the last minute.
        data_curve: bytes per second in the last minute.
        records: finished epochs; only some of them if there are more than 100.
        validations: validations, thinned in the same way.
        measured: the measurements, as in a saved report; times of host snapshots are relative to the write.
    """

    run: str
    owner: str
    host: str
    pid: int
    beat: int
    every_s: float
    written_s: float
    state: RunState
    reason: str | None
    epoch: int
    epoch_count: int
    step_in_epoch: int
    steps_per_epoch: int
    step: int
    elapsed_s: float
    remaining_s: float | None
    waiting_s: float
    cost_share: float
    checkpoint: str | None
    values: Mapping[str, float]
    loss_curve: tuple[float, ...]
    speed_curve: tuple[float, ...]
    data_curve: tuple[float, ...]
    records: tuple[EpochRecord, ...]
    validations: tuple[Validation, ...]
    measured: SavedRun

    @property
    def checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint, if any."""
        digits = re.findall(r"\d+", self.checkpoint or "")
        return int(digits[0]) if digits else None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("finished", "stopped", "failed")


def parse_status(text: bytes, act: str) -> SavedStatus:
    """Return the content of a status file.

    Raises:
        BadSource: if the file is damaged, or was written by a newer version.
    """
    number = FORMAT
    try:
        values = json.loads(text)
        number = values.pop("format")
        if number != FORMAT:
            raise ValueError
        records = from_plain(tuple[EpochRecord, ...], values["epochs"])
        measured = run_of({name: values.pop(name) for name in ("spent", "facts", "hosts", "precision", "epochs")})
        status: SavedStatus = record_of(SavedStatus, values, records=records, measured=measured)
        return status
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if number != FORMAT:
            found, next_step = f"its format is {number!r}", "Install the version of colabkit that the run uses"
            raise BadSource(cannot(act, found, f"format {FORMAT}", next_step)) from None
        next_step = "If the run is alive, try again in a few seconds"
        raise BadSource(cannot(act, "the file is damaged", "a status that train() wrote", next_step)) from error


class FoundStatus(NamedTuple):
    """A run in a folder.

    Attributes:
        saved: the content of its status file; None without one.
        step: step of its newest checkpoint; None without one.
    """

    saved: SavedStatus | None
    step: int | None


def read_status(folder: Path) -> FoundStatus:
    """Read the status of the newest run in a checkpoint folder.

    A run on this machine that saves to a mount also writes its status locally, which is newer, and which can be read
    while the mount hangs.

    Raises:
        BadSource: if the file is damaged, or was written by a newer version.
        TimedOut, NotMounted, FileFailed: if the folder cannot be read.
    """
    act = f"read the status of {str(folder)!r}"
    checkpoints = CheckpointFolder(folder, timeout_s=ANSWER_S)
    near = checkpoints.local_folder / STATUS_FILE
    with file_changes.translated(act):
        text = _text(near)
    saved = None if text is None else parse_status(text, act)
    if checkpoints.folder != checkpoints.local_folder and not (saved and partials.is_running(saved.owner)):
        remote = RemoteFolder(checkpoints.folder, ANSWER_S)
        text = remote.ask(act, lambda _: _text(checkpoints.folder / STATUS_FILE))
        other = None if text is None else parse_status(text, act)
        if other and not (saved and saved.run == other.run and saved.beat >= other.beat):
            saved = other
    if saved is not None and not saved.is_over and partials.is_running(saved.owner):
        # While the run is alive, use the checkpoint that its status names, so that nothing waits for the mount.
        return FoundStatus(saved, saved.checkpoint_step)
    return FoundStatus(saved, checkpoints.newest_step())


def folders_with_status(folder: Path) -> list[Path]:
    """Return the folder if it holds a run, otherwise its subfolders that do, sorted by name.

    In each folder, the runs of `train_on()` are also found.

    Raises:
        TimedOut, NotMounted, FileFailed: if the folder cannot be read.
    """
    act = f"look for runs in {str(folder)!r}"
    checkpoints = CheckpointFolder(folder, timeout_s=ANSWER_S)
    with file_changes.translated(act):
        if _has_run(checkpoints.local_folder):
            return [folder]

        def find(_: object = None) -> list[Path]:
            if _has_run(folder):
                return [folder]
            below = (one for pattern in _PLACES for one in folder.glob(pattern))
            return sorted(one for one in below if _has_run(one))

        is_far = checkpoints.folder != checkpoints.local_folder
        return RemoteFolder(folder, ANSWER_S).ask(act, find) if is_far else find()


def _has_run(folder: Path) -> bool:
    return (folder / STATUS_FILE).is_file() or bool(steps_in(folder))


def _text(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None

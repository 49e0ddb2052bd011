"""The report of `train()`: epochs, curves, checkpoints and timings; saving it to a file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from colabkit.foundation import (
    HostSnapshot,
    Interrupted,
    LoaderFacts,
    MetersSnapshot,
    Report,
    file_changes,
    finite,
    format_rate,
    format_seconds,
    format_share,
    format_things,
    import_optional,
    option,
    user_path,
    write_atomically,
)
from colabkit.training.records import INTENDED_STOPS, EpochRecord, Validation
from colabkit.training.trace import trace_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_LISTED = 200
"""Maximum number of epochs, validations and points of a curve in `to_dict()`."""

_FIRST, _LAST = 5, 10
"""Number of the first and the last epochs that a table lists, if there are more."""

_LISTED_MACHINES = 240
"""Size budget for the host snapshots in `to_dict()`: a snapshot costs 5, plus 1 for each GPU."""


@dataclass(frozen=True, repr=False)
class TrainReport(Report):
    """The report of a `train()` call.

    Attributes:
        epochs: one record per complete epoch, including epochs trained before a resume.
        trained: number of epochs that this call completed.
        steps: total number of steps, including steps before a resume.
        seconds: duration of this call in seconds.
        samples_per_s: training throughput of this call in samples per second, over all processes and without
            validation; 0 if no training was left to do.
        wait_share: fraction of the training time spent waiting for data, in [0, 1].
        parts: seconds in this call that each part of the loader was busy.
        curve: for each value that the step returned, up to 1,000 pairs: a step, and the mean since the previous pair.
        validations: values of each validation, with its step.
        stopped: reason why training stopped early: `"patience"`, `"on_step"` or `"on_checkpoint"` (which raised
            `StopIteration`), `"deadline"`, `"Ctrl-C"`, `"SIGTERM"` or `"SIGHUP"`; None if training did not stop early.
        checkpoint: the newest checkpoint, or None without `to`.
        best: the saved checkpoint with the best value of `monitor`, or None without `to` or without values of
            `monitor`. To load its weights, use
            `model.load_state_dict(torch.load(report.best)["content"]["state"]["model"])`.
        best_value: the best value of `monitor`, or None if `monitor` was never measured. If a save failed, it may
            belong to a state that is not saved.
        resumed_from: the checkpoint that this call resumed from, or None.
        skipped_checkpoints: names of checkpoints that were skipped because they were damaged or had NaN or infinite
            weights, each with the reason.
        changed_settings: descriptions of the settings that differ from those of the checkpoint; each states whether
            the new value is ignored.
        failed_saves: steps of checkpoints that could not be written or published, with the reason. If the checkpoint of
            the last step could not be written, the trained weights exist only in this process.
        spent: the loader's counters in this call, and how the time of the steps was spent.
        facts: configuration of the loader.
        hosts: host snapshots taken during this call, evenly thinned; empty if the host was not monitored.
        precision: the precision of a supervised step, such as `"bf16"`; None for a custom step.
    """

    epochs: tuple[EpochRecord, ...]
    trained: int
    steps: int
    seconds: float
    samples_per_s: float
    wait_share: float
    parts: Mapping[str, float]
    curve: Mapping[str, list[tuple[int, float]]]
    validations: tuple[Validation, ...]
    stopped: Literal["Ctrl-C", "SIGHUP", "SIGTERM", "deadline", "on_checkpoint", "on_step", "patience"] | None
    checkpoint: Path | None
    best: Path | None
    best_value: float | None
    resumed_from: Path | None
    skipped_checkpoints: tuple[tuple[str, str], ...]
    changed_settings: tuple[str, ...]
    failed_saves: tuple[tuple[int, str], ...]
    spent: MetersSnapshot = MetersSnapshot()  # noqa: RUF009 - frozen, so it may be shared
    facts: LoaderFacts | None = None
    hosts: tuple[HostSnapshot, ...] = ()
    precision: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether training ended as intended: after all epochs, by `patience` or by `StopIteration`."""
        return self.stopped in INTENDED_STOPS

    @property
    def is_good(self) -> bool:
        """Whether training ended as intended and every checkpoint was saved."""
        return self.is_finished and not self.failed_saves

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot how step time was spent, the throughput, the machine utilization, and the values of the steps.

        Args:
            path: file to save the figure to, such as `"run.png"` or `"run.pdf"`; may start with `drive:`.

        Returns:
            The matplotlib figure.

        Raises:
            MissingPackage: if matplotlib is not installed.
            InvalidOption: if nothing has been trained, or the file extension is not an image format.
            FileFailed: if the file cannot be written.
            NotEnoughSpace: if the disk is full.
            NotMounted: if `path` is on Drive and Drive is not mounted.
        """
        from colabkit.foundation import plotting
        from colabkit.training.plot import plot_run

        headline = self._summary().partition("\n")[0].partition(";")[0]
        figure = plot_run(headline, self.epochs, self.curve, self.validations, self.hosts)
        if path is not None:
            plotting.save_figure(figure, path)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for `json.dumps`, at most about 200 kB.

        For long runs, `epochs`, `validations`, `curve` and `hosts` are thinned evenly, keeping the first and the last
        entry. The times of individual steps in `spent` are omitted.
        """
        values = super().to_dict()
        del values["spent"]["recent"]
        values["spent"]["stretches"] = short([list(stretch) for stretch in self.spent.stretches])
        for name in ("epochs", "validations"):
            values[name] = thinned(values[name], _LISTED)
        values["curve"] = {name: short(thinned(points, _LISTED)) for name, points in values["curve"].items()}
        gpus = max((len(snapshot.gpus) for snapshot in self.hosts), default=0)
        values["hosts"] = short(thinned(values["hosts"], max(2, _LISTED_MACHINES // (5 + gpus))))
        return values

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a JSON file of at most about 300 kB, which `doctor()` accepts, and return its path.

        The file holds the values of `to_dict()` and the times of the most recent steps. NaN and infinity become null,
        because JSON cannot represent them. An existing file is replaced atomically.

        Args:
            path: file to write; may start with `drive:`.

        Raises:
            FileFailed: if the file cannot be written.
            NotEnoughSpace: if the disk is full.
            NotMounted: if `path` is on Drive and Drive is not mounted.
        """
        values = self.to_dict()
        values["spent"]["recent"] = short([list(step) for step in self.spent.recent])
        return _write_json(path, "save the report", values)

    def to_pandas(self) -> DataFrame:
        """Return a pandas data frame with one row per epoch: its number from 0, counts, seconds, and all values.

        A validation value whose name training also uses gets the prefix `val_`.

        Raises:
            MissingPackage: if pandas is not installed.
        """
        pandas = import_optional("pandas", "make a data frame", "for to_pandas()")
        fields = [field.name for field in dataclasses.fields(EpochRecord) if field.name not in ("values", "validation")]
        rows = [{**one.shown, **{name: getattr(one, name) for name in fields}} for one in self.epochs]
        names = dict.fromkeys([*fields, *(name for row in rows for name in row)])
        return pandas.DataFrame(rows, columns=[*names])

    def to_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write how the time of this call's steps was spent to a trace file, and return its path.

        Open the file in https://ui.perfetto.dev or `chrome://tracing`. Each step is split into data wait, copy, compute
        and other; up to 512 of the newest steps are shown one by one, and earlier ones as one block per epoch. The sums
        equal those of `spent`. An existing file is replaced atomically.

        Args:
            path: file to write, such as `"run.trace.json"`; may start with `drive:`.

        Raises:
            FileFailed: if the file cannot be written.
            NotEnoughSpace: if the disk is full.
            NotMounted: if `path` is on Drive and Drive is not mounted.
        """
        epochs = self.epochs[len(self.epochs) - self.trained :]
        return _write_json(path, "save the trace", trace_of(epochs, self.steps, self.spent))

    def _summary(self) -> str:
        count = format_things(self.trained, "epoch", "epochs")
        total = f" ({len(self.epochs)} in total)" if self.trained != len(self.epochs) else ""
        lines = [f"Trained {count}{total}"]
        if self.stopped and self.stopped != "patience" and not self.samples_per_s:
            lines[0] += "; stopped before the first step"
        elif self.samples_per_s:
            rate = format_rate(self.samples_per_s, "images")
            lines[0] += f" in {format_seconds(self.seconds)}: {rate}, {format_share(self.wait_share)} waiting for data"
        else:
            lines[0] += "; nothing was left to do"
        if self.epochs and (values := self.epochs[-1].shown):
            lines[0] += "; " + _listed(values)
        if self.stopped:
            saved = f"; checkpoint {str(self.checkpoint)!r}" if self.checkpoint else ", without a checkpoint"
            lines.append(f"Stopped by {self.stopped} after step {self.steps}{saved}")
        elif self.checkpoint:
            lines.append(f"Checkpoints in {str(self.checkpoint.parent)!r}")
        for label, text in self._incidents():
            lines.append(f"{label.capitalize()}{':' if label in ('changed', 'warning') else ''} {text}")
        return "\n".join(lines)

    def _incidents(self) -> list[tuple[str, str]]:
        """Return labeled descriptions of an unsaved last state, a resume, skipped checkpoints, changes and failures."""
        found = [("warning", unsaved)] if (unsaved := _unsaved_end(self)) else []
        found += [("resumed from", repr(str(self.resumed_from)))] if self.resumed_from else []
        found += [("skipped", f"{name!r}: {reason}") for name, reason in self.skipped_checkpoints]
        found += [("changed", text) for text in self.changed_settings]
        found += [("not saved", f"at step {step}: {reason}") for step, reason in self.failed_saves]
        return found

    def _header(self) -> tuple[str, ...]:
        return ("", "time", "speed", "waiting", *self._value_names()) if self.epochs else ()

    def _value_names(self) -> list[str]:
        """Return the names of the values of all epochs, in the order in which they first appear."""
        return list(dict.fromkeys(name for record in self.epochs for name in record.shown))

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        names = self._value_names()
        folded = max(0, len(self.epochs) - _FIRST - _LAST)
        for record in self.epochs if folded < 2 else (*self.epochs[:_FIRST], *self.epochs[-_LAST:]):
            rate = format_rate(record.samples / max(record.seconds, 1e-9), "images")
            waiting = format_share(record.wait_s / max(record.seconds, 1e-9))
            name = f"epoch {record.epoch + 1}"
            shown = record.shown
            values = (f"{shown[label]:.4g}" if label in shown else "" for label in names)
            rows.append((name, format_seconds(record.seconds), rate, waiting, *values))
        if folded > 1:
            rows.insert(
                _FIRST,
                ("…", f"{format_things(folded, 'more epoch', 'more epochs')}, which to_pandas() lists"),
            )
        incidents = [("stopped", f"by {self.stopped} after step {self.steps}")] if self.stopped else []
        incidents += self._incidents()
        incidents += [("checkpoint", str(self.checkpoint))] if self.checkpoint else []
        rows += incidents
        if self.best and self.best_value is not None:
            # If a save failed, the state with the best value may be the one that is not saved.
            place = "; the best saved checkpoint is" if self.failed_saves else " in"
            rows.append(("best", f"{self.best_value:.4g}{place} {self.best}"))
        return rows


def _unsaved_end(report: TrainReport) -> str:
    """Return a note about the newest checkpoint if the state after the last step is not saved; empty if it is."""
    newest = report.checkpoint
    if not report.failed_saves or report.failed_saves[-1][0] != report.steps:
        return ""
    if newest is not None and newest.name.startswith(f"checkpoint-{report.steps:08d}"):
        return ""
    rest = f"the newest checkpoint is {str(newest)!r}" if newest else "there is no checkpoint"
    return f"the state after step {report.steps} is not saved, and {rest}. Save the model before this process ends"


class TrainingInterrupted(Interrupted):
    """Ctrl-C stopped training between two steps.

    Attributes:
        report: the `TrainReport` of the steps until then.
    """

    def __init__(self, report: TrainReport) -> None:
        self.report = report
        stopped = f"Training stopped after step {report.steps}"
        if unsaved := _unsaved_end(report):
            super().__init__(f"{stopped}: {unsaved}.")
        elif report.checkpoint:
            saved = f"checkpoint {str(report.checkpoint)!r} is saved"
            super().__init__(f"{stopped}: {saved}. Start the same training again to resume.")
        else:
            next_step = ("Name a folder with ", option("to"), " to save checkpoints and to resume.")
            super().__init__((f"{stopped}: nothing is saved. ", *next_step))


def _write_json(path: str | os.PathLike[str], act: str, values: Any) -> Path:
    target = user_path(path, act).absolute()
    text = json.dumps(finite(values), allow_nan=False)
    with file_changes.translated(act):
        write_atomically(target, text.encode(), durable=True)
    return target


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def thinned(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return items
    step = (len(items) - 1) / (most - 1)
    return [items[round(number * step)] for number in range(most)]


def short(value: Any) -> Any:
    """Return plain values with every float rounded to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return [short(item) for item in value] if isinstance(value, list) else value

"""The launcher's form without its widgets: its values, its choices, and errors that name its fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from colabkit.foundation import (
    PYTHON,
    BadSource,
    Code,
    ColabkitError,
    DiskReport,
    RuntimeReport,
    SourceMissing,
    TargetExists,
    format_bytes,
)
from colabkit.notebook.options import LineWords, option_words
from colabkit.notebook.verbs import VERBS

FIELDS = {
    "source": "Source",
    "to": "Local copy",
    "batch_size": "Batch size",
    "epochs": "Epochs",
    "work": "Work folder",
    "size": "Image size",
    "encoding": "Encoding",
    "labels": "Labels",
    "splits": "Splits",
    "channels": "Channels",
    "on_bad": "Bad files",
}
"""The labels of the fields, by the names of `Settings`, in the form's order."""

PACK_OPTIONS = ("size", "encoding", "labels", "splits", "channels", "on_bad")
"""The fields that are options of `pack()` with the same name; the form shows them in a collapsible section."""

_MAY_BE_EMPTY = ("size", "labels", "splits")
_PACK = next(verb for verb in VERBS if verb.name == "pack")
_OF_PACK = {option.name: option for option in _PACK.options if option.name in PACK_OPTIONS}
_SHARED_TMPFS = "/dev/shm"
_ABOUT = {"label": ("labels",), "split": ("splits",), "read": ("source",), "fetch": ("source",)}
"""The field to mark if an error names none, by the verb of the failed action."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the form's fields; text fields are not parsed yet.

    Attributes:
        source: path or address of the data.
        to: destination of the local copy.
        size: height and width to resize images to; empty to keep their size.
        encoding: encoding of the pack.
        labels: origin of the labels, as in `pack()`.
        splits: shares of the splits, or a column; empty to use the source's splits.
        channels: channels of the images, `"3"` or `"1"`.
        on_bad: action for files that cannot be decoded.
        batch_size: samples per batch.
        epochs: total number of epochs.
        work: folder for packs and checkpoints.
    """

    source: str = "samples:digits"
    to: str = "auto"
    size: str = ""
    encoding: str = "auto"
    labels: str = "auto"
    splits: str = "train=0.8,test=0.2"
    channels: str = "3"
    on_bad: str = "raise"
    batch_size: int = 32
    epochs: int = 3
    work: str = "colabkit-work"


def places(found: RuntimeReport, local_folder: str) -> list[tuple[str, str]]:
    """Return the choices for the destination of a local copy, as pairs of label and value for `stage(to=)`.

    Args:
        found: report of `runtime()`.
        local_folder: folder for local copies on disk.
    """
    shared = next((one for one in found.tmpfs if one.folder == _SHARED_TMPFS), None)
    return [
        ("auto: tmpfs if it leaves enough RAM for training, otherwise disk", "auto"),
        (f"tmpfs: {_free(shared)}", "tmpfs"),
        (f"disk: {_free(_disk_of(found.disks, local_folder))}", "disk"),
    ]


def _disk_of(disks: tuple[DiskReport, ...], folder: str) -> DiskReport | None:
    holding = [one for one in disks if PurePath(folder).is_relative_to(one.folder)]
    return max(holding, key=lambda one: len(one.folder)) if holding else disks[-1] if disks else None


def _free(place: DiskReport | None) -> str:
    return "none found" if place is None else f"{format_bytes(place.budget_bytes)} free"


class FieldWords(LineWords):
    """The wording of messages in the launcher: field labels, such as `Labels: none`, and magics for everything else.

    Args:
        action: action of the clicked button.
    """

    def __init__(self, action: str) -> None:
        super().__init__(_PACK, "%")
        self._action = action

    def option(self, name: str, value: Any) -> str:
        """Return the label of a field and the value to enter."""
        label = FIELDS.get(name, "")
        if not label or isinstance(value, Code):
            return super().option(name, value)
        if value is ...:
            return label
        words = option_words(_OF_PACK[name], value) if name in _OF_PACK else [str(value)]
        if not words:
            return super().option(name, value)
        text = f"{label}: {words[-1]}"
        # The network cannot be trained without labels, so the advice "none" applies only to packing.
        return f"{text} when you pack" if (self._action, name, value) == ("train", "labels", None) else text

    def omit(self, name: str) -> str:
        """Return the advice to leave a field empty, or to choose the default of a field that cannot be empty."""
        if name in _MAY_BE_EMPTY:
            return f"leave {FIELDS[name]} empty"
        return f"use {FIELDS[name]}: {getattr(Settings(), name)}" if name in FIELDS else super().omit(name)


def in_form(error: ColabkitError, action: str) -> tuple[str, tuple[str, ...]]:
    """Return an error's message with the form's labels, and the names of the fields that it is about."""
    error.words = FieldWords(action)
    if error.message is None:
        return str(error), ()
    named = tuple(name for name in error.message.options if name in FIELDS)
    if not named:
        verb = PYTHON.render(error.message.action).partition(" ")[0]
        is_of_source = isinstance(error, SourceMissing | BadSource)
        named = ("work",) if isinstance(error, TargetExists) else ("source",) if is_of_source else _ABOUT.get(verb, ())
    return str(error), named

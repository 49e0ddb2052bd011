"""The launcher's form without its widgets: its values as arguments of `train_on()`, and errors that name its fields."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from colabkit.foundation import (
    PYTHON,
    BadSource,
    CallRef,
    Code,
    ColabkitError,
    DiskReport,
    InvalidOption,
    RuntimeReport,
    SourceMissing,
    cannot,
    format_bytes,
    option,
)
from colabkit.notebook.options import LineWords, option_words, parse_value
from colabkit.notebook.verbs import VERBS

FIELDS = {
    "source": "Source",
    "size": "Image size",
    "epochs": "Epochs",
    "to": "Save to",
    "batch_size": "Batch size",
    "model": "Network",
    "labels": "Labels",
    "splits": "Splits",
    "path_column": "Path column",
    "root": "Folder of paths",
    "on_bad": "Unreadable files",
    "max_bad": "Unreadable limit",
}
"""The labels of the fields, by the parameters of `train_on()`, in the form's order."""

MORE_OPTIONS = ("to", "batch_size", "model", "labels", "splits", "path_column", "root", "on_bad", "max_bad")
"""The fields that the form shows in a collapsible section."""

_TRAIN_ON = next(verb for verb in VERBS if verb.name == "train_on")
_OPTIONS = {one.name: one for one in _TRAIN_ON.options}
_ACT = "use the form"
_ABOUT = {"label": ("labels",), "split": ("splits",), "read": ("source",), "fetch": ("source",)}
"""The field to mark if an error names none, by the verb of the failed action."""
_SHARED_TMPFS = "/dev/shm"
_NEAR = {"auto": "auto", "tmpfs": "RAM disk", "disk": "disk"}
"""The entries of the menu of destinations of a local copy, by their values for `stage(to=)`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The texts of the form's fields, named like the parameters of `train_on()`.

    Attributes:
        source: path or address of the data.
        size: height and width to resize images to, or `"auto"`.
        epochs: number of epochs, or `"auto"`.
        to: folder for the model and the checkpoints.
        batch_size: images per batch, or `"auto"`.
        model: name of the network, or `"auto"`.
        labels: origin of the labels.
        splits: shares of the splits, or a column; empty to use the source's splits.
        path_column: a table's column of paths; empty for a column with a common name.
        root: folder of the relative paths in a table; empty for the table's own folder.
        on_bad: action for files that cannot be decoded.
        max_bad: maximum number of such files, as a share or a count.
    """

    source: str = "samples:digits"
    size: str = "auto"
    epochs: str = "auto"
    to: str = "colabkit-work"
    batch_size: str = "auto"
    model: str = "auto"
    labels: str = "auto"
    splits: str = ""
    path_column: str = ""
    root: str = ""
    on_bad: str = "skip"
    max_bad: str = "0.1"

    @property
    def path(self) -> str:
        """The validated source.

        Raises:
            InvalidOption: if it is empty, or not one line.
        """
        text = _one_line("source", self.source)
        if not text:
            found = (option("source"), " is empty")
            raise InvalidOption(cannot(_ACT, found, "a path or an address", ("Fill in ", option("source"))))
        return text

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `train_on()` that differ from its defaults.

        Raises:
            InvalidOption: if the text of a field is invalid.
        """
        found = {name: self._value(name) for name in FIELDS if name != "source"}
        return {name: value for name, value in found.items() if value != _OPTIONS[name].default}

    def _value(self, name: str) -> Any:
        text, row = _one_line(name, getattr(self, name)), _OPTIONS[name]
        if not text or text == str(row.default):
            return row.default
        try:
            return parse_value(row.kind, text)
        except argparse.ArgumentTypeError as error:
            given, _, expected = str(error).partition(" is not ")
            found = (option(name), f" is {given}")
            raise InvalidOption(cannot(_ACT, found, expected, ("Check ", option(name)))) from None


def _one_line(name: str, text: str) -> str:
    text = text.strip()
    if len(text.splitlines()) > 1 or "\0" in text:
        found = (option(name), " contains a line break or a null character")
        raise InvalidOption(cannot(_ACT, found, "one line of text", ("Check ", option(name))))
    return text


def choices_of(name: str) -> tuple[str, ...]:
    """Return the only valid values of an option; empty if it takes any text."""
    return _OPTIONS[name].words if _OPTIONS[name].is_closed else ()


def places(found: RuntimeReport, local_folder: str) -> list[tuple[str, str]]:
    """Return the choices for the destination of a local copy, as pairs of label and value for `stage(to=)`.

    Args:
        found: report of `runtime()`.
        local_folder: folder for local copies on disk.
    """
    shared = next((one for one in found.tmpfs if one.folder == _SHARED_TMPFS), None)
    kinds = (("tmpfs", shared), ("disk", _disk_of(found.disks, local_folder)))
    free = [(f"{_NEAR[value]} ({format_bytes(disk.budget_bytes)} free)", value) for value, disk in kinds if disk]
    return [("auto", "auto"), *free]


def _disk_of(disks: tuple[DiskReport, ...], folder: str) -> DiskReport | None:
    holding = [one for one in disks if PurePath(folder).is_relative_to(one.folder)]
    return max(holding, key=lambda one: len(one.folder)) if holding else disks[-1] if disks else None


class FieldWords(LineWords):
    """The wording of messages in the launcher: field labels, such as `Labels: none`, and magics for other verbs.

    A call that trains is written as a line of Python, as the launcher shows it.

    Args:
        function: name of the function that the form calls. For `stage()`, the option `to` is the menu beside the button
            "Copy"; in messages of `prepare()`, it is written as in Python.
    """

    def __init__(self, function: str = _TRAIN_ON.name) -> None:
        super().__init__(_TRAIN_ON, "%")
        self._function = function

    def option(self, name: str, value: Any) -> str:
        """Return the label of a field and the value to enter."""
        if name == "to" and self._function == "stage" and value in (..., *_NEAR):
            return "the menu beside Copy" if value is ... else f"Copy to: {_NEAR[value]}"
        if name == "to" and not self.is_field(name):
            return PYTHON.option(name, value)
        label = FIELDS.get(name, "")
        if not label or isinstance(value, Code):
            return super().option(name, value)
        if value is ...:
            return label
        words = option_words(_OPTIONS[name], value) if name != "source" else [str(value)]
        if not words:
            return super().option(name, value)
        return f"{label}: {words[-1]}"

    def omit(self, name: str) -> str:
        """Return the advice to set a field to its default, which may be empty."""
        if not self.is_field(name):
            return PYTHON.omit(name) if name == "to" else super().omit(name)
        default = getattr(Settings(), name)
        return f"use {FIELDS[name]}: {default}" if default else f"leave {FIELDS[name]} empty"

    def is_field(self, name: str) -> bool:
        """Return whether an option of the called function is a field of the form."""
        return name in FIELDS and not (name == "to" and self._function in ("stage", "prepare"))

    def call(self, call: CallRef) -> str:
        """Return a call that trains as a line of Python, and any other call as a magic."""
        return PYTHON.call(call) if call.name == _TRAIN_ON.name else super().call(call)


def in_form(error: ColabkitError) -> tuple[str, tuple[str, ...]]:
    """Return an error's message with the form's labels, and the names of the fields that it is about."""
    if not isinstance(error.words, FieldWords):
        error.words = FieldWords()
    if error.message is None:
        return str(error), ()
    named = tuple(filter(error.words.is_field, error.message.options))
    if not named:
        verb = PYTHON.render(error.message.action).partition(" ")[0]
        named = ("source",) if isinstance(error, SourceMissing | BadSource) else _ABOUT.get(verb, ())
    return str(error), named

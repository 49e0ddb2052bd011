"""The launcher's form without its widgets: its values, its choices, and errors that name its fields."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import PurePath

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    DiskReport,
    RuntimeReport,
    SourceMissing,
    TargetExists,
    format_bytes,
)
from colabkit.notebook.options import in_other_words, option_words
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
"""The fields that are options of `pack()` of the same name; the form shows them in a section that unfolds."""

_OF_PACK = {
    option.name: option
    for verb in VERBS
    for option in verb.options
    if verb.name == "pack" and option.name in PACK_OPTIONS
}
_SHARED_TMPFS = "/dev/shm"
_SHARES = re.compile(r"(?<!=)\{('train'[^}]*)\}")
_LEFT_OUT = re.compile(rf"\bLeave ({'|'.join(FIELDS)}) out\b")
_IN_CODE = re.compile(r"\b(a function|functions) of the path\b(?! in code)")
_MOUNT, _ON_DRIVE = "run colabkit.mount() if it is on Drive", "start it with drive: if it is on Drive"
_ABOUT = {"label": "labels", "split": "splits", "read": "source", "fetch": "source"}
"""The field to mark if an error's advice names none, by the verb of the failed action."""
_PATH, _ANOTHER = "Check the path", "Choose another path"


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the form's fields; text fields are not parsed yet.

    Attributes:
        source: Path or address of the data.
        to: Destination of the local copy.
        size: Height and width to resize images to; empty to keep their size.
        encoding: Encoding of the pack.
        labels: Source of the labels.
        splits: Shares of the splits, or a column; empty to use the source's folders.
        channels: Channels of the images, `"3"` or `"1"`.
        on_bad: How to handle files that cannot be decoded.
        batch_size: Samples per batch.
        epochs: Total number of epochs.
        work: Folder for packs and checkpoints.
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


def places(found: RuntimeReport, near: str) -> list[tuple[str, str]]:
    """Return the choices for the destination of a local copy, as pairs of label and value for `stage(to=)`.

    Args:
        found: Report of `runtime()`.
        near: Folder of local copies on disk.
    """
    shared = next((one for one in found.tmpfs if one.folder == _SHARED_TMPFS), None)
    return [
        ("auto: tmpfs if it leaves enough RAM for training, otherwise disk", "auto"),
        (f"tmpfs: {_free(shared)}", "tmpfs"),
        (f"disk: {_free(_disk_of(found.disks, near))}", "disk"),
    ]


def _disk_of(disks: tuple[DiskReport, ...], near: str) -> DiskReport | None:
    """Return the disk that holds a folder, or else the last one, which is the working folder's."""
    holding = [one for one in disks if PurePath(near).is_relative_to(one.folder)]
    return max(holding, key=lambda one: len(one.folder)) if holding else disks[-1] if disks else None


def _free(place: DiskReport | None) -> str:
    return "none found" if place is None else f"{format_bytes(place.budget_bytes)} free"


def reword_for_form(error: ColabkitError, action: str) -> tuple[str, tuple[str, ...]]:
    """Return an error's message, with advice that names the form's fields, and the names of these fields.

    Advice to use no labels helps only with packing, so it becomes "Pack with Labels: none" if the button trains.
    """
    before, dot, step = str(error).rpartition(". ")
    if isinstance(error, SourceMissing | BadSource):
        step = step.replace(_PATH, f"Check {FIELDS['source']}").replace(_MOUNT, _ON_DRIVE)
    if isinstance(error, TargetExists):
        step = step.replace(_ANOTHER, f"Choose another {FIELDS['work']}")
    step = _LEFT_OUT.sub(lambda found: f"Leave {FIELDS[found[1]]} empty", step)
    step = _SHARES.sub(r"splits={\1}", step)
    step = in_other_words(step, lambda name, value: _labelled(name, value, action))
    step = _IN_CODE.sub(r"\1 of the path in code", step)
    named = tuple(name for name, label in FIELDS.items() if label in step)
    verb = before.removeprefix("Cannot ").partition(" ")[0]
    return f"{before}{dot}{step}", named or ((_ABOUT[verb],) if verb in _ABOUT else ())


def _labelled(name: str, value: str, action: str) -> str:
    """Return the label of a field and the value to enter, such as `"Labels: none"`; empty without such a field."""
    label = FIELDS.get(name, "")
    if not value or not label:
        return label
    try:
        given = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError):
        return label
    plain = option_words(_OF_PACK[name], given)[-1] if name in _OF_PACK else str(given)
    text = f"{label}: {plain}"
    return f"Pack with {text}" if (action, name, plain) == ("train", "labels", "none") else text

"""The launcher's form without its widgets: its values, its choices, and errors in the words of its fields."""

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
    "to": "Near copy",
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
"""What the fields are called beside them, by the names of `Settings`, in the form's order."""

PACK_OPTIONS = ("size", "encoding", "labels", "splits", "channels", "on_bad")
"""The fields that are options of `pack()`, by the same names, which unfold."""

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
_MOUNT = "run colabkit.mount() if it is on Drive"
_ABOUT = {"label": "labels", "split": "splits", "read": "source", "fetch": "source"}
"""The field to look at where the next step names none, by the verb of what cannot be done."""
_PATH, _ANOTHER = "Check the path", "Choose another path"


@dataclass(frozen=True, slots=True)
class Settings:
    """The form's values, as they stand in its fields.

    Attributes:
        source: where the data is.
        to: where the near copy goes.
        size: height and width to bring images to, empty for as they are.
        encoding: of the pack.
        labels: where they come from.
        splits: shares, or a column; empty for as the source says.
        channels: of images, `"3"` or `"1"`.
        on_bad: what becomes of files that cannot be decoded.
        batch_size: samples of a batch.
        epochs: how many in all.
        work: folder of packs and checkpoints.
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
    """Return where a local copy may go: what is free there, and the value for `stage()`; `near` is their folder."""
    shared = next((one for one in found.tmpfs if one.folder == _SHARED_TMPFS), None)
    return [
        ("auto: tmpfs where it fits and leaves RAM for training, else disk", "auto"),
        (f"tmpfs: {_free(shared)}", "tmpfs"),
        (f"disk: {_free(_disk_of(found.disks, near))}", "disk"),
    ]


def _disk_of(disks: tuple[DiskReport, ...], near: str) -> DiskReport | None:
    """Return the disk that holds a folder: the one named by a folder on the way to it, else the working folder's."""
    holding = [one for one in disks if PurePath(near).is_relative_to(one.folder)]
    return max(holding, key=lambda one: len(one.folder)) if holding else disks[-1] if disks else None


def _free(place: DiskReport | None) -> str:
    return "none found" if place is None else f"{format_bytes(place.budget_bytes)} free"


def reword_for_form(error: ColabkitError, action: str) -> tuple[str, tuple[str, ...]]:
    """Return an error's message with its next step in the words of the form, and the fields that it names.

    Packing without labels is advised as such where the button, `action`, trains.
    """
    before, dot, step = str(error).rpartition(". ")
    if isinstance(error, SourceMissing | BadSource):
        step = step.replace(_PATH, f"Check {FIELDS['source']}").replace(_MOUNT, "begin it with drive: if it is there")
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
    """Return a field and what to put into it, as in `"Labels: none"`; empty for an option without a field."""
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

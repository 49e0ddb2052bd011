"""What the launcher's form holds, and what its choices say beside them; no widgets here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from colabkit.foundation import DiskReport, RuntimeReport, format_bytes

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

_SHARED_TMPFS = "/dev/shm"


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
    """Return the choices of where a near copy goes, each with what is free there, and its value for `stage()`.

    Args:
        found: what this machine allows.
        near: the folder of near copies on disk.
    """
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

"""Where the samples live while training: GPU memory, RAM, disk; chosen by what is free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from colabkit.foundation import InvalidOption, cannot, file_changes, format_bytes, memory_limits, read_file
from colabkit.loading.loader.kept import promised_bytes

Keep: TypeAlias = Literal["auto", "gpu", "ram", "disk"]
KEEPS = ("auto", "gpu", "ram", "disk")

_RAM_SHARE = 0.7  # of what is available: the rest is the model's, the notebook's and the batches'
_GPU_SHARE = 0.4  # of what is free: a model that is not there yet takes the rest
_LATE_GPU_SHARE = 0.7  # when the model is there
_DISK_SHARE = 0.8


@dataclass(frozen=True)
class Tier:
    """Where the samples live.

    Attributes:
        name: `"gpu"`, `"ram"` or `"disk"`; `"source"` if each epoch decodes, or asks the data set, anew.
        reason: why there.
        rows: how many decoded samples are kept; 0 where nothing is decoded, or nothing kept.
    """

    name: Literal["gpu", "ram", "disk", "source"]
    reason: str
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def fits_on(device: torch.device, needed: int) -> bool:
    """Return whether a GPU, with the model on it by now, still has room for samples."""
    return needed <= _LATE_GPU_SHARE * torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class Room:
    """Bytes that are free for samples.

    Attributes:
        gpu_bytes: of the GPU that batches go to; None if they go to none.
        ram_bytes: RAM that is available under all limits.
        disk_bytes: of the near disk.
        promised_bytes: of that RAM, what other loaders of this process are going to fill.
    """

    gpu_bytes: int | None
    ram_bytes: int
    disk_bytes: int
    promised_bytes: int = 0

    @classmethod
    def here(cls, device: torch.device, near: Path, processes: int) -> Room:
        """Return what is free now, shared between some processes."""
        gpu = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        ram = memory_limits(read_file).available_bytes
        return cls(gpu, ram // processes, file_changes.free_bytes(near) // processes, promised_bytes())


def choose_tier(
    act: str,
    keep: Keep,
    room: Room,
    *,
    row_bytes: int | None,
    count: int,
    is_decoded: bool,
    is_on_disk: bool,
) -> Tier:
    """Return where samples will live.

    Args:
        act: for messages.
        keep: what was asked for; `"gpu"` only where there is one.
        room: what is free.
        row_bytes: of a sample that is ready to use; None if they differ, or nobody knows.
        count: samples.
        is_decoded: whether samples have to be decoded before they are rows.
        is_on_disk: whether rows lie in a file that is mapped, whose pages the kernel keeps while there is room.

    Raises:
        InvalidOption: if what was asked for cannot be.
    """
    if row_bytes is None:
        why = "samples differ in size; size= would make them rows that can be kept" if is_decoded else "made one by one"
        if keep != "auto":
            found = f"keep={keep!r}, and samples that cannot be kept ({why})"
            next_step = "Use keep='auto', or give size=" if is_decoded else "Leave keep out"
            raise InvalidOption(cannot(act, found, "rows of one size", next_step))
        return Tier("source", why)
    needed = row_bytes * count
    shown = format_bytes(needed)
    gpu = None if room.gpu_bytes is None else int(_GPU_SHARE * room.gpu_bytes)
    promised = room.promised_bytes if keep in ("auto", "disk") else 0  # who asks for RAM gets it
    free = max(0, room.ram_bytes - promised)
    ram, disk = int(_RAM_SHARE * free), int(_DISK_SHARE * room.disk_bytes)
    if keep in ("auto", "gpu") and gpu is not None:
        on_the_way = ram if is_decoded else needed  # decoded samples are collected in RAM first
        if needed <= min(gpu, on_the_way):
            return Tier("gpu", f"{shown} of {format_bytes(room.gpu_bytes or 0)} free", count if is_decoded else 0)
        if keep == "gpu":
            where = "on the GPU" if needed > gpu else "in RAM, where they are collected"
            raise _too_much(act, keep, shown, f"{format_bytes(min(gpu, on_the_way))} for them {where}")
    if not is_decoded:
        return _of_rows(act, keep, shown, needed, ram, is_on_disk)
    if keep in ("auto", "ram") and (needed <= ram or (keep == "auto" and ram >= disk)):
        return _kept("ram", needed, ram, row_bytes, count)
    if keep in ("auto", "disk"):
        tier = _kept("disk", needed, disk, row_bytes, count)
        if keep == "auto" and needed <= int(_RAM_SHARE * room.ram_bytes):
            tier = replace(tier, reason=f"{tier.reason}; {format_bytes(promised)} of RAM are promised to other loaders")
        return tier
    raise _too_much(act, keep, shown, f"{format_bytes(ram)} for them in RAM")


def _of_rows(act: str, keep: Keep, shown: str, needed: int, ram: int, is_on_disk: bool) -> Tier:
    """Return where rows that need no decoding live."""
    if not is_on_disk:
        if keep == "disk":
            found = "keep='disk' for arrays, which are in memory already"
            raise InvalidOption(cannot(act, found, "a pack or image files", "Leave keep out, or pack() them first"))
        return Tier("ram", f"{shown} that are in memory already")
    if keep == "disk":
        return Tier("disk", "as asked for")
    if needed <= ram:
        return Tier("ram", f"{shown}, and {format_bytes(ram)} of RAM for them")
    if keep == "ram":
        raise _too_much(act, keep, shown, f"{format_bytes(ram)} for them in RAM")
    return Tier("disk", f"{shown} are more than {format_bytes(ram)} of RAM for them")


def _kept(where: Literal["ram", "disk"], needed: int, budget: int, row_bytes: int, count: int) -> Tier:
    rows = min(count, budget // max(1, row_bytes))
    if not rows:
        return Tier("source", f"no room to keep {format_bytes(needed)} of decoded samples")
    what = "RAM" if where == "ram" else "disk"
    shown = f"{format_bytes(needed)} decoded" if rows == count else f"{rows:,} of {count:,} decoded samples"
    return Tier(where, f"{shown}, and {format_bytes(budget)} of {what} for them", rows)


def _too_much(act: str, keep: Keep, shown: str, needed: str) -> InvalidOption:
    found = f"keep={keep!r}, and {shown} of samples"
    return InvalidOption(cannot(act, found, f"no more than {needed}", "Use keep='auto'"))

"""`open_pack()` maps a sealed pack into memory; its splits are map-style torch data sets.

Opening reads a few kilobytes. Samples are read from a memory map of the file, without HDF5, so any number of threads
and of forked or spawned workers may read one pack.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colabkit._reports import html_table
from colabkit._units import format_bytes, format_count
from colabkit.errors import InvalidOption, MissingSplit, cannot
from colabkit.labels import SPLIT_FOLDERS
from colabkit.mounts import user_path
from colabkit.pack_format import LABELS, SAMPLES, PackInfo, read_pack

__all__ = ["Pack", "PackedDataset", "open_pack"]


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """Return the sealed pack at `path`, mapped into memory: `open_pack(path)["train"]` is a data set.

    Seal, length and layout are checked; the samples' own digests are checked by `verify()`.

    Args:
        path: a pack made by `pack()`.

    Raises:
        SourceMissing: if there is no such file.
        BadSource: if it is no HDF5 file.
        NotSealed: if it is HDF5 but no finished pack.
        Corrupt: if it was sealed and has changed.
    """
    return Pack(read_pack(user_path(path, f"open {os.fspath(path)!r}").absolute()))


class Pack(Mapping[str, "PackedDataset"]):
    """The splits of a pack by name, as in `pack["train"]`.

    Attributes:
        path: the file.
        classes: class names; a label is an index into them.
        source: where the samples came from.
        info: layout and seal, as read from the file.
    """

    def __init__(self, info: PackInfo) -> None:
        self.info = info
        self._splits: dict[str, PackedDataset] = {}
        self.path = info.path
        self.classes: tuple[str, ...] = tuple(info.meta["classes"])
        self.source: str = info.meta["source"]

    def __getitem__(self, split: str) -> PackedDataset:
        split = SPLIT_FOLDERS.get(split, split)  # "val" is the split dev
        if split not in self.info.splits:
            act = f"take split {split!r} of {str(self.path)!r}"
            raise MissingSplit(cannot(act, "no such split", f"one of {', '.join(self)}", "Use one of these"))
        if split not in self._splits:
            # The file is mapped by its name, which another pack may have taken since this one was opened.
            self._splits[split] = _reopen(self.path, self.info.seal, split)
        return self._splits[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.info.splits)

    def __len__(self) -> int:
        return len(self.info.splits)

    def __repr__(self) -> str:
        splits = ", ".join(f"{split} {format_count(self.info.count(split))}" for split in self)
        shape = "x".join(map(str, self.info.meta["sample_shape"]))
        size = format_bytes(self.path.stat().st_size)
        return f"Pack {str(self.path)!r}: {splits}; images {shape}, {len(self.classes)} classes, {size}"

    def _repr_html_(self) -> str:
        rows = []
        for split in self:
            field = self.info.fields[f"{SAMPLES}_{split}"]
            shape = " x ".join(map(str, field.shape))
            rows.append(
                (
                    split,
                    format_count(self.info.count(split)),
                    f"{np.dtype(field.dtype)} {shape}",
                    format_bytes(field.size_bytes),
                )
            )
        table = html_table(repr(self), rows, ("split", "samples", "layout", "bytes"))
        return table + html_table("", [("source", self.source), ("seal", self.info.seal[:16])])


class PackedDataset(Dataset[tuple[Tensor, int]]):
    """One split of a pack: `dataset[i]` is an image, `uint8 [C, H, W]`, and its label.

    It works in a plain `DataLoader`; `colabkit.Loader` reads it at memory speed. Pickled, it takes its path along and
    maps the file again.

    Attributes:
        rows: every sample as stored, `uint8 [N, H, W, C]`, a tensor over the read-only memory map: never write to it.
        labels: `int64 [N]`.
        classes: class names.
        fields: names of what a sample consists of.
    """

    def __init__(self, info: PackInfo, split: str) -> None:
        self.info = info
        self.split = split
        self.classes: tuple[str, ...] = tuple(info.meta["classes"])
        self.fields = (SAMPLES, LABELS)
        self.fingerprint = f"{info.seal[:32]}/{split}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.rows = torch.from_numpy(info.map(f"{SAMPLES}_{split}"))
        self.labels = torch.from_numpy(info.table(f"{LABELS}_{split}").astype(np.int64, copy=False))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.rows[index].clone().permute(2, 0, 1), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several samples at once, as newer versions of `DataLoader` ask for them."""
        return [self[index] for index in indices]

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.info.path, self.info.seal, self.split)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.rows.shape[1:]))
        return f"PackedDataset {self.split!r}: {format_count(len(self))} images {shape}, {len(self.classes)} classes"


def _reopen(path: Path, seal: str, split: str) -> PackedDataset:
    info = read_pack(path)
    if info.seal != seal:
        act = f"open {str(path)!r} again"
        raise InvalidOption(
            cannot(act, "another pack is there now", "the one it was", "Open the pack and build it anew")
        )
    return PackedDataset(info, split)

"""The samples of a sealed pack: in one file, or in shards beside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import Corrupt, InvalidOption, SourceMissing, cannot
from colabkit.packs.dataset.samples import (
    ArrayColumn,
    Batch,
    Column,
    FileSamples,
    ImageFiles,
    Numbers,
    RaggedColumn,
    Samples,
)
from colabkit.packs.decode.pixels import MAX_PIXELS
from colabkit.packs.format.layout import CRC, LABELS, Field, PackInfo, Shard, corrupt
from colabkit.packs.format.reading import read_pack


@dataclass(frozen=True)
class OpenSplit:
    """One split, ready to be read.

    Attributes:
        info: what its pack says of itself.
        split: its name.
        samples: all fields but the labels.
        labels: `[N]` or `[N, K]`; None if there are none.
        again: what opens it in another process: a function and its arguments.
    """

    info: PackInfo
    split: str
    samples: Samples
    labels: Tensor | None
    again: tuple[Callable[..., OpenSplit], tuple[Any, ...]]


def open_sealed(path: Path, seal: str, split: str) -> OpenSplit:
    """Return a split of the pack at `path`.

    Raises:
        InvalidOption: if another pack has taken its place, since `seal` was read.
        Corrupt: if its tables are not the sealed ones.
    """
    info = read_pack(path)
    if info.seal != seal:
        act = f"open {str(path)!r} again"
        raise InvalidOption(
            cannot(act, "another pack is there now", "the one it was", "Open the pack and build it anew")
        )
    samples: Samples = ShardedSamples(info, split) if info.shards else _file_samples(info, split)
    labels = torch.from_numpy(_table(info, f"{LABELS}_{split}")) if LABELS in info.fields else None
    if labels is not None and info.meta["label_kind"] == "class":
        labels = labels.long()
    return OpenSplit(info, split, samples, labels, (open_sealed, (path, seal, split)))


def _file_samples(info: PackInfo, split: str, first: int = 0) -> FileSamples:
    columns = {name: _column(info, field, split) for name, field in info.fields.items() if name != LABELS}
    checked = [field.name for field in info.sample_fields()]
    crcs = _table(info, f"{CRC}_{split}")
    if len(crcs) != info.count(split):
        raise corrupt(info.path, f"{len(crcs)} CRCs for {info.count(split)} samples of {split}")
    return FileSamples(info.path, split, columns, checked, crcs, first)


def _column(info: PackInfo, field: Field, split: str) -> Column:
    name = field.data_set(split)
    array = info.table(name) if name in info.table_crcs else np.asarray(info.map(name))
    if not field.is_ragged:
        return ArrayColumn(array, field.content)
    index = _table(info, field.index(split))
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (index.min() < 0 or (starts > array.size - lengths).any()):
        raise corrupt(info.path, f"{field.index(split)!r} points beyond {name!r}")
    if field.content != "image":
        return RaggedColumn(array, index, field.content)
    height, width = [*(info.meta["sample_shape"] or ()), 1, 1][:2]
    channels = info.meta.get("channels")
    if channels not in (1, 3) or not 0 < height * width <= MAX_PIXELS:
        raise corrupt(info.path, f"it tells of images of {height}x{width}x{channels}")
    return RaggedColumn(array, index, field.content, channels, (height, width))


def _table(info: PackInfo, name: str) -> npt.NDArray[Any]:
    table = info.table(name)
    return table.astype(table.dtype.newbyteorder("="), copy=False)


class ShardedSamples:
    """The samples of one split in the shards beside an index, which are opened when they are needed first.

    Args:
        info: of the index.
        split: of the index.
    """

    def __init__(self, info: PackInfo, split: str) -> None:
        self.names = tuple(name for name in info.fields if name != LABELS)
        self._info = info
        self._split = split
        self._shards = [shard for shard in info.shards if shard.splits.get(split)]
        self._starts = list(accumulate((shard.splits[split] for shard in self._shards), initial=0))
        self._opened: dict[int, FileSamples] = {}
        if self._starts[-1] != info.count(split):
            raise corrupt(info.path, f"its shards hold {self._starts[-1]} samples of {split} of {info.count(split)}")

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked."""
        number = bisect_right(self._starts, row) - 1
        return self._shard(number).one(row - self._starts[number])

    def many(self, rows: Numbers) -> tuple[Batch, ...]:
        """Return the fields of several samples, read shard by shard."""
        columns, place = self._by_shard(rows, lambda shard, some: shard.many(some))
        return tuple(_placed([column[number] for column in columns], place) for number in range(len(self.names)))

    def column(self, name: str, rows: Numbers) -> Batch:
        """Return one field of several samples."""
        columns, place = self._by_shard(rows, lambda shard, some: shard.column(name, some))
        return _placed(columns, place)

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, shard by shard; None if they have to be decoded."""
        found: list[npt.NDArray[Any]] = []
        for number in range(len(self._shards)):
            maps = self._shard(number).maps(name)
            if maps is None:
                return None
            if found and (maps[0].shape[1:], maps[0].dtype) != (found[0].shape[1:], found[0].dtype):
                raise corrupt(self._shard(number).path, f"samples {maps[0].shape[1:]} unlike those of its index")
            found.extend(maps)
        return tuple(found)

    def encoded(self, row: int) -> bytes:
        """Return the bytes of X of one sample as stored, checked."""
        number = bisect_right(self._starts, row) - 1
        return self._shard(number).encoded(row - self._starts[number])

    def about_images(self) -> ImageFiles | None:
        """Return what X is if it holds the bytes of image files, else None."""
        return self._shard(0).about_images() if self._shards else None

    def _by_shard(self, rows: Numbers, read: Callable[[FileSamples, Numbers], Any]) -> tuple[list[Any], Numbers]:
        """Return what was read of each shard, and for each of `rows` its place among all that."""
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(owner, kind="stable")
        numbers, firsts = np.unique(owner[order], return_index=True)
        pieces = np.split(rows[order], firsts[1:])
        read_of = [
            read(self._shard(number), some - self._starts[number])
            for number, some in zip(numbers.tolist() or [0][: len(self._shards)], pieces, strict=False)
        ]
        place = np.empty(len(rows), np.int64)
        place[order] = np.arange(len(rows))
        return read_of, place

    def _shard(self, number: int) -> FileSamples:
        if number not in self._opened:
            info = _open_shard(self._info, self._shards[number], self._split)
            self._opened[number] = _file_samples(info, self._split, self._starts[number])
        return self._opened[number]


def _open_shard(index: PackInfo, shard: Shard, split: str) -> PackInfo:
    """Return what a shard says of itself, after making sure that it is the one the index means."""
    path = index.path.with_name(shard.name)
    act = f"read samples of {str(index.path)!r}"
    next_step = "Stage or pack it again, the index together with all its shards"
    try:
        info = read_pack(path)
    except SourceMissing as error:
        found = f"its shard {shard.name!r} is not beside it"
        raise SourceMissing(cannot(act, found, "all shards in one folder", next_step)) from error
    counted = info.meta["splits"].get(split)
    if info.seal != shard.seal or counted != shard.splits[split] or dict(info.fields) != dict(index.fields):
        found = f"{shard.name!r} beside it is another pack"
        raise Corrupt(cannot(act, found, f"the shard with seal {shard.seal[:16]}", next_step))
    return info


def _placed(pieces: list[Batch], place: Numbers) -> Batch:
    """Return pieces that lie shard by shard in the order that was asked for."""
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if tensors and len(tensors) == len(pieces):
        return torch.cat(tensors)[torch.from_numpy(place)] if len(tensors) > 1 else tensors[0]
    values = [value for piece in pieces for value in piece]
    return [values[number] for number in place.tolist()]

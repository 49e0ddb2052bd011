"""The samples of one split: a column for each field, in one file or in shards, and a CRC for each sample.

Single samples are checked against their CRC whenever they are read. `OpenSplit` checks the samples of batches.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import (
    BadImage,
    Corrupt,
    FileFailed,
    SourceMissing,
    call,
    cannot,
    format_things,
    option,
)
from colabkit.packs.dataset.columns import (
    ArrayColumn,
    Column,
    FieldBatch,
    Flags,
    ImageFiles,
    RaggedColumn,
    Stored,
    stored_rows,
)
from colabkit.packs.dataset.hdf5_reader import file_stamp
from colabkit.packs.decode.pixels import MAX_PIXELS
from colabkit.packs.format.layout import CRC, LABELS, Field, Indices, PackInfo, Shard, corrupt
from colabkit.packs.format.mapped_pages import UnreadablePages
from colabkit.packs.format.pack_file import read_pack


@dataclass(eq=False)
class SingleFileSamples:
    """The samples of one split in one file.

    Attributes:
        path: path of the file, for reading and for messages.
        split: name of the split, for messages.
        columns: all fields except the labels, in the order of a sample.
        checked: names of the fields that the CRCs cover.
        crcs: CRC32 of each sample, `[N]`; None for an HDF5 file that is not a pack.
        first: index of the file's first sample in the split, for messages.
    """

    path: Path
    split: str
    columns: Mapping[str, Column]
    checked: Sequence[str] = ()
    crcs: npt.NDArray[np.uint32] | None = None
    first: int = 0

    def __post_init__(self) -> None:
        self.names = tuple(self.columns)
        self._in_order = list(self.columns.values())
        self._checked = [number for number, name in enumerate(self.columns) if name in self.checked]
        self._is_ragged = any(isinstance(column, RaggedColumn) for column in self._in_order)
        self._stamp = file_stamp(self.path)

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked against its CRC.

        Raises:
            Corrupt: if the bytes do not match the CRC.
            BadImage: if the sample cannot be decoded.
        """
        stored = self._stored(row)
        try:
            return tuple([column.value(some) for column, some in zip(self._in_order, stored, strict=True)])
        except BadImage as error:
            next_step = ("Pack the source again with ", option("on_bad", "skip"), " or ", option("on_bad", "blank"))
            raise BadImage(cannot(self._act("decode", row), str(error), "", next_step)) from error.__cause__

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample, checked against its CRC."""
        stored = self._stored(row)[0]
        assert isinstance(stored, bytes)
        return stored

    def many(self, rows: Indices) -> tuple[FieldBatch, ...]:
        """Return the fields of several samples; if any field is ragged, samples are read one by one and checked."""
        if self._is_ragged and len(rows):
            return tuple(map(list, zip(*map(self.one, rows.tolist()), strict=True)))
        return tuple(column.many(rows) for column in self._in_order)

    def column(self, name: str, rows: Indices) -> FieldBatch:
        """Return one field of several samples."""
        return self.columns[name].many(rows)

    def matches(self, rows: Indices) -> Flags:
        """Return whether each sample matches its CRC, `bool [B]`; True if the file has no CRCs."""
        if self.crcs is None:
            return np.ones(len(rows), bool)
        crcs: Iterable[int] = itertools.repeat(0, len(rows))
        for number in self._checked:
            crcs = map(crc32, cast("Iterator[bytes]", stored_rows(self._in_order[number], rows)), crcs)
        try:
            return np.equal(np.fromiter(crcs, np.uint32, len(rows)), self.crcs[rows])
        except UnreadablePages as error:
            raise self._read_error(f"read {self.split} of {str(self.path)!r}") from error

    def damage_error(self, row: int) -> Corrupt:
        """Return the error for a sample that does not match its CRC."""
        again = ("Pack or stage the data again (", call("prepare", refresh=True), " packs it again)")
        next_step = (*again, ", or list all damaged samples with ", call("verify"))
        return Corrupt(cannot(self._act("read", row), "it does not match its CRC32", "", next_step))

    def has_changed(self) -> bool:
        """Return whether the file was modified in place since it was opened, or since the last call.

        A file that was removed or replaced counts as unmodified, because the memory map still refers to the original
        file.

        Raises:
            Corrupt: if the file became shorter. Reading the lost part of the map would end the process.
        """
        before, now = self._stamp, file_stamp(self.path)
        if now == before or now[2:] != before[2:]:
            return False
        if now[0] < before[0]:
            found = f"the file was truncated from {before[0]:,} to {format_things(now[0], 'byte')} after it was opened"
            act = f"read {self.split} of {str(self.path)!r}"
            next_step = "Pack or stage the data again, and open the pack again"
            raise Corrupt(cannot(act, found, "an unchanged file", next_step))
        self._stamp = now
        return True

    def name_of(self, row: int) -> str:
        """Return the name of a sample, for messages."""
        return f"{self.split}[{self.first + row}] of {str(self.path)!r}"

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, `[N, ...]`, in a tuple; None if they need decoding, conversion or HDF5."""
        column = self.columns[name]
        is_plain = isinstance(column, ArrayColumn) and column.array.dtype.isnative and column.array.dtype.kind != "S"
        return (column.array,) if isinstance(column, ArrayColumn) and is_plain else None

    def image_files(self) -> ImageFiles | None:
        """Return the decoding settings for `X` if it holds image files; otherwise None."""
        column = self._in_order[0]
        if isinstance(column, RaggedColumn) and column.content == "image":
            return ImageFiles(column.channels, column.blank)
        return None

    def _stored(self, row: int) -> list[Stored]:
        try:
            stored = [column.stored(row) for column in self._in_order]
        except UnreadablePages as error:
            raise self._read_error(self._act("read", row)) from error
        if self.crcs is not None:
            crc = 0
            for number in self._checked:
                crc = crc32(cast("bytes", stored[number]), crc)
            if crc != self.crcs.item(row):
                raise self.damage_error(row)
        return stored

    def _read_error(self, act: str) -> FileFailed:
        """Return the error for a part of the file that cannot be read.

        Raises:
            Corrupt: if the reason is that the file became shorter.
        """
        self.has_changed()
        next_step = ("Copy the file to local storage with ", call("stage"), ", or check the disk or mount")
        return FileFailed(cannot(act, "the disk or mount of this file returned an error", "", next_step))

    def _act(self, verb: str, row: int) -> str:
        return f"{verb} {self.name_of(row)}"


class JoinedSamples:
    """The samples of several parts, one after another.

    Args:
        names: names of all fields except the labels.
        counts: number of samples in each part.
    """

    def __init__(self, names: Sequence[str], counts: Iterable[int]) -> None:
        self.names = tuple(names)
        self._starts = [0, *itertools.accumulate(counts)]

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked against its CRC."""
        part, start = self._part_of(row)
        return part.one(row - start)

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample, checked against its CRC."""
        part, start = self._part_of(row)
        return part.encoded(row - start)

    def many(self, rows: Indices) -> tuple[FieldBatch, ...]:
        """Return the fields of several samples, read part by part."""
        columns, place = self._by_part(rows, lambda part, some: part.many(some))
        return tuple(_reorder([column[number] for column in columns], place) for number in range(len(self.names)))

    def column(self, name: str, rows: Indices) -> FieldBatch:
        """Return one field of several samples."""
        columns, place = self._by_part(rows, lambda part, some: part.column(name, some))
        return _reorder(columns, place)

    def matches(self, rows: Indices) -> Flags:
        """Return whether each sample matches its CRC, `bool [B]`."""
        found, place = self._by_part(rows, lambda part, some: part.matches(some))
        return np.concatenate(found)[place]

    def damage_error(self, row: int) -> Corrupt:
        """Return the error for a sample that does not match its CRC."""
        part, start = self._part_of(row)
        return part.damage_error(row - start)

    def has_changed(self) -> bool:
        """Return whether a file was modified in place since it was opened, or since the last call.

        Raises:
            Corrupt: if a file became shorter.
        """
        return sum(part.has_changed() for part in self._open_parts()) > 0

    def name_of(self, row: int) -> str:
        """Return the name of a sample, for messages."""
        part, start = self._part_of(row)
        return part.name_of(row - start)

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, one array per file; None if they need decoding or conversion."""
        found: list[npt.NDArray[Any]] = []
        for number in range(len(self._starts) - 1):
            if (maps := self._part(number).maps(name)) is None:
                return None
            found.extend(maps)
        return tuple(found)

    def image_files(self) -> ImageFiles | None:
        """Return the decoding settings for `X` if it holds image files; otherwise None."""
        parts = self._one_part()
        return self._part(parts[0]).image_files() if parts else None

    def _by_part(
        self, rows: Indices, read: Callable[[SingleFileSamples | JoinedSamples, Indices], Any]
    ) -> tuple[list[Any], Indices]:
        owner = self._numbers_of(rows)
        order = np.argsort(owner, kind="stable")
        numbers, firsts = np.unique(owner[order], return_index=True)
        pieces = np.split(rows[order], firsts[1:])
        results = [
            read(self._part(number), some - self._starts[number])
            for number, some in zip(numbers.tolist() or self._one_part(), pieces, strict=False)
        ]
        place = np.empty(len(rows), np.int64)
        place[order] = np.arange(len(rows))
        return results, place

    def _one_part(self) -> list[int]:
        """Return the number of a file that describes the samples of all files; an empty list if there is no file."""
        return [0][: len(self._starts) - 1]

    def _part_of(self, row: int) -> tuple[SingleFileSamples | JoinedSamples, int]:
        number = self._number_of(row)
        return self._part(number), self._starts[number]

    def _number_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1

    def _numbers_of(self, rows: Indices) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _part(self, number: int) -> SingleFileSamples | JoinedSamples:
        raise NotImplementedError

    def _open_parts(self) -> Iterable[SingleFileSamples | JoinedSamples]:
        raise NotImplementedError


class MixedSamples(JoinedSamples):
    """The samples of several packs, one pack after another.

    Attributes:
        parts: the samples of each pack, with the index of its first sample among all of them.
    """

    def __init__(self, samples: Sequence[SingleFileSamples | JoinedSamples], counts: Iterable[int]) -> None:
        super().__init__(samples[0].names, counts)
        self.parts = tuple(zip(samples, self._starts, strict=False))

    def _part(self, number: int) -> SingleFileSamples | JoinedSamples:
        return self.parts[number][0]

    def _open_parts(self) -> Iterable[SingleFileSamples | JoinedSamples]:
        return [part for part, _ in self.parts]


class ShardedSamples(JoinedSamples):
    """The samples of one split in the shards next to an index; shards are opened on first use."""

    def __init__(self, info: PackInfo, split: str) -> None:
        self._info = info
        self._split = split
        self._shards = [shard for shard in info.shards if shard.splits.get(split)]
        self._opened: dict[int, SingleFileSamples] = {}
        names = [name for name in info.fields if name != LABELS]
        super().__init__(names, [shard.splits[split] for shard in self._shards])
        if self._starts[-1] != info.count(split):
            found = f"its shards have {self._starts[-1]} samples of {split} instead of {info.count(split)}"
            raise corrupt(info.path, found)

    def counts(self, numbers: Indices | None) -> dict[int, int] | None:
        """Return the samples that a view has in each shard, by number, in order; None if the view mixes the shards.

        Args:
            numbers: row numbers of the view's samples; None for all rows.
        """
        counts = np.diff(self._starts)
        if numbers is not None:
            owners = self._numbers_of(numbers)
            if (np.diff(owners) < 0).any():
                return None
            counts = np.bincount(owners, minlength=len(counts))
        return {number: count for number, count in enumerate(counts.tolist()) if count}

    def name_of(self, row: int) -> str:
        """Return the name of a sample, for messages; it does not open a shard."""
        return f"{self._split}[{row}] of {str(self._info.path)!r}"

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, one array per shard; None if they need decoding or conversion."""
        found = super().maps(name)
        for number, rows in enumerate(found or ()):
            if found and (rows.shape[1:], rows.dtype) != (found[0].shape[1:], found[0].dtype):
                reason = f"its samples have shape {list(rows.shape[1:])}, unlike those of other shards"
                raise corrupt(self._info.path.with_name(self._shards[number].name), reason)
        return found

    def _part(self, number: int) -> SingleFileSamples:
        if (found := self._opened.get(number)) is None:
            found = self._opened[number] = self._open_shard(number)
        return found

    def _open_parts(self) -> Iterable[SingleFileSamples]:
        return tuple(self._opened.values())

    def _open_shard(self, number: int) -> SingleFileSamples:
        info = _read_shard(self._info, self._shards[number], self._split)
        return file_samples(info, self._split, self._starts[number])


def file_samples(info: PackInfo, split: str, first: int = 0) -> SingleFileSamples:
    """Return the samples of a split in one file; `first` is the index of the file's first sample in the split."""
    columns = open_columns(info, split)
    checked = [field.name for field in info.sample_fields()]
    crcs = read_table(info, f"{CRC}_{split}")
    if len(crcs) != info.count(split):
        raise corrupt(info.path, f"it has {len(crcs)} CRCs for {info.count(split)} samples of {split}")
    return SingleFileSamples(info.path, split, columns, checked, crcs, first)


def open_columns(info: PackInfo, split: str) -> dict[str, Column]:
    """Return all fields of a split in one file except the labels, by name."""
    return {name: _column(info, field, split) for name, field in info.fields.items() if name != LABELS}


def _column(info: PackInfo, field: Field, split: str) -> Column:
    name = field.data_set(split)
    array = info.table(name) if name in info.table_crcs else np.asarray(info.map(name))
    if not field.is_ragged:
        return ArrayColumn(array, field.content)
    index = read_table(info, field.index(split))
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (index.min() < 0 or (starts > array.size - lengths).any()):
        raise corrupt(info.path, f"{field.index(split)!r} points beyond the end of {name!r}")
    if field.content != "image":
        return RaggedColumn(array, index, field.content)
    height, width = [*(info.meta["sample_shape"] or ()), 1, 1][:2]
    channels = info.meta.get("channels")
    if channels not in (1, 3) or not 0 < height * width <= MAX_PIXELS:
        raise corrupt(info.path, f"its metadata has the invalid image shape {height}x{width}x{channels}")
    return RaggedColumn(array, index, field.content, channels, (height, width))


def read_table(info: PackInfo, name: str) -> npt.NDArray[Any]:
    """Return a copy of a table in the machine's byte order, checked against its CRC."""
    table = info.table(name)
    return table.astype(table.dtype.newbyteorder("="), copy=False)


def _read_shard(index: PackInfo, shard: Shard, split: str) -> PackInfo:
    path = index.path.with_name(shard.name)
    act = f"read samples of {str(index.path)!r}"
    next_step = "Copy all shards next to the index, or pack or stage the data again"
    try:
        info = read_pack(path)
    except SourceMissing:
        found = f"the shard {shard.name!r} is missing"
        raise SourceMissing(cannot(act, found, "all shards in the folder of the index", next_step)) from None
    counted = info.meta["splits"].get(split)
    if info.seal != shard.seal or counted != shard.splits[split] or dict(info.fields) != dict(index.fields):
        message = f"{shard.name!r} is not a shard of this index"
        raise Corrupt(cannot(act, message, f"the shard with the seal {shard.seal[:16]}", next_step))
    return info


def _reorder(pieces: list[FieldBatch], place: Indices) -> FieldBatch:
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if tensors and len(tensors) == len(pieces):
        return torch.cat(tensors)[torch.from_numpy(place)] if len(tensors) > 1 else tensors[0]
    values = [value for piece in pieces for value in piece]
    return [values[number] for number in place.tolist()]

"""The samples of one split: a column for each field, in one file or in shards, and a CRC for each sample.

Single samples are checked against their CRC whenever they are read. Batches are not; `OpenSplit` checks their samples.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import (
    BadImage,
    Corrupt,
    SourceMissing,
    call,
    cannot,
    option,
)
from colabkit.packs.dataset.hdf5_reader import file_stamp
from colabkit.packs.decode.images import decode_image
from colabkit.packs.decode.pixels import MAX_PIXELS
from colabkit.packs.format.layout import CRC, LABELS, Field, Indices, PackInfo, Shard, corrupt
from colabkit.packs.format.pack_file import read_pack

Batch: TypeAlias = Tensor | list[Any]
"""One field of several samples: one tensor, or a list for text, bytes, and samples whose shapes may differ."""
Stored: TypeAlias = npt.NDArray[Any] | bytes
Flags: TypeAlias = npt.NDArray[np.bool_]

# Rows of fewer bytes are gathered before their CRCs are computed.
_LARGE_ROW = 16 << 10
# Bytes gathered at once, which fit in a processor's L2 cache.
_GATHERED_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Decoding settings for images stored as files.

    Attributes:
        channels: number of channels after decoding.
        blank: height and width of the black image that replaces an empty file; None makes an empty file an error.
    """

    channels: int
    blank: tuple[int, int] | None


class Column(Protocol):
    """Interface for reading one field of one split from one file."""

    def stored(self, row: int) -> Stored:
        """Return a copy of the stored bytes or values of a sample."""

    def value(self, stored: Stored) -> Any:
        """Convert stored bytes or values to the value returned to the user."""

    def many(self, rows: Indices) -> Batch:
        """Return the values of several samples."""


def convert_rows(array: npt.NDArray[Any], content: str) -> Batch:
    """Convert one or more stored rows to the values returned to the user; images become channels-first."""
    if array.dtype.kind == "S":
        values = array.tolist()
        return [value.decode("utf-8", "surrogateescape") for value in values] if content == "text" else values
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    if content != "image":
        return tensor
    return tensor.permute(2, 0, 1) if array.ndim == 3 else tensor.permute(0, 3, 1, 2)


def convert_pixels(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Convert decoded pixels `[H, W, C]`, possibly read-only, to a writable image `[C, H, W]`."""
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def stack_samples(field: Batch) -> Batch:
    """Stack the values of a field into one tensor if all are tensors of one shape; otherwise return them unchanged."""
    if isinstance(field, list) and field and all(isinstance(value, Tensor) for value in field):
        return torch.stack(field) if len({value.shape for value in field}) == 1 else field
    return field


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """A field whose samples are rows of one array, `[N, ...]`, in memory or memory-mapped."""

    array: npt.NDArray[Any]
    content: str

    def stored(self, row: int) -> Stored:
        """Return a copy of a sample."""
        return np.array(self.array[row, ...])

    def value(self, stored: Stored) -> Any:
        """Convert a stored sample to a tensor, text or bytes."""
        assert isinstance(stored, np.ndarray)
        if stored.dtype.kind == "S":
            return convert_rows(stored.reshape(1), self.content)[0]
        return convert_rows(stored, self.content)

    def many(self, rows: Indices) -> Batch:
        """Return the values of several samples, gathered in one thread because threads do not survive a fork."""
        gathered = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        # With mode="raise", NumPy would buffer the output and copy it once more.
        np.take(self.array, rows, axis=0, out=gathered, mode="clip")
        return convert_rows(gathered, self.content)


@dataclass(frozen=True, slots=True)
class RaggedColumn:
    """A field whose samples are stored back to back in one flat array: image files, text or bytes.

    Attributes:
        flat: the bytes of all samples.
        index: offset and length of each sample, `[N, 2]`.
        content: content of the samples, as in `Field`.
        channels: number of channels after decoding.
        blank: height and width of the black image for a sample that was bad when packed and has no bytes.
    """

    flat: npt.NDArray[np.uint8]
    index: Indices
    content: str
    channels: int = 3
    blank: tuple[int, int] = (1, 1)

    def stored(self, row: int) -> Stored:
        """Return a copy of a sample."""
        offset, length = self.index[row].tolist()
        return self.flat[offset : offset + length].tobytes()

    def value(self, stored: Stored) -> Any:
        """Convert a stored sample to a tensor, text or bytes."""
        assert isinstance(stored, bytes)
        match self.content:
            case "image" if not stored:
                return torch.zeros((self.channels, *self.blank), dtype=torch.uint8, device="cpu")
            case "image":
                return convert_pixels(decode_image(stored, self.channels))
            case "text":
                return stored.decode("utf-8", "surrogateescape")
            case "bytes":
                return stored
            case _:
                return torch.from_numpy(np.frombuffer(bytearray(stored), np.uint8))

    def many(self, rows: Indices) -> Batch:
        """Return a list of the values, each converted separately."""
        return [self.value(self.stored(row)) for row in rows.tolist()]


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
            raise BadImage(cannot(self._act("decode", row), str(error), "", next_step)) from error

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample, checked against its CRC."""
        stored = self._stored(row)[0]
        assert isinstance(stored, bytes)
        return stored

    def many(self, rows: Indices) -> tuple[Batch, ...]:
        """Return the fields of several samples; if any field is ragged, samples are read one by one and checked."""
        if self._is_ragged and len(rows):
            return tuple(map(list, zip(*map(self.one, rows.tolist()), strict=True)))
        return tuple(column.many(rows) for column in self._in_order)

    def column(self, name: str, rows: Indices) -> Batch:
        """Return one field of several samples."""
        return self.columns[name].many(rows)

    def matches(self, rows: Indices) -> Flags:
        """Return whether each sample matches its CRC, `bool [B]`; True if the file has no CRCs."""
        if self.crcs is None:
            return np.ones(len(rows), bool)
        crcs: Iterable[int] = itertools.repeat(0, len(rows))
        for number in self._checked:
            crcs = map(crc32, cast("Iterator[bytes]", _stored_rows(self._in_order[number], rows)), crcs)
        return np.equal(np.fromiter(crcs, np.uint32, len(rows)), self.crcs[rows])

    def damage_error(self, row: int) -> Corrupt:
        """Return the error for a sample that does not match its CRC."""
        next_step = ("Stage or pack it again, or list all damaged samples with ", call("verify"))
        return Corrupt(cannot(self._act("read", row), "it does not match its CRC32", "", next_step))

    def has_changed(self) -> bool:
        """Return whether the file was modified in place since it was opened, or since the last call.

        A file that was removed or replaced counts as unmodified, because the map still shows the former file.

        Raises:
            Corrupt: if the file became shorter. Reading the lost part of the map would end the process.
        """
        before, now = self._stamp, file_stamp(self.path)
        if now == before or now[2:] != before[2:]:
            return False
        if now[0] < before[0]:
            found = f"the file was cut from {before[0]:,} to {now[0]:,} bytes after it was opened"
            act, next_step = f"read {self.split} of {str(self.path)!r}", "Stage or pack it again, and open it again"
            raise Corrupt(cannot(act, found, "an unchanged file", next_step))
        self._stamp = now
        return True

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
        """Return the stored fields of one sample, checked against its CRC."""
        stored = [column.stored(row) for column in self._in_order]
        if self.crcs is not None:
            crc = 0
            for number in self._checked:
                crc = crc32(cast("bytes", stored[number]), crc)
            if crc != self.crcs.item(row):
                raise self.damage_error(row)
        return stored

    def _act(self, verb: str, row: int) -> str:
        return f"{verb} {self.split}[{self.first + row}] of {str(self.path)!r}"


class ShardedSamples:
    """The samples of one split in the shards next to an index; shards are opened on first use."""

    def __init__(self, info: PackInfo, split: str) -> None:
        self.names = tuple(name for name in info.fields if name != LABELS)
        self._info = info
        self._split = split
        self._shards = [shard for shard in info.shards if shard.splits.get(split)]
        self._starts = list(itertools.accumulate((shard.splits[split] for shard in self._shards), initial=0))
        self._opened: dict[int, SingleFileSamples] = {}
        if self._starts[-1] != info.count(split):
            found = f"its shards have {self._starts[-1]} samples of {split} instead of {info.count(split)}"
            raise corrupt(info.path, found)

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked against its CRC."""
        shard, start = self._shard_of(row)
        return shard.one(row - start)

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample, checked against its CRC."""
        shard, start = self._shard_of(row)
        return shard.encoded(row - start)

    def many(self, rows: Indices) -> tuple[Batch, ...]:
        """Return the fields of several samples, read shard by shard."""
        columns, place = self._by_shard(rows, lambda shard, some: shard.many(some))
        return tuple(_reorder([column[number] for column in columns], place) for number in range(len(self.names)))

    def column(self, name: str, rows: Indices) -> Batch:
        """Return one field of several samples."""
        columns, place = self._by_shard(rows, lambda shard, some: shard.column(name, some))
        return _reorder(columns, place)

    def matches(self, rows: Indices) -> Flags:
        """Return whether each sample matches its CRC, `bool [B]`."""
        found, place = self._by_shard(rows, SingleFileSamples.matches)
        return np.concatenate(found)[place]

    def damage_error(self, row: int) -> Corrupt:
        """Return the error for a sample that does not match its CRC."""
        shard, start = self._shard_of(row)
        return shard.damage_error(row - start)

    def has_changed(self) -> bool:
        """Return whether a shard was modified in place since it was opened, or since the last call.

        Raises:
            Corrupt: if a shard became shorter.
        """
        return sum(shard.has_changed() for shard in tuple(self._opened.values())) > 0

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, one array per shard; None if they need decoding or conversion."""
        found: list[npt.NDArray[Any]] = []
        for number in range(len(self._shards)):
            maps = self._shard(number).maps(name)
            if maps is None:
                return None
            if found and (maps[0].shape[1:], maps[0].dtype) != (found[0].shape[1:], found[0].dtype):
                reason = f"its samples have shape {list(maps[0].shape[1:])}, unlike those of other shards"
                raise corrupt(self._shard(number).path, reason)
            found.extend(maps)
        return tuple(found)

    def image_files(self) -> ImageFiles | None:
        """Return the decoding settings for `X` if it holds image files; otherwise None."""
        return self._shard(0).image_files() if self._shards else None

    def _by_shard(self, rows: Indices, read: Callable[[SingleFileSamples, Indices], Any]) -> tuple[list[Any], Indices]:
        """Return the result of reading each shard, and for each row its position in the concatenated results."""
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(owner, kind="stable")
        numbers, firsts = np.unique(owner[order], return_index=True)
        pieces = np.split(rows[order], firsts[1:])
        results = [
            read(self._shard(number), some - self._starts[number])
            for number, some in zip(numbers.tolist() or [0][: len(self._shards)], pieces, strict=False)
        ]
        place = np.empty(len(rows), np.int64)
        place[order] = np.arange(len(rows))
        return results, place

    def _shard_of(self, row: int) -> tuple[SingleFileSamples, int]:
        number = bisect_right(self._starts, row) - 1
        return self._shard(number), self._starts[number]

    def _shard(self, number: int) -> SingleFileSamples:
        if number not in self._opened:
            info = _read_shard(self._info, self._shards[number], self._split)
            self._opened[number] = file_samples(info, self._split, self._starts[number])
        return self._opened[number]


def _stored_rows(column: Column, rows: Indices) -> Iterator[Stored]:
    """Yield copies of the stored bytes of samples; small rows are gathered many at a time, which is faster."""
    row_bytes = column.array[:1].nbytes if isinstance(column, ArrayColumn) else _LARGE_ROW
    if not isinstance(column, ArrayColumn) or row_bytes >= _LARGE_ROW:
        yield from map(column.stored, rows.tolist())
        return
    step = _GATHERED_BYTES // max(1, row_bytes)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        gathered = np.take(column.array, some, axis=0, mode="clip")
        yield from gathered.view(np.uint8).reshape(len(some), row_bytes)


def file_samples(info: PackInfo, split: str, first: int = 0) -> SingleFileSamples:
    """Return the samples of a split in one file; `first` is the index of the file's first sample in the split."""
    columns = {name: _column(info, field, split) for name, field in info.fields.items() if name != LABELS}
    checked = [field.name for field in info.sample_fields()]
    crcs = read_table(info, f"{CRC}_{split}")
    if len(crcs) != info.count(split):
        raise corrupt(info.path, f"it has {len(crcs)} CRCs for {info.count(split)} samples of {split}")
    return SingleFileSamples(info.path, split, columns, checked, crcs, first)


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
    """Return the description of a shard, after checking that it is the one listed in the index."""
    path = index.path.with_name(shard.name)
    act = f"read samples of {str(index.path)!r}"
    next_step = "Copy all shards next to the index, or stage or pack it again"
    try:
        info = read_pack(path)
    except SourceMissing as error:
        found = f"the shard {shard.name!r} is missing"
        raise SourceMissing(cannot(act, found, "all shards in the folder of the index", next_step)) from error
    counted = info.meta["splits"].get(split)
    if info.seal != shard.seal or counted != shard.splits[split] or dict(info.fields) != dict(index.fields):
        message = f"{shard.name!r} is not a shard of this index"
        raise Corrupt(cannot(act, message, f"the shard with the seal {shard.seal[:16]}", next_step))
    return info


def _reorder(pieces: list[Batch], place: Indices) -> Batch:
    """Concatenate values that were read shard by shard and put them in the requested order."""
    tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
    if tensors and len(tensors) == len(pieces):
        return torch.cat(tensors)[torch.from_numpy(place)] if len(tensors) > 1 else tensors[0]
    values = [value for piece in pieces for value in piece]
    return [values[number] for number in place.tolist()]

"""How samples are read: a column for each field of a split, and the CRC of each sample over them.

A sample read alone is checked against its CRC. Batches of rows are not, since that would take as long as reading them;
`verify()` checks every sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import BadImage, Corrupt, cannot
from colabkit.packs.decode.images import decode_image

Numbers: TypeAlias = npt.NDArray[np.int64]
"""Rows of a split, or samples of a view."""
Batch: TypeAlias = Tensor | list[Any]
"""One field of several samples: stacked, or a list where that cannot be."""
Stored: TypeAlias = npt.NDArray[Any] | bytes


class Column(Protocol):
    """One field of one split in one file."""

    def stored(self, row: int) -> Stored:
        """Return a copy of what is stored of a sample."""

    def value(self, stored: Stored) -> Any:
        """Return what the user gets for it."""

    def many(self, rows: Numbers) -> Batch:
        """Return the values of several samples."""


class Samples(Protocol):
    """The samples of one split, by row, without labels."""

    names: tuple[str, ...]

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked.

        Raises:
            Corrupt: if its bytes are not the sealed ones.
            BadImage: if it cannot be decoded.
        """

    def many(self, rows: Numbers) -> tuple[Batch, ...]:
        """Return the fields of several samples, each as one batch."""

    def column(self, name: str, rows: Numbers) -> Batch:
        """Return one field of several samples."""

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored, `[N, ...]`, of each file; None if they have to be decoded or converted."""

    def encoded(self, row: int) -> bytes:
        """Return the bytes of X of one sample as stored, checked.

        Raises:
            Corrupt: if its bytes are not the sealed ones.
        """

    def about_images(self) -> ImageFiles | None:
        """Return what X is if it holds the bytes of image files, else None."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """What images that are stored as files become.

    Attributes:
        channels: of decoded images.
        blank: height and width of an image without bytes; None where such a one is broken.
    """

    channels: int
    blank: tuple[int, int] | None


def values_of(array: npt.NDArray[Any], content: str) -> Batch:
    """Return stored rows, or one row, as what the user gets: images with their channels before height and width."""
    if array.dtype.kind == "S":
        values = array.tolist()
        return [value.decode("utf-8", "surrogateescape") for value in values] if content == "text" else values
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    if content != "image":
        return tensor
    return tensor.permute(2, 0, 1) if array.ndim == 3 else tensor.permute(0, 3, 1, 2)


def image_of(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Return decoded pixels `[H, W, C]`, perhaps read-only, as an image `[C, H, W]` that may be written to."""
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """A field whose samples are rows of one array, `[N, ...]`, in memory or in a map."""

    array: npt.NDArray[Any]
    content: str

    def stored(self, row: int) -> Stored:
        """Return a copy of a row."""
        return np.array(self.array[row, ...])

    def value(self, stored: Stored) -> Any:
        """Return a row as a tensor, or as text or bytes."""
        assert isinstance(stored, np.ndarray)
        if stored.dtype.kind == "S":
            return values_of(stored.reshape(1), self.content)[0]
        return values_of(stored, self.content)

    def many(self, rows: Numbers) -> Batch:
        """Return rows gathered in one pass, in one thread, which is safe in forked processes."""
        gathered = np.empty((len(rows), *self.array.shape[1:]), self.array.dtype)
        np.take(self.array, rows, axis=0, out=gathered, mode="clip")  # "raise" would copy all of it once more
        return values_of(gathered, self.content)


@dataclass(frozen=True, slots=True)
class RaggedColumn:
    """A field whose samples lie one after the other in one flat array: images as files, text, bytes.

    Attributes:
        flat: `uint8 [bytes]`.
        index: `int64 [N, 2]`, offset and length of each.
        content: `image`, `text`, `bytes` or `array`.
        channels: of decoded images.
        blank: height and width of an image without bytes, which was bad when it was packed.
    """

    flat: npt.NDArray[np.uint8]
    index: Numbers
    content: str
    channels: int = 3
    blank: tuple[int, int] = (1, 1)

    def stored(self, row: int) -> Stored:
        """Return the bytes of a sample."""
        offset, length = self.index[row].tolist()
        return self.flat[offset : offset + length].tobytes()

    def value(self, stored: Stored) -> Any:
        """Return bytes as an image, text, bytes, or a tensor of them."""
        assert isinstance(stored, bytes)
        match self.content:
            case "image" if not stored:
                return torch.zeros((self.channels, *self.blank), dtype=torch.uint8, device="cpu")
            case "image":
                pixels = decode_image(stored, self.channels)
                return image_of(pixels)
            case "text":
                return stored.decode("utf-8", "surrogateescape")
            case "bytes":
                return stored
            case _:
                return torch.from_numpy(np.frombuffer(bytearray(stored), np.uint8))

    def many(self, rows: Numbers) -> Batch:
        """Return the values one by one."""
        return [self.value(self.stored(row)) for row in rows.tolist()]


class FileSamples:
    """The samples of one split in one file.

    Args:
        path: the file, for messages.
        split: of the file.
        columns: its fields, by name, in order.
        checked: names of the fields whose bytes a CRC covers.
        crcs: CRC32 of each sample, `uint32 [N]`; None if there are none.
        first: number, in the split of the whole pack, of this file's first sample, for messages.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        columns: Mapping[str, Column],
        checked: Sequence[str] = (),
        crcs: npt.NDArray[np.uint32] | None = None,
        first: int = 0,
    ) -> None:
        self.path = path
        self.split = split
        self.names = tuple(columns)
        self.first = first
        self._columns = columns
        self._in_order = list(columns.values())
        self._crcs = crcs
        self._checked = [number for number, name in enumerate(columns) if name in checked]
        self._is_ragged = any(isinstance(column, RaggedColumn) for column in columns.values())

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked."""
        stored = self._stored(row)
        try:
            return tuple([column.value(some) for column, some in zip(self._in_order, stored, strict=True)])
        except BadImage as error:
            next_step = "Pack it again with on_bad='skip' or 'blank'"
            raise BadImage(cannot(self._act("decode", row), str(error), "an image", next_step)) from error

    def encoded(self, row: int) -> bytes:
        """Return the bytes of X of one sample as stored, checked."""
        stored = self._stored(row)[0]
        assert isinstance(stored, bytes)
        return stored

    def _stored(self, row: int) -> list[Stored]:
        """Return what is stored of one sample, checked against its CRC."""
        stored = [column.stored(row) for column in self._in_order]
        if self._crcs is not None:
            crc = 0
            for number in self._checked:
                crc = crc32(cast("bytes", stored[number]), crc)
            if crc != self._crcs.item(row):
                found, needed = "its bytes are not the sealed ones", "the sample as it was packed"
                next_step = "Stage or pack it again; colabkit.verify() names every damaged sample"
                raise Corrupt(cannot(self._act("read", row), found, needed, next_step))
        return stored

    def many(self, rows: Numbers) -> tuple[Batch, ...]:
        """Return the fields of several samples: gathered, or one by one and checked if there are ragged ones."""
        if self._is_ragged and len(rows):
            return tuple(map(list, zip(*map(self.one, rows.tolist()), strict=True)))
        return tuple(column.many(rows) for column in self._in_order)

    def column(self, name: str, rows: Numbers) -> Batch:
        """Return one field of several samples."""
        return self._columns[name].many(rows)

    def maps(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return a field's rows as stored; None if they have to be decoded or converted."""
        column = self._columns[name]
        is_plain = isinstance(column, ArrayColumn) and column.array.dtype.isnative and column.array.dtype.kind != "S"
        return (column.array,) if isinstance(column, ArrayColumn) and is_plain else None

    def about_images(self) -> ImageFiles | None:
        """Return what X is if it holds the bytes of image files, else None."""
        column = self._in_order[0]
        if isinstance(column, RaggedColumn) and column.content == "image":
            return ImageFiles(column.channels, column.blank)
        return None

    def _act(self, verb: str, row: int) -> str:
        return f"{verb} {self.split}[{self.first + row}] of {str(self.path)!r}"

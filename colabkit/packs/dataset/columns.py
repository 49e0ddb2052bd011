"""Columns of a sample file: arrays, and byte strings stored back to back. Each converts samples for the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.packs.decode.images import decode_image
from colabkit.packs.format.layout import Indices, decode_text
from colabkit.packs.format.mapped_pages import read_pages

FieldBatch: TypeAlias = Tensor | list[Any]
"""One field of several samples: one tensor, or a list for text, bytes, and samples whose shapes may differ."""
Stored: TypeAlias = npt.NDArray[Any] | bytes
Flags: TypeAlias = npt.NDArray[np.bool_]

# Size in bytes below which samples are gathered in groups, and their pages are not read in advance.
_LARGE_ROW = 16 << 10
# Maximum number of bytes to gather in one call, which fit in a processor's L2 cache.
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
        """Return a copy of the stored bytes or values of a sample.

        Raises:
            UnreadablePages: if a large sample is mapped and its part of the file cannot be read.
        """

    def value(self, stored: Stored) -> Any:
        """Convert stored bytes or values to the value returned to the user."""

    def many(self, rows: Indices) -> FieldBatch:
        """Return the values of several samples."""


def convert_rows(array: npt.NDArray[Any], content: str) -> FieldBatch:
    """Convert one or more stored rows to the values returned to the user; images become channels-first."""
    if array.dtype.kind == "S":
        values = array.tolist()
        return [*map(decode_text, values)] if content == "text" else values
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(array)
    if content != "image":
        return tensor
    return tensor.permute(2, 0, 1) if array.ndim == 3 else tensor.permute(0, 3, 1, 2)


def convert_pixels(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Convert decoded pixels `[H, W, C]`, possibly read-only, to a writable image `[C, H, W]`."""
    return torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)


def stack_samples(field: FieldBatch) -> FieldBatch:
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
        """Return a copy of a sample's values."""
        _read_large(found := self.array[row, ...])
        return np.array(found)

    def value(self, stored: Stored) -> Any:
        """Convert a stored sample to a tensor, text or bytes."""
        assert isinstance(stored, np.ndarray)
        if stored.dtype.kind == "S":
            return convert_rows(stored.reshape(1), self.content)[0]
        return convert_rows(stored, self.content)

    def many(self, rows: Indices) -> FieldBatch:
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
        """Return a copy of a sample's bytes."""
        offset, length = self.index[row].tolist()
        _read_large(found := self.flat[offset : offset + length])
        return found.tobytes()

    def value(self, stored: Stored) -> Any:
        """Convert a stored sample to a tensor, text or bytes."""
        assert isinstance(stored, bytes)
        match self.content:
            case "image" if not stored:
                return torch.zeros((self.channels, *self.blank), dtype=torch.uint8, device="cpu")
            case "image":
                return convert_pixels(decode_image(stored, self.channels))
            case "text":
                return decode_text(stored)
            case "bytes":
                return stored
            case _:
                return torch.from_numpy(np.frombuffer(bytearray(stored), np.uint8))

    def many(self, rows: Indices) -> FieldBatch:
        """Return a list of the values, each converted separately."""
        return [self.value(self.stored(row)) for row in rows.tolist()]


def stored_rows(column: Column, rows: Indices) -> Iterator[Stored]:
    """Yield copies of the stored bytes of samples; small rows are gathered in groups for speed.

    Raises:
        UnreadablePages: if a large sample is mapped and its part of the file cannot be read.
    """
    row_bytes = column.array[:1].nbytes if isinstance(column, ArrayColumn) else _LARGE_ROW
    if not isinstance(column, ArrayColumn) or row_bytes >= _LARGE_ROW:
        yield from map(column.stored, rows.tolist())
        return
    step = _GATHERED_BYTES // max(1, row_bytes)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        gathered = np.take(column.array, some, axis=0, mode="clip")
        yield from gathered.view(np.uint8).reshape(len(some), row_bytes)


def _read_large(array: npt.NDArray[Any]) -> None:
    """Call `read_pages` for a large array; for a small one, this would take longer than reading it."""
    if array.nbytes >= _LARGE_ROW:
        read_pages(array)

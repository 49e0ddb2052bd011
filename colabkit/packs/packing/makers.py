"""What makes the samples of a pack: one by one, in any order, in any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, BadSource, cannot, kind_of
from colabkit.packs.decode.arrays import decode_array
from colabkit.packs.decode.images import check_image, decode_image, row_decoder
from colabkit.packs.decode.jpeg import encode_jpeg
from colabkit.packs.format.layout import SAMPLES, Field
from colabkit.storage import Item, Source

Encoding: TypeAlias = Literal["raw", "source", "jpeg"]
Value: TypeAlias = npt.NDArray[Any] | bytes | memoryview


class Unequal(BadImage):
    """An image has another size than the first one, and no common size was asked for."""

    next_step = "Use size= to bring all images to one size, or encoding='source' to keep each as it is"


class _UnequalArrays(Unequal):
    next_step = "Bring all arrays to one shape and dtype, or leave this file out"


@dataclass(frozen=True, slots=True)
class MadeField:
    """A field that a maker makes.

    Attributes:
        field: name and content.
        shape: of each sample; of a ragged field ().
        dtype: of its elements.
        is_table: whether it is small, and kept like a table.
    """

    field: Field
    shape: tuple[int, ...] = ()
    dtype: str = "|u1"
    is_table: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample; of a ragged field 0."""
        return 0 if self.field.is_ragged else int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class SampleMaker(Protocol):
    """Makes the samples that a pack takes, by number. It is pickled for other processes.

    Attributes:
        fields: what it makes of each sample, `X` first.
        source: where the bytes of samples are read from; None if a sample needs no reading.
        can_share: whether threads, or processes that are forked, may make samples at once.
    """

    fields: tuple[MadeField, ...]
    source: Source | None
    can_share: bool

    def item(self, number: int) -> Item:
        """Return the item that a sample is made of, if there is a source."""

    def lengths(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the bytes of each sample's `X` if that is ragged and known before it is made."""

    def path(self, number: int) -> str:
        """Return what a sample is called in messages and lists."""

    def make(self, number: int, data: bytes) -> tuple[Value, ...]:
        """Return a sample's fields; `data` are its item's bytes.

        Raises:
            BadImage: with the bare reason, if it is broken.
        """

    def part(self, numbers: npt.NDArray[np.int64]) -> SampleMaker:
        """Return a maker of these samples only, numbered from 0."""


@runtime_checkable
class RowMaker(SampleMaker, Protocol):
    """A maker that may be able to make samples where their rows are, without a copy.

    Attributes:
        fills_rows: whether it is, now: it makes rows of one field.
    """

    @property
    def fills_rows(self) -> bool:
        """Whether samples are rows of one field."""

    def make_into(self, number: int, data: bytes, row: npt.NDArray[Any]) -> None:
        """Fill a sample's row; as `make()` otherwise."""


@runtime_checkable
class ChunkMaker(SampleMaker, Protocol):
    """A maker that makes many samples in one go."""

    def make_many(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any] | Sequence[bytes], ...]:
        """Return the fields of many samples: rows `[n, ...]`, C-contiguous and of the field's dtype, or bytes each."""


class FileSamples:
    """Makes samples of files: images decoded to one size, encoded anew or untouched, `.npy` arrays as they are.

    Args:
        source: open; in another process it opens itself again.
        items: one for each sample.
        encoding: of the images.
        channels: 3 or 1.
        size: height and width of all images; None keeps their own.
        shape: of a row of `raw`.
        dtype: of its elements; other than uint8 for `.npy` files only.
        quality: of `jpeg`.
        extra: further fields: what each is, and a function of a sample's path.
    """

    can_share = True

    def __init__(
        self,
        source: Source,
        items: Sequence[Item],
        encoding: Encoding,
        *,
        channels: int,
        size: tuple[int, int] | None,
        shape: tuple[int, ...] = (),
        dtype: str = "|u1",
        is_image: bool = True,
        quality: int = 0,
        extra: Sequence[tuple[MadeField, Callable[[str], Any]]] = (),
    ) -> None:
        self.source: Source | None = source
        self.encoding = encoding
        self._items = items
        self._channels = channels
        self._size = size
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._is_image = is_image
        self._quality = quality
        self._extra = extra
        is_raw = encoding == "raw"
        first = Field(SAMPLES, "image" if is_image else "array", not is_raw)
        self.fields: tuple[MadeField, ...] = (
            MadeField(first, shape if is_raw else (), self._dtype.str if is_raw else "|u1"),
            *(made for made, _ in extra),
        )

    def item(self, number: int) -> Item:
        """Return the file of a sample."""
        return self._items[number]

    def lengths(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the files' sizes if they are packed untouched."""
        if self.encoding != "source":
            return None
        return np.fromiter((self._items[number].size for number in numbers.tolist()), np.int64, len(numbers))

    def path(self, number: int) -> str:
        """Return the file's path in its source."""
        return self._items[number].path

    def make(self, number: int, data: bytes) -> tuple[Value, ...]:
        """Return the fields of a sample of its file's bytes."""
        return (self._made(data), *self.further(number)) if self._extra else (self._made(data),)

    def further(self, number: int) -> tuple[Value, ...]:
        """Return the fields of a sample that functions make of its path."""
        path = self.path(number)
        return tuple(_suited(path, made, function(path)) for made, function in self._extra)

    @property
    def fills_rows(self) -> bool:
        """Whether images are decoded straight into rows."""
        return self.encoding == "raw" and self._is_image and not self._extra

    def make_into(self, number: int, data: bytes, row: npt.NDArray[Any]) -> None:
        """Decode an image into its row."""
        try:
            self._decode_row(data, row)
        except BadImage:
            row[:] = self._made(data)  # which tells an image of another size from one that is broken

    @cached_property
    def _decode_row(self) -> Callable[[bytes, npt.NDArray[np.uint8]], None]:
        return row_decoder(self._shape, self._size is not None)

    def _made(self, data: bytes) -> Value:
        if self.encoding == "raw":
            pixels = decode_image(data, self._channels, self._size) if self._is_image else decode_array(data)
            unequal = Unequal if self._is_image else _UnequalArrays
            if pixels.shape != self._shape:
                raise unequal(f"its shape is {_by(pixels.shape)}, not {_by(self._shape)} like the first")
            if pixels.dtype != self._dtype:
                raise unequal(f"its dtype is {pixels.dtype}, not {self._dtype} like the first")
            return pixels
        if self.encoding == "source":
            check_image(data)
            return data
        return encode_jpeg(decode_image(data, self._channels, self._size), self._quality)

    def part(self, numbers: npt.NDArray[np.int64]) -> FileSamples:
        """Return a maker of these samples only, numbered from 0."""
        assert self.source is not None
        return FileSamples(
            self.source,
            [self._items[number] for number in numbers.tolist()],
            self.encoding,
            channels=self._channels,
            size=self._size,
            shape=self._shape,
            dtype=self._dtype.str,
            is_image=self._is_image,
            quality=self._quality,
            extra=self._extra,
        )

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_decode_row"}  # a closure


def is_stored(dtype: np.dtype[Any]) -> bool:
    """Return whether a pack holds numbers of a dtype; torch knows no longer ones."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _suited(path: str, made: MadeField, value: Any) -> Value:
    """Return what a function of the user's own returned, as its field needs it; nothing is cut on the way."""
    act, next_step = f"pack the field {made.field.name!r} of {path!r}", "Return values of one kind and shape"
    if made.field.is_ragged:
        kind = str if made.field.content == "text" else bytes
        if not isinstance(value, kind):
            found, needed = kind_of(value), f"{kind.__name__} like the first"
            raise BadSource(cannot(act, found, needed, next_step))
        return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    try:
        given = np.array(value)  # a copy: the function may fill the same array for each sample
    except ValueError:
        raise BadSource(cannot(act, "lists of several lengths", "numbers of one shape", next_step)) from None
    if given.shape != made.shape:
        found, needed = f"the shape {_by(given.shape)}", f"{_by(made.shape)} like the first"
        raise BadSource(cannot(act, found, needed, next_step))
    if given.dtype.str == made.dtype:
        return given
    wanted = np.dtype(made.dtype)
    if given.dtype.kind in ("biuf" if wanted.kind == "f" else "biu"):
        found_values = given.astype(wanted)
        if wanted.kind == "f" or np.array_equal(found_values, given):
            return found_values
    raise BadSource(cannot(act, f"values of {given.dtype}", f"{wanted} like the first", next_step))


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"

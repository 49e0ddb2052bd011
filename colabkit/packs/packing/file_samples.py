"""Makes the samples of a pack from files, which are decoded to one size, re-encoded or stored unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadArchive, BadImage, BadSource, cannot, kind_of
from colabkit.packs.decode.images import check_image, decode_array, decode_image, row_decoder
from colabkit.packs.decode.jpeg import encode_jpeg
from colabkit.packs.format.layout import SAMPLES, Indices, encode_text
from colabkit.packs.packing.pack_plan import (
    PAD,
    BadHandler,
    ColumnValues,
    Encoding,
    SampleField,
    SampleMaker,
    UnequalSample,
    Value,
)
from colabkit.storage import Block, ConcurrentReader, Item, ReadRequest, Retries, Source, Threads, read_item


class BrokenMember(BadImage):
    """Error for a damaged member of an otherwise readable archive; the message contains only the reason."""


class UnequalArray(UnequalSample):
    """Error for an `.npy` array whose shape or dtype differs from that of the first array."""

    next_step = "Convert all arrays to one shape and dtype, or remove this file"


class SampleReader(ConcurrentReader):
    """Reads complete items like `ConcurrentReader`, but can skip damaged members of an archive.

    Damage in an archive without random access is always an error, because nothing after the damage can be read.

    Args:
        source: source of the items.
        threads: number of concurrent reads, or `"auto"`.
        retries: counts retries.
        on_wait: called several times a second while nothing arrives.
        is_strict: whether a damaged member is an error.
    """

    def __init__(
        self,
        source: Source,
        threads: Threads,
        retries: Retries,
        on_wait: Callable[[], None] | None = None,
        *,
        is_strict: bool,
    ) -> None:
        super().__init__(source, threads, retries, on_wait)
        self._is_strict = is_strict
        self._broken: dict[Item, BrokenMember] = {}

    def items(self, items: Iterable[Item]) -> Generator[Block, None, None]:
        """Yield each item as one block, in any order."""
        return self.blocks(ReadRequest(item, 0, item.size) for item in items)

    def data(self, block: Block) -> bytes | BrokenMember:
        """Return the bytes of an item that arrived, or the reason why it is damaged."""
        return self._broken.get(block.item) or bytes(block.data or b"")

    def _read(self, one: ReadRequest) -> Block:
        try:
            return super()._read(one)
        except BadArchive as error:
            if self._is_strict:
                raise
            self._broken[one.item] = _broken(error)
            return Block(one.item, one.offset, one.size, 0, None)


def read_sample(source: Source, item: Item, retries: Retries, *, is_strict: bool) -> bytes | BrokenMember:
    """Return an item's bytes; if the item is damaged, raise an error if `is_strict`, otherwise return the reason."""
    try:
        return read_item(source, item, retries)
    except BadArchive as error:
        if is_strict:
            raise
        return _broken(error)


def read_samples(source: Source, items: Sequence[Item], *, is_strict: bool) -> list[tuple[Item, bytes | BrokenMember]]:
    """Return items with the results of `read_sample`; slow sources are read concurrently, in any order."""
    retries = Retries()
    if len(items) == 1 or not source.can_hang:
        return [(item, read_sample(source, item, retries, is_strict=is_strict)) for item in items]
    with SampleReader(source, "auto", retries, is_strict=is_strict) as reader:
        return [(block.item, reader.data(block)) for block in list(reader.items(items))]


def _broken(error: BadArchive) -> BrokenMember:
    return BrokenMember(str(error.__cause__ or error))


@dataclass(frozen=True)
class FileSampleMaker(SampleMaker):
    """Makes samples from files: images decoded to one size, re-encoded or unchanged, and `.npy` arrays.

    Attributes:
        source: the open source, which reopens in other processes.
        items: the file of each sample.
        encoding: encoding of the images.
        channels: number of channels of decoded images, 3 or 1.
        size: height and width of all images; None keeps each image's size.
        is_strict: whether a damaged member of an archive is an error.
        shape: shape of a row if `encoding` is `raw`.
        dtype: dtype of a row; always uint8 except for `.npy` files.
        is_image: whether samples are images rather than arrays.
        quality: JPEG quality for `jpeg`.
        extra: additional fields, each with the function that computes it from a sample's path.
    """

    source: Source
    items: Sequence[Item]
    encoding: Encoding
    channels: int
    size: tuple[int, int] | None
    is_strict: bool = True
    shape: tuple[int, ...] = ()
    dtype: str = "|u1"
    is_image: bool = True
    quality: int = 0
    extra: Sequence[tuple[SampleField, Callable[[str], Any]]] = ()

    @cached_property
    def fields(self) -> tuple[SampleField, ...]:  # type: ignore[override]
        """Fields of a sample: the image or array, then the additional fields."""
        is_raw = self.encoding == "raw"
        shape, dtype = (self.shape, self.dtype) if is_raw else ((), "|u1")
        x = SampleField(SAMPLES, "image" if self.is_image else "array", not is_raw, shape, dtype)
        return (x, *(field for field, _ in self.extra))

    def path(self, number: int) -> str:
        """Return the file's path in its source."""
        return self.items[number].path

    def subset(self, numbers: Indices) -> FileSampleMaker:
        """Return a maker of only the given files."""
        return replace(self, items=[self.items[number] for number in numbers.tolist()])

    def lengths(self, numbers: Indices) -> Indices | None:
        """Return the file sizes in bytes if files are stored unchanged, otherwise None."""
        return self.sizes(numbers) if self.encoding == "source" else None

    def sizes(self, numbers: Indices) -> Indices:
        """Return the size in bytes of each sample's file."""
        return np.fromiter((self.items[number].size for number in numbers.tolist()), np.int64, len(numbers))

    def blank(self, number: int) -> tuple[Value, ...]:
        """Return a blank image or array and the additional fields, which do not depend on the file's bytes."""
        return (super().blank(number)[0], *self._extra(number)) if self.extra else super().blank(number)

    def examples(self, numbers: Iterable[int]) -> Iterator[tuple[Value, ...]]:
        """Read the files of the given samples and yield their fields, omitting bad ones."""
        by_item = {self.items[number]: number for number in numbers}
        for item, data in read_samples(self.source, list(by_item), is_strict=self.is_strict):
            with contextlib.suppress(BadImage):
                yield self._made(by_item[item], data)

    def columns(
        self, numbers: Sequence[int], data: Iterable[bytes | BrokenMember], on_bad: BadHandler
    ) -> Sequence[ColumnValues]:
        """Return each field of the given samples from the bytes of their files; bad samples are blank."""
        if self.encoding == "raw" and self.is_image and not self.extra:
            return (self._rows(numbers, data, on_bad),)
        given = iter(data)
        return self._join(numbers, lambda number: self._made(number, next(given)), on_bad)

    def _rows(
        self, numbers: Sequence[int], data: Iterable[bytes | BrokenMember], on_bad: BadHandler
    ) -> npt.NDArray[np.uint8]:
        rows = np.empty((len(numbers), *self.shape), np.uint8)
        for place, (row, one) in enumerate(zip(rows, data, strict=True)):
            try:
                self._decode_into(one, row)
            except BadImage as error:
                on_bad(place, numbers[place], error)
                row[:] = 0
        return rows

    def _decode_into(self, data: bytes | BrokenMember, row: npt.NDArray[np.uint8]) -> None:
        if isinstance(data, BrokenMember):
            raise data
        try:
            self._decode_row(data, row)
        except BadImage:
            # Decode again, to distinguish an image of another size from a broken image.
            row[:] = self._encoded(data)

    @cached_property
    def _decode_row(self) -> Callable[[bytes, npt.NDArray[np.uint8]], None]:
        return row_decoder(self.shape, self.size is not None)

    def _made(self, number: int, data: bytes | BrokenMember) -> tuple[Value, ...]:
        if isinstance(data, BrokenMember):
            raise data
        return (self._encoded(data), *self._extra(number)) if self.extra else (self._encoded(data),)

    def _extra(self, number: int) -> tuple[Value, ...]:
        path = self.path(number)
        return tuple(_stored_value(path, field, function(path)) for field, function in self.extra)

    def _encoded(self, data: bytes) -> Value:
        if self.encoding == "raw":
            pixels = decode_image(data, self.channels, self.size) if self.is_image else decode_array(data)
            self.fields[0].check_shape(pixels, UnequalSample if self.is_image else UnequalArray)
            if pixels.dtype != np.dtype(self.dtype):
                raise UnequalArray(f"the dtype is {pixels.dtype}, but {np.dtype(self.dtype)} in the first sample")
            return pixels
        if self.encoding == "source":
            check_image(data)
            return data
        return encode_jpeg(decode_image(data, self.channels, self.size), self.quality)

    def __getstate__(self) -> Mapping[str, Any]:
        # Omit the row decoder, which cannot be pickled because it is a closure.
        return {name: value for name, value in self.__dict__.items() if name != "_decode_row"}


def _stored_value(path: str, made: SampleField, value: Any) -> Value:
    """Convert a user function's result to the field's type; raise `BadSource` if its type or shape does not fit."""
    act = f"pack the field {made.name!r} of {path!r}"
    next_step = f"Return values of one type and shape. {PAD}"
    if made.is_ragged:
        kind = str if made.content == "text" else bytes
        if not isinstance(value, kind):
            found = f"the function returned {kind_of(value)}, but {kind.__name__} for the first sample"
            raise BadSource(cannot(act, found, "", next_step))
        return encode_text(value) if isinstance(value, str) else value
    try:
        # Copy, because the function may reuse the same array for each sample.
        return made.converted(np.array(value), UnequalSample)
    except UnequalSample as error:
        raise BadSource(cannot(act, str(error), "", next_step)) from None
    except ValueError:
        uneven = "the function returned lists of different lengths"
        raise BadSource(cannot(act, uneven, "lists of one length", next_step)) from None

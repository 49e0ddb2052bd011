"""The plan of a pack: its samples, tables and metadata, determined before anything is written."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, BadSource, Text, cannot, format_things, option
from colabkit.packs.format.layout import CRC, LABELS, SAMPLES, DataSet, Field, Indices

OnBad: TypeAlias = Literal["raise", "skip", "blank"]
Encoding: TypeAlias = Literal["raw", "source", "jpeg"]
Lengths: TypeAlias = Mapping[str, Indices]
"""Size in bytes of each sample of a ragged field, by dataset name."""
Value: TypeAlias = npt.NDArray[Any] | bytes | memoryview
ColumnValues: TypeAlias = npt.NDArray[Any] | Sequence[Any]
"""One field of many samples: rows `[n, ...]`, C-contiguous and of the field's dtype, or a sequence of values."""
BadHandler: TypeAlias = Callable[[int, int, BadImage], None]
"""Called with the position, number and error of a bad sample; raises if bad samples are not allowed."""


_LISTED_BAD = 5
PAD = "Pad values of different lengths to a fixed number of rows, for example with zeros"
"""Advice for values whose shapes differ, such as the bounding boxes of images."""


class UnequalSample(BadImage):
    """Error for a sample whose shape or dtype differs from that of the first sample.

    The message contains only the reason.

    Attributes:
        next_step: advice that completes a message with this reason.
    """

    next_step: ClassVar[Text] = (
        *("Use ", option("size"), " to resize all images, or "),
        *(option("encoding", "source"), " to store the files unchanged"),
    )


@dataclass(frozen=True, slots=True)
class SampleField(Field):
    """A field whose values are made together with the samples.

    Attributes:
        shape: shape of each sample; () if the field is ragged.
        dtype: dtype of the elements.
        is_table: whether the field is small and covered by a single CRC, like a table.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "|u1"
    is_table: bool = False

    @property
    def row_bytes(self) -> int:
        """Size of a sample in bytes; 0 if the field is ragged."""
        return 0 if self.is_ragged else int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def check_shape(self, array: npt.NDArray[Any], error: type[UnequalSample]) -> None:
        """Raise `error` if an array's shape differs from the field's."""
        if array.shape != self.shape:
            found, first = ("x".join(map(str, shape)) or "()" for shape in (array.shape, self.shape))
            raise error(f"{self._named('shape')} is {found}, but {first} in the first sample")

    def converted(self, array: npt.NDArray[Any], error: type[UnequalSample]) -> npt.NDArray[Any]:
        """Convert an array to the field's dtype.

        Raise `error` if the shape differs, or numbers would change other than by rounding to a floating-point dtype.
        """
        self.check_shape(array, error)
        if array.dtype.str == self.dtype:
            return array
        dtype = np.dtype(self.dtype)
        if array.dtype.kind in {"f": "biuf", "c": "biufc"}.get(dtype.kind, "biu"):
            converted = array.astype(dtype)
            if dtype.kind in "fc" or np.array_equal(converted, array):
                return converted
        raise error(f"{self._named('dtype')} is {array.dtype}, but {dtype} in the first sample")

    def _named(self, property_name: str) -> str:
        return f"the {property_name}" if self.name == SAMPLES else f"the {property_name} of {self.name!r}"


class SampleMaker(ABC):
    """Makes the samples of a pack by number; can be pickled for other processes.

    Attributes:
        fields: fields of each sample, `X` first.
    """

    fields: tuple[SampleField, ...]

    @abstractmethod
    def path(self, number: int) -> str:
        """Return the name of a sample for messages and reports."""

    @abstractmethod
    def subset(self, numbers: Indices) -> Self:
        """Return a maker of only the given samples, numbered from 0."""

    @abstractmethod
    def examples(self, numbers: Iterable[int]) -> Iterator[tuple[Value, ...]]:
        """Yield the fields of the given samples, omitting bad ones."""

    def lengths(self, numbers: Indices) -> Indices | None:
        """Return the size of each sample's `X` in bytes; None if `X` is not ragged or the sizes are still unknown."""
        return None

    def blank(self, number: int) -> tuple[Value, ...]:
        """Return the fields that replace a bad sample."""
        return tuple(b"" if one.is_ragged else np.zeros(one.shape, one.dtype) for one in self.fields)

    def _join(
        self, numbers: Iterable[int], make: Callable[[int], tuple[Value, ...]], on_bad: BadHandler
    ) -> Sequence[ColumnValues]:
        samples = []
        for place, number in enumerate(numbers):
            try:
                samples.append(make(number))
            except BadImage as error:
                on_bad(place, number, error)
                samples.append(self.blank(number))
        return tuple(zip(*samples, strict=True))


class MemorySampleMaker(SampleMaker):
    """Makes samples from values in memory or from a dataset."""

    @abstractmethod
    def columns(self, numbers: Indices, on_bad: BadHandler, on_wait: Callable[[], None]) -> Sequence[ColumnValues]:
        """Return each field of the given samples as a column; bad samples are blank.

        If user code makes the samples, `on_wait` is called before each, because that may be slow.
        """

    def examples(self, numbers: Iterable[int]) -> Iterator[tuple[Value, ...]]:
        """Yield the fields of the given samples, omitting bad ones."""
        for number in numbers:
            bad: list[int] = []
            columns = self.columns(np.array([number]), lambda place, *_, bad=bad: bad.append(place), lambda: None)
            if not bad:
                yield tuple(column[0] for column in columns)


@dataclass(frozen=True)
class FieldTable:
    """A field whose values are known before samples are made; values of a ragged field are bytes."""

    field: Field
    values: npt.NDArray[Any] | tuple[bytes, ...]

    def subset(self, numbers: Indices) -> FieldTable:
        """Return the table of only the given samples."""
        if isinstance(self.values, tuple):
            return FieldTable(self.field, tuple(self.values[number] for number in numbers.tolist()))
        return FieldTable(self.field, self.values[numbers])


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be made: its index in the split, its path and the reason."""

    split: str
    index: int
    path: str
    why: str


@dataclass(frozen=True)
class PackPlan:
    """The complete contents of a pack or a shard; can be pickled for other processes.

    Attributes:
        name: name of the source.
        maker: maker of the samples.
        splits: the maker's sample numbers in each split, in the order of the pack.
        tables: fields whose values are known in advance.
        about: metadata of the pack, such as the source, the encoding and the classes.
        on_bad: action for samples that cannot be decoded.
        most_bad: maximum number of bad samples.
    """

    name: str
    maker: SampleMaker
    splits: Mapping[str, Indices]
    tables: tuple[FieldTable, ...]
    about: Mapping[str, Any]
    on_bad: OnBad
    most_bad: int

    @property
    def act(self) -> str:
        """Verb and object for messages."""
        return f"pack {self.name!r}"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(map(len, self.splits.values()))

    @property
    def is_shard(self) -> bool:
        """Whether this is the plan of a shard."""
        return "shard" in self.about

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples in each split."""
        return {split: len(numbers) for split, numbers in self.splits.items()}

    @property
    def numbers(self) -> Indices:
        """The maker's numbers of all samples, split by split."""
        return np.concatenate(list(self.splits.values()))

    @property
    def row_bytes(self) -> int:
        """Size of a sample in bytes, excluding ragged fields and tables."""
        return sum(one.row_bytes for one in self.maker.fields)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """All fields by name: `X`, the labels, then the others."""
        fields = [*self.maker.fields, *(table.field for table in self.tables)]
        found = {field.name: field for field in fields}
        return {name: found[name] for name in sorted(found, key=lambda name: (name != SAMPLES, name != LABELS))}

    @cached_property
    def spooled(self) -> tuple[SampleField, ...]:
        """Fields whose lengths are unknown until the samples are made."""
        is_known = self.lengths is not None
        return tuple(one for one in self.maker.fields if one.is_ragged and not (is_known and one.name == SAMPLES))

    @cached_property
    def lengths(self) -> Lengths | None:
        """Size in bytes of each sample's `X` by dataset; None if the sizes are not known in advance."""
        found = {}
        for split, numbers in self.splits.items():
            lengths = self.maker.lengths(numbers)
            if lengths is None:
                return None
            found[self.maker.fields[0].data_set(split)] = lengths
        return found

    def check_bad(self, bad: Sequence[BadSample]) -> None:
        """Raise `BadImage` if more samples are bad than allowed, `BadSource` if all samples of a complete pack are."""
        first = ", ".join(f"{one.path!r} ({one.why})" for one in bad[:_LISTED_BAD])
        if len(bad) > self.most_bad:
            found = f"there are at least {format_things(len(bad), 'bad file')}, starting with {first}"
            more: Text = "" if len(bad) == self.samples else (", or increase ", option("max_bad"))
            raise BadImage(cannot(self.act, found, f"at most {self.most_bad}", ("Check the source", more)))
        if len(bad) == self.samples and not self.is_shard:
            none_good = f"none of {format_things(self.samples, 'sample')} could be packed, starting with {first}"
            raise BadSource(cannot(self.act, none_good, "at least one readable sample", "Check the source"))

    def data_sets(self, kept: Mapping[str, Indices], lengths: Lengths) -> list[DataSet]:
        """Return the layout of a pack.

        Args:
            kept: indices of each split's samples that are stored in the pack.
            lengths: sizes of the kept samples of ragged fields; a missing field is laid out without bytes.
        """
        laid = []
        made = {one.name: one for one in self.maker.fields}
        tables = {table.field.name: table for table in self.tables}
        for split, rows in kept.items():
            for field in self.fields.values():
                name = field.data_set(split)
                if field.name in tables:
                    values = tables[field.name].subset(self.splits[split][rows]).values
                    size = sum(map(len, values)) if isinstance(values, tuple) else 0
                    shape, dtype = ((), "") if isinstance(values, tuple) else (values.shape[1:], values.dtype.str)
                else:
                    size = int(lengths[name].sum()) if name in lengths else 0
                    shape, dtype = made[field.name].shape, made[field.name].dtype
                if field.is_ragged:
                    laid += [DataSet(name, (size,), "|u1"), DataSet(field.index(split), (len(rows), 2), "<i8")]
                else:
                    laid.append(DataSet(name, (len(rows), *shape), dtype))
            laid.append(DataSet(f"{CRC}_{split}", (len(rows),), "<u4"))
        return laid

    def meta(self, counts: Mapping[str, int], bad: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        """Return the metadata; each entry of `bad` is a split, an index (None if omitted), a path and a reason."""
        fields = {name: [field.content, field.is_ragged] for name, field in self.fields.items()}
        return {**self.about, "fields": fields, "splits": dict(counts), "bad": list(bad)}

    def shard(self, start: int, stop: int, about: Mapping[str, Any]) -> PackPlan:
        """Return the plan of a shard with samples `start` to `stop`, counted across all splits."""
        chosen: list[Indices] = []
        splits: dict[str, Indices] = {}
        before = count = 0
        for split, numbers in self.splits.items():
            mine = numbers[max(0, start - before) : max(0, stop - before)]
            if len(mine):
                splits[split] = np.arange(count, count + len(mine))
                chosen.append(mine)
                count += len(mine)
            before += len(numbers)
        every = np.concatenate(chosen)
        tables = tuple(table.subset(every) for table in self.tables)
        return replace(self, maker=self.maker.subset(every), splits=splits, tables=tables, about=about)


def unequal_shapes(values: Iterable[Any]) -> str:
    """Return, for messages, two different shapes of the lists or arrays among values; empty if there are none."""
    shapes: dict[tuple[int, ...], None] = {}
    for value in values:
        if isinstance(value, list | tuple) or getattr(value, "shape", None):
            try:
                shapes[tuple(np.shape(value))] = None
            except ValueError:
                # NumPy rejects nested lists of different lengths.
                continue
        if len(shapes) == 2:
            return " and ".join(str([*shape]) for shape in shapes)
    return ""


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return whether a pack can store a dtype: numbers of at most 8 bytes, or 16 if complex, as in PyTorch."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def number_array(values: Any) -> npt.NDArray[Any]:
    """Convert values to an array like `np.asarray`, but convert a list of integers without rounding.

    Raises:
        OverflowError: if integers fit in neither `int64` nor `uint64`; the message contains only the reason.
    """
    array = np.asarray(values)
    # NumPy rounds integers to float64 if only some of them fit in int64.
    if array.dtype == np.float64 and not hasattr(values, "dtype") and (array >= 2.0**63).any():
        cells = np.array(values, object).reshape(-1).tolist()
        if all(isinstance(cell, int | np.integer) for cell in cells):
            if min(cells) < 0:
                raise OverflowError(f"no integer dtype holds both {min(cells)} and {max(cells)}")
            return np.array(values, np.uint64)
    return array


def digest_of(*values: object) -> str:
    """Return the SHA-256 of JSON-serializable values in hex."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

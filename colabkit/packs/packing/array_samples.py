"""Takes the samples of a pack from arrays, such as NumPy arrays or datasets in HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, InvalidOption, cannot, kind_of, option, shortened
from colabkit.packs.format.layout import SAMPLES, Indices, encode_text
from colabkit.packs.packing.options import Layout
from colabkit.packs.packing.pack_plan import (
    PAD,
    BadHandler,
    ColumnValues,
    MemorySampleMaker,
    SampleField,
    is_storable,
    number_array,
    unequal_shapes,
)
from colabkit.storage import text_categories

IMAGE_CHANNELS = (1, 3)
LAYOUTS = {"nhwc": "[N, H, W, C]", "nchw": "[N, C, H, W]", "nhw": "[N, H, W]"}
"""The dimensions of images in an array, by layout."""

# Smallest height and width of images without a dimension for the channels, which could otherwise be small matrices.
_LEAST_SIDE = 8
_STEP_BYTES = 8 << 20

Rows: TypeAlias = Any
"""An array whose rows are samples: a NumPy array, or an object with NumPy slices, such as `h5py.Dataset`."""


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text, as UTF-8, or of bytes; one value for each sample. A pandas Categorical has categories."""

    values: tuple[bytes, ...]
    content: Literal["text", "bytes"]
    categories: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)


def is_array(value: object) -> bool:
    """Return whether a value is an array, for example from NumPy, PyTorch or HDF5."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def column_of(act: str, name: str, value: Any) -> Rows | TextColumn:
    """Convert a field to an array of numbers or a column of text or bytes; raise `InvalidOption` for other values.

    Numeric NumPy arrays, including memory maps, and CPU tensors are not copied. Numeric arrays that load slices on
    demand, such as `h5py.Dataset`, are not read yet.
    """
    if hasattr(value, "numpy") and hasattr(value, "detach"):
        value = value.detach().cpu()
    if np.ma.is_masked(value):
        masked = f"the array {name!r} has masked values"
        raise InvalidOption(cannot(act, masked, "", "Fill them, for example with filled(0)"))
    if isinstance(value, list | tuple) and value and all(isinstance(one, str | bytes) for one in value):
        # NumPy's text and bytes dtypes would drop trailing null characters.
        value = np.array(value, object)
    is_lazy = is_array(value) and not hasattr(value, "numpy") and not hasattr(value, "iloc")
    try:
        # Use `getattr`, because the dtypes of polars have no `kind`.
        kind = getattr(value.dtype, "kind", "") if is_lazy else ""
        rows = value if kind in tuple("biufc") and not isinstance(value, np.ndarray) else number_array(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(value, list | tuple):
            _check_shapes(act, name, value)
        reason = shortened(" ".join(str(error).split()), 80) or type(error).__name__
        found = f"{name!r} is {kind_of(value)} that cannot be converted to an array ({reason})"
        convert = "Convert it to a NumPy array"
        raise InvalidOption(cannot(act, found, "an array of numbers, or a list of text", convert)) from None
    if rows.dtype.kind in "UST" or rows.dtype.kind == "O":
        return _text_column(act, name, rows, text_categories(getattr(value, "dtype", None)))
    if not is_storable(rows.dtype):
        dtype = f"{name!r} has dtype {rows.dtype}"
        next_step = "Convert it, for example to float32"
        raise InvalidOption(cannot(act, dtype, "a numeric dtype that PyTorch supports, or text", next_step))
    return rows


def _check_shapes(act: str, name: str, values: Sequence[Any]) -> None:
    if shapes := unequal_shapes(values):
        found = f"the samples of {name!r} have different shapes, such as {shapes}"
        raise InvalidOption(cannot(act, found, "samples of one shape", PAD)) from None


def _text_column(act: str, name: str, rows: npt.NDArray[Any], categories: tuple[str, ...]) -> TextColumn:
    values = rows.tolist()
    if rows.ndim == 1 and all(isinstance(value, str) for value in values):
        return TextColumn(tuple(map(encode_text, values)), "text", categories)
    if rows.ndim == 1 and all(isinstance(value, bytes) for value in values):
        return TextColumn(tuple(values), "bytes")
    _check_shapes(act, name, values)
    expected, next_step = "an array of numbers, or one string for each sample", "Convert the values to numbers or text"
    if rows.ndim != 1:
        shape = f"{name!r} contains text or objects of shape {list(rows.shape)}"
        raise InvalidOption(cannot(act, shape, expected, next_step))
    other = next((value for value in values if not isinstance(value, str)), None)
    found = f"{name!r} contains Python objects, such as {kind_of(other)}"
    raise InvalidOption(cannot(act, found, expected, next_step))


class ArraySampleMaker(MemorySampleMaker):
    """Takes samples from arrays, one array for each field and split.

    Args:
        columns: the arrays of each field, split by split; `X` first, without labels.
        chosen: numbers of the samples to use, counted across all splits; None for all.
        layout: order of the dimensions of `X`; all images are stored as `nhwc`.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Rows | TextColumn]],
        chosen: Indices | None = None,
        *,
        layout: Layout = "array",
    ) -> None:
        self._columns = columns
        self._chosen = chosen
        self._layout = layout
        self._ends = np.cumsum([len(array) for array in columns[SAMPLES]])
        self.fields = tuple(
            _field(name, arrays[0], layout if name == SAMPLES else "array") for name, arrays in columns.items()
        )

    def path(self, number: int) -> str:
        """Return the sample's number as text."""
        return f"sample {number}"

    def lengths(self, numbers: Indices) -> Indices | None:
        """Return the size of each sample's text in bytes; None if samples are array rows."""
        if not self.fields[0].is_ragged:
            return None
        texts = self._column(self.fields[0], numbers)
        return np.fromiter(map(len, texts), np.int64, len(texts))

    def columns(self, numbers: Indices, on_bad: BadHandler, on_wait: Callable[[], None]) -> Sequence[ColumnValues]:
        """Return each field of the given samples; copy consecutive rows only if they need conversion."""
        return tuple(self._column(made, numbers) for made in self.fields)

    def subset(self, numbers: Indices) -> ArraySampleMaker:
        """Return a maker of only the given samples; no rows are copied until samples are written or pickled."""
        chosen = numbers if self._chosen is None else self._chosen[numbers]
        return ArraySampleMaker(self._columns, chosen, layout=self._layout)

    def __reduce__(self) -> tuple[Any, ...]:
        every = np.arange(self._ends[-1] if self._chosen is None else len(self._chosen))
        columns = {}
        for made in self.fields:
            column, content = self._column(made, every), made.content
            columns[made.name] = [TextColumn(tuple(column), content) if made.is_ragged else column]  # type: ignore[arg-type]
        return partial(ArraySampleMaker, layout="array" if self._layout == "array" else "nhwc"), (columns,)

    def _column(self, made: SampleField, numbers: Indices) -> Any:
        rows = numbers if self._chosen is None else self._chosen[numbers]
        owners = np.searchsorted(self._ends, rows, "right")
        pieces: list[Any] = []
        # Handle one array at a time, because each split has a separate array.
        for owner in dict.fromkeys(owners.tolist()):
            array = self._columns[made.name][owner]
            mine = rows[owners == owner] - (int(self._ends[owner - 1]) if owner else 0)
            if isinstance(array, TextColumn):
                pieces += [array.values[row] for row in mine.tolist()]
            else:
                block = _take(array, mine)
                if made.name == SAMPLES and self._layout in ("nchw", "nhw"):
                    block = np.moveaxis(block, 1, -1) if self._layout == "nchw" else block[..., None]
                pieces.append(np.ascontiguousarray(block, made.dtype))
        if made.is_ragged:
            return pieces
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def check_alike(act: str, name: str, first: Rows | TextColumn | None, other: Rows | TextColumn | None) -> None:
    """Raise `InvalidOption` if a field differs in content, shape or dtype between two splits, or one split lacks it."""
    if first is None or other is None:
        some = f"the field {name!r} exists only in some of the splits"
        raise InvalidOption(cannot(act, some, "the same fields in all splits", "Add it to all splits, or remove it"))
    one, two = (
        given.content if isinstance(given, TextColumn) else f"{given.dtype} {list(given.shape[1:])}"
        for given in (first, other)
    )
    if one != two:
        found = f"the field {name!r} is {one} in one split but {two} in another"
        raise InvalidOption(cannot(act, found, "the same type, shape and dtype in all splits", "Convert one of them"))


def check_lengths(act: str, split: str, arrays: Mapping[str, Rows | TextColumn]) -> None:
    """Raise `InvalidOption` if an array is a single value or differs in length, `BadSource` if arrays are empty."""
    counts = {name: len(one) if isinstance(one, TextColumn) or one.shape else None for name, one in arrays.items()}
    for name, count in counts.items():
        if count is None:
            single = f"{name!r} of the split {split!r} is a single value"
            expected = "an array with one value for each sample"
            raise InvalidOption(cannot(act, single, expected, "Pass an array or a list"))
        if count != counts[SAMPLES]:
            found = f"{name!r} of the split {split!r} has {count} samples but {SAMPLES!r} has {counts[SAMPLES]}"
            raise InvalidOption(cannot(act, found, "the same number of samples", "Check the arrays of this split"))
    if not counts[SAMPLES]:
        empty = f"the split {split!r} has no samples"
        raise BadSource(cannot(act, empty, "at least one sample", "Remove the split, or add samples to it"))


def digest_of_column(column: Rows | TextColumn) -> list[Any]:
    """Return JSON-serializable values that identify an array: its content type or dtype, its shape and CRC32s."""
    if isinstance(column, TextColumn):
        lengths = np.fromiter(map(len, column.values), np.int64, len(column))
        categories = [list(column.categories)] if column.categories else []
        return [column.content, len(column), crc32(b"".join(column.values)), crc32(lengths.data), *categories]
    crc, step = 0, _rows_at_once(column)
    for start in range(0, len(column), step):
        crc = crc32(np.ascontiguousarray(column[start : start + step]).reshape(-1).view(np.uint8).data, crc)
    return [column.dtype.str, list(column.shape), crc]


def _rows_at_once(rows: Rows) -> int:
    row_bytes = int(np.prod(rows.shape[1:], dtype=np.int64)) * int(rows.dtype.itemsize)
    return max(1, _STEP_BYTES // max(1, row_bytes))


def _take(array: Rows, rows: Indices) -> npt.NDArray[Any]:
    """Return rows of an array; from an array in a file, read blocks that may include unneeded rows."""
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return np.asarray(array[int(rows[0]) : int(rows[-1]) + 1])
    if isinstance(array, np.ndarray):
        return array[rows]
    order = np.argsort(rows)
    ordered, step = rows[order], _rows_at_once(array)
    found = np.empty((len(rows), *array.shape[1:]), array.dtype)
    at = 0
    while at < len(rows):
        first = int(ordered[at])
        stop = int(np.searchsorted(ordered, first + step))
        piece = np.asarray(array[first : int(ordered[stop - 1]) + 1])
        found[order[at:stop]] = piece[ordered[at:stop] - first]
        at = stop
    return found


def layout_of(act: str, rows: Rows | TextColumn, layout: Layout) -> Layout:
    """Return `layout`; for `"auto"`, the layout of `uint8` images with 1 or 3 channels, or else `array`.

    Arrays without a dimension for the channels count as images from a height and width of 8.

    Raises:
        InvalidOption: if the array does not have the given layout.
    """
    shape = () if isinstance(rows, TextColumn) else tuple(map(int, rows.shape[1:]))
    found: list[Layout] = []
    if not isinstance(rows, TextColumn) and len(shape) == 3 and rows.dtype == np.uint8:
        found += ["nhwc"] if shape[2] in IMAGE_CHANNELS else []
        found += ["nchw"] if shape[0] in IMAGE_CHANNELS else []
    if not isinstance(rows, TextColumn) and len(shape) == 2 and rows.dtype == np.uint8:
        found += ["nhw"] if layout == "nhw" or min(shape) >= _LEAST_SIDE else []
    if layout == "auto":
        return found[0] if found else "array"
    if layout != "array" and layout not in found:
        kind = "text" if isinstance(rows, TextColumn) else f"{rows.dtype} [{', '.join(['N', *map(str, shape)])}]"
        channels = "" if layout == "nhw" else " with 1 or 3 channels"
        fitting = found[0] if found else "array"
        expected = f"uint8 images {LAYOUTS[layout]}{channels}"
        raise InvalidOption(cannot(act, f"the samples are {kind}", expected, ("Use ", option("layout", fitting))))
    return layout


def _field(name: str, array: Rows | TextColumn, layout: Layout) -> SampleField:
    if isinstance(array, TextColumn):
        return SampleField(name, array.content, is_ragged=True)
    shape = tuple(map(int, array.shape[1:]))
    if layout == "nchw":
        shape = (*shape[1:], shape[0])
    elif layout == "nhw":
        shape = (*shape, 1)
    dtype = np.dtype(array.dtype).newbyteorder("<").str
    return SampleField(name, "array" if layout == "array" else "image", shape=shape, dtype=dtype)

"""Arrays as the samples of a pack: taken chunk by chunk, so that one that lies in a file is never in memory whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, InvalidOption, cannot, kind_of
from colabkit.packs.format.layout import SAMPLES, Field
from colabkit.packs.packing.pack_plan import (
    BadHandler,
    Column,
    MemorySampleMaker,
    SampleField,
    SampleNumbers,
    is_storable,
)

IMAGE_CHANNELS = (1, 3)
_STEP_BYTES = 8 << 20

Blobs: TypeAlias = tuple[bytes, ...]
"""Text or bytes, one for each sample."""
Rows: TypeAlias = Any
"""An array whose rows are samples: NumPy's, or one that gives NumPy arrays for slices, as `h5py.Dataset`."""


def is_array(value: object) -> bool:
    """Return whether a value is an array of NumPy, torch, HDF5 or the like."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def rows_of(act: str, name: str, value: Any) -> tuple[Rows | Blobs, str]:
    """Return an array with what it holds: `array`, `text` or `bytes`.

    Arrays of NumPy, memory maps too, and tensors on the CPU are not copied; what gives slices is not read yet.

    Raises:
        InvalidOption: if it is no array of numbers or text.
    """
    if hasattr(value, "numpy") and hasattr(value, "detach"):
        value = value.detach().cpu()
    if np.ma.is_masked(value):
        found = f"{name} is an array of which some values are masked"
        raise InvalidOption(cannot(act, found, "a value for each", "Fill them, as by filled(0)"))
    if isinstance(value, list | tuple) and value and all(isinstance(one, str | bytes) for one in value):
        value = np.array(value, object)  # whose own text and bytes would lose zeros at the end
    is_lazy = is_array(value) and not hasattr(value, "numpy") and not hasattr(value, "iloc")
    try:
        kind = value.dtype.kind if is_lazy else ""
        rows = value if kind in tuple("biufc") and not isinstance(value, np.ndarray) else np.asarray(value)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        found = f"{name} is {kind_of(value)} that is no array ({' '.join(str(error).split()):.80})"
        raise InvalidOption(cannot(act, found, "numbers of one shape, or text", "Convert it")) from error
    if rows.dtype.kind in "UST" or rows.dtype.kind == "O":
        return _blobs_of(act, name, rows)
    if not is_storable(rows.dtype):
        raise InvalidOption(cannot(act, f"{name} has the dtype {rows.dtype}", "numbers or text", "Convert it"))
    return rows, "array"


def _blobs_of(act: str, name: str, rows: npt.NDArray[Any]) -> tuple[Blobs, str]:
    values = rows.tolist()
    if rows.ndim == 1 and all(isinstance(value, str) for value in values):
        return tuple(value.encode("utf-8", "surrogateescape") for value in values), "text"
    if rows.ndim == 1 and all(isinstance(value, bytes) for value in values):
        return tuple(values), "bytes"
    told = f"{name} holds Python objects" if rows.ndim == 1 else f"{name} holds text of shape {list(rows.shape)}"
    odd = next((value for value in values if not isinstance(value, str)), None) if rows.ndim == 1 else None
    told += f", {kind_of(odd)} among them" if odd is not None else ""
    raise InvalidOption(cannot(act, told, "numbers of one shape, or one text for each sample", "Convert it"))


class ArraySampleMaker(MemorySampleMaker):
    """Takes samples from arrays, one array a field.

    Args:
        parts: for each split its arrays by field, `X` first, but without labels; all alike.
        contents: of the fields: `array`, `text` or `bytes`.
        chosen: numbers of the samples that there are, counted through all parts; None for all.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, Rows | Blobs]],
        contents: Mapping[str, str],
        chosen: SampleNumbers | None = None,
    ) -> None:
        self._parts = list(parts)
        self._contents = dict(contents)
        self._chosen = chosen
        self._ends = np.cumsum([len(part[SAMPLES]) for part in parts])
        self.fields = tuple(_made(name, array, contents[name]) for name, array in parts[0].items())

    def path(self, number: int) -> str:
        """Return the sample's number as text."""
        return f"sample {number}"

    def lengths(self, numbers: SampleNumbers) -> SampleNumbers | None:
        """Return the bytes of each sample's text; None if samples are rows."""
        if not self.fields[0].field.is_ragged:
            return None
        blobs = self._column(self.fields[0], numbers)
        return np.fromiter(map(len, blobs), np.int64, len(blobs))

    def columns(self, numbers: SampleNumbers, on_bad: BadHandler) -> Sequence[Column]:
        """Return each field of many samples, without a copy where rows lie side by side."""
        return tuple(self._column(made, numbers) for made in self.fields)

    def subset(self, numbers: SampleNumbers) -> ArraySampleMaker:
        """Return these samples only; nothing is copied before it is written or pickled."""
        chosen = numbers if self._chosen is None else self._chosen[numbers]
        return ArraySampleMaker(self._parts, self._contents, chosen)

    def __reduce__(self) -> tuple[Any, ...]:
        count = int(self._ends[-1]) if self._chosen is None else len(self._chosen)
        columns = (self._column(made, np.arange(count)) for made in self.fields)
        plain = (tuple(one) if isinstance(one, list) else one for one in columns)
        part = dict(zip((made.field.name for made in self.fields), plain, strict=True))
        return ArraySampleMaker, ([part], self._contents)

    def _column(self, made: SampleField, numbers: SampleNumbers) -> Any:
        rows = numbers if self._chosen is None else self._chosen[numbers]
        owners = np.searchsorted(self._ends, rows, "right")
        pieces: list[Any] = []
        for owner in dict.fromkeys(owners.tolist()):  # samples of one split lie in one part
            array = self._parts[owner][made.field.name]
            mine = rows[owners == owner] - (int(self._ends[owner - 1]) if owner else 0)
            if isinstance(array, tuple):
                pieces.append([array[row] for row in mine.tolist()])
            else:
                pieces.append(np.ascontiguousarray(_taken(array, mine), made.dtype))
        if made.field.is_ragged:
            return [blob for piece in pieces for blob in piece]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def check_alike(
    act: str, name: str, first: tuple[Rows | Blobs, str] | None, other: tuple[Rows | Blobs, str] | None
) -> None:
    """Refuse a field that is not of the same kind in two splits, each as `rows_of` gives it; raises `InvalidOption`."""
    if first is None or other is None:
        found = f"the field {name!r} in some splits only"
        raise InvalidOption(cannot(act, found, "the same fields in all", "Leave it out, or give it for all"))
    given = first, other
    one, two = (kind if isinstance(rows, tuple) else f"{rows.dtype} {list(rows.shape[1:])}" for rows, kind in given)
    if one != two:
        found = f"{name!r} of {one} in one split and of {two} in another"
        raise InvalidOption(cannot(act, found, "the same kind, shape and dtype", "Convert one of them"))


def check_lengths(act: str, split: str, arrays: Mapping[str, Rows | Blobs]) -> None:
    """Refuse arrays that have not as many rows, or none; raises `InvalidOption` or `BadSource`."""
    counts = {name: None if not isinstance(one, tuple) and not one.shape else len(one) for name, one in arrays.items()}
    for name, count in counts.items():
        if count is None or count != counts[SAMPLES]:
            told = f"{name} of {split!r} has {'no' if count is None else count} samples and X {counts[SAMPLES] or 0}"
            raise InvalidOption(cannot(act, told, "as many of each", "Check the arrays"))
    if not counts[SAMPLES]:
        raise BadSource(cannot(act, f"no samples in {split!r}", "at least one", "Leave the split out"))


def digest_of_rows(rows: Rows | Blobs, content: str) -> list[Any]:
    """Return plain values that other arrays do not have: what they hold or their dtype, shape and CRC32s."""
    if isinstance(rows, tuple):
        return [content, len(rows), crc32(b"".join(rows)), crc32(np.fromiter(map(len, rows), np.int64, len(rows)).data)]
    crc = 0
    for piece in _pieces(rows):
        crc = crc32(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data, crc)
    return [rows.dtype.str, list(rows.shape), crc]


def _pieces(rows: Rows) -> Iterator[npt.NDArray[Any]]:
    step = _step(rows)
    for start in range(0, len(rows), step):
        yield np.asarray(rows[start : start + step])


def _step(rows: Rows) -> int:
    """Return how many rows are read at once."""
    row_bytes = int(np.prod(rows.shape[1:], dtype=np.int64)) * int(rows.dtype.itemsize)
    return max(1, _STEP_BYTES // max(1, row_bytes))


def _taken(array: Rows, rows: SampleNumbers) -> npt.NDArray[Any]:
    """Return rows of an array, side by side or not; of one in a file, what lies between is read too, step by step."""
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return np.asarray(array[int(rows[0]) : int(rows[-1]) + 1])
    if isinstance(array, np.ndarray):
        return array[rows]
    order = np.argsort(rows)
    ordered, step = rows[order], _step(array)
    found = np.empty((len(rows), *array.shape[1:]), array.dtype)
    at = 0
    while at < len(rows):
        first = int(ordered[at])
        stop = int(np.searchsorted(ordered, first + step))
        piece = np.asarray(array[first : int(ordered[stop - 1]) + 1])
        found[order[at:stop]] = piece[ordered[at:stop] - first]
        at = stop
    return found


def _made(name: str, array: Rows | Blobs, content: str) -> SampleField:
    if isinstance(array, tuple):
        return SampleField(Field(name, content, is_ragged=True))  # type: ignore[arg-type]
    shape = tuple(map(int, array.shape[1:]))
    is_image = name == SAMPLES and array.dtype == np.uint8 and len(shape) == 3 and shape[2] in IMAGE_CHANNELS
    dtype = np.dtype(array.dtype).newbyteorder("<").str
    return SampleField(Field(name, "image" if is_image else "array"), shape, dtype)

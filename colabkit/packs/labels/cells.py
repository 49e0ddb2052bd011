"""What the cells of a table, or the values that a function returns, mean as labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, cannot, format_bytes, format_things, kind_of
from colabkit.packs.labels.splitting import Kind
from colabkit.storage import Item

_PLAIN = frozenset({bool, int, float, str, list, tuple, set, frozenset, type(None)})
_LISTS = frozenset({list, tuple, set, frozenset})
_ORDERED = frozenset({list, tuple})
_KINDS = "text, whole numbers, floats, bools or lists"
_MOST_CLASSES = 100_000
_MOST_TABLE_BYTES = 4 << 30  # a table of labels is kept in memory
_CONVERT = "Convert them, or use another column"


@dataclass(frozen=True, slots=True)
class Meaning:
    """Labels.

    Attributes:
        kind: what they are.
        classes: names of the classes, or of the K labels or targets; empty for a single target.
        values: `int64 [n]` classes, `uint8 [n, K]` labels, `float32 [n]` or `[n, K]` targets, None for no labels.
    """

    kind: Kind
    classes: tuple[str, ...]
    values: npt.NDArray[Any] | None


def meaning_of(act: str, what: str, cells: Sequence[Any], items: Sequence[Item]) -> Meaning:
    """Return what the cells of one column mean: their types decide, not what they hold.

    - Text is classes, sorted. Bools are the classes False and True. Whole numbers are classes: from 0
      to 99,999 they are kept, and there are as many classes as the largest asks for; others are numbered in order.
    - Floats are targets of a regression, also where all or some are whole. Lists of floats of one length are several
      targets.
    - Lists and sets of text or whole numbers are the labels that a sample has, among all that occur, sorted. But lists
      of one length that hold only 0 and 1, or bools, say for each label whether the sample has it.

    Args:
        act: verb and object for messages.
        what: the cells, for messages.
        cells: one a sample; numbers and arrays of NumPy and torch count as plain ones.
        items: the samples, for messages.

    Raises:
        BadSource: if a cell is empty or NaN, or the cells are of several kinds or of another.
    """
    cells = _plain_cells(cells)
    _check_filled(act, what, cells, items)
    kinds = set(map(type, cells))
    if kinds == {str}:
        return as_classes(cells, sorted(set(cells)))
    if kinds == {bool}:
        return Meaning("class", ("False", "True"), np.array(cells, np.int64))
    if kinds == {int}:
        least, most = min(cells), max(cells)
        if least >= 0 and most < _MOST_CLASSES:  # parts of a data set, packed apart, agree on what 3 means
            return Meaning("class", tuple(map(str, range(most + 1))), np.array(cells, np.int64))
        return as_classes(cells, sorted(set(cells)))
    if kinds in ({float}, {float, int}):  # JSON and text write 1 for 1.0
        return Meaning("regression", (), _targets(act, what, cells, items))
    if kinds <= _LISTS:
        return _meaning_of_lists(act, what, cells, items, kinds <= _ORDERED)
    odd = next((row for row, cell in enumerate(cells) if type(cell) not in _PLAIN), None)
    if odd is not None:
        raise BadSource(cannot(act, f"{what} holds {_named(cells, odd, items)}", _KINDS, _CONVERT))
    odd = next(row for row, cell in enumerate(cells) if type(cell) is not type(cells[0]))
    found = f"{what} holds {_named(cells, 0, items)} and {_named(cells, odd, items)}"
    raise BadSource(cannot(act, found, "one kind of values", _CONVERT))


def meaning_of_several(
    act: str, names: Sequence[str], columns: Sequence[Sequence[Any]], items: Sequence[Item]
) -> Meaning:
    """Return what several columns mean: labels if all hold 0 and 1 or bools, targets if there are floats.

    Args:
        act: verb and object for messages.
        names: of the columns, which become those of the labels or targets.
        columns: the cells of each.
        items: the samples, for messages.

    Raises:
        BadSource: if a cell is empty or no number, or the columns hold other whole numbers only.
    """
    has_floats, is_binary = False, True
    found: list[npt.NDArray[Any]] = []
    for name, given in zip(names, columns, strict=True):
        what = f"the column {name!r}"
        cells = _plain_cells(given)
        _check_filled(act, what, cells, items)
        kinds = set(map(type, cells))
        if not kinds <= {bool, int, float}:
            row = next(row for row, cell in enumerate(cells) if type(cell) not in (bool, int, float))
            told = f"{what} holds {_named(cells, row, items)}"
            raise BadSource(cannot(act, told, "numbers or bools in several columns", "Use one column, or convert it"))
        has_floats |= float in kinds
        is_binary &= float not in kinds and set(cells) <= {0, 1}
        found.append(np.array(cells, np.uint8) if is_binary else _targets(act, what, cells, items))
    if is_binary:
        return Meaning("multilabel", tuple(names), np.stack(found, axis=1))
    if has_floats:
        return Meaning("regression", tuple(names), np.stack(found, axis=1).astype(np.float32))
    needed = "0 and 1 for labels, or floats for targets"
    raise BadSource(cannot(act, f"the columns {', '.join(names)} hold other whole numbers", needed, "Convert them"))


def as_classes(cells: Sequence[Any], classes: Sequence[Any]) -> Meaning:
    """Return cells as numbers of classes that are given in their order."""
    number = {value: index for index, value in enumerate(classes)}
    values = np.fromiter(map(number.__getitem__, cells), np.int64, len(cells))
    return Meaning("class", tuple(map(str, classes)), values)


def _meaning_of_lists(act: str, what: str, cells: Sequence[Any], items: Sequence[Item], is_ordered: bool) -> Meaning:
    if not set().union(*(map(type, cell) for cell in cells)) <= {bool, int, float, str}:
        cells = [_plain_cells(tuple(cell)) for cell in cells]
    for row, cell in enumerate(cells):
        if any(value is None or value != value for value in cell):  # noqa: PLR0124 - NaN alone is not itself
            raise BadSource(
                cannot(act, f"{what} holds a list with an empty value for {items[row].path!r}", _KINDS, _CONVERT)
            )
    kinds = set().union(*(map(type, cell) for cell in cells))
    lengths = set(map(len, cells))
    if not kinds:
        raise BadSource(cannot(act, f"{what} holds empty lists only", "some labels", "Use another column"))
    if kinds == {float} and is_ordered:
        if len(lengths) > 1:
            found = f"{what} holds lists of {min(lengths)} to {max(lengths)} floats"
            raise BadSource(cannot(act, found, "as many targets for each sample", _CONVERT))
        return Meaning("regression", tuple(map(str, range(lengths.pop()))), _targets(act, what, cells, items))
    if is_ordered and len(lengths) == 1 and kinds <= {bool, int} and set().union(*cells) <= {0, 1}:
        return Meaning("multilabel", tuple(map(str, range(lengths.pop()))), np.array(cells, np.uint8))
    if kinds not in ({str}, {int}):
        found = f"{what} holds lists of {', '.join(sorted(kind.__name__ for kind in kinds))}"
        raise BadSource(cannot(act, found, "lists of text, or of whole numbers", _CONVERT))
    names = sorted(set().union(*cells))
    if (size := len(cells) * len(names)) > _MOST_TABLE_BYTES:
        found = f"{what} holds {len(names)} labels, {format_bytes(size)} for {len(cells)} samples"
        raise BadSource(cannot(act, found, f"at most {format_bytes(_MOST_TABLE_BYTES)}", "Leave out the rare ones"))
    number = {name: index for index, name in enumerate(names)}
    counts = np.fromiter(map(len, cells), np.int64, len(cells))
    held = np.fromiter((number[name] for cell in cells for name in cell), np.int64, int(counts.sum()))
    values = np.zeros((len(cells), len(names)), np.uint8)
    values[np.repeat(np.arange(len(cells)), counts), held] = 1
    return Meaning("multilabel", tuple(map(str, names)), values)


def _targets(act: str, what: str, cells: Sequence[Any], items: Sequence[Item]) -> npt.NDArray[Any]:
    """Return floats, or lists of one length of them, as `float32`; refuse what that cannot hold."""
    with np.errstate(over="ignore"):
        try:
            values = np.array(cells, np.float64).astype(np.float32)
        except OverflowError:  # a whole number beyond float64
            values = np.array([_float(cell) for cell in cells], np.float32)
    beyond = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if beyond.any():
        row = int(beyond.argmax())
        found = f"{what} holds {cells[row]!s:.60} for {items[row].path!r}"
        raise BadSource(cannot(act, found, "what float32 can hold", "Scale the targets, or leave this sample out"))
    return values


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_filled(act: str, what: str, cells: Sequence[Any], items: Sequence[Item]) -> None:
    """Raise `BadSource` if cells are None or NaN."""
    if type(None) not in (kinds := set(map(type, cells))) and float not in kinds:
        return
    empty = [row for row, cell in enumerate(cells) if cell is None or (type(cell) is float and math.isnan(cell))]
    if empty:
        count = f"{len(empty)} of {format_things(len(cells), 'sample')}"
        found = f"{what} is empty for {items[empty[0]].path!r}, and for {count} in all"
        raise BadSource(cannot(act, found, "a value for each", "Fill them, or leave these samples out"))


def _plain_cells(cells: Sequence[Any]) -> Sequence[Any]:
    """Return cells as plain Python values, where they are numbers, text or arrays of another type."""
    return cells if set(map(type, cells)) <= _PLAIN else list(map(_plain, cells))


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return value.tolist() if hasattr(value, "tolist") else value  # arrays and their scalars


def _named(cells: Sequence[Any], row: int, items: Sequence[Item]) -> str:
    names = {str: "text", bool: "a bool", int: "a whole number", float: "a float"}
    return f"{names.get(type(cells[row])) or kind_of(cells[row])} for {items[row].path!r}"

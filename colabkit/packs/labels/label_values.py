"""Interprets labels, with the same rules for table cells, function results and arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    Text,
    cannot,
    format_bytes,
    format_things,
    kind_of,
    omit,
    option,
)
from colabkit.packs.labels.label_texts import SEVERAL, hold_several, split_advice
from colabkit.storage import Item

LabelKind: TypeAlias = Literal["class", "multilabel", "regression", "none"]
"""Kind of a sample's labels: a class number, 0 or 1 for each of several labels, regression targets, or none."""

Task: TypeAlias = Literal["auto", "classes", "multilabel", "regression"]
"""Task of the labels; `auto` infers it from their type."""

TASKS: Mapping[Task, LabelKind] = {"classes": "class", "multilabel": "multilabel", "regression": "regression"}
"""Kind of the labels for each task except `auto`."""

_PLAIN = frozenset({bool, int, float, str, list, tuple, set, frozenset, type(None)})
_LISTS = frozenset({list, tuple, set, frozenset})
_KINDS = "text, whole numbers, floats, bools or lists"
_CONVERT: Text = ("Convert the values, or choose others with ", option("labels"))
_TASK: Text = ("Choose other labels with ", option("labels"), ", or change ", option("task"))
_MOST_CLASSES = 100_000
_LARGEST_CLASS = np.iinfo(np.int64).max
# Maximum size of the label table, which is held in memory.
_MOST_TABLE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LabelValues:
    """Labels of all samples.

    Attributes:
        kind: kind of the labels.
        classes: names of the classes, or of the K labels or targets; empty if there are none.
        values: `int64 [n]` class numbers, `uint8 [n, K]` labels, or `float32 [n]` or `[n, K]` targets; None for no
            labels.
        basis: description of the type of the values, from which the kind was inferred.
    """

    kind: LabelKind
    classes: tuple[str, ...]
    values: npt.NDArray[Any] | None
    basis: str = ""

    def check_options(self, act: str, task: Task, *, renumber: bool) -> None:
        """Raise `InvalidOption` if `task` or `renumber` is requested, but does not apply to these labels."""
        kind = {
            "none": "the samples have no labels",
            "regression": "the labels are regression targets",
            "multilabel": "each sample has several labels",
        }.get(self.kind)
        if self.kind == "none" and task != "auto":
            found = (option("task", task), f" is given, but {kind}")
            next_step = ("Name the labels with ", option("labels"), ", or ", omit("task"))
            raise InvalidOption(cannot(act, found, "", next_step))
        if renumber and kind is not None:
            found = (option("renumber", True), f" is given, but {kind}")
            raise InvalidOption(cannot(act, found, "class labels", omit("renumber")))

    def inferred(self, labels: str, task: Task, *, renumber: bool = False) -> dict[str, str]:
        """Return descriptions of the values inferred from the labels, by the option that overrides each.

        Args:
            labels: the inferred origin of the labels; empty if the user named it.
            task: the requested task.
            renumber: whether numbering the classes in order was requested.
        """
        found = {"labels": labels} if labels else {}
        if renumber and self.basis in ("", "bools", "text", SEVERAL):
            found["renumber"] = "classes with names are always numbered in order"
        if self.values is None:
            return found
        count, columns = format_things(len(self.classes), "class"), self.values.shape[1:]
        numbered = f"{count}" if self.classes else "classes"
        meaning = {
            "class": numbered,
            "multilabel": f"{columns[0] if columns else 0} yes-or-no labels of each sample",
            "regression": f"{format_things(columns[0], 'regression target')}" if columns else "a regression target",
        }.get(self.kind, "")
        if task == "auto" and self.basis:
            other = ", not regression" if self.kind == "class" and self.basis == "whole numbers" else ""
            found["task"] = f"{meaning}{other}, since labels are {self.basis}"
        if self.kind == "class" and len(self.values):
            used = np.unique(self.values)
            if len(used) == 1:
                name = self.classes[used[0]] if self.classes else str(used[0])
                alone = f"all samples have the class {name!r}"
                found["labels"] = f"{labels}; {alone}" if labels else alone
            elif not self.classes:
                found["renumber"] = f"the numbers {used[0]} to {used[-1]} are kept, but losses expect classes from 0"
            elif len(used) < len(self.classes):
                found["renumber"] = f"only {len(used)} of the class numbers 0 to {len(self.classes) - 1} occur"
        return found


def infer_array(values: npt.NDArray[Any], task: Task = "auto", *, renumber: bool = False) -> LabelValues | None:
    """Interpret an array `[n]` or `[n, K]` as labels; None if it cannot hold labels for this task.

    By default, integers and bools `[n]` are classes, `[n, K]` of 0 and 1 is multi-label, and floats are regression
    targets.

    Raises:
        ValueError: if a label is NaN or cannot be stored; the message contains only the reason.
    """
    stored = convert_labels(values, task)
    if stored is None:
        return None
    kind = kind_of_stored(stored.dtype, stored.ndim)
    names = tuple(map(str, range(stored.shape[1]))) if kind == "multilabel" else ()
    basis = {"b": "bools", "f": "floats"}.get(values.dtype.kind, "0 and 1" if names else "whole numbers")
    if kind == "class" and renumber and values.dtype.kind != "b":
        used, stored = np.unique(stored, return_inverse=True)
        return LabelValues(kind, tuple(map(str, used.tolist())), stored.reshape(-1).astype("<i8"), basis)
    whole = stored if values.dtype.kind == "f" else values
    return LabelValues(kind, name_classes(whole) if kind == "class" else names, stored, basis)


def convert_labels(values: npt.NDArray[Any], task: Task = "auto") -> npt.NDArray[Any] | None:
    """Convert labels `[n]` or `[n, K]` to the stored dtype, `int64`, `uint8` or `float32`; None if they are unsuitable.

    Raises:
        ValueError: if a label is NaN or cannot be stored; the message contains only the reason.
    """
    kind = values.dtype.kind
    if kind == "f" and np.isnan(values).any():
        raise ValueError("a label is NaN")
    if task == "regression" and kind in "biu":
        values, kind = values.astype(np.float64), "f"
    elif task not in ("auto", "regression") and kind == "f" and (values == np.trunc(values)).all():
        # The largest floats do not fit in an integer.
        values, kind = (values.astype("<i8"), "i") if (np.abs(values) < _LARGEST_CLASS).all() else (values, kind)
    if (task == "multilabel" and values.ndim != 2) or (task in ("classes", "multilabel") and kind == "f"):
        return None
    if kind == "f" and values.ndim <= 2:
        with np.errstate(over="ignore"):
            stored = values.astype("<f4")
        _check_stored(values, np.isfinite(stored), stored.dtype)
        return stored
    if kind not in "biu":
        return None
    # Keras stores class labels as [n, 1].
    if values.shape[1:] == (1,) and task != "multilabel":
        values = values.reshape(-1)
    if values.ndim == 1:
        if kind == "u":
            _check_stored(values, values <= _LARGEST_CLASS, np.dtype(np.int64))
        return values.astype("<i8")
    is_binary = values.ndim == 2 and task != "classes" and ((values == 0) | (values == 1)).all()
    return values.astype("|u1") if is_binary else None


def kind_of_stored(dtype: npt.DTypeLike, ndim: int) -> LabelKind:
    """Return the label kind implied by the stored dtype and number of dimensions."""
    return "regression" if np.dtype(dtype).kind == "f" else "multilabel" if ndim > 1 else "class"


def name_classes(values: npt.NDArray[Any]) -> tuple[str, ...]:
    """Return the names of classes that are bools or integers from 0 to 99,999; empty for other numbers."""
    if values.dtype.kind == "b":
        return "False", "True"
    if not values.size or values.min() < 0 or values.max() >= _MOST_CLASSES:
        return ()
    return tuple(map(str, range(int(values.max()) + 1)))


def number_classes(cells: Sequence[Any], categories: Sequence[str] = (), *, renumber: bool = False) -> LabelValues:
    """Number the distinct values of the cells in sorted order, and return the numbers as class labels.

    Categories are numbered in their order instead, also those that do not occur, unless `renumber`.
    """
    used = set(cells)
    names = [name for name in categories if not renumber or name in used] if categories else sorted(used)
    number = {value: index for index, value in enumerate(names)}
    values = np.fromiter(map(number.__getitem__, cells), np.int64, len(cells))
    basis = "categories" if categories else "whole numbers" if all(type(cell) is int for cell in number) else "text"
    if basis == "text" and hold_several([*number]):
        basis = SEVERAL
    return LabelValues("class", tuple(map(str, number)), values, basis)


def _check_stored(values: npt.NDArray[Any], is_stored: npt.NDArray[np.bool_], dtype: np.dtype[Any]) -> None:
    if not is_stored.all():
        label = values[np.unravel_index(int(is_stored.argmin()), values.shape)]
        raise ValueError(f"the label {label} is out of range for {dtype}")


def infer_cells(
    act: str,
    what: Text,
    cells: Sequence[Any],
    items: Sequence[Item],
    task: Task = "auto",
    categories: Sequence[str] = (),
    *,
    renumber: bool = False,
) -> LabelValues:
    """Interpret the cells of one column as labels, by the task or else by the types of the cells.

    - Text values are classes, in sorted order, or in the order of `categories`, which contain all values; unused
      categories are classes too, unless `renumber`. Bools are the classes False and True. Integers are classes: from 0
      to 99,999, they keep their value, and the largest value determines the number of classes; otherwise, and if
      `renumber`, they are numbered in order.
    - Floats are regression targets, even if some or all are whole numbers. Lists of floats of one length are several
      targets.
    - Lists and sets of text or integers are multi-label: each contains the labels of its sample, and all distinct
      labels are numbered in sorted order. Lists of one length that hold only 0 and 1, or bools, state for each label
      whether the sample has it.

    For the task `classes`, whole floats are integers; for `regression`, all numbers are targets; for `multilabel`, 0.0
    and 1.0 in lists are 0 and 1. NumPy and PyTorch numbers and arrays are treated like plain Python values. `act`,
    `what` and `items` are for messages.

    Raises:
        BadSource: if a cell is empty or NaN, if cells have different or unsupported types, or if they do not fit the
            task or the stored dtype.
    """
    column = _LabelCells(act, what, cells, items)
    found = _infer_column(column, task, categories, renumber=renumber)
    if task != "auto" and found.kind != TASKS[task]:
        expected = {
            "classes": "text, whole numbers or bools",
            "multilabel": "lists of labels, or of 0 and 1",
            "regression": "numbers, or lists of numbers",
        }[task]
        next_step: Text = _TASK
        if task == "multilabel" and column.kinds == {str}:
            next_step = split_advice(what, column.cells)
        raise BadSource(cannot(act, (what, f" contains {column.named(0)}"), f"{expected} for this task", next_step))
    return found


def infer_named(
    act: str, what: Text, cells: Sequence[Any], items: Sequence[Item], names: Sequence[str], *, renumber: bool
) -> LabelValues:
    """Interpret cells that hold the number of a class, or lists of such numbers, given the names of all classes.

    Lists are multi-label. If `renumber`, only classes that occur are kept, in order.

    Raises:
        BadSource: if a cell is empty, or is not the number of a class.
    """
    column = _LabelCells(act, what, cells, items)
    is_lists = column.kinds <= _LISTS
    lists = [list(cell) for cell in column.cells] if is_lists else [[cell] for cell in column.cells]
    for row, numbers in enumerate(lists):
        if outside := [one for one in numbers if type(one) is not int or not 0 <= one < len(names)]:
            found = (what, f" contains {outside[0]!r:.40} for {items[row].path!r}")
            expected = f"one of the class numbers 0 to {len(names) - 1}"
            next_step = ("Pack the files of such samples separately, with ", option("labels", None))
            raise BadSource(cannot(act, found, expected, next_step))
    if is_lists:
        held = np.zeros((len(lists), len(names)), np.uint8)
        for row, numbers in enumerate(lists):
            held[row, numbers] = 1
        return LabelValues("multilabel", tuple(names), held, "lists of class numbers")
    values = np.array(column.cells, np.int64)
    if renumber:
        used, values = np.unique(values, return_inverse=True)
        names = [names[number] for number in used.tolist()]
    return LabelValues("class", tuple(names), values.reshape(-1).astype(np.int64), "numbers of named classes")


def _infer_column(column: _LabelCells, task: Task, categories: Sequence[str], *, renumber: bool) -> LabelValues:
    act, what, cells, kinds = column.act, column.what, column.cells, column.kinds
    if task == "classes" and kinds <= {float, int} and all(cell % 1 == 0 for cell in cells):
        cells, kinds = list(map(int, cells)), {int}
    if task == "regression" and kinds <= {bool, int, float}:
        return LabelValues("regression", (), column.targets())
    if kinds == {str}:
        return number_classes(cells, categories, renumber=renumber)
    if kinds in ({bool}, {int}):
        # Numbers in this range keep their value, so that class 3 is the same in splits that are packed separately.
        if kinds == {bool} or (min(cells) >= 0 and max(cells) < _MOST_CLASSES and not renumber):
            values = np.array(cells)
            basis = "bools" if kinds == {bool} else "whole numbers"
            return LabelValues("class", name_classes(values), values.astype(np.int64), basis)
        return number_classes(cells)
    # Integers among floats are floats too, because JSON and text files may contain 1 for 1.0.
    if kinds in ({float}, {float, int}):
        return LabelValues("regression", (), column.targets(), "floats")
    if kinds <= _LISTS:
        return _infer_lists(column, task)
    odd = next((row for row, cell in enumerate(cells) if type(cell) not in _PLAIN), None)
    if odd is not None:
        raise BadSource(cannot(act, (what, f" contains {column.named(odd)}"), _KINDS, _CONVERT))
    odd = next(row for row, cell in enumerate(cells) if type(cell) is not type(cells[0]))
    mixed = (what, f" contains {column.named(0)} and {column.named(odd)}")
    raise BadSource(cannot(act, mixed, "values of one kind", _CONVERT))


def infer_columns(
    act: str, names: Sequence[str], columns: Sequence[Sequence[Any]], items: Sequence[Item], task: Task = "auto"
) -> LabelValues:
    """Interpret several columns as labels if all hold 0 and 1 or bools, or as targets if any holds floats.

    The labels or targets are named after the columns. For the task `regression`, all numbers are targets.

    Raises:
        BadSource: if a cell is empty or not a number, the columns hold only integers that are not all 0 or 1, or they
            do not fit the task.
    """
    if task == "classes":
        one = ("For example, use ", option("labels", names[0]), ", or change ", option("task"))
        raise BadSource(cannot(act, (option("labels", list(names)), " is a list"), "one column of classes", one))
    has_floats, is_binary = task == "regression", task != "regression"
    found: list[npt.NDArray[Any]] = []
    for name, given in zip(names, columns, strict=True):
        column = _LabelCells(act, f"the column {name!r}", given, items)
        if not column.kinds <= {bool, int, float}:
            row = next(row for row, cell in enumerate(column.cells) if type(cell) not in (bool, int, float))
            other = f"the column {name!r} contains {column.named(row)}"
            convert = "Use a single column, or convert its values to numbers"
            raise BadSource(cannot(act, other, "numbers or bools in every column", convert))
        has_floats |= float in column.kinds
        is_binary &= (float not in column.kinds or task == "multilabel") and set(column.cells) <= {0, 1}
        found.append(np.array(column.cells, np.uint8) if is_binary else column.targets())
    if is_binary:
        return LabelValues("multilabel", tuple(names), np.stack(found, axis=1), "0 and 1")
    if has_floats and task != "multilabel":
        return LabelValues("regression", tuple(names), np.stack(found, axis=1).astype(np.float32), "floats")
    message = f"the columns {', '.join(names)} contain numbers other than 0 and 1"
    next_step = ("Use ", option("task", "regression"), " for regression targets, or a single column for classes")
    raise BadSource(cannot(act, message, "0 and 1 for labels, or floats for regression targets", next_step))


class _LabelCells:
    """The cells of one column as plain Python values, none of them empty; `act` and `what` are for messages."""

    def __init__(self, act: str, what: Text, cells: Sequence[Any], items: Sequence[Item]) -> None:
        self.cells = _plain_cells(cells)
        self.kinds = set(map(type, self.cells))
        self.act, self.what, self.items = act, what, items
        if not self.kinds.isdisjoint({type(None), float}):
            is_empty = [cell is None or (type(cell) is float and math.isnan(cell)) for cell in self.cells]
            if empty := [row for row, cell in enumerate(is_empty) if cell]:
                count = f"{len(empty)} of {format_things(len(cells), 'sample')}"
                found = (what, f" is empty for {count}, starting with {items[empty[0]].path!r}")
                next_step = "Fill in the values, or remove these samples"
                raise BadSource(cannot(act, found, "a value for every sample", next_step))

    def named(self, row: int) -> str:
        names = {str: "text", bool: "a bool", int: "a whole number", float: "a float"}
        cell = self.cells[row]
        return f"{names.get(type(cell)) or kind_of(cell)} for {self.items[row].path!r}"

    def targets(self) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):
            try:
                values = np.array(self.cells, np.float64).astype(np.float32)
            except OverflowError:
                # An integer exceeds the range of float64.
                values = np.array([_float(cell) for cell in self.cells], np.float32)
        beyond = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if beyond.any():
            row = int(beyond.argmax())
            found = (self.what, f" contains {self.cells[row]!s:.60} for {self.items[row].path!r}")
            next_step = "Scale the targets, or remove this sample"
            raise BadSource(cannot(self.act, found, "values in the range of float32", next_step))
        return values


def _infer_lists(column: _LabelCells, task: Task) -> LabelValues:
    cells = column.cells
    if not set().union(*(map(type, cell) for cell in cells)) <= {bool, int, float, str}:
        cells = column.cells = [_plain_cells(tuple(cell)) for cell in cells]
    for row, cell in enumerate(cells):
        if any(value is None or value != value for value in cell):  # noqa: PLR0124 - NaN alone is not itself
            empty = (column.what, f" contains a list with an empty value for {column.items[row].path!r}")
            raise BadSource(cannot(column.act, empty, "lists without empty values", _CONVERT))
    kinds = set().union(*(map(type, cell) for cell in cells))
    lengths = set(map(len, cells))
    is_ordered = column.kinds.isdisjoint({set, frozenset})
    if not kinds:
        nothing = (column.what, " contains only empty lists")
        next_step = ("Choose other values with ", option("labels"))
        raise BadSource(cannot(column.act, nothing, "at least one label", next_step))
    is_binary = is_ordered and len(lengths) == 1 and kinds <= {bool, int, float} and set().union(*cells) <= {0, 1}
    if (
        (kinds == {float} or (task == "regression" and kinds <= {bool, int, float}))
        and is_ordered
        and not (task == "multilabel" and is_binary)
    ):
        if len(lengths) > 1:
            unequal = (column.what, f" contains lists of {min(lengths)} to {max(lengths)} floats")
            raise BadSource(cannot(column.act, unequal, "lists of one length", _CONVERT))
        return LabelValues("regression", tuple(map(str, range(lengths.pop()))), column.targets(), "lists of floats")
    if is_binary and (kinds <= {bool, int} or task == "multilabel"):
        return LabelValues("multilabel", tuple(map(str, range(lengths.pop()))), np.array(cells, np.uint8), "0 and 1")
    if kinds not in ({str}, {int}):
        mixed = (column.what, f" contains lists of {', '.join(sorted(kind.__name__ for kind in kinds))}")
        raise BadSource(cannot(column.act, mixed, "lists of text, or lists of whole numbers", _CONVERT))
    names = sorted(set().union(*cells))
    if (size := len(cells) * len(names)) > _MOST_TABLE_BYTES:
        found = f" contains {len(names)} distinct labels, which take {format_bytes(size)} for {len(cells)} samples"
        limit = f"at most {format_bytes(_MOST_TABLE_BYTES)}"
        raise BadSource(cannot(column.act, (column.what, found), limit, "Remove rare labels"))
    number = {name: index for index, name in enumerate(names)}
    counts = np.fromiter(map(len, cells), np.int64, len(cells))
    held = np.fromiter((number[name] for cell in cells for name in cell), np.int64, int(counts.sum()))
    values = np.zeros((len(cells), len(names)), np.uint8)
    values[np.repeat(np.arange(len(cells)), counts), held] = 1
    return LabelValues("multilabel", tuple(map(str, names)), values, "lists")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _plain_cells(cells: Sequence[Any]) -> Sequence[Any]:
    return cells if set(map(type, cells)) <= _PLAIN else list(map(_plain, cells))


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    # NumPy and PyTorch arrays and scalars have tolist().
    return value.tolist() if hasattr(value, "tolist") else value

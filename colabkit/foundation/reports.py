"""The base class of the reports that public functions return: text in a terminal, a small table in a notebook.

This module also contains the HTML helpers. Names of files, classes and errors must pass through `escape`.
"""

from __future__ import annotations

import dataclasses
import html
import math
import shutil
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from colabkit.foundation.messages import PYTHON, Words

_PLAIN = "vertical-align:top;padding:1px 12px 1px 0;border:0"
_CELL, _NUMBER = (f"text-align:{side};{_PLAIN}" for side in ("left", "right"))
# Cells of up to this many characters, such as numbers with units, are not wrapped; longer ones, such as paths, may be.
_SHORT = 24


def escape(text: object) -> str:
    """Escape text for HTML elements and attributes; undecodable bytes become escape sequences."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def printable(text: object) -> str:
    """Make text safe for a terminal; undecodable bytes and control characters become escape sequences."""
    shown = str(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def finite(value: Any) -> Any:
    """Return plain values with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def html_table(title: str, rows: Iterable[tuple[str, ...]], header: tuple[str, ...] = ()) -> str:
    """Return a small HTML table with inline styles only, so that it is preserved in saved notebooks.

    Below a header, numbers are aligned to the right, and the last cell of a shorter row spans the remaining columns.
    """
    rows = list(rows)
    numbers = {at for row in rows if len(row) == len(header) for at, cell in enumerate(row) if _is_number(cell)}
    head = "".join(
        f'<th scope="col" style="{_NUMBER if at in numbers else _CELL}">{escape(cell)}</th>'
        for at, cell in enumerate(header)
    )
    body = "".join(
        "<tr>"
        + f'<th scope="row" style="{_CELL};white-space:nowrap;font-weight:normal;opacity:0.7">{escape(row[0])}</th>'
        + "".join(_data_cells(row, len(header), numbers))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div style="font-weight:600;padding:2px 0">{escape(title)}</div>'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"{f'<tr>{head}</tr>' if head else ''}{body}</table>"
    )


def _is_number(cell: str) -> bool:
    return cell.lstrip("-")[:1].isdigit()


def _data_cells(row: tuple[str, ...], columns: int, numbers: set[int]) -> Iterator[str]:
    for at, cell in enumerate(row[1:], 1):
        span = columns - at if at == len(row) - 1 else 1
        style = _NUMBER if at in numbers and span <= 1 else _CELL
        yield f'<td{f" colspan={span}" if span > 1 else ""} style="{style};{_wrap(cell)}">{escape(cell)}</td>'


def _wrap(cell: str) -> str:
    return "white-space:nowrap" if len(cell) <= _SHORT else "overflow-wrap:anywhere;min-width:11em"


def _text_rows(rows: list[tuple[str, ...]], columns: int, room: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each row of a table with a header of `columns` cells.

    Columns are aligned. Those that exceed `room` characters follow in another block, with the names of the rows again.
    The last cell of a shorter row is not a column.
    """
    places = [place for place, row in enumerate(rows) if len(row) == columns]
    stop = places[-1] + 1 if places else 0
    widths = [max(map(len, column)) for column in zip(*(rows[place] for place in places), strict=True)]
    first = 1
    while first < len(widths):
        last = first + 1
        while last < len(widths) and sum(widths[first : last + 1]) + 2 * (last - first) <= room:
            last += 1
        for name, *values in rows[:stop]:
            is_full = len(values) == columns - 1
            cells = map(str.rjust, values[first - 1 : last - 1], widths[first:last]) if is_full else values
            yield name, "  ".join(cells)
        first = last
    for name, *values in rows[stop:]:
        yield name, "  ".join(values)


class Report(ABC):
    """Base class of the frozen dataclasses that public functions return.

    Subclasses implement `_summary` and `_rows`, from which `repr`, HTML and text tables are generated. They name
    options and calls with `self._words`.
    """

    _words: ClassVar[Words] = PYTHON

    @abstractmethod
    def _summary(self) -> str:
        """Return a summary of one or a few lines."""

    @abstractmethod
    def _rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table, each a name and its values."""

    def _header(self) -> tuple[str, ...]:
        """Return the names of the columns; empty if the rows need no header."""
        return ()

    @property
    def is_good(self) -> bool:
        """Whether the report describes a state without problems."""
        return True

    def speak(self, words: Words) -> None:
        """Use the syntax of a front end for options and calls in the summary and the table, not in `to_dict()`."""
        object.__setattr__(self, "_words", words)

    def __repr__(self) -> str:
        return self._summary()

    def _repr_html_(self) -> str:
        first = self._summary().splitlines()[0]
        return html_table(first, self._rows(), self._header())

    def text_table(self) -> str:
        """Return the report as text for a terminal: the summary, followed by the table."""
        header = self._header()
        rows = [*([header] if header else []), *self._rows()]
        width = max((len(printable(row[0])) for row in rows), default=0)
        indent = " " * (width + 4)
        columns = max(40, shutil.get_terminal_size().columns - 1)
        lines = [printable(line) for line in self._summary().split("\n")]
        for name, text in _text_rows(rows, len(header), columns - len(indent)):
            lines.append(
                textwrap.fill(
                    printable(text) or "-",
                    columns,
                    initial_indent=f"  {printable(name):{width}}  ",
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON-serializable values."""
        return _fields(self)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value

"""Tables of paths: which files are tables, on which line a row begins, and properties of columns and paths."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colabkit.foundation import IMAGE_EXTENSIONS, Text, in_python, user_path

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")
"""File name suffixes of tables."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Separators of the cells in text files, by suffix."""

PARQUET = ".parquet"
"""Suffix of Parquet files."""

_FILE_NAMES = ("path", "file", "filename", "file_name", "filepath", "file_path")
PATH_COLUMNS = (*_FILE_NAMES, "image", "image_path", "img", "img_path", "photo")
"""Common names of columns that hold paths."""

_SHOWN = 20


def is_manifest(path: Path) -> bool:
    """Return whether a file is a table of paths: it has a path column, and the first path in it exists.

    Only the rows up to the first path are read, and of a Parquet file only the first row. Without pyarrow, no Parquet
    file counts as a table.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        return False
    first = _first_in_parquet(path) if suffix == PARQUET else _first_in_text(path, SEPARATORS[suffix])
    if not first or "\0" in first:
        return False
    return os.path.isfile(os.path.join(path.parent, user_path(first, f"read {str(path)!r}")))


def table_problem(source: Path, name: str) -> tuple[str, Text]:
    """Return why `is_manifest` is false for a file with the suffix of a table, and what to do, or "", for a message.

    Args:
        source: the file, or the folder that holds it.
        name: the path of the file in the folder.
    """
    path = source if source.is_file() else source / name
    found = f"{path.name!r} has no path column with a common name, or the first file in it does not exist"
    if path.suffix.lower() == PARQUET or not path.is_file():
        return found, ""
    separator = SEPARATORS[path.suffix.lower()]
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        names = next(csv.reader(file, delimiter=separator), [])
    if not names:
        return f"{path.name!r} is empty", ""
    if find_path_column(names) is None:
        other = next((one for one in ";\t," if one in names[0]), "") if len(names) == 1 else ""
        if other:
            found = f"the cells of {path.name!r} are separated by {other!r} instead of {separator!r}"
            frame = in_python(f", or pass the table of pandas.read_csv(path, sep={other!r})")
            return found, (f"Save the table with the separator {separator!r}", frame)
        if row := next((one for one in names if one.rpartition(".")[2].lower() in IMAGE_EXTENSIONS), ""):
            found = f"{path.name!r} has no header line (its first line contains {row!r})"
            return found, "Insert a first line with the names of the columns, such as path and label"
        shown = ", ".join(map(repr, names[:_SHOWN]))
        return f"no column of {path.name!r} has a common name for paths, among {shown}", ""
    first = _first_in_text(path, separator)
    found = (
        f"the first file in {path.name!r}, {first!r}, does not exist" if first else f"{path.name!r} contains no path"
    )
    return found, ""


def _first_in_text(path: Path, separator: str) -> str:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, delimiter=separator, skipinitialspace=True)
        try:
            at = find_path_column(next(rows, []))
            paths = () if at is None else (row[at] for row in rows if len(row) > at)
            return next(filter(str.strip, paths), "")
        except csv.Error:
            return ""


def _first_in_parquet(path: Path) -> str:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        return ""
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            at = find_path_column(names)
            if at is None:
                return ""
            first = next(file.iter_batches(batch_size=1, columns=[names[at]])).column(0)[0].as_py()
    except OSError:
        raise
    except Exception:
        # The file is not Parquet, or has no rows.
        return ""
    return first if isinstance(first, str) else ""


def row_lines(path: Path, count: int) -> list[int]:
    """Return the line on which each row of a CSV or TSV file begins; empty if this does not find `count` rows."""
    lines, start = [], 1
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file, delimiter=SEPARATORS[path.suffix.lower()])
        try:
            for row in rows:
                # pandas ignores blank lines. An empty cell in quotes is not one.
                if row and not (len(row) == 1 and row[0].isspace()):
                    lines.append(start)
                start = rows.line_num + 1
        except csv.Error:
            return []
    return lines[1:] if len(lines) == count + 1 else []


def find_path_column(names: Sequence[str]) -> int | None:
    """Return the place of the column whose name is the first common one, or None."""
    lowered = [name.strip().lower() for name in names]
    return next((lowered.index(name) for name in PATH_COLUMNS if name in lowered), None)


def image_ending(path: str) -> str:
    """Return the suffix that completes a path to that of an existing image file, such as `.JPEG`; empty if none does.

    Only the names of common suffixes are tried, because listing a large folder can take long.
    """
    endings = (f".{case}" for extension in IMAGE_EXTENSIONS for case in (extension, extension.upper()))
    return next((ending for ending in endings if os.path.isfile(f"{path}{ending}")), "")


def categories_of(frame: Any, *, is_pandas: bool) -> dict[str, tuple[str, ...]]:
    """Return the categories of the columns of a DataFrame, as `text_categories` does, by column.

    Unless the table is from pandas, only ordered categories count: other packages and files use unordered ones to save
    space, in the order in which the values occur.
    """
    if not hasattr(frame, "columns"):
        return {}
    dtypes = zip(map(str, frame.columns), frame.dtypes, strict=True)
    found = {name: text_categories(dtype) for name, dtype in dtypes if is_pandas or getattr(dtype, "ordered", False)}
    return {name: categories for name, categories in found.items() if categories}


def text_categories(dtype: Any) -> tuple[str, ...]:
    """Return the categories of a pandas dtype in their order; empty if they are not text, or there are none."""
    names = tuple(dtype.categories) if type(dtype).__name__ == "CategoricalDtype" else ()
    return names if all(isinstance(name, str) for name in names) else ()

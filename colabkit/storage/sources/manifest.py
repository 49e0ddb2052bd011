"""A table of paths as a source: a DataFrame from pandas or another package, a CSV or Parquet file, or a list."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    MissingPackage,
    Mount,
    Report,
    SourceMissing,
    Text,
    call,
    can_hang,
    cannot,
    format_things,
    import_optional,
    in_python,
    kind_of,
    mounts,
    omit,
    option,
    translated,
    user_path,
)
from colabkit.storage.sources.concurrency import STALLED_S, answer_of, concurrently
from colabkit.storage.sources.items import Item, Listing, SourceKind
from colabkit.storage.sources.reads import Retries, open_listed, read_ahead, read_listed
from colabkit.storage.sources.table_cells import decoded_text, plain_value, stripped_value, undecodable
from colabkit.storage.sources.table_files import (
    PARQUET,
    PATH_COLUMNS,
    SEPARATORS,
    TABLE_SUFFIXES,
    categories_of,
    find_path_column,
    image_ending,
    row_lines,
)

# Texts of missing cells. The defaults of pandas include words such as NA and None, which may be labels.
_MISSING_CELLS = ["", "nan", "NaN"]


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of a table that have a path.

    Attributes:
        root: folder that item paths are relative to.
        paths: path of the file of each row.
        columns: the other columns.
        categories: categories of columns, as in `Listing`.
        rows: number of each row in the table, from 0.
        count: number of rows, including those without a path.
        index: index of a pandas table; None for other tables.
    """

    root: str
    paths: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    count: int = 0
    index: Any = None

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Iterate over the numbers and paths of the rows."""
        return zip(self.rows, self.paths, strict=True)


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas DataFrame or Series, or a table that `to_pandas()` converts to one.

    Polars, Arrow and Ray Data tables qualify. A Hugging Face dataset qualifies if its path column is text; otherwise,
    it is a dataset of samples. Arrays and map-style datasets do not qualify, even if they have `to_pandas()`.
    """
    if hasattr(value, "iloc"):
        return True
    if isinstance(value, type | Report) or not callable(getattr(value, "to_pandas", None)):
        return False
    if hasattr(value, "dtype"):
        # This is a polars Series or an xarray array; only a Series of strings can hold paths.
        return str(value.dtype) == "String"
    if hasattr(value, "features"):
        # This is a Hugging Face dataset. A streamed one may not know its columns.
        features = value.features or {}
        names = [*features]
        at = find_path_column(names)
        return at is not None and getattr(features[names[at]], "dtype", None) in ("string", "large_string")
    if hasattr(value, "__arrow_c_stream__"):
        return True
    # A Ray dataset has a schema and cannot be indexed.
    return hasattr(value, "schema") and not hasattr(value, "__getitem__")


def as_pandas(act: str, table: Any) -> Any:
    """Convert a table from another package to a pandas DataFrame or Series; return other values unchanged.

    Raises:
        MissingPackage: if pandas or pyarrow is not installed.
    """
    if hasattr(table, "iloc") or not is_frame(table):
        return table
    for package in ("pandas", "pyarrow"):
        import_optional(package, act, f"to read {kind_of(table)}")
    return table.to_pandas()


class ManifestSource:
    """The files that a table lists, one per row, with the other columns as Python values; empty cells are None.

    The table is read once, in the constructor. The path column is the first of `path, file, filename, file_name,
    filepath, file_path, image, image_path, img, img_path, photo` that exists, ignoring case, or the only column. Paths
    may begin with `drive:` or `~`; other relative paths are resolved against the folder of the table file, or the
    working folder for a DataFrame or list. Item paths are relative to that folder if all files are below it; for a
    DataFrame or list without `root`, all given paths must also be relative. Otherwise, item paths are relative to the
    common folder of all files. In a text file that is not UTF-8, cells other than paths are read as Windows-1252, in
    which Excel saves CSV files. A pickled copy can open the items that were listed before, but does not contain the
    table.

    Args:
        table: a pandas or polars DataFrame, an Arrow table, a Ray dataset, a Hugging Face dataset with a column of text
            that has one of the names above, the path of a `.csv`, `.tsv` or `.parquet` file, or a list or Series of
            paths.
        path_column: name of the column that holds the paths; None searches for the names above.
        root: folder of relative paths, instead of those above.
        skips_missing: leave out rows without a path and rows whose files are missing, unless no row remains; None if
            the caller has no `on_bad=` for this.

    Raises:
        InvalidOption: if `table` is none of these, or there is no column `path_column`.
        BadSource: if the table is invalid, has no rows or no path column, or if a cell of that column holds no path.
    """

    kind: ClassVar[SourceKind] = "table"

    def __init__(
        self,
        table: Any,
        *,
        path_column: str | None = None,
        root: str | os.PathLike[str] | None = None,
        skips_missing: bool | None = None,
    ) -> None:
        self._path_column, self._path_name = path_column, ""
        self._skips_missing = skips_missing
        self._file: Path | None = None
        self.name, self._act = "a table of paths", "read the table of paths"
        if isinstance(table, str | os.PathLike):
            self._file = user_path(table, f"read {os.fspath(table)!r}")
            self.name = str(self._file)
            self._act = f"read {self.name!r}"
        self._folder = None if root is None else os.path.abspath(user_path(root, self._act))
        given, table = table, as_pandas(self._act, table)
        self._is_pandas = self._file is None and table is given
        is_table = isinstance(table, list | tuple) or hasattr(table, "iloc")
        if not is_table and (self._file is None or self._file.suffix.lower() not in TABLE_SUFFIXES):
            found = f"it is {kind_of(table)}" if self._file is None else f"its name ends in {self._file.suffix!r}"
            expected = f"a pandas DataFrame, a list of paths, or a file with a suffix among {', '.join(TABLE_SUFFIXES)}"
            next_step = (
                "Pass a DataFrame or a list of paths"
                if self._file is None
                else "Convert it to CSV, or read it with pandas and pass the DataFrame"
            )
            raise InvalidOption(cannot(self._act, found, expected, next_step))
        mounted = mounts()
        self._is_file_remote = self._file is not None and can_hang(os.path.abspath(self._file), mounted)
        with translated(self._act):
            self._table = answer_of(lambda: self._parsed(table), self._is_file_remote)
        folders = {os.path.dirname(path) for path in self._table.paths}
        self.can_hang = self._is_file_remote or any(can_hang(folder, mounted) for folder in folders)

    @property
    def root(self) -> str:
        """The folder that item paths are relative to, for a DataFrame or list; empty if the table is a file."""
        return self._table.root if self._file is None else ""

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the table file, if there is one, and of the files that its rows list."""
        own = () if self._file is None else (os.path.abspath(self._file),)
        return (*own, *dict.fromkeys(self._table.paths))

    @property
    def digest(self) -> str:
        """Digest of the paths, the other columns and their categories."""
        table = self._table
        return hashlib.sha256(repr((table.paths, table.columns, table.categories)).encode()).hexdigest()

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_table": _Table(self._table.root, (), {})}

    def list(self) -> Listing:
        """Return one item per row, in order, with the other columns; a table file below the root is an extra."""
        table = self._table
        if not table.paths:
            empty = "its rows are available only in the process that opened the table"
            raise BadSource(cannot(self._act, empty, "", "List it in that process, or open the table in this process"))
        retries = Retries()

        def look(path: str) -> tuple[str, os.stat_result | None]:
            try:
                return path, retries.run(lambda: os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return path, None

        stalled_s = STALLED_S if self.can_hang else None
        with translated(self._act):
            unique = dict.fromkeys(table.paths)
            found = dict(concurrently(look, unique, "auto", stalled_s=stalled_s))
        missing = [path for path in table.paths if found[path] is None]
        if len(missing) == len(table.paths) and (ending := answer_of(lambda: image_ending(missing[0]), self.can_hang)):
            raise self._without_ending(len(missing), missing[0], ending)
        skipped = {row: (path, "the file is missing") for row, path in table.numbered() if found[path] is None}
        if missing and not (self._skips_missing and len(missing) < len(table.paths)):
            root, is_below = self._folder or "", all(_is_below(path, self._folder or "") for path in table.paths)
            if self._folder and is_below and not answer_of(lambda: os.path.isdir(root), self.can_hang):
                next_step = ("Check the path, or run ", call("mount"), " if the folder is on Drive")
                no_folder = (option("root", root), " is not a folder")
                raise SourceMissing(cannot(self._act, no_folder, "the folder of the relative paths", next_step))
            rows = format_things(len(table.paths), "row")
            lost = f"files are missing for {len(missing)} of {rows}, starting with {missing[0]!r}"
            folder: Text = ("set the folder of relative paths with ", option("root"))
            if self._folder and _is_below(missing[0], self._folder):
                lost += f" ({_inner(missing[0], root)!r} in the table)"
                folder = ("correct the folder of relative paths in ", option("root"))
            skip: Text = ""
            if self._skips_missing is False and len(missing) < len(table.paths):
                skip = (", or leave these rows out with ", option("on_bad", "skip"))
            run = ", or run " if not skip else ", run "
            advice = ("Check the paths, ", folder, run, call("mount"), " if the files are on Drive", skip)
            raise SourceMissing(cannot(self._act, lost, "", advice))
        items, columns = [], table.columns
        for row, path in table.numbered():
            if (stats := found[path]) is not None:
                if not stat.S_ISREG(stats.st_mode):
                    kind = "a folder" if stat.S_ISDIR(stats.st_mode) else "a special file"
                    raise self._bad_row(table, row, f"{path!r}, {kind}", "a file")
                items.append(Item.of(_inner(path, table.root), stats))
        if missing:
            is_found = [found[path] is not None for path in table.paths]
            columns = {name: tuple(compress(cells, is_found)) for name, cells in columns.items()}
        pathless = sorted({*range(table.count)}.difference(table.rows))
        for row, place in zip(pathless, self._places(table, pathless), strict=True):
            skipped[row] = (place, "the path is missing")
        reasons = tuple(skipped[row] for row in sorted(skipped))
        return Listing(tuple(items), reasons, retries.count, columns, self._extras(table), categories=table.categories)

    def _without_ending(self, count: int, path: str, ending: str) -> SourceMissing:
        rows = format_things(count, "row")
        found = f"files are missing for {count} of {rows}, starting with {path!r}, but {path + ending!r} exists"
        column, example = self._path_name, f"[path + {ending!r} for path in paths]"
        if column:
            example = f"table[{column!r}] = table[{column!r}] + {ending!r}, with pandas"
        next_step = (f"Add the suffix {ending!r} to the paths", in_python(f", for example {example}"))
        return SourceMissing(cannot(self._act, found, "", next_step))

    def open(self, item: Item) -> BinaryIO:
        """Open the file of a row."""
        return open_listed(Path(self._table.root, item.path), self.name, item)

    def read_at_once(self, item: Item) -> bytes | None:
        """Return a small local item's bytes, or None if the file is unreadable or has changed."""
        return read_listed(f"{self._table.root}/{item.path}", item)

    def read_ahead(self, items: Sequence[Item]) -> None:
        """Let the system read items in the background, unless it has them in memory."""
        read_ahead(f"{self._table.root}/{item.path}" for item in items)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _extras(self, table: _Table) -> tuple[Item, ...]:
        if self._file is None or not _is_below(path := os.path.abspath(self._file), table.root):
            return ()
        with translated(self._act):
            stats = answer_of(lambda: os.stat(path), self._is_file_remote)
        return (Item.of(_inner(path, table.root), stats),)

    def _parsed(self, given: Any) -> _Table:
        index = given.index if self._is_pandas and hasattr(given, "iloc") else None
        if hasattr(given, "iloc") and not hasattr(given, "columns"):
            # The table is a pandas Series.
            given = given.tolist()
        columns: Mapping[str, tuple[Any, ...]] = {}
        categories: Mapping[str, tuple[str, ...]] = {}
        if isinstance(given, list | tuple):
            if self._path_column is not None:
                no_columns = (option("path_column", self._path_column), " is given, but a list of paths has no columns")
                raise InvalidOption(cannot(self._act, no_columns, "", omit("path_column")))
            cells: Sequence[Any] = given
        else:
            frame = given if self._file is None else self._frame(self._file)
            cells, columns = self._split(frame)
            found = categories_of(frame, is_pandas=self._is_pandas)
            categories = {name: names for name, names in found.items() if name in columns}
        if not len(cells):
            raise BadSource(cannot(self._act, "the table has no rows", "at least one", "Check the table"))
        has_path = [not _is_empty(cell) for cell in cells]
        rows = tuple(compress(range(len(cells)), has_path))
        table = _Table("", (), {}, categories, rows, len(cells), index)
        if not all(has_path) and not (self._skips_missing and rows):
            raise self._bad_row(table, has_path.index(False), "no path", "a path")
        folder = self._folder or (os.path.abspath(self._file.parent) if self._file else os.getcwd())
        mounted = mounts()
        named = [self._user_path(table, row, cells[row], mounted) for row in rows]
        paths = tuple(os.path.abspath(os.path.join(folder, path)) for path in named)
        is_own = bool(self._file or self._folder) or not any(map(os.path.isabs, named))
        shared = os.path.commonpath([os.path.dirname(path) for path in dict.fromkeys(paths)])
        root = folder if is_own and (shared == folder or _is_below(shared, folder)) else shared
        columns = {name: tuple(compress(column, has_path)) for name, column in columns.items()}
        return replace(table, root=root, paths=paths, columns=columns)

    def _user_path(self, table: _Table, row: int, cell: Any, mounted: Sequence[Mount]) -> str:
        text = os.fspath(cell) if isinstance(cell, str | os.PathLike) else ""
        if getattr(cell, "shape", ()):
            found, expected = f"item {row + 1} of the source is {kind_of(cell)}", "a path"
            arrays = "a tuple of NumPy arrays, such as (x.to_numpy(), y.to_numpy()) from pandas"
            next_step = f"To pack arrays, pass colabkit.pack() {arrays}"
            raise BadSource(cannot(self._act, found, expected, next_step))
        if not isinstance(text, str) or not text or "\0" in text:
            raise self._bad_row(table, row, f"{cell!r:.60}", "a path")
        if "://" in text:
            # Do not show the address, which can hold secrets.
            raise self._bad_row(table, row, "an address", "a path on this machine")
        return os.fspath(user_path(text, self._act, [*mounted])) if text.startswith(("drive:", "~")) else text

    def _bad_row(self, table: _Table, row: int, found: str, expected: str) -> BadSource:
        next_step: Text = "Repair or remove the row"
        if found == "no path" and self._skips_missing is False:
            next_step = ("Repair or remove the row, or leave it out with ", option("on_bad", "skip"))
        (place,) = self._places(table, [row])
        return BadSource(cannot(self._act, f"{place} contains {found}", f"{expected} in each row", next_step))

    def _places(self, table: _Table, rows: Sequence[int]) -> Sequence[str]:
        """Return the places of rows, for messages: labels of the index, lines of the file or row numbers."""
        if not rows:
            return ()
        if table.index is not None:
            return [f"the row with index {plain_value(table.index[row])!r:.60}" for row in rows]
        lines: Sequence[int] = ()
        if (file := self._file) is not None and file.suffix.lower() != PARQUET:
            with translated(self._act):
                lines = answer_of(lambda: row_lines(file, table.count), self._is_file_remote)
        return [f"line {lines[row]}" if lines else f"row {row + 1}" for row in rows]

    def _split(self, frame: Any) -> tuple[Sequence[Any], Mapping[str, tuple[Any, ...]]]:
        names = [str(name) for name in frame.columns]
        at = self._find_paths(names)
        if at is None and len(names) == 1:
            at = 0
        if at is None:
            found = f"it has the columns {', '.join(names)}"
            expected = f"one of the columns {', '.join(PATH_COLUMNS)}"
            values = in_python(". If the table holds the samples themselves, pass colabkit.pack() their NumPy arrays")
            next_step = ("Name the column that holds the paths with ", option("path_column"), values)
            raise BadSource(cannot(self._act, found, expected, next_step))
        others = [number for number in range(len(names)) if number != at]
        if twice := next((one for one, other in pairwise(sorted(names[n] for n in others)) if one == other), None):
            repeated = f"two columns are named {twice!r}"
            raise BadSource(cannot(self._act, repeated, "", "Rename one of them"))
        is_text = self._file is not None and self._file.suffix.lower() != PARQUET
        value_of = stripped_value if is_text else plain_value
        columns = {names[number]: tuple(map(value_of, frame.iloc[:, number].tolist())) for number in others}
        self._path_name = names[at]
        return frame.iloc[:, at].tolist(), columns

    def _find_paths(self, names: Sequence[str]) -> int | None:
        if self._path_column is None:
            return find_path_column(names)
        if self._path_column not in names:
            found = f"there is no column {self._path_column!r}"
            raise InvalidOption(cannot(self._act, found, f"one of {', '.join(names)}", "Use one of these"))
        return names.index(self._path_column)

    def _frame(self, file: Path) -> Any:
        pandas = import_optional("pandas", self._act, "for tables of paths")
        try:
            if file.suffix.lower() == PARQUET:
                import_optional("pyarrow", self._act, "for tables of paths")
                return pandas.read_parquet(file)
            return self._read_text(pandas, file)
        except (InvalidOption, MissingPackage, OSError):
            raise
        # pandas and pyarrow raise many types of exceptions.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise BadSource(cannot(self._act, f"it is not a valid table ({reason})", "", "Check the file")) from None

    def _read_text(self, pandas: Any, file: Path) -> Any:
        def read(encoding: str) -> Any:
            separator = SEPARATORS[file.suffix.lower()]
            options = {"sep": separator, "encoding": encoding, "index_col": False, "skipinitialspace": True}
            names = pandas.read_csv(file, nrows=0, **options).columns
            at = self._find_paths([str(name) for name in names])
            # Read paths as text, so that a file name such as 0001 does not become a number.
            texts = {names[at or 0]: str} if len(names) else {}
            return pandas.read_csv(
                file, converters=texts, keep_default_na=False, na_values=_MISSING_CELLS, low_memory=False, **options
            )

        try:
            return read("utf-8-sig")
        except UnicodeDecodeError:
            # Latin-1 decodes every byte, so that the bytes of each cell can be decoded again.
            frame = read("latin-1")
            names = [decoded_text(name) for name in frame.columns]
            decode = dict.fromkeys(range(len(names)), decoded_text)
            # Names of files keep their bytes.
            decode[self._find_paths(names) or 0] = undecodable
            cells = {n: [decode[n](cell) for cell in frame.iloc[:, n].tolist()] for n in decode}
            return pandas.DataFrame(cells, dtype=object).set_axis(names, axis="columns")


def _is_empty(cell: Any) -> bool:
    """Return whether the cell of a path is missing or blank."""
    return not cell.strip() if isinstance(cell, str | bytes) else plain_value(cell) is None


def _inner(path: str, root: str) -> str:
    return path.removeprefix(root).lstrip("/")


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")

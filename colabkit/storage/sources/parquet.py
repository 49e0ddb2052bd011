"""Parquet files that contain encoded images, such as datasets on Hugging Face, as a source."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    InvalidOption,
    cannot,
    import_optional,
    is_image_head,
    option,
    shortened,
)
from colabkit.storage.sources.concurrency import still_moving
from colabkit.storage.sources.items import Listing, broken_archive, changed_item
from colabkit.storage.sources.ranges import (
    HEAD_BYTES,
    MOST_VALUES,
    ListingBuilder,
    Range,
    RangeSource,
    is_plain,
    shard_names,
    split_of,
)
from colabkit.storage.sources.reads import is_as_listed, open_listed

PARQUET_SUFFIX = ".parquet"
"""File name suffix of Parquet files."""

# Target size of the images that are decompressed at once.
_BATCH_BYTES = 8 << 20
_MOST_BATCH_ROWS = 4096
# Threads that make consecutive samples are at most a few batches apart.
_KEPT_BATCHES = 4
_READ_BYTES = 1 << 20
_SHOWN = 12
_TYPE_CHARS = 60


class ParquetSource(RangeSource):
    """Parquet files with a column of encoded images; every row is a sample.

    The image column is binary, or a struct with the binary field `bytes`, as the package `datasets` writes it. A
    sample's path is its file's name and its row in that file; a row without an image is a sample of 0 bytes. Columns of
    numbers, text, and lists of at most 1,024 of these become columns of the same name; `skipped` lists other columns.
    Class names come from the metadata of `datasets`. The column `split` is added if file names contain split names and
    no column has this name.

    Indexing decompresses all images once, to check them and to find their sizes. Images are decompressed a few MiB at a
    time, so large row groups need little memory. Rows must be read in order to be read fast, since reading an earlier
    row decompresses its row group again.

    Args:
        name: name for messages.
        files: Parquet files with the same columns.
        column: name of the image column; None if there is only one.
    """

    def __init__(self, name: str, files: Sequence[Path], column: str | None = None) -> None:
        super().__init__(name, files)
        self._column = column
        self._reader = _ImageReader()

    def __getstate__(self) -> Mapping[str, Any]:
        return {**super().__getstate__(), "_reader": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._reader = _ImageReader()

    def close(self) -> None:
        """Close the file that was read last; the next use opens it again."""
        self._reader.close()

    def _read(self, known: Range) -> bytes:
        if self._reader.pid != os.getpid():
            # A forked process would share the position of the parent's file.
            self._reader = _ImageReader()
        return self._reader.read(self.name, known, self._column)

    def _indexed(self) -> Listing:
        found = ListingBuilder(self.name)
        first: _Columns | None = None
        has_bytes = False
        for path, shard in zip(self.files, shard_names(self.files), strict=True):
            split = split_of(shard)
            labels: dict[str, Any] = {} if split is None else {"split": split}
            file, _ = found.open_next(path)
            with _opened(found.act, path, file) as parquet:
                columns = _columns_of(found.act, path, parquet, self._column)
                first = first or columns
                first.check_same(found.act, self.files[0], columns, path)
                row = 0
                for batch in _batches(parquet, 0, [columns.leaf, *columns.plain]):
                    lengths = _compute().binary_length(_images(batch, columns.image))
                    sizes = [length or 0 for length in lengths.to_pylist()]
                    has_bytes = has_bytes or any(sizes)
                    cells = {name: batch.column(name).to_pylist() for name in columns.plain}
                    for name, values in cells.items():
                        if not all(map(is_plain, values)):
                            found.drop(name, f"long text, or lists of more than {MOST_VALUES} values")
                    for number, size in enumerate(sizes):
                        fields = {name: values[number] for name, values in cells.items()}
                        found.add(f"{shard}/{row + number:08d}", row + number, size, labels | fields)
                    row += len(sizes)
        if first is not None and len(found) and not has_bytes:
            empty = f"the column {first.image!r} contains no bytes"
            next_step = "Write the files with embedded images, or pass a table of paths"
            raise BadSource(cannot(found.act, empty, "the bytes of an image in each row", next_step))
        listing = found.finish()
        if first is None:
            return listing
        skipped = tuple(sorted([*listing.skipped, *first.others.items()]))
        return replace(listing, skipped=skipped, classes=first.classes)


def holds_images(act: str, path: Path, column: str | None) -> bool:
    """Return whether a Parquet file has the image column `column`, or, if it is None, any column of encoded images."""
    with path.open("rb", buffering=0) as file, _opened(act, path, file) as parquet:
        names, heads = _image_columns(parquet)
        return bool(heads) if column is None else column in names


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a Parquet file.

    Attributes:
        image: name of the image column.
        leaf: path of the column that holds the bytes of the images.
        plain: names of the columns of numbers, text, or lists of these.
        others: types of the other columns by name.
        classes: class names by column.
    """

    image: str
    leaf: str
    plain: tuple[str, ...]
    others: Mapping[str, str]
    classes: Mapping[str, tuple[str, ...]]

    def check_same(self, act: str, path: Path, other: _Columns, other_path: Path) -> None:
        """Raise `BadSource` if another file has different columns or classes."""
        ours, theirs = ({one.image, *one.plain, *one.others} for one in (self, other))
        if odd := sorted(ours ^ theirs):
            found = f"only one of {str(path)!r} and {str(other_path)!r} has the column {odd[0]!r}"
        elif self.classes != other.classes:
            found = f"{str(path)!r} and {str(other_path)!r} have different classes"
        else:
            return
        next_step = "Pass the files of one configuration, such as its folder"
        raise BadSource(cannot(act, found, "the same columns and classes in all files", next_step))


def _columns_of(act: str, path: Path, parquet: Any, column: str | None) -> _Columns:
    schema = parquet.schema_arrow
    leaves, images = _image_columns(parquet)
    if column is not None:
        if column not in leaves:
            found = f"{str(path)!r} has no column {column!r} of images"
            expected = f"one of {', '.join(map(repr, leaves))}" if leaves else "a column of images"
            raise InvalidOption(cannot(act, found, expected, ("Change ", option("path_column"))))
        images = [column]
    if not images:
        kinds = ", ".join(f"{field.name!r} ({_type_name(field)})" for field in list(schema)[:_SHOWN]) or "none"
        found = f"{str(path)!r} has no column of encoded images (columns: {kinds})"
        expected = "a binary column, or a struct with the field 'bytes'"
        raise BadSource(cannot(act, found, expected, "Pass files with embedded images, or a table of paths"))
    if len(images) > 1:
        several = f"{str(path)!r} has {len(images)} columns of images ({', '.join(map(repr, images))})"
        next_step = ("Choose one with ", option("path_column", images[0]))
        raise BadSource(cannot(act, several, "one column of images", next_step))
    image = images[0]
    plain = tuple(field.name for field in schema if field.name != image and _is_plain_type(field.type))
    others = {field.name: f"a column of {_type_name(field)}" for field in schema if field.name not in {image, *plain}}
    features = _features(schema)
    classes = {name: names for name in plain if (names := _class_names(features.get(name)))}
    return _Columns(image, leaves[image], plain, others, classes)


def _image_columns(parquet: Any) -> tuple[dict[str, str], list[str]]:
    """Return the leaf of each column that can hold images, and the names of the columns that do hold images."""
    types = _arrow().types
    features = _features(parquet.schema_arrow)
    leaves = {}
    for field in parquet.schema_arrow:
        inner = {one.name: one.type for one in field.type} if types.is_struct(field.type) else {}
        if any(map(_is_binary, (field.type, inner.get("bytes")))):
            leaves[field.name] = f"{field.name}.bytes" if inner else field.name
    declared = [name for name in leaves if features.get(name, {}).get("_type") == "Image"]
    # `datasets` writes audio and video in the same form as images.
    undeclared = [name for name in leaves if features.get(name, {}).get("_type", "Value") == "Value"]
    return leaves, declared or [name for name in undeclared if _starts_like_image(parquet, name, leaves[name])]


def _starts_like_image(parquet: Any, name: str, leaf: str) -> bool:
    for batch in _batches(parquet, 0, [leaf]):
        blobs = _images(batch, name)
        if blobs.null_count < len(blobs):
            return is_image_head(blobs.drop_null()[0].as_py()[:HEAD_BYTES])
    return False


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features of the columns that `datasets` writes into a schema's metadata; empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: one[0] if isinstance(one, list) else one for name, one in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return {}


def _class_names(feature: Any) -> tuple[str, ...]:
    while isinstance(feature, dict):
        names = feature.get("names")
        if feature.get("_type") == "ClassLabel" and isinstance(names, list):
            return tuple(map(str, names))
        # The labels may be in a list.
        feature = feature.get("feature")
    return ()


def _is_plain_type(kind: Any) -> bool:
    types = _arrow().types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain_type(kind.value_type)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_boolean, types.is_integer, types.is_floating, types.is_string, types.is_large_string)
    return any(test(kind) for test in tests)


def _is_binary(kind: Any) -> bool:
    types = _arrow().types
    return kind is not None and (types.is_binary(kind) or types.is_large_binary(kind))


def _type_name(field: Any) -> str:
    return shortened(" ".join(str(field.type).split()), _TYPE_CHARS)


def _arrow() -> Any:
    return import_optional("pyarrow", "read Parquet", "to read Parquet")


def _compute() -> Any:
    return import_optional("pyarrow.compute", "read Parquet", "to read Parquet")


def _images(batch: Any, name: str) -> Any:
    column = batch.column(name)
    return _compute().struct_field(column, "bytes") if _arrow().types.is_struct(column.type) else column


def _batches(parquet: Any, first: int, leaves: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of the row groups from number `first` on, a few MiB at a time."""
    found = parquet.metadata
    groups = [found.row_group(number) for number in range(first, found.num_row_groups)]
    row_bytes = max((one.total_byte_size / one.num_rows for one in groups if one.num_rows), default=1)
    count = max(1, min(_MOST_BATCH_ROWS, int(_BATCH_BYTES / max(row_bytes, 1))))
    numbers = list(range(first, found.num_row_groups))
    for batch in parquet.iter_batches(count, row_groups=numbers, columns=[*leaves], use_threads=False):
        still_moving()
        yield batch


@contextmanager
def _opened(act: str, path: Path, file: BinaryIO) -> Iterator[Any]:
    """Open a Parquet file and close it at the end."""
    with _damage_named(path), file:
        yield _parquet_of(act, file)


def _parquet_of(act: str, file: BinaryIO) -> Any:
    arrow = import_optional("pyarrow", act, "to read Parquet")
    parquet = import_optional("pyarrow.parquet", act, "to read Parquet")
    # These options read a column in small pieces, and check the pages that have a checksum.
    options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
    return parquet.ParquetFile(arrow.PythonFile(file, "r"), **options)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Translate the errors that pyarrow raises for damaged files."""
    try:
        yield
    except ColabkitError:
        raise
    except Exception as error:
        # Errors of the file system have a number; those of pyarrow do not.
        is_damage = error.errno is None if isinstance(error, OSError) else isinstance(error, _arrow().ArrowException)
        if not is_damage:
            raise
        raise broken_archive(str(path), " ".join(str(error).split())[:200].rstrip(".")) from error


class _ImageReader:
    """Reads images of one file after another, for all threads of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._position: _Position | None = None
        # Path of the file, first row and images of the latest batches.
        self._kept: deque[tuple[Path, int, Any]] = deque(maxlen=_KEPT_BATCHES)

    def read(self, source: str, known: Range, column: str | None) -> bytes:
        """Return an image; raise `SourceChanged` if its size or its file has changed."""
        path, row = known.file.path, known.offset
        with self._lock, _damage_named(path):
            for kept, start, images in self._kept:
                if kept == path and start <= row < start + len(images):
                    break
            else:
                start, images = self._find(source, known, column)
        data: bytes = images[row - start].as_py() or b""
        if len(data) != known.size:
            raise changed_item(source, known, len(data))
        return data

    def close(self) -> None:
        """Close the open file."""
        with self._lock:
            self._kept.clear()
            self._close_file()

    def _find(self, source: str, known: Range, column: str | None) -> tuple[int, Any]:
        path = known.file.path
        if self._position is None or self._position.path != path:
            self._close_file()
            self._position = _Position(source, known, column)
        try:
            for start, images in self._position.images_to(known.offset):
                self._kept.append((path, start, images))
        except BaseException:
            # An interrupted iterator yields no further rows.
            self._close_file()
            raise
        if not is_as_listed(os.fstat(self._position.file.fileno()), known.file.listed):
            raise changed_item(source, known, known.size)
        return start, images

    def _close_file(self) -> None:
        if self._position is not None:
            self._position.file.close()
        self._position = None


class _Position:
    """An open file, and the next row to read."""

    def __init__(self, source: str, known: Range, column: str | None) -> None:
        self.path = known.file.path
        self.file = open_listed(self.path, source, known.file.listed)
        try:
            act = f"read {source!r}"
            self._parquet = _parquet_of(act, self.file)
            self._columns = _columns_of(act, self.path, self._parquet, column)
        except BaseException:
            self.file.close()
            raise
        found = self._parquet.metadata
        self._ends = list(accumulate(found.row_group(number).num_rows for number in range(found.num_row_groups)))
        self._row = -1
        self._batches: Iterator[Any] = iter(())

    def images_to(self, row: int) -> Iterator[tuple[int, Any]]:
        """Yield the first row and the images of each batch, up to the batch that contains `row`."""
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        if not start <= self._row <= row:
            self._row, self._batches = start, _batches(self._parquet, group, [self._columns.leaf])
        while self._row <= row:
            batch = next(self._batches, None)
            if batch is None:
                raise broken_archive(str(self.path), f"row {row} is missing")
            images = _images(batch, self._columns.image)
            first, self._row = self._row, self._row + len(images)
            yield first, images

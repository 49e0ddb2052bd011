"""Samples that are byte ranges of a few large files: the base of WebDataset, TFRecord, LMDB and Parquet sources."""

from __future__ import annotations

import io
import os
import re
import threading
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from colabkit.foundation import BadSource, can_hang, cannot, mounts, translated
from colabkit.storage.sources.concurrency import answer_of, still_moving
from colabkit.storage.sources.items import Item, Listing, broken_archive, unknown_item
from colabkit.storage.sources.reads import open_listed, pread_all

HEAD_BYTES = 16
"""Number of first bytes that `is_image_head` and `compression_of` examine."""

MOST_VALUES = 1024
"""Maximum number of values in one cell of a column; columns stay in memory, so larger data must be a payload."""

MOST_TEXT_BYTES = 1 << 20
"""Maximum size of a text value in a column, in bytes."""

_MOST_COLUMNS = 256
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SHARD_SUFFIX = re.compile(r"\.(tar|tfrecords?|tfrec|parquet)(?=$|-\d+-of-\d+$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    listed: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(Item):
    """A sample with its location, so that any process can read it without an index.

    Attributes:
        file: the file, as it was when it was indexed.
        offset: offset of the sample in bytes; in a Parquet file, its row.
    """

    file: _File
    offset: int


class RangeSource:
    """A source whose samples are byte ranges of files.

    Each read opens the file, checks that it has not changed since indexing, reads the range at its offset, and closes
    the file. Therefore, threads and forked processes share no open files, and no descriptors stay open. Items contain
    their locations, so a source that was unpickled or opened again reads them without indexing.
    """

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.files = tuple(files)
        table = mounts()
        self.can_hang = any(can_hang(folder, table) for folder in {os.path.dirname(os.path.abspath(f)) for f in files})
        self._lock = threading.Lock()
        self._listing: Listing | None = None

    def __getstate__(self) -> Mapping[str, Any]:
        files = tuple(file.absolute() for file in self.files)
        return {**self.__dict__, "files": files, "_lock": None, "_listing": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def list(self) -> Listing:
        """Return every sample, with its other fields as columns."""
        with self._lock:
            if self._listing is None:
                with translated(f"read {self.name!r}"):
                    self._listing = answer_of(self._indexed, self.can_hang)
            return self._listing

    def open(self, item: Item) -> BinaryIO:
        """Return a sample's bytes as a file."""
        return io.BytesIO(self._read(item if isinstance(item, Range) else self._known(item)))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read(self, known: Range) -> bytes:
        with open_listed(known.file.path, self.name, known.file.listed) as file:
            data = pread_all(file.fileno(), known.size, known.offset)
        if len(data) != known.size:
            raise broken_archive(str(known.file.path), f"{known.path!r} ends too early")
        return data

    def _known(self, item: Item) -> Range:
        items = self.list().items
        row = bisect_left(items, item.path, key=lambda one: one.path)
        known = items[row] if row < len(items) else None
        if not isinstance(known, Range) or (known.path, known.size) != (item.path, item.size):
            raise unknown_item(self.name, item, "sample")
        return known

    def _indexed(self) -> Listing:
        raise NotImplementedError


class ListingBuilder:
    """A listing under construction; samples are added file by file, in any order."""

    def __init__(self, name: str) -> None:
        self.act = f"read {name!r}"
        self.skipped: list[tuple[str, str]] = []
        self.columns: dict[str, list[Any]] = {}
        self._dropped: dict[str, str] = {}
        self._paths: list[str] = []
        self._sizes = array("q")
        self._files: list[_File] = []
        self._numbers = array("I")
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._paths)

    def open_next(self, path: Path) -> tuple[BinaryIO, int]:
        """Open the next file unbuffered and return it with its size; samples added from now on are in this file."""
        found = os.stat(path)
        listed = Item.of(path.name, found)
        self._files.append(_File(Path(os.path.abspath(path)), listed))
        return open_listed(path, str(path), listed), found.st_size

    def add(self, path: str, offset: int, size: int, fields: Mapping[str, Any]) -> None:
        """Add a sample with its fields by column; columns that `fields` does not contain get None."""
        still_moving()
        row = len(self._paths)
        self._paths.append(path)
        self._sizes.append(size)
        self._numbers.append(len(self._files) - 1)
        self._offsets.append(offset)
        for name, value in fields.items():
            if name in self._dropped:
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) == _MOST_COLUMNS:
                    found = f"{name!r:.80} would be column {_MOST_COLUMNS + 1}"
                    limit = f"at most {_MOST_COLUMNS} columns"
                    raise BadSource(cannot(self.act, found, limit, "Write the samples with fewer fields"))
                column = self.columns[name] = []
            column += [None] * (row - len(column))
            column.append(value)

    def drop(self, column: str, reason: str) -> None:
        """Omit a column for all samples."""
        self._dropped.setdefault(column, reason)
        self.columns.pop(column, None)

    def is_dropped(self, column: str) -> bool:
        """Return whether a column is omitted."""
        return column in self._dropped

    def finish(self) -> Listing:
        """Return the listing; raise `BadSource` if there are no samples, or two samples with the same path."""
        count = len(self._paths)
        if not count:
            example = f" (skipped {self.skipped[0][0]!r}: {self.skipped[0][1]})" if self.skipped else ""
            raise BadSource(cannot(self.act, f"it contains no samples{example}", "at least one", "Check the path"))
        for column in self.columns.values():
            column.extend([None] * (count - len(column)))
        if any(this >= that for this, that in zip(self._paths, self._paths[1:], strict=False)):
            self._sort()
        twice = next((one for one, other in zip(self._paths, self._paths[1:], strict=False) if one == other), None)
        if twice is not None:
            next_step = "Store all members of a sample together, and use each name only once"
            raise BadSource(cannot(self.act, f"two samples are named {twice!r}", "unique names", next_step))
        places = zip(self._paths, self._sizes, self._numbers, self._offsets, strict=True)
        items = tuple(
            Range(path, size, self._files[number].listed.mtime_ns, file=self._files[number], offset=offset)
            for path, size, number, offset in places
        )
        columns = {name: tuple(values) for name, values in sorted(self.columns.items())}
        return Listing(items, tuple(sorted([*self.skipped, *self._dropped.items()])), 0, columns)

    def _sort(self) -> None:
        order = sorted(range(len(self._paths)), key=self._paths.__getitem__)
        self._paths = [self._paths[row] for row in order]
        self._sizes = array("q", [self._sizes[row] for row in order])
        self._numbers = array("I", [self._numbers[row] for row in order])
        self._offsets = array("q", [self._offsets[row] for row in order])
        for name, values in self.columns.items():
            self.columns[name] = [values[row] for row in order]


def is_plain(value: Any) -> bool:
    """Return whether a column can hold a value: a number, a short text or a list of at most 1,024 of these."""
    waiting, count = [value], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) or (isinstance(one, str) and len(one) > MOST_TEXT_BYTES):
            return False
        if isinstance(one, list):
            waiting += one
        count += 1
        if count > MOST_VALUES + 1:
            return False
    return True


def text_of(data: bytes) -> str | None:
    """Return bytes as UTF-8 text; None if they are invalid or contain a zero byte, as binary numbers often do."""
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def shard_names(files: Sequence[Path]) -> list[str]:
    """Return a name for each shard: its path below the common folder, without the suffix if all names stay unique."""
    paths = [os.path.abspath(file) for file in files]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, root) for path in paths]
    short = [_SHARD_SUFFIX.sub("", name) for name in names]
    return short if len(set(short)) == len(set(names)) and all(short) else names


def split_of(shard: str) -> str | None:
    """Return the split named in a shard's name, such as `train` or `val`; None if it names none or several."""
    words = [word for word in re.split(r"[^a-z]+", shard.lower()) if word in _SPLIT_WORDS]
    return words[0] if len({_SPLIT_WORDS[word] for word in words}) == 1 else None

"""The protocol that all sources implement, and code that several of them share.

To add a source type, write a module with a class that implements `Source`, and add a line to `registry.py` that selects
the class. A new archive type inherits from `ArchiveSource`; only `registry.py` names the concrete classes of archives.

The class can also implement `SequentialSource`, and define

- `kind`, its `SourceKind`, by default `"folder"`: plans show it, and for a `"file"`, `stage()` returns the path of that
  file instead of a folder;
- `read_at_once(item)`, which returns the bytes of a small local item in the fastest way, or None if they are unreadable
  or have changed;
- `read_ahead(items)`, which lets the system read local items in the background that will soon be needed.

Sources can build on `PathSource`, `RangeSource` (samples that are parts of a few large files), `ByteSpan` (a
file-like object for an item) and `directory_of` (checks for archives).
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

from colabkit.foundation import (
    BadArchive,
    SourceChanged,
    can_hang,
    cannot,
    format_bytes,
    format_things,
    mounts,
    translated,
)

STAGE_SEAL = ".colabkit-stage.json"
"""Name of the seal that `stage()` writes into a local copy; it is not part of the data."""

MOST_MEMBERS = 10_000_000
"""Maximum number of members in an archive."""

MOST_LISTINGS = 6
"""Maximum number of listings of a folder on a mount, which may leave names out, until two of them agree."""

# Maximum size of members relative to their archive: photos grow by a few percent, and zip bombs thousands of times.
_INFLATION = 200
_INFLATION_SLACK_BYTES = 1 << 30

_LIST_AGAIN = "Try again, or create a new FileDataset, to list the source again"

# A path without empty parts and without parts that start with a dot.
_PLAIN_NAME = re.compile(r"(?:[^/\0.][^/\0]*/)*[^/\0.][^/\0]*")

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

H = TypeVar("H")

SourceKind: TypeAlias = Literal["folder", "archive", "file", "table", "bucket"]
"""The type of a source, for reports."""


def mode_of(path: str | os.PathLike[str]) -> int:
    """Return the mode of a file or folder; 0 if the path is missing, a broken link or not a valid path.

    Unlike `Path.is_dir()`, which returns False for any error in Python 3.14, it does not treat a dead mount as missing.

    Raises:
        OSError: if the path cannot be examined, for example because its mount is dead or permission is denied.
    """
    try:
        return os.stat(path).st_mode
    except ValueError:
        return 0
    except OSError as error:
        if error.errno in _MISSING:
            return 0
        raise


@dataclass(frozen=True, slots=True)
class Item:
    """A file of a source.

    Attributes:
        path: path inside the source, with forward slashes.
        size: size in bytes.
        mtime_ns: modification time in nanoseconds since 1970; 0 if unknown.
        ctime_ns: time of the last change of the file or its attributes, which no program can set; for an object of a
            bucket, a number made from its version; 0 if unknown. Items that differ only in this time are equal, since
            it also changes when a file is linked or renamed.
    """

    path: str
    size: int
    mtime_ns: int = 0
    ctime_ns: int = field(default=0, compare=False)

    @classmethod
    def of(cls, path: str, stats: os.stat_result) -> Item:
        """Return the item of a file at `path` inside the source."""
        return cls(path, stats.st_size, stats.st_mtime_ns, stats.st_ctime_ns)

    @property
    def has_version(self) -> bool:
        """Whether a change of the file's bytes would show in one of its times."""
        return bool(self.version_ns)

    @property
    def version_ns(self) -> int:
        """The modification time, or, if that is unknown, the time of the last change; 0 if both are unknown."""
        return self.mtime_ns or self.ctime_ns


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source, as returned by `Source.list()`.

    Attributes:
        items: the files, sorted by path; for a table, the files of its rows, in order.
        skipped: pairs of a skipped path, or of the place of a row without a path, and the reason.
        retries: number of retries while the source was listed.
        columns: the other columns of a table, or the fields of records, by name, with one value per item.
        extras: files that belong to the source but are not samples, such as the table itself.
        classes: names of the classes that the numbers in a column stand for, by column, if the source defines them.
        categories: all values that a column of text can have, in their order, by column, if the source defines them.
    """

    items: tuple[Item, ...]
    skipped: tuple[tuple[str, str], ...]
    retries: int = 0
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    extras: tuple[Item, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Total size of all items."""
        return sum(item.size for item in self.items)


@runtime_checkable
class Source(Protocol):
    """A collection of files: call `list()` once, then `open()` for any item from any thread.

    `list()` raises `TimedOut` if there is no answer in two attempts, `FileFailed` for errors of files and mounts,
    `FetchFailed` for errors of fsspec file systems, and `MissingPackage` if a required package is not installed.
    `open()` and its files can also raise `OSError`, which readers retry if it is transient.

    Attributes:
        name: name for messages.
        can_hang: whether another program or machine serves the source, so that a read may never return.
    """

    name: str
    can_hang: bool

    def list(self) -> Listing:
        """Return every regular file of the source.

        Raises:
            SourceMissing: if the source, or a file that it names explicitly, does not exist.
            BadSource: if its contents are invalid or unsuitable.
            BadArchive: if an archive or record file is truncated, damaged, encrypted, compressed in an unsupported way,
                or malicious: it names a file outside itself, uses a path for both a file and a folder, or would inflate
                to more than 200 times its size plus 1 GiB.
        """

    def open(self, item: Item) -> BinaryIO:
        """Return an unbuffered binary file with the item's bytes.

        If Python's `open()` created the file, it must hold exactly the item's bytes: blocks are read through its
        descriptor, whose size and time are compared with the listing. The `fileno()` of other files is not used, since
        it can refer to other data: that of `gzip.GzipFile` refers to the compressed file.

        Raises:
            SourceChanged: if the item no longer exists, or its size or time differs from the listing.
            BadArchive: if its bytes are found to be damaged or truncated.
        """

    def close(self) -> None:
        """Release files that reading keeps open; the next use opens them again."""


@runtime_checkable
class SequentialSource(Source, Protocol):
    """A source that `walk()` can read in one pass; some of these sources can only be read sequentially.

    Attributes:
        is_sequential: whether the source can only be read from its start.
    """

    @property
    def is_sequential(self) -> bool:
        """Whether `open()` has to read all data that precedes an item."""

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        """Yield the items whose paths are in `wanted`, by default all; each file is valid until the next step."""


class PathSource:
    """Base class of sources at one path; a pickled copy contains only the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.can_hang = can_hang(os.path.abspath(path), mounts())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path.absolute(),)

    def close(self) -> None:
        """Do nothing: no file stays open."""


class ArchiveSource(PathSource):
    """Base class of archives, which are files that hold other files. The constructor takes only a path.

    `stage()` copies a remote archive as one file and extracts the copy. A subclass implements `list()` and `open()`,
    and also `walk()` and `is_sequential` if it can only be read from its start.

    Attributes:
        has_directory: whether `list()` reads only a small part of the file, so that a remote archive is listed in
            place; otherwise, its local copy is listed.
    """

    kind: ClassVar[SourceKind] = "archive"
    has_directory: ClassVar[bool] = False

    @property
    def archive_bytes(self) -> int:
        """Size of the archive in bytes."""
        with translated(f"read {self.name!r}"):
            return self.path.stat().st_size

    @property
    def is_sequential(self) -> bool:
        """Whether `open()` has to read all data that precedes an item; defaults to False."""
        return False

    def list(self) -> Listing:
        """Return every regular member."""
        raise NotImplementedError

    def open(self, item: Item) -> BinaryIO:
        """Open a member."""
        raise NotImplementedError

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        """Yield the wanted items, by default all, in listing order; each file is valid until the next step."""
        for item in self.list().items:
            if wanted is None or item.path in wanted:
                with self.open(item) as file:
                    yield item, file


class ByteSpan(io.RawIOBase):
    """A seekable, read-only file of fixed size; subclasses implement `_bytes()`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position; it may be past the end."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes, by default all that remain; only an empty result marks the end."""
        if self.closed:
            raise ValueError("read of a closed file")
        left = max(0, self._size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self._bytes(size) if size else b""
        self._at += len(data)
        return data

    def _bytes(self, size: int) -> bytes:
        """Return at least one and at most `size` bytes, starting at the position."""
        raise NotImplementedError


def unknown_item(source: str, item: Item, kind: str = "member") -> SourceChanged:
    """Return the error for an item that a source does not contain."""
    act = f"read {item.path!r} of {source!r}"
    return SourceChanged(cannot(act, f"the source has no such {kind}", "", _LIST_AGAIN))


def changed_item(source: str, item: Item, found: int) -> SourceChanged:
    """Return the error for an item whose size or time has changed; `found` is its current size in bytes."""
    act = f"read {item.path!r} of {source!r}"
    if found == item.size:
        return SourceChanged(cannot(act, "it was modified after it was listed", "", _LIST_AGAIN))
    # Reading stops one byte after the listed size, so the actual size may be larger.
    listed = format_things(item.size, "byte")
    size = f"more than {listed}" if found == item.size + 1 else format_things(found, "byte")
    return SourceChanged(cannot(act, f"it has {size}", f"the listed {listed}", _LIST_AGAIN))


def unsteady_listing(act: str) -> SourceChanged:
    """Return the error for a folder whose listings never agree."""
    found = f"no two of {MOST_LISTINGS} listings contained the same names"
    return SourceChanged(cannot(act, found, "", "Try again when no program is adding or removing files"))


def broken_archive(source: str, reason: str) -> BadArchive:
    """Return the error for a damaged archive."""
    found = f"it is damaged or truncated ({reason})"
    return BadArchive(cannot(f"read {source!r}", found, "", "Download or create it again"))


class Member(NamedTuple, Generic[H]):
    """A member of an archive, as its header describes it.

    Name and size are taken from the header unchecked. `handle` locates the bytes in a form that depends on the archive
    type. `oddity` names the type of a member that is neither a regular file nor a folder. `hard_link` is the name to
    which a hard link refers; tar programs write a hard link if they archive the same file twice.
    """

    name: str
    size: int
    mtime_ns: int
    handle: H
    is_folder: bool = False
    oddity: str = ""
    hard_link: str = ""


@dataclass(frozen=True, slots=True)
class Directory(Generic[H]):
    """An archive's listing, and the handle of each item by its path."""

    listing: Listing
    handles: Mapping[str, H]


def directory_of(source: str, members: Iterable[Member[H]], archive_bytes: int) -> Directory[H]:
    """Return the regular files among an archive's members; of members with the same path, return the last one.

    Raises:
        BadArchive: if a name points outside the archive, a path is both a file and a folder, there are more than 10
            million members, or they would inflate too much.
    """
    act = f"read {source!r}"
    last: dict[str, Member[H]] = {}
    folders: set[str] = set()
    skipped: list[tuple[str, str]] = []
    for number, member in enumerate(members):
        if number == MOST_MEMBERS:
            limit = f"at most {MOST_MEMBERS:,}"
            raise BadArchive(cannot(act, "it has too many members", limit, "Extract it yourself if you trust it"))
        path = _inner_path(act, member)
        if member.is_folder:
            _add_folder(path, folders)
        elif member.hard_link == member.name and path in last:
            skipped.append((path, "repeated by a later member"))
        elif path != STAGE_SEAL:
            if path in last:
                skipped.append((path, "replaced by a later member with the same path"))
            last[path] = member
    items = []
    for path, member in last.items():
        if member.oddity:
            skipped.append((path, member.oddity))
        else:
            items.append(Item(path, member.size, member.mtime_ns))
            _add_folder(path.rpartition("/")[0], folders)
    if clash := next((item.path for item in items if item.path in folders), None):
        found = f"{clash!r} is both a file and a folder in it"
        raise BadArchive(cannot(act, found, "", "Rename one of them, and create the archive again"))
    listing = Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)))
    if listing.total_bytes > inflation_limit(archive_bytes):
        raise inflates_too_far(source, listing.total_bytes, archive_bytes)
    return Directory(listing, {item.path: last[item.path].handle for item in items})


def inflation_limit(archive_bytes: int) -> int:
    """Return the maximum total size, in bytes, of the members of an archive of the given size."""
    return _INFLATION * archive_bytes + _INFLATION_SLACK_BYTES


def inflates_too_far(source: str, size: int, archive_bytes: int) -> BadArchive:
    """Return the error for an archive that inflates to `size` bytes or more."""
    found = f"its members take up {format_bytes(size)} or more when decompressed"
    limit = f"at most {format_bytes(inflation_limit(archive_bytes))}"
    return BadArchive(cannot(f"read {source!r}", found, limit, "Extract it yourself if you trust it"))


def _inner_path(act: str, member: Member[H]) -> str:
    """Return a member's path inside the archive; empty for the root folder."""
    if _PLAIN_NAME.fullmatch(member.name) and not member.is_folder:
        return member.name
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.is_folder and not parts:
        return ""
    if member.name.startswith("/") or not parts or ".." in parts or "\0" in member.name:
        found = f"it has a member named {member.name!r}"
        raise BadArchive(cannot(act, found, "paths inside the archive", "Use an archive that you trust"))
    return "/".join(parts)


def _add_folder(path: str, folders: set[str]) -> None:
    while path and path not in folders:
        folders.add(path)
        path = path.rpartition("/")[0]

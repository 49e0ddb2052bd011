"""An LMDB as a source: its file is read here, page by page, not by LMDB's own library.

That library maps the file and trusts what is in it: a cut file ends the process by a signal. Its environments must not
cross a fork either. Each value lies in one piece, so that its place is all that a read needs.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from colabkit.foundation import BadArchive, BadSource, cannot, format_things
from colabkit.storage.sources.concurrency import still_moving
from colabkit.storage.sources.items import Listing, broken_archive
from colabkit.storage.sources.ranges import (
    HEAD_BYTES,
    MOST_TEXT_BYTES,
    Indexing,
    RangeSource,
    is_image_head,
    pread_all,
    text_of,
)

DATA_FILE = "data.mdb"
"""The file of an LMDB that is a folder."""

LMDB_SUFFIXES = (".lmdb", ".mdb")
"""How the names of LMDBs that are one file end."""

# lmdb.h and mdb.c of LMDB 0.9, on a 64-bit little-endian machine
_PAGE = struct.Struct("<QHHHH")  # number, padding, flags, then end of the table of nodes and start of the nodes
_OVERFLOW = struct.Struct("<QHHI")  # number, padding, flags, pages
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_DB = struct.Struct("<IHHQQQQQ")  # page size or padding, flags, depth, pages of three kinds, entries, root
_NODE = struct.Struct("<HHHH")  # low and high half of the size, flags, length of the key
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
_IS_BRANCH, _IS_LEAF, _IS_OVERFLOW, _IS_META, _IS_LEAF2 = 1, 2, 4, 8, 32
_IN_OVERFLOW, _IS_DATABASE = 1, 2
_MOST_DEPTH = 32

_FIRST_META_BYTES = _PAGE.size + _META.size + 2 * _DB.size + 16
_PAGE_SIZES = frozenset(1 << power for power in range(9, 17))

_LABEL_KEY = re.compile(rb"\Alabel-(?=\d+\Z)")
_COUNT_KEY = b"num-samples"
_MOST_COUNT_BYTES = 20
_PICKLE_HEADS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_CONTROL = re.compile(rb"[\0-\x1f\x7f]")


class LmdbSource(RangeSource):
    """A Lightning Memory-Mapped Database: a folder with `data.mdb`, or one file.

    Each key is a sample whose value is an image by its first bytes; if none is, every key. Its path is the key as
    UTF-8, or in hex if it is binary. In the layout of scene text, `image-000000001` with `label-000000001`, `label` is
    a column. Keys that are no samples, and databases inside, are named in the listing's `skipped`. A pickle is never
    loaded. LMDB keeps no checksums: a bit that flipped inside of a value is not noticed here.

    Args:
        path: of the folder or file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), [path / DATA_FILE if path.is_dir() else path])

    def _indexed(self) -> Listing:
        """Return where the values are, by one walk through the tree of keys."""
        found = Indexing(self.name)
        (path,) = self.files
        file, size = found.open_next(path)
        with file:
            values = _Values(file.fileno())
            for value in _Database(str(path), file.fileno(), size).values(found.skipped):
                values.add(value)
            rows = values.images or values.all_unless_pickled(found.act)
            paths = _paths(found, values.keys)
            labels = values.labels(found) if values.images else {}
            are_rows = bytearray(len(values.keys))
            for row in rows:
                are_rows[row] = True
                key = values.keys[row]
                fields = {"label": labels.get(key)} if labels else {}
                found.add(paths[row], values.offsets[row], values.sizes[row], fields)
            for row, is_sample in enumerate(are_rows):
                if not is_sample and not (labels and _LABEL_KEY.match(values.keys[row])):
                    is_pickle = values.is_pickle(row)
                    found.skipped.append((paths[row], "a pickle, which is never loaded" if is_pickle else "no image"))
        return found.finish()


class _Value(NamedTuple):
    """A key, where its value is, and the value's first bytes."""

    key: bytes
    offset: int
    size: int
    head: bytes


class _Values:
    """All keys of a database, and what their values are by the first bytes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.keys: list[bytes] = []
        self.offsets = array("q")
        self.sizes = array("q")
        self.images = array("L")
        self._may_be_pickle = bytearray()

    def add(self, value: _Value) -> None:
        still_moving()
        if is_image_head(value.head):
            self.images.append(len(self.keys))
        self.keys.append(value.key)
        self.offsets.append(value.offset)
        self.sizes.append(value.size)
        self._may_be_pickle.append(value.head.startswith(_PICKLE_HEADS))

    def read(self, row: int) -> bytes:
        return pread_all(self._fd, self.sizes[row], self.offsets[row])

    def is_pickle(self, row: int) -> bool:
        """Return whether a value begins and ends as pickles do."""
        return bool(self._may_be_pickle[row]) and self.read(row).endswith(b".")

    def all_unless_pickled(self, act: str) -> range:
        """Return all rows.

        Raises:
            BadSource: if a value is a pickle.
        """
        rows = range(len(self.keys))
        if (row := next(filter(self.is_pickle, rows), None)) is not None:
            told = f"the value of {self.keys[row]!r:.80} is a pickle"
            needed = "bytes of images or arrays: a pickle may run any code, and is never loaded"
            raise BadSource(cannot(act, told, needed, "Write the bytes themselves as values"))
        return rows

    def labels(self, found: Indexing) -> dict[bytes, str | None]:
        """Return the labels by the key of their image in the layout of scene text; of others none.

        Raises:
            BadSource: if a label is no text.
        """
        labels: dict[bytes, str | None] = {}
        count = None
        images = {self.keys[row] for row in self.images}
        for row, key in enumerate(self.keys):
            if key == _COUNT_KEY and self.sizes[row] <= _MOST_COUNT_BYTES:
                count = self.read(row)
            image = _LABEL_KEY.sub(b"image-", key)
            if image != key and image in images:
                labels[image] = self._text(found.act, row)
        if labels and count is not None and count != b"%d" % len(images):
            found.skipped.append(
                (_COUNT_KEY.decode(), f"it says {count!r}, and it holds {format_things(len(images), 'image')}")
            )
        return labels

    def _text(self, act: str, row: int) -> str:
        text = text_of(self.read(row)) if self.sizes[row] <= MOST_TEXT_BYTES else None
        if text is None:
            told = f"{self.keys[row]!r} is no text"
            raise BadSource(cannot(act, told, "a text as label", "Repair or leave out this sample"))
        return text


class _Database:
    """The main database of an LMDB file.

    Source: mdb.c of LMDB 0.9: two pages that each name a root, the newer of which holds; below it a B+ tree.

    Raises:
        BadArchive: if the file is none, or is broken.
    """

    def __init__(self, name: str, fd: int, size: int) -> None:
        self._name = name
        self._fd = fd
        self._size = size
        self._page_bytes = _FIRST_META_BYTES
        self._page_bytes, *first = self._meta(0)
        _, *second = self._meta(1)
        _, self._flags, self._depth, self._entries, self._root = max(first, second, key=lambda meta: meta[0])

    def values(self, skipped: list[tuple[str, str]]) -> Iterator[_Value]:
        """Yield every key with its value's place, in the order of keys.

        Args:
            skipped: gets the names of databases inside.
        """
        if self._flags:
            raise self._broken(f"keys or values of a kind that is not read, by its flags {self._flags}")
        if self._root == _NO_PAGE:
            return
        count, total = 0, 0
        before: bytes | None = None
        for page in self._leaves(self._root, self._depth):
            for at, low, high, flags, key_bytes in self._nodes(page):
                key = page[at : at + key_bytes]
                if before is not None and key <= before:
                    raise self._broken(f"the key {key!r:.80} is out of order")
                before = key
                count += 1
                if flags & _IS_DATABASE:
                    skipped.append((key.decode("utf-8", "backslashreplace"), "a database inside of the database"))
                    continue
                if flags & ~_IN_OVERFLOW:
                    raise self._broken(f"{key!r:.80} is of a kind that is not known")
                value = self._value(page, at + key_bytes, key, low | high << 16, bool(flags & _IN_OVERFLOW))
                total += value.size
                if total > self._size:
                    raise self._broken("its values are larger than itself")
                yield value
        if count != self._entries:
            raise self._broken(f"{count} keys of {self._entries}")

    def _meta(self, number: int) -> tuple[int, int, int, int, int, int]:
        """Return page size, transaction, and flags, depth, entries and root of the main database."""
        page = self._page(number, _FIRST_META_BYTES)
        magic, version, _, _ = _META.unpack_from(page, _PAGE.size)
        if magic != _MAGIC or not self._flags_of(page) & _IS_META:
            raise self._broken("it has no mark of LMDB on a 64-bit little-endian machine")
        if version != _VERSION:
            found = f"LMDB data of version {version}"
            raise BadArchive(cannot(f"read {self._name!r}", found, f"version {_VERSION}", "Write it with LMDB 0.9"))
        at = _PAGE.size + _META.size
        page_bytes = _DB.unpack_from(page, at)[0]
        if page_bytes not in _PAGE_SIZES or (number and page_bytes != self._page_bytes):
            raise self._broken(f"pages of {page_bytes} bytes")
        _, flags, depth, _, _, _, entries, root = _DB.unpack_from(page, at + _DB.size)
        if depth > _MOST_DEPTH:
            raise self._broken(f"a tree {depth} pages deep")
        (transaction,) = struct.unpack_from("<Q", page, at + 2 * _DB.size + 8)
        return page_bytes, transaction, flags, depth, entries, root

    def _leaves(self, number: int, depth: int) -> Iterator[bytes]:
        """Yield the leaf pages below a page, from left to right."""
        page = self._page(number, self._page_bytes)
        flags = self._flags_of(page)
        if depth == 1 and flags & _IS_LEAF and not flags & (_IS_BRANCH | _IS_OVERFLOW | _IS_META | _IS_LEAF2):
            yield page
        elif depth > 1 and flags & _IS_BRANCH and not flags & (_IS_LEAF | _IS_OVERFLOW | _IS_META):
            for _, low, high, top, _ in self._nodes(page):
                yield from self._leaves(low | high << 16 | top << 32, depth - 1)
        else:
            raise self._broken(f"page {number} is of another kind than its place")

    def _nodes(self, page: bytes) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield for each node of a page where its key begins, its size's halves, its flags and its key's length."""
        _, _, _, lower, upper = _PAGE.unpack_from(page)
        if not _PAGE.size < lower <= upper <= len(page) or lower % 2:
            raise self._broken("a page without a table of nodes")
        for at in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size):
            if not upper <= at <= len(page) - _NODE.size:
                raise self._broken("a node outside of its page")
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            if at + _NODE.size + key_bytes > len(page):
                raise self._broken("a key outside of its page")
            yield at + _NODE.size, low, high, flags, key_bytes

    def _value(self, page: bytes, at: int, key: bytes, size: int, is_in_overflow: bool) -> _Value:
        (own,) = struct.unpack_from("<Q", page)
        if not is_in_overflow:
            if at + size > len(page):
                raise self._broken(f"the value of {key!r:.80} lies outside of its page")
            return _Value(key, own * self._page_bytes + at, size, page[at : at + min(size, HEAD_BYTES)])
        if at + 8 > len(page):
            raise self._broken(f"the value of {key!r:.80} lies outside of its page")
        (number,) = struct.unpack_from("<Q", page, at)
        head = self._page(number, _OVERFLOW.size + min(size, HEAD_BYTES))
        _, _, flags, pages = _OVERFLOW.unpack_from(head)
        if not flags & _IS_OVERFLOW or _OVERFLOW.size + size > pages * self._page_bytes:
            raise self._broken(f"the value of {key!r:.80} is not where it should be")
        offset = number * self._page_bytes + _OVERFLOW.size
        if offset + size > self._size:
            raise self._broken(f"it is cut short within the value of {key!r:.80}")
        return _Value(key, offset, size, head[_OVERFLOW.size :])

    def _page(self, number: int, size: int) -> bytes:
        """Return so many bytes of a page, which has its own number in front."""
        offset = number * self._page_bytes
        if offset + size > self._size:
            raise self._broken(f"it is cut short before byte {offset + size}")
        page = pread_all(self._fd, size, offset)
        if len(page) < size or struct.unpack_from("<Q", page)[0] != number:
            raise self._broken(f"page {number} is not where it should be")
        return page

    @staticmethod
    def _flags_of(page: bytes) -> int:
        return int(_PAGE.unpack_from(page)[2])

    def _broken(self, reason: str) -> BadArchive:
        """Return the error for a file whose bytes make no sense."""
        return broken_archive(self._name, reason)


def _paths(found: Indexing, keys: list[bytes]) -> list[str]:
    """Return the keys as paths: UTF-8, and where there are binary ones, in hex what is no UTF-8.

    Raises:
        BadSource: if one points out of the database, as a path.
    """
    has_binary = any(map(_CONTROL.search, keys))
    paths = []
    for key in keys:
        text = key.decode("utf-8", "surrogateescape")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if not parts or (has_binary and (_CONTROL.search(key) or not text.isprintable())):
            paths.append(key.hex())
            continue
        if ".." in parts:
            needed = "keys that lie inside as paths"
            raise BadSource(cannot(found.act, f"the key {key!r:.80}", needed, "Write it with other keys"))
        paths.append("/".join(parts))
    return paths

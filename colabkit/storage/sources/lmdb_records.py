"""An LMDB as a source; LMDB's library, in a child process, lists the locations of the values.

LMDB's library maps the file and trusts its contents: a truncated file kills the process with a signal. Also, an open
LMDB must not be used after a fork. Therefore, only a child process uses the library, and only for listing. Each value
is contiguous, so its offset and size are sufficient for reading it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from array import array
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    BadArchive,
    BadSource,
    MissingPackage,
    TimedOut,
    cannot,
    format_things,
    is_image_head,
    processes,
)
from colabkit.storage.sources.concurrency import STALLED_S, still_moving
from colabkit.storage.sources.items import Listing, broken_archive
from colabkit.storage.sources.ranges import (
    MOST_TEXT_BYTES,
    ListingBuilder,
    RangeSource,
    text_of,
)
from colabkit.storage.sources.reads import pread_all

DATA_FILE = "data.mdb"
"""Name of the data file in an LMDB folder."""

LMDB_SUFFIXES = (".lmdb", ".mdb")
"""File name suffixes of single-file LMDBs."""

# Refer to `lmdb_child` by its path, because importing it would import lmdb, which only the child process needs.
_CHILD = Path(__file__).with_name("lmdb_child.py")
_LABEL_KEY = re.compile(rb"\Alabel-(?=\d+\Z)")
_COUNT_KEY = b"num-samples"
_MOST_COUNT_BYTES = 20
_PICKLE_HEADS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_CONTROL = re.compile(rb"[\0-\x1f\x7f]")


class LmdbSource(RangeSource):
    """A Lightning Memory-Mapped Database: a folder with `data.mdb`, or one file.

    Every key whose value starts like an image is a sample; if there are no such keys, every key is a sample. A sample's
    path is its key as UTF-8, or in hex if the key is binary. In the layout of scene text datasets, `image-000000001`
    with `label-000000001`, the labels become the column `label`. Other keys and nested databases are listed in
    `skipped`. Pickles are never loaded. LMDB stores no checksums, so a flipped bit inside a value is not detected.

    Args:
        path: the folder or file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), [path / DATA_FILE if path.is_dir() else path])

    def _indexed(self) -> Listing:
        found = ListingBuilder(self.name)
        (path,) = self.files
        file, size = found.open_next(path)
        with file:
            values = _LmdbValues(str(path), file.fileno(), size)
            values.list_all(found)
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
                    reason = "a pickle, which is never loaded" if values.is_pickle(row) else "not an image"
                    found.skipped.append((paths[row], reason))
        return found.finish()


class _LmdbValues:
    def __init__(self, name: str, fd: int, size: int) -> None:
        self._name = name
        self._fd = fd
        self._size = size
        self.keys: list[bytes] = []
        self.offsets = array("q")
        self.sizes = array("q")
        self.images = array("L")
        self._may_be_pickle = bytearray()

    def list_all(self, found: ListingBuilder) -> None:
        if importlib.util.find_spec("lmdb") is None:
            missing = "the package lmdb, which is needed to read LMDB, is not installed"
            raise MissingPackage(cannot(found.act, missing, "", "Run pip install lmdb"))
        heard = time.monotonic()
        is_whole = False

        def on_line(line: str) -> None:
            nonlocal heard, is_whole
            heard = time.monotonic()
            still_moving()
            if (record := processes.parse_record(line)) is None:
                return
            if "error" in record:
                reason = f"the library lmdb cannot list it ({record['error']})"
                raise BadArchive(cannot(f"read {self._name!r}", reason, "", "Check the database, or create it again"))
            found.skipped += [(name, "a nested database") for name in record["databases"]]
            is_whole = record["is_last"]
            self._add(record)

        def on_tick(_: float) -> None:
            if time.monotonic() - heard > STALLED_S:
                stalled = f"the library lmdb listed no key for {STALLED_S:g} s"
                next_step = "Copy the database to local storage, or create it again"
                raise TimedOut(cannot(found.act, stalled, "", next_step))

        # The child runs in another working folder.
        path = os.path.abspath(self._name)
        command = processes.python(_CHILD.read_text(encoding="utf-8"), path, isolated=False)
        ended = processes.run(command, found.act, math.inf, on_line=on_line, on_tick=on_tick)
        if not is_whole:
            raise broken_archive(self._name, f"the library lmdb ended early with status {ended.status}")

    def _add(self, record: dict[str, Any]) -> None:
        first = len(self.keys)
        keys, heads = ([bytes.fromhex(text) for text in record[name]] for name in ("keys", "heads"))
        offsets, sizes = record["offsets"], record["sizes"]
        if keys and pread_all(self._fd, len(heads[0]), offsets[0]) != heads[0]:
            raise broken_archive(self._name, f"the value of {keys[0]!r:.80} is not at its listed offset")
        if any(offset < 0 or offset + size > self._size for offset, size in zip(offsets, sizes, strict=True)):
            raise broken_archive(self._name, "a value extends past the end of the file")
        self.keys += keys
        self.offsets.extend(offsets)
        self.sizes.extend(sizes)
        self.images.extend(first + at for at, head in enumerate(heads) if is_image_head(head))
        self._may_be_pickle.extend(head.startswith(_PICKLE_HEADS) for head in heads)

    def read(self, row: int) -> bytes:
        return pread_all(self._fd, self.sizes[row], self.offsets[row])

    def is_pickle(self, row: int) -> bool:
        return bool(self._may_be_pickle[row]) and self.read(row).endswith(b".")

    def all_unless_pickled(self, act: str) -> range:
        """Return all rows; raise `BadSource` if a value is a pickle."""
        rows = range(len(self.keys))
        if (row := next(filter(self.is_pickle, rows), None)) is not None:
            pickled = f"the value of {self.keys[row]!r:.80} is a pickle, which is never loaded since it can run code"
            next_step = "Create the database again with these bytes as values"
            raise BadSource(cannot(act, pickled, "bytes of images or arrays", next_step))
        return rows

    def labels(self, found: ListingBuilder) -> dict[bytes, str | None]:
        """Return the labels by image key, in the layout of scene text datasets; empty for other layouts."""
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
            reason = f"its value is {count!r}, and the database has {format_things(len(images), 'image')}"
            found.skipped.append((_COUNT_KEY.decode(), reason))
        return labels

    def _text(self, act: str, row: int) -> str:
        text = text_of(self.read(row)) if self.sizes[row] <= MOST_TEXT_BYTES else None
        if text is None:
            found = f"the label at the key {self.keys[row]!r} is not text"
            raise BadSource(cannot(act, found, "UTF-8 text", "Repair or remove this sample"))
        return text


def _paths(found: ListingBuilder, keys: list[bytes]) -> list[str]:
    has_binary = any(map(_CONTROL.search, keys))
    paths = []
    for key in keys:
        text = key.decode("utf-8", "surrogateescape")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if not parts or (has_binary and (_CONTROL.search(key) or not text.isprintable())):
            paths.append(key.hex())
            continue
        if ".." in parts:
            outside = f"the key {key!r:.80} contains '..' as a folder"
            next_step = "Create the database with other keys"
            raise BadSource(cannot(found.act, outside, "keys that are paths inside the source", next_step))
        paths.append("/".join(parts))
    return paths

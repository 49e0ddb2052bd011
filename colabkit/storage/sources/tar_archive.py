"""A tar archive as a source, plain or compressed."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from colabkit.foundation import translated
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.items import (
    ArchiveSource,
    ByteSpan,
    Directory,
    Item,
    Listing,
    broken_archive,
    changed_item,
    directory_of,
    unknown_item,
)
from colabkit.storage.sources.reads import is_as_listed, open_listed, pread_all
from colabkit.storage.sources.tar_stream import TarStream, compression_of, is_tar_head, tar_members

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")
"""File name suffixes of tar archives."""

# Maximum size in bytes of members that are read in one piece.
_AT_ONCE_BYTES = 1 << 20


def is_tar(path: Path) -> bool:
    """Return whether a file begins like a tar, after decompression if necessary."""
    with path.open("rb") as file:
        return is_tar_head(str(path), file)


class _OpenTar(NamedTuple):
    file: BinaryIO
    archive: Item
    is_sequential: bool


class TarSource(ArchiveSource):
    """A tar archive, read without extracting it: plain, or compressed with gzip, bzip2, xz or zstd.

    Members of a plain tar can be read in any order, from any thread. A compressed tar can only be read from its start:
    `list()` reads all of it once, and `walk()` yields its members in one pass. `open()` is slow, since it starts a new
    pass for each member. The compression is recognized by the first bytes, not by the name.

    Args:
        path: the path of the archive.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._opened: _OpenTar | None = None
        self._known: tuple[Item, Directory[int]] | None = None

    @property
    def archive_bytes(self) -> int:
        """Size of the archive in bytes."""
        return self._open().archive.size

    @property
    def is_sequential(self) -> bool:
        """Whether the archive is compressed, and so can only be read from its start."""
        return self._open().is_sequential

    def close(self) -> None:
        """Close the archive; the next use opens it again."""
        with self._lock:
            if self._opened is not None:
                self._opened.file.close()
                self._opened = None

    def list(self) -> Listing:
        """Return every regular member."""
        return self._directory(self._open()).listing

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        """Yield the wanted items, by default all, in archive order; each file is valid until the next step."""
        opened = self._open()
        directory = self._directory(opened)
        places = [(directory.handles[item.path], item) for item in directory.listing.items]
        chosen = sorted((place for place in places if wanted is None or place[1].path in wanted), key=lambda at: at[0])
        if not opened.is_sequential:
            for _, item in chosen:
                with self.open(item) as file:
                    yield item, file
        elif chosen:
            with translated(f"read {self.name!r}"):
                stream = self._stream(opened.archive)
            with closing(stream):
                for at, item in chosen:
                    with _TarMember(stream, at, item.size) as file:
                        yield item, cast(BinaryIO, file)
                with translated(f"read {self.name!r}"):
                    stream.drain()

    def open(self, item: Item) -> BinaryIO:
        """Open a member; in a compressed archive, this reads everything before it."""
        opened = self._open()
        directory = self._directory(opened)
        at = directory.handles.get(item.path)
        if at is None:
            raise unknown_item(self.name, item)
        if not opened.is_sequential:
            if not is_as_listed(os.fstat(opened.file.fileno()), opened.archive):
                raise changed_item(self.name, opened.archive, os.fstat(opened.file.fileno()).st_size)
            part = _Slice(self.name, opened.file, at, item)
            return io.BytesIO(part.read()) if item.size <= _AT_ONCE_BYTES else cast(BinaryIO, part)
        if item.size > _AT_ONCE_BYTES:
            return cast(BinaryIO, _TarMember(None, at, item.size, lambda: self._stream(opened.archive)))
        with closing(self._stream(opened.archive)) as stream:
            stream.skip(at)
            return io.BytesIO(stream.read(item.size))

    def _open(self) -> _OpenTar:
        with self._lock:
            if self._opened is None:
                with translated(f"read {self.name!r}"):
                    self._opened = answer_of(self._first_look, self.can_hang)
            return self._opened

    def _first_look(self) -> _OpenTar:
        found = os.stat(self.path)
        archive = Item.of(self.path.name, found)
        file = open_listed(self.path, self.name, archive)
        try:
            return _OpenTar(file, archive, bool(compression_of(os.pread(file.fileno(), 16, 0))))
        except BaseException:
            file.close()
            raise

    def _directory(self, opened: _OpenTar) -> Directory[int]:
        with self._lock:
            if self._known is None or self._known[0] != opened.archive:
                directory = answer_of(lambda: self._read_directory(opened.archive), self.can_hang)
                self._known = opened.archive, directory
            return self._known[1]

    def _read_directory(self, archive: Item) -> Directory[int]:
        with translated(f"read {self.name!r}"), closing(self._stream(archive)) as stream:
            directory = directory_of(self.name, tar_members(stream), archive.size)
            stream.drain()
            return directory

    def _stream(self, archive: Item) -> TarStream:
        file = open_listed(self.path, self.name, archive)
        try:
            return TarStream(self.name, file, archive.size)
        except BaseException:
            file.close()
            raise


class _Slice(ByteSpan):
    def __init__(self, source: str, archive: BinaryIO, start: int, item: Item) -> None:
        super().__init__(item.size)
        self._source = source
        self._archive = archive
        self._start = start
        self._path = item.path

    def _bytes(self, size: int) -> bytes:
        data = pread_all(self._archive.fileno(), size, self._start + self._at)
        if len(data) < size:
            raise broken_archive(self._source, f"{self._path!r} ends too early")
        return data


class _TarMember(ByteSpan):
    """A member of a compressed tar, reached by skipping everything before it.

    Reads use `stream`, which stays open, or a separate stream, which `again` opens for the first read and after each
    backward seek.
    """

    def __init__(
        self, stream: TarStream | None, start: int, size: int, again: Callable[[], TarStream] | None = None
    ) -> None:
        super().__init__(size)
        self._stream = stream
        self._start = start
        self._again = again

    def _bytes(self, size: int) -> bytes:
        target = self._start + self._at
        if self._again is not None and (self._stream is None or self._stream.position > target):
            if self._stream is not None:
                self._stream.close()
            self._stream = self._again()
        if self._stream is None or self._stream.position > target:
            raise io.UnsupportedOperation("it can only be read forwards")
        self._stream.skip(target - self._stream.position)
        return self._stream.read(size)

    def close(self) -> None:
        if self._again is not None and self._stream is not None:
            self._stream.close()
        super().close()

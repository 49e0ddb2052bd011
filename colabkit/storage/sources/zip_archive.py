"""A zip archive as a source."""

from __future__ import annotations

import calendar
import errno
import io
import lzma
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, BinaryIO, Final, NamedTuple, cast

from colabkit.foundation import BadArchive, cannot, translated
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.items import (
    ArchiveSource,
    ByteSpan,
    Directory,
    Item,
    Listing,
    Member,
    broken_archive,
    directory_of,
    unknown_item,
)

# Maximum size in bytes of members that are inflated in one piece, unless they are compressed with bzip2 or LZMA.
_INFLATE_BYTES = 64 << 20
# Local file header: the signature, and the lengths of the name and of the extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
_UTF8 = 1 << 11
_READABLE = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA})
# Unsupported methods, from section 4.4.5 of PKWARE's APPNOTE.TXT.
_METHODS: Final = {
    6: "Implode",
    9: "Deflate64",
    10: "PKWARE's Implode",
    20: "Zstandard",
    93: "Zstandard",
    94: "MP3",
    95: "XZ",
    96: "JPEG",
    97: "WavPack",
    98: "PPMd",
    99: "AES encryption",
}
# Exceptions of zipfile and its decompressors for invalid or changed archives.
_BROKEN = (
    *(zipfile.BadZipFile, EOFError, LookupError, ValueError, NotImplementedError, OverflowError, RuntimeError),
    *(struct.error, zlib.error, lzma.LZMAError),
)


class _OpenZip(NamedTuple):
    archive: zipfile.ZipFile
    directory: Directory[zipfile.ZipInfo]


class ZipSource(ArchiveSource):
    """A zip archive, read member by member without extracting it.

    Stored and deflated members of up to 64 MiB are read with `os.pread` and inflated in one piece. This is several
    times faster than the streams of `zipfile`, and threads can read concurrently.
    """

    has_directory = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._opening = threading.Lock()
        self._opened: _OpenZip | None = None

    def close(self) -> None:
        """Close the archive; the next use opens it again."""
        with self._opening:
            if self._opened is not None:
                self._opened.archive.close()
                self._opened = None

    def list(self) -> Listing:
        """Return every regular member; raise `BadArchive` if a file is encrypted or its compression is unsupported."""
        return self._open_archive().directory.listing

    def _open_archive(self) -> _OpenZip:
        with self._opening:
            if self._opened is None:
                with translated(f"read {self.name!r}"):
                    self._opened = answer_of(self._read_directory, self.can_hang)
            return self._opened

    def _read_directory(self) -> _OpenZip:
        try:
            archive = zipfile.ZipFile(self.path)
        except _BROKEN as error:
            raise broken_archive(self.name, str(error)) from None
        except TypeError as error:
            # Python returns None instead of raising if the system call fails with EAGAIN.
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self.path)) from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise broken_archive(self.name, "its directory is outside the file") from error
        try:
            # Forked processes share the position of a file, which streams of members move.
            archive.fp = cast(IO[bytes], _ArchiveFile(archive.fp, self.archive_bytes))
            return _OpenZip(archive, directory_of(self.name, self._members(archive), self.archive_bytes))
        except BaseException:
            archive.close()
            raise

    def _members(self, archive: zipfile.ZipFile) -> Iterator[Member[zipfile.ZipInfo]]:
        act = f"read {self.name!r}"
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            oddity = "link" if kind == stat.S_IFLNK else ""
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                oddity = "special file"
            is_folder = member.filename.endswith("/") or kind == stat.S_IFDIR
            is_file = not is_folder and not oddity
            if is_file and member.flag_bits & _ENCRYPTED:
                encrypted = f"its member {member.filename!r} is encrypted"
                raise BadArchive(cannot(act, encrypted, "", "Extract it with its password first"))
            if is_file and member.compress_type not in _READABLE:
                method = _METHODS.get(member.compress_type, f"method {member.compress_type}")
                found = f"its member {member.filename!r} is compressed with {method}"
                expected = "Deflate, bzip2, LZMA or no compression"
                raise BadArchive(cannot(act, found, expected, "Extract it with another program first"))
            yield Member(member.filename, member.file_size, _mtime_ns(member.date_time), member, is_folder, oddity)

    def open(self, item: Item) -> BinaryIO:
        """Open a member; its CRC is checked at the latest when its last byte is read."""
        archive, directory = self._open_archive()
        member = directory.handles.get(item.path)
        if member is None:
            raise unknown_item(self.name, item)
        try:
            if member.header_offset < 0:
                raise zipfile.BadZipFile("it begins before the archive")
            plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if plain and max(item.size, member.file_size, member.compress_size) <= _INFLATE_BYTES:
                return io.BytesIO(self._inflated(archive, member))
            return cast(BinaryIO, _ZipMember(self.name, archive.open(member), member))
        except _BROKEN as error:
            raise broken_archive(self.name, f"{item.path!r}: {error}") from error

    def read_at_once(self, item: Item) -> bytes | None:
        """Return a member's bytes if it is valid, stored or deflated, and not large; otherwise None."""
        archive, directory = self._open_archive()
        member = directory.handles.get(item.path)
        if member is None or member.file_size != item.size or member.compress_size > _INFLATE_BYTES:
            return None
        if member.header_offset < 0 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return None
        try:
            return self._inflated(archive, member)
        except _BROKEN:
            return None

    @staticmethod
    def _inflated(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        assert archive.fp is not None
        fd = archive.fp.fileno()
        name = member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")
        header = os.pread(fd, _LOCAL_HEADER.size + len(name), member.header_offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
        if signature != b"PK\x03\x04":
            raise zipfile.BadZipFile("it has no header at the offset in the directory")
        # The directory has no checksum, so a flipped bit could rename a file or hide the next one.
        if name_length != len(name) or not header.endswith(name):
            raise zipfile.BadZipFile("its names in the directory and in its header differ")
        offset = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        data = os.pread(fd, member.compress_size, offset)
        if member.compress_type == zipfile.ZIP_DEFLATED:
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            # Inflate at most one byte more than declared; the next check detects the extra byte.
            data = inflater.decompress(data, member.file_size + 1)
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile("its bytes do not match its CRC")
        return data


class _ArchiveFile(ByteSpan):
    """An open archive with a position of its own in each process."""

    def __init__(self, file: IO[bytes] | None, size: int) -> None:
        super().__init__(size)
        assert file is not None
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def _bytes(self, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, self._at)

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZipMember(ByteSpan):
    def __init__(self, source: str, file: IO[bytes], member: zipfile.ZipInfo) -> None:
        super().__init__(member.file_size)
        self._source = source
        self._file = file
        self._path = member.filename

    def _bytes(self, size: int) -> bytes:
        try:
            if self._file.tell() != self._at:
                self._file.seek(self._at)
            if block := self._file.read(size):
                return block
            raise zipfile.BadZipFile("it has fewer bytes than its header states")
        except (*_BROKEN, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                # An error number means a file system error, since errors of bzip2 have none.
                raise
            raise broken_archive(self._source, f"{self._path!r}: {error}") from error

    def close(self) -> None:
        self._file.close()
        super().close()


@lru_cache(maxsize=1024)
def _mtime_ns(date_time: tuple[int, ...]) -> int:
    """Return a member's modification time in ns, read as UTC since zip stores no time zone; 0 if it is invalid."""
    try:
        return calendar.timegm(date_time) * 10**9
    except (ValueError, OverflowError):
        return 0

"""A zip archive as a source."""

from __future__ import annotations

import io
import lzma
import os
import stat
import struct
import threading
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from colabkit.errors import BadArchive, cannot
from colabkit.sources.items import STAGE_SEAL, Item, Listing, broken_archive

__all__ = ["ZipSource"]

_INFLATE_BYTES = 64 << 20  # larger members are streamed
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then lengths of name and extra field
_ZIP_RATIO_LIMIT = 200  # a photo archive inflates by a few per cent; a bomb by thousands
_ZIP_SLACK_BYTES = 1 << 30
_BROKEN = (  # what zipfile and its decompressors raise on bytes that are no archive, or not any more
    *(zipfile.BadZipFile, EOFError, KeyError, ValueError, NotImplementedError, OverflowError, RuntimeError),
    *(struct.error, zlib.error, lzma.LZMAError),
)


class ZipSource:
    """A zip archive, read member by member without extracting it.

    Stored and deflated members, which is nearly all there are, are read by `os.pread` and inflated in one piece: that
    is several times faster than `zipfile`'s streams and lets threads read at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._opening = threading.Lock()
        self._opened: tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]] | None = None

    def _open_archive(self) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
        """Return the archive and its members by path; of several with one path the last counts."""
        with self._opening:
            if self._opened is None:
                try:
                    archive = zipfile.ZipFile(self.path)
                except _BROKEN as error:
                    raise broken_archive(self.name, str(error)) from error
                members = {_member_path(member): member for member in archive.infolist() if not member.is_dir()}
                self._opened = archive, members
            return self._opened

    def close(self) -> None:
        """Close the archive; the next use opens it again."""
        with self._opening:
            if self._opened is not None:
                self._opened[0].close()
                self._opened = None

    def list(self) -> Listing:
        """Return every regular member.

        Raises:
            BadArchive: if the archive is cut short or broken, names a file outside itself or inside another file, or
                would inflate to more than 200 times its size and 1 GiB.
        """
        act = f"read {self.name!r}"
        items, skipped = [], []
        archive, members = self._open_archive()
        for member in archive.infolist():
            path = _member_path(member)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if member.is_dir() or path == STAGE_SEAL:
                continue
            if member.filename.startswith("/") or not path or ".." in path.split("/") or "\0" in path:
                found = f"a member named {member.filename!r}"
                raise BadArchive(cannot(act, found, "names inside the archive", "Do not use an archive like this"))
            if members[path] is not member:
                skipped.append((path, "a later member has its name"))
            elif kind not in (0, stat.S_IFREG):
                skipped.append((path, "link or special file"))
            elif member.flag_bits & 1:
                found = f"{path!r} is encrypted"
                raise BadArchive(cannot(act, found, "plain members", "Extract it with its password first"))
            else:
                items.append(Item(path, member.file_size))
        folders = {str(folder) for item in items for folder in PurePosixPath(item.path).parents}
        if clash := next((item.path for item in items if item.path in folders), None):
            found = f"{clash!r} is a file and a folder"
            raise BadArchive(cannot(act, found, "one of them", "Do not use an archive like this"))
        listing = Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)))
        limit = _ZIP_RATIO_LIMIT * self.path.stat().st_size + _ZIP_SLACK_BYTES
        if listing.total_bytes > limit:
            found = f"{listing.total_bytes} bytes when inflated"
            raise BadArchive(cannot(act, found, f"at most {limit}", "Extract it yourself if you trust it"))
        return listing

    def open(self, item: Item) -> BinaryIO:
        """Open a member; its CRC is checked at the latest when its last byte is read."""
        archive, members = self._open_archive()
        try:
            member = members[item.path]
            if member.header_offset < 0:
                raise zipfile.BadZipFile("it begins before the archive does")
            plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if plain and max(item.size, member.compress_size) <= _INFLATE_BYTES:
                return io.BytesIO(self._inflated(archive, member))
            return cast(BinaryIO, _Member(archive.open(member), member.file_size))
        except _BROKEN as error:
            raise broken_archive(self.name, f"{item.path!r}: {error}") from error

    @staticmethod
    def _inflated(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        assert archive.fp is not None
        fd = archive.fp.fileno()
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(
            os.pread(fd, _LOCAL_HEADER.size, member.header_offset)
        )
        if signature != b"PK\x03\x04":
            raise zipfile.BadZipFile("no header where the directory says")
        offset = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        data = os.pread(fd, member.compress_size, offset)
        if member.compress_type == zipfile.ZIP_DEFLATED:
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            data = inflater.decompress(data, member.file_size + 1)  # never more than declared, whatever the stream says
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile("its bytes do not match its CRC")
        return data


class _Member(io.RawIOBase):
    """A streamed member; what its decompressor says of broken bytes becomes `BadZipFile`."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._size = size

    def read(self, size: int = -1) -> bytes:
        try:
            block = self._file.read(size)
        except OSError as error:
            if error.errno is not None:
                raise  # of the file system; bzip2 raises one without a number
            raise zipfile.BadZipFile(str(error)) from error
        except _BROKEN as error:
            raise zipfile.BadZipFile(str(error)) from error
        if size and not block and self._file.tell() < self._size:
            raise zipfile.BadZipFile("it has fewer bytes than declared")
        return block

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()


def _member_path(member: zipfile.ZipInfo) -> str:
    return "/".join(PurePosixPath(member.filename).parts)

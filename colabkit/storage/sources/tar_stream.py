"""Read a tar sequentially: decompress its bytes and parse its headers.

`tarfile.TarInfo.frombuf` parses the header blocks. Everything else is parsed here, with limits, since `tarfile` itself
stops silently at a damaged header and allocates any amount of memory that a header requests. Its older versions also
loop on negative sizes (CVE-2025-8194) and take quadratic time for extended headers (CVE-2024-6232).
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, cast

from colabkit.foundation import BadArchive, ColabkitError, format_things, import_optional
from colabkit.storage.sources.concurrency import still_moving
from colabkit.storage.sources.items import Member, broken_archive, inflates_too_far, inflation_limit

_MAGIC: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# Magic number of a skippable zstd frame; pzstd writes such a frame first.
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_USTAR_AT = 257
_HEAD_BYTES = 512
_STEP_BYTES = 1 << 20
_BUFFER_BYTES = 64 << 10


class TarStream:
    """A tar, plain or compressed, that is read once from start to end. `close()` also closes its file.

    Attributes:
        position: offset of the next byte in the decompressed tar.
        is_inflated: whether the archive is compressed.
    """

    def __init__(self, name: str, file: BinaryIO, archive_bytes: int) -> None:
        self.name = name
        self.archive_bytes = archive_bytes
        self.position = 0
        self._archive = file
        self._buffered = io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)
        method = compression_of(self._buffered.peek(_HEAD_BYTES))
        self.is_inflated = bool(method)
        self._limit = inflation_limit(archive_bytes) if method else archive_bytes
        self._file: Any = self._buffered
        if method:
            with self._translated_errors():
                self._file = _inflated(name, self._buffered, method)

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes; raise `BadArchive` if there are fewer, or the archive inflates too far."""
        self._check_room(size)
        pieces = []
        while size:
            piece = self._step(size)
            if not piece:
                raise broken_archive(self.name, "it ends too early")
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, size: int) -> None:
        """Skip `size` bytes; raise the errors of `read`."""
        self._check_room(size)
        if not self.is_inflated:
            self.position += size
            self._buffered.seek(self.position)
            return
        while size:
            skipped = len(self._step(size))
            if not skipped:
                raise broken_archive(self.name, "it ends too early")
            size -= skipped

    def drain(self) -> None:
        """Read a compressed archive to its end, where most formats store a checksum; raise the errors of `read`."""
        while self.is_inflated and self._step(_STEP_BYTES):
            self._check_room(0)

    def close(self) -> None:
        """Close the archive."""
        self._buffered.close()

    def _step(self, size: int) -> bytes:
        with self._translated_errors():
            piece = cast(bytes, self._file.read(min(size, _STEP_BYTES)))
        still_moving()
        self.position += len(piece)
        return piece

    def _check_room(self, size: int) -> None:
        if self.position + size <= self._limit:
            return
        if self.is_inflated:
            raise inflates_too_far(self.name, self.position + size, self.archive_bytes)
        raise broken_archive(self.name, "it ends too early")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except ColabkitError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                # File system errors have an error number; those of decompressors do not.
                raise
            raise broken_archive(self.name, str(error) or type(error).__name__) from error


def compression_of(head: bytes) -> str:
    """Return the compression of an archive from its first bytes; empty if it is not compressed."""
    if _SKIPPABLE.match(head):
        return "zstd"
    return next((method for magic, method in _MAGIC.items() if head.startswith(magic)), "")


def is_tar_head(name: str, file: BinaryIO) -> bool:
    """Return whether an open file begins like a tar, after decompression if necessary."""
    head = file.read(_HEAD_BYTES)
    if method := compression_of(head):
        try:
            file.seek(0)
            head = _inflated(name, file, method).read(_HEAD_BYTES)
        except Exception:
            # Decompressors raise many types of exceptions for files that they cannot read.
            return False
    return head[_USTAR_AT : _USTAR_AT + 5] == b"ustar"


def _inflated(name: str, file: BinaryIO, method: str) -> Any:
    if method == "gzip":
        return gzip.GzipFile(fileobj=file)
    if method == "bzip2":
        return bz2.BZ2File(file)
    if method == "xz":
        return lzma.LZMAFile(file)
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdFile(file)
    return import_optional("backports.zstd", f"read {name!r}", "to decompress zstd", "backports.zstd").ZstdFile(file)


_BLOCK_BYTES = 512
# Maximum size of an extended header. Paths have at most 4 KiB, and extended attributes 64 KiB each.
_EXTENDED_BYTES = 1 << 20
_LINKS = frozenset({tarfile.LNKTYPE, tarfile.SYMTYPE})
_SPECIAL = frozenset({tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE})
_FILES = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_LONG_NAMES = frozenset({tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
_PAX = frozenset({tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE})
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_NUMBER = re.compile(rb"([0-9]{1,20})")
_TIME = re.compile(rb"(-?[0-9]{1,18})(?:\.([0-9]*))?")
_MOST_NS = 1 << 63
# Offsets of the flag for a following block of the sparse map, in the header and in such a block (GNU's old format).
_SPARSE_GOES_ON_AT, _SPARSE_GOES_ON_AGAIN_AT = 482, 504


def _padded(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def tar_members(stream: TarStream) -> Iterator[Member[int]]:
    """Yield the members up to the end mark; a member's handle is the offset of its bytes in the stream."""
    general: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    long_name: bytes | None = None
    long_link: bytes | None = None
    is_extended = False
    while (header := _next_header(stream)) is not None:
        if header.type in _LONG_NAMES | _PAX:
            data = _extension(stream, header)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = data.split(b"\0", 1)[0]
            elif header.type == tarfile.XGLTYPE:
                general |= _pax_records(stream, data)
            elif header.type == tarfile.GNUTYPE_LONGLINK:
                long_link = data.split(b"\0", 1)[0]
            else:
                own |= _pax_records(stream, data)
            is_extended |= header.type != tarfile.XGLTYPE
            continue
        member = _member(stream, header, general | own, long_name, long_link)
        yield member
        if header.type not in _LINKS | _SPECIAL and not member.is_folder:
            stream.skip(_padded(member.size))
        own, long_name, long_link, is_extended = {}, None, None, False
    if is_extended:
        raise _broken(stream, "its last header belongs to no member")


def _next_header(stream: TarStream) -> tarfile.TarInfo | None:
    at = stream.position
    block = stream.read(_BLOCK_BYTES)
    if not any(block):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise _broken(stream, f"invalid header at byte {at}: {error}") from error
    if header.size < 0:
        raise _broken(stream, f"a member has the size {header.size}")
    if header.type == tarfile.GNUTYPE_SPARSE and block[_SPARSE_GOES_ON_AT]:
        while stream.read(_BLOCK_BYTES)[_SPARSE_GOES_ON_AGAIN_AT]:
            pass
    return header


def _extension(stream: TarStream, header: tarfile.TarInfo) -> bytes:
    if header.size > _EXTENDED_BYTES:
        raise _broken(stream, f"an extended header has {format_things(header.size, 'byte')}")
    return stream.read(_padded(header.size))[: header.size]


def _member(
    stream: TarStream,
    header: tarfile.TarInfo,
    records: Mapping[bytes, bytes],
    long_name: bytes | None,
    long_link: bytes | None,
) -> Member[int]:
    size, mtime_ns = header.size, int(header.mtime) * 10**9
    name = _name(header.name, long_name, records.get(b"path"))
    linked = _name(header.linkname, long_link, records.get(b"linkpath")) if header.type == tarfile.LNKTYPE else ""
    if b"mtime" in records:
        mtime_ns = _time_ns(records[b"mtime"])
    if abs(mtime_ns) >= _MOST_NS:
        mtime_ns = 0
    if b"size" in records:
        if not _NUMBER.fullmatch(records[b"size"]):
            raise _broken(stream, f"the size of {name!r} is not a number")
        size = int(records[b"size"])
    is_folder = header.type == tarfile.DIRTYPE or (header.type == tarfile.AREGTYPE and name.endswith("/"))
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith(b"GNU.sparse.") for key in records)
    oddity = ""
    if is_sparse:
        oddity = "sparse file"
    elif header.type in _LINKS:
        oddity = "link"
    elif header.type in _SPECIAL:
        oddity = "special file"
    elif header.type not in _FILES and not is_folder:
        oddity = f"member of type {header.type!r}"
    return Member(name, size, mtime_ns, stream.position, is_folder, oddity, linked)


def _name(short: str, long: bytes | None, extended: bytes | None) -> str:
    """Return a name from a header, or from the GNU or pax record that replaces it."""
    found = long if extended is None else extended
    return short if found is None else found.decode("utf-8", "surrogateescape")


def _pax_records(stream: TarStream, data: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header, each `LENGTH KEY=VALUE` and a newline (POSIX.1-2001, pax)."""
    records = {}
    at = 0
    while at < len(data) and data[at]:
        length = _PAX_LENGTH.match(data, at)
        end = at + int(length[1]) if length else 0
        if length is None or not length.end() < end <= len(data) or data[end - 1] != ord("\n"):
            raise _broken(stream, "an extended header is invalid")
        key, separator, value = data[length.end() : end - 1].partition(b"=")
        if not separator:
            raise _broken(stream, "an extended header is invalid")
        records[key] = value
        at = end
    return records


def _time_ns(text: bytes) -> int:
    if not (match := _TIME.fullmatch(text)):
        return 0
    nanoseconds = int((match[2] or b"")[:9].ljust(9, b"0"))
    seconds = int(match[1])
    return seconds * 10**9 + (-nanoseconds if match[1].startswith(b"-") else nanoseconds)


def _broken(stream: TarStream, reason: str) -> BadArchive:
    return broken_archive(stream.name, reason)

"""The headers of a tar, from front to back.

The blocks are parsed by `tarfile.TarInfo.frombuf`; what stands between them is read here, within limits: `tarfile`
itself ends quietly at a broken header, loops over negative sizes (CVE-2025-8194), searches extended headers in
quadratic time (CVE-2024-6232) and takes any memory that a header asks for.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping

from colabkit.foundation import BadArchive
from colabkit.storage.sources.items import broken_archive
from colabkit.storage.sources.members import Member
from colabkit.storage.sources.tar_streams import TarStream

_BLOCK_BYTES = 512
_EXTENDED_BYTES = 1 << 20  # paths have at most 4 KiB, extended attributes 64 KiB each
_LINKS = frozenset({tarfile.LNKTYPE, tarfile.SYMTYPE})
_SPECIAL = frozenset({tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE})
_FILES = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_LONG_NAMES = frozenset({tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
_PAX = frozenset({tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE})
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")
_NUMBER = re.compile(rb"([0-9]{1,20})")
_TIME = re.compile(rb"(-?[0-9]{1,18})(?:\.([0-9]*))?")
_MOST_NS = 1 << 63
_SPARSE_GOES_ON_AT, _SPARSE_GOES_ON_AGAIN_AT = 482, 504  # of GNU's old format: more blocks of its map follow


def _padded(size: int) -> int:
    """Return how many bytes a member of this size takes: whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def tar_members(stream: TarStream) -> Iterator[Member[int]]:
    """Yield the members up to the tar's end mark; a member's handle is where in the stream its bytes begin.

    Raises:
        BadArchive: if a header makes no sense, or the stream ends before the mark.
    """
    general: dict[bytes, bytes] = {}
    own: dict[bytes, bytes] = {}
    long_name: bytes | None = None
    is_extended = False
    while (header := _next_header(stream)) is not None:
        if header.type in _LONG_NAMES | _PAX:
            data = _extension(stream, header)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = data.split(b"\0", 1)[0]
            elif header.type == tarfile.XGLTYPE:
                general |= _pax_records(stream, data)
            elif header.type != tarfile.GNUTYPE_LONGLINK:
                own |= _pax_records(stream, data)
            is_extended |= header.type != tarfile.XGLTYPE
            continue
        member = _member(stream, header, general | own, long_name)
        yield member
        if header.type not in _LINKS | _SPECIAL and not member.is_folder:
            stream.skip(_padded(member.size))
        own, long_name, is_extended = {}, None, False
    if is_extended:
        raise _broken(stream, "its last header belongs to no member")


def _next_header(stream: TarStream) -> tarfile.TarInfo | None:
    """Return the next header as it stands, None at the end mark."""
    at = stream.position
    block = stream.read(_BLOCK_BYTES)
    if not any(block):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise _broken(stream, f"no header at byte {at}: {error}") from error
    if header.size < 0:
        raise _broken(stream, f"a member of {header.size} bytes")
    if header.type == tarfile.GNUTYPE_SPARSE and block[_SPARSE_GOES_ON_AT]:
        while stream.read(_BLOCK_BYTES)[_SPARSE_GOES_ON_AGAIN_AT]:
            pass
    return header


def _extension(stream: TarStream, header: tarfile.TarInfo) -> bytes:
    if header.size > _EXTENDED_BYTES:
        raise _broken(stream, f"an extended header of {header.size} bytes")
    return stream.read(_padded(header.size))[: header.size]


def _member(
    stream: TarStream, header: tarfile.TarInfo, records: Mapping[bytes, bytes], long_name: bytes | None
) -> Member[int]:
    name, size, mtime_ns = header.name, header.size, int(header.mtime) * 10**9
    if long_name is not None:
        name = long_name.decode("utf-8", "surrogateescape")
    if b"path" in records:
        name = records[b"path"].decode("utf-8", "surrogateescape")
    if b"mtime" in records:
        mtime_ns = _time_ns(records[b"mtime"])
    if abs(mtime_ns) >= _MOST_NS:
        mtime_ns = 0
    if b"size" in records:
        if not _NUMBER.fullmatch(records[b"size"]):
            raise _broken(stream, f"{name!r} has a size that is no number")
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
        oddity = f"member of kind {header.type!r}"
    return Member(name, size, mtime_ns, stream.position, is_folder, oddity)


def _pax_records(stream: TarStream, data: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header, each `LENGTH KEY=VALUE` and a line feed (POSIX.1-2001, pax)."""
    records = {}
    at = 0
    while at < len(data) and data[at]:
        length = _PAX_LENGTH.match(data, at)
        end = at + int(length[1]) if length else 0
        if length is None or not length.end() < end <= len(data) or data[end - 1] != ord("\n"):
            raise _broken(stream, "an extended header that makes no sense")
        key, separator, value = data[length.end() : end - 1].partition(b"=")
        if not separator:
            raise _broken(stream, "an extended header that makes no sense")
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
    """Return the error for a tar whose bytes make no sense."""
    return broken_archive(stream.name, reason)

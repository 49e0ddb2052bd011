"""Malicious and damaged archives, built from single headers."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile

END = bytes(1024)


def entry(name: str = "x", data: bytes = b"", kind: bytes = tarfile.REGTYPE, **raw: bytes) -> bytes:
    """Return the header and data of a tar member; `raw` overwrites header fields before the checksum is computed."""
    header = tarfile.TarInfo("x")
    header.name, header.type, header.size = name, kind, len(data)
    header.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    offsets = {"size": 124, "mtime": 136, "type": 156, "sparse": 482}
    for field, value in raw.items():
        at = len(block) - 512 + offsets[field]
        block[at : at + len(value)] = value
    return checked(block) + data + bytes(-len(data) % 512)


def checked(block: bytearray) -> bytes:
    """Return header blocks with a correct checksum in the last block."""
    start = len(block) - 512
    block[start + 148 : start + 156] = b" " * 8
    block[start + 148 : start + 156] = b"%06o\0 " % sum(block[start:])
    return bytes(block)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return entry("pax", records, kind)


def record(key: str, value: str) -> bytes:
    """Return a record of an extended header; its length prefix counts the entire record."""
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


def base256(value: int) -> bytes:
    """Return a number in the 12-byte form that GNU tar uses for large and negative numbers."""
    return (b"\xff" if value < 0 else b"\x80") + value.to_bytes(11, "big", signed=True)


REFUSED = {
    "absolute": entry("/etc/x", b"1"),
    "parent": entry("../x", b"1"),
    "parent inside": entry("a/../../x", b"1"),
    "only parent": entry("..", b"1"),
    "no name": entry("", b"1"),
    "dot as file": entry(".", b"1"),
    "folder outside": entry("../up/", kind=tarfile.DIRTYPE),
    "link outside": entry("../link", kind=tarfile.SYMTYPE),
    "long name outside": entry("long", b"../" * 60 + b"x\0", tarfile.GNUTYPE_LONGNAME) + entry("fine", b"1"),
    "pax path outside": pax(record("path", "/etc/x")) + entry("fine", b"1"),
    "pax path with a zero byte": pax(record("path", "a\0b")) + entry("fine", b"1"),
    "global path outside": pax(record("path", "../x"), tarfile.XGLTYPE) + entry("fine", b"1"),
    "file and folder": entry("a", b"1") + entry("a/b", b"2"),
    "file and empty folder": entry("a/b", b"1") + entry("a/b/", kind=tarfile.DIRTYPE),
    "file and folder of folders": entry("a/b/c/", kind=tarfile.DIRTYPE) + entry("a", b"1"),
    "negative size": entry("x", size=base256(-512)),
    "size minus its header": entry("x", size=base256(-1024)),
    "huge size": entry("x", size=base256(1 << 80)),
    "size past the end": entry("x", size=b"77777777777\0"),
    "size of an extended header": entry("x", kind=tarfile.XHDTYPE, size=b"77777777777\0"),
    "negative extended header": entry("x", kind=tarfile.XGLTYPE, size=base256(-512)),
    "huge long name": entry("x", kind=tarfile.GNUTYPE_LONGNAME, size=b"00077777777\0") + bytes(17 << 20),
    "pax size that is not a number": pax(record("size", "-512")) + entry("x", b"1"),
    "pax size past the end": pax(record("size", "99999999999")) + entry("x", b"1"),
    "pax length zero": pax(b"0 a=b\n") + entry("x", b"1"),
    "pax length past the end": pax(b"99 a=b\n") + entry("x", b"1"),
    "pax length of digits": pax(b"1" * 100_000) + entry("x", b"1"),
    "pax without a sign": pax(b"6 abc\n") + entry("x", b"1"),
    "extended header of nothing": pax(record("path", "a")),
    "garbage between": entry("a", b"1") + b"garbage!" * 64 + entry("b", b"1"),
    "broken checksum": entry("a", b"1") + entry("b", b"1").replace(b"b", b"c", 1),
}
SKIPPED = {
    "symbolic link": (entry("s", kind=tarfile.SYMTYPE), "link"),
    "hard link": (entry("s", kind=tarfile.LNKTYPE), "link"),
    "hard link with a size": (entry("s", kind=tarfile.LNKTYPE, size=b"00000000077\0"), "link"),
    "character device": (entry("s", kind=tarfile.CHRTYPE), "special file"),
    "block device": (entry("s", kind=tarfile.BLKTYPE), "special file"),
    "pipe": (entry("s", kind=tarfile.FIFOTYPE), "special file"),
    "sparse": (entry("s", b"data", tarfile.GNUTYPE_SPARSE), "sparse file"),
    "long sparse map": (
        entry("s", b"", tarfile.GNUTYPE_SPARSE, sparse=b"\1") + b"\1" * 512 + bytes(512),
        "sparse file",
    ),
    "sparse of pax": (
        pax(record("GNU.sparse.major", "1") + record("GNU.sparse.realsize", "9" * 15)) + entry("s", b"1\n0\n1\n"),
        "sparse file",
    ),
    "unknown kind": (entry("s", b"data", b"?"), "member of type b'?'"),
    "part of a volume": (entry("s", b"data", b"M"), "member of type b'M'"),
    "overwritten": (entry("s", b"older") + entry("./s", b""), "replaced by a later member with the same path"),
}


def zip_of(*names: str, **fields: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"data")
    data = bytearray(buffer.getvalue())
    at = data.index(b"PK\x01\x02")
    places = {
        "flags": (8, "<H"),
        "method": (10, "<H"),
        "crc": (16, "<I"),
        "packed": (20, "<I"),
        "size": (24, "<I"),
        "offset": (42, "<I"),
    }
    for field, value in fields.items():
        struct.pack_into(places[field][1], data, at + places[field][0], value)
    return bytes(data)


BAD_ZIPS = {
    "folder outside": zip_of("../up/"),
    "file and folder": zip_of("a", "a/b"),
    "file and empty folder": zip_of("a", "a/"),
    "offset past the end": zip_of("a", offset=0xFFFFFFF0),
    "size too large": zip_of("a", size=5),
    "size too small": zip_of("a", size=3),
    "wrong compressed size": zip_of("a", packed=0),
    "wrong checksum": zip_of("a", crc=1),
    "encrypted": zip_of("a", flags=1),
    "unknown compression": zip_of("a", method=77),
    "another name in the header": zip_of("a", "b").replace(b"b", b"c", 1),
    "longer name in the header": zip_of("a", "bc").replace(b"\2\0\0\0bc", b"\1\0\1\0bc", 1),
    "directory before its start": zip_of("a")[30:],
    "only an end": zip_of("a")[-22:],
}

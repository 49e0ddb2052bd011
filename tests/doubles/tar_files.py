"""Tar archives, plain and compressed, made from the bytes of files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

import zstandard


def packed(data: bytes, ending: str) -> bytes:
    """Return data compressed in the format of the given suffix."""
    if ending in (".tar.gz", ".tgz"):
        return gzip.compress(data, mtime=0)
    if ending in (".tar.bz2", ".tbz2"):
        return bz2.compress(data)
    if ending in (".tar.xz", ".txz"):
        return lzma.compress(data)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if ending in (".tar.zst", ".tzst") else data


def tar_bytes(files: Mapping[str, bytes], layout: int = tarfile.PAX_FORMAT) -> bytes:
    """Return an uncompressed tar of files, each one second older than the next."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        for number, (path, data) in enumerate(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mtime = len(data), 1_600_000_000 + number
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def tar_of(path: Path, files: Mapping[str, bytes], layout: int = tarfile.PAX_FORMAT) -> Path:
    ending = path.name[path.name.index(".") :]
    path.write_bytes(packed(tar_bytes(files, layout), ending))
    return path

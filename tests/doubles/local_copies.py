"""Helpers for staging tests: archives, in-memory sources, and snapshots of folders."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO

from colabkit.storage.sources.items import STAGE_SEAL, Item, Listing
from colabkit.storage.staging.api import stage
from colabkit.storage.staging.reports import StageReport


def tarred(folder: Path, archive: Path) -> Path:
    """Write a tar archive of a folder, compressed according to its suffix."""
    mode = archive.suffix.lstrip(".")
    with tarfile.open(archive, f"w:{mode}" if mode in ("gz", "bz2", "xz") else "w") as file:
        for path in sorted(folder.rglob("*")):
            file.add(path, path.relative_to(folder), recursive=False)
    return archive


def zipped(folder: Path, archive: Path, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(archive, "w", compression) as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(folder))
    return archive


def data_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder except the seal."""
    return {
        os.fsdecode(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path != folder / STAGE_SEAL
    }


def state_of(folder: Path) -> list[tuple[object, ...]]:
    """Return the names, times, sizes, modes and inodes of a folder and of everything below it."""
    return sorted(
        (str(path), path.lstat().st_mtime_ns, path.lstat().st_size, path.lstat().st_mode, path.lstat().st_ino)
        for path in [folder, *folder.rglob("*")]
    )


def copy(source: object, to: object = "disk", **options: object) -> StageReport:
    return stage(source, to, progress=False, **options)


class MemorySource:
    """A source of files in memory; subclasses can override `open()` to count opens or to fail."""

    name = "memory"
    can_hang = False

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def list(self) -> Listing:
        return Listing(tuple(Item(path, len(data)) for path, data in sorted(self.files.items())), ())

    def open(self, item: Item) -> io.BytesIO:
        return io.BytesIO(self.files[item.path])

    def close(self) -> None:
        pass


class WalkedSource(MemorySource):
    """A source in memory that, like a tar archive, can only be read sequentially.

    Attributes:
        passes: number of complete iterations of `walk()`.
        largest_read: size of the largest read in bytes.
    """

    is_sequential = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.passes = self.largest_read = 0

    def open(self, item: Item) -> io.BytesIO:
        raise AssertionError("opened one by one")

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        for item in self.list().items:
            if wanted is None or item.path in wanted:
                yield item, _ForwardFile(self, self.files[item.path])
        self.passes += 1


class _ForwardFile(io.BytesIO):
    """A file that cannot seek, and whose larger reads return fewer bytes than requested."""

    def __init__(self, source: WalkedSource, data: bytes) -> None:
        super().__init__(data)
        self._source = source

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size if size is None or size < 2 else size - size // 3)
        self._source.largest_read = max(self._source.largest_read, len(data))
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        raise io.UnsupportedOperation("it can only be read forwards")


def kept_partials(folder: Path) -> list[Path]:
    """Return the partial copies that interrupted runs left in a folder."""
    return sorted(folder.glob(".colabkit-*-kept.partial"))

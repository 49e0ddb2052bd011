"""A local copy that `stage()` has finished: its files, and its seal, a hidden file in it that is written last.

The seal's first line is a JSON object about the whole copy, each further line a JSON array about one file: path, size
and time at the source, and the CRC32 of each of its blocks.
"""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from colabkit.foundation import Corrupt, ProgressBar, TargetExists, cannot, file_changes
from colabkit.storage.sources.engine import BLOCK_BYTES, block_offsets
from colabkit.storage.sources.items import STAGE_SEAL, Item
from colabkit.storage.staging.reports import StageVerifyReport

_FORMAT = 2

Crcs = Mapping[int, int]
"""CRC32 of each block of a file, by its offset."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The facts about a local copy.

    Attributes:
        key: tells its source and the way it was staged from all others.
        source: its source's name.
        target: `"tmpfs"`, `"disk"` or `"path"`.
        why: the reason for the target.
        file: the name of the one file in it, where it is the copy of a file.
        files: files in it.
        staged_bytes: their bytes.
        retries: reads and listings that were tried again.
        skipped: what was skipped, with the reason.
        verify: `"size"` or `"full"`.
        origin: size and time of the archive that it was extracted from, None of other sources.
        tmpfs: the folder at which a tmpfs was mounted for it, else empty.
    """

    key: str
    source: str
    target: str
    why: str
    file: str
    files: int
    staged_bytes: int
    retries: int
    skipped: tuple[tuple[str, str], ...]
    verify: str
    origin: tuple[int, int] | None = None
    tmpfs: str = ""
    format: int = _FORMAT

    def write(self, folder: Path, manifest: Iterable[tuple[Item, Crcs]]) -> None:
        """Seal a folder that is complete."""
        lines = [json.dumps(dataclasses.asdict(self))]
        for item, crcs in manifest:
            lines.append(json.dumps([item.path, item.size, item.mtime_ns, *(crcs[offset] for offset in sorted(crcs))]))
        file_changes.write_file(folder / STAGE_SEAL, "\n".join(lines).encode())


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A folder with a seal."""

    folder: Path
    seal: Seal

    @classmethod
    def at(cls, folder: Path) -> LocalCopy | None:
        """Return the local copy in a folder, None if its seal is missing or makes no sense."""
        try:
            with (folder / STAGE_SEAL).open("rb") as file:
                values = json.loads(file.readline())
            if values["format"] != _FORMAT:
                return None
            values["skipped"] = tuple((name, why) for name, why in values["skipped"])
            values["origin"] = tuple(values["origin"]) if values["origin"] else None
            return cls(folder, Seal(**values))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def of(cls, path: Path) -> LocalCopy | None:
        """Return the local copy at a path, or whose one file lies there; None if there is none."""
        if found := cls.at(path):
            return found
        found = cls.at(path.parent)
        return found if found and found.seal.file == path.name else None

    @property
    def path(self) -> Path:
        """The folder, or the one file in it where the source is a file."""
        return self.folder / self.seal.file if self.seal.file else self.folder

    def manifest(self) -> list[tuple[Item, list[int]]]:
        """Return the files as they were at the source, each with the CRC32 of its blocks.

        Raises:
            Corrupt: if the manifest is damaged.
        """
        try:
            with (self.folder / STAGE_SEAL).open("rb") as file:
                next(file)
                rows = [json.loads(line) for line in file]
            return [(Item(path, size, mtime_ns), crcs) for path, size, mtime_ns, *crcs in rows]
        except (OSError, StopIteration, ValueError, TypeError) as error:
            act = f"read the manifest of {str(self.folder)!r}"
            needed, next_step = "the one that stage() wrote is needed", "Run colabkit.stage(..., refresh=True)"
            raise Corrupt(cannot(act, "it is damaged", needed, next_step)) from error

    def contents_digest(self) -> tuple[str, int]:
        """Return a SHA-256 of the files' names, sizes, times and CRC32s, and the time of the seal in nanoseconds.

        The digest is the same wherever the copy lies.
        """
        with (self.folder / STAGE_SEAL).open("rb") as file:
            file.readline()
            lines = sorted(line.strip() for line in file)
            sealed_ns = os.fstat(file.fileno()).st_mtime_ns
        return hashlib.sha256(b"\n".join(lines)).hexdigest(), sealed_ns

    def is_complete(self) -> bool:
        """Return whether all sealed files are there in their sizes; other files do not matter."""
        sizes = self._sizes()
        if len(sizes) < self.seal.files:
            return False
        try:
            return all(sizes.get(item.path) == item.size for item, _ in self.manifest())
        except Corrupt:
            return False

    def has_good(self, item: Item, sealed: list[int]) -> bool:
        """Return whether a file has the bytes that it was sealed with."""
        crcs = block_crcs(item, sealed)
        return good_blocks(self.folder / item.path, item, crcs) == crcs

    def verify(self, *, progress: bool) -> StageVerifyReport:
        """Read all files and return which of them are missing or damaged."""
        started = time.monotonic()
        damaged = []
        with ProgressBar("verify", self.seal.staged_bytes, "B", progress, files=self.seal.files) as bar:
            for item, sealed in self.manifest():
                if not self.has_good(item, sealed):
                    damaged.append(item.path)
                bar.advance(item.size, 1)
        seconds = time.monotonic() - started
        return StageVerifyReport(self.folder, self.seal.files, self.seal.staged_bytes, tuple(damaged), seconds)

    def carry_over(self, act: str, new: Path) -> None:
        """Give files that users added to this copy a second name in the folder that replaces it.

        Raises:
            TargetExists: if the source has something else in such a place now, so that a file would be lost.
        """
        sizes = self._sizes()
        try:
            sealed = {item.path for item, _ in self.manifest()}
        except Corrupt:  # then every path that the source has too counts as sealed
            sealed = {path for path in sizes if os.path.lexists(new / path)}
        for path in sizes:
            if path in sealed or _are_same(self.folder / path, new / path):
                continue
            if not _has_place(new, path):
                found = f"{path!r} of your own lies in the local copy where the source has something else"
                next_step = f"Move {os.fspath(self.folder / path)!r} elsewhere, and run it again"
                raise TargetExists(cannot(act, found, "a place for each", next_step))
            file_changes.make_folder((new / path).parent)
            file_changes.link_or_copy(self.folder / path, new / path)

    def _sizes(self) -> dict[str, int]:
        """Return the size of every file beside the seal, by its path."""
        sizes: dict[str, int] = {}
        waiting = [""]
        while waiting:
            inside = waiting.pop()
            with os.scandir(self.folder / inside) as entries:
                for entry in entries:
                    path = f"{inside}/{entry.name}" if inside else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    else:
                        sizes[path] = entry.stat(follow_symlinks=False).st_size
        sizes.pop(STAGE_SEAL, None)
        return sizes


def _are_same(own: Path, other: Path) -> bool:
    """Return whether both are files of the same bytes."""
    are_files = all(path.is_file() and not path.is_symlink() for path in (own, other))
    return are_files and filecmp.cmp(own, other, shallow=False)


def _has_place(folder: Path, path: str) -> bool:
    """Return whether a path is free in a folder, and no file stands where its folders would be."""
    parents = itertools.takewhile(lambda parent: parent != folder, (folder / path).parents)
    return not os.path.lexists(folder / path) and not any(parent.exists() and not parent.is_dir() for parent in parents)


def block_crcs(item: Item, crcs: list[int]) -> dict[int, int]:
    """Return the CRC32 of each block of a sealed file, by its offset."""
    return dict(zip(block_offsets(item.size), crcs, strict=False))


def good_blocks(path: Path, item: Item, noted: Crcs) -> dict[int, int]:
    """Return those of the noted blocks whose bytes in a file have the noted CRC32; none if its size differs."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != item.size:
                return {}
            return {
                offset: crc
                for offset, crc in noted.items()
                if crc32(os.pread(file.fileno(), BLOCK_BYTES, offset)) == crc
            }
    except OSError:
        return {}

"""A finished local copy made by `stage()`: its files, and its seal, a hidden file that is written last.

The seal's first line is a JSON object that describes the copy. The second line is a JSON array with the change times of
all files at the source. Each further line is a JSON array for one file, with its path, its size and modification time
at the source, and the CRC32 of each of its blocks.
"""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

from colabkit.foundation import Corrupt, FileFailed, ProgressBar, TargetExists, call, cannot, file_changes
from colabkit.storage.sources.engine import BLOCK_BYTES, block_offsets
from colabkit.storage.sources.items import STAGE_SEAL, Item
from colabkit.storage.staging.reports import StageVerifyReport

_FORMAT = 3

Crcs = Mapping[int, int]
"""CRC32 of each block of a file, by the block's offset."""

Origin: TypeAlias = tuple[int, int, int]
"""Size in bytes, modification time and change time in ns of a source that is a single file."""


def origin_of(path: Path, *, can_hang: bool = False) -> Origin:
    """Return the origin of a file; on a mount, its change time is 0, because the next mount may change it."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, 0 if can_hang else found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class Seal:
    """The metadata of a local copy.

    Attributes:
        key: digest that identifies the source and the options it was staged with.
        source: name of the source.
        target: `"tmpfs"`, `"disk"`, or `"path"` for a path chosen by the user.
        why: the reason for choosing the target.
        file: name of the file if the source is a plain file or an archive that is not extracted, otherwise empty.
        files: number of files.
        staged_bytes: total size of the files.
        retries: number of retries of reads and listings.
        skipped: pairs of a skipped path and the reason.
        verify: `"size"` or `"full"`.
        origin: the source's `origin_of()` if it is an archive or a local or downloaded file; otherwise None.
        tmpfs: folder of the tmpfs that was mounted for the copy, otherwise empty.
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
    origin: Origin | None = None
    tmpfs: str = ""
    format: int = _FORMAT

    def write(self, folder: Path, manifest: Iterable[tuple[Item, Crcs]]) -> None:
        """Write the seal into a complete folder.

        Raises:
            FileFailed: if another program has removed files from the folder.
        """
        manifest = list(manifest)
        present = {path for path, _ in files_below(folder)}
        if missing := [item.path for item, _ in manifest if item.path not in present]:
            found = f"{len(missing)} of {len(manifest)} copied files have disappeared, starting with {missing[0]!r}"
            next_step = f"Check that no other program removes files from {str(folder.parent)!r}, then try again"
            raise FileFailed(cannot(f"stage {self.source!r}", found, "", next_step))
        lines = [json.dumps(dataclasses.asdict(self)), json.dumps([item.ctime_ns for item, _ in manifest])]
        for item, crcs in manifest:
            lines.append(json.dumps([item.path, item.size, item.mtime_ns, *(crcs[offset] for offset in sorted(crcs))]))
        file_changes.write_file(folder / STAGE_SEAL, "\n".join(lines).encode())


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A folder with the files of a source and a valid seal."""

    folder: Path
    seal: Seal

    @classmethod
    def at(cls, folder: Path) -> LocalCopy | None:
        """Return the local copy in a folder; None if its seal is missing or invalid."""
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
        """Return the local copy at a path, or the copy whose single file is at the path; None if there is none."""
        if found := cls.at(path):
            return found
        found = cls.at(path.parent)
        return found if found and found.seal.file == path.name else None

    @property
    def path(self) -> Path:
        """The folder, or the single file in it if the source is a file."""
        return self.folder / self.seal.file if self.seal.file else self.folder

    def manifest(self) -> list[tuple[Item, list[int]]]:
        """Return the files as they were at the source, with the CRC32s of their blocks.

        Raises:
            Corrupt: if the manifest is damaged.
        """
        try:
            with (self.folder / STAGE_SEAL).open("rb") as file:
                next(file)
                times, *rows = [json.loads(line) for line in file]
            return [
                (Item(path, size, mtime_ns, ctime_ns), crcs)
                for (path, size, mtime_ns, *crcs), ctime_ns in zip(rows, times, strict=True)
            ]
        except (OSError, StopIteration, ValueError, TypeError) as error:
            act = f"read the manifest of {str(self.folder)!r}"
            next_step = ("Run ", call("stage", ..., refresh=True))
            raise Corrupt(cannot(act, "the manifest is damaged", "", next_step)) from error

    def contents_digest(self) -> tuple[str, int]:
        """Return a SHA-256 of the files' paths, sizes, modification times and CRC32s, and the time of sealing in ns.

        The digest does not depend on the location of the copy.
        """
        with (self.folder / STAGE_SEAL).open("rb") as file:
            file.readline()
            file.readline()
            lines = sorted(line.strip() for line in file)
            sealed_ns = os.fstat(file.fileno()).st_mtime_ns
        return hashlib.sha256(b"\n".join(lines)).hexdigest(), sealed_ns

    def is_complete(self) -> bool:
        """Return whether all sealed files exist and have the recorded sizes; other files are ignored."""
        sizes = self._sizes()
        if len(sizes) < self.seal.files:
            return False
        try:
            return all(sizes.get(item.path) == item.size for item, _ in self.manifest())
        except Corrupt:
            return False

    def has_good(self, item: Item, sealed: list[int], on_block: Callable[[], None] = lambda: None) -> bool:
        """Return whether a file's bytes match the sealed CRC32s; call `on_block` after each block."""
        crcs = block_crcs(item, sealed)
        return good_blocks(self.folder / item.path, item, crcs, on_block) == crcs

    def verify(self, *, progress: bool) -> StageVerifyReport:
        """Read all files, and report which files are missing or damaged."""
        started = time.monotonic()
        damaged = []
        with ProgressBar("verify", self.seal.staged_bytes, "B", progress, files=self.seal.files) as bar:
            for item, sealed in self.manifest():
                if not self.has_good(item, sealed):
                    damaged.append(item.path)
                bar.advance(item.size, 1)
        seconds = time.monotonic() - started
        return StageVerifyReport(self.folder, self.seal.files, self.seal.staged_bytes, tuple(damaged), seconds)

    def added(self, new: Path | None = None) -> list[str]:
        """Return the paths of the files that users have added to this copy.

        If the manifest is damaged, these are the files that a new copy in the folder `new` lacks; none without one.
        """
        paths = self._sizes().keys()
        try:
            sealed = {item.path for item, _ in self.manifest()}
        except Corrupt:
            sealed = {path for path in paths if new is None or os.path.lexists(new / path)}
        return sorted(paths - sealed)

    def carry_over(self, act: str, new: Path) -> None:
        """Hard-link or copy files that users added to this copy into the folder that replaces it.

        Raises:
            TargetExists: if the new folder has a different file or a folder at the path of such a file, or a file in
                place of one of its parent folders.
        """
        for path in self.added(new):
            if _are_same(self.folder / path, new / path):
                continue
            if not _has_place(new, path):
                found = f"your file {path!r} in the local copy conflicts with a file or folder in the source"
                next_step = f"Move {os.fspath(self.folder / path)!r} elsewhere, then try again"
                raise TargetExists(cannot(act, found, "", next_step))
            file_changes.make_folder((new / path).parent)
            file_changes.link_or_copy(self.folder / path, new / path)

    def _sizes(self) -> dict[str, int]:
        sizes = {path: entry.stat(follow_symlinks=False).st_size for path, entry in files_below(self.folder)}
        sizes.pop(STAGE_SEAL, None)
        return sizes


def files_below(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the path and the entry of each file and link below a folder."""
    start = len(os.path.join(folder, ""))
    for entry in file_changes.entries_below(folder):
        if not entry.is_dir(follow_symlinks=False):
            yield entry.path[start:], entry


def _are_same(own: Path, other: Path) -> bool:
    are_files = all(path.is_file() and not path.is_symlink() for path in (own, other))
    return are_files and filecmp.cmp(own, other, shallow=False)


def _has_place(folder: Path, path: str) -> bool:
    parents = itertools.takewhile(lambda parent: parent != folder, (folder / path).parents)
    return not os.path.lexists(folder / path) and not any(parent.exists() and not parent.is_dir() for parent in parents)


def block_crcs(item: Item, crcs: list[int]) -> dict[int, int]:
    """Return the CRC32 of each block of a sealed file, by offset."""
    return dict(zip(block_offsets(item.size), crcs, strict=False))


def good_blocks(path: Path, item: Item, noted: Crcs, on_block: Callable[[], None] = lambda: None) -> dict[int, int]:
    """Return the recorded CRC32s that match a file's blocks, by offset; empty if its size differs or reading fails.

    `on_block` is called after each block.
    """
    good: dict[int, int] = {}
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != item.size:
                return {}
            for offset, crc in noted.items():
                if crc32(os.pread(file.fileno(), BLOCK_BYTES, offset)) == crc:
                    good[offset] = crc
                on_block()
    except OSError:
        return {}
    return good

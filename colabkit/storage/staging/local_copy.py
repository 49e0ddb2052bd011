"""The seal of a near copy: a hidden file in it, written last, that says what it is and what it holds.

Its first line is a JSON object about the whole copy, each further line a JSON array about one file: path, size and time
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from colabkit.foundation import (
    Corrupt,
    ProgressBar,
    Report,
    TargetExists,
    cannot,
    file_changes,
    format_bytes,
    format_seconds,
    format_things,
)
from colabkit.storage.sources.engine import BLOCK_BYTES, block_offsets
from colabkit.storage.sources.items import STAGE_SEAL, Item

_FORMAT = 2

Crcs = Mapping[int, int]
"""CRC32 of each block of a file, by its offset."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a near copy is.

    Attributes:
        key: tells its source and the way it was staged from all others.
        source: its source's name.
        target: `"tmpfs"`, `"disk"` or `"path"`.
        why: the reason for the target.
        file: the name of the one file in it, where it is the copy of a file.
        files: files in it.
        staged_bytes: their bytes.
        retries: reads and listings that were tried again.
        skipped: what was passed over, with the reason.
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


def write_seal(folder: Path, seal: Seal, manifest: Iterable[tuple[Item, Crcs]]) -> None:
    """Write the seal of a folder that is whole."""
    lines = [json.dumps(dataclasses.asdict(seal))]
    for item, crcs in manifest:
        lines.append(json.dumps([item.path, item.size, item.mtime_ns, *(crcs[offset] for offset in sorted(crcs))]))
    file_changes.write_file(folder / STAGE_SEAL, "\n".join(lines).encode())


def read_seal(folder: Path) -> Seal | None:
    """Return the seal of a near copy, None where there is none or it makes no sense."""
    try:
        with (folder / STAGE_SEAL).open("rb") as file:
            values = json.loads(file.readline())
        if values["format"] != _FORMAT:
            return None
        values["skipped"] = tuple((name, why) for name, why in values["skipped"])
        values["origin"] = tuple(values["origin"]) if values["origin"] else None
        return Seal(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_manifest(folder: Path) -> list[tuple[Item, list[int]]]:
    """Return the files of a near copy as they were at the source, each with the CRC32 of its blocks.

    Raises:
        Corrupt: if the manifest is damaged.
    """
    try:
        with (folder / STAGE_SEAL).open("rb") as file:
            next(file)
            rows = [json.loads(line) for line in file]
        return [(Item(path, size, mtime_ns), crcs) for path, size, mtime_ns, *crcs in rows]
    except (OSError, StopIteration, ValueError, TypeError) as error:
        act = f"read the manifest of {str(folder)!r}"
        raise Corrupt(
            cannot(
                act, "it is damaged", "the one that stage() wrote is needed", "Run colabkit.stage(..., refresh=True)"
            )
        ) from error


def contents_digest(folder: Path) -> tuple[str, int]:
    """Return a SHA-256 of what a near copy was made of, and when it was sealed, in nanoseconds.

    It tells the files' names, sizes and times at the source, and their CRC32s; it is the same wherever the copy is.
    """
    with (folder / STAGE_SEAL).open("rb") as file:
        file.readline()
        lines = sorted(line.strip() for line in file)
        sealed_ns = os.fstat(file.fileno()).st_mtime_ns
    return hashlib.sha256(b"\n".join(lines)).hexdigest(), sealed_ns


def sealed_crcs(item: Item, crcs: list[int]) -> dict[int, int]:
    """Return the CRC32 of each block of a sealed file, by its offset."""
    return dict(zip(block_offsets(item.size), crcs, strict=False))


def is_complete(folder: Path, seal: Seal) -> bool:
    """Return whether a near copy still has all files that it was sealed with, in their sizes; others do not matter."""
    sizes = sizes_in(folder)
    if len(sizes) < seal.files:
        return False
    try:
        return all(sizes.get(item.path) == item.size for item, _ in read_manifest(folder))
    except Corrupt:
        return False


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the size of every file of a near copy beside its seal, by its path in it."""
    sizes: dict[str, int] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    sizes[path] = entry.stat(follow_symlinks=False).st_size
    sizes.pop(STAGE_SEAL, None)
    return sizes


@dataclass(frozen=True, repr=False)
class StageVerifyReport(Report):
    """What `verify()` found in a near copy. `damaged` names each file that is missing or not as it was sealed."""

    path: Path
    files: int
    checked_bytes: int
    damaged: tuple[str, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no file is damaged."""
        return not self.damaged

    def _summary(self) -> str:
        if not self.damaged:
            size = format_bytes(self.checked_bytes)
            return f"{str(self.path)!r} is whole: {format_things(self.files, 'file')}, {size}, each as it was staged"
        first = ", ".join(map(repr, self.damaged[:5]))
        damage = f"{len(self.damaged)} of {format_things(self.files, 'file')}, first {first}"
        return f"{str(self.path)!r} is damaged: {damage}; run colabkit.stage(..., refresh=True)"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("damaged", str(len(self.damaged))), ("checked in", format_seconds(self.seconds))]


def near_copy_at(path: Path) -> tuple[Path, Seal] | None:
    """Return the near copy that a path is, or is the one file of; None if it is none."""
    if seal := read_seal(path):
        return path, seal
    if (seal := read_seal(path.parent)) and seal.file == path.name:
        return path.parent, seal
    return None


def verify_near_copy(folder: Path, seal: Seal, *, progress: bool) -> StageVerifyReport:
    """Read all files of a near copy and return which are not as they were sealed."""
    started = time.monotonic()
    damaged = []
    with ProgressBar("verify", seal.staged_bytes, "B", progress, files=seal.files) as bar:
        for item, sealed in read_manifest(folder):
            crcs = sealed_crcs(item, sealed)
            if good_blocks(folder / item.path, item, crcs) != crcs:
                damaged.append(item.path)
            bar.advance(item.size, 1)
    return StageVerifyReport(folder, seal.files, seal.staged_bytes, tuple(damaged), time.monotonic() - started)


def carry_over(act: str, old: Path, new: Path) -> None:
    """Give files that others put into a near copy a second name in the one that takes its place.

    Raises:
        TargetExists: if the source has something else in such a place now, so that a file would be lost.
    """
    sizes = sizes_in(old)
    try:
        sealed = {item.path for item, _ in read_manifest(old)}
    except Corrupt:  # then what the source has is taken for the copy's, and all else for somebody's
        sealed = {path for path in sizes if os.path.lexists(new / path)}
    for path in sizes:
        if path in sealed or _are_same(old / path, new / path):
            continue
        if not _has_place(new, path):
            found = f"{path!r} of your own lies in the near copy where the source has something else"
            next_step = f"Move {os.fspath(old / path)!r} elsewhere, and run it again"
            raise TargetExists(cannot(act, found, "a place for each", next_step))
        file_changes.make_folder((new / path).parent)
        file_changes.link_or_copy(old / path, new / path)


def _are_same(own: Path, other: Path) -> bool:
    """Return whether both are files of the same bytes."""
    are_files = all(path.is_file() and not path.is_symlink() for path in (own, other))
    return are_files and filecmp.cmp(own, other, shallow=False)


def _has_place(folder: Path, path: str) -> bool:
    """Return whether a path is free in a folder, and no file stands where its folders would be."""
    parents = itertools.takewhile(lambda parent: parent != folder, (folder / path).parents)
    return not os.path.lexists(folder / path) and not any(parent.exists() and not parent.is_dir() for parent in parents)


def good_blocks(path: Path, item: Item, noted: Crcs) -> dict[int, int]:
    """Return those of the noted blocks whose bytes in a file are as noted; none if it has not the item's size."""
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

"""The seal of a near copy: a hidden file in it, written last, that says what it is and what it holds.

Its first line is a JSON object about the whole copy, each further line a JSON array about one file: path, size and time
at the source, and the CRC32 of each of its blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import Corrupt, cannot, file_changes
from colabkit.storage.sources.engine import block_offsets
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

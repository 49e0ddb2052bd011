"""Checking a near copy against the digests that it was sealed with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import ProgressBar, Report, format_bytes, format_seconds, format_things
from colabkit.storage.staging.copying import good_blocks
from colabkit.storage.staging.seal import Seal, read_manifest, read_seal, sealed_crcs


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

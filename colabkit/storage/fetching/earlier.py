"""What earlier fetches finished, so that a cell that is run again does not fetch again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import file_changes, near_folder, partials


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """What an earlier fetch put at a final path, and how the path was then.

    `near_folder()` keeps one small file for each: the digest of the address, never the address. The path counts as
    untouched while its size and time are what they were; a folder's while its files and bytes are.
    """

    path: str
    validator: str
    state: tuple[int, int]
    files: int
    sha256: str | None
    via: str

    @classmethod
    def recalled(cls, identity: str) -> FetchRecord | None:
        """Return what was fetched under this identity, if it is there untouched."""
        try:
            values = json.loads(_note_of(identity).read_bytes())
            found = cls(**{**values, "state": tuple(values["state"])})
            return found if state_of(Path(found.path)) == found.state else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remember(self, identity: str) -> None:
        """Keep it for the next fetch; where that fails the next one does not know."""
        values = {name: getattr(self, name) for name in self.__slots__}
        try:
            with partials.Partial(_note_of(identity)) as partial:
                file_changes.write_file(partial.path, json.dumps(values).encode())
                partial.publish(replace=True)
        except OSError:
            return


def _note_of(identity: str) -> Path:
    return near_folder(os.environ) / "fetched" / f"{identity}.json"


def state_of(path: Path) -> tuple[int, int]:
    """Return what tells whether a path was touched: of a file size and time, of a folder its files and bytes."""
    if path.is_dir():
        sizes = [file.lstat().st_size for file in path.rglob("*") if not file.is_dir()]
        return len(sizes), sum(sizes)
    stats = path.stat()
    return stats.st_size, stats.st_mtime_ns

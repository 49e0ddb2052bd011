"""Faults 1 to 5: reads that fail, end early or never return."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from far_mounts import FuseMount
from trees import files_of, leftovers

from colabkit.storage.sources.items import STAGE_SEAL

from .board import Outcome, Result, attempt, fault
from .tools import COPIERS, Copier

_FILES = 12


def _source(folder: Path) -> Path:
    """Create a folder of small files and one of several blocks."""
    source = folder / "source"
    generator = random.Random(5)
    for number in range(_FILES):
        path = source / f"class{number % 3}" / f"{number:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.randbytes(3_000_000 if number == 0 else 4000 + number))
    return source


def _copies(copier: Copier, folder: Path, name: str, plan: dict[str, Any]) -> Result:
    """Copy the source through a mount with these planned faults; a copy that was made must equal the source."""
    source, target = folder / "source", folder / "copies" / name
    target.parent.mkdir(exist_ok=True)
    with FuseMount(folder / f"mount-{name}", source, plan=plan) as mount:

        def work() -> Outcome:
            copier.copy(mount.point, target)
            found = files_of(target)
            found.pop(STAGE_SEAL, None)
            assert found == files_of(source), "the copy differs from the source"
            return Outcome.SURVIVED

        def after() -> None:
            found = files_of(target) if target.exists() else None
            if found is not None:
                found.pop(STAGE_SEAL, None)
            assert found in (None, files_of(source)), "an incomplete copy is at the final path"
            assert not leftovers(folder), "unfinished files are left"

        return attempt(name, work, after, refusals=copier.refusals)


@fault(1, "reads fail with EIO for a while", COPIERS)
def a_burst_of_errors(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    _source(folder)
    for count in range(1, min(limit, 6) + 1):
        burst = {"on": "read", "path": "*.bin", "do": "error", "count": count, "first": count}
        yield _copies(copier, folder, f"{count}-failures", {"faults": [burst]})

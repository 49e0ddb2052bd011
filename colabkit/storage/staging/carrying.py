"""What others put into a near copy, which outlives its refresh."""

from __future__ import annotations

import filecmp
import itertools
import os
from pathlib import Path

from colabkit.foundation import Corrupt, TargetExists, cannot, file_changes
from colabkit.storage.staging.seal import read_manifest, sizes_in


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

"""A folder tree as a source."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from colabkit._files import translated
from colabkit.sources.engine import concurrently
from colabkit.sources.items import STAGE_SEAL, Item, Listing, changed_item

__all__ = ["FolderSource"]

_Level: TypeAlias = tuple[list[Item], list[str], list[tuple[str, str]]]  # files, folders, what was passed over


class FolderSource:
    """A folder tree. Links and special files are passed over and named in the listing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def list(self) -> Listing:
        """Return every regular file below the folder; folders are listed concurrently.

        Raises:
            FileFailed: if a folder cannot be listed.
        """
        items: list[Item] = []
        skipped: list[tuple[str, str]] = []
        with translated(f"list {self.name!r}"):
            waiting = [""]
            while waiting:
                level = concurrently(self._list_folder, waiting, "auto")
                waiting = []
                for files, folders, passed_over in level:
                    items += files
                    waiting += folders
                    skipped += passed_over
        return Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)))

    def _list_folder(self, inside: str) -> _Level:
        files, folders, skipped = [], [], []
        with os.scandir(self.path / inside) as entries:
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                if path == STAGE_SEAL:
                    continue
                if entry.is_symlink():
                    skipped.append((path, "link"))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    files.append(Item(path, entry.stat(follow_symlinks=False).st_size))
                else:
                    skipped.append((path, "special file"))
        return files, folders, skipped

    def open(self, item: Item) -> BinaryIO:
        """Open the item's file without following links.

        Raises:
            SourceChanged: if it is no file any more, or its size is no longer the listed one.
        """
        # Where a pipe took the file's place, O_NONBLOCK keeps the opening from waiting for its other end.
        fd = os.open(self.path / item.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != item.size:
            os.close(fd)
            raise changed_item(self.name, item, found.st_size)
        return cast(BinaryIO, open(fd, "rb", buffering=0))

    def close(self) -> None:
        """Do nothing: no file stays open."""

"""A folder tree as a source."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from colabkit._files import translated
from colabkit.mounts import DRIVEFS, SHORTCUT_TARGETS, mount_holding, mounts
from colabkit.sources.engine import Retries, concurrently
from colabkit.sources.items import STAGE_SEAL, Item, Listing, changed_item

__all__ = ["FolderSource"]

_Chain: TypeAlias = tuple[str, ...]  # the real folders of the shortcuts on the way, the source's own first
_Folder: TypeAlias = tuple[str, _Chain]
_SHORTCUT_DEPTH = 8
_Level: TypeAlias = tuple[list[Item], list[_Folder], list[tuple[str, str]]]  # files, folders, what was passed over


class FolderSource:
    """A folder tree. Drive's shortcuts are followed; links and special files are passed over, named in the listing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        holding = mount_holding(os.path.abspath(path), mounts())
        is_drive = holding is not None and holding.fstype == DRIVEFS
        self._shortcut_targets = f"{holding.point}/{SHORTCUT_TARGETS}/" if holding and is_drive else ""

    def list(self) -> Listing:
        """Return every regular file below the folder; folders are listed concurrently.

        Raises:
            FileFailed: if a folder cannot be listed.
        """
        items: list[Item] = []
        skipped: list[tuple[str, str]] = []
        retries = Retries()

        def list_folder(folder: _Folder) -> _Level:
            tries = 0
            while True:
                try:
                    return self._list_folder(folder)
                except OSError as error:
                    tries += 1
                    retries.pause(error, tries)

        with translated(f"list {self.name!r}"):
            waiting: list[_Folder] = [("", (os.path.realpath(self.path),))]
            while waiting:
                level = concurrently(list_folder, waiting, "auto")
                waiting = []
                for files, folders, passed_over in level:
                    items += files
                    waiting += folders
                    skipped += passed_over
        return Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)), retries.count)

    def _list_folder(self, folder: _Folder) -> _Level:
        inside, chain = folder
        files: list[Item] = []
        folders: list[_Folder] = []
        skipped: list[tuple[str, str]] = []
        with os.scandir(self.path / inside) as entries:
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                if path == STAGE_SEAL:
                    continue
                is_shortcut = entry.is_symlink() and self._is_shortcut(entry.path)
                if entry.is_symlink() and not is_shortcut:
                    skipped.append((path, "link"))
                elif entry.is_dir():
                    target = os.path.realpath(entry.path) if is_shortcut else ""
                    if target in chain or len(chain) > _SHORTCUT_DEPTH:
                        skipped.append((path, "shortcut to a folder that it lies in, or nested too deep"))
                    else:
                        folders.append((path, (*chain, target) if is_shortcut else chain))
                elif entry.is_file():
                    files.append(Item(path, entry.stat().st_size))
                elif is_shortcut:
                    skipped.append((path, "shortcut to nothing"))
                else:
                    skipped.append((path, "special file"))
        return files, folders, skipped

    def open(self, item: Item) -> BinaryIO:
        """Open the item's file without following links other than Drive's shortcuts.

        Raises:
            SourceChanged: if it is no file any more, or its size is no longer the listed one.
        """
        # Where a pipe took the file's place, O_NONBLOCK keeps the opening from waiting for its other end.
        path = self.path / item.path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP or not self._is_shortcut(path):
                raise
            fd = os.open(path, flags)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != item.size:
            os.close(fd)
            raise changed_item(self.name, item, found.st_size)
        return cast(BinaryIO, open(fd, "rb", buffering=0))

    def _is_shortcut(self, link: str | Path) -> bool:
        """Return whether a link is one of Drive's shortcuts: DriveFS shows them as links into a folder of its own."""
        target = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        return bool(self._shortcut_targets) and target.startswith(self._shortcut_targets)

    def close(self) -> None:
        """Do nothing: no file stays open."""

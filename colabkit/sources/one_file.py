"""One regular file as a source: a pack, a checkpoint, an archive that is kept as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, cast

from colabkit._files import translated
from colabkit.environment import can_hang
from colabkit.mounts import mounts
from colabkit.sources.answering import answer_of
from colabkit.sources.engine import is_as_listed
from colabkit.sources.items import Item, Listing, changed_item

__all__ = ["FileSource", "open_listed"]


class FileSource:
    """One file; its item has the file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.can_hang = can_hang(os.path.abspath(path), mounts())

    def list(self) -> Listing:
        """Return the one file, with its size and time of now.

        Raises:
            FileFailed: if it cannot be had.
            TimedOut: if there was no answer, twice.
        """
        with translated(f"read {self.name!r}"):
            found = answer_of(self.path.stat, self.can_hang)
        return Listing((Item(self.path.name, found.st_size, found.st_mtime_ns),), ())

    def open(self, item: Item) -> BinaryIO:
        """Open the file.

        Raises:
            SourceChanged: if it is no file any more, or its size or time is no longer the listed one.
        """
        return open_listed(self.path, self.name, item)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def open_listed(path: Path, source: str, item: Item, flags: int = 0) -> BinaryIO:
    """Open a regular file that is as it was listed.

    Args:
        path: of the file.
        source: its source's name, for messages.
        item: as listed.
        flags: of `os.open`, besides reading.

    Raises:
        SourceChanged: if it is no regular file, or its size or time is another.
        OSError: if it cannot be opened.
    """
    # Where a pipe took the file's place, O_NONBLOCK keeps the opening from waiting for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(fd)
        if not is_as_listed(found, item):
            raise changed_item(source, item, found.st_size)
        return cast(BinaryIO, open(fd, "rb", buffering=0))
    except BaseException:
        os.close(fd)
        raise

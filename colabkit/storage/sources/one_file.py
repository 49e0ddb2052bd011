"""One regular file as a source: a pack, a checkpoint, an archive that is kept as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from colabkit.foundation import can_hang, mounts, translated
from colabkit.storage.sources.answering import answer_of
from colabkit.storage.sources.items import Item, Listing
from colabkit.storage.sources.listed import open_listed


class FileSource:
    """One file; its item has the file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.can_hang = can_hang(os.path.abspath(path), mounts())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path.absolute(),)

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

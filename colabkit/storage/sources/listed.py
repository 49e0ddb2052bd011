"""Local files, read only as long as they are what was listed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from colabkit.storage.sources.items import Item, changed_item

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in the file's place is not waited for


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
    fd = os.open(path, _FLAGS | flags)
    try:
        found = os.fstat(fd)
        if not is_as_listed(found, item):
            raise changed_item(source, item, found.st_size)
        return cast(BinaryIO, open(fd, "rb", buffering=0))
    except BaseException:
        os.close(fd)
        raise


def read_listed(path: str, item: Item, flags: int = 0) -> bytes | None:
    """Return all bytes of a small local file by as few calls as can be; None if it is not what was listed.

    Args:
        path: of the file.
        item: as listed.
        flags: of `os.open`, besides reading.
    """
    try:
        fd = os.open(path, _FLAGS | flags)
    except OSError:
        return None
    try:
        data = os.read(fd, item.size + 1)
        return data if len(data) == item.size and is_as_listed(os.fstat(fd), item) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def is_as_listed(found: os.stat_result, item: Item) -> bool:
    """Return whether an open file is a regular one of the size and time listed."""
    same_time = not item.mtime_ns or found.st_mtime_ns == item.mtime_ns
    return stat.S_ISREG(found.st_mode) and found.st_size == item.size and same_time

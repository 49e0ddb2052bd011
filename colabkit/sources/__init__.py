"""Where data comes from: a folder or a zip archive becomes a listing of items that can be read.

A source is listed once; its items are read by the engine that staging and packing share. It is never written to.
"""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

from colabkit._files import translated
from colabkit.errors import BadSource, InvalidOption, SourceMissing, cannot
from colabkit.mounts import user_path
from colabkit.sources.archive import ZipSource
from colabkit.sources.engine import Retries, Threads, check_threads, concurrently, read_blocks, read_item, read_range
from colabkit.sources.folder import FolderSource
from colabkit.sources.items import STAGE_SEAL, Item, Listing, Source

__all__ = [
    "STAGE_SEAL",
    "FolderSource",
    "Item",
    "Listing",
    "Retries",
    "SlowSource",
    "Source",
    "Threads",
    "ZipSource",
    "check_outside",
    "check_threads",
    "concurrently",
    "open_source",
    "read_blocks",
    "read_item",
    "read_range",
    "sample_archive",
]

_SAMPLES = Path(__file__).parent.parent / "samples"


def open_source(source: str | os.PathLike[str] | Source) -> Source:
    """Return the source at a path: a folder, a zip archive, or `samples:NAME` for data inside the package.

    Raises:
        SourceMissing: if nothing is there.
        BadSource: if it is neither a folder nor a zip archive.
        BadArchive: if it is an archive that is cut short or broken.
    """
    if isinstance(source, Source):
        return source
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        needed = "a folder, a zip archive or 'samples:digits'"
        raise InvalidOption(cannot(f"read {source!r}", f"a {type(source).__name__}", needed, "Pass its path"))
    name = os.fspath(source)
    act = f"read {name!r}"
    if "://" in name:
        next_step = "Run colabkit.fetch() first, and use the path that it returns"
        raise BadSource(cannot(act, "an address", "a folder or a zip archive on this machine", next_step))
    path = sample_archive(name.removeprefix("samples:")) if name.startswith("samples:") else user_path(name, act)
    with translated(act):
        if path.is_dir():
            return FolderSource(path)
        if not path.exists():
            parent = next(folder for folder in path.absolute().parents if folder.exists())
            raise SourceMissing(
                cannot(
                    act,
                    f"no such file or folder; {str(parent)!r} is the last part that exists",
                    "a folder or a zip archive",
                    "Check the path, or run colabkit.mount() if it is on Drive",
                )
            )
        if path.is_file() and (path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)):
            return ZipSource(path)
    kind = f"a file of type {path.suffix!r}" if path.is_file() else "a special file"
    raise BadSource(cannot(act, kind, "a folder or a zip archive", "Name the folder that holds the files"))


def check_outside(act: str, source: Source, target: Path) -> None:
    """Refuse a target that is the source or lies inside it: a source is never written to.

    Raises:
        BadSource: naming the target.
    """
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source.name)):
        found = f"the target {str(target)!r} lies inside the source"
        raise BadSource(cannot(act, found, "a target elsewhere", "Choose another target"))


def sample_archive(name: str) -> Path:
    """Return the archive of a data set that travels inside the package, as in `sample_archive("digits")`."""
    path = _SAMPLES / f"{name}.zip"
    if not path.is_file():
        known = ", ".join(repr(f"samples:{file.stem}") for file in sorted(_SAMPLES.glob("*.zip")))
        act = f"read {f'samples:{name}'!r}"
        raise SourceMissing(cannot(act, "no such samples", f"one of {known}", "Use one of these"))
    return path


class SlowSource:
    """A source behind a simulated slow mount: every open waits `latency_s` first, as a network drive makes it."""

    def __init__(self, source: Source, latency_s: float) -> None:
        self.source = source
        self.latency_s = latency_s
        self.name = source.name

    def list(self) -> Listing:
        """Return the inner source's listing after one latency."""
        time.sleep(self.latency_s)
        return self.source.list()

    def open(self, item: Item) -> BinaryIO:
        """Open the item after one latency."""
        time.sleep(self.latency_s)
        return self.source.open(item)

    def close(self) -> None:
        """Close the inner source."""
        self.source.close()

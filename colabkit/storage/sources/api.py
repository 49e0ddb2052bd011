"""Where data comes from: a folder, an archive, a table, a bucket or records become a listing of items that can be read.

A source is listed once; its items are read by the engine that staging and packing share. It is never written to.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    SourceMissing,
    can_hang,
    cannot,
    kind_of,
    mounts,
    resolved,
    translated,
    user_path,
)
from colabkit.storage.addresses import FSSPEC, address_of
from colabkit.storage.sources.answering import answer_of
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item, Listing, Source
from colabkit.storage.sources.manifest import TABLE_SUFFIXES, ManifestSource, is_manifest
from colabkit.storage.sources.one_file import FileSource
from colabkit.storage.sources.tar_archive import TAR_SUFFIXES, TarSource, is_tar
from colabkit.storage.sources.zip_archive import ZipSource

AnySource: TypeAlias = str | os.PathLike[str] | Source | Any
"""What public calls take as source; a table of paths is a list of them, or a pandas DataFrame."""

_SAMPLES = Path(__file__).parent.parent / "samples"
_WHOLE_SUFFIXES = (  # zip archives inside, many of them, which those who read them want whole
    *(".bin", ".ckpt", ".keras", ".npz", ".onnx", ".pt", ".pt2", ".ptl", ".pth", ".safetensors"),
    *(".apk", ".docx", ".epub", ".ipynb", ".jar", ".kmz", ".odp", ".ods", ".odt", ".pptx", ".whl", ".xlsx"),
    *(".h5", ".hdf5", ".npy", ".arrow", ".feather", ".tfrecord"),
)


def open_source(source: AnySource) -> Source:
    """Return the source that is meant.

    A path is a folder, a zip or tar archive, a table of paths, or one file of any other kind. Archives are told by
    their names, those of no known ending by their first and last bytes; a `.csv`, `.tsv` or `.parquet` file is a table
    if it has a column of paths and the first of them is there.

    Args:
        source: a path; a list of paths or a pandas DataFrame with a column of them; the address of a bucket's folder,
            as in `"gs://bucket/birds"`; `samples:NAME` for data inside the package; or a `Source`.

    Raises:
        SourceMissing: if nothing is there.
        BadSource: if it is a special file, or an address that has to be fetched first.
        InvalidOption: if it cannot be meant.
        TimedOut: if there was no answer, twice.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, list | tuple) or hasattr(source, "iloc"):
        return ManifestSource(source)
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not name or not isinstance(name, str):
        needed = "a path, an address, a table of paths or 'samples:digits'"
        raise InvalidOption(cannot(f"read {source!r:.60}", kind_of(source), needed, "Pass its path"))
    if "://" in name or name.startswith(("drive.google.com/", "docs.google.com/")):
        return _open_address(name)
    act = f"read {name!r}"
    path = sample_archive(name.removeprefix("samples:")) if name.startswith("samples:") else user_path(name, act)
    with translated(act):
        kind = answer_of(lambda: _kind_of(path), can_hang(os.path.abspath(path), mounts()))
        if kind is not None:
            return kind(path)
        if os.path.lexists(path):
            next_step = "Name the folder that holds the files"
            raise BadSource(cannot(act, "a special file or broken link", "a folder, a file or an archive", next_step))
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    found = f"no such file or folder; {str(parent)!r} is the last part that exists"
    next_step = "Check the path, or run colabkit.mount() if it is on Drive"
    raise SourceMissing(cannot(act, found, "a folder, a file or an archive", next_step))


def _open_address(text: str) -> Source:
    if text.lower().startswith(("file://", "local://")):
        raise BadSource(cannot(f"read {text!r}", "a path as address", "a path", "Leave out what stands before it"))
    address = address_of(text)
    if address.kind == FSSPEC:
        return BucketSource(text)
    next_step = "Run colabkit.stage() with it, and use the path that it returns"
    raise BadSource(cannot(f"read {address.shown!r}", "an address", "something on this machine", next_step))


def _kind_of(path: Path) -> Callable[[Path], Source] | None:
    """Return what opens a path; None if it is neither a folder nor a regular file."""
    if path.is_dir():
        return FolderSource
    if not path.is_file():
        return None
    name = path.name.lower()
    if name.endswith(".zip"):
        return ZipSource
    if name.endswith(TAR_SUFFIXES):
        return TarSource
    if name.endswith(TABLE_SUFFIXES):
        return ManifestSource if is_manifest(path) else FileSource
    if name.endswith(_WHOLE_SUFFIXES):
        return FileSource
    if is_tar(path):
        return TarSource
    return ZipSource if zipfile.is_zipfile(path) else FileSource


def check_outside(act: str, source: Source, target: Path) -> None:
    """Refuse a target that is the source or lies inside it: a source is never written to.

    Raises:
        BadSource: naming the target.
    """
    table = mounts()  # a mount that hangs is not asked
    if Path(resolved(os.path.abspath(target), table)).is_relative_to(resolved(os.path.abspath(source.name), table)):
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
        self.can_hang = True

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

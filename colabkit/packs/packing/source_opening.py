"""Opens a source to pack, and stages it first where that is necessary or faster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from colabkit.foundation import ColabkitError, SourceMissing, call, cannot
from colabkit.storage import (
    ARCHIVE_SUFFIXES,
    DATA_FILE,
    FSSPEC,
    AnySource,
    ArchiveSource,
    BucketSource,
    LmdbSource,
    RangeSource,
    Retries,
    Source,
    identity_of,
    is_record_bucket,
    open_records,
    open_samples,
    stage,
)

_CONTAINER_SUFFIXES = (*ARCHIVE_SUFFIXES, ".tfrecord", ".tfrecords", ".tfrec", ".lmdb", ".mdb", ".parquet")
"""Suffixes of bucket objects that contain many samples; these objects are staged completely."""


def exchanged(source: object, to: object) -> SourceMissing | None:
    """Return the error for a missing source if it is named like a pack and the target is not."""
    names = [str(path) for path in (source, to) if path and isinstance(path, str | os.PathLike)]
    if [name.lower().endswith((".h5", ".hdf5")) for name in names] != [True, False] or os.path.lexists(names[0]):
        return None
    missing, target = names
    found = f"this file does not exist, and the target {target!r} does not have the name of a pack"
    next_step = ("The source and the target may be swapped: use ", call("pack", target, missing))
    return SourceMissing(cannot(f"pack {missing!r}", found, "", next_step))


def opened_source(
    source: AnySource, to: object, as_table: Mapping[str, Any], *, overwrite: bool, progress: bool
) -> Source:
    """Open a source to pack; stage it first where that is necessary or faster."""
    address = None if isinstance(source, Source) else identity_of(source, extract=False)[2]
    if address is not None and address.kind != FSSPEC:
        source = stage(source, extract=False, refresh=overwrite, progress=progress).path
    elif address is not None and str(source).rstrip("/").lower().endswith(_CONTAINER_SUFFIXES):
        name = str(source).rstrip("/").rpartition("/")[2]
        folder = stage(source, extract=False, refresh=overwrite, progress=progress).path
        source = folder / name if (folder / name).is_file() else folder
    elif address is not None and _is_record_bucket(address.text):
        source = stage(source, extract=False, refresh=overwrite, progress=progress).path
    try:
        opened = open_samples(source, **as_table)
    except SourceMissing:
        if error := exchanged(source, to):
            raise error from None
        raise
    if opened.can_hang and isinstance(opened, RangeSource):
        return _staged_records(opened, as_table["path_column"], overwrite=overwrite, progress=progress)
    if opened.can_hang and isinstance(opened, ArchiveSource) and opened.is_sequential:
        # Stage the archive, because listing and reading the samples each need a full pass over it.
        opened.close()
        return type(opened)(stage(opened.path, extract=False, refresh=overwrite, progress=progress).path)
    return opened


def _is_record_bucket(address: str) -> bool:
    # If the bucket cannot be listed, listing it as a source raises the error.
    with suppress(ColabkitError, OSError):
        bucket = BucketSource(address)
        return Retries().run(lambda: is_record_bucket(bucket))
    return False


def _staged_records(remote: RangeSource, column: str | None, *, overwrite: bool, progress: bool) -> Source:
    """Stage record files and open the local copy, because reading individual samples from a mount is slow."""
    files = [os.path.abspath(file) for file in remote.files]
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    folder = stage(files, extract=False, refresh=overwrite, progress=progress).path
    local = [os.fspath(folder / os.path.relpath(file, root)) for file in files]
    given: AnySource = local
    if isinstance(remote, LmdbSource):
        given = folder if local[0] == os.fspath(folder / DATA_FILE) else local[0]
    opened = open_records(given, column)
    assert opened is not None
    opened.name = remote.name
    return opened

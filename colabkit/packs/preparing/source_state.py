"""The state of a source, by which `prepare()` recognizes a source that has changed since it was packed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from colabkit.foundation import Text, can_hang, format_things, mounts, option, partials, user_path
from colabkit.storage import (
    FSSPEC,
    STALLED_S,
    TABLE_SUFFIXES,
    Address,
    AnySource,
    ArchiveSource,
    BucketSource,
    FileSource,
    FolderSource,
    Item,
    Listing,
    ManifestSource,
    RangeSource,
    Retries,
    Source,
    answer_of,
    concurrently,
    open_samples,
    version_of,
)

# Maximum number of files of a remote source whose sizes and times are read. On a mount, each file takes a request of
# several milliseconds, while one request lists all names in a folder.
_REMOTE_STATS = 4000


@dataclass(frozen=True, slots=True)
class SourceState:
    """The state of a source at one time.

    Attributes:
        digest: digest of the names, sizes and modification times of the source's files; an unchanged source has the
            same digest in later sessions.
        changes: identifier of the current boot, a space, and a digest of the files' inodes and change times, which
            programs cannot set; empty for a remote source, since mounts may change inode numbers.
        checked: the facts that were compared, and those that were not; empty if the source cannot change.
        listing: the files of a folder, perhaps without the sizes of some; None for other sources.
    """

    digest: str
    changes: str
    checked: Text
    listing: Listing | None = None


class _Contents(NamedTuple):
    """Lines that describe a source, and the files whose sizes and times belong to its state too.

    The field `facts` describes the content of the lines and of the files' metadata. The field `listing` is the listing
    of a folder, in the order of `files`.
    """

    lines: Sequence[str]
    files: Sequence[str]
    is_remote: bool
    facts: str = "names, sizes and times"
    listing: Listing | None = None


def read_state(
    source: AnySource, address: Address | None, as_table: Mapping[str, Any], go_on: Callable[[], None]
) -> SourceState:
    """Return the state of a source; this reads only names, metadata and tables of paths.

    Args:
        source: a source of `prepare()`.
        address: its address, or None.
        as_table: the arguments of `open_source()` for tables.
        go_on: called between requests to the source; may raise an error to stop.

    Raises:
        SourceMissing: if the source does not exist.
        ColabkitError: if it cannot be read.
    """
    if isinstance(source, str) and source.startswith("samples:"):
        return SourceState("", "", "")
    if address is not None and address.kind != FSSPEC:
        again = (option("refresh", True), " to fetch it again")
        return SourceState("", "", ("nothing, because the source is an address; use ", *again))
    lines, files, is_remote, facts, listing = _contents_of(source, as_table, go_on)
    step = math.ceil(len(files) / _REMOTE_STATS) if is_remote else 1
    some = files[:: max(step, 1)]
    retries = Retries()

    def look(path: str) -> tuple[str, os.stat_result | None]:
        go_on()
        try:
            return path, retries.run(lambda: os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return path, None

    found = dict(concurrently(look, some, "auto", stalled_s=STALLED_S if is_remote else None))
    stats = [found[path] for path in some]
    sizes = [f"{path}\0{one and (one.st_size, one.st_mtime_ns)}" for path, one in zip(some, stats, strict=True)]
    inodes = [f"{one.st_ino}\0{one.st_ctime_ns}" for one in stats if one is not None]
    changes = "" if is_remote else f"{partials.owner().partition('-')[0]} {_digest(inodes)}"
    counted = format_things(len(files) or len(lines), "file")
    checked: Text = f"{facts} of {counted}"
    if len(some) < len(files):
        rest = f"names of {counted}, and sizes and times of {len(some):,} of them; use "
        checked = (rest, option("refresh", True), " if the contents of others have changed")
    if listing is not None:
        known = ((item, found.get(path)) for item, path in zip(listing.items, files, strict=True))
        listing = replace(listing, items=tuple(Item.of(item.path, one) if one else item for item, one in known))
    return SourceState(_digest([*lines, "", *sizes]), changes, checked, listing)


def _contents_of(source: AnySource, as_table: Mapping[str, Any], go_on: Callable[[], None]) -> _Contents:
    if isinstance(source, str | os.PathLike) and "://" not in str(source):
        path = os.path.abspath(user_path(source, f"read {os.fspath(source)!r}"))
        is_remote = can_hang(path, mounts())
        # Open only tables, because they list other files. Any other file may be on a slow mount.
        if not path.lower().endswith(TABLE_SUFFIXES) and answer_of(lambda: os.path.isfile(path), is_remote):
            return _Contents((), (path,), is_remote)
    opened = source if isinstance(source, Source) else open_samples(source, **as_table)
    with closing(opened):
        if isinstance(opened, FolderSource):
            listing = opened.list(lambda _: go_on(), go_on, has_sizes=False)
            root = os.path.abspath(opened.path)
            files = [f"{root}/{item.path}" for item in listing.items]
            return _Contents([*files, *map(str, listing.skipped)], files, opened.can_hang, listing=listing)
        if isinstance(opened, RangeSource):
            return _Contents((), [os.path.abspath(file) for file in opened.files], opened.can_hang)
        if isinstance(opened, ManifestSource):
            return _Contents((), opened.files, opened.can_hang)
        if isinstance(opened, FileSource | ArchiveSource):
            return _Contents((), [os.path.abspath(opened.path)], opened.can_hang)
        if isinstance(opened, BucketSource):
            found = opened.facts()
            has_versions = all(map(version_of, found.values()))
            facts = "names, sizes and versions" if has_versions else "names and sizes"
            lines = [f"{path}\0{info.get('size')}\0{version_of(info)}" for path, info in found.items()]
            return _Contents(lines, (), opened.can_hang, facts)
        listing = opened.list()
        items, columns = listing.items, listing.columns
        rows = (f"\0{columns.keys()} {row}" for row in zip(*columns.values(), strict=True)) if columns else repeat("")
        facts = "names, sizes and times" if all(item.mtime_ns for item in items) else "names and sizes"
        lines = [f"{item.path}\0{item.size}\0{item.mtime_ns}{row}" for item, row in zip(items, rows, strict=False)]
        return _Contents(lines, (), opened.can_hang, facts)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

"""The places that the launcher lists, from which a source is chosen: folders, archives, tables and record files."""

from __future__ import annotations

import os

from colabkit.notebook.lines import list_paths
from colabkit.notebook.recipe.api import is_drive_missing

DRIVE = "drive:"
_HERE, _ROOT = "./", "/"
_KAGGLE = "/kaggle/input/"
_SOURCES = r"\.(zip|tar|tgz|tar\.\w+|csv|tsv|parquet|h5|hdf5|tfrecords?|tfrec|lmdb|mdb)$"
_MOST = 1000
"""Maximum number of entries of a place, since each is shown by the browser."""

_SAMPLE = ("samples:digits (1,797 images of digits)", "samples:digits")

Entry = tuple[str, str]
"""A label, and the path that it stands for: a source, or a place, which ends in a slash or is `drive:` or empty."""


def is_place(path: str) -> bool:
    """Return whether an entry's path is a place that can be listed, rather than a source."""
    return not path or path[-1] in "/:"


def list_place(place: str) -> list[Entry]:
    """Return the entries of a place; `""` stands for the list of starting places.

    A folder that cannot be listed within two seconds has only the entry for its parent folder.
    """
    if not place:
        drive = "Google Drive (connect)" if is_drive_missing() else "Google Drive"
        kaggle = [("Kaggle's input", _KAGGLE)] if os.path.isdir(_KAGGLE) else []
        return [_SAMPLE, (drive, DRIVE), *kaggle, ("this folder", _HERE), ("all files of this machine", _ROOT)]
    found = [path.removeprefix(_HERE) for path in list_paths(place, _SOURCES, _MOST + 1)]
    base = place.removeprefix(_HERE)
    # List folders before files.
    entries = [(path.removeprefix(base), path) for path in sorted(found, key=lambda path: (path[-1] != "/", path))]
    if len(entries) > _MOST:
        entries[_MOST:] = [("… and more: type the path in Source", place)]
    source = place.rstrip("/")
    use = [] if place in (DRIVE, _HERE, _ROOT, _KAGGLE) else [(f"✓ use {source}", source)]
    return [(f"↑ up from {place}", _above(place)), *use, *entries]


def _above(place: str) -> str:
    if place in (DRIVE, _ROOT, _KAGGLE):
        return ""
    if place == _HERE:
        return os.path.dirname(os.getcwd()).rstrip("/") + "/"
    head, slash, _ = place.removesuffix("/").rpartition("/")
    if place.startswith(DRIVE) and not slash:
        return DRIVE
    return head + slash if slash else _HERE

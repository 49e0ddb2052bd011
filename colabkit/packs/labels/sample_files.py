"""The files of a listing that are samples, by their folder and extension."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from colabkit.foundation import IMAGE_EXTENSIONS, BadSource, Text, cannot, format_things, option, user_path
from colabkit.storage import TABLE_SUFFIXES, FolderSource, Item, Listing, LocalCopy, Source, table_problem

IMAGES = frozenset(IMAGE_EXTENSIONS)
"""Extensions of image files."""

ARRAY = "npy"
"""Extension of files that contain an array."""

_OTHER_IMAGES = frozenset({"arw", "cr2", "cr3", "dng", "eps", "exr", "hdr", "jxl", "nef", "psd", "raw", "svg"})


def by_folder(items: Sequence[Item], rows: Iterable[int]) -> dict[str, list[int]]:
    """Return the given rows by the folder of their item."""
    folders: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        folders[items[row].path.rpartition("/")[0]].append(row)
    return folders


def find_samples(act: str, listing: Listing, name: str) -> tuple[dict[str, list[int]], tuple[tuple[str, str], ...]]:
    """Return the rows of samples by folder, and the files that are not samples, with the reason.

    Samples are the files with an image extension; if there are none, the `.npy` files; if no file has an extension, as
    in an LMDB, all files. Hidden files are never samples.

    Raises:
        BadSource: if there are no samples.
    """
    items = listing.items
    images: dict[str, list[int]] = defaultdict(list)
    others: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for folder, rows in by_folder(items, range(len(items))).items():
        is_hidden = any(part.startswith(".") or part == "__MACOSX" for part in folder.split("/"))
        start = len(folder) + 1 if folder else 0
        for row in rows:
            base = items[row].path[start:]
            if is_hidden or base.startswith("."):
                reasons[row] = "hidden"
            elif (ending := ending_of(base)) in IMAGES:
                images[folder].append(row)
            else:
                others[row] = ending
    chosen: list[int] = []
    if not images:
        has_endings = any(others.values())
        chosen = [row for row, ending in others.items() if ending == ARRAY or not has_endings]
        images = by_folder(items, chosen)
    if not images:
        raise _no_images(act, listing, others.values(), name)
    for row in others.keys() - chosen:
        is_image = others[row] in _OTHER_IMAGES
        reasons[row] = "an image format that Pillow cannot decode" if is_image else "no image extension"
    # List hidden files last, because reports show the first name, and files of unknown formats matter more.
    rows = sorted(reasons, key=lambda row: (reasons[row] == "hidden", row))
    left_out = (*listing.skipped, *((items[row].path, reasons[row]) for row in rows))
    return images, left_out


def check_complete(act: str, source: Source, labels: object) -> None:
    """Raise `BadSource` if labels are inferred and a source is the local copy of a table, which lacks its columns."""
    if not (isinstance(source, FolderSource) and isinstance(labels, str) and labels == "auto") or source.can_hang:
        return
    copy = LocalCopy.of(source.path)
    if copy and not copy.seal.file and copy.seal.source.lower().endswith(TABLE_SUFFIXES):
        found = f"it is the local copy of the files that {copy.seal.source!r} lists, without the labels in this table"
        paths = (" and, if its paths are relative, ", option("root", os.fspath(source.path)))
        raise BadSource(cannot(act, found, "the table", ("Pass the path of the table", paths)))


def _no_images(act: str, listing: Listing, endings: Iterable[str], name: str) -> BadSource:
    items = listing.items
    if links := [path for path, reason in listing.skipped if reason == "link"]:
        contents = f"no image among {format_things(len(items), 'file')}, and links" if items else "only links"
        found = f"it contains {contents}, such as {links[0]!r}, which are not followed"
        copy = "Pass the folder that they point to, or copy the files"
        return BadSource(cannot(act, found, "image files or .npy files", copy))
    if not items:
        return BadSource(cannot(act, "the source has no files", "image files or .npy files", "Check the path"))
    named = ", ".join(f"{count:,} .{ending}" for ending, count in Counter(filter(None, endings)).most_common(3))
    found = f"there is no image among {format_things(len(items), 'file')}{f' ({named})' if named else ''}"
    next_step: Text = "Check the path"
    if _OTHER_IMAGES.intersection(endings):
        found, next_step = f"Pillow cannot decode the formats of its images ({named})", "Convert the files to JPEG"
    if {*endings} and {*endings} <= {"csv", "tsv", "parquet"}:
        files: Text = (", and the folder of the files with ", option("root"))
        next_step = ("Name the column of paths in the table with ", option("path_column"), files)
        if len(items) == 1:
            found, special = table_problem(user_path(name, act), items[0].path)
            return BadSource(cannot(act, found, "images, or a table of existing files", special or next_step))
    if {*endings} & {"h5", "hdf5"}:
        next_step = "In Python, use open_pack(path)['train'], with x= and y= unless it is a pack, and its split()"
    elif {*endings} & {"npz"}:
        next_step = "Load the arrays with numpy.load(path), and pack them as a tuple (images, labels)"
    return BadSource(cannot(act, found, f"files of the types {', '.join(sorted(IMAGES))} or npy", next_step))


def ending_of(name: str) -> str:
    """Return the extension of a file name in lower case, without the dot."""
    _, dot, ending = name.rpartition(".")
    return ending.lower() if dot else ""

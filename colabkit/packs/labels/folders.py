"""Which split and which class a file belongs to, read from its folders.

The tree is `[split/]class/…/file`. Splits are folders named like splits, and only where all top folders are; everything
else at the top is a class. One folder that wraps the whole tree, as archives often have it, is looked through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from colabkit.foundation import BadSource, cannot, format_things
from colabkit.packs.format.layout import SPLITS, Indices
from colabkit.packs.labels.splits import split_named
from colabkit.storage import Item, Listing

_IMAGES = frozenset({"bmp", "gif", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"})
_ARRAY = "npy"
_ENDINGS = _IMAGES | {_ARRAY}
_LAYOUT = "labels need one folder of images for each class, as in 'cats/1.jpg'"

ByFolder = Mapping[str, list[int]]


class Tree:
    """Splits and classes of the folders that hold samples.

    Args:
        folders: for each folder, by its path, the rows of its samples.
    """

    def __init__(self, folders: ByFolder) -> None:
        self.folders = folders
        self._inside = _unwrapped({folder: tuple(folder.split("/")) if folder else () for folder in folders})
        self.has_splits = all(parts and split_named(parts[0]) for parts in self._inside.values())

    def check_splits(self, act: str) -> None:
        """Refuse folders of classes beside `train` and its like whose own name is no split's: they would be lost.

        Raises:
            BadSource: naming one.
        """
        depths: dict[str, int] = {}
        for parts in self._inside.values():
            if parts:
                depths[parts[0]] = max(depths.get(parts[0], 0), len(parts))
        named = [top for top in depths if split_named(top)]
        if self.has_splits or not named or min(depths.values()) < 2:
            return
        other = min(top for top in depths if top not in named)
        found = f"{other!r}, which is no split, beside {min(named)!r}"
        needed = f"folders named {', '.join(SPLITS)} or their like"
        raise BadSource(cannot(act, found, needed, "Rename it, or use labels= and splits= with functions of the path"))

    def class_of(self, folder: str) -> str | None:
        """Return the class that a folder's samples are of; None if it is no class folder nor below one."""
        inside = self._inside[folder][self.has_splits :]
        return inside[0] if inside else None

    def split_of(self, folder: str) -> str:
        """Return the split that a folder's samples are in."""
        return (self.has_splits and split_named(self._inside[folder][0])) or "train"

    def splits(self, count: int) -> Indices:
        """Return the place in `SPLITS` of each row's split, `int64 [count]`."""
        return self._spread(count, {folder: SPLITS.index(self.split_of(folder)) for folder in self.folders})

    def classes(self, act: str, items: Sequence[Item]) -> tuple[tuple[str, ...], Indices]:
        """Return the sorted classes, and the class of each row, `int64 [len(items)]`.

        Raises:
            BadSource: if a sample lies in no class folder, or names have no endings, so that they are no files' names.
        """
        named = {folder: self.class_of(folder) for folder in self.folders}
        next_step = "Sort the files into folders, or use a function of the path, or labels=None"
        if outside := [rows[0] for folder, rows in self.folders.items() if named[folder] is None]:
            found = f"{items[min(outside)].path!r} lies in no class folder"
            raise BadSource(cannot(act, found, _LAYOUT, next_step))
        firsts = [items[rows[0]].path for rows in self.folders.values()]
        if keys := [path for path in firsts if _ending(path.rpartition("/")[2]) not in _ENDINGS]:
            raise BadSource(cannot(act, f"{keys[0]!r} is not named like a file", _LAYOUT, next_step))
        names = sorted({name for name in named.values() if name is not None})
        number = {name: index for index, name in enumerate(names)}
        numbers = {folder: number[name] for folder, name in named.items() if name is not None}
        return tuple(names), self._spread(len(items), numbers)

    def order(self, items: Sequence[Item]) -> Indices:
        """Return the rows sorted by class, folder and name, as `ImageFolder` of torchvision sorts them."""
        ranked = sorted(self.folders, key=lambda folder: (self.class_of(folder) or "", folder))
        sorted_rows = (sorted(self.folders[folder], key=lambda row: items[row].path) for folder in ranked)
        return np.fromiter(chain.from_iterable(sorted_rows), np.int64)

    def _spread(self, count: int, numbers: Mapping[str, int]) -> Indices:
        spread = np.zeros(count, np.int64)
        for folder, rows in self.folders.items():
            spread[rows] = numbers[folder]
        return spread


def by_folder(items: Sequence[Item], rows: Iterable[int] | None = None) -> dict[str, list[int]]:
    """Return rows by the folder of their items, all rows by default."""
    folders: dict[str, list[int]] = defaultdict(list)
    for row in range(len(items)) if rows is None else rows:
        folders[items[row].path.rpartition("/")[0]].append(row)
    return folders


def samples_of(act: str, listing: Listing) -> tuple[dict[str, list[int]], tuple[tuple[str, str], ...]]:
    """Return the rows of samples by their folder, and the files that are none, with the reason.

    Samples are the files that end like images; where there is none, those that end in `.npy`; where no name has an
    ending at all, as in an LMDB, all of them. Hidden files are none.

    Raises:
        BadSource: if there are none.
    """
    items = listing.items
    images: dict[str, list[int]] = {}
    hidden: list[int] = []
    others: dict[int, str] = {}
    for folder, rows in by_folder(items).items():
        if _is_hidden(folder):
            hidden += rows
            continue
        start = len(folder) + 1 if folder else 0
        found = []
        for row in rows:
            name = items[row].path[start:]
            if name.startswith("."):
                hidden.append(row)
            elif (ending := _ending(name)) in _IMAGES:
                found.append(row)
            else:
                others[row] = ending
        if found:
            images[folder] = found
    if not images:
        has_endings = any(others.values())
        chosen = [row for row, ending in others.items() if ending == _ARRAY or not has_endings]
        images = by_folder(items, chosen)
        for row in chosen:
            del others[row]
    if not images:
        told = f"no image among {format_things(len(items), 'file')}" if items else "no files at all"
        raise BadSource(cannot(act, told, _LAYOUT, "Check the path"))
    reasons = dict.fromkeys(others, "no image by its name") | dict.fromkeys(hidden, "hidden")
    return images, (*listing.skipped, *((items[row].path, reasons[row]) for row in sorted(reasons)))


@dataclass(frozen=True, slots=True)
class ClassTree:
    """Files with their labels.

    Attributes:
        classes: class names, sorted; a label is an index into them.
        splits: for each split, its files with their labels, sorted by class, folder and name.
        left_out: files that are no samples, with the reason.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, tuple[tuple[Item, int], ...]]
    left_out: tuple[tuple[str, str], ...]


def class_tree(listing: Listing, name: str) -> ClassTree:
    """Return splits, classes and labels of a listing with one folder a class.

    Args:
        listing: the files.
        name: the source's name, for messages.

    Raises:
        BadSource: if there are no files, no images, or images outside of class folders.
    """
    act = f"label {name!r}"
    folders, left_out = samples_of(act, listing)
    tree = Tree(folders)
    classes, numbers = tree.classes(act, listing.items)
    order = tree.order(listing.items)
    places = tree.splits(len(listing.items))[order]
    splits = {}
    for place, split in enumerate(SPLITS):
        rows = order[places == place].tolist()
        if rows:
            splits[split] = tuple((listing.items[row], int(numbers[row])) for row in rows)
    return ClassTree(classes, splits, left_out)


def _ending(name: str) -> str:
    """Return what follows the last dot of a file's name, in small letters; empty if there is no dot."""
    _, dot, ending = name.rpartition(".")
    return ending.lower() if dot else ""


def _is_hidden(folder: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in folder.split("/"))


def _unwrapped(inside: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the folders' parts without the folders that wrap all of them, down to classes or splits."""
    while True:
        tops = {parts[0] if parts else "" for parts in inside.values()}
        if len(tops) != 1 or split_named(next(iter(tops))) or any(len(parts) < 2 for parts in inside.values()):
            return inside
        inside = {folder: parts[1:] for folder, parts in inside.items()}

"""Samples, labels and splits of a listing, from its columns, its folders, or functions of the path.

Folders are `[split/]class/…/file`. Top-level folders count as splits only if all of them are named like splits;
otherwise each top-level folder is a class. A folder that contains the entire tree, as is common in archives, is
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    BadSource,
    Code,
    InvalidOption,
    Text,
    cannot,
    check_one_of,
    check_whole_number,
    format_things,
    in_python,
    omit,
    option,
)
from colabkit.packs.format.layout import SPLITS, Indices, split_named, stored_splits
from colabkit.packs.labels.label_values import (
    TASKS,
    LabelKind,
    LabelValues,
    Task,
    infer_cells,
    infer_columns,
    infer_named,
)
from colabkit.packs.labels.sample_files import ARRAY, IMAGES, by_folder, ending_of, find_samples
from colabkit.packs.labels.splits import (
    SplitPlaces,
    checked_splits,
    shares_of,
    split_labelled,
    split_places,
)
from colabkit.storage import Item, Listing

Labels: TypeAlias = str | Sequence[str] | Callable[[str], Any] | None
"""Origin of the labels: `"auto"`, a column, several columns, a function of a sample's path, or None for no labels."""

Splits: TypeAlias = str | Mapping[str, float] | Callable[[str], str] | None
"""Origin of the splits: a column, shares as text or as a mapping, a function of a sample's path, or None to use the
splits that the source defines."""

LABEL_COLUMNS = (
    *("label", "labels", "class", "class_name", "target", "category", "y", "cls"),
    *("image/class/label", "json.label", "json.class"),
)
"""Names of columns that `"auto"` recognizes as labels."""

_SPLIT_COLUMN = "split"
_FOLD = "fold"
_FUNCTION = in_python(", a function of the path")
_INTO_TABLE = "Put the labels into a table: a pandas DataFrame with the columns path and label"
_BY_FUNCTION = in_python(", use a function of the path")
_OR_FUNCTION = in_python(", or use a function of the path")
_DIVIDE = in_python(", and divide a split of the open pack, for example data['train'].split((0.8, 0.2))")
_OR_NONE = (", or pass ", option("labels", None), " if you need none")
_LAYOUT = "one folder of images for each class, such as 'cats/1.jpg'"


@dataclass(frozen=True)
class LabelledSamples:
    """Samples with their labels and splits.

    Attributes:
        items: the samples; one file can hold several.
        rows: row of each sample in the listing, `int64 [n]`.
        kind: kind of the labels.
        classes: names of the classes, or of the K labels or targets; empty for a single target or no labels.
        values: `int64 [n]` class numbers, `uint8 [n, K]` labels, or `float32 [n]` or `[n, K]` targets; None for no
            labels.
        splits: `int64` sample numbers of each non-empty split, in the order of the pack.
        left_out: files that are missing or are not samples, with the reason.
        inferred: inferred values, described as text, by the option that overrides each.
    """

    items: tuple[Item, ...]
    rows: npt.NDArray[np.int64]
    kind: LabelKind
    classes: tuple[str, ...]
    values: npt.NDArray[Any] | None
    splits: Mapping[str, npt.NDArray[np.int64]]
    left_out: tuple[tuple[str, str], ...]
    inferred: Mapping[str, str]


def label_samples(
    listing: Listing,
    name: str,
    *,
    labels: Labels = "auto",
    task: Task = "auto",
    renumber: bool = False,
    splits: Splits = None,
    seed: int = 0,
) -> LabelledSamples:
    """Return the samples of a listing with their labels and splits.

    In tables and record files, which have columns, every row is a sample, in order. Otherwise the samples are the files
    with an image extension; if there are none, the `.npy` files; if no file has an extension, all files. If classes
    come from folder names, files are sorted by class, folder and name; otherwise they stay in the order of the listing.

    Args:
        listing: the files.
        name: name of the source, for messages.
        labels: the name of a column, several column names, a function that takes a sample's path and returns any value
            that a cell may hold, or None for no labels. `"auto"` uses the first column named `label, labels, class,
            class_name, target, category, y, cls, image/class/label, json.label` or `json.class`, ignoring case,
            otherwise the folder names. See `label_values.infer_cells` for how values are interpreted.
        task: `"classes"`, `"multilabel"` or `"regression"`; `"auto"` infers it from the type of the labels.
        renumber: number the occurring classes in order; by default whole numbers from 0 to 99,999 keep their value.
        splits: the name of a column; a function that takes a sample's path and returns a split; or shares of all
            samples such as `"train=0.8,test=0.2"` or `{"train": 0.8, "test": 0.2}`, stratified by class, by combination
            of labels, or by up to ten bins of a single target. None uses a column named `split`, ignoring case,
            otherwise folders named like splits, otherwise all samples are `train`. Splits are called `train, training,
            val, valid, validation, dev, test` or `testing`.
        seed: seed for splitting by shares; the same seed gives the same splits.

    Raises:
        BadSource: if there are no samples or no labels, if cells are empty or of different kinds, or if a split is
            unknown.
        InvalidOption: if a column does not exist, if shares do not add up to 1 or leave a split empty, or if shares are
            given for a source that already has splits.
    """
    check_whole_number(f"split {name!r}", "seed", seed, 0)
    act = f"label {name!r}"
    check_one_of(act, "task", task, ("auto", *TASKS))
    column = _label_column(listing) if isinstance(labels, str) and labels == "auto" else labels
    is_by_folder = column is None and labels is not None
    if not listing.columns:
        folders, left_out = find_samples(act, listing, name)
    elif listing.items:
        folders, left_out = by_folder(listing.items, range(len(listing.items))), listing.skipped
    else:
        raise BadSource(cannot(act, "the source has no rows", "at least one row", "Check the source"))
    splits = checked_splits(f"split {name!r}", splits)
    tree = _FolderTree(listing.items, folders)
    if is_by_folder and not listing.columns:
        if splits is None:
            tree.check_splits(act)
        order = tree.order()
    else:
        order = np.sort(np.fromiter(chain.from_iterable(folders.values()), np.int64))
    items = tuple(map(listing.items.__getitem__, order.tolist()))
    if is_by_folder:
        meaning = _folder_classes(act, listing.columns, tree, order)
        origin = f"{format_things(len(meaning.classes), 'class')} from the folder names"
        origin += f", not from a column ({', '.join(listing.columns)})" if listing.columns else ""
        if task not in ("auto", "classes"):
            expected = "a column or a function of the path that returns the labels"
            raise BadSource(cannot(act, "the folder names are classes", expected, ("Pass it with ", option("labels"))))
    else:
        meaning = _infer_labels(act, listing, column, items, task, renumber=renumber)
        origin = f"labels from the column {column!r}" if column is not None and column is not labels else ""
    places = SplitPlaces(tree.splits()[order], tree.split_names)
    found = _split_samples(f"split {name!r}", listing.columns, places, items, splits, meaning, seed)
    meaning.check_options(act, task, renumber=renumber)
    inferred = meaning.inferred(origin, task, renumber=renumber)
    if splits is None:
        own = _split_column(listing.columns)
        folders_or_none = "splits from the folder names" if tree.split_names else "all samples are 'train'"
        inferred["splits"] = folders_or_none if own is None else f"splits from the column {own!r}"
    return LabelledSamples(items, order, meaning.kind, meaning.classes, meaning.values, found, left_out, inferred)


def _label_column(listing: Listing) -> str | None:
    named = {column.strip().lower(): column for column in reversed([*listing.columns])}
    alone = next(iter(listing.classes)) if len(listing.classes) == 1 else None
    return next((named[name] for name in LABEL_COLUMNS if name in named), alone)


def _folder_classes(act: str, columns: Mapping[str, Any], tree: _FolderTree, order: Indices) -> LabelValues:
    """Return the classes that folders define; raise `BadSource` if there are none, or only one for a table."""
    try:
        meaning = tree.classes(act, order)
    except BadSource:
        if not columns:
            raise
        meaning = LabelValues("class", (), order)
    # In a table, a single folder is the location of the files rather than a class.
    if columns and len(meaning.classes) < 2:
        found = f"no column ({', '.join(columns)}) has a common label name, and there are no class folders"
        # Row numbers and measurements differ more than classes.
        best = min(columns, key=lambda name: len(set(map(str, columns[name]))))
        advice: Text = ("Name a column, for example ", option("labels", best), _BY_FUNCTION, _OR_NONE)
        raise BadSource(cannot(act, found, f"one of the columns {', '.join(LABEL_COLUMNS)}", advice))
    return meaning


def _infer_labels(
    act: str, listing: Listing, labels: Labels, items: Sequence[Item], task: Task, *, renumber: bool
) -> LabelValues:
    columns = listing.columns
    if labels is None:
        return LabelValues("none", (), None)
    if isinstance(labels, str):
        cells, column = _column(act, columns, labels), f"the column {labels!r}"
        names = listing.classes.get(labels, ())
        # For other tasks, the numbers are not classes.
        if names and task in ("auto", "multilabel" if isinstance(cells[0], list) else "classes"):
            return infer_named(act, column, cells, items, names, renumber=renumber)
        return infer_cells(act, column, cells, items, task, listing.categories.get(labels, ()), renumber=renumber)
    if isinstance(labels, list | tuple) and labels and all(isinstance(name, str) for name in labels):
        if len(labels) == len(items) > len(columns):
            raise InvalidOption(cannot(act, "labels= holds a label for each file", "columns", _INTO_TABLE))
        if len(set(labels)) < len(labels):
            found = (option("labels", list(labels)), " names a column twice")
            raise InvalidOption(cannot(act, found, "each column once", "Remove the duplicate"))
        return infer_columns(act, labels, [_column(act, columns, name) for name in labels], items, task)
    if callable(labels):
        what = ("the result of ", option("labels", Code("function")))
        return infer_cells(act, what, [labels(item.path) for item in items], items, task, renumber=renumber)
    expected = ("a column, a list of columns", _FUNCTION, ", 'auto' or None")
    next_step: Text = _INTO_TABLE if hasattr(labels, "__len__") else ("For example, use ", option("labels", "label"))
    raise InvalidOption(cannot(act, option("labels", labels), expected, next_step))


def _column(
    act: str, columns: Mapping[str, Sequence[Any]], name: str, for_files: Text = "Sort the files into folders"
) -> Sequence[Any]:
    if name not in columns:
        if not columns:
            found = f"there is no column {name!r}, because the source has only files"
            raise InvalidOption(cannot(act, found, "a table", (for_files, _OR_FUNCTION)))
        next_step = ("Name one of these", _OR_FUNCTION)
        raise InvalidOption(cannot(act, f"there is no column {name!r}", f"one of {', '.join(columns)}", next_step))
    return columns[name]


def _split_column(columns: Mapping[str, Sequence[Any]]) -> str | None:
    return next((name for name in columns if name.strip().lower() == _SPLIT_COLUMN), None)


def _split_samples(
    act: str,
    columns: Mapping[str, Sequence[Any]],
    of_folders: SplitPlaces,
    items: Sequence[Item],
    splits: Splits,
    meaning: LabelValues,
    seed: int,
) -> dict[str, Indices]:
    own = _split_column(columns)
    if isinstance(splits, str):
        example = ("For shares, use ", option("splits", "train=0.8,val=0.2"))
        found = split_places(act, f"the column {splits!r}", _column(act, columns, splits, example), items)
    elif callable(splits):
        what = ("the result of ", option("splits", Code("function")))
        found = split_places(act, what, [splits(item.path) for item in items], items)
    elif splits is None:
        rename = f"rename the column to {_FOLD!r}"
        found = of_folders if own is None else split_places(act, f"the column {own!r}", columns[own], items, rename)
    else:
        shares = shares_of(act, splits)
        # A split column that contains an unknown name does not define splits.
        names = of_folders.names if own is None else stored_splits(columns[own])
        if names.keys() - {SPLITS[0]} and (own is None or all(map(split_named, columns[own]))):
            already = f"the source already has the splits {', '.join(names.values())}"
            next_step = (omit("splits"), _DIVIDE, _OR_FUNCTION)
            raise InvalidOption(cannot(act, already, "samples that are not split yet", next_step))
        return split_labelled(meaning.kind, meaning.values, len(items), shares, seed)
    split = {found.names.get(one, one): np.flatnonzero(found.places == place) for place, one in enumerate(SPLITS)}
    return {name: numbers for name, numbers in split.items() if len(numbers)}


class _FolderTree:
    """Splits and classes of the folders that hold samples; `folders` maps each folder's path to its rows."""

    def __init__(self, items: Sequence[Item], folders: Mapping[str, Sequence[int]]) -> None:
        self._items = items
        self._folders = folders
        self._inside = _strip_wrapping({folder: tuple(folder.split("/")) if folder else () for folder in folders})
        self._has_splits = all(parts and split_named(parts[0]) for parts in self._inside.values())

    def check_splits(self, act: str) -> None:
        """Raise `BadSource` if only some top-level folders are named like splits, and one of these has subfolders.

        Otherwise `train` would count as a class, and the class folders inside it would be lost.
        """
        depths: dict[str, int] = {}
        for parts in self._inside.values():
            if parts:
                depths[parts[0]] = max(depths.get(parts[0], 0), len(parts))
        named = [top for top in depths if split_named(top)]
        others = [top for top in depths if top not in named]
        if not others or all(depths[top] < 2 for top in named):
            return
        found = f"the folder {min(others)!r} next to {min(named)!r} is not a split"
        functions = (option("labels", Code("function")), " and ", option("splits", Code("function")))
        next_step = ("Move or rename the folder", in_python((", or pass functions of the path: ", functions)))
        raise BadSource(cannot(act, found, f"folders named {', '.join(SPLITS)} or similar", next_step))

    @property
    def split_names(self) -> dict[str, str]:
        """Name under which a pack stores each split that folders define; empty if folders do not define splits."""
        return stored_splits(sorted(parts[0] for parts in self._inside.values())) if self._has_splits else {}

    def splits(self) -> Indices:
        splits = {folder: split_named(parts[0]) for folder, parts in self._inside.items()} if self._has_splits else {}
        return self._by_row({folder: SPLITS.index(splits.get(folder) or SPLITS[0]) for folder in self._folders})

    def classes(self, act: str, order: Indices) -> LabelValues:
        """Return the classes of the samples in the given rows.

        Raises:
            BadSource: if a sample is not in a class folder, or if names lack extensions and are therefore not file
                names.
        """
        named = {folder: self._class_of(folder) for folder in self._folders}
        next_step = ("Sort the files into folders", _BY_FUNCTION, _OR_NONE)
        if outside := [rows[0] for folder, rows in self._folders.items() if not named[folder]]:
            found = f"{self._items[min(outside)].path!r} is not in a class folder"
            raise BadSource(cannot(act, found, _LAYOUT, next_step))
        firsts = [self._items[rows[0]].path for rows in self._folders.values()]
        if keys := [path for path in firsts if ending_of(path.rpartition("/")[2]) not in {*IMAGES, ARRAY}]:
            raise BadSource(cannot(act, f"{keys[0]!r} has no file extension", _LAYOUT, next_step))
        names = sorted(set(named.values()))
        number = {name: index for index, name in enumerate(names)}
        numbers = self._by_row({folder: number[name] for folder, name in named.items()})
        return LabelValues("class", tuple(names), numbers[order])

    def order(self) -> Indices:
        """Return the rows of samples sorted by class, folder and name, as in torchvision's `ImageFolder`."""
        ranked = sorted(self._folders, key=lambda folder: (self._class_of(folder), folder))
        sorted_rows = (sorted(self._folders[folder], key=lambda row: self._items[row].path) for folder in ranked)
        return np.fromiter(chain.from_iterable(sorted_rows), np.int64)

    def _class_of(self, folder: str) -> str:
        return next(iter(self._inside[folder][self._has_splits :]), "")

    def _by_row(self, numbers: Mapping[str, int]) -> Indices:
        found = np.zeros(len(self._items), np.int64)
        for folder, rows in self._folders.items():
            found[rows] = numbers[folder]
        return found


def _strip_wrapping(inside: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Remove wrapper folders from the folders' path components, so that they begin with a split or a class."""
    while True:
        tops = {parts[0] if parts else "" for parts in inside.values()}
        if len(tops) != 1 or split_named(next(iter(tops))):
            return inside
        # A folder that contains files directly is a class, unless it also contains folders of splits.
        has_splits = any(split_named(parts[1]) for parts in inside.values() if len(parts) > 1)
        if any(len(parts) < 2 for parts in inside.values()) and not has_splits:
            return inside
        inside = {folder: parts[1:] for folder, parts in inside.items()}

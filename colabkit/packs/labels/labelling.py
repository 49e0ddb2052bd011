"""Samples, labels and splits of a listing: from its columns, its folders, or functions of the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, InvalidOption, cannot, check_whole_number
from colabkit.packs.format.layout import SPLITS
from colabkit.packs.labels.folders import Tree, by_folder, samples_of
from colabkit.packs.labels.label_values import LabelKind, LabelValues, infer_cells, infer_columns
from colabkit.packs.labels.splits import shares_of, split_named, split_shares, strata_of
from colabkit.storage import Item, Listing

Labels: TypeAlias = str | Sequence[str] | Callable[[str], Any] | None
"""What labels are taken from: `"auto"`, a column, several columns, a function of a sample's path, or nothing."""

Splits: TypeAlias = str | Mapping[str, float] | Callable[[str], str] | None
"""What splits are taken from: a column, shares, a function of a sample's path, or None for what the source says."""

LABEL_COLUMNS = (
    *("label", "labels", "class", "class_name", "target", "category", "y", "cls"),
    *("image/class/label", "json.label", "json.class"),
)
"""Names of columns that hold labels."""

_SPLIT_COLUMN = "split"
_KNOWN_SPLITS = "train, dev, val, test or the like"


@dataclass(frozen=True)
class Labelling:
    """Samples with their labels and splits.

    Attributes:
        items: the samples; a file can be several.
        rows: `int64 [n]`, the row of each sample in the listing.
        kind: what the labels are.
        classes: names of the classes, or of the K labels or targets; empty for a single target or no labels.
        values: `int64 [n]` numbers of classes, `uint8 [n, K]` labels, `float32 [n]` or `[n, K]` targets, None for none.
        splits: for each split that has samples, in the order train, dev, test, their numbers, `int64`, in the order
            that they have in a pack.
        left_out: files that are no samples, with the reason.
    """

    items: tuple[Item, ...]
    rows: npt.NDArray[np.int64]
    kind: LabelKind
    classes: tuple[str, ...]
    values: npt.NDArray[Any] | None
    splits: Mapping[str, npt.NDArray[np.int64]]
    left_out: tuple[tuple[str, str], ...]


def label_samples(
    listing: Listing, name: str, *, labels: Labels = "auto", splits: Splits = None, seed: int = 0
) -> Labelling:
    """Return the samples of a listing with their labels and splits.

    Of a table or of records, which have columns, every row is a sample, in their order. Else samples are the files that
    end like images, or if there is none in `.npy`; where no name has an ending, all are. If classes are the names of
    folders, files are sorted by class, folder and name, else they are in the listing's order.

    Args:
        listing: the files.
        name: the source's name, for messages.
        labels: the name of a column, several such names, a function that takes a sample's path and returns what a cell
            could hold, or None. `"auto"` takes the first column named `label, labels, class, class_name, target,
            category, y, cls, image/class/label, json.label` or `json.class`, in capitals or not, else the names of
            folders. What the cells mean is told at `label_values.infer_cells`.
        splits: the name of a column, a function that takes a sample's path and returns a split, or shares of all
            samples such as `{"train": 0.8, "test": 0.2}`, which each class keeps, each combination of labels, and each
            of up to ten ranges of a single target. None takes a column named `split`, in capitals or not, else folders
            named like splits, else all samples train. Splits are called `train, training, dev, val, valid, validation,
            test` or `testing`.
        seed: of shares; the same seed gives the same splits.

    Raises:
        BadSource: if there are no samples or no labels, cells that are empty or of several kinds, or unknown splits.
        InvalidOption: if there is no such column, or shares cannot be meant: they do not add up to 1, leave a split
            empty, or the source has splits already.
    """
    check_whole_number(f"split {name!r}", "seed", seed, 0)
    act = f"label {name!r}"
    column = _label_column(listing.columns) if isinstance(labels, str) and labels == "auto" else labels
    is_by_folder = column is None and labels is not None
    if listing.columns:
        folders, left_out = by_folder(listing.items), listing.skipped
    else:
        folders, left_out = samples_of(act, listing)
    if not folders:
        raise BadSource(cannot(act, "no rows", "at least one", "Check the table"))
    tree = Tree(folders)
    if is_by_folder and splits is None and not listing.columns:
        tree.check_splits(act)
    if listing.columns:
        order = np.arange(len(listing.items))
    elif is_by_folder:
        order = tree.order(listing.items)
    else:
        order = np.sort(np.fromiter(chain.from_iterable(folders.values()), np.int64))
    items = tuple(map(listing.items.__getitem__, order.tolist()))
    if is_by_folder:
        meaning = _folder_classes(act, listing, tree, order)
    else:
        meaning = _meaning(act, listing.columns, column, items)
    dealt = _Splitting(f"split {name!r}", listing, tree, items, order).splits(splits, meaning, seed)
    return Labelling(items, order, meaning.kind, meaning.classes, meaning.values, dealt, left_out)


def _label_column(columns: Mapping[str, Sequence[Any]]) -> str | None:
    """Return the column of labels by its name, None if there is none."""
    named = {column.lower(): column for column in reversed([*columns])}
    return next((named[name] for name in LABEL_COLUMNS if name in named), None)


def _folder_classes(act: str, listing: Listing, tree: Tree, order: npt.NDArray[np.int64]) -> LabelValues:
    """Return classes from folders; raises `BadSource` if there are none, or one for all rows of a table."""
    if not listing.columns:
        classes, numbers = tree.classes(act, listing.items)
        return LabelValues("class", classes, numbers[order])
    try:
        classes, numbers = tree.classes(act, listing.items)
    except BadSource:
        classes, numbers = (), order
    if len(classes) < 2:  # one folder is merely where a table's files lie
        found = f"the columns {', '.join(listing.columns)}, and no folder for each class"
        needed = f"a column named {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}"
        next_step = "Use labels='a column', a function of the path, or labels=None"
        raise BadSource(cannot(act, found, needed, next_step))
    return LabelValues("class", classes, numbers)


def _meaning(act: str, columns: Mapping[str, Sequence[Any]], labels: Labels, items: Sequence[Item]) -> LabelValues:
    """Return what the wanted labels mean."""
    if labels is None:
        return LabelValues("none", (), None)
    if isinstance(labels, str):
        return infer_cells(act, f"the column {labels!r}", _column(act, columns, labels), items)
    if isinstance(labels, list | tuple) and labels and all(isinstance(name, str) for name in labels):
        if len(set(labels)) < len(labels):
            found = f"a column twice in labels={list(labels)!r}"
            raise InvalidOption(cannot(act, found, "each once", "Remove one of them"))
        return infer_columns(act, labels, [_column(act, columns, name) for name in labels], items)
    if callable(labels):
        return infer_cells(act, "what labels= returned", [labels(item.path) for item in items], items)
    found = f"labels={labels!r:.80}"
    needed = "a column, a list of columns, a function of the path, 'auto' or None"
    raise InvalidOption(cannot(act, found, needed, "Use labels='label', say"))


def _column(act: str, columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    if name not in columns:
        needed = f"one of {', '.join(columns)}" if columns else "a table, since files alone have no columns"
        raise InvalidOption(cannot(act, f"no column {name!r}", needed, "Name a column, or use a function of the path"))
    return columns[name]


@dataclass(frozen=True, slots=True)
class _Splitting:
    """Samples that are to be split; `order` has their rows."""

    act: str
    listing: Listing
    tree: Tree
    items: Sequence[Item]
    order: npt.NDArray[np.int64]

    def splits(self, splits: Splits, meaning: LabelValues, seed: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return the numbers of each split's samples."""
        if splits is None:
            places = self._own()
        elif isinstance(splits, str):
            cells = _column(self.act, self.listing.columns, splits)
            places = self._places(f"the column {splits!r}", cells)
        elif callable(splits):
            places = self._places("what splits= returned", [splits(item.path) for item in self.items])
        else:
            return self._shared_out(splits, meaning, seed)
        found = {split: np.flatnonzero(places == place) for place, split in enumerate(SPLITS)}
        return {split: numbers for split, numbers in found.items() if len(numbers)}

    def _shared_out(self, splits: object, meaning: LabelValues, seed: int) -> dict[str, npt.NDArray[np.int64]]:
        shares = shares_of(self.act, splits)
        own = np.unique(self._own(is_strict=False))
        if own.tolist() != [0]:
            found = f"the source already has the splits {', '.join(SPLITS[place] for place in own)}"
            needed = "samples that are not split yet"
            raise InvalidOption(cannot(self.act, found, needed, "Leave splits out, or use a function of the path"))
        strata = strata_of(meaning.kind, meaning.values, shares)
        return split_shares(strata, len(self.items), shares, seed)

    def _own(self, *, is_strict: bool = True) -> npt.NDArray[np.int64]:
        """Return the place in `SPLITS` of each sample's split, by what the source says.

        Args:
            is_strict: whether a column with other values is an error; else it says nothing.
        """
        column = next((name for name in self.listing.columns if name.lower() == _SPLIT_COLUMN), None)
        if column is None:
            return self.tree.splits(len(self.listing.items))[self.order]
        cells = self.listing.columns[column]
        if not is_strict and any(split_named(cell) is None for cell in cells):
            return np.zeros(len(cells), np.int64)
        return self._places(f"the column {column!r}", cells)

    def _places(self, what: str, cells: Sequence[Any]) -> npt.NDArray[np.int64]:
        splits = [split_named(cell) for cell in cells]
        if None in splits:
            unknown = list(dict.fromkeys(repr(cell) for cell in cells if split_named(cell) is None))
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            found = f"{what} holds {', '.join(unknown[:5])}{more}, first for {self.items[splits.index(None)].path!r}"
            next_step = "Rename them, or use splits= with a function of the path"
            raise BadSource(cannot(self.act, found, _KNOWN_SPLITS, next_step))
        place = {split: number for number, split in enumerate(SPLITS)}
        return np.fromiter((place[split] for split in splits if split), np.int64, len(splits))

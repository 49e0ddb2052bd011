"""HDF5 files not written by colabkit, presented as packs: dataset names, samples and labels."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import (
    HDF5_USER_BLOCK_BYTES,
    BadSource,
    InvalidOption,
    NotSealed,
    SourceChanged,
    Text,
    cannot,
    check_one_of,
    format_things,
    omit,
    option,
    translated,
)
from colabkit.packs.dataset.columns import ArrayColumn, Column, FieldBatch, RaggedColumn, Stored, convert_rows
from colabkit.packs.dataset.hdf5_reader import (
    Hdf5Dataset,
    Hdf5Reader,
    dataset_names,
    describe_datasets,
    examine_dataset,
    file_stamp,
    has_dataset,
    open_hdf5,
)
from colabkit.packs.dataset.open_split import OpenSplit
from colabkit.packs.dataset.samples import SingleFileSamples
from colabkit.packs.format.layout import (
    LABELS,
    SAMPLES,
    SPLIT_NAMES,
    DataSet,
    Indices,
    PackInfo,
    find_split,
    split_named,
    stored_splits,
)
from colabkit.packs.format.pack_file import META, hdf5_start, is_pack
from colabkit.packs.labels.label_values import TASKS, LabelValues, Task, convert_labels, infer_array, number_classes
from colabkit.packs.packing.array_samples import LAYOUTS, layout_of
from colabkit.packs.packing.options import Layout

if TYPE_CHECKING:
    import h5py


DataSetNames: TypeAlias = str | Mapping[str, str]
"""Name of the only split's dataset, or a mapping of split names to dataset names."""

_SEARCHED_BYTES = 1 << 16
_WITH_SPLIT = (
    ("X_{}", "Y_{}"),
    ("X_{}", "y_{}"),
    ("x_{}", "y_{}"),
    ("{}_set_x", "{}_set_y"),
    ("{}_x", "{}_y"),
    ("images_{}", "labels_{}"),
    ("{}_images", "{}_labels"),
    ("{}/images", "{}/labels"),
)
_WHOLE = tuple(
    itertools.product(("X", "x", "images", "image", "data"), ("Y", "y", "labels", "label", "targets", "target"))
)
_COMMON_NAMES = frozenset(name for pair in _WHOLE for name in pair) | {
    pattern.format(word) for pair in _WITH_SPLIT for pattern in pair for word in SPLIT_NAMES
}


@dataclass(frozen=True)
class Hdf5Options:
    """The options of `open_pack()` for HDF5 files not written by colabkit, except the names of datasets."""

    trusted: bool = False
    task: Task = "auto"
    renumber: bool = False
    layout: Layout = "auto"


@dataclass(frozen=True)
class Hdf5Contents:
    """Contents of an HDF5 file not written by colabkit, by split.

    Attributes:
        info: description of the contents, as for a pack.
        x: names of the datasets that hold the samples.
        y: names of the datasets that hold the labels; empty if there are none.
        samples: locations and types of the datasets that hold the samples.
        labels: labels, converted as `pack()` converts them.
    """

    info: PackInfo
    x: Mapping[str, str]
    y: Mapping[str, str]
    samples: Mapping[str, Hdf5Dataset]
    labels: Mapping[str, Tensor]


def is_plain_hdf5(path: Path) -> bool:
    """Return whether a file is an HDF5 file not written by `pack()`; false for a pack that lost its seal."""
    with translated(f"open {str(path)!r}"):
        if not path.is_file() or is_pack(path):
            return False
        with path.open("rb") as file:
            head = file.read(_SEARCHED_BYTES)
            start = hdf5_start(file.fileno(), os.fstat(file.fileno()).st_size)
    return start is not None and not (start == HDF5_USER_BLOCK_BYTES and META.encode() in head)


def inspect_hdf5(path: Path, x: DataSetNames | None, y: DataSetNames | None, options: Hdf5Options) -> Hdf5Contents:
    """Return the contents of an HDF5 file, including its labels; without `x`, search for names such as `images`.

    Raises:
        BadSource: if a dataset does not exist or cannot be used.
        NotSealed: if the file is a pack that lost its seal.
        InvalidOption: if an argument is invalid, `y` is given without `x`, `task` without labels, `renumber` without
            classes, or the splits of `x` and `y` differ.
    """
    act, trusted, task = f"open {str(path)!r}", options.trusted, options.task
    check_one_of(act, "task", task, ("auto", *TASKS))
    check_one_of(act, "renumber", options.renumber, (False, True))
    check_one_of(act, "layout", options.layout, ("auto", *LAYOUTS, "array"))
    stamp = file_stamp(path)
    xs, ys = _by_split(act, "x", x), _by_split(act, "y", y)
    with open_hdf5(act, path) as file:
        if META in file.attrs:
            raise NotSealed(cannot(act, "the pack lost its seal", "a sealed pack", "Pack or stage the data again"))
        if not xs:
            if ys:
                alone = (option("y", y), " is given without ", option("x"))
                add_x = ("Name the samples with ", option("x"))
                raise InvalidOption(cannot(act, alone, "the names of samples and labels", add_x))
            xs, ys = _guess_names(act, file)
        # `val` and `dev` name the same split.
        ys = {find_split(xs, split) or split: name for split, name in ys.items()}
        if ys and set(ys) != set(xs):
            both = (option("x"), f" has the splits {', '.join(xs)}, and ", option("y"), f" has {', '.join(ys)}")
            raise InvalidOption(cannot(act, both, "the same splits in both", "Name the labels of each split"))
        samples = {split: examine_dataset(act, file, name, stamp[0], trusted) for split, name in xs.items()}
        label_sets = {split: examine_dataset(act, file, name, stamp[0], trusted) for split, name in ys.items()}
        layout = _infer_layout(act, list(samples.values()), options.layout)
        for split, labels_of in label_sets.items():
            if labels_of.shape[0] != samples[split].shape[0]:
                counts = (samples[split].shape[0], "sample"), (labels_of.shape[0], "label")
                unequal = f"the split {split!r} has {' and '.join(format_things(*one) for one in counts)}"
                other_y = ("Name the labels of these samples with ", option("y"))
                raise BadSource(cannot(act, unequal, "as many labels as samples", other_y))
        stored = {split: np.asarray(file[labels_of.name][()]) for split, labels_of in label_sets.items()}
    if task != "auto" and not ys:
        no_labels = (option("task", task), " is given without labels")
        raise InvalidOption(cannot(act, no_labels, "", ("Name the labels with ", option("y"), ", or ", omit("task"))))
    labels, meaning = _labels(act, stored, options)
    meaning.check_options(act, "auto", renumber=options.renumber)
    inferred = {} if x is not None else {"x": f"samples from {_listed(xs)}"}
    origin = f"labels from {_listed(ys)}" if inferred and ys else ""
    described = meaning.inferred(origin, task, renumber=options.renumber)
    inferred |= {"y" if name == "labels" else name: text for name, text in described.items()}
    first = next(iter(samples.values()))
    shape = first.shape[1:]
    if options.layout == "auto" and layout is not None and len(shape) > 1:
        inferred["layout"] = _describe_layout(first, layout)
    is_ragged = layout is None
    content = "image" if layout in (None, "nhwc", "nhw") else "array"
    layouts = [[split, x.name, x.shape, str(x.dtype), x.offset] for split, x in samples.items()]
    meta = {
        "source": str(path),
        "encoding": "source" if is_ragged else "raw" if content == "image" else "array",
        "fields": {SAMPLES: (content, is_ragged), **({LABELS: ("labels", False)} if label_sets else {})},
        "classes": list(meaning.classes),
        "label_kind": meaning.kind,
        "splits": {split: found.shape[0] for split, found in samples.items()},
        "sample_shape": None if is_ragged else _image_shape(shape) if content == "image" else shape,
        "channels": 3,
        "is_foreign": True,
        "inferred": inferred,
    }
    data_sets = {
        f"{SAMPLES}_{split}": DataSet(f"{SAMPLES}_{split}", x.shape, x.dtype.str, -1 if x.offset is None else x.offset)
        for split, x in samples.items()
    }
    info = PackInfo(path, data_sets, meta, {}, _identity(path, json.dumps([layouts, list(ys.items())]), stored))
    return Hdf5Contents(info, xs, ys, samples, labels)


def open_hdf5_split(
    path: Path, x: Mapping[str, str], y: Mapping[str, str], options: Hdf5Options, seal: str, split: str
) -> OpenSplit:
    """Return a split of the HDF5 file at `path`.

    Raises:
        SourceChanged: if the file's digest is no longer `seal`, or the file changes while it is opened.
    """
    stamp = file_stamp(path)
    contents = inspect_hdf5(path, x, y or None, options)
    if contents.info.seal != seal or file_stamp(path) != stamp:
        act, next_step = f"reopen {str(path)!r}", "Open it again, and create the dataset again"
        raise SourceChanged(cannot(act, "the file has been replaced or changed", "", next_step))
    found = contents.samples[split]
    content, _ = contents.info.meta["fields"][SAMPLES]
    column: Column
    if found.offset is None:
        column = _ReadColumn(Hdf5Reader(path, stamp), found, content)
    else:
        array = np.asarray(contents.info.map(f"{SAMPLES}_{split}"))
        column = ArrayColumn(_with_channels(array) if content == "image" else array, content)
    samples = SingleFileSamples(path, split, {SAMPLES: column})
    reopen = partial(open_hdf5_split, path, x, y, options, seal, split)
    return OpenSplit(contents.info, split, samples, contents.labels.get(split), reopen)


@dataclass(frozen=True, slots=True)
class _ReadColumn:
    reader: Hdf5Reader
    found: Hdf5Dataset
    content: str

    def stored(self, row: int) -> Stored:
        block = self.reader.rows(self.found, np.array([row]))
        return bytes(block[0]) if self.found.dtype.kind == "O" else block[0:1]

    def value(self, stored: Stored) -> Any:
        if isinstance(stored, bytes):
            return RaggedColumn(np.empty(0, np.uint8), np.empty((0, 2), np.int64), self.content).value(stored)
        return self._values(stored)[0]

    def many(self, rows: Indices) -> FieldBatch:
        block = self.reader.rows(self.found, rows)
        return [self.value(bytes(one)) for one in block] if self.found.dtype.kind == "O" else self._values(block)

    def _values(self, block: npt.NDArray[Any]) -> FieldBatch:
        return convert_rows(_with_channels(block) if self.content == "image" else block, self.content)


def _by_split(act: str, parameter: str, names: DataSetNames | None) -> dict[str, str]:
    if names is None:
        return {}
    given = {"train": names} if isinstance(names, str) else names if isinstance(names, Mapping) else {}
    splits = {split_named(split): name for split, name in given.items()}
    if (
        len(splits) < max(1, len(given))
        or None in splits
        or not all(name and isinstance(name, str) for name in splits.values())
    ):
        next_step = ("For example, use ", option(parameter, "images" if parameter == "x" else "labels"))
        expected = "the name of a dataset, or one name each for train, val or test"
        raise InvalidOption(cannot(act, option(parameter, names), expected, next_step))
    return {name: splits[split] for split, name in stored_splits(given).items()}


def _guess_names(act: str, file: h5py.File) -> tuple[dict[str, str], dict[str, str]]:
    """Return the datasets of samples and of labels by split, chosen by names such as `X_train` and `images`."""
    names = {name for name in _COMMON_NAMES if has_dataset(file, name)}
    for has_labels in (True, False):
        for pattern, of_labels in _WITH_SPLIT:
            pairs = {word: (pattern.format(word), of_labels.format(word)) for word in SPLIT_NAMES}
            fits = {
                word: pair for word, pair in pairs.items() if pair[0] in names and (pair[1] in names or not has_labels)
            }
            if fits:
                bare = [whole for whole, labels in pairs.values() if whole in names and labels not in names]
                if has_labels and bare:
                    unlabelled = f"{bare[0]!r} has no labels, unlike the datasets of other splits"
                    only = (option("x", {"train": "X_train"}), " and ", option("y", {"train": "y_train"}))
                    choose = ("Name the datasets to open, for example ", only)
                    raise BadSource(cannot(act, unlabelled, "labels for all splits", choose))
                of_split = {split_named(word): pair for word, pair in fits.items()}
                for word, pair in fits.items():
                    if pair != (other := of_split[split_named(word)]):
                        found = f"{pair[0]!r} and {other[0]!r} are the same split"
                        by_name = ("Name the datasets to open with ", option("x"))
                        raise BadSource(cannot(act, found, "one dataset of samples for each split", by_name))
                pairs = {name: of_split[split] for split, name in stored_splits(fits).items()}
                xs = {split: pair[0] for split, pair in pairs.items()}
                return xs, {split: pair[1] for split, pair in pairs.items()} if has_labels else {}
        for whole, of_labels in _WHOLE:
            if whole in names and (of_labels in names or not has_labels):
                return {"train": whole}, {"train": of_labels} if has_labels else {}
    listed = describe_datasets(file)
    found = f"no dataset among {listed} has a common name for samples" if listed else "the file itself has no datasets"
    x, y = _largest_pair(file)
    next_step = ("Name the datasets, for example ", option("x", x), " and ", option("y", y))
    raise BadSource(cannot(act, found, "a dataset with a name such as 'X_train', 'images' or 'data'", next_step))


def _largest_pair(file: h5py.File) -> tuple[str, str]:
    """Return the names of the two datasets that probably hold the samples and their labels."""
    sizes = {name: file[name].shape for name in dataset_names(file)}
    known = {name: shape for name, shape in sizes.items() if shape}
    x = max(known, key=lambda name: math.prod(known[name]), default="images")
    beside = [name for name, shape in known.items() if name != x and shape[0] == known[x][0]]
    # If several datasets have a row for each sample, the labels are usually in the same group as the samples.
    beside.sort(key=lambda name: (name.rpartition("/")[0] != x.rpartition("/")[0], math.prod(known[name])))
    return x, beside[0] if beside else "labels"


def _infer_layout(act: str, found: list[Hdf5Dataset], layout: Layout) -> Layout | None:
    """Return the layout of the samples; None for image files."""
    first = found[0]
    for other in found:
        if (other.shape[1:], other.dtype) != (first.shape[1:], first.dtype):
            unequal = f"{other.name!r} has samples of {_kind(other)}, but {first.name!r} has {_kind(first)}"
            next_step = ("Open one split at a time with ", option("x"))
            raise BadSource(cannot(act, unequal, "samples of one shape and dtype", next_step))
    if first.varies and len(first.shape) == 1:
        if layout != "auto":
            files = (option("layout", layout), " is given, but the samples are image files")
            raise InvalidOption(cannot(act, files, "", omit("layout")))
        return None
    if first.dtype.kind in "OS":
        next_step = ("Name another dataset with ", option("x"))
        raise BadSource(cannot(act, f"{first.name!r} contains text", "numbers or image files", next_step))
    # `layout_of` expects 1 or 3 channels, as in packs, but the Loader also loads images with an alpha channel.
    is_rgba = first.dtype == np.uint8 and len(first.shape) == 4 and first.shape[3] == 4
    return "nhwc" if is_rgba and layout in ("auto", "nhwc") else layout_of(act, first, layout)


def _describe_layout(found: Hdf5Dataset, layout: Layout) -> str:
    order = LAYOUTS.get(layout)
    kind = f"{found.dtype.newbyteorder('=')} [N, {', '.join(map(str, found.shape[1:]))}]"
    return f"images from uint8 {order}" if order else f"arrays {kind}, not images"


def _kind(found: Hdf5Dataset) -> str:
    return f"{found.dtype} {list(found.shape[1:])}"


def _image_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 1) if len(shape) == 2 else shape


def _with_channels(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return images.reshape(len(images), *_image_shape(images.shape[1:]))


def _listed(names: Mapping[str, str]) -> str:
    return " and ".join(map(repr, names.values()))


def _labels(
    act: str, stored: Mapping[str, npt.NDArray[Any]], options: Hdf5Options
) -> tuple[dict[str, Tensor], LabelValues]:
    task = options.task
    if not stored:
        return {}, LabelValues("none", (), None)
    arrays = [array.reshape(len(array)) if array.shape[1:] == (1,) else array for array in stored.values()]
    basis = {"b": "bools", "i": "whole numbers", "u": "whole numbers"}.get(arrays[0].dtype.kind)
    found = None
    next_step: tuple[Text, ...] = ("Name another dataset with ", option("y"))
    if {array.dtype.kind for array in arrays} <= set("SO") and all(array.ndim == 1 for array in arrays):
        if task in ("auto", "classes"):
            found = number_classes([_text(value) for array in arrays for value in array.tolist()])
    elif len({array.shape[1:] for array in arrays}) == 1:
        try:
            if task == "auto":
                arrays = [array if _is_class(array) else array.astype(np.float64) for array in arrays]
            parts = [convert_labels(array, task) for array in arrays]
            if all(part is not None for part in parts):
                joined = np.concatenate([part for part in parts if part is not None])
                found = infer_array(joined, task, renumber=options.renumber)
        except ValueError as error:
            raise BadSource(cannot(act, str(error), "labels that a pack can store", next_step)) from None
    if found is None or found.values is None:
        shapes = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        expected = "class numbers or names [N], 0 and 1 [N, K], or regression targets [N] or [N, K]"
        if task != "auto":
            next_step = (*next_step, ", or change ", option("task"))
        raise BadSource(cannot(act, f"the labels are {shapes}", expected, next_step))
    ends = np.cumsum([len(array) for array in arrays])[:-1]
    pieces = map(torch.from_numpy, np.split(found.values, ends))
    if basis and found.kind != "multilabel":
        found = replace(found, basis=basis)
    return dict(zip(stored, pieces, strict=True)), found


def _is_class(array: npt.NDArray[Any]) -> bool:
    """Return True except for integers `[N, K]` that are not all 0 or 1, which are regression targets."""
    return array.dtype.kind not in "iu" or array.ndim == 1 or bool(((array == 0) | (array == 1)).all())


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _identity(path: Path, layouts: str, labels: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return a digest of a file's layout, labels and length, and of its first and last 64 KiB."""
    digest = hashlib.sha256(layouts.encode())
    for array in labels.values():
        digest.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())
    with translated(f"open {str(path)!r}"), path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        digest.update(b"%d" % length + file.read(_SEARCHED_BYTES))
        digest.update(os.pread(file.fileno(), _SEARCHED_BYTES, max(0, length - _SEARCHED_BYTES)))
    return digest.hexdigest()

"""Plans packs of arrays and of map-style datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, InvalidOption, Text, cannot, in_python, omit, option
from colabkit.packs.format.layout import (
    LABELS,
    SAMPLES,
    SPLITS,
    Field,
    Indices,
    decode_text,
    split_named,
    stored_splits,
)
from colabkit.packs.labels.label_values import LabelKind, LabelValues, infer_array, name_classes, number_classes
from colabkit.packs.labels.splits import shares_of, split_labelled
from colabkit.packs.packing.array_samples import (
    LAYOUTS,
    ArraySampleMaker,
    Rows,
    TextColumn,
    check_alike,
    check_lengths,
    column_of,
    digest_of_column,
    is_array,
    layout_of,
)
from colabkit.packs.packing.dataset_samples import LABEL_KEYS, DatasetSampleMaker, ImageFormat
from colabkit.packs.packing.options import MAX_BAD, QUALITY, PackOptions, check_field_names
from colabkit.packs.packing.pack_plan import FieldTable, PackPlan, digest_of
from colabkit.storage import is_frame


class MapDataset(Protocol):
    """A map-style dataset, such as one from PyTorch or Hugging Face: it has a length and returns samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample: its `X`, or a tuple or mapping of its fields."""


_DIVIDE = in_python(", and divide a split of the open pack, for example data['train'].split((0.8, 0.2))")
_FIELDS = {"x": SAMPLES, "y": LABELS}
_EXPECTED = {
    "auto": "classes [N], 0 and 1 [N, K], or floating-point numbers [N] or [N, K]",
    "classes": "text or whole numbers [N] for classes",
    "multilabel": "0 and 1 [N, K] for multi-label samples",
    "regression": "numbers [N] or [N, K] for regression targets",
}
_MEANINGS = {"class": "classes", "multilabel": "several labels of each sample", "regression": "regression targets"}


def is_arrays(source: object) -> bool:
    """Return whether a source is an array, or a tuple or mapping of arrays, possibly nested by split."""
    if isinstance(source, Mapping):
        return not is_dataset(source) and not any(is_dataset(part) for part in source.values())
    if isinstance(source, tuple) and source and isinstance(source[0], str | os.PathLike):
        return False
    if isinstance(source, tuple):
        first, *others = source or (None,)
        return is_array(first) and all(is_array(one) or isinstance(one, list | tuple) for one in others)
    # A Series is not an array here but a table of paths.
    return is_array(source) and not is_frame(source)


def is_dataset(source: object) -> bool:
    """Return whether a source is a map-style dataset, or a mapping of splits to datasets."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_dataset(part) for part in source.values())
    if isinstance(source, str | bytes | list | tuple) or is_array(source) or is_frame(source):
        return False
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


def plan_arrays(source: Any, options: PackOptions) -> PackPlan:
    """Return the plan of a pack of arrays.

    Raises:
        InvalidOption: if arrays do not match each other, or an option applies only to files.
        BadSource: if a split is empty.
    """
    act = options.act
    refused = {
        "size": options.size is not None,
        "fields": bool(options.fields),
        "on_bad": options.on_bad != "raise",
        # An array of labels must not be compared with a text: NumPy would compare each element.
        "labels": not (options.labels is None or (isinstance(options.labels, str) and options.labels == "auto")),
        "encoding": options.encoding not in ("auto", "raw"),
        "quality": options.quality != QUALITY,
        "max_bad": options.max_bad != MAX_BAD,
        "path_column": options.path_column is not None,
        "root": options.root is not None,
    }
    _refuse(options, refused, "arrays")
    splits = {split: _checked_arrays(act, split, arrays) for split, arrays in _by_split(act, source).items()}
    first = next(iter(splits.values()))
    for arrays in splits.values():
        for name in first.keys() | arrays.keys():
            check_alike(act, name, first.get(name), arrays.get(name))
    digests = [[split, name, digest_of_column(one)] for split, arrays in splits.items() for name, one in arrays.items()]
    columns = {name: [arrays[name] for arrays in splits.values()] for name in first}
    labels, tables = LabelValues("none", (), None), []
    given_labels = columns.pop(LABELS, None)
    if given_labels is not None and options.labels is not None:
        labels = _labels(options, given_labels)
    if labels.values is not None:
        tables.append(FieldTable(Field(LABELS, "labels"), labels.values))
    for name in [name for name, one in first.items() if isinstance(one, TextColumn) and name not in (SAMPLES, LABELS)]:
        texts = columns.pop(name)
        values = tuple(value for column in texts for value in column.values)
        tables.append(FieldTable(Field(name, texts[0].content, is_ragged=True), values))
    layout = layout_of(act, first[SAMPLES], options.layout)
    maker = ArraySampleMaker(columns, layout=layout)
    counts = {split: len(arrays[SAMPLES]) for split, arrays in splits.items()}
    x = maker.fields[0]
    _refuse(options, {"channels": options.channels == 1 and x.shape[2:] != (1,)}, "arrays")
    encoding = "raw" if x.content == "image" else "array"
    digests += [[layout]]
    about = _about("arrays", encoding, labels.kind, labels.classes, x.shape, digest_of(options.plain(), digests))
    labels.check_options(options.act, options.task, renumber=options.renumber)
    about["inferred"] = labels.inferred("", options.task, renumber=options.renumber)
    if options.layout == "auto" and len(x.shape) > 1:
        order = LAYOUTS.get(layout)
        kind = f"{np.dtype(x.dtype)} [N, {', '.join(map(str, x.shape))}]"
        about["inferred"]["layout"] = f"images from uint8 {order}" if order else f"arrays {kind}, not images"
    _note_splits(about, counts, options)
    numbers = _number_splits(act, counts, options, labels.kind, labels.values)
    return PackPlan("arrays", maker, numbers, tuple(tables), about, "raise", 0)


def plan_dataset(source: Any, options: PackOptions) -> PackPlan:
    """Return the plan of a pack of one map-style dataset, or of a dataset for each split.

    Raises:
        InvalidOption: if an option applies only to files.
        BadSource: if a split is empty, or samples contain unsupported values.
        BadImage: if the first sample is bad or, with `on_bad="skip"`, each of the first 16.
    """
    act, key = options.act, options.labels
    refused = {
        "fields": bool(options.fields),
        "on_bad": options.on_bad == "blank",
        "encoding": options.encoding == "source",
        "renumber": options.renumber,
        "layout": options.layout != "auto",
        "path_column": options.path_column is not None,
        "root": options.root is not None,
    }
    _refuse(options, refused, "a dataset")
    if key is not None and not isinstance(key, str):
        expected = "the key of the labels in the dataset's samples, 'auto' or None"
        next_step = (omit("labels"), " and return (x, label) from the dataset")
        raise InvalidOption(cannot(act, option("labels", key), expected, next_step))
    datasets = {split: _undecoded(dataset) for split, dataset in _by_split(act, source).items()}
    names = [(_classes(dataset, key), _changes_labels(dataset)) for dataset in datasets.values()]
    if len(set(names)) > 1:
        differ = f"the splits {' and '.join(map(repr, datasets))} have different classes"
        alike = "the same classes in the same order in all splits"
        raise BadSource(cannot(act, differ, alike, "Use one list of classes for all splits"))
    is_jpeg = options.encoding == "jpeg"
    images = ImageFormat("jpeg" if is_jpeg else "raw", options.channels, options.image_size, options.quality)
    skips_bad, task = options.on_bad == "skip", options.task
    classes, are_changed = names[0]
    maker = DatasetSampleMaker(
        act, datasets, images, key, classes, has_named_numbers=not are_changed, skips_bad=skips_bad, task=task
    )
    kind, known = maker.label_kind, None
    classes = () if are_changed and not maker.has_text else classes
    if kind == "class":
        known = _joined([_targets(dataset, key, maker.counts[split]) for split, dataset in datasets.items()])
    shape = maker.image_shape or maker.fields[0].shape
    encoding = images.encoding if maker.image_shape else "array"
    has_one_shape = not (maker.image_shape and is_jpeg) or options.size is not None
    name = type(next(iter(datasets.values()))).__name__
    about = _about(name, encoding, kind, _class_names(maker, classes, known), shape if has_one_shape else (), None)
    if maker.image_shape:
        about["channels"] = maker.image_shape[2]
    if options.task == "auto" and kind != "none":
        about["inferred"] = {"task": f"{_MEANINGS[kind]}, judging by the label of the first sample"}
    _note_splits(about, maker.counts, options)
    if options.splits is not None and known is None and kind != "none":
        about["inferred"]["splits"] = "shares that are not stratified, because the dataset does not list its classes"
    numbers = _number_splits(act, maker.counts, options, "class", known if len(datasets) == 1 else None)
    return PackPlan(name, maker, numbers, (), about, options.on_bad, options.most_bad(sum(maker.counts.values())))


def _about(
    name: str, encoding: str, kind: str, classes: Sequence[str], shape: Sequence[int], key: str | None
) -> dict[str, Any]:
    return {
        "source": name,
        "encoding": encoding,
        "classes": tuple(classes),
        "label_kind": kind,
        "sample_shape": list(shape) or None,
        "channels": shape[2] if len(shape) == 3 else 3,
        "options": {},
        "plan": key,
        "source_bytes": 0,
        "left_out": (),
        "inferred": {},
    }


def _note_splits(about: dict[str, Any], counts: Mapping[str, int], options: PackOptions) -> None:
    if options.splits is None and list(counts) == [SPLITS[0]]:
        about["inferred"]["splits"] = "all samples are 'train'"


def _refuse(options: PackOptions, refused: Mapping[str, bool], kind: str) -> None:
    for name, is_refused in refused.items():
        if is_refused:
            found = (option(name, getattr(options, name)), f" does not apply to {kind}")
            next_step: Text = omit(name)
            if name == "labels":
                next_step = "Pass the labels with the samples, as a tuple (images, labels)"
            raise InvalidOption(cannot(options.act, found, "", next_step))


def _checked_arrays(act: str, split: str, arrays: Mapping[str, Any]) -> dict[str, Rows | TextColumn]:
    if SAMPLES not in arrays:
        given = (
            f"the split {split!r} has the arrays {', '.join(map(repr, arrays))}" if arrays else "there are no arrays"
        )
        next_step = "For example, pass {'X': images, 'Y': labels}"
        raise InvalidOption(cannot(act, given, "an array named 'X'", next_step))
    check_field_names(act, [name for name in arrays if name not in (SAMPLES, LABELS)])
    found = {name: column_of(act, name, arrays[name]) for name in sorted(arrays, key=lambda name: name != SAMPLES)}
    check_lengths(act, split, found)
    return found


def _labels(options: PackOptions, columns: Sequence[Rows | TextColumn]) -> LabelValues:
    act, task = options.act, options.task
    if task not in ("auto", "classes") and isinstance(columns[0], TextColumn):
        raise InvalidOption(cannot(act, "the labels 'Y' are text", _EXPECTED[task], ("Change ", option("task"))))
    if all(isinstance(one, TextColumn) for one in columns):
        has_categories = all(one.categories for one in columns)
        names = dict.fromkeys(name for one in columns for name in one.categories if has_categories)
        cells = [decode_text(value) for one in columns for value in one.values]
        return number_classes(cells, [*names], renumber=options.renumber)
    values = np.concatenate(list(map(np.asarray, columns)))
    try:
        found = infer_array(values, task, renumber=options.renumber)
    except ValueError as error:
        next_step = "Correct the labels, or remove these samples"
        raise BadSource(cannot(act, f"in 'Y', {error}", "", next_step)) from None
    if found is None:
        wrong = f"the labels 'Y' are {values.dtype} {list(values.shape)}"
        expected = _EXPECTED[task]
        if task != "auto":
            raise InvalidOption(cannot(act, wrong, expected, ("Change ", option("task"))))
        rename = "Pass this array under another name, for example {'X': images, 'boxes': boxes}"
        raise InvalidOption(cannot(act, wrong, expected, rename))
    return found


def _class_names(maker: DatasetSampleMaker, names: Sequence[str], known: npt.NDArray[Any] | None) -> tuple[str, ...]:
    if maker.label_kind == "class":
        if maker.has_bools:
            return "False", "True"
        return tuple(names) or (() if known is None else name_classes(known))
    if maker.label_kind == "multilabel":
        return tuple(names) if len(names) == maker.label_count else tuple(map(str, range(maker.label_count)))
    return ()


def _number_splits(
    act: str, counts: Mapping[str, int], options: PackOptions, kind: LabelKind, labels: npt.NDArray[Any] | None
) -> dict[str, Indices]:
    if options.splits is None:
        ends = np.cumsum(list(counts.values())).tolist()
        return {split: np.arange(end - counts[split], end) for split, end in zip(counts, ends, strict=True)}
    if not isinstance(options.splits, Mapping):
        next_step = ("For example, use ", option("splits", {"train": 0.8, "test": 0.2}))
        raise InvalidOption(cannot(act, option("splits", options.splits), "a share for each split", next_step))
    if list(counts) != ["train"]:
        both = (option("splits"), f" is given, but the source already has the splits {', '.join(map(repr, counts))}")
        raise InvalidOption(cannot(act, both, "", (omit("splits"), _DIVIDE)))
    shares = shares_of(act, options.splits)
    return split_labelled(kind, labels, counts["train"], shares, options.seed)


def _undecoded(dataset: Any) -> Any:
    """Return a Hugging Face dataset with files instead of Pillow images, which would be decoded completely.

    A dataset with a custom format or transform is returned unchanged, and so are images that it converts to a mode.
    """
    features = getattr(dataset, "features", None)
    # Other datasets may use these names for anything.
    if not isinstance(features, Mapping) or not hasattr(dataset, "cast_column"):
        return dataset
    if dataset.format["type"] is None:
        for name, feature in features.items():
            if type(feature).__name__ == "Image" and getattr(feature, "mode", None) is None:
                dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


def _changes_labels(dataset: Any) -> bool:
    """Return whether `target_transform` changes the labels that a dataset's `classes` and `targets` describe.

    The dataset may be inside `Subset` or `ConcatDataset`.
    """
    given = (dataset, getattr(dataset, "transforms", None))
    if any(getattr(one, "target_transform", None) is not None for one in given):
        return True
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        own, inner = (getattr(one, "classes", None) for one in (dataset, dataset.dataset))
        # A wrapper may have classes for the changed labels, or pass on those of the dataset inside.
        return (not own or own == inner) and _changes_labels(dataset.dataset)
    return any(map(_changes_labels, getattr(dataset, "datasets", None) or ()))


def _classes(dataset: Any, key: str | None) -> tuple[str, ...]:
    """Return a dataset's class names, looking inside `Subset` and `ConcatDataset`; () if there are none."""
    own = getattr(dataset, "classes", None)
    if isinstance(own, list | tuple) and own:
        return tuple(name if isinstance(name, str) else str(name) for name in own)
    # Hugging Face datasets describe their columns in `features`.
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        for name in LABEL_KEYS if key in ("auto", None) else (key,):
            if names := getattr(features.get(name), "names", None):
                return tuple(map(str, names))
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        return _classes(dataset.dataset, key)
    if parts := getattr(dataset, "datasets", None):
        found = {_classes(part, key) for part in parts}
        return found.pop() if len(found) == 1 else ()
    return ()


def _targets(dataset: Any, key: str | None, count: int) -> Indices | None:
    """Return the class numbers of all samples if the dataset lists them, as torchvision and `TensorDataset` do."""
    if _changes_labels(dataset):
        return None
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        whole = _targets(dataset.dataset, key, len(dataset.dataset))
        return None if whole is None else whole[np.asarray(dataset.indices)]
    if parts := getattr(dataset, "datasets", None):
        return _joined([_targets(part, key, len(part)) for part in parts])
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        names = [name for name in (LABEL_KEYS if key in ("auto", None) else (key,)) if name in columns]
        given = [np.asarray(dataset[name]) for name in names[:1]]
    else:
        given = [np.asarray(getattr(dataset, name, None)) for name in ("targets", "labels")]
        # A subclass may return other values than those of its tensors.
        if type(dataset).__name__ == "TensorDataset":
            given += map(np.asarray, dataset.tensors[1:2])
    for values in given:
        if values.shape == (count,) and values.dtype.kind in "iu":
            return values.astype(np.int64)
    return None


def _joined(targets: Sequence[Indices | None]) -> Indices | None:
    known = [some for some in targets if some is not None]
    return np.concatenate(known) if len(known) == len(targets) else None


def _by_split(act: str, source: Any) -> dict[str, Any]:
    """Return the arrays or the dataset of each split, in the order of `SPLITS`.

    Arrays are given as one array, as a tuple, as a mapping of fields to arrays, as a mapping of splits to such
    mappings, or under combined names: `X_train`, `Y_train`, `X_test`.
    """
    if isinstance(source, tuple):
        return {"train": _by_field(source)}
    if not isinstance(source, Mapping):
        return {"train": {SAMPLES: source} if is_array(source) else source}
    named = {
        str(name): _by_field(value) if isinstance(value, tuple) and is_arrays(value) and split_named(name) else value
        for name, value in source.items()
    }
    are_splits = [isinstance(value, Mapping) or is_dataset(value) for value in named.values()]
    if named and all(are_splits):
        return _ordered_splits(act, named)
    if any(are_splits):
        mixed = "the source contains both arrays and splits"
        next_step = "For example, pass {'X': images, 'Y': labels}"
        raise InvalidOption(cannot(act, mixed, "either arrays by field, or splits", next_step))
    ends = {name: name.rpartition("_") for name in named}
    is_flat = {name: bool(field) and split_named(split) is not None for name, (field, _, split) in ends.items()}
    if not any(is_flat.values()) or any(name.lower() in _FIELDS for name in named):
        return {"train": {_FIELDS.get(name, name): array for name, array in named.items()}}
    if odd := [name for name, is_split in is_flat.items() if not is_split]:
        flat = next(name for name in named if is_flat[name])
        found = f"the name {odd[0]!r} does not end with a split, unlike {flat!r}"
        expected = f"names that end with one of {', '.join(f'_{split}' for split in SPLITS)}"
        raise InvalidOption(cannot(act, found, expected, f"Rename or remove {odd[0]!r}"))
    fields: dict[str, dict[str, Any]] = {}
    for name, (field, _, split) in ends.items():
        fields.setdefault(split, {})[field] = named[name]
    return _ordered_splits(act, fields)


def _by_field(arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Name the arrays of a tuple `X`, `Y`, `Z`, `Z2` and so on, like the values in a dataset's samples."""
    names = (SAMPLES, LABELS, "Z", *(f"Z{number}" for number in range(2, len(arrays))))
    return dict(zip(names, arrays, strict=False))


def _ordered_splits(act: str, named: Mapping[str, Any]) -> dict[str, Any]:
    names, splits = stored_splits(named), {}
    for name, value in named.items():
        split = split_named(name)
        if split is None or split in splits:
            found = f"the splits are named {', '.join(map(repr, named))}"
            expected = "'train', 'val' (or 'valid', 'dev') and 'test', each at most once"
            raise InvalidOption(cannot(act, found, expected, "Rename or join the splits"))
        is_fields = isinstance(value, Mapping)
        splits[split] = {_FIELDS.get(str(key), str(key)): one for key, one in value.items()} if is_fields else value
    return {name: splits[split] for split, name in names.items()}

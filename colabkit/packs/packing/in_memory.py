"""Plans of packs of arrays and of map-style data sets, by split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadSource, InvalidOption, cannot
from colabkit.packs.format.layout import LABELS, SAMPLES, SPLITS, Field
from colabkit.packs.labels.label_values import LabelKind, LabelValues, infer_array, name_classes, number_classes
from colabkit.packs.labels.splits import SPLIT_FOLDERS, shares_of, split_shares, strata_of
from colabkit.packs.packing.array_samples import (
    ArraySampleMaker,
    Blobs,
    Rows,
    check_alike,
    check_lengths,
    digest_of_rows,
    is_array,
    rows_of,
)
from colabkit.packs.packing.dataset_samples import LABEL_KEYS, DatasetSampleMaker, ImageFormat
from colabkit.packs.packing.options import PackOptions, check_field_names
from colabkit.packs.packing.pack_plan import FieldTable, PackPlan, SampleNumbers, digest_of

_FIELDS = {"x": SAMPLES, "y": LABELS}


def is_arrays(source: object) -> bool:
    """Return whether a source is an array, or a mapping of arrays by field, or of such mappings by split."""
    if isinstance(source, Mapping):
        return not is_dataset(source) and not any(is_dataset(part) for part in source.values())
    return is_array(source) and not hasattr(source, "iloc")  # a pandas Series is a table of paths


def is_dataset(source: object) -> bool:
    """Return whether a source is a map-style data set, or a mapping of such by split."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_dataset(part) for part in source.values())
    if isinstance(source, str | bytes | list | tuple) or is_array(source) or hasattr(source, "iloc"):
        return False
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


def plan_arrays(source: Any, options: PackOptions) -> PackPlan:
    """Return the plan of a pack of arrays.

    Raises:
        InvalidOption: if arrays do not fit together, or an option is meant for files.
        BadSource: if a split is empty.
    """
    act = options.act
    _refuse(act, "size=", options.size is not None)
    _refuse(act, "fields=", bool(options.fields))
    _refuse(act, f"on_bad={options.on_bad!r}", options.on_bad != "raise")
    _refuse(act, f"labels={options.labels!r:.60}", options.labels not in ("auto", None))
    _refuse(act, f"encoding={options.encoding!r}", options.encoding not in ("auto", "raw"))
    given = {split: _arrays(act, split, part) for split, part in _parts_of(act, source).items()}
    alike = next(iter(given.values()))
    for part in given.values():
        for name in alike.keys() | part.keys():
            check_alike(act, name, alike.get(name), part.get(name))
    contents = {name: content for name, (_, content) in alike.items()}
    parts = {split: {name: rows for name, (rows, _) in part.items()} for split, part in given.items()}
    first = next(iter(parts.values()))
    digests = [
        [split, name, digest_of_rows(one, contents[name])]
        for split, part in parts.items()
        for name, one in part.items()
    ]
    labels = LabelValues("none", (), None)
    if LABELS in first and options.labels is not None:
        columns = [part[LABELS] for part in parts.values()]
        labels = _labels(act, [one if isinstance(one, tuple) else np.asarray(one) for one in columns])
    parts = {split: {name: one for name, one in part.items() if name != LABELS} for split, part in parts.items()}
    texts = [name for name, one in first.items() if isinstance(one, tuple) and name not in (SAMPLES, LABELS)]
    tables = [] if labels.values is None else [FieldTable(Field(LABELS, "labels"), labels.values)]
    for name in texts:
        values = tuple(blob for part in parts.values() for blob in part.pop(name))
        tables.append(FieldTable(Field(name, contents[name], is_ragged=True), values))  # type: ignore[arg-type]
    maker = ArraySampleMaker([*parts.values()], contents)
    counts = {split: len(part[SAMPLES]) for split, part in parts.items()}
    x = maker.fields[0]
    encoding = "raw" if x.field.content == "image" else "array"
    about = _about("arrays", encoding, labels.kind, labels.classes, list(x.shape), digest_of(options.plain(), digests))
    return PackPlan(
        "arrays", maker, _splits(act, counts, options, labels.kind, labels.values), tuple(tables), about, "raise", 0
    )


def plan_dataset(source: Any, options: PackOptions) -> PackPlan:
    """Return the plan of a pack of map-style data sets.

    Args:
        source: the data set, or a mapping of splits to such.
        options: of the pack.

    Raises:
        InvalidOption: if an option is meant for files.
        BadSource: if a split is empty, or samples hold what cannot be packed.
        BadImage: if the data set cannot give the first sample.
    """
    act = options.act
    _refuse(act, "fields=", bool(options.fields))
    _refuse(act, "on_bad='blank'", options.on_bad == "blank")
    _refuse(act, "encoding='source'", options.encoding == "source")
    if options.labels is not None and not isinstance(options.labels, str):
        found, needed = f"labels={options.labels!r:.60} for a data set", "the key of a label in its samples, or None"
        raise InvalidOption(cannot(act, found, needed, "Leave it out, or return (x, label) in the data set"))
    parts = _parts_of(act, source)
    key = options.labels
    names = [_classes(part, key) for part in parts.values()]
    if len(set(names)) > 1:
        found = f"other classes in {' than in '.join(parts)}"
        raise BadSource(cannot(act, found, "the same classes in the same order", "Number the labels alike"))
    maker = DatasetSampleMaker(
        act,
        parts,
        ImageFormat("jpeg" if options.encoding == "jpeg" else "raw", options.channels, options.size, options.quality),
        key,
        names[0],
        skips_bad=options.on_bad == "skip",
    )
    kind = maker.label_kind
    targets = [_targets(part, key, maker.counts[split]) for split, part in parts.items()] if kind == "class" else []
    known = _joined(targets) if targets else None
    classes = _class_names(maker, names[0], known)
    shape = list(maker.fields[0].shape)
    if maker.is_image:
        assert maker.first_shape is not None
        shape = list(maker.first_shape) if options.encoding != "jpeg" or options.size else []
    encoding = ("jpeg" if options.encoding == "jpeg" else "raw") if maker.is_image else "array"
    name = type(next(iter(parts.values()))).__name__
    about = _about(name, encoding, kind, classes, shape, None)
    if maker.first_shape is not None:
        about["channels"] = maker.first_shape[2]
    strata = known if len(parts) == 1 else None
    splits = _splits(act, maker.counts, options, "class", strata)
    most_bad = options.most_bad(sum(maker.counts.values()))
    return PackPlan(name, maker, splits, (), about, options.on_bad, most_bad)


def _about(
    name: str, encoding: str, kind: str, classes: Sequence[str], shape: list[int], key: str | None
) -> dict[str, Any]:
    return {
        "source": name,
        "encoding": encoding,
        "classes": tuple(classes),
        "label_kind": kind,
        "sample_shape": shape or None,
        "channels": shape[2] if len(shape) == 3 else 3,
        "options": {},
        "plan": key,
        "source_bytes": 0,
        "left_out": (),
    }


def _refuse(act: str, option: str, is_given: bool) -> None:
    """Refuse an option that means something for files only."""
    if is_given:
        next_step = "Leave it out, and change the samples before"
        raise InvalidOption(cannot(act, f"{option} for samples that are no files", "the samples alone", next_step))


def _arrays(act: str, split: str, part: Mapping[str, Any]) -> dict[str, tuple[Rows | Blobs, str]]:
    """Return a split's arrays, `X` first, each with what it holds."""
    if SAMPLES not in part:
        told = f"the fields {', '.join(part) or 'nothing'} in {split!r}"
        raise InvalidOption(cannot(act, told, "an array named X", "Use {'X': images, 'Y': labels}, say"))
    check_field_names(act, [name for name in part if name not in (SAMPLES, LABELS)])
    found = {name: rows_of(act, name, part[name]) for name in sorted(part, key=lambda name: name != SAMPLES)}
    check_lengths(act, split, {name: rows for name, (rows, _) in found.items()})
    return found


def _labels(act: str, given: Sequence[npt.NDArray[Any] | Blobs]) -> LabelValues:
    if all(isinstance(one, tuple) for one in given):
        return number_classes([blob.decode("utf-8", "surrogateescape") for one in given for blob in one])
    values = np.concatenate(given)
    try:
        found = infer_array(values)
    except ValueError as error:
        raise BadSource(cannot(act, f"Y holds {error}", "a number for each sample", "Leave these out")) from error
    if found is None:
        needed = "classes [N], 0 and 1 [N, K], or floating-point numbers [N] or [N, K]"
        next_step = "Give it another name, as in {'X': ..., 'boxes': ...}"
        raise InvalidOption(cannot(act, f"Y of {values.dtype} {list(values.shape)}", needed, next_step))
    return found


def _class_names(maker: DatasetSampleMaker, names: Sequence[str], known: npt.NDArray[Any] | None) -> tuple[str, ...]:
    """Return the names of the classes, labels or targets of a data set."""
    if maker.label_kind == "class":
        if maker.has_bools:
            return "False", "True"
        return tuple(names) or (() if known is None else name_classes(known))
    if maker.label_kind == "multilabel":
        return tuple(names) if len(names) == maker.label_count else tuple(map(str, range(maker.label_count)))
    return ()


def _splits(
    act: str, counts: Mapping[str, int], options: PackOptions, kind: LabelKind, labels: npt.NDArray[Any] | None
) -> dict[str, SampleNumbers]:
    if options.splits is None:
        ends = np.cumsum(list(counts.values())).tolist()
        return {split: np.arange(end - counts[split], end) for split, end in zip(counts, ends, strict=True)}
    if not isinstance(options.splits, Mapping):
        found, needed = f"splits={options.splits!r:.60}", "shares, as in {'train': 0.8, 'test': 0.2}"
        raise InvalidOption(cannot(act, found, needed, "Give the splits as a mapping of parts instead"))
    if list(counts) != ["train"]:
        found, needed = f"splits= beside the splits {', '.join(counts)}", "one of them"
        raise InvalidOption(cannot(act, found, needed, "Leave the option out"))
    shares = shares_of(act, options.splits)
    return split_shares(strata_of(kind, labels, shares), counts["train"], shares, options.seed)


def _classes(dataset: Any, key: str | None) -> tuple[str, ...]:
    """Return the class names that a data set tells, also through views of torch; none if it tells none."""
    own = getattr(dataset, "classes", None)
    if isinstance(own, list | tuple) and own:
        return tuple(name if isinstance(name, str) else str(name) for name in own)
    features = getattr(dataset, "features", None)  # of Hugging Face
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


def _targets(dataset: Any, key: str | None, count: int) -> SampleNumbers | None:
    """Return the classes of a data set that tells them without making its samples, as torchvision's do."""
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        whole = _targets(dataset.dataset, key, len(dataset.dataset))
        return None if whole is None else whole[np.asarray(dataset.indices)]
    if parts := getattr(dataset, "datasets", None):
        found = [_targets(part, key, len(part)) for part in parts]
        return _joined(found)
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        names = [name for name in (LABEL_KEYS if key in ("auto", None) else (key,)) if name in columns]
        given = [np.asarray(dataset[name]) for name in names[:1]]
    else:
        given = [np.asarray(getattr(dataset, name, None)) for name in ("targets", "labels")]
    for values in given:
        if values.shape == (count,) and values.dtype.kind in "iu":
            return values.astype(np.int64)
    return None


def _joined(parts: Sequence[SampleNumbers | None]) -> SampleNumbers | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def _parts_of(act: str, source: Any) -> dict[str, Any]:
    """Return the parts of a source by split, in the order train, dev, test.

    Arrays come as a mapping of fields to arrays, or of splits to such mappings, or by names as a pack has them:
    `X_train`, `Y_train`, `X_test`.

    Raises:
        InvalidOption: if the names make no sense.
    """
    if not isinstance(source, Mapping):
        return {"train": {SAMPLES: source} if is_array(source) else source}
    named = {str(name): part for name, part in source.items()}
    are_parts = [isinstance(part, Mapping) or is_dataset(part) for part in named.values()]
    if named and all(are_parts):
        return _by_split(act, named)
    if any(are_parts):
        found, needed = "arrays beside mappings", "either arrays by field or splits"
        raise InvalidOption(cannot(act, found, needed, "Use {'X': images, 'Y': labels}, say"))
    ends = {name: name.rpartition("_") for name in named}
    is_flat = {name: bool(field) and split.lower() in SPLIT_FOLDERS for name, (field, _, split) in ends.items()}
    if not any(is_flat.values()) or any(name.lower() in _FIELDS for name in named):
        return {"train": {_FIELDS.get(name, name): array for name, array in named.items()}}
    if odd := [name for name, is_split in is_flat.items() if not is_split]:
        found = f"{odd[0]!r} beside {next(name for name in named if is_flat[name])!r}"
        raise InvalidOption(cannot(act, found, f"names that end in {', '.join(SPLITS)}", "Rename or remove it"))
    fields: dict[str, dict[str, Any]] = {}
    for name, (field, _, split) in ends.items():
        fields.setdefault(split, {})[_FIELDS.get(field, field)] = named[name]
    return _by_split(act, fields)


def _by_split(act: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    splits = {}
    for name, part in parts.items():
        split = SPLIT_FOLDERS.get(name.lower())
        if split is None or split in splits:
            found, needed = f"the splits {', '.join(map(repr, parts))}", f"names among {', '.join(SPLITS)}, each once"
            raise InvalidOption(cannot(act, found, needed, "Rename or join them"))
        is_fields = isinstance(part, Mapping)
        splits[split] = {_FIELDS.get(str(field), str(field)): one for field, one in part.items()} if is_fields else part
    return {split: splits[split] for split in SPLITS if split in splits}

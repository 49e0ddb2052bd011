"""Which sources are in memory, or make their samples themselves: arrays and map-style data sets, by split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from colabkit.foundation import InvalidOption, cannot
from colabkit.packs.format.layout import LABELS, SAMPLES, SPLITS
from colabkit.packs.labels.splits import SPLIT_FOLDERS
from colabkit.packs.packing.options import OWN_NAMES

_FIELDS = {"x": SAMPLES, "y": LABELS}


def is_arrays(source: object) -> bool:
    """Return whether a source is an array, or a mapping of arrays by field, or of such mappings by split."""
    if isinstance(source, Mapping):
        return not is_dataset(source) and not any(is_dataset(part) for part in source.values())
    return is_array(source) and not hasattr(source, "iloc")  # a pandas Series is a table of paths


def is_array(value: object) -> bool:
    """Return whether a value is an array of NumPy, torch, HDF5 or the like."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))


def is_dataset(source: object) -> bool:
    """Return whether a source is a map-style data set, or a mapping of such by split."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_dataset(part) for part in source.values())
    if isinstance(source, str | bytes | list | tuple) or is_array(source) or hasattr(source, "iloc"):
        return False
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


def parts_of(act: str, source: Any) -> dict[str, Any]:
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


def check_field_names(act: str, names: Iterable[object]) -> None:
    """Refuse names that no further field can have; raises `InvalidOption`."""
    for name in names:
        if not isinstance(name, str) or not name or name in OWN_NAMES or "/" in name or "\0" in name:
            found, needed = f"a field named {name!r}", "a name without '/', other than X, Y and crc"
            raise InvalidOption(cannot(act, found, needed, "Rename it"))


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

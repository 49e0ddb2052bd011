"""Reading the measurements of a run from a saved report or from a status file."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from colabkit.foundation import (
    BadSource,
    FileFailed,
    HostSnapshot,
    LoaderFacts,
    MetersSnapshot,
    SourceMissing,
    cannot,
    file_changes,
    user_path,
)
from colabkit.training.records import EpochRecord

_hints_of = cache(get_type_hints)


@cache
def _hint_parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


class SavedRun(NamedTuple):
    """The measurements in a saved report: counters and facts of the loader, host snapshots, precision, and epochs.

    Each epoch is a pair: its number, from 1, and its values by label.
    """

    spent: MetersSnapshot
    facts: LoaderFacts | None
    hosts: tuple[HostSnapshot, ...]
    precision: str | None
    epochs: tuple[tuple[int, Mapping[str, float]], ...]


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """Read the measurements from a file that `TrainReport.save()` wrote.

    Args:
        path: file to read; may start with `drive:`.

    Raises:
        SourceMissing: if the file does not exist.
        NotMounted: if `path` is on Drive and Drive is not mounted.
        FileFailed: if the file cannot be read.
        BadSource: if the file is not a saved report.
    """
    found = user_path(path, "read the report")
    try:
        with file_changes.translated("read the report"), open(found, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileFailed as error:
        expected = "a file that TrainReport.save() wrote"
        act = f"read the report {str(found)!r}"
        if isinstance(error.__cause__, IsADirectoryError):
            next_step = f"For a run with checkpoints, pass its status, {str(found / 'status.json')!r}"
            raise BadSource(cannot(act, "it is a folder", expected, next_step)) from None
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SourceMissing(cannot(act, "the file does not exist", expected, "Check the path")) from None
    try:
        return run_of(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        act = f"read the report {str(found)!r}"
        is_json = not isinstance(error, json.JSONDecodeError)
        cause = "its fields are not those of a saved report" if is_json else "the file is not JSON"
        expected, next_step = "a file that TrainReport.save() wrote", "Save the report again"
        raise BadSource(cannot(act, cause, expected, next_step)) from error


def run_of(values: dict[str, Any]) -> SavedRun:
    """Return the measurements in the values of a saved report or status; see `from_plain` for the errors."""
    epochs: tuple[EpochRecord, ...] = from_plain(tuple[EpochRecord, ...], values["epochs"])
    return SavedRun(
        from_plain(MetersSnapshot, values["spent"]),
        from_plain(LoaderFacts | None, values["facts"]),
        from_plain(tuple[HostSnapshot, ...], values["hosts"]),
        from_plain(str | None, values["precision"]),
        tuple((epoch.epoch + 1, epoch.shown) for epoch in epochs),
    )


def from_plain(hint: Any, value: Any) -> Any:
    """Return the object of the type `hint` for its plain value from JSON, with NaN in place of null in a mapping.

    Args:
        hint: a type whose objects JSON holds as plain values, dataclasses and named tuples included.
        value: the plain value.

    Raises:
        TypeError, ValueError, KeyError: if the value is not of this type.
    """
    origin, options = _hint_parts(hint)
    is_union = origin in (Union, UnionType)
    # Trying each option of a union is slow, and most values have the type of one.
    if type(value) is hint or (is_union and type(value) in options):
        return value
    if is_union:
        for option in options:
            with contextlib.suppress(TypeError, ValueError, KeyError):
                return from_plain(option, value)
    elif origin is Literal:
        if value in options:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(from_plain(options[0], one) for one in value)
    elif origin is Mapping:
        if isinstance(value, dict):
            return {key: math.nan if one is None else from_plain(options[1], one) for key, one in value.items()}
    elif hasattr(hint, "__dataclass_fields__"):
        return record_of(hint, value)
    elif hasattr(hint, "_fields"):
        return hint(*(from_plain(one, part) for one, part in zip(_hints_of(hint).values(), value, strict=True)))
    elif isinstance(value, float | int if hint is float else hint):
        return value
    raise TypeError(f"{value!r} is not {hint}")


def record_of(kind: Any, values: Any, /, **converted: Any) -> Any:
    """Return an object of the dataclass `kind`, built from plain `values` and from fields that are already `converted`.

    Raises:
        TypeError, ValueError, KeyError: if a value is not of the type of its field, or fields are missing or unknown.
    """
    hints = _hints_of(kind)
    if not isinstance(values, dict):
        raise TypeError(f"{values!r} is not {kind}")
    if unequal := hints.keys() ^ (values.keys() | converted.keys()):
        raise KeyError(*unequal)
    return kind(**{name: from_plain(hints[name], value) for name, value in values.items()}, **converted)

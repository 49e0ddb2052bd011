"""What a saved report still tells of a run: enough for the doctor."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from colabkit.foundation import (
    BadSource,
    FileFailed,
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    MetersSnapshot,
    PartSnapshot,
    SourceMissing,
    StepTimes,
    cannot,
    file_changes,
    user_path,
)

_Record = TypeVar("_Record")

_hints_of = cache(get_type_hints)


class SavedRun(NamedTuple):
    """What is kept of a run: what its loader counted and is, the machine meanwhile, the step's precision."""

    spent: MetersSnapshot
    facts: LoaderFacts | None
    hosts: tuple[HostSnapshot, ...]
    precision: str | None


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """Return what `TrainReport.save()` wrote.

    Args:
        path: of the file; `drive:` is allowed.

    Raises:
        SourceMissing: if there is no such file.
        FileFailed: if it cannot be read.
        BadSource: if it is no saved report.
    """
    found = user_path(path, "read the report")
    try:
        with file_changes.translated("read the report"), open(found, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileFailed as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        needed = "a file that TrainReport.save() wrote"
        raise SourceMissing(cannot(f"read {str(found)!r}", "no such file", needed, "Check the path")) from error
    try:
        told = json.loads(text)
        return SavedRun(
            _spent_of(told["spent"]),
            None if told["facts"] is None else _made(LoaderFacts, told["facts"]),
            tuple(_host_of(host) for host in told["hosts"]),
            told["precision"],
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        act = f"read the report {str(found)!r}"
        needed, next_step = "a file that TrainReport.save() wrote", "Save the report again"
        raise BadSource(cannot(act, "other contents", needed, next_step)) from error


def _spent_of(told: dict[str, Any]) -> MetersSnapshot:
    parts = tuple(_made(PartSnapshot, part) for part in told["parts"])
    recent = tuple(map(_step_of, told["recent"]))
    first = told.get("first_pass")
    return _made(
        MetersSnapshot, told, parts=parts, recent=recent, first_pass=None if first is None else _spent_of(first)
    )


def _step_of(told: list[Any]) -> StepTimes:
    wait_s, copy_s, compute_s, other_s, samples, *rest = told
    return StepTimes(float(wait_s), float(copy_s), float(compute_s), float(other_s), int(samples), *map(bool, rest))


def _host_of(told: dict[str, Any]) -> HostSnapshot:
    gpus = tuple(_made(GpuSnapshot, gpu, slowed_by=tuple(map(str, gpu["slowed_by"]))) for gpu in told["gpus"])
    return _made(HostSnapshot, told, gpus=gpus)


def _made(kind: type[_Record], told: dict[str, Any], **made: Any) -> _Record:
    """Return a record of plain values, and of some that were made of them.

    Raises:
        TypeError: if a value is not of its field's type.
    """
    hints = _hints_of(kind)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    for name, value in told.items():
        if name not in made and not _fits(hints.get(name), value):
            raise TypeError(f"{kind.__name__}.{name} is {value!r}")
    return kind(**{**told, **made})


def _fits(hint: Any, value: Any) -> bool:
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return value in options
    if any(get_origin(one) is Literal for one in options):
        return any(_fits(one, value) for one in options)
    return isinstance(value, (*options, int) if float in options else options)

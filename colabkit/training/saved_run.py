"""Reading the measurements of a run from a saved report or from a status file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from colabkit.foundation import (
    BadSource,
    BusyProcess,
    FileFailed,
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    LoopSpot,
    MetersSnapshot,
    PartSnapshot,
    SourceMissing,
    SpotKind,
    StepTimes,
    Stretch,
    ThreadsSnapshot,
    cannot,
    file_changes,
    user_path,
)
from colabkit.training.records import EpochRecord

_Record = TypeVar("_Record")

_hints_of = cache(get_type_hints)


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
    """Return the measurements in the values of a saved report or status; see `record_of` for the errors."""
    return SavedRun(
        _spent_of(values["spent"]),
        None if (facts := values["facts"]) is None else _facts_of(facts),
        tuple(_host_of(host) for host in values["hosts"]),
        values["precision"],
        tuple((epoch.epoch + 1, epoch.shown) for epoch in map(epoch_of, values["epochs"])),
    )


def _spent_of(values: dict[str, Any]) -> MetersSnapshot:
    parts = tuple(record_of(PartSnapshot, part) for part in values["parts"])
    recent = tuple(map(_step_of, values["recent"]))
    first = values.get("first_pass")
    return record_of(
        MetersSnapshot,
        values,
        parts=parts,
        recent=recent,
        first_pass=None if first is None else _spent_of(first),
        stretches=tuple(map(_stretch_of, values["stretches"])),
        rank_waits=tuple(map(float, values["rank_waits"])),
    )


def _stretch_of(values: list[Any]) -> Stretch:
    steps, samples, seconds, wait_s = values
    return Stretch(int(steps), int(samples), float(seconds), float(wait_s))


def epoch_of(values: dict[str, Any]) -> EpochRecord:
    """Return the record of an epoch for its plain values, with NaN in place of None."""
    named = {
        name: {key: math.nan if value is None else float(value) for key, value in values[name].items()}
        for name in ("values", "validation")
    }
    return record_of(EpochRecord, values, **named)


def _step_of(values: list[Any]) -> StepTimes:
    wait_s, copy_s, compute_s, other_s, samples, is_first, cpu_s = values
    return StepTimes(
        float(wait_s),
        float(copy_s),
        float(compute_s),
        float(other_s),
        int(samples),
        bool(is_first),
        None if cpu_s is None else float(cpu_s),
    )


def _facts_of(values: dict[str, Any]) -> LoaderFacts:
    return record_of(LoaderFacts, values, settable=tuple(map(str, values["settable"])))


def _host_of(values: dict[str, Any]) -> HostSnapshot:
    gpus = tuple(record_of(GpuSnapshot, gpu, slowed_by=tuple(map(str, gpu["slowed_by"]))) for gpu in values["gpus"])
    threads, other = values["threads"], values["other_process"]
    if threads is not None:
        threads = record_of(ThreadsSnapshot, threads, spots=tuple(map(_spot_of, threads["spots"])))
    if other is not None:
        name, cpus = other
        other = BusyProcess(str(name), float(cpus))
    return record_of(HostSnapshot, values, gpus=gpus, threads=threads, other_process=other)


def _spot_of(values: list[Any]) -> LoopSpot:
    place, text, kind, samples, asleep = values
    if kind not in get_args(SpotKind):
        raise ValueError
    return LoopSpot(str(place), str(text), kind, int(samples), int(asleep))


def record_of(kind: type[_Record], values: dict[str, Any], /, **converted: Any) -> _Record:
    """Return a record of the class `kind`, built from plain `values` and from fields that are already `converted`.

    Raises:
        TypeError: if a plain value does not have the type of its field.
    """
    # mypy believes that classes are not hashable.
    hints = _hints_of(kind)  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in converted and not _fits(hints.get(name), value):
            raise TypeError(f"{kind.__name__}.{name} is {value!r}")
    return kind(**{**values, **converted})


def _fits(hint: Any, value: Any) -> bool:
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return value in options
    if any(get_origin(one) is Literal for one in options):
        return any(_fits(one, value) for one in options)
    return isinstance(value, (*options, int) if float in options else options)

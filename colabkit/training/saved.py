"""What a saved report still tells of a run: enough for the doctor."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from colabkit import _files
from colabkit.errors import BadSource, FileFailed, SourceMissing, cannot
from colabkit.meters import LoaderFacts, MetersSnapshot, PartSnapshot, StepTimes
from colabkit.mounts import user_path
from colabkit.telemetry import GpuSnapshot, HostSnapshot

__all__ = ["SavedRun", "read_run"]


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
        BadSource: if it is no saved report.
    """
    found = user_path(path, "read the report")
    try:
        with _files.translated("read the report"), open(found, encoding="utf-8", errors="replace") as file:
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
            told["facts"] and LoaderFacts(**told["facts"]),
            tuple(_host_of(host) for host in told["hosts"]),
            told["precision"],
        )
    except (ValueError, TypeError, KeyError) as error:
        act = f"read the report {str(found)!r}"
        needed, next_step = "a file that TrainReport.save() wrote", "Save the report again"
        raise BadSource(cannot(act, "other contents", needed, next_step)) from error


def _spent_of(told: dict[str, Any]) -> MetersSnapshot:
    parts = tuple(PartSnapshot(**part) for part in told["parts"])
    return MetersSnapshot(**{**told, "parts": parts, "recent": tuple(StepTimes(*step) for step in told["recent"])})


def _host_of(told: dict[str, Any]) -> HostSnapshot:
    gpus = tuple(GpuSnapshot(**{**gpu, "slowed_by": tuple(gpu["slowed_by"])}) for gpu in told["gpus"])
    return HostSnapshot(**{**told, "gpus": gpus})

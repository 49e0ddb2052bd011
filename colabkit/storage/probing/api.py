"""`read_probe()`: what a folder, a file or a mount can do, measured before anybody waits for it.

The path is touched by a child process alone, which has a deadline: a mount that is dead or hangs cannot hold the
caller. Nothing is written, and no byte is read twice, since it would come from a cache the second time.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import time
from collections import defaultdict
from typing import Any

from colabkit.foundation import (
    BadSource,
    FileFailed,
    SourceMissing,
    TimedOut,
    cannot,
    check_seconds,
    file_changes,
    format_seconds,
    heartbeat,
    mount_holding,
    mounts,
    processes,
    user_path,
)
from colabkit.storage.probing import child
from colabkit.storage.probing.report import ProbeReport, ReadRate, advise, doubt

_CHILD_END_S = 1.5  # what the child may take beyond its seconds, before it counts as hung

_Records = defaultdict[str, list[dict[str, Any]]]


class _LastRecord(Exception):
    """The last record came; the child may be unable to end."""


def read_probe(path: str | os.PathLike[str], *, seconds: float = 8.0, progress: bool = True) -> ProbeReport:
    """Return how fast a folder or a file can be listed, opened and read, and what follows from that.

    Measured are the latency of opening a file, the rate of listing, whole small files with 1, 4, 16 and 32 threads, and
    the largest file, if it has 16 MiB or more, in 1, 2, 4 and 8 ranges at once. Small are files of up to 1 MiB; where
    there are hardly any, those of less than 16 MiB. What there are too few files or too little time for is None. Each
    file is read once at most, in random order, and no more than some thousand files and 600 MiB of the large one. Links
    below the path are not followed.

    Args:
        path: a folder or a file; `drive:` and `~` work.
        seconds: it may take; less where everything is known earlier, about two more where the mount hangs.
        progress: show the seconds that pass.

    Raises:
        SourceMissing: if nothing is at the path.
        NotMounted: if the path begins with `drive:` and Drive is not mounted.
        FileFailed: if the mount is dead, or the path cannot be listed or opened at all.
        BadSource: if it is neither a folder nor a file.
    """
    started = time.monotonic()
    act = f"probe {str(path)!r}"
    check_seconds(act, "seconds", seconds)
    table = mounts()  # as it is now: a mount can go away meanwhile
    with file_changes.translated(act):
        text = os.path.abspath(user_path(path, act, table))  # fails in a working folder that was removed
    records = _run_child(act, text, seconds, progress)
    _check(act, records)
    facts: dict[str, Any] = {}
    for values in records["facts"]:
        facts |= values
    for kind, levels in (("small", child.SMALL_LEVELS), ("large", child.LARGE_LEVELS)):
        found = {values["concurrency"]: ReadRate(**values) for values in records[kind]}
        facts[kind] = tuple(found.get(level, ReadRate(level)) for level in levels)
    if stalled := _last(records, "stalled"):
        operation = {"list": "listing", "open": "opening", "read": "reading"}.get(stalled["operation"], "looking at")
        waited = format_seconds(stalled["seconds"])
        facts |= {"stalled": True, "stall": f"{operation} {stalled['path']!r} had not ended after {waited}"}
    place = _last(records, "found")
    mount = mount_holding(place.get("path", text), table)
    if mount is not None:
        facts |= {"fstype": mount.fstype, "mount_source": mount.source, "is_remote": mount.is_remote}
    errors = max(records["errors"], key=lambda counts: sum(counts.values()), default={})
    report = ProbeReport(
        path=str(path),
        type=place.get("type", "unknown"),
        errors=tuple(sorted(errors.items())),
        seconds=time.monotonic() - started,
        **facts,
    )
    return dataclasses.replace(report, recommendation=advise(report), caveat=doubt(report))


def _run_child(act: str, path: str, seconds: float, progress: bool) -> _Records:
    """Probe in a child and return its records by kind."""
    records: _Records = defaultdict(list)

    def keep(line: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # a warning of the interpreter
        records[record["kind"]].append(record["values"])
        records["errors"].append(record["errors"])
        if record["kind"] in ("end", "stalled"):
            raise _LastRecord

    command = processes.python(inspect.getsource(child), path, str(seconds))
    try:
        with heartbeat("probe", seconds, progress) as tick:
            processes.run(command, act, seconds + _CHILD_END_S, on_tick=tick, on_line=keep)
    except _LastRecord:
        pass
    except TimedOut:
        records["stalled"].append({"operation": "answer", "path": path, "seconds": seconds + _CHILD_END_S})
    return records


def _check(act: str, records: _Records) -> None:
    """Raise what the first touch of the path says, if that was an error."""
    if failed := _last(records, "failed"):
        error = OSError(failed["errno"], os.strerror(failed["errno"]), failed["path"])
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise SourceMissing(cannot(act, "nothing at this path", "a folder or a file", "Check the path")) from error
        with file_changes.translated(act):
            raise error
    found = _last(records, "found")
    if found.get("type") == "special file":
        raise BadSource(cannot(act, "a device, pipe or socket", "a folder or a file", "Choose another path"))
    if not records["stalled"] and not (found and records["end"]):
        raise FileFailed(cannot(act, "the probe's process ended early", "its figures", "Try again"))


def _last(records: _Records, kind: str) -> dict[str, Any]:
    return records[kind][-1] if records[kind] else {}

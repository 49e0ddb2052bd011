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
from typing import Any

from colabkit.foundation import (
    BadSource,
    FileFailed,
    Mount,
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

_Records = dict[str, list[dict[str, Any]]]


class _Ended(Exception):
    """The child has said everything; it may be unable to end."""


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
    records: _Records = {}

    def keep(line: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # a warning of the interpreter
        records.setdefault(record["kind"], []).append(record)
        if record["kind"] in ("end", "stalled"):
            raise _Ended

    command = processes.python(inspect.getsource(child), text, str(seconds))
    try:
        with heartbeat("probe", seconds, progress) as tick:
            processes.run(command, act, seconds + _CHILD_END_S, on_tick=tick, on_line=keep)
    except _Ended:
        pass
    except TimedOut:
        records.setdefault("stalled", [{"operation": "answer", "path": text, "seconds": seconds + _CHILD_END_S}])
    _check(act, records)
    mount = mount_holding(_last(records, "found").get("path", text), table)
    return _report(str(path), mount, records, time.monotonic() - started)


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
    if not _last(records, "stalled") and not (found and _last(records, "end")):
        raise FileFailed(cannot(act, "the probe's process ended early", "its figures", "Try again"))


def _last(records: _Records, kind: str) -> dict[str, Any]:
    return records.get(kind, [{}])[-1]


def _rates(records: list[dict[str, Any]], levels: tuple[int, ...]) -> tuple[ReadRate, ...]:
    found = {record["concurrency"]: record for record in records}
    return tuple(
        ReadRate(level, one["reads"], one["bytes"], one["reads_per_s"], one["bytes_per_s"], one["quick"])
        if (one := found.get(level))
        else ReadRate(level)
        for level in levels
    )


def _report(path: str, mount: Mount | None, records: _Records, seconds: float) -> ProbeReport:
    found, listed, sized, opened, stalled = (
        _last(records, kind) for kind in ("found", "listed", "sized", "opened", "stalled")
    )
    said = [record.get("errors", {}) for kind in records.values() for record in kind]
    stall = ""
    if stalled:
        operation = {"list": "listing", "open": "opening", "read": "reading"}.get(stalled["operation"], "looking at")
        stall = f"{operation} {stalled['path']!r} had not ended after {format_seconds(stalled['seconds'])}"
    files = listed.get("files", 1 if found.get("type") == "file" else 0)
    report = ProbeReport(
        path=path,
        type=found.get("type", "unknown"),
        fstype=mount.fstype if mount else "",
        mount_source=mount.source if mount else "",
        is_remote=mount is not None and mount.is_remote,
        open_s=opened.get("open_s"),
        open_p95_s=opened.get("open_p95_s"),
        listed_entries=listed.get("entries", 0),
        listing_rate=listed["entries"] / listed["seconds"] if listed.get("entries") and listed["seconds"] else None,
        is_complete=listed.get("is_complete", found.get("type") == "file"),
        files=files,
        sized_files=sized.get("files", 0),
        sized_bytes=sized.get("bytes", 0),
        small_files=sized.get("small_files", 0),
        small_bytes=sized.get("small_bytes", 0),
        largest_bytes=sized.get("largest_bytes", 0),
        small=_rates(records.get("small", []), child.SMALL_LEVELS),
        large=_rates(records.get("large", []), child.LARGE_LEVELS),
        errors=tuple(sorted(max(said, key=lambda errors: sum(errors.values())).items())),
        stalled=bool(stalled),
        stall=stall,
        seconds=seconds,
    )
    return dataclasses.replace(report, recommendation=advise(report), caveat=doubt(report))

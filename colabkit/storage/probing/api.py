"""`probe()` measures how fast a folder, file or mount can be listed and read.

Only a child process with a deadline touches the path, so a dead or hanging mount cannot block the caller. The probe
writes nothing, and reads no byte twice, since the second read would come from a cache.
"""

from __future__ import annotations

import dataclasses
import inspect
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
    check_duration,
    checked_call,
    file_changes,
    format_seconds,
    heartbeat,
    interruptible,
    mount_holding,
    mounts,
    processes,
    user_path,
)
from colabkit.storage.probing import child
from colabkit.storage.probing.report import ProbeReport, ReadRate, doubt

# Seconds after its deadline at which a child that has not ended counts as hanging.
_CHILD_END_S = 1.5

_Records = defaultdict[str, list[dict[str, Any]]]


class _LastRecord(Exception):
    """A signal to stop reading after the last record, since the child may be unable to exit."""


@interruptible("The measurement", "No file was changed.")
@checked_call()
def probe(path: str | os.PathLike[str], *, seconds: float | str = 8.0, progress: bool = True) -> ProbeReport:
    """Measure how fast a folder or file can be listed, opened and read, and recommend how to use it.

    The probe measures the latency of opening a file and the rate of listing. It reads small files with 1, 4, 16 and 32
    threads, and the largest file, if it has at least 16 MiB, with 1, 2, 4 and 8 concurrent ranges. Files of up to 1 MiB
    count as small; if there are fewer than five such files, all files under 16 MiB count as small. A rate is None if
    there were too few files or too little time. Each file is read at most once, in random order, with a limit of about
    5,300 small files and 600 MiB of the large file. Symbolic links below the path are not followed.

    Args:
        path: a folder or a file; `drive:` and `~` work.
        seconds: time limit in seconds, or text such as `"1min"`. The probe ends earlier if everything has been
            measured, and about two seconds later if the mount hangs.
        progress: show the elapsed seconds.

    Returns:
        The measured rates with a recommendation.

    Raises:
        InvalidOption: if an argument is invalid.
        SourceMissing: if the path does not exist.
        NotMounted: if the path begins with `drive:` and Drive is not mounted.
        FileFailed: if the mount is dead, or the path cannot be accessed or listed.
        BadSource: if the path is neither a folder nor a file.

    Example:
        >>> import colabkit
        >>> staged = colabkit.stage("samples:digits", to="digits")
        >>> probe = colabkit.probe("digits", seconds=1)
        >>> probe.small[-1].concurrency
        32
        >>> probe.recommendation
        '...'
    """
    started = time.monotonic()
    act = f"probe {str(path)!r}" if isinstance(path, str | os.PathLike) else "probe a folder"
    time_limit_s = check_duration(act, "seconds", seconds, example=8)
    # Read the mount table before the probe, since the mount can disappear meanwhile.
    table = mounts()
    with file_changes.translated(act):
        # `abspath` raises if the working folder was removed.
        text = os.path.abspath(user_path(path, act, table))
    records = _run_child(act, text, time_limit_s, progress)
    _check(act, records)
    facts: dict[str, Any] = {}
    for values in records["facts"]:
        facts |= values
    for kind, levels in (("small", child.SMALL_LEVELS), ("large", child.LARGE_LEVELS)):
        found = {values["concurrency"]: ReadRate(**values) for values in records[kind]}
        facts[kind] = tuple(found.get(level, ReadRate(level)) for level in levels)
    if stalled := _last(records, "stalled"):
        operation = {"list": "listing", "open": "opening", "read": "reading"}.get(stalled["operation"], "accessing")
        waited = format_seconds(stalled["seconds"])
        facts |= {"stalled": True, "stall": f"{operation} {stalled['path']!r} did not finish within {waited}"}
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
    return dataclasses.replace(report, caveat=doubt(report))


def _run_child(act: str, path: str, seconds: float, progress: bool) -> _Records:
    records: _Records = defaultdict(list)

    def keep(line: str) -> None:
        if (record := processes.parse_record(line)) is None:
            return
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
    if failed := _last(records, "failed"):
        error = OSError(failed["errno"], os.strerror(failed["errno"]), failed["path"])
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise SourceMissing(cannot(act, "this path does not exist", "", "Check the path")) from error
        with file_changes.translated(act):
            raise error
    found = _last(records, "found")
    if found.get("type") == "special file":
        raise BadSource(cannot(act, "it is a device, pipe or socket", "a folder or a file", "Choose another path"))
    if not records["stalled"] and not (found and records["end"]):
        raise FileFailed(cannot(act, "the process that measures the rates ended early", "", "Try again"))


def _last(records: _Records, kind: str) -> dict[str, Any]:
    return records[kind][-1] if records[kind] else {}

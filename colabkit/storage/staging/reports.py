"""What `stage()` and `unstage()` return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import Report, format_bytes, format_count, format_rate, format_seconds, format_things


@dataclass(frozen=True, repr=False)
class StagePlan(Report):
    """What `stage()` is going to do, decided before anything is written.

    Attributes:
        source: where the data comes from.
        kind: `"folder"`, `"archive"`, `"file"`, `"table"` or `"bucket"`.
        files: files that the near copy will have, None for an archive whose members are known only once it is near.
        read_bytes: bytes to be read from the source.
        staged_bytes: bytes of the near copy; of an archive whose members are not known yet, an estimate.
        peak_bytes: what the target has to hold at most while staging: beside the copy the archive it is extracted from.
        cache_bytes: what the mount's own cache takes on this machine's disk besides: DriveFS keeps all that is read.
        present_bytes: what an interrupted earlier run left, which is not read again if it is as it was.
        target: `"tmpfs"`, `"disk"` or `"path"`.
        why: the reason for the target.
        path: where the near copy will be.
        skipped: links and special files that are passed over, with the reason.
    """

    source: str
    kind: str
    files: int | None
    read_bytes: int
    staged_bytes: int
    peak_bytes: int
    cache_bytes: int
    present_bytes: int
    target: str
    why: str
    path: Path
    skipped: tuple[tuple[str, str], ...]

    def _summary(self) -> str:
        if self.kind == "address":
            return f"Would fetch {self.source!r} and stage it to {str(self.path)!r} ({self.target}: {self.why})"
        files = "an archive" if self.files is None else format_things(self.files, "file")
        size = f"{files}, {format_bytes(self.read_bytes)} to read, {format_bytes(self.staged_bytes)} near"
        there = f", {format_bytes(self.present_bytes)} there already" if self.present_bytes else ""
        return f"Would stage {self.source!r} to {str(self.path)!r}: {size}{there} ({self.target}: {self.why})"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows."""
        return [
            ("source", f"{self.kind} {self.source}"),
            ("files", "known once it is near" if self.files is None else format_count(self.files)),
            ("to read", format_bytes(self.read_bytes)),
            ("there already", format_bytes(self.present_bytes)),
            ("near copy", format_bytes(self.staged_bytes)),
            ("at most meanwhile", format_bytes(self.peak_bytes)),
            ("the mount's own cache", format_bytes(self.cache_bytes)),
            ("target", f"{self.target}: {self.why}"),
            ("path", str(self.path)),
            ("skipped", _first(self.skipped)),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return self.rows()


@dataclass(frozen=True, repr=False)
class StageReport(Report):
    """What `stage()` did.

    Attributes:
        path: the near copy, ready to be used: a folder, or a file where the source is one.
        source: where it came from.
        target: `"tmpfs"`, `"disk"` or `"path"`, with the reason in `why`.
        files: files in the near copy.
        staged_bytes: their bytes.
        seconds: how long it took.
        retries: reads and listings that failed and were tried again.
        skipped: links and special files that were passed over, with the reason.
        reused: whether the near copy was there already.
        resumed_bytes: what an interrupted earlier run, or a former copy that was refreshed, had brought already.
        verify: `"size"`: byte counts were compared; `"full"`: the source was read twice and the bytes compared.
        plan: what was decided before; None where the near copy was found.
        is_dry: whether nothing was done but planning.
        is_refreshed: whether the source was looked at although a near copy was there.
    """

    path: Path
    source: str
    target: str
    why: str
    files: int
    staged_bytes: int
    seconds: float
    retries: int
    skipped: tuple[tuple[str, str], ...]
    reused: bool
    resumed_bytes: int = 0
    verify: str = "size"
    plan: StagePlan | None = None
    is_dry: bool = False
    is_refreshed: bool = False

    def _summary(self) -> str:
        if self.is_dry and self.plan is not None:
            return repr(self.plan)
        size = f"{format_things(self.files, 'file')}, {format_bytes(self.staged_bytes)}"
        if self.reused and self.is_refreshed:
            return f"Nothing has changed at {self.source!r}: {str(self.path)!r} stays, {size}"
        if self.reused:
            return f"Already staged at {str(self.path)!r}: {size}; refresh=True looks for changes"
        rate = format_rate(self.files / max(self.seconds, 1e-9), "files")
        notes = f", {format_bytes(self.resumed_bytes)} of it there already" if self.resumed_bytes else ""
        notes += f", {format_things(self.retries, 'retry')}" if self.retries else ""
        notes += (
            f", {format_things(len(self.skipped), 'link or special file', 'links or special files')} skipped"
            if self.skipped
            else ""
        )
        return f"Staged {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"

    def _rows(self) -> list[tuple[str, ...]]:
        if self.is_dry and self.plan is not None:
            return self.plan.rows()
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("target", f"{self.target}: {self.why}"),
            ("verified", "byte counts" if self.verify == "size" else "all bytes, read twice"),
            ("retries", str(self.retries)),
            ("skipped", _first(self.skipped)),
        ]


@dataclass(frozen=True, repr=False)
class UnstageReport(Report):
    """What `unstage()` gave back."""

    path: Path
    freed_bytes: int

    def _summary(self) -> str:
        return f"Removed {str(self.path)!r}: {format_bytes(self.freed_bytes)} given back"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("path", str(self.path)), ("freed", format_bytes(self.freed_bytes))]


def _first(skipped: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{name!r} ({why})" for name, why in skipped[:5]) or "nothing"

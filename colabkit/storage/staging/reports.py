"""Reports of `stage()`, `unstage()` and the verification of local copies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    Report,
    call,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_things,
    option,
)
from colabkit.storage.addresses import DRIVE_FILE, DRIVE_FOLDER

_DRIVE_LINKS = (DRIVE_FILE.lower(), DRIVE_FOLDER.lower())


@dataclass(frozen=True, repr=False)
class StagePlan(Report):
    """The plan of `stage()`, made before the local copy is written.

    Attributes:
        source: name of the source.
        kind: `"folder"`, `"archive"`, `"file"`, `"table"`, `"bucket"`, or `"address"` for a source not fetched yet,
            with all sizes 0.
        files: number of files in the local copy; None if it is unknown until the source is local, as for a remote tar
            archive.
        read_bytes: bytes to read from the source, excluding files that already exist locally.
        staged_bytes: size of the local copy; an estimate for an archive whose members are unknown.
        peak_bytes: maximum additional space needed at the target, including the temporary copy of a remote archive.
        cache_bytes: local disk space for the mount's cache; DriveFS caches everything that is read.
        present_bytes: size of the files that already exist locally, even in part; valid blocks are not read again.
        target: `"tmpfs"`, `"disk"` or `"path"`.
        why: the reason for the target.
        path: path of the local copy.
        skipped: pairs of a skipped path and the reason.
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
        size = f"{files}, {format_bytes(self.read_bytes)} to read, {format_bytes(self.staged_bytes)} to write"
        present = f", {format_bytes(self.present_bytes)} already local" if self.present_bytes else ""
        return f"Would stage {self.source!r} to {str(self.path)!r}: {size}{present} ({self.target}: {self.why})"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table."""
        return [
            ("source", f"{self.kind} {self.source}"),
            ("files", "known when the source is local" if self.files is None else format_count(self.files)),
            ("to read", format_bytes(self.read_bytes)),
            ("already local", format_bytes(self.present_bytes)),
            ("local copy", format_bytes(self.staged_bytes)),
            ("peak space", format_bytes(self.peak_bytes)),
            ("mount cache", format_bytes(self.cache_bytes)),
            ("target", f"{self.target}: {self.why}"),
            ("path", str(self.path)),
            ("skipped", first_skipped(self.skipped)),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return self.rows()


@dataclass(frozen=True, repr=False)
class StageReport(Report):
    """The report of `stage()`.

    Attributes:
        path: the local copy: a file if the source is a plain file or an unextracted archive, otherwise a folder.
        source: name of the source.
        target: `"tmpfs"`, `"disk"` or `"path"`, with the reason in `why`.
        files: number of files in the local copy.
        staged_bytes: total size of these files.
        seconds: duration of the call.
        retries: number of retries of reads and listings.
        skipped: pairs of a skipped path and the reason.
        reused: whether an existing local copy was used.
        resumed_bytes: size of the complete files reused from an interrupted run or from the copy that was refreshed.
        verify: `"size"` if file sizes were compared; `"full"` if the source, or the file downloaded from an https
            address or Drive link, was read twice and all bytes compared.
        plan: the plan of the run; None if an existing copy was used.
        is_dry: whether nothing was copied because of `dry_run`; False if an existing copy was used.
        is_refreshed: whether `refresh` was set; False if `is_dry`.
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
            return f"Unchanged source {self.source!r}: reused {str(self.path)!r}, {size}"
        if self.reused:
            advice = ("use ", option("refresh", True), " to check for changes")
            return self._words.render((f"Already staged at {str(self.path)!r}: {size}; ", *advice))
        rate = format_rate(self.files / max(self.seconds, 1e-9), "files")
        notes = f", {format_bytes(self.resumed_bytes)} reused" if self.resumed_bytes else ""
        notes += f", {format_things(self.retries, 'retry')}" if self.retries else ""
        if self.skipped:
            notes += f", {format_things(len(self.skipped), 'path')} skipped"
        return f"Staged {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"

    def _rows(self) -> list[tuple[str, ...]]:
        if self.is_dry and self.plan is not None:
            return self.plan.rows()
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("target", f"{self.target}: {self.why}"),
            ("verified", "byte counts" if self.verify == "size" else self._read_twice()),
            ("retries", str(self.retries)),
            ("skipped", first_skipped(self.skipped)),
        ]

    def _read_twice(self) -> str:
        is_download = self.source.lower().startswith(("http://", "https://", *_DRIVE_LINKS))
        return f"all bytes{' of the download' if is_download else ''}, read twice"


@dataclass(frozen=True, repr=False)
class UnstageReport(Report):
    """The report of `unstage()`.

    Attributes:
        path: the removed path; the first one if several were removed.
        freed_bytes: disk space or RAM that was freed, in bytes.
    """

    path: Path
    freed_bytes: int

    def _summary(self) -> str:
        return f"Removed {str(self.path)!r}: {format_bytes(self.freed_bytes)} freed"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("path", str(self.path)), ("freed", format_bytes(self.freed_bytes))]


@dataclass(frozen=True, repr=False)
class StageVerifyReport(Report):
    """The report of `verify()` for a local copy.

    Attributes:
        path: path of the local copy.
        files: number of files checked.
        checked_bytes: number of bytes checked.
        damaged: paths of missing files and of files with changed bytes.
        seconds: duration of the check.
    """

    path: Path
    files: int
    checked_bytes: int
    damaged: tuple[str, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no file is damaged."""
        return not self.damaged

    def _summary(self) -> str:
        if not self.damaged:
            size = format_bytes(self.checked_bytes)
            return f"{str(self.path)!r} is intact: {format_things(self.files, 'file')}, {size}, all checksums match"
        first = ", ".join(map(repr, self.damaged[:5]))
        damage = f"{len(self.damaged)} of {format_things(self.files, 'file')}, starting with {first}"
        advice = ("run ", call("stage", ..., refresh=True))
        return self._words.render((f"{str(self.path)!r} is damaged: {damage}; ", *advice))

    def _rows(self) -> list[tuple[str, ...]]:
        return [("damaged", str(len(self.damaged))), ("checked in", format_seconds(self.seconds))]


def first_skipped(skipped: tuple[tuple[str, str], ...]) -> str:
    """Return the first five skipped paths with their reasons as text."""
    return "; ".join(f"{name!r} ({why})" for name, why in skipped[:5]) or "nothing"

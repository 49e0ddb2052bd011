"""The reports of `mount()`, `unmount()`, `flush()` and `clear_cache()`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from colabkit.foundation import PYTHON, Report, Text, format_bytes, format_count, format_seconds, format_things


@dataclass(frozen=True, repr=False)
class MountReport(Report):
    """The report of `mount()`.

    Attributes:
        path: the My Drive folder, which `drive:` stands for.
        mountpoint: folder where Drive is mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        state: `"mounted"`, `"was mounted already"`, or `"repaired"` if a dead or hanging mount was replaced.
        readonly: whether writes are refused; None if unknown, for example if DriveFS's command line is unreadable.
        seconds: duration of the call.
    """

    path: Path
    mountpoint: Path
    kind: str
    state: str
    readonly: bool | None
    seconds: float
    _notes: ClassVar[tuple[Text, ...]] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Further information, such as a warning about writes that may be lost."""
        return tuple(map(self._words.render, self._notes))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON-serializable values."""
        return {**super().to_dict(), "notes": [PYTHON.render(note) for note in self._notes]}

    def _summary(self) -> str:
        mode = ", read-only" if self.readonly else ""
        how = "" if self.state == "was mounted already" else f" in {format_seconds(self.seconds)}"
        lines = [f"Drive {self.state} at {str(self.path)!r} ({self.kind}{mode}){how}; drive: is its short name"]
        return "\n".join([*lines, *self.notes])

    def _rows(self) -> list[tuple[str, ...]]:
        mode = {None: "unknown", True: "read-only", False: "read and write"}[self.readonly]
        return [
            ("My Drive", str(self.path)),
            ("mounted at", str(self.mountpoint)),
            ("mode", mode),
            *(("note", note) for note in self.notes),
        ]


def with_notes(report: MountReport, notes: tuple[Text, ...]) -> MountReport:
    """Set a report's notes, which may refer to calls and options, and return the report."""
    object.__setattr__(report, "_notes", notes)
    return report


@dataclass(frozen=True, repr=False)
class _WritesReport(Report):
    mountpoint: Path
    kind: str
    sent: str

    def _rows(self) -> list[tuple[str, ...]]:
        return [("mounted at", str(self.mountpoint)), ("kind", self.kind), ("writes", self.sent)]


@dataclass(frozen=True, repr=False)
class UnmountReport(_WritesReport):
    """The report of `unmount()`.

    Attributes:
        mountpoint: folder where Drive was mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        sent: the known state of the writes, as text.
        seconds: duration of the call.
    """

    seconds: float

    def _summary(self) -> str:
        return f"Unmounted {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}; {self.sent}"


@dataclass(frozen=True, repr=False)
class FlushReport(_WritesReport):
    """The report of `flush()`.

    Attributes:
        mountpoint: folder where Drive is mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        sent: the known state of the writes, as text; they may not have reached Drive's servers yet.
        remounted: whether Drive was mounted again.
        seconds: duration of the call.
    """

    remounted: bool
    seconds: float

    def _summary(self) -> str:
        again = ", mounted again" if self.remounted else ""
        return f"Flushed {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}{again}; {self.sent}"


@dataclass(frozen=True, repr=False)
class CacheReport(Report):
    """The report of `clear_cache()`.

    Attributes:
        mountpoint: folder where Drive is mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        folder: the cache folder; None if the mount's program reports no cache folder.
        cached_bytes: disk space that the cache took up, in bytes.
        freed_bytes: disk space that was freed, or would be freed with `dry_run`, in bytes.
        unsent: number of files not yet uploaded; None if unknown.
        steps: the steps that were taken, or would be taken with `dry_run`.
        loss: the data that was lost, or could be lost with `dry_run`; empty if none.
        dry_run: whether this was a dry run, which changes nothing.
        seconds: duration of the call.
    """

    mountpoint: Path
    kind: str
    folder: Path | None
    cached_bytes: int
    freed_bytes: int
    unsent: int | None
    steps: tuple[str, ...]
    loss: str
    dry_run: bool
    seconds: float

    def _summary(self) -> str:
        rest = self.cached_bytes - self.freed_bytes
        remains = f"; {format_bytes(rest)} of file contents remain" if rest else ""
        if self.dry_run:
            action = f"Would clear the {self.kind} cache of {str(self.mountpoint)!r}"
            is_sent_first = self.unsent and self.kind != "rclone"
            first = f"; {format_things(self.unsent or 0, 'file')} to send first" if is_sent_first else ""
            loss = self.loss or "nothing"
            return f"{action} and free {format_bytes(self.freed_bytes)}{remains}{first}\nWould lose: {loss}"
        action = f"Cleared the {self.kind} cache of {str(self.mountpoint)!r} in {format_seconds(self.seconds)}"
        loss = f"\nLost: {self.loss}" if self.loss else ""
        freed = f"{format_bytes(self.freed_bytes)} freed" if self.freed_bytes else "folders are listed again when read"
        return f"{action}: {freed}{remains}{loss}"

    def _rows(self) -> list[tuple[str, ...]]:
        unsent = "unknown" if self.unsent is None else format_count(self.unsent)
        return [
            ("cache", "in memory" if self.folder is None else f"{self.folder} ({format_bytes(self.cached_bytes)})"),
            ("unsent files", unsent),
            *(("step", step) for step in self.steps),
            ("would be lost" if self.dry_run else "lost", self.loss or "nothing"),
        ]

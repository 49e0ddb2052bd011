"""What the calls of `drive` return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import Report, format_bytes, format_count, format_seconds, format_things


@dataclass(frozen=True, repr=False)
class MountReport(Report):
    """Where Drive is.

    Attributes:
        path: My Drive, the folder that `drive:` stands for.
        mountpoint: where Drive is mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        state: `"mounted"`, `"was mounted already"` or `"repaired"`, where a dead mount was replaced.
        readonly: whether writes are refused; None where that cannot be told, as of a DriveFS that was there already.
        seconds: how long it took.
        notes: what else has to be known, such as writes that may be lost.
    """

    path: Path
    mountpoint: Path
    kind: str
    state: str
    readonly: bool | None
    seconds: float
    notes: tuple[str, ...] = ()

    def _summary(self) -> str:
        mode = ", read-only" if self.readonly else ""
        how = "" if self.state == "was mounted already" else f" in {format_seconds(self.seconds)}"
        lines = [f"Drive {self.state} at {str(self.path)!r} ({self.kind}{mode}){how}; drive: is its short name"]
        return "\n".join([*lines, *self.notes])

    def _rows(self) -> list[tuple[str, ...]]:
        mode = {None: "cannot be told", True: "read-only", False: "read and write"}[self.readonly]
        return [
            ("My Drive", str(self.path)),
            ("mounted at", str(self.mountpoint)),
            ("mode", mode),
            *(("note", self._worded(note)) for note in self.notes),
        ]


@dataclass(frozen=True, repr=False)
class UnmountReport(Report):
    """What `unmount()` did; `sent` is what can be said of the writes."""

    mountpoint: Path
    kind: str
    sent: str
    seconds: float

    def _summary(self) -> str:
        return f"Unmounted {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}; {self.sent}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("mountpoint", str(self.mountpoint)), ("kind", self.kind), ("writes", self.sent)]


@dataclass(frozen=True, repr=False)
class FlushReport(Report):
    """What `flush()` did.

    Attributes:
        mountpoint: whose writes.
        kind: of the mount.
        sent: what can be said of the writes; that they reached Drive cannot be seen from here.
        remounted: whether the mount was taken away and put back for it.
        seconds: how long it took.
    """

    mountpoint: Path
    kind: str
    sent: str
    remounted: bool
    seconds: float

    def _summary(self) -> str:
        again = ", mounted again" if self.remounted else ""
        return f"Flushed {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}{again}; {self.sent}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("mountpoint", str(self.mountpoint)), ("kind", self.kind), ("writes", self.sent)]


@dataclass(frozen=True, repr=False)
class CacheReport(Report):
    """What `clear_cache()` did, or would do.

    Attributes:
        mountpoint: whose cache.
        kind: of the mount.
        folder: where the cache is; None where it is in the memory of the mount's program only.
        cached_bytes: disk space that the cache held.
        freed_bytes: of these, what was given back, or would be.
        unsent: files that are not sent yet; None where that cannot be told.
        steps: what was done, or would be.
        loss: what is lost, or would be; empty for nothing.
        dry_run: whether nothing was done.
        seconds: how long it took.
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
        kept = self.cached_bytes - self.freed_bytes
        stays = f"; {format_bytes(kept)} of file contents stay" if kept else ""
        if self.dry_run:
            doing = f"Would clear the {self.kind} cache of {str(self.mountpoint)!r}"
            first = (
                f"; {format_things(self.unsent, 'file')} to send first" if self.unsent and self.kind != "rclone" else ""
            )
            lost = self.loss or "nothing"
            return f"{doing}: {format_bytes(self.freed_bytes)} to free{stays}{first}\nWould lose: {lost}"
        did = f"Cleared the {self.kind} cache of {str(self.mountpoint)!r} in {format_seconds(self.seconds)}"
        lost = f"\nLost: {self.loss}" if self.loss else ""
        freed = f"{format_bytes(self.freed_bytes)} freed" if self.freed_bytes else "it lists anew"
        return f"{did}: {freed}{stays}{lost}"

    def _rows(self) -> list[tuple[str, ...]]:
        unsent = "cannot be told" if self.unsent is None else format_count(self.unsent)
        return [
            ("cache", "in memory" if self.folder is None else f"{self.folder} ({format_bytes(self.cached_bytes)})"),
            ("files not sent yet", unsent),
            *(("step", step) for step in self.steps),
            ("would be lost" if self.dry_run else "lost", self.loss or "nothing"),
        ]

"""`mount()`, `unmount()`, `flush()` and `clear_cache()` for Google Drive, adapted to the exact type of the mount.

Only child processes with a deadline touch a mount, so that a dead or hanging one cannot freeze the notebook.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    DRIVE_TYPES,
    DRIVEFS,
    OCAMLFUSE,
    RCLONE,
    InvalidOption,
    Mount,
    MountFailed,
    Report,
    cannot,
    check_seconds,
    current_place,
    drive_root,
    format_bytes,
    format_count,
    format_seconds,
    format_things,
    log_causes,
    user_path,
)
from colabkit.storage.drive.drivefs import DriveFs, check_can_mount, mount_in_colab, options_of
from colabkit.storage.drive.mountpoints import (
    DriveMount,
    check_alive,
    check_not_inside,
    counted_files,
    detach,
    find_drive,
    find_mount,
    liveness,
    mount_failed,
)
from colabkit.storage.drive.ocamlfuse import Ocamlfuse
from colabkit.storage.drive.rclone import Rclone

COLAB_POINT = "/content/drive"


@dataclass(frozen=True, repr=False)
class MountReport(Report):
    """The report of `mount()`.

    Attributes:
        path: the My Drive folder, which `drive:` stands for.
        mountpoint: folder where Drive is mounted.
        kind: `"DriveFS"`, `"google-drive-ocamlfuse"` or `"rclone"`.
        state: `"mounted"`, `"was mounted already"`, or `"repaired"` if a dead mount was replaced.
        readonly: whether writes are refused; None if unknown, for example for a DriveFS mounted by another process.
        seconds: duration of the call.
        notes: further information, such as a warning about writes that may be lost.
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
        return "\n".join([*lines, *map(self._words.render, self.notes)])

    def _rows(self) -> list[tuple[str, ...]]:
        mode = {None: "cannot be told", True: "read-only", False: "read and write"}[self.readonly]
        return [
            ("My Drive", str(self.path)),
            ("mounted at", str(self.mountpoint)),
            ("mode", mode),
            *(("note", self._words.render(note)) for note in self.notes),
        ]


@dataclass(frozen=True, repr=False)
class _WritesReport(Report):
    mountpoint: Path
    kind: str
    sent: str

    def _rows(self) -> list[tuple[str, ...]]:
        return [("mountpoint", str(self.mountpoint)), ("kind", self.kind), ("writes", self.sent)]


@dataclass(frozen=True, repr=False)
class UnmountReport(_WritesReport):
    """The report of `unmount()`; `sent` is the known state of the writes."""

    seconds: float

    def _summary(self) -> str:
        return f"Unmounted {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}; {self.sent}"


@dataclass(frozen=True, repr=False)
class FlushReport(_WritesReport):
    """The report of `flush()`; `sent` is the known state of the writes, which may not have reached Drive's servers."""

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
        kind: type of the mount.
        folder: the cache folder; None if the cache is only in the memory of the mount's program.
        cached_bytes: disk space that the cache took.
        freed_bytes: disk space that was freed, or would be with `dry_run`.
        unsent: number of files not yet uploaded; None if unknown.
        steps: the steps that were done, or would be with `dry_run`.
        loss: the data that was lost, or would be with `dry_run`; empty for none.
        dry_run: whether nothing was changed.
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
        kept = self.cached_bytes - self.freed_bytes
        stays = f"; {format_bytes(kept)} of file contents stay" if kept else ""
        if self.dry_run:
            doing = f"Would clear the {self.kind} cache of {str(self.mountpoint)!r}"
            is_sent_first = self.unsent and self.kind != "rclone"
            first = f"; {format_things(self.unsent or 0, 'file')} to send first" if is_sent_first else ""
            lost = self.loss or "nothing"
            return f"{doing}: {format_bytes(self.freed_bytes)} to free{stays}{first}\nWould lose: {lost}"
        did = f"Cleared the {self.kind} cache of {str(self.mountpoint)!r} in {format_seconds(self.seconds)}"
        lost = f"\nLost: {self.loss}" if self.loss else ""
        freed = f"{format_bytes(self.freed_bytes)} freed" if self.freed_bytes else "it lists again"
        return f"{did}: {freed}{stays}{lost}"

    def _rows(self) -> list[tuple[str, ...]]:
        unsent = "cannot be told" if self.unsent is None else format_count(self.unsent)
        return [
            ("cache", "in memory" if self.folder is None else f"{self.folder} ({format_bytes(self.cached_bytes)})"),
            ("files not sent yet", unsent),
            *(("step", step) for step in self.steps),
            ("would be lost" if self.dry_run else "lost", self.loss or "nothing"),
        ]


def mount(
    path: str | os.PathLike[str] | None = None, *, readonly: bool = False, timeout: float = 120.0, force: bool = False
) -> MountReport:
    """Mount Google Drive, or find its existing mount, and report its path.

    A working mount is reused without asking for consent again; a mount whose program died is repaired. Outside Colab,
    an existing mount by google-drive-ocamlfuse or rclone is used; without one, the error lists the alternatives.

    Args:
        path: where to mount Drive; defaults to its present mount point, else `/content/drive`.
        readonly: refuse writes, which makes reading for training safer.
        timeout: seconds for the consent, for Drive, and later for DriveFS to list one folder; large folders need more.
        force: also remount a working mount, after sending its writes, and a hanging mount, which loses unsent writes.

    Returns:
        The path of My Drive, and the state of the mount.

    Raises:
        MountFailed: if Drive cannot be mounted; the attribute `cause` holds the reason.
        UnsentWrites: if writes could not be sent before mounting again.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> drive.state
        'mounted'
        >>> (drive.path / "notes.txt").write_text("seen in Drive")
        13
    """
    started = time.monotonic()
    act = "mount Drive"
    check_seconds(act, "timeout", timeout)
    if isinstance(path, str) and path.startswith("drive:"):
        raise InvalidOption(cannot(act, f"{path!r} as path", "a folder to mount it at", "Leave the path out"))
    place = current_place()
    asked_point = None if path is None else os.path.abspath(user_path(path, act))
    found = find_drive(act, place, asked_point)
    if found is None:
        made = mount_in_colab(asked_point or COLAB_POINT, readonly, timeout, force)
        return _report(made, "mounted", readonly, started)
    point = asked_point or found.point
    state, reason = liveness(_folders(found), timeout)
    if state == "alive" and not force:
        if point != found.point:
            raise mount_failed(
                "folder",
                f"it is mounted at {found.point!r} already",
                "one mount at a time",
                "Use that, or drive: for short, or run colabkit.unmount() first",
            )
        mode = options_of(found)[0] if found.fstype == DRIVEFS else found.readonly
        notes = [f"It is the rclone mount of {found.source!r}"] if found.fstype == RCLONE else []
        if readonly and not mode:
            known = "It is for reading and writing" if mode is False else "Whether it is read-only cannot be told"
            notes.append(f"{known}; force=True mounts it again")
        return _report(found, "was mounted already", mode, started, tuple(notes))
    if found.fstype != DRIVEFS:
        raise _not_colabs(found, state, reason, timeout)
    check_can_mount(place)
    if state in ("hung", "failing") and not force:
        is_quota = "quota" in log_causes()
        says = f"does not answer ({reason})" if state == "hung" else f"answers {reason}"
        loses = "loses what it has not sent" if state == "hung" else "sends its writes first"
        raise mount_failed(
            "quota" if is_quota else state,
            f"DriveFS at {found.point!r} {says}" + (", and its log says QUOTA_EXCEEDED" if is_quota else ""),
            "a mount that answers",
            f"Wait and try again, or mount it again with force=True, which {loses}",
        )
    check_not_inside(found, act)
    return _replace(found, point, state, readonly, timeout, started)


def _not_colabs(found: Mount, state: str, reason: str, timeout: float) -> MountFailed:
    """Return the error for a mount that google.colab did not make; if it is dead, unmount it first."""
    kind = DRIVE_TYPES[found.fstype]
    command = f"rclone mount {found.source}" if found.fstype == RCLONE else kind
    if state == "dead":
        detach(found, timeout, lazily=True)
        gone = f"the program of the {kind} mount at {found.point!r} died, and what it left was taken away"
        return mount_failed(state, gone, "a mount that answers", f"Run '{command} {found.point}' again")
    why = {"hung": "does not answer", "failing": f"answers {reason}"}.get(state, "is not Colab's to mount again")
    next_step = f"Use its own tools, or colabkit.unmount() and '{command} {found.point}'"
    cause = "place" if state == "alive" else state
    return mount_failed(cause, f"the {kind} mount at {found.point!r} {why}", "one that can be replaced", next_step)


def _replace(found: Mount, point: str, state: str, readonly: bool, timeout: float, started: float) -> MountReport:
    """Replace a DriveFS mount: send its writes first, unless it is dead or hangs."""
    if state in ("alive", "failing"):
        DriveFs(found).unmount("mount Drive again", timeout, progress=True)
        made = mount_in_colab(point, readonly, timeout, force=False)
        return _report(made, "mounted", readonly, started)
    _take_away(found, timeout)
    made = mount_in_colab(point, readonly, timeout, force=True)
    return _report(made, "repaired", readonly, started, ("What had been written and not sent before may be lost",))


def unmount(
    path: str | os.PathLike[str] | None = None, *, timeout: float = 600.0, force: bool = False, progress: bool = True
) -> UnmountReport:
    """Send all writes and unmount Drive.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        timeout: seconds to wait for the upload, which continues afterwards.
        force: unmount at once, even if the mount is dead, hangs, or has unsent writes.
        progress: show the elapsed seconds.

    Returns:
        The mount point, and the known state of the writes.

    Raises:
        NotMounted: if Drive is not mounted.
        TimedOut, UnsentWrites: if the writes are not sent in time, or cannot be sent.
        MountFailed: if files on the mount are open.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> (drive.path / "notes.txt").write_text("seen in Drive")
        13
        >>> colabkit.unmount().kind
        'DriveFS'
    """
    started = time.monotonic()
    found = find_mount(path, "unmount Drive", timeout)
    act = f"unmount {found.point!r}"
    check_not_inside(found, act)
    if force:
        sent = _take_away(found, timeout)
    else:
        check_alive(found, act, timeout)
        sent = _served(found, act).unmount(act, timeout, progress)
    return UnmountReport(Path(found.point), DRIVE_TYPES[found.fstype], sent, time.monotonic() - started)


def flush(path: str | os.PathLike[str] | None = None, *, timeout: float = 600.0, progress: bool = True) -> FlushReport:
    """Send all writes to Drive.

    In Colab, this mounts Drive again: no file on it may be in use, and Drive can ask for consent again.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        timeout: seconds to wait for the upload, which continues afterwards.
        progress: show the elapsed seconds.

    Returns:
        The known state of the writes, and whether Drive was remounted.

    Raises:
        NotMounted: if Drive is not mounted.
        TimedOut, UnsentWrites: if the writes are not sent in time, or cannot be sent.
        MountFailed: if Drive cannot be mounted again.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> (drive.path / "notes.txt").write_text("seen in Drive")
        13
        >>> colabkit.flush().remounted
        True
    """
    started = time.monotonic()
    found = find_mount(path, "flush Drive", timeout)
    act = f"flush {found.point!r}"
    check_alive(found, act, timeout)
    served = _served(found, act)
    if served.is_remounted:
        check_not_inside(found, act)
    sent = served.send(act, timeout, progress)
    kind, remounted = DRIVE_TYPES[found.fstype], served.is_remounted
    return FlushReport(Path(found.point), kind, sent, remounted, time.monotonic() - started)


def clear_cache(
    path: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    timeout: float = 600.0,
    force: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Clear the local cache of the Drive mount, to see new files and to free disk space.

    DriveFS sends its writes and ends, its cache is removed, and Drive is mounted again. google-drive-ocamlfuse uploads,
    is unmounted, cleared with `-cc` and mounted again. rclone only forgets its directory listings.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        dry_run: change nothing; report what would be freed and lost.
        timeout: seconds for sending writes, and for each further step.
        force: clear the cache even if writes are unsent, which loses them.
        progress: show the elapsed seconds.

    Returns:
        The disk space freed, and the writes lost.

    Raises:
        NotMounted: if Drive is not mounted.
        TimedOut: if the writes are not sent in time; the cache stays unchanged.
        UnsentWrites: if clearing would lose writes, unless `force`.
        MountFailed: if files on the mount are open, or Drive cannot be mounted again.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> colabkit.clear_cache(dry_run=True).loss
        ''
        >>> colabkit.clear_cache().kind
        'DriveFS'
    """
    started = time.monotonic()
    found = find_mount(path, "clear the cache of Drive", timeout)
    act = f"clear the cache of {found.point!r}"
    if not force or found.fstype != DRIVEFS:
        check_alive(found, act, timeout)
    served = _served(found, act)
    folder, unsent, cached = served.cache_folder(), served.unsent(), served.cache_bytes()
    freed = cached if served.frees_contents else 0
    if dry_run:
        loss = _at_stake(unsent, timeout) if force else ""
    else:
        check_not_inside(found, act)
        loss = served.clear(act, timeout, force, progress)
        freed = max(0, freed - served.cache_bytes()) if freed else 0
    return CacheReport(
        mountpoint=Path(found.point),
        kind=DRIVE_TYPES[found.fstype],
        folder=folder,
        cached_bytes=cached,
        freed_bytes=freed,
        unsent=unsent,
        steps=served.steps,
        loss=loss,
        dry_run=dry_run,
        seconds=time.monotonic() - started,
    )


def _served(found: Mount, act: str) -> DriveMount:
    if found.fstype == DRIVEFS:
        return DriveFs(found)
    return Ocamlfuse.of(found, act) if found.fstype == OCAMLFUSE else Rclone.of(found, act)


def _take_away(found: Mount, timeout: float) -> str:
    """Unmount at once, dead or alive; return a note about its unsent writes."""
    if found.fstype == DRIVEFS:
        DriveFs(found).drop(timeout)
        return "what DriveFS had not sent is lost"
    detach(found, timeout, lazily=True)
    return "what it had not sent may be lost; look at its cache before mounting again"


def _at_stake(unsent: int | None, timeout: float) -> str:
    if unsent is None:
        return f"what cannot be sent in {format_seconds(timeout)}"
    return f"those of {counted_files(unsent)} that cannot be sent in {format_seconds(timeout)}" if unsent else ""


def _folders(found: Mount) -> tuple[str, ...]:
    return (found.point, drive_root(found)) if found.fstype == DRIVEFS else (found.point,)


def _report(
    found: Mount, state: str, readonly: bool | None, started: float, notes: tuple[str, ...] = ()
) -> MountReport:
    return MountReport(
        path=Path(drive_root(found)),
        mountpoint=Path(found.point),
        kind=DRIVE_TYPES[found.fstype],
        state=state,
        readonly=readonly,
        seconds=time.monotonic() - started,
        notes=notes,
    )

"""`mount()`, `unmount()`, `flush()` and `clear_cache()` of Google Drive, by the exact type of the mount.

The kernel's table of mounts is read first, and a mount is only touched by children with a deadline: a dead or hanging
mount never takes the notebook with it.
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
class _WritesReport(Report):
    mountpoint: Path
    kind: str
    sent: str

    def _rows(self) -> list[tuple[str, ...]]:
        return [("mountpoint", str(self.mountpoint)), ("kind", self.kind), ("writes", self.sent)]


@dataclass(frozen=True, repr=False)
class UnmountReport(_WritesReport):
    """What `unmount()` did; `sent` is what is known about the writes."""

    seconds: float

    def _summary(self) -> str:
        return f"Unmounted {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}; {self.sent}"


@dataclass(frozen=True, repr=False)
class FlushReport(_WritesReport):
    """What `flush()` did.

    Attributes:
        mountpoint: whose writes.
        kind: of the mount.
        sent: what is known about the writes; that they reached Drive cannot be seen from here.
        remounted: whether the mount was taken away and put back for it.
        seconds: how long it took.
    """

    remounted: bool
    seconds: float

    def _summary(self) -> str:
        again = ", mounted again" if self.remounted else ""
        return f"Flushed {str(self.mountpoint)!r} ({self.kind}) in {format_seconds(self.seconds)}{again}; {self.sent}"


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
    """Mount Google Drive, or find its existing mount, and return where it is.

    An existing mount that is alive is used without asking for consent again; one whose program died is repaired.
    Elsewhere than in Colab a mount by google-drive-ocamlfuse or rclone is found; without one the error says what works
    there.

    Args:
        path: where to mount it; by default where it is, else `/content/drive`.
        readonly: refuse writes, which makes reading for training safer.
        timeout: seconds for the consent, and again for Drive. Drive also takes it as the time that it may list one
            folder in, for the life of the mount: folders of very many files need more.
        force: mount it again also where it is alive, after its writes are sent, or hangs, losing what is not sent.

    Raises:
        MountFailed: with the cause in plain words and as its attribute `cause`.
        UnsentWrites: if writes could not be sent before mounting again.
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
    """Return the error for a mount that somebody else made; a dead one is unmounted first, for them to mount again."""
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
    """Replace a DriveFS mount: its writes are sent first; dead or hung, it is taken away as it is."""
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
    """Send all writes and take the Drive mount away; the report says what can be said of the writes.

    Args:
        path: anything on the mount; by default the Drive mount.
        timeout: seconds for sending; sending continues afterwards.
        force: take it away at once, also if it is dead, hangs, or has not sent everything.
        progress: show the seconds that pass.

    Raises:
        NotMounted: if there is no such mount.
        TimedOut: if writes are not sent in time.
        UnsentWrites: if they cannot be sent.
        MountFailed: if files on it are open.
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
    """Send all writes; the report says what can be said of them.

    DriveFS sends them only when it ends: in Colab the mount goes away and comes back, so no file on it may be in use,
    and Drive can ask for consent again.

    Args:
        path: anything on the mount; by default the Drive mount.
        timeout: seconds for sending; sending continues afterwards.
        progress: show the seconds that pass.

    Raises:
        NotMounted: if there is no such mount.
        TimedOut: if writes are not sent in time.
        UnsentWrites: if they cannot be sent.
        MountFailed: if Drive cannot be mounted again.
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
    """Clear the local cache of the Drive mount, to see new files and to get disk space back.

    By the exact type of the mount: DriveFS sends its writes, ends, loses its cache and is mounted again;
    google-drive-ocamlfuse uploads, is unmounted, cleared with `-cc` and mounted again; rclone forgets its listings.

    Args:
        path: anything on the mount; by default the Drive mount.
        dry_run: change nothing; return what would be freed and lost.
        timeout: seconds for sending writes, and for each further step.
        force: clear also what has not been sent, which is then lost.
        progress: show the seconds that pass.

    Raises:
        NotMounted: if there is no such mount.
        TimedOut: if writes are not sent in time; the cache stays unchanged.
        UnsentWrites: if clearing would lose writes, unless `force`.
        MountFailed: if files on it are open, or it cannot be mounted again.
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
    """Take a mount away at once, dead or alive; return what becomes of what it had not sent."""
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

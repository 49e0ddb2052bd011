"""Google Drive's mount: made, found again, repaired, flushed, its cache cleared, by the exact type of the mount.

The kernel's table of mounts is read first, and a mount is only touched by children with a deadline: a dead or hanging
mount never takes the notebook with it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar, Protocol

from colabkit.foundation import (
    DRIVE_TYPES,
    DRIVEFS,
    OCAMLFUSE,
    RCLONE,
    InvalidOption,
    Mount,
    MountFailed,
    NotMounted,
    Place,
    cannot,
    check_seconds,
    current_place,
    drive_mounts,
    drive_root,
    format_seconds,
    log_causes,
    mount_holding,
    mounts,
    user_path,
)
from colabkit.storage.drive.drivefs import DriveFs, asked, check_can_mount, mount_in_colab
from colabkit.storage.drive.mountpoints import GIVE_UP, counted_files, detach, liveness, mount_failed
from colabkit.storage.drive.ocamlfuse import Ocamlfuse
from colabkit.storage.drive.rclone import Rclone
from colabkit.storage.drive.reports import CacheReport, FlushReport, MountReport, UnmountReport

COLAB_POINT = "/content/drive"


def mount(
    path: str | os.PathLike[str] | None = None, *, readonly: bool = False, timeout: float = 120.0, force: bool = False
) -> MountReport:
    """Mount Google Drive, or find the mount that is there, and return where it is.

    A mount that is there and alive is used as it is, without asking for consent again; one whose program died is
    repaired. Elsewhere than in Colab a mount by google-drive-ocamlfuse or rclone is found; without one the error says
    what works there.

    Args:
        path: where to mount it; by default where it is, else `/content/drive`.
        readonly: refuse writes, which makes reading for training safer.
        timeout: seconds for the consent, and again for Drive. Drive also takes it as the time that it may list one
            folder in, for the life of the mount: folders of very many files need more.
        force: mount anew what is alive, after its writes are sent, and what hangs, losing what is not sent.

    Raises:
        MountFailed: with the cause in plain words and as its attribute `cause`.
        UnsentWrites: if writes could not be sent before mounting anew.
    """
    started = time.monotonic()
    act = "mount Drive"
    check_seconds(act, "timeout", timeout)
    if isinstance(path, str) and path.startswith("drive:"):
        raise InvalidOption(cannot(act, f"{path!r} as path", "a folder to mount it at", "Leave the path out"))
    place = current_place()
    asked_point = None if path is None else os.path.abspath(user_path(path, act))
    found = _to_be_found(act, place, asked_point)
    if found is None:
        check_can_mount(place)
    point = asked_point or (found.point if found else COLAB_POINT)
    if found is None:
        return _report(mount_in_colab(point, readonly, timeout, force), "mounted", readonly, started)
    state, reason = liveness(_folders(found), timeout)
    if state == "alive" and not force:
        if point != found.point:
            raise mount_failed(
                "folder",
                f"it is mounted at {found.point!r} already",
                "one mount at a time",
                "Use that, or drive: for short, or run colabkit.unmount() first",
            )
        mode = asked(found)[0] if found.fstype == DRIVEFS else found.readonly
        notes = [f"It is the rclone mount of {found.source!r}"] if found.fstype == RCLONE else []
        if readonly and not mode:
            known = "It is for reading and writing" if mode is False else "Whether it is read-only cannot be told"
            notes.append(f"{known}; force=True mounts it anew")
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
            f"Wait and try again, or mount it anew with force=True, which {loses}",
        )
    _check_not_inside(found, act)
    return _mount_anew(found, point, state, readonly, timeout, started)


def _not_colabs(found: Mount, state: str, reason: str, timeout: float) -> MountFailed:
    """Return the error for a mount that somebody else made; a dead one is taken away first, so that they can again."""
    kind = DRIVE_TYPES[found.fstype]
    command = f"rclone mount {found.source}" if found.fstype == RCLONE else kind
    if state == "dead":
        detach(found, timeout, lazily=True)
        gone = f"the program of the {kind} mount at {found.point!r} died, and what it left was taken away"
        return mount_failed(state, gone, "a mount that answers", f"Run '{command} {found.point}' again")
    why = {"hung": "does not answer", "failing": f"answers {reason}"}.get(state, "is not Colab's to mount anew")
    next_step = f"Use its own tools, or colabkit.unmount() and '{command} {found.point}'"
    cause = "place" if state == "alive" else state
    return mount_failed(cause, f"the {kind} mount at {found.point!r} {why}", "one that can be replaced", next_step)


def _mount_anew(found: Mount, point: str, state: str, readonly: bool, timeout: float, started: float) -> MountReport:
    """Replace a DriveFS mount: its writes are sent first; dead or hung, it is taken away as it is."""
    if state in ("alive", "failing"):
        DriveFs(found).unmount("mount Drive anew", timeout, progress=True)
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
        timeout: seconds for sending; it goes on by itself afterwards.
        force: take it away at once, also if it is dead, hangs, or has not sent everything.
        progress: show the seconds that pass.

    Raises:
        NotMounted: if there is no such mount.
        TimedOut: if writes are not sent in time.
        UnsentWrites: if they cannot be sent.
        MountFailed: if files on it are open.
    """
    started = time.monotonic()
    found = _meant(path, "unmount Drive", timeout)
    act = f"unmount {found.point!r}"
    _check_not_inside(found, act)
    if force:
        sent = _take_away(found, timeout)
    else:
        _check_alive(found, act, timeout)
        sent = _served(found, act).unmount(act, timeout, progress)
    return UnmountReport(Path(found.point), DRIVE_TYPES[found.fstype], sent, time.monotonic() - started)


def flush(path: str | os.PathLike[str] | None = None, *, timeout: float = 600.0, progress: bool = True) -> FlushReport:
    """Send all writes; the report says what can be said of them.

    DriveFS sends them only when it ends: in Colab the mount goes away and comes back, so no file on it may be in use,
    and Drive can ask for consent again.

    Args:
        path: anything on the mount; by default the Drive mount.
        timeout: seconds for sending; it goes on by itself afterwards.
        progress: show the seconds that pass.

    Raises:
        NotMounted: if there is no such mount.
        TimedOut: if writes are not sent in time.
        UnsentWrites: if they cannot be sent.
        MountFailed: if Drive cannot be mounted again.
    """
    started = time.monotonic()
    found = _meant(path, "flush Drive", timeout)
    act = f"flush {found.point!r}"
    _check_alive(found, act, timeout)
    served = _served(found, act)
    if served.remounts_to_send:
        _check_not_inside(found, act)
    sent = served.send(act, timeout, progress)
    kind, remounted = DRIVE_TYPES[found.fstype], served.remounts_to_send
    return FlushReport(Path(found.point), kind, sent, remounted, time.monotonic() - started)


def clear_cache(
    path: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    timeout: float = 600.0,
    force: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Clear what the Drive mount keeps near: to see new files, and to get disk space back.

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
        TimedOut: if writes are not sent in time; the cache is as it was.
        UnsentWrites: if clearing would lose writes, unless `force`.
        MountFailed: if files on it are open, or it cannot be mounted again.
    """
    started = time.monotonic()
    found = _meant(path, "clear the cache of Drive", timeout)
    act = f"clear the cache of {found.point!r}"
    if not force or found.fstype != DRIVEFS:
        _check_alive(found, act, timeout)
    served = _served(found, act)
    folder, unsent = served.cache_folder(), served.unsent()
    cached, freed = served.cache_bytes(), served.freeable_bytes()
    if dry_run:
        loss = _at_stake(unsent, timeout) if force else ""
    else:
        _check_not_inside(found, act)
        loss = served.clear(act, timeout, force, progress)
        freed = max(0, cached - served.cache_bytes()) if freed else 0
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


def _meant(path: str | os.PathLike[str] | None, act: str, timeout: float) -> Mount:
    """Return the mount that a user means.

    Raises:
        NotMounted: if Drive is not mounted, or nothing is mounted at the path.
        InvalidOption: if another kind of file system is.
    """
    check_seconds(act, "timeout", timeout)
    table = mounts()
    if path is None and not os.environ.get("COLABKIT_DRIVE"):
        if found := _only_drive(act, table):
            return found
        raise NotMounted(cannot(act, "Drive is not mounted", "a mount", "Run colabkit.mount() first"))
    path = "drive:" if path is None else path
    holding = mount_holding(os.path.abspath(user_path(path, act)), table)
    if holding is None or not holding.is_remote:
        act = f"{act.partition(' Drive')[0]} {os.fspath(path)!r}"
        raise NotMounted(cannot(act, "no mount is there", "a path on the Drive mount", "See colabkit.runtime()"))
    if holding.fstype not in DRIVE_TYPES:
        needed = f"one of {', '.join(DRIVE_TYPES)}"
        raise InvalidOption(cannot(act, f"{holding.point!r} is of type {holding.fstype}", needed, "Use its own tools"))
    return holding


class _Served(Protocol):
    """A mount and the program that serves it: what the calls of this module need of each type."""

    steps: ClassVar[tuple[str, ...]]
    remounts_to_send: ClassVar[bool]

    def unsent(self) -> int | None: ...
    def cache_folder(self) -> Path | None: ...
    def cache_bytes(self) -> int: ...
    def freeable_bytes(self) -> int: ...
    def send(self, act: str, timeout: float, progress: bool) -> str: ...
    def unmount(self, act: str, timeout: float, progress: bool) -> str: ...
    def clear(self, act: str, timeout: float, force: bool, progress: bool) -> str: ...


def _served(found: Mount, act: str) -> _Served:
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


def _only_drive(act: str, table: list[Mount]) -> Mount | None:
    """Return the Drive mount, None where there is none.

    Raises:
        NotMounted: if there are several.
    """
    found = drive_mounts(table)
    if len(found) > 1:
        points = ", ".join(repr(mount.point) for mount in found)
        next_step = "Pass its path, or set COLABKIT_DRIVE to the folder that drive: stands for"
        raise NotMounted(cannot(act, f"{len(found)} mounts can be meant ({points})", "one", next_step))
    return found[0] if found else None


def _to_be_found(act: str, place: Place, point: str | None) -> Mount | None:
    """Return the mount that `mount()` finds there: where Colab can make its own, no other counts."""
    table = mounts()
    table = [mount for mount in table if mount.point == point and mount.fstype in DRIVE_TYPES] or table
    if place.can_mount_drive:
        table = [mount for mount in table if mount.fstype == DRIVEFS]
    return _only_drive(act, table)


def _at_stake(unsent: int | None, timeout: float) -> str:
    if unsent is None:
        return f"what cannot be sent in {format_seconds(timeout)}"
    return f"those of {counted_files(unsent)} that cannot be sent in {format_seconds(timeout)}" if unsent else ""


def _check_not_inside(found: Mount, act: str) -> None:
    """Refuse to take away the ground that this process stands on."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    if mount_holding(here, [found]):
        needed = "a working folder elsewhere"
        raise mount_failed("in use", f"the working folder {here!r} lies on it", needed, "Run %cd /content first", act)


def _check_alive(found: Mount, act: str, timeout: float) -> None:
    state, reason = liveness((found.point,), timeout)
    if state in ("alive", "failing"):  # it answers, if only with errors: its writes may still be sent
        return
    cure = "Run colabkit.mount(), which takes it away" if state == "dead" else f"Wait and try again, or {GIVE_UP}"
    raise mount_failed(state, f"the mount is {state} ({reason})", "a mount that answers", cure, act)


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

"""Google Drive's mount: made, found again, repaired, flushed, its cache cleared, by the exact type of the mount.

The kernel's table of mounts is read first, and a mount is only touched by children with a deadline: a dead or hanging
mount never takes the notebook with it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar, Protocol

from colabkit.drive.drivefs import DriveFs, check_can_mount, mount_in_colab
from colabkit.drive.mountpoints import detach, liveness, mount_failed
from colabkit.drive.ocamlfuse import Ocamlfuse
from colabkit.drive.rclone import Rclone
from colabkit.drive.reports import CacheReport, FlushReport, MountReport, UnmountReport
from colabkit.environment import current_place
from colabkit.errors import InvalidOption, NotMounted, cannot, check_seconds
from colabkit.mounts import DRIVE_TYPES, DRIVEFS, OCAMLFUSE, Mount, drive_mount, drive_root, mount_holding, mounts

__all__ = [
    "CacheReport",
    "FlushReport",
    "MountReport",
    "UnmountReport",
    "clear_cache",
    "flush",
    "mount",
    "unmount",
]

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
    place = current_place()
    table = mounts()
    found = next((one for one in reversed(table) if one.fstype == DRIVEFS), None)
    if found is None and not place.can_mount_drive:
        found = drive_mount(table)
    if found is None:
        check_can_mount(place)
    point = os.path.abspath(os.path.expanduser(path)) if path is not None else found.point if found else COLAB_POINT
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
        notes = ("It is not read-only; force=True mounts it anew",) if readonly and not found.readonly else ()
        return _report(found, "was mounted already", found.readonly or None, started, notes)
    if found.fstype != DRIVEFS:
        kind = DRIVE_TYPES[found.fstype]
        why = reason or "alive, and not Colab's to mount anew"
        raise mount_failed(state, f"{kind} at {found.point!r}: {why}", "a mount that answers", f"Mount it with {kind}")
    check_can_mount(place)
    if state == "hung" and not force:
        raise mount_failed(
            "hung",
            f"DriveFS at {found.point!r} does not answer ({reason})",
            "a mount that answers",
            "Wait and try again, or end it with force=True, which loses what it has not sent",
        )
    return _mount_anew(found, point, state, readonly, timeout, started)


def _mount_anew(found: Mount, point: str, state: str, readonly: bool, timeout: float, started: float) -> MountReport:
    """Replace a DriveFS mount: alive, its writes are sent first; dead or hung, it is taken away as it is."""
    if state == "alive":
        DriveFs(found).unmount("mount Drive anew", timeout, progress=False)
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
    if not force:
        _check_alive(found, act, timeout)
    served = _served(found, act)
    folder, unsent = served.cache_folder(), served.unsent()
    cached, freed = served.cache_bytes(), served.freeable_bytes()
    loss = "" if dry_run else served.clear(act, timeout, force, progress)
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
    if path is None or os.fspath(path).startswith("drive:"):
        if found := drive_mount(table):
            return found
        raise NotMounted(cannot(act, "Drive is not mounted", "a mount", "Run colabkit.mount() first"))
    holding = mount_holding(os.path.abspath(os.path.expanduser(os.fspath(path))), table)
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
    return "what it had not sent waits in its cache for the next mount"


def _check_alive(found: Mount, act: str, timeout: float) -> None:
    state, reason = liveness((found.point,), timeout)
    if state == "alive":
        return
    cure = "Run colabkit.mount(), which repairs it" if found.fstype == DRIVEFS else "Mount it again"
    if state == "hung":
        cure = "Wait and try again, or give up what it has not sent with force=True"
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

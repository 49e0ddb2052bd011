"""`mount()`, `unmount()`, `flush()` and `clear_cache()` for all supported types of Google Drive mounts.

colabkit checks mounts in child processes with a deadline, so that a dead or hanging mount cannot freeze the notebook.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from colabkit.foundation import (
    DRIVE_TYPES,
    DRIVEFS,
    OCAMLFUSE,
    RCLONE,
    InvalidOption,
    Mount,
    MountFailed,
    Text,
    call,
    cannot,
    check_duration,
    checked_call,
    current_place,
    drive_root,
    format_seconds,
    interruptible,
    log_causes,
    omit,
    option,
    user_path,
)
from colabkit.storage.drive.drivefs import DriveFs, check_can_mount, mount_in_colab, options_of
from colabkit.storage.drive.mountpoints import (
    DriveMount,
    check_alive,
    check_unused,
    counted_files,
    detach,
    find_drive,
    find_mount,
    liveness,
)
from colabkit.storage.drive.ocamlfuse import Ocamlfuse
from colabkit.storage.drive.rclone import Rclone
from colabkit.storage.drive.reports import CacheReport, FlushReport, MountReport, UnmountReport, with_notes

COLAB_POINT = "/content/drive"


@interruptible("Mounting Drive", "Run the same call again; a mount that already works is reused.")
@checked_call()
def mount(
    path: str | os.PathLike[str] | None = None,
    *,
    readonly: bool = False,
    timeout: float | str = 120.0,
    force: bool = False,
) -> MountReport:
    """Mount Google Drive, or find its existing mount, and report its path.

    A working mount is reused without asking for consent again; a DriveFS mount whose program died is repaired. Outside
    Colab, an existing google-drive-ocamlfuse or rclone mount is used; without such a mount, the error names
    alternatives.

    Args:
        path: where to mount Drive; defaults to its current mount point, or `/content/drive` if it is not mounted.
        readonly: refuse writes, to protect training data from accidental changes; an existing mount keeps its mode
            unless it is remounted.
        timeout: seconds, or text such as `"5min"`, to wait for consent, for Drive to start, and later for each folder
            listing; large folders need more time.
        force: also remount a DriveFS mount that works, returns errors or hangs. Its writes are sent first, but the
            unsent writes of a hanging mount are lost.

    Returns:
        The path of My Drive, and the state of the mount.

    Raises:
        MountFailed: if Drive cannot be mounted; the attribute `cause` holds the reason.
        NotMounted: if there are several Drive mounts, and `path` is none of their mount points.
        TimedOut, UnsentWrites: if writes could not be sent before remounting.

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
    timeout_s = check_duration(act, "timeout", timeout)
    if isinstance(path, str) and path.startswith("drive:"):
        on_drive = f"{path!r} is a path on Drive itself"
        raise InvalidOption(cannot(act, on_drive, "a local folder to mount it at", omit("path")))
    place = current_place()
    requested_point = None if path is None else os.path.abspath(user_path(path, act))
    found = find_drive(act, place, requested_point)
    if found is None:
        mounted = mount_in_colab(requested_point or COLAB_POINT, readonly, timeout_s, force)
        return _report(mounted, "mounted", readonly, started)
    point = requested_point or found.point
    state, reason = liveness(_folders(found), timeout_s)
    if state == "alive" and not force:
        if point != found.point:
            next_step = ("Use that mount, or run ", call("unmount"), " first")
            raise MountFailed(cannot(act, f"it is already mounted at {found.point!r}", "", next_step), cause="folder")
        mode = options_of(found)[0] if found.fstype == DRIVEFS else found.readonly
        notes: list[Text] = [f"This is the rclone mount of {found.source!r}"] if found.fstype == RCLONE else []
        if readonly and not mode:
            notes.append(_note_of_mode(found, mode))
        return _report(found, "was mounted already", mode, started, tuple(notes))
    if found.fstype != DRIVEFS:
        raise _cannot_replace(found, state, reason, timeout_s)
    check_can_mount(place)
    if state in ("hung", "failing") and not force:
        raise _forced_only(found, state, reason)
    check_unused(found, act, force=state != "alive")
    return _replace(found, point, state, readonly, timeout_s, started)


def _note_of_mode(found: Mount, mode: bool | None) -> Text:
    known = "The mount is writable" if mode is False else "Whether the mount is read-only is unknown"
    if found.fstype != DRIVEFS:
        return f"{known}; to make it read-only, mount it again with {DRIVE_TYPES[found.fstype]}"
    return (f"{known}; to mount it again read-only, use ", option("force", True))


def _forced_only(found: Mount, state: str, reason: str) -> MountFailed:
    """Return the error for a DriveFS mount that hangs or returns errors; `mount(force=True)` replaces such a mount."""
    is_quota = "quota" in log_causes()
    problem = "does not respond" if state == "hung" else "returns errors"
    log = "; its log reports QUOTA_EXCEEDED" if is_quota else ""
    effect = "which loses unsent writes" if state == "hung" else "which sends its writes first"
    next_step = ("Wait and try again, or mount it again with ", option("force", True), f", {effect}")
    mounted = f"the DriveFS mount at {found.point!r} {problem} ({reason}){log}"
    return MountFailed(cannot("mount Drive", mounted, "", next_step), cause="quota" if is_quota else state)


def _cannot_replace(found: Mount, state: str, reason: str, timeout: float) -> MountFailed:
    """Return the error for a mount that google.colab did not make; if the mount is dead, unmount it first."""
    next_step: Text
    kind = DRIVE_TYPES[found.fstype]
    command = f"{f'rclone mount {found.source}' if found.fstype == RCLONE else kind} {found.point}"
    if state == "dead":
        detach(found, timeout, lazily=True)
        mounted = f"the {kind} mount at {found.point!r} was dead and has been removed"
        next_step = f"Run '{command}' again"
    elif state == "alive":
        mounted = f"the {kind} mount at {found.point!r} was not made by google.colab, which cannot mount it again"
        next_step = ("Run ", call("unmount"), f", then '{command}'")
    else:
        problem = "does not respond" if state == "hung" else "returns errors"
        mounted = f"the {kind} mount at {found.point!r} {problem} ({reason})"
        loss = f", which may lose unsent writes, then '{command}'"
        next_step = ("Wait and try again, or run ", call("unmount", force=True), loss)
    return MountFailed(cannot("mount Drive", mounted, "", next_step), cause="place" if state == "alive" else state)


def _replace(found: Mount, point: str, state: str, readonly: bool, timeout: float, started: float) -> MountReport:
    """Replace a DriveFS mount: send its writes first, unless it is dead or hangs."""
    if state in ("alive", "failing"):
        DriveFs(found).unmount("mount Drive again", timeout, progress=True)
        mounted = mount_in_colab(point, readonly, timeout, force=False)
        return _report(mounted, "mounted", readonly, started)
    _unmount_at_once(found, timeout)
    mounted = mount_in_colab(point, readonly, timeout, force=True)
    return _report(mounted, "repaired", readonly, started, ("Writes that were not sent before the repair may be lost",))


@checked_call()
def unmount(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout: float | str = 600.0,
    force: bool = False,
    progress: bool = True,
) -> UnmountReport:
    """Send all writes, unless `force` is set, and unmount Drive.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        timeout: seconds, or text such as `"5min"`, to wait for the upload; after a timeout, the upload continues.
        force: unmount immediately, even if the mount is dead, hangs, or has unsent writes.
        progress: show the elapsed seconds.

    Returns:
        The mount point, and the known state of the writes.

    Raises:
        NotMounted: if Drive is not mounted, `path` is not on a mount, or there are several Drive mounts and no `path`.
        TimedOut, UnsentWrites: if the writes are not sent in time, or cannot be sent.
        MountFailed: if the mount is in use; without `force`, also if it is dead, hangs, or has a file that this process
            writes.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> (drive.path / "notes.txt").write_text("seen in Drive")
        13
        >>> colabkit.unmount().kind
        'DriveFS'
    """
    started = time.monotonic()
    timeout_s = check_duration("unmount Drive", "timeout", timeout)
    found = find_mount(path, "unmount Drive")
    act = f"unmount {found.point!r}"
    check_unused(found, act, force)
    if force:
        sent = _unmount_at_once(found, timeout_s)
    else:
        check_alive(found, act, timeout_s)
        sent = _served(found, act).unmount(act, timeout_s, progress)
    return UnmountReport(Path(found.point), DRIVE_TYPES[found.fstype], sent, time.monotonic() - started)


@checked_call()
def flush(
    path: str | os.PathLike[str] | None = None, *, timeout: float | str = 600.0, progress: bool = True
) -> FlushReport:
    """Send all writes to Drive.

    In Colab, this mounts Drive again: no file on it may be in use, and Drive can ask for consent again.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        timeout: seconds, or text such as `"5min"`, to wait for the upload; after a timeout, the upload continues.
        progress: show the elapsed seconds.

    Returns:
        The known state of the writes, and whether Drive was remounted.

    Raises:
        NotMounted: if Drive is not mounted, `path` is not on a mount, or there are several Drive mounts and no `path`.
        TimedOut, UnsentWrites: if the writes are not sent in time, or cannot be sent.
        MountFailed: if the mount is dead, hangs or is in use, or Drive cannot be mounted again.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> (drive.path / "notes.txt").write_text("seen in Drive")
        13
        >>> colabkit.flush().remounted
        True
    """
    started = time.monotonic()
    timeout_s = check_duration("flush Drive", "timeout", timeout)
    found = find_mount(path, "flush Drive")
    act = f"flush {found.point!r}"
    check_alive(found, act, timeout_s)
    served = _served(found, act)
    if served.is_remounted:
        check_unused(found, act, force=False)
    sent = served.send(act, timeout_s, progress)
    kind, remounted = DRIVE_TYPES[found.fstype], served.is_remounted
    return FlushReport(Path(found.point), kind, sent, remounted, time.monotonic() - started)


@checked_call()
def clear_cache(
    path: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    timeout: float | str = 600.0,
    force: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Clear the local cache of the Drive mount, to see new files and to free disk space.

    For DriveFS: send all writes, end DriveFS, remove its cache and mount Drive again. For google-drive-ocamlfuse: wait
    for uploads, unmount, run `google-drive-ocamlfuse -cc` and mount again. For rclone: only make rclone forget its
    directory listings.

    Args:
        path: any path on the mount; defaults to the only Drive mount.
        dry_run: change nothing; report what would be freed and lost.
        timeout: seconds, or text such as `"5min"`, for sending writes, and for each further step.
        force: clear the cache even if writes cannot be sent and are lost.
        progress: show the elapsed seconds.

    Returns:
        The disk space freed, and the writes lost.

    Raises:
        NotMounted: if Drive is not mounted, `path` is not on a mount, or there are several Drive mounts and no `path`.
        TimedOut: if the writes are not sent in time; the cache stays unchanged.
        UnsentWrites: if clearing would lose writes, unless `force` is set.
        MountFailed: if the mount is dead, hangs or is in use, or Drive cannot be mounted again.

    Example:
        >>> import colabkit
        >>> drive = colabkit.mount()
        >>> colabkit.clear_cache(dry_run=True).loss
        ''
        >>> colabkit.clear_cache().kind
        'DriveFS'
    """
    started = time.monotonic()
    timeout_s = check_duration("clear the cache of Drive", "timeout", timeout)
    found = find_mount(path, "clear the cache of Drive")
    act = f"clear the cache of {found.point!r}"
    if not force or found.fstype != DRIVEFS:
        check_alive(found, act, timeout_s)
    served = _served(found, act)
    folder, unsent, cached = served.cache_folder(), served.unsent(), served.cache_bytes()
    freed = cached if served.frees_contents else 0
    if dry_run:
        loss = _possible_loss(unsent, timeout_s) if force else ""
    else:
        check_unused(found, act, force)
        loss = served.clear(act, timeout_s, force, progress)
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


def _unmount_at_once(found: Mount, timeout: float) -> str:
    """Unmount a mount in any state immediately; return a note about its unsent writes."""
    if found.fstype == DRIVEFS:
        DriveFs(found).drop(timeout)
        return "writes that DriveFS had not sent are lost"
    detach(found, timeout, lazily=True)
    return "unsent writes may be lost; look for them in the program's cache before you mount again"


def _possible_loss(unsent: int | None, timeout: float) -> str:
    if unsent is None:
        return f"writes that cannot be sent within {format_seconds(timeout)}"
    return f"up to {counted_files(unsent)} that cannot be sent within {format_seconds(timeout)}" if unsent else ""


def _folders(found: Mount) -> tuple[str, ...]:
    return (found.point, drive_root(found)) if found.fstype == DRIVEFS else (found.point,)


def _report(
    found: Mount, state: str, readonly: bool | None, started: float, notes: tuple[Text, ...] = ()
) -> MountReport:
    report = MountReport(
        path=Path(drive_root(found)),
        mountpoint=Path(found.point),
        kind=DRIVE_TYPES[found.fstype],
        state=state,
        readonly=readonly,
        seconds=time.monotonic() - started,
    )
    return with_notes(report, notes)

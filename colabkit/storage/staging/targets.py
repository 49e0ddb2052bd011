"""Where a near copy goes: tmpfs as long as training keeps its RAM, else disk, else where the user says."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    DRIVEFS,
    DRIVEFS_FOLDER,
    NotEnoughSpace,
    cannot,
    file_changes,
    format_bytes,
    memory_limits,
    mount_holding,
    mounts,
    near_folder,
    printable,
    read_file,
    resolved,
    run,
    user_path,
)
from colabkit.storage.sources.items import Item
from colabkit.storage.staging.identity import short_name

TMPFS = Path("/dev/shm")
RESERVE_BYTES = 2 << 30
"""RAM that staging to tmpfs leaves for training, or a quarter of what is available where that is more."""

_CAP_SYS_ADMIN = 21
_MOUNT_S = 10.0
_SLACK_BYTES = 16 << 20  # of a tmpfs: for its folders and our own notes
_PAGE_BYTES = 4096
_ENTRY_BYTES = 1024  # of a file system, for each file


@dataclass(frozen=True, slots=True)
class Target:
    """A place for a near copy.

    Attributes:
        name: `"tmpfs"`, `"disk"` or `"path"`.
        why: the reason.
        path: of the near copy.
        mounted_at: the folder at which a tmpfs is mounted for it alone; None without.
    """

    name: str
    why: str
    path: Path
    mounted_at: Path | None = None


def candidates(source: str, to: str | os.PathLike[str], key: str, act: str) -> list[Target]:
    """Return all places where the near copy may be, or may have been begun; the last is on disk, or as asked.

    Args:
        source: its name.
        to: as the user asked.
        key: of the source.
        act: verb and object for messages.
    """
    name = f"{short_name(source)}-{key[:8]}"
    disk = near_folder(os.environ)
    shared, own = TMPFS / f"colabkit-{os.getuid()}", disk / f"{name}.tmpfs"
    places = [Target("tmpfs", "", own / name, own), Target("disk", "", disk / name)]
    if _is_own(shared):
        places.insert(0, Target("tmpfs", "", shared / name))
    if isinstance(to, str) and to in ("auto", "tmpfs", "disk"):
        return [place for place in places if to in ("auto", place.name)]
    return [Target("path", "as asked", user_path(to, act).absolute())]


def choose(places: list[Target], needed: int, is_asked: bool) -> Target:
    """Return where the near copy goes, with the reason.

    Args:
        places: from `candidates`.
        needed: bytes that the place has to hold at most.
        is_asked: whether the user named the kind of place.
    """
    size, room, spare = format_bytes(needed), format_bytes(tmpfs_room()), format_bytes(_spare_ram())
    shared = next((place for place in places if place.name == "tmpfs" and place.mounted_at is None), None)
    own = next((place for place in places if place.mounted_at is not None), None)
    if shared is not None and (fits(shared, needed) or (is_asked and not (own and fits(own, needed)))):
        why = "as asked" if is_asked else f"{size} fit in the {room} of tmpfs that training can spare"
        return Target("tmpfs", why, shared.path)
    if own is not None and (fits(own, needed) or len(places) == 1):
        fitting = f"{size} fit in the {spare} of RAM that training can spare, but not in {str(TMPFS)!r}"
        why = f"{fitting}: in a tmpfs of its own"
        return Target("tmpfs", why, own.path, own.mounted_at)
    why = "as asked" if is_asked else f"{size} do not fit in the {room} of tmpfs that training can spare"
    return Target(places[-1].name, why, places[-1].path)


def fits(place: Target, needed: int) -> bool:
    """Return whether so many bytes have room in a place, and training keeps its RAM."""
    if place.name != "tmpfs":
        return needed <= file_changes.free_bytes(place.path)
    if place.mounted_at is None:
        return needed <= tmpfs_room()
    return needed + _SLACK_BYTES <= _spare_ram() and _may_mount()


def room_of(items: Iterable[Item]) -> int:
    """Return the bytes that files take on a file system: whole pages, and an entry for each."""
    return sum(-(-item.size // _PAGE_BYTES) * _PAGE_BYTES + _ENTRY_BYTES for item in items)


def tmpfs_room() -> int:
    """Return the bytes that staging may put in the tmpfs that is there."""
    return min(file_changes.free_bytes(TMPFS), _spare_ram()) if TMPFS.is_dir() else 0


def _spare_ram() -> int:
    """Return the RAM that near copies may take: training needs some of it too."""
    available = memory_limits(read_file).available_bytes
    return max(0, available - max(RESERVE_BYTES, available // 4))


def check_room(act: str, target: Target, needed: int, cached: int) -> None:
    """Refuse, before anything is written, what will not fit.

    Args:
        act: verb and object for the message.
        target: where the near copy goes.
        needed: bytes that it will take at most, besides those there already.
        cached: bytes that the mount's own cache will take on disk.

    Raises:
        NotEnoughSpace: naming both numbers.
    """
    cache = Path.home() / DRIVEFS_FOLDER
    if target.mounted_at is None:
        shared = cached if cached and _device(target.path) == _device(cache) else 0
        file_changes.check_space(act, needed + shared, target.path, tmpfs_room() if target.name == "tmpfs" else None)
    if cached and cached > (free := file_changes.free_bytes(cache)):
        found = f"{format_bytes(free)} free on the disk that DriveFS caches on"
        raise NotEnoughSpace(
            cannot(act, found, f"{format_bytes(cached)} needed", "Free some space, or run colabkit.clear_cache()")
        )


def cache_bytes(path: str, read_bytes: int) -> int:
    """Return what the mount that holds a path keeps on this machine's disk of so many bytes read: DriveFS keeps all."""
    table = mounts()
    holding = mount_holding(resolved(path, table), table) if os.path.isabs(path) else None
    return read_bytes if holding is not None and holding.fstype == DRIVEFS else 0


def prepare_place(act: str, target: Target, needed: int) -> None:
    """Make what a place needs: a private folder in the shared tmpfs, or a tmpfs of its own, large enough.

    Raises:
        NotEnoughSpace: if a tmpfs cannot be mounted.
    """
    if target.name == "tmpfs" and target.mounted_at is None:
        file_changes.make_private_folder(target.path.parent)
    if (point := target.mounted_at) is None:
        return
    file_changes.make_folder(point)
    with _locked(point.parent):
        is_there = os.path.ismount(point)
        size = needed + _SLACK_BYTES + (file_changes.used_bytes(point) if is_there else 0)
        options = f"{'remount,' if is_there else ''}size={size},mode=0700,nosuid,nodev"
        said = run(["mount", "-t", "tmpfs", "-o", options, "colabkit", str(point)], act, _MOUNT_S)
    if said.status:
        give_back_tmpfs(act, point)
        found = f"mount said {printable(said.output.strip())!r}"
        raise NotEnoughSpace(cannot(act, found, "a tmpfs of its own", "Use to='disk'"))


def give_back_tmpfs(act: str, point: Path | None) -> None:
    """Unmount a tmpfs that was mounted for one near copy, and remove its folder, if nothing is in it any more."""
    if point is None or not point.is_dir() or any(point.iterdir()):
        return
    if os.path.ismount(point):
        run(["umount", str(point)], act, _MOUNT_S)
    if not os.path.ismount(point):
        file_changes.remove_empty_folder(point)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time mount below a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # where there are no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_own(folder: Path) -> bool:
    """Return whether a folder in a place open to all is this user's, or not there yet."""
    try:
        found = folder.lstat()
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _may_mount() -> bool:
    """Return whether this process may mount file systems."""
    try:
        status = dict(line.split(":", 1) for line in read_file("/proc/self/status").splitlines())
        return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1)
    except (OSError, KeyError, ValueError):
        return False


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev

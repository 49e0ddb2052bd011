"""Where a near copy goes: tmpfs as long as training keeps its RAM, else disk, else where the user says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from colabkit import _files
from colabkit._processes import run
from colabkit._reports import printable
from colabkit._units import format_bytes
from colabkit.environment import memory_limits, near_folder
from colabkit.errors import NotEnoughSpace, cannot
from colabkit.mounts import DRIVEFS, DRIVEFS_FOLDER, mount_holding, mounts, read_file, user_path
from colabkit.staging.identity import short_name

__all__ = ["Target", "cache_bytes", "candidates", "check_room", "choose", "give_back_tmpfs", "tmpfs_room"]

TMPFS = Path("/dev/shm")
RESERVE_BYTES = 2 << 30
"""RAM that staging to tmpfs leaves for training, or a quarter of what is available where that is more."""

_CAP_SYS_ADMIN = 21
_MOUNT_S = 10.0
_SLACK_BYTES = 64 << 20  # a tmpfs's own pages: of its folders, and the last one of each file


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
    """Return all places where the near copy may be, or may have been begun.

    Args:
        source: its name.
        to: as the user asked.
        key: of the source.
        act: verb and object for messages.
    """
    name = f"{short_name(source)}-{key[:8]}"
    disk = near_folder(os.environ)
    own = disk / f"{name}.tmpfs"
    places = [
        Target("tmpfs", "", TMPFS / f"colabkit-{os.getuid()}" / name),
        Target("tmpfs", "", own / name, own),
        Target("disk", "", disk / name),
    ]
    if isinstance(to, str) and to in ("auto", "tmpfs", "disk"):
        return [place for place in places if to in ("auto", place.name)]
    return [Target("path", "as asked", user_path(to, act))]


def choose(places: list[Target], needed: int, is_asked: bool) -> Target:
    """Return where the near copy goes, with the reason.

    Args:
        places: from `candidates`.
        needed: bytes that the place has to hold at most.
        is_asked: whether the user named the kind of place.
    """
    why = "as asked"
    if places[0].name != "tmpfs":
        return Target(places[0].name, why, places[0].path)
    size, room, spare = format_bytes(needed), tmpfs_room(), _spare_ram()
    if needed <= room:
        if not is_asked:
            why = f"{size} fit in the {format_bytes(room)} of tmpfs that training can spare"
        return Target("tmpfs", why, places[0].path)
    if needed + _SLACK_BYTES <= spare and _may_mount():
        fitting = f"{size} fit in the {format_bytes(spare)} of RAM that training can spare, but not in {str(TMPFS)!r}"
        return Target("tmpfs", f"{fitting}: in a tmpfs of its own", places[1].path, places[1].mounted_at)
    if is_asked:
        return Target("tmpfs", why, places[0].path)
    why = f"{size} do not fit in the {format_bytes(max(room, 0))} of tmpfs that training can spare"
    return Target("disk", why, places[-1].path)


def tmpfs_room() -> int:
    """Return the bytes that staging may put in the tmpfs that is there."""
    return min(_files.free_bytes(TMPFS), _spare_ram()) if TMPFS.is_dir() else 0


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
    if target.mounted_at is None or os.path.ismount(target.mounted_at):
        shared = cached if cached and _device(target.path) == _device(cache) else 0
        _files.check_space(act, needed + shared, target.path, tmpfs_room() if target.name == "tmpfs" else None)
    if cached and cached > (free := _files.free_bytes(cache)):
        found = f"{format_bytes(free)} free on the disk that DriveFS caches on"
        raise NotEnoughSpace(
            cannot(act, found, f"{format_bytes(cached)} needed", "Free some space, or run colabkit.clear_cache()")
        )


def cache_bytes(source: str, read_bytes: int) -> int:
    """Return what the source's mount keeps on this machine's disk of so many bytes read: DriveFS keeps all."""
    holding = mount_holding(os.path.abspath(source), mounts()) if os.path.isabs(source) else None
    return read_bytes if holding is not None and holding.fstype == DRIVEFS else 0


def mount_tmpfs(act: str, target: Target, needed: int) -> None:
    """Mount the tmpfs that a target has for itself, if it has one that is not mounted yet."""
    if (point := target.mounted_at) is None or os.path.ismount(point):
        return
    _files.make_folder(point)
    options = f"size={needed + _SLACK_BYTES},mode=0700,nosuid,nodev"
    said = run(["mount", "-t", "tmpfs", "-o", options, "colabkit", str(point)], act, _MOUNT_S)
    if said.status:
        _files.remove_empty_folder(point)
        found = f"mount said {printable(said.output.strip())!r}"
        raise NotEnoughSpace(cannot(act, found, "a tmpfs of its own", "Use to='disk'"))


def give_back_tmpfs(act: str, point: Path) -> None:
    """Unmount a tmpfs that was mounted for one near copy, and remove its folder."""
    if os.path.ismount(point):
        run(["umount", str(point)], act, _MOUNT_S)
    if not os.path.ismount(point):
        _files.remove_empty_folder(point)


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

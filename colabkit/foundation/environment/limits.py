"""Resource limits of this process: CPUs by affinity and quota, RAM by cgroup limits, disks and tmpfs.

In a container, `/proc/meminfo` and `os.cpu_count()` describe the host, so these functions also apply the CPU affinity
and the limits of all cgroups that contain this process. Functions that parse system files take a file reader, so that
tests can simulate any system.

Paths on remote mounts other than `/` are not accessed, since a dead mount would hang the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation.mount_table import Mount, Reader, mount_holding, mounts, read_file
from colabkit.foundation.reports import Report
from colabkit.foundation.units import format_bytes

_CGROUP = "/sys/fs/cgroup"
_RECLAIMABLE = {
    2: ("inactive_file", "active_file", "slab_reclaimable"),
    1: ("total_inactive_file", "total_active_file"),
}
"""Fields of `memory.stat` that count reclaimable memory, by cgroup version; none of them includes tmpfs."""
_DISK_FOLDERS = ("/content", "/kaggle/working", "/cache", "/local_disk0", "/tmp")
_SYSTEM_FOLDERS = ("/run", "/sys", "/proc", "/dev", "/var/run", "/var/lock", "/snap")
# Maximum number of symlinks followed in a path, which is also the kernel's limit.
_MOST_LINKS = 40
_FOR_USERS = ("/dev/shm", "/run/user")


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """RAM that this process may use.

    Attributes:
        total_bytes: the minimum of the machine's RAM and the limits of the cgroups that contain this process.
        available_bytes: RAM that can still be allocated; reclaimable page cache counts as free.
        limited_by: `"machine"`, or the folder of the cgroup that sets the limit.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str

    def _summary(self) -> str:
        return f"{format_bytes(self.available_bytes)} of {format_bytes(self.total_bytes)} RAM available"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("available", format_bytes(self.available_bytes)), ("limited by", self.limited_by)]


def allowed_cpus(read: Reader, affinity: int) -> float:
    """Return the number of CPUs this process may use: the minimum of its affinity and its cgroup quotas."""
    limits = [float(affinity)]
    for version, folder in cgroup_folders(read, "cpu"):
        try:
            if version == 2:
                quota, period = read(f"{folder}/cpu.max").split()
            else:
                quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
            if quota.strip() not in ("max", "-1"):
                limits.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(limits)


def usable_cpus() -> float:
    """Return the number of CPUs this process may use, which can be fractional."""
    return allowed_cpus(read_file, len(allowed_cores()))


def memory_limits(read: Reader) -> MemoryReport:
    """Return the total and the available RAM: the minima over the machine and all cgroups of this process.

    tmpfs counts as used RAM; reclaimable page cache does not.
    """
    total, available = _machine_memory(read)
    limited_by = "machine"
    for version, folder in cgroup_folders(read, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            # The value "max" means no limit; int() then raises ValueError.
            limit = int(read(f"{folder}/{names[0]}"))
        except (OSError, ValueError):
            continue
        if limit < total:
            total, limited_by = limit, folder
        used = _number(read, f"{folder}/{names[1]}")
        reclaimable = sum(_number(read, f"{folder}/memory.stat", key) for key in _RECLAIMABLE[version])
        available = min(available, max(0, limit - max(0, used - reclaimable)))
    return MemoryReport(total, available, limited_by)


def _machine_memory(read: Reader) -> tuple[int, int]:
    meminfo = {}
    with contextlib.suppress(OSError):
        for line in read("/proc/meminfo").splitlines():
            key, _, value = line.partition(":")
            # Skip lines in other formats, with which some sandboxes emulate this file.
            with contextlib.suppress(ValueError, IndexError):
                meminfo[key] = int(value.split()[0]) * 1024
    if "MemTotal" in meminfo:
        return meminfo["MemTotal"], meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    try:
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    # On Linux, psutil reads the same file, and raises many types of errors if it is missing or malformed.
    except Exception:
        pages = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        total, available = (max(0, number) * os.sysconf("SC_PAGE_SIZE") for number in pages)
        return total, available


def _number(read: Reader, path: str, key: str = "") -> int:
    try:
        text = read(path)
        return int(dict(line.split() for line in text.splitlines()).get(key, 0) if key else text)
    except (OSError, ValueError):
        return 0


def cgroup_folders(read: Reader, controller: str) -> Iterator[tuple[int, str]]:
    """Yield the version and the folder of each cgroup that contains this process; the folder may be missing."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, roots = 2, (_CGROUP, f"{_CGROUP}/unified")
        elif controller in controllers.split(","):
            version, roots = 1, (f"{_CGROUP}/{controllers}", f"{_CGROUP}/{controller}")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for root in dict.fromkeys(roots):
            for depth in range(len(parts), -1, -1):
                yield version, "/".join([root, *parts[:depth]])


def allowed_cores() -> set[int]:
    """Return the indices of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True, repr=False)
class DiskReport(Report):
    """A disk or tmpfs.

    Attributes:
        folder: a folder on the disk.
        fstype: file system type.
        total_bytes: size of the disk.
        free_bytes: free space for this user, according to the file system.
        budget_bytes: bytes that can be written; on tmpfs, limited by the available RAM.
    """

    folder: str
    fstype: str
    total_bytes: int
    free_bytes: int
    budget_bytes: int

    def _summary(self) -> str:
        free, total = format_bytes(self.free_bytes), format_bytes(self.total_bytes)
        is_less = self.budget_bytes < self.free_bytes
        budget = f", {format_bytes(self.budget_bytes)} of it within the RAM available" if is_less else ""
        return f"{self.folder}: {free} of {total} free{budget} ({self.fstype})"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("budget", format_bytes(self.budget_bytes)),
            ("free", format_bytes(self.free_bytes)),
            ("total", format_bytes(self.total_bytes)),
        ]


def can_hang(path: str, table: Iterable[Mount]) -> bool:
    """Return whether an absolute path leads to a remote mount, directly or by symlinks, so that access can hang.

    Only symlinks on this machine are read. A remote root, as in a sandbox or on a diskless machine, is ignored, since
    Python itself runs from it.
    """
    points = _remote_points(table)
    return _is_below(_resolved(path, points), points)


def resolved(path: str, table: Iterable[Mount]) -> str:
    """Resolve the symlinks of an absolute path, except those on a remote mount, which are not read."""
    return _resolved(path, _remote_points(table))


def _remote_points(table: Iterable[Mount]) -> tuple[str, ...]:
    return tuple(mount.point for mount in table if mount.is_remote and mount.point != "/")


def _resolved(path: str, remote: tuple[str, ...]) -> str:
    parts = path.split("/")[::-1]
    reached, links = "/", 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            reached = os.path.dirname(reached)
            continue
        at = os.path.join(reached, part)
        if _is_below(at, remote) or links > _MOST_LINKS:
            return os.path.join(at, *parts[::-1])
        try:
            target = os.readlink(at)
        except OSError:
            reached = at
            continue
        links += 1
        parts += target.split("/")[::-1]
        reached = "/" if target.startswith("/") else reached
    return reached


def disk(folder: str, table: list[Mount], available_bytes: int) -> DiskReport | None:
    """Return the report of a folder's disk; None if the folder is on a remote mount or cannot be accessed.

    Args:
        folder: absolute path without symlinks.
        table: the mounts.
        available_bytes: RAM that can still be allocated.
    """
    if can_hang(folder, table):
        return None
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    holding = mount_holding(folder, table)
    free = stats.f_bavail * stats.f_frsize
    fstype = "unknown" if holding is None else holding.fstype
    budget = min(free, available_bytes) if fstype == "tmpfs" else free
    return DiskReport(folder, fstype, stats.f_blocks * stats.f_frsize, free, budget)


def disks(table: list[Mount], available_bytes: int) -> tuple[DiskReport, ...]:
    """Return the disks of the usual data folders and of the working folder, each once and without tmpfs."""
    by_device: dict[int, str] = {}
    for folder in (*_DISK_FOLDERS, *_working_folder()):
        if not can_hang(folder, table) and os.path.isdir(folder):
            by_device[os.stat(folder).st_dev] = folder
    found = (disk(folder, table, available_bytes) for folder in by_device.values())
    return tuple(one for one in found if one is not None and one.fstype != "tmpfs")


def tmpfs(table: list[Mount], available_bytes: int) -> tuple[DiskReport, ...]:
    """Return every tmpfs that this user can write to, except in system folders other than `_FOR_USERS`."""
    points = dict.fromkeys(
        mount.point for mount in table if mount.fstype == "tmpfs" and not mount.readonly and not _is_system(mount.point)
    )
    usable = (point for point in points if not can_hang(point, table) and os.access(point, os.W_OK | os.X_OK))
    found = (disk(point, table, available_bytes) for point in usable)
    return tuple(one for one in found if one is not None and one.fstype == "tmpfs")


def _is_system(point: str) -> bool:
    return _is_below(point, _SYSTEM_FOLDERS) and not _is_below(point, _FOR_USERS)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def is_tmpfs(path: Path) -> bool:
    """Return whether `path`, which need not exist, is on tmpfs; symlinks are resolved unless that can hang."""
    table = mounts()
    text = os.path.abspath(path)
    holding = mount_holding(text if can_hang(text, table) else os.path.realpath(path), table)
    return holding is not None and holding.fstype == "tmpfs"


def _working_folder() -> tuple[str, ...]:
    try:
        return (os.getcwd(),)
    except OSError:
        # The working folder was removed, for example by a notebook cell, or its mount no longer exists.
        return ()

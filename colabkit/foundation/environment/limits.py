"""How much of the machine this process may use: CPUs by affinity and quota, RAM by the limits above it.

In a container `/proc/meminfo` and `os.cpu_count()` speak of the host; what counts is the least of those and the cgroup
limits. All are functions of a file reader, so each branch can be tested anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from colabkit.foundation.mount_table import Reader, read_file
from colabkit.foundation.reports import Report
from colabkit.foundation.units import format_bytes

_CGROUP = "/sys/fs/cgroup"
_RECLAIMABLE = {
    2: ("inactive_file", "active_file", "slab_reclaimable"),
    1: ("total_inactive_file", "total_active_file"),
}
"""What the kernel gives back when memory is short, by cgroup version; tmpfs is in none of these lists."""


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """RAM that this process may use.

    Attributes:
        total_bytes: the least of the machine's RAM and the cgroup limits above this process.
        available_bytes: what can still be taken; reclaimable page cache counts as free.
        limited_by: `"machine"` or the cgroup that sets the limit.
    """

    total_bytes: int
    available_bytes: int
    limited_by: str

    def _summary(self) -> str:
        return f"{format_bytes(self.available_bytes)} of {format_bytes(self.total_bytes)} RAM available"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("available", format_bytes(self.available_bytes)), ("limited by", self.limited_by)]


def allowed_cpus(read: Reader, affinity: int) -> float:
    """Return the CPUs this process may use: the least of its affinity and the cgroup quotas above it."""
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
    """Return the CPUs this process may use, as `runtime()` reports them."""
    return allowed_cpus(read_file, _affinity())


def memory_limits(read: Reader) -> MemoryReport:
    """Return RAM total and available: the least of the machine and of each cgroup above this process.

    tmpfs counts as used RAM; page cache that the kernel can drop does not.
    """
    meminfo = {}
    try:
        for line in read("/proc/meminfo").splitlines():
            key, _, value = line.partition(":")
            meminfo[key] = int(value.split()[0]) * 1024
    except OSError:
        import psutil

        memory = psutil.virtual_memory()
        meminfo = {"MemTotal": memory.total, "MemAvailable": memory.available}
    total = meminfo["MemTotal"]
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    limited_by = "machine"
    for version, folder in cgroup_folders(read, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit = int(read(f"{folder}/{names[0]}"))  # "max" is no number: no limit here
        except (OSError, ValueError):
            continue
        if limit < total:
            total, limited_by = limit, folder
        used = _number(read, f"{folder}/{names[1]}")
        reclaimable = sum(_number(read, f"{folder}/memory.stat", key) for key in _RECLAIMABLE[version])
        available = min(available, max(0, limit - max(0, used - reclaimable)))
    return MemoryReport(total, available, limited_by)


def _number(read: Reader, path: str, key: str = "") -> int:
    """Return a file's number, or the number after `key` in it; 0 where sandboxes leave the file out."""
    try:
        text = read(path)
        return int(dict(line.split() for line in text.splitlines()).get(key, 0) if key else text)
    except (OSError, ValueError):
        return 0


def cgroup_folders(read: Reader, controller: str) -> Iterator[tuple[int, str]]:
    """Yield (version, folder) of the cgroups above this process, leaf first."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
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


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

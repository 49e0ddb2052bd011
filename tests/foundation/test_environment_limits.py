"""CPUs and RAM of simulated machines: quotas, limits and reclaimable memory."""

from __future__ import annotations

import errno
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from colabkit.foundation.environment.limits import allowed_cpus, memory_limits

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: {4 << 20} kB\nMemAvailable: {32 << 20} kB\nHugePages_Total: 0\n"
SANDBOX_MEMINFO = f"""\
MemTotal:        {13 << 20} kB
MemFree:         {10 << 20} kB
MemAvailable:    {12 << 20} kB
Buffers:                0 kB
Cached:            524288 kB
SwapTotal:              0 kB
Active(anon):      262144 kB
Shmem:               4096 kB
"""
V2 = "/sys/fs/cgroup"
V1_MEMORY = f"{V2}/memory"


def reader(files: dict[str, str]):
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return files[path]

    return read


def v2_memory(folder: str, limit: int | str, used: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}\nshmem {used}\n",
    }


def v1_memory(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


CPUS = (
    ({}, 8),
    ({"/proc/self/cgroup": "0::/\n"}, 8),
    ({"/proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
    ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "200000 100000\n"}, 2),
    ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "50000 100000\n"}, 0.5),
    ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "1600000 100000\n"}, 8),
    ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "garbage\n"}, 8),
    ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "100000 0\n"}, 8),
    (
        {
            "/proc/self/cgroup": "0::/p/leaf\n",
            f"{V2}/p/leaf/cpu.max": "400000 100000\n",
            f"{V2}/p/cpu.max": "150000 100000\n",
            f"{V2}/cpu.max": "max 100000\n",
        },
        1.5,
    ),
    ({"/proc/self/cgroup": "0::/gone/here\n", f"{V2}/cpu.max": "300000 100000\n"}, 3),
    (
        {
            "/proc/self/cgroup": "5:cpuacct,cpu:/docker/x\n4:memory:/docker/x\n",
            f"{V2}/cpuacct,cpu/cpu.cfs_quota_us": "250000\n",
            f"{V2}/cpuacct,cpu/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    (
        {
            "/proc/self/cgroup": "5:cpu,cpuacct:/x\n",
            f"{V2}/cpu/x/cpu.cfs_quota_us": "-1\n",
            f"{V2}/cpu/x/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    (
        {
            "/proc/self/cgroup": "5:cpu:/x\n0::/x\n",
            f"{V2}/cpu/x/cpu.cfs_quota_us": "600000\n",
            f"{V2}/cpu/x/cpu.cfs_period_us": "100000\n",
            f"{V2}/unified/x/cpu.max": "400000 100000\n",
        },
        4,
    ),
)


def test_cpus_are_the_minimum_of_affinity_and_all_quotas():
    for files, expected in CPUS:
        assert allowed_cpus(reader(files), 8) == expected


SANDBOX = {
    "/proc/meminfo": SANDBOX_MEMINFO,
    "/proc/self/cgroup": "2:memory:/\n1:cpu:/\n",
    f"{V1_MEMORY}/memory.limit_in_bytes": "9223372036854771712\n",
    f"{V1_MEMORY}/memory.usage_in_bytes": f"{GIB}\n",
}


UNLIMITED = (
    ({"/proc/meminfo": MEMINFO}, 64, 32),
    (SANDBOX, 13, 12),
    # Without an estimate of the available memory, the free memory is used.
    ({"/proc/meminfo": f"MemTotal: {8 << 20} kB\nMemFree: {3 << 20} kB\n"}, 8, 3),
)


def test_memory_without_limits_is_that_of_the_machine():
    for files, total, available in UNLIMITED:
        report = memory_limits(reader(files))
        assert (report.total_bytes, report.available_bytes) == (total * GIB, available * GIB)
        assert report.limited_by == "machine"


def test_memory_is_read_from_psutil_without_meminfo(monkeypatch):
    fake = ModuleType("psutil")
    fake.virtual_memory = lambda: SimpleNamespace(total=5 * GIB, available=2 * GIB)
    monkeypatch.setitem(sys.modules, "psutil", fake)
    report = memory_limits(reader({}))
    assert (report.total_bytes, report.available_bytes) == (5 * GIB, 2 * GIB)


ODD_TABLES = ("", "MemTotal:", "MemTotal: many kB\n", "\0\0\n", "no colons at all")


@pytest.mark.parametrize("meminfo", [None, *ODD_TABLES])
def test_the_memory_is_known_although_meminfo_is_missing_or_odd(monkeypatch, meminfo):
    fake = ModuleType("psutil")

    def fail() -> None:
        raise KeyError("MemTotal:")

    fake.virtual_memory = fail
    monkeypatch.setitem(sys.modules, "psutil", fake)
    files = {} if meminfo is None else {"/proc/meminfo": meminfo}
    report = memory_limits(reader({**files, "/proc/self/cgroup": "odd\n\n0::\n"}))
    page = os.sysconf("SC_PAGE_SIZE")
    assert report.total_bytes == os.sysconf("SC_PHYS_PAGES") * page
    assert 0 < report.available_bytes < report.total_bytes


def test_odd_lines_of_meminfo_are_ignored():
    text = f"odd\nMemTotal: {8 << 20} kB\nMemFree:\nMemAvailable: {3 << 20} kB\nHugePages_Total: ?\n"
    report = memory_limits(reader({"/proc/meminfo": text}))
    assert (report.total_bytes, report.available_bytes) == (8 * GIB, 3 * GIB)


MEMORY = (
    ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB), 12, 7, f"{V2}/a"),
    ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, inactive=2 * GIB), 12, 9, f"{V2}/a"),
    ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 9 * GIB, 2 * GIB, 4 * GIB), 12, 9, f"{V2}/a"),
    ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, 4 * GIB, 4 * GIB), 12, 12, f"{V2}/a"),
    ("0::/a\n", v2_memory(f"{V2}/a", "max", 5 * GIB), 64, 32, "machine"),
    ("0::/a\n", v2_memory(f"{V2}/a", 40 * GIB, GIB), 40, 32, f"{V2}/a"),
    ("0::/a\n", v2_memory(f"{V2}/a", 100 * GIB, 90 * GIB), 64, 10, "machine"),
    ("0::/a\n", v2_memory(f"{V2}/a", 2 * GIB, 3 * GIB), 2, 0, f"{V2}/a"),
    ("0::/gone\n", v2_memory(V2, 6 * GIB, GIB), 6, 5, V2),
    ("4:memory:/docker/x\n", v1_memory(V1_MEMORY, 6 * GIB, 2 * GIB, inactive=GIB), 6, 5, V1_MEMORY),
    ("4:memory:/x\n", v1_memory(f"{V1_MEMORY}/x", 2**63 - 4096, GIB), 64, 32, "machine"),
)


def test_memory_is_the_minimum_of_machine_and_cgroup():
    for cgroup, files, total, available, limited_by in MEMORY:
        report = memory_limits(reader({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": cgroup, **files}))
        assert (report.total_bytes / GIB, report.available_bytes / GIB) == (total, available)
        assert report.limited_by == limited_by


def test_a_tighter_parent_cgroup_counts_including_its_other_children():
    files = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/pod/leaf\n", **v2_memory(V2, "max", 30 * GIB)}
    for leaf, parent, expected in (
        ((20 * GIB, GIB), (10 * GIB, 8 * GIB), (10 * GIB, 2 * GIB, f"{V2}/pod")),
        ((8 * GIB, GIB), (10 * GIB, 9 * GIB), (8 * GIB, GIB, f"{V2}/pod/leaf")),
    ):
        cgroups = {**v2_memory(f"{V2}/pod/leaf", *leaf), **v2_memory(f"{V2}/pod", *parent)}
        report = memory_limits(reader({**files, **cgroups}))
        assert (report.total_bytes, report.available_bytes, report.limited_by) == expected


@pytest.mark.parametrize("missing", ["memory.stat", "memory.current"])
def test_a_limit_counts_even_if_other_files_of_the_cgroup_are_missing(missing):
    files = v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, inactive=GIB)
    del files[f"{V2}/a/{missing}"]
    report = memory_limits(reader({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/a\n", **files}))
    assert report.total_bytes == 12 * GIB
    assert report.available_bytes == {"memory.stat": 7 * GIB, "memory.current": 12 * GIB}[missing]

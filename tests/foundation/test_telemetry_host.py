"""CPUs, RAM, storage, network and stalls of simulated machines: containers, sandboxes, hosts that report little."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from colabkit.foundation.telemetry import totals
from colabkit.foundation.telemetry.host import Host, HostSnapshot

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: {4 << 20} kB\nMemAvailable: {32 << 20} kB\nShmem: 2048 kB\n"
SANDBOX_MEMINFO = "MemTotal: 13000000 kB\nMemFree: 9000000 kB\nMemAvailable: 9000000 kB\nBuffers: 0 kB\nCached: 1 kB\n"
V2 = "/sys/fs/cgroup"
RATES = [name for name in HostSnapshot.__slots__ if name.endswith(("_rate", "_per_s"))]

Core = namedtuple("Core", "user nice system idle iowait irq softirq steal guest guest_nice")  # noqa: PYI024
Times = namedtuple("Times", "user system children_user children_system")  # noqa: PYI024


def core(busy: float, idle: float) -> Core:
    return Core(busy, 0, 0, idle / 2, idle / 2, 0, 0, 0, busy / 2, 0)


@dataclass(eq=False)
class FakeProcess:
    """A fake `psutil.Process`; if `fails` is set, its methods raise it."""

    cpu: tuple[float, float] = (0.0, 0.0)
    read: int = 0
    asked: int = 0
    family: list[FakeProcess] = field(default_factory=list)
    fails: Exception | None = None
    looks: int = 0
    pid: int = field(default_factory=os.getpid)

    def _check(self) -> None:
        if self.fails is not None:
            raise self.fails

    def cpu_times(self) -> Times:
        self._check()
        return Times(self.cpu[0], 0.0, self.cpu[1], 0.0)

    def io_counters(self) -> SimpleNamespace:
        self._check()
        return SimpleNamespace(read_bytes=self.read, read_chars=self.asked)

    def memory_info(self) -> SimpleNamespace:
        self._check()
        return SimpleNamespace(rss=GIB)

    def children(self, recursive: bool) -> list[FakeProcess]:
        assert recursive
        self._check()
        self.looks += 1
        return list(self.family)


class Machine:
    """A machine whose values a test sets, with a stopped clock."""

    def __init__(self, files: dict[str, str] | None = None) -> None:
        self.files = {"/proc/meminfo": MEMINFO, **(files or {})}
        self.now = 100.0
        self.cores: list[Core] | Exception = [core(0, 0) for _ in range(4)]
        self.disk: Any = SimpleNamespace(read_bytes=0, write_bytes=0)
        self.network: Any = {name: SimpleNamespace(bytes_recv=0, bytes_sent=0) for name in ("lo", "eth0")}
        self.allowed = {0, 1, 2, 3}
        self.process = FakeProcess()
        self.slow_looks = 0
        self.host = Host(
            read=self._read,
            system=SimpleNamespace(
                cpu_times=lambda percpu: self._told(self.cores),
                disk_io_counters=lambda nowrap: self._told(self.disk),
                net_io_counters=lambda pernic, nowrap: self._told(self.network),
            ),
            process=self.process,
            clock=lambda: self.now,
            affinity=self._affinity,
            statvfs=self._statvfs,
            environ={"COLABKIT_LOCAL": os.getcwd()},
        )

    def after(self, seconds: float, **changes: Any) -> HostSnapshot:
        self.now += seconds
        for name, value in changes.items():
            setattr(self, name, value)
        return self.host.snapshot()

    def _read(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return self.files[path]

    def _told(self, value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    def _affinity(self) -> set[int]:
        self.slow_looks += 1
        return self.allowed

    def _statvfs(self, folder: str) -> SimpleNamespace:
        if folder != "/dev/shm":
            raise FileNotFoundError
        return SimpleNamespace(f_bavail=1, f_blocks=2, f_frsize=GIB)


def test_a_first_snapshot_knows_no_rates_and_a_second_does():
    pressure = {f"/proc/pressure/{name}": "some avg10=0.00 total=0\n" for name in ("cpu", "io", "memory")}
    quota = {f"{V2}/cpu.max": "max 100000\n", f"{V2}/cpu.stat": "nr_throttled 0\nthrottled_usec 0\n"}
    machine = Machine({**pressure, **quota, "/proc/self/cgroup": "0::/\n"})
    first = machine.host.snapshot()
    assert [getattr(first, name) for name in RATES] == [None] * len(RATES)
    second = machine.after(1, cores=[core(0.5, 0.5)] * 4)
    assert None not in [getattr(second, name) for name in RATES]
    assert (first.at_s, second.at_s) == (100, 101)


def test_rates_are_unchanged_while_no_time_passes():
    machine = Machine()
    first, second = machine.host.snapshot(), machine.host.snapshot()
    assert [getattr(second, name) for name in RATES] == [getattr(first, name) for name in RATES]


def test_only_allowed_cores_count():
    machine = Machine()
    machine.allowed = {1, 3}
    machine.host.snapshot()
    found = machine.after(10, cores=[core(10, 0), core(1, 9), core(10, 0), core(4, 6)])
    assert found.cpus == 2
    assert found.cpu_rate == pytest.approx(0.25)
    assert found.busiest_core_rate == pytest.approx(0.4)


QUOTA_V2 = {"/proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "200000 100000\n"}
QUOTA_V1 = {
    "/proc/self/cgroup": "3:cpu,cpuacct:/docker\n",
    f"{V2}/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    f"{V2}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "usage", "before", "after", "cpus"),
    [
        (QUOTA_V2, "cpu.stat", "usage_usec 5000000\nuser_usec 1\n", "usage_usec 6000000\nuser_usec 1\n", 2),
        (QUOTA_V1, "cpu,cpuacct/cpuacct.usage", "1000000000\n", "1250000000\n", 0.5),
    ],
)
def test_under_a_quota_only_the_usage_of_the_own_cgroup_counts(files, usage, before, after, cpus):
    machine = Machine({**files, f"{V2}/{usage}": before})
    machine.host.snapshot()
    machine.files[f"{V2}/{usage}"] = after
    found = machine.after(1, cores=[core(1, 0)] * 4)
    assert (found.cpus, found.cpu_rate, found.busiest_core_rate) == (cpus, pytest.approx(0.5), 1)


@pytest.mark.parametrize(
    ("cgroup", "stat", "period", "unit"),
    [
        ("0::/\n", "cpu.stat", ("cpu.max", "200000 100000\n"), "throttled_usec {}000000"),
        ("1:cpu:/\n", "cpu/cpu.stat", ("cpu/cpu.cfs_period_us", "100000\n"), "throttled_time {}000000000"),
    ],
)
@pytest.mark.parametrize(("waited_s", "periods", "share"), [(1, 12, 0.5), (40, 12, 0.6), (40, 20, 1.0)])
def test_the_time_without_a_cpu_quota_is_counted_once_for_all_cores(
    cgroup: str, stat: str, period: tuple[str, str], unit: str, waited_s: int, periods: int, share: float
) -> None:
    machine = Machine({"/proc/self/cgroup": cgroup, f"{V2}/{period[0]}": period[1]})
    machine.files[f"{V2}/{stat}"] = "nr_throttled 3\n" + unit.format(1)
    machine.host.snapshot()
    machine.files[f"{V2}/{stat}"] = f"nr_throttled {3 + periods}\n" + unit.format(1 + waited_s)
    assert machine.after(2).throttled_rate == pytest.approx(share)


def test_cpu_time_that_a_hypervisor_takes_is_counted():
    machine = Machine()
    machine.host.snapshot()
    assert machine.after(1, cores=[core(0.5, 0.3)._replace(steal=0.2)] * 4).steal_rate == pytest.approx(0.2)


def test_the_busiest_other_process_is_named_only_while_others_use_the_cpu():
    machine = Machine()
    machine.host.snapshot()
    assert machine.after(1, cores=[core(0.1, 0.9)] * 4).other_process is None
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        machine.files |= {f"/proc/{busy.pid}/comm": "python\n", f"/proc/{busy.pid}/cmdline": "python\0busy.py\0"}
        found = None
        for ticks in (100, 200, 300):
            machine.files[f"/proc/{busy.pid}/stat"] = f"{busy.pid} (python) R {' '.join(['0'] * 10)} {ticks} 0"
            found = machine.after(1, cores=[core(ticks / 100, 0)] * 4).other_process
    finally:
        busy.kill()
        busy.wait()
    assert found == (f"python busy.py, PID {busy.pid}", pytest.approx(100 / os.sysconf("SC_CLK_TCK")))


def test_a_quota_without_usage_figures_falls_back_to_the_cores():
    machine = Machine(QUOTA_V2)
    machine.host.snapshot()
    assert machine.after(1, cores=[core(0.25, 0.75)] * 4).cpu_rate == pytest.approx(0.5)


@pytest.mark.parametrize("cores", [[core(0, 0)] * 4, [core(9, 9)] * 3, [], NotImplementedError(), OSError()])
def test_cores_without_figures_are_unknown_instead_of_idle(cores):
    machine = Machine()
    machine.host.snapshot()
    found = machine.after(1, cores=cores)
    assert (found.cpu_rate, found.busiest_core_rate) == (None, None)


def test_offline_cores_do_not_change_the_numbers_of_the_others():
    machine = Machine()
    machine.allowed, machine.cores = {2, 3}, [core(0, 0)] * 3
    machine.host.snapshot()
    assert machine.after(1, cores=[core(1, 0)] * 3).cpu_rate is None


def test_own_cpu_covers_the_process_its_children_and_ended_children():
    machine = Machine()
    child = FakeProcess(cpu=(50.0, 0.0))
    machine.process.family = [child]
    machine.host.snapshot()
    machine.process.cpu, child.cpu = (1.0, 0.0), (51.0, 1.0)
    assert machine.after(1).own_cpu_rate == pytest.approx(3 / 4)
    # After half a CPU second, the child has ended and its parent has waited for it.
    child.fails = psutil.NoSuchProcess(1)
    machine.process.cpu = (1.0, 52.5)
    assert machine.after(1).own_cpu_rate == pytest.approx(0.5 / 4)


def test_a_child_that_is_found_later_causes_no_jump():
    machine = Machine()
    machine.host.snapshot()
    machine.process.family = [FakeProcess(cpu=(1000.0, 0.0), read=10**9, asked=10**9)]
    found = machine.after(6)
    assert (found.own_cpu_rate, found.storage_read_bytes_per_s, found.asked_read_bytes_per_s) == (0, 0, 0)
    machine.process.family[0].read += 500
    assert machine.after(1).storage_read_bytes_per_s == 500


def test_a_server_in_its_own_session_does_not_count_as_own(monkeypatch):
    machine = Machine()
    worker = FakeProcess(cpu=(10.0, 0.0))
    server = FakeProcess(cpu=(500.0, 0.0), read=10**9, asked=10**9, pid=8)
    monkeypatch.setattr(totals.os, "getsid", lambda pid: 8 if pid == 8 else 7)
    machine.process.family = [worker, server]
    machine.host.snapshot()
    worker.cpu, server.cpu, server.read = (11.0, 0.0), (504.0, 0.0), 2 * 10**9
    found = machine.after(1)
    assert (found.own_cpu_rate, found.children_cpu_rate, found.storage_read_bytes_per_s) == (0.25, 0.25, 0)
    server.cpu = (505.0, 0.0)
    assert machine.after(1).children_cpu_rate == 0
    server.fails = psutil.ZombieProcess(8)
    assert machine.after(1).children_cpu_rate == 0
    server.fails = psutil.NoSuchProcess(8)
    machine.process.cpu, machine.process.read, machine.process.asked = (0.0, 505.0), 2 * 10**9, 10**9
    ended = machine.after(1)
    assert (ended.own_cpu_rate, ended.children_cpu_rate, ended.storage_read_bytes_per_s) == (0, 0, 0)


def test_a_zombie_child_causes_no_negative_rate():
    machine = Machine()
    machine.process.family = [FakeProcess(cpu=(5.0, 0.0))]
    machine.host.snapshot()
    machine.process.family[0].cpu = (6.0, 0.0)
    machine.after(1)
    machine.process.family[0].fails = psutil.NoSuchProcess(1)
    assert machine.after(1).own_cpu_rate is None
    assert machine.after(1).own_cpu_rate == 0


def test_children_are_searched_every_five_seconds():
    machine = Machine()
    for _ in range(20):
        machine.after(1)
    assert machine.process.looks == 4


def test_reads_count_the_process_and_its_children():
    machine = Machine()
    machine.process.family = [FakeProcess(read=7)]
    machine.host.snapshot()
    machine.process.read, machine.process.asked, machine.process.family[0].read = 100, 1000, 107
    found = machine.after(2)
    assert (found.storage_read_bytes_per_s, found.asked_read_bytes_per_s) == (100, 500)


@pytest.mark.parametrize("error", [psutil.AccessDenied(), OSError(), psutil.ZombieProcess(1)])
def test_a_process_without_permission_is_unknown_instead_of_idle(error):
    machine = Machine()
    machine.process.fails = error
    machine.host.snapshot()
    found = machine.after(1)
    assert (found.own_cpu_rate, found.storage_read_bytes_per_s, found.asked_read_bytes_per_s) == (None, None, None)
    assert found.own_ram_bytes is None


def test_disks_and_interfaces_are_counted_without_loopback_or_unknown():
    machine = Machine()
    machine.host.snapshot()
    network = {
        "lo": SimpleNamespace(bytes_recv=10**9, bytes_sent=10**9),
        "eth0": SimpleNamespace(bytes_recv=300, bytes_sent=40),
    }
    found = machine.after(2, disk=SimpleNamespace(read_bytes=50, write_bytes=10), network=network)
    assert (found.disk_read_bytes_per_s, found.disk_written_bytes_per_s) == (25, 5)
    assert (found.network_bytes_per_s, found.network_sent_bytes_per_s) == (150, 20)
    again = SimpleNamespace(read_bytes=10, write_bytes=10)
    assert machine.after(1, disk=again).disk_read_bytes_per_s is None, "it began again"
    assert machine.after(1, disk=SimpleNamespace(read_bytes=30, write_bytes=10)).disk_read_bytes_per_s == 20
    for disk, interfaces in ((NotImplementedError(), OSError()), (None, {"lo": network["lo"]})):
        found = machine.after(1, disk=disk, network=interfaces)
        assert (found.disk_read_bytes_per_s, found.disk_written_bytes_per_s) == (None, None)
        assert (found.network_bytes_per_s, found.network_sent_bytes_per_s) == (None, None)


@pytest.mark.parametrize(
    ("files", "ram", "tmpfs"),
    [
        ({}, (32 * GIB, 64 * GIB), 2 << 20),
        ({"/proc/meminfo": SANDBOX_MEMINFO}, (4_000_000 * 1024, 13_000_000 * 1024), None),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": f"{8 * GIB}\n",
                f"{V2}/memory.current": f"{3 * GIB}\n",
                f"{V2}/memory.stat": f"anon 1\nshmem {GIB}\ninactive_file {GIB}\n",
            },
            (2 * GIB, 8 * GIB),
            GIB,
        ),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "max\n",
                f"{V2}/memory.current": "1\n",
                f"{V2}/memory.stat": f"shmem {GIB}\n",
            },
            (32 * GIB, 64 * GIB),
            2 << 20,
        ),
        (
            {
                "/proc/self/cgroup": "4:memory:/\n",
                f"{V2}/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                f"{V2}/memory/memory.usage_in_bytes": f"{GIB}\n",
                f"{V2}/memory/memory.stat": "shmem 1\ntotal_shmem 5\n",
            },
            (GIB, 8 * GIB),
            5,
        ),
        (
            {
                "/proc/self/cgroup": "4:memory:/\n",
                f"{V2}/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                f"{V2}/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            (GIB, 8 * GIB),
            None,
        ),
    ],
    ids=["machine", "sandbox", "version 2", "no limit", "version 1", "version 1, no statistics"],
)
def test_ram_and_tmpfs_follow_the_tightest_limit(files, ram, tmpfs):
    found = Machine(files).host.snapshot()
    assert (found.ram_used_bytes, found.ram_total_bytes) == ram
    assert found.tmpfs_bytes == tmpfs
    assert found.own_ram_bytes == GIB


def stalls(microseconds: int) -> str:
    return f"some avg10=99.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull avg10=0.00 total=1\n"


def test_stalls_are_exact_and_those_of_the_own_cgroup_if_available():
    own = f"{V2}/a/io.pressure"
    machine = Machine({"/proc/self/cgroup": "0::/a\n", own: stalls(0), "/proc/pressure/io": stalls(0)})
    machine.files["/proc/pressure/cpu"] = stalls(100)
    machine.host.snapshot()
    machine.files |= {own: stalls(500_000), "/proc/pressure/io": stalls(2_000_000), "/proc/pressure/cpu": stalls(200)}
    found = machine.after(2)
    assert found.io_stall_rate == pytest.approx(0.25)
    assert found.cpu_stall_rate == pytest.approx(0.00005)
    assert found.memory_stall_rate is None


@pytest.mark.parametrize("text", ["", "garbage", "some avg10=0.00\n", "some total=x\n"])
def test_stalls_that_cannot_be_parsed_are_unknown(text):
    machine = Machine({"/proc/pressure/io": text})
    machine.host.snapshot()
    assert machine.after(1).io_stall_rate is None


def test_free_disk_and_shared_memory_are_reported_and_the_disk_is_checked_rarely():
    machine = Machine()
    found = [machine.after(1) for _ in range(20)]
    assert all(0 < one.disk_free_bytes <= one.disk_total_bytes for one in found)
    assert {(one.shm_free_bytes, one.shm_total_bytes) for one in found} == {(GIB, 2 * GIB)}
    assert machine.slow_looks == 2


def test_a_local_folder_behind_a_mount_that_can_hang_is_not_accessed():
    machine = Machine({"/proc/mounts": f"server {os.getcwd()} fuse.sshfs rw 0 0\n"})
    found = machine.host.snapshot()
    assert (found.disk_free_bytes, found.disk_total_bytes) == (None, None)

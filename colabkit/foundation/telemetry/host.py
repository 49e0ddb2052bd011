"""CPU, RAM, storage, network and stall statistics of this machine, within the limits of this process.

In a container, the files in `/proc` describe the host. CPU statistics therefore cover the allowed cores, or the cgroup
if its quota is lower. RAM is relative to the lowest limit. Stall statistics are those of the cgroup if available.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from colabkit.foundation.environment.limits import (
    allowed_cores,
    allowed_cpus,
    can_hang,
    cgroup_folders,
    disk,
    memory_limits,
)
from colabkit.foundation.environment.places import local_root
from colabkit.foundation.mount_table import Reader, mounts, read_file
from colabkit.foundation.telemetry.gpus import Gpus, GpuSnapshot
from colabkit.foundation.telemetry.processes import BusyProcess, OtherProcesses
from colabkit.foundation.telemetry.stacks import StackSampler, prompt_gil
from colabkit.foundation.telemetry.threads import ProcessThreads, ThreadsSnapshot, training_thread
from colabkit.foundation.telemetry.totals import Family, Rate

# Interval for values that change slowly: disk space, affinity and CPU quota.
_SLOW_S = 10.0
# Share of the CPUs that other processes must use before their names are looked up.
_FOREIGN = 0.2
# Above this utilization of a GPU, nothing on the host delays the step.
_BUSY = 0.7


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """A snapshot of the machine, with rates since the previous snapshot.

    Unknown values are None, never 0. In the first snapshot, all rates are None. Shares are in [0, 1].

    Attributes:
        at_s: time of the snapshot, by `time.monotonic`.
        cpus: number of CPUs that this process may use, which can be fractional.
        cpu_rate: share of these CPUs used by all processes; under a CPU quota, by those of this process's cgroup.
        own_cpu_rate: share of these CPUs used by this process and its children.
        children_cpu_rate: share of these CPUs used by the children.
        busiest_core_rate: utilization of the busiest allowed core.
        ram_used_bytes: RAM that is not available, including tmpfs.
        ram_total_bytes: the minimum of the machine's RAM and the memory limits of this process's cgroups.
        tmpfs_bytes: RAM used by files in tmpfs and by shared memory, which the kernel counts together.
        own_ram_bytes: resident memory of this process, including shared pages and memory-mapped files.
        storage_read_bytes_per_s: bytes per second that this process and its children read from storage, without
            page-cache hits; reads through FUSE may be missing.
        asked_read_bytes_per_s: bytes per second that this process and its children requested through read calls,
            including page-cache hits and pipes; reads from memory maps are missing.
        disk_read_bytes_per_s: bytes per second read by all disks of the host; stacked devices such as LVM volumes count
            twice.
        disk_written_bytes_per_s: bytes per second written by all disks of the host, counted in the same way.
        network_bytes_per_s: bytes per second received by all network interfaces except loopback; on the host of a
            container, bridged traffic counts twice.
        network_sent_bytes_per_s: bytes per second sent by these interfaces.
        disk_free_bytes: free space on the disk that holds local copies.
        disk_total_bytes: size of that disk.
        shm_free_bytes: free space in `/dev/shm`.
        shm_total_bytes: size of `/dev/shm`.
        cpu_stall_rate: share of the time in which some task waited for a CPU, from the kernel's pressure counters for
            this process's cgroup or, if it has none, for the machine.
        io_stall_rate: share of the time in which some task waited for storage, from the same counters.
        memory_stall_rate: share of the time in which some task waited for memory, from the same counters.
        steal_rate: share of the allowed CPUs' time that a hypervisor gave to other machines.
        throttled_rate: share of the time in which this process's cgroup had used up its CPU quota.
        other_process: the busiest process that is neither this one nor a child of it; None if unknown, or if other
            processes use little.
        threads: the threads of this process.
        gpus: the GPUs that this process may use; empty without a driver.
    """

    at_s: float = 0.0
    cpus: float = 1.0
    cpu_rate: float | None = None
    own_cpu_rate: float | None = None
    children_cpu_rate: float | None = None
    busiest_core_rate: float | None = None
    ram_used_bytes: int = 0
    ram_total_bytes: int = 0
    tmpfs_bytes: int | None = None
    own_ram_bytes: int | None = None
    storage_read_bytes_per_s: float | None = None
    asked_read_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_written_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    cpu_stall_rate: float | None = None
    io_stall_rate: float | None = None
    memory_stall_rate: float | None = None
    steal_rate: float | None = None
    throttled_rate: float | None = None
    other_process: BusyProcess | None = None
    threads: ThreadsSnapshot | None = None
    gpus: tuple[GpuSnapshot, ...] = ()


class Host:
    """A source of snapshots of the machine, in which values that cannot be read are None.

    Args:
        read: reads a small text file.
        system: provides `cpu_times`, `net_io_counters` and `disk_io_counters` like psutil. The counters are read
            with `nowrap=False`, since psutil's handling of counter overflow takes a lock that may be held after a fork.
        process: this process, as a `psutil.Process`.
        clock: returns the current time in seconds.
        affinity: returns the indices of the allowed cores.
        statvfs: returns the statistics of a file system.
        environ: the process's environment, which may set the folder for local copies.
    """

    def __init__(
        self,
        read: Reader = read_file,
        system: Any = psutil,
        process: Any = None,
        clock: Callable[[], float] = time.monotonic,
        affinity: Callable[[], set[int]] = allowed_cores,
        statvfs: Callable[[str], Any] = os.statvfs,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._read = read
        self._system = system
        self._process = psutil.Process() if process is None else process
        self._clock = clock
        self._affinity = affinity
        self._statvfs = statvfs
        self._near = os.path.abspath(local_root(environ))
        self._family = Family(self._process, clock, read)
        self._rates: dict[str, Rate] = {}
        self._cores_before: list[tuple[float, float, float]] = []
        self._steal_rate: float | None = None
        self._others = OtherProcesses(read, clock)
        self._other: BusyProcess | None = None
        self._looks_at_others_s = 0.0
        self._stall_files: dict[str, str | None] = {}
        self._due_s = clock()
        self._allowed: set[int] = set()
        self._cpus = 1.0
        self._room: tuple[int | None, int | None] = (None, None)

    def snapshot(self, gpus: tuple[GpuSnapshot, ...] = (), threads: ThreadsSnapshot | None = None) -> HostSnapshot:
        """Return a snapshot that includes `gpus` and `threads`."""
        at_s = self._clock()
        if at_s >= self._due_s:
            self._due_s = at_s + _SLOW_S
            self._look_slowly()
        # Cache file contents, since several values are read from the same files.
        read = functools.cache(self._read)
        cpu_rate, busiest = self._cpu(read)
        own = self._family.totals()
        own_cpus = self._rate("own", own.cpu_s)
        children_cpus = self._rate("children", own.children_cpu_s)
        memory = memory_limits(read)
        shm_free, shm_total = self._shm_room()
        disks = _ask(lambda: self._system.disk_io_counters(nowrap=False))
        received, sent = self._network_bytes()
        # The kernel adds the time of all cores that wait, so it may exceed the periods without quota.
        waits = (self._rate(name, total) for name, total in _throttled(read).items())
        throttled = min((rate for rate in waits if rate is not None), default=None)
        foreign = None if cpu_rate is None or own_cpus is None else cpu_rate - own_cpus / self._cpus
        return HostSnapshot(
            at_s=at_s,
            cpus=self._cpus,
            cpu_rate=cpu_rate,
            own_cpu_rate=None if own_cpus is None else min(1.0, own_cpus / self._cpus),
            children_cpu_rate=None if children_cpus is None else min(1.0, children_cpus / self._cpus),
            busiest_core_rate=busiest,
            ram_used_bytes=memory.total_bytes - memory.available_bytes,
            ram_total_bytes=memory.total_bytes,
            tmpfs_bytes=_tmpfs_bytes(read, memory.limited_by),
            own_ram_bytes=_ask(lambda: int(self._process.memory_info().rss)),
            storage_read_bytes_per_s=self._rate("read", own.read_bytes),
            asked_read_bytes_per_s=self._rate("asked", own.asked_bytes),
            disk_read_bytes_per_s=self._rate("disk", None if disks is None else disks.read_bytes),
            disk_written_bytes_per_s=self._rate("written", None if disks is None else disks.write_bytes),
            network_bytes_per_s=self._rate("network", received),
            network_sent_bytes_per_s=self._rate("sent", sent),
            disk_free_bytes=self._room[0],
            disk_total_bytes=self._room[1],
            shm_free_bytes=shm_free,
            shm_total_bytes=shm_total,
            cpu_stall_rate=self._stall(read, "cpu"),
            io_stall_rate=self._stall(read, "io"),
            memory_stall_rate=self._stall(read, "memory"),
            steal_rate=self._steal_rate,
            throttled_rate=None if throttled is None else min(1.0, throttled),
            other_process=self._other_process(at_s, foreign),
            threads=threads,
            gpus=gpus,
        )

    def _other_process(self, now_s: float, foreign_rate: float | None) -> BusyProcess | None:
        """Return the busiest other process, which is looked up in two successive snapshots, then kept for a while."""
        if foreign_rate is None or foreign_rate < _FOREIGN:
            self._other = None
            return None
        if now_s >= self._looks_at_others_s:
            found = self._others.busiest({os.getpid(), *self._family.children_ids})
            if found is not None:
                self._other, self._looks_at_others_s = found, now_s + _SLOW_S
        return self._other

    def _rate(self, name: str, total: float | None) -> float | None:
        if name not in self._rates:
            self._rates[name] = Rate(self._clock)
        return self._rates[name].of(total)

    def _look_slowly(self) -> None:
        self._allowed = self._affinity()
        self._cpus = allowed_cpus(self._read, len(self._allowed))
        self._room = self._local_disk_bytes()

    def _local_disk_bytes(self) -> tuple[int | None, int | None]:
        """Return the free and the total bytes of the disk for local copies, whose folder need not exist."""
        table = mounts(self._read)
        if can_hang(self._near, table):
            return None, None
        for folder in (self._near, *map(str, Path(self._near).parents)):
            if (found := disk(folder, table, 0)) is not None:
                return found.free_bytes, found.total_bytes
        return None, None

    def _shm_room(self) -> tuple[int | None, int | None]:
        try:
            stats = self._statvfs("/dev/shm")
        except OSError:
            return None, None
        return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize

    def _cpu(self, read: Reader) -> tuple[float | None, float | None]:
        """Return the utilization of the allowed CPUs, and that of the busiest core.

        Both are computed from the kernel's times per core, and are None in sandboxes that lack these. With a CPU quota,
        the cores are shared with other cgroups, so the first value is computed from the CPU time of this cgroup if it
        is known.
        """
        shares = self._core_shares()
        busiest = max(shares, default=None)
        if self._cpus < len(self._allowed):
            used_s = self._rate("cgroup", _cgroup_cpu_s(read))
            if used_s is not None:
                return min(1.0, used_s / self._cpus), busiest
        return (min(1.0, sum(shares) / self._cpus) if shares else None), busiest

    def _core_shares(self) -> list[float]:
        cores = _ask(lambda: self._system.cpu_times(percpu=True)) or []
        # Select by index only if needed: if some cores are offline, core indices differ from positions in this list.
        if len(cores) != len(self._allowed):
            in_order = sorted(self._allowed)
            cores = [cores[core] for core in in_order] if in_order and in_order[-1] < len(cores) else []
        now = [_core_times(times) for times in cores]
        before, self._cores_before = self._cores_before, now
        if len(before) != len(now):
            return []
        passed = [
            tuple(new - old for new, old in zip(one, then, strict=True)) for one, then in zip(now, before, strict=True)
        ]
        total_s = sum(total for _, total, _ in passed)
        self._steal_rate = max(0.0, sum(stolen for *_, stolen in passed) / total_s) if total_s > 0 else None
        return [min(1.0, max(0.0, busy / total)) for busy, total, _ in passed if total > 0]

    def _network_bytes(self) -> tuple[int | None, int | None]:
        """Return the bytes that all network interfaces except loopback have received and sent."""
        interfaces = _ask(lambda: self._system.net_io_counters(pernic=True, nowrap=False)) or {}
        others = [counters for name, counters in interfaces.items() if name not in ("lo", "lo0")]
        if not others:
            return None, None
        return sum(one.bytes_recv for one in others), sum(one.bytes_sent for one in others)

    def _stall(self, read: Reader, resource: str) -> float | None:
        if resource not in self._stall_files:
            own = [
                f"{folder}/{resource}.pressure" for version, folder in cgroup_folders(read, resource) if version == 2
            ]
            files = (*own, f"/proc/pressure/{resource}")
            self._stall_files[resource] = next((file for file in files if _stalled_s(read, file) is not None), None)
        file = self._stall_files[resource]
        rate = None if file is None else self._rate(file, _stalled_s(read, file))
        return None if rate is None else min(1.0, rate)


def _ask(query: Callable[[], Any]) -> Any:
    """Query psutil; return None if it fails, for example because a sandbox has no `/proc/diskstats`."""
    try:
        return query()
    except (psutil.Error, OSError, RuntimeError, NotImplementedError):
        return None


def _core_times(times: Any) -> tuple[float, float, float]:
    """Return the seconds in which a core was busy, its total seconds, and those that a hypervisor has stolen."""
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total, getattr(times, "steal", 0.0)


def _cgroup_cpu_s(read: Reader) -> float | None:
    for version, folder in (*cgroup_folders(read, "cpu"), *cgroup_folders(read, "cpuacct")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if version == 2:
                return int(_numbers(read(f"{folder}/cpu.stat"))["usage_usec"]) / 1e6
            return int(read(f"{folder}/cpuacct.usage")) / 1e9
    return None


def _throttled(read: Reader) -> dict[str, float]:
    """Return the seconds in which cores waited for the cgroup's quota, and the seconds of all periods with waits."""
    for version, folder in cgroup_folders(read, "cpu"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            numbers = _numbers(read(f"{folder}/cpu.stat"))
            waited_s = int(numbers["throttled_usec"]) / 1e6 if version == 2 else int(numbers["throttled_time"]) / 1e9
            period_file = f"{folder}/cpu.max" if version == 2 else f"{folder}/cpu.cfs_period_us"
            period_s = int(read(period_file).split()[-1]) / 1e6
            return {"throttled": waited_s, "throttled periods": int(numbers["nr_throttled"]) * period_s}
    return {}


def _tmpfs_bytes(read: Reader, limited_by: str) -> int | None:
    """Return the bytes in tmpfs and shared memory, of the machine or of the cgroup that limits the RAM."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if limited_by == "machine":
            lines = (line.split() for line in read("/proc/meminfo").splitlines())
            return next((int(words[1]) * 1024 for words in lines if words and words[0] == "Shmem:"), None)
        fields = _numbers(read(f"{limited_by}/memory.stat"))
        shared = fields.get("total_shmem", fields.get("shmem"))
        return None if shared is None else int(shared)
    return None


def _numbers(text: str) -> dict[str, str]:
    return dict(words for line in text.splitlines() if len(words := line.split()) == 2)


def _stalled_s(read: Reader, file: str) -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        words: Sequence[str] = read(file).splitlines()[0].split()
        if words[0] == "some" and words[-1].startswith("total="):
            return int(words[-1].removeprefix("total=")) / 1e6
    return None


class Telemetry:
    """A source of snapshots of the machine and its GPUs, which caches handles to the driver and the process.

    Not thread-safe.

    Args:
        nvml: the NVML module; by default `pynvml` from the package `nvidia-ml-py`, if installed.
        environ: the process's environment.
        modules: the imported modules, which may include torch.

    Attributes:
        samples_stacks: whether stacks should be sampled until the next snapshot, because no GPU is busy.
    """

    def __init__(
        self,
        nvml: ModuleType | None = None,
        environ: Mapping[str, str] = os.environ,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        self._host = Host(environ=environ)
        self._open_gpus = functools.partial(Gpus, nvml, environ, modules)
        self._gpus: Gpus | None = None
        self._threads = ProcessThreads(read_file)
        self._stacks = StackSampler(read_file)
        self.samples_stacks = False

    def snapshot(self) -> HostSnapshot:
        """Return a snapshot; takes about 2 ms of CPU time without a GPU."""
        threads = self._threads.snapshot(self._stacks.take())
        if self._gpus is None:
            self._gpus = self._open_gpus()
        with prompt_gil():
            snapshot = self._host.snapshot(self._gpus.snapshot(), threads)
        self.samples_stacks = training_thread() is not None and not _is_gpu_busy(snapshot)
        return snapshot

    def sample_stack(self) -> None:
        """Sample the stack of the training thread."""
        if (training := training_thread()) is not None:
            self._stacks.sample(training.ident, training.native_id)

    def close(self) -> None:
        """Release the driver, which the next snapshot opens again; may be called twice."""
        if self._gpus is not None:
            self._gpus.close()
        self._gpus = None


def _is_gpu_busy(snapshot: HostSnapshot) -> bool:
    """Return whether a GPU is busy, so that nothing on the host delays the step.

    Busy CPUs say little: torch's threads spin for a while after their work, also while a loop logs.
    """
    return any((gpu.utilization_rate or 0.0) >= _BUSY for gpu in snapshot.gpus)

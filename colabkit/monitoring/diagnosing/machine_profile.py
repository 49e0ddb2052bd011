"""The profile of the machine during a run: the use of its CPUs, memory, disk and GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from colabkit.foundation import GpuSnapshot, HostSnapshot, StepTimes, usable_cpus

_MEAN_RATES = (
    "cpu_rate", "own_cpu_rate", "children_cpu_rate", "busiest_core_rate", "io_stall_rate", "steal_rate",
    "throttled_rate",
)  # fmt: skip
SNAPSHOT_S = 1.0
"""Usual number of seconds between snapshots of the machine, which the rates of a snapshot cover."""


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """The machine over a time window; unknown values are None.

    Rates are shares in [0, 1]: `own_cpu_rate` covers this process and its children, and `io_stall_rate` is the share of
    the time in which some task waited for storage. RAM, tmpfs, disk and `/dev/shm` are measured at the end of the
    window; `ram_used` and `shm_free` are shares. `gpu` is the GPU that this process uses most.
    """

    cpus: float = 1.0
    cpu_rate: float | None = None
    own_cpu_rate: float | None = None
    children_cpu_rate: float | None = None
    busiest_core_rate: float | None = None
    ram_used: float | None = None
    ram_total_bytes: int | None = None
    ram_free_bytes: int | None = None
    tmpfs_bytes: int | None = None
    read_bytes_per_s: float | None = None
    disk_free_bytes: int | None = None
    shm_free: float | None = None
    io_stall_rate: float | None = None
    steal_rate: float | None = None
    throttled_rate: float | None = None
    gpu: GpuProfile | None = None

    @property
    def foreign_cpus(self) -> float | None:
        """Number of CPUs used by other processes; None if unknown."""
        if self.cpu_rate is None or self.own_cpu_rate is None:
            return None
        return max(0.0, self.cpu_rate - self.own_cpu_rate) * self.cpus


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A GPU over a time window: median utilization, memory at the end, and share of the time with throttled clocks."""

    name: str | None = None
    utilization_rate: float | None = None
    used: float | None = None
    torch_bytes: int | None = None
    other_bytes: int | None = None
    slowed: float = 0.0
    slowed_by: tuple[str, ...] = ()
    is_lost: bool = False


def profile_machine(hosts: Sequence[HostSnapshot], steps: Sequence[StepTimes]) -> MachineProfile:
    """Summarize the machine during a run.

    Args:
        hosts: snapshots of the machine, oldest first; the last was taken about when the steps ended.
        steps: the newest steps, oldest first.
    """
    if not hosts:
        return MachineProfile(cpus=usable_cpus())
    last, hosts = hosts[-1], _settled_hosts(hosts, steps)
    rates: dict[str, Any] = {name: mean_of_known(getattr(host, name) for host in hosts) for name in _MEAN_RATES}
    return MachineProfile(
        cpus=last.cpus,
        **rates,
        ram_used=_share(last.ram_used_bytes, last.ram_total_bytes),
        ram_total_bytes=last.ram_total_bytes or None,
        ram_free_bytes=last.ram_total_bytes - last.ram_used_bytes if last.ram_total_bytes else None,
        tmpfs_bytes=last.tmpfs_bytes,
        read_bytes_per_s=mean_of_known(host.storage_read_bytes_per_s for host in hosts),
        disk_free_bytes=last.disk_free_bytes,
        shm_free=_share(last.shm_free_bytes, last.shm_total_bytes),
        gpu=_gpu_of([host.gpus for host in hosts]),
    )


def _settled_hosts(hosts: Sequence[HostSnapshot], steps: Sequence[StepTimes]) -> Sequence[HostSnapshot]:
    """Return the snapshots without those of a long start of the loader, or all snapshots if that leaves none.

    If workers are new processes that import libraries, as on Windows, on macOS and since Python 3.14, their start takes
    seconds of CPU time, which is not work on samples. Time between passes is not known, so with long validations some
    other snapshots may be left out instead.
    """
    settled, ended_s = list(hosts), hosts[-1].at_s
    for step in reversed(steps):
        began_s = ended_s - step.seconds
        if step.is_first and step.seconds > SNAPSHOT_S:
            # Rates cover the time since the snapshot before, and the last snapshot may be early or late by that time.
            is_start = [began_s - SNAPSHOT_S < host.at_s < ended_s + 2 * SNAPSHOT_S for host in settled]
            settled = [host for host, drop in zip(settled, is_start, strict=True) if not drop]
        ended_s = began_s
    return settled or hosts


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without such values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def own_gpu(gpus: Sequence[GpuSnapshot]) -> GpuSnapshot | None:
    """Return the GPU that this process uses most, by tensor memory, then by utilization; None without GPUs."""
    return max(gpus, key=lambda gpu: (gpu.torch_bytes or 0, gpu.utilization_rate or 0.0), default=None)


def _gpu_of(snapshots: Sequence[Sequence[GpuSnapshot]]) -> GpuProfile | None:
    """Return the state of the GPU that this process uses most."""
    last = own_gpu(snapshots[-1])
    if last is None:
        return None
    place = snapshots[-1].index(last)
    own = [gpus[place] for gpus in snapshots if len(gpus) > place]
    gpu, known = own[-1], [one.utilization_rate for one in own if one.utilization_rate is not None]
    held = gpu.torch_reserved_bytes or gpu.torch_bytes
    slowed = [one for one in own if one.slowed_by]
    return GpuProfile(
        name=gpu.name,
        utilization_rate=median(known) if known else None,
        used=_share(gpu.used_bytes, gpu.total_bytes),
        torch_bytes=gpu.torch_bytes,
        other_bytes=None if gpu.used_bytes is None else max(0, gpu.used_bytes - (held or 0)),
        slowed=len(slowed) / len(own),
        slowed_by=slowed[-1].slowed_by if slowed else (),
        is_lost=gpu.is_lost,
    )

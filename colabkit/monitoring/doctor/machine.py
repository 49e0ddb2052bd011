"""What the machine was like over a window: means of its snapshots, for the doctor's rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from colabkit.foundation import GpuSnapshot, HostSnapshot, usable_cpus

SNAPSHOT_S = 1.0
"""Seconds that a snapshot of the machine tells of, or a little more."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine over a window; None is what is not known.

    Attributes:
        cpus: that this process may use.
        cpu_rate: share of them that was busy.
        own_cpu_rate: share of them that this process and its children used.
        children_cpu_rate: share that the children alone used.
        busiest_core_rate: of the busiest core.
        ram_used: share of the RAM in use at the end.
        ram_total_bytes: RAM under the tightest limit.
        ram_free_bytes: of it still free at the end.
        tmpfs_bytes: of the RAM, what files in tmpfs take.
        read_bytes_per_s: read from storage by this process.
        disk_free_bytes: of the near disk.
        shm_free: free share of `/dev/shm`.
        io_stall_rate: share of the time that some task waited for storage.
        gpu: the one that this process uses most; None if there is none.
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
    gpu: GpuState | None = None

    @property
    def foreign_cpus(self) -> float | None:
        """CPUs that other processes used."""
        if self.cpu_rate is None or self.own_cpu_rate is None:
            return None
        return max(0.0, self.cpu_rate - self.own_cpu_rate) * self.cpus


@dataclass(frozen=True, slots=True)
class GpuState:
    """The busiest GPU over a window.

    Attributes:
        name: as the driver names it.
        utilization_rate: median share of the time that a kernel ran.
        used: share of its memory in use at the end.
        torch_bytes: memory of this process's tensors.
        other_bytes: memory in use that torch does not hold here.
        slowed: share of snapshots whose clocks were held down.
        slowed_by: why.
        is_lost: whether it has fallen off the bus.
    """

    name: str | None = None
    utilization_rate: float | None = None
    used: float | None = None
    torch_bytes: int | None = None
    other_bytes: int | None = None
    slowed: float = 0.0
    slowed_by: tuple[str, ...] = ()
    is_lost: bool = False


def machine_of(hosts: Sequence[HostSnapshot]) -> Machine:
    """Return what some snapshots come to."""
    if not hosts:
        return Machine(cpus=usable_cpus())
    last = hosts[-1]
    return Machine(
        cpus=last.cpus,
        cpu_rate=_mean(host.cpu_rate for host in hosts),
        own_cpu_rate=_mean(host.own_cpu_rate for host in hosts),
        children_cpu_rate=_mean(host.children_cpu_rate for host in hosts),
        busiest_core_rate=_mean(host.busiest_core_rate for host in hosts),
        ram_used=last.ram_used_bytes / last.ram_total_bytes if last.ram_total_bytes else None,
        ram_total_bytes=last.ram_total_bytes or None,
        ram_free_bytes=last.ram_total_bytes - last.ram_used_bytes if last.ram_total_bytes else None,
        tmpfs_bytes=last.tmpfs_bytes,
        read_bytes_per_s=_mean(host.storage_read_bytes_per_s for host in hosts),
        disk_free_bytes=last.disk_free_bytes,
        shm_free=None
        if last.shm_free_bytes is None or not last.shm_total_bytes
        else last.shm_free_bytes / last.shm_total_bytes,
        io_stall_rate=_mean(host.io_stall_rate for host in hosts),
        gpu=_gpu_of([host.gpus for host in hosts]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _gpu_of(snapshots: Sequence[Sequence[GpuSnapshot]]) -> GpuState | None:
    """Return the state of the GPU that this process uses most, by its tensors, else by its utilisation."""
    last = snapshots[-1]
    if not last:
        return None
    place = max(range(len(last)), key=lambda place: (last[place].torch_bytes or 0, last[place].utilization_rate or 0))
    own = [gpus[place] for gpus in snapshots if len(gpus) > place]
    gpu, known = own[-1], [one.utilization_rate for one in own if one.utilization_rate is not None]
    held = gpu.torch_reserved_bytes or gpu.torch_bytes
    slowed = [one for one in own if one.slowed_by]
    return GpuState(
        name=gpu.name,
        utilization_rate=median(known) if known else None,
        used=gpu.used_bytes / gpu.total_bytes if gpu.used_bytes is not None and gpu.total_bytes else None,
        torch_bytes=gpu.torch_bytes,
        other_bytes=None if gpu.used_bytes is None else max(0, gpu.used_bytes - (held or 0)),
        slowed=len(slowed) / len(own),
        slowed_by=slowed[-1].slowed_by if slowed else (),
        is_lost=gpu.is_lost,
    )

"""What is measured of the machine at one instant. What is not to be had is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU at one instant.

    Attributes:
        uuid: of the card, or of the MIG instance.
        name: as the driver names it.
        utilization_rate: share of the last sample period in which a kernel ran, in [0, 1]; a duty cycle, not a load.
            None under MIG.
        used_bytes: memory in use by all processes.
        total_bytes: memory of the card.
        torch_bytes: memory that tensors of this process occupy; None if torch has not touched the card.
        torch_reserved_bytes: memory that torch holds for them.
        power_w: power drawn.
        slowed_by: why the clocks are held down: `"power"`, `"heat"`; empty if they are not.
        is_lost: whether the card has fallen off the bus.
    """

    uuid: str | None = None
    name: str | None = None
    utilization_rate: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    torch_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    power_w: float | None = None
    slowed_by: tuple[str, ...] = ()
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """The machine at one instant, and what happened since the snapshot before; rates are None in the first one.

    Attributes:
        at_s: when, by `time.monotonic`.
        cpus: CPUs that this process may use, which can be a fraction of a core.
        cpu_rate: share of them that was busy, by any process, in [0, 1].
        own_cpu_rate: share of them that this process and its children used.
        children_cpu_rate: share of them that the children alone used.
        busiest_core_rate: share of the time that the busiest of the allowed cores was busy.
        ram_used_bytes: RAM that is not available any more, tmpfs included.
        ram_total_bytes: RAM under the tightest limit.
        tmpfs_bytes: of the RAM in use, what files in tmpfs take, and shared memory, which the kernel counts with them.
        own_ram_bytes: resident memory of this process alone, pages that it shares with others and maps of files
            included.
        storage_read_bytes_per_s: bytes a second that this process and its children fetched from storage; page-cache
            hits are none, and reads through FUSE may be none.
        asked_read_bytes_per_s: bytes a second that they asked for, page-cache hits and pipes included; maps are none.
        disk_read_bytes_per_s: bytes a second that the disks of the whole host read; one that lies on another, as LVM
            makes them, counts twice.
        network_bytes_per_s: bytes a second that all network interfaces received, loopback apart; what a bridge passes
            on to a container counts twice on the host.
        disk_free_bytes: room on the disk of the near folder.
        disk_total_bytes: its size.
        shm_free_bytes: room in `/dev/shm`.
        shm_total_bytes: its size.
        cpu_stall_rate: share of the time that some task waited for a CPU, by the kernel's pressure counters: those of
            this process's cgroup, else of the machine.
        io_stall_rate: share of the time that some task waited for storage, likewise.
        memory_stall_rate: share of the time that some task waited for memory, likewise.
        gpus: the GPUs that this process may use, none where there is no driver.
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
    network_bytes_per_s: float | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    cpu_stall_rate: float | None = None
    io_stall_rate: float | None = None
    memory_stall_rate: float | None = None
    gpus: tuple[GpuSnapshot, ...] = ()

"""Snapshots of the machine while something runs: CPU, RAM, storage reads, GPUs. What is not to be had is None."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil

from colabkit.environment import memory_limits, usable_cpus
from colabkit.mounts import read_file

__all__ = ["GpuSnapshot", "HostSnapshot", "Telemetry"]


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """One GPU at one instant.

    Attributes:
        name: as the driver names it.
        utilization_rate: share of the last sample period in which a kernel ran, in [0, 1]; a duty cycle, not a load.
        used_bytes: memory in use by all processes.
        total_bytes: memory of the card.
    """

    name: str | None
    utilization_rate: float | None
    used_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """The machine at one instant, and what happened since the snapshot before.

    Attributes:
        cpu_rate: share of the allowed CPUs that was busy, in [0, 1]; None in the first snapshot.
        ram_used_bytes: RAM that is not available any more, tmpfs included.
        ram_total_bytes: RAM under the tightest limit.
        storage_read_bytes_per_s: bytes a second that this process fetched from storage; page-cache hits are none.
        gpus: the GPUs, none where there is no driver.
    """

    cpu_rate: float | None
    ram_used_bytes: int
    ram_total_bytes: int
    storage_read_bytes_per_s: float | None
    gpus: tuple[GpuSnapshot, ...]


class Telemetry:
    """Takes snapshots; keeps its own handles to driver and process, since opening them anew is slow.

    Args:
        nvml: the NVML binding; by default `pynvml` as `nvidia-ml-py` installs it, if it is there.
    """

    def __init__(self, nvml: ModuleType | None = None) -> None:
        self._cpus = usable_cpus()
        self._process = psutil.Process()
        self._before: tuple[float, float, int | None] | None = None
        self._nvml, self._gpus = _open_gpus(nvml)

    def snapshot(self) -> HostSnapshot:
        """Return the state of this instant; takes about a millisecond."""
        now = time.perf_counter()
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        read_bytes = self._storage_read_bytes()
        cpu_rate = read_rate = None
        if self._before is not None:
            then, busy_before_s, read_before = self._before
            passed_s = max(now - then, 1e-9)
            cpu_rate = min(1.0, max(0.0, busy_s - busy_before_s) / (passed_s * self._cpus))
            if read_bytes is not None and read_before is not None:
                read_rate = (read_bytes - read_before) / passed_s
        self._before = (now, busy_s, read_bytes)
        memory = memory_limits(read_file)
        return HostSnapshot(
            cpu_rate=cpu_rate,
            ram_used_bytes=memory.total_bytes - memory.available_bytes,
            ram_total_bytes=memory.total_bytes,
            storage_read_bytes_per_s=read_rate,
            gpus=tuple(self._gpu(handle) for handle in self._gpus),
        )

    def close(self) -> None:
        """Let the driver go; may be called twice."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._gpus = None, []

    def _storage_read_bytes(self) -> int | None:
        try:
            return int(self._process.io_counters().read_bytes)
        except (psutil.Error, OSError, AttributeError):
            return None

    def _gpu(self, handle: Any) -> GpuSnapshot:
        assert self._nvml is not None
        name = self._ask(self._nvml.nvmlDeviceGetName, handle)
        utilization = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuSnapshot(
            name=name.decode() if isinstance(name, bytes) else name,
            utilization_rate=None if utilization is None else utilization.gpu / 100,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
        )

    def _ask(self, query: Any, handle: Any) -> Any:
        assert self._nvml is not None
        try:
            return query(handle)
        except self._nvml.NVMLError:
            return None


def _open_gpus(nvml: ModuleType | None) -> tuple[ModuleType | None, list[Any]]:
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no binding, no driver, or another package of that name
        return None, []
    handles = []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None, []
    return nvml, handles

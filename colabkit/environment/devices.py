"""The GPUs as NVML lists them; each value that a driver does not tell is missing by itself."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from colabkit._reports import Report
from colabkit._units import format_bytes

__all__ = ["GpuReport", "gpus"]


@dataclass(frozen=True, repr=False)
class GpuReport(Report):
    """A GPU as the driver names it; a value that the driver does not tell is None.

    Attributes:
        uuid: which tells cards apart, as in `"GPU-..."`, or `"MIG-..."` for a slice.
        name: as in `"Tesla T4"`.
        total_bytes: memory of the card.
        free_bytes: memory that no process has taken.
        driver: version of the driver.
    """

    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None = None

    def _summary(self) -> str:
        memory = "memory n/a" if self.total_bytes is None else format_bytes(self.total_bytes)
        return f"{self.name or 'GPU, name n/a'}, {memory}"

    def details(self) -> str:
        """Return all that is known in one line."""
        free = "" if self.free_bytes is None else f", {format_bytes(self.free_bytes)} free"
        driver = "" if self.driver is None else f", driver {self.driver}"
        return f"{self._summary()}{free}{driver}, {self.uuid or 'UUID n/a'}"

    def _rows(self) -> list[tuple[str, ...]]:
        free = "n/a" if self.free_bytes is None else format_bytes(self.free_bytes)
        return [("uuid", self.uuid or "n/a"), ("free", free)]


def gpus(nvml: ModuleType | None = None) -> tuple[GpuReport, ...]:
    """Return the GPUs that NVML lists; none where driver or binding is missing. No CUDA context is made.

    Args:
        nvml: the binding; by default `pynvml` as `nvidia-ml-py` installs it.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ()
    if not hasattr(nvml, "nvmlInit") or not hasattr(nvml, "nvmlDeviceGetCount"):
        return ()  # another package hides the binding
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        found = []
        driver = _text(_told(nvml, "nvmlSystemGetDriverVersion"))
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = _told(nvml, "nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                found.append(GpuReport(None, None, None, None, driver))
                continue
            memory = _told(nvml, "nvmlDeviceGetMemoryInfo", handle)
            found.append(
                GpuReport(
                    uuid=_text(_told(nvml, "nvmlDeviceGetUUID", handle)),
                    name=_text(_told(nvml, "nvmlDeviceGetName", handle)),
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                    driver=driver,
                )
            )
        return tuple(found)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _told(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    """Return what the driver tells, None where it does not, or where the binding is too old to ask."""
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value

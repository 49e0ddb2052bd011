"""The GPUs as NVML lists them; each value that a driver does not tell is missing by itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from colabkit.foundation.reports import Report
from colabkit.foundation.units import format_bytes


@dataclass(frozen=True, repr=False)
class GpuReport(Report):
    """A GPU as the driver names it; a value that the driver does not tell is None.

    Attributes:
        uuid: which tells cards apart, as in `"GPU-..."`.
        name: as in `"Tesla T4"`.
        total_bytes: memory of the card.
        free_bytes: memory that no process has taken.
        driver: version of the driver.
        cuda: newest version of CUDA that the driver can run, as in `"13.0"`.
        is_sliced: whether the card is in MIG mode, so that a process gets a slice of it and of its memory.
    """

    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None = None
    cuda: str | None = None
    is_sliced: bool | None = None

    def _summary(self) -> str:
        memory = "memory n/a" if self.total_bytes is None else format_bytes(self.total_bytes)
        return f"{self.name or 'GPU, name n/a'}, {memory}"

    def details(self) -> str:
        """Return all that is known in one line."""
        free = "" if self.free_bytes is None else f", {format_bytes(self.free_bytes)} free"
        sliced = ", in MIG slices" if self.is_sliced else ""
        driver = "" if self.driver is None else f", driver {self.driver}"
        cuda = "" if self.cuda is None else f", CUDA up to {self.cuda}"
        return f"{self._summary()}{free}{sliced}{driver}{cuda}, {self.uuid or 'UUID n/a'}"

    def _rows(self) -> list[tuple[str, ...]]:
        free = "n/a" if self.free_bytes is None else format_bytes(self.free_bytes)
        return [
            ("uuid", self.uuid or "n/a"),
            ("free", free),
            ("driver", self.driver or "n/a"),
            ("CUDA", self.cuda or "n/a"),
        ]


def gpus(nvml: ModuleType | None = None, paths: Sequence[str] | None = None) -> tuple[GpuReport, ...]:
    """Return the GPUs that NVML lists; none where driver or binding is missing. No CUDA context is made.

    Args:
        nvml: the binding; by default `pynvml` as `nvidia-ml-py` installs it.
        paths: where it is looked for unless imported already; by default Python's search path.
    """
    if nvml is None:
        if "pynvml" not in sys.modules and PathFinder.find_spec("pynvml", paths) is None:
            return ()
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
        cuda = _version(_told(nvml, "nvmlSystemGetCudaDriverVersion"))
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = _told(nvml, "nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                found.append(GpuReport(None, None, None, None, driver, cuda))
                continue
            memory = _told(nvml, "nvmlDeviceGetMemoryInfo", handle)
            slicing = _told(nvml, "nvmlDeviceGetMigMode", handle)  # now, and after the next reset
            found.append(
                GpuReport(
                    uuid=_text(_told(nvml, "nvmlDeviceGetUUID", handle)),
                    name=_text(_told(nvml, "nvmlDeviceGetName", handle)),
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                    driver=driver,
                    cuda=cuda,
                    is_sliced=None if slicing is None else bool(slicing[0]),
                )
            )
        return tuple(found)
    except nvml.NVMLError:
        return ()
    finally:
        _told(nvml, "nvmlShutdown")


def _told(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    """Return what the driver tells, None where it does not, or where the binding is too old to ask."""
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _version(number: int | None) -> str | None:
    """Return CUDA's version from NVML's number for it: a thousand for each major one, ten for each minor one."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

"""What this machine allows: place, CPUs, RAM under cgroup limits, tmpfs, disks, GPUs, versions.

Everything is a function of an injected file reader and environment, so each branch can be tested anywhere. In a
container `/proc/meminfo` and `os.cpu_count()` speak of the host; what counts is the least of those and the cgroup
limits.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from colabkit._reports import Report
from colabkit._units import format_bytes

__all__ = ["DiskReport", "GpuReport", "MemoryReport", "RuntimeReport", "runtime"]

Reader = Callable[[str], str]

_CGROUP = "/sys/fs/cgroup"
_PACKAGES = ("torch", "numpy", "h5py", "pillow", "simplejpeg", "ipython", "ipykernel", "ipywidgets")
_DISK_FOLDERS = ("/content", "/kaggle/working", "/tmp")
_TMPFS_FOLDERS = ("/dev/shm", "/run/user/{uid}")


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


@dataclass(frozen=True, repr=False)
class DiskReport(Report):
    """A place for files: its folder, file system type, and bytes."""

    folder: str
    fstype: str
    total_bytes: int
    free_bytes: int

    def _summary(self) -> str:
        return (
            f"{self.folder}: {format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} free ({self.fstype})"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [("free", format_bytes(self.free_bytes)), ("total", format_bytes(self.total_bytes))]


@dataclass(frozen=True, repr=False)
class GpuReport(Report):
    """A GPU as the driver names it; a value that the driver does not tell is None."""

    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None

    def _summary(self) -> str:
        memory = "memory n/a" if self.total_bytes is None else f"{format_bytes(self.total_bytes)}"
        return f"{self.name or 'GPU, name n/a'}, {memory}"

    def _rows(self) -> list[tuple[str, ...]]:
        free = "n/a" if self.free_bytes is None else format_bytes(self.free_bytes)
        return [("uuid", self.uuid or "n/a"), ("free", free)]


@dataclass(frozen=True, repr=False)
class RuntimeReport(Report):
    """What `runtime()` found. `cpus` is what this process may use, which can be a fraction of a core."""

    place: str
    python: str
    cpus: float
    memory: MemoryReport
    tmpfs: tuple[DiskReport, ...]
    disks: tuple[DiskReport, ...]
    gpus: tuple[GpuReport, ...]
    versions: Mapping[str, str]

    def _summary(self) -> str:
        gpus = "; ".join(map(repr, self.gpus)) or "no GPU"
        place = "" if self.place == "Python" else f"{self.place}, "
        return f"{place}Python {self.python}: {self.cpus:g} CPUs, {self.memory!r}, {gpus}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("CPUs allowed", f"{self.cpus:g}"),
            ("RAM", f"{self.memory!r} (limit: {self.memory.limited_by})"),
            *(("tmpfs", repr(disk)) for disk in self.tmpfs),
            *(("disk", repr(disk)) for disk in self.disks),
            *([("GPU", repr(gpu)) for gpu in self.gpus] or [("GPU", "none")]),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]


def runtime() -> RuntimeReport:
    """Return what this machine allows: CPUs and RAM under cgroup limits, tmpfs, disks, GPUs, versions.

    Takes a few milliseconds, imports no heavy package and starts no process.
    """
    memory = memory_limits(read_file)
    mounts = list(_mounts(read_file))
    return RuntimeReport(
        place=place(os.environ, _shell_class(), Path("/var/colab/hostname").exists()),
        python=platform.python_version(),
        cpus=usable_cpus(),
        memory=memory,
        tmpfs=tuple(
            disk
            for folder in _TMPFS_FOLDERS
            if (disk := _disk(folder.format(uid=os.getuid()), mounts)) and disk.fstype == "tmpfs"
        ),
        disks=tuple(
            disk for folder in _separate_disks((*_DISK_FOLDERS, *_working_folder())) if (disk := _disk(folder, mounts))
        ),
        gpus=gpus(),
        versions=dict(_versions()),
    )


def read_file(path: str) -> str:
    """Return a small text file; raises `OSError` where there is none."""
    return Path(path).read_text(errors="surrogateescape")


def place(environ: Mapping[str, str], shell_class: str | None, has_colab_hostname: bool) -> str:
    """Return where the code runs.

    Kaggle is asked first: its image is built from Colab's and looks like it in every other way.

    Args:
        environ: the process's environment.
        shell_class: module and name of IPython's shell class, None outside of IPython.
        has_colab_hostname: whether `/var/colab/hostname` exists, which only hosted Colab has.
    """
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return "Kaggle"
    if shell_class is None:
        return "Python"
    if shell_class.startswith("google.colab"):
        if environ.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE":
            return "Colab Enterprise"
        return "Colab" if has_colab_hostname else "Colab, local runtime"
    if shell_class.endswith("ZMQInteractiveShell"):
        return "Jupyter"
    return "IPython"


def allowed_cpus(read: Reader, affinity: int) -> float:
    """Return the CPUs this process may use: the least of its affinity and the cgroup quotas above it."""
    limits = [float(affinity)]
    for version, folder in _cgroup_folders(read, "cpu"):
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
    for version, folder in _cgroup_folders(read, "memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        try:
            limit = int(read(f"{folder}/{names[0]}"))  # "max" is no number: no limit here
        except (OSError, ValueError):
            continue
        if limit < total:
            total, limited_by = limit, folder
        used = _number(read, f"{folder}/{names[1]}")
        reclaimable = _number(read, f"{folder}/memory.stat", names[2])
        available = min(available, max(0, limit - max(0, used - reclaimable)))
    return MemoryReport(total, available, limited_by)


def _number(read: Reader, path: str, key: str = "") -> int:
    """Return a file's number, or the number after `key` in it; 0 where sandboxes leave the file out."""
    try:
        text = read(path)
        return int(dict(line.split() for line in text.splitlines()).get(key, 0) if key else text)
    except (OSError, ValueError):
        return 0


def _cgroup_folders(read: Reader, controller: str) -> Iterator[tuple[int, str]]:
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
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = _field(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                found.append(GpuReport(None, None, None, None))
                continue
            memory = _field(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            found.append(
                GpuReport(
                    uuid=_text(_field(nvml, nvml.nvmlDeviceGetUUID, handle)),
                    name=_text(_field(nvml, nvml.nvmlDeviceGetName, handle)),
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                )
            )
        return tuple(found)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _field(nvml: ModuleType, query: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return query(argument)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def near_folder(environ: Mapping[str, str]) -> Path:
    """Return where near copies go on disk unless the user says otherwise; `COLABKIT_NEAR` overrides it."""
    if chosen := environ.get("COLABKIT_NEAR"):
        return Path(chosen).expanduser()
    for folder in ("/content", "/kaggle/temp"):
        if Path(folder).is_dir():
            return Path(folder) / "colabkit"
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "colabkit"


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shell_class() -> str | None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return f"{type(shell).__module__}.{type(shell).__name__}" if shell is not None else None


def _mounts(read: Reader) -> Iterator[tuple[str, str]]:
    try:
        lines = read("/proc/mounts").splitlines()
    except OSError:
        return
    for line in lines:
        _, point, fstype, *_ = line.split(" ")
        yield re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point), fstype


def _disk(folder: str, mounts: list[tuple[str, str]]) -> DiskReport | None:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    return DiskReport(
        str(folder), _fstype(Path(folder), mounts), stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    )


def _fstype(path: Path, mounts: list[tuple[str, str]]) -> str:
    path = path.resolve()
    holding = [(len(point), number) for number, (point, _) in enumerate(mounts) if path.is_relative_to(point)]
    return mounts[max(holding)[1]][1] if holding else "unknown"


def is_tmpfs(path: Path) -> bool:
    """Return whether the bytes of a file at `path`, there already or not, are RAM."""
    return _fstype(path, list(_mounts(read_file))) == "tmpfs"


def _working_folder() -> tuple[str, ...]:
    try:
        return (os.getcwd(),)
    except FileNotFoundError:  # it was removed, as cells that start afresh do
        return ()


def _separate_disks(folders: tuple[str, ...]) -> list[str]:
    by_device = {os.stat(folder).st_dev: folder for folder in folders if os.path.isdir(folder)}
    return list(by_device.values())


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue

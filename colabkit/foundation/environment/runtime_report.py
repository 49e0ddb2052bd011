"""`runtime()` reports the platform and its resource limits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from colabkit.foundation.checks import checked_call
from colabkit.foundation.environment.limits import (
    DiskReport,
    MemoryReport,
    can_hang,
    disks,
    memory_limits,
    tmpfs,
    usable_cpus,
)
from colabkit.foundation.environment.places import current_place
from colabkit.foundation.mount_table import DRIVE_TYPES, Mount, drive_mount, mounts, read_file
from colabkit.foundation.reports import Report
from colabkit.foundation.telemetry.gpus import GpuReport, gpu_reports
from colabkit.foundation.units import format_bytes, format_things

_PACKAGES = (
    *("colabkit", "torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg"),
    *("ipython", "ipykernel", "ipywidgets", "psutil", "gdown", "fsspec"),
)


@dataclass(frozen=True, repr=False)
class RuntimeReport(Report):
    """The platform and its resource limits, as returned by `runtime()`.

    Attributes:
        place: name of the platform, for example `"Colab"`, `"Kaggle"`, `"Jupyter"` or `"Python"`.
        shell: `"kernel"` in a notebook, `"IPython"` in an IPython terminal, `"script"` otherwise.
        python: version of Python.
        cpus: number of CPUs that this process may use, which can be fractional.
        memory: RAM under cgroup limits.
        tmpfs: every tmpfs that data can be written to.
        disks: the disks of the usual data folders, such as `/content`, and of the working folder.
        mounts: (mount point, type) of all remote mounts, such as NFS and most FUSE mounts.
        drive: mount point of Google Drive; None if it is not mounted, or mounted more than once.
        gpus: the GPUs that the driver lists.
        versions: versions of colabkit and the packages that it works with.
    """

    place: str
    shell: str
    python: str
    cpus: float
    memory: MemoryReport
    tmpfs: tuple[DiskReport, ...]
    disks: tuple[DiskReport, ...]
    mounts: tuple[tuple[str, str], ...]
    drive: str | None
    gpus: tuple[GpuReport, ...]
    versions: Mapping[str, str]

    def _summary(self) -> str:
        gpus = "; ".join(map(repr, self.gpus)) or "no GPU"
        place = "" if self.place == "Python" else f"{self.place}, "
        return f"{place}Python {self.python}: {format_things(self.cpus, 'CPU')}, {self.memory!r}, {gpus}"

    def _rows(self) -> list[tuple[str, ...]]:
        memory = f"{format_bytes(self.memory.available_bytes)} of {format_bytes(self.memory.total_bytes)} available"
        others = [(point, fstype) for point, fstype in self.mounts if point != self.drive]
        return [
            ("place", f"{self.place} ({self.shell})"),
            ("CPUs", f"{self.cpus:g} allowed"),
            ("RAM", f"{memory} (limited by {self.memory.limited_by})"),
            *([("GPU", gpu.details()) for gpu in self.gpus] or [("GPU", "none")]),
            ("Drive", "not mounted" if self.drive is None else f"{self.drive}, {dict(self.mounts)[self.drive]}"),
            *(("disk", repr(disk)) for disk in self.disks),
            *(("tmpfs", repr(disk)) for disk in self.tmpfs),
            *(("mount", f"{point} ({fstype})") for point, fstype in others),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]

    __str__ = Report.text_table


@checked_call()
def runtime() -> RuntimeReport:
    """Report the platform, CPUs and RAM under cgroup limits, tmpfs, disks, mounts, GPUs and package versions.

    This takes about 10 ms without a GPU, imports no heavy packages, starts no processes, and does not access remote
    mounts.

    Returns:
        The report.

    Example:
        >>> import colabkit
        >>> machine = colabkit.runtime()
        >>> machine.cpus > 0, machine.memory.available_bytes > 0
        (True, True)
        >>> machine.python
        '3...'
    """
    memory = memory_limits(read_file)
    table = mounts()
    place = current_place()
    drive = drive_mount(table)
    packages = _package_folders(table)
    return RuntimeReport(
        place=place.name,
        shell=place.shell,
        python=platform.python_version(),
        cpus=usable_cpus(),
        memory=memory,
        tmpfs=tmpfs(table, memory.available_bytes),
        disks=disks(table, memory.available_bytes),
        mounts=tuple((mount.point, _named(mount)) for mount in table if mount.is_remote),
        drive=None if drive is None else drive.point,
        gpus=gpu_reports(paths=packages),
        versions=dict(_versions(packages)),
    )


def _named(mount: Mount) -> str:
    name = DRIVE_TYPES.get(mount.fstype, mount.fstype)
    return f"{name}, read-only" if mount.readonly else name


def _package_folders(table: list[Mount]) -> list[str]:
    """Return Python's search path without relative folders and folders that can hang, such as those on Drive."""
    texts = (path for path in sys.path if isinstance(path, str) and os.path.isabs(path))
    return [path for path in map(os.path.normpath, texts) if not can_hang(path, table)]


def _versions(folders: list[str]) -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        for found in importlib.metadata.distributions(name=package, path=folders):
            yield package, found.version
            break

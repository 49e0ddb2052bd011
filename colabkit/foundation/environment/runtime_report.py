"""Where this runs and what it allows: CPUs, RAM under cgroup limits, tmpfs, disks, mounts, GPUs, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from colabkit.foundation.environment.devices import GpuReport, gpus
from colabkit.foundation.environment.limits import MemoryReport, memory_limits, usable_cpus
from colabkit.foundation.environment.places import current_place
from colabkit.foundation.environment.storage import DiskReport, can_hang, disks, tmpfs
from colabkit.foundation.mount_table import DRIVE_TYPES, Mount, drive_mount, mounts, read_file
from colabkit.foundation.reports import Report
from colabkit.foundation.units import format_bytes, format_things

_PACKAGES = (
    *("colabkit", "torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg"),
    *("ipython", "ipykernel", "ipywidgets", "tqdm", "psutil", "gdown", "fsspec"),
)


@dataclass(frozen=True, repr=False)
class RuntimeReport(Report):
    """What `runtime()` found.

    Attributes:
        place: where this is, as `Place.name` says it.
        shell: `"kernel"` in a notebook, `"IPython"` in its terminal, `"script"` otherwise.
        python: its version.
        cpus: what this process may use, which can be a fraction of a core.
        memory: RAM under the limits above this process.
        tmpfs: each tmpfs that data can go to.
        disks: each disk that data can go to.
        mounts: what other programs or machines serve, untouched: mountpoint and type.
        drive: the folder that `drive:` is mounted at, None where Drive is not mounted.
        gpus: as the driver names them.
        versions: of the packages that matter here.
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


def runtime() -> RuntimeReport:
    """Return where this runs and what it allows: CPUs and RAM under cgroup limits, tmpfs, disks, GPUs, versions.

    Takes a few milliseconds, imports no heavy package, starts no process and touches no remote mount.
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
        gpus=gpus(paths=packages),
        versions=dict(_versions(packages)),
    )


def _named(mount: Mount) -> str:
    name = DRIVE_TYPES.get(mount.fstype, mount.fstype)
    return f"{name}, read-only" if mount.readonly else name


def _package_folders(table: list[Mount]) -> list[str]:
    """Return Python's search path without what can hang, such as folders on Drive or the working folder."""
    texts = (path for path in sys.path if isinstance(path, str) and os.path.isabs(path))
    return [path for path in map(os.path.normpath, texts) if not can_hang(path, table)]


def _versions(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Yield installed packages with their versions."""
    for package in _PACKAGES:
        for found in importlib.metadata.distributions(name=package, path=folders):
            yield package, found.version
            break

"""Detection of the platform, and `runtime()`, which reports it with its resource limits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Container, Iterator, Mapping
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
from colabkit.foundation.mount_table import DRIVE_TYPES, Mount, drive_mount, mounts, read_file
from colabkit.foundation.reports import Report
from colabkit.foundation.telemetry.gpus import GpuReport, gpu_reports
from colabkit.foundation.units import format_bytes, format_things

_PACKAGES = (
    *("colabkit", "torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg"),
    *("ipython", "ipykernel", "ipywidgets", "tqdm", "psutil", "gdown", "fsspec"),
)
# A file that exists on Colab's hosted runtimes; google.colab.drive checks for it, too.
_HOSTNAME = "/var/colab/hostname"
# A variable that VS Code's Jupyter extension sets in every notebook.
_VS_CODE = "__vsc_ipynb_file__"
# PAPERSPACE_API_KEY is not listed, since users may set it on any machine.
_PAPERSPACE = ("PAPERSPACE_FQDN", "PAPERSPACE_METRIC_WORKLOAD_ID")
_JUPYTERHUB = ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_API_TOKEN")
_BY_FOLDER = {
    "/teamspace/studios/this_studio": "Lightning Studio",
    "/home/studio-lab-user": "SageMaker Studio Lab",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The platform that code runs on.

    Attributes:
        name: `"Colab"`, `"Colab in VS Code"`, `"Colab, local runtime"`, `"Colab Enterprise"`, `"Kaggle"`,
            `"Lightning Studio"`, `"SageMaker Studio Lab"`, `"Paperspace"`, `"JupyterHub"`, `"Jupyter"`, `"IPython"` or
            `"Python"`.
        shell: `"kernel"` in a notebook, `"IPython"` in an IPython terminal, `"script"` otherwise.
        can_mount_drive: whether `google.colab.drive` works, which requires the kernel of a hosted runtime.
    """

    name: str
    shell: str
    can_mount_drive: bool = False


def place_of(
    environ: Mapping[str, str], shell_class: str | None, variables: Container[str], exists: Callable[[str], bool]
) -> Place:
    """Detect the platform.

    Kaggle is checked first, since its image is built from Colab's and otherwise looks the same. Colab Enterprise is
    recognized by the variable that Google's client libraries check. Colab is checked before anything that a user can
    install or mount on it. The other hosted platforms and JupyterHub are recognized by a folder or by environment
    variables; elsewhere, the result depends only on the shell.

    Args:
        environ: the process's environment.
        shell_class: module and name of IPython's shell class; None outside of IPython.
        variables: the names in the user's namespace.
        exists: returns whether a path exists.
    """
    is_colab_shell = shell_class is not None and shell_class.startswith("google.colab")
    is_kernel = is_colab_shell or (shell_class is not None and shell_class.endswith("ZMQInteractiveShell"))
    shell = "script" if shell_class is None else "kernel" if is_kernel else "IPython"
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return Place("Kaggle", shell)
    if environ.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE":
        return Place("Colab Enterprise", shell)
    is_hosted = exists(_HOSTNAME)
    if is_colab_shell or (is_hosted and "COLAB_RELEASE_TAG" in environ):
        if not is_hosted:
            return Place("Colab, local runtime", shell)
        return Place("Colab in VS Code" if _VS_CODE in variables else "Colab", shell, is_colab_shell)
    for folder, name in _BY_FOLDER.items():
        if exists(folder):
            return Place(name, shell)
    if any(name in environ for name in _PAPERSPACE):
        return Place("Paperspace", shell)
    if any(name in environ for name in _JUPYTERHUB):
        return Place("JupyterHub", shell)
    return Place({"kernel": "Jupyter", "IPython": "IPython", "script": "Python"}[shell], shell)


def current_place() -> Place:
    """Detect the platform of this process; uses IPython only if it is already imported."""
    # The attribute is missing while IPython is being imported.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    name = f"{type(shell).__module__}.{type(shell).__name__}" if shell is not None else None
    return place_of(os.environ, name, getattr(shell, "user_ns", {}), _exists)


def _exists(path: str) -> bool:
    """Return whether a path exists; if accessing it can hang, only compare it with mount points and the home folder."""
    table = mounts()
    if not can_hang(path, table):
        return os.path.exists(path)
    known = [*(mount.point for mount in table), os.environ.get("HOME", "")]
    return any(one == path or one.startswith(f"{path}/") for one in known)


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

    Takes about 10 ms without a GPU. Imports no heavy packages, starts no processes and does not access remote mounts.

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

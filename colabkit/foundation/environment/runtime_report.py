"""Where this runs, told from facts in an order that cannot be fooled, and all that it allows: `runtime()`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

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
_HOSTNAME = "/var/colab/hostname"  # hosted runtimes have it; google.colab.drive itself asks for it
_VS_CODE = "__vsc_ipynb_file__"  # VS Code's Jupyter extension sets it in every notebook
_PAPERSPACE = ("PAPERSPACE_FQDN", "PAPERSPACE_METRIC_WORKLOAD_ID")  # PAPERSPACE_API_KEY is a user's, anywhere
_JUPYTERHUB = ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_API_TOKEN")
_BY_FOLDER = {
    "/teamspace/studios/this_studio": "Lightning Studio",
    "/home/studio-lab-user": "SageMaker Studio Lab",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where code runs.

    Attributes:
        name: `"Colab"`, `"Colab in VS Code"`, `"Colab, local runtime"`, `"Colab Enterprise"`, `"Kaggle"`,
            `"Lightning Studio"`, `"SageMaker Studio Lab"`, `"Paperspace"`, `"JupyterHub"`, `"Jupyter"`, `"IPython"` or
            `"Python"`.
        shell: `"kernel"` in a notebook, `"IPython"` in its terminal, `"script"` otherwise.
        can_mount_drive: whether `google.colab.drive` works here, which needs a hosted runtime's kernel.
    """

    name: str
    shell: str
    can_mount_drive: bool = False


def place_of(
    environ: Mapping[str, str], shell_class: str | None, variables: Container[str], exists: Callable[[str], bool]
) -> Place:
    """Return where code runs.

    Kaggle is asked first: its image is built from Colab's and looks like it in every other way. Colab Enterprise says
    itself what it is, as Google's own client libraries ask it. Colab comes before all that a user can set up or mount
    inside it; other hosts are known by what only they have.

    Args:
        environ: the process's environment.
        shell_class: module and name of IPython's shell class, None outside of IPython.
        variables: the names in the user's namespace.
        exists: whether a path exists.
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
    """Return where this code runs; asks IPython only where it is imported already."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # an import under way has none yet
    shell = get_ipython() if get_ipython is not None else None
    name = f"{type(shell).__module__}.{type(shell).__name__}" if shell is not None else None
    return place_of(os.environ, name, getattr(shell, "user_ns", {}), _exists)


def _exists(path: str) -> bool:
    """Return whether a path exists; of one that can hang, by the text of mounts and home alone."""
    table = mounts()
    if not can_hang(path, table):
        return os.path.exists(path)
    known = [*(mount.point for mount in table), os.environ.get("HOME", "")]
    return any(one == path or one.startswith(f"{path}/") for one in known)


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
        gpus=gpu_reports(paths=packages),
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

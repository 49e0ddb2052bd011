"""Detection of the platform, its shell, and its folder for local copies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colabkit.foundation.environment.limits import can_hang
from colabkit.foundation.mount_table import mounts

# This file exists on Colab's hosted runtimes; google.colab.drive checks for it, too.
_HOSTNAME = "/var/colab/hostname"
# VS Code's Jupyter extension sets this variable in every notebook.
_VS_CODE = "__vsc_ipynb_file__"
# Variables that identify Paperspace. They exclude PAPERSPACE_API_KEY, since users may set it on any machine.
_PAPERSPACE = ("PAPERSPACE_FQDN", "PAPERSPACE_METRIC_WORKLOAD_ID")
_JUPYTERHUB = ("JUPYTERHUB_SERVICE_PREFIX", "JUPYTERHUB_API_TOKEN")
_BY_FOLDER = {
    "/teamspace/studios/this_studio": "Lightning Studio",
    "/home/studio-lab-user": "SageMaker Studio Lab",
}
_LOCAL_DISKS = {"Kaggle": "/kaggle/temp", "Lightning Studio": "/cache", "Databricks": "/local_disk0"}
_COLAB_DISK = "/content"
_FOR_ONE_NOTEBOOK = ("Colab", "Colab in VS Code", "Colab Enterprise", "Kaggle")


@dataclass(frozen=True, slots=True)
class Place:
    """The platform that code runs on.

    Attributes:
        name: `"Colab"`, `"Colab in VS Code"`, `"Colab, local runtime"`, `"Colab Enterprise"`, `"Kaggle"`,
            `"Databricks"`, `"Lightning Studio"`, `"SageMaker Studio Lab"`, `"Paperspace"`, `"JupyterHub"`, `"Jupyter"`,
            `"IPython"` or `"Python"`.
        shell: `"kernel"` in a notebook, `"IPython"` in an IPython terminal, `"script"` otherwise.
        can_mount_drive: whether `google.colab.drive` works, which requires the kernel of a hosted runtime.
    """

    name: str
    shell: str
    can_mount_drive: bool = False

    @property
    def is_for_one_notebook(self) -> bool:
        """Whether the machine runs only this notebook and its programs."""
        return self.name in _FOR_ONE_NOTEBOOK


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
        exists: function that returns whether a path exists.
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
    if "DATABRICKS_RUNTIME_VERSION" in environ:
        return Place("Databricks", shell)
    for folder, name in _BY_FOLDER.items():
        if exists(folder):
            return Place(name, shell)
    if any(name in environ for name in _PAPERSPACE):
        return Place("Paperspace", shell)
    if any(name in environ for name in _JUPYTERHUB):
        return Place("JupyterHub", shell)
    return Place({"kernel": "Jupyter", "IPython": "IPython", "script": "Python"}[shell], shell)


def running_shell() -> Any:
    """Return the shell of IPython that runs this code, or None; IPython is not imported here."""
    # The attribute is missing while IPython is being imported.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def current_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Detect the platform of this process; uses IPython only if it is already imported."""
    shell = running_shell()
    name = f"{type(shell).__module__}.{type(shell).__name__}" if shell is not None else None
    return place_of(environ, name, getattr(shell, "user_ns", {}), _exists)


def local_root(environ: Mapping[str, str]) -> Path:
    """Return the default folder for local copies; the environment variable `COLABKIT_LOCAL` overrides it.

    It is on the local disk of the platform, if this user can write there, otherwise in the user's cache.
    """
    if chosen := environ.get("COLABKIT_LOCAL"):
        return Path(chosen).expanduser().absolute()
    # Kaggle's image contains Colab's folder, so the platform comes first.
    for folder in (_LOCAL_DISKS.get(current_place(environ).name), _COLAB_DISK):
        if folder is not None and _is_writable(folder):
            return Path(folder) / "colabkit"
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "colabkit"


def _is_writable(folder: str) -> bool:
    """Return whether this user can write to a folder, or can create Kaggle's folder, which may be missing."""
    holding = folder if os.path.isdir(folder) or folder != _LOCAL_DISKS["Kaggle"] else os.path.dirname(folder)
    return os.path.isdir(holding) and os.access(holding, os.W_OK | os.X_OK)


def _exists(path: str) -> bool:
    """Return whether a path exists; if accessing it can hang, only compare it with mount points and the home folder."""
    table = mounts()
    if not can_hang(path, table):
        return os.path.exists(path)
    known = [*(mount.point for mount in table), os.environ.get("HOME", "")]
    return any(one == path or one.startswith(f"{path}/") for one in known)

"""Where this runs: told from facts that are handed in, in an order that cannot be fooled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from colabkit.foundation.environment.storage import can_hang
from colabkit.foundation.mount_table import mounts

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

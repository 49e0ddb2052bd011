"""Kernels in which tests run notebooks: with the packages of the test environment, and with Colab's.

`COLABKIT_COLAB_PYTHON` names the interpreter of an environment with IPython 7.34, ipykernel 6.17.1, ipywidgets 7.7.1
and torch.
"""

from __future__ import annotations

import json
import os
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from trees import needs
from warm_python import Program

ROOT = Path(__file__).parents[2]
KINDS = ("newest", "colab")


def python_of(kind: str) -> str:
    """Return the interpreter for a kind of kernel; skip the test if there is none."""
    if kind == "newest":
        return sys.executable
    python = os.environ.get("COLABKIT_COLAB_PYTHON", "")
    needs("an environment with Colab's versions (COLABKIT_COLAB_PYTHON)", bool(python))
    return python


@contextmanager
def kernel_of(kind: str, folder: Path, *, is_warm: bool = False) -> Iterator[str]:
    """Yield the name of a kernel of the given kind, which writes its files to a folder; see `kernel_at()`."""
    search = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    with kernel_at(folder, [python_of(kind), "-m", "ipykernel_launcher"], search, is_warm=is_warm) as name:
        yield name


@contextmanager
def kernel_at(
    folder: Path,
    command: Sequence[str],
    search: Sequence[str | Path],
    environ: Mapping[str, str] = {},
    *,
    is_warm: bool = False,
) -> Iterator[str]:
    """Yield the name of a kernel that a command starts and that writes its files to a folder.

    Args:
        folder: folder for all files that the kernel writes.
        command: command line without the connection file.
        search: folders to search for modules before the default ones.
        environ: additional environment variables.
        is_warm: whether kernels that start in the block have imported torch, and so start faster.
    """
    kernel = folder / "kernels" / "tested"
    kernel.mkdir(parents=True)
    own = {"COLABKIT_LOCAL": str(folder / "near"), "IPYTHONDIR": str(folder / "ipython")}
    spec = {
        "argv": [*command, "-f", "{connection_file}"],
        "display_name": "tested",
        "language": "python",
        "env": {"PYTHONPATH": os.pathsep.join(map(str, search)), **own, **environ},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        if is_warm:
            patch.setattr("jupyter_client.launcher.Popen", Program)
        yield "tested"


def link_packages(purelib: str, folder: Path) -> Path:
    """Fill a folder with links to all packages of an environment except colabkit."""
    folder.mkdir()
    for path in Path(purelib).iterdir():
        if not path.name.startswith(("colabkit", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def make_environment(folder: Path, *packages: Path) -> Path:
    """Create an environment that finds packages in the given folders, in this order; return its interpreter."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "beside.pth").write_text("".join(f"{path}\n" for path in packages))
    return folder / "bin" / "python"

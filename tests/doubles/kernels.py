"""Kernels that tests run notebooks in: with the newest packages, and with Colab's.

`COLABKIT_COLAB_PYTHON` names the interpreter of an environment with IPython 7.34, ipykernel 6.17.1, ipywidgets 7.7.1
and torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from trees import needs

ROOT = Path(__file__).parents[2]
KINDS = ("newest", "colab")


def python_of(kind: str) -> str:
    """Return the interpreter of a kind; the test is skipped where there is none."""
    if kind == "newest":
        return sys.executable
    python = os.environ.get("COLABKIT_COLAB_PYTHON", "")
    needs("an environment with Colab's versions (COLABKIT_COLAB_PYTHON)", bool(python))
    return python


@contextmanager
def kernel_of(kind: str, folder: Path) -> Iterator[str]:
    """Give the name of a kernel of a kind, which keeps what it writes in a folder."""
    search = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    with kernel_at(folder, [python_of(kind), "-m", "ipykernel_launcher"], search) as name:
        yield name


@contextmanager
def kernel_at(
    folder: Path, command: Sequence[str], search: Sequence[str | Path], environ: Mapping[str, str] = {}
) -> Iterator[str]:
    """Give the name of a kernel that a command starts, and that keeps what it writes in a folder.

    Args:
        folder: for all that it writes.
        command: without the connection file.
        search: where it looks for modules before its own.
        environ: further variables.
    """
    kernel = folder / "kernels" / "tested"
    kernel.mkdir(parents=True)
    own = {"COLABKIT_NEAR": str(folder / "near"), "IPYTHONDIR": str(folder / "ipython")}
    spec = {
        "argv": [*command, "-f", "{connection_file}"],
        "display_name": "tested",
        "language": "python",
        "env": {"PYTHONPATH": os.pathsep.join(map(str, search)), **own, **environ},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        yield "tested"

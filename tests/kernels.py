"""Kernels that tests run notebooks in: with the newest packages, and with Colab's.

`COLABKIT_COLAB_PYTHON` names the interpreter of an environment with IPython 7.34, ipykernel 6.17.1, ipywidgets 7.7.1
and torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import needs

ROOT = Path(__file__).parent.parent
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
    kernel = folder / "kernels" / "tested"
    kernel.mkdir(parents=True)
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    spec = {
        "argv": [python_of(kind), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "tested",
        "language": "python",
        "env": {"PYTHONPATH": search, "COLABKIT_NEAR": str(folder / "near"), "IPYTHONDIR": str(folder / "ipython")},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        yield "tested"

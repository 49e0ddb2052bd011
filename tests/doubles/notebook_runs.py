"""Run notebooks in real kernels: of this environment, or of one with Colab's IPython, ipykernel and ipywidgets."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from kernels import ROOT, kernel_at, python_of
from nbclient import NotebookClient
from nbformat import NotebookNode
from notebook_files import FOLDER, code_cells, read

__all__ = ["Kernel", "NotebookRun", "colab_kernel", "kernel", "warm_kernel", "with_parameters"]

TESTS = Path(__file__).parent
CELL_DEADLINE_S = 480
STARTUP_DEADLINE_S = 240
STARTING = threading.Lock()
"""Held while a kernel starts, because kernels are found through an environment variable of the process."""


@dataclass(frozen=True)
class NotebookRun:
    """A notebook with its outputs, and its run time in seconds."""

    notebook: NotebookNode
    seconds: float

    def outputs(self, cell: str) -> list[NotebookNode]:
        (found,) = [one for one in code_cells(self.notebook) if one.id == cell]
        return found.outputs

    def text(self, cell: str = "") -> str:
        """Return all text output of a cell, or of the notebook."""
        chosen = self.outputs(cell) if cell else [each for one in code_cells(self.notebook) for each in one.outputs]
        return "\n".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in chosen)

    def data(self, cell: str, kind: str) -> list[str]:
        return [each.data[kind] for each in self.outputs(cell) if kind in each.get("data", {})]

    def panels(self, cell: str) -> list[str]:
        """Return the texts of the panels that a cell shows."""
        shown = [each.data for each in self.outputs(cell) if "Training panel" in str(each.get("data", {}))]
        return [data["text/plain"] for data in shown]


def with_parameters(name: str, **values: object) -> NotebookNode:
    """Return a stored notebook with the given values in its form; other values stay unchanged."""
    notebook = read(FOLDER / f"{name}.ipynb")
    (form,) = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    lines = form.source.splitlines()
    for key, value in values.items():
        (number,) = [number for number, line in enumerate(lines) if line.startswith(f"{key} = ")]
        lines[number] = f"{key} = {value!r}"
    form.source = "\n".join(lines)
    return notebook


class Kernel:
    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    def name_cells(self) -> None:
        """Name a cell in each request, as Colab's page does; Colab's command line does not."""
        self._client.kc.session.metadata["colab"] = {"cell_id": "cell"}

    def run(self, notebook: NotebookNode) -> NotebookRun:
        """Run all cells from top to bottom; raise an error if a cell fails."""
        self._client.nb = notebook
        # Discard display updates of an earlier run.
        self._client.reset_execution_trackers()
        began = time.monotonic()
        for number, cell in enumerate(notebook.cells):
            self._client.execute_cell(cell, number)
        return NotebookRun(copy.deepcopy(notebook), time.monotonic() - began)


@contextmanager
def kernel(
    folder: Path, python: str, *, search: Sequence[Path] = (ROOT,), work: Path | None = None, **environ: str
) -> Iterator[Kernel]:
    """Run a kernel within the block.

    Args:
        folder: folder for all files that the kernel writes.
        python: the kernel's interpreter.
        search: folders to search for modules before the default ones.
        work: the kernel's working folder; None uses a new one in `folder`.
        environ: additional environment variables.
    """
    with _started(folder, [python, "-m", "ipykernel_launcher"], search, work, environ) as started:
        yield started


@contextmanager
def warm_kernel(folder: Path) -> Iterator[Kernel]:
    """Run a kernel of this environment that has imported torch, as cells will do, within the block.

    Args:
        folder: folder for all files that the kernel writes.
    """
    command = [sys.executable, "-m", "ipykernel_launcher"]
    with _started(folder, command, (ROOT,), None, {}, is_warm=True) as started:
        yield started


@contextmanager
def colab_kernel(folder: Path, **environ: str) -> Iterator[Kernel]:
    """Run a warm kernel like hosted Colab's within the block; skip the test without an environment with its versions.

    Args:
        folder: folder for all files that the kernel writes.
        environ: additional environment variables.
    """
    command = [python_of("colab"), str(TESTS / "colab_kernel.py")]
    with _started(folder, command, (TESTS / "colab_double", ROOT, TESTS), None, environ, is_warm=True) as started:
        started.name_cells()
        yield started


@contextmanager
def _started(
    folder: Path,
    command: Sequence[str],
    search: Sequence[Path],
    work: Path | None,
    environ: Mapping[str, str],
    *,
    is_warm: bool = False,
) -> Iterator[Kernel]:
    work = work or folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    own = {
        "KERAS_HOME": str(folder / "keras"),
        # Threads that wait for each other are slow while other processes use the CPU.
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    with ExitStack() as running:
        with STARTING, kernel_at(folder, command, search, own, is_warm=is_warm) as name:
            client = NotebookClient(
                nbformat.v4.new_notebook(),
                timeout=CELL_DEADLINE_S,
                startup_timeout=STARTUP_DEADLINE_S,
                kernel_name=name,
                resources={"metadata": {"path": str(work)}},
            )
            running.enter_context(client.setup_kernel())
        yield Kernel(client)

"""Notebooks: clean in the repository, and run from top to bottom, twice, in a real kernel."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from colabkit.options import VERBS

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
MAGIC = re.compile(r"^(\s*(?:\w+ = )?)%(\w+)(.*)$", re.MULTILINE)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_template() -> None:
    assert FOLDER / "colabkit_template.ipynb" in NOTEBOOKS


@by_notebook
def test_stored_notebooks_are_valid_and_hold_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert cell.source.strip()
    assert "widgets" not in notebook.metadata
    assert notebook.cells[0].source.startswith("# ")


@by_notebook
def test_settings_are_a_form_tagged_parameters(path: Path) -> None:
    (settings,) = [cell for cell in code_cells(read(path)) if "parameters" in cell.metadata.get("tags", [])]
    assert settings.metadata["cellView"] == "form"
    assignments = [line for line in settings.source.splitlines() if " = " in line]
    assert assignments
    assert all(re.search(r"# ?@param ", line) for line in assignments)


@by_notebook
def test_cells_parse_and_their_magics_exist(path: Path) -> None:
    known = {verb.name for verb in VERBS if verb.is_magic} | {"load_ext", "pip"}
    for cell in code_cells(read(path)):
        assert {match[2] for match in MAGIC.finditer(cell.source)} <= known
        ast.parse(MAGIC.sub(r"\1None", cell.source))


@by_notebook
def test_notebooks_name_no_addresses(path: Path) -> None:
    assert "http" not in path.read_text(encoding="utf-8")


def outputs_text(notebook: NotebookNode) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_the_template_runs_twice_in_one_kernel_and_goes_on_where_it_was(tmp_path: Path) -> None:
    notebook = read(FOLDER / "colabkit_template.ipynb")
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
        first = outputs_text(notebook)
        html = [
            output.data["text/html"]
            for cell in code_cells(notebook)
            for output in cell.outputs
            if "Training panel" in output.get("data", {}).get("text/html", "")
        ]
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
        second = outputs_text(notebook)
    assert "Staged 1,797 files" in first
    assert "Packed 1,797 images 8x8x3" in first
    accuracy = float(re.search(r"test accuracy ([\d.]+)", first)[1])
    assert accuracy >= 0.95
    assert len(html) == 1, "one panel, whose last frame stays in the notebook"
    assert "epoch 3/3" in html[0]
    assert "Already staged" in second
    assert "Already packed" in second
    assert "nothing was left to do" in second

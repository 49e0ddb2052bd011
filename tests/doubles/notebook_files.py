"""Read the notebooks of the repository, and write them in one format.

`python tests/doubles/notebook_files.py` rewrites all notebooks without outputs and execution counts, with cell IDs
and sorted keys, and copies the template into the package, from which `write_template()` reads it.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import NotebookNode

__all__ = ["FOLDER", "NOTEBOOKS", "PACKAGED", "TEMPLATE", "cell_named", "code_cells", "read", "stored"]

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TEMPLATE = FOLDER / "colabkit_template.ipynb"
PACKAGED = FOLDER.parent / "colabkit" / "notebook" / "template.ipynb"
"""The copy of the template in the package."""

METADATA = {
    "accelerator": "GPU",
    "colab": {"toc_visible": True},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("cellView", "jupyter", "tags")


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def cell_named(notebook: NotebookNode, name: str) -> NotebookNode:
    (found,) = [cell for cell in notebook.cells if cell.id == name]
    return found


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def stored(notebook: NotebookNode) -> str:
    made = nbformat.from_dict({**notebook, "metadata": METADATA})
    for cell in made.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name in CELL_METADATA}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(made) + "\n"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        path.write_text(stored(read(path)), encoding="utf-8")
    PACKAGED.write_bytes(TEMPLATE.read_bytes())

"""Read the notebooks of the repository, and write them in a uniform format.

`python tests/doubles/notebook_files.py` rewrites all notebooks in the stored format, with cell IDs and sorted keys, and
copies the template into the package, from which `write_template()` reads it. With names, as in
`python tests/doubles/notebook_files.py quick_start keras`, it first runs these notebooks and stores their outputs, so
that a viewer without a kernel shows them. The template, which users fill in, has no outputs.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

__all__ = [
    "FOLDER",
    "HOME",
    "NOTEBOOKS",
    "PACKAGED",
    "SHOWN",
    "TEMPLATE",
    "cell_named",
    "code_cells",
    "kinds",
    "read",
    "stored",
]

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TEMPLATE = FOLDER / "colabkit_template.ipynb"
SHOWN = [path for path in NOTEBOOKS if path != TEMPLATE]
"""The notebooks that are stored with their outputs."""
PACKAGED = FOLDER.parent / "colabkit" / "notebook" / "template.ipynb"
"""The copy of the template in the package."""

HOME = "/home/you"
"""The folder that stored outputs show in place of the one in which the notebook ran."""

METADATA = {
    "accelerator": "GPU",
    "colab": {"toc_visible": True},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("cellView", "jupyter", "tags")
# Output types that viewers without a kernel can show; they do not include widgets.
SHOWN_TYPES = ("image/png", "text/html", "text/markdown", "text/plain")
# The last line of a progress bar, such as "pack: 1,797/1,797 samples in 1.3 s".
PROGRESS = re.compile(r"\w+: [\d,]+.* in [\d.]+ .+")
TABLE = re.compile(r"^\|.*\|\n(?:\|.*\|(?:\n|$))+", re.MULTILINE)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def cell_named(notebook: NotebookNode, name: str) -> NotebookNode:
    (found,) = [cell for cell in notebook.cells if cell.id == name]
    return found


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: NotebookNode) -> list[str]:
    """Return the kind of each output of a code cell: the name of a stream, or the types of the data."""
    return [each.get("name") or " ".join(sorted(each.get("data", {}))) for each in outputs_of(cell)]


def outputs_of(cell: NotebookNode) -> list[NotebookNode]:
    """Return the outputs of a cell in the stored format.

    Adjacent text is joined. Three kinds of output are left out: widgets; the progress of operations, which quick ones
    do not show; and standard error, whose warnings depend on the versions of packages.
    """
    found: list[NotebookNode] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if found and found[-1].get("name") == output.name:
                found[-1].text += output.text
            else:
                found.append(nbformat.from_dict(dict(output)))
        elif output.output_type in {"display_data", "execute_result"}:
            data = {kind: output.data[kind] for kind in SHOWN_TYPES if kind in output.data}
            is_progress = output.output_type == "display_data" and PROGRESS.fullmatch(data.get("text/plain", ""))
            if data and not is_progress and "application/vnd.jupyter.widget-view+json" not in output.data:
                found.append(nbformat.v4.new_output(output.output_type, data=data))
    return found


def stored(notebook: NotebookNode, *, has_outputs: bool = True) -> str:
    made = nbformat.from_dict({**notebook, "metadata": METADATA})
    for number, cell in enumerate(code_cells(made), 1):
        has_run = has_outputs and cell.execution_count is not None
        cell.outputs = outputs_of(cell) if has_run else []
        cell.execution_count = number if has_run else None
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    for cell in made.cells:
        cell.metadata = {name: value for name, value in cell.metadata.items() if name in CELL_METADATA}
    return nbformat.writes(made) + "\n"


def run(path: Path) -> NotebookNode:
    """Run a notebook in a new kernel, and return it with its outputs and, if it has one, its table of results."""
    # Imported here, because tests of the stored files need no kernel.
    from notebook_runs import kernel

    with tempfile.TemporaryDirectory() as folder, kernel(Path(folder), sys.executable, TMPDIR=folder) as started:
        ran = started.run(read(path)).notebook
    text = nbformat.writes(ran)
    # The working folder is inside the other folder, so replace it first.
    for inner in (f"{folder}/work", folder, str(FOLDER.parent)):
        text = text.replace(inner, HOME)
    shown = nbformat.reads(text, as_version=4)
    for cell in shown.cells:
        if cell.id == "result":
            (output,) = cell_named(shown, "compare").outputs
            (shown_before,) = TABLE.findall(cell.source)
            cell.source = cell.source.replace(shown_before, output.data["text/markdown"] + "\n")
    return shown


def main(*names: str) -> None:
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        path.write_text(stored(run(path)), encoding="utf-8")
    for path in NOTEBOOKS:
        path.write_text(stored(read(path), has_outputs=path != TEMPLATE), encoding="utf-8")
    PACKAGED.write_bytes(TEMPLATE.read_bytes())


if __name__ == "__main__":
    main(*sys.argv[1:])

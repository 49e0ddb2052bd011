"""Stored notebooks have one format, short cells, outputs for viewers without a kernel, and valid magics."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from notebook_files import (
    FOLDER,
    HOME,
    NOTEBOOKS,
    PACKAGED,
    SHOWN,
    TEMPLATE,
    cell_named,
    code_cells,
    kinds,
    read,
    stored,
)

from colabkit.notebook.lines import split_line
from colabkit.notebook.options import parser_of
from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import CELLS, VERBS

by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
by_shown = pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
RUN = "run python tests/doubles/notebook_files.py NAME"
# Folders that exist on every machine.
EVERYWHERE = ("/dev", "/tmp")
STREAMS = (("stdout", "a"), ("stderr", "a warning"), ("stdout", "b"))
LINES = {verb.name: verb for verb in VERBS if verb.is_magic}
BODIES = {verb.name: verb for verb in CELLS}
OTHERS = {"colabkit", "env", "load_ext", "pip"}
ASSIGNED = re.compile(r"^(\w+(?:, \w+)*) = ", re.MULTILINE)
LINE_MAGIC = re.compile(r"^(\s*(?:\w+ = )?)%(\w+)(.*)$", re.MULTILINE)
CELL_MAGIC = re.compile(r"\A%%(\w+)(.*)\n")
MOST_LINES = 18
# Maximum length of a line; Colab cuts off longer lines on a small screen.
MOST_COLUMNS = 100
MOST_LINES_OF_A_FUNCTION = 5
MOST_CELLS_OF_THE_TEMPLATE = 12
MOST_BYTES = 300_000
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
# Packages that `pip install .` installs, and colabkit itself.
PLAIN = {"IPython", "PIL", "colabkit", "ipywidgets", "numpy", "torch", "torchvision"}


class AnyValue(str):
    """A stand-in for the value of any variable, such as a path or a report with a path."""

    __slots__ = ()
    path = "value"


def as_python(source: str) -> str:
    return LINE_MAGIC.sub(r"\1None", CELL_MAGIC.sub("", source))


def settings_of(notebook: NotebookNode) -> NotebookNode:
    (found,) = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    return found


def texts_of(output: NotebookNode) -> list[str]:
    """Return an output as text; the text of HTML follows its tags."""
    data = output.get("data", {})
    html = re.sub(r"<[^>]*>", " ", data.get("text/html", ""))
    return [output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", ""), html]


def imports_of(cell: NotebookNode) -> Iterator[str]:
    for node in ast.walk(ast.parse(as_python(cell.source))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def magics_of(source: str) -> Iterator[tuple[str, str, dict[str, Verb]]]:
    """Yield the name and the line of each magic in a cell, and the table to look up its name in."""
    if found := CELL_MAGIC.match(source):
        yield found[1], found[2], BODIES
    for match in LINE_MAGIC.finditer(CELL_MAGIC.sub("", source)):
        yield match[2], match[3], LINES


def test_the_guide_to_the_notebooks_lists_all_of_them() -> None:
    guide = (FOLDER.parent / "docs" / "tutorials" / "notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+\.ipynb)`", guide, re.MULTILINE)) == {path.name for path in NOTEBOOKS}


@by_notebook
def test_notebooks_are_valid_and_stored_in_one_format(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    text = stored(notebook, has_outputs=path != TEMPLATE)
    assert path.read_text(encoding="utf-8") == text, "run python tests/doubles/notebook_files.py"


def test_the_stored_format_keeps_ids_and_forms_and_what_a_viewer_can_show(tmp_path: Path) -> None:
    form = nbformat.v4.new_code_cell("1", id="one", execution_count=3, metadata={"cellView": "form", "scrolled": True})
    texts = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in STREAMS]
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "a widget"}
    shown = {"text/html": "<b>1</b>", "text/plain": "1", "application/json": {}}
    form.outputs = [
        *texts,
        nbformat.v4.new_output("display_data", data=widget),
        nbformat.v4.new_output("execute_result", data=shown, execution_count=3, metadata={"isolated": True}),
    ]
    new = nbformat.v4.new_code_cell("2", id="two")
    file = tmp_path / "run.ipynb"
    file.write_text(stored(nbformat.v4.new_notebook(cells=[form, new], metadata={"widgets": {}})))
    found = read(file)
    nbformat.validate(found)
    assert "widgets" not in found.metadata
    clean, unrun = found.cells
    assert (clean.id, clean.execution_count, clean.metadata) == ("one", 1, {"cellView": "form"})
    assert kinds(clean) == ["stdout", "text/html text/plain"]
    text, result = clean.outputs
    assert text.text == "ab"
    assert (result.data, result.metadata) == ({"text/html": "<b>1</b>", "text/plain": "1"}, {})
    assert (unrun.outputs, unrun.execution_count) == ([], None)
    assert file.read_text() == stored(found)
    assert file.read_text().startswith('{\n "cells": [\n  {\n   "cell_type"')
    assert [cell.outputs for cell in nbformat.reads(stored(found, has_outputs=False), 4).cells] == [[], []]


@by_shown
def test_notebooks_are_stored_with_the_outputs_of_a_complete_run(path: Path) -> None:
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], RUN
    assert "error" not in {output.output_type for cell in cells for output in cell.outputs}
    assert path.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("path", [path for path in SHOWN if path.stem != "ray_train"], ids=lambda path: path.stem)
def test_the_last_frame_of_the_panel_is_stored_as_html_and_text(path: Path) -> None:
    outputs = [output.data for cell in code_cells(read(path)) for output in cell.outputs if "data" in output]
    panels = [data for data in outputs if "Training panel" in data.get("text/html", "")]
    assert panels, RUN
    for data in panels:
        assert re.match(r"Finished|Stopped", data["text/plain"])


@by_shown
def test_stored_outputs_name_no_folder_of_the_machine_that_made_them(path: Path) -> None:
    texts = [text for cell in code_cells(read(path)) for output in cell.outputs for text in texts_of(output)]
    folders = re.findall(r"(?<![\w.)\]<}/])(/\w+)/\w", "\n".join(texts))
    assert set(folders) <= {"/" + HOME.split("/")[1], *EVERYWHERE}


def test_the_table_at_the_top_of_the_slow_loop_is_that_of_its_end() -> None:
    notebook = read(FOLDER / "why_is_my_training_slow.ipynb")
    assert [cell.id for cell in notebook.cells][:2] == ["title", "result"]
    (compared,) = cell_named(notebook, "compare").outputs
    shown = TABLE_ROW.findall(cell_named(notebook, "result").source)
    assert shown == compared.data["text/markdown"].splitlines(), RUN
    assert len(shown) == 5


@by_shown
def test_code_is_plain(path: Path) -> None:
    for cell in code_cells(read(path)):
        if "cellView" in cell.metadata:
            continue
        for node in ast.walk(ast.parse(as_python(cell.source))):
            assert not isinstance(node, ast.NamedExpr), cell.id
            assert not (isinstance(node, ast.Name) and node.id == "itertools"), cell.id


@by_shown
def test_imports_are_public_and_other_packages_are_installed_first(path: Path) -> None:
    installed: set[str] = set()
    for cell in code_cells(read(path)):
        installed |= set(re.findall(r"^%pip install --quiet (\w+)$", cell.source, re.MULTILINE))
        for name in imports_of(cell):
            package, *inner = name.split(".")
            assert package in PLAIN | installed | sys.stdlib_module_names, f"{cell.id}: {name}"
            assert package != "colabkit" or [*inner[:1]] in [[], ["augment"], ["sampler"], ["types"], ["errors"]]


@by_notebook
def test_cells_are_short_named_and_not_empty(path: Path) -> None:
    notebook = read(path)
    assert notebook.cells[0].source.startswith("# ")
    names = [cell.id for cell in notebook.cells]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
    for cell in notebook.cells:
        assert cell.source.strip() == cell.source
        assert cell.source
    for cell in code_cells(notebook):
        if "cellView" not in cell.metadata:
            lines = cell.source.splitlines()
            assert len(lines) <= MOST_LINES, cell.id
            assert max(map(len, lines)) <= MOST_COLUMNS, cell.id


@by_notebook
def test_titles_are_in_sentence_case(path: Path) -> None:
    names = {"Drive", "Ray", "Train"}
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    for title in re.findall(r"^#+ (.+)$", "\n".join(texts), re.MULTILINE):
        first, *others = re.findall(r"[\w%]+", title)
        assert not first[0].islower()
        assert [word for word in others if word[0].isupper() and word not in names] == []


@by_notebook
def test_functions_have_at_most_five_lines(path: Path) -> None:
    for cell in code_cells(read(path)):
        for node in ast.walk(ast.parse(as_python(cell.source))):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                assert node.end_lineno - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{cell.id}: {node.lineno}"


def test_the_template_is_short_and_has_one_form_to_fill_in() -> None:
    notebook = read(TEMPLATE)
    # `write_template()` adds a cell.
    assert len(notebook.cells) <= MOST_CELLS_OF_THE_TEMPLATE - 1
    assert [cell.id for cell in notebook.cells if "@param" in cell.source] == ["settings"]
    assert [cell.id for cell in code_cells(notebook)] == ["settings", "install", "train", "launcher"]


def test_the_package_contains_the_template() -> None:
    assert PACKAGED.read_bytes() == TEMPLATE.read_bytes(), "run python tests/doubles/notebook_files.py"


def test_all_notebooks_install_colabkit_in_the_same_way() -> None:
    assert len({cell_named(read(path), "install").source for path in NOTEBOOKS}) == 1


@by_notebook
def test_settings_are_a_form_that_ends_with_the_source_of_colabkit(path: Path) -> None:
    settings = settings_of(read(path))
    assert settings.metadata["cellView"] == "form"
    assert settings.source.startswith("# @title Settings\n")
    lines = [line for line in settings.source.splitlines() if not line.startswith("# @")]
    assert lines[-1] == 'INSTALL_FROM = ""  # @param {type:"string"}'
    for line in lines:
        value = re.fullmatch(r"[A-Z_]+ = (.+?)  # @param (.+)", line)
        assert value, line
        ast.literal_eval(value[1])
        assert re.fullmatch(
            r'\{type:"(string|integer|boolean)"\}|\{type:"slider", .+\}|\[.+\] \{(type:"raw"|allow-input: true)\}',
            value[2],
        )


@by_notebook
def test_magics_exist_and_their_options_are_valid(path: Path) -> None:
    notebook = read(path)
    assigned = [names.split(", ") for cell in code_cells(notebook) for names in ASSIGNED.findall(cell.source)]
    values: dict[str, object] = dict.fromkeys(itertools.chain.from_iterable(assigned), AnyValue("value"))
    exec(settings_of(notebook).source, values)
    found = [magic for cell in code_cells(notebook) for magic in magics_of(cell.source)]
    assert found
    for name, line, table in found:
        if table is LINES and name in OTHERS:
            continue
        assert name in table, f"no magic %{name}"
        parser_of(table[name], f"%{name}").parse_args(split_line(line, values))


@by_notebook
def test_cells_contain_no_addresses_and_no_absolute_paths(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells)
    assert "http" not in text
    assert not re.search(r"[\"'` ]/(?!content\b)\w+/", text)


@by_notebook
def test_cells_show_their_last_expression_instead_of_printing_it(path: Path) -> None:
    for cell in code_cells(read(path)):
        *_, last = ast.parse(as_python(cell.source)).body
        is_print = isinstance(last, ast.Expr) and ast.unparse(last).startswith("print(")
        assert not is_print, cell.id

"""Stored notebooks have one format, no outputs and short cells, and use existing magics with valid options."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from notebook_files import FOLDER, NOTEBOOKS, PACKAGED, TEMPLATE, cell_named, code_cells, read, stored

from colabkit.notebook.lines import split_line
from colabkit.notebook.options import parser_of
from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import CELLS, VERBS

by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
LINES = {verb.name: verb for verb in VERBS if verb.is_magic}
BODIES = {verb.name: verb for verb in CELLS}
OTHERS = {"colabkit", "load_ext"}
ASSIGNED = re.compile(r"^(\w+(?:, \w+)*) = ", re.MULTILINE)
LINE_MAGIC = re.compile(r"^(\s*(?:\w+ = )?)%(\w+)(.*)$", re.MULTILINE)
CELL_MAGIC = re.compile(r"\A%%(\w+)(.*)\n")
MOST_LINES = 18
# Colab cuts off longer lines on a small screen.
MOST_COLUMNS = 100
MOST_LINES_OF_A_FUNCTION = 5
MOST_CELLS_OF_THE_TEMPLATE = 12


class AnyValue(str):
    """A stand-in for the value of any variable, such as a path or a report with a path."""

    __slots__ = ()
    path = "value"


def as_python(source: str) -> str:
    return LINE_MAGIC.sub(r"\1None", CELL_MAGIC.sub("", source))


def settings_of(notebook: NotebookNode) -> NotebookNode:
    (found,) = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    return found


def magics_of(source: str) -> Iterator[tuple[str, str, dict[str, Verb]]]:
    """Yield the name and the line of each magic in a cell, and the table to look up its name in."""
    if found := CELL_MAGIC.match(source):
        yield found[1], found[2], BODIES
    for match in LINE_MAGIC.finditer(CELL_MAGIC.sub("", source)):
        yield match[2], match[3], LINES


def test_there_are_four_notebooks() -> None:
    names = ["bring_your_own_loop", "colabkit_template", "resume_bit_for_bit", "why_is_my_training_slow"]
    assert [path.stem for path in NOTEBOOKS] == names


def test_the_readme_lists_every_notebook() -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in NOTEBOOKS} <= set(re.findall(r"\(notebooks/([\w.]+)\)", readme))


@by_notebook
def test_notebooks_are_valid_and_stored_in_one_format(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert path.read_text(encoding="utf-8") == stored(notebook), "run python tests/doubles/notebook_files.py"


def test_the_stored_format_has_no_outputs_and_keeps_ids_and_forms(tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell("1", id="one", execution_count=3, metadata={"cellView": "form", "scrolled": True})
    cell.outputs = [nbformat.v4.new_output("stream", text="1")]
    file = tmp_path / "run.ipynb"
    file.write_text(stored(nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})))
    found = read(file)
    nbformat.validate(found)
    assert "widgets" not in found.metadata
    (clean,) = found.cells
    assert (clean.id, clean.outputs, clean.execution_count, clean.metadata) == ("one", [], None, {"cellView": "form"})
    assert file.read_text().startswith('{\n "cells": [\n  {\n   "cell_type"')


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
    names = {"Keras", "Lightning", "Accelerate", "Python", "Drive"}
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
def test_notebooks_contain_no_addresses_and_no_absolute_paths(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "http" not in text
    assert not re.search(r"[\"'` ]/(?!content\b)\w+/", text)


@by_notebook
def test_cells_show_their_last_expression_instead_of_printing_it(path: Path) -> None:
    for cell in code_cells(read(path)):
        *_, last = ast.parse(as_python(cell.source)).body
        is_print = isinstance(last, ast.Expr) and ast.unparse(last).startswith("print(")
        assert not is_print, cell.id

"""The house of CONTRIBUTING.md: its table names every module, and imports never go up."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "colabkit"
ROW = re.compile(r"\| (\d+) \| `(\w+)` \| .+ \|")


def layers() -> dict[str, int]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {match[2]: int(match[1]) for match in map(ROW.fullmatch, text.splitlines()) if match}


def module_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def imports_of(file: Path) -> set[str]:
    """Return the first names below `colabkit` that a file imports, anywhere in it; type checking does not count."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            if node.module == "colabkit":
                found.update(alias.name for alias in node.names)
            elif node.module and node.module.startswith("colabkit."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("colabkit."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


def test_the_table_names_exactly_the_modules_there_are() -> None:
    assert set(layers()) == {module_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_down_or_stay_inside(file: Path) -> None:
    layer = layers()
    for name in imports_of(file):
        assert name in layer, f"{file} imports {name}, which is no module"
        assert layer[name] <= layer[module_of(file)], f"{file} imports {name} from a higher layer"


def test_no_module_of_a_layer_imports_in_a_circle() -> None:
    graph = {module_of(file): set() for file in FILES}
    for file in FILES:
        graph[module_of(file)] |= imports_of(file) - {module_of(file)}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for inner in graph[module]:
                walk(inner, (*path, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_files_stay_short() -> None:
    for file in FILES:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 450, f"{file} has outgrown one purpose"

"""Rules for the package's structure, such as imports without cycles, unique names of types and short files."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import colabkit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "colabkit"
SUBPACKAGES = ("foundation", "storage", "packs", "loading", "training", "monitoring", "notebook")
NAMESPACES = ("augment", "errors", "sampler", "types")
"""Public namespaces besides the subpackages. They import only from the subpackages' `__init__` modules."""

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def subpackage_of(module: str) -> str:
    subpackage = module.split(".")[1] if "." in module else ""
    return subpackage if subpackage in SUBPACKAGES else ""


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of an imported colabkit module and its import statement, including imports inside functions."""
    file = MODULES[module]
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            targets = [node.module or ""]
            targets += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            continue
        known = [target for target in targets if target in MODULES]
        # `from package import module` imports `module`; `from module import name` also imports `module`.
        deepest = {target for target in known if not any(other.startswith(f"{target}.") for other in known)}
        found += [(target, ast.unparse(node)) for target in deepest]
    return tuple(found)


def test_modules_import_only_from_their_own_subpackage_and_earlier_ones() -> None:
    wrong = []
    for module in MODULES:
        for target, line in imports_of(module):
            if not subpackage_of(module) or (subpackage_of(module) == SUBPACKAGES[-1] and target == "colabkit"):
                # Public namespaces may import from every subpackage; the last subpackage may import `colabkit`.
                continue
            if not subpackage_of(target) or SUBPACKAGES.index(subpackage_of(target)) > SUBPACKAGES.index(
                subpackage_of(module)
            ):
                wrong.append(f"{module}: {line}")
    assert wrong == []


def test_other_subpackages_are_imported_through_their_init_modules() -> None:
    wrong = []
    for module in MODULES:
        for target, line in imports_of(module):
            if not subpackage_of(target):
                continue
            is_from_init = line.startswith(f"from colabkit.{subpackage_of(target)} import ")
            if is_from_init == (subpackage_of(target) == subpackage_of(module)) and not (
                is_from_init and target.count(".") > 1
            ):
                wrong.append(f"{module}: {line}")
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    finished: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in finished:
            for target, _ in imports_of(module):
                if target != module and target.count(".") > 1:
                    walk(target, (*path, module))
            finished.add(module)

    for module in MODULES:
        walk(module, ())


def classes_and_aliases() -> Iterator[tuple[str, str]]:
    """Yield the name and module of each class, and of each type alias, such as `Name = tuple[int, str]`."""
    for module, file in MODULES.items():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                yield node.name, module
        for node in tree_of(file).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                yield ast.unparse(node.target), module
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
                name = ast.unparse(node.targets[0])
                # Names of constants have no lower-case letters.
                if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*", name):
                    yield name, module


def test_names_of_classes_and_type_aliases_are_unique() -> None:
    homes = defaultdict(list)
    for name, module in classes_and_aliases():
        homes[name.lstrip("_")].append(f"{module}.{name}")
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_init_modules_contain_only_a_docstring_and_names() -> None:
    wrong = []
    for file in FILES:
        if file.name != "__init__.py":
            continue
        first, *rest = tree_of(file).body
        assert isinstance(first, ast.Expr), f"{file} has no docstring"
        for node in rest:
            is_dunder = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()").startswith("__")
            if not is_dunder and not isinstance(node, ast.Import | ast.ImportFrom):
                wrong.append(f"{file}, line {node.lineno}: {ast.unparse(node):.60}")
    assert wrong == []


def test_only_init_modules_and_public_namespaces_define_all() -> None:
    listing = [
        module
        for module, file in MODULES.items()
        if file.name != "__init__.py" and module.removeprefix("colabkit.") not in NAMESPACES
        for node in tree_of(file).body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    assert listing == []


def test_init_modules_describe_every_module_and_export_only_used_names() -> None:
    wrong = []
    for subpackage in SUBPACKAGES:
        package = importlib.import_module(f"colabkit.{subpackage}")
        text = inspect.getdoc(package) or ""
        inside = {path.parent.name for path in (PACKAGE / subpackage).glob("*/__init__.py")}
        inside |= {path.stem for path in (PACKAGE / subpackage).glob("*.py")} - {"__init__"}
        wrong += [f"{subpackage} does not describe {name}" for name in inside if f"`{name}`" not in text]
        named = {word for line in re.findall(r"^- (.*?):", text, re.MULTILINE) for word in re.findall(r"`(\w+)`", line)}
        wrong += [f"{subpackage} has no {name}" for name in named - inside]
        wrong += [f"nobody imports {subpackage}.{name}" for name in set(package.__all__) - used_names()[subpackage]]
    assert wrong == []


@cache
def used_names() -> dict[str, set[str]]:
    """Return the names that the package, its tests and notebooks import from each subpackage."""
    used: dict[str, set[str]] = defaultdict(set)
    line = re.compile(r"from (?:colabkit)?\.(\w+) import (\([^)]*\)|[^\n\\(\"]*)")
    for root in (PACKAGE, ROOT / "tests", ROOT / "notebooks"):
        for file in root.rglob("*"):
            if file.suffix in (".py", ".ipynb") or file == PACKAGE / "__init__.pyi":
                for subpackage, names in line.findall(file.read_text(encoding="utf-8")):
                    used[subpackage] |= set(re.findall(r"\w+", names))
    return used


def test_no_public_function_has_the_name_of_a_module() -> None:
    modules = {module.rpartition(".")[2] for module in MODULES}
    functions = {name for name in colabkit.__all__ if isinstance(getattr(colabkit, name), types.FunctionType)}
    assert functions & modules == set()


def test_files_stay_short() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


@pytest.mark.full
def test_no_test_module_imports_another() -> None:
    """Code that tests share is in `tests/doubles` or in a `conftest.py`; `tests/faults` is a separate program."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    names = [file.stem for file in files if file.stem.startswith("test_")]
    assert sorted(set(names)) == sorted(names), "two test files share a name"
    wrong = []
    for file in files:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom):
                targets = [node.module or "."]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            wrong += [
                f"{file}: {name}"
                for name in targets
                if name.partition(".")[0] in {*names, "", "tests", "conftest"} and name != "tests.faults"
            ]
    assert wrong == []


def test_test_files_are_named_after_what_they_test() -> None:
    """Names have the form `tests/<subpackage>/test_<module>_<aspect>.py`; the aspect is optional.

    The subpackage's name may precede the module's.
    """
    wrong = []
    for subpackage in SUBPACKAGES:
        names = {path.stem for path in (PACKAGE / subpackage).rglob("*") if path.suffix == ".py" or path.is_dir()}
        for file in sorted((ROOT / "tests" / subpackage).glob("test_*.py")):
            stem = file.stem.removeprefix("test_").removeprefix(f"{subpackage}_")
            if not any(f"{stem}_".startswith(f"{name}_") for name in names):
                wrong.append(f"{subpackage}: {file.name}")
    assert wrong == []


def test_paths_in_the_contributing_guide_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []

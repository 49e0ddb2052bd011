"""The structure of the package: rooms in order, front doors, no cycles, and one class for each name."""

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

import colabkit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "colabkit"
ROOMS = ("foundation", "storage", "packs", "loading", "training", "monitoring", "notebook")
FACES = ("augment", "errors", "sampler", "types")
"""Public namespaces beside the rooms: they only import from front doors."""

FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = {room: PACKAGE / room / "__init__.pyi" for room in ROOMS}


def name_of(file: Path) -> str:
    """Return the dotted name of a module; a package has that of its folder."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def room_of(module: str) -> str:
    """Return the room of a module, empty for the public namespaces."""
    room = module.split(".")[1] if "." in module else ""
    return room if room in ROOMS else ""


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> tuple[tuple[str, str], ...]:
    """Return the modules of colabkit that a module imports anywhere, also for type checking, with the line as text."""
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
        # `from package import module` imports the module; `from module import name` the module itself.
        deepest = {target for target in known if not any(other.startswith(f"{target}.") for other in known)}
        found += [(target, ast.unparse(node)) for target in deepest]
    return tuple(found)


def test_modules_import_only_from_their_own_room_and_the_rooms_above_it() -> None:
    wrong = []
    for module in MODULES:
        for target, line in imports_of(module):
            if not room_of(module) or (room_of(module) == ROOMS[-1] and target == "colabkit"):
                continue  # public namespaces may import from every room, the last room may use the package as users do
            if not room_of(target) or ROOMS.index(room_of(target)) > ROOMS.index(room_of(module)):
                wrong.append(f"{module}: {line}")
    assert wrong == []


def test_other_rooms_are_imported_through_their_front_doors() -> None:
    wrong = []
    for module in MODULES:
        for target, line in imports_of(module):
            if not room_of(target):
                continue
            is_door = line.startswith(f"from colabkit.{room_of(target)} import ")
            if is_door == (room_of(target) == room_of(module)) and not (is_door and target.count(".") > 1):
                wrong.append(f"{module}: {line}")
    assert wrong == []


def test_no_files_import_each_other_in_a_circle() -> None:
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


def classes() -> Iterator[tuple[str, str]]:
    for module, file in MODULES.items():
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                yield node.name, module


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for name, module in classes():
        homes[name.lstrip("_")].append(f"{module}.{name}")
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_package_files_hold_a_docstring_and_names_only() -> None:
    wrong = []
    for file in FILES:
        if file.name != "__init__.py":
            continue
        first, *rest = tree_of(file).body
        assert isinstance(first, ast.Expr), f"{file} does not explain its folder"
        for node in rest:
            is_dunder = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()").startswith("__")
            if not is_dunder and not isinstance(node, ast.Import | ast.ImportFrom):
                wrong.append(f"{file}, line {node.lineno}: {ast.unparse(node):.60}")
    assert wrong == []


def test_only_front_doors_list_their_names() -> None:
    listing = [
        module
        for module, file in MODULES.items()
        if file.name != "__init__.py" and module.removeprefix("colabkit.") not in FACES
        for node in tree_of(file).body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    assert listing == []


def test_front_doors_explain_every_module_and_offer_only_what_is_used() -> None:
    wrong = []
    for room in ROOMS:
        door = importlib.import_module(f"colabkit.{room}")
        text = inspect.getdoc(door) or ""
        inside = {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")}
        inside |= {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
        wrong += [f"{room} does not explain {name}" for name in inside if f"`{name}`" not in text]
        named = {word for line in re.findall(r"^- (.*?):", text, re.MULTILINE) for word in re.findall(r"`(\w+)`", line)}
        wrong += [f"{room} has no {name}" for name in named - inside]
        wrong += [f"nobody imports {room}.{name}" for name in set(door.__all__) - used_names()[room]]
    assert wrong == []


@cache
def used_names() -> dict[str, set[str]]:
    """Return, for each room, the names that anything imports through its front door."""
    used: dict[str, set[str]] = defaultdict(set)
    line = re.compile(r"from (?:colabkit)?\.(\w+) import (\([^)]*\)|[^\n\\(\"]*)")
    for root in (PACKAGE, ROOT / "tests", ROOT / "notebooks"):
        for file in root.rglob("*"):
            if file.suffix in (".py", ".ipynb") or file == PACKAGE / "__init__.pyi":
                for room, names in line.findall(file.read_text(encoding="utf-8")):
                    used[room] |= set(re.findall(r"\w+", names))
    return used


def test_no_public_function_has_the_name_of_a_module() -> None:
    modules = {module.rpartition(".")[2] for module in MODULES}
    functions = {name for name in colabkit.__all__ if isinstance(getattr(colabkit, name), types.FunctionType)}
    assert functions & modules == set()


def test_files_stay_short() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_no_test_module_imports_another() -> None:
    """What tests share lives in `tests/doubles` or in a `conftest.py`."""
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
                f"{file}: {name}" for name in targets if name.partition(".")[0] in {*names, "", "tests", "conftest"}
            ]
    assert wrong == []


def test_test_files_are_named_after_what_they_test() -> None:
    """`tests/<room>/test_<module>_<aspect>.py`, where the name of the room may stand before that of the module."""
    wrong = []
    for room in ROOMS:
        names = {path.stem for path in (PACKAGE / room).rglob("*") if path.suffix == ".py" or path.is_dir()}
        for file in sorted((ROOT / "tests" / room).glob("test_*.py")):
            stem = file.stem.removeprefix("test_").removeprefix(f"{room}_")
            if not any(f"{stem}_".startswith(f"{name}_") for name in names):
                wrong.append(f"{room}: {file.name}")
    assert wrong == []


def test_the_paths_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []

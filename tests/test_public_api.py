"""The public names of `colabkit`: sorted, complete, documented, and fast to import."""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import colabkit

HEAVY = ("torch", "h5py", "numpy", "PIL", "IPython", "ipywidgets", "google.colab", "psutil", "tqdm", "pynvml")
MODULES = {name for name in colabkit.__all__ if isinstance(getattr(colabkit, name), types.ModuleType)}
MADE_BY_COLABKIT = ("Dashboard", "Launcher", "Pack", "PackedDataset", "PreparedPack", "SupervisedStep", "WatchedLoader")
NAMESPACES = [getattr(colabkit, name) for name in MODULES]
# Arguments of these types and modules are passed by colabkit itself, never by users.
PASSED_BY_COLABKIT = ("meters", "Words")


def test_public_names_are_sorted() -> None:
    assert colabkit.__all__ == sorted(colabkit.__all__)
    assert set(dir(colabkit)) == set(colabkit.__all__)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        colabkit.no_such_name  # noqa: B018


def test_every_public_object_method_and_argument_is_documented() -> None:
    wrong = []
    for name in sorted(set(colabkit.__all__) - MODULES):
        thing = getattr(colabkit, name)
        text = inspect.getdoc(thing)
        assert thing.__name__ == name
        wrong += [] if text else [name]
        if inspect.isclass(thing):
            methods = {method: one for method, one in vars(thing).items() if inspect.isfunction(one)}
            wrong += [f"{name}.{method}" for method, one in methods.items() if method[0] != "_" and not one.__doc__]
        if not name.endswith("Report") and name not in MADE_BY_COLABKIT:
            arguments = inspect.signature(thing).parameters
            wrong += [f"{name}: {one}" for one in arguments if f"\n    {one}: " not in f"\n{text}"]
    assert wrong == []


def annotations_in_help(thing: Any) -> Iterator[tuple[str, str, types.ModuleType]]:
    """Yield the annotations that `help()` shows for a function or class, each with its argument or field and module."""
    owners = [base for base in inspect.getmro(thing) if "colabkit" in base.__module__] if inspect.isclass(thing) else []
    functions = {} if inspect.isclass(thing) else {"": thing}
    for owner in owners:
        for field, text in vars(owner).get("__annotations__", {}).items():
            if pydoc.visiblename(field):
                yield f".{field}", text, sys.modules[owner.__module__]
        for name, member in vars(owner).items():
            function = inspect.unwrap(getattr(member, "__func__", member))
            is_private = name == "__init__" and owner.__name__ in MADE_BY_COLABKIT
            if inspect.isfunction(function) and pydoc.visiblename(name) and not is_private:
                functions.setdefault(f".{name}", function)
    for name, function in functions.items():
        for argument, text in function.__annotations__.items():
            # Skip the methods that dataclasses generate: they repeat the fields, with types as annotations.
            if isinstance(text, str):
                yield f"{name}({argument})", text, sys.modules[function.__module__]


def private_names(annotation: str, module: types.ModuleType) -> Iterator[str]:
    """Yield colabkit's private aliases and classes in an annotation."""
    public = [getattr(space, name) for space in (colabkit, *NAMESPACES) for name in space.__all__]
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        # A missing name is a builtin, or is imported from another package only for type checking.
        found = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
        if found is None or isinstance(found, TypeVar) or any(found is one for one in public):
            continue
        package = found.__name__ if isinstance(found, types.ModuleType) else getattr(found, "__module__", "")
        is_alias = not isinstance(found, type | types.ModuleType) and getattr(found, "__name__", "") != node.id
        if is_alias or package.startswith("colabkit"):
            yield node.id


def test_help_shows_only_standard_types_and_public_names() -> None:
    wrong = [
        f"{name}{place}: {text}"
        for space in (colabkit, colabkit.augment, colabkit.errors, colabkit.sampler)
        for name in set(space.__all__) - MODULES
        for place, text, module in annotations_in_help(getattr(space, name))
        for private in private_names(text, module)
        if private not in PASSED_BY_COLABKIT
    ]
    assert wrong == []


def test_public_types_are_documented() -> None:
    assert [name for name in colabkit.types.__all__ if not inspect.getdoc(getattr(colabkit.types, name))] == []


LOADER = colabkit.Loader([[1.0]], 1)
TIMED = {
    "clear_cache": (),
    "doctor": (LOADER,),
    "fetch": ("https://example.org/a.zip",),
    "flush": (),
    "headspace": (len, LOADER),
    "mount": (),
    "probe": (".",),
    "train": (len, LOADER),
    "unmount": (),
}
"""Valid arguments of the calls that take `timeout` or `seconds`."""


def test_every_time_limit_is_a_number_of_seconds_or_text_with_a_unit() -> None:
    taken = {name: inspect.signature(getattr(colabkit, name)).parameters for name in set(colabkit.__all__) - MODULES}
    timed = {(name, one) for name, found in taken.items() for one in found if one in ("timeout", "seconds")}
    assert {name for name, _ in timed if not name.endswith("Report")} == TIMED.keys()
    for name, one in sorted(timed):
        if name in TIMED:
            assert taken[name][one].annotation in ("float | str", "float | str | None")
            with pytest.raises(colabkit.errors.InvalidOption, match=rf"{one}='soon'; expected a duration above 0"):
                getattr(colabkit, name)(*TIMED[name], **{one: "soon"})


def test_a_time_limit_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert colabkit.probe(tmp_path, seconds="1min", progress=False).files == 1


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_no_heavy_package_and_has_no_side_effects() -> None:
    code = f"""
import json, logging, os, sys, threading, warnings
def state():
    return dict(os.environ), list(logging.root.handlers), list(warnings.filters), threading.active_count()
before = state()
import colabkit
heavy = [name for name in {HEAVY!r} if name in sys.modules]
loaded = sorted(name for name in sys.modules if name.startswith("colabkit"))
print(json.dumps([heavy, before == state(), loaded]))
"""
    heavy, is_unchanged, loaded = json.loads(run_python(code))
    assert heavy == []
    assert is_unchanged
    assert loaded == ["colabkit"]


def test_import_takes_under_a_tenth_of_a_second() -> None:
    code = "import time; t = time.perf_counter(); import colabkit; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.1


def test_staging_and_packing_do_not_import_torch() -> None:
    code = "import colabkit as c, sys; c.pack, c.stage, c.runtime, c.verify; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"

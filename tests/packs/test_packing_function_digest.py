"""The digest of a user's function changes with its code and with the values that it refers to."""

from __future__ import annotations

import functools
import importlib
import os.path
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from colabkit.packs.packing.function_digest import function_digest

NUMBERS = {"cat": 0}
upper = (number for number in ())


def constant(value: object) -> Callable[[str], object]:
    return lambda path: value


def looked_up(path: str) -> int:
    return NUMBERS[path]


def by_helper(path: str) -> int:
    return looked_up(path)


def again(path: str) -> int:
    return again(path[1:]) + 1 if path else 0


def with_default(path: str, number: int = 1) -> int:
    return number


def before_its_helper_is_defined() -> Callable[[str], int]:
    def label(path: str) -> int:
        return helper(path)

    if NUMBERS is None:
        helper = label
    return label


def holding_itself() -> Callable[[str], object]:
    table: list[Any] = [len]
    table.append(table)
    return constant(table)


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(1),
        lambda: looked_up,
        lambda: again,
        lambda: partial(with_default, number=2),
        lambda: len,
        before_its_helper_is_defined,
        holding_itself,
        lambda: lambda path: path.upper(),
        lambda: constant(np.arange(3)),
        lambda: constant(torch.arange(3)),
    ],
)
def test_a_function_keeps_its_digest(make):
    assert function_digest(make()) == function_digest(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (constant(1), constant(2)),
        (lambda path: 0, lambda path: 1),
        (lambda path: path.upper(), lambda path: path.lower()),
        (lambda path: [0 for _ in path], lambda path: [1 for _ in path]),
        (partial(with_default, number=2), partial(with_default, number=3)),
        (os.path.basename, os.path.dirname),
        ("a".join, "b".join),
        (constant([by_helper, by_helper, again]), constant([by_helper, again, again])),
        (constant(torch.zeros(2)), constant(torch.ones(2))),
        (constant(([1], 2)), constant(([1, 2],))),
        (constant(1), constant(True)),
        (constant({1: len}), constant([1, len])),
    ],
)
def test_different_functions_have_different_digests(one, other):
    assert function_digest(one) != function_digest(other)


@pytest.mark.parametrize("function", [looked_up, by_helper, partial(by_helper), lambda path: by_helper(path) + 1])
def test_the_values_that_a_function_refers_to_change_its_digest(function, monkeypatch):
    before = function_digest(function)
    monkeypatch.setitem(NUMBERS, "cat", 1)
    assert function_digest(function) != before


def test_a_function_with_a_value_that_cannot_be_pickled_has_another_digest_each_time():
    held = constant(number for number in ())
    assert function_digest(held) != function_digest(held)


NOTEBOOK = {
    "method": "class Labeler:\n    def __call__(self, path): return self.number(path)\n"
    "    def number(self, path): return {0}\nlabel = Labeler()",
    "call": "class Labeler:\n    def __call__(self, path): return {0}\nlabel = Labeler()",
    "bound method": "class Labeler:\n    def number(self, path): return {0}\nlabel = Labeler().number",
    "class method": "class Labeler:\n    @classmethod\n    def number(cls, path): return {0}\nlabel = Labeler.number",
    "property": "class Labeler:\n    @property\n    def number(self): return {0}\n"
    "    def __call__(self, path): return self.number\nlabel = Labeler()",
    "base": "class Base:\n    number = {0}\nclass Labeler(Base):\n    def __call__(self, path): return self.number\n"
    "label = Labeler()",
    "state": "class Labeler:\n    def __init__(self, do): self.do = do\n"
    "    def __call__(self, path): return self.do(path)\nlabel = Labeler(lambda path: {0})",
    "class by name": "class Numbers:\n    cat = {0}\ndef label(path): return Numbers.cat",
    "data class": "import dataclasses\n@dataclasses.dataclass\nclass Labeler:\n    number: int = {0}\n"
    "    def __call__(self, path): return self.number\nlabel = Labeler()",
    "cache": "import functools\n@functools.lru_cache\ndef label(path): return {0}",
    "decorator": "import torch\n@torch.no_grad()\ndef label(path): return {0}",
    "keyword": "import functools\ndef parse(path): return {0}\ndef call(path, f): return f(path)\n"
    "label = functools.partial(call, f=parse)",
    "default": "def parse(path): return {0}\ndef label(path, parse=parse): return parse(path)",
    "list": "def parse(path): return {0}\nlist_of = [parse]\ndef label(path): return list_of[0](path)",
    "dict": "def parse(path): return {0}\ntable = {{'f': (parse,)}}\ndef label(path): return table['f'][0](path)",
}


@pytest.mark.parametrize("kind", NOTEBOOK)
def test_a_function_edited_in_a_notebook_has_another_digest(kind, monkeypatch):
    digests = []
    for number in (1, 2, 1):
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(NOTEBOOK[kind].format(number), scope)
        # Define the names in the module, because pickle looks up functions and classes by name.
        for name, value in scope.items():
            monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
        digests.append(function_digest(scope["label"]))
    assert digests[0] == digests[2] != digests[1]


LABELER = """
from colabkit.packs.packing.function_digest import function_digest
NAMES = {'cat', 'dog', 'bee', 'ant'}
class Labeler:
    table = dict.fromkeys('abc')
    def __call__(self, path): return path in NAMES or path in {'png', 'jpg', 'gif', 'bmp'}
print(function_digest(Labeler()), function_digest(Labeler.__call__))
"""


def test_another_process_computes_the_same_digest():
    children = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", LABELER]
        children.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    one, other = (child.communicate(timeout=120)[0].split() for child in children)
    assert one == other
    assert len(one) == 2


LIBRARY = """
import threading
lock = threading.Lock()
class Parser: lock = lock
def parse(path):
    with lock: return 1
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_functions_of_installed_packages_count_by_name(tmp_path, monkeypatch, folder):
    name = f"library_of_{folder[:4]}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / folder)
    found = importlib.import_module(name)
    parser = found.Parser
    for label in (found.parse, lambda path: parser(), functools.partial(found.parse)):
        assert function_digest(label) == function_digest(label)


USES_OF_A_MODULE = {
    "function": "from custom_module import labels\nlabel = lambda path: labels.number(path)",
    "value": "from custom_module import labels\nlabel = lambda path: labels.NUMBERS[0]",
    "submodule": "import custom_module.labels\nlabel = lambda path: custom_module.labels.number(path)",
    "closure": "def made():\n    from custom_module import labels\n    return lambda path: labels.number(path)\n"
    "label = made()",
    "import inside": "def label(path):\n    import custom_module.labels\n    return custom_module.labels.number(path)",
    "module inside": "def label(path):\n    from custom_module import labels\n    return labels.number(path)",
    "function inside": "def label(path):\n    from custom_module.labels import number\n    return number(path)",
}


@pytest.mark.parametrize("use", USES_OF_A_MODULE)
@pytest.mark.parametrize("has_init", [False, True])
def test_an_edited_module_that_a_function_uses_changes_its_digest(tmp_path, monkeypatch, use, has_init):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "custom_module").mkdir()
    if has_init:
        (tmp_path / "custom_module" / "__init__.py").touch()
    digests = []
    for number in (1, 2, 1):
        code = f"NUMBERS = [{number}]\ndef number(path): return NUMBERS[0]"
        (tmp_path / "custom_module" / "labels.py").write_text(code)
        for name in ("custom_module", "custom_module.labels"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(USES_OF_A_MODULE[use], scope)
        digests.append(function_digest(scope["label"]))
        assert scope["label"]("a.jpg") == number
        assert function_digest(scope["label"]) == digests[-1]
    assert digests[0] == digests[2] != digests[1]


def test_locks_and_a_script_that_exits_do_not_change_the_digest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "locked_labels.py").write_text("import threading\n_lock = threading.Lock()\ndef number(): return _lock")
    (tmp_path / "exiting_script.py").write_text("raise SystemExit(2)")

    def label(path: str) -> object:
        import locked_labels

        if not path:
            import exiting_script

            return exiting_script
        return locked_labels.number()

    assert function_digest(label) == function_digest(label)
    number = importlib.import_module("locked_labels").number
    assert function_digest(number) == function_digest(number)


def test_a_function_that_imports_a_missing_module_keeps_its_digest():
    def label(path: str) -> object:
        import module_that_is_missing

        return module_that_is_missing

    assert function_digest(label) == function_digest(label)

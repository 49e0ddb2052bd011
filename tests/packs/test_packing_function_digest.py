"""Functions as options of a pack: the same as long as they do the same, whatever their names."""

from __future__ import annotations

import os.path
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from colabkit.packs.packing.function_digest import function_digest

NUMBERS = {"cat": 0}
NAMES = {"cat", "dog", "bee", "ant"}


def constant(value: object) -> Callable[[str], object]:
    return lambda path: value


def looked_up(path: str) -> int:
    return NUMBERS[path]


def by_helper(path: str) -> int:
    return looked_up(path)


def by_sets(path: str) -> bool:
    return path in NAMES or path in {"png", "jpg", "gif", "bmp"}


def again(path: str) -> int:
    return again(path[1:]) + 1 if path else 0


def with_default(path: str, number: int = 1) -> int:
    return number


@pytest.mark.parametrize(
    "make",
    [lambda: constant(1), lambda: looked_up, lambda: again, lambda: partial(with_default, number=2), lambda: len],
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
    ],
)
def test_functions_that_differ_have_other_digests(one, other):
    assert function_digest(one) != function_digest(other)


@pytest.mark.parametrize("function", [looked_up, by_helper, partial(by_helper), lambda path: by_helper(path) + 1])
def test_what_a_function_names_counts(function, monkeypatch):
    before = function_digest(function)
    monkeypatch.setitem(NUMBERS, "cat", 1)
    assert function_digest(function) != before


def test_a_function_that_holds_what_nobody_can_tell_is_another_each_time():
    held = constant(threading.Lock())
    assert function_digest(held) != function_digest(held)


def test_another_process_finds_the_same_digest():
    code = "from test_packing_function_digest import *; print(function_digest(by_helper), function_digest(by_sets))"
    children = []
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", code]
        children.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
    told = [child.communicate(timeout=120)[0].split() for child in children]
    assert told == [[function_digest(by_helper), function_digest(by_sets)]] * 2


def defaulting(inner: Callable[[str], int]) -> Callable[[str], int]:
    def call(path: str, inner: Callable[[str], int] = inner) -> int:
        return inner(path)

    return call


@pytest.mark.parametrize(
    "held",
    [
        lambda inner: partial(with_default, number=inner),
        lambda inner: partial(with_default, inner),
        defaulting,
        lambda inner: constant([inner]),
        lambda inner: constant({"f": (inner,)}),
    ],
    ids=["keyword", "argument", "default", "list", "dict"],
)
def test_a_function_that_another_one_holds_counts_with_what_it_does(held):
    """As in a notebook, where a function that is changed keeps its name."""
    made: dict[int, Callable[[str], int]] = {}
    for number in (1, 2):
        scope: dict[str, Any] = {"__name__": __name__}
        exec(f"def parse(path):\n    return {number}", scope)
        made[number] = scope["parse"]
        globals()["parse"] = made[number]  # so that pickle finds it by its name
        made[number] = held(made[number])
        made[number + 10] = function_digest(made[number])
    del globals()["parse"]
    assert made[11] != made[12]


def test_a_container_that_holds_itself_has_a_digest():
    table: list[Any] = [len]
    table.append(table)
    assert function_digest(lambda path: table) == function_digest(lambda path: table) != ""

"""Names with markup or unreadable characters, and reports of every class that contain them."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import colabkit
from colabkit.foundation import messages
from colabkit.foundation.reports import Report

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'>",
    "' onmouseover='alert(1)",
    "</td></table><h1>out\n<b>&lt;i&gt;</b>",
)
UNREADABLE = ("&lt;b&gt;", "<!-- comment", "\udcff<b>\udcfe", "\0<b>", "a\nb<i>\x1bc")


class Page(HTMLParser):
    """The structure of a page: its tags in order, each with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.built: list[tuple[str, ...]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.built.append((tag, *(name for name, _ in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.built.append((f"/{tag}",))

    def handle_comment(self, data: str) -> None:
        self.built.append(("!--",))


def check_alike(page: str, plain: str) -> None:
    """Check that a page with hostile names has the same structure as the page with plain names."""
    built = Page(page).built
    assert built == Page(plain).built
    assert not [names for names in built if "script" in names or any(name.startswith("on") for name in names)]


def kinds() -> list[type[Report]]:
    for module in pkgutil.walk_packages(colabkit.__path__, "colabkit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, rest = [], [Report]
    while rest:
        kind = rest.pop()
        rest += kind.__subclasses__()
        if dataclasses.is_dataclass(kind) and not inspect.isabstract(kind) and kind.__module__.startswith("colabkit."):
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def filled(hint: Any, name: str) -> Any:
    """Return a value for a type hint, with `name` in place of every text."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (str, Any, object):
        return name
    if hint is Path:
        return Path("/x") / name
    if hint in (int, float, bool):
        return hint(1)
    if origin is Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return filled(next(one for one in arguments if one is not type(None)), name)
    if origin in (list, collections.abc.Sequence):
        return [filled(arguments[0], name)]
    if origin is tuple:
        return tuple(filled(one, name) for one in arguments if one is not Ellipsis)
    if origin in (dict, collections.abc.Mapping):
        return {filled(arguments[0], name): filled(arguments[1], name)}
    if dataclasses.is_dataclass(hint):
        # The type hints of these fields name classes that the modules of the reports import only for type checking.
        hints = typing.get_type_hints(hint, localns={**vars(messages), "TrainReport": colabkit.TrainReport})
        fields = [field.name for field in dataclasses.fields(hint) if field.init]
        # Leave out fields of the class's own type, which would recurse forever.
        own = {field for field in fields if hint in typing.get_args(hints[field])}
        return hint(**{field: None if field in own else filled(hints[field], name) for field in fields})
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*(filled(one, name) for one in typing.get_type_hints(hint).values()))
    raise TypeError(f"how to fill {hint}?")

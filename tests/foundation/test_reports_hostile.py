"""Names, paths and error texts that contain markup never become HTML, in any report or pack."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import json
import pkgutil
import types
import typing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

import colabkit
from colabkit.foundation import messages
from colabkit.foundation.reports import Report

PACKAGE = Path(colabkit.__file__).parent
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'>",
    "' onmouseover='alert(1)",
    "</td></table><h1>out\n<b>&lt;i&gt;</b>",
)
UNREADABLE = ("&lt;b&gt;", "<!-- comment", "\udcff<b>\udcfe", "\0<b>", "a\nb<i>\x1bc")
OWN = (
    "foundation/reports.py",
    "packs/dataset/opened_pack.py",
    "packs/preparing/prepared_pack.py",
    "storage/probing/report.py",
)


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
    for module in pkgutil.walk_packages([str(PACKAGE)], "colabkit."):
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
    """Return a value of a type that contains `name` in place of every text."""
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
        # `Text` refers to classes that the modules of reports may not import.
        hints = typing.get_type_hints(hint, localns=vars(messages))
        fields = [field.name for field in dataclasses.fields(hint) if field.init]
        # A field of the class's own type would recurse forever.
        own = {field for field in fields if hint in typing.get_args(hints[field])}
        return hint(**{field: None if field in own else filled(hints[field], name) for field in fields})
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*(filled(one, name) for one in typing.get_type_hints(hint).values()))
    raise TypeError(f"how to fill {hint}?")


@pytest.mark.parametrize("name", [*HOSTILE, *UNREADABLE])
def test_no_name_in_a_report_becomes_html_or_breaks_lines_and_all_reports_become_json(name: str) -> None:
    for kind in kinds():
        report = filled(kind, name)
        check_alike(report._repr_html_(), filled(kind, "plain")._repr_html_())
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        rows = report.text_table().split("\n")[len(repr(report).split("\n")) :]
        assert all(row.isprintable() for row in rows), kind
        assert "\n".join(rows).encode("utf-8")


def test_all_classes_with_html_output_are_known() -> None:
    shows = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "def _repr_html_" in path.read_text()}
    assert shows == set(OWN), "a new one needs a test here"
    assert not [path for path in PACKAGE.rglob("*.py") if "_repr_mimebundle_" in path.read_text()]


@pytest.mark.parametrize("name", [name.replace("/", "|") for name in HOSTILE])
def test_a_pack_shows_hostile_classes_and_paths_as_text(name: str, tmp_path: Path) -> None:
    packs = [packed(tmp_path, name), packed(tmp_path, "plain")]
    assert [name in pack.classes for pack in packs] == [True, False]
    check_alike(*(pack._repr_html_() for pack in packs))


def packed(folder: Path, name: str) -> colabkit.Pack:
    """Return a pack of two images; `name` is the name of a class, of the pack and of its source."""
    for place in (name, "b"):
        (folder / name / place).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name / place / f"{name[:40]}.png")
    return colabkit.open_pack(colabkit.pack(folder / name, folder / f"{name[:40]}.h5", progress=False).path)


@pytest.mark.parametrize("name", HOSTILE)
def test_an_error_about_a_hostile_path_is_one_line_of_text(name: str) -> None:
    with pytest.raises(colabkit.errors.ColabkitError) as caught:
        colabkit.open_pack(f"/no/such/{name}")
    (line,) = caught.value._render_traceback_()
    assert len(line.splitlines()) == 1

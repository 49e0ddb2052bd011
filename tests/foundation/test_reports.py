"""Reports: text in a terminal, an escaped table in a notebook, plain values for JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colabkit.foundation.environment.limits import MemoryReport
from colabkit.foundation.environment.runtime_report import RuntimeReport
from colabkit.foundation.reports import Report, escape, html_table

TAGS = {"div", "table", "tr", "th", "td"}
ATTRIBUTES = {"style", "scope"}
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "</td></table><h1>out</h1>",
    "&lt;b&gt;",
    "<!-- comment",
    "a\nb<i>c",
    "\udcff<b>\udcfe",
    "\0<b>",
)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.open.append(tag)
        self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_comment(self, data: str) -> None:
        self.tags.add("!--")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def assert_harmless(text: str) -> Page:
    page = Page(text)
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert page.open == []
    assert text.encode("utf-8")
    return page


@dataclass(frozen=True, repr=False)
class Sample(Report):
    """A report with a field of every kind."""

    text: str
    path: Path
    numbers: tuple[int, ...]
    by_name: MappingProxyType
    inner: MemoryReport
    nothing: None = None

    def _summary(self) -> str:
        return f"{self.text}\nsecond line"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("text", self.text), ("path", str(self.path), "and more")]


def sample(text: str = "hello") -> Sample:
    by_name = MappingProxyType({"a": (1, Path("x")), PurePosixPath("b"): [MemoryReport(3, 2, "leaf")]})
    return Sample(text, Path("/a/b"), (1, 2), by_name, MemoryReport(2, 1, "machine"))


def test_tables_show_hostile_names_unchanged_as_text():
    for name in HOSTILE:
        shown = name.encode("utf-8", "backslashreplace").decode()
        page = assert_harmless(html_table(name, [(name, name)], (name, name)))
        cells = [cell.replace("\ufffd", "\0") for cell in page.cells if cell]
        assert cells == [shown] * 5


@given(st.text())
def test_no_text_becomes_markup(text):
    page = assert_harmless(html_table(text, [(text, text)], (text,)))
    assert page.tags == TAGS


def test_escape_works_inside_attributes_and_accepts_any_object():
    assert escape("\"'<>&") == "&quot;&#x27;&lt;&gt;&amp;"
    assert escape("a\udcffb") == r"a\udcffb"
    assert escape(Path("<x>")) == "&lt;x&gt;"


def test_a_table_shows_header_and_rows_in_order_and_works_without_them():
    assert assert_harmless(html_table("title", [])).cells == ["title", ""]
    page = assert_harmless(html_table("t", [("a", "1"), ("b", "2")], ("name", "value")))
    assert [cell for cell in page.cells if cell] == ["t", "name", "value", "a", "1", "b", "2"]


def test_numbers_below_a_header_are_aligned_to_the_right_and_a_short_row_spans_all_columns():
    rows = [("a", "uint8", "1.5 s"), ("b", "-2", "n/a"), ("c", "text about all columns")]
    markup = html_table("t", rows, ("", "type", "time"))
    cells = {text: style for style, text in re.findall(r"<t[dh]([^>]*)>([^<]*)</t[dh]>", markup)}
    right = {text for text, style in cells.items() if "text-align:right" in style}
    assert right == {"type", "time", "uint8", "1.5 s", "-2", "n/a"}
    assert "colspan=2" in cells["text about all columns"]
    assert "text-align:right" not in html_table("t", rows)


def test_a_long_cell_wraps_anywhere_but_keeps_a_minimum_width():
    short, long = "12 files", "/a/path/" * 20
    markup = html_table("t", [("a", short, long)])
    styles = {text: style for style, text in re.findall(r'<td style="([^"]*)">([^<]*)</td>', markup)}
    assert "nowrap" in styles[short]
    assert "overflow-wrap:anywhere;min-width:11em" in styles[long]


def test_a_report_is_a_summary_in_a_terminal_and_a_table_in_a_notebook():
    report = sample()
    assert repr(report) == str(report) == "hello\nsecond line"
    page = assert_harmless(report._repr_html_())
    assert [cell for cell in page.cells if cell] == ["hello", "text", "hello", "path", "/a/b", "and more"]


def test_reports_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().text = "other"


def test_a_report_becomes_a_dict_of_json_values():
    values = sample().to_dict()
    assert values == {
        "text": "hello",
        "path": "/a/b",
        "numbers": [1, 2],
        "by_name": {"a": [1, "x"], "b": [{"total_bytes": 3, "available_bytes": 2, "limited_by": "leaf"}]},
        "inner": {"total_bytes": 2, "available_bytes": 1, "limited_by": "machine"},
        "nothing": None,
    }
    assert json.loads(json.dumps(values)) == values


def test_a_report_must_define_its_summary_and_rows():
    class EmptyReport(Report):
        pass

    with pytest.raises(TypeError, match="abstract"):
        EmptyReport()


def test_the_text_table_aligns_names_and_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = RuntimeReport(
        "Colab",
        "kernel",
        "3.13",
        2,
        MemoryReport(2 << 30, 1 << 30, "machine"),
        (),
        (),
        (),
        None,
        (),
        {"a" * 9: "1"} | {f"package{number}": "1.2.3" for number in range(9)},
    ).text_table()
    first, *rows = text.splitlines()
    assert first.startswith("Colab, Python 3.13")
    assert max(map(len, rows)) < 60
    values = [row[12:] for row in rows]
    assert all(value and value[0] != " " for value in values)


def test_the_text_table_aligns_names_by_their_shown_width():
    class NamedRowsReport(Sample):
        def _rows(self):
            return [("a\tb\udcff", "first"), ("c", "second")]

    *_, first, second = NamedRowsReport(**vars(sample())).text_table().splitlines()
    assert first == r"  a\tb\udcff  first"
    assert first.index("first") == second.index("second")

"""Screens: an output of a notebook, a widget that is replaced by such an output, a terminal."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import IPython.display
import pytest
from panel_states import RUNNING, STATES, render

from colabkit.monitoring.panel.screens import NotebookScreen, TerminalScreen, WidgetScreen, choose_screen

VIEW = "application/vnd.jupyter.widget-view+json"


class FakePart:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class FakeWidget(FakePart):
    made: ClassVar[list[FakeWidget]] = []

    def __init__(self, value: str) -> None:
        super().__init__()
        self.value, self.model_id = value, "m1"
        self.layout, self.style = FakePart(), FakePart()
        self.made.append(self)

    @property
    def is_all_closed(self) -> bool:
        return self.is_closed and self.layout.is_closed and self.style.is_closed


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str, bool]]:
    """Return a list of later displays: the bundle, its display ID, and whether it is an update."""
    found: list[tuple[dict[str, Any], str, bool]] = []

    def display(bundle: dict[str, Any], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        found.append((bundle, display_id, update))

    monkeypatch.setattr(IPython.display, "display", display)
    return found


def test_a_notebook_has_one_output_with_html_and_text_that_is_updated(
    shown: list[tuple[dict[str, Any], str, bool]],
) -> None:
    screen = NotebookScreen()
    for number in range(3):
        screen.paint(f"html {number}", f"text {number}", number == 2)
    screen.close()
    assert [update for _, _, update in shown] == [False, True, True]
    assert len({display_id for _, display_id, _ in shown}) == 1
    assert shown[-1][0] == {"text/html": "html 2", "text/plain": "text 2"}
    NotebookScreen().paint("", "", False)
    assert shown[-1][1] != shown[0][1], "each panel has its own"


def test_a_widget_is_shown_once_updated_in_place_and_finally_replaced_by_a_plain_output(
    shown: list[tuple[dict[str, Any], str, bool]],
) -> None:
    FakeWidget.made.clear()
    screen = WidgetScreen(SimpleNamespace(HTML=FakeWidget))
    screen.paint("one", "text one", False)
    (widget,) = FakeWidget.made
    screen.paint("two", "text two", False)
    assert widget.value == "two"
    assert len(shown) == 1
    assert shown[0][0] == {VIEW: {"version_major": 2, "version_minor": 0, "model_id": "m1"}, "text/plain": "text one"}
    screen.paint("three", "text three", True)
    assert shown[1] == ({"text/html": "three", "text/plain": "text three"}, shown[0][1], True)
    assert widget.is_all_closed
    screen.close()


def test_a_widget_is_closed_even_if_its_last_frame_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWidget.made.clear()
    monkeypatch.setattr(IPython.display, "display", lambda *bundle, **options: None)
    screen = WidgetScreen(SimpleNamespace(HTML=FakeWidget))
    screen.paint("one", "text", False)
    monkeypatch.setattr(IPython.display, "display", lambda *bundle, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        screen.paint("two", "text", True)
    screen.close()
    assert FakeWidget.made[0].is_all_closed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_rewritten_in_place_and_a_log_gets_the_last_frame_only() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        screen = TerminalScreen(stream)
        screen.paint("", "one\nframe", False)
        screen.paint("", "two\nframe", True)
        screen.close()
    assert terminal.getvalue() == "one\nframe\n\x1b[2F\x1b[Jtwo\nframe\n"
    assert log.getvalue() == "two\nframe\n"


def test_lines_that_a_terminal_would_wrap_or_scroll_are_cut_except_in_the_last_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (20, 5))
    terminal, text = Terminal(), render(RUNNING)[1]
    screen = TerminalScreen(terminal)
    screen.paint("", text, False)
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) == 19
    screen.paint("", text, True)
    assert terminal.getvalue().endswith(f"\x1b[4F\x1b[J{text}\n")


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_terminal_without_unicode_still_shows_the_text(state: Any) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = render(state)[1]
    TerminalScreen(stream).paint("", text, True)
    stream.flush()
    assert stream.buffer.getvalue() == f"{text}\n".encode("ascii", "replace")


def test_screens_are_chosen_by_name_or_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_screen("auto"), TerminalScreen)
    assert isinstance(choose_screen("text"), TerminalScreen)
    assert isinstance(choose_screen("notebook"), NotebookScreen)
    assert isinstance(choose_screen("widgets"), WidgetScreen)
    assert choose_screen("none") is None
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    assert type(choose_screen("auto")) is NotebookScreen
    monkeypatch.setattr(IPython, "get_ipython", SimpleNamespace)
    assert isinstance(choose_screen("auto"), TerminalScreen)


def test_ipywidgets_is_imported_only_on_request() -> None:
    code = (
        "import sys, colabkit\n"
        "from colabkit.monitoring.panel.screens import choose_screen\n"
        "for name in ('auto', 'notebook', 'text', 'none'): colabkit.dashboard(screen=name)\n"
        "assert 'ipywidgets' not in sys.modules and 'IPython' not in sys.modules\n"
        "colabkit.dashboard(screen='widgets')\n"
        "assert 'ipywidgets' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

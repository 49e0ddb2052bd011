"""Screens for notebooks, marimo, terminals, and places that cannot be redrawn; and the choice between them."""

from __future__ import annotations

import io
import logging
import re
import shutil
import sys
import unicodedata
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import IPython
import IPython.display
import pytest
from panel_states import RUNNING, STATES, FakeTime

from colabkit.errors import InvalidOption
from colabkit.foundation import screens
from colabkit.foundation.screens import (
    FinalScreen,
    LineScreen,
    MarimoScreen,
    NotebookScreen,
    TerminalScreen,
    choose_screen,
)
from colabkit.monitoring.panel.text import PanelFrame

DAY_S = 86_400


@dataclass
class ShownFrame:
    html: str = ""
    text: str = ""
    line: str = ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str, bool]]:
    """Return a list of later displays: the bundle, its display ID, and whether it is an update."""
    found: list[tuple[dict[str, Any], str, bool]] = []

    def display(bundle: dict[str, Any], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        found.append((bundle, display_id, update))

    monkeypatch.setattr(IPython.display, "display", display)
    return found


class Marimo(ModuleType):
    """The part of marimo that a screen uses."""

    def __init__(self, is_notebook: bool = True) -> None:
        super().__init__("marimo")
        self.shown: list[str] = []
        self.Html = str
        self.output = SimpleNamespace(replace=self.shown.append)
        self.running_in_notebook = lambda: is_notebook


def run_in_kernel(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=kernel))


def test_a_notebook_has_one_output_with_html_and_text_that_is_updated(
    displayed: list[tuple[dict[str, Any], str, bool]],
) -> None:
    screen = NotebookScreen()
    for number in range(3):
        screen.paint(ShownFrame(f"html {number}", f"text {number}"), number == 2)
    screen.close()
    assert [update for _, _, update in displayed] == [False, True, True]
    assert len({display_id for _, display_id, _ in displayed}) == 1
    assert displayed[-1][0] == {"text/html": "html 2", "text/plain": "text 2"}
    screen.paint(ShownFrame(), False)
    assert not displayed[-1][2], "a panel that is used again appears in the new cell"
    NotebookScreen().paint(ShownFrame(), False)
    assert len({display_id for _, display_id, _ in displayed}) == 3, "each panel has its own output"


def test_marimo_replaces_the_output_of_the_cell() -> None:
    marimo = Marimo()
    screen = MarimoScreen(marimo)
    screen.paint(ShownFrame("one"), False)
    screen.paint(ShownFrame("two"), True)
    screen.close()
    assert marimo.shown == ["one", "two"]


def test_a_terminal_is_rewritten_in_place_and_a_log_gets_the_last_frame_only() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        screen = TerminalScreen(stream)
        screen.paint(ShownFrame(text="one\nframe"), False)
        screen.paint(ShownFrame(text="two\nframe"), True)
        screen.close()
    assert terminal.getvalue() == "\r\x1b[Kone\nframe\n\x1b[2F\x1b[Jtwo\nframe\n"
    assert log.getvalue() == "two\nframe\n"


def test_a_terminal_removes_a_frame_that_is_not_the_last_one() -> None:
    terminal = Terminal()
    screen = TerminalScreen(terminal)
    screen.paint(ShownFrame(text="half"), False)
    screen.close()
    screen.close()
    assert terminal.getvalue() == "\r\x1b[Khalf\n\x1b[1F\x1b[J"


def drawn(written: str) -> list[str]:
    """Return the lines of a terminal after a text that moves the cursor only as `TerminalScreen` does."""
    lines = [""]
    for part in re.split(r"(\x1b\[\d+F\x1b\[J|\r\x1b\[K|\n)", written):
        if part == "\n":
            lines.append("")
        elif part.startswith("\r"):
            lines[-1] = ""
        elif part.startswith("\x1b"):
            del lines[len(lines) - 1 - int(part[2 : part.index("F")]) :]
            lines.append("")
        else:
            lines[-1] += part
    return lines


def test_printed_lines_stay_above_the_frame_and_unfinished_ones_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (40, 20))
    terminal, errors = Terminal(), Terminal()
    # Both streams write to the same terminal.
    errors.write = terminal.write  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    screen = TerminalScreen()
    screen.paint(ShownFrame(text="one\nframe"), False)
    print("printed")
    print("warning", file=sys.stderr)
    print("half of", end="")
    assert drawn(terminal.getvalue()) == ["printed", "warning", "one", "frame", "half of"]
    screen.paint(ShownFrame(text="two"), False)
    assert drawn(terminal.getvalue()) == ["printed", "warning", "two", "half of"]
    print(" a line")
    print("x" * 30, end="")
    print("y" * 10, end="")
    assert drawn(terminal.getvalue())[2:] == ["half of a line", "x" * 30 + "y" * 10, "two", ""]
    print("unfinished", end="")
    screen.paint(ShownFrame(text="last"), True)
    print("after")
    assert drawn(terminal.getvalue())[4:] == ["unfinished", "last", "after", ""]
    assert (sys.stdout, sys.stderr) == (terminal, errors)


def test_a_progress_bar_that_moves_the_cursor_writes_to_the_terminal_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = TerminalScreen()
    screen.paint(ShownFrame(text="frame"), False)
    for text in ("\r10%", "\n", "\r50%", "\x1b[A"):
        sys.stdout.write(text)
    assert terminal.getvalue() == "\r\x1b[Kframe\n\r10%\n\r50%\x1b[A"
    screen.close()
    assert sys.stdout is terminal


def test_lines_after_a_progress_bar_stay_above_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = TerminalScreen()
    screen.paint(ShownFrame(text="one\nframe"), False)
    print("\r100%", end="")
    print()
    print("epoch 1")
    screen.paint(ShownFrame(text="two\nframe"), False)
    assert drawn(terminal.getvalue().replace("\r100%", "100%")) == ["epoch 1", "two", "frame", ""]
    screen.close()


def test_log_lines_stay_above_the_frame_and_handlers_get_their_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, errors = Terminal(), Terminal()
    errors.write = terminal.write  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    handler, logger = logging.StreamHandler(), logging.getLogger("test of screens")
    monkeypatch.setattr(logger, "handlers", [handler])
    screen = TerminalScreen()
    screen.paint(ShownFrame(text="one"), False)
    logger.error("broken")
    screen.paint(ShownFrame(text="last"), True)
    assert drawn(terminal.getvalue()) == ["broken", "last", ""]
    assert handler.stream is errors


def test_a_print_that_cannot_be_encoded_does_not_break_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class StrictTerminal(Terminal):
        def write(self, text: str) -> int:
            text.encode()
            return super().write(text)

    terminal = StrictTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    screen = TerminalScreen()
    screen.paint(ShownFrame(text="one"), False)
    with pytest.raises(UnicodeEncodeError):
        print("\udcff")
    print("printed")
    screen.paint(ShownFrame(text="last"), True)
    assert drawn(terminal.getvalue())[-3:] == ["printed", "last", ""]
    assert sys.stdout is terminal


def test_the_first_frame_replaces_a_progress_bar_in_the_line_of_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.write("\r  0%|      | 0/60")
    TerminalScreen(terminal).paint(ShownFrame(text="one"), False)
    assert drawn(terminal.getvalue().removeprefix("\r")) == ["one", ""]


def test_the_frame_of_another_panel_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    outer = TerminalScreen()
    outer.paint(ShownFrame(text="outer\nframe"), False)
    inner = TerminalScreen()
    inner.paint(ShownFrame(text="inner"), False)
    inner.paint(ShownFrame(text="end of inner"), True)
    outer.paint(ShownFrame(text="outer"), False)
    print("printed")
    outer.paint(ShownFrame(text="end of outer"), True)
    assert drawn(terminal.getvalue()) == ["end of inner", "printed", "end of outer", ""]
    assert sys.stdout is terminal


def test_a_frame_fits_the_terminal_and_only_its_last_lines_are_left_out_except_in_the_last_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (20, 5))
    terminal, frame = Terminal(), PanelFrame(RUNNING)
    screen = TerminalScreen(terminal)
    screen.paint(frame, False)
    lines = drawn(terminal.getvalue())[:-1]
    assert len(lines) == 4
    assert max(map(len, lines)) <= 19
    assert " ".join(line.strip() for line in lines) == frame.text[: len(" ".join(line.strip() for line in lines))]
    screen.paint(frame, True)
    assert terminal.getvalue().endswith(f"\x1b[4F\x1b[J{frame.text}\n")


def test_lines_of_characters_that_take_two_columns_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (40, 50))
    terminal = Terminal()
    TerminalScreen(terminal).paint(
        ShownFrame(text="复制 训练图片/鸟类/北极燕鸥/春天/夏天/秋天/冬天/一月/二月/三月/四月/五月\nplain"), False
    )
    for line in terminal.getvalue().splitlines():
        assert sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in line) <= 39


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_terminal_without_unicode_still_shows_the_text(state: Any) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = PanelFrame(state).text
    TerminalScreen(stream).paint(PanelFrame(state), True)
    stream.flush()
    assert stream.buffer.getvalue() == f"{text}\n".encode("ascii", "replace")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(screens.time, "monotonic", time)
    return time


def test_lines_are_printed_every_10_s_in_the_first_minute_then_at_twice_the_time_and_at_the_end(time: FakeTime) -> None:
    stream = io.StringIO()
    began_s = time.now_s
    screen = LineScreen(stream)
    for _ in range(20 * 60):
        time.now_s += 0.5
        screen.paint(ShownFrame(line=f"{time.now_s - began_s:.0f}"), False)
    screen.paint(ShownFrame(line="end"), True)
    assert stream.getvalue().split() == ["10", "20", "30", "40", "50", "60", "120", "240", "480", "end"]
    for same in ("end", ""):
        screen.paint(ShownFrame(line=same), True)
    assert stream.getvalue().split()[-2:] == ["480", "end"], "neither an empty line nor the same one again"


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_run_prints_at_most_2_kb_of_lines_however_long_it_is(state: Any, time: FakeTime) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    screen, frame = LineScreen(stream), PanelFrame(state)
    for _ in range(10 * DAY_S // 10):
        time.now_s += 10
        screen.paint(ShownFrame(line=f"{frame.line[:-5]}{time.now_s % 1e5:05.0f}"), False)
    screen.paint(frame, True)
    printed = stream.buffer.getvalue()
    assert len(printed) <= 2000
    assert len(printed.splitlines()) >= (2 if state.is_over else 15)
    assert max(map(len, printed.decode().splitlines())) <= (760 if state.is_over else 72)


def test_a_reader_that_has_ended_does_not_stop_the_run() -> None:
    class ClosedStream(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    LineScreen(ClosedStream()).paint(ShownFrame(line="end"), True)


@pytest.mark.parametrize("screen", ["auto", "lines", "text"])
def test_a_stream_that_only_writes_gets_its_text_and_a_closed_one_does_not_stop_the_run(screen: Any) -> None:
    class Tee:
        def __init__(self) -> None:
            self.written: list[str] = []

        def write(self, text: str) -> None:
            self.written.append(text)

        def flush(self) -> None:
            """Do nothing."""

    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    tee = Tee()
    for stream in (tee, closed):
        shown = choose_screen(screen, cast(Any, stream))
        if shown is not None:
            shown.paint(ShownFrame(text="half", line="half"), False)
            shown.paint(ShownFrame(text="end", line="end"), True)
            shown.close()
    assert tee.written == ["end\n"]


def test_only_the_last_frame_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    screen = choose_screen("final", stream)
    assert isinstance(screen, FinalScreen)
    screen.paint(ShownFrame(text="one"), False)
    screen.paint(ShownFrame(text="two"), True)
    screen.close()
    assert stream.getvalue() == "two\n"
    marimo = Marimo()
    monkeypatch.setitem(sys.modules, "marimo", marimo)
    screen = choose_screen("final")
    assert screen is not None
    screen.paint(ShownFrame("one"), False)
    screen.paint(ShownFrame("two"), True)
    assert marimo.shown == ["two"]


def test_the_screen_fits_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_screen(stream=Terminal()), TerminalScreen)
    assert isinstance(choose_screen(stream=io.StringIO()), LineScreen), "a pipe, a log, or the shell of an agent"
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "dumb")
        assert isinstance(choose_screen(stream=Terminal()), LineScreen)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert choose_screen() is None, "a process without a console"
    with monkeypatch.context() as patch:
        patch.setattr(IPython, "get_ipython", SimpleNamespace)
        assert isinstance(choose_screen(stream=Terminal()), TerminalScreen), "IPython in a terminal"
    with monkeypatch.context() as patch:
        run_in_kernel(patch, object())
        assert isinstance(choose_screen(), NotebookScreen)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "marimo", Marimo())
        assert isinstance(choose_screen(), MarimoScreen)
        patch.setitem(sys.modules, "marimo", Marimo(is_notebook=False))
        assert isinstance(choose_screen(stream=Terminal()), TerminalScreen), "a script that marimo wrote"
        # marimo is still being imported.
        patch.setitem(sys.modules, "marimo", ModuleType("marimo"))
        assert isinstance(choose_screen(stream=Terminal()), TerminalScreen)


# Requests as Colab's command line 0.7.5 (`colab exec`) and Colab's page send them.
COMMAND_LINE = {"content": {"code": "", "allow_stdin": False}, "metadata": {}}
PAGE = {"content": {"code": "", "allow_stdin": True}, "metadata": {"colab": {"cell_id": "x"}}}


@pytest.mark.parametrize(
    ("request_", "is_hosted", "expected"),
    [
        (COMMAND_LINE, True, LineScreen),
        (PAGE, True, NotebookScreen),
        ({**PAGE, "metadata": {}}, True, NotebookScreen),
        # nbclient and papermill do not answer `input()` either, but they replace the output.
        (COMMAND_LINE, False, NotebookScreen),
    ],
)
def test_colabs_command_line_which_prints_each_update_again_gets_lines(
    monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], is_hosted: bool, expected: type
) -> None:
    run_in_kernel(monkeypatch, SimpleNamespace(get_parent=lambda: request_))
    monkeypatch.setattr(screens, "current_place", lambda: SimpleNamespace(can_mount_drive=is_hosted))
    assert isinstance(choose_screen(), expected)


def test_an_environment_variable_chooses_the_screen_unless_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"notebook": NotebookScreen, "text": TerminalScreen, "lines": LineScreen, "final": FinalScreen}
    for name, kind in chosen.items():
        monkeypatch.setenv("COLABKIT_SCREEN", name)
        assert isinstance(choose_screen(), kind)
    assert isinstance(choose_screen("lines"), LineScreen)
    monkeypatch.setenv("COLABKIT_SCREEN", "none")
    assert choose_screen() is None
    for same in ("auto", ""):
        monkeypatch.setenv("COLABKIT_SCREEN", same)
        assert isinstance(choose_screen(stream=Terminal()), TerminalScreen)
    monkeypatch.setenv("COLABKIT_SCREEN", "window")
    with pytest.raises(InvalidOption, match="COLABKIT_SCREEN is 'window'; expected one of auto, notebook, text"):
        choose_screen()

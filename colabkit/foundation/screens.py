"""Screens, which show panels and progress, and the choice of a screen for the front end that runs the code.

A front end shows an output that is updated (Jupyter, Colab, Kaggle, VS Code, marimo), redraws lines (a terminal), or
only appends text (a pipe, a log, the shell of an agent, Colab's command line). `choose_screen` is the only place that
distinguishes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
import uuid
from collections.abc import Iterable
from typing import Any, Literal, Protocol, TextIO, TypeAlias, cast, get_args

from colabkit.foundation.environment.places import current_place, running_shell
from colabkit.foundation.errors import InvalidOption
from colabkit.foundation.messages import cannot

ScreenName: TypeAlias = Literal["auto", "notebook", "text", "lines", "final", "none"]

VARIABLE = "COLABKIT_SCREEN"
"""Environment variable with the name of the screen that `"auto"` stands for."""

_LINE_EVERY_S, _LINES_UNTIL_S = 10.0, 60.0
# Maximum number of bytes of all lines before the last one.
_MOST_BYTES = 1200
# Moves the cursor up by one line.
_UP = "\x1b[A"


class Frame(Protocol):
    """The content at one instant, in each form that a screen may need."""

    @property
    def html(self) -> str:
        """The frame as HTML."""

    @property
    def text(self) -> str:
        """The frame as lines of text."""

    @property
    def line(self) -> str:
        """The frame as one line of text; empty if there is nothing to print."""


class Screen(Protocol):
    """Shows frames, each replacing the previous one."""

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame; the final one stays visible."""

    def close(self) -> None:
        """Remove a frame that is not final, if that is possible; may be called twice."""


class NotebookScreen:
    """Updates one output of the running cell; the last frame stays in the saved notebook as HTML and text.

    It needs neither widgets nor scripts, so that frames look the same in Colab, Jupyter, Kaggle and VS Code, and in a
    notebook that is opened again.
    """

    def __init__(self) -> None:
        self._display_id: str | None = None

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame; must be called from the thread that runs the cell."""
        from IPython.display import display

        bundle = {"text/html": frame.html, "text/plain": frame.text}
        is_first = self._display_id is None
        self._display_id = self._display_id or uuid.uuid4().hex
        display(bundle, raw=True, display_id=self._display_id, update=not is_first)

    def close(self) -> None:
        """Keep the output, since front ends cannot remove it; a later frame is shown by the cell that runs then."""
        self._display_id = None


class MarimoScreen:
    """Replaces the output of the running cell in marimo; a value at the end of the cell replaces the last frame.

    Args:
        marimo: the module `marimo`.
    """

    def __init__(self, marimo: Any) -> None:
        self._page, self._replace = marimo.Html, marimo.output.replace

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame; must be called from the thread that runs the cell."""
        self._replace(self._page(frame.html))

    def close(self) -> None:
        """Keep the output."""


class TerminalScreen:
    """Updates a frame in place in a terminal; writes only the final frame to other streams.

    Lines that the program prints while a frame is shown appear above it.

    Args:
        stream: output stream; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._stream: TextIO = stream.stream if isinstance(stream, _StreamProxy) else stream
        self._lines = 0
        self._frame = ""
        # Printed text that does not end with a newline; it is shown below the frame until its line is complete.
        self._unfinished = ""
        # Lines between the end of the frame and the cursor, which progress bars move.
        self._below = 0
        self._process = os.getpid()
        self._writing = threading.RLock()

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame."""
        is_terminal = _is_terminal(self._stream)
        if not final and not is_terminal:
            return
        lines = _encodable(frame.text, self._stream).splitlines()
        # Lines that the terminal itself wraps, or scrolls out of view, cannot be rewritten.
        if not final:
            columns, rows = shutil.get_terminal_size()
            lines = [part for line in lines for part in _wrapped(line, columns - 1)][: rows - 1]
        text = "".join(f"{line}\n" for line in lines)
        with self._writing:
            if is_terminal:
                self._hide_others()
            if final:
                self._write(f"{self._unfinished}\n{text}" if self._unfinished else text)
                self._release()
            else:
                # The cursor may be behind a progress bar, which would stay in the line of the first frame.
                start = "" if self._lines else "\r\x1b[K"
                self._write(f"{start}{text}{self._unfinished}")
                self._lines, self._frame = len(lines), text
                self._catch_prints()

    def close(self) -> None:
        """Remove a frame that is not final."""
        with self._writing:
            try:
                if self._lines:
                    self._write(self._unfinished)
            finally:
                self._release()

    def print_above(self, stream: TextIO, text: str) -> None:
        """Write printed text to a stream of this terminal, above the frame."""
        # A forked process does not know the current frame, and its lock may be held by a thread that it lacks.
        if os.getpid() != self._process:
            stream.write(text)
            return
        with self._writing:
            if not self._lines:
                stream.write(text)
                return
            done, newline, rest = f"{self._unfinished}{text}".rpartition("\n")
            columns, _ = shutil.get_terminal_size()
            # The terminal would wrap a longer line, and the frame could not be found again.
            if len(rest) >= columns:
                done, newline, rest = f"{done}{newline}{rest}", "\n", ""
            stream.write(f"{self._erasure()}{done}\n{self._frame}{rest}" if newline else text)
            stream.flush()
            # Standard error takes all characters, but the next frame repeats the text on the stream of the frame.
            self._unfinished = _encodable(rest, self._stream)

    def print_below(self, stream: TextIO, text: str) -> None:
        """Write text that moves the cursor, as progress bars do, and note how far below the frame the cursor is."""
        stream.write(text)
        if self._lines and os.getpid() == self._process:
            self._below += text.count("\n") - text.count(_UP)

    def _erasure(self) -> str:
        below, self._below = self._below, 0
        return f"\x1b[{self._lines + below}F\x1b[J" if self._lines else ""

    def _write(self, text: str) -> None:
        self._stream.write(f"{self._erasure()}{text}")
        self._stream.flush()

    def _hide_others(self) -> None:
        """Remove the frame of another screen, so that the two do not overwrite each other."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _StreamProxy) and stream.screen is not self:
                stream.screen.close()

    def _catch_prints(self) -> None:
        if isinstance(sys.stdout, _StreamProxy) or self._stream is not sys.stdout:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not isinstance(stream, _StreamProxy) and _is_terminal(stream):
                _replace_stream(name, cast(TextIO, _StreamProxy(stream, self)))

    def _release(self) -> None:
        self._lines, self._frame, self._unfinished, self._below = 0, "", "", 0
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _StreamProxy) and stream.screen is self:
                _replace_stream(name, stream.stream)


def _replace_stream(name: str, new: TextIO) -> None:
    """Replace a standard stream, also in the handlers of loggers, which hold it."""
    old = getattr(sys, name)
    setattr(sys, name, new)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            # `setStream()` would wait for the handler's lock, whose holder may wait for the screen.
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


class _StreamProxy:
    """Takes the place of a standard stream while a frame is shown, and writes above the frame.

    Args:
        stream: the standard stream.
        screen: the screen that shows the frame.
    """

    def __init__(self, stream: TextIO, screen: TerminalScreen) -> None:
        self.stream = stream
        self.screen = screen
        self._moves_cursor = False

    def write(self, text: str) -> int:
        """Write text above the frame, unless the program moves the cursor itself, as progress bars do."""
        plain = text.replace("\r\n", "\n")
        # A newline alone belongs to the text before it.
        if plain.strip("\n"):
            self._moves_cursor = "\r" in plain or _UP in plain
        write = self.screen.print_below if self._moves_cursor else self.screen.print_above
        write(self.stream, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class LineScreen:
    """Prints one line every 10 s, and a last one, where nothing can be redrawn.

    After a minute, the interval doubles with each line, so that a run of a day prints 16 lines. Together with a last
    line of at most 800 bytes, a run prints at most 2 kB.

    Args:
        stream: output stream; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._began_s = time.monotonic()
        self._next_s = self._began_s + _LINE_EVERY_S
        self._left_bytes = _MOST_BYTES
        self._printed = ""

    def paint(self, frame: Frame, final: bool) -> None:
        """Print a line if one is due, or if the frame is final."""
        now_s = time.monotonic()
        if not final and now_s < self._next_s:
            return
        passed_s = now_s - self._began_s
        self._next_s = now_s + (_LINE_EVERY_S if passed_s < _LINES_UNTIL_S else passed_s)
        line = f"{_encodable(frame.line, self._stream)}\n"
        size = len(line.encode())
        # Do not print the last frame of a run twice.
        if frame.line and line != self._printed and (final or size <= self._left_bytes):
            self._printed = line
            self._left_bytes -= size
            # The run must continue even if the reader of a pipe has ended, a disk is full, or the stream is closed.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line)
                self._stream.flush()

    def close(self) -> None:
        """Do nothing: printed lines stay."""


class FinalScreen:
    """Shows only the final frame, on another screen.

    Args:
        screen: the other screen.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame if it is final."""
        if final:
            self._screen.paint(frame, final)

    def close(self) -> None:
        """Close the other screen."""
        self._screen.close()


def choose_screen(name: ScreenName = "auto", stream: TextIO | None = None) -> Screen | None:
    """Return a screen by name, or None for `"none"`.

    Args:
        name: `"auto"` is the value of the environment variable `COLABKIT_SCREEN` if it is set. Otherwise it is
            `"notebook"` in a notebook, `"text"` in a terminal, and `"lines"` where nothing can be redrawn.
        stream: stream for text; standard output by default.

    Raises:
        InvalidOption: if the environment variable has an invalid value.
    """
    stream = stream or sys.stdout
    if name == "auto":
        name = _named_by_user() or _fitting(stream)
    if name == "final":
        shown = choose_screen("notebook" if _fitting(stream) == "notebook" else "text", stream)
        return None if shown is None else FinalScreen(shown)
    if name == "notebook":
        marimo = _marimo()
        return NotebookScreen() if marimo is None else MarimoScreen(marimo)
    # A process without a console has no standard streams, or closed ones.
    if name == "none" or stream is None or getattr(stream, "closed", False):
        return None
    return TerminalScreen(stream) if name == "text" else LineScreen(stream)


def _named_by_user() -> ScreenName | None:
    given = os.environ.get(VARIABLE, "auto") or "auto"
    for name in get_args(ScreenName):
        if given == name:
            return None if name == "auto" else name
    found, expected = f"the environment variable {VARIABLE} is {given!r}", f"one of {', '.join(get_args(ScreenName))}"
    raise InvalidOption(cannot("choose a screen", found, expected, f"Set {VARIABLE}=auto"))


def _fitting(stream: TextIO | None) -> ScreenName:
    if _marimo() is not None:
        return "notebook"
    if getattr(running_shell(), "kernel", None) is not None:
        return "lines" if _is_command_line_of_colab() else "notebook"
    is_terminal = _is_terminal(stream) and os.environ.get("TERM", "") != "dumb"
    return "text" if is_terminal else "lines"


def _marimo() -> Any:
    """Return the module marimo if it runs this code as a notebook; it is not imported here."""
    marimo = sys.modules.get("marimo")
    is_running = getattr(marimo, "running_in_notebook", None)
    return marimo if is_running is not None and is_running() else None


def _is_command_line_of_colab() -> bool:
    """Return whether this code runs in Colab's command line, which prints each update of an output again.

    Unlike Colab's page, it does not answer `input()`, and names no cell in its requests.
    """
    kernel = running_shell().kernel
    if not current_place().can_mount_drive or not hasattr(kernel, "get_parent"):
        return False
    request = kernel.get_parent()
    is_answered = request.get("content", {}).get("allow_stdin", True)
    return not is_answered and "colab" not in request.get("metadata", {})


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    # A replacement of a standard stream may only have the method write(), and a closed stream raises ValueError.
    except (AttributeError, ValueError):
        return False


def _wrapped(line: str, columns: int) -> list[str]:
    # `textwrap` counts characters, but some of them, such as Chinese ones, take two columns.
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in line)
    width = max(columns - wide, columns // 2, 1)
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)

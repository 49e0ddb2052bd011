"""Where the panel appears: under a notebook's cell, in a terminal, or nowhere."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Literal, Protocol, TextIO

__all__ = ["NotebookScreen", "NullScreen", "Screen", "TerminalScreen", "choose_screen"]


class Screen(Protocol):
    """Shows frames, each in place of the one before."""

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame; the final one stays."""


class NotebookScreen:
    """Updates one output of the running cell; its last frame stays in the saved notebook, as HTML and as text.

    A display handle needs neither widgets nor scripts, so it looks the same in Colab, Jupyter, Kaggle and VS Code.
    """

    def __init__(self) -> None:
        self._display_id = uuid.uuid4().hex
        self._is_shown = False

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame; call it from the thread that runs the cell."""
        from IPython.display import display

        bundle = {"text/html": html, "text/plain": text}
        display(bundle, raw=True, display_id=self._display_id, update=self._is_shown)
        self._is_shown = True


class TerminalScreen:
    """Rewrites some lines in place on a terminal; writes only the final frame to anything else.

    Args:
        stream: where to write; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lines = 0

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame."""
        if not final and not self._stream.isatty():
            return
        encoding = self._stream.encoding or "utf-8"
        shown = text.encode(encoding, "replace").decode(encoding)
        up = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
        self._stream.write(f"{up}{shown}\n")
        self._stream.flush()
        self._lines = shown.count("\n") + 1


class NullScreen:
    """Shows nothing."""

    def paint(self, html: str, text: str, final: bool) -> None:
        """Do nothing."""


def choose_screen(name: Literal["auto", "notebook", "text", "none"]) -> Screen:
    """Return a screen by name; `"auto"` is the notebook where a kernel runs the code, else the terminal."""
    if name == "auto":
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        name = "notebook" if shell is not None and hasattr(shell, "kernel") else "text"
    screens: dict[str, Callable[[], Screen]] = {
        "notebook": NotebookScreen,
        "text": TerminalScreen,
        "none": NullScreen,
    }
    return screens[name]()

"""The screens that show the panel: below a notebook cell, as a widget, or in a terminal."""

from __future__ import annotations

import shutil
import sys
import uuid
from typing import Any, Literal, Protocol, TextIO, TypeAlias

from colabkit.foundation import import_optional

ScreenName: TypeAlias = Literal["auto", "notebook", "widgets", "text", "none"]


class Screen(Protocol):
    """Shows frames, each replacing the previous one."""

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame; the final one stays visible."""

    def close(self) -> None:
        """Release resources but keep the output; may be called twice."""


class NotebookScreen:
    """Updates one output of the running cell; the last frame stays in the saved notebook as HTML and text.

    It needs neither widgets nor scripts, so the panel looks the same in Colab, Jupyter, Kaggle and VS Code.
    """

    def __init__(self) -> None:
        self._display_id = uuid.uuid4().hex
        self._is_shown = False

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame; must be called from the thread that runs the cell."""
        self._show({"text/html": html, "text/plain": text})

    def close(self) -> None:
        """Do nothing: this screen holds no resources."""

    def _show(self, bundle: dict[str, Any]) -> None:
        from IPython.display import display

        display(bundle, raw=True, display_id=self._display_id, update=self._is_shown)
        self._is_shown = True


class WidgetScreen(NotebookScreen):
    """Updates one HTML widget; at the end, the last frame replaces it as HTML and text.

    Each frame sends only a small message, and the saved notebook can be read without widgets.

    Args:
        widgets: the module `ipywidgets`.
    """

    def __init__(self, widgets: Any) -> None:
        super().__init__()
        self._widgets = widgets
        self._widget: Any = None

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame; must be called from the thread that runs the cell."""
        if final:
            super().paint(html, text, final)
            self.close()
        elif self._widget is None:
            self._widget = self._widgets.HTML(value=html)
            # Display the widget as ipywidgets would, but in an output that the last frame can replace.
            view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
            self._show({"application/vnd.jupyter.widget-view+json": view, "text/plain": text})
        else:
            self._widget.value = html

    def close(self) -> None:
        """Close the widget and its layout and style."""
        widget, self._widget = self._widget, None
        if widget is not None:
            for part in (widget, widget.layout, widget.style):
                part.close()


class TerminalScreen:
    """Updates the panel in place in a terminal; writes only the final frame to other streams.

    Args:
        stream: output stream; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lines = 0

    def paint(self, html: str, text: str, final: bool) -> None:
        """Show a frame."""
        if not final and not self._stream.isatty():
            return
        encoding = self._stream.encoding or "utf-8"
        lines = text.encode(encoding, "replace").decode(encoding).splitlines()
        # Lines that the terminal wraps or scrolls out of view cannot be rewritten.
        if not final:
            columns, rows = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in lines[: rows - 1]]
        up = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
        self._stream.write("\n".join([up + lines[0], *lines[1:], ""]))
        self._stream.flush()
        self._lines = len(lines)

    def close(self) -> None:
        """Do nothing: this screen holds no resources."""


def choose_screen(name: ScreenName) -> Screen | None:
    """Return a screen by name, or None for `"none"`.

    `"auto"` is the notebook if an IPython kernel is running, otherwise the terminal.

    Raises:
        MissingPackage: if `name` is `"widgets"` and ipywidgets is not installed.
    """
    if name == "auto":
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        name = "notebook" if shell is not None and hasattr(shell, "kernel") else "text"
    match name:
        case "notebook":
            return NotebookScreen()
        case "widgets":
            act, advice = "show the panel", "Run pip install ipywidgets, or use screen='notebook'"
            return WidgetScreen(import_optional("ipywidgets", act, "for screen='widgets'", next_step=advice))
        case "text":
            return TerminalScreen()
    return None

"""`launch()` opens a panel whose buttons lead from remote files to a trained network without code.

The form's settings become a pipeline of public calls. The panel shows their progress, errors and reports, and a cell
that makes the same calls.

A click is handled immediately in the kernel's main thread, because Drive's consent dialog needs that thread and some
front ends repaint only while the kernel is busy. If a kernel handles clicks in another thread, the work is passed to
the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

import colabkit
from colabkit.foundation import (
    ColabkitError,
    NoNotebook,
    Report,
    cannot,
    format_seconds,
    import_optional,
    local_root,
    printable,
    shown_by,
)
from colabkit.notebook.launcher import html
from colabkit.notebook.launcher.pipeline import Action, Pipeline, code_of, make_pipeline, run_pipeline
from colabkit.notebook.launcher.settings import Settings, in_form, places
from colabkit.notebook.launcher.view import View

_FALLBACK = "colabkit's launcher: run this cell again to open it."
_STOPPED = "Stopped. Click again to resume."

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None

_open: list[Launcher] = []


def launch() -> Launcher:
    """Open a panel below this cell with buttons to probe a source, stage it, pack it and train on it.

    The work runs in the kernel's main thread, so other cells wait for it. Progress, errors, reports and the live panel
    of the training appear in the panel. Interrupt the kernel to stop the work, and click again to resume. "Show the
    code" shows a cell that does the same as "Stage and train". Opening another panel closes the previous one.

    Returns:
        The panel. `close()` removes it, and `results` holds the reports of the last run.

    Raises:
        NoNotebook: if this is not a notebook.
        MissingPackage: if ipywidgets is not installed.

    Example:
        >>> import colabkit
        >>> launcher = colabkit.launch()
        >>> launcher.is_open
        True
        >>> launcher.close()
    """
    act = "open the launcher"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        next_step = "Run it in Colab or Jupyter, or see python -m colabkit --help"
        raise NoNotebook(cannot(act, "this is not a notebook", "", next_step))
    widgets = import_optional("ipywidgets", act, "for fields and buttons", next_step="Run %pip install ipywidgets")
    close_launchers()
    launcher = Launcher(widgets)
    _open.append(launcher)
    launcher.show()
    return launcher


def close_launchers() -> None:
    """Close the open panel, if any."""
    while _open:
        _open.pop().close()


class Launcher:
    """The launcher's panel; `close()` removes it.

    The results of a run are also displayed in a separate output, which is hidden while the panel is alive. In a saved
    notebook, only this output remains readable.

    Args:
        widgets: the package ipywidgets.

    Attributes:
        view: the widgets.
        results: reports of the last run, by the variable names of the shown code: `mounted`, `probed`, `staged`,
            `packed` and `report`.
        is_open: whether the panel is open.

    Example:
        >>> import colabkit
        >>> launcher = colabkit.launch()
        >>> launcher.is_open
        True
        >>> launcher.close()
    """

    def __init__(self, widgets: Any) -> None:
        self.results: dict[str, Report] = {}
        self.is_open = True
        self._id = f"colabkit-{uuid.uuid4().hex}"
        self.view = View(widgets, _places(), self._start, _code, self._id)
        self._busy = threading.Lock()
        self._loop = _main_loop()
        self._shown_in: int | None = None

    def show(self) -> None:
        """Show the panel below the running cell."""
        from IPython import get_ipython

        view = {"version_major": 2, "version_minor": 0, "model_id": self.view.root.model_id}
        self._display(self._id, {"application/vnd.jupyter.widget-view+json": view, "text/plain": _FALLBACK})
        self._display(f"{self._id}-kept", self._kept())
        self._shown_in = getattr(get_ipython(), "execution_count", None)

    def close(self) -> None:
        """Close all widgets; the results of the last run stay as HTML and text. May be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        if self._shown_in is not None:
            self._display(self._id, {"text/html": "", "text/plain": ""}, update=True)
        self.view.remove()

    def __repr__(self) -> str:
        return f"colabkit's launcher, {'open' if self.is_open else 'closed'}"

    def _ipython_display_(self) -> None:
        """Show an open panel again, except in the cell that opened it; show a closed one as text."""
        from IPython import get_ipython

        if not self.is_open:
            self._display(None, {"text/plain": repr(self)})
        elif self._shown_in != getattr(get_ipython(), "execution_count", None):
            self.show()

    def _display(self, display_id: str | None, bundle: dict[str, Any], *, update: bool = False) -> None:
        from IPython.display import display

        display(bundle, raw=True, display_id=display_id, update=update)

    def _kept(self) -> dict[str, Any]:
        """Return the results of the last run for the saved notebook; they are hidden while the panel is alive."""
        text = "\n".join(filter(None, [self.view.said, *map(repr, self.view.reports)]))
        shown = self.view.shown or html.message(_FALLBACK)
        return {"text/html": html.keep(shown, self._id), "text/plain": text or _FALLBACK}

    def _start(self, action: Action) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            self.view.begin()
            if self._loop is not None and threading.current_thread() is not threading.main_thread():
                self.view.say("Waiting for the kernel")
                self._loop.call_soon_threadsafe(self._work, action)
                return
        except BaseException:
            # Starting can fail, for example if the front end or the event loop is gone.
            self._busy.release()
            raise
        self._work(action)

    def _work(self, action: Action) -> None:
        started = time.monotonic()
        # Ignore interrupts while the panel is updated; only the pipeline itself can be interrupted.
        with _on_interrupt(signal.SIG_IGN):
            try:
                with _noted(self.view.note), shown_by(self.view.progress), _on_interrupt(signal.default_int_handler):
                    pipeline = _pipeline(self.view.settings, action)
                    self.results = {}
                    run_pipeline(pipeline, self.view, self._begin, self._done)
                self.view.say(f"Done in {format_seconds(time.monotonic() - started)}.")
            except KeyboardInterrupt as stop:
                # A TrainingInterrupted has a report. Its class is not imported here, because that would load torch.
                if report := getattr(stop, "report", None):
                    self._done("report", report)
                # Remove the note that training is being stopped.
                self.view.note("")
                self.view.say(_STOPPED)
            except Exception as error:
                text, fields = _described(error, action)
                self.view.say(text, is_error=True)
                self.view.point_to(fields)
            finally:
                self.view.end()
                self._busy.release()
            self.view.offer(_places())
            if self._shown_in is not None:
                self._display(f"{self._id}-kept", self._kept(), update=True)

    def _begin(self, doing: str) -> None:
        self.view.say(f"{doing}. To stop, interrupt the kernel.")

    def _done(self, name: str, report: Report) -> None:
        self.results[name] = report
        self.view.report(report)


def _pipeline(settings: Settings, action: Action) -> Pipeline:
    return make_pipeline(settings, action, needs_mount=not os.environ.get("COLABKIT_DRIVE"))


def _code(settings: Settings) -> str:
    """Return code that does the same as "Stage and train", or a comment that states the error in the settings."""
    try:
        return code_of(_pipeline(settings, "train"))
    except ColabkitError as error:
        return f"# {in_form(error, 'train')[0]}\n"


def _places() -> list[tuple[str, str]]:
    return places(colabkit.runtime(), os.path.abspath(local_root(os.environ)))


def _described(error: Exception, action: Action) -> tuple[str, tuple[str, ...]]:
    if os.environ.get("COLABKIT_DEBUG") == "1":
        return "".join(traceback.format_exception(error)), ()
    if isinstance(error, ColabkitError):
        return in_form(error, action)
    return f"{type(error).__name__}: {error}\nSet COLABKIT_DEBUG=1 in the environment to see the traceback here.", ()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _on_interrupt(handler: Handler) -> Iterator[None]:
    """Set the handler of SIGINT (Ctrl-C or the kernel's interrupt) in the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextlib.contextmanager
def _noted(note: Callable[[str], None]) -> Iterator[None]:
    """Pass colabkit's log warnings in the block to a function, one line each."""

    class NoteHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(printable(record.getMessage()))

    logger, notes = logging.getLogger("colabkit"), NoteHandler(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)

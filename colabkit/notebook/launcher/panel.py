"""`open_launcher()` opens a panel with buttons: from remote files to a trained network without a line of code.

The form's settings become a pipeline of public calls; the panel shows their progress, errors and reports, and the cell
that makes the same calls.

A click works where it is heard: in the kernel's main thread, as Drive's consent needs it, and while the kernel is busy,
as some front ends need it to repaint. Where a kernel hears clicks in other threads, the work is handed to the main one.
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
    near_folder,
    printable,
    shown_by,
)
from colabkit.notebook.launcher import html
from colabkit.notebook.launcher.pipeline import Action, Pipeline, code_of, make_pipeline, run_pipeline
from colabkit.notebook.launcher.settings import Settings, places, reword_for_form
from colabkit.notebook.launcher.view import View

_FALLBACK = "colabkit's launcher: run this cell again to open it."
_STOPPED = "Stopped. A click goes on where it was."

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None

_open: list[Launcher] = []


def open_launcher() -> Launcher:
    """Open a panel with buttons below this cell: probe a source, stage it, pack it, train on it.

    Work is done in the kernel's main thread while its button is disabled, so cells wait for it. Progress, errors,
    reports and the live panel of the training appear inside. Interrupting the kernel stops the work; a click goes on
    where it was. "Show the code" shows the cell that does the same. Opening another panel closes the one before.

    Returns:
        The panel: `close()` takes it away, `results` holds the reports of the last run.

    Raises:
        NoNotebook: outside of a notebook.
        MissingPackage: if ipywidgets is not installed.
    """
    act = "open the launcher"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        next_step = "Run it in Colab or Jupyter, or see python -m colabkit --help"
        raise NoNotebook(cannot(act, "this is no notebook", "a cell, below which it is shown", next_step))
    widgets = import_optional("ipywidgets", act, "for fields and buttons", next_step="Run %pip install ipywidgets")
    close_launchers()
    launcher = Launcher(widgets)
    _open.append(launcher)
    launcher.show()
    return launcher


def close_launchers() -> None:
    """Close the panel that is open, if there is one."""
    while _open:
        _open.pop().close()


class Launcher:
    """The open panel; `close()` takes it away.

    What each run came to is also put into an output of its own, which is hidden while the panel is alive and all that
    can be read in a saved notebook.

    Args:
        widgets: the package ipywidgets.

    Attributes:
        view: its widgets.
        results: the reports of the last run, by the variables that the shown code gives them: `mounted`, `probed`,
            `staged`, `packed` and `report`.
        is_open: whether it has not been closed.
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
        """Close all widgets; what the last run came to stays, as HTML and text. May be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        if self._shown_in is not None:
            self._display(self._id, {"text/html": "", "text/plain": ""}, update=True)
        self.view.remove()

    def __repr__(self) -> str:
        return f"colabkit's launcher, {'open' if self.is_open else 'closed'}"

    def _ipython_display_(self) -> None:
        """Show the panel once more; not in the cell that opened it, where it stands already."""
        from IPython import get_ipython

        if not self.is_open:
            self._display(None, {"text/plain": repr(self)})
        elif self._shown_in != getattr(get_ipython(), "execution_count", None):
            self.show()

    def _display(self, display_id: str | None, bundle: dict[str, Any], *, update: bool = False) -> None:
        from IPython.display import display

        display(bundle, raw=True, display_id=display_id, update=update)

    def _kept(self) -> dict[str, Any]:
        """Return what stays in a saved notebook: what the last run came to, hidden while the panel is alive."""
        text = "\n".join(filter(None, [self.view.said, *map(repr, self.view.reports)]))
        shown = self.view.shown or html.message(_FALLBACK)
        return {"text/html": html.keep(shown, self._id), "text/plain": text or _FALLBACK}

    def _start(self, action: Action) -> None:
        """Begin what a button does, unless something runs."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            self.view.begin()
            if self._loop is not None and threading.current_thread() is not threading.main_thread():
                self.view.say("Waiting for the kernel")
                self._loop.call_soon_threadsafe(self._work, action)
                return
        except BaseException:  # the front end or the loop is gone
            self._busy.release()
            raise
        self._work(action)

    def _work(self, action: Action) -> None:
        """Do what a button does, and tell how it went; nothing that goes wrong leaves the panel."""
        started = time.monotonic()
        with _on_interrupt(signal.SIG_IGN):  # but for what can be stopped
            try:
                with _noted(self.view.note), shown_by(self.view.progress), _on_interrupt(signal.default_int_handler):
                    pipeline = _pipeline(self.view.settings, action)
                    self.results = {}
                    run_pipeline(pipeline, self.view, self._begin, self._done)
                self.view.say(f"Done in {format_seconds(time.monotonic() - started)}.")
            except KeyboardInterrupt as stop:
                if report := getattr(stop, "report", None):  # of a TrainingInterrupted, whose module may not be loaded
                    self._done("report", report)
                self.view.note("")  # that it is being stopped
                self.view.say(_STOPPED)
            except Exception as error:
                told, fields = _told(error, action)
                self.view.say(told, is_error=True)
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
    """Return the cell that does what the last button does, or why there is none."""
    try:
        return code_of(_pipeline(settings, "train"))
    except ColabkitError as error:
        return f"# {reword_for_form(error, 'train')[0]}\n"


def _places() -> list[tuple[str, str]]:
    return places(colabkit.runtime(), os.path.abspath(near_folder(os.environ)))


def _told(error: Exception, action: Action) -> tuple[str, tuple[str, ...]]:
    """Return what is said of an error, and the fields to look at."""
    if os.environ.get("COLABKIT_DEBUG") == "1":
        return "".join(traceback.format_exception(error)), ()
    if isinstance(error, ColabkitError):
        return reword_for_form(error, action)
    return f"{type(error).__name__}: {error}\nWith COLABKIT_DEBUG=1 in the environment all of it is shown here.", ()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    """Return the main thread's event loop, where this is that thread and it has one."""
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _on_interrupt(handler: Handler) -> Iterator[None]:
    """Have Ctrl-C, or the kernel's interrupt, handled so in the block; only the main thread hears it."""
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
    """Give the warnings that colabkit logs in the block to a function, one line each, in place of the error stream."""

    class NoteHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(printable(record.getMessage()))

    logger, notes = logging.getLogger("colabkit"), NoteHandler(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)

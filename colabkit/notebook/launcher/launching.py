"""A launcher that is open: what its buttons do, and what it tells of it.

A click works where it is heard: in the kernel's main thread, as Drive's consent needs it, and while the kernel is busy,
as some front ends need it to repaint. Where a kernel hears clicks in other threads, the work is handed to the main one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import traceback
import uuid
from typing import Any

import colabkit
from colabkit.foundation import ColabkitError, Report, format_seconds, near_folder, shown_by
from colabkit.notebook.launcher import texts
from colabkit.notebook.launcher.code import code_of
from colabkit.notebook.launcher.fields import in_fields
from colabkit.notebook.launcher.plan import Action, Plan, plan_of
from colabkit.notebook.launcher.running import carry_out, noted, on_interrupt
from colabkit.notebook.launcher.settings import Settings, places
from colabkit.notebook.launcher.view import View

_FALLBACK = "colabkit's launcher: run this cell again to open it."
_STOPPED = "Stopped. A click goes on where it was."


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
        html = self.view.html or texts.message(_FALLBACK)
        return {"text/html": texts.keep(html, self._id), "text/plain": text or _FALLBACK}

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
        with on_interrupt(signal.SIG_IGN):  # but for what can be stopped
            try:
                with noted(self.view.note), shown_by(self.view.progress), on_interrupt(signal.default_int_handler):
                    plan = _plan(self.view.settings, action)
                    self.results = {}
                    carry_out(plan, self.view, self._begin, self._done)
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


def _plan(settings: Settings, action: Action) -> Plan:
    return plan_of(settings, action, needs_mount=not os.environ.get("COLABKIT_DRIVE"))


def _code(settings: Settings) -> str:
    """Return the cell that does what the last button does, or why there is none."""
    try:
        return code_of(_plan(settings, "train"))
    except ColabkitError as error:
        return f"# {in_fields(error, 'train')[0]}\n"


def _places() -> list[tuple[str, str]]:
    return places(colabkit.runtime(), os.path.abspath(near_folder(os.environ)))


def _told(error: Exception, action: Action) -> tuple[str, tuple[str, ...]]:
    """Return what is said of an error, and the fields to look at."""
    if os.environ.get("COLABKIT_DEBUG") == "1":
        return "".join(traceback.format_exception(error)), ()
    if isinstance(error, ColabkitError):
        return in_fields(error, action)
    return f"{type(error).__name__}: {error}\nWith COLABKIT_DEBUG=1 in the environment all of it is shown here.", ()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    """Return the main thread's event loop, where this is that thread and it has one."""
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

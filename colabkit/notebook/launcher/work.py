"""The work of a click: it runs in the kernel's main thread, can be stopped, and its state is shown every second.

Drive's consent dialog and interrupts need the main thread. If a kernel handles clicks in another thread, the work is
passed to the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from signal import SIG_IGN, default_int_handler
from typing import Any, Literal, TypeAlias

from colabkit.foundation import (
    ColabkitError,
    Report,
    format_seconds,
    meters,
    on_interrupt,
    printable,
)
from colabkit.notebook.launcher.settings import in_form
from colabkit.notebook.launcher.stopping import (
    can_receive,
    interrupt_main_thread,
    publish_state,
    stoppable,
)
from colabkit.notebook.launcher.view import View

Outcome: TypeAlias = Literal["done", "stopped", "failed"]

# Seconds after the work during which the form stays disabled and clicks are ignored, since queued clicks arrive then.
_QUIET_S = 0.3


class ClickWorker:
    """Does the work of one click at a time, and shows what it is doing.

    Args:
        view: the launcher's widgets.
        kernel: the kernel of the notebook; None in a test without one.

    Attributes:
        doing: the current activity of the work; empty if there is no work.
        results: reports of the last work, by the names of the functions that returned them.
    """

    def __init__(self, view: View, kernel: Any) -> None:
        self.doing = ""
        self.results: dict[str, Report] = {}
        self._view = view
        self._kernel = kernel
        self._busy = threading.Lock()
        self._loop = _main_loop()
        self._began = 0.0
        self._found = ""

    @property
    def is_busy(self) -> bool:
        """Whether clicks are ignored: during the work, and afterwards those that were made during it."""
        return self._busy.locked()

    def in_main_thread(self, call: Callable[[], Any]) -> None:
        """Call a function in the main thread: now, or when the kernel's event loop gets to it."""
        if self._loop is None or threading.current_thread() is threading.main_thread():
            call()
        else:
            self._loop.call_soon_threadsafe(call)

    def run(self, doing: str, work: Callable[[], None], ended: Callable[[Outcome], None]) -> None:
        """Do work in the main thread, unless other work is being done, and call `ended` with its outcome."""
        # Ignore interrupts before and after the work: one in between would leave the form disabled.
        with on_interrupt(SIG_IGN):
            if self._busy.acquire(blocking=False):
                self._run(doing, work, ended)

    def _run(self, doing: str, work: Callable[[], None], ended: Callable[[Outcome], None]) -> None:
        # If another thread handles clicks, the front end would show the kernel as idle during the work.
        parent = self._kernel.get_parent() if can_receive(self._kernel) else {}

        def tell_again() -> None:
            publish_state(self._kernel, "busy", parent)
            self._tell()

        self._began, self._found, self.results = time.monotonic(), "", {}
        try:
            self._view.begin(can_receive(self._kernel))
            self.enter(doing)
            with stoppable(self._kernel, self._view.stop.model_id, self._stop):
                ended(self._outcome_of(work, tell_again))
        finally:
            self.doing = ""
            publish_state(self._kernel, "idle", parent)
            if self._loop is None:
                self._rest()
            else:
                self._loop.call_later(_QUIET_S, self._rest)

    def _rest(self) -> None:
        """Accept clicks again."""
        self._busy.release()
        self._view.enable(True)

    def _outcome_of(self, work: Callable[[], None], tell_again: Callable[[], None]) -> Outcome:
        """Do work that may fail or be interrupted, call `tell_again` every second meanwhile, and show the outcome."""
        fields: tuple[str, ...] = ()
        outcome: Outcome = "done"
        is_error = False
        try:
            # The other thread ends before the outcome is shown, which it would replace by the activity.
            with _noted(self._view.note), _every_second(tell_again), on_interrupt(default_int_handler):
                work()
            said = f"Done in {format_seconds(time.monotonic() - self._began)}."
        except KeyboardInterrupt as stop:
            # A TrainingInterrupted has a report. Its class is not imported here, because that would load torch.
            report = getattr(stop, "report", None)
            if report is not None:
                self.add("train", report)
            # Remove the note that training is being stopped.
            self._view.note("")
            is_error = report is not None and report.steps in dict(report.failed_saves)
            said, outcome = str(stop) if is_error else "Stopped.", "stopped"
        except Exception as error:
            said, fields = _described(error)
            outcome, is_error = "failed", True
        self.doing = ""
        self._view.say(said, is_error=is_error)
        self._view.point_to(fields)
        return outcome

    def add(self, name: str, report: Report) -> None:
        """Add and show the report of a function."""
        self.results[name] = report
        self._view.report(report)

    def enter(self, doing: str) -> None:
        """Show that the work begins an activity."""
        self.doing, self._found = doing, ""
        self._tell()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Show the start of training in the block, and the lines that the block prints."""

        def listen(event: meters.Event) -> None:
            if isinstance(event, meters.RunStarted):
                self.enter("Training")

        unsubscribe = meters.subscribe(listen)
        try:
            with contextlib.redirect_stdout(_Lines(self._take_in)):
                yield
        finally:
            unsubscribe()

    def _take_in(self, line: str) -> None:
        """Show a line that the work printed: its current activity, or something that it found or chose."""
        if line.partition(" ")[0].endswith("ing"):
            self.enter(line)
        else:
            self._found = line
            self._tell()

    def _tell(self) -> None:
        """Show the current activity of the work, and its duration so far."""
        if doing := self.doing:
            seconds = int(time.monotonic() - self._began)
            elapsed = f"{seconds} s" if seconds < 60 else format_seconds(seconds)
            self._view.say(f"{doing} … {elapsed}", more=self._found)

    def _stop(self) -> None:
        self._view.stop.description = "Stopping …"
        interrupt_main_thread()


def _described(error: Exception) -> tuple[str, tuple[str, ...]]:
    if os.environ.get("COLABKIT_DEBUG") == "1":
        return "".join(traceback.format_exception(error)), ()
    if isinstance(error, ColabkitError):
        return in_form(error)
    return f"{type(error).__name__}: {error}\nSet COLABKIT_DEBUG=1 in the environment to see the traceback here.", ()


def _main_loop() -> asyncio.AbstractEventLoop | None:
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _every_second(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function every second from another thread, so that the form changes even if the work reports nothing."""
    over = threading.Event()

    def keep_telling() -> None:
        while not over.wait(1.0):
            tell()

    thread = threading.Thread(target=keep_telling, name="colabkit-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Lines(io.TextIOBase):
    """A stream that passes each line to a function."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                self._tell(printable(line.strip()))
        return len(text)


@contextlib.contextmanager
def _noted(note: Callable[[str], None]) -> Iterator[None]:
    """Pass the warnings that colabkit logs in the block to a function, one line each."""

    class NoteHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(printable(record.getMessage()))

    logger, notes = logging.getLogger("colabkit"), NoteHandler(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)

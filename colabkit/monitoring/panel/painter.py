"""A panel that is shown from entering a `with` block to leaving it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

from colabkit.foundation import Sampler, meters, sampled
from colabkit.monitoring.doctor.judging import Doctor
from colabkit.monitoring.panel.pace import Pace
from colabkit.monitoring.panel.recorder import Recorder
from colabkit.monitoring.panel.render import render
from colabkit.monitoring.panel.screens import Screen, TerminalScreen
from colabkit.monitoring.panel.text import as_text

_open: list[Dashboard] = []


def is_any_open() -> bool:
    """Return whether a panel is shown, or kept from being shown by `screen="none"`."""
    return bool(_open)


class Dashboard:
    """A panel; it listens to the meters and is painted by the thread that opened it, also while that waits for data.

    It appears with the first event, so that a block without a loop shows nothing. Of several that are open the one
    opened last is shown, and of a run within a run nothing. Whatever fails while it is painted, the run goes on: the
    panel goes on as text, and if that fails too, not at all.

    Args:
        screen: where it is shown; None for nowhere.
        refresh_s: seconds between frames.
        machine: gives what is seen of the machine.
        doctor: makes a doctor, one for each run.
        clock: tells seconds.
        cpu_clock: tells the CPU seconds of the calling thread.

    Attributes:
        has_heard: whether anything has happened that a panel shows since it was entered, if it is shown anywhere.
    """

    def __init__(
        self,
        screen: Screen | None,
        refresh_s: float = 0.5,
        *,
        machine: Callable[[], AbstractContextManager[Sampler]] = sampled,
        doctor: Callable[[], Doctor] = Doctor,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.has_heard = screen is None
        self._asked = screen
        self._refresh_s = refresh_s
        self._machine = machine
        self._doctor = doctor
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._held = ExitStack()
        self._screens: list[Screen] = []
        self._is_begun = False
        self._runs = 0  # that go on, one within the other, as a step may train something itself
        self._beginning = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            _open.append(self)
            held.callback(_open.remove, self)
            self._is_begun = False
            self._runs = 0
            self.has_heard = self._asked is None
            if self._asked is not None:
                self._screens = [self._asked, TerminalScreen()]
                held.callback(_closed, self._asked)
                self._thread = threading.get_ident()
            self._held = held.pop_all()
        if self._asked is not None:
            self._held.callback(meters.subscribe(self.listen))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self._is_begun:
                self._recorder.end(kind.__name__ if kind else None)
                self._paint(final=True)
            self._screens = []

    def listen(self, event: meters.Event) -> None:
        """Take in an event, and paint if it is time to."""
        self.has_heard = True
        kind = type(event)
        self._runs += kind is meters.RunStarted
        is_inner = self._runs > 1
        if kind is meters.RunEnded:
            self._runs = max(0, self._runs - 1)  # an end may be told twice, and one of a run that began before
        if self._asked is None or _open[-1:] != [self]:
            return
        try:
            self._take_in(event, is_inner)
        except BaseException:
            self._runs -= kind is meters.RunStarted  # a run that is interrupted as it starts tells no end
            raise

    def _take_in(self, event: meters.Event, is_inner: bool) -> None:
        if not self._is_begun:
            with self._beginning:
                if not self._is_begun:
                    self._begin()
        if not is_inner:
            if type(event) is meters.RunStarted:
                self._recorder = Recorder(self._doctor(), self._clock)
            self._recorder.note(event)
        is_due = self._pace.is_due or (type(event) is meters.RunEnded and not is_inner)
        if is_due and threading.get_ident() == self._thread:
            self._paint(final=False)

    def _begin(self) -> None:
        self._sampler = self._held.enter_context(self._machine())
        self._recorder = Recorder(self._doctor(), self._clock)
        self._pace = Pace(self._refresh_s, self._clock)
        self._shown = ""
        self._is_begun = True

    def _paint(self, final: bool) -> None:
        began_s, began_cpu_s = self._clock(), self._cpu_clock()
        while self._screens:
            try:
                self._show(self._screens[0], final)
                break
            except Exception:
                screen = self._screens.pop(0)
                rest = "it goes on as text" if self._screens else "it is gone"
                meters.logger.warning("the panel cannot be painted: %s, and the run goes on", rest, exc_info=True)
                _closed(screen)
        self._pace.painted(self._clock() - began_s, self._cpu_clock() - began_cpu_s)

    def _show(self, screen: Screen, final: bool) -> None:
        painting, sampling = self._pace.cost_share, self._sampler.cost_share
        state = self._recorder.state(self._sampler, None if painting is None else painting + sampling)
        html, text = render(state) if screen is self._asked else ("", as_text(state))
        if final or text != self._shown:
            screen.paint(html, text, final)
            self._shown = text


def _closed(screen: Screen) -> None:
    try:
        screen.close()
    except Exception:
        meters.logger.warning("the panel's screen cannot be closed; the run goes on", exc_info=True)

"""`dashboard()` shows a live panel beside `train()` or any loop over a `Loader`.

It listens to the meters and is painted by the thread that runs the loop, at most twice a second, also while that thread
waits for data. The loop knows nothing of it; if painting fails, the panel continues as text and the run continues.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self, get_args

from colabkit.foundation import Sampler, check_number, check_one_of, meters, sampled
from colabkit.monitoring.doctor.verdict import Doctor
from colabkit.monitoring.panel.html import as_html
from colabkit.monitoring.panel.recorder import RunRecorder
from colabkit.monitoring.panel.screens import Screen, ScreenName, TerminalScreen, choose_screen
from colabkit.monitoring.panel.text import as_text

_COSTLY_S = 0.005
_COSTLY_SHARE = 0.005
_SLOWEST_S = 8.0
_open: list[Dashboard] = []


def is_any_open() -> bool:
    """Return whether a panel is shown, or kept from being shown by `screen="none"`."""
    return bool(_open)


def dashboard(*, refresh_s: float = 0.5, screen: ScreenName = "auto") -> Dashboard:
    """Return a context manager that shows a live panel while its block runs.

    It says what training waits for and what would help, beside `train()`, beside any loop over a `Loader`, and beside
    one over another loader that `watch()` watches. It appears when such a loop begins. Beside a loop, epochs are
    numbered as the loader does it, the ones before the panel included. It shows the share of the time that it takes
    itself, and is painted less often where painting takes more than 0.5%.

    Args:
        refresh_s: seconds between frames, at least 0.5.
        screen: `"notebook"`, an output of the cell whose last frame stays in the saved notebook; `"widgets"`, an
            ipywidgets one that turns into the same at the end; `"text"`; `"none"`, which also keeps the panel away
            that `%load_ext colabkit` shows; or `"auto"`, the notebook where a kernel runs, else text.

    Raises:
        InvalidOption: if an argument cannot be meant.
        MissingPackage: if `"widgets"` is asked for and ipywidgets is not installed.
    """
    check_number("show the panel", "refresh_s", refresh_s, 0.5, example=0.5)
    check_one_of("show the panel", "screen", screen, get_args(ScreenName))
    return Dashboard(choose_screen(screen), refresh_s)


def show_beside_training() -> Callable[[], None]:
    """Show a panel beside every `train()` from now on, unless one is open; return the function that ends this."""
    shown: list[Dashboard | None] = []  # of each run that goes on, as a step may train something itself

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.RunStarted):
            panel = None if is_any_open() else dashboard()
            if panel is not None:
                panel.__enter__()
                panel.listen(event)  # it subscribed while this event was being told
            shown.append(panel)
        elif isinstance(event, meters.RunEnded) and shown:
            panel = shown.pop()
            if panel is not None:
                panel.listen(event)  # it may have been told already; the first end counts
                panel.__exit__(None, None, None)

    return meters.subscribe(listen)


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
                self._recorder = RunRecorder(self._doctor(), self._clock)
            self._recorder.note(event)
        is_due = self._pace.is_due or (type(event) is meters.RunEnded and not is_inner)
        if is_due and threading.get_ident() == self._thread:
            self._paint(final=False)

    def _begin(self) -> None:
        self._sampler = self._held.enter_context(self._machine())
        self._recorder = RunRecorder(self._doctor(), self._clock)
        self._pace = FramePace(self._refresh_s, self._clock)
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
        html, text = (as_html(state), as_text(state)) if screen is self._asked else ("", as_text(state))
        if final or text != self._shown:
            screen.paint(html, text, final)
            self._shown = text


def _closed(screen: Screen) -> None:
    try:
        screen.close()
    except Exception:
        meters.logger.warning("the panel's screen cannot be closed; the run goes on", exc_info=True)


class FramePace:
    """Counts what frames cost and tells when the next one is due.

    A frame that takes more than 5 ms, or a share of the time above 0.5%, doubles the time to the next frame, up to 8 s;
    each frame after which neither holds halves it again. The first frame loads what it is shown by, and comes before
    the run; it counts for neither.

    A frame lets others have the interpreter: the thread that sends it, and those that load data. What they do in up to
    two of its turns, 5 ms each by default, is theirs; a frame that is longer away than that waits for a front end.

    Args:
        refresh_s: seconds between frames that cost little.
        clock: tells seconds.
    """

    def __init__(self, refresh_s: float, clock: Callable[[], float]) -> None:
        self._least_s = refresh_s
        self._clock = clock
        self._began_s: float | None = None
        self._next_s = 0.0
        self._spent_s = 0.0
        self.interval_s = refresh_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a frame."""
        return self._clock() >= self._next_s

    @property
    def cost_share(self) -> float | None:
        """Share of the time since the first frame that went into frames; None before the second."""
        if self._began_s is None or not self._spent_s:
            return None
        return self._spent_s / max(self._clock() - self._began_s, 1e-9)

    def painted(self, wall_s: float, cpu_s: float) -> None:
        """A frame has taken so long by the clock, and so much of this thread's CPU time."""
        now_s = self._clock()
        cost_s = max(cpu_s, wall_s - 2 * sys.getswitchinterval())
        if self._began_s is None:
            self._began_s = now_s
        else:
            self._spent_s += cost_s
            share = self._spent_s / max(now_s - self._began_s, 1e-9)
            if cost_s > _COSTLY_S or share > _COSTLY_SHARE:
                self.interval_s = min(2 * self.interval_s, max(_SLOWEST_S, self._least_s))
            else:
                self.interval_s = max(self._least_s, self.interval_s / 2)
        self._next_s = now_s + self.interval_s

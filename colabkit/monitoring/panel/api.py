"""`dashboard()` shows a live panel during `train()` or any loop over a `Loader`.

The panel subscribes to the meters. The thread that opened the panel and runs the loop paints it at most twice per
second, even while this thread waits for a batch of a `Loader`. The loop does not depend on the panel: if painting
fails, the panel falls back to text, and the run continues.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Literal, Self, get_args, overload

from colabkit.foundation import (
    InvalidOption,
    Progress,
    Sampler,
    Screen,
    ScreenName,
    Show,
    TerminalScreen,
    cannot,
    check_duration,
    check_one_of,
    checked_call,
    choose_screen,
    meters,
    offer_view,
    option,
    sampled,
    user_path,
)
from colabkit.monitoring.attaching import RunWatch, StatusReport, runs_in
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.attached import show_run
from colabkit.monitoring.panel.recorder import RunRecorder
from colabkit.monitoring.panel.text import PanelFrame

_COSTLY_S = 0.005
_COSTLY_SHARE = 0.005
_SLOWEST_S = 8.0
_PEEK_S = 1.0
_open: list[Dashboard] = []


def is_any_open() -> bool:
    """Return whether a panel is open, including one with `screen="none"`, which shows nothing."""
    return bool(_open)


@overload
def dashboard(*, attach: None = None, refresh_s: float | str = 1.0, screen: ScreenName = "auto") -> Dashboard: ...


@overload
def dashboard(
    *, attach: str | os.PathLike[str], refresh_s: float | str = 1.0, screen: ScreenName = "auto"
) -> StatusReport: ...


@checked_call()
def dashboard(
    *,
    attach: str | os.PathLike[str] | None = None,
    refresh_s: float | str = 1.0,
    screen: Literal["auto", "notebook", "text", "lines", "final", "none"] = "auto",
) -> Dashboard | StatusReport:
    """Return a context manager that shows a live panel while its block runs, or show the panel of another process.

    The panel shows the bottleneck and advice during `train()`, a loop over a `Loader`, or a loop over another loader
    wrapped by `watch()`, and the progress of `stage()`, `pack()` and other long operations that precede it. Throughout,
    it shows the utilization of GPUs and CPUs, and disk and network throughput. It appears when the loop or operation
    begins. In a loop, epochs are numbered by the loader and include those before the panel was opened. Of several loops
    in a block, it shows the one over the first loader that trains; its time and rates leave out later loops over other
    loaders, so use one block per loader to show them. The panel shows its own share of the run time, and reduces its
    frame rate if painting takes more than 0.5%.

    With `attach`, the panel shows a run that saves checkpoints to that folder, in any process and on any machine, until
    the run ends or you press Ctrl-C, which does not affect the run. If the run has died, the panel shows how to resume
    it.

    Args:
        attach: folder of the checkpoints of a run, or the folder to which `train_on()` saves; the folder may be on
            Drive. If it contains several runs, the panel shows the only one that is still running. None to show the
            loops of this process.
        refresh_s: seconds between frames, at least 0.5, or text with a unit such as `"1min"`.
        screen: where the panel is shown. `"notebook"` is an output of the cell, whose last frame stays in the saved
            notebook. `"text"` is redrawn in the terminal. `"lines"` prints one line every 10 s, less often after a
            minute, and at most 2 kB. `"final"` shows only the last frame. `"none"` shows nothing and also suppresses
            the panel of `%load_ext colabkit`. `"auto"` uses the value of the environment variable `COLABKIT_SCREEN` if
            it is set, otherwise `"notebook"` in a notebook, `"text"` in a terminal, and `"lines"` where output cannot
            be redrawn, such as in a pipe or with Colab's command line.

    Returns:
        The panel, as a context manager; with `attach`, the last status of the run.

    Raises:
        InvalidOption: if an argument has an invalid value, or the folder holds several runs and not exactly one of
            them is alive.
        SourceMissing: if there is no run in the folder.
        NotMounted, TimedOut, FileFailed: if the folder cannot be read.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> loader = colabkit.Loader(data, batch_size=64)
        >>> with colabkit.dashboard(screen="none"):
        ...     samples = sum(len(labels) for images, labels in loader)
        >>> samples
        1797
    """
    interval_s = check_duration("show the panel", "refresh_s", refresh_s, least=0.5, example=0.5)
    check_one_of("show the panel", "screen", screen, get_args(ScreenName))
    shown = choose_screen(screen)
    if attach is None:
        return Dashboard(shown, interval_s)
    folder = user_path(attach, "show the panel")
    found = runs_in(folder)
    if len(found) > 1:
        alive = [one for one in found if not RunWatch(one).look().is_over]
        found = alive if len(alive) == 1 else found
    if len(found) > 1:
        several = f"there are {len(found)} runs in {str(folder)!r}"
        next_step = ("For example, use ", option("attach", str(found[0])))
        raise InvalidOption(cannot("show the panel", several, "one", next_step))
    return StatusReport(folder, (show_run(RunWatch(found[0]), shown, interval_s),))


def show_beside_training() -> Callable[[], None]:
    """Show a panel during every later `train()` call, unless a panel is already open.

    Returns:
        A function that stops showing panels.
    """
    # One entry per active run; runs are nested if a step itself trains something.
    shown: list[Dashboard | None] = []

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.RunStarted):
            panel = None if is_any_open() else dashboard()
            if panel is not None:
                try:
                    panel.__enter__()
                    # The panel subscribed while this event was being delivered, so it has not received it.
                    panel.listen(event)
                except BaseException:
                    panel.__exit__(None, None, None)
                    raise
            shown.append(panel)
        elif isinstance(event, meters.RunEnded) and shown:
            panel = shown.pop()
            if panel is not None:
                # The panel may have received this event already; it ignores the second one.
                panel.listen(event)
                panel.__exit__(None, None, None)

    return meters.subscribe(listen)


class Dashboard:
    """A live panel, painted by the thread that opened it.

    It appears with the first event, so a block without a loop shows nothing. If several panels are open, only the one
    opened last is shown. Runs nested in another run are not shown. If painting fails, the panel falls back to text, and
    if that fails too, it disappears; the run continues.

    Args:
        screen: where the panel is shown; None to show nothing.
        refresh_s: seconds between frames.
        machine: function that opens the sampler of the machine's state.
        doctor: function that creates the doctor of a run.
        clock: function that returns the current time in seconds.
        cpu_clock: function that returns the CPU seconds of the calling thread.
        work_after_s: seconds that an operation must take before the panel shows it.

    Attributes:
        has_heard: whether an event has arrived since the panel was entered; always true if `screen` is None.
        ignores_peeks: whether a loop is shown only after its second batch, or if it waits more than a second for one.

    Example:
        >>> import colabkit
        >>> panel = colabkit.dashboard(screen="text")
        >>> with panel:
        ...     pass
        >>> panel.has_heard
        False
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
        work_after_s: float = 1.0,
    ) -> None:
        self.has_heard = screen is None
        self.ignores_peeks = False
        self._asked = screen
        self._refresh_s = refresh_s
        self._machine = machine
        self._doctor = doctor
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._work_after_s = work_after_s
        self._held = ExitStack()
        self._screens: list[Screen] = []
        self._is_begun = False
        # Created with the first event.
        self._recorder: RunRecorder
        self._pace: FramePace
        self._batches = 0
        # Number of active runs; runs are nested if a step itself trains something.
        self._runs = 0
        self._beginning = threading.Lock()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            _open.append(self)
            held.callback(_open.remove, self)
            self._is_begun = False
            self._runs = self._batches = 0
            self._is_peek = self.ignores_peeks
            self.has_heard = self._asked is None
            if self._asked is not None:
                self._screens = [self._asked, TerminalScreen()]
                held.callback(_closed, self._asked)
                self._thread = threading.get_ident()
            self._held = held.pop_all()
        if self._asked is not None:
            self._held.callback(meters.subscribe(self.listen))
            self._held.callback(offer_view(self._view))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self._is_begun:
                self._recorder.end(kind.__name__ if kind else None)
                if kind is not None or not self._is_peek:
                    self._paint(final=True)
            self._screens = []

    def listen(self, event: meters.Event) -> None:
        """Record an event, and paint a frame if one is due."""
        self.has_heard = True
        kind = type(event)
        self._runs += kind is meters.RunStarted
        is_inner = self._runs > 1
        if kind is meters.RunEnded:
            # A `RunEnded` may arrive twice, or belong to a run that began before the panel was opened.
            self._runs = max(0, self._runs - 1)
        if self._asked is None or _open[-1:] != [self]:
            return
        try:
            self._take_in(event, is_inner)
        except BaseException:
            # A run that is interrupted while it starts sends no `RunEnded`.
            self._runs -= kind is meters.RunStarted
            raise

    def _view(self) -> Show | None:
        """Return a function that shows the progress of an operation, or None after a run or loop, which stays shown."""
        has_loop = self._is_begun and self._recorder.has_loop
        is_shown = self._asked is not None and _open[-1:] == [self] and threading.get_ident() == self._thread
        return self._show_work if is_shown and not has_loop else None

    def _show_work(self, work: Progress | None) -> None:
        try:
            if work is not None and self._screens and (self._is_begun or work.seconds >= self._work_after_s):
                self.has_heard = True
                self._begin_once()
                self._is_peek = False
                self._recorder.note_work(work)
                if self._pace.is_due and threading.get_ident() == self._thread:
                    self._paint(final=False)
        except Exception:
            self._screens = []
            meters.logger.warning("the panel failed and is closed; the operation continues", exc_info=True)

    def _take_in(self, event: meters.Event, is_inner: bool) -> None:
        if not self._is_begun:
            self._begin_once()
        if not is_inner:
            if type(event) is meters.RunStarted or self._recorder.is_replaced_by(event):
                self._recorder = RunRecorder(self._doctor(), self._clock)
            self._recorder.note(event)
        self._batches += type(event) is meters.BatchTaken
        is_long = type(event) is meters.DataWait and event.wait_s >= _PEEK_S
        self._is_peek &= not (self._runs or self._batches > 1 or is_long)
        is_due = self._pace.is_due or (type(event) is meters.RunEnded and not is_inner)
        if is_due and not self._is_peek and threading.get_ident() == self._thread:
            self._paint(final=False)

    def _begin_once(self) -> None:
        with self._beginning:
            if self._is_begun:
                return
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
                rest = "it is shown as text" if self._screens else "it is closed"
                meters.logger.warning("the panel cannot be drawn, so %s; the run continues", rest, exc_info=True)
                _closed(screen)
        self._pace.painted(self._clock() - began_s, self._cpu_clock() - began_cpu_s)

    def _show(self, screen: Screen, final: bool) -> None:
        painting, sampling = self._pace.cost_share, self._sampler.cost_share
        state = self._recorder.state(self._sampler, None if painting is None else painting + sampling)
        frame = PanelFrame(state)
        if final or frame.text != self._shown:
            screen.paint(frame, final)
            self._shown = frame.text


def _closed(screen: Screen) -> None:
    try:
        screen.close()
    except Exception:
        meters.logger.warning("the panel's screen cannot be closed; the run continues", exc_info=True)


class FramePace:
    """Measures the cost of frames and schedules the next one.

    The interval doubles, up to 8 s, after a frame that takes more than 5 ms, or while frames take more than 0.5% of the
    time. It halves, down to `refresh_s`, after any other frame. The first frame is ignored, since it loads the display
    and comes before the run.

    While a frame is painted, other threads may get the GIL, such as those that send the frame or load data. Up to two
    switch intervals, 5 ms each by default, are therefore not counted. A longer wait is caused by the front end, and
    counts.

    Args:
        refresh_s: shortest interval between frames, in seconds.
        clock: function that returns the current time in seconds.
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
        """Whether the next frame is due."""
        return self._clock() >= self._next_s

    @property
    def cost_share(self) -> float | None:
        """Share of the time since the first frame spent on painting, in [0, 1]; None before the second frame."""
        if self._began_s is None or not self._spent_s:
            return None
        return self._spent_s / max(self._clock() - self._began_s, 1e-9)

    def painted(self, wall_s: float, cpu_s: float) -> None:
        """Record the wall time and the CPU time of a frame, both in seconds."""
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

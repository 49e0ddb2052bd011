"""`dashboard()` shows a live panel beside `train()` or any loop over a `Loader`.

It listens to the meters and is painted by the thread that runs the loop, at most twice a second, also while that thread
waits for data. The loop knows nothing of it; if painting fails, the panel goes and the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from colabkit import meters
from colabkit.errors import InvalidOption, cannot
from colabkit.panel.render import render
from colabkit.panel.screens import Screen, choose_screen
from colabkit.panel.state import Recorder
from colabkit.telemetry import Telemetry

__all__ = ["Dashboard", "dashboard", "show_beside_training"]

_COSTLY_S = 0.005  # a frame that takes longer than this makes the panel halve its rate
_SLOWEST_S = 8.0

_open: list[Dashboard] = []


def dashboard(*, refresh_s: float = 0.5, screen: Literal["auto", "notebook", "text", "none"] = "auto") -> Dashboard:
    """Return a context manager that shows a live panel while its block runs.

    Args:
        refresh_s: seconds between frames, at least 0.1.
        screen: `"notebook"`, `"text"`, `"none"`, or what suits the place.

    Raises:
        InvalidOption: if an argument cannot be meant.
    """
    if refresh_s < 0.1:
        raise InvalidOption(cannot("show the panel", f"refresh_s={refresh_s}", "0.1 or more", "Use refresh_s=0.5"))
    if screen not in ("auto", "notebook", "text", "none"):
        known = "'auto', 'notebook', 'text' or 'none'"
        raise InvalidOption(cannot("show the panel", f"screen={screen!r}", known, "Use one of these"))
    return Dashboard(choose_screen(screen), refresh_s)


class Dashboard:
    """A panel; shown from entering the `with` block to leaving it.

    Args:
        screen: where it is shown.
        refresh_s: seconds between frames.
    """

    def __init__(self, screen: Screen, refresh_s: float) -> None:
        self._screen = screen
        self._refresh_s = refresh_s
        self._unsubscribe: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._recorder = Recorder()
        self._telemetry = Telemetry()
        self._thread = threading.get_ident()
        self._cost_s = 0.0
        self._next_paint = 0.0
        self._unsubscribe = meters.subscribe(self._listen)
        _open.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._unsubscribe = None
        _open.remove(self)
        self._recorder.end(kind.__name__ if kind else None)
        try:
            self._paint(final=True)
        except Exception:
            meters.logger.warning("the panel's last frame failed", exc_info=True)
        self._telemetry.close()

    def _listen(self, event: meters.Event) -> None:
        self._recorder.note(event)
        if time.monotonic() >= self._next_paint and threading.get_ident() == self._thread:
            self._paint(final=False)

    def _paint(self, final: bool) -> None:
        started = time.perf_counter()
        state = self._recorder.state(self._telemetry.snapshot(), self._cost_s)
        self._screen.paint(*render(state), final)
        cost_s = time.perf_counter() - started
        self._cost_s += cost_s
        if cost_s > _COSTLY_S and self._cost_s > _COSTLY_S * 4:
            self._refresh_s = min(2 * self._refresh_s, _SLOWEST_S)
        self._next_paint = time.monotonic() + self._refresh_s


def show_beside_training() -> Callable[[], None]:
    """Show a panel beside every `train()` from now on, unless one is open; return the function that ends this."""
    shown: list[Dashboard] = []

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.RunStarted) and not _open:
            panel = dashboard()
            panel.__enter__()
            panel._listen(event)  # noqa: SLF001 - it subscribed while this event was being told
            shown.append(panel)
        elif isinstance(event, meters.RunEnded) and shown:
            panel = shown.pop()
            panel._recorder.note(event)  # noqa: SLF001 - it may have been told already; the first end counts
            panel.__exit__(None, None, None)

    return meters.subscribe(listen)

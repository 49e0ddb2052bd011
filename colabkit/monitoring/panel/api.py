"""`dashboard()` shows a live panel beside `train()` or any loop over a `Loader`.

It listens to the meters and is painted by the thread that runs the loop, at most twice a second, also while that thread
waits for data. The loop knows nothing of it; if painting fails, the panel goes on as text and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from colabkit.foundation import InvalidOption, cannot, is_finite_number, meters
from colabkit.monitoring.panel.painter import Dashboard, is_any_open
from colabkit.monitoring.panel.screens import ScreenName, choose_screen


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
    if not is_finite_number(refresh_s) or refresh_s < 0.5:
        raise InvalidOption(
            cannot("show the panel", f"refresh_s={refresh_s!r}", "a finite number of 0.5 or more", "Use refresh_s=0.5")
        )
    if screen not in get_args(ScreenName):
        known = ", ".join(map(repr, get_args(ScreenName)))
        raise InvalidOption(cannot("show the panel", f"screen={screen!r}", f"one of {known}", "Use one of these"))
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

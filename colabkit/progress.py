"""One progress bar for all long work, drawn by `tqdm.auto`: a widget in notebooks, a line in terminals."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

__all__ = ["ProgressBar", "heartbeat"]


class ProgressBar:
    """Counts work done and shows it, until the `with` block ends; then the bar is wiped away.

    Silent when `enabled` is false and where the output is neither a notebook nor a terminal, so logs stay clean.

    Args:
        action: what is done, shown before the bar.
        total: how many units there are, or None where nobody knows.
        unit: what is counted; `"B"` is shown in binary multiples.
        enabled: false for silence.
    """

    def __init__(self, action: str, total: int | None, unit: str, enabled: bool = True) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns where ipywidgets is missing; the text bar will do
            from tqdm.auto import tqdm

            # Without a monitor interval of 0 tqdm starts a thread that outlives every bar.
            self._bar = type("Bar", (tqdm,), {"monitor_interval": 0})(
                desc=action,
                total=total,
                unit=unit,
                unit_scale=unit == "B",
                unit_divisor=1024 if unit == "B" else 1000,
                disable=None if enabled else True,
                leave=False,
                mininterval=0.2,
            )

    def advance(self, count: int) -> None:
        """Add `count` units of finished work."""
        self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


@contextlib.contextmanager
def heartbeat(action: str, timeout: float, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show the seconds that pass of those allowed; the block calls what it gets with the seconds so far."""
    with ProgressBar(action, round(timeout), " s", enabled) as bar:
        shown = 0

        def tick(passed: float) -> None:
            nonlocal shown
            bar.advance(int(passed) - shown)
            shown = int(passed)

        yield tick

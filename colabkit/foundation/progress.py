"""One progress bar for all long work, drawn by `tqdm.auto`: a widget in notebooks, a line in terminals.

Whoever has a bar of its own, as a panel with buttons, shows the work of a block in that: `with shown_by(show): ...`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from colabkit.foundation.units import format_count, format_seconds, format_things

_REDRAWN_S = 0.2
_STILL_S = 2.0  # after which a bar says that nothing moves


@dataclass(frozen=True, slots=True)
class Progress:
    """How far some work is.

    Attributes:
        action: what is done.
        done: units of finished work.
        total: how many there are, None where nobody knows.
        unit: what is counted, `"B"` for bytes.
        note: what else there is to say: files, retries, and how long nothing has moved.
        seconds: since the work began.
    """

    action: str
    done: int
    total: int | None
    unit: str
    note: str
    seconds: float


Show: TypeAlias = Callable[[Progress | None], None]

_show: ContextVar[Show | None] = ContextVar("_show", default=None)


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Call `show` with all progress of the block, in place of bars of `tqdm`.

    It is called when work begins, some times a second while it goes on, and with None when it ends.
    """
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


class _ProgressRelay:
    """Stands in for a bar of tqdm and passes its numbers to a function."""

    def __init__(self, show: Show, action: str, total: int | None, unit: str) -> None:
        self._show = show
        self._about = action, total, unit
        self._began = time.monotonic()
        self._done = 0
        self._note = ""
        self.refresh()

    def update(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._shown >= _REDRAWN_S:
            self.refresh()

    def refresh(self) -> None:
        self._shown = time.monotonic()
        action, total, unit = self._about
        self._show(Progress(action, self._done, total, unit, self._note, self._shown - self._began))

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._note = text

    def close(self) -> None:
        self._show(None)


class _Silence:
    """Stands in for a bar of tqdm and shows nothing."""

    def update(self, *_: object, **__: object) -> None:
        pass

    refresh = set_postfix_str = close = update


class ProgressBar:
    """Counts work done and shows it, until the `with` block ends; then the bar is wiped away.

    Beside the count stand rate and time left, and where they matter: files, retries, and how long nothing has moved.
    Silent when `enabled` is false and where the output is neither a notebook nor a terminal, so logs stay clean. Within
    `shown_by()` its numbers go there instead.

    Args:
        action: what is done, shown before the bar.
        total: how many units there are, or None where nobody knows.
        unit: what is counted; `"B"` is shown in binary multiples.
        enabled: false for silence.
        files: how many files the units belong to, where both are counted.
    """

    def __init__(self, action: str, total: int | None, unit: str, enabled: bool = True, files: int = 0) -> None:
        self._files = files
        self._files_done = 0
        self._retries = 0
        self._moved = self._shown = time.monotonic()
        self._bar: Any = _Silence()
        if not enabled:  # tqdm is not even loaded, which takes longer than a small pack
            return
        if (show := _show.get()) is not None:
            self._bar = _ProgressRelay(show, action, total, unit)
            return
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
                disable=None,
                leave=False,
                mininterval=_REDRAWN_S,
            )

    def advance(self, count: int, files: int = 0) -> None:
        """Add `count` units, and so many files, of finished work."""
        self._files_done += files
        now = time.monotonic()
        if now - self._shown > _REDRAWN_S or now - self._moved > _STILL_S:
            self._annotate(now, 0.0)
        self._moved = now
        self._bar.update(count)

    def wait(self) -> None:
        """Show that nothing moves, and for how long; call it some times a second meanwhile."""
        now = time.monotonic()
        if now - self._shown > _STILL_S / 2:
            self._annotate(now, now - self._moved)
            self._bar.refresh()

    def retried(self, retries: int) -> None:
        """Note how many reads failed so far and were tried again."""
        self._retries = retries

    def _annotate(self, now: float, still_s: float) -> None:
        self._shown = now
        notes = [f"{format_count(self._files_done)}/{format_things(self._files, 'file')}"] if self._files else []
        if self._retries:
            notes.append(format_things(self._retries, "retry"))
        if still_s > _STILL_S:
            notes.append(f"nothing for {format_seconds(int(still_s))}")
        self._bar.set_postfix_str(", ".join(notes), refresh=False)

    def close(self) -> None:
        """Wipe the bar away."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

"""The progress bar of all long operations, drawn by `tqdm.auto`: a widget in notebooks, a line in terminals.

A caller with its own progress display, such as a panel with buttons, wraps the operation: `with shown_by(show): ...`.
An open live panel shows the progress in place of a bar.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from colabkit.foundation.units import format_count, format_seconds, format_things

_REDRAWN_S = 0.2
# A bar reports a stall after this time without progress.
_STILL_S = 2.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an operation.

    Attributes:
        action: description of the operation.
        done: number of finished units.
        total: total number of units; None if unknown.
        unit: name of the unit; `"B"` for bytes.
        note: additional text: files, retries, and the time without progress.
        seconds: seconds since the start.
    """

    action: str
    done: int
    total: int | None
    unit: str
    note: str
    seconds: float


Show: TypeAlias = Callable[[Progress | None], None]

_show: ContextVar[Show | None] = ContextVar("_show", default=None)
# The open panels; see `offer_view`.
_offers: list[Callable[[], Show | None]] = []
# Panels belong to the parent process.
os.register_at_fork(after_in_child=_offers.clear)


def offer_view(offer: Callable[[], Show | None]) -> Callable[[], None]:
    """Let a panel show the progress of later operations, until the returned function is called.

    Args:
        offer: called when an operation begins outside of `shown_by()`; returns a function that shows its progress, as
            in `shown_by()`, or None to leave it to a bar.
    """
    _offers.append(offer)

    def stop() -> None:
        if offer in _offers:
            _offers.remove(offer)

    return stop


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Pass all progress in the block to `show` instead of drawing `tqdm` bars.

    `show` is called when an operation begins, at most a few times per second while it continues, and with None when it
    ends.
    """
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


class _ProgressRelay:
    """A replacement for a tqdm bar that passes the progress to a function."""

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
        self._shown, self._shown_done = time.monotonic(), self._done
        action, total, unit = self._about
        self._show(Progress(action, self._done, total, unit, self._note, self._shown - self._began))

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._note = text

    def close(self) -> None:
        if self._done != self._shown_done:
            self.refresh()
        self._show(None)


class _Silence:
    def update(self, *_: object, **__: object) -> None:
        pass

    refresh = set_postfix_str = close = update


class ProgressBar:
    """A context manager that shows the progress of an operation and removes the bar at the end of the block.

    The bar shows the count, the rate and the remaining time, and, if applicable, files, retries and the time without
    progress. Nothing is shown if `enabled` is false, or if the output is neither a notebook with ipywidgets nor a
    terminal, to keep logs clean. Within `shown_by()`, the progress is passed to that function instead.

    Args:
        action: description of the operation, shown before the bar.
        total: total number of units; None if unknown.
        unit: name of the unit; `"B"` is shown in binary multiples.
        enabled: whether to show progress.
        files: number of files that the units belong to, if files are counted too.
    """

    def __init__(self, action: str, total: int | None, unit: str, enabled: bool = True, files: int = 0) -> None:
        self._files = files
        self._files_done = 0
        self._retries = 0
        self._moved = self._shown = time.monotonic()
        self._bar: Any = _Silence()
        # Return before importing tqdm, which takes longer than writing a small pack.
        if not enabled:
            return
        show = _show.get() or next(filter(None, (offer() for offer in reversed(_offers))), None)
        if show is not None:
            self._bar = _ProgressRelay(show, action, total, unit)
            return
        with warnings.catch_warnings():
            # tqdm warns in a notebook without ipywidgets, where no bar is shown.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm

            # Unless the monitor interval is 0, tqdm starts a thread that outlives all bars.
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
        """Add finished units and files."""
        self._files_done += files
        now = time.monotonic()
        if now - self._shown > _REDRAWN_S or now - self._moved > _STILL_S:
            self._annotate(now, 0.0)
        self._moved = now
        self._bar.update(count)

    def wait(self) -> None:
        """Show how long there has been no progress; call this a few times per second while waiting."""
        now = time.monotonic()
        if now - self._shown > _STILL_S / 2:
            self._annotate(now, now - self._moved)
            self._bar.refresh()

    def retried(self, retries: int) -> None:
        """Set the total number of retried reads."""
        self._retries = retries

    def _annotate(self, now: float, still_s: float) -> None:
        self._shown = now
        notes = [f"{format_count(self._files_done)}/{format_things(self._files, 'file')}"] if self._files else []
        if self._retries:
            notes.append(format_things(self._retries, "retry"))
        if still_s > _STILL_S:
            notes.append(f"no progress for {format_seconds(int(still_s))}")
        self._bar.set_postfix_str(", ".join(notes), refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def heartbeat(action: str, timeout: float, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show how much of a timeout has elapsed; the block calls the yielded function with the elapsed seconds."""
    with ProgressBar(action, round(timeout), " s", enabled) as bar:
        shown = 0

        def tick(passed: float) -> None:
            nonlocal shown
            bar.advance(int(passed) - shown)
            shown = int(passed)

        yield tick

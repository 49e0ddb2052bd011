"""The progress of all long operations: a bar in notebooks and terminals, and a line every 10 s elsewhere.

It needs no widgets, and a notebook keeps one line of text. An open live panel shows the progress in place of a bar.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from colabkit.foundation.reports import escape, printable
from colabkit.foundation.screens import MarimoScreen, NotebookScreen, Screen, choose_screen
from colabkit.foundation.units import (
    format_bytes,
    format_count,
    format_fill,
    format_seconds,
    format_share,
    format_things,
)

_REDRAWN_S = 0.2
# Seconds after which an operation shows a bar.
_SHOWN_AFTER_S = 0.5
# Number of redraws over which the speed is averaged.
_MEASURED_REDRAWS = 25
SECONDS = " s"
"""Unit of operations that count seconds, such as a wait."""

# Seconds without progress after which a bar reports a stall.
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

    @property
    def share(self) -> float | None:
        """The finished share in [0, 1]; None if the total is unknown or 0."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def count(self) -> str:
        """The finished and the total number of units, as text."""
        if self.unit == "B":
            return format_fill(self.done, self.total) if self.total else format_bytes(self.done)
        return f"{format_count(self.done)}{f'/{format_count(self.total)}' if self.total else ''}{self.unit}"


Show: TypeAlias = Callable[[Progress | None], object]

# The open panels; see `offer_view`.
_offers: list[Callable[[], Show | None]] = []
# In a fork, drop the panels, because they belong to the parent process.
os.register_at_fork(after_in_child=_offers.clear)


def offer_view(offer: Callable[[], Show | None]) -> Callable[[], None]:
    """Let a panel show the progress of later operations, until the returned function is called.

    Args:
        offer: function that is called when an operation begins, and returns a function that shows the progress, or None
            to show a bar instead. The function that `offer` returns is called when the operation begins, at most a few
            times per second while it continues, and with None when it ends.
    """
    _offers.append(offer)

    def stop() -> None:
        if offer in _offers:
            _offers.remove(offer)

    return stop


class _Bar:
    """Shows the progress of an operation on a screen.

    It is drawn only by the thread that created it, since some kernels do not show the output of other threads.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._thread = threading.get_ident()
        self._is_drawn = False
        self._measured: deque[Progress] = deque(maxlen=_MEASURED_REDRAWS)

    def __call__(self, progress: Progress | None) -> bool:
        """Show the progress; return False if another thread must show it."""
        if threading.get_ident() != self._thread:
            return False
        try:
            if progress is None:
                self._end()
            else:
                self._measured.append(progress)
                if progress.seconds >= _SHOWN_AFTER_S:
                    self._is_drawn = True
                    self._screen.paint(_BarFrame(progress, self._measured[0]), final=False)
        # Ignore errors of the display, which must not stop the operation.
        except Exception:
            self._thread = -1
        return True

    def _end(self) -> None:
        if self._is_drawn and isinstance(self._screen, NotebookScreen | MarimoScreen):
            self._screen.paint(_LastFrame(self._measured[-1]), final=True)
        self._screen.close()


class _BarFrame:
    """A frame of an operation: the share, the count, the note, the speed and the remaining time."""

    def __init__(self, progress: Progress, before: Progress) -> None:
        self._progress = progress
        passed_s = progress.seconds - before.seconds
        self._per_s = (progress.done - before.done) / passed_s if passed_s > 0 else 0.0

    @property
    def html(self) -> str:
        """A bar, and the text below it."""
        share = self._progress.share
        value = "" if share is None else f' value="{share:.3f}"'
        return (
            '<div style="font-variant-numeric:tabular-nums">'
            f'<progress{value} style="width:min(100%,360px)"></progress><br>{escape(self.line)}</div>'
        )

    @property
    def line(self) -> str:
        """One line. A narrow terminal cuts the speed and the remaining time, which come last."""
        one, share = self._progress, self._progress.share
        parts = [format_share(share) if share is not None else "", one.count, one.note, *self._pace()]
        return f"{printable(one.action)}: {', '.join(filter(None, parts))}"

    text = line

    def _pace(self) -> list[str]:
        one = self._progress
        if self._per_s <= 0 or one.unit == SECONDS:
            return []
        speed = f"{format_bytes(self._per_s)}/s" if one.unit == "B" else f"{format_count(self._per_s)}{one.unit}/s"
        left = [f"{format_seconds(max(1, round((one.total - one.done) / self._per_s)))} left"] if one.total else []
        return [speed, *left]


class _LastFrame:
    """The frame that a notebook keeps after an operation: one line of text."""

    def __init__(self, progress: Progress) -> None:
        self.text = self.line = f"{printable(progress.action)}: {progress.count} in {format_seconds(progress.seconds)}"
        self.html = f"<div>{escape(self.text)}</div>"


class ProgressBar:
    """A context manager that shows the progress of an operation, until the end of the block.

    It shows the count, the rate and the remaining time, and, if applicable, files, retries and the time without
    progress. Without an open panel, it is shown on the screen that `choose_screen()` chooses, if the operation takes
    more than half a second.

    Args:
        action: description of the operation, shown before the bar.
        total: total number of units; None if unknown.
        unit: name of the unit; `"B"` is shown in binary multiples.
        enabled: whether to show progress.
        files: number of files that the units belong to, if files are counted too.
    """

    def __init__(self, action: str, total: int | None, unit: str, enabled: bool = True, files: int = 0) -> None:
        self._about = action, total, unit
        self._files = files
        self._files_done = 0
        self._retries = 0
        self._done = self._drawn_done = 0
        self._began = self._moved = self._drawn = time.monotonic()
        self._still_s = 0.0
        self._show = _chosen_show() if enabled else None
        if self._show is not None:
            self._draw(self._began)

    def advance(self, count: int, files: int = 0) -> None:
        """Add finished units and files."""
        self._done += count
        self._files_done += files
        now = time.monotonic()
        self._moved, self._still_s = now, 0.0
        if now - self._drawn >= _REDRAWN_S:
            self._draw(now)

    def wait(self) -> None:
        """Show the time without progress; call this a few times per second while waiting."""
        now = time.monotonic()
        if now - self._drawn > _STILL_S / 2:
            self._still_s = now - self._moved
            self._draw(now)

    def retried(self, retries: int) -> None:
        """Set the total number of retried reads."""
        self._retries = retries

    def _draw(self, now: float) -> None:
        if self._show is not None:
            action, total, unit = self._about
            is_drawn = self._show(Progress(action, self._done, total, unit, self._note(), now - self._began))
            if is_drawn is not False:
                self._drawn, self._drawn_done = now, self._done

    def _note(self) -> str:
        notes = [f"{format_count(self._files_done)}/{format_things(self._files, 'file')}"] if self._files_done else []
        if self._retries:
            notes.append(format_things(self._retries, "retry"))
        if self._still_s > _STILL_S:
            notes.append(f"no progress for {format_seconds(int(self._still_s))}")
        return ", ".join(notes)

    def close(self) -> None:
        """Remove the bar; a notebook keeps one line of text."""
        if self._show is not None:
            if self._done != self._drawn_done:
                self._draw(time.monotonic())
            self._show(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SilentBar(ProgressBar):
    """A progress bar without a display, which calls a function instead.

    Args:
        on_progress: called when the operation advances or waits; an error that it raises ends the operation.
    """

    def __init__(self, on_progress: Callable[[], None]) -> None:
        super().__init__("", None, "", enabled=False)
        self._on_progress = on_progress

    def advance(self, count: int, files: int = 0) -> None:
        """Call the function."""
        self._on_progress()

    def wait(self) -> None:
        """Call the function."""
        self._on_progress()


def _chosen_show() -> Show | None:
    """Return the function that shows progress: that of an open panel, else of a new bar; None to show nothing."""
    show = next(filter(None, (offer() for offer in reversed(_offers))), None)
    if show is None and (screen := choose_screen("auto", sys.stderr)) is not None:
        show = _Bar(screen)
    return show


@contextlib.contextmanager
def heartbeat(action: str, timeout: float, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show the elapsed share of a timeout; the block calls the yielded function with the elapsed seconds."""
    with ProgressBar(action, round(timeout), SECONDS, enabled) as bar:
        shown = 0

        def tick(passed: float) -> None:
            nonlocal shown
            bar.advance(int(passed) - shown)
            shown = int(passed)

        yield tick

"""Durations and deadlines as users write them, and when a checkpoint is due."""

from __future__ import annotations

import math
import re
import time
from datetime import datetime, timedelta
from typing import TypeAlias

from colabkit.foundation import InvalidOption, cannot, check_whole_number

Moment: TypeAlias = float | str | timedelta | datetime

_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_PARTS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")


def duration_s(act: str, name: str, value: float | str | timedelta) -> float:
    """Return a duration in seconds: of a number of them, a `timedelta`, or text such as `"5min"` or `"1h 30min"`.

    Raises:
        InvalidOption: if it is none, or not longer than 0.
    """
    seconds = math.nan
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            found = f"{name} is a number of hundreds of digits"
            raise InvalidOption(cannot(act, found, "a duration", f"Use {name}='11h', say")) from None
    elif isinstance(value, str):
        parts = _PARTS.findall(value.lower())
        if parts and not _PARTS.sub("", value.lower()).strip() and all(unit in _UNITS for _, unit in parts):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not (math.isfinite(seconds) and seconds > 0):
        needed = "a duration"
        raise InvalidOption(cannot(act, f"{name}={value!r}", needed, f"Use {name}='30min', say: s, min, h or d"))
    return seconds


def moment(act: str, name: str, value: Moment) -> float:
    """Return a moment by the clock of `time.monotonic`: a `datetime`, or a duration from now.

    Raises:
        InvalidOption: if it is neither, or over, or outside what the clock can tell.
    """
    if not isinstance(value, datetime):
        return time.monotonic() + duration_s(act, name, value)
    try:
        left = value.timestamp() - time.time()
    except (ValueError, OverflowError, OSError):  # at the first and the last days of all
        needed = "a moment that the clock can tell"
        raise InvalidOption(cannot(act, f"{name}={value}", needed, f"Use {name}='11h', say")) from None
    if not left > 0:
        raise InvalidOption(cannot(act, f"{name}={value}", "a moment to come", "Give a later one"))
    return time.monotonic() + left


class SaveSchedule:
    """Says when a checkpoint is due.

    Args:
        every: a number of steps, a duration such as `"5min"`, or `"epoch"`.

    Raises:
        InvalidOption: if it is none of these.
    """

    def __init__(self, every: int | str) -> None:
        self._steps: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str) and every != "epoch":
            self._seconds = duration_s("train", "save_every", every)
        elif not isinstance(every, str):
            check_whole_number("train", "save_every", every, 1)
            self._steps = every
        self.is_by_epoch = every == "epoch"
        self._saved_step = 0
        self._saved_at = time.monotonic()

    def saved(self, step: int) -> None:
        """Note that the state after a step is being saved."""
        self._saved_step, self._saved_at = step, time.monotonic()

    def is_late(self) -> bool:
        """Return whether the clock says so, which may differ between processes."""
        return self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds

    def is_due(self, step: int) -> bool:
        """Return whether the number of the step says so, which is equal in all processes."""
        return self._steps is not None and step // self._steps > self._saved_step // self._steps

"""Durations and moments as users write them: `"5min"`, `300`, a `timedelta`, a `datetime`."""

from __future__ import annotations

import math
import re
import time
from datetime import datetime, timedelta
from typing import TypeAlias

from colabkit.foundation import InvalidOption, cannot

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

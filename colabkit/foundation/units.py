"""Formatting of bytes, seconds, counts and rates, and parsing of byte sizes and durations."""

from __future__ import annotations

import math
import re

_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?) *((?P<prefix>[KMGTP])(?P<binary>i)?)?B?", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")
_UNITS_S = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Format a byte count in binary units, for example `"1.5 GiB"`."""
    size = float(count)
    for unit in _BYTE_UNITS:
        if abs(size) < 1023.5 or unit == _BYTE_UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{_three_digits(size)} {unit}"


def parse_bytes(text: str) -> int:
    """Parse a byte size such as `"256MiB"`, `"1.5 GB"` or `"1000000"`; raise `ValueError` for other text."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    base = 1024 if match["binary"] else 1000
    power = " KMGTP".index((match["prefix"] or " ").upper())
    return round(float(match["number"]) * float(base**power))


def parse_duration(text: str) -> float:
    """Parse a duration such as `"5min"` or `"1h 30min"` to seconds; raise `ValueError` for other text."""
    found = _DURATION.findall(text.lower())
    if not found or _DURATION.sub("", text.lower()).strip() or any(unit not in _UNITS_S for _, unit in found):
        raise ValueError(text)
    return sum(float(number) * _UNITS_S[unit] for number, unit in found)


def format_fill(used: float, total: float) -> str:
    """Format used and total bytes, for example `"1.1 of 12.7 GiB"`; a common unit appears once."""
    left, right = format_bytes(used), format_bytes(total)
    same_unit = left.partition(" ")[2] == right.partition(" ")[2]
    return f"{left.partition(' ')[0] if same_unit else left} of {right}"


def format_seconds(seconds: float) -> str:
    """Format a duration, for example `"1.2 ms"`, `"3.4 s"`, `"5 min 06 s"` or `"2 h 03 min"`."""
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def format_count(count: float) -> str:
    """Format a rounded count with thousands separators, for example `"60,000"`."""
    return f"{round(count):,}"


def format_things(count: float, thing: str, things: str = "") -> str:
    """Format a count with a noun, for example `"1 file"`, `"2,000 files"`, `"2 retries"` or `"1.5 CPUs"`.

    Args:
        count: the count, which may be fractional.
        thing: singular of the noun.
        things: plural of the noun; by default the regular plural.
    """
    if count != 1 and not things:
        is_y = thing.endswith("y") and thing[-2] not in "aeiou"
        ending = "ies" if is_y else "es" if thing.endswith(("s", "x", "ch", "sh")) else "s"
        things = (thing[:-1] if is_y else thing) + ending
    number = format_count(count) if count == round(count) else f"{count:g}"
    return f"{number} {thing if count == 1 else things}"


def format_rate(per_second: float, unit: str) -> str:
    """Format a rate, for example `"12,300 images/s"`; rates below ten have one decimal."""
    number = f"{per_second:.1f}" if per_second < 9.95 else format_count(per_second)
    return f"{number} {unit}/s"


def format_share(share: float) -> str:
    """Format a share in [0, 1] as a percentage, for example `"40%"`, `"4.0%"` or `"<0.1%"`."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "<0.1%"
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"

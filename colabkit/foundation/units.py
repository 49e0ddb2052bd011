"""Bytes, seconds, counts and rates as text, and bytes from text; units change where the rounded text would."""

from __future__ import annotations

import math
import re

_BYTES = re.compile(r"(?P<number>\d+(\.\d+)?) *((?P<prefix>[KMGTP])(?P<binary>i)?)?B?", re.IGNORECASE)
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Return a byte count in binary units, as in `"1.5 GiB"`."""
    size = float(count)
    for unit in _BYTE_UNITS:
        if abs(size) < 1023.5 or unit == _BYTE_UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{_three_digits(size)} {unit}"


def parse_bytes(text: str) -> int:
    """Return the bytes that a text says, as `"256MiB"`, `"1.5 GB"` or `"1000000"`; raises `ValueError` for others."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    base = 1024 if match["binary"] else 1000
    power = " KMGTP".index((match["prefix"] or " ").upper())
    return round(float(match["number"]) * float(base**power))


def format_fill(used: float, total: float) -> str:
    """Return how much of something is used, as in `"1.1 of 12.7 GiB"`; the unit stands once where it is the same."""
    left, right = format_bytes(used), format_bytes(total)
    same_unit = left.partition(" ")[2] == right.partition(" ")[2]
    return f"{left.partition(' ')[0] if same_unit else left} of {right}"


def format_seconds(seconds: float) -> str:
    """Return a duration, as in `"1.2 ms"`, `"3.4 s"`, `"5 min 06 s"`, `"2 h 03 min"`."""
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
    """Return a whole number with thousands separated, as in `"60,000"`."""
    return f"{round(count):,}"


def format_things(count: float, thing: str, things: str = "") -> str:
    """Return a number of things, as in `"1 file"`, `"2,000 files"`, `"2 retries"`, `"3 classes"` or `"1.5 CPUs"`.

    Args:
        count: how many, which may be a fraction.
        thing: one of them.
        things: several of them, where that is not formed as usual.
    """
    if count != 1 and not things:
        is_y = thing.endswith("y") and thing[-2] not in "aeiou"
        ending = "ies" if is_y else "es" if thing.endswith(("s", "x", "ch", "sh")) else "s"
        things = (thing[:-1] if is_y else thing) + ending
    number = format_count(count) if count == round(count) else f"{count:g}"
    return f"{number} {thing if count == 1 else things}"


def format_rate(per_second: float, unit: str) -> str:
    """Return a rate, as in `"12,300 images/s"`; rates under ten keep one decimal."""
    number = f"{per_second:.1f}" if per_second < 9.95 else format_count(per_second)
    return f"{number} {unit}/s"


def format_share(share: float) -> str:
    """Return a share in [0, 1] as per cent, as in `"40%"`, `"4.0%"` or `"<0.1%"`."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "<0.1%"
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"

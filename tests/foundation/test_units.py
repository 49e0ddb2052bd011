"""Numbers as text: correct units, rounding, and limits at which the unit changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from colabkit.foundation.units import (
    format_bytes,
    format_count,
    format_fill,
    format_rate,
    format_seconds,
    format_share,
    format_things,
)

CASES = (
    (format_things, 1, "bad file", "1 bad file"),
    (format_things, 0, "file", "0 files"),
    (format_things, 1797, "file", "1,797 files"),
    (format_things, 1, "retry", "1 retry"),
    (format_things, 2, "retry", "2 retries"),
    (format_things, 2, "array", "2 arrays"),
    (format_things, 1.0, "CPU", "1 CPU"),
    (format_things, 1.5, "CPU", "1.5 CPUs"),
    (format_things, 0.5, "CPU", "0.5 CPUs"),
    (format_things, 2.0, "CPU", "2 CPUs"),
    (format_things, 3, "class", "3 classes"),
    (format_things, 2, "batch", "2 batches"),
    (format_things, 2, "GPU", "2 GPUs"),
    (format_bytes, 0, "0 B"),
    (format_bytes, 1, "1 B"),
    (format_bytes, 1023, "1023 B"),
    (format_bytes, 1024, "1.0 KiB"),
    (format_bytes, 1536, "1.5 KiB"),
    (format_bytes, 100 * 1024, "100 KiB"),
    (format_bytes, 1024**2 - 1, "1.0 MiB"),
    (format_bytes, 1.5 * 2**30, "1.5 GiB"),
    (format_bytes, 2**50, "1.0 PiB"),
    (format_bytes, 5000 * 2**50, "5000 PiB"),
    (format_bytes, -2048, "-2.0 KiB"),
    (format_seconds, 0, "0 µs"),
    (format_seconds, 0.0000125, "12 µs"),
    (format_seconds, 0.0012, "1.2 ms"),
    (format_seconds, 0.25, "250 ms"),
    (format_seconds, 3.4, "3.4 s"),
    (format_seconds, 59.9, "59.9 s"),
    (format_seconds, 60, "1 min 00 s"),
    (format_seconds, 306, "5 min 06 s"),
    (format_seconds, 7380, "2 h 03 min"),
    (format_seconds, 36 * 3600, "36 h 00 min"),
    (format_seconds, 0.0009999, "1.0 ms"),
    (format_seconds, 0.99999, "1.0 s"),
    (format_seconds, 59.99, "1 min 00 s"),
    (format_seconds, 3599.7, "1 h 00 min"),
    (format_seconds, 119.6, "2 min 00 s"),
    (format_count, 0, "0"),
    (format_count, 999, "999"),
    (format_count, 60_000, "60,000"),
    (format_count, 1_234_567.4, "1,234,567"),
    (format_count, -1500, "-1,500"),
    (format_rate, 0, "images", "0.0 images/s"),
    (format_rate, 0.25, "images", "0.2 images/s"),
    (format_rate, 9.94, "images", "9.9 images/s"),
    (format_rate, 12, "images", "12 images/s"),
    (format_rate, 12_345, "images", "12,345 images/s"),
    (format_fill, 1.1 * 2**30, 12.7 * 2**30, "1.1 of 12.7 GiB"),
    (format_fill, 5 * 2**20, 2**30, "5.0 MiB of 1.0 GiB"),
    (format_fill, 0, 0, "0 of 0 B"),
    (format_share, 0.0004, "<0.1%"),
    (format_share, 0.0005, "0.1%"),
    (format_share, 0, "0%"),
    (format_share, 0.003, "0.3%"),
    (format_share, 0.04, "4.0%"),
    (format_share, 0.099, "9.9%"),
    (format_share, 0.0996, "10%"),
    (format_share, 1, "100%"),
    (format_rate, 9.97, "files", "10 files/s"),
)


def test_numbers_are_shown_with_a_suitable_unit_and_few_digits():
    for function, *arguments, text in CASES:
        assert function(*arguments) == text


FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.integers(min_value=0, max_value=2**59))
def test_formatted_bytes_are_correct_within_rounding_and_below_the_next_unit(count):
    number, unit = format_bytes(count).split(" ")
    assert abs(float(number) * FACTORS[unit] - count) <= (0.05 if "." in number else 0.5) * FACTORS[unit] + 1e-9
    assert float(number) < 1024


@given(st.floats(min_value=0, max_value=1e7), st.floats(min_value=0, max_value=1e7))
def test_a_longer_duration_is_never_shown_as_shorter(one, other):
    less, more = sorted((one, other))
    assert seconds_of(format_seconds(less)) <= seconds_of(format_seconds(more))


def seconds_of(text: str) -> float:
    factors = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    words = text.split(" ")
    return sum(float(number) * factors[unit] for number, unit in zip(words[::2], words[1::2], strict=True))

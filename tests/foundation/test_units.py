"""Numbers as text: right units, at most three digits before the unit changes, no surprise at the borders."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize(
    ("count", "thing", "text"),
    [
        (1, "bad file", "1 bad file"),
        (0, "file", "0 files"),
        (1797, "file", "1,797 files"),
        (1, "retry", "1 retry"),
        (2, "retry", "2 retries"),
        (2, "array", "2 arrays"),
        (1.0, "CPU", "1 CPU"),
        (1.5, "CPU", "1.5 CPUs"),
        (0.5, "CPU", "0.5 CPUs"),
        (2.0, "CPU", "2 CPUs"),
        (3, "class", "3 classes"),
        (2, "batch", "2 batches"),
        (2, "GPU", "2 GPUs"),
    ],
)
def test_one_thing_is_never_told_as_several(count, thing, text):
    assert format_things(count, thing) == text


FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 * 1024, "100 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5000 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count, text):
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=2**59))
def test_bytes_as_text_stay_within_rounding_and_below_the_next_unit(count):
    number, unit = format_bytes(count).split(" ")
    assert abs(float(number) * FACTORS[unit] - count) <= (0.05 if "." in number else 0.5) * FACTORS[unit] + 1e-9
    assert float(number) < 1024


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.0000125, "12 µs"),
        (0.0012, "1.2 ms"),
        (0.25, "250 ms"),
        (3.4, "3.4 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (306, "5 min 06 s"),
        (7380, "2 h 03 min"),
        (36 * 3600, "36 h 00 min"),
    ],
)
def test_durations_are_shown_in_the_unit_that_suits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0009999, "1.0 ms"), (0.99999, "1.0 s"), (59.99, "1 min 00 s"), (3599.7, "1 h 00 min"), (119.6, "2 min 00 s")],
)
def test_durations_that_round_up_take_the_next_unit(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(min_value=0, max_value=1e7), st.floats(min_value=0, max_value=1e7))
def test_a_longer_duration_never_reads_shorter(one, other):
    less, more = sorted((one, other))
    assert seconds_of(format_seconds(less)) <= seconds_of(format_seconds(more))


def seconds_of(text: str) -> float:
    """Return what a duration as text stands for."""
    factors = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    words = text.split(" ")
    return sum(float(number) * factors[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (60_000, "60,000"), (1_234_567.4, "1,234,567"), (-1500, "-1,500")]
)
def test_counts_have_their_thousands_separated(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0.0 images/s"),
        (0.25, "0.2 images/s"),
        (9.94, "9.9 images/s"),
        (12, "12 images/s"),
        (12_345, "12,345 images/s"),
    ],
)
def test_rates_keep_a_decimal_only_where_it_matters(rate, text):
    assert format_rate(rate, "images") == text


def test_a_rate_that_rounds_to_ten_has_no_decimal():
    assert format_rate(9.97, "files") == "10 files/s"


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [(1.1 * 2**30, 12.7 * 2**30, "1.1 of 12.7 GiB"), (5 * 2**20, 2**30, "5.0 MiB of 1.0 GiB"), (0, 0, "0 of 0 B")],
)
def test_a_fill_names_the_unit_once_where_it_is_the_same(used, total, text):
    assert format_fill(used, total) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0004, "<0.1%"),
        (0.0005, "0.1%"),
        (0, "0%"),
        (0.003, "0.3%"),
        (0.04, "4.0%"),
        (0.099, "9.9%"),
        (0.0996, "10%"),
        (1, "100%"),
    ],
)
def test_shares_are_per_cent_with_a_decimal_below_ten(share, text):
    assert format_share(share) == text

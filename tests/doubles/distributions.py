"""Statistical tests of random results.

If the distributions are equal, a chi-square test with 1,000 degrees of freedom fails once in about 90,000 runs, one
with 20 once in about 2,700.
"""

from __future__ import annotations

import math

import numpy as np


def assert_even(counts: np.ndarray) -> None:
    """Assert that counts of equally likely outcomes pass a chi-square test at 4.5 standard deviations."""
    assert_as_likely(counts, np.ones(counts.shape))


def assert_as_likely(counts: np.ndarray, chances: np.ndarray) -> None:
    """Assert that counts are proportional to `chances`, by a chi-square test at 4.5 standard deviations."""
    expected = counts.sum() * chances / chances.sum()
    assert expected.min() >= 5
    assert_chi_square(float(((counts - expected) ** 2 / expected).sum()), counts.size - 1)


def assert_chi_square(value: float, free: int) -> None:
    """Assert that chi-square with `free` degrees of freedom is within 4.5 standard deviations of its mean."""
    assert abs(value - free) < 4.5 * math.sqrt(2 * free)


def assert_same_distribution(first: np.ndarray, second: np.ndarray) -> None:
    """Compare two samples by the Kolmogorov-Smirnov test; equal distributions fail once in 10,000 runs (c = 2.23)."""
    values = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (first, second)]
    assert np.abs(shares[0] - shares[1]).max() < 2.23 * math.sqrt(1 / len(first) + 1 / len(second))


def assert_unlike(orders: list[np.ndarray]) -> None:
    """Assert that orders of the same samples look random: two random orders agree at one position on average."""
    matches = [float((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(matches) <= 8
    assert 0.5 < np.mean(matches) < 1.6

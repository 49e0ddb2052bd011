"""Statistical tests of random results: equal distributions fail about once in 100,000 runs."""

from __future__ import annotations

import math

import numpy as np


def assert_even(counts: np.ndarray) -> None:
    """Assert that counts of equally likely cells are within 4.5 standard deviations of chi-square."""
    assert_as_likely(counts, np.ones(counts.shape))


def assert_as_likely(counts: np.ndarray, chances: np.ndarray) -> None:
    """Assert that counts are within 4.5 standard deviations of chi-square for these probabilities."""
    expected = counts.sum() * chances / chances.sum()
    assert expected.min() >= 5
    assert_chi_square(float(((counts - expected) ** 2 / expected).sum()), counts.size - 1)


def assert_chi_square(value: float, free: int) -> None:
    """Assert that chi-square with `free` degrees of freedom is within 4.5 standard deviations of its mean."""
    assert abs(value - free) < 4.5 * math.sqrt(2 * free)


def assert_same_distribution(first: np.ndarray, second: np.ndarray) -> None:
    """Compare two samples by the Kolmogorov-Smirnov test; equal ones fail with probability below 1e-4 (c = 2.23)."""
    values = np.union1d(first, second)
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (first, second)]
    assert np.abs(shares[0] - shares[1]).max() < 2.23 * math.sqrt(1 / len(first) + 1 / len(second))


def assert_unlike(orders: list[np.ndarray]) -> None:
    """Assert that orders of the same samples look random: two of them agree at one position on average."""
    matches = [float((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(matches) <= 8
    assert 0.5 < np.mean(matches) < 1.6

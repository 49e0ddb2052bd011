"""Test parameters: plain `pytest` runs a few of them, `pytest --full` runs all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(values: Iterable[Any], count: int) -> Sequence[Any]:
    """Return the parameters; without `--full`, only evenly spaced ones run, including the first and the last.

    Args:
        values: the parameters; a tuple stands for several arguments.
        count: number of parameters that run without `--full`; 1 runs only the first.
    """
    listed = list(values)
    saved = {0} if count == 1 else {round(number * (len(listed) - 1) / (count - 1)) for number in range(count)}
    return [
        value if number in saved else pytest.param(*_arguments(value), marks=pytest.mark.full)
        for number, value in enumerate(listed)
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

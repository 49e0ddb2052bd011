"""Waiting for what another thread or process does; it takes long only where a test fails."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 30.0
"""What no test waits for, unless it fails."""


def comes_true(condition: Callable[[], object], seconds: float = LONG_S) -> bool:
    """Return whether a condition holds before long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


def wait_until(condition: Callable[[], object], seconds: float = LONG_S) -> None:
    """Return when a condition holds; the test fails if it does not before long."""
    assert comes_true(condition, seconds), "waited in vain"

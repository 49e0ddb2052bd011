"""Wait until a condition holds in another thread or process; passing tests rarely wait long."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG_S = 30.0
"""Deadline in seconds, reached only by failing tests."""


def comes_true(condition: Callable[[], object], seconds: float = LONG_S, look_s: float = 0.001) -> bool:
    """Return whether a condition becomes true before the deadline; it is checked every `look_s` seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(look_s)
    return bool(condition())


def wait_until(condition: Callable[[], object], seconds: float = LONG_S) -> None:
    """Wait until a condition holds; fail the test after the deadline."""
    assert comes_true(condition, seconds), "the condition did not become true in time"

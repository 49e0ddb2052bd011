"""What the tests of concurrent reading share: its threads, and waiting for what will come true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONG_S = 30.0
"""What no test waits for, unless it fails."""


def reader_threads() -> list[threading.Thread]:
    """Return the threads of the engine."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("colabkit-read")]


def no_reader_threads() -> bool:
    """Return whether every thread of the engine has ended."""
    return not reader_threads()


def comes_true(condition: Callable[[], bool]) -> bool:
    """Return whether a condition holds before long."""
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()

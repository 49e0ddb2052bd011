"""The threads of concurrent reading."""

from __future__ import annotations

import threading


def reader_threads() -> list[threading.Thread]:
    """Return the threads of the engine."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("colabkit-read")]


def no_reader_threads() -> bool:
    """Return whether every thread of the engine has ended."""
    return not reader_threads()

"""List the reader threads that are running."""

from __future__ import annotations

import threading


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("colabkit-read")]


def no_reader_threads() -> bool:
    return not reader_threads()

"""Functions that tests run in other processes, in a module with few imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
from PIL import Image
from waiting import wait_until


class Squares:
    """A map-style dataset that does not support concurrent calls from two threads."""

    def __init__(self) -> None:
        self.is_busy = False

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        assert not self.is_busy
        self.is_busy = True
        value = np.full((5, 9), number * number, "<i4")
        os.sched_yield()
        self.is_busy = False
        return value, number % 4


class Noise:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        random = np.random.default_rng(number)
        return Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)), number % 3


def die_once(flag: Path, path: str) -> int:
    """Kill the first process that makes sample `bees/004.png`."""
    if path == "bees/004.png" and not flag.exists():
        flag.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return len(path)


def die_while(flag: Path, path: str) -> int:
    """Kill each process that makes sample `bees/004.png` while `flag` exists, and count the kills in it."""
    if path == "bees/004.png" and flag.exists():
        with flag.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return len(path)


def die_beside(folder: Path, path: str) -> int:
    """Kill a worker at `bees/004.png` while another one waits at `ants/000.png` for SIGTERM, which arrives twice."""
    waits, died = folder / "waits", folder / "died"
    if path == "ants/000.png" and multiprocessing.parent_process() is not None and not waits.exists():
        arrived: list[int] = []
        before = signal.getsignal(signal.SIGTERM)
        assert callable(before)
        signal.signal(signal.SIGTERM, lambda number, frame: (arrived.append(number), before(number, frame)))
        waits.touch()
        wait_until(lambda: arrived)
        os.kill(os.getpid(), signal.SIGTERM)
    if path == "bees/004.png" and not died.exists():
        wait_until(waits.exists)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(path)


def hold(folder: Path, path: str) -> int:
    """Write a file and hang at the first call for `bees/004.png`; later calls return."""
    if path == "bees/004.png" and not (folder / "held").exists():
        (folder / "held").touch()
        threading.Event().wait()
    return len(path)


def fail(path: str) -> int:
    if path == "bees/004.png":
        raise ZeroDivisionError("of mine")
    return 1


CALLS: list[str] = []


def fail_once(path: str) -> int:
    """Raise an error in the second call: `pack()` makes the first, and a task the second."""
    CALLS.append(path)
    if len(CALLS) == 2:
        raise RuntimeError("of mine")
    return len(path)


def process_of(path: str) -> int:
    return os.getpid()


MAKERS: list[str] = []


def add_worker() -> None:
    """Start a worker of the cluster; a test replaces this."""


def thread_of(path: str) -> int:
    """Append the name of the calling thread to `MAKERS`; when this process packs for the first time, add a worker."""
    name = threading.current_thread().name
    if name.startswith("colabkit-pack") and name not in MAKERS:
        add_worker()
    MAKERS.append(name)
    return 0

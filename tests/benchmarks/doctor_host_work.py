"""Artificial work on the host that slows down a training loop, for doctor_runs.py."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

# Seconds after which a run becomes slow.
SLOW_AFTER_S = 2.5


def in_python(work: int) -> int:
    """Return a result that pure Python computes slowly."""
    total = 0
    for number in range(work):
        total += number * number % 7
    return total


def block(passed_s: float) -> None:
    """Sleep, like a network call or a read of a value from the device."""
    time.sleep(0.02)


LOCK = threading.Lock()


def take_lock(passed_s: float) -> None:
    with LOCK:
        pass


def log_in_loop(passed_s: float) -> None:
    """Write a long text as JSON, as a logger of images and histograms does."""
    json.dumps({str(number): list(range(20)) for number in range(400)}, indent=1)


def become_slow(passed_s: float) -> None:
    """Compute for longer in every step of the second half of the run."""
    if passed_s > SLOW_AFTER_S:
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:
            torch.ones(1000).exp()


def save_often(passed_s: float) -> None:
    """Write a large checkpoint to the disk in about every fortieth step."""
    STEPS.append(0)
    if len(STEPS) % 40 == 0:
        with tempfile.TemporaryFile() as file:
            for _ in range(20):
                torch.save(torch.zeros(1 << 20), file)
                file.flush()
                os.fsync(file.fileno())


STEPS: list[int] = []


@contextlib.contextmanager
def in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in another thread of this process until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), name="refresher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def hold_gil(stop: threading.Event) -> None:
    while not stop.is_set():
        in_python(10_000)


def hold_lock(stop: threading.Event) -> None:
    while not stop.is_set():
        with LOCK:
            time.sleep(0.03)
        time.sleep(0.0001)


def compute_freely(stop: threading.Event) -> None:
    """Compute during a quarter of the time, with the GIL released."""
    values = np.random.default_rng(0).random(1 << 18)
    while not stop.is_set():
        started = time.perf_counter()
        np.sort(values)
        time.sleep(3 * (time.perf_counter() - started))

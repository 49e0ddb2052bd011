"""The activity of this process's threads: CPU time, and waits for a CPU and for Python's global interpreter lock (GIL).

All values come from files of the kernel that not every system has, so each may be unknown.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from colabkit.foundation.mount_table import Reader
from colabkit.foundation.telemetry.processes import cpu_seconds
from colabkit.foundation.telemetry.stacks import LoopSpot, prompt_gil

_TASKS = "/proc/self/task"
# Number of times that the GIL is released and acquired again, and the seconds between. After a much shorter time, this
# thread would often acquire it before a thread that waits for it has woken up.
_PROBES, _RELEASED_S = 5, 5e-4


@dataclass(frozen=True, slots=True)
class ThreadsSnapshot:
    """The threads of this process since the previous snapshot; unknown values are None.

    The training thread is the one that iterated over a loader last.

    Attributes:
        training_cpu_rate: share of the time in which the training thread was on a CPU.
        training_held_rate: share of the time in which it was ready to run, but another thread had its CPU.
        held_rate: share of the ready-to-run time of this process's threads in which they had no CPU.
        compute_cpus: CPUs used by threads without Python code, such as torch's own threads.
        busiest_thread: name of the Python thread that used the most CPU time, apart from the training thread.
        busiest_thread_rate: share of the time in which that thread was on a CPU.
        gil_wait_s: mean seconds for which a thread waits for the GIL.
        spots: where the training thread was when its stack was sampled; empty if it was not.
        torch_threads: number of threads that torch uses when the training thread calls it; None without torch.
    """

    training_cpu_rate: float | None = None
    training_held_rate: float | None = None
    held_rate: float | None = None
    compute_cpus: float | None = None
    busiest_thread: str | None = None
    busiest_thread_rate: float | None = None
    gil_wait_s: float | None = None
    spots: tuple[LoopSpot, ...] = ()
    torch_threads: int | None = None


class TrainingThread(NamedTuple):
    """The thread that last iterated over a loader.

    Attributes:
        ident: Python's identifier.
        native_id: the kernel's thread ID.
        torch_threads: number of threads that torch uses when this thread calls it; None without torch.
    """

    ident: int
    native_id: int
    torch_threads: int | None = None


_training: list[TrainingThread] = []


def train_in_this_thread() -> None:
    """Record that the calling thread iterates over a loader."""
    torch = sys.modules.get("torch")
    torch_threads = None if torch is None else torch.get_num_threads()
    _training[:] = [TrainingThread(threading.get_ident(), threading.get_native_id(), torch_threads)]


def training_thread() -> TrainingThread | None:
    """Return the thread that iterated over a loader last."""
    return _training[0] if _training else None


def _python_threads() -> Mapping[int, str]:
    return {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}


def _task_ids() -> Iterable[int]:
    return [int(name) for name in os.listdir(_TASKS)]


class _ThreadTimes(NamedTuple):
    cpu_s: float
    held_s: float | None


@dataclass
class ProcessThreads:
    """A source of snapshots of this process's threads.

    Args:
        read: returns the text of a file.
        clock: returns the current time in seconds.
        training: returns the training thread, if any.
        names: returns the names of the Python threads by the kernel's thread ID.
        task_ids: returns the thread IDs of all threads.
        release: releases the GIL for half a millisecond and acquires it again.
        probe_clock: returns the current time in seconds, for waits for the GIL.
    """

    read: Reader
    clock: Callable[[], float] = time.monotonic
    training: Callable[[], TrainingThread | None] = training_thread
    names: Callable[[], Mapping[int, str]] = _python_threads
    task_ids: Callable[[], Iterable[int]] = _task_ids
    release: Callable[[], object] = lambda: time.sleep(_RELEASED_S)
    probe_clock: Callable[[], float] = time.perf_counter
    _before: dict[int, _ThreadTimes] = field(default_factory=dict, init=False)
    _before_s: float | None = field(default=None, init=False)

    def snapshot(self, spots: tuple[LoopSpot, ...] = ()) -> ThreadsSnapshot | None:
        """Return the threads' activity since the last call; None in the first call, or if nothing is known."""
        now_s, training = self.clock(), self.training()
        try:
            with prompt_gil():
                tasks = {task_id: task for task_id in self.task_ids() if (task := self._task(task_id)) is not None}
        except (OSError, ValueError):
            # Neither macOS nor some sandboxes list the threads.
            tasks = {}
        before, self._before = self._before, tasks
        before_s, self._before_s = self._before_s, now_s
        if before_s is None or now_s <= before_s:
            return None
        passed_s = now_s - before_s
        spent = {
            task_id: _ThreadTimes(
                max(0.0, task.cpu_s - before[task_id].cpu_s),
                None if task.held_s is None else max(0.0, task.held_s - (before[task_id].held_s or 0.0)),
            )
            for task_id, task in tasks.items()
            if task_id in before
        }
        gil_wait_s = self._gil_wait_s()
        if not spent:
            return ThreadsSnapshot(gil_wait_s=gil_wait_s, spots=spots)
        own = spent.get(training.native_id) if training else None
        names = {**self.names(), **({training.native_id: ""} if training else {})}
        held_s = [task.held_s for task in spent.values()]
        cpu_s = sum(task.cpu_s for task in spent.values())
        ready_s = cpu_s + sum(one or 0.0 for one in held_s)
        others = {task_id: spent[task_id].cpu_s for task_id, name in names.items() if name and task_id in spent}
        busiest = max(others, key=lambda task_id: others[task_id], default=None)
        return ThreadsSnapshot(
            training_cpu_rate=None if own is None else min(1.0, own.cpu_s / passed_s),
            training_held_rate=None if own is None or own.held_s is None else min(1.0, own.held_s / passed_s),
            held_rate=None if None in held_s or not ready_s else (ready_s - cpu_s) / ready_s,
            compute_cpus=sum(task.cpu_s for task_id, task in spent.items() if task_id not in names) / passed_s,
            busiest_thread=None if busiest is None else names[busiest],
            busiest_thread_rate=None if busiest is None else min(1.0, others[busiest] / passed_s),
            gil_wait_s=gil_wait_s,
            spots=spots,
            torch_threads=training.torch_threads if training else None,
        )

    def _task(self, task_id: int) -> _ThreadTimes | None:
        try:
            cpu_ns, held_ns, *_ = self.read(f"{_TASKS}/{task_id}/schedstat").split()
            return _ThreadTimes(int(cpu_ns) / 1e9, int(held_ns) / 1e9)
        except (OSError, ValueError):
            pass
        try:
            return _ThreadTimes(cpu_seconds(self.read, f"{_TASKS}/{task_id}/stat"), None)
        except (OSError, ValueError, IndexError):
            return None

    def _gil_wait_s(self) -> float:
        """Return the mean seconds for which this thread waits for the GIL, without those in which it has no CPU.

        If the latter are unknown, return the median instead, on which a single wait for a CPU has no effect.
        """
        own, waits_s = threading.get_native_id(), []
        before = self._task(own)
        for _ in range(_PROBES):
            began_s = self.probe_clock()
            self.release()
            waits_s.append(max(0.0, self.probe_clock() - began_s - _RELEASED_S))
        after = self._task(own)
        if before is None or after is None or before.held_s is None or after.held_s is None:
            return median(waits_s)
        return max(0.0, sum(waits_s) - (after.held_s - before.held_s)) / _PROBES

"""Forked workers for tasks too short for threads; each receives tasks through a pipe and is replaced if it dies."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Generic, Self, TypeVar

from colabkit.foundation import ColabkitError, PackingFailed, TimedOut, cannot, option

T = TypeVar("T")
R = TypeVar("R")

# Tasks assigned to a worker: one running, one queued.
_AHEAD = 2
_TICK_S = 0.25
_TRIES = 2
_END_S = 5.0
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Return whether this process may fork workers: only on Linux, and not if it is daemonic."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


@dataclass(eq=False)
class _Worker(Generic[T]):
    """A worker process, its pipe, and its tasks in order, each with the number of the current attempt."""

    process: Any
    pipe: connection.Connection
    tasks: deque[tuple[T, int]] = field(default_factory=deque)
    moved: float = field(default_factory=time.monotonic)


@dataclass
class ForkedWorkers(Generic[T, R]):
    """Calls a function in forked processes that share this process's memory, and ends the processes on exit.

    A worker that dies or takes longer than `stalled_s` is replaced, and its task is retried once.

    Args:
        act: verb and object for messages.
        function: called with each task; its result is pickled.
        count: number of processes.
        describe: returns the name of a task for messages.
        stalled_s: maximum seconds for one task.
    """

    act: str
    function: Callable[[T], R]
    count: int
    describe: Callable[[T], str]
    stalled_s: float = 300.0

    def __post_init__(self) -> None:
        self._workers: list[_Worker[T]] = []

    def results(self, tasks: Iterable[T], on_wait: Callable[[], None] | None = None) -> Iterator[R]:
        """Yield the result of each task as it finishes.

        Raises:
            PackingFailed: if a worker cannot be started, or dies during the second attempt at a task.
            TimedOut: if the second attempt at a task takes too long.
            Exception: any error that the function raised, or a RuntimeError with its text if it cannot be pickled.
        """
        remaining = ((task, 1) for task in tasks)
        again: deque[tuple[T, int]] = deque()
        while True:
            for worker in self._workers:
                while len(worker.tasks) < _AHEAD and (one := again.popleft() if again else next(remaining, None)):
                    self._give(worker, one)
            busy = [worker for worker in self._workers if worker.tasks]
            if not busy:
                return
            ready = connection.wait([worker.pipe for worker in busy], _TICK_S)
            if not ready and on_wait is not None:
                on_wait()
            for worker in busy:
                if worker.pipe in ready:
                    try:
                        is_good, answer = worker.pipe.recv()
                    except (EOFError, OSError):
                        again += self._replaced(worker, "died")
                        continue
                    worker.tasks.popleft()
                    worker.moved = time.monotonic()
                    if not is_good:
                        raise answer
                    yield answer
                elif time.monotonic() - worker.moved > self.stalled_s:
                    again += self._replaced(worker, "hung")

    def _give(self, worker: _Worker[T], one: tuple[T, int]) -> None:
        if not worker.tasks:
            worker.moved = time.monotonic()
        worker.tasks.append(one)
        # Ignore errors here, because a dead worker is detected when its answer is read.
        with contextlib.suppress(OSError):
            worker.pipe.send(one[0])

    def _replaced(self, worker: _Worker[T], how: str) -> list[tuple[T, int]]:
        """Replace a worker and return its tasks, counting another attempt for the first task.

        Raise an error instead if the first task has already been retried.
        """
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        worker.process.close()
        (first, tries), *others = worker.tasks
        if tries >= _TRIES:
            files = self.describe(first)
            if how == "hung":
                hung = f"two worker processes spent more than {self.stalled_s:g} s on {files}"
                raise TimedOut(cannot(self.act, hung, "", "Check these files, or remove them"))
            end = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
            died = f"two worker processes died while they packed {files} ({end})"
            raise PackingFailed(cannot(self.act, died, "", "Check these files and the free memory"))
        self._workers.append(self._started())
        return [(first, tries + 1), *others]

    def _started(self) -> _Worker[T]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [worker.pipe for worker in self._workers]
        process = context.Process(
            target=_work,
            args=(os.getpid(), self.function, theirs, [ours, *inherited]),
            name="colabkit-pack",
            daemon=True,
        )
        with warnings.catch_warnings():
            # Newer Python versions warn about forking a process with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except OSError as error:
                ours.close()
                theirs.close()
                found = f"a worker process cannot be started ({error.strerror or error})"
                next_step = ("Free some memory, or use ", option("threads", 1))
                raise PackingFailed(cannot(self.act, found, "", next_step)) from error
        theirs.close()
        return _Worker(process, ours)

    def __enter__(self) -> Self:
        try:
            for _ in range(self.count):
                self._workers.append(self._started())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.pipe.close()
            if worker.tasks:
                worker.process.kill()
        deadline = time.monotonic() + _END_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()


def _work(
    parent: int, function: Callable[[Any], Any], pipe: connection.Connection, others: list[connection.Connection]
) -> None:
    with contextlib.suppress(OSError, AttributeError):
        # Let the kernel kill this process if the parent dies, even during a task that never ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Check for a parent that died before the call above.
    if os.getppid() != parent:
        os._exit(1)
    # A garbage collection would otherwise write to, and thus copy, all shared memory.
    gc.freeze()
    # Ignore Ctrl-C, which the parent handles by ending the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Close inherited pipe ends; otherwise the pipes would stay open after the parent ends.
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                answer = True, function(task)
            except Exception as error:
                answer = False, _portable(error)
            pipe.send(answer)
    os._exit(0)


def _portable(error: Exception) -> Exception:
    text = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, ColabkitError):
        error.add_note(f"In a worker process:\n{text}")
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - data from this process
        if type(again) is type(error):
            return error
    except Exception:  # noqa: S110 - constructors may need more than a message
        pass
    return RuntimeError(f"{type(error).__name__} in a worker process: {error}\n\n{text}")

"""Forked workers for work that is too fine for threads: each takes tasks by a pipe, and one that dies is replaced."""

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

from colabkit.foundation import ColabkitError, PackingFailed, TimedOut, cannot

T = TypeVar("T")
R = TypeVar("R")

# Tasks that a worker has: one under way, one that waits for it.
_AHEAD = 2
_TICK_S = 0.25
_TRIES = 2
_END_S = 5.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def can_fork() -> bool:
    """Return whether processes can be forked here without harm; those of a pool may have none of their own."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


@dataclass(eq=False)
class _Worker(Generic[T]):
    """A process with its end of the pipe, and its tasks with the number of their try, the oldest first."""

    process: Any
    pipe: connection.Connection
    tasks: deque[tuple[T, int]] = field(default_factory=deque)
    moved: float = field(default_factory=time.monotonic)


@dataclass
class ForkedWorkers(Generic[T, R]):
    """Calls a function in forked processes, which share the memory of this one; a context that ends them.

    A worker that dies, or takes longer than `stalled_s`, is replaced, and its task is tried once more.

    Args:
        act: verb and object for messages.
        function: called with each task; its result is pickled.
        count: processes.
        describe: returns the name of a task for messages.
        stalled_s: seconds that one task may take.
    """

    act: str
    function: Callable[[T], R]
    count: int
    describe: Callable[[T], str]
    stalled_s: float = 300.0

    def __post_init__(self) -> None:
        self._workers: list[_Worker[T]] = []

    def results(self, tasks: Iterable[T], on_wait: Callable[[], None] | None = None) -> Iterator[R]:
        """Yield the result of every task as they come.

        Raises:
            PackingFailed: if a worker died twice over the same task.
            TimedOut: if one took too long twice.
            Exception: what the function raised; as a RuntimeError that says so if it cannot be pickled.
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
        # A worker that has died is noticed when its answer is awaited.
        with contextlib.suppress(OSError):
            worker.pipe.send(one[0])

    def _replaced(self, worker: _Worker[T], how: str) -> list[tuple[T, int]]:
        """Replace a worker and return its tasks, the first of which has had one try more."""
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        worker.process.close()
        (first, tries), *others = worker.tasks
        if tries >= _TRIES:
            found = f"a worker process {how} twice at {self.describe(first)}"
            if how == "hung":
                needed, next_step = f"an answer in {self.stalled_s:g} s", "Check these files, or leave them out"
                raise TimedOut(cannot(self.act, found, needed, next_step))
            found += f" ({signal.Signals(-code).name if code and code < 0 else f'exit code {code}'})"
            next_step = "Check these files, and the free memory"
            raise PackingFailed(cannot(self.act, found, "processes that live", next_step))
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
            # Newer Pythons warn of forks beside threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except OSError as error:
                ours.close()
                theirs.close()
                found = f"no further process ({error.strerror or error})"
                next_step = "Free some memory, or use threads=1"
                raise PackingFailed(cannot(self.act, found, "processes that can be started", next_step)) from error
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
    """Answer tasks until the pipe is closed, which a parent that was killed does, too."""
    with contextlib.suppress(OSError, AttributeError):
        # The kernel kills this process when its parent is killed, also in the middle of a task that never ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os._exit(1)
    # Otherwise a collection would touch, and so copy, all shared memory.
    gc.freeze()
    # Ctrl-C reaches the parent, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Otherwise the end of the parent would not close them.
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
    """Return an error as it can be raised in the parent: the same where it survives pickling."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, ColabkitError):
        error.add_note(f"In a worker process:\n{text}")
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - of this very process
        if type(again) is type(error):
            return error
    except Exception:  # noqa: S110 - some are made of more than their message
        pass
    return RuntimeError(f"{type(error).__name__} in a worker process: {error}\n\n{text}")

"""Worker threads that build batches in this process.

Small batches are built several at a time, as one group, because a hand-over costs more than gathering 512 CIFAR images.
One thread opens a group; the slow work in it is split into pieces that all threads share, oldest group first.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch

from colabkit.foundation import has_started, read_file
from colabkit.loading.engine.batch_builder import BatchBuilder
from colabkit.loading.engine.batches import BatchGroup, BatchPlan
from colabkit.loading.engine.read_ahead import Cancellation

logger = logging.getLogger("colabkit")

_CLOSE_S = 10.0
_NO_PLAN = BatchPlan(np.empty(0, np.int64), np.empty(0, np.int64), (), ())
_OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")


class ThreadPool:
    """Daemon threads that build the batches of plans; `take` returns groups of batches in order.

    An error ends the iteration, after all earlier batches.

    Args:
        plans: plans of the batches; one thread at a time fetches the next one.
        builder: builder of the batches.
        threads: number of threads to start, of which the system may allow fewer; with 0, `take` builds the group it
            returns.
        groups_ahead: largest number of groups in progress or waiting.
        on_wait: function called with the seconds that a thread was idle.
    """

    def __init__(
        self,
        plans: Iterator[BatchPlan],
        builder: BatchBuilder,
        threads: int,
        groups_ahead: int,
        on_wait: Callable[[float], None],
    ) -> None:
        self._plans = plans
        self._builder = builder
        self._on_wait = on_wait
        self._errors: type[BaseException] = BaseException
        self._ready: queue.SimpleQueue[BatchGroup | BaseException | None] = queue.SimpleQueue()
        # This condition protects the attributes below.
        self._changed = threading.Condition()
        self._room = groups_ahead
        self._pieces: deque[tuple[BatchGroup, int, int]] = deque()
        self._under_way: deque[BatchGroup] = deque()
        self._is_opening = False
        self._is_exhausted = False
        self._is_over = False
        self._wanted = threads
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. The caller must close the pool, even if a keyboard interrupt ends this call."""
        _live.add(self)
        for number in range(self._wanted):
            thread = threading.Thread(target=self._run, name=f"colabkit-loader-{number}", daemon=True)
            self._threads.append(thread)
            if not has_started(thread):
                del self._threads[number]
                logger.warning(
                    "the system allows only %d of %d loader threads, so batches take longer", number, self._wanted
                )
                break
        if not self._threads:
            # In the caller's thread, a keyboard interrupt must pass through, not count as the error of a batch.
            self._errors = Exception

    def ready(self) -> int:
        """Return the number of groups that `take` would return without waiting."""
        return self._ready.qsize()

    def take(self, timeout: float) -> BatchGroup | None:
        """Return the next group, or None at the end.

        Raises:
            queue.Empty: if no group is ready within `timeout` seconds.
            BaseException: the error raised while the group was built.
        """
        if not self._threads:
            # Work in the mode of a worker thread, whatever the mode of the user's thread is.
            with torch.inference_mode(False), torch.no_grad():
                while self._ready.empty() and self._step():
                    pass
        group = self._ready.get(timeout=timeout)
        if isinstance(group, BaseException):
            raise group
        return group

    def make_room(self) -> None:
        """Allow one more group; call this once for each group that `take` has returned."""
        with self._changed:
            self._room += 1
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads and wait for them, up to a deadline; may be called twice.

        A call from one of the threads does not wait. The garbage collector, which runs in any thread, makes such calls
        when it closes an abandoned iteration.
        """
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            # A thread whose start was interrupted cannot be joined yet. It ends by itself.
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("threads of a closed loader are still running after %g s and are abandoned", _CLOSE_S)

    def forget_threads(self) -> None:
        """Forget the threads, which a forked child process does not have, so that `close` does not wait for them."""
        # A thread of the parent may have held the lock during the fork.
        self._changed = threading.Condition()
        self._threads.clear()
        self._is_over = True

    def _run(self) -> None:
        limit_torch_to_one_thread()
        try:
            # Nobody differentiates through a loader, but a transform may contain a network.
            with torch.no_grad():
                while self._step():
                    pass
        except Cancellation:
            pass
        except BaseException as error:
            self._ready.put(error)

    def _step(self) -> bool:
        waited_s = 0.0
        with self._changed:
            while not (self._is_over or self._pieces or self._is_exhausted or self._may_open):
                since = time.perf_counter()
                self._changed.wait()
                waited_s += time.perf_counter() - since
            is_over = self._is_over or (self._is_exhausted and not self._pieces)
            # Keep the piece only in a local variable, so that a waiting thread keeps no group, and no buffer, alive.
            piece = self._pieces.popleft() if self._pieces and not is_over else None
            if piece is None and not is_over:
                self._room -= 1
                self._is_opening = True
        if waited_s:
            # Call this without the lock, because the callback takes another lock.
            self._on_wait(waited_s)
        if piece is not None:
            self._work(*piece)
        elif not is_over:
            self._open()
        return not is_over

    @property
    def _may_open(self) -> bool:
        return self._room > 0 and not self._is_opening

    def _open(self) -> None:
        plan = _NO_PLAN
        try:
            plan = next(self._plans, _NO_PLAN)
            group = self._builder.begin(plan) if plan is not _NO_PLAN else None
        except Cancellation:
            raise
        except self._errors as error:
            group = BatchGroup(plan)
            group.error, group.failed_at = error, 0
        with self._changed:
            self._is_opening = False
            if group is None:
                self._is_exhausted = True
                self._deliver()
            else:
                group.pieces_left = len(group.pieces)
                self._under_way.append(group)
                self._pieces.extend((group, *piece) for piece in group.pieces)
            if len(self._threads) > 1:
                self._changed.notify_all()
        if group is not None and not group.pieces:
            self._end(group)

    def _work(self, group: BatchGroup, start: int, stop: int) -> None:
        try:
            # Samples after a failure are not delivered.
            if start < group.failed_at:
                self._builder.fill(group, start, stop)
        except Cancellation:
            raise
        except self._errors as error:
            with self._changed:
                if start < group.failed_at:
                    group.failed_at, group.error = start, error
        with self._changed:
            group.pieces_left -= 1
            is_last = not group.pieces_left
        if is_last:
            self._end(group)

    def _end(self, group: BatchGroup) -> None:
        try:
            for batch in self._builder.finish(group, group.failed_at) if group.failed_at else ():
                group.batches.append(batch)
                if self._is_over:
                    raise Cancellation
        except Cancellation:
            raise
        except self._errors as error:
            group.error = error
        with self._changed:
            group.is_done = True
            self._deliver()

    def _deliver(self) -> None:
        while not self._is_over and self._under_way and self._under_way[0].is_done:
            group = self._under_way.popleft()
            if group.batches:
                self._ready.put(group)
            elif group.error is None:
                # All samples of the group are bad and skipped, so there is nothing to deliver.
                self._room += 1
                self._changed.notify_all()
            if group.error is not None:
                self._is_over = True
                self._changed.notify_all()
                self._ready.put(group.error)
                return
        if self._is_exhausted and not self._under_way:
            self._ready.put(None)


_live: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all threads before the interpreter exits: ending a thread inside torch would abort the process."""
    for pool in tuple(_live):
        pool.close()


def _forget_all() -> None:
    for pool in tuple(_live):
        pool.forget_threads()
    _live.clear()


os.register_at_fork(after_in_child=_forget_all)


def limit_torch_to_one_thread() -> None:
    """Limit torch to one compute thread for calls from the current thread.

    Otherwise OpenMP starts helper threads for each calling thread, which spin for milliseconds after every call and
    take CPU cores from the model. `torch.set_num_threads` would also affect future threads. If the OpenMP library is
    not found, nothing changes: calls are slower but correct.
    """
    if (set_threads := _set_threads()) is not None:
        # The first torch call in a thread sets the number of threads, so make that call before setting the limit.
        torch.get_num_threads()
        set_threads(1)


@functools.cache
def _set_threads() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of a loaded OpenMP library, preferably torch's, or None."""
    try:
        mapped = {line.split()[-1] for line in read_file("/proc/self/maps").splitlines() if "omp" in line}
    except OSError:
        return None
    # Other packages may load OpenMP libraries, too, so try torch's library first.
    for path in sorted(mapped, key=lambda path: ("/torch" not in path, path)):
        if path.rpartition("/")[2].startswith(_OPENMP_LIBRARIES):
            try:
                return ctypes.CDLL(path).omp_set_num_threads
            except (OSError, AttributeError):
                continue
    return None

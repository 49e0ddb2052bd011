"""Worker threads that make batches ahead of their use, and hand them over in order.

Small batches are made several at a time, as one group, because handing one over between threads costs more than
gathering 512 CIFAR images. A group is opened by one thread; what takes long in it is cut into pieces that all threads
share, those of the oldest group first.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from colabkit.foundation import Mark
from colabkit.loading.augment.draws import Draws
from colabkit.loading.loader.cores import keep_to_one_core
from colabkit.loading.loader.portions import Numbers, Portion

logger = logging.getLogger("colabkit")

_CLOSE_S = 10.0
_NONE = Portion(np.empty(0, np.int64), np.empty(0, np.int64), (), ())


class Stopped(Exception):
    """Raised inside a worker whose work nobody wants any more."""


@dataclass(slots=True)
class Batch:
    """A batch, and how it came to the user.

    Attributes:
        values: its fields, or a whole batch that `collate_fn` made.
        positions: of its samples in the epoch's global order.
        reached: how many samples of the epoch all ranks have received after it.
        was_ready: whether it was ready when it was asked for.
        marks: set in the stream of its device before and after what waits for it.
    """

    values: Any
    positions: Numbers
    reached: int
    was_ready: bool = True
    marks: tuple[Mark, Mark] | None = None


class Group:
    """Batches that are made together.

    Attributes:
        portion: which samples they hold.
        buffer: the host memory that is lent for them.
        values: each field of all samples, while they are made.
        result: what transforms made of the first field.
        draws: the samples' random numbers.
        bad: samples that shall be left out, by their place in the portion.
        batches: the finished batches.
        pieces: samples from which to which are made apart, by any thread.
        lock: for what several threads set.
    """

    def __init__(self, portion: Portion, buffer: Tensor | None = None) -> None:
        self.portion = portion
        self.buffer = buffer
        self.values: list[Any] = []
        self.result: Tensor | None = None
        self.draws: Draws
        self.bad: list[int] = []
        self.batches: list[Batch] = []
        self.pieces: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.left = 0
        self.error: BaseException | None = None
        self.failed_at = len(portion.numbers)  # the first sample that could not be made
        self.is_done = False


class GroupMaker(Protocol):
    """Makes the batches of a group; all but `begin` may be called by several threads at once, on different groups."""

    def begin(self, portion: Portion) -> Group:
        """Return a new group with memory for its batches, and with the pieces that are left to do."""

    def fill(self, group: Group, start: int, stop: int) -> None:
        """Make the samples from `start` to `stop` of a group."""

    def finish(self, group: Group, samples: int) -> Iterator[Batch]:
        """Yield the batches that end within the first `samples` samples, which are made."""


def made_here(maker: GroupMaker, portion: Portion) -> Group:
    """Return a group made in the calling thread; where it fails, the batches before, and the error."""
    group = Group(portion)
    try:
        group = maker.begin(portion)
        for start, stop in group.pieces:
            group.failed_at = start
            maker.fill(group, start, stop)
        group.failed_at = len(portion.numbers)
    except Exception as error:
        group.error = error
        if not group.values:
            return group
    try:
        group.batches.extend(maker.finish(group, group.failed_at))
    except Exception as error:
        group.error = error  # of a batch before the one that could not be filled
    return group


class Workers:
    """Runs a plan in daemon threads; `take` gives its groups in order.

    Args:
        portions: what to make; asked for the next one by one thread at a time.
        maker: makes it.
        threads: how many.
        groups_ahead: how many groups may be under way or waiting.
        on_wait: told how long a thread had nothing to do, in seconds.
    """

    def __init__(
        self,
        portions: Iterator[Portion],
        maker: GroupMaker,
        threads: int,
        groups_ahead: int,
        on_wait: Callable[[float], None],
    ) -> None:
        self._portions = portions
        self._maker = maker
        self._on_wait = on_wait
        self._ready: queue.SimpleQueue[Group | BaseException | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._room = groups_ahead
        self._pieces: deque[tuple[Group, int, int]] = deque()
        self._under_way: deque[Group] = deque()
        self._is_opening = False
        self._is_exhausted = False
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, name=f"colabkit-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        _live.add(self)

    def ready(self) -> int:
        """Return how many groups `take` would give at once."""
        return self._ready.qsize()

    def take(self, timeout: float) -> Group | None:
        """Return the next group, or None after the last.

        Args:
            timeout: seconds to wait.

        Raises:
            queue.Empty: if there is none by then.
            BaseException: what the making of it failed with.
        """
        group = self._ready.get(timeout=timeout)
        if isinstance(group, BaseException):
            raise group
        return group

    def make_room(self) -> None:
        """Let one more group be made ahead; call it once for each group taken, when its last batch is handed out."""
        with self._changed:
            self._room += 1
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads and wait for them, though not for ever on one that hangs; may be called twice.

        One of the threads that finds itself here does not wait: the garbage collector, which ends a pass that was left,
        runs in any thread, and holding any lock.
        """
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("the loader's threads are still at work after %g s and are left alone", _CLOSE_S)

    def _run(self) -> None:
        keep_to_one_core()
        try:
            while (piece := self._next()) is not None:
                self._work(*piece)
                del piece  # or its group's buffer could not be used again while this thread waits
        except Stopped:
            pass
        except BaseException as error:
            self._ready.put(error)

    def _next(self) -> tuple[Group, int, int] | None:
        """Return a piece to make, opening the next group where none is left; None when all is done."""
        while True:
            waited_s = 0.0
            with self._changed:
                while not (self._is_over or self._pieces or self._is_exhausted or self._may_open):
                    since = time.perf_counter()
                    self._changed.wait()
                    waited_s += time.perf_counter() - since
                is_over = self._is_over or (self._is_exhausted and not self._pieces)
                piece = self._pieces.popleft() if self._pieces and not is_over else None
                if piece is None and not is_over:
                    self._room -= 1
                    self._is_opening = True
            if waited_s:
                self._on_wait(waited_s)  # which takes a lock of its own
            if piece is not None or is_over:
                return piece
            self._open()

    @property
    def _may_open(self) -> bool:
        return self._room > 0 and not self._is_opening

    def _open(self) -> None:
        portion = _NONE
        try:
            portion = next(self._portions, _NONE)
            group = self._maker.begin(portion) if portion is not _NONE else None
        except Stopped:
            raise
        except BaseException as error:
            group = Group(portion)
            group.error, group.failed_at = error, 0
        with self._changed:
            self._is_opening = False
            if group is None:
                self._is_exhausted = True
                self._deliver()
            else:
                group.left = len(group.pieces)
                self._under_way.append(group)
                self._pieces.extend((group, *piece) for piece in group.pieces)
            if len(self._threads) > 1:
                self._changed.notify_all()
        if group is not None and not group.pieces:
            self._end(group)

    def _work(self, group: Group, start: int, stop: int) -> None:
        try:
            if start < group.failed_at:  # nobody will see what comes after a failure
                self._maker.fill(group, start, stop)
        except Stopped:
            raise
        except BaseException as error:
            with self._changed:
                if start < group.failed_at:
                    group.failed_at, group.error = start, error
        with self._changed:
            group.left -= 1
            is_whole = not group.left
        if is_whole:
            self._end(group)

    def _end(self, group: Group) -> None:
        try:
            for batch in self._maker.finish(group, group.failed_at) if group.failed_at else ():
                group.batches.append(batch)
                if self._is_over:
                    raise Stopped
        except Stopped:
            raise
        except BaseException as error:
            group.error = error
        with self._changed:
            group.is_done = True
            self._deliver()

    def _deliver(self) -> None:
        """Hand over the groups that are done, in order; after one that failed, its error and nothing more."""
        while not self._is_over and self._under_way and self._under_way[0].is_done:
            group = self._under_way.popleft()
            if group.batches:
                self._ready.put(group)
            elif group.error is None:  # all its samples were left out: nobody will take it
                self._room += 1
                self._changed.notify_all()
            if group.error is not None:
                self._is_over = True
                self._changed.notify_all()
                self._ready.put(group.error)
                return
        if self._is_exhausted and not self._under_way:
            self._ready.put(None)


_live: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all threads while the interpreter still runs: ending one that is inside torch would abort the process."""
    for workers in tuple(_live):
        workers.close()


if hasattr(os, "register_at_fork"):  # a child has none of these threads
    os.register_at_fork(after_in_child=_live.clear)

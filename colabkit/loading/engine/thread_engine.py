"""Batches are gathered, decoded, cropped and transformed in this process: by threads, or where they are requested.

Rows that lie in memory are gathered faster than a thread can hand them over. So the first ones are gathered where they
are requested, and a thread takes over when it can work while the user does: when both take longer than a hand-over.

Small batches are built several at a time, as one group, because handing one over between threads costs more than
gathering 512 CIFAR images. A group is opened by one thread; what takes long in it is cut into pieces that all threads
share, those of the oldest group first.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from colabkit.foundation import meters, read_file
from colabkit.loading.engine.batch_builder import BatchBuilder, InlineGather, PrefetchDepth, TransformStages
from colabkit.loading.engine.batches import Batch, BatchGroup, BatchPlan, announce_plans, split_plans
from colabkit.loading.engine.columns import DatasetColumns
from colabkit.loading.engine.device import DeviceTransfer, send
from colabkit.loading.engine.gather import PinnedSlots
from colabkit.loading.engine.image_decoders import ImageOptions
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.read_ahead import Cancellation, FileReadAhead, PagePopulator, RowFile, read_rows_ahead
from colabkit.loading.engine.user_code import reporting_errors
from colabkit.packs import FileDataset

logger = logging.getLogger("colabkit")

_TICK_S = 0.25  # how often listeners hear of a waiting user
_FILES_AHEAD = 512
_HAND_OVER_S = 2e-4
_CONVINCED = 3  # gathers in a row that would have paid for a thread
_CLOSE_S = 10.0
_NO_PLAN = BatchPlan(np.empty(0, np.int64), np.empty(0, np.int64), (), ())
_OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")


class ThreadPool:
    """Builds the batches of plans in daemon threads; `take` returns their groups in order.

    An error arrives in its turn: after the batches before it, and nothing comes after it.

    Args:
        plans: of the batches; one thread at a time fetches the next one.
        builder: builds them.
        threads: how many; with 0 `take` itself builds the group that it returns.
        groups_ahead: how many groups may be under way or waiting.
        on_wait: called with the seconds that a thread had nothing to do.
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
        # In the caller's thread an interrupt is no error of a batch.
        self._errors: type[BaseException] = BaseException if threads else Exception
        self._ready: queue.SimpleQueue[BatchGroup | BaseException | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._room = groups_ahead
        self._pieces: deque[tuple[BatchGroup, int, int]] = deque()
        self._under_way: deque[BatchGroup] = deque()
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
        """Return how many groups `take` would return at once."""
        return self._ready.qsize()

    def take(self, timeout: float) -> BatchGroup | None:
        """Return the next group, or None after the last.

        Raises:
            queue.Empty: if there is none within `timeout` seconds.
            BaseException: with which building it failed.
        """
        while not self._threads and self._ready.empty() and self._step():
            pass
        group = self._ready.get(timeout=timeout)
        if isinstance(group, BaseException):
            raise group
        return group

    def make_room(self) -> None:
        """Allow one more group; call it once for each group taken, when its last batch is handed out."""
        with self._changed:
            self._room += 1
            self._changed.notify()

    def close(self) -> None:
        """Stop the threads and wait for them, up to a deadline; may be called twice.

        It does not wait if one of the threads calls it: the garbage collector, which closes an iteration that was left,
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
        limit_torch_to_one_thread()
        try:
            while self._step():
                pass
        except Cancellation:
            pass
        except BaseException as error:
            self._ready.put(error)

    def _step(self) -> bool:
        """Fill a piece, or open the next group if none is left and there is room; return False when all is done."""
        waited_s = 0.0
        with self._changed:
            while not (self._is_over or self._pieces or self._is_exhausted or self._may_open):
                since = time.perf_counter()
                self._changed.wait()
                waited_s += time.perf_counter() - since
            is_over = self._is_over or (self._is_exhausted and not self._pieces)
            # Local to this call, or its group's buffer could not be used again while this thread waits.
            piece = self._pieces.popleft() if self._pieces and not is_over else None
            if piece is None and not is_over:
                self._room -= 1
                self._is_opening = True
        if waited_s:
            self._on_wait(waited_s)  # which takes a lock of its own
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
            if start < group.failed_at:  # nothing after a failure is delivered
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
        """Hand over the groups that are done, in order; after one that failed, its error and nothing more."""
        while not self._is_over and self._under_way and self._under_way[0].is_done:
            group = self._under_way.popleft()
            if group.batches:
                self._ready.put(group)
            elif group.error is None:  # all its samples were left out, so it is not delivered
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
    """Stop all threads while the interpreter still runs: ending one that is inside torch would abort the process."""
    for pool in tuple(_live):
        pool.close()


if hasattr(os, "register_at_fork"):  # a child has none of these threads
    os.register_at_fork(after_in_child=_live.clear)


def limit_torch_to_one_thread() -> None:
    """Make torch compute with one thread when it is called from this thread.

    OpenMP would give each calling thread helpers of its own, which spin for milliseconds after every call and take the
    cores from the model. `torch.set_num_threads` would hold for future threads as well. If the OpenMP library is not
    found nothing changes, which is slower but just as correct.
    """
    if (set_threads := _set_threads()) is not None:
        torch.get_num_threads()  # which else would set it again at its first use in this thread
        set_threads(1)


@functools.cache
def _set_threads() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of the OpenMP library that torch has loaded, None where there is none."""
    try:
        mapped = {line.split()[-1] for line in read_file("/proc/self/maps").splitlines() if "omp" in line}
    except OSError:
        return None
    for path in sorted(mapped, key=lambda path: ("/torch" not in path, path)):  # other packages bring theirs
        if path.rpartition("/")[2].startswith(_OPENMP_LIBRARIES):
            try:
                return ctypes.CDLL(path).omp_set_num_threads
            except (OSError, AttributeError):
                continue
    return None


@dataclass(eq=False)
class ThreadEngine:
    """Builds the batches of epochs by threads of this process.

    Attributes:
        images: how samples are decoded, if they are image files.
        populator: reads a map's pages into memory meanwhile; None for none.
        row_files: with rows that are read from disk just ahead of their use; None if the kernel caches them.
    """

    options: LoaderOptions
    columns: DatasetColumns
    stages: TransformStages
    images: ImageOptions | None
    depth: PrefetchDepth
    populator: PagePopulator | None
    row_files: tuple[RowFile, ...] | None

    def __post_init__(self) -> None:
        self.plan_batches = self.depth.plan_batches
        self._counts = self.options.counts
        self._builder = BatchBuilder(self.options, self.columns, self.stages, self.images, self.depth)
        is_inline = self.images is None and not self.stages.works_in_threads and not self.options.is_on_gpu
        self._inline = InlineGather(self.columns, self.options.batch_size, self._counts) if is_inline else None

    def batches(self, seed: int, epoch: int, plans: Iterator[BatchPlan]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch; closing the generator ends all that works for it."""
        ahead = self._file_read_ahead()
        if self.populator is not None:
            self.populator.start()
        try:
            if ahead is not None:
                plans = announce_plans(plans, ahead.announce, max(_FILES_AHEAD, 4 * self.options.batch_size))
            elif self.row_files is not None and (rows := self.columns.rows) is not None:
                numbers = None if rows.numbers is None else rows.numbers.numpy()
                depth = 2 * self.depth.group_batches * self.options.batch_size
                plans = read_rows_ahead(split_plans(plans, self.depth.group_batches), self.row_files, numbers, depth)
            with reporting_errors():
                rest: Iterator[BatchPlan] | None = plans
                if self._inline is not None and (self.depth.begins_inline or not self.depth.threads):
                    rest = yield from self._gather_inline(self._inline, plans)
                if rest is not None:
                    yield from self._build(self._builder.of_epoch(seed, epoch, ahead), rest, ahead)
        finally:
            if ahead is not None:
                ahead.close()
            if self.populator is not None:
                self.populator.stop()

    def _gather_inline(
        self, gather: InlineGather, plans: Iterator[BatchPlan]
    ) -> Generator[Batch, None, Iterator[BatchPlan] | None]:
        """Yield batches gathered in the caller's thread; return the rest when a thread would pay, else None."""
        clock, convinced = time.perf_counter, 0
        for plan in plans:
            given = 0
            with closing(gather.batches(plan)) as lists:
                for made_s, batches in lists:
                    given += len(batches)
                    left = clock()
                    while batches:
                        yield batches.pop()
                    convinced = convinced + 1 if min(made_s, clock() - left) > _HAND_OVER_S else 0
                    if convinced == _CONVINCED and self.depth.threads:
                        return itertools.chain([plan.slice(given)] if given < len(plan.sizes) else [], plans)
        return None

    def _build(
        self, builder: BatchBuilder, plans: Iterator[BatchPlan], ahead: FileReadAhead | None
    ) -> Generator[Batch, None, None]:
        """Yield batches that threads build, or the caller's thread if there are none."""
        part = "decode" if self.images else "augment" if self.stages.works_in_threads else "gather"
        pool = ThreadPool(
            split_plans(plans, self.depth.group_batches),
            builder,
            self.depth.threads,
            self.depth.groups,
            lambda wait_s: self._counts.add(part, 0, 0, 0.0, wait_s),
        )
        pinned = builder.pinned
        try:
            with closing(self._host_batches(pool) if pinned is None else self._sent(pool, pinned)) as ready:
                yield from ready
        finally:
            if ahead is not None:
                ahead.close()  # first, or a worker would wait for a file that does not come
            pool.close()

    def _file_read_ahead(self) -> FileReadAhead | None:
        if self.images is None:
            return None
        files, cache = self.images.dataset, self.images.cache
        if not isinstance(files, FileDataset) or not files.source.can_hang:
            return None
        return None if cache.is_full else FileReadAhead(files, lambda index: cache.row(index) is not None, self._counts)

    def _host_batches(self, pool: ThreadPool) -> Generator[Batch, None, None]:
        while (group := self._take(pool)) is not None:
            batches = group.batches
            batches.reverse()
            del group
            while batches:
                if len(batches) == 1:
                    pool.make_room()
                yield batches.pop()

    def _sent(self, pool: ThreadPool, pinned: PinnedSlots) -> Generator[Batch, None, None]:
        """Yield batches that were sent to a GPU."""

        def groups() -> Iterator[tuple[list[Batch], torch.Tensor | None]]:
            while (group := self._take(pool)) is not None:
                pool.make_room()
                yield group.batches, group.buffer

        few = self.depth.group_batches
        transfer = DeviceTransfer(self.options.device, pinned, self._counts)
        yield from send(transfer, groups(), lambda under_way: under_way > few or not pool.ready())

    def _take(self, pool: ThreadPool) -> BatchGroup | None:
        """Return the next group, None after the last; listeners hear of the wait."""
        ready = pool.ready()
        if self.depth.threads:
            self._counts.queued += ready
            self._counts.queue_room += self.depth.groups
        started = time.perf_counter()
        while True:
            try:
                group = pool.take(_TICK_S)
            except queue.Empty:
                meters.publish(meters.Waiting(self._counts, time.perf_counter() - started))
                continue
            if group is not None:
                group.batches[0].was_ready = bool(ready)
            return group

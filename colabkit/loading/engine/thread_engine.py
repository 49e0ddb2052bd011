"""Build batches in this process, in worker threads or in the caller's thread.

Gathering rows from memory is faster than handing a batch from thread to thread. If batches stay on the CPU and need no
other work, the first ones are therefore gathered in the caller's thread. A worker thread takes over once both the
gather and the user's own work take longer than a hand-over, because then the two can overlap.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from colabkit.foundation import meters
from colabkit.loading.engine.batch_builder import BatchBuilder, InlineGather, PrefetchDepth, TransformStages
from colabkit.loading.engine.batches import Batch, BatchGroup, BatchPlan, announce_plans, split_plans
from colabkit.loading.engine.columns import DatasetColumns
from colabkit.loading.engine.device import DeviceTransfer, send
from colabkit.loading.engine.device_decoder import send_decoded
from colabkit.loading.engine.gather import PinnedSlots
from colabkit.loading.engine.image_decoders import ImageOptions
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.read_ahead import FileReadAhead, PagePopulator, RowFile, read_rows_ahead
from colabkit.loading.engine.sample_wait import SampleWait
from colabkit.loading.engine.shard_ahead import ShardReadAheads
from colabkit.loading.engine.share import Share
from colabkit.loading.engine.thread_pool import ThreadPool
from colabkit.loading.engine.user_code import reporting_loading_errors
from colabkit.loading.sampler.orders import Order
from colabkit.packs import FileDataset

# Interval in seconds of the events that report how long the user has been waiting for a batch.
_TICK_S = 0.25
_FILES_AHEAD = 512
_HAND_OVER_S = 2e-4
# Number of consecutive gathers for which a thread would have been faster before a thread takes over.
_CONVINCED = 3


@dataclass(eq=False)
class ThreadEngine:
    """An engine that builds batches in threads of this process.

    Attributes:
        options: options of the loader.
        columns: columns of the dataset.
        stages: stages of the transform.
        images: options for decoding, if samples are image files.
        depth: number of batches that are built ahead, and of threads.
        populator: background reader of the pages of mapped rows, if any.
        row_files: files whose rows are read from disk just ahead of their use; None if the kernel caches the rows.
    """

    options: LoaderOptions
    columns: DatasetColumns
    stages: TransformStages
    images: ImageOptions | None
    depth: PrefetchDepth
    populator: PagePopulator | None
    row_files: tuple[RowFile, ...] | None

    def __post_init__(self) -> None:
        options, self.plan_batches = self.options, self.depth.plan_batches
        self._counts = options.counts
        self._builder = BatchBuilder(options, self.columns, self.stages, self.images, self.depth)
        is_inline = self.images is None and not self.stages.works_in_threads and not options.is_on_gpu
        self._inline = None
        if is_inline:
            self._inline = InlineGather(self.columns, options.batch_size, self._counts, not options.channels_last)

    def batches(
        self, seed: int, epoch: int, plans: Iterator[BatchPlan], order: Order | None, share: Share
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch; closing the generator stops its background work.

        Args:
            seed: seed of the transforms.
            epoch: number of the epoch.
            plans: plans of the batches.
            order: order of the samples, if it is known; shards of a remote pack, and files that are still being packed,
                are read in this order.
            share: share of this process.
        """
        ahead: FileReadAhead | ShardReadAheads | SampleWait | None = (files_ahead := self._file_read_ahead())
        packed = self.columns.packed
        # Read this once, because the pack may be completed at any time.
        arriving = None if packed is None else packed.arriving
        populator = self.populator if arriving is None else None
        if populator is not None:
            populator.start()
        try:
            if packed is not None and arriving is not None:
                ahead = SampleWait(arriving, packed.numbers, order, epoch, self._counts)
                plans = ahead.following(split_plans(plans, 1))
            elif packed is not None and packed.remote_parts:
                # Files are decoded after the next plan has been requested, but rows are read before that.
                under_way = 0 if self.images is None else self.depth.groups + 2
                ahead = ShardReadAheads(packed, order, epoch, share, under_way)
                plans = ahead.following(split_plans(plans, self.depth.group_batches))
            elif files_ahead is not None:
                plans = announce_plans(plans, files_ahead.announce, max(_FILES_AHEAD, 4 * self.options.batch_size))
            elif self.row_files is not None and (rows := self.columns.rows) is not None:
                numbers = None if rows.numbers is None else rows.numbers.numpy()
                depth = 2 * self.depth.group_batches * self.options.batch_size
                plans = read_rows_ahead(split_plans(plans, self.depth.group_batches), self.row_files, numbers, depth)
            if packed is not None:
                plans = self.columns.checked(plans, self.depth.group_batches, self._counts)
            with reporting_loading_errors():
                rest: Iterator[BatchPlan] | None = plans
                begins_inline = self.depth.begins_inline and arriving is None
                if self._inline is not None and (begins_inline or not self.depth.threads):
                    rest = yield from self._gather_inline(self._inline, plans)
                if rest is not None:
                    yield from self._build(self._builder.of_epoch(seed, epoch, files_ahead), rest, ahead)
        finally:
            if ahead is not None:
                ahead.close()
            if populator is not None:
                populator.stop()

    def _gather_inline(
        self, gather: InlineGather, plans: Iterator[BatchPlan]
    ) -> Generator[Batch, None, Iterator[BatchPlan] | None]:
        """Yield batches gathered in the caller's thread; return the remaining plans once a thread would be faster."""
        clock, convinced, asked = time.perf_counter, 0, time.perf_counter()
        for plan in plans:
            given, check_s = 0, clock() - asked
            with closing(gather.batches(plan)) as lists:
                for made_s, batches in lists:
                    given, spent_s, check_s = given + len(batches), made_s + check_s, 0.0
                    left = clock()
                    while batches:
                        yield batches.pop()
                    convinced = convinced + 1 if min(spent_s, clock() - left) > _HAND_OVER_S else 0
                    if convinced == _CONVINCED and self.depth.threads:
                        return itertools.chain([plan.slice(given)] if given < len(plan.sizes) else [], plans)
            asked = clock()
        return None

    def _build(
        self,
        builder: BatchBuilder,
        plans: Iterator[BatchPlan],
        ahead: FileReadAhead | ShardReadAheads | SampleWait | None,
    ) -> Generator[Batch, None, None]:
        part = "decode" if self.images else "augment" if self.stages.works_in_threads else "gather"
        pool = ThreadPool(
            split_plans(plans, self.depth.group_batches),
            builder,
            self.depth.threads,
            self.depth.groups,
            lambda wait_s: self._counts.add(part, 0, 0, 0.0, wait_s),
        )
        pinned = builder.pinned
        with closing(pool):
            try:
                pool.start()
                with closing(self._host_batches(pool) if pinned is None else self._sent(pool, pinned)) as ready:
                    yield from ready
            finally:
                # Close the read-ahead first: a worker thread may wait for one of its files, shards or samples.
                if ahead is not None:
                    ahead.close()

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
        def groups() -> Iterator[tuple[list[Batch], torch.Tensor | None]]:
            while (group := self._take(pool)) is not None:
                pool.make_room()
                yield group.batches, group.buffer

        transfer = DeviceTransfer(self.options.device, pinned, self._counts)
        send_all = send_decoded if self.images is not None and self.images.is_on_device else send
        yield from send_all(transfer, groups(), lambda ahead: ahead > self.depth.group_batches or not pool.ready())

    def _take(self, pool: ThreadPool) -> BatchGroup | None:
        ready = pool.ready()
        if self.depth.threads:
            self._counts.queued += ready
            self._counts.queue_room += self.depth.groups
        started = time.perf_counter()
        while True:
            try:
                group = pool.take(_TICK_S)
            except queue.Empty:
                meters.publish(meters.DataWait(self._counts, time.perf_counter() - started))
                continue
            if group is not None:
                group.batches[0].was_ready = bool(ready)
            return group

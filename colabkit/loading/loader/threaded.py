"""Batches are gathered, decoded, cut and transformed in this process: by threads, or where they are asked for.

Rows that lie in memory are gathered faster than a thread can hand them over. So the first ones are made where they are
asked for, and a thread takes over when it can work while the user does: when both take longer than a hand-over.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from colabkit.foundation import ColabkitError, meters
from colabkit.loading.augment.draws import Draws
from colabkit.loading.loader.decoding import BadSamples, ImageDecoding
from colabkit.loading.loader.direct import DirectRows
from colabkit.loading.loader.failing import failed
from colabkit.loading.loader.feeds import Feed
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.kept import KeptRows
from colabkit.loading.loader.making import BatchMaker, row_bytes_of
from colabkit.loading.loader.paging import MappedRows, Populating, looked_ahead
from colabkit.loading.loader.portions import Portion, parted, told_early
from colabkit.loading.loader.reading import ReadingAhead
from colabkit.loading.loader.slots import Memory, PinnedFields, PinnedSlots, RecycledFields, RecycledSlots, aligned
from colabkit.loading.loader.stages import Stages
from colabkit.loading.loader.transfer import DeviceTransfer, Taken, sent
from colabkit.loading.loader.workers import Batch, Group, Workers, made_here
from colabkit.packs import FileDataset

_TICK_S = 0.25  # how often a waiting user is told of
_FILES_AHEAD = 512
_HAND_OVER_S = 2e-4
_CONVINCED = 3  # groups in a row that would have paid for a thread


@dataclass(frozen=True)
class Depth:
    """How much is made ahead.

    Attributes:
        portion_batches: batches that are planned together at most.
        group_batches: batches that threads make together at most.
        groups: such groups under way or waiting.
        threads: that make them; with 0 batches are made where they are asked for.
        begins_here: whether the first batches are, too.
    """

    portion_batches: int
    group_batches: int
    groups: int
    threads: int
    begins_here: bool


@dataclass(frozen=True)
class Images:
    """Samples that have to be decoded: what `ImageDecoding` needs, for every epoch."""

    row_shape: tuple[int, int, int] | None
    fit: bool
    kept: KeptRows | None
    bad: BadSamples


class InThreads:
    """Batches are gathered, decoded, cut and transformed by threads of this process.

    Attributes:
        portion_batches: how many batches are planned together at most.

    Args:
        feed: what batches consist of.
        stages: what is done to the samples in threads.
        images: how samples are decoded, if they are image files.
        depth: how much is made ahead.
        batch_size: samples of a batch.
        device: where batches go.
        counts: the loader's meters.
        populating: brings a map's pages into memory meanwhile; None for none.
        on_disk: where rows lie that are fetched from disk just ahead of their use; None where the kernel keeps them.
    """

    def __init__(
        self,
        feed: Feed,
        stages: Stages,
        images: Images | None,
        depth: Depth,
        batch_size: int,
        device: torch.device,
        counts: meters.LoaderMeters,
        populating: Populating | None,
        on_disk: tuple[MappedRows, ...] | None,
    ) -> None:
        self.portion_batches = depth.portion_batches
        self._feed = feed
        self._stages = stages
        self._images = images
        self._depth = depth
        self._batch_size = batch_size
        self._device = device
        self._counts = counts
        self._populating = populating
        self._on_disk = on_disk
        samples = min(depth.group_batches * (batch_size + 1), max(1, feed.count))  # a sampler may ask for more
        sizes = [samples * row_bytes for row_bytes in row_bytes_of(feed, stages, self._decoding(None))]
        self._pinned = PinnedSlots(sum(map(aligned, sizes)), device) if device.type == "cuda" else None
        keep = depth.groups + 2
        self._memory: Memory = RecycledFields(sizes, keep) if self._pinned is None else PinnedFields(self._pinned)
        self._results = RecycledSlots(0, keep)
        is_direct = images is None and not stages.works_in_threads and device.type == "cpu"
        self._direct = DirectRows(feed, batch_size, counts) if is_direct else None

    def batches(self, seed: int, epoch: int, portions: Iterator[Portion]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch."""
        ahead = self._ahead()
        if self._populating is not None:
            self._populating.start()
        try:
            if ahead is not None:
                portions = told_early(portions, ahead.coming, max(_FILES_AHEAD, 4 * self._batch_size))
            elif self._on_disk is not None and isinstance(self._feed.samples, RowGather):
                numbers = self._feed.samples.numbers
                depth = 2 * self._depth.group_batches * self._batch_size
                few = parted(portions, self._depth.group_batches)
                portions = looked_ahead(few, self._on_disk, None if numbers is None else numbers.numpy(), depth)
            make = partial(
                BatchMaker,
                self._feed,
                self._stages,
                self._decoding(ahead),
                self._memory,
                self._results,
                lambda portion: Draws(seed, epoch, portion.positions),
                self._depth.threads,
                self._counts,
            )
            left: Iterator[Portion] | None = portions
            if self._depth.begins_here or not self._depth.threads:
                left = yield from self._made_here(make() if self._direct is None else self._direct, portions)
            if left is not None:
                yield from self._made_ahead(make(), left, ahead)
        finally:
            if ahead is not None:
                ahead.close()
            if self._populating is not None:
                self._populating.stop()

    def _made_here(
        self, maker: BatchMaker | DirectRows, portions: Iterator[Portion]
    ) -> Generator[Batch, None, Iterator[Portion] | None]:
        """Yield batches made in the caller's thread; return those that are left when a thread would pay, else None."""
        clock, convinced = time.perf_counter, 0
        can_pay = self._depth.threads > 0 and isinstance(maker, DirectRows)  # which leaves no batch out
        while (portion := _next_of(portions)) is not None:
            given = 0
            with closing(_lists_here(maker, portion)) as lists:
                for made_s, batches in lists:
                    given += len(batches)
                    left = clock()
                    while batches:
                        yield batches.pop()
                    convinced = convinced + 1 if min(made_s, clock() - left) > _HAND_OVER_S else 0
                    if convinced == _CONVINCED and can_pay:
                        rest = [portion.part(given)] if given < len(portion.sizes) else []
                        return itertools.chain(rest, portions)
        return None

    def _made_ahead(
        self, maker: BatchMaker, portions: Iterator[Portion], ahead: ReadingAhead | None
    ) -> Generator[Batch, None, None]:
        """Yield batches that threads make."""
        portions = parted(portions, self._depth.group_batches)
        part = "decode" if self._images else "augment" if self._stages.works_in_threads else "gather"
        workers = Workers(
            portions, maker, self._depth.threads, self._depth.groups, lambda s: self._counts.add(part, 0, 0, 0.0, s)
        )
        try:
            pinned = self._pinned
            with closing(self._host_batches(workers) if pinned is None else self._sent(workers, pinned)) as ready:
                yield from ready
        finally:
            if ahead is not None:
                ahead.close()  # first, or a worker would wait for a file that does not come
            workers.close()

    def _ahead(self) -> ReadingAhead | None:
        files = self._feed.samples
        if self._images is None or not isinstance(files, FileDataset) or not files.source.can_hang:
            return None
        kept = self._images.kept
        if kept is not None and kept.is_whole:
            return None
        return ReadingAhead(files, lambda number: kept is not None and kept.row(number) is not None, self._counts)

    def _decoding(self, ahead: ReadingAhead | None) -> ImageDecoding | None:
        if self._images is None:
            return None
        images, files = self._images, self._feed.samples
        return ImageDecoding(
            files,  # type: ignore[arg-type]
            images.row_shape,
            images.fit,
            self._stages.geometry,
            images.kept,
            ahead,
            images.bad,
            self._counts,
        )

    def _host_batches(self, workers: Workers) -> Generator[Batch, None, None]:
        while True:
            group, was_ready = self._take(workers)
            if group is None:
                return
            batches, group.batches = group.batches[::-1], []
            batches[-1].was_ready = was_ready
            del group
            while batches:
                if len(batches) == 1:
                    workers.make_room()
                yield batches.pop()

    def _sent(self, workers: Workers, pinned: PinnedSlots) -> Generator[Batch, None, None]:
        """Yield batches that were sent to a GPU."""

        def take() -> Taken:
            group, was_ready = self._take(workers)
            if group is None:
                return Taken((), None, was_ready)
            workers.make_room()
            return Taken(group.batches, group.buffer, was_ready)

        few = self._depth.group_batches
        transfer = DeviceTransfer(self._device, pinned, self._counts)
        yield from sent(transfer, take, lambda count: count <= few and bool(workers.ready() or not count))

    def _take(self, workers: Workers) -> tuple[Group | None, bool]:
        """Return the next group, and whether it was ready; tell listeners while waiting."""
        ready = workers.ready()
        self._counts.queued += ready
        self._counts.queue_room += self._depth.groups
        started = time.perf_counter()
        while True:
            try:
                return workers.take(_TICK_S), bool(ready)
            except queue.Empty:
                meters.publish(meters.Waiting(self._counts, time.perf_counter() - started))
            except Exception as error:
                _raise(error)


def _raise(error: BaseException) -> NoReturn:
    """Raise an error as the user gets it: our own and interrupts as they are, others as one of ours."""
    if isinstance(error, ColabkitError) or not isinstance(error, Exception):
        raise error
    raise failed(error) from error


def _next_of(portions: Iterator[Portion]) -> Portion | None:
    """Return the next portion, None after the last; what is the user's may fail here, such as a sampler."""
    try:
        return next(portions, None)
    except Exception as error:
        _raise(error)


def _lists_here(maker: BatchMaker | DirectRows, portion: Portion) -> Generator[tuple[float, list[Batch]], None, None]:
    """Yield batches that are made together in the caller's thread, backwards, and the seconds it took."""
    if isinstance(maker, DirectRows):
        try:
            yield from maker.made(portion)
        except Exception as error:
            _raise(error)
        return
    began = time.perf_counter()
    group = made_here(maker, portion)
    group.batches.reverse()
    if group.batches:
        group.batches[-1].was_ready = False
    yield time.perf_counter() - began, group.batches
    if group.error is not None:
        _raise(group.error)

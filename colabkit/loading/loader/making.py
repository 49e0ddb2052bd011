"""Batches are made from a feed: rows gathered, images decoded, crops cut, transforms applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.loading.augment.draws import Draws
from colabkit.loading.loader.decoding import ImageDecoding, cut_rows
from colabkit.loading.loader.failing import failing_in, place_in
from colabkit.loading.loader.feeds import Feed
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.portions import Numbers, Portion
from colabkit.loading.loader.slots import Memory, RecycledSlots
from colabkit.loading.loader.stages import Stages
from colabkit.loading.loader.workers import Batch, Group
from colabkit.packs import stack_samples

_PIECES_A_THREAD = 4  # so that no thread has nothing to do while another makes the rest of a batch
_LEAST_PIECE = 4


class BatchMaker:
    """Makes the batches of one epoch.

    Args:
        feed: what they consist of.
        stages: what is done to the samples in worker threads.
        decoding: decodes the samples, if they are image files.
        memory: lends memory for the fields that are rows.
        results: lend memory for what transforms make.
        draws_of: gives the random numbers of positions.
        threads: how many work at it.
        meters: count the parts `gather`, `decode`, `augment` and `read`.
    """

    def __init__(
        self,
        feed: Feed,
        stages: Stages,
        decoding: ImageDecoding | None,
        memory: Memory,
        results: RecycledSlots,
        draws_of: Callable[[Portion], Draws],
        threads: int,
        meters: LoaderMeters,
    ) -> None:
        self._feed = feed
        self._stages = stages
        self._decoding = decoding
        self._memory = memory
        self._results = results
        self._draws_of = draws_of
        self._threads = max(1, threads)
        self._meters = meters
        self._label = feed.label_place
        self._columns = [*feed.columns.values()]
        self._made_shape = _made_shape(feed, stages, decoding)
        self._row_bytes = row_bytes_of(feed, stages, decoding)
        # What only has to be gathered: the first field, unless it is made here, and the others.
        self._gathered_bytes = sum(self._row_bytes[int(self._made_shape is not None) :])

    def begin(self, portion: Portion) -> Group:
        """Return a group with all fields gathered that only have to be, and the pieces that are left to do."""
        count = len(portion.numbers)
        memories, buffer = self._memory.lend([count * row_bytes for row_bytes in self._row_bytes])
        group = Group(portion, buffer)
        numbers = torch.from_numpy(portion.numbers)
        started, read_s = time.perf_counter(), 0.0
        for place, (column, memory) in enumerate(zip(self._columns, memories, strict=True)):
            if place == 0 and self._made_shape is not None:
                group.values.append(memory.view(count, *self._made_shape).permute(0, 3, 1, 2))
            elif isinstance(column, RowGather):
                group.values.append(column.gather(numbers, memory))
            else:
                assert callable(column)
                began = time.perf_counter()
                group.values.append(column(portion.numbers))
                read_s += time.perf_counter() - began
                self._meters.add("read", count if place == 0 else 0, 0, time.perf_counter() - began)
        if self._gathered_bytes:
            gather_s = time.perf_counter() - started - read_s
            self._meters.add("gather", count, count * self._gathered_bytes, gather_s)
        if self._decoding is not None or self._stages.works_in_threads:
            group.draws = self._draws_of(portion)
        if self._decoding is not None or self._stages.geometry or self._stages.by_slice:
            group.pieces = [*self._pieces(portion)]
        return group

    def _pieces(self, portion: Portion) -> Iterator[tuple[int, int]]:
        """Yield samples from which to which are made apart; none lies in two batches, or an error would spoil both."""
        start = 0
        for size in portion.sizes:
            step = max(_LEAST_PIECE, -(-size // (_PIECES_A_THREAD * self._threads)))
            yield from ((place, min(place + step, start + size)) for place in range(start, start + size, step))
            start += size

    def fill(self, group: Group, start: int, stop: int) -> None:
        """Make the samples from `start` to `stop`."""
        draws = group.draws.part(start, stop)
        if self._decoding is not None:
            self._decoding.fill(group, start, stop, draws)
        elif self._stages.geometry is not None:
            self._cut(group, start, stop, draws)
        if self._stages.by_slice is not None:
            images = group.values[0][start:stop]
            numbers = group.portion.numbers[start:stop]
            with self._failing_in(draws, numbers), self._meters.busy("augment", stop - start, images.nbytes):
                made, _ = self._stages.by_slice.apply(images, None, draws)
                self._result(group, made)[start:stop] = made

    def finish(self, group: Group, samples: int) -> Iterator[Batch]:
        """Yield the batches that end within the first `samples` samples."""
        if group.result is not None:
            group.values[0] = group.result
        portion, start = group.portion, 0
        if samples == len(portion.numbers) and not group.bad and self._stages.by_batch is None:
            yield from _parted(group)
            return
        for size, reached in zip(portion.sizes, portion.reached, strict=True):
            stop = start + size
            if stop > samples:
                break
            batch = Batch(
                [stack_samples(value[start:stop]) for value in group.values], portion.positions[start:stop], reached
            )
            if bad := [number - start for number in group.bad if start <= number < stop]:
                _leave_out(batch, bad)
            start = stop
            if not len(batch.positions):
                continue  # all of it is bad
            if self._stages.by_batch is not None:
                numbers = np.delete(portion.numbers[stop - size : stop], bad)
                with self._failing_in(group.draws, numbers):
                    self._apply_by_batch(batch.values, replace(group.draws, positions=batch.positions))
            yield batch
        group.values, group.result = [], None  # or a buffer could not be used again while one of its batches is held

    def _failing_in(self, draws: Draws, numbers: Numbers) -> AbstractContextManager[None]:
        return failing_in(lambda: place_in(draws.epoch, numbers.tolist(), self._feed.name_of))

    def _apply_by_batch(self, values: list[Any], draws: Draws) -> None:
        assert self._stages.by_batch is not None
        labels = None if self._label is None else values[self._label]
        with self._meters.busy("augment", len(values[0]), 0):
            values[0], labels = self._stages.by_batch.apply(values[0], labels, draws)
        if self._label is not None:
            values[self._label] = labels

    def _cut(self, group: Group, start: int, stop: int, draws: Draws) -> None:
        """Cut the samples' boxes out of their rows as they lie in the map."""
        rows, geometry = self._feed.samples, self._stages.geometry
        assert isinstance(rows, RowGather)
        assert geometry is not None
        out = group.values[0].permute(0, 2, 3, 1).numpy()
        with self._meters.busy("augment", stop - start, out[start:stop].nbytes):
            cut_rows(rows.pixels(group.portion.numbers[start:stop]), geometry, draws, out[start:stop])

    def _result(self, group: Group, made: Tensor) -> Tensor:
        """Return memory for what transforms make of the whole group, like what they made of a piece."""
        with group.lock:
            if group.result is None:
                count = len(group.portion.numbers)
                memory = self._results.lend(count * made[0].nbytes)
                if made.ndim == 4 and made.is_contiguous(memory_format=torch.channels_last):
                    _, channels, height, width = made.shape
                    group.result = memory.view(made.dtype).view(count, height, width, channels).permute(0, 3, 1, 2)
                else:
                    group.result = memory.view(made.dtype).view(count, *made.shape[1:])
            return group.result


def row_bytes_of(feed: Feed, stages: Stages, decoding: ImageDecoding | None) -> list[int]:
    """Return the bytes that a sample takes in a group's memory, for each field; 0 for what is no row."""
    sizes = [column.row_bytes if isinstance(column, RowGather) else 0 for column in feed.columns.values()]
    if (shape := _made_shape(feed, stages, decoding)) is not None:
        sizes[0] = prod(shape)
    return sizes


def _made_shape(feed: Feed, stages: Stages, decoding: ImageDecoding | None) -> tuple[int, int, int] | None:
    """Return `[h, w, C]` of a sample that is decoded or cut piece by piece; None if it is gathered as it lies."""
    if decoding is not None:
        return decoding.out_shape
    if stages.geometry is None:
        return None
    rows = feed.samples
    assert isinstance(rows, RowGather)
    height, width = stages.geometry.size or rows.shape[:2]
    return height, width, rows.shape[2]


def _parted(group: Group) -> Iterator[Batch]:
    """Yield the batches of a group with nothing left to do."""
    portion, sizes, start = group.portion, group.portion.sizes, 0
    parts = [
        torch.split_with_sizes(value, sizes) if isinstance(value, Tensor) else list(sliced(value, sizes))
        for value in group.values
    ]
    group.values, group.result = [], None  # or a buffer could not be used again while one of its batches is held
    for size, reached, *values in zip(sizes, portion.reached, *parts, strict=True):
        yield Batch(values, portion.positions[start : start + size], reached)
        start += size


def sliced(values: list[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """Yield the values of each batch, of as many as its size."""
    start = 0
    for size in sizes:
        yield stack_samples(values[start : start + size])
        start += size


def _leave_out(batch: Batch, bad: list[int]) -> None:
    """Take some samples out of a batch."""
    good = np.setdiff1d(np.arange(len(batch.positions)), bad)
    batch.values = [
        value[torch.from_numpy(good)] if isinstance(value, Tensor) else [value[place] for place in good.tolist()]
        for value in batch.values
    ]
    batch.positions = batch.positions[good]

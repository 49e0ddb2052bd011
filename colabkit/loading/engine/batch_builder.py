"""Build batches from columns: gather rows, decode images, crop, and apply transforms."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.loading.augment.compose import geometry_of, split_steps, steps_of
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.joint import JointTransform, split_joint
from colabkit.loading.augment.transform import Draws, Transform
from colabkit.loading.engine.batches import Batch, BatchGroup, BatchPlan, split_batches, split_values
from colabkit.loading.engine.columns import ColumnReader, DatasetColumns
from colabkit.loading.engine.device_decoder import device_decoder
from colabkit.loading.engine.gather import FieldBuffers, GatherSlots, PageableSlots, RowGather, copy_pixels
from colabkit.loading.engine.image_decoders import ImageDecoder, ImageOptions, crop_each
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.read_ahead import FileReadAhead
from colabkit.loading.engine.user_code import describe_samples, reporting_errors
from colabkit.loading.inspection import bytes_in
from colabkit.packs import Indices, stack_samples

# Number of pieces per thread; several, so that no thread idles while another builds the rest of a batch.
_PIECES_A_THREAD = 4
# Minimum number of samples in a piece, unless some threads would then idle. Threads run Python for each piece one at a
# time, so small pieces limit the number of threads that can decode at once.
_LEAST_PIECE = 16
# Maximum number of bytes to gather in one call. Two buffers of this size fit in an L3 cache.
_GATHERED_BYTES = 5 << 20
# Maximum number of bytes to read from a pack in one call. Each call decompresses a chunk of an HDF5 file again.
_READ_BYTES = 256 << 20
# Maximum row size in bytes for which a field is gathered for all batches of a plan in one call.
_SMALL_ROW = 256


@dataclass(frozen=True)
class TransformStages:
    """The steps of a transform, grouped by where and when they run; each group is None if it is empty.

    Attributes:
        geometry: crops and flips that worker threads apply while they gather or decode samples.
        by_slice: steps that worker threads apply to slices of a batch, without its labels.
        by_batch: colabkit transforms that need the complete batch or its labels; a worker thread applies them.
        at_last: steps that run in the user's thread when a batch is requested: a custom function and the steps
            after it, and steps on a GPU.
        moves_boxes: whether bounding boxes in the labels move with `geometry`.
    """

    geometry: Geometry | None = None
    by_slice: Transform | None = None
    by_batch: Transform | None = None
    at_last: Callable[..., Any] | None = None
    moves_boxes: bool = False

    @property
    def draws_globally(self) -> bool:
        """Whether the steps in `at_last` may draw from the global generators."""
        return self.at_last is not None and not all(isinstance(step, Transform) for step in steps_of(self.at_last))

    def apply_at_last(self, values: list[Any], place: int | None, draws: Draws, counts: LoaderMeters) -> None:
        """Apply the steps in `at_last` to the first field of a batch, and to its labels at `place`, if any."""
        assert self.at_last is not None
        labels = None if place is None else values[place]
        began, size = time.perf_counter(), bytes_in(values[0])
        if isinstance(self.at_last, Transform):
            values[0], labels = self.at_last.apply(values[0], labels, draws)
        else:
            values[0] = self.at_last(values[0])
        if place is not None:
            values[place] = labels
        # Count only wall time: CPU seconds predict the effect of more workers, but this is not a worker thread.
        counts.add("augment", len(draws.positions), size, time.perf_counter() - began)

    @property
    def works_in_threads(self) -> bool:
        """Whether worker threads apply a part of the transform."""
        return bool(self.geometry or self.by_slice or self.by_batch)


def split_transform(
    transform: Callable[..., Any] | None, *, on_device: bool, by_sample: bool, resized: bool
) -> TransformStages:
    """Split a transform into stages.

    Args:
        transform: a transform of colabkit, or any callable that takes a batch of images.
        on_device: whether batches go to a GPU, which then runs all steps that work on a batch.
        by_sample: whether crops have to run sample by sample, because samples differ in size.
        resized: whether crops that resize run sample by sample, from the stored rows.
    """
    if transform is None:
        return TransformStages()
    if not isinstance(transform, Transform):
        return TransformStages(at_last=transform)
    # Masks cannot follow, because those of images of different sizes differ in size.
    joint = transform if by_sample and isinstance(transform, JointTransform) and transform.labels == "boxes" else None
    geometry, rest = geometry_of(transform) if joint is None else split_joint(joint)
    if geometry is None or not (by_sample or (resized and geometry.resizes and not on_device)):
        geometry, rest, joint = None, transform, None
    if rest is None or on_device:
        # On a GPU, these steps run in the stream of the model. In a separate stream, they would not end sooner, because
        # they would compete with the model for the same processors, and each batch would need a second destination.
        return TransformStages(geometry, at_last=rest, moves_boxes=joint is not None)
    by_slice, others = split_steps(rest, _takes_any_slice)
    by_batch, at_last = None, None
    if others is not None:
        by_batch, at_last = split_steps(others, lambda step: isinstance(step, Transform))  # type: ignore[arg-type]
    return TransformStages(geometry, by_slice, by_batch, at_last, joint is not None)


def _takes_any_slice(step: object) -> bool:
    return isinstance(step, Transform) and not step.whole_batch and not step.changes_labels


@dataclass(frozen=True)
class PrefetchDepth:
    """The number of batches that are built ahead, and of threads that build them.

    Attributes:
        plan_batches: maximum number of batches that are planned together.
        group_batches: maximum number of batches that threads build together, as one group.
        groups: maximum number of groups in progress or waiting.
        threads: number of threads that build groups; if 0, the caller's thread builds them.
        begins_inline: whether the first batches are built in the caller's thread even if there are threads.
    """

    plan_batches: int
    group_batches: int
    groups: int
    threads: int
    begins_inline: bool


@dataclass(eq=False)
class BatchBuilder:
    """A builder of the batches of an epoch; threads may call `fill` for different pieces, and `finish`, concurrently.

    Attributes:
        options: options of the loader.
        columns: columns of the dataset.
        stages: stages of the transform; the builder applies those of worker threads.
        images: options for decoding, if samples are image files.
        depth: number of batches that are built ahead, and of threads.
        decoder: decoder of the epoch, if samples are image files.
        seed_and_epoch: seed and epoch of the samples' random numbers.
        pinned: pool of pinned buffers for batches that go to a GPU, else None.
    """

    options: LoaderOptions
    columns: DatasetColumns
    stages: TransformStages
    images: ImageOptions | None
    depth: PrefetchDepth
    decoder: ImageDecoder | None = None
    seed_and_epoch: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        columns, stages, depth = self.columns, self.stages, self.depth
        self._threads = max(1, depth.threads)
        self._counts = self.options.counts
        self._label = columns.label_place
        self._made = self._made_shape()
        self._is_contiguous = not self.options.channels_last
        row_bytes = [column.row_bytes if isinstance(column, RowGather) else 0 for column in columns.by_name.values()]
        is_on_device = self.images is not None and self.images.is_on_device
        made_bytes = 0 if self._made is None or is_on_device else prod(self._made)
        self._field_bytes = row_bytes if self._made is None else [made_bytes, *row_bytes[1:]]
        # Include the stored rows of the first field, although crops read them later, in `fill`. Image files are not
        # rows; they count as read.
        self._gathered_bytes = sum(row_bytes)
        self._has_pieces = bool(self.images or stages.geometry or stages.by_slice)
        under_way = self.options.batch_size * depth.group_batches * depth.groups
        self._least_piece = max(1, min(_LEAST_PIECE, under_way // (2 * self._threads)))
        samples = min(depth.group_batches * self.options.batch_size, max(1, columns.count))
        keep = depth.groups + 2
        self._buffers = FieldBuffers([samples * size for size in self._field_bytes], keep, self.options.device)
        # Reusable memory for the results of transforms.
        self._results = PageableSlots(0, keep)
        self.pinned = self._buffers.pinned

    def _made_shape(self) -> tuple[int, int, int] | None:
        """Return the shape `[h, w, C]` of decoded or cropped samples; None if samples are only gathered."""
        images, rows, geometry = self.images, self.columns.rows, self.stages.geometry
        shape: tuple[int, ...]
        if images is not None:
            shape = images.row_shape or (0, 0, images.files.channels)
        elif geometry is not None and rows is not None:
            shape = tuple(rows.shape)
        else:
            return None
        height, width = (geometry and geometry.size) or shape[:2]
        return height, width, shape[2]

    def of_epoch(self, seed: int, epoch: int, ahead: FileReadAhead | None) -> BatchBuilder:
        """Return a builder for one epoch, with the same buffers; `ahead` reads the files of a remote source."""
        builder = copy.copy(self)
        builder.seed_and_epoch = seed, epoch
        if self.images is not None:
            geometry, counts = self.stages.geometry, self._counts
            if self.images.is_on_device:
                builder.decoder = device_decoder(self.images, geometry, ahead, counts, self.options)
            else:
                builder.decoder = self.images.decoder(geometry, ahead, counts)
        return builder

    def begin(self, plan: BatchPlan) -> BatchGroup:
        """Start a group: gather all fields that need no other work, and list the pieces that remain."""
        count = len(plan.indices)
        memories, buffer = self._buffers.lend([count * size for size in self._field_bytes])
        group = BatchGroup(plan, buffer)
        indices = torch.from_numpy(plan.indices)
        started, read_s = time.perf_counter(), 0.0
        for place, (column, memory) in enumerate(zip(self.columns.by_name.values(), memories, strict=True)):
            # The first field is made contiguous piece by piece, after its transforms.
            is_stored = not self._is_contiguous or (place == 0 and self._has_pieces)
            if place == 0 and self.images is not None and self.images.is_on_device:
                group.values.append([None] * count)
            elif place == 0 and self._made is not None:
                group.values.append(memory.view(count, *self._made).permute(0, 3, 1, 2))
            elif isinstance(column, RowGather):
                gather = column.gather if is_stored else column.gather_contiguous
                group.values.append(gather(indices, memory))
            elif isinstance(column, ColumnReader):
                began = time.perf_counter()
                group.values.append(column.read(plan.indices, not is_stored))
                read_s += time.perf_counter() - began
                self._counts.add("read", count if place == 0 else 0, 0, time.perf_counter() - began)
        if self._gathered_bytes:
            gather_s = time.perf_counter() - started - read_s
            self._counts.add("gather", count, count * self._gathered_bytes, gather_s)
        if self.decoder is not None or self.stages.works_in_threads:
            group.draws = Draws(*self.seed_and_epoch, plan.positions)
        if self._has_pieces:
            group.pieces = [*self._pieces(plan)]
        return group

    def _pieces(self, plan: BatchPlan) -> Iterator[tuple[int, int]]:
        """Yield the pieces of a plan; a piece never spans two batches, so that an error affects only one batch."""
        for start, stop in plan.spans:
            step = max(self._least_piece, -(-(stop - start) // (_PIECES_A_THREAD * self._threads)))
            yield from ((place, min(place + step, stop)) for place in range(start, stop, step))

    def fill(self, group: BatchGroup, start: int, stop: int) -> None:
        """Build the samples from `start` to `stop`: decode, crop and transform them."""
        draws = group.draws.part(start, stop)
        rows, geometry = self.columns.rows, self.stages.geometry
        if self.decoder is not None:
            self.decoder.fill(group, start, stop, draws)
        elif rows is not None and geometry is not None:
            out = group.values[0].permute(0, 2, 3, 1).numpy()[start:stop]
            with self._counts.busy("augment", stop - start, out.nbytes):
                crop_each(rows.pixels(group.plan.indices[start:stop]), geometry, draws, out)
        if self.stages.by_slice is not None:
            images, indices = group.values[0][start:stop], group.plan.indices[start:stop]
            with self._reporting_errors(draws, indices), self._counts.busy("augment", stop - start, images.nbytes):
                made, _ = self.stages.by_slice.apply(images, None, draws)
                copy_pixels(made, self._result(group, made)[start:stop])
        elif self._is_contiguous and isinstance(group.values[0], Tensor) and not group.values[0].is_contiguous():
            images = group.values[0][start:stop]
            with self._counts.busy("augment" if self.decoder is None else "decode", 0, 0):
                copy_pixels(images, self._result(group, images)[start:stop])

    def finish(self, group: BatchGroup, samples: int) -> Iterator[Batch]:
        """Yield the batches that end within the first `samples` samples."""
        if self.decoder is not None and samples >= group.plan.sizes[0]:
            self.decoder.finish(group)
        if group.result is not None:
            group.values[0] = group.result
        plan = group.plan
        if samples == len(plan.indices) and not group.bad and self.stages.by_batch is None:
            batches = split_batches(plan, group.values)
            _release_memory(group)
            yield from batches
            return
        for (start, stop), end in zip(plan.spans, plan.ends, strict=True):
            if stop > samples:
                break
            # As in `split_batches`, each batch has its own version counter.
            values = [
                value[start:stop].data if isinstance(value, Tensor) else stack_samples(value[start:stop])
                for value in group.values
            ]
            batch = Batch(values, plan.positions[start:stop], end)
            bad = [place - start for place in group.bad if start <= place < stop]
            if bad and self.decoder is not None:
                with self.decoder.on_stream():
                    _leave_out(batch, bad)
            if not len(batch.positions):
                continue
            if self.stages.by_batch is not None:
                draws = replace(group.draws, positions=batch.positions)
                with self._reporting_errors(draws, np.delete(plan.indices[start:stop], bad)):
                    self._apply_by_batch(self.stages.by_batch, batch.values, draws)
            yield batch
        _release_memory(group)

    def _reporting_errors(self, draws: Draws, indices: Indices) -> AbstractContextManager[None]:
        name_of = self.columns.name_of
        return reporting_errors(lambda: f"transforming {describe_samples(draws.epoch, indices.tolist(), name_of)}")

    def _apply_by_batch(self, transform: Transform, values: list[Any], draws: Draws) -> None:
        labels = None if self._label is None else values[self._label]
        with self._counts.busy("augment", len(values[0]), 0):
            values[0], labels = transform.apply(values[0], labels, draws)
        if self._label is not None:
            values[self._label] = labels

    def _result(self, group: BatchGroup, made: Tensor) -> Tensor:
        """Return memory for the transformed group, with the dtype of the transformed piece `made`.

        The memory is channels-last if `made` is and the loader keeps that format, otherwise contiguous.
        """
        with group.lock:
            if group.result is None:
                count = len(group.plan.indices)
                memory = self._results.lend(count * made[0].nbytes)
                is_last = made.ndim == 4 and made.is_contiguous(memory_format=torch.channels_last)
                if is_last and not self._is_contiguous:
                    _, channels, height, width = made.shape
                    group.result = memory.view(made.dtype).view(count, height, width, channels).permute(0, 3, 1, 2)
                else:
                    group.result = memory.view(made.dtype).view(count, *made.shape[1:])
            return group.result


def _release_memory(group: BatchGroup) -> None:
    group.values, group.result = [], None


def _leave_out(batch: Batch, bad: list[int]) -> None:
    good = np.setdiff1d(np.arange(len(batch.positions)), bad)
    batch.values = [
        value[torch.from_numpy(good)] if isinstance(value, Tensor) else [value[place] for place in good.tolist()]
        for value in batch.values
    ]
    batch.positions = batch.positions[good]


class InlineGather:
    """Gathers batches of rows in the caller's thread, a few batches at a time.

    Gathering a few megabytes takes less than a millisecond, so the overhead per batch matters. Two small, alternating
    buffers stay in the processor's cache: the user holds one while the other is filled.

    Args:
        columns: columns of the dataset, without image files.
        batch_size: samples per batch.
        counts: meters of the loader, for `gather` and `read`.
        is_contiguous: whether images are returned contiguous instead of channels-last.
    """

    def __init__(self, columns: DatasetColumns, batch_size: int, counts: LoaderMeters, is_contiguous: bool) -> None:
        self._columns = [*columns.by_name.values()]
        self._counts = counts
        self._is_contiguous = is_contiguous
        row_bytes = {
            place: column.row_bytes for place, column in enumerate(self._columns) if isinstance(column, RowGather)
        }
        self._row_bytes = sum(row_bytes.values())
        read_bytes = sum(column.row_bytes for column in self._columns if isinstance(column, ColumnReader))
        gathered = _GATHERED_BYTES // (batch_size * max(1, *row_bytes.values(), 1))
        self._batches_at_once = max(1, min(gathered, _READ_BYTES // (batch_size * max(1, read_bytes))))
        # Initial number of samples per slot; a slot grows for a larger group of batches.
        samples = min(self._batches_at_once * batch_size, max(1, columns.count))
        self._slots = {
            place: GatherSlots(column, samples, is_contiguous)
            for place, column in enumerate(self._columns)
            if isinstance(column, RowGather) and column.row_bytes > _SMALL_ROW
        }

    def batches(self, plan: BatchPlan) -> Generator[tuple[float, list[Batch]], None, None]:
        """Yield the seconds that each gather took, and its batches in reverse order."""
        clock, together, gather_s, given = time.perf_counter, self._batches_at_once, 0.0, 0
        sizes, positions, ends = plan.sizes, plan.positions, plan.ends
        starts = [*itertools.accumulate(sizes, initial=0)]
        steps = [*starts[:-1:together], starts[-1]]
        indices = torch.from_numpy(plan.indices)
        began = clock()
        small = {
            place: self._gather_small(column, indices, sizes)
            for place, column in enumerate(self._columns)
            if isinstance(column, RowGather) and place not in self._slots
        }
        indices_of_steps = indices.split_with_sizes([stop - start for start, stop in itertools.pairwise(steps)])
        try:
            for first, rows in zip(range(0, len(sizes), together), indices_of_steps, strict=True):
                some = sizes[first : first + together]
                values = self._gather(
                    rows, some, {place: one[first : first + together] for place, one in small.items()}
                )
                batches = [
                    Batch(fields, positions[starts[place] : starts[place + 1]], ends[place], was_ready=False)
                    for place, fields in enumerate(zip(*values, strict=True), first)
                ]
                # Release the tensors, so that a buffer can be used again once the user drops its batches.
                del values
                batches.reverse()
                made_s = clock() - began
                gather_s += made_s
                given += len(rows)
                yield made_s, batches
                began = clock()
        finally:
            self._counts.add("gather", given, given * self._row_bytes, gather_s)

    # The batches of a plan may be requested in different modes.
    @torch.inference_mode(False)
    def _gather(
        self, indices: Tensor, sizes: tuple[int, ...], small: Mapping[int, Sequence[Tensor]]
    ) -> list[Sequence[Any]]:
        values: list[Sequence[Any]] = []
        for place, column in enumerate(self._columns):
            if place in self._slots:
                values.append(self._slots[place].gather(indices, sizes))
            elif place in small:
                values.append(small[place])
            elif isinstance(column, ColumnReader):
                with self._counts.busy("read", 0, 0):
                    read = column.read(indices.numpy(), self._is_contiguous)
                values.append(split_values(read, sizes))
        return values

    @torch.inference_mode(False)
    def _gather_small(self, rows: RowGather, indices: Tensor, sizes: tuple[int, ...]) -> Sequence[Tensor]:
        found = rows.gather_new(indices)
        found = found.contiguous() if self._is_contiguous else found
        return found.unsafe_split_with_sizes(sizes)

"""A `Loader` is built: where its samples live, what makes its batches, and how much that makes ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from colabkit.foundation import InvalidOption, LoaderMeters, cannot, near_folder, usable_cpus
from colabkit.loading.augment.compose import steps_of
from colabkit.loading.augment.per_batch import PerBatch
from colabkit.loading.augment.per_sample import is_per_sample
from colabkit.loading.augment.transform import Transform, check_fill
from colabkit.loading.loader.decoding import BadSamples, row_shape_of
from colabkit.loading.loader.engines import Engine, InProcesses, OnDevice
from colabkit.loading.loader.feeds import Column, Feed, check_channels
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.kept import KeptRows
from colabkit.loading.loader.options import check_without_processes
from colabkit.loading.loader.paging import Populating, mapped_rows
from colabkit.loading.loader.portions import MADE_TOGETHER
from colabkit.loading.loader.processes import SampleWorkers
from colabkit.loading.loader.resident import Resident
from colabkit.loading.loader.stages import Stages, stages_of
from colabkit.loading.loader.threaded import Depth, Images, InThreads
from colabkit.loading.loader.tiers import Keep, Room, Tier, choose_tier, fits_on

_GROUP_BYTES = 8 << 20  # made together: two of them stay in a processor's cache
_DEVICE_GROUP_BYTES = 64 << 20
_PORTION_BATCHES = 32, 128  # planned together, as many of them as hold so many bytes
_PORTION_BYTES = 256 << 20
_LEAST_AHEAD = 4
_AHEAD_BYTES = 512 << 20


@dataclass(frozen=True)
class Asked:
    """What was asked for, as `Loader` has it, checked.

    Attributes:
        batch_size: samples of a batch.
        device: where batches go.
        transform: what is done to them.
        size: of decoded image files.
        keep: where samples shall live.
        num_workers: threads or processes; None for as many as CPUs may be used.
        prefetch_batches: how many are made ahead; None chooses.
        persistent_workers: whether processes live on between epochs.
        bad: what is done about image files that cannot be decoded.
        counts: the loader's meters.
    """

    batch_size: int
    device: torch.device
    transform: Callable[..., Any] | None
    size: tuple[int, int] | None
    keep: Keep
    num_workers: int | None
    prefetch_batches: int | None
    persistent_workers: bool
    bad: BadSamples
    counts: LoaderMeters

    @property
    def workers(self) -> int:
        """How many threads or processes may work."""
        return max(1, round(usable_cpus())) if self.num_workers is None else self.num_workers


@dataclass
class Built:
    """What makes the batches of a loader.

    Attributes:
        asked: what was asked for.
        tier: where samples live, and why.
        engine: makes the batches.
        stages: what is done to the samples, and when.
        feed: what batches consist of; None where samples are made one by one.
        row_bytes: of a sample; None if they differ.
        kept: decoded samples that are collected; None for none.
        decodes: whether samples are image files that are decoded.
    """

    asked: Asked
    tier: Tier
    engine: Engine
    stages: Stages
    feed: Feed | None = None
    row_bytes: int | None = None
    kept: KeptRows | None = None
    decodes: bool = False

    def engine_now(self) -> Engine:
        """Return what makes the next epoch: when all is decoded and the GPU has room, rows there."""
        if self.tier.name == "gpu" and self.kept is not None and self.kept.is_whole:
            assert self.feed is not None
            columns = dict(self.feed.columns)
            columns[next(iter(columns))] = self.kept.gather()
            row_bytes = prod(self.kept.shape)
            try:
                if fits_on(self.asked.device, row_bytes * self.feed.count):
                    self.engine = _on_device(self.asked, columns, row_bytes)
                    self.kept = None
                    return self.engine
            except torch.cuda.OutOfMemoryError:
                pass
            self.tier = Tier("ram", "the GPU has no room any more for what is decoded", self.tier.rows)
        return self.engine


def built_by_sample(act: str, asked: Asked, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> Built:
    """Return what makes batches sample by sample, in worker processes.

    Args:
        act: for messages.
        asked: what was asked for.
        dataset: map-style.
        collate_fn: makes a batch of samples; None for torch's.
    """
    nothing = Room(None, 0, 0)
    tier = choose_tier(act, asked.keep, nothing, row_bytes=None, count=0, is_decoded=False, is_on_disk=False)
    if not asked.workers:
        check_without_processes(act, asked.persistent_workers, ("num_workers=0", "Leave one of the two out"))
    of_sample = asked.transform if is_per_sample(asked.transform) else None
    workers = SampleWorkers(
        dataset,
        of_sample,
        collate_fn,
        asked.workers,
        asked.prefetch_batches,
        asked.device.type == "cuda",
        asked.persistent_workers,
    )
    stages = Stages() if of_sample is not None else Stages(at_last=asked.transform)
    return Built(asked, tier, InProcesses(workers, asked.device, asked.counts), stages)


def built_of_feed(act: str, asked: Asked, feed: Feed, dataset: Any, processes: int) -> Built:
    """Return what gathers or decodes batches: in threads, or on the device.

    Args:
        act: for messages.
        asked: what was asked for.
        feed: what batches consist of.
        dataset: whose feed it is.
        processes: how many share what is free.

    Raises:
        InvalidOption: if what was asked for does not fit the samples.
    """
    check_without_processes(act, asked.persistent_workers, (f"{feed.about}, which threads load", "Leave it out"))
    samples = feed.samples
    is_decoded = not (isinstance(samples, RowGather) or callable(samples))
    if not is_decoded:
        _check_rows(act, asked, feed)
    on_device = asked.device.type == "cuda"
    row_shape, by_sample = None, False
    if is_decoded:
        crops = stages_of(asked.transform, on_device=on_device, by_sample=True, resized=True).geometry
        by_sample = asked.size is None and crops is not None and crops.size is not None
        if not by_sample:
            row_shape = row_shape_of(samples, feed.count, asked.size, asked.bad)  # type: ignore[arg-type]
        by_sample = by_sample or row_shape is None
    resized = row_shape is not None or (isinstance(samples, RowGather) and samples.are_images_of_bytes)
    stages = stages_of(asked.transform, on_device=on_device, by_sample=by_sample, resized=resized)
    if stages.geometry is not None:  # which cuts bytes, one sample after the other
        check_fill(act, stages.geometry.fill)
    row_bytes = samples.row_bytes if isinstance(samples, RowGather) else None
    if row_shape is not None:
        row_bytes = prod(row_shape)
    near, is_mapped = near_folder(os.environ), feed.is_on_disk
    room = Room.here(asked.device, near, processes)
    tier = choose_tier(
        act, asked.keep, room, row_bytes=row_bytes, count=feed.count, is_decoded=is_decoded, is_on_disk=is_mapped
    )
    if tier.name == "gpu" and not is_decoded:
        return Built(asked, tier, _on_device(asked, feed.columns, row_bytes), stages, feed, row_bytes)
    images, kept = None, None
    if is_decoded:
        if row_shape is not None and tier.rows:
            where: Literal["ram", "disk"] = "disk" if tier.name == "disk" else "ram"
            kept = KeptRows(feed.count, row_shape, tier.rows, where, near)
        images = Images(row_shape, asked.size is not None, kept, asked.bad)
    mapped = mapped_rows(dataset, samples) if is_mapped and isinstance(samples, RowGather) else None
    populating = None
    if mapped is not None and tier.name == "ram" and isinstance(samples, RowGather):
        populating = Populating(samples.maps, samples.numbers)
    engine = InThreads(
        feed,
        stages,
        images,
        _depth(asked, stages, is_decoded, row_bytes),
        asked.batch_size,
        asked.device,
        asked.counts,
        populating,
        mapped if tier.name == "disk" else None,
    )
    return Built(asked, tier, engine, stages, feed, row_bytes, kept, is_decoded)


def _check_rows(act: str, asked: Asked, feed: Feed) -> None:
    """Refuse what has no meaning for samples that need no decoding; their own size is no wish."""
    rows = feed.samples
    shape = tuple(rows.shape[:2]) if isinstance(rows, RowGather) and rows.are_images else None
    if asked.size is not None and asked.size != shape:
        found, needed = f"size={asked.size} for samples that need no decoding", "image files"
        if shape is not None:
            found, needed = f"size={asked.size} for images that are stored decoded", f"their size {shape}"
        next_step = "Leave size= out: a transform such as RandomResizedCrop scales, or pack() them with this size"
        raise InvalidOption(cannot(act, found, needed, next_step))
    if asked.bad.on_bad != "raise":
        found = f"on_bad={asked.bad.on_bad!r} for samples that need no decoding"
        raise InvalidOption(cannot(act, found, "image files", "Leave on_bad= out: there is nothing to fail"))
    first = None if asked.transform is None else steps_of(asked.transform)[0]
    if isinstance(first, Transform) and not isinstance(first, PerBatch):  # other people's may turn them
        check_channels(act, feed)


def _depth(asked: Asked, stages: Stages, is_decoded: bool, row_bytes: int | None) -> Depth:
    """Return how much is made ahead: many small batches, a few large ones."""
    works = is_decoded or stages.works_in_threads
    threads = asked.workers if works else min(1, asked.workers)  # rows are gathered faster than two threads take turns
    threads = max(1, threads) if asked.device.type == "cuda" else threads
    batch_bytes = max(1, asked.batch_size * (row_bytes or 1 << 18))
    fitting = 1 if is_decoded else max(1, min(MADE_TOGETHER, _GROUP_BYTES // batch_bytes))
    most = max(2, _AHEAD_BYTES // (4 * batch_bytes) if works else 2 * fitting)  # floats are four times as large
    ahead = asked.prefetch_batches or max(min(_LEAST_AHEAD, most), 2 * fitting)
    group = max(1, min(fitting, ahead // 2))
    begins_here = not works and asked.device.type == "cpu" and asked.prefetch_batches is None
    least, largest = _PORTION_BATCHES
    portion = max(least, min(largest, _PORTION_BYTES // batch_bytes)) if begins_here else group
    return Depth(portion, group, max(1, ahead // group), threads, begins_here)


def _on_device(asked: Asked, columns: Mapping[str, Column], row_bytes: int | None) -> Engine:
    """Return what gathers batches on the device; small ones several at a time."""
    fitting = _DEVICE_GROUP_BYTES // max(1, asked.batch_size * (row_bytes or 1))
    group_batches = max(1, min(MADE_TOGETHER, fitting))
    return OnDevice(Resident(columns, asked.device), asked.counts, group_batches)

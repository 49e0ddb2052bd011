"""The pipeline of a `Loader`: the tier of its samples, the engine that builds its batches, and the prefetch depth."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from colabkit.foundation import InvalidOption, LoaderFacts, call, cannot, format_bytes, local_root
from colabkit.loading.augment.compose import steps_of
from colabkit.loading.augment.joint import RESIZED_BOXES, moves_boxes
from colabkit.loading.augment.transform import PerBatch, Transform, check_fill, is_per_sample
from colabkit.loading.engine.batch_builder import PrefetchDepth, TransformStages, split_transform
from colabkit.loading.engine.batches import BATCHES_TOGETHER, Batch, BatchPlan
from colabkit.loading.engine.columns import (
    ColumnReader,
    DatasetColumn,
    DatasetColumns,
    ImageDataset,
    check_channels_first,
)
from colabkit.loading.engine.decoder_choice import DecoderChoice, choose_decoder
from colabkit.loading.engine.device import DeviceEngine
from colabkit.loading.engine.image_decoders import ImageOptions, row_shape_of
from colabkit.loading.engine.options import LoaderOptions, check_without_processes
from colabkit.loading.engine.process_engine import ProcessEngine, apply_to_tensor, takes_tensors
from colabkit.loading.engine.read_ahead import PagePopulator, row_files_of
from colabkit.loading.engine.shard_ahead import check_cache_for
from colabkit.loading.engine.share import Share
from colabkit.loading.engine.thread_engine import ThreadEngine
from colabkit.loading.engine.tiers import Room, RowCache, Tier, choose_tier, fits_on, shortages
from colabkit.loading.inspection import files_of, is_remote, path_of
from colabkit.loading.sampler.orders import Order
from colabkit.packs import FileDataset, PackedDataset

# Maximum size in bytes of a group of batches that are built together. Two groups fit in a processor's cache.
_GROUP_BYTES = 8 << 20
_DEVICE_GROUP_BYTES = 64 << 20
# Minimum and maximum number of batches that are planned together; in between, as many as fit in _PLAN_BYTES.
_PLAN_BATCHES = 32, 128
_PLAN_BYTES = 256 << 20
_LEAST_AHEAD = 4
_AHEAD_BYTES = 512 << 20
_SIZES_SAMPLED = 256
# Size in bytes that is assumed for a sample of unknown size.
_UNKNOWN_BYTES = 1 << 18
_NO_MEMORY = "the GPU ran out of memory"

Engine: TypeAlias = ThreadEngine | ProcessEngine | DeviceEngine


@dataclass
class BatchPipeline:
    """The components that build the batches of a loader.

    Attributes:
        options: options of the loader.
        tier: tier of the samples, with the reason for the choice.
        engine: engine that builds the batches.
        stages: stages of the transform.
        decoder: decoder of JPEG files, with the reason for the choice.
        columns: columns of the dataset; None if samples are loaded one by one.
        row_bytes: size of a decoded sample in bytes; None if sizes differ or are unknown.
        images: options for decoding image files; None if samples need no decoding.
        processes: number of processes; those on one machine share its free space.
        shortages: number of times that the GPU had run out of memory when the samples were copied there.
    """

    options: LoaderOptions
    tier: Tier
    engine: Engine
    stages: TransformStages
    decoder: DecoderChoice
    columns: DatasetColumns | None = None
    row_bytes: int | None = None
    images: ImageOptions | None = None
    processes: int = 1
    shortages: int = 0

    def batches(
        self, seed: int, epoch: int, plans: Iterator[BatchPlan], order: Order | None, share: Share
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch.

        Args:
            seed: seed of the transforms.
            epoch: number of the epoch.
            plans: plans of the batches.
            order: order of the samples, if it is known.
            share: share of this process.

        Raises:
            InvalidOption: if the cache of a remote pack is too small for an order that was loaded.
        """
        if isinstance(self.engine, ThreadEngine):
            check_cache_for(self.options.act, self.columns and self.columns.packed, order, share)
            return self.engine.batches(seed, epoch, plans, order, share)
        return self.engine.batches(seed, epoch, plans)

    def of_next_epoch(self) -> BatchPipeline:
        """Return the pipeline of the next epoch.

        Decoded samples move to GPU memory once all are decoded, if they fit. With `keep="auto"`, samples leave GPU
        memory after the process has run out of it.
        """
        if self.columns is not None and isinstance(self.engine, DeviceEngine):
            device = self.options.device
            if self.options.keep != "auto" or shortages(device) == self.shortages:
                return self
            pipeline = column_pipeline(self.options, self.columns, self.processes, _NO_MEMORY)
            pipeline.update_facts()
            return pipeline
        cache = None if self.images is None else self.images.cache
        if self.tier.name == "gpu" and self.columns is not None and cache is not None and cache.is_full:
            columns = {**self.columns.by_name, next(iter(self.columns.by_name)): cache.gather()}
            sample_bytes = prod(cache.shape) + self.columns.other_bytes
            try:
                if fits_on(self.options.device, sample_bytes * self.columns.count, self.processes):
                    self.engine = _device_engine(self.options, columns, sample_bytes)
                    self.images, self.shortages = None, shortages(self.options.device)
                    self.update_facts()
                    return self
            except torch.OutOfMemoryError:
                pass
            self.tier = Tier("ram", "the GPU has too little free memory for the decoded samples", self.tier.rows)
            self.update_facts()
        return self

    @property
    def _kind(self) -> Literal["gathered", "decoded", "processes", "device"]:
        if isinstance(self.engine, ProcessEngine):
            return "processes"
        if isinstance(self.engine, DeviceEngine):
            return "device"
        return "gathered" if self.images is None else "decoded"

    @property
    def _workers(self) -> int:
        options = self.options
        return {"processes": options.workers, "decoded": options.threads}.get(self._kind, min(1, options.threads))

    def facts(self, dataset: Any, count: int, transform: str | None) -> LoaderFacts:
        """Return the configuration of this loader, on which `doctor()` bases its diagnosis."""
        kind = self._kind
        encoding: Literal["raw", "encoded", "python"] | None = "python" if kind == "processes" else "raw"
        sample_bytes = float(self.row_bytes) if self.row_bytes else None
        is_files = isinstance(dataset, FileDataset)
        if is_files:
            encoding = "encoded"
            step = max(1, len(dataset) // _SIZES_SAMPLED)
            sizes = [size for index in range(0, len(dataset), step) if (size := dataset.item(index).size)]
            sample_bytes = sum(sizes) / len(sizes) if sizes else None
        elif isinstance(dataset, PackedDataset) and dataset.image_files() is not None and kind != "processes":
            encoding = "encoded"
        options, path = self.options, path_of(dataset)
        return LoaderFacts(
            kind=kind,
            samples=count,
            batch_size=options.batch_size,
            device=str(options.device),
            workers=self._workers,
            sample_bytes=sample_bytes,
            path=path,
            source=_packed_from(dataset) or files_of(dataset),
            is_remote=dataset.source.can_hang if is_files else is_remote(path),
            is_arriving=isinstance(dataset, PackedDataset) and dataset.arriving is not None,
            files=len(dataset) if is_files else None,
            encoding=encoding,
            tier=self.tier.name,
            transform=transform,
            is_pinned=True if options.is_on_gpu else None,
            keeps_workers=options.persistent_workers or not options.workers if kind == "processes" else None,
            split=getattr(dataset, "split_name", None),
            prefetch=options.prefetch_batches,
        )

    def update_facts(self) -> None:
        """Set the facts of the loader's meters that depend on where its samples are now."""
        if (facts := self.options.counts.facts) is not None:
            found = replace(facts, kind=self._kind, tier=self.tier.name, workers=self._workers)
            self.options.counts.facts = found


def _packed_from(dataset: Any) -> str | None:
    name = str(dataset.info.meta["source"]) if isinstance(dataset, PackedDataset) else ""
    return name if name != path_of(dataset) and (os.path.isabs(name) or "://" in name) else None


def process_pipeline(options: LoaderOptions, dataset: Any) -> BatchPipeline:
    """Return the pipeline of a map-style dataset: worker processes, if any, load its samples one by one."""
    nothing = Room(None, 0, 0)
    tier = choose_tier(options.act, options.keep, nothing, row_bytes=None, count=0, is_decoded=False, is_on_disk=False)
    # Processes read shards when they need them, so their order is not known in advance.
    check_cache_for(options.act, dataset, None, Share())
    if not options.workers:
        check_without_processes(options, "num_workers=0 starts none", "Omit one of the two")
    sample_transform = options.transform if is_per_sample(options.transform) else None
    if sample_transform is not None and takes_tensors(sample_transform):
        sample_transform = partial(apply_to_tensor, sample_transform)
    stages = TransformStages(at_last=None if sample_transform is not None else options.transform)
    decoder = DecoderChoice("cpu", "samples are loaded one by one")
    return BatchPipeline(options, tier, ProcessEngine(options, dataset, sample_transform), stages, decoder)


def column_pipeline(
    options: LoaderOptions, columns: DatasetColumns, processes: int, why_not_gpu: str = ""
) -> BatchPipeline:
    """Return the pipeline of a dataset with columns: threads or the GPU build its batches.

    Args:
        options: options of the loader.
        columns: columns of the dataset.
        processes: number of processes; those on one machine share its free space.
        why_not_gpu: reason why samples are not kept in GPU memory, for the tier; "" if they may be.

    Raises:
        InvalidOption: if the options do not apply to the samples.
    """
    act = options.act
    check_without_processes(options, f"threads load {columns.description}", "Omit persistent_workers=")
    rows, on_device = columns.rows, options.is_on_gpu
    if columns.images is None:
        _check_rows(options, columns)
        resized = rows is not None and rows.are_images_of_bytes
        stages = split_transform(options.transform, on_device=on_device, by_sample=False, resized=resized)
        row_shape = None
    else:
        stages, row_shape = _image_stages(options, columns, columns.images)
    # Threads crop `uint8` samples, so the fill value has to be valid for this dtype.
    if stages.geometry is not None:
        check_fill(act, stages.geometry.fill)
    row_bytes = None if rows is None else rows.row_bytes
    if row_shape is not None:
        row_bytes = prod(row_shape)
    is_resident = on_device and columns.images is None and options.keep == "auto"
    if is_resident and columns.packed is not None and columns.packed.arriving is not None:
        why_not_gpu = "samples are still being packed"
    folder = local_root(os.environ)
    room = Room.measure(options.device, folder, processes)
    tier = choose_tier(
        act,
        options.keep,
        replace(room, gpu_bytes=None) if why_not_gpu else room,
        row_bytes=row_bytes,
        other_bytes=columns.other_bytes,
        count=columns.count,
        is_decoded=columns.images is not None,
        is_on_disk=columns.packed is not None,
    )
    if columns.packed is not None and (remote := columns.packed.remote_parts) and tier.name == "source":
        sizes = [cache.most_bytes for cache in dict.fromkeys(part.samples.cache for part in remote)]
        caches = "a cache" if len(sizes) == 1 else f"{len(sizes)} caches"
        tier = Tier("source", f"shards are downloaded into {caches} of {format_bytes(sum(sizes))}")
    if why_not_gpu:
        tier = replace(tier, reason=f"{tier.reason}; {why_not_gpu}")
    if tier.name == "gpu" and columns.images is None:
        return _resident_pipeline(options, columns, processes, tier, stages, row_bytes)
    images = None
    if columns.images is not None and (files := columns.images.image_files()) is not None:
        empty = RowCache(columns.count, row_shape or (0, 0, 0), 0, "ram", folder)
        images = ImageOptions(
            columns.images,
            files,
            row_shape,
            options.size is not None,
            empty,
            options.bad,
            moves_boxes=stages.moves_boxes,
            label_place=columns.label_place,
        )
    decoder = choose_decoder(options, images, stages.geometry, tier)
    if images is not None and decoder.name == "gpu":
        tier = Tier("source", "decoded on the GPU in every epoch")
        images = replace(images, is_on_device=True)
    elif images is not None and row_shape is not None and tier.rows:
        where: Literal["ram", "disk"] = "disk" if tier.name == "disk" else "ram"
        images = replace(images, cache=RowCache(columns.count, row_shape, tier.rows, where, folder))
    packed, name = columns.packed, next(iter(columns.by_name))
    row_files = row_files_of(packed, name, rows) if packed is not None and rows is not None else None
    populator = None
    if row_files is not None and rows is not None and tier.name == "ram":
        populator = PagePopulator(rows.maps, rows.numbers)
    depth = _prefetch_depth(options, columns, stages, images is not None, row_bytes)
    row_files = row_files if tier.name == "disk" else None
    thread_engine = ThreadEngine(options, columns, stages, images, depth, populator, row_files)
    return BatchPipeline(options, tier, thread_engine, stages, decoder, columns, row_bytes, images, processes)


def _resident_pipeline(
    options: LoaderOptions,
    columns: DatasetColumns,
    processes: int,
    tier: Tier,
    stages: TransformStages,
    row_bytes: int | None,
) -> BatchPipeline:
    """Return the pipeline of rows in GPU memory or, if it runs out, of rows elsewhere."""
    # Samples in GPU memory are read from the pack only once, so check them all now.
    if not columns.are_checked():
        columns.check(np.arange(columns.count), options.counts)
    # Leave this block before anything else is done, because the error keeps the copied rows alive.
    with suppress(torch.OutOfMemoryError):
        engine = _device_engine(options, columns.by_name, (row_bytes or 0) + columns.other_bytes)
        decoder, known = choose_decoder(options, None, None, tier), shortages(options.device)
        return BatchPipeline(
            options, tier, engine, stages, decoder, columns, row_bytes, processes=processes, shortages=known
        )
    if options.keep == "gpu":
        found, next_step = f"keep='gpu', but {_NO_MEMORY}", "Free GPU memory, or use keep='auto'"
        raise InvalidOption(cannot(options.act, found, f"room for {tier.reason}", next_step))
    return column_pipeline(options, columns, processes, _NO_MEMORY)


def _image_stages(
    options: LoaderOptions, columns: DatasetColumns, dataset: ImageDataset
) -> tuple[TransformStages, tuple[int, int, int] | None]:
    """Return the stages for image files, and the shape of decoded rows: None if a crop gives all images one size."""
    on_device = options.is_on_gpu
    if options.size is not None and moves_boxes(options.transform):
        found = f"size={options.size} resizes the images, but not their bounding boxes"
        raise InvalidOption(cannot(options.act, found, "", f"Omit size=, and resize with transform={RESIZED_BOXES}"))
    crops = split_transform(options.transform, on_device=on_device, by_sample=True, resized=True)
    if options.size is None and crops.geometry is not None and crops.geometry.size is not None:
        return crops, None
    files = dataset.image_files()
    row_shape = None if files is None else row_shape_of(dataset, files, columns.count, options.size, options.bad)
    return split_transform(options.transform, on_device=on_device, by_sample=False, resized=True), row_shape


def _check_rows(options: LoaderOptions, columns: DatasetColumns) -> None:
    act, stored = options.act, columns.stored
    shape = tuple(stored.shape[:2]) if stored is not None and stored.are_images and stored.shape else None
    # `size=` is allowed if it equals the size of the stored images.
    if options.size is not None and options.size != shape:
        if shape is None:
            not_files = f"size={options.size} is for image files, but these samples need no decoding"
            resize = "Omit size=, or resize with a transform such as RandomResizedCrop"
            raise InvalidOption(cannot(act, not_files, "", resize))
        found = f"size={options.size}, but the images are stored with size {shape}"
        next_step = (
            "Omit size=, resize with a transform such as RandomResizedCrop, or run ",
            call("pack", ..., size=options.size),
        )
        raise InvalidOption(cannot(act, found, "", next_step))
    if options.on_bad != "raise":
        no_decoding = f"on_bad={options.on_bad!r} is for image files, but these samples need no decoding"
        raise InvalidOption(cannot(act, no_decoding, "", "Omit on_bad="))
    first = None if options.transform is None else steps_of(options.transform)[0]
    # A custom function may permute the channels itself.
    if isinstance(first, Transform) and not isinstance(first, PerBatch):
        check_channels_first(act, columns)


def _prefetch_depth(
    options: LoaderOptions, columns: DatasetColumns, stages: TransformStages, is_decoded: bool, row_bytes: int | None
) -> PrefetchDepth:
    works, on_device = is_decoded or stages.works_in_threads, options.is_on_gpu
    # One thread gathers faster than two that take turns.
    threads = options.threads if works else min(1, options.threads)
    threads = max(1, threads) if on_device else threads
    read_bytes = columns.first.row_bytes if isinstance(columns.first, ColumnReader) else 0
    sample_bytes = (row_bytes or max(_UNKNOWN_BYTES, read_bytes)) + columns.other_bytes
    batch_bytes = max(1, options.batch_size * sample_bytes)
    fitting = 1 if is_decoded else max(1, min(BATCHES_TOGETHER, _GROUP_BYTES // batch_bytes))
    # A transform may turn bytes into floats, which take four times as much memory.
    most = max(2, _AHEAD_BYTES // (4 * batch_bytes) if works else 2 * fitting)
    ahead = options.prefetch_batches or max(min(_LEAST_AHEAD, most), 2 * fitting)
    group = max(1, min(fitting, ahead // 2))
    begins_inline = not works and not on_device and options.prefetch_batches is None
    least, largest = _PLAN_BATCHES
    plan = max(least, min(largest, _PLAN_BYTES // batch_bytes)) if begins_inline else group
    return PrefetchDepth(plan, group, max(1, ahead // group), threads, begins_inline)


def _device_engine(options: LoaderOptions, columns: Mapping[str, DatasetColumn], sample_bytes: int) -> DeviceEngine:
    """Return an engine that gathers batches on the device; it gathers several small batches at a time."""
    fitting = _DEVICE_GROUP_BYTES // max(1, options.batch_size * sample_bytes)
    batches, is_contiguous = max(1, min(BATCHES_TOGETHER, fitting)), not options.channels_last
    return DeviceEngine(columns, options.device, batches, options.counts, is_contiguous)

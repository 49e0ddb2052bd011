"""The class `Loader`, which yields batches on the device in a resumable order."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from colabkit.foundation import LoaderMeters, LongPass, check_size, check_whole_number, format_things, meters
from colabkit.loading.augment.transform import Draws
from colabkit.loading.dataloader import DataLoaderSource
from colabkit.loading.engine.batches import Batch, EndDetector, OrderPlanner, fields_of, map_tensors
from colabkit.loading.engine.columns import as_samples, columns_of, fingerprint_of, unwrap_subset
from colabkit.loading.engine.decoder_choice import DecoderChoice
from colabkit.loading.engine.device import set_mark
from colabkit.loading.engine.options import (
    LoaderOptions,
    check_beside,
    check_counts,
    check_drop_last,
    check_skipping,
    loader_call,
    order_of,
    sample_argument,
    transform_name,
    usable_device,
)
from colabkit.loading.engine.pipeline import column_pipeline, process_pipeline
from colabkit.loading.engine.position import LoaderPosition
from colabkit.loading.engine.share import Share, share_of
from colabkit.loading.engine.tiers import Tier
from colabkit.loading.engine.user_code import (
    SamplerPlanner,
    check_collated,
    check_process,
    describe_samples,
    reporting_errors,
    restored_generators,
    seed_by_draws,
    yields_batches,
)
from colabkit.loading.inspection import name_of, note_image_size
from colabkit.loading.sampler.orders import Order

# Number of batches between calls of `settle`; until a call, a GPU clock keeps the events of all steps.
_SETTLED_EVERY = 64


class Loader(DataLoaderSource):
    """Batches of a dataset, loaded in the background in a resumable order.

    The dataset is a split of a pack or a view of one, a `Mixture` of them, files (`FileDataset`), tensors or arrays
    (one, or a tuple or dict of them), or any map-style torch dataset. A batch holds the dataset's fields in order,
    usually `images, labels`, or the value of the only field.

    - Images of a pack or of files are `uint8 [B, C, H, W]`, or the result of `transform`. Models take floats: pass
      `transform=augment.Normalize()`, or train with `supervised_step()`. Both scale `uint8` images to [0, 1]. Other
      samples keep their shape and dtype. Class labels are `int64 [B]`. Text and bytes are returned as lists.
    - A batch stays valid as long as you hold it. Each iteration is one epoch. With `shuffle`, each epoch has its own
      order, which depends only on `seed` and the epoch number.
    - Each sample of a pack is checked against its CRC when this process first reads it. About every second, the loader
      looks for changes to the file, and checks the samples of a modified file again. A damaged sample (see `on_bad`),
      or a file that became shorter, raises `Corrupt`.
    - Under `torch.distributed`, every process gets its share of each global batch. No sample is repeated to
      fill a share, and all processes get the same number of batches. A custom sampler must shard its samples itself.
    - These run in worker processes: map-style datasets, subclasses with their own `__getitem__`, `collate_fn`,
      torchvision transforms and `augment.PerSample`. On the CPU, transforms of `colabkit.augment`, including
      `PerBatch`, run in worker threads. Any other callable runs in your thread when you request the batch; the global
      random generators are seeded by the batch's position, so the callable draws the same numbers after a resume. If
      batches go to a GPU, all transforms of batches run on the GPU, in the caller's stream.

    Args:
        dataset: dataset to load.
        batch_size: samples per batch, in each process. If it is 1, processes need equal shares or `drop_last=True`.
        shuffle: whether to shuffle the samples in every epoch; `"block"` shuffles in windows, for packs beyond RAM.
        seed: seed of the order and of the transforms.
        drop_last: whether to drop a last batch that is not full; invalid with a sampler that yields batches.
        device: device of the batches; None means the CPU. Custom objects in a batch are moved by their method `to()`.
        transform: transform of the images of each batch, from `colabkit.augment` or torchvision, or any callable.
            Combine several transforms with `Compose([...])` of the same package.
        sampler: order of the samples, instead of `shuffle`: from `colabkit.sampler`, such as `BalancedOrder(labels)`,
            or any iterable with a length that yields sample indices, or lists of them (batches). For torch's samplers
            the order depends on their generator's seed, on `seed` and on the epoch. The same holds for other samplers
            that draw from the global generators only before they yield their first index. A sampler that draws later
            can be resumed if it has its own generator and seeds it in `set_epoch`, which the loader calls if it exists.
        collate_fn: function that makes a batch from a list of samples, as in `DataLoader`. It may drop samples, but not
            together with a transform of `colabkit.augment`, which draws random numbers for every sample.
        fields: names of the fields that batches hold, in this order; None for all. Packs and files name samples `X`
            and labels `Y`; arrays of a tuple are `0`, `1` and so on. `transform` applies to the dataset's first field.
        as_dict: whether batches are dicts keyed by field name, as in `batch["X"]`.
        size: size in pixels of decoded image files: one side, or height and width. Images are resized and cropped as in
            `pack()`. Images decoded to one size are cached if there is room, so later epochs skip decoding. For samples
            that are stored decoded, only the stored size is allowed.
        keep: where samples are kept: `"gpu"`, `"ram"`, `"disk"`, or `"auto"` to choose by the free space; see `tier`.
            With `"auto"`, samples leave GPU memory at the start of an epoch if the GPU has run out of memory.
        decode: where JPEG files are decoded: `"cpu"`, `"gpu"` in every epoch, with torchvision's nvJPEG, or `"auto"`.
            `"auto"` chooses the GPU if decoded images do not fit in a cache and it decodes a few files 1.5 times as
            fast; see `decoder`. On the GPU, pixels differ slightly. Files that it cannot decode use the CPU.
        on_bad: how to handle image files that cannot be decoded or have a wrong CRC: `"raise"`, `"skip"` (only in a
            single process), or `"blank"` for a black image. If a pack has fields besides images and labels, `"blank"`
            raises an error for a wrong CRC. If one size is needed, other sizes are always an error.
        num_workers: number of worker threads or processes; None for one per usable CPU, but at most 8 threads. With 0,
            a batch is built in your thread when you request it; for a GPU, one thread may still build batches ahead.
        prefetch_batches: number of batches to make ahead; None chooses by their size.
        persistent_workers: whether to keep worker processes between epochs, to save about 0.1 s per epoch. They do not
            see later changes to the dataset. Invalid without worker processes.
        channels_last: whether images of packs, files and channels-last tensors keep channels-last memory format. False
            makes them contiguous, so that `.view` works. None means True on a GPU (faster convolutions), else False.
        rank: rank of this process; None uses that of `torch.distributed`, or 0 without it.
        world_size: number of processes; None uses that of `torch.distributed`, or 1 without it.

    Raises:
        InvalidOption: if an argument is invalid.
        BadImage: if an image cannot be decoded and `on_bad` is `"raise"`, or if no image of an epoch can be decoded.
        Corrupt: during iteration, or in this call for samples in GPU memory, if a sample does not match its CRC.
        SourceChanged, BadArchive, FileFailed, TimedOut: during iteration, if a file of a `FileDataset` cannot be read.
        LoaderFailed: during iteration, if a worker process dies, or if your code fails; its error is then the cause.

    Attributes:
        meters: counts and seconds of each stage, and the time that you waited for batches.
        tier: the tier where samples are kept. `tier.name` is `"gpu"`, `"ram"`, `"disk"` (in a cache of decoded samples,
            or in the pack itself) or `"source"` (each epoch decodes samples or calls the dataset again). `tier.reason`
            names the sizes that led to this choice, and `tier.rows` is the number of cached decoded samples.
        decoder: the decoder of JPEG files: `decoder.name` is `"cpu"` or `"gpu"`; `decoder.reason` is the reason.
        bad_samples: names of the bad image files, with the reasons.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> loader = colabkit.Loader(data, batch_size=64, shuffle=True)
        >>> images, labels = next(iter(loader))
        >>> images.shape, labels.shape
        (torch.Size([64, 3, 8, 8]), torch.Size([64]))
        >>> len(loader)
        29
    """

    @loader_call
    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | Literal["block"] = False,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device | None = None,
        transform: Callable[..., Any] | None = None,
        sampler: Order | Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        fields: Sequence[str] | None = None,
        as_dict: bool = False,
        size: int | tuple[int, int] | None = None,
        keep: Literal["auto", "gpu", "ram", "disk"] = "auto",
        decode: Literal["cpu", "gpu", "auto"] = "cpu",
        on_bad: Literal["raise", "skip", "blank"] = "raise",
        num_workers: int | None = None,
        prefetch_batches: int | None = None,
        persistent_workers: bool = False,
        channels_last: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        act = "make a Loader"
        options = LoaderOptions(
            act,
            batch_size,
            seed,
            usable_device(act, device),
            transform,
            collate_fn,
            None if size is None else check_size(act, "size", size),
            keep,
            on_bad,
            num_workers,
            prefetch_batches,
            persistent_workers,
            channels_last,
            decode=decode,
        )
        self.dataset = whole = unwrap_subset(act, dataset)
        self.batch_size = options.batch_size
        self.seed = options.seed
        self.drop_last = drop_last
        self.device = options.device
        self.transform = transform
        self.meters = options.counts
        self._aside: meters.LoaderMeters | None = None
        self._given_share = rank, world_size
        self.on_bad, self._bad = options.on_bad, options.bad
        share = share_of(act, rank, world_size)
        why = sample_argument(options)
        self._columns = None if why else columns_of(act, self.dataset, fields, as_dict)
        if self._columns is None:
            self.dataset = as_samples(act, self.dataset)
            given = {"fields": fields is not None, "as_dict": as_dict, "size": size is not None}
            reason = f"the dataset ({type(self.dataset).__name__}) loads samples one by one"
            why = why or (reason, "load a pack, image files or arrays")
            check_beside(act, {**given, "on_bad": on_bad != "raise", "decode": decode == "gpu"}, why)
            self._count = len(self.dataset)
            self._pipeline = process_pipeline(options, self.dataset)
        else:
            self._count = self._columns.count
            self._pipeline = column_pipeline(options, self._columns, share.world_size)
        order = order_of(act, shuffle, self.seed, self._count, sampler, self._pipeline.row_bytes, whole, share)
        self._yields_batches = not isinstance(order, Order) and yields_batches(order)
        check_drop_last(act, drop_last, self._yields_batches)
        self._position = LoaderPosition(order, self.seed, fingerprint_of(act, whole), self.decoder.name, decode, whole)
        self._check_counts(act, share)
        facts = self._pipeline.facts(self.dataset, self._count, transform and transform_name(transform))
        self.meters.facts = replace(facts, shuffle=self.shuffle)

    def __len__(self) -> int:
        """Return the number of batches of a full epoch."""
        return self._planner().batches(0)

    def __repr__(self) -> str:
        share = self._share()
        features = [
            f"{format_things(len(self), 'batch')} of {self.batch_size}",
            self._position.order_text,
            f"on {self.device}",
            *([f"rank {share.rank} of {share.world_size}"] if share.world_size > 1 else []),
            *([f"transform {transform_name(self.transform)}"] if self.transform is not None else []),
            f"samples in {self.tier}",
            *([f"decoded on {self.decoder}"] if self._position.decode != "cpu" else []),
        ]
        what = f"{type(self.dataset).__name__} of {format_things(self._count, 'sample')}"
        if self._columns is not None:
            what = self._columns.description
        return f"Loader of {what}: {', '.join(features)}"

    @property
    def tier(self) -> Tier:
        """The tier where samples are kept, and the reason."""
        return self._pipeline.tier

    @property
    def decoder(self) -> DecoderChoice:
        """The decoder of JPEG files, and the reason for the choice."""
        return self._pipeline.decoder

    @property
    def shuffle(self) -> bool | str:
        """The mode of shuffling: True, False or `"block"`; False for a custom sampler."""
        return self._position.shuffle

    @property
    def bad_samples(self) -> dict[str, str]:
        """Names of the bad image files found so far, with the reasons; the first 1,000."""
        return dict(self._bad.reasons)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next iteration starts, or resumes after `load_state_dict`."""
        return self._position.next[0]

    @property
    def received(self) -> tuple[int, int]:
        """Epoch, and number of its samples that all processes have received: `epoch` and `samples` of `state_dict()`.

        With a custom sampler, this counts only the samples that this process has received.
        """
        return self._position.received

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a loaded position inside this epoch is preserved.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            InvalidOption: if `epoch` is not a whole number of 0 or more.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the current position, from which `load_state_dict` resumes after the last batch that you received.

        A position counts the samples that all processes together have received, so the state of one process is valid
        for all. With a custom sampler, a position counts the samples of one process, so the state is valid for all
        processes only if each has received the same number.
        """
        return self._position.state_dict(self.batch_size, self._share().world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration at the position of `state`, in the same order.

        Batch size, number of processes and threads, device, transform and prefetching may differ. Seed and shuffle are
        restored from the state; for a `Mixture`, only the seed is. JPEG files must be decoded on the same device; with
        `decode="auto"`, the loader only logs a warning. With a custom sampler, the number of processes may differ only
        if the state was taken at the end of an epoch.

        Args:
            state: result of `state_dict()`.

        Raises:
            InvalidOption: if the state is invalid, or belongs to other data, to another decoder, to another sampler or
                (with a custom sampler) to a different number of processes, or if the processes cannot share the samples
                that are left.
        """
        self._position.load(state, self._is_end, self._share().world_size)
        self.seed = self._position.seed

    def peek(self, batches: int = 1) -> list[Any]:
        """Return copies of the next batches without moving the position.

        You may call this during an iteration.

        Args:
            batches: number of batches; near the end of the epoch fewer are returned.

        Raises:
            InvalidOption: if `batches` is not a whole number of 1 or more.
        """
        check_whole_number("look at the next batches", "batches", batches, 1)
        with self.aside(), closing(self._batches()) as coming:
            return [map_tensors(batch, torch.Tensor.clone) for batch in itertools.islice(coming, batches)]

    @contextmanager
    def aside(self) -> Iterator[LoaderMeters]:
        """Start iterations in the `with` block at the current position, and restore the position afterwards.

        These iterations publish no events except `DataWait`. `with` returns separate meters, which count the batches of
        the block; the loader's meters still count the work of its stages.
        """
        before, self._aside = self._aside, meters.LoaderMeters(facts=self.meters.facts)
        try:
            with self._position.aside():
                yield self._aside
        finally:
            self._aside = before

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, which starts when the first batch is requested."""
        self._check_counts("load batches", self._share(), self._position.next[1])
        return self._batches()

    def _batches(self) -> Generator[Any]:
        epoch, start = self._position.begin()
        # Read the order and the seed once: a state loaded during this iteration applies to the next one.
        order, seed = self._position.pure_order, self.seed
        self._pipeline = self._pipeline.of_next_epoch()
        planner, engine, is_published = self._planner(), self._pipeline.engine, self._aside is None
        counts = self.meters if self._aside is None else self._aside
        if is_published:
            meters.used(counts)
            if meters.listeners:
                meters.publish(meters.EpochStarted(counts, epoch, planner.batches(start), planner.samples(start)))
        clock = self._clock(counts)
        counts.begin_pass(clock)
        stepped, now = clock.stepped, time.perf_counter
        requested, owner, long = now(), os.getpid(), LongPass(is_published, counts.spent.seconds, counts.passes - 1)
        plans = EndDetector(planner.plans(epoch, start, engine.plan_batches))
        batches = self._pipeline.batches(seed, epoch, iter(plans), order, planner.share)
        at_last, received = self._pipeline.stages.at_last, counts.batches
        as_structured = (lambda batch: batch) if self._columns is None else self._columns.batch
        try:
            for made in batches:
                batch = as_structured(made.values) if at_last is None else self._finished(order, seed, epoch, made)
                samples, end = len(made.positions), made.end
                counts.batches += 1
                counts.samples += samples
                counts.ready += made.was_ready
                clock.given(made.marks)
                del made
                given = now()
                if given >= long.due_s:
                    long.observe()
                if counts.batches == 1:
                    counts.facts = note_image_size(self.meters, batch)
                if is_published and meters.listeners:
                    meters.publish(meters.BatchTaken(counts))
                self._position.receive(epoch, end, is_over=end == plans.end)
                yield batch
                del batch
                check_process(owner, batches)
                left = now()
                stepped(requested, given, left, samples)
                requested = left
                if not counts.batches % _SETTLED_EVERY:
                    counts.settle(clock)
            if not start and counts.batches == received and self._bad.reasons:
                raise self._bad.none_readable(planner.samples(0))
            # The epoch is over even if its last batches held only bad samples, and so were not yielded.
            self._position.receive(epoch, 0, is_over=True)
        finally:
            if os.getpid() == owner:
                long.end()
                batches.close()
                counts.settle(clock)

    def _clock(self, counts: LoaderMeters) -> meters.Clock:
        is_on_cpu = self.device.type == "cpu"
        return meters.HostClock(counts.spent) if is_on_cpu else meters.DeviceClock(partial(set_mark, self.device))

    def _finished(self, order: Order | None, seed: int, epoch: int, made: Batch) -> Any:
        whole: Callable[[Sequence[Any]], Any]
        if self._columns is not None:
            values, whole, label_place = [*made.values], self._columns.batch, self._columns.label_place
        else:
            values, whole = fields_of(made.values)
            label_place = 1 if len(values) > 1 else None
            check_collated(self._pipeline.stages.at_last, values[0], len(made.positions))
        if len(made.positions):
            draws = Draws(seed, epoch, made.positions)
            with reporting_errors(lambda: self._describe(order, draws)):
                if self._pipeline.stages.draws_globally:
                    with restored_generators(self.device):
                        seed_by_draws(draws, self.device)
                        self._pipeline.stages.apply_at_last(values, label_place, draws, self.meters)
                else:
                    self._pipeline.stages.apply_at_last(values, label_place, draws, self.meters)
        return whole(values)

    def _describe(self, order: Order | None, draws: Draws) -> str:
        if order is None:
            count, first = len(draws.positions), draws.positions.item(0)
            return f"transforming {format_things(count, 'sample')} from position {first} of epoch {draws.epoch}"
        indices = [order.indices(draws.epoch, at, at + 1).item() for at in draws.positions.tolist()]
        return f"transforming {describe_samples(draws.epoch, indices, partial(name_of, self.dataset))}"

    def _is_end(self, samples: int) -> bool:
        """Return whether no batch is left after `samples` samples; raise `InvalidOption` if samples would be lost."""
        self._check_counts("resume the Loader", self._share(), samples)
        return not self._planner().batches(samples)

    def _share(self) -> Share:
        return share_of("load batches", *self._given_share)

    def _planner(self) -> OrderPlanner | SamplerPlanner:
        position, share = self._position, self._share()
        if position.pure_order is not None:
            return OrderPlanner(position.pure_order, self.batch_size, self.drop_last, share)
        return SamplerPlanner(
            position.order, self._yields_batches, self.seed, self._count, self.batch_size, self.drop_last, share
        )

    def _check_counts(self, act: str, share: Share, start: int = 0) -> None:
        """Raise `InvalidOption` if an epoch yields no batch, or if ranks may yield different numbers of batches."""
        check_skipping(act, self._bad.on_bad, share)
        if self._position.pure_order is not None:
            check_counts(act, self._position.pure_order, self.batch_size, self.drop_last, share, start)

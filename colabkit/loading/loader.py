"""`Loader` yields batches on the device at memory speed, in an order that can be resumed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Literal

import torch

from colabkit.foundation import (
    BadImage,
    cannot,
    check_size,
    check_whole_number,
    format_things,
    kind_of,
    meters,
    shown,
)
from colabkit.loading.augment.transform import Draws, Transform
from colabkit.loading.engine.batches import Batch, EndDetector, OrderPlanner, Share, fields_of, map_tensors
from colabkit.loading.engine.columns import as_samples, columns_of, fingerprint_of, unwrap_subset
from colabkit.loading.engine.device import set_mark
from colabkit.loading.engine.image_decoders import OnBad
from colabkit.loading.engine.options import (
    LoaderOptions,
    check_beside,
    check_counts,
    check_drop_last,
    check_skipping,
    order_of,
    sample_argument,
    share_of,
    usable_device,
)
from colabkit.loading.engine.pipeline import column_pipeline, process_pipeline
from colabkit.loading.engine.position import LoaderPosition
from colabkit.loading.engine.tiers import Keep, Tier
from colabkit.loading.engine.user_code import (
    SamplerPlanner,
    check_collated,
    describe_samples,
    reporting_errors,
    restored_generators,
    seed_by_draws,
    yields_batches,
)
from colabkit.loading.inspection import bytes_in, name_of
from colabkit.loading.sampler.orders import Order

_SETTLED_EVERY = 64  # batches: a GPU's clock keeps the marks of a few times as many


class Loader:
    """Yields batches of a data set, made in the background, in an order that can be resumed.

    The data set is a split of a pack or a view of one, files (`FileDataset`), tensors or arrays (one, a tuple or a dict
    of them), or any map-style torch data set. A batch has the data set's fields, in its order: `images, labels` as a
    rule, one tensor alone where there is one field.

    - Images of a pack or of files are `uint8 [B, C, H, W]` in channels-last memory, or what `transform` makes of them;
      other samples keep their stored shape and dtype. Class labels are `int64 [B]`, others as stored. Text and bytes
      come as lists.
    - A batch stays valid as long as you hold it. Each iteration is one epoch; with `shuffle` each epoch has its own
      order, which depends on `seed` and the epoch's number alone.
    - Rows are not checked against their CRCs, which would take as long as gathering them: `verify()` does that. Image
      files of a pack are checked.
    - Under `torch.distributed` every process gets its share of each global batch; every sample comes once in an epoch,
      and all processes get equally many batches. A custom sampler must shard samples across ranks itself.
    - A map-style data set, a `collate_fn`, a transform of torchvision and `augment.PerSample` run in worker processes,
      and so does a subclass with its own `__getitem__`. On the CPU the transforms of `colabkit.augment`, including
      `PerBatch`, run in worker threads. Other callables on a batch run where the batch is handed over, with the global
      generators seeded by its position, so that they draw the same after a resume. On a GPU all transforms run there,
      in the caller's stream.

    Args:
        dataset: what to load.
        batch_size: samples of a batch, of each process.
        shuffle: shuffle the samples in every epoch; `"block"` shuffles within a window of blocks, for packs beyond RAM.
        seed: of the orders and of the transforms.
        drop_last: leave out a last batch that is not full; not with a sampler that yields batches.
        device: where batches go; None leaves them on the CPU.
        transform: applied to the images of each batch: of `colabkit.augment`, of torchvision, or any callable. Combine
            several with `Compose([...])`: of `colabkit.augment` for batches, of torchvision for single samples.
        sampler: the order, instead of `shuffle`: one of `colabkit.sampler`, such as `Balanced(labels)`, or any iterable
            with a length, of indices of samples, or of lists of them that are batches. The order of torch's samplers
            depends on the seed of their generator, on `seed` and the epoch. So does that of others that draw from the
            global generators before they yield their first, equally in all processes. One that draws later resumes if
            it has its own generator and seeds it in `set_epoch`, which is called if it exists.
        collate_fn: makes a batch of a list of samples, as of `DataLoader`. It may leave samples out, but not beside a
            transform of `colabkit.augment`, which draws for each.
        fields: names of the fields that batches have, in this order; None for all. Packs and files call their samples
            `X` and their labels `Y`, arrays of a tuple are `0`, `1` and so on. The transform applies to the field that
            comes first in the data set.
        as_dict: batches are dicts by the fields' names, as in `batch["X"]`.
        size: of decoded image files: one side, or height and width; resized and cropped as by `pack()`. Images that are
            decoded to one size are cached, so that later epochs run at the speed of rows. `size=` is allowed for rows
            if it matches.
        keep: where samples live: `"gpu"`, `"ram"`, `"disk"`, or `"auto"` by what is free; `tier` reports the choice.
        on_bad: what to do about image files that cannot be decoded: `"raise"`, `"skip"` in a single process, or a
            `"blank"` image. Good images that differ in size, where one size is needed, are always an error.
        num_workers: threads that decode and transform, or processes; None for as many as CPUs may be used. With 0 all
            work happens where a batch is requested, except what is sent to a GPU.
        prefetch_batches: how many batches are made ahead; None chooses by their size.
        persistent_workers: keep worker processes between epochs, which saves a tenth of a second for each epoch; they
            do not see changes of the data set. Threads do not need it.
        rank: number of this process; None asks `torch.distributed`.
        world_size: how many processes there are; None likewise.

    Raises:
        InvalidOption: if an argument is invalid.
        BadImage: while it is iterated, if an image cannot be decoded, or none in an epoch.
        LoaderFailed: while it is iterated, if a data set, a transform or `collate_fn` fails; its cause is the error.

    Attributes:
        meters: counts and seconds of each part, and of the user's waiting.
        tier: where samples live, and why: `tier.name` is `"gpu"`; `"ram"`; `"disk"`, from where the kernel or the
            loader fetches them; or `"source"`, if each epoch decodes them or asks the data set again. `tier.reason` has
            the bytes that decided, and `tier.rows` is the number of decoded samples that are cached.
        bad_samples: names and reasons of image files that could not be decoded.
    """

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
        keep: Keep = "auto",
        on_bad: OnBad = "raise",
        num_workers: int | None = None,
        prefetch_batches: int | None = None,
        persistent_workers: bool = False,
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
        self._bad = options.bad
        share = share_of(act, rank, world_size)
        why = sample_argument(options)
        self._columns = None if why else columns_of(act, self.dataset, fields, as_dict)
        if self._columns is None:
            self.dataset = as_samples(act, self.dataset)
            given = {"fields": fields is not None, "as_dict": as_dict, "size": size is not None}
            why = why or (kind_of(self.dataset), "load a pack, image files or arrays")
            check_beside(act, {**given, "on_bad": on_bad != "raise"}, why)
            self._count = len(self.dataset)
            self._pipeline = process_pipeline(options, self.dataset)
        else:
            self._count = self._columns.count
            self._pipeline = column_pipeline(options, self._columns, self.dataset, share.world_size)
        order = order_of(act, shuffle, self.seed, self._count, sampler, self._pipeline.row_bytes)
        self._yields_batches = not isinstance(order, Order) and yields_batches(order)
        check_drop_last(act, drop_last, self._yields_batches)
        self._position = LoaderPosition(order, self.seed, fingerprint_of(act, whole))
        self._check_counts(act, share)
        self.meters.facts = self._pipeline.facts(self.dataset, self._count, transform and _name_of(transform))

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self._planner().batches(0)

    def __repr__(self) -> str:
        share = self._share()
        features = [
            f"{format_things(len(self), 'batch')} of {self.batch_size}",
            self._position.order_text,
            f"on {self.device}",
            *([f"rank {share.rank} of {share.world_size}"] if share.world_size > 1 else []),
            *([f"transform {_name_of(self.transform)}"] if self.transform is not None else []),
            f"samples in {self.tier}",
        ]
        what = (
            f"{type(self.dataset).__name__} of {format_things(self._count, 'sample')}"
            if self._columns is None
            else self._columns.description
        )
        return f"Loader of {what}: {', '.join(features)}"

    @property
    def tier(self) -> Tier:
        """Where samples live, and why."""
        return self._pipeline.tier

    @property
    def shuffle(self) -> bool | str:
        """How samples are shuffled: True, False or `"block"`; False for a custom sampler."""
        return self._position.shuffle

    @property
    def bad_samples(self) -> dict[str, str]:
        """Names of image files that could not be decoded so far, with the reason; the first 1,000."""
        return dict(self._bad.reasons)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next iteration begins, or resumes after `load_state_dict`."""
        return self._position.next[0]

    @property
    def received(self) -> tuple[int, int]:
        """Epoch, and samples of it that all processes have received: `epoch` and `samples` of `state_dict()`.

        With a custom sampler, samples that this process has received.
        """
        return self._position.received

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the epoch of this number; a position loaded for this epoch is kept."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the user, so that `load_state_dict` resumes after the last batch received.

        Positions count the samples that all processes together have received, so a state of one process serves all.
        With a custom sampler they count those that each process has received, so it serves all as long as these are
        equally many.
        """
        return self._position.state_dict(self.batch_size, self._share().world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume where `state` was taken, in the same order.

        Batch size, number of processes and threads, device, transform and prefetching may differ; seed and shuffle are
        taken from the state. With a custom sampler the number of processes may differ only if the state was taken at
        the end of an epoch.

        Raises:
            InvalidOption: if the state is of other data, of another sampler, of another number of processes with a
                custom sampler, of an unknown version, or incomplete.
        """
        world_size = self._share().world_size
        self._position.load(state, lambda samples: not self._planner().batches(samples), world_size)
        self.seed = self._position.seed

    def peek(self, batches: int = 1) -> list[Any]:
        """Return copies of the next `batches` batches, or fewer at the end of the epoch; the position stays.

        It may be called in the middle of an iteration.
        """
        check_whole_number("look at the next batches", "batches", batches, 1)
        with self.aside(), closing(self._batches()) as coming:
            return [map_tensors(batch, torch.Tensor.clone) for batch in itertools.islice(coming, batches)]

    @contextmanager
    def aside(self) -> Iterator[meters.LoaderMeters]:
        """Return a block whose iterations begin at the current position, and after which the position is restored.

        They publish no events; the block's own meters count them, except for what the loader's parts do.
        """
        before, self._aside = self._aside, meters.LoaderMeters(facts=self.meters.facts)
        try:
            with self._position.aside():
                yield self._aside
        finally:
            self._aside = before

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, which begins when the first one is asked for."""
        self._check_counts("load batches", self._share())
        return self._batches()

    def _batches(self) -> Generator[Any]:
        epoch, start = self._position.begin()
        order, seed = self._position.pure_order, self.seed  # a state that is loaded meanwhile is for the next one
        planner, engine, is_published = self._planner(), self._pipeline.current_engine(), self._aside is None
        counts = self.meters if self._aside is None else self._aside
        if is_published:
            meters.used(counts)
            if meters.is_heard():
                meters.publish(meters.EpochStarted(counts, epoch, planner.batches(start), planner.samples(start)))
        clock: meters.Clock
        clock = (
            meters.HostClock(counts.spent)
            if self.device.type == "cpu"
            else meters.DeviceClock(lambda: set_mark(self.device))
        )
        counts.begin_pass(clock)
        stepped, now = clock.stepped, time.perf_counter
        requested = now()
        plans = EndDetector(planner.plans(epoch, start, engine.plan_batches))
        batches = engine.batches(seed, epoch, iter(plans))
        at_last, received = self._pipeline.stages.at_last, counts.batches
        as_structured = _unchanged if self._columns is None else self._columns.batch
        try:
            for made in batches:
                batch = as_structured(made.values) if at_last is None else self._finished(order, seed, epoch, made)
                self._position.receive(epoch, made.end, is_over=made.end == plans.end)
                samples = len(made.positions)
                counts.batches += 1
                counts.samples += samples
                counts.ready += made.was_ready
                clock.given(made.marks)
                del made
                given = now()
                if is_published and meters.is_heard():
                    meters.publish(meters.BatchTaken(counts))
                yield batch
                del batch
                left = now()
                stepped(requested, given, left, samples)
                requested = left
                if not counts.batches % _SETTLED_EVERY:
                    counts.settle(clock)
            if not start and counts.batches == received and self._bad.reasons:
                found = f"{format_things(planner.samples(0), 'image file')} of which none can be decoded"
                next_step = "See loader.bad_samples"
                raise BadImage(cannot("load an epoch", found, "at least one readable image", next_step))
            self._position.receive(epoch, 0, is_over=True)  # also if the last batches held bad samples only
        finally:
            batches.close()
            counts.settle(clock)

    def _finished(self, order: Order | None, seed: int, epoch: int, made: Batch) -> Any:
        """Return a batch as the user gets it, after the last steps of the transform."""
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
                        self._apply_at_last(values, label_place, draws)
                else:
                    self._apply_at_last(values, label_place, draws)
        return whole(values)

    def _apply_at_last(self, values: list[Any], place: int | None, draws: Draws) -> None:
        transform = self._pipeline.stages.at_last
        assert transform is not None
        labels = None if place is None else values[place]
        began, size = time.perf_counter(), bytes_in(values[0])
        if isinstance(transform, Transform):
            values[0], labels = transform.apply(values[0], labels, draws)
        else:
            values[0] = transform(values[0])
        if place is not None:
            values[place] = labels
        # The host's seconds; no CPU seconds, which are of workers and say what more of them would bring.
        self.meters.add("augment", len(draws.positions), size, time.perf_counter() - began)

    def _describe(self, order: Order | None, draws: Draws) -> str:
        """Return the samples of a batch for a message; those of a custom sampler by their position."""
        if order is None:
            count, first = len(draws.positions), draws.positions.item(0)
            return f"{format_things(count, 'sample')} from position {first} of epoch {draws.epoch}"
        indices = [order.indices(draws.epoch, at, at + 1).item() for at in draws.positions.tolist()]
        return describe_samples(draws.epoch, indices, partial(name_of, self.dataset))

    def _share(self) -> Share:
        return share_of("load batches", *self._given_share)

    def _planner(self) -> OrderPlanner | SamplerPlanner:
        """Return what plans the batches of this process, for as many processes as there are now."""
        position, share = self._position, self._share()
        if position.pure_order is not None:
            return OrderPlanner(position.pure_order, self.batch_size, self.drop_last, share)
        return SamplerPlanner(
            position.order, self._yields_batches, self.seed, self._count, self.batch_size, self.drop_last, share
        )

    def _check_counts(self, act: str, share: Share) -> None:
        """Raise `InvalidOption` for a loader that would yield no batch, or not equally many on each rank."""
        check_skipping(act, self._bad.on_bad, share)
        if self._position.pure_order is not None:
            check_counts(act, self._position.pure_order, self.batch_size, self.drop_last, share)


def _unchanged(batch: Any) -> Any:
    return batch


def _name_of(transform: Callable[..., Any]) -> str:
    """Return the name of a function, or the text of a transform in one line."""
    return str(getattr(transform, "__name__", None) or shown(transform))

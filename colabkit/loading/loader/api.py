"""`Loader` yields batches on the device at memory speed, in an order that can be resumed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Literal

import torch

from colabkit.foundation import BadImage, cannot, check_whole_number, format_things, kind_of, meters
from colabkit.loading.augment.checks import checked_size, shown
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform
from colabkit.loading.loader.building import Asked, built_by_sample, built_of_feed
from colabkit.loading.loader.decoding import BadSamples, OnBad
from colabkit.loading.loader.facts import facts_of
from colabkit.loading.loader.failing import check_collated, failing_in, name_of, place_in
from colabkit.loading.loader.feeds import as_samples, feed_of, fingerprint_of, wrapped
from colabkit.loading.loader.options import (
    check_beside,
    check_callable,
    check_choice,
    check_counts,
    check_drop_last,
    check_skipping,
    check_transform,
    order_of,
    share_of,
    usable_device,
    why_one_by_one,
)
from colabkit.loading.loader.portions import EpochPlan, OrderedPlan, Portions, Share
from colabkit.loading.loader.position import Position
from colabkit.loading.loader.sampled import SampledPlan, gives_batches
from colabkit.loading.loader.seeding import generators_kept, seed_all
from colabkit.loading.loader.structures import bytes_of, fields_of, mapped
from colabkit.loading.loader.tiers import Keep, Tier
from colabkit.loading.loader.transfer import marked
from colabkit.loading.loader.workers import Batch
from colabkit.loading.sampler.orders import Order

_SETTLED_EVERY = 64  # batches: a GPU's clock keeps a few times as many that nobody has asked it for


class Loader:
    """Yields batches of a data set, made in the background, in an order that can be resumed.

    The data set is a split of a pack or a view of one, files (`FileDataset`), tensors or arrays (one, a tuple or a dict
    of them), or any map-style torch data set. A batch has the data set's fields, in its order: `images, labels` as a
    rule, one tensor alone where there is one field.

    - Images of a pack or of files are `uint8 [B, C, H, W]` in channels-last memory, or what `transform` makes of them;
      other samples keep their stored shape and dtype. Class labels are `int64 [B]`, others as stored. Text and bytes
      come as lists.
    - A batch stays valid as long as it is held. Each iteration is one epoch; with `shuffle` each has an order of its
      own, which depends on `seed` and the epoch's number alone.
    - Rows are not checked against their CRCs, which would take as long as gathering them: `verify()` does that. Image
      files of a pack are.
    - Under `torch.distributed` every process gets its share of each global batch; every sample comes once in an epoch,
      and all processes get equally many batches. A sampler of the user's own says itself which samples are whose.
    - A map-style data set, a `collate_fn`, a transform of torchvision and `augment.PerSample` run in worker processes,
      and so does a subclass with a `__getitem__` of its own, whatever it inherits from. On the CPU the transforms of
      `colabkit.augment`, `PerBatch` among them, run in worker threads. Other callables on a batch run where the batch
      is handed over, with the global generators seeded by its position, so that what they draw comes again after a
      resume. On a GPU all run there, in the caller's stream.

    Args:
        dataset: what to load.
        batch_size: samples of a batch, of each process.
        shuffle: mix the samples anew in every epoch; `"block"` mixes over a window of blocks, for packs beyond RAM.
        seed: of the orders and of the transforms.
        drop_last: leave out a last batch that is not full; a sampler that gives batches says itself which there are.
        device: where batches go; None leaves them on the CPU.
        transform: applied to the images of each batch: of `colabkit.augment`, of torchvision, or any callable. Several
            are one by `Compose([...])`: of `colabkit.augment` for batches, of torchvision for single samples.
        sampler: the order, instead of `shuffle`: one of `colabkit.sampler`, such as `Balanced(labels)`, or any iterable
            of numbers of samples, or of lists of them that are batches, with a length. What torch's draw depends on the
            seed of their generator, on `seed` and the epoch; so does what others draw from the global generators until
            they give their first, equally in all processes. One that draws later resumes if it has a generator of its
            own and seeds it in `set_epoch`, which is called on those that have it.
        collate_fn: makes a batch of a list of samples, as of `DataLoader`. It may leave samples out, but not beside a
            transform of `colabkit.augment`, which draws for each.
        fields: names of the fields that batches have, in this order; None for all. Packs and files call their samples
            `X` and their labels `Y`, arrays of a tuple are `0`, `1` and so on. What is transformed is the one that
            comes first in the data set.
        as_dict: batches are dicts by the fields' names, as in `batch["X"]`.
        size: of decoded image files: one side, or height and width; scaled and cut as `pack()` does it. What is decoded
            to one size is kept, so that later epochs run at the speed of rows. Rows may have this size already.
        keep: where samples live: `"gpu"`, `"ram"`, `"disk"`, or `"auto"` by what is free; `tier` says what was chosen.
        on_bad: what to do about image files that cannot be decoded: `"raise"`, `"skip"` in a single process, or a
            `"blank"` image. Good images that differ in size, where one size is needed, are an error always.
        num_workers: threads that decode and transform, or processes; None for as many as CPUs may be used; with 0 all
            is done where a batch is asked for, but for what is sent to a GPU.
        prefetch_batches: how many batches are made ahead; None chooses by their size.
        persistent_workers: let worker processes live on between epochs, which saves a tenth of a second for each; what
            is changed in the data set meanwhile is not seen by them. Threads need none of it.
        rank: number of this process; None asks `torch.distributed`.
        world_size: how many processes there are; None likewise.

    Raises:
        InvalidOption: if an argument cannot be meant.
        BadImage: while it is iterated, if an image cannot be decoded, or none in an epoch.
        LoaderFailed: while it is iterated, if a data set, a transform or `collate_fn` fails; its cause is the error.

    Attributes:
        meters: counts and seconds of each part, and of the user's waiting.
        tier: where samples live, and why: `tier.name` is `"gpu"`; `"ram"`; `"disk"`, from where the kernel or the
            loader fetches them; or `"source"`, if each epoch decodes them, or asks the data set for them, anew.
            `tier.reason` has the bytes that decided, and `tier.rows` tells how many decoded samples are kept.
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
        batch_size = check_whole_number(act, "batch_size", batch_size, 1)
        seed = check_whole_number(act, "seed", seed, 0)
        if prefetch_batches is not None:
            prefetch_batches = check_whole_number(act, "prefetch_batches", prefetch_batches, 1)
        if num_workers is not None:
            num_workers = check_whole_number(act, "num_workers", num_workers, 0)
        check_transform(act, transform)
        check_callable(act, "collate_fn", collate_fn, "Pass a function of a list of samples")
        self.dataset = whole = wrapped(act, dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.device = usable_device(act, device)
        check_choice(act, keep, on_bad, self.device)
        self.transform = transform
        self.meters = meters.LoaderMeters()
        self._aside: meters.LoaderMeters | None = None
        self._said = rank, world_size
        self._bad = BadSamples(on_bad)
        sides = None if size is None else checked_size(act, size)
        share = share_of(act, rank, world_size)
        asked = Asked(
            batch_size,
            self.device,
            transform,
            sides,
            keep,
            num_workers,
            prefetch_batches,
            persistent_workers,
            self._bad,
            self.meters,
        )
        why = why_one_by_one(transform, collate_fn)
        self._feed = None if why else feed_of(act, self.dataset, fields, as_dict)
        if self._feed is None:
            self.dataset = as_samples(act, self.dataset)
            given = {"fields": fields is not None, "as_dict": as_dict, "size": size is not None}
            why = why or (kind_of(self.dataset), "load a pack, image files or arrays")
            check_beside(act, {**given, "on_bad": on_bad != "raise"}, why)
            self._count = len(self.dataset)
            self._built = built_by_sample(act, asked, self.dataset, collate_fn)
        else:
            self._count = self._feed.count
            self._built = built_of_feed(act, asked, self._feed, self.dataset, share.world_size)
        order = order_of(act, shuffle, seed, self._count, sampler, self._built.row_bytes)
        self._gives_batches = not isinstance(order, Order) and gives_batches(order)
        check_drop_last(act, drop_last, self._gives_batches)
        self._position = Position(order, seed, fingerprint_of(act, whole))
        self._check_counts(act, share)
        self.meters.facts = facts_of(self._built, self.dataset, self._count, transform and _name_of(transform))

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self._plan().batches(0)

    def __repr__(self) -> str:
        share = self._share()
        about = [
            f"{format_things(len(self), 'batch')} of {self.batch_size}",
            self._position.order_text,
            f"on {self.device}",
            *([f"rank {share.rank} of {share.world_size}"] if share.world_size > 1 else []),
            *([f"transform {_name_of(self.transform)}"] if self.transform is not None else []),
            f"samples in {self.tier}",
        ]
        what = (
            f"{type(self.dataset).__name__} of {format_things(self._count, 'sample')}"
            if self._feed is None
            else self._feed.about
        )
        return f"Loader of {what}: {', '.join(about)}"

    @property
    def tier(self) -> Tier:
        """Where samples live, and why."""
        return self._built.tier

    @property
    def shuffle(self) -> bool | str:
        """How samples are mixed: True, False or `"block"`; False for a sampler of the user's own."""
        return self._position.shuffle

    @property
    def bad_samples(self) -> dict[str, str]:
        """Names of image files that could not be decoded so far, with the reason; the first 1,000."""
        return dict(self._bad.found)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next iteration begins, or goes on with after `load_state_dict`."""
        return self._position.next_epoch

    @property
    def received(self) -> tuple[int, int]:
        """Epoch, and samples of it that all processes have received: `epoch` and `samples` of `state_dict()`.

        With a sampler of the user's own, samples that this process has received.
        """
        return self._position.received

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the epoch of this number; a position loaded for this epoch is kept."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is: what `load_state_dict` needs to go on after the last batch received.

        Positions count the samples that all processes together have received, so a state of one process serves all.
        With a sampler of the user's own they count those that each process has received, so it serves all as long as
        these are equally many.
        """
        return self._position.state_dict(self.batch_size, self._share().world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, in the same order.

        Batch size, number of processes and threads, device, transform and prefetching may differ; seed and shuffle are
        taken from the state. A sampler of the user's own gives each process samples of its own: with one, the number of
        processes may differ only if the state was taken at the end of an epoch.

        Raises:
            InvalidOption: if the state is of other data, of another sampler, of another number of processes that a
                sampler of the user's own served, of an unknown version, or not whole.
        """
        world_size = self._share().world_size
        self._position.load(state, lambda samples: not self._plan().batches(samples), world_size)
        self.seed = self._position.seed

    def peek(self, batches: int = 1) -> list[Any]:
        """Return copies of the batches that follow those received, without moving on.

        It may be called in the middle of an iteration. Fewer come where the epoch ends before.

        Args:
            batches: how many.
        """
        check_whole_number("look at the next batches", "batches", batches, 1)
        with self.aside(), closing(self._batches()) as coming:
            return [mapped(batch, torch.Tensor.clone) for batch in itertools.islice(coming, batches)]

    @contextmanager
    def aside(self) -> Iterator[meters.LoaderMeters]:
        """Return a block within which iterations begin after what was received, and after which nothing has moved.

        Nobody is told of them; the block's own meters count them, but for what the loader's parts do.
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
        plan, engine, is_told = self._plan(), self._built.engine_now(), self._aside is None
        counts = self.meters if self._aside is None else self._aside
        if is_told:
            meters.used(counts)
            if meters.is_heard():
                meters.publish(meters.EpochStarted(counts, epoch, plan.batches(start), plan.samples(start)))
        clock: meters.Clock
        clock = (
            meters.HostClock(counts.spent)
            if self.device.type == "cpu"
            else meters.DeviceClock(lambda: marked(self.device))
        )
        counts.begin_pass(clock)
        stepped, now = clock.stepped, time.perf_counter
        asked = now()
        portions = Portions(plan.portions(epoch, start, engine.portion_batches))
        ready = engine.batches(seed, epoch, iter(portions))
        at_last, received = self._built.stages.at_last, counts.batches
        as_structured = _as_it_is if self._feed is None else self._feed.batch
        try:
            for taken in ready:
                batch = as_structured(taken.values) if at_last is None else self._finished(order, seed, epoch, taken)
                self._position.reached(epoch, taken.reached, is_over=taken.reached == portions.stop)
                samples = len(taken.positions)
                counts.batches += 1
                counts.samples += samples
                counts.ready += taken.was_ready
                clock.given(taken.marks)
                del taken
                given = now()
                if is_told and meters.is_heard():
                    meters.publish(meters.BatchTaken(counts))
                yield batch
                del batch
                left = now()
                stepped(asked, given, left, samples)
                asked = left
                if not counts.batches % _SETTLED_EVERY:
                    counts.settle(clock)
            if not start and counts.batches == received and self._bad.found:
                found = f"{format_things(plan.samples(0), 'image file')} of which none can be decoded"
                raise BadImage(cannot("load an epoch", found, "a good one at least", "See loader.bad_samples"))
            self._position.reached(epoch, 0, is_over=True)  # also if the last batches held bad samples only
        finally:
            ready.close()
            counts.settle(clock)

    def _finished(self, order: Order | None, seed: int, epoch: int, taken: Batch) -> Any:
        """Return a batch as the user gets it, after what is done to it at last."""
        whole: Callable[[Sequence[Any]], Any]
        if self._feed is not None:
            values, whole, label_place = [*taken.values], self._feed.batch, self._feed.label_place
        else:
            values, whole = fields_of(taken.values)
            label_place = 1 if len(values) > 1 else None
            check_collated(self._built.stages.at_last, values[0], len(taken.positions))
        if len(taken.positions):
            draws = Draws(seed, epoch, taken.positions)
            with failing_in(lambda: self._place(order, draws)):
                if self._built.stages.draws_globally:
                    with generators_kept(self.device):
                        seed_all(draws, self.device)
                        self._apply_at_last(values, label_place, draws)
                else:
                    self._apply_at_last(values, label_place, draws)
        return whole(values)

    def _apply_at_last(self, values: list[Any], place: int | None, draws: Draws) -> None:
        transform = self._built.stages.at_last
        assert transform is not None
        labels = None if place is None else values[place]
        began, size = time.perf_counter(), bytes_of(values[0])
        if isinstance(transform, Transform):
            values[0], labels = transform.apply(values[0], labels, draws)
        else:
            values[0] = transform(values[0])
        if place is not None:
            values[place] = labels
        # The host's seconds; no CPU seconds, which are of workers and say what more of them would bring.
        self.meters.add("augment", len(draws.positions), size, time.perf_counter() - began)

    def _place(self, order: Order | None, draws: Draws) -> str:
        """Return the samples of a batch for a message; those of a sampler of the user's own by their position."""
        if order is None:
            count, first = len(draws.positions), draws.positions.item(0)
            return f"{format_things(count, 'sample')} from position {first} of epoch {draws.epoch}"
        numbers = [order.indices(draws.epoch, at, at + 1).item() for at in draws.positions.tolist()]
        return place_in(draws.epoch, numbers, partial(name_of, self.dataset))

    def _share(self) -> Share:
        return share_of("load batches", *self._said)

    def _plan(self) -> EpochPlan:
        """Return the batches of this process, as many as there are now."""
        position, share = self._position, self._share()
        if position.pure_order is not None:
            return OrderedPlan(position.pure_order, self.batch_size, self.drop_last, share)
        return SampledPlan(
            position.order, self._gives_batches, self.seed, self._count, self.batch_size, self.drop_last, share
        )

    def _check_counts(self, act: str, share: Share) -> None:
        """Refuse a loader that would give no batch, or not as many on each rank."""
        check_skipping(act, self._bad.on_bad, share)
        if self._position.pure_order is not None:
            check_counts(act, self._position.pure_order, self.batch_size, self.drop_last, share)


def _as_it_is(batch: Any) -> Any:
    return batch


def _name_of(transform: Callable[..., Any]) -> str:
    """Return a function's name, or what a transform says of itself, in one line."""
    return str(getattr(transform, "__name__", None) or shown(transform))

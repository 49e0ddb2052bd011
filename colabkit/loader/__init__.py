"""`Loader` yields batches on the device at memory speed, in an order that can be resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch

from colabkit import meters
from colabkit.augment import Draws, Transform
from colabkit.environment import near_folder, usable_cpus
from colabkit.errors import ColabkitError, InvalidOption, cannot, check_whole_number
from colabkit.loader.decoding import BadSamples, OnBad, row_shape_of
from colabkit.loader.engines import Engine, InProcesses, OnDevice, failed
from colabkit.loader.feeds import Column, Feed, as_samples, feed_of, wrapped
from colabkit.loader.gather import RowGather
from colabkit.loader.kept import KeptRows
from colabkit.loader.options import (
    check_callable,
    check_choice,
    checked_size,
    order_of,
    share_of,
    usable_device,
)
from colabkit.loader.paging import Populating, mapped_rows
from colabkit.loader.portions import OrderedPlan, Plan, Portions, Share
from colabkit.loader.position import Position
from colabkit.loader.processes import SampleWorkers, is_per_sample
from colabkit.loader.resident import Resident
from colabkit.loader.sampled import SampledPlan, gives_batches
from colabkit.loader.seeding import generators_kept, seed_all
from colabkit.loader.stages import Stages, stages_of
from colabkit.loader.structures import fields_of
from colabkit.loader.threaded import Depth, Images, InThreads
from colabkit.loader.tiers import Keep, Room, Tier, choose_tier, fits_on
from colabkit.loader.workers import Batch
from colabkit.sampler import Order

__all__ = ["Loader", "Tier"]

_GROUP_BYTES = 8 << 20  # made together: two of them stay in a processor's cache
_DEVICE_GROUP_BYTES = 64 << 20
_GROUP_BATCHES = 32
_LEAST_AHEAD = 4
_AHEAD_BYTES = 512 << 20


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
      and all processes get equally many batches.
    - A map-style data set, a `collate_fn`, a transform of torchvision and `augment.PerSample` run in worker processes.
      On the CPU the transforms of `colabkit.augment`, `PerBatch` among them, run in worker threads. Other callables on
      a batch run where the batch is handed over, with the global generators seeded by its position, so that what they
      draw comes again after a resume. On a GPU all run there, in the caller's stream.

    Args:
        dataset: what to load.
        batch_size: samples of a batch, of each process.
        shuffle: mix the samples anew in every epoch; `"block"` mixes over a window of blocks, for packs beyond RAM.
        seed: of the orders and of the transforms.
        drop_last: leave out a last batch that is not full.
        device: where batches go; None leaves them on the CPU.
        transform: applied to the images of each batch: of `colabkit.augment`, of torchvision, or any callable.
        sampler: the order, instead of `shuffle`: one of `colabkit.sampler`, such as `Balanced(labels)`, or any iterable
            of numbers of samples, or of lists of them that are batches, with a length. What torch's draw depends on the
            seed of their generator, on `seed` and the epoch; `set_epoch` is called on those that have it.
        collate_fn: makes a batch of a list of samples, as of `DataLoader`.
        fields: names of the fields that batches have, in the data set's order; None for all.
        as_dict: batches are dicts by the fields' names.
        size: of decoded image files: one side, or height and width; scaled and cut as `pack()` does it. What is decoded
            to one size is kept, so that later epochs run at the speed of rows.
        keep: where samples live: `"gpu"`, `"ram"`, `"disk"`, or `"auto"` by what is free; `tier` says what was chosen.
        on_bad: what to do about image files that cannot be decoded: `"raise"`, `"skip"`, or a `"blank"` image.
        num_workers: threads that decode and transform, or processes; None for as many as CPUs may be used; with 0 all
            is done where a batch is asked for, but for what is sent to a GPU.
        prefetch_batches: how many batches are made ahead; None chooses by their size.
        rank: number of this process; None asks `torch.distributed`.
        world_size: how many processes there are; None likewise.

    Raises:
        InvalidOption: if an argument cannot be meant.

    Attributes:
        meters: counts and seconds of each part, and of the user's waiting.
        tier: where samples live, and why.
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
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        act = "make a Loader"
        check_whole_number(act, "batch_size", batch_size, 1)
        check_whole_number(act, "seed", seed, 0)
        for name, value, least in (("prefetch_batches", prefetch_batches, 1), ("num_workers", num_workers, 0)):
            if value is not None:
                check_whole_number(act, name, value, least)
        check_callable(act, "transform", transform, "a batch of images")
        check_callable(act, "collate_fn", collate_fn, "a list of samples")
        check_choice(act, keep, on_bad)
        self.dataset = wrapped(dataset)
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.device = usable_device(act, device)
        self.transform = transform
        self.meters = meters.LoaderMeters()
        self._said = rank, world_size
        self._bad = BadSamples(on_bad)
        self._size = checked_size(act, size)
        self._keep: Keep = keep
        self._prefetch_batches = prefetch_batches
        self._num_workers = num_workers
        share = share_of(act, rank, world_size)
        by_sample = collate_fn is not None or is_per_sample(transform)
        self._feed = None if by_sample else feed_of(act, self.dataset, fields, as_dict)
        self._stages = Stages()
        self._kept: KeptRows | None = None
        self._engine: Engine
        if self._feed is None:
            if fields is not None or as_dict or self._size is not None or on_bad != "raise":
                found = "fields=, as_dict=, size= or on_bad= for samples that are made one by one"
                raise InvalidOption(cannot(act, found, "none of these", "Leave them out; collate_fn= makes the batch"))
            self.dataset = as_samples(act, self.dataset)
            self._count = _length(act, self.dataset)
            self.tier = choose_tier(
                act, keep, Room(None, 0, 0), row_bytes=None, count=0, is_decoded=False, is_on_disk=False
            )
            self._engine = self._in_processes(collate_fn)
            row_bytes = None
        else:
            self._count = self._feed.count
            self.tier, self._engine, row_bytes = self._in_threads(act, self._feed, share)
        order = order_of(act, shuffle, seed, self._count, sampler, row_bytes)
        self._gives_batches = not isinstance(order, Order) and gives_batches(order)
        self._position = Position(order, seed, self._fingerprint())
        self._check_counts(act, share)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self._plan().batches(0)

    def __repr__(self) -> str:
        order = self._position.order_text
        what = repr(self.dataset) if self._feed is None else self._feed.about
        batches = f"{len(self)} batches of {self.batch_size}, {order}, on {self.device}"
        return f"Loader of {what}: {batches}, samples in {self.tier}"

    @property
    def shuffle(self) -> bool | str:
        """How samples are mixed: True, False or `"block"`; False for a sampler of the user's own."""
        return self._position.shuffle

    @property
    def bad_samples(self) -> dict[str, str]:
        """Names of image files that could not be decoded so far, with the reason; the first 1,000."""
        return dict(self._bad.found)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the epoch of this number; a position loaded for this epoch is kept."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is: what `load_state_dict` needs to go on after the last batch received.

        Positions count the samples that all processes together have received, so a state of one process serves all.
        """
        return self._position.state_dict(self.batch_size * self._share().world_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, in the same order.

        Batch size, number of processes and threads, device, transform and prefetching may differ; seed and shuffle are
        taken from the state.

        Raises:
            InvalidOption: if the state is of other data, of another sampler, of an unknown version, or not whole.
        """
        self._position.load(state, lambda samples: not self._plan().batches(samples))
        self.seed = self._position.seed

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, which begins when the first one is asked for."""
        self._check_counts("load batches", self._share())
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        epoch, start = self._position.begin()
        plan, engine, counts = self._plan(), self._now(), self.meters
        meters.publish(meters.EpochStarted(counts, epoch, plan.batches(start), plan.samples(start)))
        portions = Portions(plan.portions(epoch, start, engine.group_batches))
        ready = engine.batches(self.seed, epoch, iter(portions))
        at_last = self._stages.at_last
        as_structured = _as_it_is if self._feed is None else self._feed.batch
        try:
            for taken in ready:
                batch = as_structured(taken.values) if at_last is None else self._finished(epoch, taken)
                self._position.reached(epoch, taken.reached, is_over=taken.reached == portions.stop)
                counts.batches += 1
                counts.samples += len(taken.positions)
                counts.wait_s += taken.wait_s
                counts.ready += taken.was_ready
                del taken
                if meters.is_heard():
                    meters.publish(meters.BatchTaken(counts))
                left = time.perf_counter()
                yield batch
                del batch
                counts.user_s += time.perf_counter() - left
            self._position.reached(epoch, 0, is_over=True)  # also if the last batches held bad samples only
        finally:
            ready.close()

    def _finished(self, epoch: int, taken: Batch) -> Any:
        """Return a batch as the user gets it, after what is done to it at last."""
        whole: Callable[[Sequence[Any]], Any]
        if self._feed is not None:
            values, whole, label_place = taken.values, self._feed.batch, self._feed.label_place
        else:
            values, whole = fields_of(taken.values)
            label_place = 1 if len(values) > 1 else None
        if len(taken.positions):
            draws = Draws(self.seed, epoch, taken.positions)
            if self._stages.draws_globally:
                with generators_kept(self.device):
                    seed_all(draws, self.device)
                    self._apply_at_last(values, label_place, draws)
            else:
                self._apply_at_last(values, label_place, draws)
        return whole(values)

    def _apply_at_last(self, values: list[Any], place: int | None, draws: Draws) -> None:
        transform = self._stages.at_last
        assert transform is not None
        try:
            if not isinstance(transform, Transform):
                values[0] = transform(values[0])
                return
            values[0], labels = transform.apply(values[0], None if place is None else values[place], draws)
            if place is not None:
                values[place] = labels
        except ColabkitError:
            raise
        except Exception as error:
            raise failed(error) from error

    def _in_threads(self, act: str, feed: Feed, share: Share) -> tuple[Tier, Engine, int | None]:
        """Return where samples live, what makes batches of them, and the bytes of a sample."""
        samples = feed.samples
        is_decoded = not (isinstance(samples, RowGather) or _is_reader(samples))
        if not is_decoded and (self._size is not None or self._bad.on_bad != "raise"):
            found = "size= or on_bad= for samples that need no decoding"
            raise InvalidOption(cannot(act, found, "none of these", "Leave them out; a transform can crop"))
        on_device = self.device.type == "cuda"
        row_shape, by_sample = None, False
        if is_decoded:
            crops = stages_of(self.transform, on_device=on_device, by_sample=True, resized=True).geometry
            by_sample = self._size is None and crops is not None and crops.size is not None
            if not by_sample:
                row_shape = row_shape_of(samples, feed.count, self._size, self._bad)  # type: ignore[arg-type]
            by_sample = by_sample or row_shape is None
        resized = row_shape is not None or (isinstance(samples, RowGather) and samples.are_images_of_bytes)
        self._stages = stages_of(self.transform, on_device=on_device, by_sample=by_sample, resized=resized)
        row_bytes = samples.row_bytes if isinstance(samples, RowGather) else None
        if row_shape is not None:
            row_bytes = row_shape[0] * row_shape[1] * row_shape[2]
        room = Room.here(self.device, near_folder(os.environ), share.world_size)
        is_mapped = feed.is_on_disk
        tier = choose_tier(
            act, self._keep, room, row_bytes=row_bytes, count=feed.count, is_decoded=is_decoded, is_on_disk=is_mapped
        )
        if tier.name == "gpu" and not is_decoded:
            return tier, self._on_device(feed.columns, row_bytes), row_bytes
        images = None
        if is_decoded:
            if row_shape is not None and tier.rows:
                where: Literal["ram", "disk"] = "disk" if tier.name == "disk" else "ram"
                self._kept = KeptRows(feed.count, row_shape, tier.rows, where, near_folder(os.environ))
            images = Images(row_shape, self._size is not None, self._kept, self._bad)
        mapped = mapped_rows(self.dataset, samples) if is_mapped and isinstance(samples, RowGather) else None
        populating = None
        if mapped is not None and tier.name == "ram" and isinstance(samples, RowGather):
            populating = Populating(samples.maps)
        engine = InThreads(
            feed,
            self._stages,
            images,
            self._depth(feed, is_decoded, row_bytes),
            self.batch_size,
            self.device,
            self.meters,
            populating,
            mapped if tier.name == "disk" else None,
        )
        return tier, engine, row_bytes

    def _in_processes(self, collate_fn: Callable[[list[Any]], Any] | None) -> Engine:
        """Return what makes batches sample by sample."""
        of_sample = self.transform if is_per_sample(self.transform) else None
        self._stages = Stages() if of_sample is not None else Stages(at_last=self.transform)
        workers = SampleWorkers(
            self.dataset,
            of_sample,
            collate_fn,
            _cpus() if self._num_workers is None else self._num_workers,
            self._prefetch_batches,
            self.device.type == "cuda",
        )
        return InProcesses(workers, self.device, self.meters)

    def _depth(self, feed: Feed, is_decoded: bool, row_bytes: int | None) -> Depth:
        """Return how much is made ahead: many small batches, a few large ones."""
        works = is_decoded or self._stages.works_in_threads
        threads = (_cpus() if works else 1) if self._num_workers is None else self._num_workers
        threads = threads if works else min(1, threads)  # rows are gathered faster than two threads take turns
        threads = max(1, threads) if self.device.type == "cuda" else threads
        batch_bytes = max(1, self.batch_size * (row_bytes or 1 << 18))
        fitting = 1 if is_decoded else max(1, min(_GROUP_BATCHES, _GROUP_BYTES // batch_bytes))
        most = max(2, _AHEAD_BYTES // (4 * batch_bytes) if works else 2 * fitting)  # floats are four times as large
        ahead = self._prefetch_batches or max(min(_LEAST_AHEAD, most), 2 * fitting)
        group = max(1, min(fitting, ahead // 2))
        begins_here = not works and self.device.type == "cpu" and self._prefetch_batches is None
        return Depth(group, max(1, ahead // group), threads, begins_here)

    def _now(self) -> Engine:
        """Return what makes the batches of the next epoch: when all is decoded and the GPU has room, rows there."""
        if self.tier.name == "gpu" and self._kept is not None and self._kept.is_whole:
            assert self._feed is not None
            columns = dict(self._feed.columns)
            columns[next(iter(columns))] = self._kept.gather()
            row_bytes = prod(self._kept.shape)
            try:
                if fits_on(self.device, row_bytes * self._count):
                    self._engine = self._on_device(columns, row_bytes)
                    self._kept = None
                    return self._engine
            except torch.cuda.OutOfMemoryError:
                pass
            self.tier = Tier("ram", "the GPU has no room any more for what is decoded", self.tier.rows)
        return self._engine

    def _on_device(self, columns: Mapping[str, Column], row_bytes: int | None) -> Engine:
        """Return what gathers batches on the device; small ones several at a time."""
        fitting = _DEVICE_GROUP_BYTES // max(1, self.batch_size * (row_bytes or 1))
        group_batches = max(1, min(_GROUP_BATCHES, fitting))
        return OnDevice(Resident(columns, self.device), self.meters, group_batches)

    def _share(self) -> Share:
        return share_of("load batches", *self._said)

    def _plan(self) -> Plan:
        """Return the batches of this process, as many as there are now."""
        position = self._position
        if position.pure_order is not None:
            return OrderedPlan(position.pure_order, self.batch_size, self.drop_last, self._share())
        return SampledPlan(position.order, self._gives_batches, self.seed, self._count, self.batch_size, self.drop_last)

    def _fingerprint(self) -> str:
        if self._feed is not None:
            return self._feed.fingerprint
        return getattr(self.dataset, "fingerprint", f"{type(self.dataset).__qualname__} of {self._count}")

    def _check_counts(self, act: str, share: Share) -> None:
        """Refuse a loader that would give no batch."""
        order = self._position.pure_order
        if order is not None and not len(self):
            found = f"{len(order)} samples"
            if self.drop_last and len(order):
                found = f"batch_size={self.batch_size} with drop_last, and {found}"
                raise InvalidOption(cannot(act, found, "at least one full batch", "Use a smaller batch_size"))
            needed = "at least one sample" if share.world_size == 1 else f"one for each of {share.world_size} processes"
            raise InvalidOption(cannot(act, found, needed, "Check the data set"))


def _cpus() -> int:
    return max(1, round(usable_cpus()))


def _as_it_is(batch: Any) -> Any:
    return batch


def _is_reader(column: Any) -> bool:
    return callable(column)


def _length(act: str, dataset: Any) -> int:
    """Return the samples of a map-style data set."""
    if hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__") and not isinstance(dataset, str):
        return len(dataset)
    found = f"a {type(dataset).__name__}"
    needed = "a data set with a length and an index, or arrays"
    raise InvalidOption(cannot(act, found, needed, "Pass open_pack(path)['train'], say"))

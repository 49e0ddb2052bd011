"""Download the shards of a remote pack ahead of need, in the order in which an epoch needs them."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, TypeAlias

from colabkit.foundation import ColabkitError, start_thread
from colabkit.loading.engine.batches import BatchPlan
from colabkit.loading.engine.read_ahead import Cancellation
from colabkit.loading.engine.share import Share
from colabkit.loading.sampler.mixed import MixedOrder
from colabkit.loading.sampler.orders import Order, SequentialOrder
from colabkit.loading.sampler.shard_order import ShardShuffledOrder
from colabkit.packs import DOWNLOADS, Indices, PackedDataset, RemotePart, check_cache

Use: TypeAlias = tuple[int, int, int]
"""The positions at which an epoch begins and no longer needs a shard, and the number of the shard."""

_TICK_S = 0.05
# Seconds after the last request for samples after which a process counts as idle.
_IDLE_S = 1.0
_CLOSE_S = 10.0


def is_remote_pack(dataset: Any) -> bool:
    """Return whether a dataset is a split of a remote pack, or a view of one."""
    return isinstance(dataset, PackedDataset) and dataset.remote is not None


def shard_counts_of(dataset: Any) -> dict[int, int] | None:
    """Return the number of samples in each shard of a packed dataset, by number; None for others."""
    return dataset.shard_counts() if isinstance(dataset, PackedDataset) else None


def check_cache_for(act: str, dataset: Any, order: Order | None, share: Share) -> None:
    """Raise `InvalidOption` unless the caches can hold the shards that an order needs together, and those needed next.

    Args:
        act: verb and object of the message.
        dataset: the dataset; only splits of remote packs, views of them, and mixtures of both have caches.
        order: order of the samples; None if it is unknown, so that every sample may be needed next.
        share: share of this process; all processes of its machine use the same cache.
    """
    parts = dataset.remote_parts if isinstance(dataset, PackedDataset) else []
    for cache in dict.fromkeys(part.samples.cache for part in parts):
        needed = [
            _shards_at_once(part, _part_order(part, order), share) for part in parts if part.samples.cache is cache
        ]
        shards, why = sum(count for count, _ in needed), needed[0][1]
        if len(needed) > 1:
            why = f"for the {len(needed)} splits and views of the mixture that use it"
        check_cache(act, cache, shards, why)


def _part_order(part: RemotePart, order: Order | None) -> Order | None:
    """Return the order of a part, of which the order of a mixture has one for each pack."""
    return order.parts[part.number] if isinstance(order, MixedOrder) else order


def _shards_at_once(part: RemotePart, order: Order | None, share: Share) -> tuple[int, str]:
    """Return the number of shards that the cache must hold for an order, and the reason."""
    counts, most = part.counts or {}, part.samples.count_of_shards
    if isinstance(order, SequentialOrder) and counts:
        return min(2, most), "the current and the next one"
    if not isinstance(order, ShardShuffledOrder) or order.counts != tuple(counts.values()):
        return most, "since this order needs all of them at a time, unlike shuffle='block'"
    streams = {stream for one in share.of_machine() for stream in _own_streams(order, one)}
    each = f" in each of {len(streams)} streams" if len(streams) > 1 else ""
    most = len({place for stream in streams for place in order.shards(stream)})
    shards = min(2 * order.window_shards * len(streams), most)
    return shards, f"for two windows of {order.window_shards}{each}"


def _own_streams(order: ShardShuffledOrder, share: Share) -> range:
    # Positions p with p % world_size == turn reach these remainders of a division by the number of streams.
    step = math.gcd(order.streams, share.world_size)
    return range(share.turn % step if order.streams > 1 else 0, order.streams, step)


def _uses(part: RemotePart, order: Order | None, epoch: int, share: Share) -> list[Use]:
    """Return the uses of a part's shards by a process in an epoch, in the order in which they begin."""
    counts = part.counts or {}
    if isinstance(order, MixedOrder):
        return _mixed_uses(part, order, epoch, share)
    if isinstance(order, ShardShuffledOrder) and order.counts == tuple(counts.values()):
        uses, numbers = [], [*counts]
        for stream in _own_streams(order, share):
            begin = 0
            for end, places in order.windows(epoch, stream):
                first, stop = begin * order.streams + stream, (end - 1) * order.streams + stream + 1
                uses += [(first, stop, numbers[place]) for place in places]
                begin = end
        return sorted(uses, key=itemgetter(0))
    if isinstance(order, SequentialOrder) and counts:
        ends = itertools.pairwise(itertools.accumulate(counts.values(), initial=0))
        return [(first, stop, number) for (first, stop), number in zip(ends, counts, strict=True)]
    return [(0, sys.maxsize, number) for number in range(part.samples.count_of_shards)]


def _mixed_uses(part: RemotePart, order: MixedOrder, epoch: int, share: Share) -> list[Use]:
    """Return the uses of a part's shards at positions of a mixture, whose epoch may contain several passes."""
    own, count = order.parts[part.number], order.counts[part.number]
    begin = epoch * count
    uses = []
    for number in range(begin // len(own), -(-(begin + count) // len(own))):
        before = number * len(own) - begin
        for first, stop, shard in _uses(part, own, number, share):
            place, end = max(0, before + first), min(count, before + min(stop, len(own)))
            if place < end:
                uses.append((order.position(part.number, place), order.position(part.number, end - 1) + 1, shard))
    return uses


def _most_at_once(uses: list[Use]) -> int:
    stops = sorted(stop for _, stop, _ in uses)
    return max((begun + 1 - bisect_right(stops, first) for begun, (first, _, _) in enumerate(uses)), default=0)


class ShardReadAhead:
    """Background threads that download shards of one pack, and the record of those that unfinished batches still need.

    The threads download the shards in the order in which the epoch begins to use them, and then those of the next
    epoch, as far as the cache has room. A shard that is no longer used is closed.

    The cache keeps the shards with which the next epoch begins, as many as fit beside those that are used at the same
    time. Only downloads for the near future remove these too: training that waits for the link needs more room at
    once, while downloads further ahead would remove shards only to download them again. `simulate` follows the same
    rules.

    Args:
        part: the pack.
        numbers: rows of the dataset's samples; None if they are all rows in order.
        order: order of the dataset's samples; None if it is unknown.
        epoch: number of the epoch.
        share: share of this process.
        under_way: maximum number of plans whose samples may not have been read yet when the next one is requested.
    """

    def __init__(
        self,
        part: RemotePart,
        numbers: Indices | None,
        order: Order | None,
        epoch: int,
        share: Share,
        under_way: int,
    ) -> None:
        self._part, self._numbers, self._samples = part, numbers, part.samples
        self._uses, following = (_uses(part, order, number, share) for number in (epoch, epoch + 1))
        # The positions at which the needed shards change.
        self._stops = sorted({stop for _, stop, _ in self._uses})
        self._later = [*dict.fromkeys(number for _, _, number in following)]
        # Several downloads run at the same time, even if fewer shards are used.
        self._room = max(DOWNLOADS, _most_at_once(self._uses))
        self._kept = self._later[: max(0, self._samples.cache.fitting_shards() - self._room)]
        self._under_way = under_way
        # This condition protects the attributes below.
        self._changed = threading.Condition()
        self._passed = -1
        # The shards in the order of need, each with the number of shards that its download must not remove.
        self._coming: list[tuple[int, int]] = []
        self._is_over = False
        self._is_opening = False
        self._opened_s = self._looked_s = time.monotonic()
        self._asked_ns = self._samples.cache.asked_ns()
        self._threads = [
            threading.Thread(target=self._run, name=f"colabkit-loader-shards-{number}", daemon=True)
            for number in range(DOWNLOADS)
        ]

    def following(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Yield plans once their shards are open; close those that neither they nor the last `under_way` plans need."""
        self._samples.cache.forget_failures()
        recent: deque[int] = deque(maxlen=self._under_way + 1)
        for plan in plans:
            recent.append(bisect_right(self._stops, plan.positions[0]))
            self._move_to(recent[0], plan.positions.item(-1))
            rows = plan.indices if self._numbers is None else self._numbers[plan.indices]
            self._is_opening = True
            self._samples.open_for(self._part.rows_of(rows), self._check_over)
            self._is_opening, self._opened_s = False, time.monotonic()
            yield plan

    def close(self) -> None:
        """Stop the downloads, which the next iteration resumes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._samples.close_shards()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            # The garbage collector may close an abandoned iteration in one of these threads.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _move_to(self, stops: int, newest: int) -> None:
        """Forget the shards whose use ends at one of the first `stops` stops; `newest` is the last position requested.

        A shard that is used again later in the epoch, as in a mixture, is closed until then.
        """
        if stops == self._passed:
            return
        is_start, begin = self._passed < 0, self._stops[stops - 1] if stops else 0
        used = {number for _, stop, number in self._uses if stop <= begin}
        uses = [use for use in self._uses if use[1] > begin]
        needed = frozenset(number for first, _, number in uses if first <= newest or number not in used)
        # Close shards first, because the threads look for room immediately.
        self._samples.close_shards(but=needed)
        left = dict.fromkeys(number for *_, number in uses)
        with self._changed:
            coming, spared = [*dict.fromkeys([*left, *self._later])], len({*left, *self._kept})
            self._passed, near = stops, 2 * self._room
            self._coming = [(number, 0 if place < near else spared) for place, number in enumerate(coming)]
            self._samples.need(coming)
            self._changed.notify_all()
        if is_start:
            for thread in self._threads:
                start_thread(thread, "download shards")

    def _check_over(self) -> None:
        if self._is_over:
            raise Cancellation

    def _while_fetching(self) -> None:
        """Raise `Cancellation` after `close`; close all shards if another process lacks room while this one is idle.

        A process that waits for others, as in an all-reduce, holds shards that the slowest one may lack.
        """
        self._check_over()
        now_s = time.monotonic()
        if now_s - self._looked_s < _TICK_S:
            return
        self._looked_s = now_s
        asked_ns = self._samples.cache.asked_ns()
        if asked_ns != self._asked_ns and not self._is_opening and now_s - self._opened_s > _IDLE_S:
            self._asked_ns = asked_ns
            self._samples.close_shards()

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._while_fetching()
                coming = self._coming
                # An error of a download is raised again when a reader needs the shard.
                outcome = self._fetch_one(coming)
                with self._changed:
                    if not self._is_over and coming is self._coming and outcome != "fetched":
                        self._changed.wait(_TICK_S)
        except (Cancellation, ColabkitError):
            pass

    def _fetch_one(self, coming: list[tuple[int, int]]) -> str:
        """Download the first missing shard that no other thread downloads; return the outcome."""
        for number, spared in coming:
            if self._is_over or coming is not self._coming:
                break
            if self._samples.has(number):
                continue
            if (outcome := self._samples.fetch(number, self._while_fetching, spared)) != "busy":
                return outcome
        return "idle"


class ShardReadAheads:
    """A `ShardReadAhead` for each remote pack of a dataset, which may be a mixture.

    Args:
        dataset: a split of a remote pack, a view of one, or a mixture that contains some.
        order, epoch, share, under_way: see `ShardReadAhead`.
    """

    def __init__(self, dataset: PackedDataset, order: Order | None, epoch: int, share: Share, under_way: int) -> None:
        numbers = None if dataset.numbers is None else dataset.numbers.numpy()
        self._each = [ShardReadAhead(part, numbers, order, epoch, share, under_way) for part in dataset.remote_parts]

    def following(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Yield plans once the shards of all packs are open."""
        for one in self._each:
            plans = one.following(plans)
        return plans

    def close(self) -> None:
        """Stop the downloads."""
        for one in self._each:
            one.close()

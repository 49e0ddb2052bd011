"""Which samples make which batch: an epoch as portions of some batches each, for one rank of several.

A global batch is what all ranks take in one step: `batch_size` consecutive positions of the epoch's order for each of
them, so a position counted in samples means the same whatever the batch size and the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from colabkit.loading.sampler.orders import Order

Numbers = npt.NDArray[np.int64]

MADE_TOGETHER = 32
"""Batches that are made together at most; more may be planned together."""

_FIRST_CHUNK = 1024  # positions: enough for a small epoch, and little for the one batch of the first portion
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Share:
    """Which of several processes this is.

    Attributes:
        rank: from 0.
        world_size: how many there are.
    """

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Portion:
    """Some consecutive batches of one rank.

    Attributes:
        numbers: which samples, `int64 [S]`.
        positions: their places in the epoch's global order, `int64 [S]`.
        sizes: samples of each batch.
        reached: for each batch, how many samples of the epoch all ranks have received after it; under a sampler of the
            user's own, how many this rank has.
    """

    numbers: Numbers
    positions: Numbers
    sizes: tuple[int, ...]
    reached: tuple[int, ...]

    def part(self, first: int, stop: int | None = None) -> Portion:
        """Return its batches from `first` to `stop`, or to its end."""
        begin, end = sum(self.sizes[:first]), sum(self.sizes[:stop])
        return Portion(
            self.numbers[begin:end], self.positions[begin:end], self.sizes[first:stop], self.reached[first:stop]
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """The global batches of one epoch, from a position to its end.

    The last one holds what is left. Where that is less than one sample for each rank, the one before it takes it too,
    so that all ranks get equally many batches and every sample comes once. (If there is none before it, since the epoch
    is resumed so near its end with more ranks than before, these few samples are left out.)

    Attributes:
        start: samples of the epoch that have been received before.
        stop: samples at which it ends.
        batch_size: of one rank.
        share: which rank this is.
    """

    start: int
    stop: int
    batch_size: int
    share: Share

    @classmethod
    def of(cls, n: int, start: int, batch_size: int, share: Share, drop_last: bool) -> Pass:
        """Return the pass over `n` samples from `start` on; with `drop_last` it ends with the last full batch."""
        rest = (n - start) % (batch_size * share.world_size) if drop_last else 0
        return cls(start, max(start, n - rest), batch_size, share)

    def __len__(self) -> int:
        """Return how many batches each rank gets."""
        full, rest = divmod(self.stop - self.start, self._step)
        return full + (rest >= self.share.world_size)

    @property
    def _step(self) -> int:
        return self.batch_size * self.share.world_size

    def samples(self) -> int:
        """Return how many samples these batches hold."""
        batches = len(self)
        if not batches:
            return 0
        ((begin, end),) = self._mine(self._begins(batches - 1, 1))
        return (batches - 1) * self.batch_size + end - begin

    def portion(self, order: Order | _InChunks, epoch: int, first: int, count: int) -> Portion:
        """Return `count` batches from the batch `first` on."""
        begins = self._begins(first, count)
        mine = self._mine(begins)
        sizes, reached = tuple([end - begin for begin, end in mine]), tuple(begins[1:])
        if self.share.world_size == 1:
            whole = begins[0], begins[-1]
            return Portion(order.indices(epoch, *whole), np.arange(*whole), sizes, reached)
        numbers = np.concatenate([order.indices(epoch, *span) for span in mine])
        return Portion(numbers, np.concatenate([np.arange(*span) for span in mine]), sizes, reached)

    def _begins(self, first: int, count: int) -> list[int]:
        """Return where some global batches begin, and where the last of them ends."""
        step = self._step
        begins = [*range(self.start + step * first, self.start + step * (first + count) + 1, step)]
        if first + count >= len(self):
            begins[-1] = self.stop
        return begins

    def _mine(self, begins: list[int]) -> list[tuple[int, int]]:
        """Return the positions of each global batch that are this rank's."""
        rank, world = self.share.rank, self.share.world_size
        if world == 1:
            return [*itertools.pairwise(begins)]
        return [
            (begin + (end - begin) * rank // world, begin + (end - begin) * (rank + 1) // world)
            for begin, end in itertools.pairwise(begins)
        ]


class _InChunks:
    """An order that is asked for in chunks: a call costs as much as some thousands of positions.

    Args:
        order: of the samples.
        stop: position after the last that will be wanted.
    """

    def __init__(self, order: Order, stop: int) -> None:
        self._order = order
        self._stop = stop
        self._from = 0
        self._chunk: Numbers = np.empty(0, np.int64)
        self._size = _FIRST_CHUNK

    def indices(self, epoch: int, start: int, stop: int) -> Numbers:
        """Return the samples at positions `start` to `stop` of an epoch, always the same one."""
        if not self._from <= start <= stop <= self._from + len(self._chunk):
            self._chunk = self._order.indices(epoch, start, min(max(stop, start + self._size), self._stop))
            self._from, self._size = start, _CHUNK
        return self._chunk[start - self._from : stop - self._from]


class EpochPlan(Protocol):
    """The batches of one process, epoch by epoch."""

    def batches(self, start: int) -> int:
        """Return how many batches an epoch has after so many samples of it; 0 only if it is known to be over."""

    def samples(self, start: int) -> int:
        """Return how many samples these batches hold."""

    def portions(self, epoch: int, start: int, most_batches: int) -> Iterator[Portion]:
        """Yield these batches: one at first, then more, up to a limit."""


@dataclass(frozen=True, slots=True)
class OrderedPlan:
    """Batches in an order of `colabkit.sampler`.

    Attributes:
        order: of the samples.
        batch_size: of one process.
        drop_last: leave out a last global batch that is not full.
        share: which process this is.
    """

    order: Order
    batch_size: int
    drop_last: bool
    share: Share

    def batches(self, start: int) -> int:
        """Return how many batches an epoch has after so many samples of it."""
        return len(self._pass(start))

    def samples(self, start: int) -> int:
        """Return how many samples these batches hold."""
        return self._pass(start).samples()

    def portions(self, epoch: int, start: int, most_batches: int) -> Iterator[Portion]:
        """Yield these batches."""
        found = self._pass(start)
        order = _InChunks(self.order, found.stop)
        first, count, batches = 0, 1, len(found)
        while first < batches:
            count = min(count, batches - first)
            yield found.portion(order, epoch, first, count)
            first, count = first + count, grown(count, most_batches)

    def _pass(self, start: int) -> Pass:
        return Pass.of(len(self.order), start, self.batch_size, self.share, self.drop_last)


def grown(batches: int, most_batches: int) -> int:
    """Return how many batches come after a portion of so many.

    Those that are made together grow up to the limit, which keeps the next batch near. Where more are planned together,
    the limit is reached at once, since each portion has a cost of its own.
    """
    if most_batches > MADE_TOGETHER:
        return most_batches
    return min(most_batches, batches * max(2, round(math.cbrt(most_batches))))


class Portions:
    """The portions of an epoch, one looked ahead, so that the last batch is known when it comes.

    Args:
        portions: to be given out; an error comes in its turn.

    Attributes:
        stop: how many samples of the epoch all ranks have received after its last batch; None while not known.
    """

    def __init__(self, portions: Iterator[Portion]) -> None:
        self.stop: int | None = None
        self._portions = portions

    def __iter__(self) -> Iterator[Portion]:
        portion = next(self._portions, None)
        while portion is not None:
            following, failure = None, None
            try:
                following = next(self._portions, None)
            except Exception as error:
                failure = error
            if following is None and failure is None:
                self.stop = portion.reached[-1]
            yield portion
            if failure is not None:
                raise failure
            portion = following


def parted(portions: Iterator[Portion], most_batches: int) -> Iterator[Portion]:
    """Yield portions of at most so many batches."""
    for portion in portions:
        if len(portion.sizes) <= most_batches:
            yield portion
            continue
        for first in range(0, len(portion.sizes), most_batches):
            yield portion.part(first, first + most_batches)


def told_early(portions: Iterator[Portion], tell: Callable[[Portion], None], depth: int) -> Iterator[Portion]:
    """Yield portions, after telling of those that come next; an error among them comes in its turn.

    Args:
        portions: of the epoch.
        tell: told each portion once.
        depth: samples that are told of before they are needed.
    """
    waiting: deque[Portion] = deque()
    ahead = 0
    failure: Exception | None = None
    while True:
        try:
            portion = next(portions, None)
        except Exception as error:
            portion, failure = None, error
        if portion is None:
            break
        tell(portion)
        waiting.append(portion)
        ahead += len(portion.numbers)
        while ahead > depth and len(waiting) > 1:
            ahead -= len(waiting[0].numbers)
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
    if failure is not None:
        raise failure

"""The order of a pack of shards, which shuffles within windows of entire shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    CHUNK,
    Positions,
    Stream,
    check_range,
    check_whole_number,
    hashed,
    key_of,
    kind_of,
    permute,
    permute_each,
)
from colabkit.loading.sampler.orders import PureOrder, set_whole_number

ShardWindow: TypeAlias = tuple[int, tuple[int, ...]]
"""The place at which a window of shards ends, and the numbers of its shards."""


@dataclass(frozen=True)
class _ShardStream:
    """Consecutive samples of shards, shuffled within windows of shards.

    Attributes:
        shards: number of the shard of each piece, `int64 [P]`; a piece is a whole shard, or one end of it.
        firsts: first sample of each piece, `int64 [P]`.
        counts: number of samples in each piece, `int64 [P]`.
        seed: seed of the stream.
        window: number of pieces that are shuffled together.
    """

    shards: Positions
    firsts: Positions
    counts: Positions
    seed: int
    window: int

    def windows(self, epoch: int) -> list[ShardWindow]:
        pieces, ends = self._pieces(epoch)
        return [
            (int(ends[min(first + self.window, len(pieces)) - 1]), tuple(self.shards[found].tolist()))
            for first in range(0, len(pieces), self.window)
            if len(found := pieces[first : first + self.window])
        ]

    def samples(self, epoch: int, places: Positions) -> Positions:
        """Return the samples at places of this stream, counted from 0; overwrites `places`."""
        pieces, ends = self._pieces(epoch)
        window_ends = np.append(ends[self.window - 1 : -1 : self.window], ends[-1:])
        windows = np.searchsorted(window_ends, places, side="right")
        starts = np.append(0, window_ends)[windows]
        places -= starts
        permute_each(places, window_ends[windows] - starts, hashed(key_of(self.seed, epoch, Stream.WINDOWS), windows))
        places += starts
        numbers = np.searchsorted(ends, places, side="right")
        found = pieces[numbers]
        places += self.firsts[found] + self.counts[found] - ends[numbers]
        return places

    def _pieces(self, epoch: int) -> tuple[Positions, Positions]:
        """Return the numbers of the pieces in the order of an epoch, and the places at which they end."""
        pieces = np.arange(len(self.counts), dtype=np.int64)
        permute(pieces, len(pieces), key_of(self.seed, epoch, Stream.BLOCKS))
        return pieces, np.cumsum(self.counts[pieces])


@dataclass(frozen=True)
class ShardShuffledOrder(PureOrder):
    """All samples of a pack of shards, shuffled within windows of entire shards, for packs beyond the local disk.

    The shards are shuffled, and every `window_shards` shards of the result form a window, inside which all samples are
    shuffled. Each epoch has a different order. `Loader(shuffle="block")` uses this order for packs that `open_pack`
    opened with `cache`.

    With several streams, the shards are dealt to the streams once for all epochs, and each stream is shuffled in this
    way. Position p of an epoch holds a sample of stream `p % streams`. Each of as many machines receives the samples of
    one stream, so it needs the same shards in every epoch. Streams are equally long: at most `streams - 1` times, a
    shard is cut between two of them.

    Args:
        counts: number of samples in each shard, 1 or more, in the order of the samples.
        seed: seed of the order, a whole number of 0 or more.
        window_shards: number of shards whose samples are shuffled together; the cache must hold twice as many.
        streams: number of streams, at most one for each shard; `Loader` uses one for each machine.

    Raises:
        InvalidOption: if an argument is not a whole number in its range.

    Example:
        >>> from colabkit import sampler
        >>> order = sampler.ShardShuffledOrder((100, 100, 50, 100), window_shards=2)
        >>> len(order), len(order.windows(epoch=0))
        (350, 2)
    """

    counts: tuple[int, ...]
    seed: int = 0
    window_shards: int = 4
    streams: int = 1

    def __post_init__(self) -> None:
        act = f"make {kind_of(self)}"
        counts = tuple(check_whole_number(act, "counts", count, 1) for count in self.counts)
        object.__setattr__(self, "counts", counts)
        set_whole_number(self, "seed", self.seed, 0)
        set_whole_number(self, "window_shards", self.window_shards, 1)
        set_whole_number(self, "streams", self.streams, 1, max(1, len(counts)))

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def n(self) -> int:
        """Number of samples in the dataset."""
        return len(self)

    @property
    def policy(self) -> str:
        """The text `"shards {number}x{window_shards}"`, followed by `"x{streams}"` if there are several streams."""
        return f"shards {len(self.counts)}x{self.window_shards}" + (f"x{self.streams}" if self.streams > 1 else "")

    def windows(self, epoch: int, stream: int = 0) -> list[tuple[int, tuple[int, ...]]]:
        """Return, for each window of a stream, the number of its samples up to the window's end, and its shards.

        Raises:
            InvalidOption: if there is no such stream.
        """
        return self._stream(stream).windows(epoch)

    def shards(self, stream: int = 0) -> list[int]:
        """Return the numbers of the shards with samples of a stream; they are the same in every epoch.

        Raises:
            InvalidOption: if there is no such stream.
        """
        found: list[int] = self._stream(stream).shards.tolist()
        return found

    def indices(self, epoch: int, start: int, stop: int, step: int = 1) -> npt.NDArray[np.int64]:
        """Return the sample indices at every `step`-th position from `start` to `stop` of an epoch, an `int64` array.

        Raises:
            InvalidOption: if the range is not inside the epoch, or if `step` is not a whole number of 1 or more.
        """
        check_range(start, stop, len(self))
        step = check_whole_number("compute sample indices", "step", step, 1)
        places = range(start, stop, step)
        chunks = [places[first : first + CHUNK] for first in range(0, len(places), CHUNK)]
        return np.concatenate([np.empty(0, np.int64), *(self._at(epoch, chunk) for chunk in chunks)])

    def _stream(self, number: int) -> _ShardStream:
        return self._streams[check_whole_number("choose a stream", "stream", number, 0, self.streams - 1)]

    def _at(self, epoch: int, places: range) -> Positions:
        found = np.arange(places.start, places.stop, places.step, dtype=np.int64)
        if self.streams == 1:
            return self._streams[0].samples(epoch, found)
        found, streams = np.divmod(found, self.streams)
        by_stream = np.argsort(streams, kind="stable")
        numbers, firsts = np.unique(streams[by_stream], return_index=True)
        for number, own in zip(numbers.tolist(), np.split(by_stream, firsts[1:]), strict=True):
            found[own] = self._streams[number].samples(epoch, found[own])
        return found

    @cached_property
    def _streams(self) -> tuple[_ShardStream, ...]:
        counts, streams = np.array(self.counts, np.int64), np.arange(self.streams)
        firsts = np.cumsum(counts) - counts
        # Neighbours go to different streams, because their samples are often of one class.
        dealt = np.argsort(np.arange(len(counts)) % self.streams, kind="stable")
        ends, cuts = np.cumsum(counts[dealt]), np.cumsum((len(self) - streams + self.streams - 1) // self.streams)
        edges = np.unique(np.concatenate([[0], ends, cuts]))
        begins = edges[:-1]
        places = np.searchsorted(ends, begins, side="right")
        shards, owners = dealt[places], np.searchsorted(cuts, begins, side="right")
        samples = firsts[shards] + begins - (ends - counts[dealt])[places]
        sizes, pieces = np.diff(edges), np.split(np.arange(len(owners)), np.searchsorted(owners, streams[1:]))
        return tuple(
            _ShardStream(shards[own], samples[own], sizes[own], self.seed + number, self.window_shards)
            for number, own in enumerate(pieces)
        )


def streams_for(machines: int, shards: int) -> int:
    """Return the number of streams with which each machine has shards of its own; 1 if there are too few shards."""
    return machines if machines <= shards else 1

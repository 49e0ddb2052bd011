"""`simulate()`: predict the effect of a cache and a link on epochs over a remote pack, without reading a sample."""

from __future__ import annotations

import heapq
import itertools
import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colabkit.foundation import (
    InvalidOption,
    Report,
    call,
    cannot,
    check_bytes,
    check_number,
    check_whole_number,
    checked_call,
    format_bytes,
    format_seconds,
    format_things,
    option,
    parse_bytes,
    plotting,
)
from colabkit.loading.sampler.shard_order import ShardShuffledOrder, streams_for
from colabkit.packs import DOWNLOADS, Pack, cache_bytes, fitting_shards, least_cache_bytes, open_pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACT = "simulate the epochs"
_NO_WAIT_S = 1e-6
_POINTS = 12
"""Number of sizes of the cache in the plot."""


@dataclass(frozen=True)
class SimulatedEpoch:
    """One simulated epoch.

    Attributes:
        seconds: duration of the epoch in seconds.
        wait_s: seconds of it in which training waits for shards.
        fetched_bytes: bytes that are downloaded during the epoch, in part for the next one.
    """

    seconds: float
    wait_s: float
    fetched_bytes: int


@dataclass(frozen=True, repr=False)
class SimulateReport(Report):
    """Simulated epochs over a pack of shards on a remote.

    Attributes:
        epochs: the epochs; the first one begins with an empty cache.
        pack_bytes: size of the shards with samples of the split that the machine needs.
        shards: number of these shards.
        cache_bytes: size of the cache.
        least_cache_bytes: size of the smallest cache that `Loader` accepts for this order.
        waitless_cache_bytes: size of the smallest cache with which training does not wait after the first epoch.
        train_s: seconds that training alone takes per epoch.
        link_s: seconds that the download of the whole pack takes at the full bandwidth.
        curve: the seconds that training waits in the last epoch, for caches of several sizes.
    """

    epochs: tuple[SimulatedEpoch, ...]
    pack_bytes: int
    shards: int
    cache_bytes: int
    least_cache_bytes: int
    waitless_cache_bytes: int
    train_s: float
    link_s: float
    curve: tuple[tuple[int, float], ...]

    def _summary(self) -> str:
        last = self.epochs[-1]
        share = last.wait_s / last.seconds if last.seconds else 0.0
        return (
            f"An epoch takes {format_seconds(last.seconds)}, {share:.0%} of it waiting for shards; "
            f"a cache of {format_bytes(self.waitless_cache_bytes)} avoids the waiting after the first epoch"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        what = f"{format_bytes(self.pack_bytes)} in {format_things(self.shards, 'shard')}"
        rows: list[tuple[str, ...]] = [
            ("pack", what, f"{format_seconds(self.link_s)} at the full bandwidth"),
            ("cache", format_bytes(self.cache_bytes), f"at least {format_bytes(self.least_cache_bytes)}"),
            ("training alone", format_seconds(self.train_s), "per epoch"),
        ]
        for number, epoch in enumerate(self.epochs, 1):
            waits = f"{format_seconds(epoch.wait_s)} waiting, {format_bytes(epoch.fetched_bytes)} downloaded"
            rows.append((f"epoch {number}", format_seconds(epoch.seconds), waits))
        return rows

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Plot the duration of an epoch after the first one for caches from the smallest to the size of the pack.

        Args:
            path: file to save the figure to, such as `"cache.png"`; may start with `drive:`.

        Returns:
            The matplotlib figure.

        Raises:
            MissingPackage: if matplotlib is not installed.
            InvalidOption: if the file extension is not an image format.
            FileFailed, NotEnoughSpace, NotMounted: if the file cannot be written.
        """
        title = f"Pack of {format_bytes(self.pack_bytes)} in {format_things(self.shards, 'shard')}"
        figure = plotting.new_figure("plot the simulation", 7, 3.6, title)
        _draw(figure.add_subplot(), self)
        if path is not None:
            plotting.save_figure(figure, path)
        return figure


@dataclass(frozen=True)
class _Model:
    """The inputs of a simulation, which do not depend on the size of the cache.

    Attributes:
        windows: for each epoch and the one after the last: the number of samples and the shards of each window.
        lengths: bytes of each shard.
        index_bytes: bytes of the index.
        samples_per_s: speed of training.
        bandwidth: bytes per second that all downloads of the machine share.
        latency_s: seconds from the request of a shard to its first byte.
    """

    windows: tuple[list[tuple[int, tuple[int, ...]]], ...]
    lengths: tuple[int, ...]
    index_bytes: int
    samples_per_s: float
    bandwidth: float
    latency_s: float

    def size_for(self, shards: int) -> int:
        """Return the size of a cache that holds any `shards` shards while some of them are being downloaded."""
        return least_cache_bytes(self.index_bytes, self.lengths, shards)

    def run(self, most_bytes: int) -> tuple[SimulatedEpoch, ...]:
        """Simulate the epochs with a cache of `most_bytes`, which is empty at the start."""
        return _Cache(self, most_bytes).run()

    def smallest(self, least_bytes: int) -> int:
        """Return the size of the smallest cache with which training does not wait in the last epoch."""
        step = min(self.lengths)
        low, high = 0, -(-(self.size_for(len(self.lengths)) - least_bytes) // step)
        while low < high:
            middle = (low + high) // 2
            if self.run(least_bytes + middle * step)[-1].wait_s < _NO_WAIT_S:
                high = middle
            else:
                low = middle + 1
        return least_bytes + low * step


class _Cache:
    """A simulated cache and its downloads, which follow the rules of `ShardCache` and `ShardReadAhead`."""

    def __init__(self, model: _Model, most_bytes: int) -> None:
        self._model, self._most_bytes = model, most_bytes
        windows = list(itertools.chain.from_iterable(model.windows))
        # All uses of shards, in the order in which training needs them.
        self._uses = [shard for _, shards in windows for shard in shards]
        self._uses_of: list[list[int]] = [[] for _ in model.lengths]
        for place, shard in enumerate(self._uses):
            self._uses_of[shard].append(place)
        self._used_bytes = empty = cache_bytes(model.index_bytes, (), ())
        self._place_bytes = [cache_bytes(model.index_bytes, (length,), ()) - empty for length in model.lengths]
        self._load_bytes = [cache_bytes(model.index_bytes, (), (length,)) - empty for length in model.lengths]
        self._time_s = 0.0
        self._fetched = 0
        # The downloads: the time at which each one's first byte arrives, and its remaining bytes.
        self._loading: dict[int, list[float]] = {}
        self._present: set[int] = set()
        # The shards in the cache by their next use, the latest first; outdated entries are skipped.
        self._latest: list[tuple[int, int]] = []
        # Places in the order of uses: of the next download, of the end of the next epoch, and of the next use.
        self._coming, self._horizon, self._done = 0, 0, 0
        # The place of the first use that does not belong to the shards with which the next epoch begins.
        self._kept_until = 0
        self._room = max(DOWNLOADS, *(len(shards) for _, shards in windows))

    def run(self) -> tuple[SimulatedEpoch, ...]:
        epochs = []
        ends = [*itertools.accumulate(sum(len(shards) for _, shards in windows) for windows in self._model.windows)]
        fitting = fitting_shards(self._model.index_bytes, self._model.lengths, self._most_bytes)
        for windows, end, horizon in zip(self._model.windows[:-1], ends, ends[1:], strict=False):
            began_s, fetched, waited_s, self._horizon = self._time_s, self._fetched, 0.0, horizon
            self._kept_until = end + max(0, fitting - self._room)
            for samples, shards in windows:
                wanted_s = self._time_s
                self._wait_for(self._done + len(shards))
                waited_s += self._time_s - wanted_s
                self._train_until(self._time_s + samples / self._model.samples_per_s)
                self._done += len(shards)
                for shard in shards:
                    heapq.heappush(self._latest, (-self._next_use(shard), shard))
            epochs.append(SimulatedEpoch(self._time_s - began_s, waited_s, self._fetched - fetched))
        return tuple(epochs)

    def _wait_for(self, stop: int) -> None:
        while not self._present.issuperset(self._uses[self._done : stop]):
            self._start_downloads(stop)
            self._pass(self._next_arrival())

    def _train_until(self, end_s: float) -> None:
        while True:
            self._start_downloads(0)
            next_s = min(self._next_arrival(), end_s)
            self._pass(next_s)
            if next_s >= end_s:
                return

    def _start_downloads(self, needed: int) -> None:
        """Start downloads of the next shards while there is room; training waits for uses before place `needed`."""
        while len(self._loading) < DOWNLOADS and self._coming < self._horizon:
            shard = self._uses[self._coming]
            if shard not in self._present and shard not in self._loading:
                if not self._make_room(shard, self._coming < needed):
                    return
                self._used_bytes += self._load_bytes[shard]
                self._loading[shard] = [self._time_s + self._model.latency_s, float(self._model.lengths[shard])]
            self._coming += 1

    def _make_room(self, shard: int, is_needed: bool) -> bool:
        while self._used_bytes + self._load_bytes[shard] > self._most_bytes:
            if not self._latest:
                return False
            use, latest = -self._latest[0][0], self._latest[0][1]
            if latest not in self._present or use != self._next_use(latest):
                heapq.heappop(self._latest)
            elif not is_needed and self._is_spared(use):
                return False
            else:
                heapq.heappop(self._latest)
                self._present.remove(latest)
                self._used_bytes -= self._place_bytes[latest]
        return True

    def _is_spared(self, use: int) -> bool:
        """Return whether the next download must not remove a shard that is used at place `use`."""
        is_near = self._coming < self._done + 2 * self._room
        return use <= self._coming or (use < self._kept_until and not is_near)

    def _next_use(self, shard: int) -> int:
        uses = self._uses_of[shard]
        place = bisect_left(uses, self._done)
        return uses[place] if place < len(uses) and uses[place] < self._horizon else len(self._uses)

    def _next_arrival(self) -> float:
        """Return the time of the next change: the first byte or the last byte of a download."""
        starts = [start_s for start_s, _ in self._loading.values() if start_s > self._time_s]
        flowing = [left for start_s, left in self._loading.values() if start_s <= self._time_s]
        ends = [self._time_s + min(flowing) * len(flowing) / self._model.bandwidth] if flowing else []
        return min(starts + ends, default=float("inf"))

    def _pass(self, until_s: float) -> None:
        flowing = [shard for shard, (start_s, _) in self._loading.items() if start_s <= self._time_s]
        for shard in flowing:
            self._loading[shard][1] -= (until_s - self._time_s) * self._model.bandwidth / len(flowing)
            if self._loading[shard][1] < 0.5:
                del self._loading[shard]
                self._used_bytes += self._place_bytes[shard] - self._load_bytes[shard]
                self._present.add(shard)
                self._fetched += self._model.lengths[shard]
                heapq.heappush(self._latest, (-self._next_use(shard), shard))
        self._time_s = until_s


@checked_call()
def simulate(
    pack: str | os.PathLike[str] | Pack,
    cache: int | str,
    bandwidth: int | str,
    batch_rate: float,
    *,
    batch_size: int = 64,
    ranks: int = 1,
    machines: int = 1,
    epochs: int = 2,
    split: str = "train",
    window_shards: int = 4,
    latency_s: float = 0.02,
    seed: int = 0,
) -> SimulateReport:
    """Predict the downloads, the waiting time and the duration of epochs over a remote pack of shards.

    The simulation follows the rules of `Loader(shuffle="block")` over `open_pack(..., cache=)`: each shard is
    downloaded before it is needed, shards needed last are removed, and those with which the next epoch begins are kept.
    It assumes a steady bandwidth and training speed.

    Args:
        pack: a pack of shards: an open pack, the path of its index, or its address.
        cache: size of the cache on the local disk, in bytes or as text such as `"20GiB"`.
        bandwidth: bytes per second of the machine's link, as a number or as text such as `"50MB"`.
        batch_rate: batches per second that each process trains on if it never waits.
        batch_size: samples per batch.
        ranks: number of processes of the machine that train together and share the cache.
        machines: number of machines that train together; each one needs shards of its own, and has its own link.
        epochs: number of epochs, at least 1; the first one begins with an empty cache.
        split: the split to train on.
        window_shards: number of shards that are shuffled together, as for `sampler.ShardShuffledOrder`.
        latency_s: seconds from the request of a shard to its first byte.
        seed: seed of the order of the shards.

    Returns:
        The epochs, and the smallest cache with which training waits only in the first one.

    Raises:
        SourceMissing, NotSealed, Corrupt, BadSource, FetchFailed, TimedOut: if the pack cannot be opened.
        MissingSplit: if it has no such split.
        InvalidOption: if an argument is invalid, the pack is a single file, or the cache is too small for this order.

    Example:
        >>> import colabkit, numpy
        >>> images = numpy.zeros((1000, 8, 8, 3), numpy.uint8)
        >>> report = colabkit.pack((images, numpy.zeros(1000, int)), "pack.h5", shard_bytes="40kB")
        >>> found = colabkit.simulate(report.path, cache="1MB", bandwidth="1MB", batch_rate=100)
        >>> found.shards, found.epochs[1].fetched_bytes
        (5, 0)
    """
    most_bytes = check_bytes(_ACT, "cache", cache, "20GiB")
    link = check_bytes(_ACT, "bandwidth", bandwidth, "50MB")
    rate = check_number(_ACT, "batch_rate", batch_rate, above=0, example=10.0)
    latency_s = check_number(_ACT, "latency_s", latency_s, 0.0, example=0.02)
    batch_size = check_whole_number(_ACT, "batch_size", batch_size, 1)
    ranks = check_whole_number(_ACT, "ranks", ranks, 1)
    machines = check_whole_number(_ACT, "machines", machines, 1)
    epochs = check_whole_number(_ACT, "epochs", epochs, 1)
    opened = pack if isinstance(pack, Pack) else open_pack(pack, cache=most_bytes if "://" in str(pack) else None)
    data = opened[split]
    if (counts := data.shard_counts()) is None:
        next_step = ("Pack the data with ", call("pack", ..., shard_bytes="256MiB"))
        raise InvalidOption(cannot(_ACT, "the pack is a single file", "the index of a pack of shards", next_step))
    order = ShardShuffledOrder(tuple(counts.values()), seed, window_shards, streams_for(machines, len(counts)))
    listed = [shard for shard in opened.info.shards if shard.splits.get(data.split_name)]
    # Simulate the first machine; the others need about as many shards.
    own = sorted(order.shards())
    lengths = tuple(listed[place].length for place in own)
    # The machines that share a stream divide its samples.
    samples_per_s = rate * batch_size * ranks * machines / order.streams
    model = _Model(
        tuple(_windows(order, epoch, own) for epoch in range(epochs + 1)),
        lengths,
        opened.path.stat().st_size,
        samples_per_s,
        link,
        latency_s,
    )
    every = [shard.length for shard in opened.info.shards]
    least = least_cache_bytes(model.index_bytes, every, min(2 * order.window_shards, len(lengths)))
    if most_bytes < least:
        windows = f"two windows of {format_things(order.window_shards, 'shard')}"
        expected = f"at least {format_things(least, 'byte')}, for {windows}"
        smaller = ("Set ", option("cache", least), " or more, or pack smaller shards")
        raise InvalidOption(cannot(_ACT, f"the cache has {format_bytes(most_bytes)}", expected, smaller))
    largest = max(least, model.size_for(len(lengths)))
    sizes = {least + (largest - least) * point // (_POINTS - 1) for point in range(_POINTS)}
    simulated = model.run(most_bytes)
    waits = {most_bytes: simulated[-1].wait_s, **{size: model.run(size)[-1].wait_s for size in sorted(sizes)}}
    waitless = min([model.smallest(least), *(size for size, wait_s in waits.items() if wait_s < _NO_WAIT_S)])
    waits.setdefault(waitless, model.run(waitless)[-1].wait_s)
    return SimulateReport(
        simulated,
        sum(lengths),
        len(lengths),
        most_bytes,
        least,
        waitless,
        order.windows(0)[-1][0] / samples_per_s,
        sum(lengths) / link,
        tuple(sorted(waits.items())),
    )


def _windows(order: ShardShuffledOrder, epoch: int, own: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    windows = order.windows(epoch)
    starts = [0, *(stop for stop, _ in windows)]
    return [
        (stop - start, tuple(bisect_left(own, place) for place in places))
        for start, (stop, places) in zip(starts, windows, strict=False)
    ]


def _draw(axes: Axes, report: SimulateReport) -> None:
    sizes, waits = zip(*report.curve, strict=True)
    # The unit in which `format_bytes` writes the largest size.
    unit = format_bytes(max(sizes)).split()[-1]
    unit_bytes = parse_bytes(f"1{unit}")
    places = [size / unit_bytes for size in sizes]
    totals = [report.train_s + wait_s for wait_s in waits]
    axes.fill_between(places, 0, [report.train_s] * len(places), color=plotting.BLUE, linewidth=0, label="training")
    axes.fill_between(
        places, report.train_s, totals, facecolor=plotting.VERMILLION, hatch="//", edgecolor="white", label="waiting"
    )
    marks = ((report.cache_bytes, "--", "this cache"), (report.waitless_cache_bytes, ":", "smallest without waiting"))
    for size, dashes, name in marks:
        label = f"{name}, {format_bytes(size)}"
        axes.axvline(size / unit_bytes, color=plotting.DARK, linestyle=dashes, linewidth=1.4, label=label)
    plotting.style_axes(axes, "Duration of an epoch after the first one", "seconds", lines=2)
    axes.set(xlabel=f"size of the cache, {unit}", ylim=(0, 1.08 * max(totals)))
    plotting.add_legend(axes, "left")

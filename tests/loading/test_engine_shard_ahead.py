"""The loader downloads shards of a remote pack ahead of need, within the cache, and resumes exactly inside an epoch."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from http_servers import running
from remote_packs import COUNTS, PackServer, cache_root, cached, largest_usage, pack_server
from waiting import LONG_S

import colabkit
from colabkit import Loader, Mixture, augment, open_pack, sampler
from colabkit.errors import FetchFailed, InvalidOption
from colabkit.loading.engine import shard_ahead
from colabkit.loading.engine.shard_ahead import ShardReadAhead
from colabkit.loading.sampler.mixed import MixedOrder
from colabkit.loading.sampler.orders import SequentialOrder
from colabkit.packs import DOWNLOADS, PackedDataset, least_cache_bytes
from colabkit.packs.dataset import shard_cache

TRAIN = tuple(counts["train"] for counts in COUNTS)
WINDOW_OF_ONE = sampler.ShardShuffledOrder(TRAIN, seed=4, window_shards=1)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackServer]:
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    with pack_server(tmp_path / "packs") as server:
        yield server


def split_of(server: PackServer, cache: int | str = "1MiB") -> PackedDataset:
    return open_pack(server.url, cache=cache)["train"]


def local(server: PackServer) -> PackedDataset:
    return open_pack(server.folder / "birds.h5")["train"]


def images_of(batches: Any) -> torch.Tensor:
    return torch.cat([images.clone() for images, _ in batches])


def smallest_cache(data: PackedDataset, **options: Any) -> int:
    with pytest.raises(InvalidOption) as caught:
        Loader(data, 4, **options)
    return int(str(caught.value).partition("cache=")[2].split()[0])


class NotedReadAhead(ShardReadAhead):
    """A read-ahead that records which of its threads have found nothing to download since the last download."""

    made: ClassVar[list[NotedReadAhead]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noted = threading.Condition()
        # The last list of shards for which each thread found nothing to download.
        self.idle: dict[int, list[tuple[int, int]]] = {}
        self.made.append(self)

    def _fetch_one(self, coming: list[tuple[int, int]]) -> str:
        outcome = super()._fetch_one(coming)
        with self.noted:
            if outcome == "fetched":
                self.idle.clear()
            else:
                self.idle[threading.get_ident()] = coming
            self.noted.notify_all()
        return outcome

    def close(self) -> None:
        super().close()
        with self.noted:
            self.noted.notify_all()

    def is_idle(self) -> bool:
        return self._is_over or sum(coming is self._coming for coming in self.idle.values()) == DOWNLOADS

    def wait_for_downloads(self) -> None:
        """Wait until nothing more can be downloaded, as if the link were faster than training."""
        with self.noted:
            assert self.noted.wait_for(self.is_idle, LONG_S)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("transform", [None, augment.Normalize()])
def test_epochs_within_the_smallest_cache_fetch_each_shard_once_and_never_exceed_it(
    tmp_path, monkeypatch, workers, transform
):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    order = sampler.ShardShuffledOrder(tuple(10 * count for count in TRAIN), seed=4, window_shards=1)
    options = {"sampler": order, "transform": transform, "prefetch_batches": 2}
    with pack_server(tmp_path / "large", scale=10) as server:
        least = smallest_cache(split_of(server, 240_000), **options)
        loader = Loader(split_of(server, least), 4, num_workers=workers, **options)
        expected = Loader(local(server), 4, **options)
        with largest_usage(cache_root()) as largest:
            for epoch in range(3):
                assert torch.equal(images_of(loader), images_of(expected))
                fetched = sum(count for name, count in server.fetched.items() if name != "birds.h5")
                # Two shards of the next epoch may already be in the cache.
                assert fetched <= 6 * (epoch + 1) + 2
        assert largest[0] <= least


def test_a_later_epoch_downloads_little_more_than_the_cache_lacks_as_simulated(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    monkeypatch.setattr(shard_ahead, "ShardReadAhead", NotedReadAhead)
    (tmp_path / "packs").mkdir()
    images = np.zeros((320, 64, 64, 3), np.uint8)
    index = tmp_path / "packs" / "birds.h5"
    colabkit.pack((images, np.arange(320) % 3), index, shard_bytes=8 * images[0].nbytes, progress=False)
    cache = images.nbytes // 2 + (256 << 10)
    found = colabkit.simulate(index, cache, "1GB", 1, batch_size=32, latency_s=0)
    with running(PackServer(tmp_path / "packs")) as server:
        loader = Loader(split_of(server, cache), 32, shuffle="block")
        for _ in range(2):
            for _ in loader:
                NotedReadAhead.made[-1].wait_for_downloads()
        fetched = server.fetched.total() - server.fetched["birds.h5"]
    assert fetched < 1.9 * found.shards
    simulated = sum(epoch.fetched_bytes for epoch in found.epochs) / found.pack_bytes
    assert fetched == pytest.approx(simulated * found.shards, abs=DOWNLOADS)


def test_shuffle_block_shuffles_within_windows_of_shards_and_equals_its_order(server):
    loader = Loader(split_of(server), 5, shuffle="block", seed=7)
    assert loader.shuffle == "block"
    assert "shuffled by shards with seed 7" in repr(loader)
    assert "shards are downloaded into a cache of 1.0 MiB" in str(loader.tier)
    order = sampler.ShardShuffledOrder(TRAIN, 7).indices(0, 0, sum(TRAIN))
    assert torch.equal(images_of(loader), local(server)[order][0])


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("resumed_in", ["remote", "local"])
def test_resuming_inside_an_epoch_is_exact_with_another_cache_and_batch_size(server, after, resumed_in):
    loader = Loader(split_of(server), 4, sampler=WINDOW_OF_ONE)
    first = images_of(itertools.islice(loader, after))
    state = loader.state_dict()
    data = split_of(server, "400KiB") if resumed_in == "remote" else local(server)
    resumed = Loader(data, 7, shuffle=resumed_in == "remote" and "block")
    resumed.load_state_dict(state)
    rest = images_of(resumed)
    order = WINDOW_OF_ONE.indices(0, 0, sum(TRAIN))
    assert torch.equal(torch.cat([first, rest]), local(server)[order][0])


def test_a_cache_that_is_too_small_for_the_order_is_refused_at_once_with_the_minimum(server):
    data = split_of(server, 110_000)
    cases = {"2 shards, the current": {}, "6 shards, for two windows of 4": {"shuffle": "block"}}
    cases["6 shards, since this order needs all"] = {"shuffle": True}
    for what, options in cases.items():
        began = time.monotonic()
        with pytest.raises(InvalidOption, match=f"the cache has 107 KiB; expected at least .* bytes, for {what}"):
            Loader(data, 4, **options)
        assert time.monotonic() - began < 1
        least = smallest_cache(data, **options)
        assert len(images_of(Loader(split_of(server, least), 4, **options))) == sum(TRAIN)
        with pytest.raises(InvalidOption, match="expected at least"):
            Loader(split_of(server, least - 1), 4, **options)


def test_a_state_whose_windows_do_not_fit_in_the_cache_is_refused(server):
    state = Loader(split_of(server), 4, shuffle="block").state_dict()
    loader = Loader(split_of(server, smallest_cache(split_of(server, 110_000))), 4)
    loader.load_state_dict(state)
    with pytest.raises(InvalidOption, match="for two windows of 4"):
        next(iter(loader))


def test_ranks_share_the_cache_and_together_receive_each_sample_once(server):
    data = split_of(server)
    loaders = [Loader(data, 3, shuffle="block", rank=rank, world_size=2) for rank in range(2)]
    batches = [batch for pair in zip(*loaders, strict=True) for batch in pair]
    order = sampler.ShardShuffledOrder(TRAIN).indices(0, 0, sum(TRAIN))
    assert sorted(images_of(batches).flatten(1).tolist()) == sorted(local(server)[order][0].flatten(1).tolist())
    assert {count for name, count in server.fetched.items() if name != "birds.h5"} == {1}


def on_machines(
    server: PackServer, folder: Path, monkeypatch: Any, count: int, cache: int | str, **options: Any
) -> Any:
    """Return the loaders of `count` machines, each with one process and with a cache in its own folder."""
    monkeypatch.setenv("WORLD_SIZE", str(count))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(count))
    loaders = []
    for rank in range(count):
        monkeypatch.setenv("COLABKIT_LOCAL", str(folder / f"machine {rank}"))
        loaders.append(Loader(split_of(server, cache), rank=rank, world_size=count, **options))
    return loaders


def rows_of(images: torch.Tensor) -> list[list[int]]:
    return images.flatten(1).tolist()


def test_each_machine_needs_shards_of_its_own_and_keeps_them(tmp_path, monkeypatch):
    with pack_server(tmp_path / "large", scale=10) as server:
        order = sampler.ShardShuffledOrder(tuple(10 * count for count in TRAIN), seed=4, window_shards=1, streams=2)
        folder = server.folder
        # The two streams share one of the six shards.
        four_shards = 5 * max(path.stat().st_size for path in folder.glob("birds-*.h5"))
        for _ in range(2):
            loaders = on_machines(server, tmp_path, monkeypatch, 2, four_shards, batch_size=4, sampler=order)
            for _ in range(2):
                received = images_of(batch for pair in zip(*loaders, strict=True) for batch in pair)
                assert sorted(rows_of(received)) == sorted(rows_of(local(server)[:][0]))
                # The second machine also downloads the first shard once, which describes the samples.
                assert sum(count for name, count in server.fetched.items() if name != "birds.h5") == 7 + 1
        for rank in range(2):
            needed = {f"birds-{place:05}.h5" for _, places in order.windows(0, rank) for place in places}
            # The first shard, which describes the samples, may stay where it is not needed.
            assert needed <= set(cached(tmp_path / f"machine {rank}")) <= needed | {"birds-00000.h5"}


@pytest.mark.parametrize(("ranks", "machines", "streams"), [(1, 1, 3), (3, 1, 3), (2, 2, 1), (4, 2, 1), (3, 3, 1)])
def test_the_cache_must_hold_two_windows_of_each_stream_of_the_machine(server, monkeypatch, ranks, machines, streams):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(machines))
    order = sampler.ShardShuffledOrder(TRAIN, window_shards=1, streams=machines if streams == 1 else streams)
    share = {"sampler": order, "rank": 0, "world_size": ranks}
    with pytest.raises(InvalidOption, match=f"for two windows of 1{'' if streams == 1 else ' in each of 3 streams'}"):
        Loader(split_of(server, 110_000), 2, **share)
    least = smallest_cache(split_of(server, 110_000), **share)
    needed = {place for stream in range(streams) for _, places in order.windows(0, stream) for place in places}
    index = server.folder / "birds.h5"
    lengths = [path.stat().st_size for path in sorted(server.folder.glob("birds-*.h5"))]
    assert least == least_cache_bytes(index.stat().st_size, lengths, min(2 * streams, len(needed)))


@pytest.mark.full
def test_processes_that_wait_for_each_other_share_the_smallest_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    monkeypatch.setattr(shard_cache, "STALLED_S", 10.0)
    monkeypatch.setattr(shard_cache, "_ASK_S", 0.05)
    monkeypatch.setattr(shard_ahead, "_IDLE_S", 0.05)
    images, index = np.zeros((480, 32, 32, 3), np.uint8), tmp_path / "p.h5"
    colabkit.pack((images, np.arange(480)), index, shard_bytes=40 * images[0].nbytes, progress=False)
    share = {"sampler": sampler.ShardShuffledOrder((40,) * 12, window_shards=1), "world_size": 4}
    least = smallest_cache(open_pack(index, cache="300KiB")["train"], rank=0, **share)
    together = threading.Barrier(4)

    def received(rank: int) -> list[int]:
        # Caches of different sizes are separate objects, as in separate processes.
        loader = Loader(open_pack(index, cache=least + rank)["train"], 6, rank=rank, **share)
        labels = []
        try:
            for _, numbers in loader:
                labels += numbers.tolist()
                together.wait(60)
        except BaseException:
            together.abort()
            raise
        return labels

    with ThreadPoolExecutor(4) as ranks:
        assert sorted(itertools.chain.from_iterable(ranks.map(received, range(4)))) == list(range(480))


@pytest.mark.parametrize("machines", [1, 2, 3, 9])
def test_the_loader_accepts_the_smallest_cache_that_the_simulation_names(server, monkeypatch, machines):
    index = server.folder / "birds.h5"
    least = colabkit.simulate(index, "1MB", "1MB", 10, window_shards=4, machines=machines).least_cache_bytes
    monkeypatch.setenv("WORLD_SIZE", str(machines))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(machines))
    options = {"shuffle": "block", "rank": 0, "world_size": machines}
    assert smallest_cache(split_of(server, 110_000), **options) <= least


@pytest.mark.parametrize("machines", [1, 3])
def test_a_run_on_two_machines_resumes_exactly_on_one_and_on_three(server, tmp_path, monkeypatch, machines):
    loaders = on_machines(server, tmp_path, monkeypatch, 2, "1MiB", batch_size=3, shuffle="block", seed=4)
    assert "shuffled by shards in 2 streams" in repr(loaders[0])
    first = images_of(itertools.chain.from_iterable(itertools.islice(loader, 2) for loader in loaders))
    state = loaders[1].state_dict()
    resumed = on_machines(server, tmp_path / "again", monkeypatch, machines, "1MiB", batch_size=2, shuffle="block")
    for loader in resumed:
        loader.load_state_dict(state)
    rest = images_of(itertools.chain.from_iterable(resumed))
    assert len(first) == 12
    assert sorted(rows_of(torch.cat([first, rest]))) == sorted(rows_of(local(server)[:][0]))
    if machines == 1:
        order = sampler.ShardShuffledOrder(TRAIN, 4, streams=2).indices(0, 12, sum(TRAIN))
        assert torch.equal(rest, local(server)[order][0])


def test_processes_that_the_launcher_does_not_describe_are_of_one_machine(server, monkeypatch):
    for described, groups in (("2", "1"), ("2", "two"), ("2", "3"), ("4", "2"), ("", "")):
        monkeypatch.setenv("WORLD_SIZE", described)
        monkeypatch.setenv("GROUP_WORLD_SIZE", groups)
        assert "streams" not in repr(Loader(split_of(server), 3, shuffle="block", rank=1, world_size=2))


def test_views_are_read_shard_by_shard(server):
    training, validation = split_of(server).split((0.8, 0.2))
    for view, count in ((training, 31), (validation, 8)):
        assert len(images_of(Loader(view, 4, shuffle="block"))) == count
    # A view in an order other than that of the shards needs all of them.
    mixed = split_of(server, 110_000).subset([38, 0, 20, 1])
    assert smallest_cache(mixed) > smallest_cache(split_of(server, 110_000))


def test_peeking_does_not_disturb_an_iteration(server):
    # The other shards arrive after the peek.
    loader = Loader(split_of(server, smallest_cache(split_of(server, 110_000))), 4)
    batches = iter(loader)
    next(batches)
    peeked = loader.peek()[0][0]
    assert torch.equal(next(batches)[0], peeked)
    assert len(images_of(batches)) == sum(TRAIN) - 8


def test_closing_while_a_download_hangs_ends_all_threads(server):
    reached = threading.Event()
    server.damage["birds-00005.h5"] = lambda data: (reached.set(), server.released.wait(30), data)[2]
    batches = iter(Loader(split_of(server), 4))
    next(batches)
    assert reached.wait(30)
    began = time.monotonic()
    server.released.set()
    batches.close()
    assert time.monotonic() - began < 10
    assert len(cached()) >= 1


def test_a_cut_link_ends_the_epoch_with_one_error_after_the_batches_before_it(server, monkeypatch):
    monkeypatch.setattr("colabkit.storage.fetching.transfer._BACK_OFF_S", 0.0)
    data = split_of(server)
    data[:20]
    server.is_cut = True
    received = []
    with pytest.raises(FetchFailed, match=r"Cannot fetch 'http.*birds-0000[345]\.h5'"):
        received.extend(images.clone() for images, _ in Loader(data, 4, num_workers=1))
    assert torch.equal(torch.cat(received), local(server)[: 4 * len(received)][0])
    server.is_cut = False
    assert len(images_of(Loader(data, 4))) == sum(TRAIN)


@pytest.fixture
def two_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PackServer]]:
    """Serve packs of 12 and of 8 shards; the target of each sample is its number in a mixture of both."""
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    with ExitStack() as servers:
        found, first = [], 0
        for name, count, in_shard in (("many", 240, 20), ("few", 80, 10)):
            (tmp_path / name).mkdir()
            images, numbers = np.zeros((count, 32, 32, 3), np.uint8), np.arange(first, first + count, dtype=np.float32)
            size = in_shard * images[0].nbytes
            colabkit.pack((images, numbers), tmp_path / name / "birds.h5", shard_bytes=size, progress=False)
            found.append(servers.enter_context(running(PackServer(tmp_path / name))))
            first += count
        yield found


def mixture_of(servers: list[PackServer], *, num_samples: int | None = None) -> Mixture:
    """Mix the packs 2 to 1, each with the smallest cache."""
    least = [smallest_cache(split_of(server, 200_000), shuffle="block") for server in servers]
    parts = [split_of(server, cache) for server, cache in zip(servers, least, strict=True)]
    return Mixture(dict(zip(parts, (2, 1), strict=True)), num_samples=num_samples)


def order_of_mixture(seed: int, num_samples: int | None = None) -> MixedOrder:
    parts = sampler.ShardShuffledOrder((20,) * 12), sampler.ShardShuffledOrder((10,) * 8)
    return MixedOrder(parts, (2, 1), num_samples, seed)


def numbers_of(batches: Any) -> list[int]:
    return [int(number) for _, numbers in batches for number in numbers]


@pytest.mark.parametrize(("num_samples", "workers"), [(None, 1), (700, 0), (700, 3)])
def test_a_mixture_of_remote_packs_has_its_own_order_within_the_smallest_caches(two_packs, num_samples, workers):
    mixture, order = mixture_of(two_packs, num_samples=num_samples), order_of_mixture(5, num_samples)
    loader = Loader(mixture, 8, shuffle="block", seed=5, num_workers=workers)
    sizes = [part.samples.cache.most_bytes for part in mixture.remote_parts]
    assert "shards are downloaded into 2 caches of" in str(loader.tier)
    with largest_usage(cache_root()) as largest:
        for epoch in range(3):
            assert numbers_of(loader) == order.indices(epoch, 0, len(order)).tolist()
    assert largest[0] <= sum(sizes)


def test_shards_of_a_mixture_are_downloaded_ahead_of_need(two_packs, monkeypatch):
    monkeypatch.setattr(shard_ahead, "ShardReadAhead", NotedReadAhead)
    loader = Loader(mixture_of(two_packs), 4, shuffle="block")
    next(batches := iter(loader))
    for server, ahead in zip(two_packs, NotedReadAhead.made[-2:], strict=True):
        ahead.wait_for_downloads()
        # The first window of four shards, and further shards, although the batch needs less.
        assert len([name for name in server.fetched if name != "birds.h5"]) > 4
    batches.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mixture_of_remote_packs_resumes_exactly_on_any_number_of_processes(two_packs, ranks):
    loader = Loader(mixture_of(two_packs), 6, shuffle="block", seed=2)
    first = numbers_of(itertools.islice(loader, 7))
    state, rest = loader.state_dict(), []
    for rank in range(ranks):
        resumed = Loader(mixture_of(two_packs), 4, shuffle="block", rank=rank, world_size=ranks)
        resumed.load_state_dict(state)
        rest += numbers_of(resumed)
    order = order_of_mixture(2)
    assert first == order.indices(0, 0, 42).tolist()
    assert sorted(rest) == sorted(order.indices(0, 42, len(order)).tolist())


def test_a_mixture_of_two_views_of_a_remote_pack_and_a_local_pack_has_its_own_order(two_packs):
    whole = split_of(two_packs[0], "2MiB")
    first, second = whole.subset(range(120)), whole.subset(range(120, 240))
    mixture = Mixture({first: 1, second: 1, local(two_packs[1]): 1}, num_samples=600)
    loader = Loader(mixture, 8, shuffle=False)
    order = MixedOrder((SequentialOrder(120), SequentialOrder(120), SequentialOrder(80)), (1, 1, 1), 600)
    for epoch in range(2):
        assert numbers_of(loader) == order.indices(epoch, 0, 600).tolist()


def test_a_cache_that_is_too_small_for_its_part_of_a_mixture_is_refused_with_the_minimum(two_packs):
    whole = split_of(two_packs[0], "1MiB")
    first, second = whole.subset(range(120)), whole.subset(range(120, 240))
    with pytest.raises(InvalidOption, match="for the 2 splits and views of the mixture that use it"):
        Loader(Mixture({first: 1, second: 1}), 4, shuffle="block")
    small = Mixture({split_of(server, 300_000): 1 for server in two_packs})
    with pytest.raises(InvalidOption, match="for two windows of 4"):
        Loader(small, 4, shuffle="block")
    with pytest.raises(InvalidOption, match="12 shards, since this order needs all"):
        Loader(small, 4, shuffle=True)

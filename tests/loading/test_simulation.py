"""`simulate()` predicts the effect of a cache and a link on the epochs over a pack of shards."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from remote_packs import cache_root

import colabkit
from colabkit.errors import InvalidOption, MissingSplit
from colabkit.packs import DOWNLOADS

SHARDS = 20


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return the index of a pack of 20 equal shards of 50 samples."""
    images = np.zeros((50 * SHARDS, 8, 8, 3), np.uint8)
    folder = tmp_path_factory.mktemp("packed")
    report = colabkit.pack((images, np.arange(len(images)) % 3), folder / "p.h5", shard_bytes=50 * 192, progress=False)
    assert len(colabkit.open_pack(report.path).info.shards) == SHARDS
    return report.path


def simulated(packed, cache="100MB", bandwidth=1_000_000, batch_rate=10.0, **options):
    return colabkit.simulate(packed, cache, bandwidth, batch_rate, batch_size=10, **options)


def test_with_a_cache_for_all_shards_only_the_first_epoch_downloads(packed):
    found = simulated(packed)
    first, second = found.epochs
    assert (first.fetched_bytes, second.fetched_bytes) == (found.pack_bytes, 0)
    assert second.wait_s == 0
    assert second.seconds == pytest.approx(found.train_s) == pytest.approx(10.0)


def test_a_slow_link_determines_the_time_of_the_first_epoch(packed):
    found = simulated(packed, bandwidth=10_000, batch_rate=1e6, latency_s=0)
    assert found.epochs[0].seconds == pytest.approx(found.link_s, rel=0.01)
    assert found.link_s == found.pack_bytes / 10_000


def test_latency_counts_once_per_group_of_concurrent_downloads(packed):
    quick, slow = (simulated(packed, batch_rate=1e6, latency_s=latency_s).epochs[0] for latency_s in (0.0, 10.0))
    assert slow.seconds - quick.seconds == pytest.approx(10.0 * SHARDS / DOWNLOADS, rel=0.05)


def test_each_process_takes_its_part_of_the_samples(packed):
    assert simulated(packed, ranks=2).train_s == simulated(packed).train_s / 2


def test_each_machine_needs_its_part_of_the_shards(packed):
    whole, half = simulated(packed), simulated(packed, machines=2)
    assert (half.shards, half.train_s) == (SHARDS // 2, whole.train_s / 2)
    assert half.epochs[0].fetched_bytes == half.pack_bytes == pytest.approx(whole.pack_bytes / 2, rel=0.01)
    assert half.epochs[1].fetched_bytes == 0


def test_a_larger_cache_never_costs_more_and_the_named_one_avoids_the_waiting(packed):
    found = simulated(packed, cache="500kB", bandwidth=50_000, batch_rate=15, epochs=3)
    waits = [wait_s for _, wait_s in found.curve]
    assert waits[0] > 0
    assert all(larger <= smaller + 1e-6 for smaller, larger in itertools.pairwise(waits))
    assert waits[-1] == 0
    assert dict(found.curve)[found.waitless_cache_bytes] == pytest.approx(0, abs=1e-6)
    enough = simulated(packed, cache=found.waitless_cache_bytes, bandwidth=50_000, batch_rate=15, epochs=3)
    assert enough.epochs[-1].wait_s == pytest.approx(0, abs=1e-6)
    assert found.least_cache_bytes <= found.waitless_cache_bytes


def test_a_cache_that_the_loader_would_refuse_is_refused(packed):
    with pytest.raises(InvalidOption, match=r"the cache has 97.7 KiB; expected at least [\d,]+ bytes, for two windows"):
        simulated(packed, cache=100_000)


def test_a_pack_in_one_file_and_wrong_arguments_are_refused(tmp_path, packed):
    one = colabkit.pack((np.zeros((4, 2, 2, 3), np.uint8), np.arange(4)), tmp_path / "one.h5", progress=False)
    with pytest.raises(InvalidOption, match=r"is a single file.*shards\. Pack .* colabkit\.pack\(\.\.\., shard_bytes="):
        simulated(one.path)
    with pytest.raises(MissingSplit):
        simulated(packed, split="test")
    for options in (
        {"bandwidth": "fast"},
        {"batch_rate": 0},
        {"ranks": 0},
        {"machines": 0},
        {"epochs": 0},
        {"window_shards": 0},
    ):
        with pytest.raises(InvalidOption, match=next(iter(options))):
            simulated(packed, **options)


def test_an_address_gives_the_same_result_as_the_local_pack(packed):
    remote = colabkit.simulate(f"file://{packed}", "100MB", 1_000_000, 10.0, batch_size=10)
    assert remote == simulated(packed)
    assert not list(cache_root().rglob("p-*.h5"))


def test_the_report_becomes_json_text_and_a_figure(packed, tmp_path):
    found = simulated(packed, cache="500kB", bandwidth=50_000, batch_rate=15)
    assert json.loads(json.dumps(found.to_dict()))["shards"] == SHARDS
    assert "avoids the waiting" in str(found)
    found.plot(tmp_path / "cache.png")
    assert (tmp_path / "cache.png").stat().st_size > 5_000

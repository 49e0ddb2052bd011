"""A remote pack of shards is read through a cache of bounded size, which processes share and which survives kills."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from contract import make_shards
from forks import start_fork
from packed_files import flip_byte, photos, sharded
from remote_packs import PackServer, cache_root, cached, disk_usage, largest_usage, pack_server, shard_bytes
from s3_server import s3_server

from colabkit.errors import BadSource, Corrupt, FetchFailed, InvalidOption, NotEnoughSpace, TimedOut
from colabkit.foundation import file_changes, hold_file, lock_folder, unlock
from colabkit.packs.dataset import shard_cache
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.dataset.shard_cache import LOADING_BYTES
from colabkit.packs.format.pack_file import read_pack

# Bytes allowed for the index and the lock.
EXTRA_BYTES = LOADING_BYTES + 16384


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackServer]:
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    with pack_server(tmp_path / "packs") as server:
        yield server


def local(server: PackServer) -> torch.Tensor:
    return open_pack(server.folder / "birds.h5")["train"][:][0]


def test_samples_of_a_web_server_a_bucket_and_a_folder_equal_the_local_ones(server):
    store = fsspec.filesystem("memory")
    for path in server.folder.iterdir():
        store.pipe(f"/bucket/{path.name}", path.read_bytes())
    images = local(server)
    for address in (server.url, "memory://bucket/birds.h5", server.folder / "birds.h5"):
        pack = open_pack(address, cache="1MiB")
        assert "6 shards, 6 of them not in the cache" in repr(pack)
        data = pack["train"]
        assert torch.equal(data[[38, 0, 20]][0], images[[38, 0, 20]])
        assert torch.equal(data[:][0], images)
        assert data.labels.tolist() == open_pack(server.folder / "birds.h5")["train"].labels.tolist()
        assert torch.equal(pickle.loads(pickle.dumps(data))[5][0], images[5])


@pytest.mark.full
def test_samples_on_s3_equal_the_local_ones_and_a_missing_shard_gives_a_clear_error(server, monkeypatch):
    with s3_server(monkeypatch) as client:
        for path in server.folder.iterdir():
            client.upload_file(str(path), "birds", f"packs/{path.name}")
        client.delete_object(Bucket="birds", Key="packs/birds-00005.h5")
        data = open_pack("s3://birds/packs/birds.h5", cache="1MiB")["train"]
        assert torch.equal(data[:33][0], local(server)[:33])
        with pytest.raises(FetchFailed, match=r"Cannot fetch 's3://birds/packs/birds-00005\.h5': nothing exists"):
            data[35]


def test_a_full_cache_never_exceeds_its_size_and_reads_each_sample(server):
    most = 2 * shard_bytes(server.folder) + EXTRA_BYTES
    with largest_usage(cache_root()) as largest:
        data = open_pack(server.url, cache=most)["train"]
        index_bytes = disk_usage(cache_root())
        for number in (0, 38, 10, 30, 16, 0):
            assert torch.equal(data[number][0], local(server)[number])
        assert torch.equal(data[::5][0], local(server)[::5])
    assert index_bytes < largest[0] <= most
    assert 1 <= len(cached()) <= 2


def test_a_cache_that_holds_all_shards_fetches_each_once_also_for_later_calls(server):
    for _ in range(2):
        pack = open_pack(server.url, cache="1MiB")
        assert torch.equal(pack["train"][:][0], local(server))
        assert len(pack["test"]) == len(pack["test"][:][0]) == 3
    assert {name: count for name, count in server.fetched.items() if name != "birds.h5"} == {
        path.name: 1 for path in server.folder.glob("birds-*.h5")
    }


def test_a_cache_below_one_shard_is_refused_at_once_and_the_minimum_is_accepted(server):
    began = time.monotonic()
    with pytest.raises(InvalidOption, match=r"the cache has 29\.3 KiB; expected .* for one shard") as caught:
        open_pack(server.url, cache=30_000)
    assert time.monotonic() - began < 1 or "PYTEST_XDIST_WORKER" in os.environ
    least = int(str(caught.value).partition("cache=")[2].split()[0])
    assert torch.equal(open_pack(server.url, cache=least)["train"][::6][0], local(server)[::6])


@pytest.mark.parametrize("cache", [0, -1, "much", True, 1.5])
def test_an_invalid_size_of_the_cache_raises(server, cache):
    with pytest.raises(InvalidOption, match="cache="):
        open_pack(server.url, cache=cache)


def test_an_address_without_a_cache_and_a_single_file_raise(server):
    with pytest.raises(InvalidOption, match=r"it is an address; expected a local path\. Set cache='20GiB'"):
        open_pack(server.url)
    with pytest.raises(BadSource, match=r"the pack is a single file; expected the index of a pack of shards"):
        open_pack(server.url.replace("birds.h5", "birds-00001.h5"), cache="1MiB")
    with pytest.raises(InvalidOption, match=r"the file is larger than the cache of 1\.0 KiB; .* Use a larger cache="):
        open_pack(server.url.replace("birds.h5", "birds-00001.h5"), cache="1KiB")
    for address in (f"{server.url}?token=secret-token", "zip://birds.h5::memory://a.zip"):
        with pytest.raises(InvalidOption, match="it addresses a single file") as caught:
            open_pack(address, cache="1MiB")
        assert "secret-token" not in str(caught.value)


def flipped(data: bytes) -> bytes:
    """Change a byte in the last sample."""
    info = np.frombuffer(data, np.uint8).copy()
    info[len(info) // 2] ^= 1
    return info.tobytes()


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda _: b"x", lambda data: data + data],
)
def test_a_flipped_truncated_or_longer_shard_is_refused_and_not_kept(server, damage):
    data = open_pack(server.url, cache="1MiB")["train"]
    server.damage["birds-00002.h5"] = damage
    with pytest.raises(Corrupt, match=r"Cannot fetch 'http.*birds-00002\.h5': the file is damaged or a different one"):
        data[15]
    assert "birds-00002.h5" not in cached()
    server.damage.clear()
    assert torch.equal(data[15][0], local(server)[15])


@pytest.mark.parametrize("index", [slice(13, 16), 15])
def test_a_shard_that_is_damaged_in_the_cache_is_fetched_again(server, index):
    open_pack(server.url, cache="1MiB")["train"][15]
    path = next(cache_root().rglob("birds-00002.h5"))
    found = read_pack(path).data_sets["X_train"]
    with path.open("r+b") as file:
        file.seek(found.offset + 2 * 768)
        file.write(b"\xff\0\xff\0")
    data = open_pack(server.url, cache="1MiB")["train"]
    with pytest.raises(Corrupt, match=r"'birds-00002\.h5' in the cache was damaged\. Try again"):
        data[index]
    assert torch.equal(data[index][0], local(server)[index])


def test_a_shard_whose_layout_is_damaged_in_the_cache_is_fetched_again(server):
    open_pack(server.url, cache="1MiB")["train"][15]
    path = next(cache_root().rglob("birds-00002.h5"))
    path.write_bytes(path.read_bytes()[:-1])
    data = open_pack(server.url, cache="1MiB")["train"]
    with pytest.raises(Corrupt, match=r"'birds-00002\.h5' in the cache was damaged\. Try again"):
        data[15]
    assert torch.equal(data[15][0], local(server)[15])


def test_an_image_file_that_is_damaged_in_the_cache_is_fetched_again(tmp_path, server):
    index = tmp_path / "files" / "birds.h5"
    sharded(photos(tmp_path / "tree"), index, 4000, encoding="source")
    data = open_pack(index, cache="1MiB")["train"]
    expected = data.encoded(0)
    path = next(path for path in cache_root().rglob("birds-00000.h5"))
    flip_byte(path, read_pack(path).data_sets["X_train"].offset)
    with pytest.raises(Corrupt, match=r"'birds-00000\.h5' in the cache was damaged\. Try again"):
        data.encoded(0)
    assert data.encoded(0) == expected


def test_an_earlier_failure_is_forgotten_once_another_process_has_fetched_the_shard(server, monkeypatch):
    monkeypatch.setattr("colabkit.storage.fetching.transfer._BACK_OFF_S", 0.0)
    data = open_pack(server.url, cache="1MiB")["train"]
    server.is_cut = True
    with pytest.raises(FetchFailed):
        data.remote.fetch(1, shard_cache.nothing, 0)
    server.is_cut = False
    # Caches of different sizes are separate objects, as in separate processes.
    open_pack(server.url, cache="2MiB")["train"][9]
    assert torch.equal(data[9][0], local(server)[9])


def test_shards_are_removed_if_the_disk_is_smaller_than_the_cache(server, monkeypatch):
    data = open_pack(server.url, cache="1MiB")["train"]
    disk_bytes = disk_usage(cache_root()) + 3 * shard_bytes(server.folder)
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: disk_bytes - disk_usage(cache_root()))
    for number in (0, 38, 10, 30, 16, 0):
        assert torch.equal(data[number][0], local(server)[number])
    assert 1 <= len(cached()) <= 3


def test_a_disk_without_space_for_one_shard_is_an_error(server, monkeypatch):
    data = open_pack(server.url, cache="1MiB")["train"]
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 4096)
    with pytest.raises(NotEnoughSpace, match=r"Cannot fetch 'birds-00001\.h5': .* has 4\.0 KiB free"):
        data[9]


def test_no_shard_is_removed_if_that_cannot_free_enough_space(server, monkeypatch):
    data = open_pack(server.url, cache="1MiB")["train"]
    for number in (0, 38, 10):
        data[number]
    before = cached()
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: -(1 << 30))
    with pytest.raises(NotEnoughSpace):
        data[30]
    assert cached() == before
    assert torch.equal(data[0][0], local(server)[0])


def test_errors_of_the_cache_folder_are_named_and_a_missing_index_is_none(server, monkeypatch):
    def failing(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    data = open_pack(server.url, cache="1MiB")["train"]
    next(cache_root().rglob("birds.h5")).unlink()
    assert data.remote.cache.fitting_shards() == 6
    monkeypatch.setattr(shard_cache, "lock_folder", failing)
    for read in (lambda: data[9], lambda: data.remote.fetch(1, shard_cache.nothing, 0)):
        with pytest.raises(NotEnoughSpace, match=r"Cannot fetch 'birds-00001\.h5': No space left on device"):
            read()


def test_a_cut_link_gives_one_clear_error_and_reading_resumes_when_it_is_back(server, monkeypatch):
    monkeypatch.setattr("colabkit.storage.fetching.transfer._BACK_OFF_S", 0.0)
    data = open_pack(server.url, cache="1MiB")["train"]
    server.is_cut = True
    with pytest.raises(FetchFailed, match=r"Cannot fetch 'http.*birds-00001\.h5': the last attempt failed"):
        data[9]
    server.is_cut = False
    assert torch.equal(data[9][0], local(server)[9])


def test_a_replaced_remote_pack_is_read_anew_and_its_old_shards_are_removed(server):
    open_pack(server.url, cache="1MiB")["train"][:]
    before = cached()
    for path in server.folder.iterdir():
        path.unlink()
    make_shards(server.folder / "birds.h5", {"train": 3}, {"train": 4}, shape=(16, 16, 3))
    data = open_pack(server.url, cache="1MiB")["train"]
    assert len(before) == 6
    assert not cached()
    assert torch.equal(data[:][0], local(server))


def started(server: PackServer, cache: str | int) -> int:
    """Read all samples in a forked process, which exits with 0 if they are those of the pack; return its ID."""
    expected = local(server).numpy()

    def read() -> None:
        data = open_pack(server.url, cache=cache)["train"]
        assert all(np.array_equal(data[index][0].numpy(), image) for index, image in enumerate(expected))

    return start_fork(read)


def test_two_processes_fetch_each_shard_once(server):
    assert [os.waitpid(pid, 0)[1] for pid in [started(server, "1MiB") for _ in range(2)]] == [0, 0]
    assert {count for name, count in server.fetched.items() if name != "birds.h5"} == {1}


def test_two_processes_share_a_cache_that_is_too_small_for_both(server):
    most = 2 * shard_bytes(server.folder) + 2 * EXTRA_BYTES
    with largest_usage(cache_root()) as largest:
        assert [os.waitpid(pid, 0)[1] for pid in [started(server, most) for _ in range(2)]] == [0, 0]
    # A process that opens the pack first copies its index to a folder next to the cache.
    assert largest[0] <= most + 2 * 65536


def test_a_killed_process_leaves_whole_shards_and_the_next_one_continues(server):
    reached, name = threading.Event(), "birds-00003.h5"
    server.damage[name] = lambda data: reached.set() or (server.released.wait(30) and data)
    pid = started(server, "1MiB")
    assert reached.wait(60)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert name not in cached()
    server.damage.clear()
    data = open_pack(server.url, cache="1MiB")["train"]
    assert torch.equal(data[:][0], local(server))
    assert {server.fetched[f"birds-{number:05d}.h5"] for number in (0, 1, 2)} == {1}
    assert not [*cache_root().rglob("*.loading")]


def test_data_that_a_killed_process_left_makes_room_for_other_shards(server):
    least = 2 * shard_bytes(server.folder) + EXTRA_BYTES
    data = open_pack(server.url, cache=least)["train"]
    left = next(cache_root().rglob("birds.h5")).with_name("birds-00005.h5.loading")
    left.mkdir()
    (left / "data").write_bytes(bytes(shard_bytes(server.folder)))
    assert torch.equal(data[[0, 10, 14]][0], local(server)[[0, 10, 14]])
    assert not left.exists()


def test_the_error_for_a_stalled_download_names_the_time_that_was_waited(server, monkeypatch):
    data = open_pack(server.url, cache="1MiB")["train"]
    fd = lock_folder(next(cache_root().rglob("birds.h5")).with_name("birds-00005.h5.loading"))
    assert fd is not None
    monkeypatch.setattr("colabkit.foundation.locks.FOLDER_STALLED_S", 0.05)
    with pytest.raises(TimedOut, match=r"makes no progress; expected data within 50\.0 ms"):
        data[35]
    unlock(fd)


def test_a_process_far_from_others_gets_an_error_instead_of_waiting_for_their_shards_forever(server, monkeypatch):
    most = 2 * shard_bytes(server.folder) + EXTRA_BYTES
    data = open_pack(server.url, cache=most)["train"]
    assert torch.equal(data[[0, 30]][0], local(server)[[0, 30]])
    held = [hold_file(path) for path in cache_root().rglob("birds-*.h5")]
    monkeypatch.setattr(shard_cache, "STALLED_S", 0.0)
    with pytest.raises(NotEnoughSpace, match=r"Cannot fetch 'birds-00002\.h5': shards in use fill the cache of"):
        data[15]
    for fd in held:
        unlock(fd)
    assert torch.equal(data[15][0], local(server)[15])

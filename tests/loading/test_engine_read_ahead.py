"""Samples are read before they are needed: pages of mapped rows, and files of remote sources."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from held_reads import HeldReads
from packed_files import photos
from sampling import sampled
from torch import Tensor
from waiting import LONG_S, comes_true

from colabkit.foundation import LoaderMeters
from colabkit.loading import Loader
from colabkit.loading.engine import read_ahead, tiers
from colabkit.loading.engine.batches import BatchPlan, OrderPlanner
from colabkit.loading.engine.gather import RowGather
from colabkit.loading.engine.read_ahead import FileReadAhead, PagePopulator, RowFile, read_rows_ahead, row_files_of
from colabkit.loading.engine.share import Share
from colabkit.packs import FileDataset, open_pack
from colabkit.sampler import ShuffledOrder
from colabkit.storage.sources import concurrency


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) > before:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


Range = tuple[str, int, int]
PAGE = mmap.PAGESIZE


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """Return a list that records the file, offset and size of each request to the kernel."""
    found: list[Range] = []

    def advise(fd: int, place: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((os.readlink(f"/proc/self/fd/{fd}"), place, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[RowFile]:
    """Return three files of 10, 1 and 7 rows of 100 bytes. The rows start at nonzero offsets."""
    found = []
    for number, rows in enumerate((10, 1, 7)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(bytes(4096 + 100 * rows))
        found.append(RowFile(path, 4096 - number, rows, 100))
    return found


def plans(batch_size: int = 2, n: int = 18) -> list[BatchPlan]:
    return list(OrderPlanner(ShuffledOrder(n, 1), batch_size, False, Share()).plans(0, 0, 3))


def expected_ranges(files: list[RowFile], rows: np.ndarray) -> set[Range]:
    every = [
        (str(file.path), file.offset + row * file.row_bytes, file.row_bytes)
        for file in files
        for row in range(file.rows)
    ]
    return {every[row] for row in rows.tolist()}


@pytest.mark.parametrize("depth", [0, 1, 5, 1000])
def test_plans_are_passed_on_in_the_same_order(files, requests, depth):
    whole = plans()
    assert [id(plan) for plan in read_rows_ahead(iter(whole), files, None, depth)] == list(map(id, whole))


@pytest.mark.parametrize("depth", [0, 6, 1000])
def test_exactly_the_rows_of_the_next_plans_are_requested_once(files, requests, depth):
    whole, seen = plans(), 0
    for place, _ in enumerate(read_rows_ahead(iter(whole), files, None, depth)):
        known = [len(plan.indices) for plan in whole[place:]]
        ahead = next((count for count in range(1, len(known)) if sum(known[: count + 1]) > depth), len(known) - 1)
        wanted = np.concatenate([plan.indices for plan in whole[: place + 1 + ahead]])
        assert set(requests) == expected_ranges(files, wanted)
        assert len(requests) == len(wanted)
        seen += 1
    assert seen == len(whole)
    assert len(requests) == 18


def test_a_view_requests_only_its_own_rows(files, requests):
    rows_of = np.array([17, 3, 10, 11, 0])
    list(read_rows_ahead(iter(plans(2, 5)), files, rows_of, 10))
    assert set(requests) == expected_ranges(files, rows_of)


def test_rows_are_requested_in_the_order_of_the_file(files, requests):
    list(read_rows_ahead(iter(plans(18)), files, None, 0))
    assert requests == sorted(requests)


def test_descriptors_are_closed_at_the_end_and_after_an_early_exit(files, requests):
    before = len(os.listdir("/proc/self/fd"))
    list(read_rows_ahead(iter(plans()), files, None, 4))
    assert len(os.listdir("/proc/self/fd")) == before
    running = read_rows_ahead(iter(plans()), files, None, 4)
    next(running)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    running.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_descriptor_is_held_if_the_process_has_none_for_some_file(files, requests, failing, monkeypatch):
    def open_most(path: Path, flags: int) -> int:
        if path == files[failing].path:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags)

    opened, before = os.open, len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", open_most)
    with closing(read_rows_ahead(iter(plans()), files, None, 4)) as running:
        next(running)
        assert len(os.listdir("/proc/self/fd")) == before
    assert requests == []


def test_plans_still_arrive_without_the_file_or_the_system_call(files, requests, monkeypatch):
    whole = plans()
    files[1].path.unlink()
    assert list(map(id, read_rows_ahead(iter(whole), files, None, 4))) == list(map(id, whole))
    assert requests == []
    monkeypatch.delattr(os, "posix_fadvise")
    assert list(map(id, read_rows_ahead(iter(whole), files[:1], None, 4))) == list(map(id, whole))


@pytest.mark.parametrize("kind", ["whole", "view", "shards"])
def test_a_pack_on_disk_is_requested_row_by_row_with_the_same_batches(tmp_path, requests, kind, monkeypatch):
    if kind == "shards":
        path = make_shards(tmp_path / "s.h5", {"train": 9}, {"train": 31})
    else:
        path = make_pack(tmp_path / "p.h5", train=40)
    data = open_pack(path)["train"]
    data = data.subset([33, 2, 17, 5]) if kind == "view" else data
    expected = [images.clone() for images, _ in Loader(data, 3, shuffle=True)]
    assert requests == []
    monkeypatch.setattr(tiers.Room, "measure", lambda *_: tiers.Room(None, 0, 0))
    loader = Loader(data, 3, shuffle=True)
    assert loader.tier.name == "disk"
    assert all(torch.equal(images, other) for (images, _), other in zip(loader, expected, strict=True))
    found = set()
    for file, place, size in requests:
        assert size == 36
        with open(file, "rb") as opened:
            opened.seek(place)
            found.add(opened.read(size))
    rows = torch.cat(expected).permute(0, 2, 3, 1)
    assert found == {row.numpy().tobytes() for row in rows}
    assert len(requests) == len(data)


def test_the_rows_of_the_first_loaded_field_are_requested(tmp_path, requests):
    fields = {"X": np.zeros((9, 5), "<f4"), "Y": np.arange(9), "mask": np.arange(63, dtype="<i2").reshape(9, 7)}
    stored = {name: {"train": values} for name, values in fields.items()}
    path = seal_fields(tmp_path / "p.h5", stored, {"X": "array", "mask": "array"}, "class", ("Y",))
    data = open_pack(path)["train"]
    list(Loader(data, 3, fields=["mask"], keep="disk"))
    found = []
    for file, place, size in requests:
        with open(file, "rb") as opened:
            opened.seek(place)
            found.append(opened.read(size))
    assert found == [row.tobytes() for row in fields["mask"]]
    requests.clear()
    # Labels are in memory.
    list(Loader(data, 3, fields=["mask", "Y"], keep="disk"))
    assert requests == []


def test_the_rows_requested_ahead_are_limited_for_any_plan_size(tmp_path, requests):
    loader = Loader(open_pack(make_pack(tmp_path / "p.h5", train=1000))["train"], 2, keep="disk")
    depth = loader._pipeline.engine.depth
    assert (depth.plan_batches, depth.group_batches) == (128, 32)
    # Threads build at most `depth.groups` groups ahead, and the rows of two further groups are read ahead.
    limit = 2 * (depth.groups + 2) * depth.group_batches
    for number, _ in enumerate(loader, 1):
        assert len(requests) - 2 * number <= limit
    assert len(requests) == 1000


def test_an_abandoned_epoch_closes_the_files_it_read_ahead(tmp_path, requests):
    loader = Loader(open_pack(make_pack(tmp_path / "p.h5", train=40))["train"], 3, keep="disk")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for _ in loader:
            break
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_reported_file_ranges_hold_the_mapped_rows(tmp_path):
    data = open_pack(make_shards(tmp_path / "s.h5", {"train": 3}, {"train": 4}))["train"]
    maps = data.maps()
    assert maps is not None
    found = row_files_of(data, "X", RowGather(maps, None, are_images=True))
    assert found is not None
    for file, rows in zip(found, maps, strict=True):
        content = file.path.read_bytes()[file.offset : file.offset + file.rows * file.row_bytes]
        assert content == rows.numpy().tobytes()


class Kernel:
    """A fake `madvise` that records its calls; one call can block, and later calls can fail.

    Calls are numbered from 0. Call `stop_at` blocks until `go_on` is set. All calls from `fail_at` on fail.
    """

    def __init__(self, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.stop_at = stop_at
        self.fail_at = fail_at
        self.waits, self.go_on = threading.Event(), threading.Event()

    def __call__(self, address: int, size: int, advice: int) -> int:
        assert advice == 22
        number = len(self.calls)
        self.calls.append((address, size))
        if number == self.stop_at:
            self.waits.set()
            assert self.go_on.wait(LONG_S)
        return -1 if self.fail_at is not None and number >= self.fail_at else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Return a function that installs a `Kernel` and sets the populator's step to two pages."""

    def put(**options: Any) -> Kernel:
        made = Kernel(**options)
        monkeypatch.setattr(read_ahead, "_STEP_BYTES", 2 * PAGE)
        monkeypatch.setattr(read_ahead, "find_madvise", lambda: made)
        return made

    return put


def maps_of(*pages: int, tail: int = 5) -> list[Tensor]:
    """Return a tensor for each page count; it begins inside a page and has `tail` bytes more than these pages."""
    return [
        torch.from_numpy(np.frombuffer(mmap.mmap(-1, (count + 2) * PAGE), np.uint8))[7 : 7 + count * PAGE + tail]
        for count in pages
    ]


def assert_all_covered(calls: list[tuple[int, int]], maps: list[Tensor]) -> None:
    at = iter(calls)
    for rows in maps:
        place, stop = rows.data_ptr() // PAGE * PAGE, rows.data_ptr() + rows.nbytes
        while place < stop:
            address, size = next(at)
            assert address == place
            assert 0 < size <= 2 * PAGE
            place += size
        assert place == stop
    assert next(at, None) is None


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "colabkit-loader-populating"]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_all_maps_are_populated_in_steps_in_order(kernel):
    fake, maps = kernel(), maps_of(5, 1, 8)
    populator = PagePopulator(maps)
    populator.start()
    assert comes_true(lambda: not threads())
    populator.stop()
    assert_all_covered(fake.calls, maps)
    populator.start()
    assert threads() == []
    assert_all_covered(fake.calls, maps)


def pages_of(calls: list[tuple[int, int]]) -> list[int]:
    """Return the numbers of all requested pages, in order and with repetitions."""
    return [page for address, size in calls for page in range(address // PAGE, -(-(address + size) // PAGE))]


@pytest.mark.parametrize("row_bytes", sampled([1, 100, PAGE // 2, PAGE, PAGE + 3, 3 * PAGE], 3))
@pytest.mark.parametrize("share", sampled([0.0, 0.02, 0.3, 0.9, 1.0], 2))
def test_exactly_the_pages_with_rows_of_a_view_are_requested_once(kernel, row_bytes, share):
    fake, counts = kernel(), (60, 1, 40)
    flat = maps_of(*(-(-count * row_bytes // PAGE) for count in counts))
    maps = [rows[: count * row_bytes].view(count, row_bytes) for rows, count in zip(flat, counts, strict=True)]
    numbers = np.random.default_rng(0).permutation(sum(counts))[: max(1, int(share * sum(counts)))]
    populator = PagePopulator(maps, torch.from_numpy(np.append(numbers, numbers[:1])))
    populator.start()
    assert comes_true(lambda: not threads())
    populator.stop()
    rows = [row for some in maps for row in some]
    wanted = {page for n in numbers for page in pages_of([(rows[n].data_ptr(), row_bytes)])}
    assert len(fake.calls) <= len(wanted)
    assert pages_of(fake.calls) == sorted(wanted, key=pages_of([(r.data_ptr(), r.nbytes) for r in maps]).index)


def test_a_loader_of_a_small_view_does_not_populate_the_rest_of_its_pack(tmp_path, kernel):
    fake = kernel()
    data = open_pack(make_pack(tmp_path / "p.h5", (64, 64, 3), train=200))["train"]
    running = iter(Loader(data.subset([150, 3, 4]), 1))
    next(running)
    assert comes_true(lambda: not threads())
    assert 9 <= len(set(pages_of(fake.calls))) <= 11
    running.close()


@pytest.mark.parametrize("stop_at", sampled(range(8), 3))
def test_a_stopped_populator_resumes_at_the_same_page(kernel, stop_at):
    fake, maps = kernel(stop_at=stop_at), maps_of(5, 1, 8)
    populator = PagePopulator(maps)
    populator.start()
    assert fake.waits.wait(LONG_S)
    threading.Timer(0.01, fake.go_on.set).start()
    populator.stop()
    assert threads() == []
    done = len(fake.calls)
    assert done <= stop_at + 1 + (not populator._is_over.is_set())
    populator.start()
    assert comes_true(lambda: not threads())
    populator.stop()
    assert_all_covered(fake.calls, maps)


def test_a_thread_that_waits_for_the_disk_is_abandoned_and_ends_by_itself(kernel, monkeypatch):
    fake, maps = kernel(stop_at=1), maps_of(9)
    joined: list[float] = []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: joined.append(timeout))
    populator = PagePopulator(maps)
    populator.start()
    assert fake.waits.wait(LONG_S)
    populator.stop()
    monkeypatch.undo()
    assert len(joined) == 1
    assert joined[0] is not None
    fake.go_on.set()
    assert comes_true(lambda: not threads())
    assert len(fake.calls) == 2


def test_a_populator_started_twice_runs_once_until_it_is_stopped_twice(kernel):
    fake, maps = kernel(stop_at=1), maps_of(9)
    populator = PagePopulator(maps)
    populator.start()
    populator.start()
    assert fake.waits.wait(LONG_S)
    assert len(threads()) == 1
    populator.stop()
    fake.go_on.set()
    assert comes_true(lambda: not threads())
    populator.stop()
    assert_all_covered(fake.calls, maps)


def test_the_last_stop_ends_the_populator(kernel):
    fake, maps = kernel(stop_at=1), maps_of(9)
    populator = PagePopulator(maps)
    for _ in range(2):
        populator.start()
    assert fake.waits.wait(LONG_S)
    populator.stop()
    threading.Timer(0.01, fake.go_on.set).start()
    populator.stop()
    assert threads() == []
    assert len(fake.calls) <= 3


@pytest.mark.parametrize("inside", [lambda loader: loader.peek(), list], ids=["peek", "nested"])
def test_a_peek_or_a_nested_iteration_does_not_stop_the_populator(tmp_path, kernel, inside):
    fake = kernel(stop_at=1)
    loader = Loader(open_pack(make_pack(tmp_path / "p.h5", (64, 64, 3), train=20))["train"], 2)
    running = iter(loader)
    next(running)
    assert fake.waits.wait(LONG_S)
    inside(loader)
    fake.go_on.set()
    assert comes_true(lambda: not threads())
    assert_all_covered(fake.calls, list(loader.dataset.maps()))
    running.close()


@pytest.mark.parametrize("fail_at", [0, 2])
def test_the_populator_ends_when_the_kernel_refuses(kernel, fail_at):
    fake, maps = kernel(fail_at=fail_at), maps_of(9, 9)
    populator = PagePopulator(maps)
    for _ in range(3):
        populator.start()
        assert comes_true(lambda: not threads())
        populator.stop()
    assert len(fake.calls) == fail_at + 1


def test_nothing_happens_without_the_system_call(monkeypatch):
    monkeypatch.setattr(read_ahead, "find_madvise", lambda: None)
    populator = PagePopulator(maps_of(3))
    populator.start()
    assert threads() == []
    populator.stop()


def test_pages_of_a_pack_are_loaded_and_batches_are_the_same(tmp_path):
    data = open_pack(make_pack(tmp_path / "p.h5", (32, 32, 3), train=300))["train"]
    maps = data.maps()
    assert maps is not None
    populator = PagePopulator(maps)
    populator.start()
    assert comes_true(lambda: not threads())
    populator.stop()
    images = torch.cat([images for images, _ in Loader(data, 32)])
    assert torch.equal(images, data.rows.permute(0, 3, 1, 2))


def test_the_loader_stops_the_populator_with_the_epoch(tmp_path, kernel):
    fake = kernel(stop_at=0)
    loader = Loader(open_pack(make_pack(tmp_path / "p.h5", (64, 64, 3), train=20))["train"], 2)
    running = iter(loader)
    next(running)
    assert fake.waits.wait(LONG_S)
    fake.go_on.set()
    running.close()
    assert comes_true(lambda: not threads())
    list(loader)
    assert comes_true(lambda: not threads())
    assert_all_covered(fake.calls, list(loader.dataset.maps()))


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    """Return a remote source of photos whose reads can be blocked."""
    monkeypatch.setattr(concurrency, "_TICK_S", 0.01)
    found = HeldReads(photos(tmp_path / "tree", 8))
    yield found
    found.go_on()


def plan_of(start: int, stop: int) -> BatchPlan:
    indices = np.arange(start, stop)
    return BatchPlan(indices, indices, (stop - start,), (stop,))


def test_samples_announced_while_all_reads_hang_are_read_too(remote):
    remote.may_read = lambda _: False
    with closing(FileReadAhead(FileDataset(remote), lambda _: False, LoaderMeters())) as ahead:
        ahead.announce(plan_of(0, 3))
        assert comes_true(lambda: sum(remote.reads.values()) == 3)
        ahead.announce(plan_of(3, 8))
        assert comes_true(lambda: sum(remote.reads.values()) == 8)
        remote.go_on()
        assert [ahead.fetch(number) for number in range(8)] == [
            FileDataset(remote).encoded(number) for number in range(8)
        ]


def test_files_of_cached_samples_are_released_whether_they_were_read_or_not(remote):
    cached: set[int] = set()
    with closing(FileReadAhead(FileDataset(remote), cached.__contains__, LoaderMeters())) as ahead:
        cached.add(2)
        ahead.announce(plan_of(0, 4))
        assert comes_true(lambda: len(ahead._found) == 3)
        assert remote.reads["ants/002.jpg"] == 0
        for number in range(4):
            ahead.forget(number)
        assert (ahead._found, ahead._held_bytes) == ({}, 0)
        remote.may_read = lambda _: False
        ahead.announce(plan_of(4, 6))
        assert comes_true(lambda: remote.reads["ants/005.jpg"] == 1)
        ahead.forget(4)
        remote.go_on()
        assert ahead.fetch(5)
        assert comes_true(lambda: not ahead._forgotten)
        assert (ahead._found, ahead._held_bytes) == ({}, 0)


def test_a_file_that_another_thread_cached_first_is_not_waited_for(remote):
    cached: set[int] = set()
    remote.may_read = lambda _: False
    with closing(FileReadAhead(FileDataset(remote), cached.__contains__, LoaderMeters())) as ahead:
        ahead.announce(plan_of(0, 3))
        assert comes_true(lambda: sum(remote.reads.values()) == 3)
        cached.add(4)
        ahead.announce(plan_of(3, 6))
        assert ahead.fetch(4) is None
        remote.go_on()
        assert ahead.fetch(5)

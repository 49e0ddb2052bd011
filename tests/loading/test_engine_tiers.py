"""The tier depends on the free space. Decoded images are cached once, by any thread, in RAM or in an unnamed file."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import h5py
import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from loader_batches import epoch
from packed_files import packed, photos
from pictures import photo, saved
from sampling import sampled
from simulated_gpu import SimulatedGpu
from strikes import ChangeHook, fill_disk

from colabkit.augment import Compose, RandomHorizontalFlip, RandomResizedCrop
from colabkit.errors import FileFailed, InvalidOption, NotEnoughSpace
from colabkit.foundation import LoaderMeters
from colabkit.foundation.permutation import epoch_order
from colabkit.loading import Loader
from colabkit.loading.engine import tiers
from colabkit.loading.engine.batches import OrderPlanner
from colabkit.loading.engine.columns import columns_of
from colabkit.loading.engine.device import DeviceEngine
from colabkit.loading.engine.share import Share
from colabkit.loading.engine.tiers import Room, RowCache, Tier, choose_tier, promised_bytes
from colabkit.packs import FileDataset, open_pack
from colabkit.sampler import ShuffledOrder
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item

GIB = 1 << 30
ROOMY = Room(None, 100 * GIB, 100 * GIB)
WITH_GPU = Room(100 * GIB, 100 * GIB, 100 * GIB)
FILE: dict[str, Any] = {"is_decoded": False, "is_on_disk": True}
ARRAY: dict[str, Any] = {"is_decoded": False, "is_on_disk": False}
DECODED: dict[str, Any] = {"is_decoded": True, "is_on_disk": False}
ROWS = 1000


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    simulated = SimulatedGpu(total_bytes=8 << 20)
    simulated.install(monkeypatch)
    with simulated:
        yield simulated


def chosen(keep: Any, room: Room, gigabytes: float | None, kind: dict[str, Any]) -> Tier:
    row_bytes = None if gigabytes is None else int(gigabytes * GIB) // ROWS
    return choose_tier("make a Loader", keep, room, row_bytes=row_bytes, count=ROWS, **kind)


@pytest.mark.parametrize(
    ("keep", "room", "gigabytes", "kind", "name", "rows"),
    [
        # The GPU is used if enough of its memory remains for a model.
        ("auto", WITH_GPU, 40, FILE, "gpu", 0),
        ("auto", WITH_GPU, 41, FILE, "ram", 0),
        ("auto", Room(100 * GIB, GIB, GIB), 40, FILE, "gpu", 0),
        ("gpu", WITH_GPU, 40, ARRAY, "gpu", 0),
        ("auto", WITH_GPU, 40, DECODED, "gpu", ROWS),
        ("gpu", WITH_GPU, 40, DECODED, "gpu", ROWS),
        ("auto", Room(0, 100 * GIB, 0), 1, FILE, "ram", 0),
        # Decoded samples move to the GPU only if all of them fit in RAM first.
        ("auto", Room(100 * GIB, 10 * GIB, 100 * GIB), 40, DECODED, "disk", ROWS),
        ("auto", Room(100 * GIB, 10 * GIB, 0), 35, DECODED, "ram", 200),
        # The kernel can cache the rows of a pack if all of them fit in RAM.
        ("auto", ROOMY, 70, FILE, "ram", 0),
        ("auto", ROOMY, 71, FILE, "disk", 0),
        ("ram", ROOMY, 70, FILE, "ram", 0),
        ("disk", ROOMY, 1, FILE, "disk", 0),
        ("auto", Room(None, 0, 0), 1, FILE, "disk", 0),
        # Arrays are already in memory.
        ("auto", Room(None, GIB, GIB), 50, ARRAY, "ram", 0),
        ("ram", Room(None, GIB, GIB), 50, ARRAY, "ram", 0),
        # Decoded samples are cached in the fastest tier with room for all of them, otherwise in the one with the most
        # room.
        ("auto", ROOMY, 70, DECODED, "ram", ROWS),
        ("ram", ROOMY, 70, DECODED, "ram", ROWS),
        ("auto", ROOMY, 71, DECODED, "disk", ROWS),
        ("auto", Room(None, 10 * GIB, 100 * GIB), 70, DECODED, "disk", ROWS),
        ("auto", Room(None, 10 * GIB, 100 * GIB), 160, DECODED, "disk", 500),
        ("auto", Room(None, 100 * GIB, 10 * GIB), 140, DECODED, "ram", 500),
        ("disk", ROOMY, 40, DECODED, "disk", ROWS),
        ("auto", Room(None, 0, 0), 1, DECODED, "source", 0),
        # Samples of different sizes cannot be cached.
        ("auto", ROOMY, None, DECODED, "source", 0),
        ("auto", WITH_GPU, None, DECODED, "source", 0),
        ("auto", ROOMY, None, ARRAY, "source", 0),
    ],
)
def test_the_tier_depends_on_the_free_space(keep, room, gigabytes, kind, name, rows):
    found = chosen(keep, room, gigabytes, kind)
    assert (found.name, found.rows) == (name, rows)
    assert found.reason
    assert str(found) == f"{name} ({found.reason})"


@pytest.mark.parametrize(
    ("keep", "room", "gigabytes", "kind", "message"),
    [
        ("gpu", WITH_GPU, 41, FILE, "samples take 41.0 GiB; expected at most 40.0 GiB on the GPU"),
        ("gpu", WITH_GPU, 41, DECODED, "at most 40.0 GiB on the GPU"),
        ("gpu", Room(100 * GIB, 10 * GIB, 0), 35, DECODED, "at most 7.0 GiB in RAM, where samples are decoded"),
        ("ram", ROOMY, 71, FILE, "71.0 GiB; expected at most 70.0 GiB in RAM. Use keep='auto'"),
        ("ram", ROOMY, 71, DECODED, "71.0 GiB; expected at most 70.0 GiB in RAM. Use keep='auto'"),
        ("ram", ROOMY, None, DECODED, "keep='ram', but .*differ in size.*samples of one size.*pass size="),
        ("disk", ROOMY, None, ARRAY, "keep='disk', but .*loaded one by one.*Omit keep="),
        ("disk", ROOMY, 1, ARRAY, r"arrays are already in memory.*colabkit\.pack\("),
        ("gpu", WITH_GPU, None, DECODED, "differ in size"),
    ],
)
def test_an_impossible_tier_raises_an_error_with_an_alternative(keep, room, gigabytes, kind, message):
    with pytest.raises(InvalidOption, match=f"Cannot make a Loader: .*{message}"):
        chosen(keep, room, gigabytes, kind)


def test_reasons_name_the_deciding_sizes():
    assert "70.0 GiB" in chosen("auto", ROOMY, 71, FILE).reason
    assert "71.0 GiB" in chosen("auto", ROOMY, 71, FILE).reason
    assert "500 of 1,000" in chosen("auto", Room(None, 10 * GIB, 100 * GIB), 160, DECODED).reason
    assert "size=" in chosen("auto", ROOMY, None, DECODED).reason
    assert chosen("disk", ROOMY, 1, FILE).reason == "requested with keep='disk'"


@pytest.mark.parametrize(
    ("processes", "local", "sharing"), [(1, None, 1), (2, None, 2), (7, None, 7), (2, "8", 2), (16, "4", 4)]
)
def test_processes_of_a_machine_share_the_free_space(tmp_path, monkeypatch, processes, local, sharing):
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    room = Room.measure(torch.device("cpu"), tmp_path, processes)
    alone = Room.measure(torch.device("cpu"), tmp_path, 1)
    assert room.gpu_bytes is None
    assert room.ram_bytes == pytest.approx(alone.ram_bytes / sharing, rel=0.2)
    assert room.disk_bytes == pytest.approx(alone.disk_bytes / sharing, rel=0.2)


@pytest.fixture
def raw(tmp_path: Path) -> Any:
    return open_pack(make_pack(tmp_path / "raw.h5", train=22))["train"]


@pytest.fixture
def encoded(tmp_path: Path) -> Any:
    return open_pack(packed(photos(tmp_path / "tree"), tmp_path / "encoded.h5", encoding="source"))["train"]


def test_the_loader_reports_its_tier(raw, encoded, monkeypatch):
    rows, arrays, decoded = Loader(raw, 4), Loader(torch.zeros(9, 2), 4), Loader(encoded, 4, size=16)
    for loader in (rows, arrays, decoded):
        assert loader.tier.name == "ram"
        assert repr(loader).endswith(f"samples in ram ({loader.tier.reason})")
    assert (rows.tier.rows, arrays.tier.rows, decoded.tier.rows) == (0, 0, 12)
    limit(monkeypatch, 0, 0)
    assert Loader(raw, 4).tier.name == "disk"
    assert Loader(encoded, 4, size=16).tier.name == "source"
    assert "samples in source" in repr(Loader([1, 2, 3, 4], 2, num_workers=0))


def test_all_fields_count_for_the_tier_and_only_decoded_images_for_a_cache(tmp_path, monkeypatch):
    kinds = {"X": "image", "mask": "array"}
    fields = {"X": {"train": np.zeros((50, 2, 2, 3), "|u1")}, "mask": {"train": np.zeros((50, 1000), "|u1")}}
    data = open_pack(seal_fields(tmp_path / "p.h5", fields, kinds, "none"))["train"]
    limit(monkeypatch, 50 * 1012, 0)
    assert Loader(data, 4).tier.name == "ram"
    limit(monkeypatch, 50 * 1012 - 1, 0)
    assert Loader(data, 4).tier.name == "disk"
    big = {"row_bytes": 30 * GIB // ROWS, "other_bytes": 20 * GIB // ROWS, "count": ROWS}
    assert choose_tier("", "auto", WITH_GPU, **big, **FILE).name == "ram"
    assert choose_tier("", "auto", WITH_GPU, **big, **DECODED).name == "ram"
    assert choose_tier("", "ram", Room(None, 43 * GIB, 0), **big, **DECODED).rows == ROWS


def test_fewer_batches_are_built_together_if_a_further_field_is_large():
    images, masks = torch.zeros(8, 4, dtype=torch.uint8), torch.zeros(8, 1 << 20, dtype=torch.uint8)
    assert Loader((images, torch.zeros(8)), 4)._pipeline.engine.depth.group_batches == 32
    assert Loader((images, masks), 4)._pipeline.engine.depth.group_batches == 1


@pytest.mark.parametrize("keep", ["gpu", "ram", "disk"])
def test_samples_loaded_one_by_one_cannot_be_cached(keep):
    with pytest.raises(InvalidOption, match=r"Cannot make a Loader: .*keep="):
        Loader([1, 2, 3, 4], 2, keep=keep)


@pytest.mark.parametrize("keep", ["RAM", None, "source", 3])
def test_unknown_tiers_raise_an_error(raw, keep):
    with pytest.raises(InvalidOption, match=r"keep=.*'auto', 'gpu', 'ram' or 'disk'"):
        Loader(raw, 2, keep=keep)


@pytest.mark.parametrize("keep", ["auto", "ram", "disk"])
def test_batches_are_the_same_in_every_tier(raw, encoded, keep, monkeypatch):
    for data, options in ((raw, {}), (encoded, {"size": 16})):
        expected = [(images.clone(), labels) for images, labels in Loader(data, 4, shuffle=True, **options)]
        for images, labels in Loader(data, 4, shuffle=True, keep=keep, **options):
            first = expected.pop(0)
            assert torch.equal(images, first[0])
            assert torch.equal(labels, first[1])
        assert expected == []


def resident_batches(data: Any, batch_size: int) -> list[list[Any]]:
    """Return the batches of an epoch, gathered by a `DeviceEngine`."""
    columns = columns_of("test", data, None, False)
    assert columns is not None
    engine = DeviceEngine(columns.by_name, torch.device("cuda", 0), 4, LoaderMeters(), is_contiguous=True)
    plan = OrderPlanner(ShuffledOrder(columns.count, 0), batch_size, False, Share())
    return [batch.values for some in plan.plans(0, 0, 4) for batch in engine._gather(some)]


def compressed(path: Path, images: torch.Tensor) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images.numpy(), compression="gzip")
    return path


@pytest.mark.parametrize("batch_size", sampled([1, 4, 22, 50], 2))
@pytest.mark.parametrize("step_bytes", sampled([1, 100, 64 << 20], 2))
@pytest.mark.parametrize("kind", ["whole", "view", "shards", "arrays", "channels last", "one", "read"])
def test_the_device_engine_gives_the_same_batches_as_the_threads(
    gpu, tmp_path, raw, kind, step_bytes, batch_size, monkeypatch
):
    monkeypatch.setattr("colabkit.loading.engine.device._STEP_BYTES", step_bytes)
    images = torch.arange(22 * 3 * 4 * 3).reshape(22, 3, 4, 3).to(torch.uint8)
    data = {
        "whole": lambda: raw,
        "view": lambda: raw.subset(np.random.default_rng(0).permutation(22)[:13]),
        "shards": lambda: open_pack(make_shards(tmp_path / "s.h5", {"train": 9}, {"train": 13}))["train"],
        "arrays": lambda: (images, torch.arange(22.0), np.arange(44, dtype=np.int16).reshape(22, 2)),
        "channels last": lambda: images.contiguous(memory_format=torch.channels_last),
        "one": lambda: images,
        "read": lambda: open_pack(compressed(tmp_path / "theirs.h5", images))["train"],
    }[kind]()
    expected = [
        [value.clone() for value in (batch if isinstance(batch, tuple) else (batch,))]
        for batch in Loader(data, batch_size, shuffle=True)
    ]
    found = resident_batches(data, batch_size)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()


def test_rows_on_a_device_have_their_own_memory(gpu, raw):
    columns = columns_of("test", raw.subset([3, 1]), None, False)
    assert columns is not None
    engine = DeviceEngine(columns.by_name, torch.device("cuda", 0), 4, LoaderMeters(), is_contiguous=True)
    assert engine._columns[0].maps[0].shape == (2, 4, 3, 3)
    (batch,) = engine._gather(next(OrderPlanner(ShuffledOrder(2, 0), 2, False, Share()).plans(0, 0, 1)))
    batch.values[0].zero_()
    assert raw.rows.any()


def test_ram_reserved_by_other_loaders_is_used_only_on_request_and_the_reason_names_it():
    room = Room(100 * GIB, 10 * GIB, 100 * GIB, promised_bytes=8 * GIB)
    without_gpu = replace(room, gpu_bytes=None)
    tier = chosen("auto", without_gpu, 5, DECODED)
    assert tier.name == "disk"
    assert tier.reason.endswith("; 8.0 GiB of RAM are reserved by other loaders")
    assert chosen("ram", without_gpu, 5, DECODED).name == "ram"
    assert chosen("gpu", room, 5, DECODED).name == "gpu"
    assert "reserved" not in chosen("auto", replace(without_gpu, promised_bytes=0), 50, DECODED).reason


SHAPE = (4, 5, 3)
COUNT = 12


class CountedSource(FolderSource):
    def __init__(self, path: Path, can_hang: bool = False) -> None:
        super().__init__(path)
        self.can_hang = can_hang
        self.reads: Counter[str] = Counter()

    def open(self, item: Item) -> BinaryIO:
        self.reads[item.path] += 1
        return super().open(item)

    def read_at_once(self, item: Item) -> bytes | None:
        self.reads[item.path] += 1
        return super().read_at_once(item)


@pytest.fixture(autouse=True)
def _nothing_is_left(near_storage: Path) -> Iterator[None]:
    yield
    if left := [path for path in near_storage.rglob("*") if path.is_file()]:
        gc.collect()
        left = [path for path in left if path.exists()]
    assert left == []


@pytest.fixture(params=[False, True], ids=["local", "remote"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> CountedSource:
    return CountedSource(photos(tmp_path / "tree"), request.param)


def new_cache(capacity: int, where: Any = "ram", folder: Path = Path("/nowhere"), count: int = COUNT) -> RowCache:
    return RowCache(count, SHAPE, capacity, where, folder)


def row_of(number: int) -> np.ndarray:
    return np.full(SHAPE, number % 251, np.uint8)


def cache_row(rows: RowCache, number: int) -> bool:
    place = rows.claim()
    if place is None:
        return False
    rows.at(place)[...] = row_of(number)
    rows.settle(place, number)
    return True


def limit(monkeypatch: pytest.MonkeyPatch, ram_bytes: int, disk_bytes: int) -> None:
    monkeypatch.setattr(tiers, "_RAM_SHARE", 1)
    monkeypatch.setattr(tiers, "_DISK_SHARE", 1)
    monkeypatch.setattr(tiers.Room, "measure", lambda *_: tiers.Room(None, ram_bytes, disk_bytes))


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_cached_rows_are_returned_unchanged(where, tmp_path):
    rows = new_cache(COUNT, where, tmp_path)
    for number in np.random.default_rng(0).permutation(COUNT).tolist():
        assert rows.row(number) is None
        assert not rows.is_full
        assert cache_row(rows, number)
        assert np.array_equal(rows.row(number), row_of(number))
    assert rows.is_full
    assert len(rows) == COUNT
    assert all(np.array_equal(rows.row(number), row_of(number)) for number in range(COUNT))


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_the_free_part_of_a_cache_is_reserved_until_it_is_used_or_deleted(where, tmp_path):
    gc.collect()
    before = promised_bytes()
    rows = new_cache(10, where, tmp_path)
    for number in range(4):
        cache_row(rows, number)
        assert promised_bytes() - before == (0 if where == "disk" else (9 - number) * 60)
    del rows
    gc.collect()
    assert promised_bytes() == before


def test_the_same_ram_is_not_reserved_for_two_loaders(source, monkeypatch):
    gc.collect()
    data, row_bytes = FileDataset(source), 16 * 16 * 3
    free = promised_bytes() + 30 * row_bytes
    monkeypatch.setattr(tiers, "_RAM_SHARE", 1)
    monkeypatch.setattr(tiers, "memory_limits", lambda _: SimpleNamespace(available_bytes=free))
    loaders = [Loader(data, 4, size=16) for _ in range(3)]
    assert [loader.tier.name for loader in loaders] == ["ram", "ram", "disk"]
    # keep="ram" ignores the RAM that other loaders have reserved.
    assert Loader(data, 4, size=16, keep="ram").tier.name == "ram"
    del loaders
    gc.collect()
    assert Loader(data, 4, size=16).tier.name == "ram"


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_cached_rows_are_gathered_as_images(where, tmp_path):
    rows = new_cache(COUNT, where, tmp_path)
    for number in (5, 3, 8):
        cache_row(rows, number)
    gather = rows.gather()
    images = gather.gather(torch.tensor([8, 5, 8]), torch.empty(3 * 60, dtype=torch.uint8))
    assert images.shape == (3, 3, 4, 5)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert [image.unique().tolist() for image in images] == [[8], [5], [8]]


def test_a_cache_holds_no_more_rows_than_its_capacity():
    rows = new_cache(5)
    assert [cache_row(rows, number) for number in range(7)] == [True] * 5 + [False] * 2
    assert len(rows) == 5
    assert not rows.is_full
    assert rows.row(5) is None


def test_a_released_slot_is_claimed_again():
    rows = new_cache(2)
    first, second = rows.claim(), rows.claim()
    assert rows.claim() is None
    rows.release(first)
    assert rows.claim() == first
    rows.settle(second, 7)
    # Another thread has decoded the same sample.
    rows.settle(first, 7)
    assert len(rows) == 1
    assert rows.claim() == first


def test_rows_that_many_threads_cache_at_once_are_stored_once_and_complete():
    count, capacity = 400, 300
    rows = new_cache(capacity, count=count)
    start, wrong = threading.Barrier(8), []

    def work(seed: int) -> None:
        start.wait()
        for number in np.random.default_rng(seed % 4).permutation(count).tolist():
            if rows.row(number) is None:
                cache_row(rows, number)
            row = rows.row(number)
            if row is not None and not np.array_equal(row, row_of(number)):
                wrong.append(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    found = [number for number in range(count) if rows.row(number) is not None]
    assert len(found) == len(rows) == capacity
    assert all(np.array_equal(rows.row(number), row_of(number)) for number in found)


def test_a_cache_file_has_no_name_and_reserves_its_space_at_once(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    free = os.statvfs(tmp_path)
    rows = RowCache(1000, (64, 64, 3), 1000, "disk", tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    taken = (free.f_bfree - os.statvfs(tmp_path).f_bfree) * free.f_frsize
    assert taken > 6_000_000
    del rows
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk_raises_one_error_and_leaves_no_file(number, tmp_path, file_hook):
    before = len(os.listdir("/proc/self/fd"))
    file_hook(ChangeHook(number, fill_disk))
    with pytest.raises(NotEnoughSpace, match=r"Cannot cache decoded images in .*Free some space"):
        new_cache(COUNT, "disk", tmp_path / "new")
    file_hook(None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_with_less_space_than_reported_raises_an_error_of_the_loader(source, monkeypatch, file_hook):
    limit(monkeypatch, 0, 1 << 30)
    file_hook(ChangeHook(2, fill_disk))
    with pytest.raises(NotEnoughSpace, match="Cannot cache decoded images"):
        Loader(FileDataset(source), 4, size=16)


def test_a_folder_that_cannot_be_created_raises_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileFailed, match="Cannot cache decoded images"):
        new_cache(COUNT, "disk", tmp_path / "file" / "folder")


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_later_epochs_read_no_files_and_give_the_same_images(source, where):
    loader = Loader(FileDataset(source), 5, size=16, keep=where, num_workers=2)
    assert loader.tier.name == where
    first = epoch(loader)
    assert set(source.reads.values()) == {1}
    assert len(source.reads) == COUNT
    for _ in range(2):
        again = epoch(loader)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])
    assert sum(source.reads.values()) == COUNT


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_shuffled_second_epoch_has_the_same_pixels(source, where):
    data = FileDataset(source)
    plain = epoch(Loader(data, 5, size=16))[0]
    source.reads.clear()
    loader = Loader(data, 5, size=16, keep=where, shuffle=True, num_workers=3)
    orders = []
    for number in range(3):
        orders.append(epoch_order(COUNT, 0, number, 0, COUNT).tolist())
        assert torch.equal(epoch(loader)[0], plain[orders[-1]])
    assert orders[0] != orders[1]
    assert set(source.reads.values()) == {1}


def test_random_crops_of_cached_images_equal_those_of_images_decoded_again(source, monkeypatch):
    options: dict[str, Any] = {"size": 20, "transform": Compose([RandomResizedCrop(12), RandomHorizontalFlip()])}
    loader = Loader(FileDataset(source), 5, shuffle=True, seed=3, **options)
    found = [epoch(loader)[0] for _ in range(3)]
    assert loader.tier.rows == COUNT
    limit(monkeypatch, 0, 0)
    uncached = Loader(FileDataset(source), 5, shuffle=True, seed=3, **options)
    assert uncached.tier.name == "source"
    assert all(torch.equal(epoch(uncached)[0], images) for images in found)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("capacity", sampled([1, 7, 11], 2))
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_images_that_do_not_fit_in_the_cache_are_read_in_each_epoch(source, where, capacity, monkeypatch):
    plain = epoch(Loader(FileDataset(source), 5, size=16))[0]
    source.reads.clear()
    row_bytes = 16 * 16 * 3
    limit(monkeypatch, *((capacity * row_bytes + 9, 0) if where == "ram" else (0, capacity * row_bytes + 9)))
    loader = Loader(FileDataset(source), 5, size=16, shuffle=True, num_workers=3)
    assert (loader.tier.name, loader.tier.rows) == (where, capacity)
    for number in range(3):
        order = epoch_order(COUNT, 0, number, 0, COUNT)
        assert torch.equal(epoch(loader)[0], plain[order])
        assert sum(source.reads.values()) == COUNT + number * (COUNT - capacity)


@pytest.mark.parametrize("capacity", [3, COUNT])
def test_a_sampler_with_replacement_gets_the_right_pixels(source, capacity, monkeypatch):
    plain = epoch(Loader(FileDataset(source), 5, size=16))[0]
    limit(monkeypatch, capacity * 16 * 16 * 3, 0)
    numbers = np.random.default_rng(4).integers(0, 5, 200).tolist()
    loader = Loader(FileDataset(source), 8, size=16, sampler=numbers, num_workers=4)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            images, labels = epoch(loader)
            assert torch.equal(images, plain[numbers])
            assert labels.tolist() == [number // 4 for number in numbers]
    finally:
        sys.setswitchinterval(before)


def test_a_row_that_another_thread_cached_first_is_used(source, monkeypatch):
    plain = epoch(Loader(FileDataset(source), 5, size=16))[0]
    settle = RowCache.settle

    def settle_second(rows: RowCache, place: int, number: int) -> None:
        if (other := rows.claim()) is not None:
            rows.at(other)[...] = rows.at(place)
            settle(rows, other, number)
        settle(rows, place, number)
        if other is not None:
            taken = rows.claim()
            assert taken == place
            rows.at(taken)[...] = 255
            rows.release(taken)

    monkeypatch.setattr(RowCache, "settle", settle_second)
    loader = Loader(FileDataset(source), 5, size=16, keep="ram", num_workers=1)
    for _ in range(2):
        assert torch.equal(epoch(loader)[0], plain)


def test_an_abandoned_epoch_caches_the_decoded_images(source):
    loader = Loader(FileDataset(source), 2, size=16, prefetch_batches=1)
    for _ in loader:
        break
    plain = epoch(loader)[0]
    assert torch.equal(plain, epoch(loader)[0])
    assert sum(source.reads.values()) < 2 * COUNT


def test_images_of_one_size_are_cached_without_size(source):
    loader = Loader(FileDataset(source), 5)
    first = epoch(loader)[0]
    reads = sum(source.reads.values())
    assert torch.equal(epoch(loader)[0], first)
    assert sum(source.reads.values()) == reads


def test_encoded_packs_are_decoded_once(tmp_path, monkeypatch):
    tree = photos(tmp_path / "tree")
    (tree / "ants" / "000.jpg").write_bytes(saved(photo(33, 21), "PNG"))
    data = open_pack(packed(tree, tmp_path / "p.h5", encoding="source"))["train"]
    loader = Loader(data, 5, size=16)
    first = epoch(loader)[0]
    monkeypatch.setattr(type(data), "encoded", lambda *_: pytest.fail("a file is decoded again"))
    assert torch.equal(epoch(loader)[0], first)


def bytes_on_gpu(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(("processes", "local", "gpus", "share"), [(1, None, 1, 1), (4, None, 2, 2), (16, "8", 2, 4)])
def test_free_gpu_memory_includes_the_cache_of_torch_and_is_divided_among_processes(
    gpu, monkeypatch, tmp_path, processes, local, gpus, share
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    held, cached = bytes_on_gpu(1 << 20), bytes_on_gpu(3 << 20)
    del cached
    room = Room.measure(torch.device("cuda", 0), tmp_path, processes)
    assert room.gpu_bytes == (4 << 20) // share + (3 << 20)
    del held


def test_samples_that_do_not_fit_in_gpu_memory_stay_in_ram(gpu, monkeypatch):
    # Another process may use the memory between the measurement and the copy.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 << 30, 80 << 30))
    rows = np.arange(9 << 20, dtype=np.uint8).reshape(9, 1 << 20)
    loader = Loader(rows, 1, device="cuda", prefetch_batches=1)
    assert (loader.tier.name, loader.tier.reason) == ("ram", "9.0 MiB, already in memory; the GPU ran out of memory")
    assert np.array_equal(torch.cat([batch.cpu() for batch in loader]).numpy(), rows)
    with pytest.raises(InvalidOption, match=r"keep='gpu', but the GPU ran out of memory; expected room for 9.0 MiB of"):
        Loader(rows, 1, device="cuda", keep="gpu")


@pytest.mark.parametrize("keep", ["auto", "gpu"])
def test_samples_leave_gpu_memory_after_training_ran_out_of_it(gpu, keep):
    rows = np.arange(2 << 20, dtype=np.uint8).reshape(64, 1 << 15)
    loader = Loader(rows, 16, device="cuda", keep=keep)
    for _ in range(2):
        assert np.array_equal(torch.cat([batch.cpu() for batch in loader]).numpy(), rows)
        assert (loader.tier.name, loader.meters.facts.kind) == ("gpu", "device")
    with pytest.raises(torch.OutOfMemoryError):
        bytes_on_gpu(8 << 20)
    assert np.array_equal(torch.cat([batch.cpu() for batch in loader]).numpy(), rows)
    if keep == "gpu":
        assert loader.tier.name == "gpu"
        return
    assert (loader.tier.name, loader.meters.facts.kind, loader.meters.facts.tier) == ("ram", "gathered", "ram")
    assert gpu.allocated < 1 << 20


@pytest.mark.parametrize("fits", [True, False])
def test_facts_name_the_tier_of_decoded_samples_after_their_move_to_the_gpu(gpu, encoded, monkeypatch, fits):
    loader = Loader(encoded, 4, size=16, device="cuda", num_workers=2)
    assert (loader.tier.name, loader.meters.facts.kind, loader.meters.facts.workers) == ("gpu", "decoded", 2)
    list(loader)
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 8 << 20))
    list(loader)
    facts, expected = loader.meters.facts, ("gpu", "device", 1) if fits else ("ram", "decoded", 2)
    assert loader.tier.name == facts.tier
    assert (facts.tier, facts.kind, facts.workers) == expected


def test_a_loader_that_runs_out_of_gpu_memory_raises_the_error_of_torch(gpu):
    held = bytes_on_gpu(7 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        list(Loader(np.zeros((4, 1 << 20), np.uint8), 2, device="cuda", keep="ram"))
    del held


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_forked_process_does_not_fill_slots_that_it_shares(tmp_path: Path, where: Any) -> None:
    rows = RowCache(2, (4, 4, 3), 2, where, tmp_path)
    if (child := os.fork()) == 0:
        os._exit(rows.claim() is None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (where == "disk")
    assert rows.claim() == 0

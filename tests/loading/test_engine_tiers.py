"""Where samples live: a pure function of what is free and what is asked for, and what the loader tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards
from packed_files import packed, photos
from sampling import sampled

from colabkit.errors import InvalidOption
from colabkit.foundation import LoaderMeters
from colabkit.loading import Loader
from colabkit.loading.engine import tiers
from colabkit.loading.engine.batches import OrderPlanner, Share
from colabkit.loading.engine.columns import columns_of
from colabkit.loading.engine.device import DeviceEngine
from colabkit.loading.engine.tiers import Room, Tier, choose_tier
from colabkit.packs import open_pack
from colabkit.sampler import Shuffled

GIB = 1 << 30
ROOMY = Room(None, 100 * GIB, 100 * GIB)
WITH_GPU = Room(100 * GIB, 100 * GIB, 100 * GIB)
FILE: dict[str, Any] = {"is_decoded": False, "is_on_disk": True}
ARRAY: dict[str, Any] = {"is_decoded": False, "is_on_disk": False}
DECODED: dict[str, Any] = {"is_decoded": True, "is_on_disk": False}
ROWS = 1000


def chosen(keep: Any, room: Room, gigabytes: float | None, kind: dict[str, Any]) -> Tier:
    """Return the tier of a thousand rows that take so many gigabytes together."""
    row_bytes = None if gigabytes is None else int(gigabytes * GIB) // ROWS
    return choose_tier("make a Loader", keep, room, row_bytes=row_bytes, count=ROWS, **kind)


@pytest.mark.parametrize(
    ("keep", "room", "gigabytes", "kind", "name", "rows"),
    [
        # The GPU takes what leaves room for a model, whatever else there is.
        ("auto", WITH_GPU, 40, FILE, "gpu", 0),
        ("auto", WITH_GPU, 41, FILE, "ram", 0),
        ("auto", Room(100 * GIB, GIB, GIB), 40, FILE, "gpu", 0),
        ("gpu", WITH_GPU, 40, ARRAY, "gpu", 0),
        ("auto", WITH_GPU, 40, DECODED, "gpu", ROWS),
        ("gpu", WITH_GPU, 40, DECODED, "gpu", ROWS),
        ("auto", Room(0, 100 * GIB, 0), 1, FILE, "ram", 0),
        # Decoded samples are collected in RAM before they go to the GPU.
        ("auto", Room(100 * GIB, 10 * GIB, 100 * GIB), 40, DECODED, "disk", ROWS),
        ("auto", Room(100 * GIB, 10 * GIB, 0), 35, DECODED, "ram", 200),
        # A pack's rows are the kernel's to keep, as long as RAM has room for all.
        ("auto", ROOMY, 70, FILE, "ram", 0),
        ("auto", ROOMY, 71, FILE, "disk", 0),
        ("ram", ROOMY, 70, FILE, "ram", 0),
        ("disk", ROOMY, 1, FILE, "disk", 0),
        ("auto", Room(None, 0, 0), 1, FILE, "disk", 0),
        # Arrays are in memory already.
        ("auto", Room(None, GIB, GIB), 50, ARRAY, "ram", 0),
        ("ram", Room(None, GIB, GIB), 50, ARRAY, "ram", 0),
        # Decoded samples go where all of them fit, else where most of them do.
        ("auto", ROOMY, 70, DECODED, "ram", ROWS),
        ("ram", ROOMY, 70, DECODED, "ram", ROWS),
        ("auto", ROOMY, 71, DECODED, "disk", ROWS),
        ("auto", Room(None, 10 * GIB, 100 * GIB), 70, DECODED, "disk", ROWS),
        ("auto", Room(None, 10 * GIB, 100 * GIB), 160, DECODED, "disk", 500),
        ("auto", Room(None, 100 * GIB, 10 * GIB), 140, DECODED, "ram", 500),
        ("disk", ROOMY, 40, DECODED, "disk", ROWS),
        ("auto", Room(None, 0, 0), 1, DECODED, "source", 0),
        # What has no size of its own cannot be kept.
        ("auto", ROOMY, None, DECODED, "source", 0),
        ("auto", WITH_GPU, None, DECODED, "source", 0),
        ("auto", ROOMY, None, ARRAY, "source", 0),
    ],
)
def test_samples_live_where_there_is_room(keep, room, gigabytes, kind, name, rows):
    found = chosen(keep, room, gigabytes, kind)
    assert (found.name, found.rows) == (name, rows)
    assert found.reason
    assert str(found) == f"{name} ({found.reason})"


@pytest.mark.parametrize(
    ("keep", "room", "gigabytes", "kind", "message"),
    [
        ("gpu", WITH_GPU, 41, FILE, "no more than 40.0 GiB for them on the GPU"),
        ("gpu", WITH_GPU, 41, DECODED, "no more than 40.0 GiB for them on the GPU"),
        ("gpu", Room(100 * GIB, 10 * GIB, 0), 35, DECODED, "no more than 7.0 GiB for them in RAM"),
        ("ram", ROOMY, 71, FILE, "71.0 GiB of samples, no more than 70.0 GiB for them in RAM. Use keep='auto'"),
        ("ram", ROOMY, 71, DECODED, "71.0 GiB of samples, no more than 70.0 GiB for them in RAM. Use keep='auto'"),
        ("ram", ROOMY, None, DECODED, "cannot be kept .*differ in size.*rows of one size.*give size="),
        ("disk", ROOMY, None, ARRAY, "cannot be kept .*made one by one.*Leave keep out"),
        ("disk", ROOMY, 1, ARRAY, r"keep='disk' for arrays, which are in memory already.*pack\(\) them first"),
        ("gpu", WITH_GPU, None, DECODED, "cannot be kept"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(keep, room, gigabytes, kind, message):
    with pytest.raises(InvalidOption, match=f"Cannot make a Loader: .*{message}"):
        chosen(keep, room, gigabytes, kind)


def test_reasons_name_the_bytes_that_decided():
    assert "70.0 GiB" in chosen("auto", ROOMY, 71, FILE).reason
    assert "71.0 GiB" in chosen("auto", ROOMY, 71, FILE).reason
    assert "500 of 1,000" in chosen("auto", Room(None, 10 * GIB, 100 * GIB), 160, DECODED).reason
    assert "size=" in chosen("auto", ROOMY, None, DECODED).reason
    assert chosen("disk", ROOMY, 1, FILE).reason == "as asked for"


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_processes_share_what_is_free(tmp_path, processes):
    room = Room.measure(torch.device("cpu"), tmp_path, processes)
    alone = Room.measure(torch.device("cpu"), tmp_path, 1)
    assert room.gpu_bytes is None
    assert room.ram_bytes == pytest.approx(alone.ram_bytes / processes, rel=0.2)
    assert room.disk_bytes == pytest.approx(alone.disk_bytes / processes, rel=0.2)


@pytest.fixture
def raw(tmp_path: Path) -> Any:
    return open_pack(make_pack(tmp_path / "raw.h5", train=22))["train"]


@pytest.fixture
def encoded(tmp_path: Path) -> Any:
    return open_pack(packed(photos(tmp_path / "tree"), tmp_path / "encoded.h5", encoding="source"))["train"]


def limit(monkeypatch: pytest.MonkeyPatch, ram_bytes: int, disk_bytes: int) -> None:
    monkeypatch.setattr(tiers.Room, "measure", lambda *_: Room(None, ram_bytes, disk_bytes))


def test_the_loader_tells_its_tier(raw, encoded, monkeypatch):
    rows, arrays, decoded = Loader(raw, 4), Loader(torch.zeros(9, 2), 4), Loader(encoded, 4, size=16)
    for loader in (rows, arrays, decoded):
        assert loader.tier.name == "ram"
        assert repr(loader).endswith(f"samples in ram ({loader.tier.reason})")
    assert (rows.tier.rows, arrays.tier.rows, decoded.tier.rows) == (0, 0, 12)
    limit(monkeypatch, 0, 0)
    assert Loader(raw, 4).tier.name == "disk"
    assert Loader(encoded, 4, size=16).tier.name == "source"
    assert "samples in source" in repr(Loader([1, 2, 3, 4], 2, num_workers=0))


@pytest.mark.parametrize("keep", ["gpu", "ram", "disk"])
def test_samples_made_one_by_one_are_not_kept(keep):
    with pytest.raises(InvalidOption, match=r"Cannot make a Loader: .*keep="):
        Loader([1, 2, 3, 4], 2, keep=keep)


@pytest.mark.parametrize("keep", ["RAM", None, "source", 3])
def test_other_places_are_refused(raw, keep):
    with pytest.raises(InvalidOption, match=r"keep=.*'auto', 'gpu', 'ram' or 'disk'"):
        Loader(raw, 2, keep=keep)


@pytest.mark.parametrize("keep", ["auto", "ram", "disk"])
def test_batches_are_the_same_wherever_samples_live(raw, encoded, keep, monkeypatch):
    for data, options in ((raw, {}), (encoded, {"size": 16})):
        expected = [(images.clone(), labels) for images, labels in Loader(data, 4, shuffle=True, **options)]
        for images, labels in Loader(data, 4, shuffle=True, keep=keep, **options):
            first = expected.pop(0)
            assert torch.equal(images, first[0])
            assert torch.equal(labels, first[1])
        assert expected == []


def resident_batches(data: Any, batch_size: int) -> list[list[Any]]:
    """Return the batches of an epoch, gathered in the memory of a device."""
    columns = columns_of("test", data, None, False)
    assert columns is not None
    engine = DeviceEngine(columns.by_name, torch.device("cpu"), 4, LoaderMeters())
    plan = OrderPlanner(Shuffled(columns.count, 0), batch_size, False, Share())
    return [batch.values for some in plan.plans(0, 0, 4) for batch in engine._gather(some)]


@pytest.mark.parametrize("batch_size", sampled([1, 4, 22, 50], 2))
@pytest.mark.parametrize("step_bytes", sampled([1, 100, 64 << 20], 2))
@pytest.mark.parametrize("kind", ["whole", "view", "shards", "arrays", "channels last", "one"])
def test_batches_from_a_device_are_those_of_the_threads(tmp_path, raw, kind, step_bytes, batch_size, monkeypatch):
    monkeypatch.setattr("colabkit.loading.engine.device._STEP_BYTES", step_bytes)
    images = torch.arange(22 * 3 * 4 * 3).reshape(22, 3, 4, 3).to(torch.uint8)
    data = {
        "whole": lambda: raw,
        "view": lambda: raw.subset(np.random.default_rng(0).permutation(22)[:13]),
        "shards": lambda: open_pack(make_shards(tmp_path / "s.h5", {"train": 9}, {"train": 13}))["train"],
        "arrays": lambda: (images, torch.arange(22.0), np.arange(44, dtype=np.int16).reshape(22, 2)),
        "channels last": lambda: images.contiguous(memory_format=torch.channels_last),
        "one": lambda: images,
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


def test_rows_on_a_device_have_a_memory_of_their_own(raw):
    columns = columns_of("test", raw.subset([3, 1]), None, False)
    assert columns is not None
    engine = DeviceEngine(columns.by_name, torch.device("cpu"), 4, LoaderMeters())
    assert engine._columns[0].maps[0].shape == (2, 4, 3, 3)
    (batch,) = engine._gather(next(OrderPlanner(Shuffled(2, 0), 2, False, Share()).plans(0, 0, 1)))
    batch.values[0].zero_()
    assert raw.rows.any()


def test_ram_that_others_were_promised_is_left_to_them_unless_it_is_asked_for_and_the_reason_says_so():
    room = Room(100 * GIB, 10 * GIB, 100 * GIB, promised_bytes=8 * GIB)
    near = replace(room, gpu_bytes=None)
    tier = chosen("auto", near, 5, DECODED)
    assert tier.name == "disk"
    assert tier.reason.endswith("; 8.0 GiB of RAM are promised to other loaders")
    assert chosen("ram", near, 5, DECODED).name == "ram"
    assert chosen("gpu", room, 5, DECODED).name == "gpu"
    assert "promised" not in chosen("auto", replace(near, promised_bytes=0), 50, DECODED).reason

"""Packing to a bucket gives the pack that a local call writes, and leaves no file that the index does not list."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from packed_files import ROW, assert_same
from packing_tasks import die_once
from repeating import RepeatingExecutor
from s3_server import s3_server
from torch.utils.data import Dataset

from colabkit.errors import BadSource, FetchFailed, InvalidOption, PackingFailed, TargetExists
from colabkit.packs import PackReport, open_pack, pack
from colabkit.packs.packing.targets import BucketTarget
from colabkit.storage import BucketFolder, file_address

COUNT = 40
SOURCE = {"X": np.arange(COUNT * 10).reshape(COUNT, 10), "Y": np.arange(COUNT) % 3}
SHARDS = 5


@pytest.fixture(autouse=True)
def local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Check that no call leaves files in its work folder."""
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    yield tmp_path / "local"
    assert [*(tmp_path / "local" / "packing").glob("*")] == []


@pytest.fixture
def bucket() -> Iterator[str]:
    """Return the address of a new folder in memory."""
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def packed(source: Any, to: str, executor: Executor | None = None, **options: Any) -> PackReport:
    return pack(source, to, **{"shard_bytes": COUNT // SHARDS * 80, "executor": executor, "progress": False, **options})


def names_in(bucket: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").find(bucket))


def listed_in(address: str) -> list[str]:
    return sorted(shard.name for shard in open_pack(address, cache="1GB").info.shards)


def rows_of(address: str) -> list[list[int]]:
    return [sample.tolist() for sample, _ in open_pack(address, cache="1GB")["train"]]


class Noise(Dataset[torch.Tensor]):
    """Samples that differ at each attempt."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(20)


@pytest.mark.parametrize("make", [lambda: None, partial(ThreadPoolExecutor, 3)], ids=["no executor", "threads"])
def test_a_pack_in_a_bucket_holds_the_samples_and_shards_that_its_report_names(bucket, make):
    report = packed(SOURCE, f"{bucket}/p.h5", make())
    assert (str(report.path), report.shards, report.splits) == (f"{bucket}/p.h5", SHARDS, {"train": COUNT})
    assert names_in(bucket) == [*listed_in(f"{bucket}/p.h5"), "p.h5"]
    assert report.pack_bytes == sum(fsspec.filesystem("memory").du(bucket, total=False).values())
    assert rows_of(f"{bucket}/p.h5") == SOURCE["X"].tolist()
    assert open_pack(report, cache="1GB")["train"].labels.tolist() == SOURCE["Y"].tolist()


def test_a_file_address_gets_the_pack_that_a_local_path_gets(tmp_path, image_tree):
    options = {"shard_bytes": 4 * ROW, "splits": "train=0.5,val=0.5", "encoding": "raw"}
    report = packed(image_tree, f"file://{tmp_path}/far/p.h5", ThreadPoolExecutor(2), **options)
    assert report.path == str(tmp_path / "far" / "p.h5")
    assert report.shards > 3
    assert_same(tmp_path / "far" / "p.h5", packed(image_tree, str(tmp_path / "p.h5"), **options).path)
    assert len([*(tmp_path / "far").iterdir()]) == report.shards + 1


@pytest.mark.parametrize("source", [SOURCE, Noise()], ids=["equal attempts", "different attempts"])
def test_every_shard_attempted_twice_at_once_is_listed_once_and_leaves_no_other_file(bucket, source):
    with RepeatingExecutor(4, "last") as executor:
        report = packed(source, f"{bucket}/p.h5", executor)
    assert (report.attempts, report.duplicates, report.lost) == (2 * report.shards, report.shards, 0)
    assert names_in(bucket) == [*listed_in(f"{bucket}/p.h5"), "p.h5"]
    assert len(rows_of(f"{bucket}/p.h5") if source is SOURCE else open_pack(report, cache="1GB")["train"][:]) == COUNT


def test_workers_of_other_machines_write_and_upload_without_the_folders_of_the_caller(bucket, tmp_path):
    class OtherMachineExecutor(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            other = replace(fn.__self__, attempts=tmp_path / "no" / "attempts", sign=tmp_path / "no" / "sign")
            return super().submit(other.run)

    with OtherMachineExecutor(2) as executor:
        report = packed(SOURCE, f"{bucket}/p.h5", executor)
    assert (report.attempts, report.lost) == (SHARDS, 0)
    assert rows_of(f"{bucket}/p.h5") == SOURCE["X"].tolist()


def test_the_same_pack_is_reused_and_another_one_is_replaced_only_on_request(bucket):
    address = f"{bucket}/p.h5"
    packed(SOURCE, address)
    before = listed_in(address)
    assert packed(SOURCE, address).reused
    other = {**SOURCE, "X": SOURCE["X"] + 1}
    with pytest.raises(TargetExists, match=r"already contains a pack of .*Use overwrite=True"):
        packed(other, address)
    assert names_in(bucket) == [*before, "p.h5"]
    assert not packed(other, address, overwrite=True).reused
    assert names_in(bucket) == [*listed_in(address), "p.h5"]
    assert not set(before) & set(names_in(bucket))
    fsspec.filesystem("memory").rm(f"{bucket}/{listed_in(address)[1]}")
    with pytest.raises(TargetExists, match="is a damaged pack"):
        packed(other, address)
    packed(other, address, overwrite=True)
    assert rows_of(address) == other["X"].tolist()


def test_a_file_that_is_not_a_pack_is_never_replaced(bucket):
    fsspec.filesystem("memory").pipe_file(f"{bucket}/p.h5", b"mine")
    for overwrite, match in ((False, "is not a pack. Choose another path"), (True, "replaces only packs")):
        with pytest.raises(TargetExists, match=match):
            packed(SOURCE, f"{bucket}/p.h5", overwrite=overwrite)
    assert fsspec.filesystem("memory").cat_file(f"{bucket}/p.h5") == b"mine"


def test_a_failed_call_removes_its_shards_and_keeps_the_existing_pack(bucket, monkeypatch):
    put, left = BucketFolder.put, [SHARDS - 1]

    def fail_at_last(self: BucketFolder, path: Path, name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise FetchFailed("no answer")
        put(self, path, name)

    fsspec.filesystem("memory").pipe_file(f"{bucket}/p-00000.0123abcd.h5.txt", b"mine")
    for with_pack in (False, True):
        if with_pack:
            packed(SOURCE, f"{bucket}/p.h5")
        before = names_in(bucket)
        with monkeypatch.context() as patched, ThreadPoolExecutor(2) as executor:
            left[0] = SHARDS - 1
            patched.setattr(BucketFolder, "put", fail_at_last)
            with pytest.raises(FetchFailed, match="no answer"):
                packed(Noise(), f"{bucket}/p.h5", executor, overwrite=True, retries=1)
        assert names_in(bucket) == before
    assert rows_of(f"{bucket}/p.h5") == SOURCE["X"].tolist()


def test_of_two_calls_at_once_the_first_index_counts_and_its_shards_remain(bucket):
    class RivalExecutor(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            future.result()
            if not fsspec.filesystem("memory").exists(f"{bucket}/p.h5"):
                packed(SOURCE, f"{bucket}/p.h5")
            return future

    with RivalExecutor(1) as executor, pytest.raises((TargetExists, PackingFailed), match="another"):
        packed(Noise(), f"{bucket}/p.h5", executor)
    assert names_in(bucket) == [*listed_in(f"{bucket}/p.h5"), "p.h5"]
    assert rows_of(f"{bucket}/p.h5") == SOURCE["X"].tolist()


def test_targets_that_cannot_be_written_are_refused(bucket, image_tree, monkeypatch):
    for address in ("https://example.org/p.h5", "memory://", f"{bucket}/"):
        with pytest.raises(InvalidOption, match="expected a local path, or the URL of a file that fsspec can write"):
            packed(SOURCE, address)
    with pytest.raises(InvalidOption, match="fsspec rejects the address"):
        packed(SOURCE, "nosuch://a/p.h5")
    fsspec.filesystem("memory").pipe_file(f"{bucket}/birds/a/1.png", b"")
    with pytest.raises(BadSource, match="is inside the source"):
        packed(f"{bucket}/birds", f"{bucket}/birds/p.h5")
    monkeypatch.chdir(image_tree.parent)
    with pytest.raises(BadSource, match="is inside the source"):
        packed(image_tree.name, f"file://{image_tree}/p.h5")


def test_a_bucket_without_permission_to_write_is_refused_in_one_line_that_names_the_login(bucket, monkeypatch):
    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError("403 for token=secret-value")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    with pytest.raises(FetchFailed, match=r"it needs a login \(PermissionError.*Provide credentials") as caught:
        packed(SOURCE, f"{bucket}/p.h5")
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_a_killed_worker_costs_one_attempt_and_leaves_no_file(tmp_path, image_tree):
    fields = {"Z": partial(die_once, tmp_path / "died")}
    options = {"shard_bytes": 4 * ROW, "fields": fields}
    with ProcessPoolExecutor(1, get_context("fork")) as executor:
        report = packed(image_tree, f"file://{tmp_path}/far/p.h5", executor, **options)
    assert (report.attempts, report.lost, report.duplicates) == (report.shards + 1, 1, 0)
    assert len([*(tmp_path / "far").iterdir()]) == report.shards + 1
    assert_same(Path(report), packed(image_tree, str(tmp_path / "whole.h5"), shard_bytes=None, fields=fields).path)


@pytest.mark.full
def test_on_s3_every_shard_attempted_twice_at_once_is_listed_once_and_the_index_is_created_once(monkeypatch):
    with s3_server(monkeypatch) as client:
        for source in (SOURCE, Noise()):
            address = f"s3://birds/{type(source).__name__}/p.h5"
            with RepeatingExecutor(4, "last") as executor:
                report = packed(source, address, executor)
            objects = client.list_objects_v2(Bucket="birds", Prefix=f"{type(source).__name__}/")["Contents"]
            names = sorted(one["Key"].rpartition("/")[2] for one in objects)
            assert names == [*listed_in(address), "p.h5"]
            assert report.duplicates == report.shards
        assert rows_of("s3://birds/dict/p.h5") == SOURCE["X"].tolist()
        folder, index = BucketTarget("pack", file_address("s3://birds/dict/p.h5")).folder, Path(__file__)
        assert [folder.create(index, name) for name in ("p.h5", "q.h5", "q.h5")] == [False, True, False]

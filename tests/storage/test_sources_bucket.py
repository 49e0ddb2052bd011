"""Buckets as sources, through fsspec: one listing, few requests, no secrets in messages."""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
import threading
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from trees import files_of

from colabkit.errors import (
    BadSource,
    FetchFailed,
    FileFailed,
    InvalidOption,
    MissingPackage,
    SourceChanged,
    SourceMissing,
    TimedOut,
)
from colabkit.storage.sources import bucket, reads
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.folder import FileSource
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_source
from colabkit.storage.staging.api import stage


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def birds():
    fs = fsspec.filesystem("memory")
    for path, data in {"owls/1.jpg": b"hoot", "owls/2.jpg": b"", "tits.txt": b"tweet" * 9}.items():
        fs.pipe_file(f"/data/birds/{path}", data)
    fs.pipe_file("/data/birds2/other", b"not of it")
    return fs


class ScriptedBucket:
    """A fake object store whose listing is set by the test."""

    def __init__(self, found: Any, cat: Any = None) -> None:
        self.found = found
        self.cat = cat or (lambda *_, **__: b"")
        self.finds = 0

    def invalidate_cache(self) -> None:
        pass

    def find(self, root: str, detail: bool) -> Any:
        self.finds += 1
        return self.found(root) if callable(self.found) else self.found

    def isfile(self, path: str) -> bool:
        return False

    def info(self, path: str) -> Any:
        if not isinstance(self.found, dict) or path not in self.found:
            raise FileNotFoundError(path)
        return self.found[path]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.cat(path, start, end)


@pytest.fixture
def scripted(monkeypatch):
    def make(found: Any, cat: Any = None, address: str = "gs://b/birds") -> tuple[BucketSource, ScriptedBucket]:
        fs = ScriptedBucket(found, cat)
        root = address.partition("://")[2].partition("?")[0].rpartition("@")[2]
        monkeypatch.setattr(bucket, "_file_system_of", lambda address, act: (fs, root, ""))
        return BucketSource(address), fs

    return make


def info(size: int | None = 1, **more: Any) -> dict[str, Any]:
    return {"size": size, "type": "file", **more}


def test_a_folder_of_a_bucket_is_listed_with_one_request_without_its_neighbors(birds, monkeypatch):
    finds = []
    find = MemoryFileSystem.find
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *a, **k: finds.append(1) or find(*a, **k))
    for address in ("memory://data/birds", "memory://data/birds/"):
        listing = BucketSource(address).list()
        assert [(item.path, item.size) for item in listing.items] == [
            ("owls/1.jpg", 4),
            ("owls/2.jpg", 0),
            ("tits.txt", 45),
        ]
    assert len(finds) == 2
    assert all(item.mtime_ns > 0 for item in listing.items)


def test_one_object_is_a_source_of_one_item(birds):
    source = BucketSource("memory://data/birds/tits.txt")
    (item,) = source.list().items
    assert (item.path, item.size) == ("tits.txt", 45)
    assert read_item(source, item, Retries()) == b"tweet" * 9
    assert read_item(BucketSource("memory://data/birds/tits.txt"), item, Retries()) == b"tweet" * 9, "without listing"


def test_an_item_named_like_the_folder_is_not_the_object_at_the_address(birds):
    birds.pipe_file("/data/birds/birds", b"inner")
    source = BucketSource("memory://data/birds")
    items = {item.path: item for item in source.list().items}
    assert read_item(source, items["birds"], Retries()) == b"inner"


@pytest.mark.parametrize("error", [PermissionError("403"), TimeoutError("late"), FileNotFoundError("gone")], ids=repr)
def test_a_folder_that_cannot_be_listed_is_not_left_out(birds, monkeypatch, error):
    listed = MemoryFileSystem.ls

    def ls(self: Any, path: str, **options: Any) -> Any:
        if path.endswith("owls"):
            raise error
        return listed(self, path, **options)

    # Most file systems inherit `find` from `AbstractFileSystem`.
    monkeypatch.setattr(MemoryFileSystem, "find", AbstractFileSystem.find)
    assert len(BucketSource("memory://data/birds").list().items) == 3
    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(FetchFailed):
        BucketSource("memory://data/birds").list()


def test_folder_markers_are_not_items(scripted):
    found = {
        "b/birds": info(0),
        "b/birds/": info(0),
        "b/birds/owls/": info(0),
        "b/birds/owls/1": info(5),
        "b/birds/tits": {"size": 0, "type": "directory"},
        "b/birds/unknown": info(None),
    }
    listing = scripted(found)[0].list()
    assert listing.items == (Item("owls/1", 5, 0),)
    assert listing.skipped == (("unknown", "its size is unknown"),)


def test_paths_outside_the_folder_and_objects_that_are_also_folders_are_refused(scripted):
    for name in ("/../x", "/a/../../x", "/a//x", "//x", "/./x", "/a\0", "/a//", "2/x", "/.."):
        with pytest.raises(BadSource, match="paths inside the folder"):
            scripted({f"b/birds{name}": info(), "b/birds/fine": info()})[0].list()
    with pytest.raises(BadSource, match="'a' is both an object and a folder"):
        scripted({"b/birds/a": info(), "b/birds/a/b/c": info()})[0].list()


def test_an_address_without_objects_is_missing(birds, scripted):
    with pytest.raises(SourceMissing, match="nothing exists at this address"):
        BucketSource("memory://data/none").list()

    def gone(root: str) -> None:
        raise FileNotFoundError(root)

    with pytest.raises(SourceMissing, match="nothing exists at this address"):
        scripted(gone)[0].list()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mtime": 1.5}, 1_500_000_000),
        ({"LastModified": dt.datetime(2024, 1, 1, tzinfo=dt.UTC)}, 1704067200 * 10**9),
        ({"last_modified": "2024-01-01T00:00:00.000001Z"}, 1704067200 * 10**9 + 1000),
        ({"updated": "2024-01-01T01:00:00+01:00", "created": 5}, 1704067200 * 10**9),
        ({"updated": "yesterday", "created": 5}, 5 * 10**9),
        ({"mtime": float("nan")}, 0),
        ({"mtime": 1e300}, 0),
        ({"mtime": -1}, 0),
        ({}, 0),
    ],
)
def test_times_are_read_in_every_form_that_file_systems_return(scripted, fields, expected):
    (item,) = scripted({"b/birds/x": info(1, **fields)})[0].list().items
    assert item.mtime_ns == expected


def test_on_a_fast_line_a_small_object_takes_one_request_and_a_large_one_few(scripted):
    data = bytes(range(256)) * (9 << 12)  # 9 MiB
    requested = []

    def cat(path: str, start: int | None, end: int | None) -> bytes:
        requested.append((path, start, end))
        return data[start:end]

    source, _ = scripted({"b/birds/small": info(8 << 20), "b/birds/large": info(len(data))}, cat)
    large, small = source.list().items
    # The first requests measure the bandwidth.
    assert read_item(source, small, Retries()) == data[: 8 << 20]
    assert len(requested) == 10
    requested.clear()
    assert read_item(source, small, Retries()) == data[: 8 << 20]
    assert requested == [("b/birds/small", 0, 8 << 20)]
    requested.clear()
    assert read_item(source, large, Retries()) == data
    assert requested == [("b/birds/large", at << 20, min(9, at + 4) << 20) for at in (0, 4, 8)]


@pytest.mark.parametrize("fields", [{"mtime": 1_700_000_000.0}, {}], ids=["dated", "undated"])
@pytest.mark.parametrize("size", [1 << 20, 9 << 20])
def test_an_object_that_is_rewritten_between_its_requests_is_refused_and_then_read_again(
    scripted, tmp_path, size, fields
):
    facts = {"b/birds/x": info(size, ETag="1", **fields), "b/birds/small": info(4, ETag="1", **fields)}
    requested = []

    def cat(path: str, start: int | None, end: int | None) -> bytes:
        requested.append(path)
        if len(requested) == 5:
            facts["b/birds/x"]["ETag"] = "2"
        return (facts[path]["ETag"].encode() * facts[path]["size"])[start:end]

    source, _ = scripted(facts, cat)
    with pytest.raises(SourceChanged, match="modified after it was listed"):
        stage(source, tmp_path / "copy", progress=False)
    assert files_of(stage(source, tmp_path / "copy", progress=False).path)["x"] == b"2" * size
    facts["b/birds/small"]["ETag"] = "3"
    assert files_of(stage(source, tmp_path / "copy", progress=False, refresh=True).path)["small"] == b"3333"


def test_on_a_slow_line_every_request_is_answered_within_seconds(scripted, monkeypatch):
    clock, waits = [0.0], []

    def cat(path: str, start: int | None, end: int | None) -> bytes:
        size = min(end or 3 << 20, 3 << 20) - (start or 0)
        waits.append(size / 30_000)
        clock[0] += waits[-1]
        return bytes(size)

    monkeypatch.setattr(bucket, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    source, _ = scripted({"b/birds/x": info(3 << 20)}, cat)
    (item,) = source.list().items
    assert read_item(source, item, Retries()) == bytes(3 << 20)
    assert max(waits) < 5


def test_only_transient_errors_are_retried(scripted):
    left = [ConnectionError("reset"), TimeoutError("slow"), RuntimeError("503")]

    def flaky(*_: Any) -> bytes:
        if left:
            raise left.pop()
        return b"x"

    source, _ = scripted({"b/birds/x": info(1)}, flaky)
    (item,) = source.list().items
    retries = Retries()
    assert read_item(source, item, retries) == b"x"
    assert retries.count == 3

    def gone(*_: Any) -> bytes:
        left.append(FileNotFoundError("b/birds/x"))
        raise left[-1]

    source, _ = scripted({"b/birds/x": info(1)}, gone)
    with pytest.raises(FetchFailed, match=r"'x' of 'gs://b/birds'.*nothing exists at this address"):
        read_item(source, item, retries)
    assert len(left) == 1


def test_a_cancelled_call_becomes_a_colabkit_error(scripted):
    def cancel(*_: Any) -> Any:
        raise asyncio.CancelledError

    source, fs = scripted({"b/birds/x": info(1)}, cancel)
    (item,) = source.list().items
    with pytest.raises(FileFailed, match="CancelledError"):
        read_item(source, item, Retries())
    fs.found = cancel
    with pytest.raises(FetchFailed, match="CancelledError"):
        source.list()


def test_messages_contain_no_secrets(scripted):
    address = "gs://user:hunter2@b/birds?token=hunter2hunter2"

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"403 for https://x/b?token=hunter2hunter2 and user:hunter2 of {address}")

    source, fs = scripted({"b/birds/x": info(1)}, fail, address)
    assert source.name == "gs://b/birds"
    (item,) = source.list().items
    with pytest.raises(FileFailed) as first:
        read_item(source, item, Retries())
    fs.found = fail
    with pytest.raises(FetchFailed) as second:
        source.list()
    assert "hunter2" not in f"{first.value} {second.value} {source.name}"
    assert second.value.__cause__ is None


def test_a_missing_login_is_reported(scripted):
    def refuse(*_: Any) -> Any:
        raise PermissionError("anonymous caller")

    with pytest.raises(FetchFailed, match=r"needs a login.*authenticate_user"):
        scripted(refuse)[0].list()


@pytest.mark.full
def test_a_bucket_that_never_answers_is_given_up(scripted, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(bucket, "_LISTING_S", 0.05)
    source, _ = scripted(lambda _: answer.wait(30))
    assert source.can_hang
    try:
        with pytest.raises(TimedOut):
            source.list()
    finally:
        answer.set()


def test_missing_packages_and_unknown_protocols_are_named(monkeypatch):
    with pytest.raises(InvalidOption, match="nonsense"):
        BucketSource("nonsense://b/x")
    with pytest.raises(InvalidOption, match="expected a bucket such as"):
        BucketSource("https://example.com/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPackage, match="pip install gcsfs"):
        BucketSource("gs://b/x")


def test_an_archive_in_a_bucket_is_one_object(birds):
    birds.pipe_file("/data/a.zip", b"PK")
    source = open_source("memory://data/a.zip")
    assert not isinstance(source, FileSource)
    assert [item.path for item in source.list().items] == ["a.zip"]

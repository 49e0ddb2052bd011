"""Tests that every type of source must pass."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import fsspec
import pytest
from source_contract import FILES, UNDECODABLE, check_source, check_untouched, write_tree
from tar_files import tar_of

from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.folder import FileSource, FolderSource, SlowSource
from colabkit.storage.sources.items import Source
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.registry import open_source
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource

Maker = Callable[[Path, Mapping[str, bytes]], Source]


def folder(place: Path, files: Mapping[str, bytes]) -> Source:
    return FolderSource(write_tree(place / "tree", files))


def slow(place: Path, files: Mapping[str, bytes]) -> Source:
    return SlowSource(folder(place, files), 1e-6)


def zipped(method: int) -> Maker:
    def make(place: Path, files: Mapping[str, bytes]) -> Source:
        with zipfile.ZipFile(place / "a.zip", "w", method) as archive:
            for path, data in files.items():
                archive.writestr(path, data)
        return ZipSource(place / "a.zip")

    return make


def tarred(ending: str, layout: int = tarfile.PAX_FORMAT) -> Maker:
    return lambda place, files: TarSource(tar_of(place / f"a{ending}", files, layout))


def listed(place: Path, files: Mapping[str, bytes]) -> Source:
    tree = write_tree(place / "tree", files)
    return ManifestSource([tree / path for path in files])


def table(place: Path, files: Mapping[str, bytes]) -> Source:
    tree = write_tree(place / "tree", files)
    lines = ["path", *(f'"{path}"' for path in files)]
    (tree / "table.csv").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    return ManifestSource(tree / "table.csv")


def bucket(place: Path, files: Mapping[str, bytes]) -> Source:
    fs = fsspec.filesystem("memory")
    for path, data in files.items():
        fs.pipe_file(f"/contract/birds/{path}", data)
    return BucketSource("memory://contract/birds")


MAKERS: dict[str, Maker] = {
    "folder": folder,
    "slow": slow,
    "stored": zipped(zipfile.ZIP_STORED),
    "deflated": zipped(zipfile.ZIP_DEFLATED),
    "bzip2": zipped(zipfile.ZIP_BZIP2),
    "lzma": zipped(zipfile.ZIP_LZMA),
    "tar": tarred(".tar"),
    "gnu tar": tarred(".tar", tarfile.GNU_FORMAT),
    "tar.gz": tarred(".tar.gz"),
    "tar.bz2": tarred(".tar.bz2"),
    "tar.xz": tarred(".tar.xz"),
    "tar.zst": tarred(".tar.zst"),
    "list": listed,
    "table": table,
    "bucket": bucket,
}
WITH_BYTES_AS_NAMES = ["folder", "tar", "gnu tar", "tar.gz", "list", "table"]
IN_THE_GIVEN_ORDER = ("list", "table")


@pytest.fixture(autouse=True)
def _empty_memory():
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("kind", MAKERS)
def test_every_source_returns_its_files_in_order_from_any_thread_and_after_closing(tmp_path, kind):
    source = MAKERS[kind](tmp_path, FILES)
    check_untouched(tmp_path, lambda: check_source(source, FILES, kind not in IN_THE_GIVEN_ORDER))


@pytest.mark.parametrize("kind", WITH_BYTES_AS_NAMES)
def test_undecodable_names_are_preserved(tmp_path, kind):
    files = {"cats/1.jpg": b"1", UNDECODABLE: b"2"}
    check_source(MAKERS[kind](tmp_path, files), files)


def test_one_file_is_a_source_of_one_item(tmp_path):
    path = tmp_path / "train.h5"
    path.write_bytes(FILES["large.bin"])
    source = open_source(path)
    assert isinstance(source, FileSource)
    check_untouched(tmp_path, lambda: check_source(source, {"train.h5": FILES["large.bin"]}))
    assert source.list().items[0].mtime_ns == path.stat().st_mtime_ns


def test_large_objects_of_a_bucket_keep_the_same_promises(tmp_path, monkeypatch):
    monkeypatch.setattr("colabkit.storage.sources.bucket._WHOLE_BYTES", 100)
    monkeypatch.setattr("colabkit.storage.sources.bucket._RANGE_BYTES", 300)
    check_source(bucket(tmp_path, FILES), FILES)

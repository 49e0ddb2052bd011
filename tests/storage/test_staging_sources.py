"""`stage()` of tar archives, tables of paths, buckets, addresses and custom sources."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import tarfile
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from http_servers import body, serve, served
from local_copies import WalkedSource, copy, data_of, tarred, zipped
from sampling import sampled
from strikes import interrupt
from trees import leftovers

from colabkit.errors import BadArchive, InvalidOption, MissingPackage, NotSealed, SourceChanged, SourceMissing
from colabkit.packs.packing.verification import verify
from colabkit.storage.fetching.api import fetch
from colabkit.storage.sources import items, registry
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.items import ArchiveSource, Item, Listing
from colabkit.storage.staging import api
from colabkit.storage.staging.api import unstage
from colabkit.storage.staging.local_copy import LocalCopy
from colabkit.storage.staging.partial_copy import PartialCopy


@pytest.mark.parametrize("suffix", sampled([".tar", ".tar.gz", ".tar.bz2", ".tar.xz"], 2))
def test_tar_archives_are_extracted(image_tree, tmp_path, near_storage, suffix):
    (image_tree / "big.bin").write_bytes(os.urandom(BLOCK_BYTES + 5))
    (image_tree / "empty").write_bytes(b"")
    archive = tarred(image_tree, tmp_path / f"tree{suffix}")
    report = copy(archive, verify="full")
    assert data_of(report.path) == data_of(image_tree)
    assert copy(archive).reused
    assert copy(archive, extract=False).path.read_bytes() == archive.read_bytes()
    assert leftovers(near_storage) == []


def test_zstd_archives_are_staged_with_the_package(image_tree, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    plain = tarred(image_tree, tmp_path / "tree.tar")
    archive = tmp_path / "tree.tar.zst"
    archive.write_bytes(zstandard.compress(plain.read_bytes()))
    assert data_of(copy(archive).path) == data_of(image_tree)


def test_zstd_archives_need_a_package(image_tree, tmp_path, monkeypatch):
    archive = tmp_path / "tree.tar.zst"
    archive.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    for module in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match="pip install"):
        copy(archive)


def test_a_hostile_tar_writes_nothing(tmp_path, near_storage):
    for name in ("../out", "/out", "a/../../out"):
        archive = tmp_path / "bad.tar"
        with tarfile.open(archive, "w") as file:
            for member in ("fine", name):
                info = tarfile.TarInfo(member)
                info.size = 1
                file.addfile(info, io.BytesIO(b"x"))
        with pytest.raises(BadArchive, match="inside"):
            copy(archive)
    assert list(near_storage.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_any_sequential_source_is_staged_block_by_block(tmp_path):
    files = {
        "a block": os.urandom(BLOCK_BYTES),
        "empty": b"",
        "large/2.4 blocks": os.urandom(10_000_001),
        "small": b"x",
    }
    source = WalkedSource(files)
    report = copy(source, verify="full")
    assert data_of(report.path) == files
    assert source.passes == 2, "one to copy, one to verify"
    assert source.largest_read <= BLOCK_BYTES
    sealed = LocalCopy.at(report.path)
    assert sealed is not None
    assert [len(crcs) for _, crcs in sealed.manifest()] == [1, 1, 3, 1]
    assert sealed.verify(progress=False).damaged == ()
    assert copy(source, verify="full").reused
    (report.path / "large/2.4 blocks").write_bytes(bytes(10_000_001))
    assert sealed.verify(progress=False).damaged == ("large/2.4 blocks",)
    assert data_of(copy(source, refresh=True).path) == files
    assert source.passes == 3


class GzipArchive(ArchiveSource):
    """A minimal archive type: a gzip file that contains one item."""

    def list(self) -> Listing:
        with gzip.open(self.path) as file:
            size = sum(map(len, iter(lambda: file.read(BLOCK_BYTES), b"")))
        return Listing((Item(self.path.stem, size, self.path.stat().st_mtime_ns),), ())

    def open(self, item: Item) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.path))


class GzipFromFront(GzipArchive):
    """A `GzipArchive` that can only be read from its start."""

    is_sequential = True


@pytest.mark.parametrize("kind", [GzipArchive, GzipFromFront])
@pytest.mark.parametrize("can_hang", [False, True])
def test_a_new_archive_type_needs_only_a_class_and_a_line_in_the_registry(tmp_path, monkeypatch, kind, can_hang):
    monkeypatch.setattr(registry, "_ARCHIVES", ((("notes.gz",), kind, lambda path: False), *registry._ARCHIVES))
    monkeypatch.setattr(items, "can_hang", lambda path, table: can_hang and path.endswith("notes.gz"))
    text = os.urandom(2 * BLOCK_BYTES + 5)
    archive = tmp_path / "notes.gz"
    archive.write_bytes(gzip.compress(text, 1))
    plan = copy(archive, dry_run=True).plan
    assert (plan.kind, plan.files) == ("archive", None if can_hang else 1)
    report = copy(archive, verify="full")
    assert data_of(report.path) == {"notes": text}
    assert verify(report.path, progress=False).damaged == ()
    assert copy(archive).reused
    assert copy(archive, refresh=True).reused
    assert copy(archive, extract=False).path.read_bytes() == archive.read_bytes()
    archive.write_bytes(gzip.compress(b"other", 1))
    assert data_of(copy(archive, refresh=True).path) == {"notes": b"other"}


class ChangedSource(WalkedSource):
    """A source whose sizes or items change between listing and reading; `name` describes the change."""

    def __init__(self, name: str, sizes: dict[str, int], files: dict[str, bytes], *, knows_sizes: bool) -> None:
        super().__init__(files)
        self.name, self.sizes, self.knows_sizes = name, sizes, knows_sizes

    def list(self) -> Listing:
        return Listing(tuple(Item(path, size) for path, size in self.sizes.items()), ())

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        for item, file in WalkedSource(self.files).walk(wanted):
            yield item if self.knows_sizes else Item(item.path, self.sizes[item.path]), file


def test_a_sequential_source_that_differs_from_its_listing_is_refused():
    for source in (
        ChangedSource("longer", {"a": 2}, {"a": b"abc"}, knows_sizes=False),
        ChangedSource("shorter", {"a": 4}, {"a": b"abc"}, knows_sizes=False),
        ChangedSource("no longer empty", {"a": 0}, {"a": b"abc"}, knows_sizes=False),
        ChangedSource("another size", {"a": 4}, {"a": b"abc"}, knows_sizes=True),
        ChangedSource("gone", {"a": 3, "b": 1}, {"a": b"abc"}, knows_sizes=True),
    ):
        for _ in range(2):
            with pytest.raises(SourceChanged, match=f"^Cannot read '[ab]' of '{source.name}': "):
                copy(source)


def test_a_list_of_paths_is_staged_below_their_common_folder(image_tree):
    paths = [image_tree / "ants" / "000.png", str(image_tree / "cats" / "003.png"), image_tree / "ants" / "000.png"]
    report = copy(paths)
    assert sorted(data_of(report.path)) == ["ants/000.png", "cats/003.png"]
    assert report.files == 2
    assert copy(paths).reused
    assert copy(paths[:2]).path != report.path


def test_a_table_is_staged_with_its_files(image_tree, tmp_path):
    pandas = pytest.importorskip("pandas")
    table = image_tree / "labels.csv"
    table.write_text("file,label\nants/000.png,1\ncats/003.png,0\n")
    report = copy(table)
    assert sorted(data_of(report.path)) == ["ants/000.png", "cats/003.png", "labels.csv"]
    frame = pandas.read_csv(table)
    frame["file"] = [str(image_tree / path) for path in frame["file"]]
    assert sorted(data_of(copy(frame).path)) == ["ants/000.png", "cats/003.png"]


def test_a_table_that_names_a_missing_file_is_refused(image_tree):
    with pytest.raises(SourceMissing, match=r"nowhere\.png"):
        copy([image_tree / "ants" / "000.png", image_tree / "nowhere.png"])


def test_a_bucket_is_staged(image_tree):
    fsspec = pytest.importorskip("fsspec")
    files = data_of(image_tree) | {"big.bin": os.urandom(2 * BLOCK_BYTES + 9)}
    bucket = fsspec.filesystem("memory")
    try:
        for path, data in files.items():
            bucket.pipe(f"/bucket/birds/{path}", data)
        report = copy("memory://bucket/birds")
        assert data_of(report.path) == files
        assert report.plan.kind == "bucket"
        assert copy("memory://bucket/birds").reused
    finally:
        bucket.store.clear()


def test_an_address_is_fetched_and_extracted_and_the_download_is_removed(image_tree, tmp_path, near_storage):
    archive = zipped(image_tree, tmp_path / "a.zip")
    with served(archive.read_bytes()) as server:
        address = server.url.replace("file.bin", "birds.zip?token=secret")
        report = copy(address)
        assert data_of(report.path) == data_of(image_tree)
        assert "secret" not in repr(report) + report._repr_html_() + str(report.to_dict())
        requests = len(server.paths)
        assert copy(address).reused
        assert len(server.paths) == requests, "the server was accessed"
    assert list((near_storage / "downloads").iterdir()) == []
    assert b"secret" not in b"".join(path.read_bytes() for path in near_storage.rglob("*.json"))


@pytest.mark.parametrize("headers", [{"ETag": '"v1"'}, {}], ids=["versioned", "unversioned"])
def test_a_download_that_is_no_archive_is_not_kept_for_the_next_call(image_tree, tmp_path, near_storage, headers):
    data = zipped(image_tree, tmp_path / "a.zip").read_bytes()
    for wrong in (data[: len(data) // 2], b"no archive" * 1000):
        with served(data, body(wrong, **headers), serve) as server:
            address = server.url.replace("file.bin", "birds.zip")
            with pytest.raises(BadArchive):
                copy(address)
            assert leftovers(near_storage) == []
            assert data_of(copy(address).path) == data_of(image_tree)
        unstage(address)


def test_a_complete_download_is_not_fetched_again_after_an_interruption(image_tree, tmp_path, monkeypatch):
    fetches = []
    monkeypatch.setattr(api, "fetch", lambda *args, **options: fetches.append(fetch(*args, **options)) or fetches[-1])
    with served(zipped(image_tree, tmp_path / "a.zip").read_bytes()) as server:
        address = server.url.replace("file.bin", "birds.zip")
        with monkeypatch.context() as patch:
            patch.setattr(PartialCopy, "write", lambda *_: interrupt())
            with pytest.raises(KeyboardInterrupt):
                copy(address)
        assert data_of(copy(address).path) == data_of(image_tree)
    assert [report.reused for report in fetches] == [False, True]


def test_an_address_of_one_file_is_staged_as_that_file(tmp_path):
    data = os.urandom(100_000)
    with served(data) as server:
        report = copy(server.url)
        assert report.path.name == "file.bin"
        assert report.path.read_bytes() == data
        unstage(report)
        assert not report.path.exists()


def test_full_verification_fetches_an_address_again(image_tree, tmp_path):
    with served(zipped(image_tree, tmp_path / "a.zip").read_bytes()) as server:
        address = server.url.replace("file.bin", "birds.zip")
        assert copy(address).verify == "size"
        report = copy(address, verify="full")
    assert (report.verify, report.reused) == ("full", False)
    assert "all bytes of the download, read twice" in report._repr_html_()
    assert data_of(report.path) == data_of(image_tree)


def test_unstage_frees_an_interrupted_download(near_storage, monkeypatch):
    def stop(source: str, to: str, **options: object) -> None:
        Path(to).mkdir(parents=True)
        (Path(to) / "birds.zip").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr("colabkit.storage.staging.api.fetch", stop)
    with pytest.raises(KeyboardInterrupt):
        copy("https://example.com/birds.zip")
    assert unstage("https://example.com/birds.zip").freed_bytes > 0
    assert list((near_storage / "downloads").iterdir()) == []
    with pytest.raises(SourceMissing, match="it has no local copy"):
        unstage("https://example.com/birds.zip")


def test_rows_with_missing_files_are_an_error_or_skipped_and_reported(image_tree, near_storage):
    paths = [str(image_tree / "ants" / "000.png"), str(image_tree / "gone.png")]
    report = copy(paths, on_bad="skip")
    assert list(data_of(report.path)) == ["ants/000.png"]
    assert report.skipped == ((paths[1], "the file is missing"),)
    with pytest.raises(SourceMissing, match=r"missing for 1 of 2 rows.*on_bad='skip'"):
        copy(paths)
    with pytest.raises(InvalidOption, match=r"on_bad='skip' applies only to a table of paths\. Omit on_bad="):
        copy(image_tree, on_bad="skip")
    unstage(paths)
    assert list(near_storage.iterdir()) == []


@pytest.mark.parametrize("is_file", [False, True])
def test_unstage_finds_the_copies_of_a_table_with_all_options(image_tree, tmp_path, near_storage, is_file):
    pandas = pytest.importorskip("pandas")
    names = [path.relative_to(image_tree).as_posix() for path in image_tree.rglob("*.png")]
    table = pandas.DataFrame({"mine": names, "other": names[::-1]})
    table.to_csv(tmp_path / "t.csv", index=False)
    source = tmp_path / "t.csv" if is_file else table
    for column in ("mine", "other"):
        copy(source, path_column=column, root=image_tree)
    assert len(list(near_storage.iterdir())) == 2
    unstage(source)
    assert list(near_storage.iterdir()) == []
    with pytest.raises(SourceMissing if not is_file else NotSealed):
        unstage(source)


def test_the_source_may_disappear_after_staging(image_tree):
    path = copy(image_tree).path
    shutil.rmtree(image_tree)
    assert copy(image_tree).path == path
    with pytest.raises(SourceMissing):
        copy(image_tree, refresh=True)
    assert copy(image_tree).path == path, "a failed refresh removes nothing"


def test_stage_leaves_no_thread(image_tree, tmp_path):
    before = threading.active_count()
    copy(zipped(image_tree, tmp_path / "a.zip"), threads=8)
    copy(image_tree, threads=8)
    assert threading.active_count() == before

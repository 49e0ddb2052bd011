"""Zip archives as sources: the same bytes as the tree, and typed errors for damaged or malicious archives."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from forks import in_fork
from local_copies import zipped
from sampling import sampled
from source_contract import contents
from trees import files_of, make_tree

from colabkit.errors import BadArchive, ColabkitError
from colabkit.storage.sources import zip_archive
from colabkit.storage.sources.items import STAGE_SEAL, Item
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.zip_archive import ZipSource

METHODS = {
    "stored": zipfile.ZIP_STORED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}


def zip_of(archive: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in members:
            file.writestr(zipfile.ZipInfo(name), data)
    return archive


@pytest.fixture
def tree(tmp_path):
    folder = make_tree(tmp_path / "tree", 1)
    (folder / "ants" / "notes.txt").write_text("many words " * 400)
    (folder / "ants" / "empty.txt").write_text("")
    return folder


def test_large_members_are_streamed_with_the_same_bytes(tree, tmp_path, monkeypatch):
    archive = zipped(tree, tmp_path / "a.zip")
    monkeypatch.setattr(zip_archive, "_INFLATE_BYTES", 10)
    monkeypatch.setattr(ZipSource, "_inflated", lambda *_: pytest.fail("inflated in one piece"))
    (tree / "ants" / "empty.txt").unlink()
    source = ZipSource(archive)
    found = {item.path: read_item(source, item, Retries()) for item in source.list().items if item.size}
    assert found == files_of(tree)


def test_a_streamed_member_is_read_while_a_forked_process_reads_another(tmp_path):
    members = {name: os.urandom(200_000) for name in ("a", "b")}
    for name, data in members.items():
        (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as file:
        for name in members:
            file.write(tmp_path / name, name)
    source = ZipSource(tmp_path / "a.zip")
    first, second = source.list().items
    with source.open(first) as member:
        data = member.read(1)
        assert in_fork(lambda: read_item(source, second, Retries())) == 0
        while block := member.read(200_000):
            data += block
    assert data == members["a"]


def test_an_archive_after_other_bytes_is_read(tree, tmp_path):
    archive = zipped(tree, tmp_path / "a.zip")
    archive.write_bytes(b"#!/bin/sh\n" * 7 + archive.read_bytes())
    assert contents(archive) == files_of(tree)


def test_concurrent_threads_read_the_directory_once(tree, tmp_path, monkeypatch):
    archive = zipped(tree, tmp_path / "a.zip")
    source = ZipSource(archive)
    items = ZipSource(archive).list().items
    opened, inside, original = [], threading.Event(), zipfile.ZipFile

    def count(path):
        opened.append(path)
        if len(opened) > 1:
            inside.set()
        # Wait, so that a second thread could enter if nothing prevented it.
        inside.wait(0.2)
        return original(path)

    monkeypatch.setattr(zipfile, "ZipFile", count)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: source.open(item).close(), items))
    assert len(opened) == 1


def test_an_archive_truncated_anywhere_is_refused(tree, tmp_path):
    archive = zipped(tree, tmp_path / "a.zip")
    data = archive.read_bytes()
    lengths = {*range(0, len(data), 97), len(data) - 1, len(data) - 21, len(data) - 22, len(data) - 23, 1, 3, 4}
    for length in sorted(lengths):
        archive.write_bytes(data[:length])
        with pytest.raises(BadArchive, match="Cannot read"):
            contents(archive)


@pytest.mark.full
@pytest.mark.parametrize("method", sampled(METHODS, 2))
def test_a_flipped_byte_anywhere_gives_correct_bytes_or_a_typed_error(tree, tmp_path, method):
    archive = zipped(tree, tmp_path / "a.zip", METHODS[method])
    data = bytearray(archive.read_bytes())
    right = set(files_of(tree).values())
    random = np.random.default_rng(3)
    refused = 0
    for place in random.permutation(len(data))[:600]:
        flip = int(random.integers(1, 256))
        data[place] ^= flip
        archive.write_bytes(data)
        data[place] ^= flip
        try:
            found = contents(archive)
        except BadArchive:
            refused += 1
        else:
            assert set(found.values()) <= right, f"wrong bytes accepted after a change at byte {place}"
    assert refused > 100


def test_a_flipped_byte_of_the_data_is_refused_and_the_member_named(tmp_path):
    archive = zip_of(tmp_path / "a.zip", ("cats/1.png", bytes(range(200))))
    data = bytearray(archive.read_bytes())
    data[data.index(bytes(range(50)))] ^= 1
    archive.write_bytes(data)
    with pytest.raises(BadArchive, match=r"'cats/1\.png'.*CRC"):
        contents(archive)


def test_paths_outside_the_archive_are_refused(tmp_path):
    for name in ("../x", "a/../../x", "/etc/x", "a/..", "..", "//x", "a/b/../c", "."):
        archive = zip_of(tmp_path / "a.zip", ("fine.txt", b"x"), (name, b"x"))
        with pytest.raises(BadArchive, match="paths inside the archive"):
            ZipSource(archive).list()


def test_folders_and_the_seal_of_a_local_copy_are_not_items(tmp_path):
    members = (STAGE_SEAL, b"{}"), ("cats/", b""), ("./", b""), ("cats/1.png", b"x")
    assert contents(zip_of(tmp_path / "a.zip", *members)) == {"cats/1.png": b"x"}


def test_encrypted_members_are_refused_with_advice(tmp_path):
    archive = zip_of(tmp_path / "a.zip", ("x", b"data"))
    declared(archive, flags=1)
    with pytest.raises(BadArchive, match=r"is encrypted.*password"):
        ZipSource(archive).list()


def declared(archive: Path, **values: int) -> None:
    """Change values that the first entry of an archive's directory declares."""
    data = bytearray(archive.read_bytes())
    entry = data.index(b"PK\x01\x02")
    places = {"flags": (8, "<H"), "crc": (16, "<I"), "packed": (20, "<I"), "size": (24, "<I"), "offset": (42, "<I")}
    for name, value in values.items():
        struct.pack_into(places[name][1], data, entry + places[name][0], value)
    archive.write_bytes(data)


def test_a_bomb_is_refused_by_the_size_it_declares(tmp_path):
    archive = zip_of(tmp_path / "a.zip", ("x", b"data"))
    declared(archive, size=3 << 30)
    with pytest.raises(BadArchive, match="when decompressed; expected at most"):
        ZipSource(archive).list()


def test_a_bomb_with_a_small_declared_size_is_not_decompressed_further(tmp_path, monkeypatch):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x", bytes(5 << 20))
    declared(archive, size=100)
    inflated = []

    class Inflater:
        def __init__(self, *options):
            self.inner = make(*options)

        def decompress(self, *arguments):
            inflated.append(self.inner.decompress(*arguments))
            return inflated[-1]

    make = zip_archive.zlib.decompressobj
    monkeypatch.setattr(zip_archive.zlib, "decompressobj", Inflater)
    with pytest.raises(BadArchive):
        contents(archive)
    assert {len(data) for data in inflated} == {101}


def test_no_memory_is_allocated_for_declared_compressed_bytes(tmp_path, monkeypatch):
    archive = zip_of(tmp_path / "a.zip", ("x", b"data"))
    declared(archive, packed=0xFFFFFFF0)
    sizes = []
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: sizes.append(size) or read(fd, min(size, 1000), offset))
    with contextlib.suppress(BadArchive):
        assert contents(archive) == {"x": b"data"}
    assert max(sizes, default=0) <= archive.stat().st_size


def test_links_and_special_members_are_skipped_and_reported(tmp_path):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, kind in (("link", stat.S_IFLNK), ("pipe", stat.S_IFIFO), ("file", stat.S_IFREG), ("bare", 0)):
            member = zipfile.ZipInfo(name)
            member.external_attr = (kind | 0o644) << 16
            file.writestr(member, "/etc/passwd")
    listing = ZipSource(archive).list()
    assert [item.path for item in listing.items] == ["bare", "file"]
    assert listing.skipped == (("link", "link"), ("pipe", "special file"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_last_of_several_members_with_one_name_counts_and_the_others_are_reported(tmp_path):
    archive = zip_of(tmp_path / "a.zip", ("x", b"first"), ("y", b"other"), ("x", b"the last"), ("./y", b"again"))
    assert contents(archive) == {"x": b"the last", "y": b"again"}
    assert ZipSource(archive).list().skipped == (
        ("x", "replaced by a later member with the same path"),
        ("y", "replaced by a later member with the same path"),
    )


def test_names_in_any_script_are_preserved(tmp_path):
    names = ["猫/一.png", "café/ü.png", "a\\b.png", "-rf", " "]
    archive = zip_of(tmp_path / "a.zip", *((name, name.encode()) for name in names))
    assert contents(archive) == {name: name.encode() for name in names}


def test_a_file_that_only_ends_in_zip_is_refused(tmp_path):
    for data in (b"", b"PK", b"<!doctype html><title>Sign in</title>", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "a.zip").write_bytes(data)
        with pytest.raises(BadArchive, match="damaged or truncated"):
            contents(tmp_path / "a.zip")


def test_an_item_of_another_listing_is_refused(tmp_path):
    archive = zip_of(tmp_path / "a.zip", ("x", b"data"))
    for item in (Item("y", 4), Item("x", 5)):
        with pytest.raises(ColabkitError):
            read_item(ZipSource(archive), item, Retries())


def test_times_are_those_of_the_members_and_invalid_ones_are_zero(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("x", (2024, 2, 29, 12, 30, 58)), b"")
        archive.writestr(zipfile.ZipInfo("y", (1980, 0, 0, 0, 0, 0)), b"")
    assert [item.mtime_ns for item in ZipSource(tmp_path / "a.zip").list().items] == [1709209858 * 10**9, 0]


@pytest.mark.full
def test_a_zip64_archive_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        with archive.open("large", "w", force_zip64=True) as file:
            file.write(b"data")
        # A directory without zip64 can count only 65,535 files.
        for number in range(70_000):
            archive.writestr(zipfile.ZipInfo(str(number)), b"")
    source = ZipSource(tmp_path / "a.zip")
    items = {item.path: item for item in source.list().items}
    assert len(items) == 70_001
    assert read_item(source, items["large"], Retries()) == b"data"


def test_a_broken_streamed_member_raises_bad_archive_wherever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(zip_archive, "_INFLATE_BYTES", 10)
    for method in METHODS.values():
        with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
            archive.writestr("x", os.urandom(50_000))
        data = bytearray((tmp_path / "a.zip").read_bytes())
        data[20_000:20_100] = bytes(100)
        (tmp_path / "a.zip").write_bytes(data)
        source = ZipSource(tmp_path / "a.zip")
        (item,) = source.list().items
        with pytest.raises(BadArchive, match="'x'"), source.open(item) as file:
            file.read()
        with source.open(item) as file, pytest.raises(BadArchive, match="'x'"):
            file.read(file.seek(40_000))

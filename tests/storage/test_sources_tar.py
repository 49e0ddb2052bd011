"""Tar archives as sources: one pass for each listing or walk, correct bytes, and no unnecessary reads."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest
from sampling import sampled
from source_contract import FILES
from tar_files import packed, tar_bytes, tar_of

from colabkit.errors import BadArchive, FileFailed, MissingPackage, SourceChanged
from colabkit.storage.sources import tar_archive, tar_stream
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_source
from colabkit.storage.sources.tar_archive import TarSource

COMPRESSED = [".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst"]


def contents(source: TarSource) -> dict[str, bytes]:
    return {item.path: file.read() for item, file in source.walk()}


@pytest.mark.parametrize("ending", [".tar", *COMPRESSED])
def test_an_archive_is_recognized_by_its_suffix_and_by_its_bytes(tmp_path, ending):
    archive = tar_of(tmp_path / f"a{ending}", FILES)
    source = open_source(archive)
    assert isinstance(source, TarSource)
    assert source.is_sequential == (ending != ".tar")
    assert source.archive_bytes == archive.stat().st_size
    nameless = archive.rename(tmp_path / "download")
    assert isinstance(open_source(nameless), TarSource)
    assert contents(open_source(nameless)) == FILES


def test_the_compression_is_recognized_from_the_bytes_alone(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes(FILES))
    (tmp_path / "b.tar").write_bytes(packed(tar_bytes(FILES), ".tar.xz"))
    for name, is_sequential in (("a.tar.gz", False), ("b.tar", True)):
        source = TarSource(tmp_path / name)
        assert source.is_sequential is is_sequential
        assert contents(source) == FILES


def test_times_are_preserved_to_the_nanosecond(tmp_path):
    member = tarfile.TarInfo("old")
    members = []
    for seconds, extended in ((1_600_000_000, {}), (-5, {}), (0, {"mtime": "1700000000.123456789"})):
        member.mtime, member.pax_headers = seconds, extended
        members.append(member.tobuf(tarfile.PAX_FORMAT))
    for header, expected in zip(members, (1_600_000_000 * 10**9, -5 * 10**9, 1700000000123456789), strict=True):
        (tmp_path / "a.tar").write_bytes(header + bytes(1024))
        assert TarSource(tmp_path / "a.tar").list().items == (Item("old", 0, expected),)


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_format_are_read(tmp_path, layout):
    names = ["a" * 99, f"{'b' * 90}/{'c' * 90}"]
    names += [] if layout == tarfile.USTAR_FORMAT else ["/".join(["d" * 200] * 5), f"{'é' * 120}.jpg"]
    files = {name: name.encode() for name in names}
    assert contents(TarSource(tar_of(tmp_path / "a.tar", files, layout))) == files


@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["1.bin", "/".join(["d" * 60] * 3)])
def test_a_file_that_was_archived_twice_keeps_its_bytes_and_a_link_to_another_file_replaces_it(tmp_path, layout, name):
    def write(linked: str) -> TarSource:
        with tarfile.open(tmp_path / "a.tar", "w", format=layout) as file:
            for member in (tarfile.TarInfo(name), tarfile.TarInfo("other" * 19)):
                member.size = 4
                file.addfile(member, io.BytesIO(b"data"))
            # GNU tar and `tarfile` write a hard link if the same file is added again.
            again = tarfile.TarInfo(name)
            again.type, again.linkname = tarfile.LNKTYPE, linked
            file.addfile(again)
        return TarSource(tmp_path / "a.tar")

    twice = write(name)
    assert contents(twice) == {name: b"data", "other" * 19: b"data"}
    assert twice.list().skipped == ((name, "repeated by a later member"),)
    assert list(contents(write("other" * 19))) == ["other" * 19]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.zst"])
def test_a_walk_yields_the_wanted_items_in_archive_order(tmp_path, ending):
    files = dict(sorted(FILES.items(), reverse=True))
    source = TarSource(tar_of(tmp_path / f"a{ending}", files))
    assert [item.path for item, _ in source.walk()] == list(files)
    wanted = {"large.bin", "cats/1.jpg", "no such"}
    assert {item.path: file.read() for item, file in source.walk(wanted)} == {p: FILES[p] for p in wanted & set(FILES)}
    assert list(source.walk(set())) == []


def test_listing_and_walking_take_one_pass_each(tmp_path, monkeypatch):
    files = {f"{number:03d}": os.urandom(1000) for number in range(100)}
    archive = tar_of(tmp_path / "a.tar.gz", files)
    streams: list[tar_stream.TarStream] = []

    class RecordedStream(tar_stream.TarStream):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            streams.append(self)

    monkeypatch.setattr(tar_archive, "TarStream", RecordedStream)
    source = TarSource(archive)
    source.list()
    source.list()
    assert len(streams) == 1
    assert contents(source) == files
    assert len(streams) == 2
    assert all(stream.position == len(gzip.decompress(archive.read_bytes())) for stream in streams), "to the end"


def test_a_file_of_a_walk_is_closed_by_the_next_step(tmp_path):
    for ending in (".tar", ".tar.gz"):
        walk = TarSource(tar_of(tmp_path / f"a{ending}", FILES)).walk()
        _, file = next(walk)
        next(walk)
        with pytest.raises(ValueError, match="closed file"):
            file.read()
        walk.close()


def test_a_walk_that_is_left_early_leaves_no_descriptor_open(tmp_path):
    source = TarSource(tar_of(tmp_path / "a.tar.gz", FILES))
    source.list()
    before = len(os.listdir("/dev/fd"))
    for item, file in source.walk():
        assert file.read(1) in (FILES[item.path][:1], b"")
        break
    for item in source.list().items:
        source.open(item).close()
    assert len(os.listdir("/dev/fd")) == before
    source.close()
    assert len(os.listdir("/dev/fd")) == before - 1


def test_listing_a_plain_tar_reads_only_its_headers(tmp_path, monkeypatch):
    archive = tar_of(tmp_path / "a.tar", {"small": b"1", "large": bytes(50 << 20), "last": b"2"})
    read, came = tar_stream.TarStream.read, []
    monkeypatch.setattr(tar_stream.TarStream, "read", lambda self, size: came.append(size) or read(self, size))
    assert [item.size for item in TarSource(archive).list().items] == [50 << 20, 1, 1]
    assert sum(came) <= 4 * 512


def test_a_modified_archive_is_not_read_further(tmp_path):
    for ending in (".tar", ".tar.gz"):
        archive = tar_of(tmp_path / f"a{ending}", FILES)
        source = TarSource(archive)
        item = source.list().items[0]
        with archive.open("r+b") as file:
            file.write(b"x")
        os.utime(archive, ns=(1, 1))
        with pytest.raises(SourceChanged):
            read_item(source, item, Retries())
        if source.is_sequential:
            with pytest.raises(SourceChanged):
                next(source.walk())


def test_a_replaced_archive_is_listed_again_after_closing(tmp_path):
    archive = tar_of(tmp_path / "a.tar", {"old": b"1"})
    source = TarSource(archive)
    (item,) = source.list().items
    source.close()
    tar_of(archive, {"new": b"22"})
    os.utime(archive, ns=(5, 5))
    assert [item.path for item in source.list().items] == ["new"]
    with pytest.raises(SourceChanged, match="no such member"):
        source.open(item)


def test_a_removed_archive_raises_a_colabkit_error(tmp_path):
    source = TarSource(tmp_path / "gone.tar")
    for use in (source.list, lambda: source.is_sequential, lambda: source.archive_bytes, lambda: next(source.walk())):
        with pytest.raises(FileFailed, match=r"gone\.tar"):
            use()


def test_a_missing_zstd_package_is_named_with_its_install_command(tmp_path, monkeypatch):
    archive = tar_of(tmp_path / "a.tar.zst", FILES)
    nameless = tar_of(tmp_path / "b.tar.zst", FILES).rename(tmp_path / "nameless")
    real = tar_stream.importlib.import_module

    def missing(name: str):
        if "zst" in name:
            raise ModuleNotFoundError(name, name=name)
        return real(name)

    monkeypatch.setattr(tar_stream.importlib, "import_module", missing)
    with pytest.raises(MissingPackage, match=r"pip install backports\.zstd"):
        open_source(archive).list()
    assert not isinstance(open_source(nameless), TarSource), "without the package, it cannot be recognized"


@pytest.mark.parametrize("ending", sampled([".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"], 2))
def test_several_streams_in_one_file_are_one_archive(tmp_path, ending):
    data = tar_bytes(FILES)
    archive = tmp_path / f"a{ending}"
    archive.write_bytes(packed(data[:5000], ending) + packed(data[5000:], ending))
    assert contents(TarSource(archive)) == FILES


@pytest.mark.parametrize("ending", [".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"])
def test_listing_detects_a_wrong_checksum(tmp_path, ending):
    archive = tar_of(tmp_path / f"a{ending}", {"x": b"data"})
    data = bytearray(archive.read_bytes())
    at = {".tar.gz": -8, ".tar.bz2": 12, ".tar.xz": -30, ".tar.zst": -1}[ending]
    data[at] ^= 0xFF
    archive.write_bytes(data)
    with pytest.raises(BadArchive, match="damaged or truncated"):
        TarSource(archive).list()

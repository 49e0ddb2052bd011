"""Malicious and damaged archives: each raises a typed error in bounded time, or is read without its bad members."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import tarfile
from pathlib import Path

import pytest
from hostile_archives import BAD_ZIPS, END, REFUSED, SKIPPED, checked, entry, pax, record, zip_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_contract import FILES
from tar_files import packed, tar_bytes

from colabkit.errors import BadArchive, ColabkitError
from colabkit.storage.sources import items
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource

pytestmark = pytest.mark.timeout(60)

ENDINGS = [".tar", ".tar.gz", ".tar.zst"]


def contents(path: Path) -> dict[str, bytes]:
    """Return all bytes of an archive; check that every way of reading returns the same."""
    source = (ZipSource if path.suffix == ".zip" else TarSource)(path)
    try:
        found = {item.path: read_item(source, item, Retries()) for item in source.list().items}
        if isinstance(source, TarSource):
            assert {item.path: file.read() for item, file in source.walk()} == found
        return found
    finally:
        source.close()


def put(folder: Path, ending: str, data: bytes) -> Path:
    path = folder / f"a{ending}"
    path.write_bytes(packed(data, ending))
    return path


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("what", REFUSED)
def test_a_malicious_tar_is_refused(tmp_path, what, ending):
    archive = put(tmp_path, ending, entry("first", b"1") + REFUSED[what] + END)
    with pytest.raises(BadArchive, match=r"^Cannot read '.*'"):
        TarSource(archive).list()
    with pytest.raises(BadArchive):
        next(TarSource(archive).walk())


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("what", SKIPPED)
def test_members_that_are_neither_files_nor_folders_are_skipped_and_reported(tmp_path, what, ending):
    odd, reason = SKIPPED[what]
    archive = put(tmp_path, ending, entry("first", b"1") + odd + entry("last", b"2") + END)
    assert TarSource(archive).list().skipped == (("s", reason),)
    found = contents(archive)
    assert {path: found[path] for path in ("first", "last")} == {"first": b"1", "last": b"2"}
    assert not found.get("s")


def test_a_file_below_a_link_is_in_a_folder_with_the_name_of_the_link(tmp_path):
    """Links are never created, so a chain of links cannot point outside."""
    chain = entry("a", kind=tarfile.SYMTYPE) + entry("a/b", kind=tarfile.SYMTYPE) + entry("a/b/c", b"inside")
    assert contents(put(tmp_path, ".tar", chain + END)) == {"a/b/c": b"inside"}


def test_the_top_folder_and_the_seal_of_a_local_copy_are_not_items(tmp_path):
    data = entry("./", kind=tarfile.DIRTYPE) + entry("./.colabkit-stage.json", b"{}") + entry("./x", b"1") + END
    assert contents(put(tmp_path, ".tar", data)) == {"x": b"1"}


@pytest.mark.parametrize("ending", [*ENDINGS, ".tar.bz2", ".tar.xz"])
def test_a_tar_truncated_anywhere_is_refused(tmp_path, ending):
    archive = put(tmp_path, ending, tar_bytes({"a": FILES["large.bin"][:9000], "b": b"", "c/d": b"1" * 5000}))
    data = archive.read_bytes()
    end = len(data) if ending != ".tar" else len(data.rstrip(b"\0"))
    for length in {*range(0, end, 1024), *range(0, end, 997), end - 1, 1, 2, 3, 10, 511, 512, 513}:
        if length < end:
            archive.write_bytes(data[:length])
            with pytest.raises(BadArchive):
                contents(archive)


def test_a_plain_tar_without_its_end_mark_is_truncated(tmp_path):
    archive = tmp_path / "a.tar"
    endless_map = entry("s", kind=tarfile.GNUTYPE_SPARSE, sparse=b"\1") + b"\1" * (512 * 40)
    for data in (entry("x", b"1"), entry("x", b"1") + pax(record("path", "y")), endless_map):
        archive.write_bytes(data)
        with pytest.raises(BadArchive, match="ends too early"):
            contents(archive)


@pytest.mark.parametrize(
    "data", [b"", b"\x1f\x8b", b"BZh9", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"<html>", b"\xff" * 999]
)
@pytest.mark.parametrize("ending", [".tar", ".tgz", ".tar.xz"])
def test_a_file_that_only_has_the_name_of_a_tar_is_refused(tmp_path, data, ending):
    archive = tmp_path / f"a{ending}"
    archive.write_bytes(data)
    with pytest.raises(BadArchive, match="damaged or truncated"):
        contents(archive)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lambda data: packed(data, ".tar.zst")])
def test_a_bomb_is_refused_before_much_of_it_is_decompressed(tmp_path, monkeypatch, compress):
    monkeypatch.setattr(items, "_INFLATION_SLACK_BYTES", 1 << 20)
    bombs = {
        "declared": entry("x", size=b"%011o\0" % (1 << 32)) + bytes(1 << 20),
        "of members": b"".join(entry(str(number), bytes(1 << 20)) for number in range(20)) + END,
        "behind the end": entry("x", b"1") + END + bytes(20 << 20),
        "of extended headers": entry("././@LongLink", bytes(500_000), tarfile.GNUTYPE_LONGNAME) * 40,
    }
    for what, data in bombs.items():
        path = tmp_path / "a.tgz"
        path.write_bytes(compress(data))
        limit = items.inflation_limit(path.stat().st_size)
        assert limit < len(data) or what == "declared"
        with pytest.raises(BadArchive, match="when decompressed; expected at most"):
            TarSource(path).list()


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(items, "MOST_MEMBERS", 10)
    assert len(contents(put(tmp_path, ".tar", b"".join(entry(str(n)) for n in range(10)) + END))) == 10
    archive = put(tmp_path, ".tar", b"".join(entry("link", kind=tarfile.SYMTYPE) for _ in range(11)) + END)
    with pytest.raises(BadArchive, match=r"too many members; expected at most 10\."):
        TarSource(archive).list()


SEED = tar_bytes({"a.txt": b"one", "dir/b.bin": bytes(range(256)) * 5, "n" * 150: b"long"}, tarfile.GNU_FORMAT)
SEED_PAX = tar_bytes({"a.txt": b"one", "ü" * 80: b"long"})
HEADERS = [at for at in range(0, len(SEED), 512) if SEED[at + 257 : at + 262] == b"ustar"]
PAX_HEADERS = [at for at in range(0, len(SEED_PAX), 512) if SEED_PAX[at + 257 : at + 262] == b"ustar"]


@pytest.mark.full
@pytest.mark.parametrize(("seed", "headers"), [(SEED, HEADERS), (SEED_PAX, PAX_HEADERS)], ids=["gnu", "pax"])
@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_headers_of_any_bytes_are_read_or_refused(tmp_path, seed, headers, data):
    changed = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        header = data.draw(st.sampled_from(headers))
        at = data.draw(st.integers(0, 511))
        new = data.draw(st.binary(min_size=1, max_size=12))
        changed[header + at : header + at + len(new)] = new
        if data.draw(st.booleans()):
            changed[header : header + 512] = checked(bytearray(changed[header : header + 512]))
    (tmp_path / "a.tar").write_bytes(changed)
    with contextlib.suppress(BadArchive):
        contents(tmp_path / "a.tar")


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=3000), start=st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd", b"BZh9"]))
def test_random_bytes_are_refused_or_an_archive(tmp_path, junk, start):
    (tmp_path / "a.tar").write_bytes(start + junk)
    with contextlib.suppress(BadArchive):
        assert contents(tmp_path / "a.tar") == {} or b"ustar" in junk


@given(name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_name_is_kept_or_refused_and_never_points_outside(tmp_path, name):
    archive = put(tmp_path, ".tar", tar_bytes({name: b"1"}))
    try:
        (path,) = contents(archive) or ("",)
    except BadArchive:
        assert name.startswith("/") or ".." in name.split("/") or not name.strip("./")
    else:
        inner = "/".join(part for part in name.split("/") if part not in ("", "."))
        assert path == (inner if not name.endswith("/") else path)
        assert not path.startswith("/")
        assert ".." not in path.split("/")


def test_a_malicious_zip_is_refused(tmp_path):
    for what, data in BAD_ZIPS.items():
        (tmp_path / "a.zip").write_bytes(data)
        with pytest.raises(BadArchive):
            print(what, contents(tmp_path / "a.zip"))


@pytest.mark.parametrize(("number", "name"), [(9, "Deflate64"), (93, "Zstandard"), (99, "AES"), (77, "method 77")])
def test_an_unsupported_compression_of_a_zip_is_named(tmp_path, number, name):
    (tmp_path / "a.zip").write_bytes(zip_of("cats/1.jpg", method=number))
    with pytest.raises(BadArchive, match=rf"'cats/1\.jpg' is compressed with {name}.*another program"):
        ZipSource(tmp_path / "a.zip").list()


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.integers(0, 200), st.binary(min_size=1, max_size=8), max_size=4), cut=st.integers(0, 40)
)
def test_a_zip_of_any_bytes_is_read_or_refused(tmp_path, changes, cut):
    data = bytearray(zip_of("a.txt", "b/c.txt"))
    for at, new in changes.items():
        data[-at - len(new) : len(data) - at] = new
    (tmp_path / "a.zip").write_bytes(data[: len(data) - cut] if cut < 20 else data)
    try:
        contents(tmp_path / "a.zip")
    except BadArchive:
        pass
    except ColabkitError as error:
        pytest.fail(f"{type(error).__name__}: {error}")

"""LMDBs as sources: the same values as the `lmdb` package reads, and typed errors for damaged databases."""

from __future__ import annotations

import pickle
import random
import struct

import lmdb
import pytest
from record_files import image, lmdb_of
from sampling import sampled
from source_contract import contents

from colabkit.errors import BadArchive, BadSource, ColabkitError, MissingPackage, TimedOut
from colabkit.storage.sources import lmdb_records
from colabkit.storage.sources.lmdb_records import LmdbSource

pytestmark = pytest.mark.timeout(60)


def noise(sizes, seed=1):
    """Return random values of the given sizes, with consecutive numbers as keys."""
    drawn = random.Random(seed)
    return {b"%06d" % number: drawn.randbytes(size) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("size", sampled([0, 1, 100, 1900, 2000, 2020, 2030, 2040, 4000, 4080, 4096, 100_000], 5))
def test_values_of_any_size_equal_those_that_lmdb_reads(tmp_path, size):
    values = noise(range(size, size + 40))
    path = lmdb_of(tmp_path / "db", values)
    assert contents(path) == {key.decode(): value for key, value in values.items()}


def test_a_relative_path_is_read(tmp_path, monkeypatch):
    lmdb_of(tmp_path / "db", {b"1": b"one"})
    monkeypatch.chdir(tmp_path)
    assert contents("db") == {"1": b"one"}


def test_a_database_after_many_changes_equals_what_lmdb_reads(tmp_path):
    drawn = random.Random(5)
    path = tmp_path / "db"
    with lmdb.open(str(path), map_size=1 << 28, sync=False) as environment:
        for _ in range(60):
            with environment.begin(write=True) as transaction:
                for _ in range(60):
                    key = b"%04d" % drawn.randrange(1500)
                    if drawn.random() < 0.4:
                        transaction.delete(key)
                    else:
                        transaction.put(key, drawn.randbytes(drawn.choice([0, 9, 500, 3000, 20_000])))
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        expected = {key.decode(): value for key, value in transaction.cursor()}
    assert len(expected) > 300
    assert contents(path) == expected


def test_a_tree_many_pages_deep_is_read_in_order(tmp_path):
    values = {b"%s%06d" % (b"k" * 400, number): b"%d" % number for number in range(2000)}
    path = lmdb_of(tmp_path / "db", values)
    with lmdb.open(str(path), readonly=True, lock=False) as environment:
        assert environment.stat()["depth"] >= 4
    assert contents(path) == {key.decode(): value for key, value in values.items()}


@pytest.mark.parametrize("options", [{"writemap": True}, {"subdir": False}])
def test_databases_written_with_other_options_are_read(tmp_path, options):
    values = noise([10, 5000])
    path = lmdb_of(tmp_path / "db.lmdb", values, **options)
    assert list(contents(path).values()) == list(values.values())


def test_images_are_the_samples_and_other_keys_are_reported(tmp_path):
    values = {b"cat/0001.jpg": image(1, "JPEG"), b"dog/a b.png": image(2), b"__len__": pickle.dumps(2), b"meta": b"{}"}
    path = lmdb_of(tmp_path / "db", values)
    listing = LmdbSource(path).list()
    assert contents(path) == {"cat/0001.jpg": image(1, "JPEG"), "dog/a b.png": image(2)}
    assert listing.skipped == (("__len__", "a pickle, which is never loaded"), ("meta", "not an image"))
    assert listing.columns == {}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_every_kind_of_image_is_recognized_by_its_first_bytes(tmp_path, kind):
    path = lmdb_of(tmp_path / "db", {b"1": image(1, kind), b"2": b"BMX and P5 and RIFF", b"3": b"text"})
    assert list(contents(path)) == ["1"]


def test_the_layout_of_scene_text_has_labels(tmp_path):
    values = {b"num-samples": b"3"}
    for number, word in ((1, "Straße"), (2, "猫"), (3, None)):
        values[b"image-%09d" % number] = image(number)
        if word is not None:
            values[b"label-%09d" % number] = word.encode()
    path = lmdb_of(tmp_path / "db", values)
    listing = LmdbSource(path).list()
    assert [item.path for item in listing.items] == ["image-000000001", "image-000000002", "image-000000003"]
    assert listing.columns == {"label": ("Straße", "猫", None)}
    assert listing.skipped == (("num-samples", "not an image"),)


def test_a_wrong_count_of_images_is_reported(tmp_path):
    values = {b"num-samples": b"7", b"image-000000001": image(1), b"label-000000001": b"one"}
    listing = LmdbSource(lmdb_of(tmp_path / "db", values)).list()
    assert ("num-samples", "its value is b'7', and the database has 1 image") in listing.skipped


def test_a_label_that_is_not_text_is_an_error(tmp_path):
    path = lmdb_of(tmp_path / "db", {b"image-1": image(1), b"label-1": b"\xff\xfe"})
    with pytest.raises(BadSource, match="is not text"):
        LmdbSource(path).list()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused(tmp_path, protocol):
    path = lmdb_of(tmp_path / "db", {b"0": pickle.dumps((b"image", 3), protocol=protocol)})
    with pytest.raises(BadSource, match="pickle"):
        LmdbSource(path).list()


def test_arrays_that_begin_like_pickles_are_samples(tmp_path):
    assert contents(lmdb_of(tmp_path / "db", {b"0": b"\x80\x04\x95\x00"})) == {"0": b"\x80\x04\x95\x00"}


def test_binary_keys_are_paths_in_hex(tmp_path):
    path = lmdb_of(tmp_path / "db", {b"\x00\x01": b"1", b"\xff\x80": b"2", b"text": b"3", b"/": b"4"})
    assert contents(path) == {"0001": b"1", "ff80": b"2", "text": b"3", "2f": b"4"}


def test_keys_with_the_same_path_are_an_error(tmp_path):
    with pytest.raises(BadSource, match="two samples are named"):
        LmdbSource(lmdb_of(tmp_path / "db", {b"a/b": b"1", b"/a//b": b"2"})).list()


def test_keys_that_point_outside_are_an_error(tmp_path):
    with pytest.raises(BadSource, match="etc"):
        LmdbSource(lmdb_of(tmp_path / "db", {b"../../etc/x": b"1"})).list()


def test_nested_databases_are_reported(tmp_path):
    path = tmp_path / "db"
    with lmdb.open(str(path), max_dbs=2, map_size=1 << 20) as environment:
        inner = environment.open_db(b"inner")
        with environment.begin(write=True) as transaction:
            transaction.put(b"1", b"1", db=inner)
    with pytest.raises(BadSource, match=r"no samples \(skipped 'inner': a nested database"):
        LmdbSource(path).list()
    with lmdb.open(str(path), max_dbs=2) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"2", b"2")
    assert contents(path) == {"2": b"2"}


# LMDB's flags for reversed keys, several values per key, and integer keys.
@pytest.mark.parametrize("flags", [2, 4, 8])
def test_a_database_with_flags_is_refused(tmp_path, flags):
    path = lmdb_of(tmp_path / "db", {b"1": b"1"}, subdir=False)
    data = bytearray(path.read_bytes())
    for page in range(2):
        struct.pack_into("<H", data, page * 4096 + 16 + 24 + 48 + 4, flags)
    path.write_bytes(data)
    with pytest.raises(BadArchive, match="unsupported flags"):
        LmdbSource(path).list()


def test_a_missing_lmdb_package_is_named_with_its_install_command(tmp_path, monkeypatch):
    path = lmdb_of(tmp_path / "db", {b"1": b"1"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"Run pip install lmdb\.$"):
        LmdbSource(path).list()


def test_a_silent_library_times_out(tmp_path, monkeypatch):
    path = lmdb_of(tmp_path / "db", {b"1": b"1"})
    (tmp_path / "child.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(lmdb_records, "_CHILD", tmp_path / "child.py")
    monkeypatch.setattr(lmdb_records, "STALLED_S", 0.1)
    with pytest.raises(TimedOut, match="listed no key for"):
        LmdbSource(path).list()


def test_an_empty_database_is_an_error(tmp_path):
    with pytest.raises(BadSource, match="no samples"):
        LmdbSource(lmdb_of(tmp_path / "db", {})).list()


@pytest.mark.parametrize("data", [b"", b"\0", b"SQLite format 3\0" * 999, bytes(1 << 16)])
def test_files_that_are_not_lmdb_are_refused(tmp_path, data):
    path = tmp_path / "a.lmdb"
    path.write_bytes(data)
    with pytest.raises(BadArchive):
        LmdbSource(path).list()


@pytest.mark.parametrize("rounds", [8, pytest.param(40, marks=pytest.mark.full)])
def test_a_truncated_database_raises_a_typed_error_or_is_read_completely(tmp_path, rounds):
    values = noise([50, 3000, 9000, 200] * 60)
    whole = lmdb_of(tmp_path / "db", values, subdir=False).read_bytes()
    drawn = random.Random(3)
    refused = 0
    for _ in range(rounds):
        path = tmp_path / "cut.lmdb"
        path.write_bytes(whole[: drawn.randrange(len(whole))])
        try:
            assert contents(path) == {key.decode(): value for key, value in values.items()}
        except BadArchive:
            refused += 1
    assert refused > 0.9 * rounds


@pytest.mark.parametrize("rounds", [8, pytest.param(40, marks=pytest.mark.full)])
def test_no_flipped_bit_crashes_hangs_or_reads_past_the_file(tmp_path, rounds):
    values = noise([50, 3000, 9000, 200] * 60)
    whole = lmdb_of(tmp_path / "db", values, subdir=False).read_bytes()
    drawn = random.Random(4)
    refused = 0
    for number in range(rounds):
        data = bytearray(whole)
        # Damage the first bytes of pages, which include their headers.
        for _ in range(1 + number % 5):
            data[drawn.randrange(len(data) // 4096) * 4096 + drawn.randrange(120)] ^= 1 << drawn.randrange(8)
        path = tmp_path / "flipped.lmdb"
        path.write_bytes(data)
        try:
            found = contents(path)
        except ColabkitError:
            refused += 1
        else:
            assert sum(map(len, found.values())) <= len(whole)
    assert refused


@pytest.mark.full
def test_pages_that_refer_to_each_other_do_not_loop_forever(tmp_path):
    path = lmdb_of(tmp_path / "db", {b"%05d" % number: bytes(90) for number in range(3000)}, subdir=False)
    data = bytearray(path.read_bytes())
    pages = range(0, len(data), 4096)
    branches = [at for at in pages if struct.unpack_from("<H", data, at + 10)[0] & 31 == 1]
    leaves = [at // 4096 for at in pages if struct.unpack_from("<H", data, at + 10)[0] & 31 == 2]
    assert branches
    assert leaves
    for target in (leaves[0], branches[0] // 4096, 0, (1 << 48) - 1):
        for branch in branches:
            lower = struct.unpack_from("<H", data, branch + 12)[0]
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", data, branch + 16):
                struct.pack_into("<HHH", data, branch + node, target & 65535, target >> 16 & 65535, target >> 32)
        path.write_bytes(data)
        with pytest.raises(BadArchive):
            LmdbSource(path).list()

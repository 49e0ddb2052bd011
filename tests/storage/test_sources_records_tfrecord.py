"""TFRecord files as sources: files of a real writer are read, and every flipped bit raises a typed error."""

from __future__ import annotations

import gzip
import os
import random
import struct
import sys
import zlib

import pytest
import tfrecord
from record_files import delimited, example, framed, image, masked
from source_contract import contents

from colabkit.errors import BadArchive, BadSource, MissingPackage
from colabkit.storage.sources.registry import open_records
from colabkit.storage.sources.tfrecord import TfRecordSource

pytestmark = pytest.mark.timeout(60)


def source_of(path, *records):
    path.write_bytes(framed(*records))
    return TfRecordSource(str(path), [path])


def test_a_file_of_a_real_writer_is_read(tmp_path):
    writer = tfrecord.TFRecordWriter(str(tmp_path / "birds.tfrecord"))
    for number in range(20):
        writer.write(
            {
                "image/encoded": (image(number), "byte"),
                "image/filename": (f"{number}.png".encode(), "byte"),
                "label": (number - 10, "int"),
                "weight": (number / 2, "float"),
                "box": ([0.5, 1.5], "float"),
            }
        )
    writer.close()
    source = open_records(tmp_path / "birds.tfrecord")
    assert contents(source) == {f"birds/{number:08d}": image(number) for number in range(20)}
    assert source.list().columns == {
        "box": ([0.5, 1.5],) * 20,
        "image/filename": tuple(f"{number}.png" for number in range(20)),
        "label": tuple(range(-10, 10)),
        "weight": tuple(number / 2 for number in range(20)),
    }


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ({"image__encoded": [image(1)], "image": [image(2)]}, 1),
        ({"image": [b"cat.jpg"], "data": [image(3)]}, 3),
        ({"image": [7], "jpeg": [image(1)]}, 1),
        ({"mask": [image(1)], "encoded": [image(2)]}, 2),
        ({"picture": [image(3)], "name": [b"x"], "more": [image(1), image(2)]}, 3),
    ],
)
def test_the_payload_is_chosen_by_one_rule(tmp_path, features, chosen):
    assert contents(source_of(tmp_path / "a.tfrecord", example(**features))) == {"a/00000000": image(chosen)}


def test_raw_pixels_are_a_payload(tmp_path):
    raw = bytes(range(48))
    source = source_of(tmp_path / "a.tfrecord", example(image_raw=[raw], height=[4], width=[4], depth=[3]))
    assert contents(source) == {"a/00000000": raw}
    assert source.list().columns == {"depth": (3,), "height": (4,), "width": (4,)}


@pytest.mark.parametrize(
    "features", [{}, {"label": [1]}, {"a": [image(1)], "b": [image(2)]}, {"image": [b"cat.jpg"]}, {"x": [b"\xff"]}]
)
def test_records_without_one_image_are_an_error_that_names_the_features(tmp_path, features):
    with pytest.raises(BadSource, match="images among " + (", ".join(features) or "no features")):
        source_of(tmp_path / "a.tfrecord", example(**features)).list()


def test_the_first_record_decides_and_records_without_its_feature_are_reported(tmp_path):
    first = example(image=[image(1)], mask=[image(2)])
    source = source_of(tmp_path / "a.tfrecord", first, example(mask=[image(3)]), example(image=[b""]))
    assert contents(source) == {"a/00000000": image(1), "a/00000002": b""}
    assert source.list().skipped == (
        ("a/00000001", "its feature 'image' is not a single bytes value"),
        ("mask", "bytes that are not text"),
    )


def test_columns_hold_lists_if_one_record_has_several_values(tmp_path):
    source = source_of(
        tmp_path / "a.tfrecord",
        example(image=[image(1)], box=[1.0], tag=[b"a"], label=[1], words=["ß".encode()]),
        example(image=[image(2)], box=[1.0, 2.0], tag=[b"a", b"b"], label=[], words=[]),
        example(image=[image(3)], label=[-3]),
    )
    assert source.list().columns == {
        "box": ([1.0], [1.0, 2.0], None),
        "label": (1, None, -3),
        "tag": (["a"], ["a", "b"], None),
        "words": ("ß", None, None),
    }


def test_features_too_large_for_columns_are_omitted(tmp_path):
    source = source_of(tmp_path / "a.tfrecord", example(image=[image(1)], pixels=[1] * 5000, raw=[b"\0\0"], label=[3]))
    assert source.list().columns == {"label": (3,)}
    assert [name for name, _ in source.list().skipped] == ["pixels", "raw"]


def test_a_column_is_omitted_if_one_of_its_values_is_not_text(tmp_path):
    examples = [example(image=[image(1)], name=[name]) for name in (b"a", b"\xff", b"c")]
    source = source_of(tmp_path / "a.tfrecord", *examples)
    assert source.list().columns == {}
    assert source.list().skipped == (("name", "bytes that are not text"),)


def test_unknown_fields_are_ignored(tmp_path):
    record = delimited(9, b"future") + example(image=[image(1)]) + delimited(2, b"feature lists")
    assert contents(source_of(tmp_path / "a.tfrecord", record)) == {"a/00000000": image(1)}


def test_splits_in_file_names_become_a_column(tmp_path):
    for name in ("birds-train.tfrecord-00000-of-00001", "birds-validation.tfrecord-00000-of-00001"):
        source_of(tmp_path / name, example(image=[image(1)]))
    (tmp_path / "features.json").write_text("{}")
    listing = open_records(tmp_path).list()
    assert [item.path for item in listing.items] == [
        "birds-train-00000-of-00001/00000000",
        "birds-validation-00000-of-00001/00000000",
    ]
    assert listing.columns == {"split": ("train", "validation")}


def test_a_feature_named_split_has_priority(tmp_path):
    source = source_of(tmp_path / "train.tfrecord", example(image=[image(1)], split=[b"holdout"]))
    assert source.list().columns == {"split": ("holdout",)}


@pytest.mark.full
def test_every_flipped_bit_is_an_error(tmp_path):
    path = tmp_path / "a.tfrecord"
    whole = framed(*(example(image=[image(number)], label=[number]) for number in range(3)))
    drawn = random.Random(2)
    for at in [*range(40), *(drawn.randrange(len(whole)) for _ in range(400))]:
        data = bytearray(whole)
        data[at] ^= 1 << drawn.randrange(8)
        path.write_bytes(data)
        with pytest.raises(BadArchive, match=r"a\.tfrecord"):
            TfRecordSource("records", [path]).list()


@pytest.mark.full
def test_a_truncated_file_is_an_error_unless_it_ends_with_a_record(tmp_path):
    path = tmp_path / "a.tfrecord"
    records = [example(image=[image(number)]) for number in (0, 2, 4)]
    whole = framed(*records)
    ends = {len(framed(*records[:count])) for count in (1, 2, 3)}
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        source = TfRecordSource("records", [path])
        if size in ends:
            assert contents(source)
        else:
            with pytest.raises(BadArchive):
                source.list()


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, (1 << 30) + 1, 1000])
def test_wrong_lengths_are_refused_without_allocating_memory(tmp_path, length):
    path = tmp_path / "a.tfrecord"
    head = struct.pack("<Q", length)
    path.write_bytes(head + struct.pack("<I", masked(head)) + b"x" * 100)
    with pytest.raises(BadArchive, match=f"a record of {length:,} bytes"):
        TfRecordSource("records", [path]).list()
    os.truncate(path, 1 << 33)
    if length > 1 << 30:
        with pytest.raises(BadArchive, match=f"a record of {length:,} bytes"):
            TfRecordSource("records", [path]).list()


@pytest.mark.parametrize(
    "record", [b"\xff" * 50, b"\x0a\xff\xff\xff\xff\x0f", delimited(1, delimited(1, b"\x0a\x05a"))]
)
def test_records_other_than_examples_are_an_error(tmp_path, record):
    with pytest.raises(BadSource, match=r"'a/00000000' is not a tf\.train\.Example"):
        source_of(tmp_path / "a.tfrecord", record).list()


def test_a_feature_name_that_is_not_text_is_an_error(tmp_path):
    entry = delimited(1, b"\xff\xfe") + delimited(2, delimited(1, delimited(1, b"x")))
    with pytest.raises(BadSource):
        source_of(tmp_path / "a.tfrecord", delimited(1, delimited(1, entry))).list()


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compressed_file_is_refused_with_advice(tmp_path, pack):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(pack(framed(example(image=[image(1)]))))
    with pytest.raises(BadArchive, match="Decompress it"):
        TfRecordSource("records", [path]).list()


def test_a_record_whose_length_looks_like_gzip_is_read(tmp_path):
    long = b"\xff" * (0x8B1F - len(example(image=[b"\xff" * 0x8B00])) + 0x8B00)
    record = example(image=[long])
    assert struct.pack("<Q", len(record))[:2] == b"\x1f\x8b"
    assert contents(source_of(tmp_path / "a.tfrecord", record)) == {"a/00000000": long}


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(BadArchive, match="0 bytes"):
        source_of(tmp_path / "a.tfrecord").list()


@pytest.mark.parametrize(("missing", "install"), [("google_crc32c", "google-crc32c"), ("google.protobuf", "protobuf")])
def test_a_missing_package_is_named_with_its_install_command(tmp_path, monkeypatch, missing, install):
    source = source_of(tmp_path / "a.tfrecord", example(image=[image(1)]))
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)

    class BlockingFinder:
        @staticmethod
        def find_spec(name, *_):
            if name.startswith(missing):
                raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(sys, "meta_path", [BlockingFinder, *sys.meta_path])
    with pytest.raises(MissingPackage, match=f"pip install {install}"):
        source.list()

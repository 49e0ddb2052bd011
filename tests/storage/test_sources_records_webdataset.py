"""WebDataset shards as sources: the same samples as webdataset reads, and typed errors for damaged shards."""

from __future__ import annotations

import json
import random
import tarfile

import numpy as np
import pytest
import webdataset
from record_files import image, shards_of, tar_of
from source_contract import contents

from colabkit.errors import BadArchive, BadSource, ColabkitError
from colabkit.storage.sources.registry import open_records
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.webdataset import WebDatasetSource

pytestmark = pytest.mark.timeout(60)


def source_of(*files):
    return WebDatasetSource("shards", files)


def test_shards_of_the_real_writer_are_read_as_webdataset_reads_them(tmp_path):
    pattern = str(tmp_path / "birds-train-%06d.tar")
    samples = [
        {"__key__": f"class{number % 3}/{number:04d}", "jpg": image(number, "JPEG"), "cls": number % 7,
         "txt": f"bird {number} ß", "json": {"weight": number / 2, "boxes": [[1, 2], [3, 4]], "sex": None},
         "npy": np.arange(4), "mask.png": image(number)}
        for number in range(50)
    ]  # fmt: skip
    shards_of(pattern, samples, 20)
    source = open_records(str(tmp_path / "birds-train-{000000..000002}.tar"))
    listing = source.list()
    theirs = [*webdataset.WebDataset(sorted(map(str, tmp_path.glob("*.tar"))), shardshuffle=False)]
    names = [f"birds-train-{number // 20:06d}/{one['__key__']}" for number, one in enumerate(theirs)]
    order = sorted(range(50), key=names.__getitem__)
    assert contents(source) == {names[row]: theirs[row]["jpg"] for row in order}
    assert [item.path for item in listing.items] == [names[row] for row in order]
    assert listing.columns == {
        "cls": tuple(int(theirs[row]["cls"]) for row in order),
        "json.boxes": ([[1, 2], [3, 4]],) * 50,
        "json.sex": (None,) * 50,
        "json.weight": tuple(json.loads(theirs[row]["json"])["weight"] for row in order),
        "split": ("train",) * 50,
        "txt": tuple(theirs[row]["txt"].decode() for row in order),
    }
    assert [name for name, _ in listing.skipped] == ["*.mask.png", "*.npy"]


@pytest.mark.parametrize(
    ("members", "payload"),
    [
        (["a.cls", "a.jpg", "a.png"], "a.jpg"),
        (["a.png", "a.jpeg"], "a.jpeg"),
        (["a.input.png", "a.target.png"], "a.input.png"),
        (["a.mask.png", "a.png"], "a.png"),
        (["a.JPG", "a.json"], "a.JPG"),
        (["a.x.npy", "a.npy", "a.bin"], "a.npy"),
        (["a.wav", "a.txt", "a.cls"], "a.wav"),
        (["a.txt"], "a.txt"),
    ],
)
def test_the_payload_is_chosen_by_one_rule(tmp_path, members, payload):
    content = {"cls": b"1", "json": b"{}", "txt": b"text"}
    shard = tar_of(tmp_path / "s.tar", *((name, content.get(name[2:], name.encode())) for name in members))
    assert contents(source_of(shard)) == {"s/a": content.get(payload[2:], payload.encode())}


def test_shards_with_an_ambiguous_payload_are_an_error(tmp_path):
    with pytest.raises(BadSource, match=r"members \.cls, \.txt"):
        source_of(tar_of(tmp_path / "a.tar", ("1.cls", b"1"), ("1.txt", b"1"))).list()
    with pytest.raises(BadSource, match=r"members \.flac, \.wav"):
        source_of(tar_of(tmp_path / "b.tar", ("1.flac", b"1"), ("1.wav", b"1"))).list()


def test_samples_without_a_payload_and_unread_members_are_reported(tmp_path):
    shard = tar_of(
        tmp_path / "s.tar",
        *(("1.jpg", b"1"), ("1.cls", b"4"), ("2.cls", b"5"), ("3.jpg", b"3"), ("3.json", b'{"a": 1, "b": {"c": 2}}')),
        *((".hidden", b""), ("__meta__", b""), ("README", b""), ("._1.jpg", b"")),
    )
    listing = source_of(shard).list()
    assert [item.path for item in listing.items] == ["s/1", "s/3"]
    assert listing.columns == {"cls": (4, None), "json.a": (None, 1)}
    assert [name for name, _ in listing.skipped] == [
        *("json.b", "s/._1.jpg", "s/.hidden", "s/2", "s/README", "s/__meta__"),
    ]


def test_equal_keys_in_different_shards_are_different_samples(tmp_path):
    shards = [tar_of(tmp_path / f"{name}.tar", ("1.jpg", name.encode()), ("1.cls", b"1")) for name in "ab"]
    assert contents(source_of(*shards)) == {"a/1": b"a", "b/1": b"b"}


def test_members_of_a_sample_that_are_not_adjacent_are_an_error(tmp_path):
    shard = tar_of(tmp_path / "s.tar", ("1.jpg", b"1"), ("2.jpg", b"2"), ("1.png", b"3"))
    with pytest.raises(BadSource, match="two samples are named 's/1'"):
        source_of(shard).list()


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["x-train-0", "x-val-0", "x-test-0"], ("test", "train", "val")),
        (["train_0", "validation_0", "other"], (None, "train", "validation")),
        (["training", "trainer"], (None, "training")),
        (["train-test", "b"], None),
        (["a", "b"], None),
    ],
)
def test_splits_are_recognized_by_words_in_the_names(tmp_path, names, splits):
    shards = [tar_of(tmp_path / f"{name}.tar", ("1.jpg", b"1"), ("1.cls", b"1")) for name in names]
    columns = source_of(*shards).list().columns
    by_path = sorted(names)
    assert columns.get("split") == (splits and tuple(splits))
    assert len(by_path) == len(columns["cls"])


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("1.cls", b"cat", "a whole number"),
        ("1.cls", b"9" * 5000, "a whole number"),
        ("1.txt", b"\xff", "not UTF-8"),
        ("1.json", b"{", "not valid JSON"),
        ("1.json", b"[" * 100_000, "not valid JSON"),
        ("1.json", b"[1]", "a list in JSON"),
        ("1.txt", b"a" * ((1 << 20) + 1), "at most 1"),
    ],
)
def test_an_invalid_label_is_an_error_that_names_the_sample(tmp_path, name, data, reason):
    shard = tar_of(tmp_path / "s.tar", ("1.jpg", b"1"), (name, data))
    with pytest.raises(BadSource, match=reason) as caught:
        source_of(shard).list()
    assert "'s/1'" in str(caught.value)


def test_values_too_large_for_columns_are_omitted(tmp_path):
    keys = {"long": list(range(5000)), "deep": [[[1], 2], 3], "short": "a", "dicts": [{"a": 1}]}
    shard = tar_of(tmp_path / "s.tar", ("1.jpg", b"1"), ("1.json", json.dumps(keys).encode()))
    listing = source_of(shard).list()
    assert listing.columns == {"json.deep": ([[[1], 2], 3],), "json.short": ("a",)}
    assert [name for name, _ in listing.skipped] == ["json.dicts", "json.long"]


def test_too_many_columns_are_refused_before_they_fill_the_memory(tmp_path):
    members = []
    for number in range(300):
        members += [(f"{number}.jpg", b"1"), (f"{number}.json", b'{"key%d": 1}' % number)]
    with pytest.raises(BadSource, match="would be column 257; expected at most 256 columns"):
        source_of(tar_of(tmp_path / "s.tar", *members)).list()


def test_a_single_tar_is_a_shard_only_if_adjacent_members_share_a_stem(tmp_path):
    pairs = tar_of(tmp_path / "a.tar", ("x/", b""), ("1.jpg", b"1"), ("1.cls", b"1"))
    assert isinstance(open_records(pairs), WebDatasetSource)
    for members in (["0.rgb.png", "0.depth.png"], ["0.0.jpg", "0.1.jpg", "0.cls"]):
        views = tar_of(tmp_path / "c.tar", *((name, b"1") for name in members))
        assert isinstance(open_records(views), WebDatasetSource)
    names_with_dots = ["train/cat.0.jpg", "train/cat.1.jpg", "train/dog.0.jpg", "train/dog.1.jpg"]
    apart = [["1.jpg", "2.jpg"], ["main.c", "main.h"], ["1.jpg", "2.jpg", "1.cls"], ["a/1.jpg", "b/1.cls"]]
    for members in (names_with_dots, *apart):
        plain = tar_of(tmp_path / "b.tar", *((name, b"1") for name in members))
        assert open_records(plain) is None
        assert isinstance(open_records([plain]), WebDatasetSource)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_shard_is_refused_with_advice(tmp_path, mode):
    path = tmp_path / "s.tar"
    with tarfile.open(path, mode) as archive:
        archive.add(__file__, "1.jpg")
    with pytest.raises(BadArchive, match="Extract or decompress it"):
        source_of(path).list()
    assert open_records(path) is None
    plain = TarSource(path)
    assert plain.list().items
    plain.close()


def test_paths_outside_a_shard_are_refused(tmp_path):
    for name in ("../1.jpg", "/etc/1.jpg", "a/../../1.jpg"):
        with pytest.raises(BadArchive, match="inside the archive"):
            source_of(tar_of(tmp_path / "s.tar", (name, b"1"))).list()


def test_a_shard_without_samples_is_an_error_unless_others_have_some(tmp_path):
    empty = tar_of(tmp_path / "a.tar")
    with pytest.raises(BadSource, match="no samples"):
        source_of(empty).list()
    assert contents(source_of(empty, tar_of(tmp_path / "b.tar", ("1.jpg", b"1")))) == {"b/1": b"1"}


def test_a_truncated_shard_is_named_in_the_error(tmp_path):
    whole = tar_of(tmp_path / "a.tar", *((f"{n}.{end}", b"1" * 700) for n in range(4) for end in ("jpg", "wav")))
    data = whole.read_bytes()
    end = len(data.rstrip(b"\0"))
    cut = tmp_path / "cut.tar"
    for size in range(0, end, 97):
        cut.write_bytes(data[:size])
        with pytest.raises(BadArchive, match=r"cut\.tar"):
            source_of(whole, cut).list()


def test_mutated_shards_are_a_typed_error_or_samples_of_the_listed_size(tmp_path):
    members = [(f"{n}.{end}", image(n) if end == "png" else b"%d" % n) for n in range(6) for end in ("cls", "png")]
    whole = tar_of(tmp_path / "a.tar", *members).read_bytes()
    drawn = random.Random(11)
    refused = 0
    path = tmp_path / "b.tar"
    for _ in range(400):
        data = bytearray(whole)
        header = drawn.choice([at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"])
        data[header + drawn.randrange(512)] ^= 1 << drawn.randrange(8)
        path.write_bytes(data)
        try:
            found = contents(source_of(path))
        except ColabkitError:
            refused += 1
        else:
            assert sum(map(len, found.values())) <= len(whole)
    assert refused > 200

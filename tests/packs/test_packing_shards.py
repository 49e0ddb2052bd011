"""A pack of several shards stores every sample once and in order."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packed_files import ROW, assert_same, content, flip_byte, identity, sharded, shards_beside
from packing_tasks import Noise
from PIL import Image
from strikes import ChangeHook, fill_disk
from trees import leftovers

from colabkit.errors import BadImage, BadSource, Corrupt, InvalidOption, SourceMissing, TargetExists
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify


def test_samples_are_stored_once_and_in_order_across_shards_and_splits(tmp_path, split_tree):
    report = sharded(split_tree, tmp_path / "p.h5")
    assert report.splits == {"train": 6, "val": 6, "test": 3}
    info = read_pack(report.path)
    assert [(one.name, dict(one.splits)) for one in info.shards] == [
        ("p-00000.h5", {"train": 3}),
        ("p-00001.h5", {"train": 3, "val": 1}),
        ("p-00002.h5", {"val": 4}),
        ("p-00003.h5", {"val": 1, "test": 3}),
    ]
    assert (report.shards, report.reused) == (4, False)
    assert report.pack_bytes == sum(path.stat().st_size for path in tmp_path.glob("p*.h5"))
    assert "in 4 shards" in repr(report)
    assert_same(report.path, sharded(split_tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "source"},
        {"encoding": "jpeg", "quality": 70},
        {"encoding": "jpeg", "size": 8},
        {"size": 4, "channels": 1},
        {"fields": {"Z": len, "path": "path"}},
        {"encoding": "source", "fields": {"note": lambda path: path * 3}},
        {"labels": None},
        {"labels": lambda path: [float(len(path)), 2.0]},
        {"splits": {"train": 0.5, "test": 0.5}},
    ],
)
def test_every_encoding_and_field_is_stored_in_shards(tmp_path, small_tree, options):
    whole = sharded(small_tree, tmp_path / "whole.h5", None, **options)
    report = sharded(small_tree, tmp_path / "p.h5", 40, **options)
    assert report.shards > 1
    assert_same(report.path, whole.path)


def test_arrays_are_stored_in_shards(tmp_path):
    random = np.random.default_rng(1)
    parts = {
        split: {"X": random.normal(size=(count, 3, 2)), "Y": random.integers(0, 5, count), "name": ["ä" * 9] * count}
        for split, count in (("train", 50), ("test", 7))
    }
    report = sharded(parts, tmp_path / "p.h5", 20 * 48)
    assert report.shards == 3
    assert_same(report.path, sharded(parts, tmp_path / "whole.h5", None).path)
    assert sharded(parts, tmp_path / "p.h5", 20 * 48).reused


@pytest.mark.parametrize("options", [{}, {"encoding": "jpeg"}])
def test_datasets_are_stored_in_shards_of_about_the_requested_size(tmp_path, options):
    whole = sharded(Noise(), tmp_path / "whole.h5", None, **options)
    report = sharded(Noise(), tmp_path / "p.h5", whole.pack_bytes // 4, **options)
    assert report.shards in (3, 4)
    assert_same(report.path, whole.path)


@pytest.mark.parametrize("encoding", ["raw", "source", "jpeg"])
def test_shards_have_about_the_requested_size(tmp_path, encoding):
    random = np.random.default_rng(5)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    for number in range(60):
        pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "tree" / "a" / f"{number}.png")
    report = sharded(tmp_path / "tree", tmp_path / "p.h5", 100_000, encoding=encoding)
    sizes = [path.stat().st_size for path in shards_beside(report.path)]
    assert report.shards == len(sizes) > 2
    assert all(70_000 < size < 140_000 for size in sizes), sizes


def test_a_pack_smaller_than_a_shard_has_one_shard(tmp_path, small_tree):
    report = sharded(small_tree, tmp_path / "p.h5", 1 << 30)
    assert (report.shards, [path.name for path in shards_beside(report.path)]) == (1, ["p-00000.h5"])


def test_a_shard_has_at_least_one_sample(tmp_path, small_tree):
    report = sharded(small_tree, tmp_path / "p.h5", 1)
    assert report.shards == 6
    assert [dict(one.splits) for one in read_pack(report.path).shards] == [{"train": 1}] * 6


def break_some(tree: Path, *names: str) -> None:
    for name in names:
        (tree / name).write_bytes(b"no image")


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
@pytest.mark.parametrize("encoding", ["raw", "source", "jpeg"])
def test_bad_files_in_shards_are_listed_as_for_one_file(tmp_path, split_tree, on_bad, encoding):
    break_some(split_tree, "train/ants/001.png", "val/ants/000.png", "test/cats/000.png")
    options = {"on_bad": on_bad, "max_bad": 3, "encoding": encoding}
    report = sharded(split_tree, tmp_path / "p.h5", 300, **options)
    assert report.shards > 2
    assert {path for path, _ in report.bad} == {"train/ants/001.png", "val/ants/000.png", "test/cats/000.png"}
    info = read_pack(report.path)
    expected = read_pack(sharded(split_tree, tmp_path / "whole.h5", None, **options).path)
    assert sorted(info.meta["bad"], key=str) == sorted(expected.meta["bad"], key=str)
    assert info.meta["splits"] == expected.meta["splits"]
    if encoding == "raw":
        assert content(report.path) == content(expected.path)


def test_a_shard_with_only_bad_files_is_omitted(tmp_path, split_tree):
    break_some(split_tree, "train/ants/000.png", "train/ants/001.png")
    report = sharded(split_tree, tmp_path / "p.h5", 2 * ROW, on_bad="skip", max_bad=2)
    assert report.splits == {"train": 4, "val": 6, "test": 3}
    assert len(report.bad) == 2
    assert "p-00000.h5" not in [path.name for path in shards_beside(report.path)]
    assert_same(report.path, sharded(split_tree, tmp_path / "whole.h5", None, on_bad="skip", max_bad=2).path)
    for path in (split_tree / "train").rglob("*.png"):
        path.write_bytes(b"none")
    shutil.rmtree(split_tree / "val")
    shutil.rmtree(split_tree / "test")
    with pytest.raises(BadSource, match="none of 6 samples could be packed"):
        sharded(split_tree, tmp_path / "none.h5", 2 * ROW, on_bad="skip", max_bad=6, size=4)
    assert leftovers(tmp_path) == []


def test_max_bad_counts_the_bad_files_of_all_shards_including_reused_ones(tmp_path, split_tree):
    break_some(split_tree, "train/ants/001.png", "val/ants/000.png", "test/cats/000.png")
    for _ in range(2):
        with pytest.raises(BadImage, match=r"at least 3 bad files.*at most 2"):
            sharded(split_tree, tmp_path / "p.h5", on_bad="skip", max_bad=2)
    assert shards_beside(tmp_path / "p.h5") == []
    assert not (tmp_path / "p.h5").exists()


def test_verify_names_a_missing_swapped_or_damaged_shard(tmp_path, split_tree):
    path = sharded(split_tree, tmp_path / "p.h5").path
    one, other = shards_beside(path)[1:3]
    info = read_pack(other)
    offset = info.data_sets["X_val"].offset + 2 * ROW + 7
    flip_byte(other, offset, 4)
    report = verify(path, progress=False)
    assert report.damaged == (("val", 3),)
    assert "'p-00002.h5'" in repr(report)
    away = one.rename(tmp_path / "away.h5")
    with pytest.raises(SourceMissing, match=r"p-00001\.h5"):
        verify(path, progress=False)
    shutil.copy(shards_beside(path)[0], one)
    with pytest.raises(Corrupt, match=r"p-00001\.h5' belongs to another pack"):
        verify(path, progress=False)
    one.write_bytes(away.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=r"p-00001\.h5"):
        verify(path, progress=False)
    with pytest.raises(TargetExists, match="damaged"):
        sharded(split_tree, path)
    assert sharded(split_tree, path, overwrite=True).splits == {"train": 6, "val": 6, "test": 3}
    assert verify(path, progress=False).is_good


def test_the_same_call_again_changes_no_files(tmp_path, split_tree, file_hook):
    sharded(split_tree, tmp_path / "p.h5")
    before = {path: identity(path) for path in tmp_path.glob("p*.h5")}
    changes = ChangeHook(0, fill_disk)
    file_hook(changes)
    report = sharded(split_tree, tmp_path / "p.h5")
    assert (report.reused, report.shards, changes.count) == (True, 4, 0)
    assert {path: identity(path) for path in tmp_path.glob("p*.h5")} == before


def test_the_size_of_shards_may_be_text_with_a_unit(tmp_path, image_tree):
    assert pack(image_tree, tmp_path / "p.h5", shard_bytes="1 kB", progress=False).shards == 2
    with pytest.raises(InvalidOption, match="shard_bytes='a lot'; expected a number of bytes"):
        pack(image_tree, tmp_path / "q.h5", shard_bytes="a lot", progress=False)


def test_equal_files_packed_again_elsewhere_have_the_same_fingerprint_and_other_pixels_another(tmp_path, split_tree):
    copy = tmp_path / "elsewhere" / split_tree.name
    shutil.copytree(split_tree, copy, copy_function=shutil.copyfile)
    first, second = (sharded(tree, tmp_path / name).path for tree, name in ((split_tree, "p.h5"), (copy, "q.h5")))
    assert read_pack(first).seal != read_pack(second).seal, "the location differs"
    assert read_pack(first).fingerprint == read_pack(second).fingerprint
    path = next(copy.rglob("*.png"))
    size = path.stat().st_size
    with Image.open(path) as image:
        changed = Image.eval(image.copy(), lambda value: 255 - value)
    changed.save(path)
    data = path.read_bytes()
    assert len(data) <= size, "the size shows that the file has changed"
    path.write_bytes(data + b"\0" * (size - len(data)))
    third = sharded(copy, tmp_path / "r.h5").path
    assert read_pack(third).fingerprint[:16] == read_pack(first).fingerprint[:16]
    assert read_pack(third).fingerprint != read_pack(first).fingerprint


def test_an_index_without_digests_of_samples_is_identified_by_its_seal(tmp_path, split_tree):
    info = read_pack(sharded(split_tree, tmp_path / "p.h5").path)
    older = replace(info, meta={name: value for name, value in info.meta.items() if name != "samples"})
    assert older.fingerprint == info.seal[:32]

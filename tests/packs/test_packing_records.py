"""`pack()` takes samples, labels, splits and fields from record files, archives and tables."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
from far_mounts import FuseMount, has_fuse
from packed_files import opened
from picture_sets import NAMES, PIXELS, archive_of, database, png, tf_records, web_shards
from record_files import tar_of
from trees import make_tree, needs

from colabkit.errors import BadSource, InvalidOption
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.packing.api import pack
from colabkit.storage.staging import places


@pytest.fixture(autouse=True)
def _local_storage(near_storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put local copies that would be in RAM into the test's folder."""
    monkeypatch.setattr(places, "TMPFS", near_storage)


def numbers_of(found: Pack, split: str) -> list[int]:
    """Return the numbers of the pictures in a split, in order."""
    number = {pixels.tobytes(): number for number, pixels in enumerate(PIXELS)}
    samples = (found[split][row] for row in range(len(found[split])))
    images = (sample[0] if isinstance(sample, tuple) else sample for sample in samples)
    return [number[image.permute(1, 2, 0).numpy().tobytes()] for image in images]


KINDS: dict[str, Callable[[Path], Path]] = {"webdataset": web_shards, "tfrecord": tf_records, "lmdb": database}


def test_webdataset_shards_give_labels_splits_and_fields(tmp_path):
    found = opened(web_shards(tmp_path / "s"), tmp_path / "p.h5", fields={"word": "txt", "age": "json.age"})
    assert (found.splits, found.classes) == ({"train": 18, "test": 6}, ("0", "1", "2"))
    assert numbers_of(found, "train") == list(range(18))
    assert numbers_of(found, "test") == list(range(18, 24))
    for n in range(6):
        _, label, word, age = found["test"][n]
        assert (label, word, float(age)) == (n % 3, f"word {18 + n}", 9 + n / 2)
    assert found["test"].fields == ("X", "Y", "word", "age")


def test_patterns_braces_and_lists_name_the_same_shards(tmp_path):
    folder = web_shards(tmp_path / "s")
    spellings = [
        f"{folder}/train-*.tar",
        f"{folder}/train-{{000000..000002}}.tar",
        [folder / f"train-{number:06d}.tar" for number in range(3)],
    ]
    for number, source in enumerate(spellings):
        found = opened(source, tmp_path / f"{number}.h5")
        assert numbers_of(found, "train") == list(range(18))
    one = opened(folder / "train-000001.tar", tmp_path / "one.h5", splits={"train": 0.5, "test": 0.5})
    assert sorted(numbers_of(one, "train") + numbers_of(one, "test")) == list(range(6, 12))
    assert [torch.bincount(one[split].labels).tolist() for split in one] == [[1, 1, 1]] * 2


def test_tfrecord_gives_labels_splits_and_fields(tmp_path):
    found = opened(tf_records(tmp_path / "r"), tmp_path / "p.h5", fields=["name", "age", "box"])
    assert found.splits == {"train": 18, "test": 6}
    assert numbers_of(found, "test") == list(range(18, 24))
    for n in range(18):
        _, label, word, age, box = found["train"][n]
        assert (label, word, float(age), box.tolist()) == (n % 3, f"word {n}", n / 2, [n, n + 1])
    several = opened(tf_records(tmp_path / "q"), tmp_path / "q.h5", labels="age", fields={"class": "image/class/label"})
    assert several["test"].labels.tolist() == [n / 2 for n in range(18, 24)]
    assert several["test"][0][2] == 0


def test_an_lmdb_gives_labels_and_shares(tmp_path):
    found = opened(database(tmp_path / "d"), tmp_path / "p.h5", splits={"train": 0.5, "val": 0.25, "test": 0.25})
    assert (found.splits, found.classes) == ({"train": 12, "val": 6, "test": 6}, NAMES)
    dealt = [number for split in found for number in numbers_of(found, split)]
    assert sorted(dealt) == list(range(24))
    for split in found:
        assert found[split].labels.tolist() == [number % 3 for number in numbers_of(found, split)]
    unlabelled = opened(database(tmp_path / "e"), tmp_path / "q.h5", labels=None)
    assert unlabelled["train"].labels is None
    assert unlabelled["train"][0].shape == (3, 7, 5)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shard_bytes": 900}, {"encoding": "source"}, {"encoding": "jpeg", "size": 4}])
def test_remote_records_are_staged_as_files_and_give_the_same_pack_as_local_ones(tmp_path, kind, options):
    needs("FUSE with mfusepy", has_fuse())
    (tmp_path / "far").mkdir()
    KINDS[kind](tmp_path / "far" / "set")
    near = opened(tmp_path / "far" / "set", tmp_path / "near.h5", **options)
    with FuseMount(tmp_path / "mount", tmp_path / "far", latency_s=0.002) as mount:
        far = opened(tmp_path / "mount" / "set", tmp_path / "p.h5", **options)
        files = [path for path in (tmp_path / "far" / "set").iterdir() if path.suffix != ".mdb" or path.stem == "data"]
        read = [path for path in mount.opened_paths if path.startswith("/set/")]
        # Reading must not open a file for each of the 24 samples.
        assert len(read) <= 3 * len(files)
        assert pack(tmp_path / "mount" / "set", tmp_path / "p.h5", progress=False, **options).reused
    assert far.source == str(tmp_path / "mount" / "set")
    assert (far.splits, far.classes, far.encoding) == (near.splits, near.classes, near.encoding)
    for split in near:
        for one, other in zip(far[split], near[split], strict=True):
            assert torch.equal(one[0], other[0])
            assert one[1] == other[1]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".png"] == []


def test_a_pattern_of_remote_shards_is_staged_and_packed(tmp_path):
    needs("FUSE with mfusepy", has_fuse())
    web_shards(tmp_path / "far")
    with FuseMount(tmp_path / "mount", tmp_path / "far") as mount:
        found = opened(f"{mount.point}/train-*.tar", tmp_path / "p.h5")
        assert numbers_of(found, "train") == list(range(18))
        found = opened(mount.point / "train-000002.tar", tmp_path / "q.h5")
        assert numbers_of(found, "train") == list(range(12, 18))


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_archive_gives_the_same_pack_as_its_folder_and_is_not_extracted(tmp_path, near_storage, name, is_remote):
    needs("FUSE with mfusepy", has_fuse())
    tree = make_tree(tmp_path / "tree", 4, prefix="train")
    make_tree(tree, 2, prefix="val")
    expected = opened(tree, tmp_path / "expected.h5")
    (tmp_path / "far").mkdir()
    archive_of(tree, tmp_path / "far" / name)
    with FuseMount(tmp_path / "mount", tmp_path / "far") as mount:
        found = opened((mount.point if is_remote else tmp_path / "far") / name, tmp_path / "p.h5")
    assert found.splits == expected.splits == {"train": 12, "val": 6}
    for split in found:
        assert torch.equal(found[split].rows, expected[split].rows)
        assert torch.equal(found[split].labels, expected[split].labels)
    assert list(near_storage.rglob("*.png")) == []


def test_a_bucket_object_with_many_samples_is_packed(tmp_path):
    bucket = fsspec.filesystem("memory")
    place = f"/{tmp_path.name}"
    tree = make_tree(tmp_path / "tree", 2)
    expected = opened(tree, tmp_path / "expected.h5")
    try:
        for name in ("a.zip", "a.tar.gz"):
            bucket.pipe(f"{place}/{name}", archive_of(tree, tmp_path / name).read_bytes())
            found = opened(f"memory:/{place}/{name}", tmp_path / f"{name}.h5")
            assert torch.equal(found["train"].rows, expected["train"].rows)
        file = tf_records(tmp_path / "r") / "train.tfrecord"
        bucket.pipe(f"{place}/train.tfrecord", file.read_bytes())
        assert numbers_of(opened(f"memory:/{place}/train.tfrecord", tmp_path / "r.h5"), "train") == list(range(18))
    finally:
        bucket.rm(place, recursive=True)


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    """Return a table with two rows for each of 24 pictures, and columns of several types."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n in range(24):
        (folder / f"{n:02d}.png").write_bytes(png(n))
    rows = [*range(24), *range(24)]
    return pd.DataFrame(
        {
            "path": [str(folder / f"{n:02d}.png") for n in rows],
            "label": [NAMES[n % 3] for n in rows],
            "split": [("train", "val", "test")[n // 8] for n in rows],
            "age": [n / 2 for n in rows],
            "note": [f"ä {row}" for row in range(48)],
            "is_old": [n > 12 for n in rows],
            "is_red": [n % 2 for n in rows],
        }
    )


@pytest.mark.parametrize("kind", ["frame", "csv", "parquet"])
def test_a_table_gives_labels_splits_and_fields(tmp_path, table, kind):
    source: Any = table
    if kind == "csv":
        table.to_csv(source := tmp_path / "t.csv", index=False)
    elif kind == "parquet":
        table.to_parquet(source := tmp_path / "t.parquet")
    found = opened(source, tmp_path / "p.h5", labels="label", splits="split", fields=["age", "note"])
    assert (found.splits, found.classes) == ({"train": 16, "val": 16, "test": 16}, NAMES)
    # A file in two rows gives two samples.
    assert numbers_of(found, "val") == [*range(8, 16), *range(8, 16)]
    for row in range(16):
        _, label, age, note = found["val"][row]
        n = 8 + row % 8
        assert (label, float(age), note) == (n % 3, n / 2, f"ä {n + row // 8 * 24}")
    assert found.info.meta["label_kind"] == "class"


def test_labels_come_from_several_columns_numbers_or_a_function_or_are_omitted(tmp_path, table):
    both = opened(table, tmp_path / "a.h5", labels=["is_old", "is_red"])
    assert (both.info.meta["label_kind"], both.classes) == ("multilabel", ("is_old", "is_red"))
    assert both["val"].labels[:8].tolist() == [[int(n > 12), n % 2] for n in range(8, 16)]
    ages = opened(table, tmp_path / "b.h5", labels="age")
    assert (ages.info.meta["label_kind"], ages.classes) == ("regression", ())
    assert ages["test"].labels[:3].tolist() == [8.0, 8.5, 9.0]
    odd = opened(table, tmp_path / "c.h5", labels=lambda path: "odd" if int(Path(path).stem) % 2 else "even")
    assert odd.classes == ("even", "odd")
    assert odd["train"].labels[:4].tolist() == [0, 1, 0, 1]
    alone = opened(table, tmp_path / "d.h5", labels=None, splits=lambda path: "test" if "1" in path[-6:] else "train")
    assert alone["train"].labels is None
    assert np.array_equal(alone["train"][0].permute(1, 2, 0), PIXELS[0])
    assert set(numbers_of(alone, "test")) == {n for n in range(24) if "1" in f"{n:02d}"}


def test_shares_of_a_table_keep_labels_and_pictures_together(tmp_path, table):
    frame = table.drop(columns="split")
    found = opened(frame, tmp_path / "p.h5", splits={"train": 0.5, "test": 0.5}, seed=3, fields=["note"])
    seen = []
    for split in found:
        assert torch.bincount(found[split].labels).tolist() == [8, 8, 8]
        assert found[split].labels.tolist() == [n % 3 for n in numbers_of(found, split)]
        notes = [int(found[split][row][2].split()[1]) for row in range(24)]
        assert [note % 24 for note in notes] == numbers_of(found, split)
        seen += notes
    assert sorted(seen) == list(range(48))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"labels": "breed"}, InvalidOption, "no column 'breed'; expected one of"),
        ({"fields": ["breed"]}, InvalidOption, "no column 'breed'"),
        ({"splits": "note"}, BadSource, "the column 'note' contains 'ä 0'"),
        ({"splits": {"train": 0.5, "test": 0.5}}, InvalidOption, "already has the splits train, val, test"),
    ],
)
def test_missing_or_unsuitable_columns_are_errors_that_name_them(tmp_path, table, options, error, match):
    with pytest.raises(error, match=match):
        pack(table, tmp_path / "p.h5", progress=False, **options)
    assert not (tmp_path / "p.h5").exists()


def test_arrays_in_shards_keep_their_dtype(tmp_path):
    members = []
    for n in range(4):
        file = io.BytesIO()
        np.save(file, np.full((2, 3), n, ">f4"))
        members += [(f"{n}.cls", b"%d" % (n % 2)), (f"{n}.npy", file.getvalue())]
    found = opened(tar_of(tmp_path / "a.tar", *members), tmp_path / "p.h5")
    assert found["train"][3][0].tolist() == [[3.0] * 3] * 2
    assert found["train"].labels.tolist() == [0, 1, 0, 1]

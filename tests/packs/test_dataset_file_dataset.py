"""`FileDataset` reads the image files of a folder, an archive or a table one by one, with labels and splits."""

from __future__ import annotations

import copy
import csv
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_copies import zipped
from packed_files import files_of, photos
from pictures import exif, photo, saved
from PIL import Image
from torch.utils.data import Subset

from colabkit.errors import BadImage, BadSource, InvalidOption, MissingSplit, SourceChanged
from colabkit.loading import Loader
from colabkit.packs.dataset.file_dataset import FileDataset
from colabkit.packs.decode.images import decode_image

pandas = pytest.importorskip("pandas")


def table_of(tree: Path, **columns: Any) -> Any:
    return pandas.DataFrame({"path": [str(path) for path in files_of(tree)], **columns})


def assert_samples(data: FileDataset, files: list[Path], labels: list[int] | None) -> None:
    assert len(data) == len(files)
    for number, path in enumerate(files):
        sample = data[number]
        image = sample if labels is None else sample[0]
        assert image.dtype == torch.uint8
        assert np.array_equal(image.permute(1, 2, 0), decode_image(path.read_bytes()))
        assert labels is None or sample[1] == labels[number]


def test_class_folders_in_a_folder_or_an_archive_are_labels(tree, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tree, "tree")
    for source in (tree, zipped(tree, tmp_path / "a.zip"), tmp_path / "a.tar"):
        data = FileDataset(source)
        assert_samples(data, files_of(tree), [0] * 4 + [1] * 4 + [2] * 4)
        assert (data.classes, data.fields) == (("ants", "bees", "cats"), ("X", "Y"))
        assert (data.labels.dtype, data.labels.tolist()) == (torch.int64, [0] * 4 + [1] * 4 + [2] * 4)
        assert f"FileDataset 'train' of {str(source)!r}: 12 files, 3 classes\nInferred: 3 classes from" in repr(data)


def test_negative_indices_count_from_the_end_and_others_raise(tree):
    data = FileDataset(tree)
    assert torch.equal(data[-1][0], data[11][0])
    assert torch.equal(data[np.int64(3)][0], data[torch.tensor(3)][0])
    assert isinstance(data[0][1], int)
    for number in (12, -13):
        with pytest.raises(IndexError, match=f"index {number} is out of range for 12 samples"):
            data[number]
    assert len(list(data)) == 12


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_compressed_tar_raises_and_the_message_suggests_pack_or_stage(tree, tmp_path, kind):
    path = tmp_path / f"a.tar.{kind}"
    with tarfile.open(path, f"w:{kind}") as archive:
        archive.add(tree, "tree")
    with pytest.raises(BadSource, match=r"only be read from start to end.*any order.*\.pack\(.*\.stage\(") as caught:
        FileDataset(path)
    assert str(path) in str(caught.value)


def test_a_table_provides_labels_and_splits_in_columns(tree, tmp_path):
    files = files_of(tree)
    rows = [
        (str(path.relative_to(tmp_path)), "yes" if number % 2 else "no", "test" if number < 3 else "train")
        for number, path in enumerate(files)
    ]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label", "split"), *rows])
    data = FileDataset(tmp_path / "table.csv")
    assert data.classes == ("no", "yes")
    assert_samples(data, files[3:], [number % 2 for number in range(3, 12)])
    assert_samples(FileDataset(tmp_path / "table.csv", split="test"), files[:3], [0, 1, 0])


def test_a_data_frame_keeps_its_order_and_may_list_a_file_twice(tree):
    files = files_of(tree)
    order = [5, 0, 5, 11]
    frame = table_of(tree, label=[f"{number:02d}" for number in range(12)]).iloc[order]
    assert_samples(FileDataset(frame, labels=None), [files[number] for number in order], None)
    data = FileDataset(frame, labels="label")
    assert data.classes == ("00", "05", "11")
    assert_samples(data, [files[number] for number in order], [1, 0, 1, 2])


def test_a_function_labels_a_list_of_paths(tree):
    files = files_of(tree)[::-1]
    paths = [str(path) for path in files]
    assert_samples(FileDataset(paths, labels=None), files, None)
    data = FileDataset(paths, labels=lambda path: Path(path).stem)
    assert_samples(data, files, [int(path.stem) for path in files])


def test_multi_label_and_regression_labels_are_tensors(tree):
    several = FileDataset(table_of(tree, red=[0, 1] * 6, round=[1, 1, 0] * 4), labels=["red", "round"])
    assert several.labels.dtype == torch.uint8
    assert several[4][1].tolist() == [0, 1]
    target = FileDataset(table_of(tree, age=[number + 0.5 for number in range(12)]), labels="age")
    assert target.labels.dtype == torch.float32
    assert target[4][1].item() == 4.5
    target[4][1].fill_(9)
    assert target[4][1].item() == 4.5


def test_split_folders_are_splits_and_an_unknown_split_raises(tmp_path):
    folder = tmp_path / "split"
    photos(folder / "train", 2)
    photos(folder / "test", 1)
    assert_samples(FileDataset(folder), files_of(folder / "train"), [0, 0, 1, 1, 2, 2])
    test = FileDataset(folder, split="test")
    assert test.split_name == "test"
    assert_samples(test, files_of(folder / "test"), [0, 1, 2])
    with pytest.raises(MissingSplit, match=r"no split 'dev'; expected 'train' or 'test'"):
        FileDataset(folder, split="dev")


def test_shares_assign_every_sample_to_one_split_by_seed(tree):
    shares = {"train": 0.75, "test": 0.25}
    parts = [FileDataset(tree, split=split, splits=shares, seed=3) for split in shares]
    items = [data.names for data in parts]
    assert list(map(len, items)) == [9, 3]
    assert len({*items[0], *items[1]}) == 12
    assert sorted(parts[1].labels.tolist()) == [0, 1, 2]
    assert parts[0].fingerprint == FileDataset(tree, splits=shares, seed=3).fingerprint
    assert parts[0].fingerprint != FileDataset(tree, splits=shares, seed=4).fingerprint


def test_images_are_upright_and_have_the_requested_channels(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "turned.jpg").write_bytes(saved(photo(30, 44), "JPEG", exif=exif(6)))
    (tmp_path / "a" / "grey.png").write_bytes(saved(Image.fromarray(photo()).convert("L"), "PNG"))
    colour, grey = FileDataset(tmp_path), FileDataset(tmp_path, channels=1)
    assert [tuple(image.shape) for image, _ in colour] == [(3, 45, 61), (3, 44, 30)]
    assert [tuple(image.shape) for image, _ in grey] == [(1, 45, 61), (1, 44, 30)]
    with pytest.raises(InvalidOption, match="channels=4"):
        FileDataset(tmp_path, channels=4)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([3, 0, 11, 3], [3, 0, 11, 3]),
        (slice(8, None), [8, 9, 10, 11]),
        (np.array([-1, 2]), [11, 2]),
        (torch.tensor([1, 0]), [1, 0]),
        (np.arange(12) % 5 == 0, [0, 5, 10]),
        ([], []),
    ],
)
def test_a_subset_has_the_chosen_samples_in_order(tree, indices, expected):
    data, files = FileDataset(tree), files_of(tree)
    view = data.subset(indices)
    assert_samples(view, [files[number] for number in expected], [number // 4 for number in expected])
    assert len(data) == 12
    if expected:
        assert_samples(view.subset([0]), [files[expected[0]]], [expected[0] // 4])
    with pytest.raises(IndexError):
        data.subset([12])


def test_fingerprints_differ_between_files_views_and_labels(tree):
    data = FileDataset(tree)
    before = data.fingerprint
    assert FileDataset(tree).fingerprint == before
    others = {
        data.subset([0, 1]).fingerprint,
        data.subset([1, 0]).fingerprint,
        FileDataset(tree, labels=None).fingerprint,
    }
    path = files_of(tree)[3]
    path.write_bytes(path.read_bytes() + b"\0")
    others.add(FileDataset(tree).fingerprint)
    path.rename(path.with_name("other.jpg"))
    others.add(FileDataset(tree).fingerprint)
    assert len(others | {before}) == 6
    assert data.fingerprint == before


def test_copies_of_the_same_files_have_the_same_fingerprint(tree, tmp_path):
    data = FileDataset(tree)
    elsewhere = shutil.copytree(tree, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    os.utime(files_of(elsewhere)[3], (1, 1))
    copies = [elsewhere, zipped(tree, tmp_path / "a.zip"), table_of(elsewhere)]
    assert {FileDataset(one).subset([4, 1]).fingerprint for one in copies} == {data.subset([4, 1]).fingerprint}


@pytest.mark.parametrize("kind", ["folder", "zip", "frame", "csv"])
def test_pickles_and_deep_copies_are_equal(tree, tmp_path, kind):
    table_of(tree).to_csv(tmp_path / "t.csv", index=False)
    sources = {
        "folder": tree,
        "zip": zipped(tree, tmp_path / "a.zip"),
        "frame": table_of(tree),
        "csv": tmp_path / "t.csv",
    }
    data = FileDataset(sources[kind], labels=lambda path: Path(path).parent.name).subset([7, 2])
    files = [files_of(tree)[number] for number in (7, 2)]
    for again in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert_samples(again, files, [1, 0])
        assert (again.fingerprint, again.classes, repr(again)) == (data.fingerprint, data.classes, repr(data))


def test_the_loader_accepts_a_torch_subset(tree):
    data = FileDataset(tree)
    images, labels = next(iter(Loader(Subset(data, [9, 1]), 2)))
    assert torch.equal(images, torch.stack([data[9][0], data[1][0]]))
    assert labels.tolist() == [2, 0]


def test_a_file_that_is_not_an_image_raises_with_its_name(tree):
    path = files_of(tree)[5]
    path.write_bytes(b"<!DOCTYPE html> not found")
    with pytest.raises(BadImage, match=r"Cannot decode 'bees/001\.jpg' of .*tree'.*web page"):
        FileDataset(tree)[5]


@pytest.mark.parametrize("kind", ["vanished", "longer", "shorter", "another time"])
def test_a_file_that_changed_since_it_was_listed_raises_with_its_name(tree, kind):
    data, path = FileDataset(tree), files_of(tree)[5]
    content = path.read_bytes()
    if kind == "vanished":
        path.unlink()
    elif kind == "another time":
        os.utime(path, (1, 1))
    else:
        path.write_bytes(content + b"\0" if kind == "longer" else content[:-1])
    found = "No such file" if kind == "vanished" else "Cannot read"
    with pytest.raises(
        (OSError, SourceChanged), match=rf"Cannot read 'bees/001\.jpg' of .*tree'.*{found}|{found}.*bees/001\.jpg"
    ):
        data[5]
    assert data[4][1] == 1


def test_an_empty_folder_and_an_unknown_column_raise(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadSource, match="Cannot"):
        FileDataset(tmp_path / "empty")
    frame = table_of(tree, kind=["a", "b"] * 6, note=range(12))
    for option in ("labels", "splits"):
        with pytest.raises(InvalidOption, match=r"no column 'wrong'; expected one of .*kind, note"):
            FileDataset(frame, **{"labels": "kind", option: "wrong"})

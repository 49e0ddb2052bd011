"""Sample fields of every kind, read alone, in batches, and from damaged packs."""

from __future__ import annotations

import itertools
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from contract import make_pack, seal_every_kind, seal_fields
from packed_files import flip_byte
from pictures import png
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from colabkit.errors import BadImage, Corrupt, InvalidOption
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack, seal_pack

RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.integers(0, 256, (10, 6, 5, 3)).astype("|u1")


@pytest.fixture
def everything(tmp_path: Path) -> PackedDataset:
    return open_pack(seal_every_kind(tmp_path / "all.h5", IMAGES))["train"]


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    """Return a pack of image files of different sizes; the fourth is blank."""
    blobs = [png(IMAGES[number, : 3 + number % 3]) for number in range(10)]
    blobs[3] = b""
    return seal_fields(
        tmp_path / "encoded.h5", {"X": {"train": blobs}, "Y": {"train": np.arange(10) % 3}}, {"X": "image"}, "class"
    )


def test_an_empty_batch_has_the_shape_of_a_sample(everything, encoded):
    empty = dict(zip(everything.fields, everything[[]], strict=True))
    assert (empty["X"].shape, empty["X"].dtype, empty["Z"].shape) == ((0, 3, 6, 5), torch.uint8, (0, 2, 4))
    assert (empty["Y"].shape, empty["caption"], empty["raw"]) == ((0,), [], [])
    assert (open_pack(encoded)["train"][[]][0], everything.__getitems__([])) == ([], [])


def same(one: object, other: object) -> bool:
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return type(one) is type(other) and one == other


def test_additional_fields_follow_in_the_packs_order_as_tensors_text_or_bytes(everything):
    assert everything.fields == ("X", "Y", "Z", "caption", "raw", "age", "code")
    image, label, array, caption, raw, age, code = everything[4]
    assert torch.equal(image, torch.from_numpy(IMAGES[4]).permute(2, 0, 1))
    assert (label, caption, raw, code) == (1, "Größe 4", bytes(range(4)), "é4")
    assert (array.shape, array.dtype) == ((2, 4), torch.float32)
    assert (int(age), age.dtype, age.ndim) == (4, torch.int16, 0)


def test_a_batch_stacks_tensors_and_lists_text_and_bytes(everything):
    images, labels, arrays, captions, raws, ages, codes = everything[2:5]
    assert images.shape == (3, 3, 6, 5)
    assert labels.tolist() == [2, 0, 1]
    assert arrays.shape == (3, 2, 4)
    assert captions == ["Größe 2", "Größe 3", "Größe 4"]
    assert raws == [bytes(range(number)) for number in (2, 3, 4)]
    assert ages.tolist() == [2, 3, 4]
    assert codes == ["é2", "é3", "é4"]


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (slice(2, 9, 3), [2, 5, 8]),
        (slice(None, None, -4), [9, 5, 1]),
        ([3, 1, 1, -1], [3, 1, 1, 9]),
        (range(4), [0, 1, 2, 3]),
        (np.array([7, -2]), [7, 8]),
        (torch.tensor([7]), [7]),
        (np.arange(10) > 7, [8, 9]),
        ([number == 4 for number in range(10)], [4]),
        ([], []),
        (slice(3, 3), []),
    ],
    ids=repr,
)
def test_slices_and_index_arrays_return_the_same_samples_as_their_integers(
    everything, encoded, tmp_path, index, numbers
):
    rows = open_pack(make_pack(tmp_path / "rows.h5", (6, 5, 3), train=10))["train"]
    images, labels = rows[index]
    assert torch.equal(images, torch.stack([rows[number][0] for number in numbers]) if numbers else images)
    assert images.shape == (len(numbers), 3, 6, 5)
    assert labels.tolist() == [number % 3 for number in numbers]
    for data in (rows, everything, open_pack(encoded)["train"]):
        assert same(data.__getitems__(index), [data[number] for number in numbers])
        batch = data[index]
        assert same([*map(list, batch[:1])], [[data[number][0] for number in numbers]])
        assert len(batch[1]) == len(numbers)


def test_invalid_indices_and_indices_out_of_range_raise(everything):
    for index in (1.5, "x", None, [0.5], [[1]], np.zeros((2, 2), int), [True, False], np.array(0.0), [1, [2, 3]]):
        with pytest.raises(InvalidOption, match="integers, 10 bools or a slice"):
            everything[index]
    for index in ([10], [0, -11], np.array([99])):
        with pytest.raises(IndexError, match="for 10 samples"):
            everything[index]


def test_image_files_are_decoded_and_blank_ones_are_black(encoded):
    data = open_pack(encoded)["train"]
    for number in range(10):
        image, label = data[number]
        expected = torch.from_numpy(IMAGES[number, : 3 + number % 3]).permute(2, 0, 1)
        assert torch.equal(image, torch.zeros(3, 1, 1, dtype=torch.uint8) if number == 3 else expected)
        assert label == number % 3
    images, labels = data[:3]
    assert [image.shape[1] for image in images] == [3, 4, 5]
    assert data[[0, 6]][0].shape == (2, 3, 3, 5)
    assert labels.tolist() == [0, 1, 2]


def test_blank_images_have_the_common_shape_and_grayscale_packs_one_channel(tmp_path):
    fields = {"X": {"train": [png(IMAGES[0]), b""]}, "Y": {"train": np.arange(2)}}
    path = seal_fields(tmp_path / "p.h5", fields, {"X": "image"}, "class", sample_shape=[6, 5, 3])
    assert open_pack(path)["train"][:][0].shape == (2, 3, 6, 5)
    grey = seal_fields(tmp_path / "grey.h5", fields, {"X": "image"}, "class", channels=1)
    assert [image.shape[0] for image, _ in open_pack(grey)["train"]] == [1, 1]


def test_an_image_that_cannot_be_decoded_raises_with_its_name(tmp_path):
    fields = {"X": {"train": [png(IMAGES[0]), b"text"]}, "Y": {"train": np.arange(2)}}
    data = open_pack(seal_fields(tmp_path / "p.h5", fields, {"X": "image"}, "class"))["train"]
    for read in (lambda: data[1], lambda: data[:2], lambda: data.__getitems__([0, 1])):
        with pytest.raises(BadImage, match=r"Cannot decode train\[1\] of .*p\.h5.*on_bad"):
            read()


@pytest.mark.parametrize(
    ("kind", "labels", "dtype"),
    [
        ("multilabel", RANDOM.integers(0, 2, (10, 4)).astype("|u1"), torch.uint8),
        ("regression", RANDOM.normal(size=10).astype("<f4"), torch.float32),
        ("regression", RANDOM.normal(size=(10, 2)).astype("<f4"), torch.float32),
    ],
)
def test_labels_other_than_classes_are_tensors(tmp_path, kind, labels, dtype):
    path = seal_fields(tmp_path / "p.h5", {"X": {"train": IMAGES}, "Y": {"train": labels}}, {"X": "image"}, kind)
    data = open_pack(path)["train"]
    label = data[3][1]
    assert torch.equal(label, torch.from_numpy(labels)[3])
    assert (label.dtype, data.labels.dtype) == (dtype, dtype)
    label.zero_()
    assert torch.equal(data[:][1], torch.from_numpy(labels))
    batches = list(DataLoader(data, batch_size=4))
    assert torch.equal(torch.cat([labels for _, labels in batches]), data.labels)


def test_without_labels_a_sample_is_its_image_or_a_tuple_of_the_other_fields(tmp_path):
    alone = open_pack(seal_fields(tmp_path / "x.h5", {"X": {"train": IMAGES}}, {"X": "image"}, "none"))["train"]
    assert alone.labels is None
    assert alone[2].shape == (3, 6, 5)
    assert alone[:4].shape == (4, 3, 6, 5)
    assert same(alone.__getitems__([1, 2]), [alone[1], alone[2]])
    fields = {"X": {"train": IMAGES}, "Z": {"train": np.arange(10.0)}}
    both = open_pack(seal_fields(tmp_path / "z.h5", fields, {"X": "image", "Z": "array"}, "none"))["train"]
    assert (len(both[2]), float(both[2][1])) == (2, 2.0)


@pytest.mark.parametrize("dtype", ["|b1", "<u2", "<i4", "<f2", "<f8", "<c8", ">f4", ">i2"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 3, 4, 5)])
def test_arrays_keep_their_dtype_and_shape(tmp_path, dtype, shape):
    arrays = (RANDOM.normal(size=(6, *shape)) * 100).astype(dtype)
    fields = {"X": {"train": arrays}, "Y": {"train": np.arange(6)}}
    data = open_pack(seal_fields(tmp_path / "p.h5", fields, {"X": "array"}, "class"))["train"]
    expected = torch.from_numpy(arrays.astype(np.dtype(dtype).newbyteorder("=")))
    for number in range(6):
        assert torch.equal(data[number][0], expected[number])
    assert torch.equal(data[[4, 1]][0], torch.stack([expected[4], expected[1]]))
    assert data[0][0].dtype == expected.dtype


@pytest.mark.parametrize("name", ["X", "Z", "caption", "raw"])
def test_reading_a_damaged_sample_raises_with_its_name(everything, name):
    path = everything.info.path
    before = everything[9]
    found = everything.info.data_sets[f"{name}_train"]
    flip_byte(path, found.offset + found.size_bytes - 1)
    data = open_pack(path)["train"]
    for read in (lambda: data[9], lambda: data[-1], lambda: data.subset([9])[0], lambda: data[8:]):
        with pytest.raises(Corrupt, match=r"Cannot read train\[9\] of .*verify"):
            read()
    assert same(data[8], everything[8])
    assert before[1] == 0


@pytest.mark.parametrize("name", ["X_train_index", "crc_train", "age_train", "Y_train"])
def test_opening_a_split_with_a_damaged_table_raises(everything, encoded, name):
    path = encoded if name == "X_train_index" else everything.info.path
    found = read_pack(path).data_sets[name]
    with path.open("r+b") as file:
        file.seek(found.offset)
        file.write(b"\x7f")
    with pytest.raises(Corrupt, match=name):
        open_pack(path)["train"]


@pytest.mark.parametrize("entry", [(-1, 4), (0, -1), (10**6, 1), (2**62, 2**62), (0, 10**6)])
def test_an_index_that_points_beyond_its_data_raises(encoded, entry):
    info = read_pack(encoded)
    index = info.table("X_train_index")
    index[-1] = entry
    with encoded.open("r+b") as file:
        file.seek(info.data_sets["X_train_index"].offset)
        file.write(index.tobytes())
        file.seek(0)
        file.write(bytes(4096))
    seal_pack(encoded, info.data_sets.values(), {**info.table_crcs, "X_train_index": crc32(index.tobytes())})
    with pytest.raises(Corrupt, match="points beyond"):
        open_pack(encoded)["train"]


def test_pytorchs_wrapper_datasets_accept_it(tmp_path):
    one = open_pack(make_pack(tmp_path / "one.h5", train=7, test=3))
    both = ConcatDataset([one["train"], one["test"]])
    assert (len(both), both[8][1]) == (10, 1)
    assert same(Subset(one["train"], [5, 2])[0], one["train"][5])
    assert same(Subset(one["train"], [5, 2]).__getitems__([1]), [one["train"][2]])
    parts = random_split(one["train"], [4, 3])
    taken = sorted(itertools.chain.from_iterable(part.indices for part in parts))
    assert taken == list(range(7))
    for data in (both, *parts):
        assert sum(len(labels) for _, labels in DataLoader(data, batch_size=3, shuffle=True)) == len(data)

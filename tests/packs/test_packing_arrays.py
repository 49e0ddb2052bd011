"""`pack()` stores array values of all supported dtypes exactly, and never loads an array file as a whole."""

from __future__ import annotations

import tracemalloc
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from packed_files import assert_refused, opened, packed
from PIL import Image
from trees import leftovers

from colabkit.errors import BadSource, InvalidOption, TargetExists
from colabkit.packs.dataset.opened_pack import Pack, open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack

RANDOM = np.random.default_rng(11)
IMAGES = RANDOM.integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)
CLASSES = RANDOM.permutation(np.arange(30) % 3)


def samples_of(found: Pack, split: str = "train") -> list[Any]:
    return [found[split][number] for number in range(len(found[split]))]


def test_images_and_labels_are_stored_unchanged(tmp_path):
    found = opened({"X": IMAGES, "Y": CLASSES}, tmp_path / "p.h5")
    assert (found.splits, found.classes, found.source, found.encoding) == (
        {"train": 30},
        ("0", "1", "2"),
        "arrays",
        "raw",
    )
    images, labels = found["train"][:]
    assert np.array_equal(images.permute(0, 2, 3, 1), IMAGES)
    assert labels.tolist() == CLASSES.tolist()
    assert [label for _, label in samples_of(found)] == CLASSES.tolist()


@pytest.mark.parametrize(
    "source",
    [
        {"train": {"X": IMAGES[:20], "Y": CLASSES[:20]}, "val": {"X": IMAGES[20:], "Y": CLASSES[20:]}},
        {"Training": {"x": IMAGES[:20], "y": CLASSES[:20]}, "val": {"x": IMAGES[20:], "y": CLASSES[20:]}},
        {"X_val": IMAGES[20:], "Y_val": CLASSES[20:], "X_train": IMAGES[:20], "Y_train": CLASSES[:20]},
        {"x_train": IMAGES[:20], "y_train": CLASSES[:20, None], "x_valid": IMAGES[20:], "y_valid": CLASSES[20:, None]},
    ],
)
def test_splits_are_given_as_mappings_or_in_the_names_of_arrays(tmp_path, source):
    found = opened(source, tmp_path / "p.h5")
    assert list(found.splits.values()) == [20, 10]
    for split, part in (("train", slice(0, 20)), ("val", slice(20, 30))):
        images, labels = found[split][:]
        assert np.array_equal(images.permute(0, 2, 3, 1), IMAGES[part])
        assert labels.tolist() == CLASSES[part].tolist()
    with pytest.raises(InvalidOption, match=r"Omit splits=, and divide a split .*data\['train'\]\.split"):
        pack(source, tmp_path / "q.h5", splits={"train": 0.5, "test": 0.5}, progress=False)


@pytest.mark.parametrize("source", [IMAGES, {"X": IMAGES}, torch.from_numpy(IMAGES), {"X": torch.from_numpy(IMAGES)}])
def test_arrays_without_labels_give_samples_without_labels(tmp_path, source):
    found = opened(source, tmp_path / "p.h5")
    assert found["train"].labels is None
    assert np.array_equal(found["train"][7].permute(1, 2, 0), IMAGES[7])
    assert np.array_equal(found["train"][:].permute(0, 2, 3, 1), IMAGES)


DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", ">i2", ">f4", ">f8", ">u4", ">c8"),
]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (1, 2, 3, 2), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_and_shape_is_stored(tmp_path, dtype, shape):
    values = RANDOM.integers(0, 2 if dtype == "bool" else 100, (5, *shape)).astype(dtype)
    found = opened({"X": values, "Y": np.arange(5), "Z": values[::-1]}, tmp_path / "p.h5")
    given, other = found["train"][:][0], found["train"][:][2]
    native = values.astype(values.dtype.newbyteorder("="))
    assert given.numpy().dtype == native.dtype
    assert np.array_equal(given.numpy(), native)
    assert np.array_equal(other.numpy(), native[::-1])
    x, y, z = found["train"][1]
    assert (y, np.array_equal(x, values[1]), np.array_equal(z, values[-2])) == (1, True, True)


@pytest.mark.parametrize(
    "view",
    [
        IMAGES.transpose(0, 3, 1, 2),
        IMAGES[::-1, ::2],
        np.asfortranarray(IMAGES),
        np.broadcast_to(IMAGES[:1], IMAGES.shape),
        torch.from_numpy(IMAGES).permute(0, 3, 2, 1),
        torch.from_numpy(IMAGES).float().requires_grad_(),
        IMAGES.tolist(),
    ],
)
def test_views_and_lists_are_stored(tmp_path, view):
    found = opened({"X": view}, tmp_path / "p.h5", splits={"train": 0.5, "test": 0.5})
    whole = view.detach().numpy() if isinstance(view, torch.Tensor) else np.asarray(view)
    # Datasets return images with their channels first.
    is_channels_last = found.info.fields["X"].content == "image" and whole.shape[-1] == 3
    given = [
        (sample.permute(1, 2, 0) if is_channels_last else sample).numpy().tobytes()
        for split in ("train", "test")
        for sample in samples_of(found, split)
    ]
    assert sorted(given) == sorted(np.ascontiguousarray(sample).tobytes() for sample in whole)


LABELS_OF_KINDS = [
    ([3, 1, 3, 0], "class", ("0", "1", "2", "3"), [3, 1, 3, 0]),
    (np.array([[2], [0], [1], [2]], np.uint8), "class", ("0", "1", "2"), [2, 0, 1, 2]),
    ([-1, 1, 1, -1], "class", (), [-1, 1, 1, -1]),
    (["owl", "elk", "owl", "ärmel"], "class", ("elk", "owl", "ärmel"), [1, 0, 1, 2]),
    (np.array([b"owl", b"elk", b"owl", b"owl"]), "class", ("elk", "owl"), [1, 0, 1, 1]),
    (pd.Series(["b", "a", "b", "b"]), "class", ("a", "b"), [1, 0, 1, 1]),
    (pd.Series(["b", "a", "b", "b"]).astype("category"), "class", ("a", "b"), [1, 0, 1, 1]),
    ([True, False, True, True], "class", ("False", "True"), [1, 0, 1, 1]),
    ([0.5, 1.0, 2.0, -3.0], "regression", (), [0.5, 1.0, 2.0, -3.0]),
    ([[0.5, 1.0]] * 4, "regression", (), [[0.5, 1.0]] * 4),
    ([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]], "multilabel", ("0", "1", "2"), None),
    (torch.tensor([[True, False]] * 4), "multilabel", ("0", "1"), [[1, 0]] * 4),
]


def test_labels_of_every_kind(tmp_path):
    for labels, kind, classes, stored in LABELS_OF_KINDS:
        found = opened({"X": IMAGES[:4], "Y": labels}, tmp_path / "p.h5", overwrite=True)
        assert (found.info.meta["label_kind"], found.classes) == (kind, classes)
        assert found["train"].labels.tolist() == (labels if stored is None else stored)
        assert found["train"][2][1] == found["train"].labels[2].tolist() or len(found["train"].labels.shape) > 1


def test_text_and_bytes_can_be_fields_or_samples(tmp_path):
    words = ["", "ä word", "a\0b", "x" * 1000]
    blobs = np.array([b"1\0", b"", b"\xff", b"2"], object)
    source = {"X": words, "Y": [0, 1, 0, 1], "caption": np.array(words, object), "blob": blobs}
    found = opened(source, tmp_path / "p.h5")
    assert samples_of(found) == [(words[n], n % 2, words[n], blobs[n]) for n in range(4)]
    assert found["train"][[3, 0]][2] == [words[3], words[0]]
    vectors = opened({"X": np.eye(4), "caption": words}, tmp_path / "q.h5", splits={"train": 0.5, "val": 0.5})
    for split in ("train", "val"):
        for vector, word in samples_of(vectors, split):
            assert word == words[int(vector.argmax())]


def test_shares_are_stratified_by_class_and_depend_on_the_seed(tmp_path):
    shares = {"train": 0.6, "val": 0.2, "test": 0.2}
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        found = opened({"X": IMAGES, "Y": CLASSES}, tmp_path / f"{number}.h5", splits=shares, seed=seed)
        runs.append({split: found[split][:] for split in found})
        whole = np.concatenate([images.permute(0, 2, 3, 1) for images, _ in runs[-1].values()])
        assert sorted(map(bytes, whole)) == sorted(map(bytes, IMAGES))
        for images, labels in runs[-1].values():
            expected = {image.tobytes(): label for image, label in zip(IMAGES, CLASSES.tolist(), strict=True)}
            assert [expected[bytes(image.permute(1, 2, 0).numpy())] for image in images] == labels.tolist()
            assert len(set(np.bincount(labels))) == 1
    assert torch.equal(runs[0]["val"][0], runs[1]["val"][0])
    assert not torch.equal(runs[0]["val"][0], runs[2]["val"][0])


def test_shares_are_stratified_by_label_combinations_and_ranges_of_targets(tmp_path):
    several = np.repeat([[0, 1], [1, 1], [1, 0]], 20, axis=0)
    found = opened({"X": np.arange(60), "Y": several}, tmp_path / "p.h5", splits={"train": 0.5, "test": 0.5})
    assert [found[split].labels.sum(0).tolist() for split in found] == [[20, 20]] * 2
    targets = RANDOM.random(100).astype("f4")
    found = opened({"X": np.arange(100), "Y": targets}, tmp_path / "q.h5", splits={"train": 0.5, "test": 0.5})
    assert abs(float(found["train"].labels.mean() - found["test"].labels.mean())) < 0.05


def test_the_same_arrays_reuse_the_pack_and_others_do_not_overwrite_it(tmp_path):
    out = tmp_path / "p.h5"
    assert not pack({"X": IMAGES, "Y": CLASSES}, out, progress=False).reused
    before = out.stat()
    assert pack({"X": IMAGES.copy(), "Y": CLASSES.tolist()}, out, progress=False).reused
    assert (out.stat().st_ino, out.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    other = IMAGES.copy()
    other[29, 5, 4, 2] ^= 1
    changed = [
        {"X": other, "Y": CLASSES},
        {"X": IMAGES, "Y": CLASSES[::-1]},
        {"X": IMAGES, "Y": CLASSES, "Z": CLASSES},
        {"X": IMAGES.view(np.int8), "Y": CLASSES},
        {"test": {"X": IMAGES, "Y": CLASSES}},
    ]
    for source in changed:
        with pytest.raises(TargetExists, match="overwrite=True"):
            pack(source, out, progress=False)
    assert not pack(changed[0], out, progress=False, overwrite=True).reused


@pytest.mark.full
@pytest.mark.parametrize("kind", ["memmap", "h5py", "chunked h5py"])
@pytest.mark.parametrize("splits", [None, {"train": 0.75, "test": 0.25}])
def test_arrays_in_files_are_never_loaded_as_a_whole(tmp_path, kind, splits):
    shape = (4000, 64, 64, 3)
    if kind == "memmap":
        array = np.memmap(tmp_path / "raw", np.uint8, "w+", shape=shape)
    else:
        file = h5py.File(tmp_path / "theirs.h5", "w")
        array = file.create_dataset("x", shape, np.uint8, chunks=(10, 64, 64, 3) if kind == "chunked h5py" else None)
    for start in range(0, 4000, 500):
        array[start : start + 500] = np.repeat(np.arange(start, start + 500) % 251, 64 * 64 * 3).reshape(
            500, *shape[1:]
        )
    tracemalloc.start()
    report = pack({"X": array, "Y": np.arange(4000) % 251}, tmp_path / "p.h5", progress=False, splits=splits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Loading the array as a whole would take 49 MB.
    assert peak < 40 << 20
    for data in open_pack(report.path).values():
        images, labels = data[:]
        assert torch.equal(images[:, 0, 0, 0], labels.byte())
    if kind != "memmap":
        file.close()


def test_an_open_hdf5_file_or_npz_is_packed_as_a_mapping_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=IMAGES, y_train=CLASSES, x_test=IMAGES[:3], y_test=CLASSES[:3])
    found = opened(np.load(tmp_path / "a.npz"), tmp_path / "p.h5")
    assert found.splits == {"train": 30, "test": 3}
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["train/X"], file["train/Y"], file["train/name"] = IMAGES, CLASSES, ["a"] * 30
    with h5py.File(tmp_path / "theirs.h5") as file:
        found = opened(file, tmp_path / "q.h5")
    assert found["train"][4][1:] == (CLASSES[4], b"a")
    assert np.array_equal(found["train"][4][0].permute(1, 2, 0), IMAGES[4])


WRONG = {
    "other lengths": (
        {"X": IMAGES, "Y": CLASSES[:29]},
        InvalidOption,
        "'Y' of the split 'train' has 29 samples but 'X' has 30",
    ),
    "a single number": ({"X": IMAGES, "Y": 5}, InvalidOption, "'Y' of the split 'train' is a single value"),
    "no samples": ({"X": IMAGES[:0], "Y": CLASSES[:0]}, BadSource, "the split 'train' has no samples"),
    "an empty split": (
        {"train": {"X": IMAGES}, "test": {"X": IMAGES[:0]}},
        BadSource,
        "the split 'test' has no samples",
    ),
    "objects": ({"X": np.array([{}, []], object)}, InvalidOption, "'X' contains Python objects, such as a dict"),
    "ragged lists": (
        {"X": [[1], [1, 2]]},
        InvalidOption,
        "'X' have different shapes, such as .1. and .2.",
    ),
    "dates": ({"X": np.array(["2024-01-01"], "M8[D]")}, InvalidOption, r"'X' has dtype datetime64\[D\]"),
    "long doubles": ({"X": np.zeros(3, np.longdouble)}, InvalidOption, "'X' has dtype"),
    "bfloat16": ({"X": torch.zeros(3).bfloat16()}, InvalidOption, "'X' is a Tensor that cannot be converted"),
    "text of two dimensions": (
        {"X": IMAGES[:2], "Z": np.array([["a", "b"]] * 2)},
        InvalidOption,
        r"text or objects of shape \[2, 2\]",
    ),
    "unknown splits": (
        {"train": {"X": IMAGES}, "eval": {"X": IMAGES}},
        InvalidOption,
        "the splits are named 'train', 'eval'",
    ),
    "a split twice": ({"val": {"X": IMAGES}, "dev": {"X": IMAGES}}, InvalidOption, "each at most once"),
    "a name without a split": (
        {"X_train": IMAGES, "extra": CLASSES},
        InvalidOption,
        "'extra' does not end with a split, unlike 'X_train'",
    ),
    "arrays and splits": ({"train": {"X": IMAGES}, "X": IMAGES}, InvalidOption, "both arrays and splits"),
    "no X": ({"images": IMAGES}, InvalidOption, "an array named 'X'"),
    "nothing": ({}, InvalidOption, "there are no arrays"),
    "labels in one split": (
        {"X_train": IMAGES, "Y_train": CLASSES, "X_val": IMAGES},
        InvalidOption,
        "'Y' exists only in some",
    ),
    "other shapes": ({"X_train": IMAGES, "X_val": IMAGES[:, :5]}, InvalidOption, r"\[6, 5, 3\] .* \[5, 5, 3\]"),
    "a bad name": ({"X": IMAGES, "a/b": CLASSES}, InvalidOption, "a field is named 'a/b'"),
    "the name of the CRCs": ({"X": IMAGES, "crc": CLASSES}, InvalidOption, "a field is named 'crc'"),
    "boxes as labels": (
        {"X": IMAGES, "Y": np.zeros((30, 4), int) + 7},
        InvalidOption,
        r"the labels 'Y' are int64 \[30, 4\]",
    ),
    "labels that are NaN": ({"X": IMAGES, "Y": np.full(30, np.nan)}, BadSource, "NaN"),
}


def test_invalid_arrays_are_one_line_errors(tmp_path):
    for source, error, match in WRONG.values():
        assert_refused(error, f"^Cannot pack 'arrays': .*{match}", source, tmp_path / "made" / "p.h5")


def test_options_for_files_are_errors(tmp_path):
    source = {"X": IMAGES, "Y": CLASSES}
    given = {"size": 8, "fields": ["a"], "labels": "a", "encoding": "jpeg", "on_bad": "skip", "splits": "a"}
    given |= {"channels": 1, "quality": 80, "max_bad": 3}
    for name, value in given.items():
        assert_refused(InvalidOption, f"^Cannot pack .*{name}=", source, tmp_path / "p.h5", **{name: value})
    assert opened({"X": IMAGES[..., :1]}, tmp_path / "gray.h5", channels=1)["train"][0].shape[0] == 1
    assert_refused(InvalidOption, "^Cannot pack .*shares", source, tmp_path / "p.h5", splits={"train": 0.5})


def test_labels_none_omits_labels(tmp_path):
    assert opened({"X": IMAGES, "Y": CLASSES}, tmp_path / "p.h5", labels=None)["train"].labels is None
    assert leftovers(tmp_path) == []


def test_trailing_zeros_of_bytes_and_text_are_stored(tmp_path):
    blobs, words = [b"ab\0\0", b"\0", b"c"], ["a\0", "a", "b"]
    found = opened({"X": blobs, "Z": words, "Y": words}, tmp_path / "p.h5")
    assert found.classes == ("a", "a\0", "b")
    with h5py.File(tmp_path / "p.h5") as file:
        assert file["X_train"][:].tobytes() == b"".join(blobs)
        assert file["Z_train"][:].tobytes() == "".join(words).encode()
        assert file["Y_train"][:].tolist() == [1, 0, 2]


def test_values_that_would_change_when_stored_are_errors(tmp_path):
    for arrays in (
        {"X": IMAGES[:2], "Y": np.array([2**63 + 5, 1], np.uint64)},
        {"X": IMAGES[:2], "Y": np.array([1e300, 1.0])},
        {"X": np.ma.masked_array(np.arange(4.0), [0, 1, 0, 0])},
        {"X": IMAGES[:2], "id": [-1, 2**63]},
    ):
        assert_refused((InvalidOption, BadSource), "^Cannot pack", arrays, tmp_path / "p.h5")


def test_large_integers_in_a_list_are_never_rounded(tmp_path):
    path = packed({"X": IMAGES[:2], "id": [1, 2**63 + 1]}, tmp_path / "p.h5")
    assert read_pack(path).map("id_train").tolist() == [1, 2**63 + 1]


@pytest.mark.parametrize("kind", [list, tuple, "object", "series", "tensors"])
def test_arrays_of_different_lengths_raise_with_the_advice_to_pad_them(tmp_path, kind):
    boxes: Any = [np.zeros((count, 4), np.float32) for count in (2, 1, 0)]
    if kind == "tensors":
        boxes = list(map(torch.from_numpy, boxes))
    elif kind == "object":
        boxes = np.array(boxes, object)
    else:
        boxes = pd.Series(boxes) if kind == "series" else kind(boxes)
    match = (
        r"the samples of 'boxes' have different shapes, such as \[2, 4\] and \[1, 4\].* Pad values of different lengths"
    )
    with pytest.raises(InvalidOption, match=match):
        pack({"X": IMAGES[:3], "boxes": boxes}, tmp_path / "p.h5", progress=False)


def test_an_object_whose_conversion_raises_an_empty_error_is_an_error(tmp_path):
    class SilentArray:
        shape, dtype = (3,), np.dtype(object)

        def __getitem__(self, index: int) -> int:
            return index

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise NotImplementedError

    with pytest.raises(
        InvalidOption, match=r"a SilentArray that cannot be converted to an array \(NotImplementedError\)"
    ):
        pack({"X": SilentArray()}, tmp_path / "p.h5", progress=False)


def test_options_accept_numpy_numbers(tmp_path):
    for number in range(4):
        (tmp_path / "tree" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "tree" / "a" / f"{number}.png")
    options = {"quality": np.int64(80), "seed": np.int64(3), "splits": {"train": 0.5, "test": 0.5}}
    opened(tmp_path / "tree", tmp_path / "p.h5", **options)
    assert pack(tmp_path / "tree", tmp_path / "p.h5", progress=False, **{**options, "quality": 80, "seed": 3}).reused


def test_text_and_bytes_are_different_fields(tmp_path):
    def source(words: list[Any]) -> dict[str, Any]:
        return {"X": np.eye(2), "words": np.array(words, object)}

    pack(source(["a", "b"]), tmp_path / "p.h5", progress=False)
    with pytest.raises(TargetExists):
        pack(source([b"a", b"b"]), tmp_path / "p.h5", progress=False)
    with pytest.raises(
        InvalidOption, match="'words' is text in one split but bytes in another; expected the same type"
    ):
        pack({"train": source(["a", "b"]), "test": source([b"a", b"b"])}, tmp_path / "q.h5", progress=False)


def test_splits_of_a_target_have_the_requested_shares(tmp_path):
    source = {"X": np.zeros((170, 2), "f4"), "Y": RANDOM.random(170, np.float32)}
    found = opened(source, tmp_path / "p.h5", splits={"train": 0.8, "val": 0.2})
    assert found.splits == {"train": 136, "val": 34}
    whole = opened(source, tmp_path / "w.h5")["train"]
    assert [len(part) for part in whole.split((0.9, 0.1))] == [153, 17]


def test_the_categories_of_labels_are_their_classes(tmp_path):
    sizes = pd.Series(pd.Categorical(["large", "small", "large"], ["small", "medium", "large"]))
    found = opened((IMAGES[:3], sizes), tmp_path / "p.h5")
    assert (found.classes, found["train"].labels.tolist()) == (("small", "medium", "large"), [2, 0, 2])
    other = sizes.cat.reorder_categories(["large", "medium", "small"])
    with pytest.raises(TargetExists):
        packed((IMAGES[:3], other), tmp_path / "p.h5")
    assert opened((IMAGES[:3], other), tmp_path / "q.h5", renumber=True).classes == ("large", "small")
    by_split = {
        "train": {"X": IMAGES[:3], "Y": sizes},
        "val": {"X": IMAGES[:3], "Y": sizes.cat.add_categories(["huge"])},
    }
    assert opened(by_split, tmp_path / "r.h5").classes == ("small", "medium", "large", "huge")

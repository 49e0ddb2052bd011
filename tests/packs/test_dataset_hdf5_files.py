"""HDF5 files of other programs: datasets are found by name, and are mapped or read through HDF5."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from contract import make_pack, whole_content
from hdf5_files import HOSTILE, IMAGES, LABELS, LINKS, STORED, write_hdf5
from pictures import png

import colabkit
from colabkit.errors import BadSource, ColabkitError, Corrupt, InvalidOption, NotSealed, SourceChanged, SourceMissing
from colabkit.loading import Loader
from colabkit.packs.dataset import hdf5_reader
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack


@pytest.fixture(params=STORED)
def foreign(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return an HDF5 file of 30 images; the parameter chooses the storage layout."""
    return write_hdf5(tmp_path / "foreign.h5", **STORED[request.param])


def test_a_foreign_file_opens_as_a_dataset(foreign):
    pack = open_pack(foreign, x="images", y="labels")
    data = pack["train"]
    assert (len(data), data.labels.tolist(), pack.classes) == (30, LABELS.tolist(), ("0", "1", "2", "3"))
    for number in (0, 17, -1):
        image, label = data[number]
        assert torch.equal(image, torch.from_numpy(IMAGES[number]).permute(2, 0, 1))
        assert label == LABELS[number]
    assert torch.equal(data[5:9][0], torch.from_numpy(IMAGES[5:9]).permute(0, 3, 1, 2))
    order = np.random.default_rng(1).integers(0, 30, 50)
    assert torch.equal(data[order][0], torch.from_numpy(IMAGES[order]).permute(0, 3, 1, 2))
    assert [label for _, label in data.__getitems__([3, 3, 0])] == [3, 3, 0]
    assert data.subset([4, 2])[:][1].tolist() == [0, 2]


def test_threads_can_read_while_the_process_forks(tmp_path):
    data = open_pack(write_hdf5(tmp_path / "p.h5", **STORED["gzip"]))["train"]
    stop = threading.Event()

    def read(number: int) -> None:
        while not stop.is_set():
            assert torch.equal(data[number][0], torch.from_numpy(IMAGES[number]).permute(2, 0, 1))

    context = multiprocessing.get_context("fork")
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, number) for number in (3, 21)]
        children = [context.Process(target=lambda: os._exit(data[7][1])) for _ in range(10)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        stop.set()
        for reader in readers:
            reader.result(60)
    assert [child.exitcode for child in children] == [3] * 10


@pytest.mark.parametrize("options", [{}, STORED["chunked"], STORED["gzip"]], ids=["mapped", "chunked", "gzip"])
def test_the_loader_reads_mapped_and_compressed_datasets(tmp_path, options):
    data = open_pack(write_hdf5(tmp_path / "m.h5", **options))["train"]
    images, labels = zip(*Loader(data, 7, shuffle=True), strict=True)
    order = [int((image.permute(1, 2, 0).numpy() == IMAGES).all((1, 2, 3)).argmax()) for image in torch.cat(images)]
    assert sorted(order) == list(range(30))
    assert torch.cat(labels).tolist() == LABELS[order].tolist()


@pytest.mark.parametrize(
    "names",
    [
        {"X_train": "train", "Y_train": "train", "X_test": "test", "Y_test": "test"},
        {"x_train": "train", "y_train": "train", "x_val": "val", "y_val": "val"},
        {"train_set_x": "train", "train_set_y": "train", "test_set_x": "test", "test_set_y": "test"},
        {"X": "train", "y": "train"},
        {"images": "train", "labels": "train"},
        {"images": "train", "targets": "train"},
        {"train/images": "train", "train/labels": "train", "valid/images": "valid", "valid/labels": "valid"},
        {"X_train": "train", "other": None},
    ],
    ids=lambda names: next(iter(names)),
)
def test_datasets_with_common_names_are_found(tmp_path, names):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for name in names:
            file[name] = IMAGES if "x" in name.lower() or "images" in name else LABELS
    pack = open_pack(tmp_path / "p.h5")
    assert list(pack) == list(dict.fromkeys(split for split in names.values() if split))
    assert all((data.labels is None) == ("other" in names) for data in pack.values())
    for data in pack.values():
        assert torch.equal(
            data[3][0] if data.labels is not None else data[3], torch.from_numpy(IMAGES[3]).permute(2, 0, 1)
        )


def test_names_may_be_nested_and_given_for_each_split(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["a/b/images"], file["a/b/labels"] = IMAGES, LABELS
        file["test images"], file["test labels"] = IMAGES[:3], LABELS[:3]
    x = {"train": "a/b/images", "test": "/test images"}
    pack = open_pack(tmp_path / "p.h5", x=x, y={"train": "/a/b/labels", "test": "test labels"})
    assert {split: len(data) for split, data in pack.items()} == {"train": 30, "test": 3}
    assert open_pack(tmp_path / "p.h5", x="a/b/images")["train"].labels is None


def test_without_common_names_the_error_lists_the_datasets(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["some/samples"], file["targets"] = IMAGES, LABELS
    for options in ({}, {"x": "samples"}, {"x": "some"}, {"x": "some/samples", "y": "nothing/here"}):
        with pytest.raises(BadSource, match=r"'targets', 'some/samples'"):
            open_pack(tmp_path / "p.h5", **options)


def test_a_dataset_without_values_is_refused(tmp_path):
    for shape, reason in (((0, 6, 5, 3), "'images' has no samples"), ((30, 0, 5, 3), "have the shape (0, 5, 3)")):
        path = write_hdf5(tmp_path / f"{shape[0]}.h5", np.zeros(shape, "|u1"), LABELS[: shape[0]])
        with pytest.raises(BadSource, match=re.escape(reason)):
            open_pack(path)


def test_thousands_of_nested_groups_are_not_searched(tmp_path, monkeypatch):
    path = write_hdf5(tmp_path / "p.h5")
    with h5py.File(path, "r+") as file:
        group = file
        for _ in range(300):
            group = group.create_group("deep")
        group["hidden"] = LABELS
        # A cycle of groups has paths of any length.
        file["deep/cycle"] = file["deep"]
    seen = []
    own = h5py.Group.__iter__
    monkeypatch.setattr(h5py.Group, "__iter__", lambda group: seen.append(group) or own(group))
    assert len(open_pack(path)["train"]) == 30
    with pytest.raises(BadSource, match=r"no dataset 'other'; expected one of 'images', 'labels'\."):
        open_pack(path, x="other")
    assert len(seen) < 1000


def test_the_search_for_datasets_stops_after_a_number_of_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5_reader, "_SEARCHED_OBJECTS", 3)
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for number in range(9):
            file[f"data{number}"] = LABELS
    with pytest.raises(BadSource, match=r"expected one of 'data0', 'data1', 'data2'\."):
        open_pack(tmp_path / "p.h5", x="other")


def test_two_datasets_for_one_split_are_never_chosen_from_silently(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for split, count in (("val", 30), ("dev", 20)):
            file[f"X_{split}"], file[f"Y_{split}"] = IMAGES[:count], LABELS[:count]
    with pytest.raises(BadSource, match=r"'X_val' and 'X_dev' are the same split.*with x="):
        open_pack(tmp_path / "p.h5")
    pack = open_pack(tmp_path / "p.h5", x={"val": "X_dev"}, y={"dev": "Y_dev"})
    assert {split: len(data) for split, data in pack.items()} == {"val": 20}


@pytest.mark.parametrize(
    "options",
    [
        {"y": "labels"},
        {"x": ""},
        {"x": {}},
        {"x": {"fold 1": "images"}},
        {"x": {"train": 3}},
        {"x": ["images"]},
        {"x": {"train": "images", "training": "labels"}},
        {"x": {"train": "images"}, "y": {"test": "labels"}},
    ],
)
def test_invalid_dataset_names_raise(tmp_path, options):
    with pytest.raises(InvalidOption, match="Cannot open"):
        open_pack(write_hdf5(tmp_path / "p.h5"), **options)


@pytest.mark.parametrize(
    ("labels", "kind", "first"),
    [
        (LABELS.astype(">i2"), "class", 1),
        (LABELS.astype("|u1").reshape(30, 1), "class", 1),
        (LABELS > 1, "class", 0),
        (np.array([b"cat", b"dog"] * 15), "class", 1),
        (np.tile(np.array([[1, 0, 1], [0, 1, 0]], "|u1"), (15, 1)), "multilabel", torch.tensor([0, 1, 0])),
        (np.linspace(0, 29, 30), "regression", torch.tensor(1.0)),
        (np.linspace(0, 29, 30).astype(">f4"), "regression", torch.tensor(1.0)),
        (np.tile(np.array([[2, 3], [4, 5]]), (15, 1)), "regression", torch.tensor([4.0, 5.0])),
    ],
)
def test_the_kind_of_labels_follows_from_dtype_and_shape(tmp_path, labels, kind, first):
    pack = open_pack(write_hdf5(tmp_path / "p.h5", labels=labels))
    assert pack.info.meta["label_kind"] == kind
    label = pack["train"][1][1]
    assert label == first if kind == "class" else torch.equal(label.float(), first.float())
    if labels.dtype.kind == "S":
        assert pack.classes == ("cat", "dog")


def test_task_sets_the_kind_of_labels(tmp_path):
    path = write_hdf5(tmp_path / "p.h5")
    pack = open_pack(path, x="images", y="labels", task="regression", layout="nhwc")
    assert (pack.info.meta["label_kind"], pack.classes, "Inferred" in repr(pack)) == ("regression", (), False)
    assert pickle.loads(pickle.dumps(pack["train"]))[1][1].item() == 1.0
    with pytest.raises(BadSource, match=r"the labels are int64 \(30,\); .* or change task="):
        open_pack(path, task="multilabel")
    with pytest.raises(InvalidOption, match=r"task='classes' is given without labels"):
        open_pack(path, x="images", task="classes")


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (np.tile([0, 5, 7, 7, 100], 6), "only 4 of the class numbers 0 to 100 occur (renumber=)"),
        (np.zeros(30, int), "labels from 'labels'; all samples have the class '0' (y=)"),
    ],
)
def test_gaps_in_class_numbers_and_a_single_class_are_reported(tmp_path, labels, line):
    assert line in repr(open_pack(write_hdf5(tmp_path / "p.h5", labels=labels)))


def test_renumber_numbers_the_classes_of_all_splits_in_order(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for split, numbers in (("train", [0, 5, 100]), ("test", [100, 7, 7])):
            file[f"X_{split}"], file[f"Y_{split}"] = IMAGES[:3], numbers
    pack = open_pack(tmp_path / "p.h5", renumber=True)
    assert pack.classes == ("0", "5", "7", "100")
    assert {split: data.labels.tolist() for split, data in pack.items()} == {"train": [0, 1, 3], "test": [3, 2, 2]}
    assert pickle.loads(pickle.dumps(pack["test"])).labels.tolist() == [3, 2, 2]
    assert "renumber=" not in repr(pack)
    floats = write_hdf5(tmp_path / "f.h5", labels=np.linspace(0, 1, 30))
    with pytest.raises(InvalidOption, match=r"renumber=True is given, but the labels are regression targets"):
        open_pack(floats, renumber=True)


@pytest.mark.parametrize(
    ("images", "line"),
    [
        (IMAGES, "images from uint8 [N, H, W, C]"),
        (IMAGES.transpose(0, 3, 1, 2), "images from uint8 [N, C, H, W]"),
        (IMAGES.transpose(0, 3, 1, 2)[:, :1], "images from uint8 [N, C, H, W]"),
        (np.tile(IMAGES[..., 0], (1, 2, 2)), "images from uint8 [N, H, W]"),
        (IMAGES[..., 0], "arrays uint8 [N, 6, 5], not images"),
        (IMAGES.astype(">f4"), "arrays float32 [N, 6, 5, 3], not images"),
    ],
)
def test_the_layout_is_inferred_as_in_pack_and_reported(tmp_path, images, line):
    path = write_hdf5(tmp_path / "p.h5", np.ascontiguousarray(images))
    assert f"{line} (layout=)" in repr(open_pack(path))
    assert f"{line} (layout=)" in repr(
        colabkit.pack(np.ascontiguousarray(images), tmp_path / "made.h5", progress=False)
    )


def test_layout_sets_the_order_of_the_dimensions(tmp_path):
    path = write_hdf5(tmp_path / "p.h5")
    arrays = open_pack(path, layout="array")
    assert torch.equal(arrays["train"][1][0], torch.from_numpy(IMAGES[1]))
    assert torch.equal(pickle.loads(pickle.dumps(arrays["train"]))[1][0], torch.from_numpy(IMAGES[1]))
    assert "layout=" not in repr(arrays)
    with pytest.raises(InvalidOption, match=r"the samples are uint8 \[N, 6, 5, 3\]; .*Use layout='nhwc'"):
        open_pack(path, layout="nchw")
    with pytest.raises(InvalidOption, match=r"layout='HWC'; expected"):
        open_pack(path, layout="HWC")


@pytest.mark.parametrize("stored", [{}, {"chunks": True, "compression": "gzip"}])
@pytest.mark.parametrize("dtype", [">f4", ">i2", "<u2", "<f8", "|b1", "<c8"])
def test_other_dtypes_and_byte_orders_become_native(tmp_path, dtype, stored):
    arrays = np.random.default_rng(1).normal(size=(9, 4, 2)).astype(dtype)
    data = open_pack(write_hdf5(tmp_path / "p.h5", arrays, LABELS[:9], **stored))["train"]
    expected = torch.from_numpy(arrays.astype(np.dtype(dtype).newbyteorder("=")))
    assert torch.equal(data[4][0], expected[4])
    assert torch.equal(data[2:6][0], expected[2:6])


def test_grayscale_images_get_a_channel_axis_and_channels_first_is_kept(tmp_path):
    for name, stored in STORED.items():
        options = {name: value for name, value in stored.items() if name != "chunks"}
        grey = open_pack(write_hdf5(tmp_path / name, np.ascontiguousarray(IMAGES[..., 0]), **options), layout="nhw")[
            "train"
        ]
        assert (grey[2][0].shape, grey[2:4][0].shape) == ((1, 6, 5), (2, 1, 6, 5))
    first = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2))
    assert torch.equal(open_pack(write_hdf5(tmp_path / "f.h5", first))["train"][1][0], torch.from_numpy(first[1]))


def test_a_pickle_reopens_the_file_and_raises_if_it_was_replaced(foreign):
    data = open_pack(foreign)["train"]
    view = pickle.loads(pickle.dumps(data.subset([5, 1])))
    assert view.labels.tolist() == [1, 1]
    assert view.fingerprint == data.subset([5, 1]).fingerprint
    kept, pack = pickle.dumps(data), open_pack(foreign)
    other = write_hdf5(foreign.with_name("other.h5"), IMAGES[::-1], LABELS[::-1], chunks=(2, 6, 5, 3))
    before = open_pack(other)["train"]
    os.replace(other, foreign)
    for take in (lambda: pickle.loads(kept), lambda: pack["train"]):
        with pytest.raises(SourceChanged, match="the file has been replaced or changed"):
            take()
    write_hdf5(other)
    with pytest.raises(SourceChanged):
        before[0]


@pytest.mark.parametrize("add", HOSTILE.values(), ids=HOSTILE)
def test_links_plugins_and_decompression_bombs_raise_unless_trusted(tmp_path, add):
    other = write_hdf5(tmp_path / "other.h5")
    (tmp_path / "hostile.h5").unlink(missing_ok=True)
    with h5py.File(tmp_path / "hostile.h5", "w") as file:
        add(file, other)
    # Opening the linked file would fail, or change its access time.
    os.chmod(other, 0)
    stamp = os.stat(other).st_atime_ns
    with pytest.raises(BadSource, match=r"trusted=True|Name another dataset"):
        open_pack(tmp_path / "hostile.h5", x="e/images")
    with pytest.raises(BadSource, match=r"no dataset|trusted=True"):
        open_pack(tmp_path / "hostile.h5")
    assert os.stat(other).st_atime_ns == stamp


def test_trusted_links_and_virtual_datasets_are_read(tmp_path):
    other = write_hdf5(tmp_path / "other.h5")
    for name, add in LINKS.items():
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            add(file, other)
        data = open_pack(path, x="e/images", trusted=True)["train"]
        assert torch.equal(data[7], torch.from_numpy(IMAGES[7]).permute(2, 0, 1))
        assert torch.equal(data[3:5], torch.from_numpy(IMAGES[3:5]).permute(0, 3, 1, 2))


def test_text_labels_as_h5py_writes_them_are_named_as_text_and_read_if_trusted(tmp_path: Path) -> None:
    path = tmp_path / "theirs.h5"
    with h5py.File(path, "w") as file:
        file["pictures"] = np.zeros((4, 2, 2, 3), np.uint8)
        file["kind"] = np.array(["cat", "dog"] * 2, h5py.string_dtype())
    with pytest.raises(BadSource, match=r"'kind' is text of varying length; .*trusted=True"):
        open_pack(path, x="pictures", y="kind")
    assert open_pack(path, x="pictures", y="kind", trusted=True)["train"].classes == ("cat", "dog")


def test_trusted_image_files_of_varying_length_are_decoded(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        stored = file.create_dataset("images", (4,), h5py.vlen_dtype(np.uint8))
        for number in range(4):
            stored[number] = np.frombuffer(png(IMAGES[number]), np.uint8)
        file.create_dataset("labels", data=["b", "a", "b", "c"], dtype=h5py.string_dtype())
    pack = open_pack(tmp_path / "p.h5", trusted=True)
    assert pack.classes == ("a", "b", "c")
    with pytest.raises(InvalidOption, match=r"layout='nhwc' is given, but the samples are image files"):
        open_pack(tmp_path / "p.h5", trusted=True, layout="nhwc")
    assert torch.equal(pack["train"][2:4][0], torch.from_numpy(IMAGES[2:4]).permute(0, 3, 1, 2))
    assert [label for _, label in pack["train"]] == [1, 0, 1, 2]


@pytest.mark.parametrize("name", ["objects", "filter"])
def test_unreadable_datasets_raise_even_if_trusted(tmp_path, name):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        HOSTILE[name](file, tmp_path)
    with pytest.raises(BadSource):
        open_pack(tmp_path / "p.h5", x="e/images", trusted=True)["train"][0]


@pytest.mark.parametrize("trusted", [False, True])
def test_trust_is_not_suggested_for_datasets_other_than_numbers(tmp_path, trusted):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        HOSTILE["objects"](file, tmp_path)
    with pytest.raises(
        BadSource, match=r"has dtype object; expected an array of numbers\. Name another dataset with x= or y=\.$"
    ):
        open_pack(tmp_path / "p.h5", x="e/images", trusted=trusted)


def test_a_trusted_broken_link_raises(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["images"], file["labels"] = h5py.SoftLink("/nothing"), LABELS
    with pytest.raises(BadSource, match=r"no dataset 'images'; expected one of 'labels'"):
        open_pack(tmp_path / "p.h5", x="images", trusted=True)


@pytest.mark.parametrize("images", [np.uint8(3), np.zeros(3, [("a", "i4")]), np.array([b"a", b"b"]), IMAGES[:29]])
def test_datasets_that_are_not_samples_with_labels_raise(tmp_path, images):
    with pytest.raises(BadSource, match="Cannot open"):
        open_pack(write_hdf5(tmp_path / "p.h5", images))


def test_a_pack_refuses_dataset_names_and_a_broken_pack_never_opens_as_a_foreign_file(tmp_path):
    path = make_pack(tmp_path / "p.h5", train=4)
    for options in ({"x": "X_train", "y": "Y_train"}, {"task": "classes"}, {"renumber": True}, {"layout": "nhwc"}):
        name, value = next(iter(options.items()))
        with pytest.raises(InvalidOption, match=f"{name}={value!r} applies only to HDF5 files .*Omit {name}="):
            open_pack(path, **options)
    data = path.read_bytes()
    broken = {
        "no seal": bytes(4096) + data[4096:],
        "another mark": b"x" + data[1:],
        "without its first page": data[4096:],
    }
    for name, content in broken.items():
        path.write_bytes(content)
        for options in ({}, {"x": "X_train", "y": "Y_train"}, {"x": "X_train", "trusted": True}):
            with pytest.raises((NotSealed, BadSource, Corrupt)):
                pytest.fail(f"{name}: {open_pack(path, **options)!r}")
    with h5py.File(make_pack(tmp_path / "q.h5", train=4)) as pack, h5py.File(tmp_path / "copy.h5", "w") as copy:
        for name in pack:
            pack.copy(name, copy)
        copy.attrs["colabkit_meta"] = pack.attrs["colabkit_meta"]
    with pytest.raises(NotSealed, match="lost its seal"):
        open_pack(tmp_path / "copy.h5", x="X_train")


def test_a_damaged_pack_never_opens_with_other_contents(tmp_path):
    path = make_pack(tmp_path / "made.h5", train=6, val=3)
    original, data = whole_content(path), path.read_bytes()
    seeded = random.Random(8)
    used = [position for position, byte in enumerate(data) if byte]
    for number in range(600):
        if number % 3:
            changed = bytearray(data)
            for _ in range(seeded.randint(1, 12)):
                changed[seeded.choice(used if number % 3 == 1 else range(20))] = seeded.randrange(256)
        else:
            changed = data[: seeded.randrange(len(data))]
        path.write_bytes(changed)
        try:
            splits = {split: [(x.tolist(), y) for x, y in dataset] for split, dataset in open_pack(path).items()}
        except ColabkitError:
            continue
        assert whole_content(path) == original
        assert {split: len(samples) for split, samples in splits.items()} == {"train": 6, "val": 3}


def test_a_truncated_foreign_file_raises_a_colabkit_error(tmp_path):
    path = write_hdf5(tmp_path / "p.h5", **STORED["gzip"])
    data = path.read_bytes()
    seeded = random.Random(9)
    for _ in range(60):
        path.write_bytes(data[: seeded.randrange(len(data))])
        with pytest.raises(ColabkitError):
            open_pack(path)["train"][:]
    with pytest.raises(SourceMissing):
        open_pack(tmp_path / "none.h5", x="images")


def test_reading_a_damaged_chunk_raises(tmp_path):
    path = write_hdf5(tmp_path / "p.h5", **STORED["gzip"])
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(3)
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(bytes(8))
    data = open_pack(path)["train"]
    with pytest.raises(BadSource, match=r"samples .* cannot be read"):
        data[:]


def test_repr_shows_that_there_is_no_seal(tmp_path):
    pack = open_pack(write_hdf5(tmp_path / "p.h5"))
    assert "seal none" in repr(pack)
    assert "images 6x5x3, 4 classes" in repr(pack)
    labels = "4 classes, not regression, since labels are whole numbers (task=)"
    assert f"Inferred: samples from 'images' (x=); labels from 'labels' (y=); {labels}" in repr(pack)
    assert "4 classes, not regression, since" in pack._repr_html_()
    with pytest.raises(NotSealed):
        read_pack(pack.path)


@pytest.mark.parametrize(
    "labels", [np.full(30, np.inf), np.full(30, 1e300), np.full((30, 2), np.nan), np.full(30, 2**63, np.uint64)]
)
def test_labels_out_of_range_raise(tmp_path, labels):
    reason = r"(a label is NaN|the label .* is out of range for (float32|int64))"
    with pytest.raises(BadSource, match=rf"{reason}; .*Name another dataset with y="):
        open_pack(write_hdf5(tmp_path / "p.h5", labels=labels))


def test_a_split_without_labels_raises_instead_of_being_skipped(tmp_path):
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for name, values in (("X_train", IMAGES), ("y_train", LABELS), ("X_test", IMAGES)):
            file.create_dataset(name, data=values)
    with pytest.raises(BadSource, match=r"'X_test' has no labels, .*Name the datasets to open, for example x="):
        open_pack(tmp_path / "p.h5")
    assert [*open_pack(tmp_path / "p.h5", x={"train": "X_train"}, y={"train": "y_train"})] == ["train"]

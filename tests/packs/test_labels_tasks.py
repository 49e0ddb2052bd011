"""Reports list the properties of samples that `pack()`, `prepare()` and `FileDataset` infer; options override them."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import colabkit
from colabkit.errors import BadSource, ColabkitError, InvalidOption

COUNT = 6
AGES = [20, 23, 24, 30, 41, 50]
ROWS = np.arange(COUNT * 4).reshape(COUNT, 4).astype(np.float32)
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 8, 9), np.uint8)


@pytest.fixture
def table(tmp_path):
    for number in range(COUNT):
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(COUNT)]
    return pd.DataFrame({"path": paths, "age": AGES, "id": [0, 5, 7, 7, 100, 5], "kind": ["cat"] * COUNT})


@pytest.fixture
def packed(tmp_path):
    def run(source, **options):
        report = colabkit.pack(source, tmp_path / "p.h5", overwrite=True, progress=False, **options)
        return report, colabkit.open_pack(report)

    return run


def test_a_column_of_whole_numbers_is_reported_as_classes_and_becomes_targets_on_request(table, packed, tmp_path):
    report, _ = packed(table, labels="age")
    assert "51 classes, not regression, since labels are whole numbers (task=)" in repr(report)
    assert "51 classes" in report._repr_html_()
    assert report.to_dict()["inferred"]["task"] == "51 classes, not regression, since labels are whole numbers"
    report, pack = packed(table, labels="age", task="regression", splits="train=1")
    assert "nferred" not in repr(report)
    assert (pack["train"].labels.tolist(), pack["train"].labels.dtype) == (AGES, torch.float32)
    prepared = colabkit.prepare(table, labels="age", task="regression", to=None, progress=False)
    assert prepared["train"].labels.tolist() == AGES
    assert "Inferred: all samples are 'train' (splits=)" in repr(prepared)
    data = colabkit.FileDataset(table, labels="age", task="regression")
    assert data.labels.tolist() == AGES
    assert "51 classes" in repr(colabkit.FileDataset(table, labels="age"))


def test_gaps_in_class_numbers_are_reported_and_closed_on_request(table, packed):
    for source, options in ((table, {"labels": "id"}), ((ROWS, table["id"].to_numpy()), {})):
        report, pack = packed(source, **options)
        assert report.inferred["renumber"] == "only 4 of the class numbers 0 to 100 occur"
        assert len(pack.classes) == 101
        report, pack = packed(source, renumber=True, **options)
        assert "renumber" not in report.inferred
        assert pack.classes == ("0", "5", "7", "100")
        assert pack["train"].labels.tolist() == [0, 1, 2, 2, 3, 1]


def test_negative_class_numbers_of_arrays_are_reported(packed):
    report, pack = packed((ROWS, -np.arange(len(ROWS))))
    assert report.inferred["renumber"] == f"the numbers {1 - len(ROWS)} to 0 are kept, but losses expect classes from 0"
    assert pack["train"].labels.min() == 1 - len(ROWS)


def test_a_single_class_is_reported_even_if_the_column_is_named(table, packed):
    report, _ = packed(table, labels="kind", task="classes", splits="train=1")
    assert report.inferred == {"labels": "all samples have the class 'cat'"}


@pytest.mark.parametrize(
    ("labels", "task", "kind", "values"),
    [
        (np.array(AGES), "regression", torch.float32, AGES),
        (np.array([0.0, 2, 1, 1, 0, 2]), "classes", torch.int64, [0, 2, 1, 1, 0, 2]),
        (np.eye(COUNT), "multilabel", torch.uint8, np.eye(COUNT).tolist()),
        (np.eye(COUNT, dtype=int), "regression", torch.float32, np.eye(COUNT).tolist()),
    ],
)
def test_the_task_decides_how_labels_in_arrays_are_stored(packed, labels, task, kind, values):
    sources = [(ROWS, labels), torch.utils.data.TensorDataset(torch.tensor(ROWS), torch.tensor(labels))]
    for source in sources:
        found = packed(source, task=task)[1]["train"]
        assert (found.labels.dtype, found.labels.tolist()) == (kind, values)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["a"] * COUNT, "regression"),
        (AGES, "multilabel"),
        ([0.5] * COUNT, "classes"),
    ],
)
def test_labels_that_do_not_fit_the_task_raise(table, packed, labels, task):
    with pytest.raises(BadSource, match=r"expected .* for this task.*change task="):
        packed(table.assign(value=labels), labels="value", task=task)
    with pytest.raises(InvalidOption, match="Change task="):
        packed((ROWS, np.array(labels)), task=task)


@pytest.mark.parametrize(
    ("separator", "split"), [(" ", "split()"), (",", "split(',')"), ("; ", "split('; ')"), ("|", "split('|')")]
)
def test_texts_of_several_labels_are_reported_and_the_error_splits_them(table, packed, separator, split):
    tags = [f"haze{separator}water", f"haze{separator}road", "water", "road", f"water{separator}road", "haze"]
    table = table.assign(tags=tags)
    report, _ = packed(table, labels="tags")
    reason = "since labels are text (for several labels per sample, split them first)"
    assert report.inferred["task"] == f"6 classes, {reason}"
    advice = rf"for this task\. Split the text into lists of labels, for example with {{}}{re.escape(split)}\."
    with pytest.raises(BadSource, match=advice.format(r"table\['tags'\] = table\['tags'\]\.str\.")):
        packed(table, labels="tags", task="multilabel")
    with pytest.raises(BadSource, match=advice.format(r"text\.")):
        packed(table, labels=lambda path: tags[int(path[-5])], task="multilabel")
    table["tags"] = table["tags"].str.split(separator)
    assert packed(table, labels="tags", task="multilabel")[1].classes == ("haze", "road", "water")


def test_class_names_of_several_words_are_not_reported_as_several_labels(table, packed):
    names = ["great white shark", "tiger shark", "great grey owl", "barn owl", "red fox", "grey fox"]
    assert packed(table.assign(kind=names), labels="kind")[0].inferred["task"] == "6 classes, since labels are text"


@pytest.mark.parametrize(
    ("label", "found"), [(np.nan, r"a label is NaN|is empty for 1 of"), (np.inf, "inf|Change task=")]
)
def test_class_labels_that_are_nan_or_infinite_raise_an_error_that_names_the_cause(table, packed, label, found):
    labels = np.array([1.0, 2, 3, 3, 2, label])
    for source, options in ((table.assign(value=labels), {"labels": "value"}), ((ROWS, labels), {})):
        with pytest.raises(ColabkitError, match=found):
            packed(source, task="classes", **options)


def test_renumbered_bools_keep_their_names(table, packed):
    for source, options in ((table.assign(old=True), {"labels": "old"}), ((ROWS, np.ones(COUNT, bool)), {})):
        assert packed(source, renumber=True, **options)[1].classes == ("False", "True")


def test_options_of_labels_that_do_not_apply_are_refused_or_reported(table, packed):
    texts, targets = table["kind"].tolist(), np.linspace(0, 1, COUNT)
    for source, options in ((table, {"labels": "kind"}), ((ROWS, texts), {})):
        assert packed(source, renumber=True, **options)[0].inferred["renumber"].startswith("classes with names are")
    for source, options in ((table.assign(value=targets), {"labels": "value"}), ((ROWS, targets), {})):
        with pytest.raises(
            InvalidOption, match=r"renumber=True is given, but the labels are regression targets; .*Omit"
        ):
            packed(source, renumber=True, **options)
    for source in (table, ROWS):
        with pytest.raises(InvalidOption, match=r"task='classes' is given, but the samples have no labels\. Name the"):
            packed(source, task="classes", labels=None)
        with pytest.raises(InvalidOption, match=r"renumber=True is given, but the samples have no labels"):
            packed(source, renumber=True, labels=None)
    with pytest.raises(InvalidOption, match=r"task='regression' is given, but the samples have no labels"):
        colabkit.FileDataset(table, labels=None, task="regression")


def test_labels_of_arrays_may_be_a_tuple_and_splits_may_be_tuples(packed):
    assert packed((ROWS, tuple(AGES)))[1]["train"].labels.tolist() == AGES
    pack = packed({"train": (ROWS, AGES), "dev": (ROWS[:2], AGES[:2])})[1]
    assert {split: data.labels.tolist() for split, data in pack.items()} == {"train": AGES, "dev": AGES[:2]}


def test_images_are_recognized_with_their_channels_first_or_last(packed):
    labels = np.array(AGES)
    for source, order in ((PIXELS, "C, H, W"), (PIXELS.transpose(0, 2, 3, 1), "H, W, C")):
        report, pack = packed((source, labels))
        assert report.inferred["layout"] == f"images from uint8 [N, {order}]"
        assert report.sample_shape == (8, 9, 3)
        assert np.array_equal(pack["train"][:][0], PIXELS)
    report, pack = packed((PIXELS, labels), layout="array")
    assert (report.encoding, "layout" in report.inferred) == ("array", False)
    assert np.array_equal(pack["train"][:][0], PIXELS)
    with pytest.raises(InvalidOption, match=r"samples are uint8 \[N, 3, 8, 9\]; expected uint8 images \[N, H, W, C\]"):
        packed((PIXELS, labels), layout="nhwc")


def test_arrays_without_channels_are_images_of_one_channel_unless_they_are_small(packed):
    report, pack = packed((PIXELS[:, 0], np.array(AGES)))
    assert report.inferred["layout"] == "images from uint8 [N, H, W]"
    assert np.array_equal(pack["train"][:][0], PIXELS[:, :1])
    assert packed(PIXELS[:, 0, :7])[0].inferred["layout"] == "arrays uint8 [N, 7, 9], not images"
    assert packed(PIXELS[:, 0, :7], layout="nhw")[0].sample_shape == (7, 9, 1)
    with pytest.raises(InvalidOption, match=r"expected uint8 images \[N, H, W, C\] .*Use layout='nhw'"):
        packed(PIXELS[:, 0], layout="nhwc")
    with pytest.raises(InvalidOption, match=r"expected uint8 images \[N, H, W\]\. Use layout='nchw'"):
        packed(PIXELS, layout="nhw")


def test_sharded_arrays_keep_their_layout(packed):
    assert np.array_equal(packed((PIXELS, np.array(AGES)), shard_bytes=500)[1]["train"][:][0], PIXELS)

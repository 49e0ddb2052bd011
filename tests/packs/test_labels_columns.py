"""Labels and splits from columns: the meaning of cells, the choice of the column, and errors."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from listings import table_of

from colabkit.errors import BadSource, InvalidOption
from colabkit.packs.labels.labelling import LabelledSamples, label_samples
from colabkit.storage.sources.items import Item, Listing


def labelled(cells: Any, **options: Any) -> LabelledSamples:
    return label_samples(table_of(label=cells), "source", **options)


@given(st.lists(st.text(), min_size=1))
def test_text_is_classes_and_samples_keep_their_class_names(cells):
    found = labelled(cells)
    assert (found.kind, found.values.dtype) == ("class", np.int64)
    assert found.classes == tuple(sorted(set(cells)))
    assert [found.classes[value] for value in found.values] == cells


@given(st.lists(st.integers(), min_size=1))
def test_whole_numbers_are_classes_in_numerical_order(cells):
    found = labelled(cells)
    assert found.kind == "class"
    assert [int(found.classes[value]) for value in found.values] == cells
    assert list(found.classes) == sorted(found.classes, key=int)


def test_whole_numbers_from_0_on_keep_their_values():
    found = labelled([5, 2, 5])
    assert (found.classes, found.values.tolist()) == (("0", "1", "2", "3", "4", "5"), [5, 2, 5])
    for odd in ([-1, 5], [100_000, 5]):
        assert labelled(odd).classes == tuple(map(str, sorted(odd)))


def test_bools_are_two_classes_even_if_only_one_occurs():
    found = labelled([True, True])
    assert (found.kind, found.classes, found.values.tolist()) == ("class", ("False", "True"), [1, 1])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_floats_are_targets_even_if_all_are_whole_numbers(cells):
    found = labelled(cells)
    assert (found.kind, found.classes, found.values.dtype) == ("regression", (), np.float32)
    assert found.values.tolist() == cells


@pytest.mark.parametrize("beyond", [math.inf, -math.inf, 1e39, 10**400], ids=str)
def test_targets_out_of_range_of_float32_raise_with_their_sample(beyond):
    for cells in ([0.5, beyond], [[0.5, 1.5], [2.5, float(beyond) if beyond != 10**400 else math.inf]]):
        with pytest.raises(
            BadSource, match=r"contains .* for 'shard/00000001'; expected values in the range of float32"
        ):
            labelled(cells)


@given(st.lists(st.frozensets(st.text(max_size=3), max_size=4), min_size=1).filter(any), st.sampled_from([list, set]))
def test_lists_of_names_are_the_labels_of_a_sample(cells, kind):
    found = labelled([kind(cell) for cell in cells])
    assert (found.kind, found.values.dtype) == ("multilabel", np.uint8)
    assert found.classes == tuple(sorted(set().union(*cells)))
    held = [{found.classes[place] for place in np.flatnonzero(row)} for row in found.values]
    assert held == [set(cell) for cell in cells]


@pytest.mark.parametrize(
    ("cells", "classes", "values"),
    [
        ([[3, 10], [3], []], ("3", "10"), [[1, 1], [1, 0], [0, 0]]),
        ([[0, 1, 0], [1, 1, 0]], ("0", "1", "2"), [[0, 1, 0], [1, 1, 0]]),
        ([(True, False), (True, True)], ("0", "1"), [[1, 0], [1, 1]]),
        ([np.array([0, 1]), np.array([0, 0])], ("0", "1"), [[0, 1], [0, 0]]),
        ([[0, 1], [0]], ("0", "1"), [[1, 1], [1, 0]]),
        ([[0, 2], [0, 1]], ("0", "1", "2"), [[1, 0, 1], [1, 1, 0]]),
        ([{0, 1}, {1}], ("0", "1"), [[1, 1], [0, 1]]),
        ([["a", "a"], ["b", "a"]], ("a", "b"), [[1, 0], [1, 1]]),
    ],
)
def test_lists_of_one_length_with_only_0_and_1_state_each_label(cells, classes, values):
    found = labelled(cells)
    assert (found.kind, found.classes, found.values.tolist()) == ("multilabel", classes, values)


def test_lists_of_floats_of_one_length_are_several_targets():
    found = labelled([[0.5, 1.0], [2.0, 3.0]])
    assert (found.kind, found.classes, found.values.dtype) == ("regression", ("0", "1"), np.float32)
    assert found.values.tolist() == [[0.5, 1.0], [2.0, 3.0]]


def test_numpy_and_torch_numbers_are_treated_like_plain_ones():
    for value in (np.int64(4), np.uint8(4), torch.tensor(4)):
        assert labelled([value, 4]).values.tolist() == [4, 4]
    assert labelled([np.float32(0.5), 0.5]).kind == "regression"
    assert labelled([1, 1.5]).kind == "regression"
    assert labelled([np.str_("a"), "b"]).classes == ("a", "b")
    assert labelled([np.bool_(True), False]).classes == ("False", "True")
    assert labelled([[np.str_("a")], ["b", "a"]]).values.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["a", None, "b", None], r"'label' is empty for 2 of 4 samples, starting with 'shard/00000001'"),
        ([1.0, math.nan], r"is empty for 1 of 2 samples, starting with 'shard/00000001'"),
        ([None, None], r"is empty for 2 of 2 samples, starting with 'shard/00000000'"),
        ([1, "a"], r"a whole number for 'shard/00000000' and text for 'shard/00000001'; expected values of one kind"),
        ([1, "1.5"], r"a whole number for .+ and .+ for"),
        ([True, 1], r"a bool for .+ and a whole number for"),
        (["a", ["b"]], r"text for .+ and a list for"),
        ([b"a", b"b"], r"contains a bytes for 'shard/00000000'; expected text, whole numbers"),
        (["a", {"b": 1}], r"contains a dict for 'shard/00000001'"),
        ([["a"], ["b", None]], r"a list with an empty value for 'shard/00000001'"),
        ([[0.5], [math.nan]], r"a list with an empty value for 'shard/00000001'"),
        ([["a"], [1]], r"lists of int, str"),
        ([[1], [True, False]], r"lists of bool, int"),
        ([[0.5], [0.5, 1.0]], r"lists of 1 to 2 floats"),
        ([{0.5}, {1.0}], r"lists of float"),
        ([[["a"]], [["b"]]], r"lists of list"),
        ([[], []], r"only empty lists"),
    ],
)
def test_cells_that_cannot_be_labels_raise_with_their_sample(cells, found):
    with pytest.raises(BadSource, match=found):
        labelled(cells)


def test_too_many_labels_for_memory_raise(monkeypatch):
    monkeypatch.setattr("colabkit.packs.labels.label_values._MOST_TABLE_BYTES", 8)
    assert labelled([["a"], ["b"]]).values.shape == (2, 2)
    with pytest.raises(BadSource, match="3 distinct labels, which take 9 B for 3 samples; expected at most 8 B"):
        labelled([["a"], ["b"], ["c"]])


def test_several_columns_of_0_and_1_are_labels_named_after_the_columns():
    found = label_samples(table_of(x=[0, 1], y=[True, False], z=[0, 0]), "source", labels=["y", "x", "z"])
    assert (found.kind, found.classes) == ("multilabel", ("y", "x", "z"))
    assert (found.values.dtype, found.values.tolist()) == (np.uint8, [[1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("other", [[3, 300], [0, 1], [2.5, 0.5]])
def test_several_columns_with_floats_are_targets(other):
    for names in (["a", "b"], ["b", "a"]):
        found = label_samples(table_of(a=[0.5, 1.5], b=other), "source", labels=names)
        assert (found.kind, found.classes, found.values.dtype) == ("regression", tuple(names), np.float32)
        assert found.values[:, names.index("b")].tolist() == other


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"a": [-1, 1], "b": [1, 1]}, "columns a, b contain numbers other than 0 and 1"),
        ({"a": [0, 1], "b": ["x", "y"]}, "column 'b' contains text for 'shard/00000000'"),
        ({"a": [0, 1], "b": [1, None]}, "column 'b' is empty for 1 of 2 samples, starting with 'shard/00000001'"),
    ],
)
def test_several_columns_of_other_values_raise(columns, found):
    with pytest.raises(BadSource, match=found):
        label_samples(table_of(**columns), "source", labels=["a", "b"])


def test_unknown_and_repeated_columns_raise():
    with pytest.raises(InvalidOption, match="no column 'c'; expected one of a, b"):
        label_samples(table_of(a=[1], b=[2]), "source", labels="c")
    with pytest.raises(InvalidOption, match="no column 'c'; expected one of a, b"):
        label_samples(table_of(a=[1], b=[2]), "source", labels=["a", "c"])
    with pytest.raises(InvalidOption, match="names a column twice"):
        label_samples(table_of(a=[1], b=[2]), "source", labels=["a", "a"])


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["width", "label"], "label"),
        (["class", "LABELS"], "LABELS"),
        (["y", "Target"], "Target"),
        (["json.label", "split", "cls"], "cls"),
        (["image/class/text", "image/class/label"], "image/class/label"),
        (["json.id", "json.class"], "json.class"),
        (["width", " Label "], " Label "),
    ],
)
def test_the_label_column_is_recognized_by_its_name(columns, chosen):
    cells = {name: ["train" if name == "split" else f"of {name}"] for name in columns}
    assert label_samples(table_of(**cells), "source").classes == (f"of {chosen}",)


def test_a_table_without_a_label_column_uses_folders_and_keeps_its_order():
    paths = ["b/2.jpg", "a/1.jpg", "b/1.jpg", "a/1.jpg"]
    found = label_samples(table_of(paths, width=[1, 2, 3, 4]), "source")
    assert [item.path for item in found.items] == paths
    assert (found.classes, found.values.tolist()) == (("a", "b"), [1, 0, 1, 0])
    assert found.rows.tolist() == found.splits["train"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("paths", [None, ["1.jpg", "2.jpg"], ["a/1.jpg", "2.jpg"], ["images/1.jpg", "images/2.jpg"]])
def test_a_table_without_label_column_and_class_folders_raises(paths):
    listing = table_of(paths, age=[31, 40], sex=["f", "m"])
    with pytest.raises(
        BadSource, match=r"no column \(age, sex\) has a common label name, and there are no.+labels='age'.+labels=None"
    ):
        label_samples(listing, "source")
    assert label_samples(listing, "source", labels="sex").classes == ("f", "m")
    assert label_samples(listing, "source", labels=None).values is None
    by_age = label_samples(listing, "source", labels=lambda path: path[-1])
    assert len(by_age.items) == 2


def test_a_table_without_rows_raises():
    with pytest.raises(BadSource, match="no rows"):
        label_samples(Listing((), (), 0, {"label": ()}), "source")


def test_rows_that_a_table_skipped_are_listed_and_all_others_are_samples():
    listing = Listing((Item("x/.hidden", 1), Item("y.txt", 1)), (("z", "no image"),), 0, {"label": ("a", "b")})
    found = label_samples(listing, "source")
    assert len(found.items) == 2
    assert found.left_out == (("z", "no image"),)


def test_a_column_named_split_accepts_common_names_of_splits():
    listing = table_of(**{"label": [1, 2, 3, 4], " Split ": ["val", "TRAIN", "testing", "training"]})
    found = label_samples(listing, "source")
    assert {split: numbers.tolist() for split, numbers in found.splits.items()} == {
        "train": [1, 3],
        "val": [0],
        "test": [2],
    }
    assert list(found.splits) == ["train", "val", "test"]


def test_a_given_column_of_splits_takes_precedence():
    paths = ["train/a/1.jpg", "test/a/2.jpg"]
    listing = table_of(paths, label=[1, 2], split=["train", "train"], part=["val", "test"])
    assert label_samples(listing, "source", splits="part").splits["val"].tolist() == [0]
    assert list(label_samples(listing, "source").splits) == ["train"]
    assert list(label_samples(table_of(paths, label=[1, 2]), "source").splits) == ["train", "test"]


@pytest.mark.parametrize("odd", ["extra", 3, None, ["train"]])
def test_unknown_splits_raise_with_their_names(odd):
    listing = table_of(label=[1, 2], split=["train", odd])
    with pytest.raises(
        BadSource, match=r"the column 'split' contains .+ \(first for 'shard/00000001'\); expected train, val"
    ):
        label_samples(listing, "source")


@pytest.mark.parametrize("folds", [[0, 1, 2], ["0", "1", "2"]])
def test_a_column_of_fold_numbers_raises_with_the_way_to_cross_validate(folds):
    views = re.escape("and use dataset.subset(table['fold'] != k) for each fold k, or colabkit.k_fold()")
    listing = table_of(label=[1, 2, 3], fold=folds)
    with pytest.raises(BadSource, match=rf"cross-validation, omit splits= {views}"):
        label_samples(listing, "source", splits="fold")
    with pytest.raises(BadSource, match=rf"cross-validation, omit splits= {views}"):
        label_samples(listing, "source", splits=lambda path: "0")
    with pytest.raises(BadSource, match=rf"cross-validation, rename the column to 'fold' {views}"):
        label_samples(table_of(label=[1, 2, 3], split=folds), "source")


def test_shares_replace_a_split_column_only_if_it_contains_no_splits():
    shares = {"train": 0.5, "test": 0.5}
    by_fold = table_of(label=[1, 1, 1, 1], split=[0, 1, 2, 3])
    assert {split: len(part) for split, part in label_samples(by_fold, "source", splits=shares).splits.items()} == {
        "train": 2,
        "test": 2,
    }
    advice = r"already has the splits train, test.*Omit splits=, and divide .*data\['train'\]\.split\(\(0\.8, 0\.2\)\)"
    with pytest.raises(InvalidOption, match=advice):
        label_samples(table_of(label=[1, 1], split=["train", "test"]), "source", splits=shares)
    all_train = table_of(label=[1, 1], split=["train", "train"])
    assert list(label_samples(all_train, "source", splits=shares).splits) == ["train", "test"]

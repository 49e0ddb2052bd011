"""Splits and classes from folders, and seeded splits by fraction that lose no sample and keep every class's share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.errors import BadSource, InvalidOption
from colabkit.labels import ClassTree, class_tree, split_by_fraction
from colabkit.sources import Item, Listing


def tree_of(*paths: str) -> ClassTree:
    """Return the tree of a listing with these paths."""
    return class_tree(Listing(tuple(Item(path, 1) for path in sorted(paths)), ()), "source")


def labelled(tree: ClassTree) -> dict[str, dict[str, str]]:
    """Return path -> class name for each split."""
    return {
        split: {item.path: tree.classes[label] for item, label in samples} for split, samples in tree.splits.items()
    }


def test_each_folder_is_a_class_and_labels_follow_the_sorted_names():
    tree = tree_of("cats/1.jpg", "ants/1.png", "ants/deep/er/2.PNG", "Bees/x.jpeg")
    assert tree.classes == ("Bees", "ants", "cats")
    assert labelled(tree) == {
        "train": {"Bees/x.jpeg": "Bees", "ants/1.png": "ants", "ants/deep/er/2.PNG": "ants", "cats/1.jpg": "cats"}
    }
    assert [label for _, label in tree.splits["train"]] == [0, 1, 1, 2]
    assert tree.left_out == ()


@pytest.mark.parametrize(
    ("folder", "split"),
    [
        ("train", "train"),
        ("Training", "train"),
        ("dev", "dev"),
        ("val", "dev"),
        ("VALID", "dev"),
        ("validation", "dev"),
        ("test", "test"),
        ("testing", "test"),
    ],
)
def test_split_folders_are_known_by_their_usual_names(folder, split):
    tree = tree_of(f"{folder}/cats/1.jpg", f"{folder}/ants/1.jpg")
    assert labelled(tree) == {split: {f"{folder}/ants/1.jpg": "ants", f"{folder}/cats/1.jpg": "cats"}}


def test_splits_come_in_their_order_with_the_classes_of_all():
    tree = tree_of("test/cats/1.jpg", "val/ants/1.jpg", "train/bees/1.jpg")
    assert list(tree.splits) == ["train", "dev", "test"]
    assert tree.classes == ("ants", "bees", "cats")


def test_a_split_folder_beside_a_class_folder_is_a_class():
    tree = tree_of("test/1.jpg", "train/1.jpg", "cats/1.jpg")
    assert tree.classes == ("cats", "test", "train")
    assert list(tree.splits) == ["train"]


@pytest.mark.parametrize("wrap", ["data/", "a/b/c/", "my dataset/"])
def test_folders_that_wrap_the_whole_tree_are_looked_through(wrap):
    assert tree_of(f"{wrap}cats/1.jpg", f"{wrap}ants/1.jpg").classes == ("ants", "cats")
    tree = tree_of(f"{wrap}train/cats/1.jpg", f"{wrap}test/cats/2.jpg")
    assert labelled(tree) == {"train": {f"{wrap}train/cats/1.jpg": "cats"}, "test": {f"{wrap}test/cats/2.jpg": "cats"}}


def test_a_single_class_is_no_wrapping():
    assert tree_of("cats/1.jpg", "cats/2.jpg").classes == ("cats",)
    assert tree_of("cats/1.jpg", "cats/deep/2.jpg").classes == ("cats",)


def test_a_lone_split_folder_is_no_wrapping():
    assert labelled(tree_of("test/cats/1.jpg", "test/ants/1.jpg")) == {
        "test": {"test/ants/1.jpg": "ants", "test/cats/1.jpg": "cats"}
    }


def test_hidden_files_and_files_that_are_no_images_are_left_out_and_named():
    tree = tree_of(
        "cats/1.jpg",
        "cats/.hidden.jpg",
        ".git/x.png",
        "__MACOSX/cats/._1.jpg",
        "cats/Thumbs.db",
        "README",
        "cats/jpg",
        "png",
        "cats/1.jpg.txt",
        "cats/x.",
    )
    assert labelled(tree) == {"train": {"cats/1.jpg": "cats"}}
    assert sorted(tree.left_out) == [
        (".git/x.png", "hidden"),
        ("README", "no image by its name"),
        ("__MACOSX/cats/._1.jpg", "hidden"),
        ("cats/.hidden.jpg", "hidden"),
        ("cats/1.jpg.txt", "no image by its name"),
        ("cats/Thumbs.db", "no image by its name"),
        ("cats/jpg", "no image by its name"),
        ("cats/x.", "no image by its name"),
        ("png", "no image by its name"),
    ]


def test_what_the_source_passed_over_is_left_out_too():
    listing = Listing((Item("cats/1.jpg", 1),), (("cats/link.jpg", "link"),))
    assert class_tree(listing, "source").left_out == (("cats/link.jpg", "link"),)


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp", "JPG"])
def test_images_are_known_by_their_endings(suffix):
    assert len(tree_of(f"cats/a.b.{suffix}").splits["train"]) == 1


def test_an_image_outside_of_class_folders_is_refused_and_named():
    with pytest.raises(BadSource, match=r"'1\.jpg' lies in no class folder"):
        tree_of("1.jpg", "cats/1.jpg")
    with pytest.raises(BadSource, match=r"'train/1\.jpg' lies in no class folder"):
        tree_of("train/1.jpg", "test/cats/1.jpg")


def test_no_image_and_no_file_are_told_apart():
    with pytest.raises(BadSource, match="none of its 2 files is an image"):
        tree_of("a/1.txt", "b/2.csv")
    with pytest.raises(BadSource, match=r"find classes in 'source': no files at all"):
        tree_of()


def test_any_name_of_a_class_is_kept():
    names = ["<img src=x>", "猫", "a b", "caf\udce9"]
    assert set(tree_of(*(f"{name}/1.jpg" for name in names)).classes) == set(names)


def many(counts: dict[str, int]) -> ClassTree:
    """Return a tree with so many images in each class."""
    return tree_of(*(f"{name}/{number:05d}.jpg" for name, count in counts.items() for number in range(count)))


FRACTIONS = st.sampled_from(
    [
        {"train": 0.8, "test": 0.2},
        {"train": 0.7, "dev": 0.2, "test": 0.1},
        {"test": 0.5, "train": 0.5},
        {"train": 1 / 3, "dev": 1 / 3, "test": 1 / 3},
        {"dev": 1.0},
    ]
)
COUNTS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(10, 60), min_size=1)


@given(counts=COUNTS, fractions=FRACTIONS, seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_every_sample_is_dealt_once_and_each_class_keeps_its_shares(counts, fractions, seed):
    tree = many(counts)
    split = split_by_fraction(tree, fractions, seed)
    assert set(split.splits) == set(fractions)
    dealt = [sample for samples in split.splits.values() for sample in samples]
    assert sorted(dealt, key=str) == sorted(tree.splits["train"], key=str)
    for name, samples in split.splits.items():
        assert list(samples) == sorted(samples, key=lambda sample: sample[0].path)
        for label, class_name in enumerate(tree.classes):
            found = sum(1 for _, its_label in samples if its_label == label)
            assert abs(found - fractions[name] * counts[class_name]) <= 1
    assert (split.classes, split.left_out) == (tree.classes, tree.left_out)


@given(counts=COUNTS, seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_the_same_seed_gives_the_same_splits_whatever_the_order_of_the_fractions(counts, seed):
    one = split_by_fraction(many(counts), {"train": 0.6, "dev": 0.2, "test": 0.2}, seed)
    other = split_by_fraction(many(counts), {"test": 0.2, "train": 0.6, "dev": 0.2}, seed)
    assert one == other


def test_another_seed_gives_other_splits():
    tree = many({"a": 40, "b": 40})
    splits = {split_by_fraction(tree, {"train": 0.5, "test": 0.5}, seed).splits["train"] for seed in range(10)}
    assert len(splits) == 10


def test_each_class_is_dealt_in_an_order_of_its_own():
    test = labelled(split_by_fraction(many({"a": 40, "b": 40}), {"train": 0.5, "test": 0.5}, 0))["test"]
    numbers = {name: {path.partition("/")[2] for path in test if test[path] == name} for name in ("a", "b")}
    assert len(numbers["a"]) == len(numbers["b"]) == 20
    assert numbers["a"] != numbers["b"]


def test_a_class_more_does_not_move_the_samples_of_earlier_classes():
    few = labelled(split_by_fraction(many({"a": 30, "b": 30}), {"train": 0.5, "test": 0.5}, 1))
    more = labelled(split_by_fraction(many({"a": 30, "b": 30, "c": 30}), {"train": 0.5, "test": 0.5}, 1))
    assert set(few["test"]) == {path for path, name in more["test"].items() if name != "c"}


def test_shares_that_add_up_to_a_hair_less_than_one_lose_no_sample():
    tree = ClassTree(("a",), {"train": tuple((Item(str(number), 1), 0) for number in range(600_000))}, ())
    split = split_by_fraction(tree, {"train": 0.5, "test": 0.5 - 9e-7}, 0)
    assert sum(map(len, split.splits.values())) == 600_000


@pytest.mark.parametrize(
    ("fractions", "found"),
    [
        ({}, "add up to 0"),
        ({"train": 0.8}, "add up to 0.8"),
        ({"train": 0.8, "test": 0.3}, "add up to 1.1"),
        ({"train": 1.2, "test": -0.2}, "positive shares"),
        ({"train": 1.0, "test": 0.0}, "positive shares"),
        ({"train": math.nan}, "positive shares"),
        ({"train": math.inf}, "positive shares"),
        ({"train": 0.5, "holdout": 0.5}, "'holdout' is no split"),
    ],
)
def test_fractions_that_cannot_be_meant_are_refused(fractions, found):
    with pytest.raises(InvalidOption, match=found):
        split_by_fraction(many({"a": 10}), fractions, 0)


def test_a_tree_with_splits_of_its_own_is_not_split_again():
    with pytest.raises(InvalidOption, match="already are the splits train, test"):
        split_by_fraction(tree_of("train/a/1.jpg", "test/a/2.jpg"), {"train": 0.5, "test": 0.5}, 0)


def test_a_split_that_would_stay_empty_is_refused():
    with pytest.raises(BadSource, match="no sample for 'test' among 2"):
        split_by_fraction(many({"a": 2}), {"train": 0.9, "test": 0.1}, 0)

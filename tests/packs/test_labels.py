"""Labels from folders: the files that count as samples, and the folders that count as classes or splits."""

from __future__ import annotations

import numpy as np
import pytest
from listings import listing_of

from colabkit.errors import BadSource, InvalidOption
from colabkit.packs.labels.labelling import LabelledSamples, label_samples
from colabkit.storage.sources.items import Item, Listing


def labelled_paths(*paths: str) -> LabelledSamples:
    return label_samples(listing_of(*paths), "source")


def classes_of(labelled: LabelledSamples) -> dict[str, dict[str, str]]:
    return {
        split: {labelled.items[number].path: labelled.classes[labelled.values[number]] for number in numbers}
        for split, numbers in labelled.splits.items()
    }


def test_each_folder_is_a_class_numbered_by_its_sorted_name():
    found = labelled_paths("cats/1.jpg", "ants/1.png", "ants/deep/er/2.PNG", "Bees/x.jpeg")
    assert found.classes == ("Bees", "ants", "cats")
    assert classes_of(found) == {
        "train": {"Bees/x.jpeg": "Bees", "ants/1.png": "ants", "ants/deep/er/2.PNG": "ants", "cats/1.jpg": "cats"}
    }
    assert (found.values.tolist(), found.left_out) == ([0, 1, 1, 2], ())
    names = {"<img src=x>", "猫", "a b", "caf\udce9"}
    assert set(labelled_paths(*(f"{name}/1.jpg" for name in names)).classes) == names


def test_split_folders_are_recognized_by_common_names():
    usual = {"train": "train Training", "val": "val validation", "valid": "VALID", "dev": "dev", "test": "test testing"}
    for split, folders in usual.items():
        for folder in folders.split():
            found = labelled_paths(f"{folder}/cats/1.jpg", f"{folder}/ants/1.jpg")
            assert classes_of(found) == {split: {f"{folder}/ants/1.jpg": "ants", f"{folder}/cats/1.jpg": "cats"}}
    found = labelled_paths("test/cats/1.jpg", "val/ants/1.jpg", "train/bees/1.jpg")
    assert (list(found.splits), found.classes) == (["train", "val", "test"], ("ants", "bees", "cats"))
    beside_a_class = labelled_paths("test/1.jpg", "train/1.jpg", "cats/1.jpg")
    assert (list(beside_a_class.splits), beside_a_class.classes) == (["train"], ("cats", "test", "train"))


@pytest.mark.parametrize("wrap", ["data/", "a/b/c/", "my dataset/"])
def test_folders_that_wrap_the_whole_tree_are_ignored(wrap):
    assert labelled_paths(f"{wrap}cats/1.jpg", f"{wrap}ants/1.jpg").classes == ("ants", "cats")
    found = labelled_paths(f"{wrap}train/cats/1.jpg", f"{wrap}test/cats/2.jpg")
    expected = {"train": {f"{wrap}train/cats/1.jpg": "cats"}, "test": {f"{wrap}test/cats/2.jpg": "cats"}}
    assert classes_of(found) == expected
    for paths in (("cats/1.jpg", "cats/2.jpg"), ("cats/1.jpg", "cats/deep/2.jpg")):
        assert labelled_paths(*paths).classes == ("cats",), "a single class folder is ignored"


def test_hidden_files_and_other_files_are_left_out_and_listed():
    tree = labelled_paths(
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
    assert classes_of(tree) == {"train": {"cats/1.jpg": "cats"}}
    assert sorted(tree.left_out) == [
        (".git/x.png", "hidden"),
        ("README", "no image extension"),
        ("__MACOSX/cats/._1.jpg", "hidden"),
        ("cats/.hidden.jpg", "hidden"),
        ("cats/1.jpg.txt", "no image extension"),
        ("cats/Thumbs.db", "no image extension"),
        ("cats/jpg", "no image extension"),
        ("cats/x.", "no image extension"),
        ("png", "no image extension"),
    ]


def test_files_that_the_source_skipped_are_listed_too():
    listing = Listing((Item("cats/1.jpg", 1),), (("cats/link.jpg", "link"),))
    assert label_samples(listing, "source").left_out == (("cats/link.jpg", "link"),)


def test_images_are_recognized_by_their_extensions():
    for suffix in (
        "bmp",
        "gif",
        "jpeg",
        "jpg",
        "pgm",
        "png",
        "ppm",
        "tif",
        "tiff",
        "webp",
        "JPG",
        "HEIC",
        "avif",
        "tga",
        "jp2",
    ):
        assert len(labelled_paths(f"cats/a.b.{suffix}").splits["train"]) == 1


def test_an_image_outside_of_class_folders_raises_with_its_name():
    with pytest.raises(BadSource, match=r"'1\.jpg' is not in a class folder"):
        labelled_paths("1.jpg", "cats/1.jpg")
    with pytest.raises(BadSource, match=r"'train/1\.jpg' is not in a class folder"):
        labelled_paths("train/1.jpg", "test/cats/1.jpg")


def test_sources_without_images_or_without_files_raise():
    with pytest.raises(BadSource, match="there is no image among 2 files"):
        labelled_paths("a/1.txt", "b/2.csv")
    with pytest.raises(BadSource, match=r"Pillow cannot decode the formats of its images \(1 \.txt, 1 \.cr2\)"):
        labelled_paths("a/1.txt", "b/2.cr2")
    with pytest.raises(BadSource, match=r"In Python, use open_pack\(path\)\['train'\], with x= and y="):
        labelled_paths("data.h5")
    with pytest.raises(BadSource, match=r"Load the arrays with numpy\.load\(path\)"):
        labelled_paths("data.npz")
    with pytest.raises(BadSource, match=r"Cannot label 'source': the source has no files"):
        labelled_paths()


def by_split(labelled: LabelledSamples) -> dict[str, list[str]]:
    return {split: [labelled.items[n].path for n in numbers] for split, numbers in labelled.splits.items()}


def test_links_that_are_not_followed_are_named_if_there_are_no_images():
    for items, found in (
        ((), "only links"),
        ((Item("README", 1), Item("a.txt", 1)), "no image among 2 files, and links"),
    ):
        with pytest.raises(BadSource, match=f"it contains {found}, such as 'cats', which are not followed.* copy the"):
            label_samples(Listing(items, (("cats", "link"), ("pipe", "special file"))), "source")


def test_samples_of_class_folders_are_sorted_by_class_folder_and_name():
    labelled = labelled_paths("cats/1.jpg", "ants/2.png", "ants/deep/1.png", "ants/1.png", "README")
    assert by_split(labelled) == {"train": ["ants/1.png", "ants/2.png", "ants/deep/1.png", "cats/1.jpg"]}
    assert (labelled.kind, labelled.values.dtype, labelled.rows.dtype) == ("class", np.int64, np.int64)
    paths = "train/b/1.jpg", "train/a/2.jpg", "test/b/3.jpg", "val/a/4.jpg", "valid/a/3.jpg", "Val/a/5.jpg"
    labelled = labelled_paths(*paths)
    assert by_split(labelled) == {
        "train": ["train/a/2.jpg", "train/b/1.jpg"],
        "val": ["Val/a/5.jpg", "val/a/4.jpg", "valid/a/3.jpg"],
        "test": ["test/b/3.jpg"],
    }
    assert list(labelled.splits) == ["train", "val", "test"]
    wrapped = labelled_paths("data/x/train/cats/1.jpg", "data/x/val/cats/1.jpg", ".git/x.jpg")
    assert by_split(wrapped) == {"train": ["data/x/train/cats/1.jpg"], "val": ["data/x/val/cats/1.jpg"]}


def test_rows_are_the_positions_of_the_samples_in_the_listing():
    listing = listing_of("a/sub/1.jpg", "a/z.jpg", "B/1.jpg", "a/note.txt")
    labelled = label_samples(listing, "source")
    assert tuple(listing.items[row] for row in labelled.rows) == labelled.items
    assert [item.path for item in labelled.items] == ["B/1.jpg", "a/z.jpg", "a/sub/1.jpg"]


def test_a_list_of_paths_is_sorted_by_class_too_and_keeps_repeated_files():
    items = tuple(Item(path, 1) for path in ("b/1.jpg", "a/2.jpg", "a/1.jpg", "b/1.jpg"))
    labelled = label_samples(Listing(items, ()), "source")
    assert [item.path for item in labelled.items] == ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/1.jpg"]
    assert labelled.rows.tolist()[:2] == [2, 1]


def test_without_labels_files_keep_the_order_of_the_listing():
    labelled = label_samples(listing_of("b/1.jpg", "2.jpg", "a/1.jpg", "x.txt"), "source", labels=None)
    assert by_split(labelled) == {"train": ["2.jpg", "a/1.jpg", "b/1.jpg"]}
    assert (labelled.kind, labelled.classes, labelled.values) == ("none", (), None)
    assert labelled.left_out == (("x.txt", "no image extension"),)
    labelled = label_samples(listing_of("data/train/1.jpg", "data/test/1.jpg"), "source", labels=None)
    assert by_split(labelled) == {"train": ["data/train/1.jpg"], "test": ["data/test/1.jpg"]}


def test_arrays_are_samples_if_no_file_is_an_image():
    labelled = label_samples(listing_of("a/1.npy", "b/2.NPY", "README"), "source")
    assert [item.path for item in labelled.items] == ["a/1.npy", "b/2.NPY"]
    assert labelled.left_out == (("README", "no image extension"),)
    mixed = label_samples(listing_of("a/1.npy", "b/2.jpg"), "source")
    assert mixed.left_out == (("a/1.npy", "no image extension"),)


def test_files_without_extensions_are_all_samples():
    labelled = label_samples(listing_of("00001", "00002"), "source", labels=None)
    assert [item.path for item in labelled.items] == ["00001", "00002"]
    with pytest.raises(BadSource, match=r"'00001' is not in a class folder.+labels=None"):
        label_samples(listing_of("00001", "00002"), "source")


def test_folders_of_files_without_extensions_are_not_classes():
    listing = listing_of("part-0/00001", "part-1/00001")
    with pytest.raises(BadSource, match=r"'part-0/00001' has no file extension.+labels=None"):
        label_samples(listing, "source")
    assert len(label_samples(listing, "source", labels=lambda path: path[5]).classes) == 2


def test_a_function_of_the_path_labels_files():
    listing = listing_of("cat_1.jpg", "dog_1.jpg", "cat_2.jpg")
    labelled = label_samples(listing, "source", labels=lambda path: path.partition("_")[0])
    assert [labelled.classes[value] for value in labelled.values] == ["cat", "cat", "dog"]
    with pytest.raises(BadSource, match=r"labels=.* is empty for 1 of 3 samples, starting with 'dog_1\.jpg'"):
        label_samples(listing, "source", labels=lambda path: None if path.startswith("dog") else 1)


def test_a_function_of_the_path_splits_files():
    listing = listing_of("a/1.jpg", "a/2.jpg", "b/1.jpg")
    labelled = label_samples(listing, "source", splits=lambda path: "Val" if "1" in path else "training")
    assert by_split(labelled) == {"train": ["a/2.jpg"], "val": ["a/1.jpg", "b/1.jpg"]}
    with pytest.raises(BadSource, match=r"the result of splits=.* contains 'holdout', None \(first for 'a/1\.jpg'\)"):
        label_samples(listing, "source", splits=lambda path: "holdout" if path.startswith("a") else None)


def test_files_of_an_unknown_format_are_named_before_hidden_files():
    labelled = label_samples(listing_of(".DS_Store", "a/1.jpg", "a/2.cr2"), "source")
    assert labelled.left_out == (("a/2.cr2", "an image format that Pillow cannot decode"), (".DS_Store", "hidden"))


def test_a_text_that_is_no_column_is_answered_with_an_example_of_shares():
    with pytest.raises(InvalidOption, match=r"no column '80/20'.* splits='train=0\.8,val=0\.2'"):
        label_samples(listing_of("a/1.jpg"), "source", splits="80/20")


def test_a_table_that_is_not_recognized_is_called_a_table():
    with pytest.raises(BadSource, match=r"'people\.csv' has no path column .* does not exist.*path_column=.*root="):
        label_samples(listing_of("people.csv"), "source")
    with pytest.raises(BadSource, match=r"no image among 1 file; .* Check the path\."):
        label_samples(listing_of(".DS_Store"), "source")


def test_invalid_labels_and_splits_raise():
    for options in ({"labels": "label"}, {"labels": ["a", "b"]}, {"splits": "fold"}):
        with pytest.raises(InvalidOption, match=r"no column .+ the source has only files"):
            label_samples(listing_of("a/1.jpg"), "source", **options)
    for labels in (5, [], ["a", 1], {"a"}, b"label"):
        with pytest.raises(InvalidOption, match="labels="):
            label_samples(listing_of("a/1.jpg"), "source", labels=labels)


def test_shares_for_a_source_with_splits_raise():
    with pytest.raises(InvalidOption, match="already has the splits train, test"):
        label_samples(listing_of("train/a/1.jpg", "test/a/2.jpg"), "source", splits={"train": 0.5, "test": 0.5})
    lone = listing_of(*(f"train/a/{n}.jpg" for n in range(4)))
    assert list(label_samples(lone, "source", splits={"train": 0.5, "test": 0.5}).splits) == ["train", "test"]


@pytest.mark.parametrize("wrap", ["", "ds/"])
def test_a_flat_folder_next_to_split_folders_raises(wrap):
    paths = [f"{wrap}{path}" for path in ("train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg", "unlabeled/1.jpg")]
    with pytest.raises(BadSource, match="'unlabeled' next to 'train' is not a split"):
        labelled_paths(*paths)


@pytest.mark.parametrize("stray", ["ds/sample.jpg", "sample.jpg"])
def test_a_file_next_to_split_folders_is_named_and_does_not_make_their_folder_a_class(stray):
    with pytest.raises(BadSource, match=f"'{stray}' is not in a class folder"):
        labelled_paths("ds/train/cat/1.jpg", "ds/train/dog/1.jpg", "ds/val/cat/2.jpg", stray)
    with pytest.raises(BadSource, match=r"'sample\.jpg' is not in a class folder"):
        labelled_paths("train/cat/1.jpg", "val/cat/2.jpg", "sample.jpg")


def test_a_folder_next_to_split_folders_that_is_not_a_split_raises():
    listing = listing_of("train/cat/1.jpg", "train/dog/1.jpg", "holdout/cat/1.jpg", "holdout/dog/1.jpg")
    with pytest.raises(BadSource, match="'holdout' next to 'train' is not a split"):
        label_samples(listing, "source")
    named = label_samples(listing, "source", splits=lambda path: "test" if path.startswith("holdout") else "train")
    assert {split: len(numbers) for split, numbers in named.splits.items()} == {"train": 2, "test": 2}

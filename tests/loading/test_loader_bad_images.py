"""Undecodable images raise an error in sample order, are skipped with their labels, or become blank images."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_files import files_of, packed, photos
from sampling import sampled
from torch import Tensor

from colabkit.augment import Compose, RandomCrop, RandomHorizontalFlip, RandomResizedCrop
from colabkit.errors import BadImage
from colabkit.loading import Loader
from colabkit.packs import FileDataset, open_pack
from colabkit.sampler import ShuffledOrder

BAD = {4: b"<html> not found", 9: b""}
"""Content of two bad files, by file number; file `CUT` is truncated."""
CUT = 10
TRANSFORMS = [
    None,
    RandomHorizontalFlip(),
    RandomResizedCrop(8),
    RandomCrop(20),
    Compose([RandomCrop(20, padding=2), RandomHorizontalFlip()]),
]


@pytest.fixture
def good(tmp_path: Path) -> FileDataset:
    return FileDataset(photos(tmp_path / "good"))


@pytest.fixture
def bad(tmp_path: Path) -> FileDataset:
    """Return twelve photos, three of which are corrupted."""
    paths = files_of(photos(tmp_path / "bad"))
    for number, content in BAD.items():
        paths[number].write_bytes(content)
    paths[CUT].write_bytes(paths[CUT].read_bytes()[:-40])
    return FileDataset(tmp_path / "bad")


def broken(tree: Path, number: int) -> FileDataset:
    files_of(tree)[number].write_bytes(b"no picture")
    return FileDataset(tree)


def next_order(loader: Loader) -> list[int]:
    return ShuffledOrder(12, loader.seed).indices(loader.state_dict()["epoch"], 0, 12).tolist()


def batches(loader: Loader) -> list[tuple[Tensor, Tensor]]:
    return [(images.clone(), labels.clone()) for images, labels in loader]


@pytest.mark.parametrize("transform", sampled(TRANSFORMS, 2), ids=repr)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_image_raises_an_error_with_its_name_after_all_earlier_batches(good, bad, transform, workers):
    options: dict[str, Any] = {"transform": transform, "num_workers": workers, "seed": 5}
    expected = batches(Loader(good, 2, **options))
    got = []
    with pytest.raises(BadImage, match=r"Cannot decode 'bees/000\.jpg' of .*bad'.*page.*='blank' \(or on_bad='skip'"):  # noqa: PT012
        for images, labels in Loader(bad, 2, **options):
            got.append((images.clone(), labels.clone()))
    assert len(got) == 2
    for one, other in zip(got, expected, strict=False):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_error_names_the_first_of_several_bad_images(bad):
    for _ in range(5):
        with pytest.raises(BadImage, match=r"bees/000\.jpg"):
            list(Loader(bad, 12, num_workers=4))


@pytest.mark.parametrize("transform", sampled(TRANSFORMS, 2), ids=repr)
@pytest.mark.parametrize("workers", [1, 3])
def test_skipped_images_are_removed_with_their_labels_and_change_nothing_else(good, bad, transform, workers):
    options: dict[str, Any] = {"transform": transform, "num_workers": workers, "shuffle": True, "seed": 5}
    whole, loader = Loader(good, 5, **options), Loader(bad, 5, on_bad="skip", **options)
    for _ in range(2):
        numbers = next_order(whole)
        for place, ((images, labels), (fewer, their_labels)) in enumerate(
            zip(batches(whole), batches(loader), strict=True)
        ):
            good_places = [number not in {*BAD, CUT} for number in numbers[5 * place : 5 * place + len(labels)]]
            assert torch.equal(fewer, images[good_places])
            assert torch.equal(their_labels, labels[good_places])
    assert len(loader) == 3


@pytest.mark.parametrize("transform", sampled(TRANSFORMS, 2), ids=repr)
def test_blank_images_are_black_and_keep_their_position(good, bad, transform):
    options: dict[str, Any] = {"transform": transform, "num_workers": 2}
    whole, labels = next(iter(Loader(good, 12, **options)))
    images, same_labels = next(iter(Loader(bad, 12, on_bad="blank", **options)))
    assert torch.equal(labels, same_labels)
    for number in range(12):
        if number in {*BAD, CUT}:
            assert not images[number].any()
        else:
            assert torch.equal(images[number], whole[number])


@pytest.mark.parametrize("transform", [None, RandomResizedCrop(8)], ids=repr)
@pytest.mark.parametrize("on_bad", ["skip", "blank"])
def test_bad_samples_lists_names_and_reasons_once(bad, on_bad, transform, caplog):
    loader = Loader(bad, 5, on_bad=on_bad, transform=transform)
    assert loader.bad_samples == {}
    for _ in range(2):
        list(loader)
    found = loader.bad_samples
    root = str(bad.source.name)
    assert sorted(found) == [f"{name!r} of {root!r}" for name in ("bees/000.jpg", "cats/001.jpg", "cats/002.jpg")]
    assert "web page" in found[f"'bees/000.jpg' of {root!r}"]
    assert len([record for record in caplog.records if "cannot be decoded" in record.getMessage()]) == 3
    found.clear()
    assert len(loader.bad_samples) == 3


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
def test_bad_images_stay_bad_when_the_others_are_cached(good, bad, on_bad):
    whole = batches(Loader(good, 4, size=16))
    loader = Loader(bad, 4, size=16, on_bad=on_bad, num_workers=2)
    first = batches(loader)
    for _ in range(2):
        for (images, labels), (again, same_labels) in zip(first, batches(loader), strict=True):
            assert torch.equal(images, again)
            assert torch.equal(labels, same_labels)
    rows = [number for number in range(12) if on_bad == "blank" or number not in {*BAD, CUT}]
    found = torch.cat([images for images, _ in first])
    expected = torch.cat([images for images, _ in whole])
    expected[[*BAD, CUT]] = 0
    assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
def test_the_first_image_may_be_bad(good, tmp_path, on_bad):
    data = broken(photos(tmp_path / "first"), 0)
    images, labels = next(iter(Loader(data, 12, on_bad=on_bad)))
    whole = next(iter(Loader(good, 12)))[0]
    assert torch.equal(images[-11:], whole[1:])
    assert len(images) == len(labels) == (11 if on_bad == "skip" else 12)


def test_a_bad_first_image_raises_an_error_with_its_name(tmp_path):
    data = broken(photos(tmp_path / "first"), 0)
    with pytest.raises(BadImage, match=r"Cannot decode 'ants/000\.jpg' of .*first'"):
        list(Loader(data, 4))


@pytest.mark.parametrize("on_bad", ["raise", "skip", "blank"])
def test_valid_images_of_another_size_raise_an_error_for_every_on_bad(tmp_path, on_bad):
    photos(tmp_path / "f", 2)
    photos(tmp_path / "other", 2, (30, 30))
    files_of(tmp_path / "f")[3].write_bytes(files_of(tmp_path / "other")[3].read_bytes())
    loader = Loader(FileDataset(tmp_path / "f"), 6, on_bad=on_bad)
    with pytest.raises(BadImage, match=r"30x30 instead of.*images of one size\. Pass size=, or a transform"):
        next(iter(loader))


def test_an_epoch_without_a_readable_image_raises_an_error(tmp_path):
    photos(tmp_path / "f", 2)
    for path in files_of(tmp_path / "f"):
        path.write_bytes(b"no image at all")
    loader = Loader(FileDataset(tmp_path / "f"), 2, on_bad="skip", size=8)
    with pytest.raises(BadImage, match=r"none of 6 image files can be decoded.*loader\.bad_samples"):
        list(loader)


@pytest.mark.parametrize("workers", sampled([1, 3], 1))
@pytest.mark.parametrize("size", [1, 2])
def test_any_number_of_consecutive_batches_may_be_skipped(tmp_path, size, workers):
    photos(tmp_path / "f", 12)
    for path in files_of(tmp_path / "f")[:-1]:
        path.write_bytes(b"no image at all")
    loader = Loader(FileDataset(tmp_path / "f"), size, on_bad="skip", num_workers=workers, size=8)
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.extend(len(labels) for _, labels in loader), daemon=True)
    thread.start()
    thread.join(60)
    assert sizes == [1]


def test_a_resumed_epoch_may_end_with_only_bad_images(bad):
    first = Loader(bad, 9, on_bad="skip", sampler=[0, 1, 2, 3, 5, 6, 7, 8, 11, *BAD, CUT])
    assert len(next(iter(first))[0]) == 9
    resumed = Loader(bad, 9, on_bad="skip", sampler=[0, 1, 2, 3, 5, 6, 7, 8, 11, *BAD, CUT])
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == []
    assert resumed.state_dict()["epoch"] == 1


@pytest.mark.parametrize("transform", sampled(TRANSFORMS, 2), ids=repr)
@pytest.mark.parametrize("first", sampled([0, 5], 1))
def test_samples_that_are_blank_in_a_pack_stay_blank(tmp_path, first, transform):
    tree = photos(tmp_path / "tree")
    whole = open_pack(packed(tree, tmp_path / "whole.h5", encoding="source"))["train"]
    files_of(tree)[first].write_bytes(b"no picture")
    data = open_pack(packed(tree, tmp_path / "p.h5", encoding="source", on_bad="blank"))["train"]
    assert data.encoded(first) == b""
    images, labels = next(iter(Loader(data, 12, transform=transform)))
    expected = next(iter(Loader(whole, 12, transform=transform)))[0].clone()
    expected[first] = 0
    assert torch.equal(images, expected)
    assert torch.equal(labels, data.labels)


def test_a_state_counts_skipped_samples(bad):
    loader, reference = (Loader(bad, 3, on_bad="skip", shuffle=True) for _ in range(2))
    expected = batches(reference)
    running = iter(loader)
    next(running), next(running)
    state = loader.state_dict()
    running.close()
    assert state["samples"] == 6
    resumed = Loader(bad, 3, on_bad="skip", shuffle=True)
    resumed.load_state_dict(state)
    rest = batches(resumed)
    assert all(np.array_equal(one[0], other[0]) for one, other in zip(rest, expected[2:], strict=True))

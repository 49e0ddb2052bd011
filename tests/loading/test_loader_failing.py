"""Errors of transforms of batches in `Loader`: one line, with the epoch and the first samples it was about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loader_transforms import Made, fails
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from trees import make_tree

from colabkit.augment import Draws, PerBatch, Transform
from colabkit.errors import LoaderFailed
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import FileDataset

SEED = 6


def fails_on(number: int) -> Callable[[Tensor], Tensor]:
    """Return a function of batches that fails on the one with a sample whose value is its number."""

    def fails_on_it(batch: Tensor) -> Tensor:
        if number in batch.flatten().tolist():
            raise ValueError("planned")
        return batch

    return fails_on_it


class FailsInSlices(Transform):
    def __init__(self, number: int) -> None:
        self.fails = fails_on(number)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        return self.fails(images), labels

    def __repr__(self) -> str:
        return "FailsInSlices()"


def dataset_of_its_own(values: Tensor) -> Any:
    return Made(lambda number: values[number])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [fails_on, lambda number: PerBatch(fails_on(number))])
@pytest.mark.parametrize("make_data", [lambda values: values, dataset_of_its_own])
def test_an_error_of_a_batch_names_its_epoch_and_first_samples(make_data, make, num_workers):
    order = epoch_order(12, SEED, 1, 0, 12).tolist()
    values = torch.arange(12).view(12, 1)
    loader = Loader(make_data(values), 5, shuffle=True, seed=SEED, transform=make(order[7]), num_workers=num_workers)
    loader.set_epoch(1)
    where = ", ".join(map(str, order[5:8]))
    with pytest.raises(
        LoaderFailed, match=rf"a batch: samples {where} and 2 more of epoch 1: ValueError: plann"
    ) as caught:
        list(loader)
    assert str(caught.value).endswith("Run transform on a batch of these samples to see it.")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_slice_of_a_batch_names_its_samples(num_workers):
    loader = Loader(torch.arange(12).view(12, 1), 3, transform=FailsInSlices(7), num_workers=num_workers)
    with pytest.raises(LoaderFailed, match=r"samples 6, 7, 8 of epoch 0: ValueError: planned"):
        list(loader)


@pytest.mark.parametrize("mark", [PerBatch, lambda function: function])
def test_an_error_of_a_batch_says_what_the_data_set_calls_its_first_sample(tmp_path, mark):
    tree = make_tree(tmp_path / "tree", 2, (12, 10))
    names = r"samples 0 \('.*/000\.\w+' of '.*tree'\), 1 of epoch 0: ValueError: planned"
    with pytest.raises(LoaderFailed, match=names):
        list(Loader(FileDataset(tree), 2, transform=mark(fails)))
    with pytest.raises(LoaderFailed, match=r"sample 0 \('.*/000\.\w+'\) of epoch 0: ValueError: planned"):
        list(Loader(ImageFolder(tree, transform=v2.PILToTensor()), 1, transform=mark(fails), num_workers=0))


def test_an_error_of_a_batch_of_a_sampler_of_the_users_own_says_its_position():
    values = torch.arange(12).view(12, 1)
    loader = Loader(values, 5, sampler=torch.utils.data.SequentialSampler(values), transform=fails_on(7))
    with pytest.raises(LoaderFailed, match=r"a batch: 5 samples from position 5 of epoch 0: ValueError: planned"):
        list(loader)


class Unnamed(Made):
    """Holds what names of samples are looked up in, of another kind."""

    samples = torch.arange(12)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_has_no_name_is_told_by_its_number(num_workers):
    with pytest.raises(LoaderFailed, match=r"Cannot make a batch: sample 0: ValueError: planned"):
        list(Loader(Unnamed(fails), 4, num_workers=num_workers))

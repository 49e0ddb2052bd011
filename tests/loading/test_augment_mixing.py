"""Squares left blank, and images mixed with their neighbours: right pixels, right labels, right shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_same_distribution
from sampling import sampled

from colabkit.augment import Cutout, Draws, MixUp
from colabkit.errors import InvalidOption


def images(count: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    batch = torch.randint(1, 256, (count, 3, 12, 10), dtype=torch.uint8, generator=generator)
    return batch.contiguous(memory_format=torch.channels_last)


def draws(count: int = 8, seed: int = 5) -> Draws:
    return Draws(seed, 1, np.arange(count))


def shares(alpha: float, count: int, seed: int = 5) -> np.ndarray:
    """Return how much each sample keeps of itself: that of class 0, where neighbours are of other classes."""
    labels = torch.eye(2, dtype=torch.float64)[torch.arange(count) % 2]
    mixed = MixUp(2, alpha)(torch.zeros(count, 1, 1, 1), labels, draws=draws(count, seed))[1]
    return mixed[torch.arange(count), torch.arange(count) % 2].numpy()


@pytest.mark.parametrize("fill", [0, 200])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_pixels_beside_the_square_stay(fill, dtype, memory_format):
    batch = images().to(dtype).contiguous(memory_format=memory_format)
    kept, labels = batch.clone(), object()
    got, same = Cutout((5, 4), fill=fill).apply(batch, labels, draws())
    assert same is labels
    assert torch.equal(batch, kept)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=memory_format)
    changed = (got != batch).any(1)
    assert changed.any((1, 2)).all()
    assert (got.permute(0, 2, 3, 1)[changed] == fill).all()
    assert (changed.sum((1, 2)) <= 20).all()


def test_only_a_share_of_the_images_gets_a_square():
    batch = torch.ones(4000, 1, 6, 6)
    for p in (0.0, 0.3, 1.0):
        blank = (Cutout(4, p=p).apply(batch, None, draws(4000))[0] == 0).any((1, 2, 3))
        assert abs(blank.double().mean() - p) <= 5 * math.sqrt(p * (1 - p) / 4000)


def test_a_square_does_not_depend_on_the_neighbours():
    whole = Cutout(5).apply(images(), None, draws())[0]
    assert torch.equal(Cutout(5).apply(images()[3:5], None, draws().part(3, 5))[0], whole[3:5])


@pytest.mark.parametrize("alpha", sampled([0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 30.0], 3))
def test_shares_are_of_the_beta_distribution(alpha):
    torch.manual_seed(3)
    exact = torch.tensor(alpha, dtype=torch.float64)
    other = torch.distributions.Beta(exact, exact).sample((20_000,)).numpy()
    got, other = shares(alpha, 20_000).round(12), other.round(12)  # torch draws no exact 0 and 1
    assert_same_distribution(got, other)
    assert abs(got.mean() - 0.5) < 5 * got.std() / math.sqrt(20_000)
    assert got.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)
    assert got.min() >= 0
    assert got.max() <= 1


def test_each_sample_has_a_share_of_its_own_whatever_the_batch():
    got = shares(1.0, 100)
    assert len(set(got)) == 100
    labels = torch.eye(2, dtype=torch.float64)[torch.arange(4) % 2]
    alone = MixUp(2, 1.0)(torch.zeros(4, 1, 1, 1), labels, draws=draws(100).part(10, 14))[1]
    assert alone[torch.arange(4), torch.arange(4) % 2].numpy() == pytest.approx(got[10:14], abs=1e-12)
    assert not np.array_equal(shares(1.0, 100, seed=6), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.uint8, 0.5), (torch.float32, 1e-4), (torch.bfloat16, 2.0)])
def test_images_and_labels_are_mixed_by_the_same_shares(dtype, tolerance):
    batch, labels = images().to(dtype), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    kept = batch.clone()
    got, mixed = MixUp(3, alpha=1.0).apply(batch, labels, draws())
    assert torch.equal(batch, kept)
    assert (got.dtype, mixed.dtype, mixed.shape) == (dtype, torch.float32, (8, 3))
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(mixed.sum(1), torch.ones(8))
    for index in range(8):
        own = mixed[index, labels[index]].item()
        assert mixed[index, labels[index - 1]].item() == pytest.approx(1 - own, abs=1e-6)
        expected = own * batch[index].double() + (1 - own) * batch[index - 1].double()
        assert (got[index].double() - expected).abs().max() <= tolerance + 1e-3


def test_equal_neighbours_keep_their_image_and_their_label():
    batch = images(1).expand(6, -1, -1, -1)
    got, mixed = MixUp(4)(batch, torch.full((6,), 3))
    assert torch.equal(got, batch)
    assert torch.allclose(mixed, torch.eye(4)[3].expand(6, 4))


def test_labels_that_are_shares_already_are_mixed_again():
    once = MixUp(3, 1.0)(images(), torch.arange(8) % 3, draws=draws())
    twice = MixUp(3, 1.0)(*once, draws=draws().of(1))
    assert torch.allclose(twice[1].sum(1), torch.ones(8))
    assert not torch.equal(twice[1], once[1])


def test_mixing_needs_the_whole_batch_and_changes_labels():
    assert MixUp.whole_batch
    assert MixUp.changes_labels
    assert not Cutout.whole_batch
    assert not Cutout.changes_labels


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (None, "labels are None"),
        ([0] * 8, "labels are a list"),
        (torch.zeros(7, dtype=torch.int64), r"labels torch.int64 \[7\]"),
        (torch.zeros(8), r"labels torch.float32 \[8\]"),
        (torch.zeros(8, 4), r"labels torch.float32 \[8, 4\]"),
        (torch.arange(8) - 1, "labels from -1 to 6"),
        (torch.arange(8), "labels from 0 to 7"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, found):
    with pytest.raises(InvalidOption, match=rf"Cannot mix images: {found}, class numbers \[8\] below 3 or shares"):
        MixUp(3)(images(), labels)


@pytest.mark.parametrize("transform", [Cutout(3), MixUp(3)], ids=["Cutout", "MixUp"])
def test_what_is_no_batch_of_images_is_refused(transform):
    with pytest.raises(InvalidOption, match="a uint8 or floating tensor"):
        transform(torch.zeros(8, 3, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("transform", [Cutout(5), MixUp(3)], ids=["Cutout", "MixUp"])
def test_a_gpu_gives_what_the_cpu_gives(transform):
    labels = torch.arange(8) % 3
    got = transform(images().cuda(), labels.cuda(), draws=draws())
    for result, expected in zip(got, transform(images(), labels, draws=draws()), strict=True):
        assert result.device.type == "cuda"
        assert (result.cpu().double() - expected.double()).abs().max() <= 1

"""`TrivialAugmentWide` applies one random operation of random strength to each image, as torchvision does."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from distributions import assert_even
from image_batches import draws, images
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode, v2

from colabkit.augment import Draws, TrivialAugmentWide
from colabkit.errors import InvalidOption
from colabkit.loading.augment.auto_augment import OPERATIONS

COUNT = 300


def photos(channels: int, height: int, width: int) -> torch.Tensor:
    small = images(COUNT, channels, 6, 8).float()
    batch = interpolate(small, (height, width), mode="bicubic").clamp(0, 255).to(torch.uint8)
    batch[::7] //= 2
    batch[::11] = 90
    return batch


def by_torchvision(transform: TrivialAugmentWide, batch: torch.Tensor, numbers: Draws) -> torch.Tensor:
    """Use torchvision's code to apply the operations chosen by `transform`, one image at a time."""
    theirs = v2.TrivialAugmentWide(fill=transform.fill or None)
    mode = InterpolationMode(transform.interpolation)
    return torch.stack(
        [
            theirs._apply_image_or_video_transform(image, OPERATIONS[number], magnitude, mode, theirs._fill)
            for image, number, magnitude in zip(batch, *transform.choices(numbers), strict=True)
        ]
    )


@pytest.mark.parametrize("fill", [0, 77])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 40, 52), (1, 33, 33), (3, 2, 9)])
def test_images_are_those_of_torchvision(channels, height, width, fill):
    batch = photos(channels, height, width)
    transform = TrivialAugmentWide(fill=fill)
    given = batch.contiguous(memory_format=torch.channels_last)
    got = transform.apply(given, "labels", draws(COUNT))
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    assert got[1] == "labels"
    expected = by_torchvision(transform, batch, draws(COUNT))
    assert (got[0].int() - expected.int()).abs().max() <= 1
    assert (got[0] != expected).float().mean() < 1e-3
    assert torch.equal(given, batch)


@pytest.mark.full
def test_floating_point_images_are_those_of_torchvision():
    transform = TrivialAugmentWide()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-5), (torch.float16, 2e-3)):
        batch = (photos(3, 40, 52).double() / 255).to(dtype)
        got = transform.apply(batch, None, draws(COUNT))[0]
        assert got.dtype == dtype
        difference = (got.double() - by_torchvision(transform, batch.double(), draws(COUNT))).abs()
        # A sampling point halfway between two pixels may be rounded to either pixel.
        assert (difference > tolerance).float().mean() < 1e-3


def test_bilinear_interpolation_is_that_of_torchvision_and_fills_softly():
    batch = photos(3, 40, 52)
    transform = TrivialAugmentWide(interpolation="bilinear")
    got = transform.apply(batch, None, draws(COUNT))[0]
    assert (got.int() - by_torchvision(transform, batch, draws(COUNT)).int()).abs().max() <= 1
    flat = TrivialAugmentWide(interpolation="bilinear", fill=60)
    warped = np.isin(flat.choices(draws(COUNT))[0], range(1, 6))
    assert (flat.apply(torch.full_like(batch, 60), None, draws(COUNT))[0][torch.from_numpy(warped)] == 60).all()


@pytest.mark.parametrize("bins", [31, 7, 2])
def test_choices_are_uniform_over_the_operations_and_strengths_of_torchvision(bins):
    numbers, magnitudes = TrivialAugmentWide(bins).choices(draws(14_000))
    assert_even(np.bincount(numbers, minlength=14))
    space = v2.TrivialAugmentWide._AUGMENTATION_SPACE
    assert set(space) == set(OPERATIONS)
    for number, name in enumerate(OPERATIONS):
        drawn, (strengths, is_signed) = magnitudes[numbers == number], space[name]
        expected = strengths(bins, 9, 9)
        expected = torch.zeros(1) if expected is None else expected.double()
        assert set(np.abs(drawn)) == set(expected.tolist())
        if is_signed:
            assert_even(np.array([(drawn < 0).sum(), (drawn > 0).sum()]))
        else:
            assert (drawn >= 0).all()


def test_a_sample_gets_the_same_operation_in_any_batch():
    batch, transform = images(40), TrivialAugmentWide()
    together = transform.apply(batch, None, draws(40))[0]
    parts = [transform.apply(batch[at : at + 7], None, draws(40).part(at, at + 7))[0] for at in range(0, 40, 7)]
    assert torch.equal(torch.cat(parts), together)
    assert transform.apply(batch[:0], None, draws(0))[0].shape == (0, 3, 23, 31)
    assert not torch.equal(transform.apply(batch, None, draws(40, seed=6))[0], together)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"num_magnitude_bins": 1}, "num_magnitude_bins=1; expected a whole number of 2 or more"),
        ({"interpolation": "bicubic"}, "interpolation='bicubic'; expected 'nearest' or 'bilinear'"),
        ({"fill": None}, "fill=None; expected a finite number"),
    ],
)
def test_invalid_options_raise_an_error(options, found):
    with pytest.raises(InvalidOption, match=f"Cannot augment images: {re.escape(found)}"):
        TrivialAugmentWide(**options)


def test_images_that_cannot_be_augmented_raise_an_error():
    with pytest.raises(InvalidOption, match="the images have 4 channels; expected 1 or 3 channels"):
        TrivialAugmentWide()(images(2, 4))
    with pytest.raises(InvalidOption, match=r"fill=0\.5"):
        TrivialAugmentWide(fill=0.5)(images(2))

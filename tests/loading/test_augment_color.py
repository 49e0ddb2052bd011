"""`ColorJitter` changes colors as torchvision does, with random factors and in a random order for each sample."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from distributions import assert_even
from image_batches import draws, images

from colabkit.augment import ColorJitter
from colabkit.errors import InvalidOption

ADJUSTMENTS = {
    "brightness": (reference.adjust_brightness, (0.0, 0.4, 1.7)),
    "contrast": (reference.adjust_contrast, (0.0, 0.4, 1.7)),
    "saturation": (reference.adjust_saturation, (0.0, 0.4, 1.7)),
    "hue": (reference.adjust_hue, (-0.5, -0.1, 0.3)),
}
ALL = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_one_factor_gives_the_images_of_torchvision(name):
    adjust, factors = ADJUSTMENTS[name]
    batch = images(6)
    # Include gray pixels, which have no hue.
    batch[:, :, :4] = batch[:, :1, :4]
    for factor, channels in itertools.product(factors, (3, 1)):
        given = batch[:, :channels].contiguous(memory_format=torch.channels_last)
        got = ColorJitter(**{name: (factor, factor)})(given)
        expected = adjust(given.contiguous(), factor)
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert (got.int() - expected.int()).abs().max() <= 1
        assert (got != expected).float().mean() < 0.01
        for dtype, tolerance in ((torch.float64, 3e-6), (torch.float32, 3e-6), (torch.float16, 2e-3)):
            floating = (given.double() / 255).to(dtype).contiguous()
            got = ColorJitter(**{name: (factor, factor)})(floating)
            assert got.dtype == dtype
            assert got.is_contiguous()
            assert torch.allclose(got.double(), adjust(floating.double(), factor), atol=tolerance, rtol=0)


def test_each_sample_has_its_own_order_and_all_orders_are_equally_likely():
    fixed = {"brightness": 1.6, "contrast": 0.5, "saturation": 1.9, "hue": 0.2}
    image = images(1, 3, 12, 12)
    by_order = []
    for order in itertools.permutations(fixed):
        expected = image
        for name in order:
            expected = ADJUSTMENTS[name][0](expected, fixed[name])
        by_order.append(expected)
    jitter = ColorJitter(**{name: (factor, factor) for name, factor in fixed.items()})
    got = jitter.apply(image.expand(1200, -1, -1, -1), None, draws(1200))[0]
    differences = (got[:, None].int() - torch.stack(by_order, 1).int()).abs().float().mean((2, 3, 4))
    assert differences.min(1).values.max() < 0.05
    assert_even(np.bincount(differences.argmin(1).numpy(), minlength=24))


def test_factors_are_uniform_in_the_range_of_torchvision():
    dot = torch.full((2000, 1, 1, 1), 0.01, dtype=torch.float64)
    for value, low, high in ((0.4, 0.6, 1.4), (2, 0, 3), ((0.2, 0.5), 0.2, 0.5)):
        factors = (ColorJitter(brightness=value).apply(dot, None, draws(2000))[0] * 100).flatten().numpy()
        assert low <= factors.min() < factors.max() <= high
        assert_even(np.histogram(factors, 10, (low, high))[0])


def test_a_sample_gets_the_same_colors_in_any_batch():
    batch = images(40)
    before = batch.clone()
    together = ALL.apply(batch, "labels", draws(40))
    assert torch.equal(batch, before)
    assert together[1] == "labels"
    parts = [ALL.apply(batch[at : at + 7], None, draws(40).part(at, at + 7))[0] for at in range(0, 40, 7)]
    assert torch.equal(torch.cat(parts), together[0])
    assert ALL.apply(batch[:0], None, draws(0))[0].shape == (0, 3, 23, 31)
    assert not torch.equal(ALL.apply(batch, None, draws(40, seed=6))[0], together[0])


def test_without_arguments_nothing_changes():
    batch = images()
    for jitter in (ColorJitter(), ColorJitter(0, 0, 0, 0)):
        assert torch.equal(jitter(batch), batch)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"brightness": -0.1}, "brightness=-0.1; expected a number of 0 or more, or two ascending numbers"),
        ({"contrast": (1.2, 0.8)}, "contrast=(1.2, 0.8)"),
        ({"saturation": float("nan")}, "saturation=nan"),
        ({"saturation": "0.4"}, "saturation='0.4'"),
        ({"hue": 0.6}, "hue=0.6; expected a number from 0 to 0.5, or two ascending numbers from -0.5 to 0.5"),
        ({"hue": (-0.6, 0)}, "hue=(-0.6, 0)"),
    ],
)
def test_invalid_factors_raise_an_error(options, found):
    with pytest.raises(InvalidOption, match=f"Cannot jitter colors: {re.escape(found)}"):
        ColorJitter(**options)


def test_images_that_are_neither_gray_nor_rgb_raise_an_error():
    with pytest.raises(InvalidOption, match="the images have 4 channels; expected 1 or 3 channels"):
        ALL(images(2, 4))

"""Crops, flips and cutout squares follow known distributions, and depend only on each sample's random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_same_distribution
from sampling import sampled
from torchvision.transforms import RandomCrop as TorchvisionCrop
from torchvision.transforms import RandomResizedCrop as TorchvisionResizedCrop

from colabkit.augment import (
    CenterCrop,
    Cutout,
    Draws,
    Geometry,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)

COUNT = 4000


def boxes(transform: Geometry, size: tuple[int, int], count: int = COUNT, seed: int = 3) -> np.ndarray:
    """Return the top, left, height and width of each sample's box, `[count, 4]`."""
    found = transform.boxes(np.tile(np.array(size), (count, 1)), Draws(seed, 0, np.arange(count)))
    return np.stack([found.top, found.left, found.height, found.width], 1)


@pytest.mark.full
@pytest.mark.parametrize("size", [(256, 256), (100, 300), (37, 20), (4, 400), (400, 4)])
@pytest.mark.parametrize(
    "options", sampled([{}, {"scale": (0.5, 0.9), "ratio": (1.5, 2.0)}, {"scale": (1, 1), "ratio": (1, 1)}], 1)
)
def test_resized_crops_follow_the_distribution_of_torchvision(size, options):
    got = boxes(RandomResizedCrop(224, **options), size)
    torch.manual_seed(1)
    image = torch.empty(3, *size, dtype=torch.uint8)
    scale, ratio = options.get("scale", (0.08, 1.0)), options.get("ratio", (3 / 4, 4 / 3))
    other = np.array([TorchvisionResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(COUNT)])
    assert (got[:, :2] >= 0).all()
    assert (got[:, :2] + got[:, 2:] <= size).all()
    assert (got[:, 2:] > 0).all()
    for column in range(4):
        assert_same_distribution(got[:, column], other[:, column])
    assert_same_distribution(got[:, 2] * got[:, 3], other[:, 2] * other[:, 3])
    assert_same_distribution(got[:, 3] / got[:, 2], other[:, 3] / other[:, 2])
    assert_same_distribution(got[:, 0] + 2 * got[:, 1], other[:, 0] + 2 * other[:, 1])


@pytest.mark.parametrize(("padding", "size"), [(4, (32, 32)), (0, (40, 33)), ((0, 7), (32, 32))])
def test_random_crops_are_uniform_as_in_torchvision(padding, size):
    transform = RandomCrop(32, padding=padding)
    got = boxes(transform, size)
    left, top, right, bottom = transform.padding
    rows, columns = size[0] + top + bottom - 32 + 1, size[1] + left + right - 32 + 1
    counts = np.bincount((got[:, 0] + top) * columns + got[:, 1] + left, minlength=rows * columns)
    cells, expected = rows * columns, COUNT / (rows * columns)
    assert len(counts) == cells, "a crop is outside the padded image"
    # The chi-squared statistic has mean cells - 1 and variance 2 * (cells - 1); allow 5 standard deviations.
    assert ((counts - expected) ** 2 / expected).sum() <= cells - 1 + 5 * math.sqrt(2 * (cells - 1))
    torch.manual_seed(1)
    image = torch.empty(3, size[0] + top + bottom, size[1] + left + right)
    other = np.array([TorchvisionCrop.get_params(image, (32, 32)) for _ in range(COUNT)]) - [top, left, 0, 0]
    for column in range(4):
        assert_same_distribution(got[:, column], other[:, column])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_images_are_flipped_with_probability_p(p):
    sizes, draws = np.tile([8, 8], (COUNT, 1)), Draws(0, 0, np.arange(COUNT))
    across, down = RandomHorizontalFlip(p).boxes(sizes, draws), RandomVerticalFlip(p).boxes(sizes, draws)
    assert not across.upside_down.any()
    assert not down.mirrored.any()
    for flipped in (across.mirrored, down.upside_down):
        assert abs(flipped.mean() - p) <= 5 * math.sqrt(p * (1 - p) / COUNT)


def test_images_of_one_batch_may_differ_in_size():
    sizes = np.array([[256, 256], [100, 300], [37, 20], [4, 400], [64, 64]])
    draws = Draws(9, 2, np.array([5, 77, 3, 10**10, 6]))
    for transform in (
        RandomResizedCrop(24),
        CenterCrop(30),
        RandomHorizontalFlip(),
        RandomVerticalFlip(),
        Resize((5, 6)),
        RandomCrop(4),
    ):
        together = list(transform.boxes(sizes, draws).rows())
        alone = [
            next(transform.boxes(sizes[index : index + 1], draws.part(index, index + 1)).rows()) for index in range(5)
        ]
        assert together == alone


def test_boxes_do_not_change_between_versions():
    sizes = np.tile([256, 256], (3, 1))
    got = RandomResizedCrop(224).boxes(sizes, Draws(42, 3, np.array([0, 1, 10**9])))
    assert [box[:4] for box in got.rows()] == [(1, 12, 254, 224), (8, 11, 164, 217), (124, 91, 132, 112)]


def test_large_boxes_start_at_a_pixel_of_the_image_scaled_while_decoding():
    for height, width in ((1211, 1403), (517, 300), (96, 1000)):
        for top, left, rows, columns in boxes(RandomResizedCrop((48, 40)), (height, width), 500).tolist():
            factor = next((each for each in (8, 4, 2) if rows >= each * 48 and columns >= each * 40), 1)
            assert top % factor == left % factor == 0
            assert 0 <= top <= height - rows
            assert 0 <= left <= width - columns


def test_an_extreme_image_gives_the_largest_central_box_of_an_allowed_ratio():
    assert (boxes(RandomResizedCrop(8, scale=(1, 1)), (10, 1000), 50) == [0, 493, 10, 13]).all()
    assert (boxes(RandomResizedCrop(8, scale=(1, 1)), (1000, 10), 50) == [493, 0, 13, 10]).all()
    assert (boxes(RandomResizedCrop(8, ratio=(5, 6)), (1, 1), 50) == [0, 0, 1, 1]).all()


@pytest.mark.parametrize("size", [(8, 8), (3, 6), (100, 2), (5, 5)])
def test_squares_follow_the_distribution_of_the_original_cutout(size):
    height, width = 20, 24
    rng = np.random.default_rng(4)
    batch = torch.full((2000, 1, height, width), 9, dtype=torch.uint8)
    got = Cutout(size).apply(batch, None, Draws(1, 0, np.arange(2000)))[0][:, 0].numpy() == 0
    # This loop follows the code of the Cutout authors.
    expected = np.zeros((2000, height, width), bool)
    for mask in expected:
        y, x = rng.integers(height), rng.integers(width)
        y1, y2 = np.clip([y - size[0] // 2, y - size[0] // 2 + size[0]], 0, height)
        x1, x2 = np.clip([x - size[1] // 2, x - size[1] // 2 + size[1]], 0, width)
        mask[y1:y2, x1:x2] = True
    assert_same_distribution(got.sum((1, 2)), expected.sum((1, 2)))
    for axis in (1, 2):
        assert_same_distribution(got.any(axis).argmax(1), expected.any(axis).argmax(1))
        assert_same_distribution(got.any(axis).sum(1), expected.any(axis).sum(1))
    assert (got.any(2).sum(1) * got.any(1).sum(1) == got.sum((1, 2))).all(), "the erased pixels are not a rectangle"

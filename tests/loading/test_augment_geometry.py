"""Crops and flips equal those of torchvision with the same boxes, for any size, dtype and memory format."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from image_batches import draws, images
from recorded_kernels import RecordedKernels
from sampling import sampled
from torch.nn.functional import interpolate

from colabkit.errors import InvalidOption
from colabkit.loading.augment.cutting import Boxes, crop_batch, cut, resize_batch
from colabkit.loading.augment.geometry import (
    CenterCrop,
    Geometry,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from colabkit.loading.augment.transform import Draws

ALL = [
    RandomResizedCrop((9, 14)),
    RandomCrop((20, 11), padding=(1, 2, 3, 4), fill=77),
    CenterCrop((30, 12)),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
]


def boxes_of(transform: Geometry, batch: torch.Tensor, numbers: Draws) -> list[tuple[int, int, int, int, bool, bool]]:
    sizes = np.tile(np.array(batch.shape[2:]), (len(batch), 1))
    return list(transform.boxes(sizes, numbers).rows())


def cut_out(image: torch.Tensor, box: tuple[int, int, int, int, bool, bool], size: tuple[int, int]) -> torch.Tensor:
    """Cut a box out of an image `[C, H, W]` whose pixels are read-only, like those of a pack."""
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    pixels.flags.writeable = False
    out = np.empty((*size, image.shape[0]), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut(pixels, *box, out)
    return torch.from_numpy(out).permute(2, 0, 1)


@pytest.mark.parametrize("channels", sampled([1, 3, 4], 2))
@pytest.mark.parametrize("size", [(224, 224), (32, 40), (1, 1), (7, 130)])
@pytest.mark.parametrize("source", [(256, 256), (40, 25), (1, 1), (3, 200)])
def test_a_resized_box_is_byte_identical_to_the_one_of_torch(channels, size, source):
    image = images(1, channels, *source)[0]
    top, left = source[0] // 5, source[1] // 7
    height, width = max(1, source[0] * 2 // 3), max(1, source[1] * 3 // 4)
    expected = interpolate(
        image[None, :, top : top + height, left : left + width], size, mode="bilinear", antialias=True
    )[0]
    assert torch.equal(cut_out(image, (top, left, height, width, False, False), size), expected)
    by_torchvision = reference.resized_crop(image, top, left, height, width, list(size), antialias=True)
    assert torch.equal(by_torchvision, expected)
    mirrored = cut_out(image, (top, left, height, width, True, False), size)
    assert (mirrored.int() - expected.flip(2).int()).abs().max() <= 1
    assert torch.equal(cut_out(image, (top, left, height, width, True, True), size), mirrored.flip(1))
    writable = np.empty((*size, channels), np.uint8)
    cut(image.permute(1, 2, 0).numpy(), top, left, height, width, True, False, writable)
    assert torch.equal(torch.from_numpy(writable).permute(2, 0, 1), mirrored)


def test_cutting_is_thread_safe():
    batch = images(16, 3, 120, 130)
    boxes = list(random_boxes(16, 120, 130, seed=1).rows())

    def work(_: int) -> torch.Tensor:
        return torch.stack([cut_out(image, box, (64, 96)) for image, box in zip(batch, boxes, strict=True)])

    expected = work(0)
    with ThreadPoolExecutor(8) as threads:
        assert all(torch.equal(got, expected) for got in threads.map(work, range(16)))


@pytest.mark.parametrize(("mirrored", "upside_down"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("side", [10, 150])
def test_a_box_that_reaches_beyond_the_image_is_filled(mirrored, upside_down, side):
    image = images(1, 3, side, side)[0]
    height, width = side + 9, side - 2
    # torchvision pads with 0; replace its padding with the fill value 9.
    expected = reference.crop(image + 0, -4, 5, height, width)
    beyond = reference.crop(torch.ones_like(image), -4, 5, height, width) == 0
    expected = torch.where(beyond, torch.tensor(9, dtype=torch.uint8), expected)
    expected = expected.flip(2) if mirrored else expected
    expected = expected.flip(1) if upside_down else expected
    out = np.empty((height, width, 3), np.uint8)
    cut(image.permute(1, 2, 0).numpy(), -4, 5, height, width, mirrored, upside_down, out, 9)
    assert np.array_equal(out, expected.permute(1, 2, 0).numpy())
    cut(image.permute(1, 2, 0).numpy(), side + 3, -height, height, width, mirrored, upside_down, out, 8)
    assert (out == 8).all()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(23, 31), (90, 85)])
def test_random_crops_equal_those_of_torchvision(channels, shape):
    batch = images(6, channels, *shape)
    transform = RandomCrop((20, 11) if shape == (23, 31) else (83, 80), padding=(1, 2, 3, 4), fill=77)
    got = transform.apply(batch, None, draws(6))[0]
    padded = reference.pad(batch, [1, 2, 3, 4], fill=77)
    for image, source, (top, left, height, width, *_) in zip(
        got, padded, boxes_of(transform, batch, draws(6)), strict=True
    ):
        assert torch.equal(image, reference.crop(source, top + 2, left + 1, height, width))


@pytest.mark.parametrize("shape", [(23, 31), (5, 90), (6, 7), (1, 1), (31, 12), (64, 65)])
def test_central_crops_equal_those_of_torchvision(shape):
    for size in [(30, 12), (1, 1), (6, 7), (31, 13)]:
        batch = images(3, 3, *shape)
        assert torch.equal(CenterCrop(size)(batch), reference.center_crop(batch, list(size))), size


@pytest.mark.parametrize(
    ("flip", "column", "expected"),
    [(RandomHorizontalFlip, 4, reference.horizontal_flip), (RandomVerticalFlip, 5, reference.vertical_flip)],
)
def test_flips_equal_those_of_torchvision(flip, column, expected):
    for shape in [(23, 31), (80, 70), (1, 1)]:
        batch = images(40, 3, *shape)
        got = flip().apply(batch, None, draws(40))[0]
        turned = [box[column] for box in boxes_of(flip(), batch, draws(40))]
        assert 5 < sum(turned) < 35
        for image, source, is_flipped in zip(got, batch, turned, strict=True):
            assert torch.equal(image, expected(source) if is_flipped else source)
        assert torch.equal(flip(1)(batch), expected(batch))
        assert torch.equal(flip(0)(batch), batch)


@pytest.mark.parametrize("size", [(24, 30), (100, 7), (61, 47), 24, 47, 90])
def test_resized_images_equal_those_of_torchvision(size):
    sides = [size] if isinstance(size, int) else list(size)
    for batch in (images(4, 3, 61, 47), images(4, 3, 47, 61)):
        assert torch.equal(Resize(size)(batch), reference.resize(batch, sides, antialias=True))
        floating = batch.double() / 255
        assert torch.allclose(Resize(size)(floating), reference.resize(floating, sides, antialias=True), atol=1e-6)


@pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)
def test_floating_point_images_give_the_same_result_as_bytes(transform):
    batch = images(6)
    as_bytes = transform.apply(batch, None, draws(6))[0]
    for dtype, tolerance in [(torch.float32, 1), (torch.float64, 1), (torch.bfloat16, 2)]:
        as_floats = transform.apply(batch.to(dtype), None, draws(6))[0]
        assert (as_floats.float() - as_bytes.float()).abs().max() <= tolerance


def test_floating_point_images_are_resized_as_by_torch():
    batch = images(8, 3, 61, 47).double() / 255
    transform = RandomResizedCrop((24, 30))
    got = transform.apply(batch, None, draws(8))[0]
    for image, source, (top, left, height, width, *_) in zip(
        got, batch, boxes_of(transform, batch, draws(8)), strict=True
    ):
        expected = reference.resized_crop(source, top, left, height, width, [24, 30], antialias=True)
        assert torch.allclose(image, expected, atol=1e-6)


def random_boxes(count: int, height: int, width: int, seed: int) -> Boxes:
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, height + 1, count), rng.integers(1, width + 1, count)
    top, left = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
    return Boxes(top, left, rows, columns, rng.random(count) < 0.5, rng.random(count) < 0.5)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    ("source", "size"), [((64, 64), (40, 40)), ((50, 81), (96, 33)), ((1, 1), (5, 3)), ((9, 1), (1, 9))]
)
def test_the_batched_resize_for_other_devices_agrees_within_1(channels, source, size):
    batch = images(16, channels, *source)
    boxes = random_boxes(16, *source, seed=sum(source))
    got = resize_batch(batch, boxes, size)
    assert got.dtype == torch.uint8
    assert got.is_contiguous(memory_format=torch.channels_last)
    differences = torch.cat(
        [
            (image.int() - cut_out(row, box, size).int()).abs()
            for image, row, box in zip(got, batch, boxes.rows(), strict=True)
        ]
    )
    assert differences.max() <= 1
    assert differences.float().mean() < 0.5


@pytest.mark.parametrize(
    ("source", "size"), [((23, 31), (8, 11)), ((40, 90), (3, 2)), ((5, 7), (40, 3)), ((1, 1), (5, 3)), ((9, 1), (1, 9))]
)
def test_float64_images_are_resized_in_float64(source, size):
    batch = images(16, 3, *source).double() / 255
    boxes = random_boxes(16, *source, seed=sum(size))
    got = resize_batch(batch, boxes, size)
    assert got.dtype == torch.float64
    for image, whole, (top, left, height, width, mirrored, upside_down) in zip(got, batch, boxes.rows(), strict=True):
        box = whole[None, :, top : top + height, left : left + width]
        expected = interpolate(box, size, mode="bilinear", antialias=True)[0]
        expected = expected.flip(2) if mirrored else expected
        assert torch.allclose(image, expected.flip(1) if upside_down else expected, atol=1e-13, rtol=0)


class WideBox(Geometry):
    """Resize a box that reaches beyond the image on every side."""

    size, resizes, fill = (8, 6), True, 77

    def boxes(self, sizes: np.ndarray, numbers: Draws) -> Boxes:
        beyond, flips = np.full(len(sizes), -5), np.arange(len(sizes)) % 2 == 0
        return Boxes(beyond, beyond - 2, sizes[:, 0] + 11, sizes[:, 1] + 12, flips, flips)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_box_of_another_size_is_an_error_unless_it_is_resized(monkeypatch, dtype):
    monkeypatch.setattr(WideBox, "resizes", False)
    with pytest.raises(InvalidOption, match="a box has 34x43 pixels; expected 8x6, the size of the result"):
        WideBox()(images(4).to(dtype))


def test_a_resized_box_is_filled_outside_its_image():
    batch = images(4)
    padded = torch.nn.functional.pad(batch, (7, 5, 5, 6), value=77).float()
    expected = interpolate(padded, WideBox.size, mode="bilinear", antialias=True)
    expected[::2] = expected[::2].flip(2, 3)
    assert (WideBox()(batch).float() - expected).abs().max() <= 1
    assert torch.allclose(WideBox()(batch.float()), expected, atol=1e-3)


def test_the_batched_resize_computes_only_the_weights_that_are_not_zero():
    batch, boxes = images(4, 3, 40, 40).float(), Boxes(*np.full((4, 4), 20), np.zeros(4, bool))
    for size, taps in ((10, 5), (20, 3), (30, 3)):
        with RecordedKernels() as kernels:
            resize_batch(batch, boxes, (size, size))
        # Each of the 4 images has weights in two directions.
        assert kernels.largest(torch.float64) == 2 * 4 * size * taps


def test_the_batched_crop_for_other_devices_gives_the_same_boxes():
    batch = images(30)
    for transform in ALL[1:]:
        boxes = transform.boxes(np.tile([23, 31], (30, 1)), draws(30))
        mixed = Boxes(boxes.top, boxes.left, boxes.height, boxes.width, np.arange(30) % 3 == 0, np.arange(30) % 2 == 0)
        size = transform.size or (23, 31)
        got = crop_batch(batch, mixed, size, transform.fill)
        for image, source, box in zip(got, batch, mixed.rows(), strict=True):
            out = np.empty((*size, 3), np.uint8)
            cut(source.permute(1, 2, 0).numpy(), *box, out, int(transform.fill))
            assert np.array_equal(image.permute(1, 2, 0).numpy(), out)


def test_an_image_that_is_too_small_raises_an_error():
    for padding, found in ((0, "23x31 pixels"), ((0, 8), "39x31 pixels with its padding")):
        with pytest.raises(InvalidOption, match=f"has {found}; expected at least 40x20 pixels"):
            RandomCrop((40, 20), padding=padding)(images(6))


def test_a_fill_value_that_is_not_a_byte_raises_an_error_for_uint8_images():
    for fill in (-1, 256, 0.5):
        with pytest.raises(InvalidOption, match=r"fill=.* is used with uint8 images"):
            RandomCrop(8, padding=2, fill=fill)(images(6))
        assert RandomCrop((27, 35), padding=2, fill=fill)(images(6).float())[0, 0, 0, 0] == fill

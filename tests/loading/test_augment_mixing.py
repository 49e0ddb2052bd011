"""`Normalize`, `Cutout`, `MixUp` and `CutMix` give the right pixels, labels and mixing weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from distributions import assert_same_distribution
from image_batches import draws, images
from recorded_kernels import RecordedKernels
from sampling import sampled
from torchvision.transforms import v2

from colabkit.augment import CutMix, Cutout, MixUp, Normalize
from colabkit.errors import InvalidOption

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
BATCH = images(8, 3, 12, 10, least=1)


def shares(alpha: float, count: int, seed: int = 5) -> np.ndarray:
    """Return the weight that `MixUp` gives each image when it is mixed with its neighbor.

    Neighbors differ in class, so the weight is the probability of the image's class.
    """
    labels = torch.eye(2, dtype=torch.float64)[torch.arange(count) % 2]
    mixed = MixUp(2, alpha)(torch.zeros(count, 1, 1, 1), labels, draws=draws(count, seed))[1]
    return mixed[torch.arange(count), torch.arange(count) % 2].numpy()


@pytest.mark.parametrize("fill", [0, 200])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_pixels_outside_the_square_are_unchanged(fill, dtype):
    batch = BATCH.to(dtype)
    got, _ = Cutout((5, 4), fill=fill).apply(batch, None, draws(8))
    changed = (got != batch).any(1)
    assert changed.any((1, 2)).all()
    assert (got.permute(0, 2, 3, 1)[changed] == fill).all()
    assert (changed.sum((1, 2)) <= 20).all()


def test_squares_occur_with_probability_p():
    batch = torch.ones(4000, 1, 6, 6)
    for p in (0.0, 0.3, 1.0):
        blank = (Cutout(4, p=p).apply(batch, None, draws(4000))[0] == 0).any((1, 2, 3))
        assert abs(blank.double().mean() - p) <= 5 * math.sqrt(p * (1 - p) / 4000)


@pytest.mark.parametrize("alpha", sampled([0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 30.0], 3))
def test_mixing_weights_follow_the_beta_distribution(alpha):
    torch.manual_seed(3)
    exact = torch.tensor(alpha, dtype=torch.float64)
    other = torch.distributions.Beta(exact, exact).sample((20_000,)).numpy()
    # Round the weights, because torch never draws exactly 0 or 1.
    got, other = shares(alpha, 20_000).round(12), other.round(12)
    assert_same_distribution(got, other)
    assert abs(got.mean() - 0.5) < 5 * got.std() / math.sqrt(20_000)
    assert got.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.06)
    assert got.min() >= 0
    assert got.max() <= 1


def test_each_sample_draws_its_own_weight_independent_of_the_batch():
    got = shares(1.0, 100)
    assert len(set(got)) == 100
    labels = torch.eye(2, dtype=torch.float64)[torch.arange(4) % 2]
    alone = MixUp(2, 1.0)(torch.zeros(4, 1, 1, 1), labels, draws=draws(100).part(10, 14))[1]
    assert alone[torch.arange(4), torch.arange(4) % 2].numpy() == pytest.approx(got[10:14], abs=1e-12)
    assert not np.array_equal(shares(1.0, 100, seed=6), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.uint8, 0.5), (torch.float32, 1e-4), (torch.bfloat16, 2.0)])
def test_images_and_labels_are_mixed_with_the_same_weights(dtype, tolerance):
    batch, labels = BATCH.to(dtype), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    before = batch.clone()
    got, mixed = MixUp(3, alpha=1.0).apply(batch, labels, draws(8))
    assert torch.equal(batch, before)
    assert (got.dtype, mixed.dtype, mixed.shape) == (dtype, torch.float32, (8, 3))
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(mixed.sum(1), torch.ones(8))
    for index in range(8):
        own = mixed[index, labels[index]].item()
        assert mixed[index, labels[index - 1]].item() == pytest.approx(1 - own, abs=1e-6)
        expected = own * batch[index].double() + (1 - own) * batch[index - 1].double()
        assert (got[index].double() - expected).abs().max() <= tolerance + 1e-3


def test_images_keep_their_memory_format_although_roll_on_cuda_does_not():
    for memory_format in (torch.channels_last, torch.contiguous_format):
        for dtype in (torch.uint8, torch.float32):
            batch = BATCH.to(dtype).contiguous(memory_format=memory_format)
            for transform in (MixUp(8), CutMix(8), Cutout(3), Normalize(MEAN, STD)):
                with RecordedKernels():
                    got = transform.apply(batch, torch.arange(8), draws(8))[0]
                assert got.is_contiguous(memory_format=memory_format), transform


def test_equal_neighbours_keep_their_image_and_their_label():
    batch = images(1, 3, 12, 10, least=1).expand(6, -1, -1, -1)
    got, mixed = MixUp(4)(batch, torch.full((6,), 3))
    assert torch.equal(got, batch)
    assert torch.allclose(mixed, torch.eye(4)[3].expand(6, 4))


def test_labels_that_are_probabilities_are_mixed_again():
    once = MixUp(3, 1.0)(BATCH, torch.arange(8) % 3, draws=draws(8))
    twice = MixUp(3, 1.0)(*once, draws=draws(8).of(1))
    assert torch.allclose(twice[1].sum(1), torch.ones(8))
    assert not torch.equal(twice[1], once[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_a_box_of_the_previous_image_replaces_that_of_each_image_and_labels_have_the_shares_of_the_pixels(dtype):
    numbers = torch.arange(8).view(8, 1, 1, 1)
    batch = numbers.expand(8, 3, 12, 10).to(dtype).contiguous(memory_format=torch.channels_last)
    before = batch.clone()
    got, mixed = CutMix(8).apply(batch, numbers.flatten(), draws(8))
    assert torch.equal(batch, before)
    assert (got.dtype, mixed.dtype, mixed.shape) == (dtype, torch.float32, (8, 8))
    assert got.is_contiguous(memory_format=torch.channels_last)
    is_own = (got == batch).all(1)
    assert torch.equal(is_own, ~(got == batch.roll(1, 0)).any(1))
    replaced = ~is_own
    assert torch.equal(replaced, replaced.any(1, keepdim=True) & replaced.any(2, keepdim=True)), (
        "the replaced pixels are not a rectangle"
    )
    assert replaced.any()
    for index in range(8):
        own = is_own[index].float().mean().item()
        assert mixed[index, index].item() == pytest.approx(own, abs=1e-6)
        assert mixed[index, index - 1].item() == pytest.approx(1 - own, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_boxes_follow_the_distribution_of_torchvision(alpha):
    count, height, width = 3000, 20, 26
    batch = (torch.arange(count) % 2).view(count, 1, 1, 1).expand(-1, 1, height, width).to(torch.uint8)
    got = CutMix(2, alpha).apply(batch, torch.zeros(count, dtype=torch.int64), draws(count))[0]
    replaced = (got != batch)[:, 0].numpy()
    torch.manual_seed(2)
    theirs = v2.CutMix(alpha=alpha, num_classes=2)
    boxes = np.array([theirs.make_params([batch[:2]])["box"] for _ in range(count)])
    expected = np.zeros_like(replaced)
    for mask, (left, top, right, bottom) in zip(expected, boxes, strict=True):
        mask[top:bottom, left:right] = True
    assert_same_distribution(replaced.sum((1, 2)), expected.sum((1, 2)))
    for axis in (1, 2):
        assert_same_distribution(replaced.any(axis).argmax(1), expected.any(axis).argmax(1))
        assert_same_distribution(replaced.any(axis).sum(1), expected.any(axis).sum(1))


def test_the_box_of_a_sample_does_not_depend_on_its_batch():
    batch = (torch.arange(40) % 2).view(40, 1, 1, 1).expand(-1, 1, 16, 16).to(torch.uint8)
    labels = torch.zeros(40, dtype=torch.int64)
    together = CutMix(2).apply(batch, labels, draws(40))[0]
    part = CutMix(2).apply(batch[10:20], labels[10:20], draws(40).part(10, 20))[0]
    assert torch.equal(part, together[10:20])
    assert CutMix(2).apply(batch[:0], labels[:0], draws(0))[1].shape == (0, 2)


def test_mixing_requires_the_whole_batch_and_changes_labels():
    assert MixUp.whole_batch
    assert MixUp.changes_labels
    assert CutMix.whole_batch
    assert CutMix.changes_labels
    assert not Cutout.whole_batch
    assert not Cutout.changes_labels


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (None, "labels are None"),
        ([0] * 8, "labels are a list"),
        (torch.zeros(7, dtype=torch.int64), r"labels have dtype torch.int64 and shape \[7\]"),
        (torch.zeros(8), r"labels have dtype torch.float32 and shape \[8\]"),
        (torch.zeros(8, 4), r"labels have dtype torch.float32 and shape \[8, 4\]"),
    ],
)
def test_labels_of_the_wrong_type_or_shape_raise_an_error(labels, found):
    expected = r"class numbers of shape \[8\] or probabilities of shape \[8, 3\]"
    with pytest.raises(InvalidOption, match=rf"Cannot mix images: the {found}; expected {expected}\."):
        MixUp(3)(BATCH, labels)
    with pytest.raises(InvalidOption, match=rf"Cannot mix images: the {found}"):
        CutMix(3)(BATCH, labels)


@pytest.mark.parametrize(("labels", "found"), [(torch.arange(8) - 1, "from -1 to 6"), (torch.arange(8), "from 0 to 7")])
def test_class_numbers_out_of_range_raise_an_error(labels, found):
    message = f"Cannot mix images: the labels range {found}; expected class numbers from 0 to 2"
    with pytest.raises(InvalidOption, match=message):
        MixUp(3)(BATCH, labels)


def every_byte(channels: int = 3) -> torch.Tensor:
    """Return two images that contain every byte value in every channel, in channels-last memory format."""
    values = torch.arange(256, dtype=torch.uint8).repeat(channels).view(1, channels, 16, 16)
    return torch.cat([values, 255 - values]).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)],
)
def test_every_byte_value_is_normalized(dtype, tolerance):
    batch = every_byte()
    got = Normalize(MEAN, STD, dtype)(batch)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    assert got.dtype == dtype
    assert got.shape == batch.shape
    assert torch.allclose(got.double(), (batch.double() / 255 - mean) / std, atol=min(tolerance, 2e-6), rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.uint8, torch.float32, torch.float16])
def test_a_half_precision_result_is_the_float32_result_rounded_once(dtype, given):
    batch = every_byte() if given == torch.uint8 else (every_byte().double() / 255).to(given)
    assert torch.equal(Normalize(MEAN, STD, dtype)(batch), Normalize(MEAN, STD)(batch).to(dtype))


def test_images_on_other_devices_are_normalized_by_one_kernel():
    for given, dtype in ((torch.uint8, torch.float32), (torch.float16, torch.float32), (torch.uint8, torch.float64)):
        for memory_format in (torch.channels_last, torch.contiguous_format):
            batch = torch.empty(2, 3, 4, 5, dtype=given, device="meta").contiguous(memory_format=memory_format)
            for normalize in (Normalize(MEAN, STD, dtype), Normalize(dtype=dtype)):
                # The first call moves the constants to the device.
                normalize(batch)
                with RecordedKernels() as kernels:
                    got = normalize.apply(batch, None, draws(2))[0]
                assert [name for name, _ in kernels.calls if name != "detach"] == ["addcmul"]
                assert (got.dtype, got.stride()) == (dtype, batch.stride())


@pytest.mark.parametrize(("channels", "values"), [(3, 2), (1, 3), (4, 3)])
def test_a_number_of_channels_unlike_the_number_of_means_raises_an_error(channels, values):
    with pytest.raises(InvalidOption, match=rf"Cannot normalize: .* {channels} channels?, .* {values} means\."):
        Normalize([0.5] * values, [0.5] * values)(every_byte(channels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_the_default_scales_bytes_to_0_to_1_and_changes_no_floats(dtype):
    batch = every_byte()
    got = Normalize(dtype=dtype)(batch)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(got, (batch.to(computed) / 255).to(dtype))
    again = Normalize(dtype=dtype)(got)
    assert torch.equal(again, got)
    assert again.data_ptr() != got.data_ptr()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.float16, 4e-3)])
def test_floating_point_images_are_not_divided_by_255_as_in_torchvision(dtype, tolerance):
    batch = (every_byte().double() / 255).to(dtype)
    normalize = Normalize(MEAN, STD)
    expected = v2.Normalize(MEAN, STD)(batch.double())
    for _ in range(2):
        assert torch.allclose(normalize(batch).double(), expected, atol=tolerance, rtol=tolerance)
        # A single transform must handle both dtypes alternately.
        bytes_too = normalize(every_byte())
        assert torch.allclose(bytes_too.double(), expected, atol=tolerance, rtol=tolerance)


def test_one_value_applies_to_any_number_of_channels():
    for channels in (1, 3, 4):
        got = Normalize([0.25], [2.0])(every_byte(channels))
        assert torch.allclose(got, (every_byte(channels).float() / 255 - 0.25) / 2, atol=1e-6)


def test_invalid_values_raise_an_error():
    finite = [((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((0.5,), (math.nan,)), ((math.inf,), (0.5,)), ((0.5,), (None,))]
    others = [(("a",), (0.5,)), ((True,), (0.5,)), ("ab", "cd"), (0.5, 0.5), ((0.5,), (0.5, 0.5)), ((), ())]
    for mean, std in [*finite, *others]:
        with pytest.raises(InvalidOption, match=r"Cannot normalize: (mean|std)"):
            Normalize(mean, std)
    for dtype in (torch.uint8, torch.int64, "float32", None, float):
        with pytest.raises(InvalidOption, match="a floating-point dtype"):
            Normalize(dtype=dtype)

"""Transforms of whole batches: right numbers, the same memory format, nothing else touched."""

from __future__ import annotations

import pickle

import pytest
import torch
from torchvision.transforms import v2

from colabkit.augment import Normalize
from colabkit.errors import InvalidOption

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def images(channels: int = 3) -> torch.Tensor:
    """Return every value of a byte in every channel, in channels-last memory as the loader gives it."""
    values = torch.arange(256, dtype=torch.uint8).repeat(channels).view(1, channels, 16, 16)
    return torch.cat([values, 255 - values]).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)],
)
def test_every_byte_value_is_normalised(dtype, tolerance):
    batch = images()
    got = Normalize(MEAN, STD, dtype)(batch)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    assert got.dtype == dtype
    assert got.shape == batch.shape
    assert torch.allclose(got.double(), (batch.double() / 255 - mean) / std, atol=min(tolerance, 2e-6), rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.uint8, torch.float32, torch.float16])
def test_a_narrow_result_is_that_of_float32_rounded_once(dtype, given):
    batch = images() if given == torch.uint8 else (images().double() / 255).to(given)
    assert torch.equal(Normalize(MEAN, STD, dtype)(batch), Normalize(MEAN, STD)(batch).to(dtype))


@pytest.mark.parametrize(("channels", "values"), [(3, 2), (1, 3), (4, 3)])
def test_images_of_another_number_of_channels_are_refused(channels, values):
    with pytest.raises(InvalidOption, match=rf"Cannot normalize: images of {channels} channels, .* means, {values}\."):
        Normalize([0.5] * values, [0.5] * values)(images(channels))


def test_the_default_brings_bytes_to_minus_one_to_one():
    got = Normalize()(images())
    assert (got.dtype, got.min().item(), got.max().item()) == (torch.float32, -1.0, pytest.approx(1.0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.float16, 4e-3)])
def test_floating_images_are_taken_as_they_are_as_by_torchvision(dtype, tolerance):
    batch = (images().double() / 255).to(dtype)
    normalize = Normalize(MEAN, STD)
    expected = v2.Normalize(MEAN, STD)(batch.double())
    for _ in range(2):
        assert torch.allclose(normalize(batch).double(), expected, atol=tolerance, rtol=tolerance)
        bytes_too = normalize(images())  # both kinds through one transform
        assert torch.allclose(bytes_too.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", [images().int(), images()[0], images().bool(), images().numpy()])
def test_what_is_no_batch_of_images_is_refused(batch):
    with pytest.raises(InvalidOption, match=r"Cannot normalize: .*uint8 or floating tensor \[B, C, H, W\]"):
        Normalize()(batch)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_one_value_serves_any_number_of_channels(channels):
    got = Normalize([0.25], [2.0])(images(channels))
    assert torch.allclose(got, (images(channels).float() / 255 - 0.25) / 2, atol=1e-6)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_the_memory_format_is_kept(memory_format):
    batch = torch.randint(0, 256, (4, 3, 6, 5), dtype=torch.uint8).contiguous(memory_format=memory_format)
    assert Normalize(MEAN, STD)(batch).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_batch_itself_is_left_alone(dtype):
    batch = images().to(dtype)
    kept = batch.clone()
    got = Normalize(MEAN, STD)(batch)
    assert torch.equal(batch, kept)
    assert got.data_ptr() != batch.data_ptr()


def test_calls_do_not_change_the_transform():
    normalize = Normalize(MEAN, STD)
    first = normalize(images())
    assert torch.equal(normalize(images()), first)
    assert torch.equal(pickle.loads(pickle.dumps(normalize))(images()), first)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,), (0.5, 0.5)),
        ((), ()),
        ((0.5,), (0.0,)),
        ((0.5,), (-1.0,)),
        ((0.5,), (float("nan"),)),
        ((float("inf"),), (0.5,)),
        (("a",), (0.5,)),
        ((0.5,), (None,)),
        ((True,), (0.5,)),
        ("ab", "cd"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(mean, std):
    with pytest.raises(InvalidOption, match=r"Cannot normalize: (mean|std)"):
        Normalize(mean, std)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, "float32", None, float])
def test_a_dtype_that_cannot_hold_the_result_is_refused(dtype):
    with pytest.raises(InvalidOption, match="floating dtype"):
        Normalize(dtype=dtype)


def test_its_text_names_what_it_does():
    assert repr(Normalize([0.5], [0.25], torch.float16)) == "Normalize(mean=(0.5,), std=(0.25,), dtype=torch.float16)"
    assert Normalize([0.5], [0.25]) == Normalize((0.5,), (0.25,)) != Normalize([0.5], [0.25], torch.float16)


def test_labels_pass_untouched():
    labels = torch.arange(2)
    assert Normalize()(images(), labels)[1] is labels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_result_is_where_the_batch_is():
    got = Normalize(MEAN, STD)(images().cuda())
    assert got.device.type == "cuda"
    assert torch.allclose(got.cpu(), Normalize(MEAN, STD)(images()), atol=1e-6)

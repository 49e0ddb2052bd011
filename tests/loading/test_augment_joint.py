"""`JointTransform` moves masks and bounding boxes in exactly the same way as the images."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as reference
from image_batches import draws, images
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode

import colabkit
from colabkit.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    Draws,
    JointTransform,
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    TrivialAugmentWide,
)
from colabkit.errors import InvalidOption
from colabkit.loading import Loader

FLIPS = [RandomHorizontalFlip(), RandomVerticalFlip()]
BATCH = images(12, 3, 40, 50)


def test_masks_of_a_pack_without_labels_follow_the_images(tmp_path):
    masks = BATCH[:, 0]
    fields = {"X": BATCH.permute(0, 2, 3, 1).numpy(), "mask": masks.numpy()}
    pack = colabkit.open_pack(colabkit.pack(fields, tmp_path / "p.h5", progress=False))
    flip = JointTransform(RandomHorizontalFlip(1))
    for source in (pack["train"], {"X": BATCH, "Y": torch.zeros(12), "mask": masks}):
        for batch, cut in Loader(source, 4, transform=flip, fields=("X", "mask")):
            assert torch.equal(batch[:, 0], cut)
            assert not torch.equal(batch[:, 0], batch[:, 0].flip(-1))
    assert all(torch.equal(batch[:, 0], cut) for batch, cut in Loader(pack["train"], 4, transform=flip))


@pytest.mark.parametrize(
    "steps",
    [
        [*FLIPS, RandomCrop((38, 30), padding=9, fill=7)],
        [RandomCrop(30), *FLIPS, RandomCrop(20)],
        FLIPS,
        [lambda images: images + 0, *FLIPS, CenterCrop(20)],
    ],
)
def test_masks_are_cropped_and_flipped_like_the_images(steps):
    transform = JointTransform(Compose(steps), fill=7)
    got, masks = transform.apply(BATCH, BATCH, draws(12))
    assert torch.equal(got, Compose(steps).apply(BATCH, None, draws(12))[0])
    assert torch.equal(masks, got)


def test_colors_of_masks_do_not_change():
    crops = [RandomCrop(20), *FLIPS]
    got, masks = JointTransform(Compose([*crops, ColorJitter(0.3), Normalize()])).apply(BATCH, BATCH, draws(12))
    assert got.dtype == torch.float32
    assert torch.equal(masks, Compose(crops).apply(BATCH, None, draws(12))[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
def test_masks_are_resampled_to_the_nearest_pixel(dtype):
    masks = (torch.arange(40 * 50).view(40, 50) % 200).expand(12, 40, 50).to(dtype)
    for crop in (RandomResizedCrop((17, 24)), Resize((70, 33))):
        transform = JointTransform(Compose([crop, RandomHorizontalFlip(1), RandomVerticalFlip(1)]))
        got = transform.apply(BATCH, masks, draws(12))[1]
        assert got.dtype == dtype
        boxes = crop.boxes(np.tile([40, 50], (12, 1)), draws(12).of(0)).rows()
        for mask, source, (top, left, height, width, *_) in zip(got, masks, boxes, strict=True):
            cut = source[None, top : top + height, left : left + width]
            exact = reference.resize(cut.float(), list(crop.size), InterpolationMode.NEAREST_EXACT)[0]
            assert torch.equal(mask, exact.flip(0, 1).to(dtype))


def test_masks_may_have_more_dimensions():
    masks = torch.randint(9, (12, 2, 3, 40, 50))
    transform = JointTransform(Compose([RandomResizedCrop(24), *FLIPS]))
    got = transform.apply(BATCH, masks, draws(12))[1]
    assert got.shape == (12, 2, 3, 24, 24)
    assert torch.equal(got[:, 1, 2], transform.apply(BATCH, masks[:, 1, 2], draws(12))[1])
    assert transform.apply(BATCH[:0], masks[:0], draws(0))[1].shape == (0, 2, 3, 24, 24)


@pytest.mark.parametrize("flips", [[], [RandomHorizontalFlip(1)], [RandomVerticalFlip(1)], [Normalize()]])
def test_bounding_boxes_are_those_of_torchvision(flips):
    corner = torch.rand(12, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    corner *= torch.tensor([50.0, 40.0])
    labels = torch.cat([corner, torch.minimum(corner + 15, torch.tensor([50.0, 40.0]))], 2)
    for crop in (RandomResizedCrop((17, 24)), CenterCrop((20, 60)), RandomCrop(30, padding=4), Resize((70, 33))):
        transform = JointTransform(Compose([crop, *flips]), labels="boxes")
        got = transform.apply(BATCH, labels, draws(12))[1]
        assert (got.shape, got.dtype) == (labels.shape, labels.dtype)
        boxes = crop.boxes(np.tile([40, 50], (12, 1)), draws(12).of(0)).rows()
        for moved, source, (top, left, height, width, *_) in zip(got, labels, boxes, strict=True):
            expected = tv_tensors.BoundingBoxes(source, format="XYXY", canvas_size=(40, 50))
            expected = reference.resized_crop(expected, top, left, height, width, list(crop.size))
            for flip in flips:
                if isinstance(flip, RandomHorizontalFlip):
                    expected = reference.horizontal_flip(expected)
                if isinstance(flip, RandomVerticalFlip):
                    expected = reference.vertical_flip(expected)
            expected = reference.clamp_bounding_boxes(expected)
            # Allow rounding differences, because torchvision computes some box coordinates in float32.
            assert torch.allclose(moved, expected.as_subclass(torch.Tensor), atol=1e-5)


def test_a_bounding_box_surrounds_the_same_pixels_as_a_mask():
    masks = torch.zeros(12, 40, 50, dtype=torch.bool)
    masks[:, 8:30, 10:44] = True
    boxes = torch.tensor([10.0, 8.0, 44.0, 30.0]).expand(12, 1, 4)
    steps = Compose([*FLIPS, RandomResizedCrop(64, scale=(0.3, 1.0))])
    cut = JointTransform(steps).apply(BATCH, masks, draws(12))[1]
    moved = JointTransform(steps, "boxes").apply(BATCH, boxes, draws(12))[1]
    for mask, (left, top, right, bottom) in zip(cut, moved[:, 0].tolist(), strict=True):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        found = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        assert np.abs(np.array(found) - (left, top, right, bottom)).max() <= 1


def test_padding_stays_empty_and_boxes_outside_become_empty():
    outside = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0], [45.0, 0.0, 50.0, 40.0]])
    transform = JointTransform(Compose([RandomHorizontalFlip(1), CenterCrop(20)]), labels="boxes")
    moved = transform.apply(BATCH[:1], outside[None], draws(1))[1][0]
    assert not moved[0].any()
    assert ((moved[:, 2:] - moved[:, :2]).min(1).values == 0).all()


def test_a_loader_gives_masks_that_fit_the_images():
    masks = torch.arange(40 * 50).view(1, 40, 50) % 251 * torch.ones(30, 1, 1, dtype=torch.int64)
    pictures = masks[:, None].to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    transform = JointTransform(Compose([RandomHorizontalFlip(), RandomCrop(24), RandomVerticalFlip()]))
    batches = list(Loader((pictures, masks), 8, shuffle=True, seed=3, transform=transform))
    for found, labels in batches:
        assert torch.equal(found[:, 0].long(), labels)
    again = list(Loader((pictures, masks), 8, shuffle=True, seed=3, transform=transform, num_workers=0))
    assert all(torch.equal(one[1], other[1]) for one, other in zip(batches, again, strict=True))


def test_labels_stay_on_their_device():
    steps = Compose([RandomCrop(30, padding=9), RandomResizedCrop(20), *FLIPS])
    masks, boxes = torch.zeros(12, 40, 50, device="meta"), torch.zeros(12, 5, 4, device="meta")
    for transform, labels in ((JointTransform(steps), masks), (JointTransform(steps, "boxes"), boxes)):
        for batch in (BATCH, BATCH.to("meta")):
            got = transform.apply(batch, labels, draws(12))
            assert [result.device for result in got] == [batch.device, labels.device]


def test_a_copy_is_equal():
    transform = JointTransform(Compose([RandomCrop(8), *FLIPS]), labels="boxes", fill=255)
    for other in (pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert other == transform
    assert transform != JointTransform(Compose([RandomCrop(8), *FLIPS]), fill=255)
    assert repr(JointTransform(RandomCrop(8))).startswith("JointTransform(RandomCrop((8, 8)")


def test_a_single_crop_draws_the_same_numbers_as_alone():
    numbers = Draws(3, 2, np.arange(12))
    got, masks = JointTransform(RandomCrop(20)).apply(BATCH, BATCH, numbers)
    assert torch.equal(got, RandomCrop(20).apply(BATCH, None, numbers)[0])
    assert torch.equal(got, masks)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: JointTransform(lambda images: images), "transform is a function; expected a transform of batches"),
        (lambda: JointTransform(RandomCrop), "transform is the class RandomCrop"),
        (lambda: JointTransform(MixUp(3)), "MixUp(3, alpha=0.2) changes the labels itself"),
        (lambda: JointTransform(Compose([FLIPS[0], CutMix(3)])), "CutMix(3, alpha=1.0) changes the labels itself"),
        (lambda: JointTransform(TrivialAugmentWide()), "shears and rotates images"),
        (lambda: JointTransform(FLIPS[0], "mask"), "labels='mask'; expected 'masks' or 'boxes'"),
        (lambda: JointTransform(FLIPS[0], fill=None), "fill=None"),
        (lambda: JointTransform(FLIPS[0])(BATCH), "the labels are None; expected masks of shape [12, ..., 40, 50]"),
        (lambda: JointTransform(FLIPS[0])(BATCH, BATCH[:, 0, :9]), "shape [12, 9, 50]"),
        (lambda: JointTransform(FLIPS[0])(BATCH, BATCH[:3]), "shape [3, 3, 40, 50]"),
        (lambda: JointTransform(FLIPS[0], fill=-1)(BATCH, BATCH), "fill=-1 is used with masks of dtype torch.uint8"),
        (lambda: JointTransform(FLIPS[0], fill=0.5)(BATCH, BATCH > 3), "expected a whole number from 0 to 1"),
        (
            lambda: JointTransform(FLIPS[0], "boxes")(BATCH, torch.zeros(12, 2, 4, dtype=torch.int64)),
            "dtype torch.int64 and shape [12, 2, 4]; expected floating-point bounding boxes of shape [12, N, 4]",
        ),
    ],
)
def test_invalid_arguments_and_labels_raise_an_error(make, found):
    with pytest.raises(InvalidOption, match=f"Cannot transform images and labels together: .*{re.escape(found)}"):
        make()

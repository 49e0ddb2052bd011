"""Each transform of a `Compose` has its own random stream; splitting a `Compose` does not change its results."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from image_batches import draws, images

from colabkit.errors import InvalidOption
from colabkit.loading.augment.color import ColorJitter
from colabkit.loading.augment.compose import Compose, geometry_of, split_steps
from colabkit.loading.augment.cutting import cut
from colabkit.loading.augment.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from colabkit.loading.augment.mixing import Cutout, MixUp, Normalize
from colabkit.loading.augment.transform import Draws, Transform
from colabkit.packs import FACTORS

FLIP = RandomHorizontalFlip()
VERTICAL_FLIP = RandomVerticalFlip()
BATCH = images(10, 3, 40, 50)


def by_sample(transform: Transform, batch: torch.Tensor, numbers: Draws) -> torch.Tensor:
    """Apply a transform as a loader does: cut boxes sample by sample, then apply the rest to slices of the batch."""
    geometry, rest = geometry_of(transform)
    assert geometry is not None
    size = geometry.size or tuple(batch.shape[2:])
    rows = batch.permute(0, 2, 3, 1).numpy()
    out = np.empty((len(batch), *size, 3), np.uint8)
    boxes = geometry.boxes(np.tile(rows.shape[1:3], (len(rows), 1)), numbers)
    for row, slot, box in zip(rows, out, boxes.rows(), strict=True):
        cut(row, *box, slot, int(geometry.fill))
    got = torch.from_numpy(out).permute(0, 3, 1, 2)
    if rest is None:
        return got
    return torch.cat(
        [rest.apply(got[:3], None, numbers.part(0, 3))[0], rest.apply(got[3:], None, numbers.part(3, 99))[0]]
    )


@pytest.mark.parametrize("size", [(40, 50), (90, 75), (33, 1)])
@pytest.mark.parametrize(
    "steps",
    [
        [RandomResizedCrop(24)],
        [RandomResizedCrop(24), FLIP],
        [FLIP, RandomResizedCrop((17, 31)), FLIP, Normalize()],
        [FLIP, RandomCrop(30, padding=15, fill=3), FLIP, Cutout(5), FLIP],
        [FLIP, FLIP, FLIP],
        [VERTICAL_FLIP, RandomResizedCrop((17, 31)), FLIP, VERTICAL_FLIP, Normalize()],
        [FLIP, VERTICAL_FLIP, RandomCrop(30, padding=15, fill=3), VERTICAL_FLIP],
        [VERTICAL_FLIP, Resize((20, 30)), VERTICAL_FLIP, CenterCrop(12)],
        [VERTICAL_FLIP, Resize(20), VERTICAL_FLIP, CenterCrop(12)],
        [CenterCrop((35, 21)), RandomCrop(20), FLIP, Normalize()],
        [RandomResizedCrop(24), RandomResizedCrop(8), Cutout(3)],
    ],
    ids=str,
)
def test_cutting_sample_by_sample_equals_cutting_the_batch(steps, size):
    batch = images(10, 3, *size)
    transform = Compose(steps)
    assert torch.equal(by_sample(transform, batch, draws()), transform.apply(batch, None, draws())[0])
    first = steps[0]
    assert torch.equal(by_sample(first, batch, draws()), first.apply(batch, None, draws())[0])


@pytest.mark.parametrize(
    "steps",
    [
        [RandomCrop(30, padding=2), FLIP, Cutout(5), Normalize()],
        [FLIP, RandomCrop(30), FLIP, CenterCrop(20), FLIP],
        [Cutout(5), FLIP, CenterCrop(60)],
        [VERTICAL_FLIP, RandomCrop(30, padding=7), FLIP, VERTICAL_FLIP, ColorJitter(0.2, hue=0.3)],
        [Normalize(), RandomResizedCrop(24), Cutout(4)],
    ],
    ids=str,
)
def test_each_transform_draws_from_the_stream_of_its_position(steps):
    one_by_one = BATCH
    for number, step in enumerate(steps):
        one_by_one, _ = step.apply(one_by_one, None, draws().of(number))
    assert torch.equal(Compose(steps).apply(BATCH, None, draws())[0], one_by_one)
    twice = Compose([Cutout(5), Cutout(5)]).apply(BATCH, None, draws())[0]
    assert not torch.equal(twice, Cutout(5).apply(BATCH, None, draws().of(0))[0])


def test_flipping_before_or_after_resizing_differs_by_at_most_1():
    steps = [FLIP, VERTICAL_FLIP, RandomResizedCrop(24), VERTICAL_FLIP, FLIP]
    one_by_one = BATCH
    for number, step in enumerate(steps):
        one_by_one, _ = step.apply(one_by_one, None, draws().of(number))
    assert (Compose(steps).apply(BATCH, None, draws())[0].int() - one_by_one.int()).abs().max() <= 1


def test_crops_after_flips_begin_where_a_scaled_jpeg_has_pixels():
    sizes = np.tile([203, 317], (200, 1))
    flips = [RandomHorizontalFlip(), RandomVerticalFlip()]
    geometry, _ = geometry_of(Compose([*flips, RandomResizedCrop(24)]))
    boxes = geometry.boxes(sizes, draws(200))
    factors = np.array([next(f for f in FACTORS if min(h, w) >= 24 * f) for _, _, h, w, *_ in boxes.rows()])
    assert set(factors) == {2, 4, 8}
    assert not (boxes.top % factors).any()
    assert not (boxes.left % factors).any()
    assert (boxes.top >= 0).all()
    assert (boxes.top + boxes.height <= 203).all()
    assert (boxes.left + boxes.width <= 317).all()


def test_nested_composes_are_flattened():
    inner = Compose([RandomCrop(30), FLIP])
    assert Compose([inner, Normalize()]) == Compose([RandomCrop(30), FLIP, Normalize()])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_split_parts_applied_in_sequence_equal_the_whole(count):
    steps = [RandomCrop(30), Cutout(5), FLIP]
    first, rest = split_steps(Compose(steps), lambda step: step in steps[:count])
    assert (first is None, rest is None) == (count == 0, count == 3)
    got, labels = BATCH, None
    for part in (first, rest):
        if part is not None:
            got, labels = part.apply(got, labels, draws())
    assert torch.equal(got, Compose(steps).apply(BATCH, None, draws())[0])


def test_transforms_without_leading_geometry_are_unchanged():
    for transform in (Normalize(), Cutout(3), Compose([Cutout(3), FLIP])):
        geometry, rest = geometry_of(transform)
        assert geometry is None
        assert torch.equal(
            rest.apply(BATCH, None, draws())[0],
            transform.apply(BATCH, None, draws())[0],
        )
    assert geometry_of(FLIP) == (FLIP, None)


def test_labels_pass_through_all_transforms():
    labels = torch.arange(10) % 4
    got, mixed = Compose([RandomCrop(30), MixUp(4), Normalize()])(BATCH, labels)
    assert (got.shape, mixed.shape) == ((10, 3, 30, 30), (10, 4))
    assert Compose([RandomCrop(30), Normalize()])(BATCH, labels)[1] is labels


def test_other_callables_receive_only_the_images():
    transform = Compose([RandomCrop(30), torch.nn.AvgPool2d(2), lambda batch: batch + 1])
    got, labels = transform(BATCH.float(), "labels", draws=draws())
    assert labels == "labels"
    cropped = RandomCrop(30).apply(BATCH.float(), None, draws().of(0))[0]
    assert torch.equal(got, torch.nn.functional.avg_pool2d(cropped, 2) + 1)


def test_a_compose_combines_the_requirements_of_its_transforms():
    assert not Compose([RandomCrop(30), Normalize()]).whole_batch
    assert Compose([RandomCrop(30), torch.nn.Identity()]).whole_batch
    assert Compose([RandomCrop(30), MixUp(3)]).whole_batch
    assert Compose([RandomCrop(30), MixUp(3)]).changes_labels
    assert not Compose([RandomCrop(30), torch.nn.Identity()]).changes_labels
    assert not geometry_of(Compose([RandomCrop(30), Cutout(3)]))[1].whole_batch


def test_outside_a_loader_random_numbers_come_from_the_generator_of_torch():
    transform = Compose([RandomCrop(30), Cutout(5)])
    torch.manual_seed(1)
    first, second = transform(BATCH), transform(BATCH)
    torch.manual_seed(1)
    assert torch.equal(transform(BATCH), first)
    assert not torch.equal(second, first)
    assert torch.equal(transform(BATCH, draws=draws()), transform(BATCH, draws=draws()))


REFUSED = [
    (lambda: RandomResizedCrop(0), "size=0"),
    (lambda: RandomResizedCrop((8, 8, 8)), "size=(8, 8, 8)"),
    (lambda: RandomResizedCrop(8.0), "size=8.0"),
    (lambda: RandomResizedCrop(True), "size=True"),
    (lambda: RandomResizedCrop("8"), "size='8'"),
    (lambda: RandomResizedCrop(8, scale=(0, 1)), "scale=("),
    (lambda: RandomResizedCrop(8, scale=(0.5, 1.1)), "scale=("),
    (lambda: RandomResizedCrop(8, scale=(0.9, 0.5)), "scale=("),
    (lambda: RandomResizedCrop(8, scale=0.5), "scale=0.5"),
    (lambda: RandomResizedCrop(8, ratio=(0.5, float("inf"))), "ratio=("),
    (lambda: RandomResizedCrop(8, ratio=(float("nan"), 1)), "ratio=("),
    (lambda: RandomCrop(8, padding=-1), "padding=-1"),
    (lambda: RandomCrop(8, padding=(1, 2, 3)), "padding=(1, 2, 3)"),
    (lambda: RandomCrop(8, padding=1.5), "padding=1.5"),
    (lambda: RandomCrop(8, fill="0"), "fill='0'"),
    (lambda: RandomCrop(8, fill=float("nan")), "fill=nan"),
    (lambda: CenterCrop(-3), "size=-3"),
    (lambda: RandomHorizontalFlip(1.5), "p=1.5"),
    (lambda: RandomHorizontalFlip(None), "p=None"),
    (lambda: RandomVerticalFlip(-1), "p=-1"),
    (lambda: Resize((8, 0)), "size=(8, 0)"),
    (lambda: Cutout(0), "size=0"),
    (lambda: Cutout(3, p=-0.1), "p=-0.1"),
    (lambda: MixUp(0), "num_classes=0"),
    (lambda: MixUp(3, alpha=0), "alpha=0"),
    (lambda: MixUp(3, alpha=-1), "alpha=-1"),
    (lambda: MixUp(3, alpha=float("inf")), "alpha=inf"),
    (lambda: Compose([]), "the list is empty"),
    (lambda: Compose(FLIP), "a RandomHorizontalFlip"),
    (lambda: Compose([FLIP, 3]), "transform=3; expected a callable. Pass a list of callables."),
    (lambda: RandomHorizontalFlip(2), "p=2; expected a finite number from 0 to 1. For example, use p=0.5."),
    (lambda: MixUp(3, alpha=0), "alpha=0; expected a finite number of 0.001 or more. For example, use alpha=0.2."),
    (lambda: Cutout(3, fill=None), "fill=None; expected a finite number. For example, use fill=0."),
    (lambda: CenterCrop(8.0), "size=8.0; expected a whole number of pixels, or height and width. Use size=8."),
    (
        lambda: CenterCrop(8.5),
        "size=8.5; expected a whole number of pixels, or height and width. For example, use size=224",
    ),
    (lambda: Compose([CenterCrop]), "is a class; expected a callable. Create an instance: transform=CenterCrop(...)."),
    (
        lambda: Compose(FLIP, FLIP),
        "2 arguments; expected one list of transforms. Put the transforms in brackets: Compose([...]).",
    ),
]


def test_invalid_arguments_raise_an_error_with_advice():
    for make, found in REFUSED:
        with pytest.raises(InvalidOption, match=rf"Cannot .*: .*{re.escape(found)}"):
            make()

"""`JointTransform`: crops, resizes and flips of images together with their masks or bounding boxes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import (
    InvalidOption,
    cannot,
    check_number,
    check_one_of,
    check_type,
    kind_of,
    option,
    shown,
)
from colabkit.loading.augment.auto_augment import TrivialAugmentWide
from colabkit.loading.augment.compose import folded_steps, geometry_of, steps_of
from colabkit.loading.augment.cutting import Boxes
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.transform import Draws, Transform, check_images, sent

RESIZED_BOXES = "JointTransform(Compose([Resize((224, 224)), ...]), labels='boxes')"
"""Example of a transform that gives images one size and moves their bounding boxes, for messages."""

_ACT = "transform images and labels together"


class JointTransform(Transform):
    """Apply a transform to images, and its crops, resizes and flips also to the masks or bounding boxes in the labels.

    Masks are resampled to the nearest pixel, so they keep their dtype and values. Coordinates of bounding boxes are
    moved, scaled and clipped to the new image; a bounding box outside the new image gets a width or height of 0. Other
    steps, such as `ColorJitter` and `Normalize`, change only the images, so a custom function in a `Compose` must not
    move pixels.

    Args:
        transform: a transform, or a `Compose` of several.
        labels: `"masks"`: tensors `[B, ..., H, W]` with the height and width of the images, for example class numbers
            of pixels; or `"boxes"`: floating-point tensors `[B, N, 4]` of left, top, right and bottom in pixels of the
            stored image. For an image with fewer than N bounding boxes, fill the remaining rows with zeros.
        fill: value of masks outside the image.

    Raises:
        InvalidOption: if an argument is invalid, or, when the transform is applied, if the labels have an unsupported
            shape or dtype.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> masks = torch.randint(5, (4, 32, 32))
        >>> steps = [augment.RandomResizedCrop(24), augment.RandomHorizontalFlip(), augment.Normalize()]
        >>> cropped, cropped_masks = augment.JointTransform(augment.Compose(steps))(images, masks)
        >>> cropped.shape, cropped_masks.shape
        (torch.Size([4, 3, 24, 24]), torch.Size([4, 24, 24]))
    """

    changes_labels = True

    def __init__(self, transform: Transform, labels: str = "masks", fill: float = 0) -> None:
        next_step = "Pass one of colabkit.augment, or several in a Compose"
        check_type(_ACT, "transform", transform, Transform, "a transform of batches", next_step)
        for step in steps_of(transform):
            reason = "changes the labels itself" if getattr(step, "changes_labels", False) else ""
            if isinstance(step, TrivialAugmentWide):
                reason = "shears and rotates images, which masks and bounding boxes cannot follow"
            if reason:
                raise InvalidOption(cannot(_ACT, f"{shown(step)} {reason}", "", "Remove it from the transform"))
        check_one_of(_ACT, "labels", labels, ("masks", "boxes"))
        self.transform, self.labels = transform, labels
        self.fill = check_number(_ACT, "fill", fill, example=0)
        self.whole_batch = transform.whole_batch

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the transformed images, and the transformed masks or bounding boxes, on the same devices.

        Args:
            images: `uint8` or floating-point `[B, C, H, W]`, on any device.
            labels: masks `[B, ..., H, W]`, or bounding boxes `[B, N, 4]`, on any device.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if the labels have an unsupported shape or dtype.
        """
        check_images(_ACT, images)
        _check_labels(self.labels, labels, len(images), images.shape[2:], self.fill)
        for step, own_draws in folded_steps(self.transform, draws):
            if isinstance(step, Geometry):
                height, width = images.shape[2:]
                sizes = np.broadcast_to(np.array([height, width], np.int64), (len(images), 2))
                boxes, size = step.boxes(sizes, own_draws), step.size_of(height, width)
                follow = self._cut_masks if self.labels == "masks" else _move_boxes
                labels = follow(labels, boxes, size)
            images = step.apply(images, None, own_draws)[0] if isinstance(step, Transform) else step(images)
        return images, labels

    def _cut_masks(self, masks: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
        """Cut boxes out of masks `[B, ..., H, W]`, resized to one size; pixels outside the image get the fill value."""
        rows = _nearest(boxes.top, boxes.height, boxes.upside_down, size[0])
        columns = _nearest(boxes.left, boxes.width, boxes.mirrored, size[1])
        height, width = masks.shape[-2:]
        samples = torch.arange(len(masks), device=masks.device)[:, None, None]
        row = sent(torch.from_numpy(rows.clip(0, height - 1)), masks.device)[:, :, None]
        column = sent(torch.from_numpy(columns.clip(0, width - 1)), masks.device)[:, None]
        planes = masks.reshape(len(masks), math.prod(masks.shape[1:-2]), height, width)
        result = planes.permute(0, 2, 3, 1)[samples, row, column]
        if boxes.reach_beyond(height, width):
            outside = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None]
            at = sent(torch.from_numpy(outside), masks.device)
            result.masked_fill_(at[..., None], self.fill)
        return result.permute(0, 3, 1, 2).reshape(*masks.shape[:-2], *size)

    def __repr__(self) -> str:
        return f"JointTransform({self.transform}, labels={self.labels!r}, fill={self.fill})"


def split_joint(transform: JointTransform) -> tuple[Geometry | None, JointTransform | None]:
    """Split a transform of bounding boxes like `geometry_of`; `move_boxes` has to follow the first part."""
    geometry, rest = geometry_of(transform.transform)
    if rest is None:
        return geometry, None
    joint = copy.copy(transform)
    joint.transform, joint.whole_batch = rest, rest.whole_batch
    return geometry, joint


def move_boxes(labels: Any, rows: list[int], boxes: Boxes, size: tuple[int, int]) -> None:
    """Move bounding boxes in the given rows of the labels, in place, as a crop to `size` moves the images.

    Args:
        labels: bounding boxes `[B, N, 4]` of a batch.
        rows: indices of the cropped samples.
        boxes: box of each cropped sample.
        size: height and width of the cropped images.

    Raises:
        InvalidOption: if the labels have an unsupported shape or dtype.
    """
    _check_labels("boxes", labels, len(labels) if isinstance(labels, Tensor) else len(rows), size)
    labels[rows] = _move_boxes(labels[rows], boxes, size)


def moves_boxes(transform: Callable[..., Any] | None) -> bool:
    """Return whether a transform, or a step of it, is a `JointTransform` of bounding boxes."""
    steps = () if transform is None else steps_of(transform)
    return any(isinstance(step, JointTransform) and step.labels == "boxes" for step in steps)


def _check_labels(kind: str, labels: Any, count: int, sides: Sequence[int], fill: float = 0) -> None:
    is_tensor = isinstance(labels, Tensor)
    if kind == "masks":
        expected = f"masks of shape {[count, '...', *sides]}".replace("'", "")
        is_valid = is_tensor and labels.ndim > 2 and labels.shape[-2:] == sides
    else:
        expected = f"floating-point bounding boxes of shape [{count}, N, 4]"
        is_valid = is_tensor and labels.ndim == 3 and labels.shape[2] == 4 and labels.is_floating_point()
    if not is_valid or len(labels) != count:
        found = f"the labels are {kind_of(labels)}"
        if is_tensor:
            found = f"the labels have dtype {labels.dtype} and shape {list(labels.shape)}"
        other = "boxes" if kind == "masks" else "masks"
        fields = option("fields", ["X", kind])
        next_step = ("Load the field that holds them with ", fields, ", or use ", option("labels", other))
        raise InvalidOption(cannot(_ACT, found, expected, next_step))
    if kind == "masks" and not labels.is_floating_point():
        limits = None if labels.dtype == torch.bool else torch.iinfo(labels.dtype)
        low, high = (limits.min, limits.max) if limits else (0, 1)
        if not (low <= fill <= high and fill == int(fill)):
            found = f"fill={fill} is used with masks of dtype {labels.dtype}"
            raise InvalidOption(
                cannot(_ACT, found, f"a whole number from {low} to {high}", ("Use ", option("fill", 0)))
            )


def _nearest(
    start: npt.NDArray[np.int64], length: npt.NDArray[np.int64], flipped: npt.NDArray[np.bool_], outputs: int
) -> npt.NDArray[np.int64]:
    """Return the row or column of the image at the center of each row or column of the result, `int64 [B, outputs]`."""
    place = np.arange(outputs)
    place = np.where(flipped[:, None], place[::-1], place)
    found: npt.NDArray[np.int64] = start[:, None] + (2 * place + 1) * length[:, None] // (2 * outputs)
    return found


def _move_boxes(labels: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    ends = np.broadcast_to(np.array(size[::-1]), (len(labels), 2))
    starts = np.stack([boxes.left, boxes.top], 1)
    scales = ends / np.stack([boxes.width, boxes.height], 1)
    flips = np.stack([boxes.mirrored, boxes.upside_down], 1)
    table = torch.from_numpy(np.stack([starts, scales, ends, flips])).to(labels.dtype)
    start, scale, end, flip = sent(table, labels.device)[:, :, None, None]
    # The last two dimensions are corner and axis; a flip exchanges the corners.
    corners = (labels.unflatten(2, (2, 2)) - start) * scale
    corners = torch.where(flip > 0, end - corners.flip(2), corners)
    moved = torch.minimum(corners.clamp_(min=0), end).flatten(2)
    # Rows of zeros are padding, which flips and crops must not move.
    return moved.masked_fill_((labels == 0).all(2, keepdim=True), 0)

"""A square of each image left blank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.loading.augment.checks import checked_number, checked_size
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform, check_images


class Cutout(Transform):
    """Fills a square at a random place of some of the images; it is cut at the border.

    Source: DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout" (2017): the
    centre is uniform over the pixels.

    Args:
        size: height and width of the square; one number stands for both.
        p: how likely an image gets one.
        fill: value of the square; 0 to 255 for `uint8` images.

    Raises:
        InvalidOption: if an argument cannot be meant.
    """

    def __init__(self, size: int | tuple[int, int], p: float = 1.0, fill: float = 0) -> None:
        act = "cut squares out of images"
        self.size = checked_size(act, size)
        self.p = checked_number(act, "p", p, 0.5, 0, 1)
        self.fill = checked_number(act, "fill", fill, 0)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the images with their squares, and the labels untouched.

        Args:
            images: `uint8` or floating `[B, C, H, W]`, on any device.
            labels: anything.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if these are no such images.
        """
        check_images("cut squares out of images", images, self.fill)
        uniforms = draws.uniforms(3)
        corner = np.floor(uniforms[:, 1:] * images.shape[2:]).astype(np.int64) - np.array(self.size) // 2
        corner[uniforms[:, 0] >= self.p] = max(images.shape[2:])  # beyond the image, a square covers nothing
        result = images.clone()
        if images.device.type == "cpu" and images.dtype == torch.uint8:
            pixels = result.permute(0, 2, 3, 1).numpy()
            last = corner + self.size
            for sample, (top, left), (bottom, right) in zip(
                pixels, corner.clip(0).tolist(), last.clip(0).tolist(), strict=True
            ):
                sample[top:bottom, left:right] = self.fill
        else:
            first = torch.from_numpy(corner).to(images.device, non_blocking=True)
            rows, columns = (_covered(first[:, axis, None], self.size[axis], images.shape[2 + axis]) for axis in (0, 1))
            result.masked_fill_((rows[:, :, None] & columns[:, None])[:, None], self.fill)
        return result, labels

    def __repr__(self) -> str:
        return f"Cutout({self.size}, p={self.p}, fill={self.fill})"


def _covered(first: Tensor, side: int, length: int) -> Tensor:
    """Return which of `length` places lie in the squares that begin at `first`, `bool [B, length]`."""
    at = torch.arange(length, device=first.device)
    return (at >= first) & (at < first + side)

"""Transforms whose result is a box of the image, perhaps resized, perhaps mirrored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.loading.augment.batched import crop_batch, resize_batch
from colabkit.loading.augment.boxes import Boxes
from colabkit.loading.augment.cutting import crop_rows, cut
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform, check_images


class Geometry(Transform):
    """Base of crops and flips: where the box of each sample lies says all about the result.

    Attributes:
        size: height and width of the result; None: those of the image.
        resizes: whether the box may have another size than the result.
        fill: value of what lies beyond the image.
    """

    size: tuple[int, int] | None = None
    resizes: bool = False
    fill: float = 0

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the box of each sample.

        Args:
            sizes: height and width of each image, `int64 [B, 2]`; they may differ.
            draws: the random numbers of the B samples.
        """
        raise NotImplementedError

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the boxes of the images, in their memory format, and the labels untouched.

        Args:
            images: `uint8` or floating `[B, C, H, W]`, on any device.
            labels: anything.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if these are no such images, or too small.
        """
        check_images("transform a batch", images, self.fill)
        height, width = images.shape[2:]
        sizes = np.broadcast_to(np.array([height, width], np.int64), (len(images), 2))
        boxes = self.boxes(sizes, draws)
        size = self.size or (height, width)
        if images.device.type != "cpu" or images.dtype != torch.uint8:
            result = resize_batch(images, boxes, size) if self.resizes else crop_batch(images, boxes, size, self.fill)
        else:
            pixels = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).numpy()
            filled = _resized(pixels, boxes, size) if self.resizes else crop_rows(pixels, boxes, size, int(self.fill))
            result = torch.from_numpy(filled).permute(0, 3, 1, 2)
        kept = torch.contiguous_format if images.is_contiguous() else torch.channels_last
        return result.contiguous(memory_format=kept), labels


def _resized(pixels: npt.NDArray[np.uint8], boxes: Boxes, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return the resized boxes of `uint8 [B, H, W, C]`, one after the other."""
    out = np.empty((len(pixels), *size, pixels.shape[3]), np.uint8)
    for index, (top, left, height, width, mirrored) in enumerate(boxes.rows()):
        cut(pixels[index], top, left, height, width, mirrored, out[index])
    return out

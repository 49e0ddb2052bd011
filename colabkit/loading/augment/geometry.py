"""Transforms that only move pixels: crops, resizes and flips, as boxes of each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, check_number, check_size, check_whole_number, is_finite_number
from colabkit.loading.augment.cutting import Boxes, Sizes, crop_batch, crop_rows, cut, resize_batch
from colabkit.loading.augment.transform import Draws, Transform, check_images


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
        """Return the boxes of the images, in their memory format, and the labels untouched."""
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


_TRIES = 10

Uniforms = npt.NDArray[np.float64]


class RandomResizedCrop(Geometry):
    """Takes a box of random area and shape from each image and resizes it: the usual crop for training.

    The rule is torchvision's: 10 tries of an area and the logarithm of a shape, both uniform, of which the first box
    that fits is taken, at a uniform place; else the largest central box of an allowed shape.

    Args:
        size: height and width of the result; one number stands for both.
        scale: smallest and largest area of the box, as shares of the image's.
        ratio: smallest and largest width of the box divided by its height.

    Raises:
        InvalidOption: if an argument cannot be meant.
    """

    resizes = True

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        act = "crop and resize images"
        self.size: tuple[int, int] = check_size(act, "size", size)
        self.scale = _checked_range(act, "scale", scale, (0.08, 1.0), 1)
        self.ratio = _checked_range(act, "ratio", ratio, (0.75, 1.25), float("inf"))

    def boxes(self, sizes: Sizes, draws: Draws) -> Boxes:
        """Return the box of each sample; it lies inside the image."""
        rows, columns = sizes[:, :1], sizes[:, 1:]
        uniforms = draws.uniforms(2 * _TRIES + 2)
        areas = rows * columns * _between(uniforms[:, :_TRIES], *self.scale)
        shapes = np.exp(_between(uniforms[:, _TRIES : 2 * _TRIES], *np.log(self.ratio)))
        widths = np.rint(np.sqrt(areas * shapes)).astype(np.int64)
        heights = np.rint(np.sqrt(areas / shapes)).astype(np.int64)
        fits = (widths > 0) & (widths <= columns) & (heights > 0) & (heights <= rows)
        chosen = fits.argmax(1)
        samples = np.arange(len(sizes))
        width, height = widths[samples, chosen], heights[samples, chosen]
        top = _place(uniforms[:, -2], rows[:, 0] - height)
        left = _place(uniforms[:, -1], columns[:, 0] - width)
        failed = np.flatnonzero(~fits[samples, chosen])
        if failed.size:
            height[failed], width[failed] = self._central(rows[failed, 0], columns[failed, 0])
            top[failed] = (rows[failed, 0] - height[failed]) // 2
            left[failed] = (columns[failed, 0] - width[failed]) // 2
        return Boxes(top, left, height, width, np.zeros(len(sizes), np.bool_))

    def _central(self, rows: Sizes, columns: Sizes) -> tuple[Sizes, Sizes]:
        """Return height and width of the largest box of an allowed shape."""
        heights = np.minimum(rows, np.rint(columns / self.ratio[0]).astype(np.int64))
        widths = np.minimum(columns, np.rint(rows * self.ratio[1]).astype(np.int64))
        return np.maximum(heights, 1), np.maximum(widths, 1)

    def __repr__(self) -> str:
        return f"RandomResizedCrop({self.size}, scale={self.scale}, ratio={self.ratio})"


class RandomCrop(Geometry):
    """Takes a box of one size from a random place of each image, after a border was added to it.

    Args:
        size: height and width of the result; one number stands for both.
        padding: pixels added on every side; two numbers stand for left and right, top and bottom; four for left, top,
            right, bottom.
        fill: value of the border, 0 to 255 for `uint8` images.

    Raises:
        InvalidOption: if an argument cannot be meant, or, when it is used, an image is too small.
    """

    def __init__(self, size: int | tuple[int, int], padding: int | Sequence[int] = 0, fill: float = 0) -> None:
        act = "crop images"
        self.size: tuple[int, int] = check_size(act, "size", size)
        sides: Sequence[Any] = padding if isinstance(padding, (tuple, list)) else (padding,)
        if len(sides) not in (1, 2, 4):
            needed = "1, 2 or 4 whole numbers"
            raise InvalidOption(cannot(act, f"padding={padding!r}", needed, "Use padding=4, say"))
        self.padding = tuple(check_whole_number(act, "padding", side, 0) for side in sides) * (4 // len(sides))
        self.fill = check_number(act, "fill", fill, example=0)

    def boxes(self, sizes: Sizes, draws: Draws) -> Boxes:
        """Return the box of each sample; it may lie partly on the border.

        Raises:
            InvalidOption: if an image with its border is smaller than the box.
        """
        height, width = self.size
        left, top, right, bottom = self.padding
        room = sizes + np.array([top + bottom - height, left + right - width])
        if room.min(initial=0) < 0:
            rows, columns = sizes[np.flatnonzero(room.min(1) < 0)[0]]
            found = f"an image of {rows}x{columns} with padding {self.padding}"
            needed = f"at least {height}x{width} with its padding"
            raise InvalidOption(cannot("crop images", found, needed, "Use a smaller size or more padding"))
        uniforms = draws.uniforms(2)
        place_top, place_left = _place(uniforms[:, 0], room[:, 0]) - top, _place(uniforms[:, 1], room[:, 1]) - left
        return Boxes.of_size(place_top, place_left, self.size)

    def __repr__(self) -> str:
        return f"RandomCrop({self.size}, padding={self.padding}, fill={self.fill})"


class CenterCrop(Geometry):
    """Takes the central box of one size from each image; what lies beyond a smaller image is 0.

    Args:
        size: height and width of the result; one number stands for both.

    Raises:
        InvalidOption: if the size cannot be meant.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size: tuple[int, int] = check_size("crop images", "size", size)

    def boxes(self, sizes: Sizes, draws: Draws) -> Boxes:
        """Return the box of each sample, placed as torchvision places it."""
        room = sizes - self.size
        # A smaller image gets the odd pixel of its border below and to the right, a larger one loses half a pixel to
        # the nearest even place.
        corner = np.where(room < 0, -(-room // 2), np.rint(room / 2).astype(np.int64))
        return Boxes.of_size(corner[:, 0], corner[:, 1], self.size)

    def __repr__(self) -> str:
        return f"CenterCrop({self.size})"


class RandomHorizontalFlip(Geometry):
    """Mirrors some of the images, left to right.

    Args:
        p: how likely each image is mirrored.

    Raises:
        InvalidOption: if the probability does not lie in 0 to 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_number("flip images", "p", p, 0, 1, example=0.5)

    def boxes(self, sizes: Sizes, draws: Draws) -> Boxes:
        """Return the whole image of each sample, mirrored or not."""
        return replace(Boxes.whole(sizes), mirrored=draws.uniforms(1)[:, 0] < self.p)

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip({self.p})"


def _between(uniforms: Uniforms, low: float, high: float) -> Uniforms:
    """Return uniform numbers from low to high."""
    return low + uniforms * (high - low)


def _place(uniforms: Uniforms, room: Sizes) -> Sizes:
    """Return uniform whole numbers from 0 to the room left over, both included."""
    return np.floor(uniforms * (room + 1)).astype(np.int64)


def _checked_range(act: str, name: str, value: Any, example: tuple[float, float], most: float) -> tuple[float, float]:
    """Return two numbers above 0 and up to `most`, in rising order; raises `InvalidOption`, which shows an example."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_finite_number, value))
    if not is_pair or not 0 < value[0] <= value[1] <= most:
        needed = "two numbers above 0 in rising order" + (f", at most {most:g}" if math.isfinite(most) else "")
        raise InvalidOption(cannot(act, f"{name}={value!r}", needed, f"Use {name}={example}, say"))
    return float(value[0]), float(value[1])

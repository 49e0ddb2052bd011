"""Geometric transforms: crops, resizes and flips, each described by one box per image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import (
    InvalidOption,
    cannot,
    check_number,
    check_size,
    check_whole_number,
    is_finite_number,
    option,
)
from colabkit.loading.augment.cutting import Boxes, Sizes, crop_batch, crop_rows, cut, resize_batch
from colabkit.loading.augment.transform import Draws, Transform, check_images
from colabkit.packs import FACTORS


class Geometry(Transform):
    """Base class of crops, resizes and flips; the box of each sample fully defines the result.

    Attributes:
        size: height and width of the result; None if they depend on the image, as `size_of` returns.
        resizes: whether the box may differ in size from the result.
        fill: pixel value outside the image.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> class UpperLeftCrop(augment.Geometry):
        ...     size = (24, 24)
        ...     def boxes(self, sizes, draws):
        ...         return augment.Boxes.of_size(0 * sizes[:, 0], 0 * sizes[:, 1], self.size)
        >>> UpperLeftCrop()(torch.zeros(4, 3, 32, 32, dtype=torch.uint8)).shape
        torch.Size([4, 3, 24, 24])
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

    def aligned(self, boxes: Boxes, sizes: npt.NDArray[np.int64]) -> Boxes:
        """Return the boxes, possibly moved to pixels at which JPEGs can be decoded faster.

        A `Compose` calls this after folding flips into the boxes.

        Args:
            boxes: boxes in the stored images.
            sizes: height and width of each image, `int64 [B, 2]`.
        """
        return boxes

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the result for an image of the given height and width."""
        return self.size or (height, width)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the transformed images, in the memory format of the input, and the unchanged labels."""
        check_images("transform a batch", images, self.fill)
        height, width = images.shape[2:]
        sizes = np.broadcast_to(np.array([height, width], np.int64), (len(images), 2))
        boxes = self.boxes(sizes, draws)
        size = self.size_of(height, width)
        if not self.resizes and (odd := np.flatnonzero((boxes.height != size[0]) | (boxes.width != size[1]))).size:
            found = f"a box has {boxes.height[odd[0]]}x{boxes.width[odd[0]]} pixels"
            next_step = "Return boxes of this size, or set the attribute resizes = True"
            raise InvalidOption(cannot("crop images", found, f"{size[0]}x{size[1]}, the size of the result", next_step))
        if images.device.type != "cpu" or images.dtype != torch.uint8:
            result = (
                resize_batch(images, boxes, size, self.fill)
                if self.resizes
                else crop_batch(images, boxes, size, self.fill)
            )
        else:
            pixels = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).numpy()
            filled = (_resized if self.resizes else crop_rows)(pixels, boxes, size, int(self.fill))
            result = torch.from_numpy(filled).permute(0, 3, 1, 2)
        kept = torch.contiguous_format if images.is_contiguous() else torch.channels_last
        return result.contiguous(memory_format=kept), labels


def _resized(pixels: npt.NDArray[np.uint8], boxes: Boxes, size: tuple[int, int], fill: int) -> npt.NDArray[np.uint8]:
    out = np.empty((len(pixels), *size, pixels.shape[3]), np.uint8)
    for image, box, result in zip(pixels, boxes.rows(), out, strict=True):
        cut(image, *box, result, fill)
    return out


_TRIES = 10

Uniforms = npt.NDArray[np.float64]


class RandomResizedCrop(Geometry):
    """Crop a box of random area and aspect ratio from each image and resize it: the usual crop for training.

    The algorithm is torchvision's. It tries 10 boxes whose area and log aspect ratio are uniform, and places the first
    one that fits at a uniform position. If none fits, it takes the largest central box with an allowed aspect ratio. A
    box of at least twice the result's size starts at a multiple of 2, 4 or 8 pixels, so that JPEGs can be scaled while
    they are decoded without displacing the box.

    Args:
        size: height and width of the result in pixels; one number means both.
        scale: smallest and largest area of the box, as fractions of the image's area.
        ratio: smallest and largest aspect ratio of the box, width divided by height.

    Raises:
        InvalidOption: if an argument is invalid.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> crop = augment.RandomResizedCrop(24, scale=(0.5, 1.0))
        >>> crop(images).shape
        torch.Size([4, 3, 24, 24])
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

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the box of each sample, which lies inside the image."""
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
        return self.aligned(Boxes(top, left, height, width, np.zeros(len(sizes), np.bool_)), sizes)

    def aligned(self, boxes: Boxes, sizes: npt.NDArray[np.int64]) -> Boxes:
        """Return the boxes; those of at least twice the result's size start at a multiple of 2, 4 or 8 pixels."""
        top, left, height, width = boxes.top, boxes.left, boxes.height, boxes.width
        if not ((height >= FACTORS[-1] * self.size[0]) & (width >= FACTORS[-1] * self.size[1])).any():
            return boxes
        is_snapped = np.zeros(len(sizes), np.bool_)
        # A JPEG can be scaled down while it is decoded only if the corner of the box falls on a pixel of the scaled
        # image.
        for factor in FACTORS:
            is_large = (height >= factor * self.size[0]) & (width >= factor * self.size[1]) & ~is_snapped
            if not is_large.any():
                continue
            top = np.where(is_large, _snapped(top, sizes[:, 0] - height, factor), top)
            left = np.where(is_large, _snapped(left, sizes[:, 1] - width, factor), left)
            is_snapped |= is_large
        return replace(boxes, top=top, left=left)

    def _central(self, rows: Sizes, columns: Sizes) -> tuple[Sizes, Sizes]:
        """Return the height and width of the largest box with an allowed aspect ratio, for each image."""
        heights = np.minimum(rows, np.rint(columns / self.ratio[0]).astype(np.int64))
        widths = np.minimum(columns, np.rint(rows * self.ratio[1]).astype(np.int64))
        return np.maximum(heights, 1), np.maximum(widths, 1)

    def __repr__(self) -> str:
        return f"RandomResizedCrop({self.size}, scale={self.scale}, ratio={self.ratio})"


def _snapped(corner: Sizes, room: Sizes, factor: int) -> Sizes:
    nearest: Sizes = np.minimum(np.rint(corner / factor).astype(np.int64), room // factor) * factor
    return nearest


class RandomCrop(Geometry):
    """Crop each image at a random position, after padding it.

    Args:
        size: height and width of the result in pixels; one number means both.
        padding: pixels added on every side; two numbers mean left and right, top and bottom; four mean left, top,
            right, bottom.
        fill: pixel value of the padding, 0 to 255 for `uint8` images.

    Raises:
        InvalidOption: if an argument is invalid, or, when the crop is applied, if an image is too small.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> crop = augment.RandomCrop(32, padding=4)
        >>> crop(images).shape
        torch.Size([4, 3, 32, 32])
    """

    def __init__(self, size: int | tuple[int, int], padding: int | Sequence[int] = 0, fill: float = 0) -> None:
        act = "crop images"
        self.size: tuple[int, int] = check_size(act, "size", size)
        sides: Sequence[Any] = padding if isinstance(padding, (tuple, list)) else (padding,)
        if len(sides) not in (1, 2, 4):
            next_step = "For example, use padding=4"
            raise InvalidOption(cannot(act, option("padding", padding), "1, 2 or 4 whole numbers", next_step))
        self.padding = tuple(check_whole_number(act, "padding", side, 0) for side in sides) * (4 // len(sides))
        self.fill = check_number(act, "fill", fill, example=0)

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the box of each sample, which may lie partly in the padding.

        Raises:
            InvalidOption: if a padded image is smaller than the box.
        """
        height, width = self.size
        left, top, right, bottom = self.padding
        room = sizes + np.array([top + bottom - height, left + right - width])
        if room.min(initial=0) < 0:
            rows, columns = room[np.flatnonzero(room.min(1) < 0)[0]] + (height, width)
            found = f"an image has {rows}x{columns} pixels{' with its padding' if any(self.padding) else ''}"
            expected = f"at least {height}x{width} pixels"
            raise InvalidOption(cannot("crop images", found, expected, "Use a smaller size or more padding"))
        uniforms = draws.uniforms(2)
        place_top, place_left = _place(uniforms[:, 0], room[:, 0]) - top, _place(uniforms[:, 1], room[:, 1]) - left
        return Boxes.of_size(place_top, place_left, self.size)

    def __repr__(self) -> str:
        return f"RandomCrop({self.size}, padding={self.padding}, fill={self.fill})"


class CenterCrop(Geometry):
    """Crop each image at its center; smaller images are padded with 0.

    Args:
        size: height and width of the result in pixels; one number means both.

    Raises:
        InvalidOption: if the size is invalid.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> crop = augment.CenterCrop(24)
        >>> torch.equal(crop(images), images[:, :, 4:28, 4:28])
        True
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size: tuple[int, int] = check_size("crop images", "size", size)

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the box of each sample, at the same position as in torchvision."""
        room = sizes - self.size
        # As in torchvision, an odd pixel of padding goes to the bottom and right, and an offset halfway between two
        # whole numbers is rounded to the even one.
        corner = np.where(room < 0, -(-room // 2), np.rint(room / 2).astype(np.int64))
        return Boxes.of_size(corner[:, 0], corner[:, 1], self.size)

    def __repr__(self) -> str:
        return f"CenterCrop({self.size})"


class _RandomFlip(Geometry):
    def __init__(self, p: float = 0.5) -> None:
        self.p = check_number("flip images", "p", p, 0, 1, example=0.5)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.p})"


class RandomHorizontalFlip(_RandomFlip):
    """Flip each image horizontally with a given probability.

    Args:
        p: probability of the flip.

    Raises:
        InvalidOption: if the probability is not between 0 and 1.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> flip = augment.RandomHorizontalFlip(p=1.0)
        >>> torch.equal(flip(images), images.flip(3))
        True
    """

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the whole image as the box of each sample, mirrored or not."""
        return replace(Boxes.whole(sizes), mirrored=draws.uniforms(1)[:, 0] < self.p)


class RandomVerticalFlip(_RandomFlip):
    """Flip each image vertically with a given probability.

    Args:
        p: probability of the flip.

    Raises:
        InvalidOption: if the probability is not between 0 and 1.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> flip = augment.RandomVerticalFlip(p=1.0)
        >>> torch.equal(flip(images), images.flip(2))
        True
    """

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the whole image as the box of each sample, upside down or not."""
        return replace(Boxes.whole(sizes), upside_down=draws.uniforms(1)[:, 0] < self.p)


class Resize(Geometry):
    """Resize each image to a height and width, or so that the shorter side has a given length.

    Args:
        size: height and width of the result in pixels, which may change the aspect ratio. One number is the length of
            the shorter side, as in torchvision: the aspect ratio is kept. Image files of different sizes need a height
            and width, because all images of a batch have one shape.

    Raises:
        InvalidOption: if the size is invalid.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 48, 32), dtype=torch.uint8)
        >>> augment.Resize((24, 24))(images).shape
        torch.Size([4, 3, 24, 24])
        >>> augment.Resize(24)(images).shape
        torch.Size([4, 3, 36, 24])
    """

    resizes = True

    def __init__(self, size: int | tuple[int, int]) -> None:
        self._given = check_size("resize images", "size", size)
        self._shorter = None if isinstance(size, (tuple, list)) else self._given[0]
        self.size = self._given if self._shorter is None else None

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        """Return the whole image as the box of each sample."""
        return Boxes.whole(sizes)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the result for an image of the given height and width."""
        if self._shorter is None:
            return self._given
        # As in torchvision, the longer side is rounded down.
        shorter, shortest = self._shorter, min(height, width)
        return int(shorter * height / shortest), int(shorter * width / shortest)

    def __repr__(self) -> str:
        return f"Resize({self._shorter or self.size})"


def _between(uniforms: Uniforms, low: float, high: float) -> Uniforms:
    return low + uniforms * (high - low)


def _place(uniforms: Uniforms, room: Sizes) -> Sizes:
    return np.floor(uniforms * (room + 1)).astype(np.int64)


def _checked_range(act: str, name: str, value: Any, example: tuple[float, float], most: float) -> tuple[float, float]:
    """Return two ascending numbers above 0 and up to `most`; raise `InvalidOption` with an example otherwise."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_finite_number, value))
    if not is_pair or not 0 < value[0] <= value[1] <= most:
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        expected = f"two ascending numbers above 0{limit}"
        raise InvalidOption(cannot(act, option(name, value), expected, ("For example, use ", option(name, example))))
    return float(value[0]), float(value[1])

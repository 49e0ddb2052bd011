"""Automatic augmentation: `TrivialAugmentWide`, which applies one random operation to each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from colabkit.foundation import check_number, check_one_of, check_whole_number
from colabkit.loading.augment.color import (
    BRIGHTNESS,
    Factors,
    adjust,
    check_channels,
    clip,
    floating,
    largest_value,
    per_image,
)
from colabkit.loading.augment.transform import Draws, Transform, check_images, sent

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Contrast",
    "Color",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
"""Names of the operations; the number of an operation is its index."""

_SIGNED = slice(OPERATIONS.index("ShearX"), OPERATIONS.index("Sharpness") + 1)

Numbers = npt.NDArray[np.int64]


class TrivialAugmentWide(Transform):
    """Apply one random operation of random strength to each image: an augmentation that needs no tuning.

    Each image gets one of 14 operations with equal probability: none, shear or translation along one axis, rotation,
    brightness, contrast, color, sharpness, posterize, solarize, automatic contrast, or equalize. Floating-point images
    are expected in [0, 1]. Source: Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data
    Augmentation" (ICCV 2021).

    Args:
        num_magnitude_bins: number of strengths per operation, 2 or more.
        interpolation: `"nearest"` or `"bilinear"`, for shears, translations and rotations.
        fill: pixel value outside the image, 0 to 255 for `uint8` images.

    Raises:
        InvalidOption: if an argument is invalid, or, when the transform is applied, if the images do not have 1 or 3
            channels.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> augment.TrivialAugmentWide()(images).shape
        torch.Size([4, 3, 32, 32])
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: str = "nearest", fill: float = 0) -> None:
        act = "augment images"
        self.num_magnitude_bins = check_whole_number(act, "num_magnitude_bins", num_magnitude_bins, 2)
        check_one_of(act, "interpolation", interpolation, ("nearest", "bilinear"))
        self.interpolation = interpolation
        self.fill = check_number(act, "fill", fill, example=0)
        self._magnitudes = _magnitudes(self.num_magnitude_bins)

    def choices(self, draws: Draws) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the number of each sample's operation, `int64 [B]`, and its signed strength, `float64 [B]`."""
        uniforms = draws.uniforms(3)
        numbers = (uniforms[:, 0] * len(OPERATIONS)).astype(np.int64)
        magnitudes = self._magnitudes[numbers, (uniforms[:, 1] * self.num_magnitude_bins).astype(np.int64)]
        is_negative = (numbers >= _SIGNED.start) & (numbers < _SIGNED.stop) & (uniforms[:, 2] < 0.5)
        return numbers, np.where(is_negative, -magnitudes, magnitudes)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the augmented images, of the same dtype and memory format, and the unchanged labels."""
        check_images("augment images", images, self.fill)
        check_channels("augment images", images)
        numbers, magnitudes = self.choices(draws)
        # Sort the images by operation, so that each kernel runs only once. Kernels are fastest in contiguous memory
        # format.
        order = np.argsort(numbers, kind="stable")
        numbers, magnitudes = numbers[order], magnitudes[order]
        at = sent(torch.from_numpy(order), images.device)
        changed = images[at].contiguous()
        for first, last, kernel in (
            ("ShearX", "Rotate", self._warped),
            ("Brightness", "Color", _adjusted),
            ("Sharpness", "Sharpness", _sharpened),
            ("Posterize", "Posterize", _posterized),
            ("Solarize", "Solarize", _solarized),
            ("AutoContrast", "AutoContrast", _auto_contrasted),
            ("Equalize", "Equalize", _equalized),
        ):
            start = np.searchsorted(numbers, OPERATIONS.index(first))
            stop = np.searchsorted(numbers, OPERATIONS.index(last), "right")
            if start < stop:
                changed[start:stop] = kernel(changed[start:stop], numbers[start:stop], magnitudes[start:stop])
        result = torch.empty_like(images)
        result[at] = changed
        return result, labels

    def _warped(self, images: Tensor, numbers: Numbers, magnitudes: Factors) -> Tensor:
        height, width = images.shape[2:]
        shear_x, shear_y, translate_x, translate_y, angle = (
            np.where(numbers == OPERATIONS.index(name), magnitudes, 0.0)
            for name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
        )
        cosine, sine = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
        # Rows of the matrices that map positions in the result to positions in the image, in pixels from the center.
        x_row = cosine, shear_x - sine, shear_x * height / 2 - np.trunc(translate_x)
        y_row = shear_y + sine, cosine, shear_y * width / 2 - np.trunc(translate_y)
        work = floating(images)
        x_x, x_y, x_1, y_x, y_y, y_1 = per_image(
            work, *(2 / width * part for part in x_row), *(2 / height * part for part in y_row)
        )[..., 0]
        x = torch.arange(width, dtype=work.dtype, device=work.device) - (width - 1) / 2
        y = (torch.arange(height, dtype=work.dtype, device=work.device) - (height - 1) / 2)[:, None]
        grid = torch.stack([x_x * x + x_y * y + x_1, y_x * x + y_y * y + y_1], 3)
        # Positions outside the image sample 0, which becomes the fill value.
        work = grid_sample(work.sub_(self.fill), grid, self.interpolation, align_corners=False).add_(self.fill)
        return work if images.is_floating_point() else work.round_()

    def __repr__(self) -> str:
        return f"TrivialAugmentWide({self.num_magnitude_bins}, interpolation={self.interpolation!r}, fill={self.fill})"


def _magnitudes(bins: int) -> Factors:
    highest = {"ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
    highest |= dict.fromkeys(("Brightness", "Contrast", "Color", "Sharpness"), 0.99)
    # Compute in float32, as torchvision does, because other dtypes would round the values differently.
    rows = [torch.linspace(0, highest.get(name, 0.0), bins, device="cpu") for name in OPERATIONS]
    rows[OPERATIONS.index("Posterize")] = (8 - torch.arange(bins, device="cpu") / ((bins - 1) / 6)).round()
    rows[OPERATIONS.index("Solarize")] = torch.linspace(1, 0, bins, device="cpu")
    return torch.stack(rows).double().numpy()


def _adjusted(images: Tensor, numbers: Numbers, magnitudes: Factors) -> Tensor:
    work = floating(images)
    # `OPERATIONS` lists brightness, contrast and color in the order of the constants from `BRIGHTNESS`.
    adjust(work, numbers - OPERATIONS.index("Brightness") + BRIGHTNESS, 1 + magnitudes, largest_value(images))
    return work


def _sharpened(images: Tensor, _: Numbers, magnitudes: Factors) -> Tensor:
    if min(images.shape[2:]) <= 2:
        return images
    work = floating(images)
    inner = work[..., 1:-1, 1:-1]
    rows = (work[..., :-2, :] + work[..., 1:-1, :]).add_(work[..., 2:, :])
    # Sums of bytes are exact, unlike a convolution on a GPU.
    smooth = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(inner, alpha=4).div_(13)
    if not images.is_floating_point():
        smooth.round_()
    (share,) = per_image(work, -magnitudes)
    inner.add_(smooth.sub_(inner).mul_(share))
    return clip(work, largest_value(images))


def _posterized(images: Tensor, _: Numbers, magnitudes: Factors) -> Tensor:
    if not images.is_floating_point():
        (mask,) = per_image(images, 256 - 2 ** (8 - magnitudes))
        return images.bitwise_and(mask)
    work = floating(images)
    (levels,) = per_image(work, 2**magnitudes)
    return torch.minimum(work.mul_(levels).floor_().clamp_(min=0), levels - 1).div_(levels)


def _solarized(images: Tensor, _: Numbers, magnitudes: Factors) -> Tensor:
    if images.is_floating_point():
        images, largest = floating(images), 1
    else:
        # As in torchvision, a byte is compared with the threshold in float32.
        largest, magnitudes = 255, np.ceil((255 * magnitudes).astype(np.float32)).astype(np.float64)
    (threshold,) = per_image(images, magnitudes)
    return torch.where(images >= threshold, largest - images, images)


def _auto_contrasted(images: Tensor, _: Numbers, __: Factors) -> Tensor:
    work, largest = floating(images), largest_value(images)
    low, high = work.amin((2, 3), keepdim=True), work.amax((2, 3), keepdim=True)
    is_flat = low == high
    scale = torch.where(is_flat, 1, (high - low).mul_(1 / largest))
    return clip(work.sub_(low.masked_fill_(is_flat, 0)).div_(scale), largest)


def _equalized(images: Tensor, _: Numbers, __: Factors) -> Tensor:
    values = floating(images).mul_(255.999).to(torch.uint8) if images.is_floating_point() else images
    flat = values.flatten(2).long()
    counts = torch.zeros((*flat.shape[:2], 256), dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(counts[..., :1]).expand_as(flat))
    below = counts.cumsum(2) - counts
    # As in torchvision and Pillow, pixels with the largest value are not counted.
    step = (flat.shape[2] - counts.gather(2, flat.amax(2, keepdim=True))).div_(255, rounding_mode="floor")
    table: Tensor = (below + step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    # A channel with too few pixels below its largest value does not change.
    table = torch.where(step == 0, torch.arange(256, device=images.device), table).to(torch.uint8)
    equalized: Tensor = table.gather(2, flat).view(values.shape)
    return equalized.double().div_(255) if images.is_floating_point() else equalized

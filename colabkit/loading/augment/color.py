"""Color transforms: `ColorJitter`, and the kernels that it shares with `TrivialAugmentWide`.

The formulas are torchvision's. As in torchvision, `uint8` images are rounded down after each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, format_things, is_finite_number, option
from colabkit.loading.augment.transform import Draws, Transform, check_images, sent

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_NAMES = ("brightness", "contrast", "saturation", "hue")
_NEUTRAL = (1.0, 1.0, 1.0, 0.0)

Factors = npt.NDArray[np.float64]


class ColorJitter(Transform):
    """Change the brightness, contrast, saturation and hue of each image by random factors, in a random order.

    Floating-point images are expected in [0, 1]. Changing saturation or hue has no effect on gray images (1 channel).

    Args:
        brightness: largest deviation from 1 of the factor that multiplies the pixels. The factor is uniform in
            `[max(0, 1 - brightness), 1 + brightness]`. Two numbers are the smallest and largest factor. None leaves the
            brightness unchanged.
        contrast: the same for the distance of the pixels from the mean gray value.
        saturation: the same for the distance of the pixels from their own gray value.
        hue: largest shift of the hue, at most 0.5, which is half of the color circle; two numbers are the smallest and
            largest shift.

    Raises:
        InvalidOption: if an argument is invalid, or, when the transform is applied, if the images do not have 1 or 3
            channels.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> jitter = augment.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
        >>> jitter(images).shape, jitter(images).dtype
        (torch.Size([4, 3, 32, 32]), torch.uint8)
    """

    def __init__(
        self,
        brightness: float | tuple[float, float] | None = None,
        contrast: float | tuple[float, float] | None = None,
        saturation: float | tuple[float, float] | None = None,
        hue: float | tuple[float, float] | None = None,
    ) -> None:
        values = (brightness, contrast, saturation, hue)
        self.ranges = tuple(_checked_factors(number, value) for number, value in enumerate(values))
        self._active = np.flatnonzero(
            [(low, high) != (neutral, neutral) for (low, high), neutral in zip(self.ranges, _NEUTRAL, strict=True)]
        )

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the changed images, of the same dtype and memory format, and the unchanged labels."""
        check_images("jitter colors", images)
        check_channels("jitter colors", images)
        uniforms = draws.uniforms(8)
        order = self._active[uniforms[:, self._active].argsort(1)]
        low, high = np.array(self.ranges).T
        factors = low + uniforms[:, 4:] * (high - low)
        work = floating(images)
        largest = largest_value(images)
        for kinds in order.T:
            own = np.take_along_axis(factors, kinds[:, None], 1)[:, 0]
            is_hue = kinds == HUE
            if not is_hue.all():
                adjust(work, np.where(is_hue, BRIGHTNESS, kinds), np.where(is_hue, 1.0, own), largest)
            if is_hue.any() and images.shape[1] == 3:
                at = sent(torch.from_numpy(np.flatnonzero(is_hue)), work.device)
                work[at] = _shift_hue(work[at], own[is_hue], largest)
        return work.to(images.dtype, memory_format=memory_format_of(images)), labels

    def __repr__(self) -> str:
        ranges = ", ".join(f"{name}={value}" for name, value in zip(_NAMES, self.ranges, strict=True))
        return f"ColorJitter({ranges})"


def adjust(images: Tensor, kinds: npt.NDArray[np.int64], factors: Factors, largest: float) -> None:
    """Multiply the brightness, contrast or saturation of each image by a factor, in place.

    Args:
        images: floating-point `[B, 1 or 3, H, W]`.
        kinds: `BRIGHTNESS`, `CONTRAST` or `SATURATION` for each image, `int64 [B]`.
        factors: `float64 [B]`.
        largest: largest possible pixel value; with 255, results are rounded down.
    """
    if images.shape[1] == 1:
        factors = np.where(kinds == SATURATION, 1.0, factors)
    rest = 1 - factors
    own, to_mean, to_gray = per_image(images, factors, rest * (kinds == CONTRAST), rest * (kinds == SATURATION))
    if (kinds != BRIGHTNESS).any():
        gray = _gray(images, largest)
        # In float64, the sum of bytes is exact, so the mean does not depend on the number of threads.
        mean = gray.mean((1, 2, 3), keepdim=True, dtype=torch.float64).to(images.dtype)
        images.mul_(own).add_(gray.mul_(to_gray).add_(mean.mul_(to_mean)))
    else:
        images.mul_(own)
    clip(images, largest)


def _gray(images: Tensor, largest: float) -> Tensor:
    if images.shape[1] == 1:
        return images.clone()
    red, green, blue = images.split(1, 1)
    gray: Tensor = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray.floor_() if largest == 255 else gray


def _shift_hue(images: Tensor, shifts: Factors, largest: float) -> Tensor:
    (shift,) = per_image(images, shifts * 6)
    red, green, blue = images.div(largest).split(1, 1)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - torch.minimum(torch.minimum(red, green), blue)
    # The hue counts sixths of the color circle. A gray pixel has no hue, so any divisor works.
    divisor = torch.where(chroma == 0, 1, chroma)
    hue = torch.where(high == green, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    hue = torch.where(high == red, (green - blue) / divisor, hue).add_(shift)
    # Each channel is a periodic trapezoid of the hue: red is highest around 0, green around 2, and blue around 4.
    center = torch.arange(5, 0, -2, dtype=hue.dtype, device=hue.device).view(1, 3, 1, 1)
    place = (hue + center).remainder_(6)
    result = high - chroma * torch.minimum(place, 4 - place).clamp_(0, 1)
    return result.mul_(255.999).floor_() if largest == 255 else result


def floating(images: Tensor) -> Tensor:
    """Return a contiguous copy of images in float64 if they are float64, otherwise in float32."""
    dtype = torch.float64 if images.dtype == torch.float64 else torch.float32
    return images.to(dtype, copy=True, memory_format=torch.contiguous_format)


def largest_value(images: Tensor) -> float:
    """Return the largest possible pixel value: 255 for bytes, 1 for floating-point numbers."""
    return 1.0 if images.is_floating_point() else 255.0


def clip(images: Tensor, largest: float) -> Tensor:
    """Clip pixels to [0, `largest`] in place, and round them down if `largest` is 255."""
    images.clamp_(0, largest)
    return images.floor_() if largest == 255 else images


def per_image(like: Tensor, *values: Factors) -> Tensor:
    """Move arrays `[B]` to the device of `like` in one copy, and return them as `[len(values), B, 1, 1, 1]`."""
    table = torch.from_numpy(np.stack(values)).to(like.dtype)
    return sent(table, like.device)[:, :, None, None, None]


def memory_format_of(images: Tensor) -> torch.memory_format:
    """Return the memory format of a batch of images: contiguous or channels-last."""
    return torch.contiguous_format if images.is_contiguous() else torch.channels_last


def check_channels(act: str, images: Tensor) -> None:
    """Raise `InvalidOption` unless images `[B, C, H, W]` have 1 or 3 channels."""
    if images.shape[1] not in (1, 3):
        found = f"the images have {format_things(images.shape[1], 'channel')}"
        raise InvalidOption(cannot(act, found, "1 or 3 channels", "Convert the images to gray or RGB"))


def _checked_factors(number: int, value: Any) -> tuple[float, float]:
    name, neutral = _NAMES[number], _NEUTRAL[number]
    least, most = (-0.5, 0.5) if number == HUE else (0.0, float("inf"))
    found: Any = (neutral, neutral) if value is None else value
    if is_finite_number(value) and value >= 0:
        found = (max(least, neutral - value), neutral + value) if number != HUE else (-value, value)
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2 and all(map(is_finite_number, found))
    if not is_pair or not least <= found[0] <= found[1] <= most:
        expected = "a number of 0 or more, or two ascending numbers"
        if number == HUE:
            expected = "a number from 0 to 0.5, or two ascending numbers from -0.5 to 0.5"
        next_step = ("For example, use ", option(name, 0.1))
        raise InvalidOption(cannot("jitter colors", option(name, value), expected, next_step))
    return float(found[0]), float(found[1])

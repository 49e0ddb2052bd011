"""Images brought to the scale that models expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, is_finite_number
from colabkit.loading.augment.checks import shown
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform, check_images


class Normalize(Transform):
    """Turns images `[B, C, H, W]` into `(x - mean) / std` of a floating dtype, keeping the memory format.

    `uint8` images are divided by 255 before; floating ones are taken as they are, in [0, 1], as torchvision's are.
    Computed in float64 for a result of float64, in float32 otherwise, and rounded once to the dtype of the result.

    Args:
        mean: one value a channel, or one for all, on the scale [0, 1].
        std: one value a channel, or one for all, on the same scale.
        dtype: of the result.

    Raises:
        InvalidOption: if a value is not a finite number, a standard deviation is not positive, the lengths differ, or
            the dtype is not floating.
    """

    def __init__(
        self, mean: Sequence[float] = (0.5,), std: Sequence[float] = (0.5,), dtype: torch.dtype = torch.float32
    ) -> None:
        if not isinstance(mean, Sequence) or not isinstance(std, Sequence):
            found = f"mean={mean!r}, std={std!r}"
            raise InvalidOption(cannot("normalize", found, "a sequence of numbers each", "Use mean=(0.5,), say"))
        if not all(is_finite_number(value) for value in (*mean, *std)):
            found = f"mean={shown(mean)}, std={shown(std)}"
            raise InvalidOption(cannot("normalize", found, "finite numbers", "Use mean=(0.5,), std=(0.5,), say"))
        if not 0 < len(mean) == len(std) or not all(value > 0 for value in std):
            found = f"mean={tuple(mean)}, std={tuple(std)}"
            needed = "as many means as positive standard deviations"
            raise InvalidOption(cannot("normalize", found, needed, "Give one of each for every channel"))
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            found = f"dtype={shown(dtype)}"
            raise InvalidOption(cannot("normalize", found, "a floating dtype", "Use torch.float32, say"))
        self.mean, self.std, self.dtype = tuple(mean), tuple(std), dtype
        self._computed = torch.float64 if dtype == torch.float64 else torch.float32
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}
        # (x - mean) / std is one multiplication and one addition, also of x / 255.
        self._scale = _by_channel([1 / s for s in std])
        self._scale_of_bytes = _by_channel([1 / (255 * s) for s in std])
        self._shift = _by_channel([-m / s for m, s in zip(mean, std, strict=True)])

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the normalised images, on the device they are on, and the labels untouched.

        Args:
            images: `uint8` from 0 to 255, or floating from 0 to 1, `[B, C, H, W]`.
            labels: anything.
            draws: not used.

        Raises:
            InvalidOption: if these are no such images, or have another number of channels.
        """
        check_images("normalize", images)
        if len(self.mean) not in (1, images.shape[1]):
            found, needed = f"images of {images.shape[1]} channels", f"as many as there are means, {len(self.mean)}"
            raise InvalidOption(cannot("normalize", found, needed, "Give one mean and one std for every channel"))
        key = images.device, images.dtype == torch.uint8
        if key not in self._constants:  # moving them makes the host wait for the device, so once is enough
            scale = self._scale_of_bytes if key[1] else self._scale
            self._constants[key] = (
                scale.to(images.device, self._computed),
                self._shift.to(images.device, self._computed),
            )
        scale, shift = self._constants[key]
        return images.to(self._computed, copy=True).mul_(scale).add_(shift).to(self.dtype), labels

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std}, dtype={self.dtype})"


def _by_channel(values: list[float]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu").view(1, -1, 1, 1)

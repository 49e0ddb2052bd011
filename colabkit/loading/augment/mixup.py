"""Images and labels of neighbours mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, check_whole_number, kind_of
from colabkit.loading.augment.checks import checked_number
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform, check_images


class MixUp(Transform):
    """Mixes each image and its label with those of the sample before it in the batch; the first one with the last.

    Labels, `int64 [B]`, become shares of the classes, `float32 [B, classes]`, which `cross_entropy` takes as they are.
    Each sample has its own share from Beta(alpha, alpha). Images keep their dtype; `uint8` ones are mixed in float32
    and rounded. Source: Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk Minimization" (ICLR 2018).

    Args:
        classes: how many there are.
        alpha: of the beta distribution, 0.001 or more; the smaller, the closer to one of the two images.

    Raises:
        InvalidOption: if an argument cannot be meant, or, when it is used, the labels are not of these classes.
    """

    whole_batch = True
    changes_labels = True

    def __init__(self, classes: int, alpha: float = 0.2) -> None:
        check_whole_number("mix images", "classes", classes, 1)
        self.classes = int(classes)
        self.alpha = checked_number("mix images", "alpha", alpha, 0.2, 0.001)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return mixed images of the same dtype, and labels `float32 [B, classes]` that sum to 1.

        Args:
            images: `uint8` or floating `[B, C, H, W]`, on any device.
            labels: class numbers `int64 [B]`, or shares of the classes, floating `[B, classes]`. Class numbers on a
                GPU are not compared with `classes`, as this would make the host wait for the device.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if these are no such images or labels.
        """
        check_images("mix images", images)
        one_hot = self._one_hot(labels, len(images))
        shares = torch.from_numpy(_symmetric_beta(self.alpha, draws.uniforms(2)))
        own_images = images.float() if images.dtype == torch.uint8 else images
        own = shares.to(own_images.dtype).to(images.device, non_blocking=True)[:, None, None, None]
        mixed = own_images.roll(1, 0).lerp_(own_images, own)
        if images.dtype == torch.uint8:
            mixed = mixed.round_().to(torch.uint8)
        own = shares.to(one_hot.dtype).to(one_hot.device, non_blocking=True)[:, None]
        return mixed, one_hot.roll(1, 0).lerp_(one_hot, own)

    def _one_hot(self, labels: Any, count: int) -> Tensor:
        """Return labels as shares of the classes."""
        if isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == (count, self.classes):
            return labels
        is_numbers = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == (count,)
        found = (
            f"labels {labels.dtype} {list(labels.shape)}"
            if isinstance(labels, Tensor)
            else f"labels are {kind_of(labels)}"
        )
        if is_numbers and labels.device.type == "cpu" and count:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                is_numbers, found = False, f"labels from {low} to {high}"
        if not is_numbers:
            needed = f"class numbers [{count}] below {self.classes} or shares [{count}, {self.classes}]"
            raise InvalidOption(cannot("mix images", found, needed, "Give the labels that belong to the images"))
        one_hot: Tensor = (labels[:, None] == torch.arange(self.classes, device=labels.device)).float()
        return one_hot

    def __repr__(self) -> str:
        return f"MixUp({self.classes}, alpha={self.alpha})"


def _symmetric_beta(alpha: float, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return numbers of Beta(alpha, alpha), `float64 [B]`, from `float64 [B, 2]` in [0, 1): exact for any alpha.

    Source: Devroye, "Random variate generation in one line of code" (Winter Simulation Conference 1996), for the
    symmetric beta: 1/2 + S / (2 sqrt(1 + 1 / ((U^(-1/a) - 1) cos^2(2 pi V)))) with S the sign of the cosine; here
    without the division by what may be 0.
    """
    power: npt.NDArray[np.float64] = (1 - uniforms[:, 0]) ** (1 / alpha)
    cosine = np.cos(2 * np.pi * uniforms[:, 1])
    spread = (1 - power) * cosine**2
    total = power + spread
    shares = np.sqrt(np.divide(spread, total, out=np.ones_like(total), where=total > 0))
    mixed: npt.NDArray[np.float64] = (1 + np.copysign(shares, cosine)) / 2
    return mixed

"""What every transform is: a pure function of a batch, its labels and the random numbers of its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, kind_of
from colabkit.loading.augment.draws import Draws


class Transform:
    """Base of all transforms; two are equal when their texts are.

    Attributes:
        whole_batch: whether the result of a sample depends on its neighbours, so the batch has to be complete.
        changes_labels: whether labels come out other than they went in; without it a loader may give none to `apply`.
    """

    whole_batch: bool = False
    changes_labels: bool = False

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the transformed images and labels; those given stay as they are.

        Args:
            images: `[B, C, H, W]`, on any device; `uint8` in channels-last memory goes fastest.
            labels: of the samples; most transforms pass them on untouched.
            draws: the random numbers of the B samples.
        """
        raise NotImplementedError

    def __call__(self, images: Tensor, labels: Any = None, *, draws: Draws | None = None) -> Any:
        """Return the transformed images, with the labels if there are any: `images` or `(images, labels)`.

        Args:
            images: `[B, C, H, W]`.
            labels: of the samples; None if there are none.
            draws: the random numbers of the B samples; without them, new ones from torch's global generator.
        """
        if draws is None:
            seed = int(torch.randint(torch.iinfo(torch.int64).max, (), device="cpu"))
            draws = Draws(seed, 0, np.arange(len(images), dtype=np.int64))
        images, labels_out = self.apply(images, labels, draws)
        return images if labels is None else (images, labels_out)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def check_images(act: str, images: Tensor, fill: float = 0) -> None:
    """Raise `InvalidOption` unless these are images of a batch, `uint8` or floating, which can hold a value.

    Args:
        act: verb and object for the message.
        images: what was given.
        fill: the value; `uint8` images need a byte.
    """
    is_tensor = isinstance(images, Tensor)
    if not is_tensor or images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        found = f"{images.dtype} {list(images.shape)}" if is_tensor else kind_of(images)
        needed = "a uint8 or floating tensor [B, C, H, W]"
        raise InvalidOption(cannot(act, found, needed, "Give a batch of images"))
    if images.dtype == torch.uint8:
        check_fill(act, fill)


def check_fill(act: str, fill: float) -> None:
    """Raise `InvalidOption` unless `uint8` images can hold a value."""
    if not (0 <= fill <= 255 and fill == int(fill)):
        found = f"fill={fill} and uint8 images"
        raise InvalidOption(cannot(act, found, "a whole number from 0 to 255", "Normalize before, or use fill=0"))

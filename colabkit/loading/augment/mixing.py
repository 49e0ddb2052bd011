"""Transforms that change pixel values: `Normalize`, `Cutout`, `MixUp` and `CutMix`."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    check_type,
    check_whole_number,
    format_things,
    kind_of,
    option,
)
from colabkit.loading.augment.transform import Draws, Transform, check_images, sent


class Normalize(Transform):
    """Normalize images `[B, C, H, W]` to `(x - mean) / std` in a floating-point dtype, keeping the memory format.

    `uint8` images are divided by 255 first, so the default scales them to [0, 1], exactly as `supervised_step()` does.
    Floating-point images are expected in [0, 1], as in torchvision; the default leaves their values unchanged. The
    result is computed in float64 if `dtype` is float64, otherwise in float32, and rounded once to `dtype`.

    Args:
        mean: one value per channel, or one for all, on the scale [0, 1].
        std: one value per channel, or one for all, on the same scale.
        dtype: floating-point dtype of the result.

    Raises:
        InvalidOption: if a value is not a finite number, a standard deviation is not positive, the lengths differ, the
            dtype is not floating-point, or, when the transform is applied, the number of channels does not fit.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
        >>> augment.Normalize(mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25])(images)[0, :, 0, 0]
        tensor([2., 2., 2.])
    """

    def __init__(
        self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), dtype: torch.dtype = torch.float32
    ) -> None:
        for name, values, above in (("mean", mean, -math.inf), ("std", std, 0)):
            check_type("normalize", name, values, Sequence, "a sequence of numbers", f"Use {name}=(0.5,)")
            for number, value in enumerate(values):
                check_number("normalize", f"{name}[{number}]", value, above=above, example=0.5)
        if not 0 < len(mean) == len(std):
            found = f"mean has {format_things(len(mean), 'value')}, but std has {len(std)}"
            next_step = "Pass one mean and one standard deviation per channel"
            raise InvalidOption(cannot("normalize", found, "equal numbers of values, at least one", next_step))
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            example = "For example, use dtype=torch.float32"
            raise InvalidOption(cannot("normalize", option("dtype", dtype), "a floating-point dtype", example))
        self.mean, self.std, self.dtype = tuple(mean), tuple(std), dtype
        self._computed = torch.float64 if dtype == torch.float64 else torch.float32
        self._only_scales = not any(self.mean) and all(value == 1 for value in self.std)
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}
        # Fold the division by 255 into the scale, so that it takes no extra operation.
        self._scale = self._by_channel([1 / s for s in std])
        self._scale_of_bytes = self._by_channel([1 / (255 * s) for s in std])
        self._shift = self._by_channel([-m / s for m, s in zip(mean, std, strict=True)])

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the normalized images, on the same device, and the unchanged labels."""
        check_images("normalize", images)
        if len(self.mean) not in (1, images.shape[1]):
            found = f"the images have {format_things(images.shape[1], 'channel')}, but there are {len(self.mean)} means"
            next_step = "Pass one mean and one standard deviation per channel"
            raise InvalidOption(cannot("normalize", found, "", next_step))
        if images.device.type == "cpu":
            return self._on_cpu(images).to(self.dtype), labels
        key = images.device, images.dtype == torch.uint8
        # Moving constants to a device makes the host wait for the device, so cache the moved constants.
        if key not in self._constants:
            scale = self._scale_of_bytes if key[1] else self._scale
            self._constants[key] = scale.to(images.device), self._shift.to(images.device)
        scale, shift = self._constants[key]
        if images.dtype == torch.float64:
            images = images.to(self._computed)
        # Convert bytes, multiply and add in a single kernel.
        return torch.addcmul(shift, images, scale).to(self.dtype), labels

    def _by_channel(self, values: list[float]) -> Tensor:
        exact = torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")
        return exact.view(1, -1, 1, 1).to(self._computed)

    def _on_cpu(self, images: Tensor) -> Tensor:
        """Return the normalized images before the conversion to `dtype`."""
        is_bytes, work = images.dtype == torch.uint8, images.to(self._computed, copy=True)
        if self._only_scales:
            return work.div_(255) if is_bytes else work
        scale, shift, values = self._scale_of_bytes if is_bytes else self._scale, self._shift, work
        if work.is_contiguous(memory_format=torch.channels_last):
            # Repeat the constants for each pixel of a row: loops over three channels are several times as slow.
            values = work.permute(0, 2, 3, 1).flatten(2)
            scale, shift = (each.view(1, -1).expand(work.shape[3], work.shape[1]).flatten() for each in (scale, shift))
        values.mul_(scale).add_(shift)
        return work

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std}, dtype={self.dtype})"


class Cutout(Transform):
    """Fill a square at a random position of each image, with a given probability.

    The center is uniform over the pixels, and the square is clipped at the border. Source: DeVries and Taylor,
    "Improved Regularization of Convolutional Neural Networks with Cutout" (2017).

    Args:
        size: side of the square in pixels, or height and width of a rectangle.
        p: probability that an image gets a square.
        fill: pixel value of the square, 0 to 255 for `uint8` images.

    Raises:
        InvalidOption: if an argument is invalid.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.full((4, 3, 32, 32), 255, dtype=torch.uint8)
        >>> cut = augment.Cutout(8)(images)
        >>> (cut == 0).flatten(1).any(1)
        tensor([True, True, True, True])
    """

    def __init__(self, size: int | tuple[int, int], p: float = 1.0, fill: float = 0) -> None:
        act = "cut squares out of images"
        self.size = check_size(act, "size", size)
        self.p = check_number(act, "p", p, 0, 1, example=0.5)
        self.fill = check_number(act, "fill", fill, example=0)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the images with filled squares, and the unchanged labels."""
        check_images("cut squares out of images", images, self.fill)
        uniforms = draws.uniforms(3)
        corner = np.floor(uniforms[:, 1:] * images.shape[2:]).astype(np.int64) - np.array(self.size) // 2
        # Move the square outside the image, where it has no effect, for images that get none.
        corner[uniforms[:, 0] >= self.p] = max(images.shape[2:])
        result = images.clone()
        if images.device.type == "cpu" and images.dtype == torch.uint8:
            pixels = result.permute(0, 2, 3, 1).numpy()
            last = corner + self.size
            for sample, (top, left), (bottom, right) in zip(
                pixels, corner.clip(0).tolist(), last.clip(0).tolist(), strict=True
            ):
                sample[top:bottom, left:right] = self.fill
        else:
            first = sent(torch.from_numpy(corner), images.device)
            rows, columns = (
                _between(first[:, axis], first[:, axis] + self.size[axis], images.shape[2 + axis]) for axis in (0, 1)
            )
            result.masked_fill_((rows[:, :, None] & columns[:, None])[:, None], self.fill)
        return result, labels

    def __repr__(self) -> str:
        return f"Cutout({self.size}, p={self.p}, fill={self.fill})"


def _between(first: Tensor, last: Tensor, length: int) -> Tensor:
    at = torch.arange(length, device=first.device)
    return (at >= first[:, None]) & (at < last[:, None])


class _SampleMix(Transform):
    """Base class of transforms that mix each image and its label with those of the previous sample in the batch."""

    whole_batch = True
    changes_labels = True

    def __init__(self, num_classes: int, alpha: float) -> None:
        self.num_classes = check_whole_number("mix images", "num_classes", num_classes, 1)
        self.alpha = check_number("mix images", "alpha", alpha, 0.001, example=0.2)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the mixed images, of the same dtype, and class probabilities `[B, num_classes]`.

        Class numbers become `float32` probabilities; given probabilities keep their dtype.

        Args:
            images: `uint8` or floating-point `[B, C, H, W]`, on any device.
            labels: class numbers `int64 [B]`, or floating-point class probabilities `[B, num_classes]`. Class numbers
                on a GPU are not compared with `num_classes`, because this would make the host wait for the device.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if the images or labels have an unsupported shape or dtype, or a class number on the CPU is
                not below `num_classes`.
        """
        check_images("mix images", images)
        one_hot = self._one_hot(labels, len(images))
        mixed, shares = self._mixed(images, draws)
        own = sent(torch.from_numpy(shares).to(one_hot.dtype), one_hot.device)[:, None]
        return mixed, _previous(one_hot).lerp_(one_hot, own)

    def _mixed(self, images: Tensor, draws: Draws) -> tuple[Tensor, npt.NDArray[np.float64]]:
        """Return the mixed images, and the share of each sample's own label, `float64 [B]`."""
        raise NotImplementedError

    def _one_hot(self, labels: Any, count: int) -> Tensor:
        if isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == (count, self.num_classes):
            return labels
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != (count,):
            found = f"the labels are {kind_of(labels)}"
            if isinstance(labels, Tensor):
                found = f"the labels have dtype {labels.dtype} and shape {list(labels.shape)}"
            expected = f"class numbers of shape [{count}] or probabilities of shape [{count}, {self.num_classes}]"
            raise InvalidOption(cannot("mix images", found, expected, "Pass one label per image"))
        if labels.device.type == "cpu" and count:
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.num_classes:
                raise InvalidOption(
                    cannot(
                        "mix images",
                        f"the labels range from {low} to {high}",
                        f"class numbers from 0 to {self.num_classes - 1}",
                        ("Correct the labels, or pass the right number of classes as ", option("num_classes")),
                    )
                )
        one_hot: Tensor = (labels[:, None] == torch.arange(self.num_classes, device=labels.device)).float()
        return one_hot

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_classes}, alpha={self.alpha})"


class MixUp(_SampleMix):
    """Mix each image and its label with those of the previous sample in the batch (the first with the last).

    Labels `int64 [B]` become class probabilities `float32 [B, num_classes]`, which `cross_entropy` accepts directly.
    Each sample draws its own weight from Beta(alpha, alpha). Images keep their dtype; `uint8` images are mixed in
    float32, or float16 on CUDA, and rounded. Source: Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk
    Minimization" (ICLR 2018).

    Args:
        num_classes: number of classes.
        alpha: parameter of the beta distribution, 0.001 or more; the smaller it is, the more one of the two images
            dominates.

    Raises:
        InvalidOption: if an argument is invalid, or, when the transform is applied, if a label is not a valid class.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> labels = torch.tensor([0, 1, 2, 3])
        >>> mixed, probabilities = augment.MixUp(num_classes=4)(images, labels)
        >>> probabilities.shape, probabilities.dtype
        (torch.Size([4, 4]), torch.float32)
    """

    def __init__(self, num_classes: int, alpha: float = 0.2) -> None:
        super().__init__(num_classes, alpha)

    def _mixed(self, images: Tensor, draws: Draws) -> tuple[Tensor, npt.NDArray[np.float64]]:
        shares = _symmetric_beta(self.alpha, draws.uniforms(2))
        own_images = images
        if images.dtype == torch.uint8:
            # On CUDA, float16 halves the time and changes a byte by at most 1.
            own_images = images.to(torch.float16 if images.is_cuda else torch.float32)
        own = sent(torch.from_numpy(shares).to(own_images.dtype), images.device)[:, None, None, None]
        mixed = torch.empty_like(own_images)
        torch.lerp(own_images[:-1], own_images[1:], own[1:], out=mixed[1:])
        torch.lerp(own_images[-1:], own_images[:1], own[:1], out=mixed[:1])
        if images.dtype == torch.uint8:
            mixed = mixed.round_().to(torch.uint8)
        return mixed, shares


class CutMix(_SampleMix):
    """Replace a box in each image with the same box from the previous sample in the batch, and mix their labels.

    The first sample takes its box from the last sample. Labels `int64 [B]` become class probabilities `float32 [B,
    num_classes]`, which `cross_entropy` accepts directly: the share of each label is the share of its pixels. Each
    sample draws its own box: the area is `1 - w` of the image with `w` from Beta(alpha, alpha), the center is uniform,
    and the box is clipped at the border. Source: Yun et al., "CutMix: Regularization Strategy to Train Strong
    Classifiers with Localizable Features" (ICCV 2019).

    Args:
        num_classes: number of classes.
        alpha: parameter of the beta distribution, 0.001 or more; the smaller it is, the more one of the two images
            dominates.

    Raises:
        InvalidOption: if an argument is invalid, or, when the transform is applied, if a label is not a valid class.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> labels = torch.tensor([0, 1, 2, 3])
        >>> mixed, probabilities = augment.CutMix(num_classes=4)(images, labels)
        >>> mixed.shape, probabilities.shape
        (torch.Size([4, 3, 32, 32]), torch.Size([4, 4]))
    """

    def __init__(self, num_classes: int, alpha: float = 1.0) -> None:
        super().__init__(num_classes, alpha)

    def _mixed(self, images: Tensor, draws: Draws) -> tuple[Tensor, npt.NDArray[np.float64]]:
        uniforms = draws.uniforms(4)
        sizes = np.array(images.shape[2:])
        # As in torchvision, the sides of the box have an even number of pixels before the box is clipped.
        half = (0.5 * np.sqrt(1 - _symmetric_beta(self.alpha, uniforms[:, :2]))[:, None] * sizes).astype(np.int64)
        center = (uniforms[:, 2:] * sizes).astype(np.int64)
        first, last = (center - half).clip(0), np.minimum(center + half, sizes)
        box = sent(torch.from_numpy(np.stack([first, last])), images.device)
        rows, columns = (_between(box[0, :, axis], box[1, :, axis], images.shape[2 + axis]) for axis in (0, 1))
        mixed = torch.where((rows[:, :, None] & columns[:, None])[:, None], _previous(images), images)
        return mixed, 1 - (last - first).prod(1) / sizes.prod()


def _previous(values: Tensor) -> Tensor:
    """Return the values with each sample replaced by the previous one, in the same memory format."""
    # Do not use `roll`, which makes the result contiguous on CUDA.
    return torch.cat((values[-1:], values[:-1]))


def _symmetric_beta(alpha: float, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return samples of Beta(alpha, alpha), `float64 [B]`, from uniform numbers `float64 [B, 2]`: exact for any alpha.

    Source: Devroye, "Random variate generation in one line of code" (Winter Simulation Conference 1996), for the
    symmetric beta: 1/2 + S / (2 sqrt(1 + 1 / ((U^(-1/a) - 1) cos^2(2 pi V)))) with S the sign of the cosine. The
    formula is rearranged here to avoid a division by zero.
    """
    power: npt.NDArray[np.float64] = (1 - uniforms[:, 0]) ** (1 / alpha)
    cosine = np.cos(2 * np.pi * uniforms[:, 1])
    spread = (1 - power) * cosine**2
    total = power + spread
    shares = np.sqrt(np.divide(spread, total, out=np.ones_like(total), where=total > 0))
    mixed: npt.NDArray[np.float64] = (1 + np.copysign(shares, cosine)) / 2
    return mixed

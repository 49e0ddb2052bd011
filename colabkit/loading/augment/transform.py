"""What every transform is: a pure function of a batch, its labels and the random numbers of its samples."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from colabkit.foundation import GAMMA, MASK, InvalidOption, cannot, check_callable, hashed, kind_of, mixed, uniforms


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of some samples: a pure function of seed, epoch and position, so resuming saves nothing.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) started at a hash
    of seed, epoch, stream and position; nothing is kept between calls.

    Attributes:
        seed: any integer; the lowest 64 bits count.
        epoch: number of the pass.
        positions: `int64 [B]`, places in the epoch's global order.
        stream: which of the sample's sequences of numbers; each transform of a `Compose` has its own.
    """

    seed: int
    epoch: int
    positions: npt.NDArray[np.int64]
    stream: int = 0

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Return numbers in [0, 1), `float64 [B, count]`; the first columns do not depend on `count`."""
        key = _hashed(_hashed(_hashed(operator.index(self.seed)) + operator.index(self.epoch)) + self.stream)
        states = hashed(key, self.positions)
        return uniforms(hashed(states[:, None], np.arange(1, count + 1)))

    def of(self, number: int) -> Draws:
        """Return the draws of the `number`-th transform inside a `Compose`: a stream of its own."""
        return Draws(self.seed, self.epoch, self.positions, _hashed(self.stream + number + 1))

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of the samples from `start` to `stop` of these."""
        return Draws(self.seed, self.epoch, self.positions[start:stop], self.stream)


def _hashed(value: int) -> int:
    """Return the number that SplitMix64 gives after the state `value`."""
    return mixed((value + GAMMA) & MASK)


class Transform:
    """Base of all transforms; two are equal when their texts are.

    Attributes:
        whole_batch: whether the result of a sample depends on its neighbours, so the batch has to be complete.
        changes_labels: whether it changes labels; without it a loader may give none to `apply`.
    """

    whole_batch: bool = False
    changes_labels: bool = False

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the transformed images and labels; those given stay unchanged.

        Args:
            images: `[B, C, H, W]`, on any device; `uint8` in channels-last memory goes fastest.
            labels: of the samples; most transforms pass them on untouched.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if the images or labels do not suit the transform.
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


class PerBatch(Transform):
    """A function of the images of a batch that draws no random numbers, as in `PerBatch(lambda x: x.float() / 255)`.

    The loader applies it in a worker thread on the CPU, while the model computes. Without this mark it runs where the
    batch is handed over, since nobody knows whether it draws from the global generators, which belong to the caller.

    Args:
        function: takes the images of a batch, `[B, C, H, W]`, and returns the result of the batch.

    Raises:
        InvalidOption: if it cannot be called.
    """

    whole_batch = True

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        check_callable("make a transform of a batch", "function", function, "Pass a function", optional=False)
        self.function = function

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Any, Any]:
        """Return the function's result, and the labels untouched."""
        return self.function(images), labels

    def __repr__(self) -> str:
        return f"PerBatch({self.function!r})"


class PerSample:
    """A function of one sample, as in `Loader(data, 64, transform=PerSample(to_spectrogram))`.

    The loader applies it to the first field of each sample, in worker processes, each time with the global generators
    of Python, NumPy and torch seeded by the sample's position. Transforms of torchvision need no such mark.

    Args:
        function: takes one sample, for example an image `uint8 [C, H, W]`; its results need one shape to be stacked.

    Raises:
        InvalidOption: if it cannot be called.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        check_callable("make a transform of one sample", "function", function, "Pass a function", optional=False)
        self.function = function

    def __call__(self, sample: Any) -> Any:
        """Return the function's result for a sample."""
        return self.function(sample)

    def __repr__(self) -> str:
        return f"PerSample({self.function!r})"


def is_per_sample(transform: Any) -> bool:
    """Return whether a transform is for one sample: so marked, or torchvision's, which give a whole batch one draw.

    An `nn.Sequential` is if all in it are; others may well be made for batches, such as those of kornia.
    """
    if isinstance(transform, nn.Sequential):
        return len(transform) > 0 and all(map(is_per_sample, transform))
    return isinstance(transform, PerSample) or type(transform).__module__.startswith("torchvision.transforms")


def check_images(act: str, images: Tensor, fill: float = 0) -> None:
    """Raise `InvalidOption` unless these are images of a batch, `uint8` or floating, which can hold the value `fill`.

    `act` is verb and object for the message.
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

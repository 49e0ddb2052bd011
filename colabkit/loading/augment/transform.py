"""Base classes of the transforms, which are pure functions of a batch, its labels and its samples' random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from colabkit.foundation import (
    GAMMA,
    MASK,
    InvalidOption,
    cannot,
    check_callable,
    checked_call,
    hashed,
    kind_of,
    mixed,
    uniforms,
)

# Size in bytes above which the CUDA driver may wait for the stream before it copies pageable memory.
_PAGEABLE_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of a set of samples, a pure function of seed, epoch and position.

    There is no generator state to save, so a resumed run draws the same numbers. The numbers come from SplitMix64
    (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), seeded with a hash of
    seed, epoch, stream and position.

    Attributes:
        seed: any integer; only the lowest 64 bits are used.
        epoch: number of the epoch.
        positions: positions of the samples in the epoch's global order, `int64 [B]`.
        stream: number of the random stream; each transform of a `Compose` has its own stream.

    Example:
        >>> import numpy as np
        >>> from colabkit import augment
        >>> draws = augment.Draws(seed=0, epoch=3, positions=np.arange(64))
        >>> draws.uniforms(2).shape
        (64, 2)
        >>> np.array_equal(draws.uniforms(2)[8:16], draws.part(8, 16).uniforms(2))
        True
    """

    seed: int
    epoch: int
    positions: npt.NDArray[np.int64]
    stream: int = 0

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Return uniform numbers in [0, 1), `float64 [B, count]`; the first columns do not depend on `count`.

        Args:
            count: random numbers per sample.
        """
        key = _hashed(_hashed(_hashed(operator.index(self.seed)) + operator.index(self.epoch)) + self.stream)
        states = hashed(key, self.positions)
        return uniforms(hashed(states[:, None], np.arange(1, count + 1)))

    def of(self, number: int) -> Draws:
        """Return the draws for the transform with the given number in a `Compose`; each has a separate stream."""
        return Draws(self.seed, self.epoch, self.positions, _hashed(self.stream + number + 1))

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of the samples from index `start` to `stop`."""
        return Draws(self.seed, self.epoch, self.positions[start:stop], self.stream)


def _hashed(value: int) -> int:
    return mixed((value + GAMMA) & MASK)


class Transform:
    """Base class of all transforms; two are equal if they have the same type and `repr`.

    Attributes:
        whole_batch: whether the result of a sample depends on the other samples, so the batch has to be complete.
        changes_labels: whether the transform changes labels; if not, a loader may call `apply` without them.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> class Invert(augment.Transform):
        ...     def apply(self, images, labels, draws):
        ...         return 255 - images, labels
        >>> Invert()(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).unique()
        tensor([255], dtype=torch.uint8)
    """

    whole_batch: bool = False
    changes_labels: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("colabkit.") and "__init__" in vars(cls):
            cls.__init__ = checked_call()(cls.__init__)  # type: ignore[method-assign]

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        """Return the transformed images and labels; the arguments are not modified.

        Args:
            images: `[B, C, H, W]`, on any device; `uint8` in channels-last memory format is fastest.
            labels: labels of the samples; most transforms return them unchanged.
            draws: the random numbers of the B samples.

        Raises:
            InvalidOption: if the transform does not support these images or labels.
        """
        raise NotImplementedError

    def __call__(self, images: Tensor, labels: Any = None, *, draws: Draws | None = None) -> Any:
        """Transform a batch and return `images`, or `(images, labels)` if labels are given.

        Args:
            images: `[B, C, H, W]`.
            labels: labels of the samples; None if there are none.
            draws: the random numbers of the B samples; None seeds new ones from torch's global generator.
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
    """Wrap a function of a batch's images that draws no random numbers, as in `PerBatch(lambda x: x.float() / 255)`.

    On the CPU, the loader calls the function in a worker thread while the model computes. A bare function instead runs
    in your thread when you request the batch, because it might draw from the global random generators.

    Args:
        function: function that takes the images of a batch, `[B, C, H, W]`, and returns the transformed images.

    Raises:
        InvalidOption: if `function` is not callable.

    Example:
        >>> import colabkit, torch
        >>> images = torch.zeros(64, 3, 8, 8, dtype=torch.uint8)
        >>> scale = colabkit.augment.PerBatch(lambda batch: batch.float() / 255)
        >>> next(iter(colabkit.Loader(images, batch_size=32, transform=scale))).dtype
        torch.float32
    """

    whole_batch = True

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        check_callable("make a transform of a batch", "function", function, "Pass a function", optional=False)
        self.function = function

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Any, Any]:
        """Return the function's result and the unchanged labels."""
        return self.function(images), labels

    def __repr__(self) -> str:
        return f"PerBatch({self.function!r})"


class PerSample:
    """Wrap a function of one sample, as in `Loader(data, 64, transform=PerSample(to_spectrogram))`.

    The loader calls it with the first field of each sample, in worker processes. Before each call, the loader seeds the
    global generators of Python, NumPy and torch from its seed, the epoch and the sample's position. Torchvision
    transforms need no wrapper.

    Args:
        function: function that takes one sample, for example an image `uint8 [C, H, W]`. All results need the same
            shape, so that they can be stacked.

    Raises:
        InvalidOption: if `function` is not callable.

    Example:
        >>> import colabkit, torch
        >>> signals = torch.zeros(64, 100)
        >>> spectrum = colabkit.augment.PerSample(lambda signal: torch.fft.rfft(signal).abs())
        >>> next(iter(colabkit.Loader(signals, batch_size=32, transform=spectrum))).shape
        torch.Size([32, 51])
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        check_callable("make a transform of one sample", "function", function, "Pass a function", optional=False)
        self.function = function

    def __call__(self, sample: Any) -> Any:
        """Return the function's result for one sample."""
        return self.function(sample)

    def __repr__(self) -> str:
        return f"PerSample({self.function!r})"


def is_per_sample(transform: Any) -> bool:
    """Return whether a transform takes single samples: a `PerSample` or a torchvision transform.

    Torchvision transforms would use the same random draw for the whole batch. An `nn.Sequential` takes single samples
    if all its modules do; other modules, such as those of kornia, are assumed to take batches.
    """
    if isinstance(transform, nn.Sequential):
        return len(transform) > 0 and all(map(is_per_sample, transform))
    return isinstance(transform, PerSample) or type(transform).__module__.startswith("torchvision.transforms")


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return small numbers, such as those of all samples of a batch, on a device, without waiting for the device."""
    if device.type == "cuda" and numbers.nbytes > _PAGEABLE_BYTES:
        # If memory cannot be page-locked, the copy is only slower.
        with suppress(RuntimeError):
            numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def check_images(act: str, images: Tensor, fill: float = 0) -> None:
    """Raise `InvalidOption` unless `images` is a `uint8` or floating-point batch whose dtype can hold `fill`.

    `act` is the verb and object of the message.
    """
    is_tensor = isinstance(images, Tensor)
    if not is_tensor or images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        found = f"the images are {kind_of(images)}"
        if is_tensor:
            found = f"the images have dtype {images.dtype} and shape {list(images.shape)}"
        expected = "a uint8 or floating-point tensor [B, C, H, W]"
        raise InvalidOption(cannot(act, found, expected, "Pass a batch of images"))
    if images.dtype == torch.uint8:
        check_fill(act, fill)


def check_fill(act: str, fill: float) -> None:
    """Raise `InvalidOption` unless `uint8` images can hold the fill value."""
    if not (0 <= fill <= 255 and fill == int(fill)):
        found = f"fill={fill} is used with uint8 images"
        next_step = "Apply Normalize first, or use fill=0"
        raise InvalidOption(cannot(act, found, "a whole number from 0 to 255", next_step))

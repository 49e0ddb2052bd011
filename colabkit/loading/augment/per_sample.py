"""Functions of one sample, which a loader runs in worker processes: those so marked, and torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from colabkit.foundation import InvalidOption, cannot


class PerSample:
    """A function of one sample, as in `Loader(data, 64, transform=PerSample(to_spectrogram))`.

    The loader applies it to the first field of each sample, in worker processes, each time with the global generators
    of Python, NumPy and torch seeded by the sample's position. Transforms of torchvision are taken so without it.

    Args:
        function: takes one sample, an image `uint8 [C, H, W]`, say; what it returns has to be of one shape to stack.

    Raises:
        InvalidOption: if it cannot be called.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        if not callable(function) or isinstance(function, type):
            act = "make a transform of one sample"
            raise InvalidOption(cannot(act, f"{function!r}", "something to call", "Pass a function"))
        self.function = function

    def __call__(self, sample: Any) -> Any:
        """Return what the function makes of a sample."""
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

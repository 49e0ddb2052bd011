"""Marks a function of one sample, which a loader runs in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colabkit.errors import InvalidOption, cannot

__all__ = ["PerSample"]


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

"""Marks a function of a batch that may run in a worker thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from colabkit.foundation import InvalidOption, cannot
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.transform import Transform


class PerBatch(Transform):
    """A function of the images of a batch that draws no random numbers, as in `PerBatch(lambda x: x.float() / 255)`.

    The loader applies it in a worker thread on the CPU, while the model computes. Without this mark it runs where the
    batch is handed over, since nobody knows whether it draws from the global generators, which belong to the caller.

    Args:
        function: takes the images of a batch, `[B, C, H, W]`, and returns what shall come of them.

    Raises:
        InvalidOption: if it cannot be called.
    """

    whole_batch = True

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        if not callable(function) or isinstance(function, type):
            act = "make a transform of a batch"
            raise InvalidOption(cannot(act, f"{function!r}", "something to call", "Pass a function"))
        self.function = function

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Any, Any]:
        """Return what the function makes of the images, and the labels untouched."""
        return self.function(images), labels

    def __repr__(self) -> str:
        return f"PerBatch({self.function!r})"

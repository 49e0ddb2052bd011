"""What tests of the loader do with its batches and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def epoch(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the images and the labels of an epoch, each in one tensor."""
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def same(some: list[Any], others: list[Any]) -> bool:
    """Return whether batches of several tensors are equal, bit for bit."""
    return len(some) == len(others) and all(
        all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(*pair, strict=True))
        for pair in zip(some, others, strict=True)
    )


def loader_threads(prefix: str = "colabkit-loader") -> list[threading.Thread]:
    """Return the threads of loaders that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]

"""Batches of random images, and the random numbers of their samples."""

from __future__ import annotations

import numpy as np
import torch

from colabkit.augment import Draws


def images(count: int = 10, channels: int = 3, height: int = 23, width: int = 31, least: int = 0) -> torch.Tensor:
    """Return `uint8 [count, channels, height, width]` in channels-last memory, with no value below `least`."""
    generator = torch.Generator().manual_seed(count * 1000 + height)
    batch = torch.randint(least, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    return batch.contiguous(memory_format=torch.channels_last)


def draws(count: int = 10, seed: int = 5) -> Draws:
    return Draws(seed, 1, np.arange(count))

"""Code that draws from the global generators gets numbers that depend on the sample, not on what was drawn before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from colabkit.loading.augment.draws import Draws


def seeds_of(draws: Draws) -> list[int]:
    """Return a seed of 53 bits for each of some samples: of many together they cost a tenth as much."""
    return [int(uniform * 2**53) for uniform in draws.uniforms(1)[:, 0].tolist()]


def seed_all(draws: Draws, device: torch.device | None = None) -> None:
    """Seed the generators by the first sample of some, as `seed_generators` does."""
    seed_generators(seeds_of(draws.part(0, 1))[0], device)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch.

    Args:
        seed: of 53 bits.
        device: whose generator is seeded besides that of the CPU. `torch.manual_seed` would seed those of all GPUs.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Put the generators back after the block as they were before it.

    Args:
        device: whose generator counts besides that of the CPU.
    """
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    gpu = device if device is not None and device.type == "cuda" else None
    on_gpu = None if gpu is None else torch.cuda.get_rng_state(gpu)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torchs)
        if gpu is not None and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, gpu)

"""Code of users runs with seeded generators, and its errors come as one line that says where, with their cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import ColabkitError, LoaderFailed, cannot, format_count, format_things
from colabkit.loading.augment.transform import Draws, Transform

_SHOWN = 3


def loader_failed(
    error: Exception | str, next_step: str = "Check them with one sample", where: str = ""
) -> LoaderFailed:
    """Return the error to raise for what code of users raised.

    Args:
        error: itself, or its text.
        next_step: how to reproduce it.
        where: the samples, as of `describe_samples`; empty if unknown.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    found = " ".join(text.split())  # which may be a traceback of many lines
    if where:
        found, next_step = f"{where}: {found}", "Run transform on a batch of these samples to see it"
    if "pic should be PIL Image" in found and "torch.Tensor" in found:  # of torchvision's older ToTensor
        next_step = "Samples are tensors: use v2.ToDtype(torch.float32, scale=True), or Normalize of colabkit.augment"
    return LoaderFailed(cannot("make a batch", found, "a data set and transforms without errors", next_step))


@contextmanager
def reporting_errors(describe: Callable[[], str] = str) -> Iterator[None]:
    """Raise `LoaderFailed` for what code of users raises in the block; `describe` returns the samples it worked on."""
    try:
        yield
    except ColabkitError:
        raise
    except Exception as error:
        raise loader_failed(error, where=describe()) from error


def check_collated(transform: object, images: Any, samples: int) -> None:
    """Raise `LoaderFailed` for a batch that a custom `collate_fn` left samples out of.

    Args:
        transform: to be applied; ours draw random numbers for each sample.
        images: the first field of the batch.
        samples: how many `collate_fn` was given.
    """
    if isinstance(transform, Transform) and isinstance(images, Tensor) and images.ndim and len(images) != samples:
        found = f"a batch of {len(images)} that collate_fn made of {format_things(samples, 'sample')}"
        next_step = "Leave samples out by sampler= or a Subset, or transform them in collate_fn"
        raise LoaderFailed(cannot("transform a batch", found, "one for each sample", next_step))


def describe_samples(epoch: int, indices: Sequence[int], name_of: Callable[[int], str] | None) -> str:
    """Return the samples of a batch for a message, as in `"samples 7 ('a/7.png' of 'tree'), 3, 5 and 61 more"`.

    Args:
        epoch: of them.
        indices: of the samples, at least one.
        name_of: returns the name of a sample, empty if it has none; None if the data set has no names.
    """
    first, *others = indices[:_SHOWN]
    name = name_of(first) if name_of is not None else ""
    listed = ", ".join([f"{first} ({name})" if name else str(first), *map(str, others)])
    more = f" and {format_count(len(indices) - _SHOWN)} more" if len(indices) > _SHOWN else ""
    return f"sample{'s' if others else ''} {listed}{more} of epoch {epoch}"


def seeds_of(draws: Draws) -> list[int]:
    """Return a seed of 53 bits for each sample; computing many together costs a tenth as much for each."""
    return [int(uniform * 2**53) for uniform in draws.uniforms(1)[:, 0].tolist()]


def seed_by_draws(draws: Draws, device: torch.device | None = None) -> None:
    """Seed the global generators by the first sample of `draws`."""
    seed_generators(seeds_of(draws.part(0, 1))[0], device)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch with 53 bits; of GPUs only that of `device`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # `torch.manual_seed` would seed the generators of all GPUs.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def restored_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators, and that of a GPU `device`, after the block."""
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

"""What other people's code raises, as the user gets it: in one line that says where, with the error as its cause."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from colabkit.foundation import ColabkitError, LoaderFailed, cannot, format_count, format_things
from colabkit.loading.augment.transform import Transform
from colabkit.packs import FileDataset, PackedDataset

_SHOWN = 3


def failed(error: Exception | str, next_step: str = "Check them with one sample", where: str = "") -> LoaderFailed:
    """Return the error for what other people's code raised.

    Args:
        error: itself, or its text.
        next_step: how to see it happen.
        where: it happened, as of `place_in`; empty if nobody knows.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    found = " ".join(text.split())  # which may be a traceback of many lines
    if where:
        found, next_step = f"{where}: {found}", "Run transform on a batch of these samples to see it"
    if "pic should be PIL Image" in found and "torch.Tensor" in found:  # of torchvision's older ToTensor
        next_step = "Samples are tensors: use v2.ToDtype(torch.float32, scale=True), or Normalize of colabkit.augment"
    return LoaderFailed(cannot("make a batch", found, "a data set and transforms without errors", next_step))


@contextmanager
def failing_in(place: Callable[[], str]) -> Iterator[None]:
    """Raise `LoaderFailed` for what a transform of a batch raises in the block; `place` tells of which samples."""
    try:
        yield
    except ColabkitError:
        raise
    except Exception as error:
        raise failed(error, where=place()) from error


def check_collated(transform: object, images: Any, samples: int) -> None:
    """Raise `LoaderFailed` for a batch that other people's `collate_fn` left samples out of.

    Args:
        transform: to be applied; ours draw random numbers for each sample.
        images: the first field of the batch.
        samples: how many `collate_fn` was given.
    """
    if isinstance(transform, Transform) and isinstance(images, Tensor) and images.ndim and len(images) != samples:
        found = f"a batch of {len(images)} that collate_fn made of {format_things(samples, 'sample')}"
        next_step = "Leave samples out by sampler= or a Subset, or transform them in collate_fn"
        raise LoaderFailed(cannot("transform a batch", found, "one for each sample", next_step))


def place_in(epoch: int, numbers: Sequence[int], name: Callable[[int], str] | None) -> str:
    """Return the samples of a batch for a message, as in `"samples 7 ('a/7.png' of 'tree'), 3, 5 and 61 more"`.

    Args:
        epoch: of them.
        numbers: of the samples, at least one.
        name: gives what the data set calls a sample; empty or None if it has no names.
    """
    first, *others = numbers[:_SHOWN]
    told = name(first) if name is not None else ""
    shown = ", ".join([f"{first} ({told})" if told else str(first), *map(str, others)])
    more = f" and {format_count(len(numbers) - _SHOWN)} more" if len(numbers) > _SHOWN else ""
    return f"sample{'s' if others else ''} {shown}{more} of epoch {epoch}"


def name_of(dataset: Any, number: int) -> str:
    """Return what a data set calls a sample, or its path, as torchvision's tell it; empty if it has no name."""
    try:
        return _name_of(dataset, number)
    except Exception:  # of other people's code, while an error of theirs is told
        return ""


def _name_of(dataset: Any, number: int) -> str:
    if isinstance(dataset, Subset):
        return _name_of(dataset.dataset, int(dataset.indices[number]))
    if isinstance(dataset, ConcatDataset):
        place = bisect.bisect_right(dataset.cumulative_sizes, number)
        return _name_of(dataset.datasets[place], number - (dataset.cumulative_sizes[place - 1] if place else 0))
    if isinstance(dataset, PackedDataset | FileDataset):
        return dataset.name_of(number)
    path = next(getattr(dataset, name) for name in ("samples", "imgs") if hasattr(dataset, name))[number]
    path = path[0] if isinstance(path, tuple | list) else path
    return repr(path) if isinstance(path, str) else ""

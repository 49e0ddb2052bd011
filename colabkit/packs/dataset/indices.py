"""Indices of any kind, as users and splitters give them, become numbers of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot
from colabkit.packs.dataset.samples import Numbers


def chosen_numbers(indices: Any, count: int) -> Numbers:
    """Return indices of any kind as numbers of samples from 0, `int64 [B]`.

    Args:
        indices: integers, bools for all samples, or a slice.
        count: samples of the data set.

    Raises:
        InvalidOption: if they are something else.
        IndexError: if one of them is no sample.
    """
    if isinstance(indices, slice):
        return np.arange(*indices.indices(count), dtype=np.int64)
    try:
        found = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
    except ValueError:  # lists of several lengths
        raise no_index(indices, count) from None
    if found.dtype == bool and found.shape == (count,):
        return np.flatnonzero(found)
    if found.ndim == 1 and not len(found):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise no_index(indices, count)
    beyond = (found < -count) | (found >= count)
    if beyond.any():
        raise IndexError(f"sample {found[beyond.argmax()]} of {count}")
    numbers = found.astype(np.int64)
    return np.where(numbers < 0, numbers + count, numbers)


def no_index(index: object, count: int) -> InvalidOption:
    """Return the error for what is no index of a data set of so many samples."""
    found = f"an index of type {type(index).__name__}"
    needed = f"integers, {count} bools or a slice"
    return InvalidOption(cannot("take samples", found, needed, "Use data[0], data[:10] or data[[0, 5]], say"))

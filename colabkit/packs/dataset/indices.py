"""Conversion of indices given by the user to sample numbers, and errors for invalid indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from colabkit.foundation import InvalidOption, MissingSample, cannot, format_things, kind_of
from colabkit.packs.format.layout import Indices


def resolve_indices(indices: Any, count: int) -> Indices:
    """Convert integers, a slice, or one bool for each of `count` samples to sample numbers from 0, `int64 [B]`.

    Raises:
        InvalidOption: if the indices are of any other kind.
        MissingSample: if an index is out of range.
    """
    if isinstance(indices, slice):
        return np.arange(*indices.indices(count), dtype=np.int64)
    try:
        found = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
    except ValueError:
        # NumPy rejects nested lists of different lengths.
        raise index_error(indices, count) from None
    if found.dtype == bool and found.shape == (count,):
        return np.flatnonzero(found)
    if found.ndim == 1 and not len(found):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise index_error(indices, count)
    beyond = (found < -count) | (found >= count)
    if beyond.any():
        raise missing_sample(found[beyond.argmax()], count)
    numbers = found.astype(np.int64)
    return np.where(numbers < 0, numbers + count, numbers)


def index_error(index: object, count: int) -> InvalidOption:
    """Return the error for an invalid index of a dataset with `count` samples."""
    found, expected = f"the index is {kind_of(index)}", f"integers, {count} bools or a slice"
    return InvalidOption(cannot("read samples", found, expected, "For example, use data[0], data[:10] or data[[0, 5]]"))


def missing_sample(index: int, count: int) -> MissingSample:
    """Return the error for an index that is out of range for `count` samples."""
    found = f"index {index} is out of range for {format_things(count, 'sample')}"
    return MissingSample(cannot("read a sample", found, "", "Check len() of the dataset"))

"""Loaders and batches of others: what can be told of them from outside."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from colabkit.foundation import LoaderMeters

_HOLDERS = (Mapping, tuple, list)
_NO_BATCHES = (str, bytes, int, float, type(None), os.PathLike, type, torch.nn.Module, Dataset, DataLoader)


def may_be_loader(of: Any) -> bool:
    """Return whether something may be a loader: it can be iterated, and is not known to give anything but batches.

    Models, arrays and tables can be iterated as well, and a list is a loader if it may hold batches.
    """
    if isinstance(of, str | bytes | Mapping | set | range | torch.nn.Module) or hasattr(of, "shape"):
        return False
    if isinstance(of, list | tuple):
        return not of or _may_be_batch(of[0])
    return isinstance(of, Iterable)


def _may_be_batch(one: Any) -> bool:
    """Return whether something holds arrays, or is an object of which nothing is known, as batches of graphs are."""
    if isinstance(one, _HOLDERS):
        return any(map(_may_be_batch, one.values() if isinstance(one, Mapping) else one))
    is_loader = isinstance(getattr(one, "meters", None), LoaderMeters)
    return not is_loader and not isinstance(one, _NO_BATCHES)


def samples_in(batch: Any, unknown: int = 1) -> int:
    """Return how many samples a batch holds: by its last field, as labels are, whose length cannot be mistaken.

    A transform that draws several views of each sample leaves the labels alone, too.

    Args:
        batch: as a loader gives it.
        unknown: how many are in an object that does not tell.
    """
    shape = _told(batch, "shape")
    if shape is not None:
        try:
            return int(shape[0]) if len(shape) else 1
        except Exception:  # what others call so may be anything
            return 1
    if isinstance(batch, Mapping):
        return samples_in((*batch.values(),))
    if not isinstance(batch, tuple | list):
        return unknown
    if not batch:
        return 0
    fields = _fields(batch)
    first, last = fields[0], fields[-1]
    if _told(last, "shape") is not None:
        return samples_in(last)
    is_stacked = _told(first, "shape") is not None
    if isinstance(last, tuple | list):
        samples = samples_in(first)
        if is_stacked and all(_told(one, "shape") is not None and samples_in(one) == samples for one in last):
            return samples  # several targets
        return len(last)  # things that differ in size, one for each sample
    return samples_in(first) if is_stacked or isinstance(first, Mapping) else len(batch)


def bytes_in(batch: Any) -> int:
    """Return the bytes of all tensors and arrays of a batch."""
    if isinstance(batch, Mapping):
        return sum(map(bytes_in, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(bytes_in, batch))
    size = _told(batch, "nbytes")
    return size if isinstance(size, int) else 0


def _fields(values: Iterable[Any]) -> list[Any]:
    """Return what has a place for each sample, without weights, counters and the like; all where nothing has."""
    every = [*values]
    return [value for value in every if _told(value, "shape") or (isinstance(value, _HOLDERS) and value)] or every


def _told(of: Any, name: str) -> Any:
    """Return an attribute, None where there is none: sparse and nested tensors raise errors of their own."""
    try:
        return getattr(of, name, None)
    except Exception:
        return None

"""Data sets, loaders and batches seen from outside, also those of other packages: names, paths, samples and bytes."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from colabkit.foundation import LoaderMeters, can_hang, mounts
from colabkit.packs import FileDataset, PackedDataset

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
    shape = _attribute(batch, "shape")
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
    if _attribute(last, "shape") is not None:
        return samples_in(last)
    is_stacked = _attribute(first, "shape") is not None
    if isinstance(last, tuple | list):
        samples = samples_in(first)
        if is_stacked and all(_attribute(one, "shape") is not None and samples_in(one) == samples for one in last):
            return samples  # several targets
        return len(last)  # things that differ in size, one for each sample
    return samples_in(first) if is_stacked or isinstance(first, Mapping) else len(batch)


def bytes_in(batch: Any) -> int:
    """Return the bytes of all tensors and arrays of a batch; sparse tensors count as if they were dense."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(bytes_in, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(bytes_in, batch))
    size = _attribute(batch, "nbytes")
    return size if isinstance(size, int) else 0


def _fields(values: Iterable[Any]) -> list[Any]:
    """Return what has a place for each sample, without weights, counters and the like; all where nothing has."""
    every = [*values]
    return [value for value in every if _attribute(value, "shape") or (isinstance(value, _HOLDERS) and value)] or every


def _attribute(of: Any, name: str) -> Any:
    """Return an attribute, None where there is none: sparse and nested tensors raise errors of their own."""
    try:
        return getattr(of, name, None)
    except Exception:
        return None


def is_far(path: str | None) -> bool | None:
    """Return whether another program or machine serves a path; None if the path is unknown."""
    return None if path is None else can_hang(os.path.abspath(path), mounts())


def path_of(dataset: Any) -> str | None:
    """Return the path of a data set's samples, also of torchvision's data sets and of views; None if unknown."""
    try:
        return _path_of(dataset)
    except Exception:  # properties of other people's data sets may do anything
        return None


def files_of(dataset: Any) -> str | None:
    """Return the folder of a data set that lists its files, as torchvision's `ImageFolder` does; None of others."""
    try:
        inner = getattr(dataset, "dataset", None)
        if inner is not None:
            return files_of(inner)
        if (first := _first_file(dataset)) is None:
            return None
        root = getattr(dataset, "root", None)
        return os.path.abspath(root if isinstance(root, str | os.PathLike) else os.path.dirname(first))
    except Exception:
        return None


def name_of(dataset: Any, index: int) -> str:
    """Return the name of a sample, or its path; empty if the data set has no names."""
    try:
        return _name_of(dataset, index)
    except Exception:  # of other people's code, while one of their errors is reported
        return ""


def _name_of(dataset: Any, index: int) -> str:
    if isinstance(dataset, Subset):
        return _name_of(dataset.dataset, int(dataset.indices[index]))
    if isinstance(dataset, ConcatDataset):
        place = bisect.bisect_right(dataset.cumulative_sizes, index)
        return _name_of(dataset.datasets[place], index - (dataset.cumulative_sizes[place - 1] if place else 0))
    if isinstance(dataset, PackedDataset | FileDataset):
        return dataset.name_of(index)
    path = next(getattr(dataset, name) for name in ("samples", "imgs") if hasattr(dataset, name))[index]
    path = path[0] if isinstance(path, tuple | list) else path
    return repr(path) if isinstance(path, str) else ""


def _path_of(dataset: Any) -> str | None:
    if isinstance(dataset, PackedDataset):
        return str(dataset.info.path)
    if isinstance(dataset, FileDataset):
        return dataset.source.name
    inner = getattr(dataset, "dataset", None)  # of torch's Subset
    if inner is not None and inner is not dataset:
        return _path_of(inner)
    root = getattr(dataset, "root", None)
    if isinstance(root, str | os.PathLike):
        return os.path.abspath(root)
    first = _first_file(dataset)
    return None if first is None else os.path.dirname(os.path.abspath(first))


def _first_file(dataset: Any) -> str | None:
    """Return the path of a data set's first sample, if it has a list of them."""
    for name in ("samples", "imgs"):
        found = getattr(dataset, name, None)
        if isinstance(found, list) and found:
            first = found[0][0] if isinstance(found[0], tuple | list) else found[0]
            if isinstance(first, str | os.PathLike):
                return os.fspath(first)
    return None

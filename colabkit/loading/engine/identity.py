"""Names of data sets and their samples: paths, folders and sample names, also of data sets of other packages."""

from __future__ import annotations

import bisect
import os
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from colabkit.foundation import can_hang, mounts
from colabkit.packs import FileDataset, PackedDataset


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

"""Inspect datasets, loaders and batches, including those of other packages: names, paths, sample counts and sizes."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from colabkit.foundation import (
    Code,
    InvalidOption,
    LoaderFacts,
    LoaderMeters,
    Text,
    call,
    can_hang,
    cannot,
    kind_of,
    mounts,
)
from colabkit.packs import FileDataset, PackedDataset

_CHANNELS = (1, 3, 4)
_HOLDERS = (Mapping, tuple, list)
_NO_BATCHES = (str, bytes, int, float, type(None), os.PathLike, type, torch.nn.Module, Dataset, DataLoader)


def may_be_loader(of: Any) -> bool:
    """Return whether an object may be a loader: an iterable whose items may be batches.

    Models, arrays and tables are iterable but are not loaders. A list counts as a loader if it may hold batches.
    """
    if isinstance(of, str | bytes | Mapping | set | range | torch.nn.Module) or hasattr(of, "shape"):
        return False
    if isinstance(of, list | tuple):
        return not of or _may_be_batch(of[0])
    return isinstance(of, Iterable)


def check_loader(act: Text, value: Any, expected: str, usage: Text) -> None:
    """Raise `InvalidOption` unless a value is a `Loader`; the message shows how to make a Loader from a dataset."""
    if isinstance(getattr(value, "meters", None), LoaderMeters):
        return
    of = "pack['train']" if isinstance(value, Mapping) else "dataset" if isinstance(value, Dataset) else ""
    of = "dataloader.dataset" if isinstance(value, DataLoader) else of
    next_step = ("Pass ", call("Loader", Code(of), batch_size=64)) if of else usage
    raise InvalidOption(cannot(act, f"loader is {kind_of(value)}", expected, next_step))


def _may_be_batch(one: Any) -> bool:
    """Return whether an object holds arrays or has an unknown type, such as a batch of graphs."""
    if isinstance(one, _HOLDERS):
        return any(map(_may_be_batch, one.values() if isinstance(one, Mapping) else one))
    is_loader = isinstance(getattr(one, "meters", None), LoaderMeters)
    return not is_loader and not isinstance(one, _NO_BATCHES)


def samples_in(batch: Any, unknown: int = 1) -> int:
    """Return the number of samples in a batch, usually the length of its last field.

    The last field usually holds labels. Their length is reliable even if a transform makes several views per sample.

    Args:
        batch: batch of any loader.
        unknown: result for an object whose size is unknown.
    """
    # Handle tensors first, since this runs in every step. After a step of 10 ms, caches are cold and each call of torch
    # takes 5 to 30 us; `shape` is faster than `dim()`, `size(0)` and `len()`.
    last = batch[-1] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(last, Tensor):
        try:
            shape = last.shape
        except RuntimeError:
            # A nested tensor has no shape, but a length.
            return last.size(0)
        if shape:
            return shape[0]
    lengths = _attribute(batch, "shape")
    if lengths is not None:
        try:
            return int(lengths[0]) if len(lengths) else 1
        # The `shape` of an object from another package may have any type.
        except Exception:
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
            # The list holds several targets, each with a row per sample.
            return samples
        # The list holds one object per sample, because the objects differ in size.
        return len(last)
    return samples_in(first) if is_stacked or isinstance(first, Mapping) else len(batch)


def bytes_in(batch: Any) -> int:
    """Return the size in bytes of all tensors and arrays in a batch; sparse tensors count as dense."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(map(bytes_in, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(bytes_in, batch))
    size = _attribute(batch, "nbytes")
    return size if isinstance(size, int) else 0


def batch_image_size(batch: Any) -> tuple[int, int] | None:
    """Return the height and width of the images in the first field of a batch; None if it holds no images."""
    if isinstance(batch, Mapping):
        batch = (*batch.values(),)
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    shape = _attribute(first, "shape")
    if not isinstance(shape, tuple) or len(shape) != 4:
        return None
    if shape[1] in _CHANNELS:
        return int(shape[2]), int(shape[3])
    return (int(shape[1]), int(shape[2])) if shape[3] in _CHANNELS else None


def note_image_size(counts: LoaderMeters, batch: Any) -> LoaderFacts | None:
    """Add the size of the images in a batch, if it holds any, to the facts about a loader, and return the facts."""
    if counts.facts is not None and (size := batch_image_size(batch)) is not None:
        counts.facts = replace(counts.facts, image_height=size[0], image_width=size[1])
    return counts.facts


def _fields(values: Iterable[Any]) -> list[Any]:
    """Return the values that have an entry per sample, unlike scalars such as weights; if none has, return all."""
    every = [*values]
    return [value for value in every if _attribute(value, "shape") or (isinstance(value, _HOLDERS) and value)] or every


def _attribute(of: Any, name: str) -> Any:
    """Return an attribute, or None on any error: sparse and nested tensors raise errors other than `AttributeError`."""
    try:
        return getattr(of, name, None)
    except Exception:
        return None


def is_remote(path: str | None) -> bool | None:
    """Return whether a path is remote, that is, served by another machine or process; None without a path."""
    return None if path is None else can_hang(os.path.abspath(path), mounts())


# Attributes of torchvision's datasets, and usual ones of custom datasets, that list files.
_LISTS, _OWN_LISTS = ("samples", "imgs"), ("paths", "files", "image_paths", "filenames")


def path_of(dataset: Any) -> str | None:
    """Return the path of a dataset's samples, including torchvision's datasets and views; None if unknown."""
    try:
        return _path_of(dataset)
    # Properties of custom datasets may raise any exception.
    except Exception:
        return None


def files_of(dataset: Any) -> str | None:
    """Return the folder of a dataset that lists its files, such as torchvision's `ImageFolder`.

    None for others, and for datasets that hold only some of the files or change the labels.
    """
    try:
        inner = getattr(dataset, "dataset", None)
        if inner is not None:
            # Other views may have labels of their own.
            is_whole = isinstance(dataset, Subset) and len({*map(int, dataset.indices)}) == len(dataset) == len(inner)
            return files_of(inner) if is_whole else None
        if getattr(dataset, "target_transform", None) is not None:
            return None
        if (first := _first_file(dataset)) is None:
            return None
        root = getattr(dataset, "root", None)
        return os.path.abspath(root if isinstance(root, str | os.PathLike) else os.path.dirname(first))
    except Exception:
        return None


def name_of(dataset: Any, index: int) -> str:
    """Return the name or the path of a sample; empty if the dataset has no names."""
    try:
        return _name_of(dataset, index)
    # Ignore any exception of a custom dataset, because the name is needed to report another error.
    except Exception:
        return ""


def _name_of(dataset: Any, index: int) -> str:
    if isinstance(dataset, Subset):
        return _name_of(dataset.dataset, int(dataset.indices[index]))
    if isinstance(dataset, ConcatDataset):
        place = bisect.bisect_right(dataset.cumulative_sizes, index)
        return _name_of(dataset.datasets[place], index - (dataset.cumulative_sizes[place - 1] if place else 0))
    if isinstance(dataset, PackedDataset | FileDataset):
        return dataset.name_of(index)
    path = file_of(dataset, index)
    return repr(path) if isinstance(path, str) else ""


def file_of(dataset: Any, index: int) -> Any:
    """Return the path of a sample in a dataset that lists its files, or in torch's `Subset` of one."""
    if isinstance(dataset, Subset):
        return file_of(dataset.dataset, int(dataset.indices[index]))
    listed = next(getattr(dataset, name) for name in _LISTS if hasattr(dataset, name))[index]
    return listed[0] if isinstance(listed, tuple | list) else listed


def _path_of(dataset: Any) -> str | None:
    if isinstance(dataset, PackedDataset):
        return str(dataset.info.path)
    if isinstance(dataset, FileDataset):
        return dataset.source.name
    # torch's Subset holds the dataset that it is a view of.
    inner = getattr(dataset, "dataset", None)
    if inner is not None and inner is not dataset:
        return _path_of(inner)
    root = getattr(dataset, "root", None)
    if isinstance(root, str | os.PathLike):
        return os.path.abspath(root)
    for names in (_LISTS, _OWN_LISTS):
        ends = [file for place in (0, -1) if (file := _listed_file(dataset, names, place)) is not None]
        if ends:
            return os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in ends])
    return None


def _first_file(dataset: Any) -> str | None:
    return _listed_file(dataset, _LISTS, 0)


def _listed_file(dataset: Any, names: Iterable[str], place: int) -> str | None:
    """Return the first or the last file of a list that is one of the dataset's attributes; None without one."""
    for name in names:
        found = getattr(dataset, name, None)
        if isinstance(found, list) and found:
            file = found[place][0] if isinstance(found[place], tuple | list) else found[place]
            if isinstance(file, str | os.PathLike) and (name in _LISTS or os.sep in os.fspath(file)):
                return os.fspath(file)
    return None

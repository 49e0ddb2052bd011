"""Checks which datasets of HDF5 files not written by colabkit are safe to read, and reads them through HDF5."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from colabkit.foundation import BadSource, ColabkitError, SourceChanged, Text, cannot, format_bytes, option
from colabkit.packs.format.layout import Indices

if TYPE_CHECKING:
    import h5py


# Registered IDs of common filters that ship with HDF5 or h5py: gzip, shuffle, fletcher32, lzf.
_FILTERS = frozenset({1, 2, 3, 32000})
# Highest compression ratio of deflate; a file that declares more data is suspicious. See zlib.net/zlib_tech.html.
_MOST_EXPANSION = 1032
# Size of the cache of decompressed chunks for single samples; a chunk of images often exceeds HDF5's default of 1 MiB.
_CACHE_BYTES = 32 << 20
_NAMES_SHOWN = 20
_SEARCHED_OBJECTS = 10_000
_SEARCHED_LEVELS = 16
_NAME_OTHER: Text = ("Name another dataset with ", option("x"), " or ", option("y"))
_COPY = "Copy or download the file again"


@dataclass(frozen=True, slots=True)
class Hdf5Dataset:
    """A dataset in an HDF5 file not written by colabkit.

    Attributes:
        name: path of the dataset in the file.
        shape: shape of the dataset.
        dtype: dtype of its elements.
        offset: offset of its values in the file, in bytes; None if they must be read through HDF5.
        chunk_rows: number of rows in a chunk; 1 if the dataset is not chunked.
        varies: whether its elements are variable-length arrays of bytes, such as encoded images.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None
    chunk_rows: int
    varies: bool


@contextmanager
def open_hdf5(act: str, path: Path) -> Iterator[h5py.File]:
    """Open a file for reading and yield it; convert errors while it is opened or read to `BadSource`."""
    import h5py

    try:
        with h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES) as file:
            yield file
    except ColabkitError:
        raise
    except (OSError, LookupError, ValueError, RuntimeError, TypeError, AttributeError, MemoryError) as error:
        raise _damage_error(act, "the HDF5 structure", error) from error


def _damage_error(act: str, what: str, error: Exception) -> BadSource:
    found = f"{what} cannot be read ({str(error).partition(chr(10))[0][:200]})"
    return BadSource(cannot(act, found, "an undamaged HDF5 file", _COPY))


def has_dataset(file: h5py.File, name: str) -> bool:
    """Return whether the file has a dataset at the given path, without following soft or external links."""
    import h5py

    group: Any = file
    *groups, last = name.split("/")
    for part in groups:
        if not _is_own(group, part, h5py.Group):
            return False
        group = group[part]
    return _is_own(group, last, h5py.Dataset)


def _is_own(group: h5py.Group, name: str, kind: type) -> bool:
    import h5py

    return isinstance(group.get(name, getlink=True), h5py.HardLink) and group.get(name, getclass=True) is kind


def describe_datasets(file: h5py.File) -> str:
    """Return the paths of the datasets nearest to the root as text, without following soft or external links.

    The text is empty if the search finds no dataset.
    """
    names = dataset_names(file)
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{' and others' if len(names) > _NAMES_SHOWN else ''}"


def dataset_names(file: h5py.File) -> list[str]:
    """Return the paths of the datasets nearest to the root, at most one more than an error message lists."""
    return list(itertools.islice(_datasets_in(file), _NAMES_SHOWN + 1))


def _datasets_in(file: h5py.File) -> Iterator[str]:
    """Yield the paths of datasets, level by level; the search is limited, since a file may nest thousands of groups."""
    import h5py

    waiting: deque[tuple[str, Any]] = deque([("", file)])
    left = _SEARCHED_OBJECTS
    while waiting:
        path, group = waiting.popleft()
        for name in itertools.islice(group, left):
            left -= 1
            if _is_own(group, name, h5py.Dataset):
                yield f"{path}{name}"
            elif path.count("/") < _SEARCHED_LEVELS and _is_own(group, name, h5py.Group):
                waiting.append((f"{path}{name}/", group[name]))


def examine_dataset(act: str, file: h5py.File, name: str, length: int, trusted: bool) -> Hdf5Dataset:
    """Return the location and type of a dataset in a file of `length` bytes.

    Raises:
        BadSource: if the dataset does not exist or cannot be read, or is unsafe to read and `trusted` is false.
    """
    import h5py

    dataset = _find_dataset(act, file, name, trusted)
    properties = dataset.get_create_plist()
    layout, external = properties.get_layout(), properties.get_external_count()
    filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
    strange = [number for number in filters if number not in _FILTERS]
    dtype = np.dtype(dataset.dtype)
    shape = tuple(map(int, dataset.shape))
    varies = dtype.kind == "O" and h5py.check_vlen_dtype(dtype) in (np.uint8, np.int8)
    if 0 in shape:
        found = f"{name!r} has no samples" if shape[0] == 0 else f"the samples of {name!r} have the shape {shape[1:]}"
        raise BadSource(cannot(act, found, "at least one sample with at least one value", _NAME_OTHER))
    if not shape or not (_is_plain(dtype) or h5py.check_string_dtype(dtype) is not None or varies):
        wrong = f"{name!r} has dtype {dtype}" if shape else f"{name!r} is a single value"
        raise BadSource(cannot(act, wrong, "an array of numbers", _NAME_OTHER))
    declared = math.prod(shape) * dtype.itemsize
    varying = "text" if h5py.check_string_dtype(dtype) is not None else "an array of elements"
    dangers = {
        "a virtual dataset, which reads other files": layout == h5py.h5d.VIRTUAL,
        "stored in another file": external,
        f"stored with filter {next(iter(strange), None)}, which runs third-party code": strange,
        f"{varying} of varying length": dtype.kind == "O",
        f"{format_bytes(declared)} of values in a file of {format_bytes(length)}": declared > _MOST_EXPANSION * length,
    }
    if not trusted and (reasons := [danger for danger, is_there in dangers.items() if is_there]):
        raise _refused_error(act, name, reasons[0])
    if missing := [number for number in strange if not h5py.h5z.filter_avail(number)]:
        found = f"{name!r} is stored with filter {missing[0]}, which is not installed"
        raise BadSource(cannot(act, found, "", "Run pip install hdf5plugin, then import hdf5plugin and try again"))
    chunk_rows = int(properties.get_chunk()[0]) if layout == h5py.h5d.CHUNKED else 1
    offset = None
    is_here = h5py.h5f.get_name(dataset) == h5py.h5f.get_name(file.id)
    if layout == h5py.h5d.CONTIGUOUS and is_here and not external:
        offset = dataset.get_offset()
        if offset is not None and offset + declared > length:
            raise BadSource(cannot(act, f"{name!r} extends beyond the end of the file", "a complete file", _COPY))
        is_as_numpy = dtype.kind != "O" and dataset.get_type().equal(h5py.h5t.py_create(dtype, logical=True))
        offset = offset if is_as_numpy else None
    return Hdf5Dataset(name, shape, dtype, None if offset is None else int(offset), chunk_rows, varies)


def _find_dataset(act: str, file: h5py.File, name: str, trusted: bool) -> Any:
    """Return a dataset's HDF5 ID; follow links of any kind if `trusted`, otherwise only hard links within the file."""
    import h5py

    if trusted and isinstance(found := file.get(name), h5py.Dataset):
        return found.id
    group: Any = file
    parts = [] if trusted else [part for part in name.split("/") if part]
    for depth, part in enumerate(parts, 1):
        link = group.get(part, getlink=True)
        if link is None:
            break
        if not isinstance(link, h5py.HardLink):
            kind = "an external link, which leads to another file" if isinstance(link, h5py.ExternalLink) else "a link"
            raise _refused_error(act, "/".join(parts[:depth]), kind)
        kind = group.get(part, getclass=True)
        if kind is h5py.Dataset and depth == len(parts):
            return h5py.h5d.open(group.id, part.encode())
        if kind is not h5py.Group:
            break
        group = group[part]
    names = describe_datasets(file)
    expected = f"one of {names}" if names else "a file with datasets"
    raise BadSource(cannot(act, f"there is no dataset {name!r}", expected, _NAME_OTHER))


def _refused_error(act: str, name: str, found: str) -> BadSource:
    trust = option("trusted", True)
    next_step = ("Name another dataset, or pass ", trust, " if you trust the origin of the file")
    return BadSource(cannot(act, f"{name!r} is {found}", "numbers stored in this file", next_step))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


# All readers share one lock, because HDF5 runs one thread at a time anyway.
_lock = threading.RLock()
_readers: weakref.WeakSet[Hdf5Reader] = weakref.WeakSet()


class Hdf5Reader:
    """Reads rows of a file's datasets through HDF5, from any thread and after a fork.

    The file is opened on first use, provided its `file_stamp` is still the same. It is closed before this process
    forks, because HDF5 would share its state with the child.
    """

    def __init__(self, path: Path, stamp: tuple[int, ...]) -> None:
        self._path = path
        self._stamp = stamp
        self._file: h5py.File | None = None
        _close_before_forks()
        with _lock:
            _readers.add(self)

    def rows(self, found: Hdf5Dataset, rows: Indices) -> npt.NDArray[Any]:
        """Return the requested rows, `[B, ...]`, reading each chunk once."""
        wanted, place = np.unique(rows, return_inverse=True)
        gathered = np.empty((len(wanted), *found.shape[1:]), found.dtype)
        # Each run is one read. It continues as long as the next row is adjacent or in the same chunk.
        ends = np.flatnonzero((np.diff(wanted) > 1) & (np.diff(wanted // found.chunk_rows) > 0)) + 1
        act = f"read {found.name!r} of {str(self._path)!r}"
        with _lock:
            dataset = self._opened(act)[found.name]
            for run in np.split(np.arange(len(wanted)), ends):
                if len(run):
                    first, last = int(wanted[run[0]]), int(wanted[run[-1]])
                    try:
                        block = dataset[first : last + 1]
                    except (OSError, ValueError, RuntimeError, MemoryError) as error:
                        raise _damage_error(act, f"samples {first} to {last}", error) from error
                    gathered[run] = block[wanted[run] - first]
        return gathered[place.reshape(-1)]

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        with _lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _opened(self, act: str) -> h5py.File:
        import h5py

        if self._file is None:
            if file_stamp(self._path) != self._stamp:
                found = "the file has been replaced or changed"
                raise SourceChanged(cannot(act, found, "", "Open it again, and create the dataset again"))
            self._file = h5py.File(self._path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES)
        return self._file


@cache
def _close_before_forks() -> None:
    os.register_at_fork(before=_lock_closed, after_in_parent=_lock.release, after_in_child=_lock.release)


def _lock_closed() -> None:
    _lock.acquire()
    for reader in list(_readers):
        reader.close()


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return a file's size, modification time and inode number; () if they cannot be read."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_size, about.st_mtime_ns, about.st_ino

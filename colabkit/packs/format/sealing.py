"""How a pack comes to be: space reserved, filled by others, sealed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from colabkit.foundation import InvalidOption, cannot, file_changes
from colabkit.packs.format.layout import DataSet
from colabkit.packs.format.reading import META, NOTES, SEAL_MARK, outside_digest

_LONG_CHARS = 2000
_DIGITS = 20  # of an offset, a size or a CRC


def create_pack(
    path: Path, data_sets: Iterable[DataSet], meta: Mapping[str, Any]
) -> tuple[dict[str, DataSet], dict[str, int]]:
    """Create an unsealed pack with all its space reserved.

    Args:
        path: a file that does not exist.
        data_sets: what it will hold.
        meta: what it says of itself. An attribute holds 64 KiB, so long values become a data set of their own.

    Returns:
        The data sets with their offsets, by name, and the CRC32s of the tables that are written already.

    Raises:
        InvalidOption: if there are too many data sets for the seal.
        NotEnoughSpace: if the space cannot be reserved; nothing of the samples is written yet.
    """
    import h5py

    wanted = list(data_sets)
    long = {name: value for name, value in meta.items() if len(json.dumps(value)) > _LONG_CHARS}
    notes = json.dumps(long).encode()
    if long:
        wanted.append(DataSet(NOTES, (len(notes),), "|u1"))
    _check_room(wanted)
    placed = {}
    with file_changes.create_hdf5(path) as file:
        for one in wanted:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.CONTIGUOUS)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            properties.set_obj_track_times(False)  # the same samples are the same bytes at any time
            kind = h5py.h5t.py_create(np.dtype(one.dtype), logical=True)
            space = h5py.h5s.create_simple(one.shape)
            made = h5py.h5d.create(file.id, one.name.encode(), kind, space, dcpl=properties)
            placed[one.name] = DataSet(one.name, one.shape, one.dtype, int(made.get_offset() or 0))
        file.attrs[META] = json.dumps({name: value for name, value in meta.items() if name not in long})
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        file_changes.reserve(fd, os.fstat(fd).st_size, path)
        crcs = {}
        if NOTES in placed:
            file_changes.write_at(fd, notes, placed[NOTES].offset, path)
            crcs[NOTES] = crc32(notes)
    finally:
        os.close(fd)
    return placed, crcs


def seal_pack(path: Path, data_sets: Iterable[DataSet], table_crcs: Mapping[str, int]) -> str:
    """Write the seal, wait until the file is on the medium, and return the seal. The file keeps its length.

    Args:
        path: the pack, complete but for its seal.
        data_sets: of the pack.
        table_crcs: CRC32 of each table's bytes.
    """
    spans = sorted((one.offset, one.size_bytes) for one in data_sets if one.size_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        outside = outside_digest(fd, length, spans)
        text = json.dumps({"length": length, "spans": spans, "tables": dict(table_crcs), "outside": outside}).encode()
        seal = hashlib.sha256(text).hexdigest()
        block = SEAL_MARK + seal.encode() + text
        assert len(block) <= file_changes.HDF5_USER_BLOCK_BYTES
        file_changes.sync(fd, path)
        file_changes.write_at(fd, block, 0, path)
        file_changes.sync(fd, path)
    finally:
        os.close(fd)
    return seal


def _check_room(data_sets: list[DataSet]) -> None:
    """Refuse more data sets than the seal, one page, has room for."""
    longest = 256 + sum(2 * _DIGITS + 8 + len(one.name) + _DIGITS for one in data_sets)
    if longest > file_changes.HDF5_USER_BLOCK_BYTES:
        found = f"{len(data_sets)} data sets with names like {data_sets[0].name!r}"
        next_step = "Leave out fields, or join some in one array"
        raise InvalidOption(cannot("pack into one file", found, "as many as one page can name", next_step))

"""The small parts of a pack, written after its samples: labels, CRCs, offsets, columns."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import file_changes
from colabkit.packs.format.layout import CRC, DataSet
from colabkit.packs.packing.compaction import Compaction
from colabkit.packs.packing.plan import PackPlan

_READ_BYTES = 16 << 20


def write_tables(plan: PackPlan, path: Path, placed: Mapping[str, DataSet], compaction: Compaction) -> dict[str, int]:
    """Write all tables of a pack and return the CRC32 of each by its data set's name.

    Args:
        plan: what the pack holds.
        path: the pack, not sealed yet.
        placed: its data sets.
        compaction: which samples it has, and what was learnt of them.
    """
    crcs = {}
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for split, kept in compaction.kept.items():
            for name, values in _tables(plan, split, kept, compaction):
                data = np.ascontiguousarray(values, placed[name].dtype).reshape(-1).view(np.uint8).data
                file_changes.write_at(fd, data, placed[name].offset, path)
                crcs[name] = crc32(data)
            for made in plan.maker.fields:
                if made.is_table:  # its rows are there already
                    crcs[made.field.data_set(split)] = _crc_of(fd, placed[made.field.data_set(split)])
    finally:
        os.close(fd)
    return crcs


def _tables(
    plan: PackPlan, split: str, kept: npt.NDArray[np.int64], compaction: Compaction
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the name and the values of each table of a split."""
    yield f"{CRC}_{split}", compaction.crcs(split)
    numbers = plan.splits[split][kept]
    for table in plan.tables:
        values = table.chosen(numbers).values
        if isinstance(values, np.ndarray):
            yield table.field.data_set(split), values
        else:
            yield table.field.data_set(split), np.frombuffer(b"".join(values), np.uint8)
            yield table.field.index(split), _index(np.fromiter(map(len, values), np.int64, len(values)))
    for made in plan.maker.fields:
        if made.field.is_ragged:
            yield made.field.index(split), _index(compaction.lengths[made.field.data_set(split)])


def _index(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return offset and length of each sample in the flat data set."""
    return np.stack([np.cumsum(lengths) - lengths, lengths], 1)


def _crc_of(fd: int, one: DataSet) -> int:
    crc, at, end = 0, one.offset, one.offset + one.size_bytes
    while at < end:
        block = os.pread(fd, min(_READ_BYTES, end - at), at)
        if not block:
            raise OSError(errno.EIO, "the pack ended while it was written")
        crc = crc32(block, crc)
        at += len(block)
    return crc

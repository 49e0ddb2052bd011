"""What a pack holds and where: fields, data sets, shards."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import Corrupt, FileFailed, cannot

CRC = "crc"
"""Name of the field that holds the CRC32 of each sample."""
SAMPLES = "X"
LABELS = "Y"
SPLITS = ("train", "dev", "test")

Content: TypeAlias = Literal["image", "array", "text", "bytes", "labels"]

Indices: TypeAlias = npt.NDArray[np.int64]
"""Numbers of samples or rows, from 0."""


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that every sample has.

    Attributes:
        name: as in `X` or `Y`.
        content: `image` (uint8 [H, W, C], or the bytes of an image file), `array`, `text` (UTF-8), `bytes`, `labels`.
        is_ragged: whether samples differ in length: their bytes then lie one after the other in one flat data set,
            beside one of `[N, 2]` offsets and lengths.
    """

    name: str
    content: Content
    is_ragged: bool = False

    def data_set(self, split: str) -> str:
        """Return the name of its data set."""
        return f"{self.name}_{split}"

    def index(self, split: str) -> str:
        """Return the name of the data set of offsets and lengths, `int64 [N, 2]`, of a ragged field."""
        return f"{self.name}_{split}_index"


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set of a pack: where its bytes lie in the file. `offset` is in bytes; -1 before the file exists."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = -1

    @property
    def size_bytes(self) -> int:
        """Bytes of the data set."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a pack of several, as the index names it: beside the index, with this seal, so many of each split."""

    name: str
    seal: str
    splits: Mapping[str, int]


@dataclass(frozen=True)
class PackInfo:
    """What a sealed pack says of itself.

    Attributes:
        path: the file; of a pack of several shards the index.
        data_sets: by name. An index holds the labels of all shards, the shards hold them too, with all else.
        meta: fields, classes, source, options, counts, who was left out or bad.
        table_crcs: CRC32 of each table's bytes, by data set name. Data sets that are no tables are covered by the CRC
            of each sample.
        seal: the digest that identifies the pack and proves it whole.
    """

    path: Path
    data_sets: Mapping[str, DataSet]
    meta: Mapping[str, Any]
    table_crcs: Mapping[str, int]
    seal: str

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits, in the order train, dev, test."""
        return tuple(split for split in SPLITS if split in self.meta["splits"])

    def count(self, split: str) -> int:
        """Return how many samples a split has."""
        return int(self.meta["splits"][split])

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What every sample has, by name, in order; `X` first."""
        return {name: Field(name, *about) for name, about in self.meta["fields"].items()}

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The files that hold the samples, in their order; none if this file does."""
        return tuple(Shard(**about) for about in self.meta.get("shards", ()))

    def sample_fields(self) -> tuple[Field, ...]:
        """Return the fields whose bytes, one after the other, a sample's CRC covers."""
        split = self.splits[0]
        return tuple(field for field in self.fields.values() if field.data_set(split) not in self.table_crcs)

    def map(self, name: str) -> npt.NDArray[Any]:
        """Return a data set as a read-only memory map; no HDF5 handle stays open, so forks and threads are safe.

        Raises:
            FileFailed: if the file cannot be mapped.
        """
        found = self.data_sets[name]
        if not found.size_bytes:
            return np.empty(found.shape, found.dtype)
        try:
            return np.memmap(self.path, found.dtype, "r", found.offset, found.shape)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise unreadable(self.path, error) from error
        private = np.memmap(self.path, found.dtype, "c", found.offset, found.shape)  # some FUSE mounts share no maps
        private.flags.writeable = False
        return private

    def table(self, name: str) -> npt.NDArray[Any]:
        """Return a table, copied into memory and checked against its CRC.

        Raises:
            Corrupt: if its bytes are not the sealed ones.
        """
        table = np.array(self.map(name))
        if crc32(table.tobytes()) != self.table_crcs[name]:
            raise corrupt(self.path, f"the table {name} is not the sealed one")
        return table


def unreadable(path: Path, error: OSError) -> FileFailed:
    """Return the error for a pack that the system does not let us read."""
    found = str(error.strerror or error).partition("\n")[0]
    next_step = "Check its permissions, or stage it"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        next_step = "Raise the limit, as by ulimit -n, or pack with a larger shard_bytes"
    return FileFailed(cannot(f"open {str(path)!r}", found, "a file that can be read", next_step))


def corrupt(path: Path, found: str) -> Corrupt:
    """Return the error for a pack that has changed since it was sealed."""
    return Corrupt(cannot(f"open {str(path)!r}", found, "the pack as it was sealed", "Pack or stage it again"))

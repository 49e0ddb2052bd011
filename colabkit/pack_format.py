r"""The layout, the seal and the checks of a pack; what goes into it and when is decided elsewhere.

A pack is plain HDF5: `<field>_<split>` data sets at the root, contiguous, so each has one offset in the file and can be
memory-mapped without HDF5. `X_train` holds samples, `Y_train` labels, `crc_train` the CRC32 of each sample's bytes; the
root attribute `colabkit_meta` tells classes, source, options, counts and what was left out, as JSON.

The seal is written last, into the user block, the first page, which HDF5 leaves alone:

    colabkit pack 1\n <SHA-256 of the rest, in hex> <JSON: length, spans, tables, outside>

`length` is the file's, `spans` are offset and size of each data set, `tables` the CRC32s of labels and CRCs, and
`outside` is the SHA-256 of all bytes that lie in no data set. So a whole, unchanged pack is known by reading a few
kilobytes, before HDF5 sees the file (one wrong bit can make HDF5 loop for ever or crash), and every other byte can be
checked when it is wanted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from colabkit import _files
from colabkit.errors import BadSource, ColabkitError, Corrupt, FileFailed, NotSealed, SourceMissing, cannot

if TYPE_CHECKING:
    import h5py

__all__ = ["FieldLayout", "PackInfo", "create_pack", "is_pack", "read_pack", "seal_pack"]

FORMAT_VERSION = 1
CRC = "crc"
SAMPLES = "X"
LABELS = "Y"
SPLITS = ("train", "dev", "test")
_META = "colabkit_meta"
_NAME = b"colabkit pack "
_MAGIC = _NAME + b"%d\n" % FORMAT_VERSION
_DIGEST_LENGTH = 64
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class FieldLayout:
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
class PackInfo:
    """What a sealed pack says of itself.

    Attributes:
        path: the file.
        fields: its data sets by name.
        meta: classes, source, options, counts, who was left out.
        table_crcs: CRC32 of each table's bytes, by data set name.
        seal: the digest that identifies the pack and proves it whole.
    """

    path: Path
    fields: Mapping[str, FieldLayout]
    meta: Mapping[str, Any]
    table_crcs: Mapping[str, int]
    seal: str

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits, in the order train, dev, test."""
        return tuple(split for split in SPLITS if f"{SAMPLES}_{split}" in self.fields)

    def count(self, split: str) -> int:
        """Return how many samples a split has."""
        return self.fields[f"{SAMPLES}_{split}"].shape[0]

    def map(self, name: str) -> npt.NDArray[Any]:
        """Return a data set as a read-only memory map; no HDF5 handle stays open, so forks and threads are safe."""
        field = self.fields[name]
        if not field.size_bytes:
            return np.empty(field.shape, field.dtype)
        try:
            return np.memmap(self.path, field.dtype, "r", field.offset, field.shape)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
        private = np.memmap(self.path, field.dtype, "c", field.offset, field.shape)  # some FUSE mounts share no maps
        private.flags.writeable = False
        return private

    def table(self, name: str) -> npt.NDArray[Any]:
        """Return a table, copied into memory and checked against its CRC.

        Raises:
            Corrupt: if its bytes are not the sealed ones.
        """
        table = np.array(self.map(name))
        if crc32(table.tobytes()) != self.table_crcs[name]:
            raise _corrupt(self.path, f"the table {name} is not the sealed one")
        return table


def create_pack(path: Path, fields: tuple[FieldLayout, ...], meta: Mapping[str, Any]) -> dict[str, FieldLayout]:
    """Create an unsealed pack with all its space reserved, and return its fields with their offsets.

    Raises:
        NotEnoughSpace: if the space cannot be reserved; nothing of the samples is written yet.
    """
    import h5py

    placed = {}
    with _files.create_hdf5(path) as file:
        for field in fields:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.CONTIGUOUS)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            properties.set_obj_track_times(False)  # the same samples are the same bytes at any time
            kind = h5py.h5t.py_create(np.dtype(field.dtype), logical=True)
            space = h5py.h5s.create_simple(field.shape)
            dataset = h5py.h5d.create(file.id, field.name.encode(), kind, space, dcpl=properties)
            placed[field.name] = FieldLayout(field.name, field.shape, field.dtype, int(dataset.get_offset() or 0))
        file.attrs[_META] = json.dumps(meta)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _files.reserve(fd, os.fstat(fd).st_size, path)
    finally:
        os.close(fd)
    return placed


def seal_pack(path: Path, fields: Iterable[FieldLayout], table_crcs: Mapping[str, int]) -> str:
    """Write the seal, wait until the file is on the medium, and return the seal. The file keeps its length.

    Args:
        path: the pack, complete but for its seal.
        fields: its data sets.
        table_crcs: CRC32 of each table's bytes.
    """
    spans = sorted((field.offset, field.size_bytes) for field in fields if field.size_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        outside = _outside(fd, length, spans)
        text = json.dumps({"length": length, "spans": spans, "tables": dict(table_crcs), "outside": outside}).encode()
        seal = hashlib.sha256(text).hexdigest()
        block = _MAGIC + seal.encode() + text
        assert len(block) <= _files.HDF5_USER_BLOCK_BYTES
        _files.sync(fd, path)
        _files.write_at(fd, block, 0, path)
        _files.sync(fd, path)
    finally:
        os.close(fd)
    return seal


def read_pack(path: Path) -> PackInfo:
    """Return what a pack says of itself, after checking its seal, size and layout.

    Raises:
        SourceMissing: if there is no such file.
        BadSource: if it is no HDF5 file.
        NotSealed: if it is HDF5 but no finished pack.
        Corrupt: if it was sealed and has changed.
        FileFailed: if it cannot be read.
    """
    import h5py

    act = f"open {str(path)!r}"
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise SourceMissing(cannot(act, found, "a pack", "Check the path, or make one with pack()"))
        seal, table_crcs = _checked_seal(act, path)
        with h5py.File(path, "r", locking=False) as file:
            fields = {name: _field(path, file, name) for name in file}
            return PackInfo(path, fields, json.loads(file.attrs[_META]), table_crcs, seal)
    except ColabkitError:
        raise
    except OSError as error:
        found = str(error.strerror or error).splitlines()[0]
        raise FileFailed(cannot(act, found, "a file that can be read", "Check its permissions, or stage it")) from error
    except (AttributeError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise _corrupt(path, f"HDF5 structures are damaged ({error})") from error


def is_pack(path: Path) -> bool:
    """Return whether a file begins like a pack, whole or not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_NAME)) == _NAME


def _checked_seal(act: str, path: Path) -> tuple[str, dict[str, int]]:
    """Return the seal and the CRCs of the tables; refuse a file whose bytes outside of the data sets are not sealed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        head = os.pread(fd, _files.HDF5_USER_BLOCK_BYTES, 0)
        if not head.startswith(_MAGIC):
            raise _not_sealed(act, fd, head, length)
        digest, text = head[len(_MAGIC) :][:_DIGEST_LENGTH], head[len(_MAGIC) + _DIGEST_LENGTH :].rstrip(b"\0")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise _corrupt(path, "its first bytes are not the sealed ones")
        sealed = json.loads(text)
        if length != sealed["length"]:
            raise _corrupt(path, f"{length} bytes instead of {sealed['length']}")
        if _outside(fd, length, sealed["spans"]) != sealed["outside"]:
            raise _corrupt(path, "its attributes or layout are not the sealed ones")
        return digest.decode(), sealed["tables"]
    finally:
        os.close(fd)


def _not_sealed(act: str, fd: int, head: bytes, length: int) -> BadSource | NotSealed:
    """Return the error for a file that does not begin like a pack of this version."""
    if head.startswith(_NAME):
        version = head[len(_NAME) :][:8].partition(b"\n")[0].decode("ascii", "replace")
        needed = f"format {FORMAT_VERSION}"
        return NotSealed(cannot(act, f"pack format {version}", needed, "Update colabkit or pack again"))
    # HDF5 files begin with their signature, or have it after a user block of 512 bytes times a power of 2.
    places = [0, *(512 << power for power in range((length // 512).bit_length()))]
    if not any(os.pread(fd, len(_HDF5_SIGNATURE), place) == _HDF5_SIGNATURE for place in places):
        found = f"no readable HDF5; it begins with {head[:8]!r}" if head else "an empty file"
        return BadSource(cannot(act, found, "a whole pack", "Pack or stage it again"))
    found = "HDF5 without colabkit's seal" if any(head) else "a pack that was never finished"
    return NotSealed(cannot(act, found, "a sealed pack", "Make one with pack()"))


def _outside(fd: int, length: int, spans: Iterable[Sequence[int]]) -> str:
    """Return the SHA-256 of the bytes after the user block that lie in none of the spans (offset, size)."""
    digest = hashlib.sha256()
    position = _files.HDF5_USER_BLOCK_BYTES
    for offset, size in [*spans, (length, 0)]:
        digest.update(os.pread(fd, offset - position, position))
        position = offset + size
    return digest.hexdigest()


def _field(path: Path, file: h5py.File, name: str) -> FieldLayout:
    """Return where a data set lies, refusing all but plain contiguous arrays of numbers in this very file."""
    import h5py

    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
        raise _corrupt(path, f"{name!r} is no data set of this file")
    dataset = file[name].id
    properties = dataset.get_create_plist()
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count() == 0
    dtype = np.dtype(dataset.dtype)
    if not plain or dtype.kind not in "biuf":
        raise _corrupt(path, f"{name!r} is not a contiguous array of numbers")
    field = FieldLayout(name, tuple(map(int, dataset.shape)), dtype.str, int(dataset.get_offset() or 0))
    if field.offset + field.size_bytes > path.stat().st_size:
        raise _corrupt(path, f"{name!r} reaches beyond the file's end")
    return field


def _corrupt(path: Path, found: str) -> Corrupt:
    return Corrupt(cannot(f"open {str(path)!r}", found, "the pack as it was sealed", "Pack or stage it again"))

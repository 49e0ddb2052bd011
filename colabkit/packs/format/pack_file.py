"""Creates and seals pack files, and checks their seal and layout before HDF5 parses them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    InvalidOption,
    NotSealed,
    SourceMissing,
    call,
    cannot,
    file_changes,
    format_things,
)
from colabkit.packs.format.layout import CRC, LABELS, NOTES, SAMPLES, DataSet, PackInfo, corrupt, unreadable

if TYPE_CHECKING:
    import h5py


META = "colabkit_meta"
_FORMAT_VERSION = 2
_NAME = b"colabkit pack "
SEAL_MARK = _NAME + b"%d\n" % _FORMAT_VERSION
_DIGEST_LENGTH = 64
_BLOCK_BYTES = 1 << 20
_REQUIRED = ("classes", "encoding", "label_kind", "sample_shape", "source")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Allowed dtype kinds: bools, numbers, and byte strings of fixed length.
_KINDS = "biufcS"
# Maximum number of characters of metadata values in the attribute, which HDF5 limits to 64 KiB; longer ones go into a
# dataset.
_LONG_CHARS = 2000
# Maximum number of digits in an offset, a size or a CRC.
_DIGITS = 20


def create_pack(
    path: Path, data_sets: Iterable[DataSet], meta: Mapping[str, Any]
) -> tuple[dict[str, DataSet], dict[str, int]]:
    """Create an unsealed pack with all space reserved; write long values of `meta` to a dataset.

    Returns:
        The datasets with their offsets, by name, and the CRC32 of the dataset of long values, if there is one.

    Raises:
        InvalidOption: if the seal has no room for this many datasets.
        NotEnoughSpace: if the space cannot be reserved; raised before any sample is written, except on a
            remote mount.
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
            # Omit timestamps, so that packing the same samples again gives the same bytes.
            properties.set_obj_track_times(False)
            kind = h5py.h5t.py_create(np.dtype(one.dtype), logical=True)
            space = h5py.h5s.create_simple(one.shape)
            made = h5py.h5d.create(file.id, one.name.encode(), kind, space, dcpl=properties)
            placed[one.name] = DataSet(one.name, one.shape, one.dtype, int(made.get_offset() or 0))
        file.attrs[META] = json.dumps({name: value for name, value in meta.items() if name not in long})
    crcs = {}
    with file_changes.descriptor(file_changes.reopen(path)) as fd:
        file_changes.reserve(fd, os.fstat(fd).st_size, path)
        if NOTES in placed:
            file_changes.write_at(fd, notes, placed[NOTES].offset, path)
            crcs[NOTES] = crc32(notes)
    return placed, crcs


def seal_pack(path: Path, data_sets: Iterable[DataSet], table_crcs: Mapping[str, int]) -> str:
    """Write the seal into the user block, sync the file to disk, and return the seal."""
    spans = sorted((one.offset, one.size_bytes) for one in data_sets if one.size_bytes)
    with file_changes.descriptor(file_changes.reopen(path)) as fd:
        length = os.fstat(fd).st_size
        outside = outside_digest(fd, length, spans)
        text = json.dumps({"length": length, "spans": spans, "tables": dict(table_crcs), "outside": outside}).encode()
        seal = hashlib.sha256(text).hexdigest()
        block = SEAL_MARK + seal.encode() + text
        assert len(block) <= file_changes.HDF5_USER_BLOCK_BYTES
        file_changes.sync(fd, path)
        file_changes.write_at(fd, block, 0, path)
        file_changes.sync(fd, path)
    return seal


def _check_room(data_sets: list[DataSet]) -> None:
    longest = 256 + sum(2 * _DIGITS + 8 + len(one.name) + _DIGITS for one in data_sets)
    if longest > file_changes.HDF5_USER_BLOCK_BYTES:
        found = f"the list of its {len(data_sets)} datasets takes up to {format_things(longest, 'byte')}"
        expected = f"at most {format_things(file_changes.HDF5_USER_BLOCK_BYTES, 'byte')}"
        next_step = "Pack fewer fields, combine several in one array, or give them shorter names"
        raise InvalidOption(cannot("pack into one file", found, expected, next_step))


def read_pack(path: Path) -> PackInfo:
    """Return the description of a pack, after checking its seal, length and layout.

    Raises:
        SourceMissing: if the path is not a regular file.
        BadSource: if the file is not an HDF5 file.
        NotSealed: if the file is HDF5 but not a finished pack of this format version.
        Corrupt: if the file has changed since it was sealed.
        FileFailed: if the file cannot be read.
    """
    import h5py

    act = f"open {str(path)!r}"
    try:
        if not path.is_file():
            found = "the file does not exist"
            if path.exists():
                found = "it is a folder" if path.is_dir() else "it is not a regular file"
            next_step = ("Check the path, or create a pack with ", call("pack"))
            raise SourceMissing(cannot(act, found, "a pack", next_step))
        seal, table_crcs = _checked_seal(act, path)
        with h5py.File(path, "r", locking=False) as file:
            data_sets = {name: _data_set(path, file, name) for name in file}
            info = PackInfo(path, data_sets, json.loads(file.attrs[META]), table_crcs, seal)
        if NOTES in data_sets:
            meta = {**info.meta, **json.loads(info.table(NOTES).tobytes())}
            info = PackInfo(path, data_sets, meta, table_crcs, seal)
        _check_meta(info)
        _check_fields(info)
        return info
    except ColabkitError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except (AttributeError, LookupError, ValueError, RuntimeError, TypeError) as error:
        raise corrupt(path, f"its HDF5 structure is damaged ({error})") from error


def _check_meta(info: PackInfo) -> None:
    if missing := [name for name in _REQUIRED if name not in info.meta]:
        raise corrupt(info.path, f"its metadata has no {missing[0]!r}")
    if not info.splits or SAMPLES not in info.fields:
        raise corrupt(info.path, "its metadata lists no samples")
    shape = info.meta["sample_shape"]
    if shape is not None and not (isinstance(shape, list) and all(type(side) is int and side >= 0 for side in shape)):
        raise corrupt(info.path, f"its metadata has the invalid sample shape {shape!r:.80}")
    classes = info.meta["classes"]
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise corrupt(info.path, f"its metadata has the invalid class names {classes!r:.80}")
    if odd := [shard.name for shard in info.shards if Path(shard.name).name != shard.name or shard.name in ("", "..")]:
        raise corrupt(info.path, f"the shard name {odd[0]!r} is not a plain file name")
    if odd := [shard.name for shard in info.shards if type(shard.length) is not int]:
        raise corrupt(info.path, f"the size of the shard {odd[0]!r} is not a number")


def _check_fields(info: PackInfo) -> None:
    for split in info.splits:
        for field in info.fields.values():
            if info.shards and field.data_set(split) not in info.data_sets:
                # Skip the other datasets of a pack of shards, since its index holds only labels.
                continue
            rows = info.data_sets[field.index(split) if field.is_ragged else field.data_set(split)]
            if rows.shape[0] != info.count(split):
                raise corrupt(info.path, f"{rows.name!r} has {rows.shape[0]} samples instead of {info.count(split)}")
            if field.is_ragged:
                _check_table(info, rows.name, "iu", 2)
            if field.name == LABELS:
                _check_table(info, rows.name, "biuf", min(2, len(rows.shape)))
        if not info.shards:
            _check_table(info, f"{CRC}_{split}", "u", 1)


def _check_table(info: PackInfo, name: str, kinds: str, rank: int) -> None:
    found = info.data_sets[name]
    dtype = np.dtype(found.dtype)
    if name not in info.table_crcs or dtype.kind not in kinds or dtype.itemsize > 8 or len(found.shape) != rank:
        raise corrupt(info.path, f"the table {name!r} is invalid ({found.dtype} {list(found.shape)})")


def is_pack(path: Path) -> bool:
    """Return whether a file starts like a sealed pack, of any format version."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_NAME)) == _NAME


def _checked_seal(act: str, path: Path) -> tuple[str, dict[str, int]]:
    """Return the seal and the tables' CRCs, after checking all bytes outside the datasets."""
    with file_changes.descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        length = os.fstat(fd).st_size
        head = os.pread(fd, file_changes.HDF5_USER_BLOCK_BYTES, 0)
        if not head.startswith(SEAL_MARK):
            raise _not_sealed(act, fd, head, length)
        digest, text = head[len(SEAL_MARK) :][:_DIGEST_LENGTH], head[len(SEAL_MARK) + _DIGEST_LENGTH :].rstrip(b"\0")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise corrupt(path, "its seal does not match the SHA-256 stored in it")
        sealed = json.loads(text)
        if length != sealed["length"]:
            raise corrupt(path, f"it has {format_things(length, 'byte')} instead of {sealed['length']:,}")
        if outside_digest(fd, length, sealed["spans"]) != sealed["outside"]:
            raise corrupt(path, "its attributes or layout do not match the seal")
        return digest.decode(), sealed["tables"]


def _not_sealed(act: str, fd: int, head: bytes, length: int) -> BadSource | NotSealed:
    if head.startswith(_NAME):
        version = head[len(_NAME) :][:8].partition(b"\n")[0].decode("ascii", "replace")
        other = f"it has pack format {version}"
        return NotSealed(cannot(act, other, f"format {_FORMAT_VERSION}", "Update colabkit, or pack the data again"))
    if hdf5_start(fd, length) is None:
        found = f"it is not an HDF5 file (it starts with {head[:8]!r})" if head else "the file is empty"
        return BadSource(cannot(act, found, "a pack", "Check the path, or pack or stage the data again"))
    if not any(head):
        return NotSealed(cannot(act, "the pack was never finished", "a sealed pack", "Pack the data again"))
    next_step = (
        "Open it unverified in Python with open_pack(), or create a pack of its source with ",
        call("pack"),
    )
    return NotSealed(cannot(act, "it is an HDF5 file without colabkit's seal", "a sealed pack", next_step))


def hdf5_start(fd: int, length: int) -> int | None:
    """Return the offset of HDF5 data: 0, or after a user block of 512 bytes times a power of 2; None if not found."""
    places = [0, *(512 << power for power in range((length // 512).bit_length()))]
    signed = (place for place in places if os.pread(fd, len(_HDF5_SIGNATURE), place) == _HDF5_SIGNATURE)
    return next(signed, None)


def outside_digest(fd: int, length: int, spans: Iterable[Sequence[int]]) -> str:
    """Return the SHA-256 of all bytes after the user block that are outside the spans (offset, size)."""
    digest = hashlib.sha256()
    position = file_changes.HDF5_USER_BLOCK_BYTES
    for offset, size in [*spans, (length, 0)]:
        # Read in blocks, because in a damaged file nearly all bytes may be outside the spans.
        while position < offset:
            block = os.pread(fd, min(_BLOCK_BYTES, offset - position), position)
            if not block:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            digest.update(block)
            position += len(block)
        position = offset + size
    return digest.hexdigest()


def _data_set(path: Path, file: h5py.File, name: str) -> DataSet:
    """Return a dataset's description; raise `Corrupt` unless its values are contiguous and stored in this file."""
    import h5py

    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
        raise corrupt(path, f"{name!r} is not a dataset of this file")
    dataset = file[name].id
    properties = dataset.get_create_plist()
    plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count() == 0
    dtype = np.dtype(dataset.dtype)
    if not plain or dtype.kind not in _KINDS:
        raise corrupt(path, f"{name!r} is not a contiguous array of numbers")
    found = DataSet(name, tuple(map(int, dataset.shape)), dtype.str, int(dataset.get_offset() or 0))
    if found.offset + found.size_bytes > path.stat().st_size:
        raise corrupt(path, f"{name!r} extends beyond the end of the file")
    return found

"""Description of a pack's contents: fields, datasets and shards."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import Corrupt, FileFailed, Text, call, cannot, format_things, option

NOTES = "colabkit_notes"
"""Name of the dataset that holds long metadata."""
CRC = "crc"
"""Name of the field that holds the CRC32 of each sample."""
SAMPLES = "X"
LABELS = "Y"
SPLITS = ("train", "val", "test")
"""Splits in the order in which a pack stores them; `val` may be stored under its other names, `valid` and `dev`."""

_SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

_DIGEST_CHARS = 16
_UNKNOWN = "0" * _DIGEST_CHARS

Content: TypeAlias = Literal["image", "array", "text", "bytes", "labels"]

Indices: TypeAlias = npt.NDArray[np.int64]
"""Indices of samples or rows, starting at 0."""

SPLIT_NAMES = tuple(_SPLIT_OF)
"""All accepted names of splits, in lower case."""


def split_named(name: object) -> str | None:
    """Return the split in `SPLITS` that a name stands for, ignoring case; None if the name is unknown."""
    return _SPLIT_OF.get(name.lower()) if isinstance(name, str) else None


def find_split(names: Iterable[str], split: object) -> str | None:
    """Return the first of `names` that stands for the same split as `split`; None if none does."""
    wanted = split_named(split)
    return next((name for name in names if name == split or (wanted and split_named(name) == wanted)), None)


def stored_splits(words: Iterable[object]) -> dict[str, str]:
    """Map each split of a source, in the order of `SPLITS`, to the name under which a pack stores it.

    `valid` and `dev` keep their names; every other split gets its name in `SPLITS`. If a source has several names for
    one split, the first name is used. Unknown names are ignored.
    """
    found: dict[str | None, str] = {}
    for word in words:
        if (split := split_named(word)) is not None:
            lowered = str(word).lower()
            found.setdefault(split, lowered if lowered in ("valid", "dev") else split)
    return {split: found[split] for split in SPLITS if split in found}


@dataclass(frozen=True, slots=True)
class Field:
    """One value that every sample has, such as its image or its label.

    Attributes:
        name: name of the field, such as `X` or `Y`.
        content: `image` (uint8 [H, W, C], or the bytes of an image file), `array`, `text` (UTF-8), `bytes`, `labels`.
        is_ragged: whether samples differ in length. Their bytes are then stored back to back in one flat dataset,
            together with a dataset of offsets and lengths, `[N, 2]`.
    """

    name: str
    content: Content
    is_ragged: bool = False

    def data_set(self, split: str) -> str:
        """Return the name of the field's dataset in a split."""
        return f"{self.name}_{split}"

    def index(self, split: str) -> str:
        """Return the name of a ragged field's dataset of offsets and lengths, `int64 [N, 2]`."""
        return f"{self.name}_{split}_index"


@dataclass(frozen=True, slots=True)
class DataSet:
    """A dataset in a file; `offset` is in bytes, -1 if the dataset is not created yet or cannot be memory-mapped."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = -1

    @property
    def size_bytes(self) -> int:
        """Size of the dataset in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as listed in the index: its file name, its seal, its number of samples in each split, and its bytes."""

    name: str
    seal: str
    splits: Mapping[str, int]
    length: int = 0


@dataclass(frozen=True)
class PackInfo:
    """Description of a sealed pack, or of another HDF5 file that is opened like one.

    Attributes:
        path: path of the pack file, or of the index if the pack has shards.
        data_sets: datasets by name. An index holds only the labels of all shards; each shard holds all fields of its
            samples, labels included.
        meta: fields, classes, source, options, counts, omitted and bad samples.
        table_crcs: CRC32 of each table's bytes, by dataset name. All other datasets are covered by the CRCs of the
            samples.
        seal: digest that identifies the pack and covers its layout.
    """

    path: Path
    data_sets: Mapping[str, DataSet]
    meta: Mapping[str, Any]
    table_crcs: Mapping[str, int]
    seal: str

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the files, labels and fields, and a digest of the samples, 16 hex digits each.

        The second is zero while samples are still being packed; see `is_same_data`. Unlike the seal, the digests stay
        the same if only the location or the times of the source's files change, as in a new local copy. If they
        are unknown, because the file is not a pack, they are the beginning of the seal.
        """
        if "plan" not in self.meta or (self.shards and "samples" not in self.meta):
            return self.seal[: 2 * _DIGEST_CHARS]
        crcs = {name: crc for name, crc in self.table_crcs.items() if name != NOTES}
        samples = {name: crcs.pop(name) for name in [f"{CRC}_{split}" for split in self.splits] if name in crcs}
        about = _digest([self.meta.get("files") or self.meta["plan"], self.meta["splits"], self.meta["fields"], crcs])
        if self.shards:
            return about + _digest(self.meta["samples"])
        return about + (_digest(samples) if samples else _UNKNOWN)

    @property
    def samples_digest(self) -> str:
        """The part of the fingerprint that identifies the samples; zero while they are being packed."""
        return self.fingerprint[_DIGEST_CHARS:]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, in the order of `SPLITS`."""
        return tuple(stored_splits(self.meta["splits"]).values())

    def count(self, split: str) -> int:
        """Return the number of samples in a split."""
        return int(self.meta["splits"][split])

    @property
    def inferred(self) -> Mapping[str, str]:
        """Values inferred by `pack()` or, for other HDF5 files, by `open_pack()`, as text.

        The keys are the options that override them.
        """
        return dict(self.meta.get("inferred", {}))

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Files of the source that are not samples or are missing, with the reason."""
        return tuple((name, why) for name, why in self.meta["left_out"])

    @property
    def bad(self) -> tuple[tuple[str, str], ...]:
        """Samples that could not be decoded, with the reason."""
        return tuple((name, why) for _, _, name, why in self.meta["bad"])

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Fields of a sample by name; `X` is first."""
        return {name: Field(name, *about) for name, about in self.meta["fields"].items()}

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Shards in the order of their samples; empty if the samples are in this file."""
        return tuple(Shard(**about) for about in self.meta.get("shards", ()))

    def sample_fields(self) -> tuple[Field, ...]:
        """Return the fields that a sample's CRC covers, in the order in which their bytes are concatenated."""
        split = self.splits[0]
        return tuple(field for field in self.fields.values() if field.data_set(split) not in self.table_crcs)

    def map(self, name: str) -> npt.NDArray[Any]:
        """Return a dataset as a read-only memory map; no HDF5 handle stays open, so forks and threads are safe.

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
        # Some FUSE mounts do not support shared maps.
        private = np.memmap(self.path, found.dtype, "c", found.offset, found.shape)
        private.flags.writeable = False
        return private

    def table(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a table, checked against its CRC.

        Raises:
            Corrupt: if the table does not match its CRC.
            FileFailed: if the file cannot be read.
        """
        found = self.data_sets[name]
        table = np.empty(found.shape, found.dtype)
        data = table.reshape(-1).view(np.uint8).data
        # Do not map the file, because an I/O error in a map would kill the process.
        try:
            with open(self.path, "rb") as file:
                file.seek(found.offset)
                size = file.readinto(data)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if size < len(data) or crc32(data) != self.table_crcs[name]:
            raise corrupt(self.path, f"the table {name!r} does not match its CRC32")
        return table


def encode_text(text: str) -> bytes:
    """Return text as UTF-8; bytes that were not UTF-8 and lone surrogates are kept for `decode_text`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Return the text of bytes from `encode_text`."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


def is_same_data(one: str, other: str) -> bool:
    """Return whether two fingerprints of packed datasets may belong to the same samples.

    The digests of the samples are compared only if both are known: the samples of a pack that is still being packed are
    identified by their files.
    """
    if _UNKNOWN in [fingerprint[_DIGEST_CHARS : 2 * _DIGEST_CHARS] for fingerprint in (one, other)]:
        return identify_files(one) == identify_files(other)
    return one == other


def identify_files(fingerprint: str) -> str:
    """Return the part of a fingerprint of a packed dataset that is known before its samples are packed."""
    return fingerprint[:_DIGEST_CHARS] + fingerprint[2 * _DIGEST_CHARS :]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]


def name_inferred(inferred: Mapping[str, str]) -> Text:
    """Describe inferred values in one line, each with the option that overrides it."""
    texts = [(text, " (", option(name), ")") for name, text in inferred.items()]
    return tuple((text, "; ") for text in texts[:-1]) + tuple(texts[-1:])


def count_omitted(left_out: Sequence[tuple[str, str]], bad: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for the files left out of a pack, and one for the bad files, if there are any."""
    counts = {"other file": (left_out, " left out"), "bad file": (bad, "")}
    return [
        f"{format_things(len(files), kind)}{verb}, starting with {files[0][0]!r} ({files[0][1]})"
        for kind, (files, verb) in counts.items()
        if files
    ]


def unreadable(path: Path, error: OSError) -> FileFailed:
    """Return the error for a pack that the operating system cannot read."""
    found = str(error.strerror or error).partition("\n")[0]
    next_step: Text = ("Check the file's permissions, or copy it to local storage with ", call("stage"))
    if error.errno in (errno.EMFILE, errno.ENFILE):
        next_step = (
            "Raise the limit with ulimit -n 4096, or pack again with ",
            option("overwrite", True),
            " and a larger ",
            option("shard_bytes"),
        )
    return FileFailed(cannot(f"open {str(path)!r}", found, "", next_step))


def corrupt(path: Path, found: str) -> Corrupt:
    """Return the error for a pack that has changed since it was packed; `found` is a clause."""
    next_step = "Pack or stage the data again"
    return Corrupt(cannot(f"open {str(path)!r}", found, "a file unchanged since it was packed", next_step))

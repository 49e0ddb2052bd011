"""Write LMDB, WebDataset and TFRecord files without code of colabkit."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import lmdb
import numpy as np
import webdataset
from PIL import Image

SIZES = [(2, 3), (40, 60), (1, 1), (90, 90)]


def image(number: int, kind: str = "PNG") -> bytes:
    """Return a noise image as file bytes; `number` determines the size, from under 100 bytes to several LMDB pages."""
    random = np.random.default_rng(number)
    file = io.BytesIO()
    pixels = random.integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def lmdb_of(path: Path, values: Mapping[bytes, bytes], subdir: bool = True, **options: Any) -> Path:
    with lmdb.open(str(path), map_size=1 << 28, subdir=subdir, sync=False, **options) as environment:
        for begin in range(0, len(values), 500):
            with environment.begin(write=True) as transaction:
                for key, value in list(values.items())[begin : begin + 500]:
                    transaction.put(key, value)
    return path


def shards_of(pattern: str, samples: Iterable[Mapping[str, Any]], per_shard: int) -> None:
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def tar_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def masked(data: bytes) -> int:
    """Return the masked CRC that a TFRecord file stores."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(*records: bytes) -> bytes:
    """Return the bytes of a TFRecord file."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, struct.pack("<I", masked(length)), record, struct.pack("<I", masked(record))]
    return b"".join(parts)


def example(**features: Any) -> bytes:
    """Return an encoded `tf.train.Example`; `__` in a name becomes a slash. Values are lists of one type."""
    return delimited(1, b"".join(feature(name.replace("__", "/"), values) for name, values in features.items()))


def feature(name: str, values: list[Any]) -> bytes:
    if values and isinstance(values[0], bytes):
        encoded = delimited(1, b"".join(delimited(1, value) for value in values))
    elif values and isinstance(values[0], float):
        encoded = delimited(2, delimited(1, struct.pack(f"<{len(values)}f", *values)))
    else:
        encoded = delimited(3, delimited(1, b"".join(varint(value % (1 << 64)) for value in values)))
    return delimited(1, delimited(1, name.encode()) + delimited(2, encoded))


def delimited(number: int, data: bytes) -> bytes:
    """Return a length-delimited field in protobuf's encoding."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Return an integer in protobuf's varint encoding."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])

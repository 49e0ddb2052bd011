"""TFRecord files with `tf.train.Example` records as a source, without TensorFlow."""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from colabkit.foundation import BadArchive, BadSource, cannot, format_things, import_optional, is_image_head
from colabkit.storage.sources.items import Listing, broken_archive
from colabkit.storage.sources.ranges import (
    HEAD_BYTES,
    MOST_TEXT_BYTES,
    MOST_VALUES,
    ListingBuilder,
    RangeSource,
    shard_names,
    split_of,
    text_of,
)

PAYLOAD_FEATURES = ("image/encoded", "image", "image_raw", "jpeg", "encoded")
"""Features that usually hold a record's payload, in order of preference."""

_NAME = re.compile(r"\.tfrec(ords?)?(\.gz)?(-\d{5}-of-\d{5})?$|-\d{5}-of-\d{5}$", re.IGNORECASE)
# Record header: the length of the data, followed by the masked CRC of this number.
_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
# Constant for masking CRCs, from tensorflow/core/lib/hash/crc32c.h.
_MASK_DELTA: Final = 0xA282EAD8
# Maximum size of a record; the limit of protobuf is 2 GiB.
_MOST_RECORD_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x5e": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


_EXAMPLE = """
name: "colabkit_example.proto"  package: "tensorflow"  syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tensorflow.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry"  options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tensorflow.Feature" }
  }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: ".tensorflow.Features" } }
"""


def is_tfrecord_name(name: str) -> bool:
    """Return whether this is a TFRecord file name, such as `x.tfrecord`, `x.tfrec` or `x-00000-of-00010`."""
    return _NAME.search(name) is not None


class TfRecordSource(RangeSource):
    """TFRecord files whose records are `tf.train.Example`s.

    A record's payload is the first of the features `image/encoded`, `image`, `image_raw`, `jpeg` and `encoded` that
    holds one bytes value other than text, or else the only feature that starts like an image. The first record
    determines the feature for all records. A record's path is its file's name and its number in that file. Every other
    feature becomes a column of the same name: text if all its bytes are UTF-8, integers, or floats; single values if no
    record has more than one, otherwise lists. A feature is omitted and listed in `skipped` if a record has more than
    1,024 values, or bytes that are not text of up to 1 MiB. The column `split` is added if file names contain split
    names and no feature has this name.

    Indexing reads all bytes once and checks every CRC.

    Args:
        name: name for messages.
        files: uncompressed TFRecord files.
    """

    def _indexed(self) -> Listing:
        found = ListingBuilder(self.name)
        examples = _Examples(found)
        for path, shard in zip(self.files, shard_names(self.files), strict=True):
            split = split_of(shard)
            labels: dict[str, Any] = {} if split is None else {"split": split}
            file, size = found.open_next(path)
            with file:
                for number, (at, data) in enumerate(_records(path, file, size, examples.crc)):
                    name = f"{shard}/{number:08d}"
                    features = examples.features(name, data)
                    payload = examples.payload(name, features)
                    if payload is None:
                        found.skipped.append((name, f"its feature {examples.chosen!r} is not a single bytes value"))
                        continue
                    # If equal bytes occur earlier in the record, their offset can be used, too.
                    found.add(name, at + data.index(payload), len(payload), labels | examples.fields(features))
        examples.even_out()
        return found.finish()


class _Examples:
    """The feature that holds the payload, and the features that hold lists, determined while records are read."""

    def __init__(self, found: ListingBuilder) -> None:
        self.chosen = ""
        self.crc = import_optional("google_crc32c", found.act, "to read TFRecord", "google-crc32c").value
        self._found = found
        self._parse, self._error = _parser(found.act)
        self._lists: set[str] = set()

    def features(self, name: str, data: bytes) -> Mapping[str, Any]:
        try:
            return cast(Mapping[str, Any], self._parse(data).features.feature)
        except self._error:
            found = f"the record {name!r} is not a tf.train.Example, although its CRC is correct"
            next_step = "Write the records as tf.train.Example"
            raise BadSource(cannot(self._found.act, found, "", next_step)) from None

    def payload(self, name: str, features: Mapping[str, Any]) -> bytes | None:
        if not self.chosen:
            self.chosen = self._choose(name, features)
        if self.chosen not in features:
            return None
        values = features[self.chosen].bytes_list.value
        return values[0] if len(values) == 1 else None

    def _choose(self, name: str, features: Mapping[str, Any]) -> str:
        single = {
            feature: one.bytes_list.value[0] for feature, one in features.items() if len(one.bytes_list.value) == 1
        }
        images = [feature for feature, value in single.items() if is_image_head(value[:HEAD_BYTES])]
        for feature in PAYLOAD_FEATURES:
            if feature in images or (feature in single and text_of(single[feature]) is None):
                return feature
        if len(images) == 1:
            return images[0]
        names = ", ".join(sorted(features)[:12]) or "no features"
        found = f"the record {name!r} has {len(images) or 'no'} images among {names}"
        expected = f"exactly one image, or an image in one of {', '.join(PAYLOAD_FEATURES)}"
        raise BadSource(cannot(self._found.act, found, expected, "Write the image's bytes as image/encoded"))

    def fields(self, features: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, feature in features.items():
            kind = feature.WhichOneof("kind")
            if name == self.chosen or kind is None or self._found.is_dropped(name):
                continue
            values = list(getattr(feature, kind).value)
            if kind == "bytes_list":
                values = [text_of(value) if len(value) <= MOST_TEXT_BYTES else None for value in values]
            if None in values:
                self._found.drop(name, "bytes that are not text")
            elif len(values) > MOST_VALUES:
                self._found.drop(name, f"lists of more than {MOST_VALUES} values")
            else:
                if len(values) > 1:
                    self._lists.add(name)
                fields[name] = values[0] if len(values) == 1 else values
        return fields

    def even_out(self) -> None:
        """Convert each column to lists if any row has several values; otherwise replace empty lists with None."""
        for name, column in self._found.columns.items():
            if name in self._lists:
                column[:] = [one if one is None or isinstance(one, list) else [one] for one in column]
            else:
                column[:] = [None if isinstance(one, list) else one for one in column]


def _records(path: Path, file: BinaryIO, size: int, crc: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each record's data; every CRC is checked.

    A record consists of the length, its masked CRC32C, the data, and their masked CRC32C ("TFRecord and
    tf.train.Example", tensorflow.org).
    """
    name = str(path)
    if not size:
        raise broken_archive(name, "it has 0 bytes")
    if compression := _COMPRESSED.get(os.pread(file.fileno(), 2, 0)):
        head = os.pread(file.fileno(), _LENGTH.size, 0)
        if len(head) < _LENGTH.size or _masked(crc(head[:8])) != _LENGTH.unpack(head)[1]:
            next_step = "Decompress it, or write it without compression, which hardly shrinks images"
            found = f"it is compressed with {compression}"
            raise BadArchive(cannot(f"read {name!r}", found, "an uncompressed file", next_step))
    with io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES) as buffered:
        at = 0
        while at < size:
            head = buffered.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                raise broken_archive(name, f"it ends too early, after byte {at}")
            length, length_crc = _LENGTH.unpack(head)
            if _masked(crc(head[:8])) != length_crc:
                raise broken_archive(name, f"the CRC of the length at byte {at} is wrong")
            at += _LENGTH.size
            if length > min(_MOST_RECORD_BYTES, size - at - _CRC.size):
                raise broken_archive(
                    name, f"a record of {format_things(length, 'byte')} begins at byte {at:,} of {size:,}"
                )
            data = buffered.read(length)
            tail = buffered.read(_CRC.size)
            if len(data) < length or len(tail) < _CRC.size:
                raise broken_archive(name, f"it ends too early, after byte {at}")
            if _masked(crc(data)) != _CRC.unpack(tail)[0]:
                raise broken_archive(name, f"the CRC of the record at byte {at} is wrong")
            yield at, data
            at += length + _CRC.size


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _parser(act: str) -> tuple[Any, type[Exception]]:
    """Return a parser of `tf.train.Example`, and the exception that it raises.

    Source: tensorflow/core/example/example.proto and feature.proto. The descriptor has a separate pool, since
    TensorFlow, if loaded, uses these names in the default pool.
    """

    def package(name: str) -> Any:
        return import_optional(f"google.protobuf.{name}", act, "to read TFRecord", "protobuf")

    file = package("text_format").Parse(_EXAMPLE, package("descriptor_pb2").FileDescriptorProto())
    pool = package("descriptor_pool").DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    example = package("message_factory").GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
    return example.FromString, package("message").DecodeError

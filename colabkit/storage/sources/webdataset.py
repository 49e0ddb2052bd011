"""WebDataset tar shards as a source: adjacent members with the same stem form a sample."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from colabkit.foundation import IMAGE_EXTENSIONS, BadArchive, BadSource, cannot, format_bytes, format_things, kind_of
from colabkit.storage.sources.items import Listing, directory_of
from colabkit.storage.sources.ranges import (
    HEAD_BYTES,
    MOST_TEXT_BYTES,
    MOST_VALUES,
    ListingBuilder,
    RangeSource,
    is_plain,
    shard_names,
    split_of,
)
from colabkit.storage.sources.reads import pread_all
from colabkit.storage.sources.tar_stream import TarStream, compression_of, tar_members

_NUMBERS, _TEXTS, _JSON = frozenset({"cls"}), frozenset({"txt", "text"}), frozenset({"json"})
_COLUMNS = _NUMBERS | _TEXTS | _JSON
_KNOWN = _COLUMNS | {*IMAGE_EXTENSIONS, "npy"}
# Splits a name like `base_plus_ext` of the webdataset package, but rejects empty stems and extensions.
_MEMBER = re.compile(r"((?:.*/|)[^./][^./]*)[.]([^/]+)", re.DOTALL)
# Names of metadata members, which belong to no sample; the webdataset package ignores them too.
_META = re.compile(r"(^|/)__[^/]*__($|/)")
_LOOKED_AT = 64
_MOST_JSON_BYTES = 16 << 20


class _SampleMember(NamedTuple):
    """A member of a sample; its kind is the last part of its extension."""

    extension: str
    kind: str
    offset: int
    size: int


class WebDatasetSource(RangeSource):
    """Tar shards in WebDataset's layout.

    Adjacent members whose paths are equal up to the first dot of the name form a sample; its path is the shard's name
    without `.tar`, followed by that common path. One member is the payload: the first image by extension (in the order
    of `foundation.image_formats.FORMATS`; also compound, such as `input.png`), or the `npy` if the first shard has no
    images, or else the only member that is not a label. Columns are `cls` as an integer, `txt` and `text` as text, each
    key of a `json` as `json.KEY` if its value contains no object, and `split` if shard names contain split names. Other
    members are never read; `skipped` lists their number by extension.

    Args:
        name: name for messages.
        files: uncompressed tars; compressed tars are rejected, since they can only be read from their start.
    """

    def _indexed(self) -> Listing:
        found = ListingBuilder(self.name)
        kind = ""
        unread: Counter[str] = Counter()
        for path, shard in zip(self.files, shard_names(self.files), strict=True):
            split = split_of(shard)
            labels: dict[str, Any] = {} if split is None else {"split": split}
            file, size = found.open_next(path)
            with file, closing(_plain_stream(path, file, size)) as stream:
                samples = _samples(stream, shard, found)
                kind = kind or _payload_kind(found.act, samples)
                for key, members in samples:
                    payload = _payload_of(members, kind)
                    if payload is None:
                        missing = "an image" if kind == "image" else f"a .{kind} member"
                        found.skipped.append((f"{shard}/{key}", f"a sample without {missing}"))
                        continue
                    fields = dict(labels)
                    for member in members:
                        if member is payload:
                            continue
                        if member.kind in _COLUMNS:
                            fields |= _values(found, file.fileno(), f"{shard}/{key}", member)
                        else:
                            unread[member.extension] += 1
                    found.add(f"{shard}/{key}", payload.offset, payload.size, fields)
        for extension, count in unread.items():
            found.skipped.append(
                (f"*.{extension}", f"{format_things(count, 'member')}, neither the payload nor a label")
            )
        return found.finish()


def is_webdataset(path: Path) -> bool:
    """Return whether a plain tar is a shard: two adjacent files share a stem, and one has a known extension.

    Only the first 64 files are examined. Files such as `cat.0.jpg` and `cat.1.jpg`, whose extensions differ only in
    numbers, do not share a stem.
    """
    try:
        with path.open("rb", buffering=0) as file, closing(_plain_stream(path, file, os.stat(path).st_size)) as stream:
            files = (one for one in tar_members(stream) if not one.is_folder and not one.oddity)
            parts = [_split_name(one.name) for one in islice(files, _LOOKED_AT)]
    except BadArchive:
        # Ignore errors here, because opening the file as an ordinary tar reports them.
        return False
    return any(
        one
        and other
        and one[0] == other[0]
        and _without_numbers(one[1]) != _without_numbers(other[1])
        and not _KNOWN.isdisjoint({_kind(one[1]), _kind(other[1])})
        for one, other in pairwise(parts)
    )


def _plain_stream(path: Path, file: BinaryIO, size: int) -> TarStream:
    if compression := compression_of(os.pread(file.fileno(), HEAD_BYTES, 0)):
        next_step = "Extract or decompress it, since compression hardly shrinks images"
        found = f"it is compressed with {compression}"
        raise BadArchive(cannot(f"read {str(path)!r}", found, "an uncompressed tar", next_step))
    return TarStream(str(path), file, size)


def _samples(stream: TarStream, shard: str, found: ListingBuilder) -> list[tuple[str, list[_SampleMember]]]:
    directory = directory_of(stream.name, tar_members(stream), stream.archive_bytes)
    found.skipped += [(f"{shard}/{path}", reason) for path, reason in directory.listing.skipped]
    samples: list[tuple[str, list[_SampleMember]]] = []
    for item in sorted(directory.listing.items, key=lambda item: directory.handles[item.path]):
        name_parts = _split_name(item.path)
        if name_parts is None:
            found.skipped.append((f"{shard}/{item.path}", "not named like a member of a sample"))
            continue
        key, extension = name_parts
        if not samples or samples[-1][0] != key:
            samples.append((key, []))
        samples[-1][1].append(_SampleMember(extension, _kind(extension), directory.handles[item.path], item.size))
    return samples


def _split_name(name: str) -> tuple[str, str] | None:
    match = None if _META.search(name) else _MEMBER.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


def _kind(extension: str) -> str:
    return extension.rpartition(".")[2]


def _without_numbers(extension: str) -> list[str]:
    return [part for part in extension.split(".") if not part.isdecimal()]


def _payload_kind(act: str, samples: Sequence[tuple[str, Sequence[_SampleMember]]]) -> str:
    extensions = {member.extension for _, members in samples for member in members}
    kinds = {_kind(extension) for extension in extensions}
    if not kinds.isdisjoint(IMAGE_EXTENSIONS):
        return "image"
    if "npy" in kinds:
        return "npy"
    others = [extension for extension in extensions if _kind(extension) not in _COLUMNS] or [*extensions]
    if len(others) > 1:
        found = f"the samples have the members .{', .'.join(sorted(others)[:8])}"
        expected = "an image, an .npy file or exactly one other member in each sample"
        raise BadSource(cannot(act, found, expected, "Write the shards with one payload per sample"))
    return others[0] if others else ""


def _payload_of(members: Sequence[_SampleMember], kind: str) -> _SampleMember | None:
    if kind == "image":
        images = [member for member in members if member.kind in IMAGE_EXTENSIONS]
        return min(images, key=lambda member: (IMAGE_EXTENSIONS.index(member.kind), *_plainness(member)), default=None)
    if kind == "npy":
        return min((member for member in members if member.kind == kind), key=_plainness, default=None)
    return next((member for member in members if member.extension == kind), None)


def _plainness(member: _SampleMember) -> tuple[bool, str]:
    return member.extension != member.kind, member.extension


def _values(found: ListingBuilder, fd: int, path: str, member: _SampleMember) -> dict[str, Any]:
    column = member.extension
    limit = _MOST_JSON_BYTES if member.kind in _JSON else MOST_TEXT_BYTES
    if member.size > limit:
        raise _bad_label(found.act, path, column, f"{format_bytes(member.size)} long", f"at most {format_bytes(limit)}")
    data = pread_all(fd, member.size, member.offset)
    if member.kind in _TEXTS:
        try:
            return {column: data.decode("utf-8")}
        except UnicodeDecodeError:
            raise _bad_label(found.act, path, column, "not UTF-8", "UTF-8 text") from None
    if member.kind in _NUMBERS:
        try:
            return {column: int(data)}
        except ValueError:
            raise _bad_label(found.act, path, column, f"{data[:40]!r}", "a whole number") from None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad_label(found.act, path, column, "not valid JSON", "a JSON object") from None
    if not isinstance(values, dict):
        raise _bad_label(found.act, path, column, f"{kind_of(values)} in JSON", "a JSON object")
    fields = {}
    for key, value in values.items():
        name = f"{column}.{key}"
        if is_plain(value):
            fields[name] = value
        else:
            found.drop(name, f"not a number, a string or a list of at most {MOST_VALUES} of these")
    return fields


def _bad_label(act: str, path: str, column: str, found: str, expected: str) -> BadSource:
    next_step = "Repair or remove this sample"
    return BadSource(cannot(act, f"the .{column} of {path!r} is {found}", expected, next_step))

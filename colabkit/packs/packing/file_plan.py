"""Plans a pack of files: its samples, labels, additional fields and encoding."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from colabkit.foundation import (
    BadImage,
    BadSource,
    InvalidOption,
    SourceMissing,
    Text,
    cannot,
    file_changes,
    format_bytes,
    format_seconds,
    format_things,
    kind_of,
    memory_limits,
    omit,
    option,
    read_file,
)
from colabkit.packs.decode.images import decode_array, decode_image
from colabkit.packs.format.layout import LABELS, Field, encode_text
from colabkit.packs.labels.labelling import LabelledSamples, label_samples
from colabkit.packs.labels.sample_files import check_complete
from colabkit.packs.packing.file_samples import BrokenMember, FileSampleMaker, read_samples
from colabkit.packs.packing.options import QUALITY, PackOptions
from colabkit.packs.packing.pack_plan import (
    PAD,
    Encoding,
    FieldTable,
    PackPlan,
    SampleField,
    digest_of,
    is_storable,
    number_array,
    unequal_shapes,
)
from colabkit.storage import (
    ArchiveSource,
    Item,
    Listing,
    LocalCopy,
    ManifestSource,
    RangeSource,
    Retries,
    Source,
    read_item,
)

_PROBED = 16
# Share of the free disk space that encoding="auto" may use.
_FREE_SHARE = 0.9
_SUGGESTED_SIDE = 256
_ARRAYS = ".npy"
_NPY_MAGIC = b"\x93NUMPY"


class FileCollection:
    """The files of a source, with their labels and splits.

    Raises:
        BadSource: if classes or splits cannot be found.
        InvalidOption: if an option does not apply to the source.
        SourceMissing: if more files of a table are missing than `max_bad` allows.
    """

    def __init__(self, source: Source, listing: Listing, options: PackOptions) -> None:
        self._source = source
        self._listing = listing
        self._options = options
        if options.layout != "auto":
            not_array = (option("layout", options.layout), " applies only to arrays in memory")
            raise InvalidOption(cannot(options.act, not_array, "", omit("layout")))
        if isinstance(source, ManifestSource) and (missing := listing.skipped):
            rows = len(listing.items) + len(missing)
            most = options.most_bad(rows)
            if len(missing) > most:
                count, first = f"{len(missing)} of {format_things(rows, 'row')}", missing[0][0]
                found = f"files or paths are missing for {count}, starting with {first!r}"
                more = ("Check the paths, or increase ", option("max_bad"))
                raise SourceMissing(cannot(options.act, found, f"at most {most}", more))
        check_complete(options.act, source, options.labels)
        self._labelled = label_samples(
            listing,
            source.name,
            labels=options.labels,
            task=options.task,
            renumber=options.renumber,
            splits=options.splits,
            seed=options.seed,
        )
        self._items: Sequence[Item] = self._labelled.items
        self._extra, self._tables = self._further_fields()
        origin, contents = _origin_of(source, self._items)
        times = [] if contents else [item.version_ns for item in self._items]
        self._table_digests = [*map(_table_digest, self._tables)]
        digests = [_listing_digest(self._labelled, times, contents), *self._table_digests]
        self.key = digest_of(origin, options.plain(), digests)

    @cached_property
    def _are_arrays(self) -> bool:
        """Whether samples are arrays, judging by file names or, for record files, by the first record's content."""
        if isinstance(self._source, RangeSource):
            return read_item(self._source, self._items[0], Retries()).startswith(_NPY_MAGIC)
        return all(item.path.lower().endswith(_ARRAYS) for item in self._items)

    def plan(self, final: Path, *, is_unequal: bool = False) -> PackPlan:
        """Return the plan of a pack at `final`.

        Args:
            final: path of the pack; the free space there affects `encoding="auto"`.
            is_unequal: whether the images are known to differ in size.

        Raises:
            BadImage: if none of the probed images can be decoded, or one cannot and bad files are errors.
        """
        encoding, shape, dtype, note = self._choose_encoding(final, is_unequal)
        options, labelled = self._options, self._labelled
        maker = FileSampleMaker(
            self._source,
            self._items,
            encoding,
            options.channels,
            options.image_size,
            is_strict=options.on_bad == "raise",
            shape=shape,
            dtype=dtype,
            is_image=not self._are_arrays,
            quality=options.quality,
            extra=self._extra,
        )
        size, quality = options.image_size, options.quality if encoding == "jpeg" else None
        about = {
            "source": self._source.name,
            "encoding": encoding,
            "classes": labelled.classes,
            "label_kind": labelled.kind,
            "sample_shape": list(shape) or ([*size, options.channels] if size else None),
            "channels": options.channels,
            "options": {"size": size, "quality": quality, "note": note},
            "plan": self.key,
            # Without origin and times, to recognize the same files elsewhere.
            "files": digest_of(options.plain(), [_listing_digest(self._labelled), *self._table_digests]),
            "source_bytes": sum(item.size for item in self._items),
            "left_out": labelled.left_out,
            "inferred": labelled.inferred,
        }
        most_bad = options.most_bad(len(self._items))
        return PackPlan(self._source.name, maker, labelled.splits, self._tables, about, options.on_bad, most_bad)

    def _choose_encoding(self, final: Path, is_unequal: bool) -> tuple[Encoding, tuple[int, ...], str, str]:
        """Return the encoding, the shape and dtype of a raw row, and a note for the report."""
        options, size = self._options, self._options.image_size
        if self._are_arrays:
            refused = {
                "size": bool(size),
                "encoding": options.encoding not in ("auto", "raw"),
                "channels": options.channels == 1,
                "quality": options.quality != QUALITY,
            }
            if name := next(filter(refused.get, refused), ""):
                given = option(name, getattr(options, name))
                found = (given, " applies only to images, but all samples are .npy arrays")
                raise InvalidOption(cannot(options.act, found, "", omit(name)))
            shape, dtype = self._probe(1)[0][0]
            if not is_storable(dtype):
                has = f"the first array has dtype {dtype}"
                next_step = "Convert the arrays, for example to float32"
                raise BadSource(cannot(options.act, has, "a numeric dtype that PyTorch supports", next_step))
            return "raw", shape, dtype.str, ""
        if options.encoding in ("source", "jpeg"):
            return options.encoding, (), "|u1", ""
        if size:
            shape, is_one_size = (*size, options.channels), True
        else:
            kinds, decode_s = self._probe(_PROBED if options.encoding == "auto" else 1)
            shape, is_one_size = kinds[0][0], len(set(kinds)) == 1 and not is_unequal
        raw_bytes = int(np.prod(shape)) * len(self._items)
        fitting = min(_FREE_SHARE * file_changes.free_bytes(final), memory_limits(read_file).available_bytes)
        if options.encoding == "raw" or (is_one_size and raw_bytes <= fitting):
            return "raw", shape, "|u1", ""
        if is_one_size:
            fits = f"only {format_bytes(fitting)} fit on the disk and in RAM"
            note = f"raw pixels would take {format_bytes(raw_bytes)}, but {fits}"
            return ("jpeg", (), "|u1", note) if size else ("source", (), "|u1", f"{note}; files are stored unchanged")
        suggested = _SUGGESTED_SIDE**2 * options.channels * len(self._items)
        note = (
            "the images have several sizes, so files are stored unchanged; raw pixels at an image size of "
            f"{_SUGGESTED_SIDE} would take {format_bytes(suggested)} and save {format_seconds(decode_s)} of decoding "
            "per sample in every epoch"
        )
        return "source", (), "|u1", note

    def _probe(self, most: int) -> tuple[list[tuple[tuple[int, ...], np.dtype[Any]]], float]:
        """Decode samples spread over the source; return their shapes and dtypes, and the mean decoding time in seconds.

        If all of them are bad and bad samples are allowed, decode more until one is good or too many are bad.
        """
        options = self._options
        is_sequential = getattr(self._source, "is_sequential", False)
        some = np.unique(np.linspace(0, len(self._items) - 1, 1 if is_sequential else most, dtype=np.int64))
        batch = list(dict.fromkeys(self._items[number] for number in some.tolist()))
        looked_at = set(batch)
        others = (item for item in self._items if item not in looked_at)
        kinds: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        bad: list[tuple[Item, BadImage]] = []
        decode_s = 0.0
        while batch:
            for item, data in read_samples(self._source, batch, is_strict=options.on_bad == "raise"):
                started = time.perf_counter()
                try:
                    if isinstance(data, BrokenMember):
                        raise data
                    array = decode_array(data) if self._are_arrays else decode_image(data, options.channels)
                    kinds.append((array.shape, array.dtype))
                except BadImage as error:
                    bad.append((item, error))
                decode_s += time.perf_counter() - started
            is_done = kinds or options.on_bad == "raise" or len(bad) > options.most_bad(len(self._items))
            batch = [] if is_done else list(itertools.islice(others, most))
        if bad and options.on_bad == "raise":
            item, reason = bad[0]
            act = f"pack {item.path!r} of {self._source.name!r}"
            repair = ("Repair or remove this file, or use ", option("on_bad", "skip"))
            raise BadImage(cannot(act, reason.message or str(reason), "", repair)) from reason.__cause__
        if not kinds:
            item, reason = bad[0]
            count = format_things(len(bad), "file")
            found = f"none of {count} could be decoded, starting with {item.path!r} ({reason})"
            more: Text = "" if len(bad) == len(self._items) else (", or increase ", option("max_bad"))
            raise BadImage(cannot(options.act, found, "at least one readable file", ("Check the source", more)))
        return kinds, decode_s / len(kinds)

    def _further_fields(self) -> tuple[list[tuple[SampleField, Callable[[str], Any]]], tuple[FieldTable, ...]]:
        labelled, made, tables = self._labelled, [], []
        if labelled.values is not None:
            tables.append(FieldTable(Field(LABELS, "labels"), labelled.values))
        for name, wanted in self._options.sources_of_fields.items():
            if callable(wanted):
                made.append((_made_by(self._options.act, name, wanted(self._items[0].path)), wanted))
            else:
                tables.append(_column_table(self._options.act, name, wanted, self._column(wanted)))
        return made, tuple(tables)

    def _column(self, name: str) -> list[Any]:
        if name == "path" and name not in self._listing.columns:
            return [item.path for item in self._items]
        if name not in self._listing.columns:
            known = f"one of {', '.join(map(repr, ['path', *self._listing.columns]))}"
            found = f"the source has no column {name!r}"
            raise InvalidOption(cannot(self._options.act, found, known, ("Use one of these for ", option("fields"))))
        column = self._listing.columns[name]
        return [column[row] for row in self._labelled.rows.tolist()]


def _column_table(act: str, field: str, column: str, values: list[Any]) -> FieldTable:
    """Convert a column of numbers, of equally long lists of numbers, or of text to a field."""
    missing = sum(value is None for value in values)
    if missing:
        empty = f"{missing} of {format_things(len(values), 'cell')} in the column {column!r} are empty"
        raise BadSource(cannot(act, empty, "a value for each sample", "Fill these cells, or remove the field"))
    if all(isinstance(value, str) for value in values):
        encoded = tuple(map(encode_text, values))
        return FieldTable(Field(field, "text", is_ragged=True), encoded)
    try:
        array = number_array(values)
    except ValueError:
        array = np.array(None)
    except OverflowError as error:
        wide, convert = f"{error} in the column {column!r}", "Convert the column, for example to text"
        raise BadSource(cannot(act, wide, "integers in the range of int64 or uint64", convert)) from None
    if array.dtype.kind not in "biuf" and (shapes := unequal_shapes(values)):
        uneven = f"the lists in the column {column!r} have different shapes, such as {shapes}"
        raise BadSource(cannot(act, uneven, "equally long lists", PAD))
    if array.dtype.kind not in "biuf" or len(array) != len(values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        found = f"the column {column!r} contains values of type {kinds}"
        expected = "numbers, equally long lists of numbers, or text"
        raise BadSource(cannot(act, found, expected, "Convert the column, or remove the field that uses it"))
    return FieldTable(Field(field, "array"), array)


def _made_by(act: str, name: str, first: Any) -> SampleField:
    if isinstance(first, str | bytes):
        return SampleField(name, "text" if isinstance(first, str) else "bytes", is_ragged=True)
    try:
        array = np.asarray(first)
    except ValueError:
        # NumPy rejects nested lists of different lengths.
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" or not is_storable(array.dtype):
        found = f"the function for the field {name!r} returned {kind_of(first)}"
        expected = "a number, an array with a numeric dtype, text or bytes"
        raise InvalidOption(cannot(act, found, expected, "Convert the value in the function"))
    return SampleField(name, "array", shape=array.shape, dtype=array.dtype.str)


def _table_digest(table: FieldTable) -> str:
    if isinstance(table.values, tuple):
        lengths = np.fromiter(map(len, table.values), np.int64, len(table.values))
        return hashlib.sha256(lengths.tobytes() + b"".join(table.values)).hexdigest()
    about = f"{table.values.dtype.str} {table.values.shape}"
    return hashlib.sha256(about.encode() + table.values.tobytes()).hexdigest()


def _origin_of(source: Source, items: Sequence[Item]) -> tuple[str, str]:
    """Return the identity of a source, and a digest of its contents if known.

    An unchanged local copy has the identity of its source, no matter where and when it was made.
    """
    copy = None if source.can_hang else LocalCopy.of(Path(source.name))
    if copy is not None:
        contents, sealed_ns = copy.contents_digest()
        if all(item.mtime_ns <= sealed_ns for item in items):
            return copy.seal.source, contents
    # Include the root, which distinguishes tables in memory, since they have no unique names.
    root = source.root if isinstance(source, ManifestSource) else ""
    if isinstance(source, ArchiveSource) and len({item.mtime_ns for item in items}) == 1:
        # Some programs write the same time for all members, so use the time of the archive.
        with file_changes.translated(f"read {source.name!r}"):
            found = source.path.stat()
        root = f"{found.st_size} {found.st_mtime_ns}"
    return f"{source.name}\0{root}" if root else source.name, ""


def _listing_digest(labelled: LabelledSamples, times: Sequence[int] = (), contents: str = "") -> str:
    """Return the SHA-256 of the samples' paths, sizes, splits and class names, and of the files' times or contents."""
    digest = hashlib.sha256("\0".join([item.path for item in labelled.items]).encode("utf-8", "surrogateescape"))
    for values in ([item.size for item in labelled.items], times):
        digest.update(np.array(values, np.int64).tobytes())
    digest.update(contents.encode())
    digest.update(encode_text("\0".join(labelled.classes)))
    for split, numbers in labelled.splits.items():
        digest.update(split.encode())
        digest.update(numbers.tobytes())
    return digest.hexdigest()

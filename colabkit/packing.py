"""`pack()` turns many image files into one sealed, memory-mapped HDF5 file.

Files are read many at once and decoded on as many cores as are allowed; each worker writes its own rows at their final
place in a file whose space was reserved before. The seal comes last, then the rename, so a killed `pack()` leaves
nothing that opens.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from colabkit import _files, _partials
from colabkit._reports import Report
from colabkit._units import format_bytes, format_count, format_rate, format_seconds
from colabkit.decode import Pixels, decode_image
from colabkit.environment import usable_cpus
from colabkit.errors import BadImage, ColabkitError, InvalidOption, TargetExists, cannot, check_whole_number
from colabkit.fetching.addresses import FSSPEC
from colabkit.labels import ClassTree, class_tree, split_by_fraction
from colabkit.mounts import user_path
from colabkit.pack_format import CRC, LABELS, SAMPLES, FieldLayout, PackInfo, create_pack, is_pack, read_pack, seal_pack
from colabkit.progress import ProgressBar
from colabkit.sources import (
    AnySource,
    Block,
    Item,
    Reading,
    Retries,
    Source,
    TarSource,
    Threads,
    Wanted,
    check_outside,
    check_threads,
    concurrently,
    open_source,
    read_item,
)
from colabkit.staging import StageReport, stage
from colabkit.staging.identity import identity_of
from colabkit.staging.verifying import StageVerifyReport, near_copy_at, verify_near_copy

__all__ = ["PackReport", "VerifyReport", "pack", "verify"]

Size: TypeAlias = int | tuple[int, int]
Fields: TypeAlias = Mapping[str, FieldLayout]


@dataclass(frozen=True, repr=False)
class PackReport(Report):
    """What `pack()` made.

    Attributes:
        path: the pack.
        source: where its samples came from.
        splits: samples of each split.
        classes: class names; a label is an index into them.
        sample_shape: height, width and channels of every sample.
        pack_bytes: the file's length.
        seconds: how long it took.
        retries: reads that failed and were tried again.
        left_out: files that are no samples, with the reason.
        reused: whether the same pack was there already.
    """

    path: Path
    source: str
    splits: Mapping[str, int]
    classes: tuple[str, ...]
    sample_shape: tuple[int, int, int]
    pack_bytes: int
    seconds: float
    retries: int
    left_out: tuple[tuple[str, str], ...]
    reused: bool

    def _summary(self) -> str:
        samples = sum(self.splits.values())
        size = (
            f"{format_count(samples)} images {'x'.join(map(str, self.sample_shape))}, {format_bytes(self.pack_bytes)}"
        )
        if self.reused:
            return f"Already packed at {str(self.path)!r}: {size}; overwrite=True packs it again"
        rate = format_rate(samples / max(self.seconds, 1e-9), "images")
        notes = f", {self.retries} retries" if self.retries else ""
        notes += f", {len(self.left_out)} other files left out" if self.left_out else ""
        return f"Packed {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("splits", ", ".join(f"{split} {format_count(count)}" for split, count in self.splits.items())),
            ("classes", f"{len(self.classes)}: {', '.join(self.classes[:12])}"),
            ("left out", "; ".join(f"{name!r} ({why})" for name, why in self.left_out[:5]) or "nothing"),
        ]


@dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """What `verify()` found. `damaged` names the split and index of each sample whose bytes changed."""

    path: Path
    samples: int
    damaged: tuple[tuple[str, int], ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no sample is damaged."""
        return not self.damaged

    def _summary(self) -> str:
        if not self.damaged:
            return f"{str(self.path)!r} is whole: all {format_count(self.samples)} samples are as they were sealed"
        first = ", ".join(f"{split}[{index}]" for split, index in self.damaged[:5])
        damage = f"{len(self.damaged)} of {format_count(self.samples)} samples, first {first}"
        return f"{str(self.path)!r} is damaged: {damage}; pack or stage it again"

    def _rows(self) -> list[tuple[str, ...]]:
        return [("damaged", str(len(self.damaged))), ("checked in", format_seconds(self.seconds))]


def pack(
    source: AnySource,
    out: str | os.PathLike[str],
    *,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    splits: Mapping[str, float] | None = None,
    seed: int = 0,
    threads: Threads = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> PackReport:
    """Pack a folder or zip archive with one folder a class into a sealed HDF5 file, and return where it is.

    The samples become `X_<split>`, `uint8 [N, H, W, C]`, the labels `Y_<split>`, `int64 [N]`; the order is by class,
    folder and name. Folders `train`, `dev` or `val`, and `test` at the top are splits; without them all is `train`. The
    same pack that is there already is used again.

    Args:
        source: a folder, a zip or tar archive, a bucket's folder, `samples:digits`, or a `Source`; what an https
            address or Drive link leads to is staged first.
        out: the pack's path, by custom ending in `.h5`.
        size: height and width, or one number for both, to which images are scaled (to cover it, bilinear with
            antialiasing) and cut around the centre; None keeps them, if all are equal.
        channels: 3 for RGB, 1 for luminance.
        splits: shares of `train`, `dev`, `test`, by class, for a tree without split folders.
        seed: decides which sample goes to which split.
        threads: files read at once; `"auto"` measures what the source rewards.
        overwrite: replace what is at `out`.
        progress: show a progress bar.

    Raises:
        SourceMissing, BadSource, BadArchive: if the source is not there, has no classes, or is broken.
        BadImage: if a file is no image, or not of the common size; it is named.
        TargetExists: if something else is at `out` and `overwrite` is false.
        NotEnoughSpace: before anything is written.
    """
    started = time.monotonic()
    address = identity_of(source, extract=False)[2]
    if address is not None and address.kind != FSSPEC:
        source = stage(source, extract=False, refresh=overwrite, progress=progress).path
    opened = open_source(source)
    if isinstance(opened, TarSource) and opened.can_hang and opened.is_sequential:  # labels need a pass, data another
        opened.close()
        opened = TarSource(stage(opened.path, extract=False, refresh=overwrite, progress=progress).path)
    act = f"pack {opened.name!r}"
    check_threads(act, threads)
    check_whole_number(act, "seed", seed, 0)
    if channels not in (1, 3):
        raise InvalidOption(cannot(act, f"channels={channels}", "3 for RGB or 1 for luminance", "Use one of them"))
    final = user_path(out, f"pack into {out!r}")
    if final.is_dir():
        needed = "the path of a file, as in 'birds.h5'"
        raise TargetExists(cannot(act, f"{str(final)!r} is a folder", needed, "Name a file in it"))
    check_outside(act, opened, final)
    with _files.translated(act), closing(opened):
        tree = class_tree(opened.list(), opened.name)
        if splits is not None:
            tree = split_by_fraction(tree, splits, seed)
        reader = _ImageReader(opened, channels, height_and_width(act, size))
        shape = reader.sample_shape(tree)
        meta = {
            "source": opened.name,
            "classes": tree.classes,
            "splits": {split: len(samples) for split, samples in tree.splits.items()},
            "sample_shape": shape,
            "options": {
                "resized": size is not None,
                "splits": dict(splits) if splits else None,
                "seed": seed if splits else None,
            },
            "listing": _listing_digest(tree),
            "source_bytes": sum(item.size for samples in tree.splits.values() for item, _ in samples),
            "left_out": tree.left_out,
        }
        if not overwrite and os.path.lexists(final):
            return _reuse(act, final, meta, started)
        if os.path.lexists(final) and not is_pack(final):
            needed = "a pack, which alone is overwritten"
            raise TargetExists(cannot(act, f"{str(final)!r} is no pack", needed, "Remove it or choose another path"))
        fields = _fields(tree, shape)
        _files.check_space(act, sum(field.size_bytes for field in fields), final)
        with _partials.Partial(final) as partial:
            placed = create_pack(partial.path, fields, meta)
            with ProgressBar("pack", sum(map(len, tree.splits.values())), " images", progress) as bar:
                crcs = _write_samples(reader, tree, partial.path, placed, threads, bar)
            table_crcs = _write_tables(tree, crcs, partial.path, placed)
            seal_pack(partial.path, placed.values(), table_crcs)
            if not overwrite and os.path.lexists(final):
                return _reuse(act, final, meta, started)  # another process was faster
            partial.publish(replace=overwrite)
    return _report(read_pack(final), started, reader.retries.count, reused=False)


def verify(path: str | os.PathLike[str] | StageReport, *, progress: bool = True) -> VerifyReport | StageVerifyReport:
    """Check every byte of a pack or a near copy against its digests and return which samples or files are damaged.

    Reads all of it once.

    Args:
        path: the pack, or what `stage()` returned.
        progress: show a progress bar.

    Raises:
        SourceMissing, BadSource, NotSealed: if there is no finished pack.
        Corrupt: if its layout, labels or table of digests are damaged, so that samples cannot be judged.
    """
    started = time.monotonic()
    if isinstance(path, StageReport):
        path = path.path
    act = f"verify {os.fspath(path)!r}"
    with _files.translated(act):
        if found := near_copy_at(user_path(path, act)):
            return verify_near_copy(*found, progress=progress)
    info = read_pack(user_path(path, act))
    damaged = []
    samples = sum(map(info.count, info.splits))
    with ProgressBar("verify", samples, " samples", progress) as bar:
        for split in info.splits:
            info.table(f"{LABELS}_{split}")
            sealed = info.table(f"{CRC}_{split}")
            for index, sample in enumerate(info.map(f"{SAMPLES}_{split}")):
                if crc32(sample.data) != sealed[index]:
                    damaged.append((split, index))
                bar.advance(1)
    return VerifyReport(info.path, samples, tuple(damaged), time.monotonic() - started)


class _ImageReader:
    """Reads and decodes the source's images to one shape; errors name the file."""

    def __init__(self, source: Source, channels: int, size: tuple[int, int] | None) -> None:
        self.source = source
        self.retries = Retries()
        self._channels = channels
        self._size = size
        # More decoders than cores would only hold more decoded images in memory.
        self._decoding = threading.Semaphore(max(1, round(usable_cpus())))

    def read(self, item: Item) -> Pixels:
        """Return the item's image, `uint8 [H, W, C]`."""
        return self.decode(item, read_item(self.source, item, self.retries))

    def decode(self, item: Item, data: bytes) -> Pixels:
        """Return the image that the item's bytes are, `uint8 [H, W, C]`."""
        try:
            with self._decoding:
                return decode_image(data, self._channels, self._size)
        except BadImage as error:
            act = f"pack {item.path!r} of {self.source.name!r}"
            raise BadImage(cannot(act, str(error), "an image file", "Remove or repair this file")) from error

    def sample_shape(self, tree: ClassTree) -> tuple[int, int, int]:
        """Return the shape of every sample: the wanted size, else that of the first image."""
        if self._size is not None:
            return (*self._size, self._channels)
        height, width, channels = self.read(next(iter(tree.splits.values()))[0][0]).shape
        return height, width, channels


def _listing_digest(tree: ClassTree) -> str:
    """Return the SHA-256 of which file, of what size, is which sample: files that were moved or renamed change it."""
    digest = hashlib.sha256()
    for split, samples in tree.splits.items():
        for item, label in samples:
            digest.update(json.dumps([split, item.path, item.size, label]).encode())
    return digest.hexdigest()


def height_and_width(act: str, size: Size | None) -> tuple[int, int] | None:
    """Return the size as a pair, None for the images' own; raises `InvalidOption` for anything else."""
    if size is None:
        return None
    both = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(both, tuple | list) and len(both) == 2
    if not is_pair or not all(isinstance(side, int) and side >= 1 for side in both):
        found, needed = f"size={size!r}", "a whole number, or height and width"
        raise InvalidOption(cannot(act, found, needed, "Use size=224 or size=(240, 320), say"))
    return both[0], both[1]


def _fields(tree: ClassTree, shape: tuple[int, int, int]) -> tuple[FieldLayout, ...]:
    fields = []
    for split, samples in tree.splits.items():
        fields += [
            FieldLayout(f"{SAMPLES}_{split}", (len(samples), *shape), "|u1"),
            FieldLayout(f"{LABELS}_{split}", (len(samples),), "<i8"),
            FieldLayout(f"{CRC}_{split}", (len(samples),), "<u4"),
        ]
    return tuple(fields)


def _write_samples(
    reader: _ImageReader, tree: ClassTree, path: Path, placed: Fields, threads: Threads, bar: ProgressBar
) -> dict[str, npt.NDArray[np.uint32]]:
    """Write every sample's row at its place and return the CRCs of each split.

    Reading and decoding are apart: a read that hangs can be left behind, and decoders are as many as there are cores.
    """
    crcs = {split: np.zeros(len(samples), "<u4") for split, samples in tree.splits.items()}
    places: dict[Item, list[tuple[str, int]]] = {}  # one file can be several samples
    for split, samples in tree.splits.items():
        for index, (item, _) in enumerate(samples):
            places.setdefault(item, []).append((split, index))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(block: Block) -> int:
        pixels = reader.decode(block.item, bytes(block.data or b""))
        for split, index in places[block.item]:
            field = placed[f"{SAMPLES}_{split}"]
            if pixels.shape != field.shape[1:]:
                act = f"pack {block.item.path!r} of {reader.source.name!r}"
                found = f"its height and width are {pixels.shape[0]}x{pixels.shape[1]}"
                needed = f"{field.shape[1]}x{field.shape[2]} like the first image"
                raise BadImage(cannot(act, found, needed, "Use size= to bring all images to one size"))
            crcs[split][index] = crc32(pixels.data)
            _files.write_at(fd, pixels.data, field.offset + index * pixels.nbytes, path)
        return len(places[block.item])

    try:
        with Reading(reader.source, threads, reader.retries, bar.wait) as reading:
            whole = (Wanted(item, 0, item.size) for item in places)
            with closing(reading.blocks(whole)) as blocks:
                for done in concurrently(write, blocks, "auto"):
                    bar.advance(done)
    finally:
        os.close(fd)
    return crcs


def _write_tables(
    tree: ClassTree, crcs: Mapping[str, npt.NDArray[np.uint32]], path: Path, placed: Fields
) -> dict[str, int]:
    """Write labels and CRCs, and return the CRC of each table."""
    table_crcs = {}
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for split, samples in tree.splits.items():
            labels = np.array([label for _, label in samples], "<i8")
            for name, table in ((f"{LABELS}_{split}", labels), (f"{CRC}_{split}", crcs[split])):
                data = table.tobytes()
                _files.write_at(fd, data, placed[name].offset, path)
                table_crcs[name] = crc32(data)
    finally:
        os.close(fd)
    return table_crcs


def _reuse(act: str, final: Path, meta: Mapping[str, Any], started: float) -> PackReport:
    """Return the report of the pack at `final` if it is the one that would be made."""
    try:
        info = read_pack(final)
    except ColabkitError as error:
        raise TargetExists(
            cannot(act, f"{str(final)!r} holds something else", "a free path", "Choose another path or overwrite=True")
        ) from error
    if info.meta != json.loads(json.dumps(meta)):
        found = f"{str(final)!r} is a pack of {info.meta['source']!r} with other files or options"
        raise TargetExists(cannot(act, found, "a free path", "Choose another path or overwrite=True"))
    return _report(info, started, 0, reused=True)


def _report(info: PackInfo, started: float, retries: int, reused: bool) -> PackReport:
    height, width, channels = info.meta["sample_shape"]
    return PackReport(
        path=info.path,
        source=info.meta["source"],
        splits=info.meta["splits"],
        classes=tuple(info.meta["classes"]),
        sample_shape=(height, width, channels),
        pack_bytes=info.path.stat().st_size,
        seconds=time.monotonic() - started,
        retries=retries,
        left_out=tuple((name, why) for name, why in info.meta["left_out"]),
        reused=reused,
    )

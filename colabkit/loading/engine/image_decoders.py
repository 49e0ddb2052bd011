"""Decode image files into the rows of a batch: resize and crop images, and cache decoded rows if there is room."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from colabkit.foundation import BadImage, Corrupt, LoaderMeters, cannot, format_things
from colabkit.loading.augment.cutting import Boxes, cut
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.joint import RESIZED_BOXES, move_boxes
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.batches import BatchGroup
from colabkit.loading.engine.columns import ImageDataset
from colabkit.loading.engine.read_ahead import FileReadAhead
from colabkit.loading.engine.tiers import RowCache
from colabkit.packs import (
    LABELS,
    SAMPLES,
    ImageFiles,
    OnBad,
    OtherSize,
    PackedDataset,
    Pixels,
    decode_image,
    decode_region,
    image_size,
    row_decoder,
)

logger = logging.getLogger("colabkit")

_MOST_LISTED = 1000


@dataclass
class BadSamples:
    """The `on_bad` option, and the image files that are bad: names and reasons of the first 1,000.

    With `has_boxes`, the transform moves bounding boxes, so messages do not advise `size=`.
    """

    on_bad: OnBad = "raise"
    reasons: dict[str, str] = field(default_factory=dict)
    has_boxes: bool = False

    def add(self, name: str, error: BadImage) -> None:
        """Raise the error of a bad sample, or record and log the error.

        Raises:
            BadImage: with the sample's name, if `on_bad` is `"raise"`, or if the sample is a valid image of another
                size.
        """
        if isinstance(error, OtherSize):
            crop = "Pass size=, or a transform whose first resize or crop gives height and width"
            if self.has_boxes:
                crop = f"Pass a transform that resizes or crops first, such as {RESIZED_BOXES}"
            raise BadImage(cannot(f"decode {name}", str(error), "images of one size", crop)) from None
        if self.on_bad == "raise":
            # Several processes refuse to skip samples.
            repair = "Repair or remove the file, or use on_bad='blank' (or on_bad='skip' in a single process)"
            raise BadImage(cannot(f"decode {name}", str(error), "a readable image", repair)) from error
        if name not in self.reasons and len(self.reasons) < _MOST_LISTED:
            self.reasons[name] = str(error)
            what = "is skipped" if self.on_bad == "skip" else "becomes a blank image"
            logger.warning("%s cannot be decoded (%s) and %s", name, error, what)

    def none_readable(self, count: int) -> BadImage:
        """Return the error for an epoch of `count` image files, all of which are bad."""
        found = f"none of {format_things(count, 'image file')} can be decoded"
        next_step = "See loader.bad_samples for the reasons"
        return BadImage(cannot("load an epoch", found, "at least one readable image", next_step))


@dataclass
class DecodingWork:
    """Samples `start` to `stop` of a group, their output memory, and the time spent on them."""

    group: BatchGroup
    start: int
    stop: int
    out: Pixels
    read: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    augment_s: float = 0.0

    def index(self, place: int) -> int:
        """Return the index of a sample in the dataset."""
        return self.group.plan.indices.item(self.start + place)

    def position(self, place: int) -> int:
        """Return the position of a sample in the epoch."""
        return self.group.plan.positions.item(self.start + place)


@dataclass(frozen=True)
class ImageOptions:
    """The options for decoding image files, the same in every epoch.

    Attributes:
        dataset: dataset that reads the files.
        files: number of channels, and size of blank images.
        row_shape: shape of every decoded image, `[H, W, C]`; None if images keep their sizes until they are cropped.
        is_resized: whether images are resized to the row shape; if not, an image of any other size is a bad sample.
        cache: cache of decoded rows.
        bad: the bad files.
        is_on_device: whether JPEG files are decoded on the device of the batches.
        moves_boxes: whether bounding boxes in the labels move when an image is cropped.
        label_place: place of the labels among the fields; None if there are none.
    """

    dataset: ImageDataset
    files: ImageFiles
    row_shape: tuple[int, int, int] | None
    is_resized: bool
    cache: RowCache
    bad: BadSamples
    is_on_device: bool = False
    moves_boxes: bool = False
    label_place: int | None = None

    def decoder(self, geometry: Geometry | None, ahead: FileReadAhead | None, counts: LoaderMeters) -> ImageDecoder:
        """Return a decoder for one epoch."""
        if self.row_shape is not None:
            return RowDecoder(self, geometry, ahead, counts, self.row_shape)
        if geometry is None or geometry.size is None:
            raise TypeError("images of different sizes require a crop to one size")
        return CropDecoder(self, geometry, ahead, counts)


@dataclass(eq=False)
class ImageDecoder:
    """Base class of decoders of the image files of one epoch.

    Attributes:
        options: options for decoding.
        geometry: crop to apply to each image; None keeps the whole image.
        ahead: read-ahead of the files of a remote source; None for local files.
        counts: meters of the loader.
    """

    options: ImageOptions
    geometry: Geometry | None
    ahead: FileReadAhead | None
    counts: LoaderMeters

    def fill(self, group: BatchGroup, start: int, stop: int, draws: Draws) -> None:
        """Decode the samples from `start` to `stop` of a group, and update the meters `read`, `decode` and `augment`.

        Raises:
            BadImage: with the name of a sample that cannot be decoded, if `on_bad` is `"raise"`.
        """
        work = DecodingWork(group, start, stop, group.values[0].permute(0, 2, 3, 1).numpy()[start:stop])
        cpu_began = time.thread_time()
        self._fill(work, draws)
        self._count(work, cpu_began)
        if self.geometry is not None:
            self.counts.add("augment", stop - start, work.out.nbytes, work.augment_s)

    def finish(self, group: BatchGroup) -> None:
        """Complete a group after all of its samples have been filled in."""

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context for work with the images of a finished group."""
        return nullcontext()

    def _move_boxes(self, group: BatchGroup, rows: list[int], boxes: Boxes) -> None:
        """Move the bounding boxes in the labels of cropped samples, if the transform does so."""
        if self.options.moves_boxes and self.geometry is not None and self.geometry.size is not None:
            place = self.options.label_place
            move_boxes(None if place is None else group.values[place], rows, boxes, self.geometry.size)

    def _count(self, work: DecodingWork, cpu_began: float) -> None:
        if self.ahead is None:
            self.counts.add("read", work.read, work.read_bytes, work.read_s)
        waited_s = 0.0 if self.ahead is None else work.read_s
        # The CPU seconds cover reading, decoding and cropping together.
        decoded_bytes, cpu_s = work.read * prod(work.out.shape[1:]), time.thread_time() - cpu_began
        self.counts.add("decode", work.read, decoded_bytes, work.decode_s, waited_s, cpu_s=cpu_s)

    def _fill(self, work: DecodingWork, draws: Draws) -> None:
        raise NotImplementedError

    def _read(self, work: DecodingWork, place: int) -> bytes | None:
        began = time.perf_counter()
        if self.ahead is not None:
            data = self.ahead.fetch(work.position(place))
        else:
            data = _encoded(self.options.dataset, work.index(place), self.options.bad)
        work.read_s += time.perf_counter() - began
        if data is not None:
            work.read_bytes += len(data)
            work.read += 1
        return data

    def _is_blank(self, data: bytes) -> bool:
        return not data and self.options.files.blank is not None

    def _add_bad(self, work: DecodingWork, place: int, error: BadImage) -> None:
        bad = self.options.bad
        bad.add(self.options.dataset.name_of(work.index(place)), error)
        if bad.on_bad == "skip":
            with work.group.lock:
                work.group.bad.append(work.start + place)


@dataclass(eq=False)
class RowDecoder(ImageDecoder):
    """A decoder that decodes images to rows of one shape, caches the rows, and crops them."""

    row_shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        self._decode = row_decoder(self.row_shape, self.options.is_resized)
        self._cache = self.options.cache
        dataset = self.options.dataset
        has_others = isinstance(dataset, PackedDataset) and not {SAMPLES, LABELS}.issuperset(dataset.fields)
        self._others = dataset if isinstance(dataset, PackedDataset) and has_others else None

    def _fill(self, work: DecodingWork, draws: Draws) -> None:
        if self._others is not None:
            # The images of these samples are not read again, but their other fields are.
            indices = work.group.plan.indices[work.start : work.stop]
            self._others.check(indices[self._cache.holds(indices)])
        rows = [self._row(work, place) for place in range(len(work.out))]
        began = time.perf_counter()
        if self.geometry is not None:
            crop_each(rows, self.geometry, draws, work.out)
        else:
            for row, out in zip(rows, work.out, strict=True):
                if row is not out:
                    out[...] = row
        work.augment_s += time.perf_counter() - began

    def _row(self, work: DecodingWork, place: int) -> Pixels:
        index = work.index(place)
        if (row := self._cache.row(index)) is not None:
            if self.ahead is not None:
                self.ahead.forget(work.position(place))
            return row
        try:
            data = self._read(work, place)
        except BadImage as error:
            self._add_bad(work, place, error)
            return np.zeros(self.row_shape, np.uint8)
        if data is None:
            return self._cache[index]
        slot = self._cache.claim()
        if slot is not None:
            row = self._cache.at(slot)
        else:
            row = work.out[place] if self.geometry is None else np.empty(self.row_shape, np.uint8)
        began = time.perf_counter()
        is_good = False
        try:
            is_good = self._decode_row(work, place, data, row)
        finally:
            if slot is not None:
                self._cache.settle(slot, index) if is_good else self._cache.release(slot)
        work.decode_s += time.perf_counter() - began
        if slot is None:
            return row
        # The slot was freed if another thread was faster, or if the image is bad and will be skipped.
        cached = self._cache.row(index)
        return np.zeros(self.row_shape, np.uint8) if cached is None else cached

    def _decode_row(self, work: DecodingWork, place: int, data: bytes, row: Pixels) -> bool:
        if self._is_blank(data):
            row[...] = 0
            return True
        try:
            self._decode(data, row)
        except BadImage as error:
            self._add_bad(work, place, error)
            row[...] = 0
            return self.options.bad.on_bad == "blank"
        return True


@dataclass(eq=False)
class CropDecoder(ImageDecoder):
    """A decoder that crops images of any size and, where possible, decodes only the cropped region."""

    geometry: Geometry

    def _fill(self, work: DecodingWork, draws: Draws) -> None:
        files: dict[int, tuple[bytes, tuple[int, int]]] = {}
        for place, out in enumerate(work.out):
            try:
                # `_read` never returns None here, because this decoder caches nothing.
                data = self._read(work, place) or b""
                if self._is_blank(data):
                    out[...] = 0
                else:
                    files[place] = data, image_size(data)
            except BadImage as error:
                self._add_bad(work, place, error)
                out[...] = 0
        if not files:
            return
        sizes = np.array([size for _, size in files.values()], np.int64)
        boxes = self.geometry.boxes(sizes, replace(draws, positions=draws.positions[list(files)]))
        self._move_boxes(work.group, [work.start + place for place in files], boxes)
        cuts = zip(files.items(), boxes.rows(), strict=True)
        for (place, (data, size)), (*region, is_mirrored, is_upside_down) in cuts:
            try:
                self._crop(work, place, data, size, tuple(region), (is_mirrored, is_upside_down))
            except BadImage as error:
                self._add_bad(work, place, error)
                work.out[place] = 0

    def _crop(
        self,
        work: DecodingWork,
        place: int,
        data: bytes,
        size: tuple[int, int],
        region: tuple[int, ...],
        flips: tuple[bool, bool],
    ) -> None:
        out, channels, began = work.out[place], self.options.files.channels, time.perf_counter()
        top, left, height, width = region
        is_inside = top >= 0 and left >= 0 and top + height <= size[0] and left + width <= size[1]
        box: tuple[int, int, float, float] = (top, left, height, width)
        if is_inside and (found := decode_region(data, channels, (top, left, height, width), out.shape[:2], size)):
            pixels, box = found
        else:
            pixels = decode_image(data, channels)
        decoded = time.perf_counter()
        cut(pixels, *box, *flips, out, int(self.geometry.fill))
        work.decode_s += decoded - began
        work.augment_s += time.perf_counter() - decoded


def crop_each(rows: Iterable[Pixels], geometry: Geometry, draws: Draws, out: Pixels) -> None:
    """Crop one box out of each row, `uint8 [H, W, C]` of one shape, into `out`, `uint8 [B, h, w, C]`."""
    rows = list(rows)
    sizes = np.broadcast_to(np.array(rows[0].shape[:2], np.int64), (len(rows), 2))
    fill = int(geometry.fill)
    boxes = geometry.boxes(sizes, draws).rows()
    for row, slot, box in zip(rows, out, boxes, strict=True):
        cut(row, *box, slot, fill)


def _encoded(dataset: ImageDataset, index: int, bad: BadSamples) -> bytes:
    try:
        return dataset.encoded(index)
    except Corrupt as error:
        # The CRC covers all fields, and only images have a blank value.
        if bad.on_bad == "raise" or (bad.on_bad == "blank" and set(dataset.fields) - {SAMPLES, LABELS}):
            raise
        raise BadImage("its bytes do not match their CRC32") from error


def row_shape_of(
    dataset: ImageDataset, files: ImageFiles, count: int, size: tuple[int, int] | None, bad: BadSamples
) -> tuple[int, int, int] | None:
    """Return the shape of decoded images, from `size` or else the first valid image; None for an empty dataset.

    If no image is valid, the shape is that of a blank image.

    Raises:
        BadImage: with the name of a bad sample before the first valid one, if `on_bad` is `"raise"`.
    """
    for index in range(count if size is None else 0):
        try:
            data = _encoded(dataset, index, bad)
            if not data and files.blank is not None:
                continue
            size = image_size(data)
            break
        except BadImage as error:
            bad.add(dataset.name_of(index), error)
    if size is None and count:
        size = files.blank or (1, 1)
    return None if size is None else (*size, files.channels)

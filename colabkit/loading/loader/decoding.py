"""Image files become rows of a batch: decoded, brought to size or cut, kept where there is room."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, LoaderMeters, cannot
from colabkit.loading.augment.cutting import cut
from colabkit.loading.augment.draws import Draws
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.loader.feeds import ImageSet
from colabkit.loading.loader.kept import KeptRows
from colabkit.loading.loader.reading import ReadingAhead
from colabkit.loading.loader.workers import Group
from colabkit.packs import OtherSize, Region, decode_image, decode_region, image_size, row_decoder

logger = logging.getLogger("colabkit")

OnBad: TypeAlias = Literal["raise", "skip", "blank"]
Pixels = npt.NDArray[np.uint8]

_LISTED = 1000
_NEXT_STEP = "Remove or repair it, or use on_bad='skip'"


@dataclass
class BadSamples:
    """Image files that could not be decoded, and what is done about them.

    Attributes:
        on_bad: `"raise"` an error, `"skip"` them, or show a `"blank"` image.
        found: name and reason of each, the first 1,000.
    """

    on_bad: OnBad = "raise"
    found: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, error: BadImage, next_step: str) -> None:
        """Raise the error of a bad sample, or note it.

        Raises:
            BadImage: naming the sample, if bad ones are errors; always if it is a good image of another size.
        """
        if isinstance(error, OtherSize):
            next_step = "Give size=, or a transform that cuts to one size"
            raise BadImage(cannot(f"decode {name}", str(error), "images of one size", next_step)) from error
        if self.on_bad == "raise":
            raise BadImage(cannot(f"decode {name}", str(error), "an image", next_step)) from error
        if name not in self.found and len(self.found) < _LISTED:
            self.found[name] = str(error)
            what = "left out" if self.on_bad == "skip" else "blank"
            logger.warning("%s cannot be decoded (%s) and is %s", name, error, what)


class ImageDecoding:
    """Decodes the samples of batches.

    Args:
        files: the images.
        row_shape: `[H, W, C]` that every image is brought to; None if each has its own size, and is cut by `geometry`.
        fit: whether images have to be scaled and cut to the row's shape; else one of another size is bad.
        geometry: cut out of each image; None takes it whole.
        kept: where rows are kept, if they are.
        ahead: reads the files of a far source; None for files that are at hand.
        bad: what is done about bad ones.
        meters: count the parts `read`, `decode` and `augment`.

    Attributes:
        out_shape: `[h, w, C]` of a sample as it comes out.
    """

    def __init__(
        self,
        files: ImageSet,
        row_shape: tuple[int, int, int] | None,
        fit: bool,
        geometry: Geometry | None,
        kept: KeptRows | None,
        ahead: ReadingAhead | None,
        bad: BadSamples,
        meters: LoaderMeters,
    ) -> None:
        about = files.image_files()
        assert about is not None
        self._files = files
        self._channels = about.channels
        self._has_blanks = about.blank is not None
        self._row_shape = row_shape
        self._geometry = geometry
        self._kept = kept
        self._ahead = ahead
        self._bad = bad
        self._meters = meters
        self._decode = None if row_shape is None else row_decoder(row_shape, fit)
        size = row_shape[:2] if geometry is None or geometry.size is None else geometry.size  # type: ignore[index]
        self.out_shape: tuple[int, int, int] = (size[0], size[1], self._channels)

    def fill(self, group: Group, start: int, stop: int, draws: Draws) -> None:
        """Fill in the samples from `start` to `stop` of a group.

        Raises:
            BadImage: naming a sample that cannot be decoded, if that is an error.
        """
        work = _Work(group, start, stop, group.values[0].permute(0, 2, 3, 1).numpy()[start:stop])
        cpu_began = time.thread_time()
        if self._row_shape is None:
            self._fill_from_files(work, draws)
        else:
            self._fill_from_rows(work, self._row_shape, draws)
        if self._ahead is None:
            self._meters.add("read", work.read, work.read_bytes, work.read_s)
        waited_s = 0.0 if self._ahead is None else work.read_s
        decoded_bytes, cpu_s = work.read * prod(self.out_shape), time.thread_time() - cpu_began  # of all that is done
        self._meters.add("decode", work.read, decoded_bytes, work.decode_s, waited_s, cpu_s=cpu_s)
        if self._geometry is not None:
            self._meters.add("augment", stop - start, work.out.nbytes, work.augment_s)

    def _fill_from_rows(self, work: _Work, shape: tuple[int, int, int], draws: Draws) -> None:
        """Decode to rows of one shape, or take those that are kept, and cut the wanted part out of each."""
        rows = [self._row(work, index, shape) for index in range(len(work.out))]
        began = time.perf_counter()
        if self._geometry is not None:
            cut_rows(rows, self._geometry, draws, work.out)
        else:
            for row, out in zip(rows, work.out, strict=True):
                if row is not out:
                    out[...] = row
        work.augment_s += time.perf_counter() - began

    def _row(self, work: _Work, index: int, shape: tuple[int, int, int]) -> Pixels:
        """Return the row of a sample: one that is kept, else a new one, which is kept if there is room."""
        number, kept = work.number(index), self._kept
        if kept is not None and (row := kept.row(number)) is not None:
            if self._ahead is not None:
                self._ahead.forget(work.position(index))
            return row
        data = self._read(work, index)
        if data is None:
            assert kept is not None
            kept_meanwhile = kept.row(number)
            assert kept_meanwhile is not None
            return kept_meanwhile
        place = None if kept is None else kept.claim()
        if place is not None:
            assert kept is not None
            row = kept.at(place)
        else:
            row = work.out[index] if self._geometry is None else np.empty(shape, np.uint8)
        began = time.perf_counter()
        is_good = False
        try:
            if self._is_blank(data):
                row[...] = 0
            else:
                assert self._decode is not None
                self._decode(data, row)
            is_good = True
        except BadImage as error:
            self._note(work, index, error)
            row[...] = 0
            is_good = self._bad.on_bad == "blank"
        finally:
            if place is not None:
                assert kept is not None
                kept.settle(place, number) if is_good else kept.release(place)
        work.decode_s += time.perf_counter() - began
        if place is None:
            return row
        assert kept is not None
        settled = kept.row(number)  # perhaps another thread's: then the place is free again, as it is after a bad one
        return np.zeros(shape, np.uint8) if settled is None else settled

    def _fill_from_files(self, work: _Work, draws: Draws) -> None:
        """Cut the wanted part out of images of any size, each decoded no further than needed."""
        assert self._geometry is not None
        files: dict[int, tuple[bytes, tuple[int, int]]] = {}
        for index in range(len(work.out)):
            data = self._read(work, index)
            assert data is not None  # since nothing is kept here
            if self._is_blank(data):
                continue
            try:
                files[index] = data, image_size(data)
            except BadImage as error:
                self._note(work, index, error)
        boxes = None
        if files:
            sizes = np.array([size for _, size in files.values()], np.int64)
            boxes = self._geometry.boxes(sizes, replace(draws, positions=draws.positions[list(files)])).rows()
        for index in range(len(work.out)):
            if index not in files:
                work.out[index] = 0
                continue
            assert boxes is not None
            top, left, height, width, mirrored = next(boxes)
            try:
                self._cut_from_file(work, index, *files[index], (top, left, height, width), mirrored)
            except BadImage as error:
                self._note(work, index, error)
                work.out[index] = 0

    def _cut_from_file(
        self, work: _Work, index: int, data: bytes, size: tuple[int, int], region: Region, mirrored: bool
    ) -> None:
        assert self._geometry is not None
        out, began = work.out[index], time.perf_counter()
        top, left, height, width = region
        is_inside = top >= 0 and left >= 0 and top + height <= size[0] and left + width <= size[1]
        found = decode_region(data, self._channels, region, out.shape[:2], size) if is_inside else None
        pixels, region = found or (decode_image(data, self._channels), region)
        decoded = time.perf_counter()
        cut(pixels, *region, mirrored, out, int(self._geometry.fill))
        work.decode_s += decoded - began
        work.augment_s += time.perf_counter() - decoded

    def _read(self, work: _Work, index: int) -> bytes | None:
        """Return the bytes of a sample's file; None if its row was kept meanwhile."""
        began = time.perf_counter()
        data: bytes | None
        if self._ahead is not None:
            data = self._ahead.fetch(work.position(index))
        else:
            data = self._files.encoded(work.number(index))
        work.read_s += time.perf_counter() - began
        if data is None:
            return None
        work.read_bytes += len(data)
        work.read += 1
        return data

    def _is_blank(self, data: bytes) -> bool:
        return not data and self._has_blanks

    def _note(self, work: _Work, index: int, error: BadImage) -> None:
        self._bad.note(self._files.name_of(work.number(index)), error, _NEXT_STEP)
        if self._bad.on_bad == "skip":
            with work.group.lock:
                work.group.bad.append(work.start + index)


@dataclass
class _Work:
    """A piece of a group: which samples, where they go, and what it took."""

    group: Group
    start: int
    stop: int
    out: Pixels
    read: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    augment_s: float = 0.0

    def number(self, index: int) -> int:
        return self.group.portion.numbers.item(self.start + index)

    def position(self, index: int) -> int:
        return self.group.portion.positions.item(self.start + index)


def cut_rows(rows: Iterable[Pixels], geometry: Geometry, draws: Draws, out: Pixels) -> None:
    """Cut a box out of each of some rows of one shape.

    Args:
        rows: `uint8 [H, W, C]` each.
        geometry: says where.
        draws: the random numbers of the samples.
        out: `uint8 [B, h, w, C]`.
    """
    rows = list(rows)
    sizes = np.broadcast_to(np.array(rows[0].shape[:2], np.int64), (len(rows), 2))
    boxes = geometry.boxes(sizes, draws)
    places = zip(boxes.top.tolist(), boxes.left.tolist(), boxes.height.tolist(), boxes.width.tolist(), strict=True)
    for row, slot, place, mirrored in zip(rows, out, places, boxes.mirrored.tolist(), strict=True):
        cut(row, *place, mirrored, slot, int(geometry.fill))


def row_shape_of(
    files: ImageSet, count: int, size: tuple[int, int] | None, bad: BadSamples
) -> tuple[int, int, int] | None:
    """Return the shape that decoded images have: the one asked for, or that of the first good one; None if none is.

    Raises:
        BadImage: naming a sample before it, if bad ones are errors.
    """
    about = files.image_files()
    assert about is not None
    for number in range(count if size is None else 0):
        data = files.encoded(number)
        if not data and about.blank is not None:
            continue
        try:
            size = image_size(data)
            break
        except BadImage as error:
            bad.note(files.name_of(number), error, _NEXT_STEP)
    if size is None and count:
        size = about.blank or (1, 1)
    return None if size is None else (*size, about.channels)

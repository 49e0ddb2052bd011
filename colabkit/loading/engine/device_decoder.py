"""Decode JPEG files on a GPU with torchvision, which calls nvJPEG.

Worker threads read the files. They also decode files other than grayscale and YCbCr JPEGs, on the CPU. The thread that
finishes a group decodes its JPEGs on the GPU, turns them upright, and cuts and resizes them into one tensor. If nvJPEG
fails, each image is decoded alone, and on the CPU if nvJPEG fails again.

Values differ slightly from those of libjpeg. Images decoded on the GPU are therefore never cached together with others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import BadImage, LoaderMeters
from colabkit.loading.augment.cutting import Boxes, resize_each
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.batches import Batch, BatchGroup
from colabkit.loading.engine.device import DeviceTransfer, send
from colabkit.loading.engine.image_decoders import DecodingWork, ImageDecoder, ImageOptions
from colabkit.loading.engine.options import LoaderOptions
from colabkit.packs import OtherSize, Pixels, decode_image, describe_sizes, image_size, read_plain_header

logger = logging.getLogger("colabkit")

# With two streams, one thread decodes on the GPU while another one resizes.
_STREAMS = 2
# Maximum size in bytes of the decoded images that are in GPU memory at the same time, for each stream.
_DECODED_BYTES = 256 << 20
_NO_PIXELS = np.empty((0, 0, 0, 0), np.uint8)

EncodedOrPixels: TypeAlias = tuple[bytes | Pixels, int]
"""A file to decode on the GPU, or an image that is decoded, with its orientation from 1 to 8."""


def device_decoder(
    images: ImageOptions, geometry: Geometry | None, ahead: Any, counts: LoaderMeters, options: LoaderOptions
) -> DeviceDecoder:
    """Return a decoder for one epoch that decodes on the device of the batches."""
    return DeviceDecoder(images, geometry, ahead, counts, options.device, bool(options.channels_last))


@dataclass(eq=False)
class DeviceDecoder(ImageDecoder):
    """A decoder of JPEG files on a GPU; `fill` reads files, and `finish` decodes the images of a group.

    Before `finish`, the first field of a group is a list with an `EncodedOrPixels` for each image, or None for a blank
    or bad one.
    """

    device: torch.device
    is_channels_last: bool
    _is_reported: bool = False

    def fill(self, group: BatchGroup, start: int, stop: int, draws: Draws) -> None:
        """Read the files from `start` to `stop` of a group; decode those that are not grayscale or YCbCr JPEGs.

        Raises:
            BadImage: with the name of a sample that cannot be decoded, if `on_bad` is `"raise"`.
        """
        work = DecodingWork(group, start, stop, _NO_PIXELS)
        cpu_began = time.thread_time()
        for place in range(stop - start):
            try:
                group.values[0][start + place] = self._file(work, place)
            except BadImage as error:
                self._add_bad(work, place, error)
        self._count(work, cpu_began)

    def _file(self, work: DecodingWork, place: int) -> EncodedOrPixels | None:
        data = self._read(work, place) or b""
        if self._is_blank(data):
            return None
        wanted = None if self.options.row_shape is None else self.options.row_shape[:2]
        header, pixels = read_plain_header(data), None
        if header is None:
            began = time.perf_counter()
            pixels = decode_image(data, self.options.files.channels, wanted if self.options.is_resized else None)
            work.decode_s += time.perf_counter() - began
        size = image_size(data) if pixels is None else (pixels.shape[0], pixels.shape[1])
        if wanted is not None and not self.options.is_resized and size != wanted:
            raise OtherSize(describe_sizes(size, wanted))
        return (data, 1 if header is None else header[3]) if pixels is None else (pixels, 1)

    def finish(self, group: BatchGroup) -> None:
        """Replace the first field of a group with its images on the device, `uint8 [B, C, h, w]`.

        Raises:
            BadImage: with the name of a sample that cannot be decoded, if `on_bad` is `"raise"`.
        """
        began, cpu_began = time.perf_counter(), time.thread_time()
        files: list[EncodedOrPixels | None] = group.values[0]
        places = [place for place, file in enumerate(files) if file is not None]
        sizes = np.array([_size_of(files[place]) for place in places], np.int64).reshape(-1, 2)
        boxes = self._boxes(sizes, replace(group.draws, positions=group.draws.positions[places]))
        self._move_boxes(group, places, Boxes(*cast("Any", boxes)))
        channels, (height, width) = self.options.files.channels, self._size
        outside = self.geometry.fill if self.geometry is not None else 0
        layout = torch.channels_last if self.is_channels_last else torch.contiguous_format
        with self.on_stream() as synchronize:
            shape = len(files), channels, height, width
            images = torch.empty(shape, dtype=torch.uint8, device=self.device, memory_format=layout).zero_()
            for start, stop in _chunks(sizes.prod(1) * channels):
                chosen = Boxes(*cast("Any", [column[start:stop] for column in boxes]))
                decoded = self._decode(group, places[start:stop], sizes[start:stop])
                made = torch.tensor(places[start:stop], device=self.device)
                images[made] = resize_each(
                    decoded, chosen, (height, width), fill=outside, is_isolated=self.geometry is not None
                )
                del decoded
                synchronize()
        group.values[0] = images
        seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
        self.counts.add("decode", 0, images.nbytes, seconds, cpu_s=cpu_s)

    @property
    def _size(self) -> tuple[int, int]:
        if self.geometry is not None and self.geometry.size is not None:
            return self.geometry.size
        assert self.options.row_shape is not None
        return self.options.row_shape[:2]

    def _boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays for `Boxes`; without a crop, boxes have the aspect ratio of the result."""
        if self.geometry is not None:
            boxes = self.geometry.boxes(sizes, draws)
            return boxes.top, boxes.left, boxes.height, boxes.width, boxes.mirrored, boxes.upside_down
        height, width = self._size
        tall, wide = sizes.astype(np.float64).T
        is_wide = wide * height >= tall * width
        box_tall = np.where(is_wide, tall, wide * height / width)
        box_wide = np.where(is_wide, tall * width / height, wide)
        upright = np.zeros(len(sizes), np.bool_)
        return (tall - box_tall) / 2, (wide - box_wide) / 2, box_tall, box_wide, upright, upright

    def _decode(self, group: BatchGroup, places: Sequence[int], sizes: npt.NDArray[np.int64]) -> list[Tensor]:
        """Return upright images on the device; a bad sample becomes a black image."""
        files = [group.values[0][place] for place in places]
        encoded = [data for data, _ in files if isinstance(data, bytes)]
        found = self._decode_jpegs(encoded)
        if self.device.type == "cuda" and any(image is None for image in found):
            # torchvision has freed the memory of an image that failed, but nvJPEG may still write to it.
            torch.cuda.synchronize(self.device)
        decoded = iter(found)
        work = DecodingWork(group, 0, len(group.plan.indices), _NO_PIXELS)
        images = []
        for place, size, (data, orientation) in zip(places, sizes.tolist(), files, strict=True):
            image = next(decoded) if isinstance(data, bytes) else self._moved(data)
            if image is not None:
                image = turn_image(image, orientation)
            if image is None or [*image.shape[1:]] != size:
                image = self._moved(self._decode_again(work, place, data, size))
            images.append(image)
        return images

    def _decode_again(self, work: DecodingWork, place: int, data: bytes | Pixels, size: list[int]) -> Pixels:
        try:
            pixels = decode_image(cast("bytes", data), self.options.files.channels)
            if [*pixels.shape[:2]] == size:
                return pixels
            raise BadImage("its header and its pixels differ in size")
        except BadImage as error:
            self._add_bad(work, place, error)
            return np.zeros((*size, self.options.files.channels), np.uint8)

    def _decode_jpegs(self, files: list[bytes]) -> list[Tensor | None]:
        """Return the decoded images before they are turned upright, or None for those that nvJPEG cannot decode."""
        if not files:
            return []
        try:
            return [*decode_jpegs(files, self.options.files.channels, self.device)]
        except (RuntimeError, ValueError) as error:
            # The error does not name the image, and no other image is returned.
            if len(files) > 1:
                return [image for file in files for image in self._decode_jpegs([file])]
            if not self._is_reported:
                self._is_reported = True
                reason = str(error).partition("\n")[0]
                logger.warning("a JPEG file cannot be decoded on the GPU (%s), so the CPU decodes such files", reason)
            return [None]

    def _moved(self, pixels: Pixels) -> Tensor:
        # Copy read-only memory, because torch would warn about it.
        writable = pixels if pixels.flags.writeable else pixels.copy()
        return torch.from_numpy(writable).permute(2, 0, 1).to(self.device)

    def on_stream(self) -> AbstractContextManager[Callable[[], None]]:
        """Return the context of `idle_stream`."""
        return idle_stream(self.device)


@contextmanager
def idle_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """Run the block in a stream that no other thread uses, and wait for its work at the end.

    `with` returns a function that waits for the work so far. torchvision takes memory for images from the pool of the
    current stream, but writes to it in another stream, which does not wait for the current one. Therefore, all work
    that may still read that memory has to end before torchvision is called.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    idle = _idle_streams(device)
    stream = idle.get()
    synchronize = partial(_synchronize, stream)
    try:
        # Without `device`, leaving the stream would create a context on the GPU that was current before.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                yield synchronize
            finally:
                synchronize()
    finally:
        idle.put(stream)


def decode_jpegs(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
    """Decode JPEG files on a device with torchvision, ignoring their orientation."""
    io = import_module("torchvision.io")
    # Copy the bytes, because torch warns about read-only memory.
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
    mode = io.ImageReadMode.RGB if channels == 3 else io.ImageReadMode.GRAY
    images: list[Tensor] = io.decode_jpeg(encoded, mode=mode, device=device)
    return images


def turn_image(image: Tensor, orientation: int) -> Tensor:
    """Return an image `[C, H, W]` rotated and flipped upright according to its EXIF orientation."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    flipped = [side for side, turned in ((2, (2, 3, 6, 7)), (1, (3, 4, 7, 8))) if orientation in turned]
    return image.flip(flipped) if flipped else image


def _size_of(file: EncodedOrPixels | None) -> tuple[int, int]:
    """Return the upright height and width of an image."""
    assert file is not None
    data = file[0]
    return image_size(data) if isinstance(data, bytes) else (data.shape[0], data.shape[1])


def _chunks(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each run of images with at most `_DECODED_BYTES` in total, or of one image."""
    start = total = 0
    for place, size in enumerate(sizes.tolist()):
        if place > start and total + size > _DECODED_BYTES:
            yield start, place
            start, total = place, 0
        total += size
    if len(sizes):
        yield start, len(sizes)


@cache
def _idle_streams(device: torch.device) -> SimpleQueue[torch.cuda.Stream]:
    streams: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for _ in range(_STREAMS):
        streams.put(torch.cuda.Stream(device))
    return streams


def _synchronize(stream: torch.cuda.Stream) -> None:
    # With `blocking=True`, the thread sleeps; otherwise it would keep a CPU core busy.
    done = torch.cuda.Event(blocking=True)
    done.record(stream)
    done.synchronize()


@dataclass(frozen=True)
class _DeviceImages:
    """Images of a batch that are already on the device, in an object that `send` does not copy, unlike a tensor."""

    images: Tensor

    def in_current_stream(self) -> Tensor:
        """Return the images for use in the current stream."""
        self.images.record_stream(torch.cuda.current_stream(self.images.device))
        return self.images


def send_decoded(
    transfer: DeviceTransfer,
    groups: Iterable[tuple[list[Batch], Tensor | None]],
    is_enough: Callable[[int], bool],
) -> Generator[Batch, None, None]:
    """Yield batches on the device, like `send`, if their images are already there."""
    with closing(send(transfer, map(_hide_images, groups), is_enough)) as batches:
        yield from map(_show_images, batches)


def _hide_images(group: tuple[list[Batch], Tensor | None]) -> tuple[list[Batch], Tensor | None]:
    for batch in group[0]:
        batch.values[0] = _DeviceImages(batch.values[0])
    return group


def _show_images(batch: Batch) -> Batch:
    batch.values[0] = batch.values[0].in_current_stream()
    return batch

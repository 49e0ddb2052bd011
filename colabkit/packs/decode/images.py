"""Image files become uint8 arrays, by the fastest decoder that gives Pillow's result; `.npy` files become arrays.

What comes out of an image, whatever the file holds:

- shape: `uint8 [H, W, C]`, C-contiguous, with C = 3 (RGB) or 1 (luminance);
- grey files: repeated to RGB; RGB to luminance: a JPEG's own, ITU-R 601 for other formats;
- orientation: turned upright as EXIF asks, or XMP where EXIF is silent; one that cannot be read counts as none;
- transparency: dropped, not blended, so the colours beneath it show;
- palettes: looked up; black and white: 0 and 255;
- CMYK and YCCK: converted by Pillow, a JPEG's values always taken as inverted, as Adobe's are; no profile is applied;
- 16 bits: the upper 8 are kept; 32 bits: as 16, after values beyond 0 to 65,535 are cut; floating point: an error;
- animations and files of several pages: the first one;
- size: scaled to cover it and cut around the centre, bilinear with antialiasing: what `ImageOps.fit` makes of the
  upright image, within 1 of 255 if it had to be turned; a JPEG of at least 4 times the size is divided by 2, 4 or 8
  while it is decoded, which changes a value by 0.5 of 255 on average (`pixels.KEPT` has the measurement);
- pixels: more than 89,478,485, Pillow's bound on decompression bombs, are an error before they are decoded;
- JPEG: within 2 of 255 of Pillow; bytes behind the image are ignored; a file cut short is an error, and flaws that
  libjpeg only warns of are judged by Pillow, which passes over them;
- formats: BMP, GIF, JPEG, PNG, PPM, TIFF, WebP; nothing that would run a program.

JPEG files of one or three components go to simplejpeg, torchcodec or torchvision (`jpeg`), the rest to Pillow.
All functions may be called from many threads at once, and before and after a fork.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from colabkit.foundation import BadImage
from colabkit.packs.decode.jpeg import SOS, find_decoder, read_header
from colabkit.packs.decode.pixels import (
    FACTORS,
    Data,
    OtherSize,
    Pixels,
    Size,
    check_pixels,
    check_with_pillow,
    choose_factor,
    decode_with_pillow,
    describe_sizes,
    divide_size,
    fit_pixels,
    measure_with_pillow,
    turn_pixels,
    turn_size,
)

Region = tuple[int, int, int, int]
"""Top, left, height and width of a box."""

# Of the JPEG files that the fast decoders take: grey, YCbCr and RGB, not CMYK and YCCK.
_COMPONENTS = (1, 3)
# What the fast decoders raise: simplejpeg the former, torch the latter.
_FLAWS = (ValueError, RuntimeError)
# Fewer rows below a box are not worth the copy of the file.
_SPARED_ROWS = 48
# The tallest block of rows that is coded together, by 4:1:0 subsampling.
_MCU_ROWS = 32
_BASELINE = 0xFFC0
_END = b"\xff\xd9"


def decode_image(data: Data, channels: int = 3, size: Size | None = None) -> Pixels:
    """Return the image in `data` as `uint8 [H, W, channels]`, C-contiguous, perhaps read-only.

    Args:
        data: the bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        size: height and width to scale and cut to; None keeps the image's own.

    Raises:
        BadImage: if the bytes are no image, cut short, or have too many pixels. The message is the reason alone; the
            caller knows the file's name.
    """
    pixels, stored, orientation = _decode(data, channels, size)
    if size is not None:
        pixels = fit_pixels(pixels, stored, orientation, size)
    return pixels if orientation == 1 else turn_pixels(pixels, orientation)


def row_decoder(shape: tuple[int, ...], fit: bool) -> Callable[[Data, Pixels], None]:
    """Return a function that fills a row of a batch with an image; a JPEG that needs no change is decoded in place.

    It takes the bytes of an image file and an array `uint8` of `shape`, `[H, W, C]` with C = 3 (RGB) or 1 (luminance),
    which it does not check: that counts for tiny files. It raises `BadImage` as `decode_image` does, and without `fit`
    `OtherSize` for images of another size; the row then holds anything.
    """
    height, width, channels = shape
    size = height, width
    upright_as_wanted = {(height, width, components, 1) for components in _COMPONENTS}
    fast = find_decoder()
    decode_fast = None if fast is None else fast.decode_into

    def decode(data: Data, out: Pixels) -> None:
        header = read_header(data)
        if header in upright_as_wanted:
            check_pixels(height, width)
            if decode_fast is not None:
                try:
                    decode_fast(data, out)
                    return
                except _FLAWS:
                    pass  # Pillow says what is wrong, or manages
        elif header is not None and not fit and turn_size(header[:2], header[3]) != size:
            raise OtherSize(describe_sizes(turn_size(header[:2], header[3]), size))
        pixels = decode_image(data, channels, size if fit else None)
        if pixels.shape != shape:
            raise OtherSize(describe_sizes((pixels.shape[0], pixels.shape[1]), size))
        out[...] = pixels

    return decode


def image_size(data: Data) -> Size:
    """Return the upright height and width of an image, from its header alone.

    The first bytes of a file are enough where the format allows: BMP, GIF, PNG, PPM, and JPEG as long as the whole
    header is there, which with a profile and a preview may take hundreds of kilobytes. WebP and TIFF need the whole
    file, and so does an orientation that stands at the end of a PNG.

    Raises:
        BadImage: as `decode_image`, as far as a header shows it.
    """
    header = read_header(data)
    if header is None:
        return measure_with_pillow(data)
    height, width, _, orientation = header
    check_pixels(height, width)
    return turn_size((height, width), orientation)


def check_image(data: Data) -> Size:
    """Return the upright height and width of an image that `decode_image` takes, at the least cost.

    A JPEG is decoded at an eighth of its sides, which reads all of its data; other formats are decoded in full.

    Raises:
        BadImage: as `decode_image`.
    """
    header = read_header(data)
    fast = find_decoder()
    if header is not None and fast is not None and fast.decode_scaled is not None and header[2] in _COMPONENTS:
        height, width, _, orientation = header
        check_pixels(height, width)
        try:
            fast.decode_scaled(data, 1, divide_size((height, width), 8))
            return turn_size((height, width), orientation)
        except _FLAWS:
            pass  # Pillow says what is wrong, or manages
    return check_with_pillow(data)


def decode_array(data: Data) -> npt.NDArray[Any]:
    """Return the array in a `.npy` file of format 1 or 2; it shares the memory of `data`.

    Raises:
        BadImage: if the bytes are no such file, hold Python objects, or are more or fewer than the header says. The
            message is the reason alone; the caller knows the file's name.
    """
    if not data:
        raise BadImage("an empty file")
    if data[:4] == b"PK\x03\x04":
        raise BadImage("an archive of arrays (.npz), where one array (.npy) is needed")
    if data[:6] != b"\x93NUMPY":
        raise BadImage(f"no array; it begins with {bytes(data[:8])!r}")
    head = io.BytesIO(bytes(data[: 64 * 1024]))
    try:
        version = npy.read_magic(head)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise BadImage(f"an array of format {version[0]}.{version[1]}, where 1.0 or 2.0 is needed")
        shape, is_fortran, dtype = read(head)
        if dtype.hasobject:
            raise BadImage("an array of Python objects, which only pickle could read")
        if dtype.itemsize == 0:
            raise BadImage("an array of elements without bytes")
        if any(side < 0 for side in shape):
            raise BadImage(f"a damaged header of an array: shape {shape}")
        needed, there = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
        if needed != there:
            raise BadImage(f"{there} bytes of values, where {dtype} {list(shape)} has {needed}")
        flat: npt.NDArray[Any] = np.ndarray(math.prod(shape), dtype, buffer=data, offset=head.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except BadImage:
        raise
    except Exception as error:  # NumPy evaluates the header as a literal, which raises anything
        raise BadImage(f"a damaged header of an array: {error}") from error


def decode_region(data: Data, channels: int, region: Region, wanted: Size, whole: Size) -> tuple[Pixels, Region] | None:
    """Return pixels that hold a box of a JPEG, and where the box lies in them; None where all has to be decoded.

    Rows below the box are left out by giving the decoder a lower image: what it then decodes is, value by value, the
    top of the whole one. If the box is at least twice the wanted size, the image is divided by 2, 4 or 8 while it is
    decoded, without the margin of `pixels.KEPT`, since a random box is seen once. The edges of the box then move to
    whole pixels of the divided image: values of smooth photos differ from those of the whole one by 1 of 255 on
    average, of photos with grain by 2, at most by 20.

    Args:
        data: the bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        region: the box, inside the image of the upright size `whole`.
        wanted: height and width that the box will be resized to.
        whole: height and width of the image, upright.
    """
    fast = find_decoder()
    header = read_header(data)
    if fast is None or header is None or header[3] != 1 or header[2] not in _COMPONENTS:
        return None
    top, _, height, width = region
    factor = next((each for each in FACTORS if height >= each * wanted[0] and width >= each * wanted[1]), 1)
    try:
        if factor > 1 and fast.decode_scaled is not None:
            least = divide_size(whole, factor)
            pixels = fast.decode_scaled(data, channels, least)
            if pixels.shape[:2] == least:
                return pixels, _divide_region(region, factor, least)
            return None
        rows = -(-(top + height) // _MCU_ROWS) * _MCU_ROWS + _MCU_ROWS  # upsampled chroma looks at the next row
        if whole[0] - rows >= _SPARED_ROWS and fast.decode_top is not None and (lower := _lower_frame(data, rows)):
            top_rows = np.empty((rows, whole[1], channels), np.uint8)
            fast.decode_top(memoryview(lower), top_rows)
            return top_rows, region
    except (*_FLAWS, struct.error):
        return None  # Pillow says what is wrong, or manages
    return None


def _decode(data: Data, channels: int, size: Size | None) -> tuple[Pixels, Size, int]:
    """Return the image, not yet turned, perhaps scaled, with its stored height and width and its orientation."""
    header = read_header(data)
    if header is not None:
        height, width, components, orientation = header
        stored = height, width
        check_pixels(height, width)
        fast = find_decoder()
        if fast is not None and components in _COMPONENTS and (orientation == 1 or not fast.turns):
            factor = 1 if size is None else choose_factor(stored, orientation, size)
            try:
                if factor == 1:
                    return fast.decode(data, channels), stored, orientation
                if fast.decode_scaled is not None:
                    return fast.decode_scaled(data, channels, divide_size(stored, factor)), stored, orientation
            except _FLAWS:
                pass  # Pillow says what is wrong, or manages
    return decode_with_pillow(data, channels, size)


def _divide_region(region: Region, factor: int, whole: Size) -> Region:
    """Return a box in the coordinates of an image that was divided: each edge at the nearest pixel's."""
    top, left = min(round(region[0] / factor), whole[0] - 1), min(round(region[1] / factor), whole[1] - 1)
    bottom, right = round((region[0] + region[2]) / factor), round((region[1] + region[3]) / factor)
    return top, left, max(1, min(bottom, whole[0]) - top), max(1, min(right, whole[1]) - left)


def _lower_frame(data: Data, rows: int) -> bytearray | None:
    """Return a baseline JPEG that says it has fewer rows; None if it is another kind of file, or is cut short."""
    if not bytes(data[-16:]).rstrip(b"\0").endswith(_END):
        return None
    at = 2
    while True:
        marker, length = struct.unpack_from(">HH", data, at)
        if marker == _BASELINE:
            break
        if marker == SOS or (0xFFC1 <= marker <= 0xFFCF and marker not in (0xFFC4, 0xFFC8, 0xFFCC)):
            return None
        at += 2 + length
    lower = bytearray(data)
    struct.pack_into(">H", lower, at + 5, rows)
    return lower

"""Decodes images with the fastest decoder that matches Pillow, and loads `.npy` files.

Every image is decoded as follows:

- Shape: `uint8 [H, W, C]`, C-contiguous, with C = 3 (RGB) or 1 (luminance).
- Grayscale: repeated to RGB if C = 3. RGB to luminance: the luminance stored in a JPEG, ITU-R 601 for other formats.
- Orientation: rotated and flipped upright according to EXIF, or XMP if EXIF has none; unreadable values are ignored.
- Transparency: dropped without blending, so the hidden colors become visible.
- Palettes: looked up. Black and white: 0 and 255.
- CMYK and YCCK: converted by Pillow without color profiles; JPEG values are always treated as inverted, like Adobe's.
- 16-bit: the upper 8 bits are kept. 32-bit: clipped to 0 to 65,535, then treated as 16-bit. Floating point: an error.
- Animations and multi-page files: the first image.
- Size: scaled to cover `size` and cropped around the center, bilinear with antialiasing. The result is that of
  `ImageOps.fit` on the upright image, within 1 of 255 if the image is rotated. A JPEG of at least 4 times the size is
  reduced by a factor of 2, 4 or 8 while it is decoded, which changes values by 0.5 of 255 on average (see
  `pixels.KEPT`).
- Pixel count: more than 89,478,485, Pillow's limit against decompression bombs, is an error before decoding.
- JPEG: values differ from Pillow's by at most 2 of 255. Bytes after the image are ignored and a truncated file is an
  error. If libjpeg only warns of a flaw, Pillow decodes the file and ignores the flaw.
- PNG: pixels that do not match the CRC of their chunk are an error.
- Formats: AVIF, BMP, GIF, JPEG, JPEG 2000, MPO, PNG, PPM, TGA, TIFF and WebP, and HEIC if pillow-heif is installed;
  formats that would run an external program are excluded. The content decides, not the extension.

JPEG files of one or three components are decoded by simplejpeg, torchcodec or torchvision (see `jpeg`), if installed.
Pillow decodes all other files, and those that the other decoder rejects. All functions can be called from many threads
at once, and before and after a fork.
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

from colabkit.foundation import BadImage, format_things
from colabkit.packs.decode.jpeg import SOS, find_decoder, has_end, read_header
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
DecodedRegion = tuple[int, int, float, float]
"""Top, left, height and width of a box."""

# Component counts that the fast decoders support: grayscale, YCbCr and RGB, but not CMYK and YCCK.
_COMPONENTS = (1, 3)
# Errors of the fast decoders: simplejpeg raises the first, torch the second.
_FLAWS = (ValueError, RuntimeError)
# Minimum number of rows below a box that are worth skipping, since skipping requires a copy of the file.
_SPARED_ROWS = 48
# Largest height of a coded block (MCU), reached with 4:1:0 subsampling.
_MCU_ROWS = 32
_BASELINE = 0xFFC0


def decode_image(data: Data, channels: int = 3, size: Size | None = None) -> Pixels:
    """Decode the image in `data` to `uint8 [H, W, channels]`, C-contiguous, possibly read-only.

    Args:
        data: bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        size: height and width to scale and crop to; None keeps the image's size.

    Returns:
        The pixels, upright.

    Raises:
        BadImage: if the bytes are not an image or are truncated, or the image has too many pixels. The message contains
            only the reason, because the caller knows the file's name.
    """
    pixels, stored, orientation = _decode(data, channels, size)
    if size is not None:
        pixels = fit_pixels(pixels, stored, orientation, size)
    return pixels if orientation == 1 else turn_pixels(pixels, orientation)


def row_decoder(shape: tuple[int, ...], fit: bool) -> Callable[[Data, Pixels], None]:
    """Return a function that decodes an image into a row of a batch.

    An upright JPEG of the row's size is decoded without a copy if simplejpeg is installed.

    The function takes the bytes of an image file and a `uint8` array of `shape`, `[H, W, C]` with C = 3 (RGB) or 1
    (luminance). It does not check the array, which saves time for tiny files. It raises `BadImage` like `decode_image`,
    and, without `fit`, also `OtherSize` for images of another size; after an error, the row's contents are undefined.

    Args:
        shape: shape of a row, `[H, W, C]`.
        fit: whether to scale and crop images of another size.
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
                    # Pillow may still decode the file; otherwise it describes the flaw.
                    pass
        elif header is not None and not fit and turn_size(header[:2], header[3]) != size:
            raise OtherSize(describe_sizes(turn_size(header[:2], header[3]), size))
        pixels = decode_image(data, channels, size if fit else None)
        if pixels.shape != shape:
            raise OtherSize(describe_sizes((pixels.shape[0], pixels.shape[1]), size))
        out[...] = pixels

    return decode


def image_size(data: Data) -> Size:
    """Return the upright height and width of an image, if possible from its header alone.

    For BMP, GIF, PNG, PPM and JPEG, the first bytes of a file are enough. A JPEG needs its entire header, which may
    take hundreds of kilobytes with a color profile and a preview. Other formats, such as WebP and TIFF, need the entire
    file, and so does a PNG whose orientation is stored at its end.

    Raises:
        BadImage: like `decode_image`, but only for problems that the header shows.
    """
    header = read_header(data)
    if header is None:
        return measure_with_pillow(data)
    height, width, _, orientation = header
    check_pixels(height, width)
    return turn_size((height, width), orientation)


def check_image(data: Data) -> Size:
    """Return the upright height and width of an image, after checking as cheaply as possible that it can be decoded.

    A JPEG is decoded at an eighth of its size, so all of its data is read; other formats are decoded in full.

    Raises:
        BadImage: like `decode_image`.
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
            # Pillow may still decode the file; otherwise it describes the flaw.
            pass
    return check_with_pillow(data)


def decode_array(data: Data) -> npt.NDArray[Any]:
    """Return the array in a `.npy` file of format 1 or 2; it shares the memory of `data`.

    Raises:
        BadImage: if the bytes are not a `.npy` file of format 1 or 2, hold Python objects, or do not match the size in
            the header. The message contains only the reason, because the caller knows the file's name.
    """
    if not data:
        raise BadImage("the file is empty")
    if data[:4] == b"PK\x03\x04":
        raise BadImage("the file is an archive of arrays (.npz) instead of one array (.npy)")
    if data[:6] != b"\x93NUMPY":
        raise BadImage(f"the file is not a .npy array (it starts with {bytes(data[:8])!r})")
    head = io.BytesIO(bytes(data[: 64 * 1024]))
    try:
        version = npy.read_magic(head)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise BadImage(f"the array has .npy format {version[0]}.{version[1]} instead of 1.0 or 2.0")
        shape, is_fortran, dtype = read(head)
        if dtype.hasobject:
            raise BadImage("the array contains Python objects, which only pickle can read")
        if dtype.itemsize == 0:
            raise BadImage(f"the array has dtype {dtype}, whose elements have 0 bytes")
        if any(side < 0 for side in shape):
            raise BadImage(f"the header of the array is damaged (shape {shape})")
        needed, there = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
        if needed != there:
            values = f"{format_things(there, 'byte')} of values"
            raise BadImage(f"the file has {values}, but {dtype} {list(shape)} has {needed:,}")
        flat: npt.NDArray[Any] = np.ndarray(math.prod(shape), dtype, buffer=data, offset=head.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except BadImage:
        raise
    except Exception as error:
        # NumPy evaluates the header as a Python literal, so any error is possible.
        raise BadImage(f"the header of the array is damaged ({error})") from error


def decode_region(
    data: Data, channels: int, region: Region, wanted: Size, whole: Size
) -> tuple[Pixels, DecodedRegion] | None:
    """Decode a part of a JPEG that contains a box; return its pixels and the box within them, or None.

    None means that the image must be decoded in full.

    Rows below the box are skipped by presenting a shorter image to the decoder; the decoded rows are identical to those
    of a full decode. The image is reduced while it is decoded by the largest factor of 8, 4 or 2 that leaves the box at
    least as large as requested and divides its top and left, without the margin of `pixels.KEPT` because a random box
    is seen only once. The size of the returned box may then be fractional. Compared to a full decode, the resized
    values of 200 photos differ by 1.1 to 1.4 of 255 on average, in the worst crop by 5.7 (bilinear with antialiasing to
    64, 96 and 128 pixels; OpenCV's INTER_AREA differs by 1.8 to 2.1).

    Args:
        data: bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        region: the box, inside the upright image of size `whole`.
        wanted: height and width to which the box will be resized.
        whole: height and width of the image, upright.
    """
    fast = find_decoder()
    header = read_header(data)
    if fast is None or header is None or header[3] != 1 or header[2] not in _COMPONENTS:
        return None
    top, left, height, width = region
    factors = [each for each in FACTORS if height >= each * wanted[0] and width >= each * wanted[1]]
    factor = next((each for each in factors if top % each == left % each == 0), 1)
    try:
        if factor > 1 and fast.decode_scaled is not None:
            least = divide_size(whole, factor)
            pixels = fast.decode_scaled(data, channels, least)
            if pixels.shape[:2] == least:
                return pixels, (top // factor, left // factor, height / factor, width / factor)
            return None
        # Include one more row of blocks, because chroma upsampling reads the next pixel row.
        rows = -(-(top + height) // _MCU_ROWS) * _MCU_ROWS + _MCU_ROWS
        if whole[0] - rows >= _SPARED_ROWS and fast.decode_top is not None and (lower := _lower_frame(data, rows)):
            top_rows = np.empty((rows, whole[1], channels), np.uint8)
            fast.decode_top(memoryview(lower), top_rows)
            return top_rows, region
    except (*_FLAWS, struct.error):
        # Return None, so that the caller uses `decode_image`, which falls back to Pillow.
        return None
    return None


def _decode(data: Data, channels: int, size: Size | None) -> tuple[Pixels, Size, int]:
    """Decode an image as `decode_with_pillow` does, if possible with a faster decoder."""
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
                # Pillow may still decode the file; otherwise it describes the flaw.
                pass
    return decode_with_pillow(data, channels, size)


def _lower_frame(data: Data, rows: int) -> bytearray | None:
    """Return a baseline JPEG with fewer rows in its header; None if the file is not baseline or is truncated."""
    if not has_end(data):
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

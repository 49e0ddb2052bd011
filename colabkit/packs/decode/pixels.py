"""Pixel limit, orientation and scaling, and decoding with Pillow for files that the fast decoders do not support."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, features

from colabkit.foundation import BadImage, FileFormat, find_format

Data = bytes | memoryview
Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]
"""Height and width."""

MAX_PIXELS = 89_478_485
"""Largest number of pixels of an image: above it, Pillow warns of a decompression bomb and colabkit raises an error."""

FACTORS = (8, 4, 2)
"""Factors by which libjpeg-turbo reduces height and width while decoding; others are slower than a full decode."""

KEPT = 2
"""An image reduced while decoding keeps at least this multiple of the requested size, and is then resized.

On 400 photos at 32, 64, 128 and 224 pixels, the result differs from a full decode by 0.4 to 0.5 of 255 on average, and
by 1.4 in the worst photo; 99.9% of the values differ by at most 6. Without this margin, these differences are 1.6, 4.9
and 23.
"""


# Formats that Pillow may decode, and among which it distinguishes itself.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Packages with HEIF decoders for Pillow; the second has no encoder.
_HEIF_PACKAGES = ("pillow_heif", "pi_heif")
# MPO is a JPEG with several images, as written by some phones.
_JPEG = ("JPEG", "MPO")
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_ORIENTATION = 0x0112
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
_HEAD_BYTES = 256
# Formats that Pillow does not recognize if it was built without them.
_OPTIONAL = ("AVIF", "WEBP")
_BOMB_PIXELS = re.compile(r"\((\d+) pixels\)")


class OtherSize(BadImage):
    """Error for an image that does not have the required size; the message contains only the reason."""


def describe_sizes(found: Size, needed: Size) -> str:
    """Return the message of `OtherSize` for the found and the required size."""
    return f"the height and width of the image are {found[0]}x{found[1]} instead of {needed[0]}x{needed[1]}"


def check_pixels(height: int, width: int) -> None:
    """Raise `BadImage` for an image of more than `MAX_PIXELS`."""
    if height * width > MAX_PIXELS:
        size = f"{height}x{width}"
        raise BadImage(f"the height and width of the image are {size}, more than the limit of {MAX_PIXELS:,} pixels")


def turn_size(size: Size, orientation: int) -> Size:
    """Convert a size from stored to upright orientation, or vice versa."""
    return (size[1], size[0]) if orientation >= 5 else size


def divide_size(size: Size, factor: int) -> Size:
    """Divide height and width by a factor and round up, as libjpeg does."""
    return -(-size[0] // factor), -(-size[1] // factor)


def choose_factor(stored: Size, orientation: int, wanted: Size | None) -> int:
    """Return the factor by which to reduce a JPEG while decoding, for an upright image of size `wanted`."""
    if wanted is None:
        return 1
    height, width = (KEPT * side for side in turn_size(wanted, orientation))
    return next((factor for factor in FACTORS if stored[0] >= factor * height and stored[1] >= factor * width), 1)


def fit_pixels(pixels: Pixels, stored: Size, orientation: int, wanted: Size) -> Pixels:
    """Scale pixels bilinearly with antialiasing to cover an upright size, and crop around the center, without rotating.

    The pixels may already have been reduced while decoding. `stored` is the size before the reduction; it is needed
    because an odd side is not halved exactly.
    """
    height, width = turn_size(wanted, orientation)
    if pixels.shape[:2] == (height, width) == stored:
        return pixels
    factor = next(factor for factor in (1, 2, 4, 8) if divide_size(stored, factor) == pixels.shape[:2])
    # Compute the crop box of ImageOps.fit in coordinates of the stored image.
    cut_height, cut_width = (float(side) for side in stored)
    if cut_width * height >= cut_height * width:
        cut_width = cut_height * width / height
    else:
        cut_height = cut_width * height / width
    left, top = (stored[1] - cut_width) / 2, (stored[0] - cut_height) / 2
    box = (left / factor, top / factor, (left + cut_width) / factor, (top + cut_height) / factor)
    channels = pixels.shape[2]
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    resized = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized).reshape(height, width, channels)


def turn_pixels(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels rotated and flipped upright as `ImageOps.exif_transpose` does, C-contiguous."""
    if orientation == 1:
        return pixels
    height, width, channels = pixels.shape
    # Move each RGB pixel as one value of three bytes, which halves the time.
    values: npt.NDArray[Any] = np.ascontiguousarray(pixels).view(f"V{channels}").reshape(height, width)
    if orientation >= 5:
        values = values.T
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    result: Pixels = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, channels)
    return result


def decode_with_pillow(data: Data, channels: int, wanted: Size | None) -> tuple[Pixels, Size, int]:
    """Decode an image without turning it upright; return the pixels, the stored height and width, and the orientation.

    A JPEG may be scaled while it is decoded, if the size `wanted` allows that.
    """
    with _open(data) as image:
        if image.format == "PNG":
            _check_png(data)
        stored = _load(image, channels, lambda size: choose_factor(size, _orientation(image), wanted))
        return _to_channels(image, channels), stored, _orientation(image)


def decode_pillow(image: Any, channels: int = 3, size: Size | None = None) -> Pixels:
    """Convert a `PIL.Image.Image` to upright `uint8 [H, W, channels]`; raise `BadImage` if that is impossible."""
    try:
        check_pixels(image.height, image.width)
        image.load()
        pixels, orientation = _to_channels(image, channels), _orientation(image)
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        # Loading a broken file can raise any error.
        raise BadImage(f"Pillow raised {type(error).__name__}: {error}") from error
    if size is not None:
        pixels = fit_pixels(pixels, (pixels.shape[0], pixels.shape[1]), orientation, size)
    return turn_pixels(pixels, orientation)


def load_with_pillow(data: Data) -> Any:
    """Return the image in `data` in its own mode, not turned upright; raise `BadImage` if that is impossible."""
    with _open(data) as image:
        if image.format == "PNG":
            _check_png(data)
        image.load()
        return image.copy()


def check_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image, after checking that all of its data decodes."""
    with _open(data) as image:
        if image.format == "PNG":
            _check_png(data)
        stored = _load(image, 3, lambda _: 8)
        _check_mode(image)
        return turn_size(stored, _orientation(image))


def measure_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image; decode only PNG files that have metadata after their pixels."""
    with _open(data) as image:
        if image.format == "PNG" and _has_late_metadata(data):
            image.load()
        stored = image.height, image.width
        # Some versions of Pillow report the upright size of a TIFF.
        if image.format == "TIFF":
            stored = int(image.tag_v2[_TIFF_HEIGHT]), int(image.tag_v2[_TIFF_WIDTH])
        return turn_size(stored, _orientation(image))


@contextmanager
def _open(data: Data) -> Iterator[Any]:
    try:
        with Image.open(io.BytesIO(data), formats=_formats_of(data)) as image:
            check_pixels(image.height, image.width)
            yield image
    except (BadImage, MemoryError):
        raise
    except (Image.DecompressionBombError, UnidentifiedImageError) as error:
        if isinstance(error, UnidentifiedImageError):
            raise BadImage(_describe_unknown(bytes(data[:_HEAD_BYTES]))) from None
        # Pillow refuses the image before its width and height can be read.
        pixels = _BOMB_PIXELS.search(str(error))
        count = f"{int(pixels[1]):,}" if pixels else "too many"
        raise BadImage(f"the image has {count} pixels, more than the limit of {MAX_PIXELS:,}") from None
    except Exception as error:
        # Pillow's plugins can raise any error on broken files.
        if (found := find_format(bytes(data[:_HEAD_BYTES]))) is not None and "not available" in str(error):
            raise BadImage(_describe_undecodable(found)) from None
        raise BadImage(f"Pillow raised {type(error).__name__}: {error}") from error


def _load(image: Any, channels: int, choose: Callable[[Size], int]) -> Size:
    """Decode an image, reducing a JPEG by the chosen factor, and return its height and width before the reduction."""
    stored = image.height, image.width
    if image.format not in _JPEG:
        # Read the size after loading, because loading rotates a TIFF.
        image.load()
        return image.height, image.width
    factor = choose(stored)
    # Use the luminance stored in a JPEG, as the fast decoders do.
    mode = "L" if channels == 1 else None
    # With a factor of 1, this changes only the mode.
    image.draft(mode, (max(1, image.width // factor), max(1, image.height // factor)))
    image.load()
    return stored


def _orientation(image: Any) -> int:
    try:
        # Call the base class's method, because the PNG class would decode the entire image to find EXIF after the
        # pixels.
        value = Image.Image.getexif(image).get(_ORIENTATION, 1)
        return int(value) if value in range(2, 9) else 1
    except Exception:
        # Damaged EXIF can raise any error in Pillow.
        return 1


def _has_late_metadata(png: Data) -> bool:
    kinds = [kind for kind, _ in _png_chunks(png)]
    return b"IDAT" in kinds and not set(_PNG_METADATA).isdisjoint(kinds[kinds.index(b"IDAT") :])


def _check_png(png: Data) -> None:
    for kind, chunk in _png_chunks(png):
        if kind == b"IDAT" and crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:], "big"):
            raise BadImage("pixels of the PNG file do not match their CRC")


def _png_chunks(png: Data) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the kind of each chunk of a PNG, and all of its bytes: length, kind, content and CRC."""
    view, at = memoryview(png), 8
    while at + 8 <= len(view):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        yield bytes(view[at + 4 : at + 8]), view[at:end]
        at = end


def _to_channels(image: Any, channels: int) -> Pixels:
    _check_mode(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")
    image = image.convert("L" if channels == 1 else "RGB")
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, channels)


def _check_mode(image: Any) -> None:
    if image.mode == "F":
        raise BadImage("the image has floating-point pixels, which have no standard conversion to 8 bits")


def _formats_of(data: Data) -> tuple[str, ...]:
    """Return the names of the formats that the bytes may have; raise `BadImage` for one that cannot be decoded here."""
    found = find_format(bytes(data[:_HEAD_BYTES]))
    if found is None or found.name in _FORMATS:
        if found is not None and found.name == "TIFF":
            _silence_libtiff()
        return _FORMATS
    if found.name not in Image.OPEN:
        Image.init()
    if found.name == "HEIF":
        _register_heif()
    if found.name not in Image.OPEN:
        raise BadImage(_describe_undecodable(found))
    return (found.name,)


@functools.cache
def _silence_libtiff() -> None:
    """Stop libtiff from printing to stderr; Pillow still raises an error if a file cannot be decoded.

    Redirecting stderr instead would affect other threads.
    """
    # Python prints the records of a logger without handlers.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    # Look up the symbol from Pillow's own library, which is linked with the libtiff that Pillow uses.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(import_module("PIL._imaging").__file__)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            set_handler = getattr(library, name)
            set_handler.argtypes, set_handler.restype = (ctypes.c_void_p,), ctypes.c_void_p
            set_handler(None)


def _register_heif() -> None:
    for name in _HEIF_PACKAGES if "HEIF" not in Image.OPEN else ():
        # A broken package can raise any error.
        with contextlib.suppress(Exception):
            import_module(name).register_heif_opener()
            return


def _describe_undecodable(found: FileFormat) -> str:
    name = found.extensions[0].upper()
    article = "an" if name.startswith("A") else "a"
    return f"the file is {article} {name} image, which Pillow cannot decode here (run pip install {found.package})"


def _describe_unknown(head: bytes) -> str:
    if not head:
        return "the file is empty"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "the file is a web page with the name of an image"
    if (found := find_format(head)) is not None and found.name in _OPTIONAL and not features.check(found.name.lower()):
        return _describe_undecodable(found)
    return f"the file is not a readable image (it starts with {head[:8]!r})"

"""Decoded pixels: their limits, turning and scaling; and Pillow, which decodes what the fast decoders do not take."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from colabkit.foundation import BadImage

Data = bytes | memoryview
Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]
"""Height and width."""

MAX_PIXELS = 89_478_485
"""Pillow's bound on decompression bombs, which is a warning there."""

FACTORS = (8, 4, 2)
"""What libjpeg-turbo divides an image's sides by while it decodes; scales between these are slower than none."""

KEPT = 2
"""An image scaled while it is decoded keeps this many times the requested size, and the rest is resampled.

On 400 photos at 32, 64, 128 and 224 pixels the result then differs from a full decode by 0.4 to 0.5 of 255 on average,
by 1.4 in the worst photo; 99.9% of the values differ by at most 6. Without the margin it is 1.6, 4.9 and 23.
"""


_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_JPEG = ("JPEG", "MPO")  # a phone's file with several images is the latter
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_ORIENTATION = 0x0112
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class OtherSize(BadImage):
    """An image of another size than needed, which may be good otherwise; the message is the reason alone."""


def describe_sizes(found: Size, needed: Size) -> str:
    """Return the reason of an `OtherSize`."""
    return f"{found[1]}x{found[0]} pixels, where {needed[1]}x{needed[0]} are needed"


def check_pixels(height: int, width: int) -> None:
    """Raise `BadImage` for an image of more than `MAX_PIXELS`."""
    if height * width > MAX_PIXELS:
        raise BadImage(f"{width}x{height} pixels, more than {MAX_PIXELS}")


def turn_size(size: Size, orientation: int) -> Size:
    """Return height and width after turning, which is also the way back."""
    return (size[1], size[0]) if orientation >= 5 else size


def divide_size(size: Size, factor: int) -> Size:
    """Return height and width divided as libjpeg divides them: rounded up."""
    return -(-size[0] // factor), -(-size[1] // factor)


def choose_factor(stored: Size, orientation: int, wanted: Size | None) -> int:
    """Return what the sides of a stored JPEG may be divided by while decoding, for an upright result `wanted`."""
    if wanted is None:
        return 1
    height, width = (KEPT * side for side in turn_size(wanted, orientation))
    return next((factor for factor in FACTORS if stored[0] >= factor * height and stored[1] >= factor * width), 1)


def fit_pixels(pixels: Pixels, stored: Size, orientation: int, wanted: Size) -> Pixels:
    """Return pixels scaled to cover an upright size and cut around the centre: bilinear with antialiasing, not turned.

    They may have been scaled while they were decoded; `stored` is their height and width before that, since an odd
    side is not halved exactly.
    """
    height, width = turn_size(wanted, orientation)
    if pixels.shape[:2] == (height, width) == stored:
        return pixels
    factor = next(factor for factor in (1, 2, 4, 8) if divide_size(stored, factor) == pixels.shape[:2])
    # The box of ImageOps.fit, in coordinates of the stored image.
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
    """Return pixels turned upright by EXIF's orientation, C-contiguous; the table is `ImageOps.exif_transpose`'s."""
    if orientation == 1:
        return pixels
    height, width, channels = pixels.shape
    # Three bytes move as one value, which halves the time.
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
    """Return the image, not yet turned, with its stored height and width and its orientation.

    A JPEG may be scaled while it is decoded, if it will be brought to the size `wanted`.
    """
    with _open(data) as image:
        stored = _load(image, channels, lambda size: choose_factor(size, _orientation(image), wanted))
        return _to_channels(image, channels), stored, _orientation(image)


def decode_pillow(image: Any, channels: int = 3, size: Size | None = None) -> Pixels:
    """Return a `PIL.Image.Image` of any mode as `images.decode_image` returns its file, perhaps read only now."""
    try:
        check_pixels(image.height, image.width)
        image.load()
        pixels, orientation = _to_channels(image, channels), _orientation(image)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # of a file that is read only now, and broken
        raise BadImage(f"{type(error).__name__}: {error}") from error
    if size is not None:
        pixels = fit_pixels(pixels, (pixels.shape[0], pixels.shape[1]), orientation, size)
    return turn_pixels(pixels, orientation)


def check_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image that decodes wholly."""
    with _open(data) as image:
        stored = _load(image, 3, lambda _: 8)
        _check_mode(image)
        return turn_size(stored, _orientation(image))


def measure_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image, undecoded but for rare PNG files with metadata at their end."""
    with _open(data) as image:
        if image.format == "PNG" and _has_late_metadata(data):
            image.load()
        stored = image.height, image.width
        if image.format == "TIFF":  # whose size some versions of Pillow have already turned
            stored = int(image.tag_v2[_TIFF_HEIGHT]), int(image.tag_v2[_TIFF_WIDTH])
        return turn_size(stored, _orientation(image))


@contextmanager
def _open(data: Data) -> Iterator[Any]:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            check_pixels(image.height, image.width)
            yield image
    except (BadImage, MemoryError):
        raise
    except (Image.DecompressionBombError, UnidentifiedImageError) as error:
        bomb = isinstance(error, Image.DecompressionBombError)
        raise BadImage("more pixels than allowed" if bomb else _describe_unknown(bytes(data[:256]))) from error
    except Exception as error:  # Pillow's plugins raise all sorts on broken files
        raise BadImage(f"{type(error).__name__}: {error}") from error


def _load(image: Any, channels: int, choose: Callable[[Size], int]) -> Size:
    """Decode an image, a JPEG at its size divided by the factor that is chosen, and return its height and width."""
    stored = image.height, image.width
    if image.format not in _JPEG:
        image.load()  # which turns a TIFF
        return image.height, image.width
    factor = choose(stored)
    mode = "L" if channels == 1 else None  # a JPEG's own luminance, as the fast decoders give it
    # A draft of the very size it has would change nothing but the mode.
    image.draft(mode, (max(1, image.width // factor), max(1, image.height // factor)))
    image.load()
    return stored


def _orientation(image: Any) -> int:
    try:
        # The general method: a PNG's own would decode the whole image to look for EXIF behind it.
        value = Image.Image.getexif(image).get(_ORIENTATION, 1)
        return int(value) if value in range(2, 9) else 1
    except Exception:  # damaged EXIF: Pillow raises anything
        return 1


def _has_late_metadata(png: Data) -> bool:
    """Return whether metadata stands behind a PNG's pixels, where it may hold an orientation."""
    at, pixels = 8, False
    while at + 8 <= len(png):
        kind = bytes(png[at + 4 : at + 8])
        pixels = pixels or kind == b"IDAT"
        if pixels and kind in _PNG_METADATA:
            return True
        at += 12 + int.from_bytes(png[at : at + 4], "big")
    return False


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
        raise BadImage("floating-point pixels, which have no 8-bit meaning")


def _describe_unknown(head: bytes) -> str:
    """Return why a file that begins like this is not an image."""
    if not head:
        return "an empty file"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page saved under an image's name"
    return f"no image; it begins with {head[:8]!r}"

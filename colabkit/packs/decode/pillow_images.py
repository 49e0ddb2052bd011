"""Pillow decodes what the fast decoders do not take, and says what is wrong with a broken file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from colabkit.foundation import BadImage
from colabkit.packs.decode.pixels import Data, Pixels, Size, check_pixels, choose_factor, turn_size

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
JPEG = ("JPEG", "MPO")  # a phone's file with several images is the latter
TIFF_WIDTH, TIFF_HEIGHT = 256, 257
_ORIENTATION = 0x0112
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


def decode_with_pillow(data: Data, channels: int, wanted: Size | None) -> tuple[Pixels, Size, int]:
    """Return the image, not yet turned, with its stored height and width and its orientation.

    Args:
        data: the bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        wanted: height and width the caller will bring it to, which allow a JPEG to be scaled while it is decoded.
    """
    with _open(data) as image:
        is_jpeg, stored = image.format in JPEG, (image.height, image.width)
        if is_jpeg:
            _draft(image, channels, choose_factor(stored, _orientation(image), wanted))
        image.load()  # which turns a TIFF
        pixels = _to_channels(image, channels)
        return pixels, stored if is_jpeg else (image.height, image.width), _orientation(image)


def convert_pillow(image: Any, channels: int) -> tuple[Pixels, int]:
    """Return the pixels of an image of Pillow, not yet turned, and its orientation."""
    try:
        check_pixels(image.height, image.width)
        image.load()
        return _to_channels(image, channels), _orientation(image)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # of a file that is read only now, and broken
        raise BadImage(f"{type(error).__name__}: {error}") from error


def check_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image that decodes wholly."""
    with _open(data) as image:
        is_jpeg, stored = image.format in JPEG, (image.height, image.width)
        if is_jpeg:
            _draft(image, 3, 8)
        image.load()
        _check_mode(image)
        return turn_size(stored if is_jpeg else (image.height, image.width), _orientation(image))


def measure_with_pillow(data: Data) -> Size:
    """Return the upright height and width of an image, undecoded but for rare PNG files with metadata at their end."""
    with _open(data) as image:
        if image.format == "PNG" and _has_late_metadata(data):
            image.load()
        stored = image.height, image.width
        if image.format == "TIFF":  # whose size some versions of Pillow have already turned
            stored = int(image.tag_v2[TIFF_HEIGHT]), int(image.tag_v2[TIFF_WIDTH])
        return turn_size(stored, _orientation(image))


@contextmanager
def _open(data: Data) -> Iterator[Any]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_pixels(image.height, image.width)
            yield image
    except (BadImage, MemoryError):
        raise
    except (Image.DecompressionBombError, UnidentifiedImageError) as error:
        bomb = isinstance(error, Image.DecompressionBombError)
        raise BadImage("more pixels than allowed" if bomb else _describe_unknown(bytes(data[:256]))) from error
    except Exception as error:  # Pillow's plugins raise all sorts on broken files
        raise BadImage(f"{type(error).__name__}: {error}") from error


def _draft(image: Any, channels: int, factor: int) -> None:
    mode = "L" if channels == 1 else None  # a JPEG's own luminance, as the fast decoders give it
    # A draft of the very size it has would change nothing but the mode.
    image.draft(mode, (max(1, image.width // factor), max(1, image.height // factor)))


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

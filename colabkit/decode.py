"""Image files become uint8 arrays, by the fastest decoder that gives Pillow's result.

simplejpeg (libjpeg-turbo) takes plain JPEG files, which is most of them; Pillow takes everything else. What comes out:

- `uint8 [H, W, C]` with C = 3 (RGB) or 1 (luminance), whatever the file holds;
- turned upright by its EXIF orientation; the first frame of an animation; transparency dropped; CMYK converted by
  Pillow; 16-bit values keep their upper 8 bits;
- with `size`, scaled to cover the size and cut around the centre, bilinear with antialiasing (`ImageOps.fit`).

Limits: 89,478,485 pixels, Pillow's own bound on decompression bombs, is an error here.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from colabkit.errors import BadImage

try:
    import simplejpeg
except ImportError:  # no wheel for this platform: Pillow decodes everything
    simplejpeg = None

__all__ = ["decode_image"]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 89_478_485
_ORIENTATIONS = (b"Exif\x00\x00", b"tiff:Orientation")  # EXIF and XMP, which Pillow asks in this order

Pixels = npt.NDArray[np.uint8]


def decode_image(data: bytes, channels: int = 3, size: tuple[int, int] | None = None) -> Pixels:
    """Return the image in `data` as `uint8 [H, W, channels]`, C-contiguous.

    Args:
        data: the bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        size: height and width to scale and cut to; None keeps the image's own.

    Raises:
        BadImage: if the bytes are no image, cut short, or have too many pixels. The message is the reason alone; the
            caller knows the file's name.
    """
    pixels = _decode_plain_jpeg(data, channels)
    if pixels is None:
        pixels = _decode_with_pillow(data, channels)
    if size is not None and pixels.shape[:2] != size:
        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        fitted = ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BILINEAR)
        pixels = np.asarray(fitted).reshape(*size, channels)
    return np.ascontiguousarray(pixels)


def _decode_plain_jpeg(data: bytes, channels: int) -> Pixels | None:
    if simplejpeg is None or not data.startswith(b"\xff\xd8"):
        return None
    head = _head_bytes(data)
    if any(data.find(mark, 0, head) >= 0 for mark in _ORIENTATIONS):
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("Gray", "YCbCr") or height * width > MAX_PIXELS:
            return None
        decoded: Pixels = simplejpeg.decode_jpeg(data, "GRAY" if channels == 1 else "RGB")
    except ValueError:
        return None  # Pillow says what is wrong, or manages
    return decoded


def _head_bytes(data: bytes) -> int:
    """Return where a JPEG's first scan begins; what tells its orientation stands before."""
    at = 2
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def _decode_with_pillow(data: bytes, channels: int) -> Pixels:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS}")
            if channels == 1:
                image.draft("L", None)  # a JPEG's own luminance, as simplejpeg gives it
            image.load()
            return _to_channels(ImageOps.exif_transpose(image), channels)
    except BadImage:
        raise
    except (Image.DecompressionBombError, UnidentifiedImageError) as error:
        reason = "more pixels than allowed" if isinstance(error, Image.DecompressionBombError) else _kind(data)
        raise BadImage(reason) from error
    except Exception as error:  # Pillow's plugins raise all sorts on broken files
        raise BadImage(f"{type(error).__name__}: {error}") from error


def _to_channels(image: Any, channels: int) -> Pixels:
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise BadImage("floating-point pixels, which have no 8-bit meaning")
    elif image.mode == "P":
        image = image.convert("RGBA")
    image = image.convert("L" if channels == 1 else "RGB")
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, channels)


def _kind(data: bytes) -> str:
    if not data:
        return "an empty file"
    head = data[:256].lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return "a web page saved under an image's name"
    return f"no image; it begins with {data[:8]!r}"

"""Pixels become JPEG files, by simplejpeg or Pillow: the same tables and subsampling, the bytes differ slightly."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from colabkit.packs.decode.fitting import Pixels
from colabkit.packs.decode.reasons import bad

MAX_SIDE = 65_500
"""libjpeg's bound; the format itself ends at 65,535."""


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Return pixels as a baseline JPEG file: colour halved in both directions (4:2:0), no metadata.

    simplejpeg has only the fast DCT below a quality of 96, which costs up to 0.1 of 255 on average against Pillow.

    Args:
        pixels: `uint8 [H, W, C]` with C = 3 (RGB) or 1 (luminance).
        quality: from 1 to 100, libjpeg's scale.

    Raises:
        BadImage: if the pixels have no such shape, or a side of 0 or more than 65,500. The message is the reason alone.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise bad(f"{pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 1 or 3]")
    height, width = pixels.shape[:2]
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise bad(f"{width}x{height} pixels, which no JPEG file holds")
    write = _writer() or _by_pillow
    return write(np.ascontiguousarray(pixels), quality)


@functools.cache
def _writer() -> Callable[[Pixels, int], bytes] | None:
    try:
        import simplejpeg

        def write(pixels: Pixels, quality: int) -> bytes:
            colours, sampling = ("RGB", "420") if pixels.shape[2] == 3 else ("GRAY", "Gray")
            file: bytes = simplejpeg.encode_jpeg(pixels, quality, colours, sampling)
            return file

        write(np.zeros((8, 8, 3), np.uint8), 90)
    except Exception:  # missing or broken
        return None
    return write


def _by_pillow(pixels: Pixels, quality: int) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()

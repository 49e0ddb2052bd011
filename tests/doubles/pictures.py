"""Pictures and image files for decoding tests, and Pillow's results to compare with."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps
from trees import needs

from colabkit.packs.decode import images, jpeg
from colabkit.packs.decode.images import row_decoder

AGREEMENT = 2
"""Largest rounding difference between two JPEG decoders, in pixel values from 0 to 255."""

PACKAGES = ["simplejpeg", "torchcodec", "torchvision", None]
"""The backends by name; None is Pillow alone."""


def photo(height: int = 45, width: int = 61, seed: int = 5) -> np.ndarray:
    """Return a picture with smooth color gradients, like a photo."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def noise(height: int = 33, width: int = 47) -> np.ndarray:
    """Return noise of only the values 0 and 255."""
    return np.random.default_rng(9).choice(np.array([0, 255], np.uint8), (height, width, 3))


def saved(pixels: np.ndarray | Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(pixels: np.ndarray) -> bytes:
    return saved(pixels, "PNG")


def exif(orientation: int) -> Image.Exif:
    """Return EXIF data with an orientation and other entries."""
    found = Image.Exif()
    found[0x010F] = "Maker of cameras"
    found[0x0112] = orientation
    found[0x0132] = "2024:01:01 00:00:00"
    return found


def by_pillow(data: bytes, channels: int = 3) -> np.ndarray:
    """Return the upright picture that Pillow alone decodes from a file."""
    image = Image.open(io.BytesIO(data))
    mode = "L" if channels == 1 else "RGB"
    if channels == 1:
        # Like colabkit, read the luminance that a JPEG stores instead of computing it from RGB.
        image.draft("L", None)
    image = ImageOps.exif_transpose(image)
    if image.mode == "P":
        image = image.convert("RGBA")
    return np.asarray(image.convert(mode)).reshape(image.height, image.width, channels)


def fitted_by_pillow(data: bytes, size: tuple[int, int], channels: int = 3) -> np.ndarray:
    """Return the result of `ImageOps.fit` on the upright picture, decoded at full size."""
    whole = by_pillow(data, channels)
    image = Image.fromarray(whole[:, :, 0] if channels == 1 else whole)
    fitted = ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(*size, channels)


def fill_row(data: bytes, out: np.ndarray, fit: bool = False) -> None:
    row_decoder(out.shape, fit)(data, out)


def distance(one: np.ndarray, other: np.ndarray) -> int:
    """Return the largest difference between two arrays of the same shape."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def take(package: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make colabkit decode JPEG with a package, or with Pillow for None; skip the test if the package is missing."""
    chosen = None
    if package is not None:
        try:
            chosen = jpeg.PROBES[package]()
        except (ImportError, RuntimeError):
            needs(package, available=False)
    monkeypatch.setattr(images, "find_decoder", lambda: chosen)
    if package != "simplejpeg":
        monkeypatch.setattr(jpeg, "_writer", lambda: None)


def without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if colabkit decodes or checks an image with Pillow."""
    monkeypatch.setattr(images, "decode_with_pillow", lambda *a: pytest.fail("Pillow decodes"))
    monkeypatch.setattr(images, "check_with_pillow", lambda *a: pytest.fail("Pillow checks"))

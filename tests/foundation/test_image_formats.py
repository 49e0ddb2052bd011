"""The table of image formats: files are recognized by their first bytes."""

from __future__ import annotations

import numpy as np
import pytest
from pictures import photo, saved
from PIL import Image, features
from trees import needs

from colabkit.foundation import find_format, is_image_head

FEATURES = {"AVIF": "avif", "WEBP": "webp", "JPEG2000": "jpg_2000"}


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_image_files_are_recognized_by_their_signature(kind):
    needs(f"{kind} in Pillow", kind not in FEATURES or features.check(FEATURES[kind]))
    data = saved(photo(), kind)
    assert is_image_head(data[:16])
    assert find_format(data[:64]).name == kind


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_tga_files_are_recognized_by_their_header(mode):
    for options in ({}, {"compression": "tga_rle"} if mode != "1" else {}):
        assert find_format(saved(Image.fromarray(photo()).convert(mode), "TGA", **options)[:64]).name == "TGA"


def test_files_of_brands_of_heif_are_told_apart():
    def found(brand: bytes, *compatible: bytes) -> str:
        size = 16 + 4 * len(compatible)
        head = size.to_bytes(4, "big") + b"ftyp" + brand + bytes(4) + b"".join(compatible) + b"avif" + bytes(40)
        return find_format(head).name

    assert found(b"heic", b"mif1", b"heic") == found(b"mif1", b"heic") == "HEIF"
    assert found(b"avif", b"mif1") == found(b"mif1", b"miaf", b"avif") == "AVIF"


def test_other_files_are_not_images():
    random = np.random.default_rng(0)
    others = [b"", b"text, and more text of a file", bytes(100), b"\0\0\1\0\3\0" + bytes(90), b"PK\3\4" + bytes(90)]
    others += [random.bytes(64) for _ in range(2000)] + [
        random.integers(0, 3, 64, np.uint8).tobytes() for _ in range(99)
    ]
    assert {find_format(other) for other in others} == {None}
    assert not any(map(is_image_head, others))

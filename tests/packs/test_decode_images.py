"""Decoding of image files of every format, mode and orientation."""

from __future__ import annotations

import io
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import AGREEMENT, by_pillow, distance, exif, fill_row, photo, saved
from PIL import Image, PngImagePlugin, features
from trees import needs

from colabkit.errors import BadImage
from colabkit.packs.decode.images import check_image, decode_image, image_size


def whole(data: bytes, channels: int = 3) -> np.ndarray:
    """Decode a file in all ways, check that they agree, and return the pixels."""
    found = decode_image(data, channels)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert image_size(data) == check_image(data) == found.shape[:2]
    row = np.full((2, *found.shape), 77, np.uint8)[1]
    fill_row(data, row)
    assert (row == found).all()
    return found


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP"])
@pytest.mark.parametrize("channels", [3, 1])
def test_lossless_formats_are_decoded_exactly(kind, channels):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    picture = photo() if kind != "GIF" else np.asarray(Image.fromarray(photo()).quantize(200).convert("RGB"))
    data = saved(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    expected = picture if channels == 3 else np.asarray(Image.fromarray(picture).convert("L"))[:, :, None]
    assert (whole(data, channels) == expected).all()


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [3, 1])
def test_images_are_turned_upright(orientation, kind, channels):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    data = saved(photo(), kind, exif=exif(orientation))
    found = whole(data, channels)
    assert found.shape[:2] == ((61, 45) if orientation >= 5 else (45, 61))
    assert distance(found, by_pillow(data, channels)) <= AGREEMENT
    if orientation > 1:
        assert found.shape[:2] != (45, 61) or distance(found[..., :1], decode_image(saved(photo(), kind), 1)) > 20


def test_an_orientation_at_the_end_of_a_png_is_applied():
    plain, turned = (saved(photo(), "PNG", **options) for options in ({}, {"exif": exif(6)}))
    start = turned.index(b"eXIf") - 4
    chunk = turned[start : start + 12 + int.from_bytes(turned[start : start + 4], "big")]
    data = plain[:-12] + chunk + plain[-12:]
    assert (whole(data) == by_pillow(data)).all()
    assert image_size(data) == (61, 45)


# Ignore Pillow's warnings about corrupt EXIF.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("orientation", [0, 9, 65535])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_invalid_orientations_are_ignored(kind, orientation):
    assert whole(saved(photo(), kind, exif=exif(orientation))).shape == (45, 61, 3)


def test_cmyk_and_ycck_are_converted_like_pillow_does():
    image = Image.fromarray(photo()).convert("CMYK")
    # Pillow writes CMYK with Adobe's marker and inverted values.
    jpeg = saved(image, "JPEG")
    adobe = jpeg.index(b"Adobe")
    assert jpeg[adobe + 11] == 0
    ycck = jpeg[: adobe + 11] + b"\x02" + jpeg[adobe + 12 :]
    # Values without Adobe's marker are treated as inverted, too.
    plain = jpeg[: adobe - 4] + jpeg[adobe + 12 :]
    results = []
    for data in (jpeg, ycck, plain, saved(image, "TIFF")):
        for channels in (3, 1):
            image = Image.open(io.BytesIO(data))
            assert image.mode == "CMYK"
            expected = np.asarray(image.convert("RGB" if channels == 3 else "L"))
            found = whole(data, channels)
            assert (found == expected.reshape(45, 61, channels)).all()
        results.append(found)
    # JPEG compression changes colors only slightly.
    assert distance(results[0], results[3]) <= 12
    assert distance(results[0], results[1]) > 50
    assert (results[0] == results[2]).all()


def test_16_bit_values_keep_their_upper_8_bits_and_32_bit_values_are_clipped_first():
    values = np.linspace(0, 65535, 12 * 10).astype(np.uint16).reshape(12, 10)
    for kind in ("PNG", "TIFF", "PPM"):
        for channels in (3, 1):
            found = whole(saved(values, kind), channels)
            assert (found == np.repeat((values >> 8).astype(np.uint8)[:, :, None], channels, axis=2)).all()
    values = np.array([[0, 255, 256, 65535, 65536, 2**31 - 1]], np.int32)
    assert whole(saved(values, "TIFF"), 1).ravel().tolist() == [0, 0, 1, 255, 255, 255]
    assert whole(saved(-values, "TIFF"), 1).ravel().tolist() == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_palettes_are_looked_up(kind, channels):
    image = Image.fromarray(photo()).quantize(16)
    expected = np.asarray(image.convert("RGB" if channels == 3 else "L")).reshape(45, 61, channels)
    assert distance(whole(saved(image, kind), channels), expected) <= (channels == 1)


def test_a_palette_with_transparency_keeps_its_colors():
    image = Image.fromarray(photo()).quantize(16)
    colours = np.asarray(image.convert("RGB"))
    for kind, transparency in (("PNG", 3), ("GIF", 3), ("PNG", bytes(range(16)))):
        data = saved(image, kind, transparency=transparency)
        with warnings.catch_warnings():
            # Pillow would warn if a palette were converted without its transparency.
            warnings.simplefilter("error")
            assert (whole(data) == colours).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("channels", [3, 1])
def test_transparency_is_dropped_without_blending(mode, channels):
    image = Image.fromarray(photo()).convert(mode)
    image.putalpha(Image.fromarray(np.linspace(0, 255, 45 * 61).astype(np.uint8).reshape(45, 61)))
    found = whole(saved(image, "PNG"), channels)
    if mode == "RGBA" and channels == 3:
        assert (found == photo()).all()
    else:
        grey = np.asarray(Image.fromarray(photo()).convert("L"))[:, :, None]
        assert distance(found, np.repeat(grey, channels, 2)) <= 1


def test_grayscale_is_repeated_to_rgb_and_black_and_white_becomes_0_and_255():
    for kind in ("PNG", "JPEG", "TIFF"):
        data = saved(Image.fromarray(photo()).convert("L"), kind)
        found = whole(data)
        assert (found == whole(data, 1)).all()
        assert distance(found[:, :, 0], np.asarray(Image.open(io.BytesIO(data)))) <= AGREEMENT
    image = Image.fromarray(photo()).convert("1")
    for kind in ("PNG", "TIFF", "BMP"):
        assert (whole(saved(image, kind), 1)[:, :, 0] == np.where(np.asarray(image), 255, 0)).all()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_decoded(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    first, second = (Image.fromarray(np.full((9, 8, 3), value, np.uint8)) for value in (40, 200))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=[second, second], **options)
    assert (whole(data) == 40).all()


def test_the_first_image_of_an_mpo_file_is_decoded():
    data = saved(Image.fromarray(photo()), "MPO", save_all=True, append_images=[Image.fromarray(photo(30, 20))])
    assert distance(whole(data), by_pillow(data)) <= AGREEMENT
    assert image_size(data) == (45, 61)


@pytest.mark.parametrize("kind", ["TGA", "JPEG2000", "AVIF"])
def test_less_common_formats_are_decoded_like_pillow_does(kind):
    feature = {"AVIF": "avif", "JPEG2000": "jpg_2000"}.get(kind)
    needs(f"{kind} in Pillow", feature is None or features.check(feature))
    for mode in ("RGB", "RGBA", "L"):
        data = saved(Image.fromarray(photo()).convert(mode), kind)
        assert (whole(data) == by_pillow(data)).all()
        assert decode_image(data, size=(8, 8)).shape == (8, 8, 3)
        for length in range(0, len(data) - 100, 97):
            with pytest.raises(BadImage):
                decode_image(data[:length])


@pytest.mark.parametrize("name", ["pillow_heif", "pi_heif"])
def test_a_heic_file_needs_a_package_that_is_named(name, monkeypatch):
    monkeypatch.setattr(Image, "OPEN", {key: value for key, value in Image.OPEN.items() if key != "HEIF"})
    for package in ("pillow_heif", "pi_heif"):
        monkeypatch.setitem(sys.modules, package, None)
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + saved(photo(), "PNG")
    with pytest.raises(BadImage, match=r"the file is a HEIC image, .* \(run pip install pillow-heif\)"):
        decode_image(data)

    def opened(file: io.BytesIO, filename: str) -> object:
        return PngImagePlugin.PngImageFile(io.BytesIO(file.getvalue()[24:]))

    def register() -> None:
        Image.OPEN["HEIF"] = opened, None

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(register_heif_opener=register))
    assert (decode_image(data) == photo()).all()


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "PPM", "JPEG"])
def test_the_first_bytes_of_a_file_determine_its_size(kind):
    data = saved(photo(400, 300), kind)
    assert image_size(data[: 1024 if kind in {"GIF", "JPEG"} else 100]) == (400, 300)


def test_a_memoryview_is_decoded_like_bytes():
    for kind in ("JPEG", "PNG"):
        data = saved(photo(), kind, exif=exif(6))
        assert (whole(memoryview(b"before" + data)[6:]) == whole(data)).all()

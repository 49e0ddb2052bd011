"""Decoding of damaged, truncated and hostile files, and the pixel limit."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
from pictures import PACKAGES, exif, fill_row, noise, photo, saved, take
from PIL import Image, features
from trees import needs

from colabkit.errors import BadImage
from colabkit.packs.decode import jpeg, pixels
from colabkit.packs.decode.images import check_image, decode_image, image_size
from colabkit.packs.decode.pixels import OtherSize

KINDS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]


# Ignore Pillow's warnings about truncated TIFF files.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_raises_or_decodes_to_the_whole_image(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    data = saved(photo(), kind)
    whole = decode_image(data)
    refused = 0
    for length in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
        part = data[:length]
        row = np.full(whole.shape, 77, np.uint8)
        try:
            found = decode_image(part)
        except BadImage:
            refused += 1
            for refuse in (check_image, lambda part, row=row: fill_row(part, row)):
                with pytest.raises(BadImage):
                    refuse(part)
        else:
            assert (found == whole).all(), f"{length} of {len(data)} bytes decode to another image"
            assert check_image(part) == whole.shape[:2]
    assert refused >= 40


@pytest.mark.parametrize("compression", ["tiff_deflate", "tiff_lzw"])
def test_a_damaged_tiff_prints_nothing(compression, capfd):
    needs("libtiff in Pillow", features.check("libtiff"))
    data = bytearray(saved(photo(), "TIFF", compression=compression))
    start = data.index(b"II*\0") + 8
    data[start + 200 : start + 900] = bytes(700)
    # Allow success, because libtiff ignores some kinds of damage.
    with contextlib.suppress(BadImage):
        decode_image(bytes(data))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"exif": exif(6)}], ids=["baseline", "progressive", "exif"]
)
def test_every_decoder_raises_for_a_jpeg_truncated_at_any_length(package, options, monkeypatch):
    take(package, monkeypatch)
    data = saved(noise(60, 80), "JPEG", quality=90, **options)
    assert len(data) > 5000
    for length in range(0, len(data) - 2, 100):
        part = data[:length]
        for refuse in (
            decode_image,
            check_image,
            lambda part: decode_image(part, size=(8, 8)),
            lambda part: fill_row(part, np.empty((60, 80, 3), np.uint8), fit=True),
        ):
            with pytest.raises(BadImage):
                refuse(part)


def test_pixels_of_a_png_that_do_not_match_their_crc_raise():
    data = bytearray(saved(noise(), "PNG"))
    # Pillow stops after the last pixel, before the checksum of the compressed data.
    data[-40] ^= 1
    for refuse in (decode_image, check_image, lambda data: fill_row(data, np.empty((33, 47, 3), np.uint8))):
        with pytest.raises(BadImage, match="do not match their CRC"):
            refuse(bytes(data))


@pytest.mark.parametrize("package", PACKAGES)
def test_bytes_after_a_jpeg_are_ignored(package, monkeypatch):
    take(package, monkeypatch)
    data = saved(photo(), "JPEG")
    for behind in (b"\x00", b"garbage" * 100, data, b"\xff\xd8\xff"):
        assert (decode_image(data + behind) == decode_image(data)).all()
        assert check_image(data + behind) == (45, 61)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_decodes_to_an_image_or_raises_bad_image(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    data = bytearray(saved(photo(), kind, **({"exif": exif(6)} if kind in {"JPEG", "PNG"} else {})))
    random = np.random.default_rng(11)
    decoded = 0
    for place in random.integers(0, min(len(data), 900), 250):
        broken = bytearray(data)
        broken[place] ^= int(random.integers(1, 256))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                size = check_image(bytes(broken))
            except BadImage:
                with pytest.raises(BadImage):
                    decode_image(bytes(broken))
                continue
            found = decode_image(bytes(broken))
            assert image_size(bytes(broken)) == size
        decoded += 1
        assert found.dtype == np.uint8
        assert found.shape == (*size, 3)
    # The chunks of a PNG file have CRCs, so every change is found.
    assert (decoded == 0) == (kind == "PNG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"\n <!DOCTYPE html><html><title>Sign in</title>", "the file is a web page with the name of an image"),
        (b"<HTML><body>404</body>", "the file is a web page with the name of an image"),
        (b"just some text", "the file is not a readable image (it starts with b'just som')"),
        (b"\xff\xd8", "the file is not a readable image"),
        (b"\xff\xd8\xff\xe0", "the file is not a readable image"),
        (b"\x89PNG\r\n\x1a\n", "the file is not a readable image"),
        (bytes(1000), "the file is not a readable image"),
        # Pillow would run an external program for this format.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", "the file is not a readable image"),
    ],
)
def test_files_that_are_not_images_raise_with_the_reason(data, reason):
    for refuse in (
        decode_image,
        check_image,
        image_size,
        lambda data: fill_row(data, np.empty((4, 4, 3), np.uint8)),
    ):
        with pytest.raises(BadImage) as caught:
            refuse(data)
        assert str(caught.value).startswith(reason)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_more_pixels_than_the_limit_raise_before_decoding(kind, package, monkeypatch):
    take(package, monkeypatch)
    data = saved(photo(), kind)
    row = np.empty((45, 61, 3), np.uint8)
    monkeypatch.setattr(pixels, "MAX_PIXELS", 45 * 61)
    assert decode_image(data).shape == (45, 61, 3)
    monkeypatch.setattr(pixels, "MAX_PIXELS", 45 * 61 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    if package is not None:
        never = jpeg.JpegDecoder("never", *[lambda *_: pytest.fail("decoded")] * 3)
        monkeypatch.setattr("colabkit.packs.decode.images.find_decoder", lambda: never)
    for refuse in (decode_image, image_size, lambda data: decode_image(data, 3, (4, 4)), lambda d: fill_row(d, row)):
        with pytest.raises(BadImage, match="45x61, more than the limit of 2,744 pixels"):
            refuse(data)


def test_a_header_with_more_pixels_than_the_limit_raises(monkeypatch):
    data = bytearray(saved(photo(), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    for refuse in (decode_image, check_image, image_size):
        with pytest.raises(BadImage, match="65535x65535, more than the limit of 89,478,485 pixels"):
            refuse(bytes(data))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    # Pillow enforces its own limit, which this test lowers.
    with pytest.raises(BadImage, match="more than the limit"):
        decode_image(saved(photo(), "PNG"))


def test_floating_point_pixels_raise():
    data = saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    for refuse in (decode_image, check_image):
        with pytest.raises(BadImage, match="floating-point"):
            refuse(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_of_another_size_does_not_fill_a_row(kind):
    for orientation, size in ((1, "45x61"), (6, "61x45")):
        data = saved(photo(), kind, exif=exif(orientation))
        for shape in ((45, 60, 3), (61 * 45, 1, 3), (61, 45, 3) if orientation == 1 else (45, 61, 3)):
            row = np.full(shape, 77, np.uint8)
            found = f"^the height and width of the image are {size} instead of {shape[0]}x{shape[1]}$"
            with pytest.raises(OtherSize, match=found):
                fill_row(data, row)
            assert (row == 77).all()

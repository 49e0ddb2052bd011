"""Image files become arrays: both decoders agree, every mode and orientation is handled, broken files are refused."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from conftest import needs
from PIL import Image, ImageOps, features

from colabkit import decode
from colabkit.decode import decode_image
from colabkit.errors import BadImage

AGREEMENT = 2
"""The two JPEG decoders may round differently, by at most this many of 255."""


def photo(height: int = 45, width: int = 61, seed: int = 5) -> np.ndarray:
    """Return a smooth picture with some edges, as photos are."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def noise(height: int = 33, width: int = 47) -> np.ndarray:
    """Return saturated noise, which no photo is as hard as."""
    return np.random.default_rng(9).choice(np.array([0, 255], np.uint8), (height, width, 3))


def saved(pixels: np.ndarray | Image.Image, kind: str, **options: object) -> bytes:
    """Return an image file's bytes."""
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def distance(one: np.ndarray, other: np.ndarray) -> int:
    """Return the largest difference of two arrays of one shape."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def by_pillow(data: bytes, channels: int = 3) -> np.ndarray:
    """Return what Pillow alone makes of a file."""
    return decode._decode_with_pillow(data, channels)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [30, 95])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("picture", [photo(), photo(16, 16), photo(1, 1), photo(7, 100), noise()])
def test_the_fast_decoder_agrees_with_pillow(picture, progressive, quality, subsampling, channels):
    needs("simplejpeg", decode.simplejpeg is not None)
    data = saved(picture, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
    fast = decode._decode_plain_jpeg(data, channels)
    assert fast is not None
    assert distance(fast, by_pillow(data, channels)) <= AGREEMENT


@pytest.mark.parametrize("channels", [3, 1])
def test_the_fast_decoder_agrees_with_pillow_on_grey_files(channels):
    needs("simplejpeg", decode.simplejpeg is not None)
    data = saved(Image.fromarray(photo()).convert("L"), "JPEG")
    fast = decode._decode_plain_jpeg(data, channels)
    assert fast is not None
    assert distance(fast, by_pillow(data, channels)) <= AGREEMENT


def test_everything_works_without_the_fast_decoder(monkeypatch):
    data = saved(photo(), "JPEG", quality=95)
    expected = decode_image(data)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert distance(decode_image(data), expected) <= AGREEMENT


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP"])
@pytest.mark.parametrize("channels", [3, 1])
def test_lossless_formats_come_out_as_they_went_in(kind, channels):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    picture = photo() if kind != "GIF" else np.asarray(Image.fromarray(photo()).quantize(200).convert("RGB"))
    data = saved(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = decode_image(data, channels)
    expected = picture if channels == 3 else np.asarray(Image.fromarray(picture).convert("L"))[:, :, None]
    assert (found == expected).all()


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("size", [None, (20, 30)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_arrays_are_uint8_contiguous_and_of_the_promised_shape(kind, size, channels):
    found = decode_image(saved(photo(), kind), channels, size)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.shape == (*(size or (45, 61)), channels)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [3, 1])
def test_images_are_turned_upright(orientation, kind, channels):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(photo(), kind, exif=exif)
    image = Image.open(io.BytesIO(data))
    if channels == 1:
        image.draft("L", None)  # a JPEG holds its luminance
    upright = np.asarray(ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB"))
    found = decode_image(data, channels)
    assert found.shape[:2] == ((61, 45) if orientation >= 5 else (45, 61))
    assert distance(found, upright.reshape(found.shape)) <= AGREEMENT
    if orientation > 1:
        assert found.shape[:2] != (45, 61) or distance(found[..., :1], decode_image(saved(photo(), kind), 1)) > 20


def test_an_orientation_that_only_xmp_tells_turns_the_image_as_pillow_does():
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    data = saved(photo(), "JPEG", xmp=xmp)
    assert decode_image(data).shape == by_pillow(data).shape == (61, 45, 3)


def test_an_orientation_behind_a_long_colour_profile_still_counts():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = saved(photo(), "JPEG")
    with_exif = saved(photo(), "JPEG", exif=exif)
    start = with_exif.index(b"\xff\xe1")
    segment = with_exif[start : start + 2 + int.from_bytes(with_exif[start + 2 : start + 4], "big")]
    profile = [b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes([part, 2]) + bytes(65519) for part in (1, 2)]
    data = plain[:2] + b"".join(profile) + segment + plain[2:]
    assert decode_image(data).shape == by_pillow(data).shape == (61, 45, 3)


@pytest.mark.parametrize("channels", [3, 1])
def test_cmyk_is_converted_as_pillow_does(channels):
    image = Image.fromarray(photo()).convert("CMYK")
    for kind in ("JPEG", "TIFF"):
        data = saved(image, kind)
        expected = Image.open(io.BytesIO(data)).convert("RGB" if channels == 3 else "L")
        assert (decode_image(data, channels) == np.asarray(expected).reshape(45, 61, channels)).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("channels", [3, 1])
def test_16_bit_values_keep_their_upper_half(kind, channels):
    values = np.linspace(0, 65535, 12 * 10).astype(np.uint16).reshape(12, 10)
    found = decode_image(saved(values, kind), channels)
    assert (found == np.repeat((values >> 8).astype(np.uint8)[:, :, None], channels, axis=2)).all()


def test_a_palette_with_transparency_keeps_its_colours():
    image = Image.fromarray(photo()).quantize(16)
    colours = np.asarray(image.convert("RGB"))
    for kind, transparency in (("PNG", 3), ("GIF", 3), ("PNG", bytes(range(16)))):
        data = saved(image, kind, transparency=transparency)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of a palette converted without its transparency
            assert (decode_image(data) == colours).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("channels", [3, 1])
def test_transparency_is_dropped_not_blended(mode, channels):
    image = Image.fromarray(photo()).convert(mode)
    image.putalpha(Image.fromarray(np.linspace(0, 255, 45 * 61).astype(np.uint8).reshape(45, 61)))
    found = decode_image(saved(image, "PNG"), channels)
    if mode == "RGBA" and channels == 3:
        assert (found == photo()).all()
    else:
        grey = np.asarray(Image.fromarray(photo()).convert("L"))[:, :, None]
        assert distance(found, np.repeat(grey, channels, 2)) <= 1


def test_black_and_white_becomes_0_and_255():
    image = Image.fromarray(photo()).convert("1")
    assert set(np.unique(decode_image(saved(image, "PNG")))) == {0, 255}


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_counts(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    first, second = (Image.fromarray(np.full((9, 8, 3), value, np.uint8)) for value in (40, 200))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=[second, second], **options)
    assert (decode_image(data) == 40).all()


@pytest.mark.parametrize("size", [(10, 10), (45, 61), (90, 30), (1, 1), (64, 200)])
@pytest.mark.parametrize("channels", [3, 1])
def test_a_size_gives_what_pillows_fit_gives(size, channels):
    data = saved(photo(), "PNG")
    image = Image.fromarray(photo()).convert("L" if channels == 1 else "RGB")
    expected = ImageOps.fit(image, (size[1], size[0]), method=Image.Resampling.BILINEAR)
    assert (decode_image(data, channels, size) == np.asarray(expected).reshape(*size, channels)).all()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of cut TIFF files
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_a_file_cut_short_is_refused_or_still_whole(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    data = saved(photo(), kind)
    whole = decode_image(data)
    refused = 0
    for length in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
        try:
            found = decode_image(data[:length])
        except BadImage:
            refused += 1
        else:
            assert (found == whole).all(), f"a part of the picture passes, of {length} of {len(data)} bytes"
    assert refused >= 40


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_broken_files_give_a_picture_or_a_bad_image_and_nothing_else(kind):
    needs("WebP in Pillow", kind != "WEBP" or features.check("webp"))
    data = bytearray(saved(photo(), kind))
    random = np.random.default_rng(11)
    for place in random.integers(0, min(len(data), 700), 150):
        broken = bytearray(data)
        broken[place] ^= int(random.integers(1, 256))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = decode_image(bytes(broken))
            except BadImage:
                continue
        assert found.dtype == np.uint8
        assert found.ndim == 3


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"),
        (b"\n <!DOCTYPE html><html><title>Sign in</title>", "a web page saved under an image's name"),
        (b"<HTML><body>404</body>", "a web page saved under an image's name"),
        (b"just some text", "no image; it begins with b'just som'"),
        (b"\xff\xd8", "no image"),
        (b"\x89PNG\r\n\x1a\n", "no image"),
        (bytes(1000), "no image"),
    ],
)
def test_what_is_no_image_is_named(data, reason):
    with pytest.raises(BadImage) as caught:
        decode_image(data)
    assert str(caught.value).startswith(reason)


def test_formats_that_run_programs_or_read_other_files_are_no_images():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    with pytest.raises(BadImage, match="no image"):
        decode_image(postscript)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_more_pixels_than_the_limit_are_refused_before_they_are_decoded(kind, monkeypatch):
    data = saved(photo(), kind)
    monkeypatch.setattr(decode, "MAX_PIXELS", 45 * 61)
    assert decode_image(data).shape == (45, 61, 3)
    monkeypatch.setattr(decode, "MAX_PIXELS", 45 * 61 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    if decode.simplejpeg is not None:
        monkeypatch.setattr(decode.simplejpeg, "decode_jpeg", lambda *a, **k: pytest.fail("decoded"))
    with pytest.raises(BadImage, match="61x45 pixels, more than 2744"):
        decode_image(data)


def test_a_bomb_by_pillows_own_measure_is_a_bad_image(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match="more pixels than allowed"):
        decode_image(saved(photo(), "PNG"))


def test_floating_point_pixels_have_no_8_bit_meaning():
    with pytest.raises(BadImage, match="floating-point"):
        decode_image(saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"))


def test_a_profile_and_a_comment_do_not_change_the_pixels():
    plain = decode_image(saved(photo(), "JPEG"))
    assert (decode_image(saved(photo(), "JPEG", icc_profile=bytes(300), comment=b"Exif")) == plain).all()

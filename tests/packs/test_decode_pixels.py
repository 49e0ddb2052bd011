"""Resizing matches `ImageOps.fit`; large JPEG files are scaled while decoding, with a small bounded difference."""

from __future__ import annotations

import numpy as np
import pytest
from pictures import AGREEMENT, PACKAGES, by_pillow, distance, exif, fill_row, fitted_by_pillow, photo, saved, take
from PIL import Image
from sampling import sampled

from colabkit.packs.decode import images, pixels
from colabkit.packs.decode.images import decode_image
from colabkit.packs.decode.pixels import FACTORS, choose_factor, divide_size, turn_pixels


@pytest.mark.parametrize("size", [(10, 10), (45, 61), (90, 30), (1, 1), (64, 200), (61, 45)])
@pytest.mark.parametrize("channels", [3, 1])
def test_a_resized_image_equals_that_of_pillows_fit(size, channels):
    data = saved(photo(), "PNG")
    expected = fitted_by_pillow(data, size, channels)
    found = decode_image(data, channels, size)
    assert (found == expected).all()
    assert found.flags.c_contiguous
    row = np.empty((*size, channels), np.uint8)
    fill_row(data, row, fit=True)
    assert (row == expected).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_image_is_resized_as_if_it_were_upright(orientation, kind):
    data = saved(photo(), kind, exif=exif(orientation))
    for size in ((30, 20), (20, 30), (45, 61), (61, 45)):
        expected = fitted_by_pillow(data, size)
        found = decode_image(data, 3, size)
        row = np.empty((*size, 3), np.uint8)
        fill_row(data, row, fit=True)
        assert distance(found, expected) <= (1 if kind != "JPEG" else 1 + AGREEMENT)
        assert (row == found).all()


def grained(height: int, width: int) -> np.ndarray:
    """Return a picture with the detail of a photo: blurred noise of several scales."""
    random = np.random.default_rng(1)
    total = np.full((height, width, 3), 128.0)
    for step in (1, 2, 4, 16, 64):
        coarse = random.normal(0, 4 * step**0.5, (height // step + 2, width // step + 2, 3)).clip(-127, 127) + 128
        scaled = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(scaled).astype(float) - 128
    return total.clip(0, 255).astype(np.uint8)


@pytest.mark.full
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("shape", "size"), sampled([((401, 603), (100, 100)), ((803, 1001), (96, 64)), ((1603, 805), (64, 50))], 2)
)
def test_a_large_jpeg_resizes_nearly_as_if_it_were_decoded_in_full(shape, size, package, monkeypatch):
    take(package, monkeypatch)
    for options in ({}, {"exif": exif(6)}, {"progressive": True}):
        data = saved(grained(*shape), "JPEG", quality=90, **options)
        expected = fitted_by_pillow(data, size).astype(int)
        found = decode_image(data, 3, size)
        error = np.abs(found - expected)
        assert error.mean() <= 1.4
        assert np.quantile(error, 0.999) <= 8


FACTORS_OF = [
    ((400, 600), (100, 100), 1, 2),
    ((399, 600), (100, 100), 1, 1),
    ((400, 600), (100, 150), 1, 2),
    ((400, 600), (100, 151), 1, 1),
    ((400, 600), (150, 100), 1, 1),
    ((400, 600), (150, 100), 6, 2),
    ((3000, 4000), (224, 224), 1, 4),
    ((4000, 6000), (224, 224), 8, 8),
    ((40000, 60000), (224, 224), 1, 8),
    ((400, 600), None, 1, 1),
]


def test_decoding_keeps_at_least_twice_the_requested_size():
    for stored, wanted, orientation, factor in FACTORS_OF:
        assert choose_factor(stored, orientation, wanted) == factor


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("shape", [(64, 64), (65, 63), (71, 129), (97, 33), (9, 11)])
def test_decoders_scale_by_exactly_the_chosen_factor(shape, channels, monkeypatch):
    data = saved(photo(*shape), "JPEG", quality=95)
    for factor in FACTORS:
        monkeypatch.setattr(images, "choose_factor", lambda *a, factor=factor: factor)
        monkeypatch.setattr(pixels, "choose_factor", lambda *a, factor=factor: factor)
        scaled = []
        for package in ("simplejpeg", None):
            take(package, monkeypatch)
            found, stored, _ = images._decode(data, channels, (1, 1))
            assert stored == shape
            assert found.shape == (*divide_size(shape, factor), channels)
            scaled.append(found)
        assert distance(*scaled) <= AGREEMENT


def test_the_smallest_images_are_resized_correctly():
    for side in range(1, 40):
        data = saved(photo(side, 200), "JPEG", quality=100, subsampling=0)
        error = np.abs(decode_image(data, 3, (1, 3)) - fitted_by_pillow(data, (1, 3)).astype(int))
        # In images with so few pixels, the edges cause larger differences.
        assert error.max() <= 16


def test_cmyk_files_are_scaled_while_decoding(monkeypatch):
    data = saved(Image.fromarray(photo(400, 600)).convert("CMYK"), "JPEG", quality=90)
    expected = fitted_by_pillow(data, (50, 50)).astype(int)
    assert np.abs(decode_image(data, 3, (50, 50)) - expected).mean() <= 1.4
    assert images._decode(data, 3, (50, 50))[0].shape == (100, 150, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [3, 1])
def test_applying_orientation_matches_pillow_exactly(orientation, channels):
    pixels = np.random.default_rng(2).integers(0, 256, (7, 5, channels), dtype=np.uint8)
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    data = saved(image, "PNG", exif=exif(orientation))
    found = turn_pixels(pixels, orientation)
    assert found.flags.c_contiguous
    assert (found == by_pillow(data, channels)).all()
    assert (turn_pixels(np.repeat(pixels, 2, 1)[:, ::2], orientation) == found).all()

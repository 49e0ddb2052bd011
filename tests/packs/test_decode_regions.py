"""Decoding a box of an image takes less work than a full decode; it returns the same pixels, or None."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from pictures import exif, photo, saved, take
from PIL import Image

from colabkit.packs.decode import images, jpeg
from colabkit.packs.decode.images import Region, decode_image, decode_region, image_size

HEIGHT, WIDTH = 301, 211
SUBSAMPLINGS = ["444", "422", "420", "440", "411"]
BOXES: list[Region] = [
    *((0, 0, 1, 1), (0, 0, 30, WIDTH), (0, 17, 31, 33), (1, 5, 31, 40), (15, 0, 17, 16), (16, 16, 16, 16)),
    *((31, 3, 1, 7), (32, 100, 32, 111), (63, 0, 65, 9), (100, 50, 60, 70), (150, 0, 38, WIDTH)),
]


@pytest.fixture(autouse=True)
def _use_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    take("simplejpeg", monkeypatch)


def sampled(pixels: np.ndarray, subsampling: str, quality: int = 90) -> bytes:
    """Return a baseline JPEG; its subsampling may be one that Pillow cannot write."""
    import simplejpeg

    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality, colorsubsampling=subsampling)


def boxed(data: bytes, region: Region, channels: int = 3, wanted: tuple[int, int] | None = None) -> np.ndarray | None:
    """Decode a box with `decode_region`; return None if a full decode is required."""
    found = decode_region(data, channels, region, wanted or region[2:], image_size(data))
    if found is None:
        return None
    pixels, (top, left, height, width) = found
    return pixels[top : top + height, left : left + width]


def crop(data: bytes, region: Region, channels: int = 3) -> np.ndarray:
    top, left, height, width = region
    return decode_image(data, channels)[top : top + height, left : left + width]


def noisy(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Return a photo with noise, so that all rows of blocks differ."""
    grain = np.random.default_rng(3).integers(-40, 40, (height, width, 3))
    return np.clip(photo(height, width).astype(int) + grain, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_a_box_has_the_same_pixels_as_in_a_full_decode(subsampling, channels):
    data = sampled(noisy(), subsampling)
    for region in BOXES:
        found = boxed(data, region, channels)
        assert found is not None, region
        assert np.array_equal(found, crop(data, region, channels)), region


@pytest.mark.parametrize("size", [(113, 16), (127, 15), (128, 17), (129, 1), (143, 8), (400, 333)])
@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_boxes_of_any_height_in_images_of_odd_sizes_are_exact(subsampling, size):
    data = sampled(noisy(*size), subsampling, quality=60)
    found = [(height, boxed(data, (0, 0, height, size[1]))) for height in range(1, size[0], 3)]
    assert sum(pixels is not None for _, pixels in found) >= (size[0] - 111) // 3
    for height, pixels in found:
        assert pixels is None or np.array_equal(pixels, crop(data, (0, 0, height, size[1]))), height


@pytest.mark.parametrize("restart", [{"restart_marker_rows": 1}, {"restart_marker_blocks": 3}])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_boxes_are_exact_with_restart_intervals(subsampling, restart):
    data = saved(noisy(), "JPEG", subsampling=subsampling, **restart)
    assert b"\xff\xd3" in data
    for region in BOXES:
        assert np.array_equal(boxed(data, region), crop(data, region)), region


@pytest.mark.parametrize("options", [{"optimize": True}, {"keep_rgb": True}, {"comment": b"\xff\xd9" * 9}])
def test_boxes_of_other_baseline_files_are_exact(options):
    for picture in (noisy(), np.asarray(Image.fromarray(noisy()).convert("L"))):
        data = saved(picture, "JPEG", **({} if picture.ndim == 2 and "keep_rgb" in options else options))
        for channels in (3, 1):
            found = boxed(data, (40, 9, 60, 100), channels)
            assert np.array_equal(found, crop(data, (40, 9, 60, 100), channels))


def segments(data: bytes) -> dict[int, bytes]:
    """Return the last segment of each marker in a JPEG.

    Key 0 holds the data of the scan, and key 1 all quantization and Huffman tables.
    """
    at, found, tables = 2, {}, b""
    while True:
        marker, length = struct.unpack_from(">HH", data, at)
        piece = data[at : at + 2 + length]
        tables += piece if marker in (0xFFDB, 0xFFC4) else b""
        found[marker] = piece
        at += 2 + length
        if marker == 0xFFDA:
            return {**found, 0: data[at:-2], 1: tables}


def test_boxes_of_a_file_with_one_scan_for_each_color_are_exact():
    planes = [segments(saved(noisy()[:, :, plane], "JPEG")) for plane in range(3)]
    height, width = HEIGHT, WIDTH
    frame = struct.pack(">HHBHHB", 0xFFC0, 17, 8, height, width, 3) + b"".join(
        bytes((number, 0x11, 0)) for number in (1, 2, 3)
    )
    scans = b"".join(
        struct.pack(">HHBBBBBB", 0xFFDA, 8, 1, number, 0, 0, 63, 0) + plane[0] for number, plane in enumerate(planes, 1)
    )
    data = b"\xff\xd8" + planes[0][1] + frame + scans + b"\xff\xd9"
    assert np.array_equal(
        crop(data, (0, 0, height, width), 1)[..., 0], decode_image(saved(noisy()[:, :, 0], "JPEG"), 1)[..., 0]
    )
    for region in BOXES:
        found = boxed(data, region)
        assert found is None or np.array_equal(found, crop(data, region)), region


def test_only_the_rows_of_the_box_are_decoded():
    found = decode_region(sampled(noisy(), "420"), 3, (8, 8, 30, 30), (30, 30), (HEIGHT, WIDTH))
    assert found is not None
    assert found[0].shape == (96, WIDTH, 3)
    assert found[1] == (8, 8, 30, 30)


def test_a_box_near_the_bottom_is_left_to_a_full_decode():
    data = sampled(noisy(), "420")
    for region in ((0, 0, HEIGHT, WIDTH), (HEIGHT - 1, 0, 1, 1), (HEIGHT - 60, 5, 20, 20)):
        assert boxed(data, region) is None


@pytest.mark.parametrize("orientation", range(2, 9))
def test_rotated_images_are_left_to_a_full_decode(orientation):
    data = saved(noisy(), "JPEG", exif=exif(orientation))
    assert boxed(data, (0, 0, 20, 20)) is None
    assert boxed(data, (0, 0, 200, 200), wanted=(20, 20)) is None


@pytest.mark.parametrize(
    "data",
    [
        saved(noisy(), "JPEG", progressive=True),
        saved(Image.fromarray(noisy()).convert("CMYK"), "JPEG"),
        saved(noisy(), "PNG"),
        saved(noisy(), "WEBP"),
    ],
    ids=["progressive", "CMYK", "PNG", "WEBP"],
)
def test_other_formats_are_left_to_a_full_decode(data):
    assert boxed(data, (0, 0, 20, 20)) is None


@pytest.mark.parametrize("restart", [{}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("wanted", [(40, 40), (10, 10)])
def test_truncated_files_are_left_to_a_full_decode(wanted, restart):
    data = saved(noisy(), "JPEG", **restart)
    begin = data.index(b"\xff\xda")
    for end in (*range(begin, len(data), 997), len(data) - 20, len(data) - 2, len(data) - 1):
        for tail in (b"", bytes(7), bytes(5000)):
            cut = data[:end] + tail
            assert decode_region(cut, 3, (0, 0, 40, 40), wanted, (HEIGHT, WIDTH)) is None, (end, len(tail))


def test_a_truncated_file_with_a_complete_preview_is_left_to_a_full_decode():
    preview = saved(noisy(40, 40), "JPEG")
    about = exif(1)
    data = saved(noisy(), "JPEG", exif=b"Exif\0\0" + about.tobytes()[6:] + preview)
    assert preview in data
    assert np.array_equal(boxed(data, (5, 5, 40, 40)), crop(data, (5, 5, 40, 40)))
    for end in (data.index(preview) + len(preview), len(data) // 2):
        assert decode_region(data[:end], 3, (0, 0, 40, 40), (40, 40), (HEIGHT, WIDTH)) is None


@pytest.mark.parametrize("restart", [{}, {"restart_marker_rows": 1}])
@pytest.mark.parametrize("damage", ["a piece is missing", "zeros", "noise", "another end"])
def test_a_box_of_a_damaged_file_equals_the_full_decode_or_is_none(damage, restart):
    data = saved(noisy(), "JPEG", **restart)
    begin, random = data.index(b"\xff\xda") + 14, np.random.default_rng(5)
    for at in range(begin, len(data) - 2100, 1999):
        broken = {
            "a piece is missing": data[:at] + data[at + 2000 :],
            "zeros": data[:at] + bytes(2000) + data[at + 2000 :],
            "noise": data[:at] + random.bytes(2000) + data[at + 2000 :],
            "another end": data[:at] + b"\xff\xd9" + data[at + 2000 :],
        }[damage]
        try:
            found = boxed(broken, (0, 0, 150, WIDTH))
        except Exception as error:
            pytest.fail(f"{at}: {error!r}")
        if found is not None:
            assert np.array_equal(found, crop(broken, (0, 0, 150, WIDTH))), at


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_large_box_is_scaled_while_decoding_and_keeps_its_position(factor, progressive):
    data = saved(photo(1211, 1403), "JPEG", quality=95, progressive=progressive)
    region = (96, 200, 803, 961)
    found = decode_region(data, 3, region, (800 // factor, 960 // factor), (1211, 1403))
    assert found is not None
    pixels, box = found
    assert pixels.shape == (-(-1211 // factor), -(-1403 // factor), 3)
    assert box == tuple(side / factor for side in region)
    height, width = 800 // factor, 960 // factor
    whole = Image.fromarray(decode_image(data))
    expected = np.asarray(whole.resize((width, height), Image.Resampling.BOX, box=(200, 96, 1160, 896)))
    top, left = 96 // factor, 200 // factor
    difference = np.abs(pixels[top : top + height, left : left + width].astype(int) - expected)
    assert difference.mean() < 0.6
    assert difference.max() <= 6


@pytest.mark.parametrize(("corner", "factor"), [((96, 200), 8), ((100, 200), 4), ((98, 204), 2), ((97, 200), 1)])
def test_an_image_is_scaled_only_as_far_as_the_corner_of_the_box_allows(corner, factor):
    data = saved(photo(1211, 1403), "JPEG", quality=95)
    found = decode_region(data, 3, (*corner, 800, 960), (100, 120), (1211, 1403))
    assert found is not None
    assert found[1] == (corner[0] / factor, corner[1] / factor, 800 / factor, 960 / factor)


@pytest.mark.parametrize("package", ["torchcodec", "torchvision", None])
def test_decoders_without_partial_decoding_return_none(package, monkeypatch):
    take(package, monkeypatch)
    chosen = None if package is None else jpeg.PROBES[package]()
    monkeypatch.setattr(images, "find_decoder", lambda: chosen)
    assert boxed(saved(noisy(), "JPEG"), (0, 0, 20, 20)) is None

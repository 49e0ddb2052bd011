"""JPEG decoders agree with Pillow, the first working decoder is used, and unusual headers are left to Pillow."""

from __future__ import annotations

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from types import ModuleType

import numpy as np
import pytest
from pictures import (
    AGREEMENT,
    PACKAGES,
    by_pillow,
    distance,
    exif,
    fill_row,
    noise,
    photo,
    png,
    saved,
    take,
    without_pillow,
)
from PIL import Image

from colabkit.errors import BadImage
from colabkit.packs.decode import jpeg
from colabkit.packs.decode.images import check_image, decode_image, image_size
from colabkit.packs.decode.jpeg import encode_jpeg, read_plain_header

XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def segment_of(data: bytes, marker: bytes) -> tuple[int, int]:
    start = data.index(marker)
    return start, start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("package", PACKAGES)
def test_every_decoder_agrees_with_pillow(package, progressive, subsampling, channels, monkeypatch):
    take(package, monkeypatch)
    files = [
        saved(picture, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
        for picture in (photo(), photo(16, 16), photo(1, 1), photo(7, 100), noise())
        for quality in (30, 95)
    ]
    files += [saved(Image.fromarray(photo()).convert("L"), "JPEG"), saved(photo(), "JPEG", keep_rgb=True)]
    expected = [by_pillow(data, channels) for data in files]
    if package is not None:
        without_pillow(monkeypatch)
    for data, picture in zip(files, expected, strict=True):
        found = decode_image(data, channels)
        row = np.full((2, *picture.shape), 77, np.uint8)[1]
        fill_row(data, row)
        assert found.flags.c_contiguous
        assert distance(found, picture) <= AGREEMENT
        assert (row == found).all()
        if package in (None, "simplejpeg"):
            assert check_image(data) == picture.shape[:2]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("package", PACKAGES)
def test_every_decoder_applies_orientation_like_pillow_does(package, orientation, monkeypatch):
    take(package, monkeypatch)
    files = [saved(photo(), "JPEG", exif=exif(orientation)), saved(photo(), "JPEG", exif=exif(orientation), xmp=XMP)]
    start, end = segment_of(files[0], b"\xff\xe1")
    big_endian = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0" + bytes([orientation]) + bytes(6)
    files.append(
        files[0][:start] + b"\xff\xe1" + (2 + len(big_endian)).to_bytes(2, "big") + big_endian + files[0][end:]
    )
    profiles = [b"\xff\xe2\xff\xffICC_PROFILE\0" + bytes([part, 2]) + bytes(65519) for part in (1, 2)]
    files.append(files[0][:2] + b"".join(profiles) + files[0][2:])
    expected = [(by_pillow(data, 3), by_pillow(data, 1)) for data in files]
    # torchcodec has different orientation rules, so Pillow decodes these files instead.
    if package in ("simplejpeg", "torchvision"):
        without_pillow(monkeypatch)
    for data, (colour, grey) in zip(files, expected, strict=True):
        assert distance(decode_image(data), colour) <= AGREEMENT
        assert distance(decode_image(data, 1), grey) <= AGREEMENT
        assert image_size(data) == colour.shape[:2] == ((61, 45) if orientation >= 5 else (45, 61))


def test_an_orientation_only_in_xmp_is_applied_like_pillow_does():
    data = saved(photo(), "JPEG", xmp=XMP)
    assert decode_image(data).shape == by_pillow(data).shape == (61, 45, 3)
    assert image_size(data) == check_image(data) == (61, 45)
    other = Image.Exif()
    other[0x010F] = "Maker"
    data = saved(photo(), "JPEG", xmp=XMP, exif=other)
    assert decode_image(data).shape == by_pillow(data).shape == (61, 45, 3)


# Ignore Pillow's warnings about corrupt EXIF.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_has_the_same_effect_as_in_pillow():
    data = saved(photo(), "JPEG", exif=exif(6))
    start, end = segment_of(data, b"\xff\xe1")
    random = np.random.default_rng(3)
    plain, seen = saved(photo(), "JPEG"), set()
    for place in [*range(start + 4, end), *random.integers(start + 4, end, 100)]:
        broken = bytearray(data)
        broken[place] ^= int(random.integers(1, 256))
        try:
            orientation = Image.open(io.BytesIO(broken)).getexif().get(0x0112, 1)
        except Exception:
            # Damaged EXIF can raise any error in Pillow.
            orientation = 1
        turned = orientation in range(2, 9)
        expected = by_pillow(saved(photo(), "JPEG", exif=exif(orientation)) if turned else plain)
        assert distance(decode_image(bytes(broken)), expected) <= AGREEMENT
        seen.add(orientation)
    assert {1, 6} < seen
    cut = data[: start + 4] + b"Exif\0\0II" + data[end:]
    cut = cut[: start + 2] + (10).to_bytes(2, "big") + cut[start + 4 :]
    assert decode_image(cut).shape == (45, 61, 3)


def test_unusual_headers_are_left_to_pillow():
    data = saved(photo(), "JPEG")
    assert jpeg.read_header(data) == (45, 61, 3, 1)
    noted = saved(photo(), "JPEG", icc_profile=bytes(300), comment=b"Exif")
    assert (decode_image(noted) == decode_image(data)).all()
    start, end = segment_of(data, b"\xff\xc0")
    frame = data[start:end]
    odd = {
        "two frames": data[:start] + frame + data[start:],
        "12 bits": data[: start + 4] + b"\x0c" + data[start + 5 :],
        "no height yet": data[: start + 5] + b"\0\0" + data[start + 7 :],
        "lossless": data[: start + 1] + b"\xc3" + data[start + 2 :],
        "a fill byte": data[:2] + b"\xff" + data[2:],
        "garbage between segments": data[:start] + b"garbage" + data[start:],
        "a length of 0": data[: start + 2] + b"\0\0" + data[start + 4 :],
        "two directories": saved(photo(), "JPEG", exif=exif(6))[:2] + saved(photo(), "JPEG", exif=exif(6))[2:],
    }
    one, until = segment_of(odd["two directories"], b"\xff\xe1")
    odd["two directories"] = odd["two directories"][:until] + odd["two directories"][one:]
    for name, header in odd.items():
        assert jpeg.read_header(header) is None, name
    for length in range(data.index(b"\xff\xda") + 2):
        assert jpeg.read_header(data[:length]) is None
    assert (decode_image(odd["a fill byte"]) == decode_image(data)).all()


def test_a_jpeg_with_a_flaw_that_pillow_ignores_is_decoded():
    data = saved(photo(), "JPEG")
    # The first file has extra bytes between the image data and the end marker.
    # In the second file, the image data is truncated and followed by an end marker.
    stray = data[:-2] + b"\0\0\0" + data[-2:]
    ended = data[: len(data) * 2 // 3] + b"\xff\xd9"
    for flawed in (stray, ended):
        with pytest.raises(ValueError, match="Corrupt JPEG data"):
            jpeg.PROBES["simplejpeg"]().decode(flawed, 3)
        assert distance(decode_image(flawed), by_pillow(flawed)) <= AGREEMENT
        row = np.empty((45, 61, 3), np.uint8)
        fill_row(flawed, row)
        assert (row == decode_image(flawed)).all()
        assert check_image(flawed) == (45, 61)


def fake_torch_packages(monkeypatch: pytest.MonkeyPatch, codec: ModuleType, vision: ModuleType) -> None:
    for name in ("torchcodec", "torchvision"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", codec)
    monkeypatch.setitem(sys.modules, "torchvision.io", vision)


@pytest.fixture
def probed():
    jpeg.find_decoder.cache_clear()
    yield jpeg.find_decoder
    jpeg.find_decoder.cache_clear()


def test_the_first_installed_decoder_is_used(probed, monkeypatch):
    for package in PACKAGES[:3]:
        # `take` skips the test if a package is missing.
        take(package, monkeypatch)
    for package in PACKAGES:
        probed.cache_clear()
        found = probed()
        assert (found.name if found else None) == package
        if package is not None:
            monkeypatch.setitem(sys.modules, package, None)
            for module in [name for name in sys.modules if name.startswith(f"{package}.")]:
                monkeypatch.setitem(sys.modules, module, None)


def test_a_broken_installation_counts_as_missing(probed, monkeypatch):
    def module(decode: object) -> ModuleType:
        found = ModuleType("made up")
        found.ImageReadMode = type("ImageReadMode", (), {"RGB": 1, "GRAY": 2})
        if decode is not None:
            found.decode_jpeg = decode
        return found

    def missing_operator(*a: object, **k: object) -> None:
        raise RuntimeError("Couldn't load the image extension")

    class Tensor:
        def __init__(self, value: int) -> None:
            self.value = value

        def numpy(self) -> np.ndarray:
            return np.full((3, 8, 16), self.value, np.uint8)

    class WrongAbi(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise ValueError("numpy.dtype size changed")

    monkeypatch.setitem(sys.modules, "simplejpeg", WrongAbi("simplejpeg"))
    right, wrong = (module(lambda *a, value=value, **k: Tensor(value)) for value in (100, 90))
    for broken in (module(None), module(missing_operator), wrong):
        fake_torch_packages(monkeypatch, broken, right)
        probed.cache_clear()
        assert probed().name == "torchvision"
        fake_torch_packages(monkeypatch, broken, broken)
        probed.cache_clear()
        assert probed() is None
    fake_torch_packages(monkeypatch, right, wrong)
    probed.cache_clear()
    assert probed().name == "torchcodec"


def test_decoding_with_simplejpeg_does_not_import_torch():
    code = (
        "import sys; from colabkit.packs.decode.images import *;"
        "from colabkit.packs.decode.jpeg import TRIAL, find_decoder;"
        "assert decode_image(TRIAL).shape == (8, 16, 3); check_image(TRIAL); decode_image(TRIAL, 1, (4, 4));"
        "assert find_decoder().name == 'simplejpeg';"
        "print([name for name in sys.modules if name.startswith('torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_threads_and_forked_processes_decode_the_same_pixels():
    files = [saved(photo(40 + n, 50, n), "JPEG", exif=exif(1 + n % 8)) for n in range(16)]
    expected = [decode_image(data, 3, (20, 30)) for data in files]
    with ThreadPoolExecutor(8) as threads:
        for found, picture in zip(threads.map(fit, files * 10), expected * 10, strict=True):
            assert (found == picture).all()
        # Fork while the decoder's threads are running.
        with get_context("fork").Pool(2) as processes:
            for found, picture in zip(processes.map_async(fit, files).get(60), expected, strict=True):
                assert (found == picture).all()


def fit(data: bytes) -> np.ndarray:
    return decode_image(data, 3, (20, 30))


@pytest.mark.parametrize("package", ["simplejpeg", None])
@pytest.mark.parametrize("channels", [3, 1])
def test_encoded_jpegs_match_pillows_size_and_quality(channels, package, monkeypatch):
    take(package, monkeypatch)
    pixels = photo() if channels == 3 else np.asarray(Image.fromarray(photo()).convert("L"))[:, :, None]
    picture = pixels if channels == 3 else Image.fromarray(pixels[:, :, 0])
    for quality in (30, 90, 100):
        data = encode_jpeg(pixels, quality)
        expected = saved(picture, "JPEG", quality=quality, subsampling="4:2:0")
        loss, usual = (np.abs(by_pillow(file, channels).astype(int) - pixels).mean() for file in (data, expected))
        assert loss <= usual + 0.1
        assert abs(len(data) - len(expected)) <= 0.02 * len(expected)
    assert (by_pillow(encode_jpeg(pixels[::-1], 90)) == by_pillow(encode_jpeg(pixels[::-1].copy(), 90))).all()


@pytest.mark.parametrize("package", ["simplejpeg", None])
@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (70000, 1, 3), (4, 4, 4), (4, 4)])
def test_pixels_that_jpeg_cannot_store_raise(shape, package, monkeypatch):
    take(package, monkeypatch)
    with pytest.raises(BadImage):
        encode_jpeg(np.zeros(shape, np.uint8), 90)
    with pytest.raises(BadImage, match="float32"):
        encode_jpeg(np.zeros((4, 4, 3), np.float32), 90)


def test_only_complete_files_in_gray_or_ycbcr_are_plain():
    pixels = photo()
    plain, gray = saved(pixels, "JPEG"), saved(Image.fromarray(pixels).convert("L"), "JPEG")
    turned = saved(pixels, "JPEG", exif=exif(6), progressive=True)
    assert [read_plain_header(file) for file in (plain, gray, turned, plain + b"\0" * 9)] == [
        (45, 61, 3, 1),
        (45, 61, 1, 1),
        (45, 61, 3, 6),
        (45, 61, 3, 1),
    ]
    # Photoshop writes an Adobe segment instead of JFIF; its last byte is the transform: 0 for RGB, 1 for YCbCr.
    start, adobe = plain.index(b"\xff\xdb"), b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0"
    by_adobe = {byte: plain[:2] + adobe + bytes([byte]) + plain[start:] for byte in (0, 1)}
    assert read_plain_header(by_adobe[1]) == (45, 61, 3, 1)
    cmyk = saved(Image.fromarray(pixels).convert("CMYK"), "JPEG")
    rgb = saved(pixels, "JPEG", keep_rgb=True)
    for file in (by_adobe[0], cmyk, rgb, plain[:-2], plain[:-40], png(pixels), b"", b"\xff\xd8\xff\xd9"):
        assert read_plain_header(file) is None
    # Pillow reads these colors in the same way.
    assert np.abs(by_pillow(by_adobe[1]).astype(int) - by_pillow(plain)).max() <= AGREEMENT
    assert np.abs(by_pillow(by_adobe[0]).astype(int) - by_pillow(plain)).max() > AGREEMENT

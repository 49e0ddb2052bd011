"""JPEG files: headers, decoders that are faster than Pillow, and the encoder.

`read_header` reads size, components and orientation without decoding. It parses segments according to ITU-T T.81, annex
B, and EXIF according to CIPA DC-008 (a TIFF header and its first directory). Unusual headers are left to Pillow.

`find_decoder` prefers simplejpeg because it scales while decoding and fills a given array. Next are torchcodec (0.16 or
later has `decode_jpeg`) and torchvision, which is preinstalled in Colab. torch is imported only if simplejpeg is
missing. A package that is installed but broken counts as missing: each must decode a small image first.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image

from colabkit.foundation import BadImage
from colabkit.packs.decode.pixels import Data, Pixels, Size

Header = tuple[int, int, int, int]
"""Height and width as stored, number of components, and orientation from 1 to 8; a plain tuple for speed."""

# Markers of baseline, extended and progressive frames.
FRAMES = frozenset((0xFFC0, 0xFFC1, 0xFFC2))
SOS = 0xFFDA
APP1 = 0xFFE1
# Segments to skip: DHT, DQT, DRI, COM, APPn.
PASSED = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0))) - {APP1}
EXIF = b"Exif\x00\x00"
ORIENTATION = 0x0112
SHORT = 3
TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}

MAX_SIDE = 65_500
"""libjpeg's limit; the format itself allows 65,535."""

TRIAL = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300080606070605080707070909080a0c140d0c0b0b0c1912130f141d1a1f"
    "1e1d1a1c1c20242e2720222c231c1c2837292c30313434341f27393d38323c2e333432ffc0000b080008001001011100ffc400150001"
    "0100000000000000000000000000000005ffc40014100100000000000000000000000000000000ffda0008010100003f00863fffd9"
)
"""A JPEG 8 pixels high and 16 wide, all of value 100, written by Pillow."""

END = b"\xff\xd9"

# Start of the scan of a file with three components, the first of which is named "R".
_RGB_SCAN = b"\xff\xda\x00\x0c\x03R"
_ADOBE = b"Adobe\x00"
# Offset of the color transform from the start of the Adobe segment's content.
_TRANSFORM = 11
# libjpeg's message for data after the last row.
_ROWS_LEFT = "extraneous bytes before marker"

_LATEST: list[tuple[bytes, Header | None]] = [(b"\xff\xd8\0", None)]
"""Bytes of the last header up to its scan, and the parsed header."""

_marker_and_length = struct.Struct(">HH").unpack_from
# Frame header: the bits per value, the height, the width and the number of components.
_frame = struct.Struct(">BHHB").unpack_from


def read_header(data: Data) -> Header | None:
    """Return a JPEG's header; None for other formats, and for unusual or truncated headers, which are left to Pillow.

    `data` must include the entire header, up to the first scan.
    """
    head, header = _LATEST[0]
    # Reuse the last result, because the files of a dataset often have the same header.
    if isinstance(data, bytes) and data.startswith(head):
        return header
    if data[:2] != b"\xff\xd8":
        return None
    at, frame = 2, None
    segments: list[bytes] = []
    try:
        while True:
            marker, length = _marker_and_length(data, at)
            if marker not in PASSED:
                if marker == SOS:
                    break
                if marker in FRAMES and frame is None:
                    frame = _frame(data, at + 4)
                elif marker == APP1:
                    segments.append(bytes(data[at + 4 : at + 2 + length]))
                else:
                    return None
            at += 2 + length
        if frame is None:
            return None
        bits, height, width, components = frame
        orientation = _orientation(segments) if segments else 1
    except struct.error:
        # The header is truncated, so leave the file to Pillow.
        return None
    if bits != 8 or not height or not width or orientation is None:
        return None
    header = height, width, components, orientation
    _LATEST[0] = bytes(data[: at + 4]), header
    return header


def read_plain_header(data: bytes) -> Header | None:
    """Return the header of a JPEG in grayscale or YCbCr that ends with its end marker; None for all other files.

    GPU decoders differ from libjpeg for other colors, and some decode truncated files. libjpeg takes three components
    for RGB if the Adobe segment or their names say so, unless the file has a JFIF segment.
    """
    header = read_header(data)
    if header is None or header[2] not in (1, 3) or not has_end(data):
        return None
    if header[2] == 3 and data[6:10] != b"JFIF":
        adobe = data.find(_ADOBE)
        if _RGB_SCAN in data or (adobe >= 0 and not data[adobe + _TRANSFORM]):
            return None
    return header


def has_end(data: Data) -> bool:
    """Return whether a JPEG ends with its end marker, apart from up to 14 zeros."""
    return bytes(data[-16:]).rstrip(b"\0").endswith(END)


def _orientation(segments: list[bytes]) -> int | None:
    exif = [segment for segment in segments if segment.startswith(EXIF)]
    if len(exif) > 1:
        # The EXIF directory may be split across several segments, so leave the file to Pillow.
        return None
    found = _exif_orientation(exif[0][len(EXIF) :]) if exif else 0
    if found == 0:
        return None if any(b"tiff:Orientation" in segment for segment in segments) else 1
    return found


def _exif_orientation(tiff: bytes) -> int | None:
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None:
        return None
    found = 0
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    (entries,) = struct.unpack_from(order + "H", tiff, start)
    for entry in range(start + 2, start + 2 + 12 * entries, 12):
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, entry)
        (place,) = struct.unpack_from(order + "I", tiff, entry + 8)
        length = count * TYPE_BYTES.get(kind, len(tiff))
        if length > 4 and place + length > len(tiff):
            # Pillow stops reading the EXIF directory at such an entry, so leave the file to Pillow.
            return None
        if tag == ORIENTATION:
            if found or kind != SHORT or count != 1 or not 1 <= value <= 8:
                return None
            found = value
    return found


@dataclass(frozen=True)
class JpegDecoder:
    """A decoder for JPEG files of one or three components; it raises ValueError or RuntimeError for any flaw.

    Attributes:
        name: name of the package.
        decode: takes the file's bytes and channels (1 or 3), returns `uint8 [H, W, C]`.
        decode_scaled: also takes a height and a width, and returns the smallest image of at least this size that
            libjpeg can produce; None if not supported.
        decode_into: takes the file's bytes and a C-contiguous array of the image's shape to fill; None if not
            supported.
        decode_top: like `decode_into`, but accepts a file with more rows than its header declares; None if not
            supported.
        turns: whether the decoder applies the orientation. Such a decoder is used only for upright images, because its
            rules differ from Pillow's.
    """

    name: str
    decode: Callable[[Data, int], Pixels]
    decode_scaled: Callable[[Data, int, Size], Pixels] | None = None
    decode_into: Callable[[Data, Pixels], object] | None = None
    decode_top: Callable[[Data, Pixels], object] | None = None
    turns: bool = False


@functools.cache
def find_decoder() -> JpegDecoder | None:
    """Return the first decoder that is installed and works; None if Pillow must decode all files."""
    for probe in PROBES.values():
        try:
            found = probe()
            if _works(found):
                return found
        except Exception:  # noqa: S112 - a broken installation can raise any error
            continue
    return None


def _simplejpeg() -> JpegDecoder:
    import simplejpeg

    decode_jpeg = simplejpeg.decode_jpeg
    names = {3: "RGB", 1: "GRAY"}

    def decode(data: Data, channels: int) -> Pixels:
        pixels: Pixels = decode_jpeg(data, names[channels])
        return pixels

    def decode_scaled(data: Data, channels: int, least: Size) -> Pixels:
        pixels: Pixels = decode_jpeg(data, names[channels], min_height=least[0], min_width=least[1])
        return pixels

    def decode_into(data: Data, out: Pixels) -> None:
        decode_jpeg(data, names[out.shape[2]], buffer=out)

    def decode_top(data: Data, out: Pixels) -> None:
        try:
            decode_into(data, out)
        except ValueError as error:
            # simplejpeg raises only after decoding all rows, and reports the first flaw.
            if _ROWS_LEFT not in str(error):
                raise

    return JpegDecoder("simplejpeg", decode, decode_scaled, decode_into, decode_top)


def _torchcodec() -> JpegDecoder:
    decode_jpeg = import_module("torchcodec.decoders").decode_jpeg
    return JpegDecoder(
        "torchcodec",
        lambda data, channels: _as_rows(decode_jpeg(bytes(data), mode="RGB" if channels == 3 else "GRAY")),
        turns=True,
    )


def _torchvision() -> JpegDecoder:
    import torch

    io = import_module("torchvision.io")
    modes = {3: io.ImageReadMode.RGB, 1: io.ImageReadMode.GRAY}

    def decode(data: Data, channels: int) -> Pixels:
        # Copy the bytes, because torch warns about read-only memory.
        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return _as_rows(io.decode_jpeg(file, mode=modes[channels]))

    return JpegDecoder("torchvision", decode)


PROBES: dict[str, Callable[[], JpegDecoder]] = {
    "simplejpeg": _simplejpeg,
    "torchcodec": _torchcodec,
    "torchvision": _torchvision,
}
"""Decoders by name in order of preference; each function raises an error if its package cannot be imported."""


def _as_rows(tensor: Any) -> Pixels:
    # Use NumPy, because torch's threads do not survive a fork.
    return np.ascontiguousarray(tensor.numpy().transpose(1, 2, 0))


def _works(found: JpegDecoder) -> bool:
    results = {(8, 16): found.decode(TRIAL, 3)}
    if found.decode_scaled:
        results[4, 8] = found.decode_scaled(TRIAL, 3, (4, 8))
    if found.decode_into:
        found.decode_into(TRIAL, np.empty((8, 16, 3), np.uint8))
    return all(
        pixels.shape == (*size, 3) and int(np.abs(pixels.astype(int) - 100).max()) <= 2
        for size, pixels in results.items()
    )


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Encode `uint8 [H, W, 1 or 3]` as a baseline JPEG file with 4:2:0 subsampling and no metadata.

    Below quality 96, simplejpeg always uses the fast DCT; once decoded, its files differ from Pillow's by up to 0.1
    of 255 on average.

    Raises:
        BadImage: if the pixels have another shape or dtype, or a side of 0 or more than 65,500 pixels. The message
            contains only the reason.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise BadImage(f"the pixels are {pixels.dtype} {list(pixels.shape)} instead of uint8 [H, W, 1 or 3]")
    height, width = pixels.shape[:2]
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise BadImage(f"the image has {width}x{height} pixels, but a JPEG has 1 to {MAX_SIDE:,} on each side")
    pixels = np.ascontiguousarray(pixels)
    if write := _writer():
        return write(pixels, quality)
    file = io.BytesIO()
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


@functools.cache
def _writer() -> Callable[[Pixels, int], bytes] | None:
    try:
        import simplejpeg

        def write(pixels: Pixels, quality: int) -> bytes:
            colours, sampling = ("RGB", "420") if pixels.shape[2] == 3 else ("GRAY", "Gray")
            file: bytes = simplejpeg.encode_jpeg(pixels, quality, colours, sampling)
            return file

        write(np.zeros((8, 8, 3), np.uint8), 90)
    except Exception:
        # simplejpeg may be missing or broken.
        return None
    return write

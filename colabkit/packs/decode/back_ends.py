"""The JPEG decoders that are faster than Pillow: the first that is installed and works is taken.

simplejpeg is asked first, since it scales while it decodes and fills a given array; then torchcodec (0.16 or later has
`decode_jpeg`) and torchvision, which Colab's image brings. torch is imported only where simplejpeg is missing. A
package that is installed but broken counts as missing: each has to decode a small picture before it is trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from colabkit.packs.decode.fitting import Data, Pixels, Size

TRIAL = bytes.fromhex(
    "ffd8ffe000104a46494600010100000100010000ffdb004300080606070605080707070909080a0c140d0c0b0b0c1912130f141d1a1f"
    "1e1d1a1c1c20242e2720222c231c1c2837292c30313434341f27393d38323c2e333432ffc0000b080008001001011100ffc400150001"
    "0100000000000000000000000000000005ffc40014100100000000000000000000000000000000ffda0008010100003f00863fffd9"
)
"""A picture of 8 by 16 pixels of value 100, by Pillow."""

_ROWS_LEFT = "extraneous bytes before marker"  # libjpeg's words for data behind the last row


@dataclass(frozen=True)
class BackEnd:
    """A decoder for JPEG files of one or three components, which raises ValueError or RuntimeError for any flaw.

    Attributes:
        name: of the package.
        decode: takes the file's bytes and channels (1 or 3), returns `uint8 [H, W, C]`.
        decode_scaled: takes also a height and a width, and returns the smallest picture that libjpeg makes of at least
            these; None if the package cannot.
        decode_into: takes the file's bytes and a C-contiguous array of the picture's shape to fill; None if it cannot.
        decode_top: as `decode_into`, for a file that holds more rows than it says, which is no flaw; None if it cannot.
        turns: whether it turns the picture, by rules of its own, so that it can be given upright ones only.
    """

    name: str
    decode: Callable[[Data, int], Pixels]
    decode_scaled: Callable[[Data, int, Size], Pixels] | None = None
    decode_into: Callable[[Data, Pixels], object] | None = None
    decode_top: Callable[[Data, Pixels], object] | None = None
    turns: bool = False


@functools.cache
def back_end() -> BackEnd | None:
    """Return the first decoder that works here, or None if Pillow has to do all."""
    for probe in PROBES.values():
        try:
            found = probe()
            if _works(found):
                return found
        except Exception:  # noqa: S112 - a broken install raises anything: a missing operator, a wrong ABI, a library
            continue
    return None


def _simplejpeg() -> BackEnd:
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
        except ValueError as error:  # it tells of the first flaw, after all rows are there
            if _ROWS_LEFT not in str(error):
                raise

    return BackEnd("simplejpeg", decode, decode_scaled, decode_into, decode_top)


def _torchcodec() -> BackEnd:
    decode_jpeg = import_module("torchcodec.decoders").decode_jpeg
    return BackEnd(
        "torchcodec",
        lambda data, channels: _as_rows(decode_jpeg(bytes(data), mode="RGB" if channels == 3 else "GRAY")),
        turns=True,
    )


def _torchvision() -> BackEnd:
    import torch

    io = import_module("torchvision.io")
    modes = {3: io.ImageReadMode.RGB, 1: io.ImageReadMode.GRAY}

    def decode(data: Data, channels: int) -> Pixels:
        # A copy, since torch warns of memory that it could not write to.
        file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return _as_rows(io.decode_jpeg(file, mode=modes[channels]))

    return BackEnd("torchvision", decode)


PROBES: dict[str, Callable[[], BackEnd]] = {
    "simplejpeg": _simplejpeg,
    "torchcodec": _torchcodec,
    "torchvision": _torchvision,
}
"""By name, in the order in which they are asked; each raises if its package is missing or broken."""


def _as_rows(tensor: Any) -> Pixels:
    # NumPy does the rest: torch's threads and a fork do not go together.
    return np.ascontiguousarray(tensor.numpy().transpose(1, 2, 0))


def _works(found: BackEnd) -> bool:
    results = {(8, 16): found.decode(TRIAL, 3)}
    if found.decode_scaled:
        results[4, 8] = found.decode_scaled(TRIAL, 3, (4, 8))
    if found.decode_into:
        found.decode_into(TRIAL, np.empty((8, 16, 3), np.uint8))
    return all(
        pixels.shape == (*size, 3) and int(np.abs(pixels.astype(int) - 100).max()) <= 2
        for size, pixels in results.items()
    )

"""Image files become uint8 arrays, by the fastest decoder that gives Pillow's result.

What comes out, whatever the file holds:

- shape: `uint8 [H, W, C]`, C-contiguous, with C = 3 (RGB) or 1 (luminance);
- grey files: repeated to RGB; RGB to luminance: a JPEG's own, ITU-R 601 for other formats;
- orientation: turned upright as EXIF asks, or XMP where EXIF is silent; one that cannot be read counts as none;
- transparency: dropped, not blended, so the colours beneath it show;
- palettes: looked up; black and white: 0 and 255;
- CMYK and YCCK: converted by Pillow, a JPEG's values always taken as inverted, as Adobe's are; no profile is applied;
- 16 bits: the upper 8 are kept; 32 bits: as 16, after values beyond 0 to 65,535 are cut; floating point: an error;
- animations and files of several pages: the first one;
- size: scaled to cover it and cut around the centre, bilinear with antialiasing: what `ImageOps.fit` makes of the
  upright picture, within 1 of 255 if it had to be turned; a JPEG of at least 4 times the size is divided by 2, 4 or 8
  while it is decoded, which changes a value by 0.5 of 255 on average (`fitting.KEPT` has the measurement);
- pixels: more than 89,478,485, Pillow's bound on decompression bombs, are an error before they are decoded;
- JPEG: within 2 of 255 of Pillow; bytes behind the picture are ignored; a file cut short is an error, and flaws that
  libjpeg only warns of are judged by Pillow, which passes over them;
- formats: BMP, GIF, JPEG, PNG, PPM, TIFF, WebP; nothing that would run a program.

JPEG files of one or three components go to simplejpeg, torchcodec or torchvision (`back_ends`), the rest to Pillow.
All functions may be called from many threads at once, and before and after a fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from colabkit.foundation import InvalidOption, cannot
from colabkit.packs.decode.back_ends import back_end
from colabkit.packs.decode.fitting import Data, Pixels, Size, fitted, scale_factor, scaled, turned, upright
from colabkit.packs.decode.jpeg_header import read_header
from colabkit.packs.decode.pillow_images import check_with_pillow, decode_with_pillow, pixels_of, size_by_pillow
from colabkit.packs.decode.reasons import check_pixels, other_size

COMPONENTS = (1, 3)
"""Of the JPEG files that the fast decoders take: grey, YCbCr and RGB, not CMYK and YCCK."""

FLAWS = (ValueError, RuntimeError)
"""What the fast decoders raise: simplejpeg the former, torch the latter."""


def decode_image(data: Data, channels: int = 3, size: Size | None = None) -> Pixels:
    """Return the image in `data` as `uint8 [H, W, channels]`, C-contiguous, perhaps read-only.

    Args:
        data: the bytes of an image file.
        channels: 3 for RGB, 1 for luminance.
        size: height and width to scale and cut to; None keeps the image's own.

    Raises:
        BadImage: if the bytes are no image, cut short, or have too many pixels. The message is the reason alone; the
            caller knows the file's name.
    """
    pixels, stored, orientation = _decode(data, channels, size)
    if size is not None:
        pixels = fitted(pixels, stored, orientation, size)
    return pixels if orientation == 1 else turned(pixels, orientation)


def decode_pillow(image: Any, channels: int = 3, size: Size | None = None) -> Pixels:
    """Return an image of Pillow as `decode_image` returns its file.

    Args:
        image: a `PIL.Image.Image`, of any mode.
        channels: 3 for RGB, 1 for luminance.
        size: height and width to scale and cut to; None keeps the image's own.

    Raises:
        BadImage: as `decode_image`, of an image whose file is read only now.
    """
    pixels, orientation = pixels_of(image, channels)
    if size is not None:
        pixels = fitted(pixels, (pixels.shape[0], pixels.shape[1]), orientation, size)
    return turned(pixels, orientation)


def decode_into(data: Data, out: Pixels, *, fit: bool = False) -> None:
    """Fill `out` with the image in `data`; a JPEG that needs no change is decoded in place, without a copy.

    Args:
        data: the bytes of an image file.
        out: `uint8 [H, W, C]`, C-contiguous, with C = 3 (RGB) or 1 (luminance), as a row of a batch is. After an error
            it holds anything.
        fit: scale and cut the image to the size of `out`; without it, the image has to have this size.

    Raises:
        BadImage: as `decode_image`; also if the image has another size.
        InvalidOption: if `out` is no such array.
    """
    if out.ndim != 3 or out.dtype != np.uint8 or out.shape[2] not in (1, 3) or not out.flags.carray:
        found = f"an array {out.dtype} {list(out.shape)} to fill"
        needed = "a writable, C-contiguous uint8 [H, W, 1 or 3]"
        raise InvalidOption(cannot("decode an image", found, needed, "Make it with numpy.empty"))
    row_decoder(out.shape, fit)(data, out)


def row_decoder(shape: tuple[int, ...], fit: bool) -> Callable[[Data, Pixels], None]:
    """Return `decode_into` for arrays of one shape, which it does not look at again: what counts for tiny files.

    Args:
        shape: of the arrays, `[H, W, C]`.
        fit: as of `decode_into`.
    """
    height, width, channels = shape
    size = height, width
    upright_as_wanted = {(height, width, components, 1) for components in COMPONENTS}
    fast = back_end()
    decode_fast = None if fast is None else fast.decode_into

    def decode(data: Data, out: Pixels) -> None:
        header = read_header(data)
        if header in upright_as_wanted:
            check_pixels(height, width)
            if decode_fast is not None:
                try:
                    decode_fast(data, out)
                    return
                except FLAWS:
                    pass  # Pillow says what is wrong, or manages
        elif header is not None and not fit and upright(header[:2], header[3]) != size:
            raise other_size(upright(header[:2], header[3]), size)
        pixels = decode_image(data, channels, size if fit else None)
        if pixels.shape != shape:
            raise other_size((pixels.shape[0], pixels.shape[1]), size)
        out[...] = pixels

    return decode


def image_size(data: Data) -> Size:
    """Return the upright height and width of an image, from its header alone.

    The first bytes of a file are enough where the format allows: BMP, GIF, PNG, PPM, and JPEG as long as the whole
    header is there, which with a profile and a preview may take hundreds of kilobytes. WebP and TIFF need the whole
    file, and so does an orientation that stands at the end of a PNG.

    Raises:
        BadImage: as `decode_image`, as far as a header shows it.
    """
    header = read_header(data)
    if header is None:
        return size_by_pillow(data)
    height, width, _, orientation = header
    check_pixels(height, width)
    return upright((height, width), orientation)


def check_image(data: Data) -> Size:
    """Return the upright height and width of an image that `decode_image` takes, at the least cost.

    A JPEG is decoded at an eighth of its sides, which reads all of its data; other formats are decoded in full.

    Raises:
        BadImage: as `decode_image`.
    """
    header = read_header(data)
    fast = back_end()
    if header is not None and fast is not None and fast.decode_scaled is not None and header[2] in COMPONENTS:
        height, width, _, orientation = header
        check_pixels(height, width)
        try:
            fast.decode_scaled(data, 1, scaled((height, width), 8))
            return upright((height, width), orientation)
        except FLAWS:
            pass  # Pillow says what is wrong, or manages
    return check_with_pillow(data)


def _decode(data: Data, channels: int, size: Size | None) -> tuple[Pixels, Size, int]:
    """Return the picture, not yet turned, perhaps scaled, with its stored height and width and its orientation."""
    header = read_header(data)
    if header is not None:
        height, width, components, orientation = header
        stored = height, width
        check_pixels(height, width)
        fast = back_end()
        if fast is not None and components in COMPONENTS and (orientation == 1 or not fast.turns):
            factor = 1 if size is None else scale_factor(stored, orientation, size)
            try:
                if factor == 1:
                    return fast.decode(data, channels), stored, orientation
                if fast.decode_scaled is not None:
                    return fast.decode_scaled(data, channels, scaled(stored, factor)), stored, orientation
            except FLAWS:
                pass  # Pillow says what is wrong, or manages
    return decode_with_pillow(data, channels, size)

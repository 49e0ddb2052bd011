"""The table of image file formats: their names in Pillow, extensions and first bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format of image files that Pillow can decode, possibly only with a plugin.

    Attributes:
        name: name of the format in Pillow.
        extensions: extensions of its files in lower case, without a dot.
        head: pattern of the first bytes.
        package: arguments of `pip install` for a Pillow that cannot decode the format.
    """

    name: str
    extensions: tuple[str, ...]
    head: bytes
    package: str = "--upgrade pillow"


# All formats, in the order in which WebDataset sources prefer them.
FORMATS = (
    FileFormat("JPEG", ("jpg", "jpeg", "jfif", "mpo"), rb"\xff\xd8\xff"),
    FileFormat("PNG", ("png",), rb"\x89PNG\r\n"),
    FileFormat("WEBP", ("webp",), rb"RIFF....WEBP"),
    FileFormat("PPM", ("ppm", "pgm", "pbm", "pnm"), rb"P[1-6]\s[\s\d#]"),
    FileFormat("BMP", ("bmp",), rb"BM....\0\0\0\0"),
    FileFormat("GIF", ("gif",), rb"GIF8[79]a"),
    FileFormat("TIFF", ("tif", "tiff"), rb"II[*+]\0|MM\0[*+]"),
    FileFormat("AVIF", ("avif",), rb"....ftypavi[fs]"),
    FileFormat("JPEG2000", ("jp2", "j2k", "j2c", "jpx"), rb"\0\0\0\x0cjP  |\xffO\xffQ"),
    FileFormat("HEIF", ("heic", "heif", "hif"), rb"....ftyp(?:" + b"|".join(_HEIF_BRANDS) + rb")", "pillow-heif"),
    # TGA has no signature. The first byte is the length of a comment. If there is a color map, its length is not 0;
    # otherwise, the fields that describe it are 0. Width and height are not 0.
    FileFormat(
        "TGA",
        ("tga",),
        rb".(?:\0[\x02\x03\n\x0b]\0{5}|\x01[\x01\t]..(?!\0\0)..[\x0f\x10\x18 ])"
        rb"....(?!\0\0)..(?!\0\0)..[\x01\x08\x0f\x10\x18 ]",
    ),
)

IMAGE_EXTENSIONS = tuple(extension for one in FORMATS for extension in one.extensions)
"""Extensions of image files, in order of preference."""

_HEADS = re.compile(b"|".join(b"(" + one.head + b")" for one in FORMATS[:-1]), re.DOTALL)
_TGA = re.compile(FORMATS[-1].head, re.DOTALL)
_AVIF = next(one for one in FORMATS if one.name == "AVIF")


def is_image_head(head: bytes) -> bool:
    """Return whether a file's first bytes, 16 or more, contain the signature of an image format; TGA has none."""
    return _HEADS.match(head) is not None


def find_format(head: bytes) -> FileFormat | None:
    """Return the image format that a file's first bytes, 64 or more, belong to; None if there is none."""
    if found := _HEADS.match(head):
        one = FORMATS[(found.lastindex or 1) - 1]
        return _AVIF if one.name == "HEIF" and _is_avif(head) else one
    return FORMATS[-1] if _TGA.match(head) else None


def _is_avif(head: bytes) -> bool:
    brands = head[16 : int.from_bytes(head[:4], "big")]
    return b"avif" in (brands[at : at + 4] for at in range(0, len(brands), 4))

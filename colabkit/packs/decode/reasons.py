"""Why a file cannot be decoded: errors whose message is the reason alone, since the caller knows the file's name."""

from __future__ import annotations

from colabkit.foundation import BadImage

MAX_PIXELS = 89_478_485
"""Pillow's bound on decompression bombs, which is a warning there."""


class OtherSize(BadImage):
    """An image of another size than needed, which is nothing bad in itself; the message is the reason alone."""


def bad(reason: str) -> BadImage:
    """Return the error with this reason."""
    return BadImage(reason)


def check_pixels(height: int, width: int) -> None:
    """Raise `BadImage` for a picture of more than `MAX_PIXELS`."""
    if height * width > MAX_PIXELS:
        raise bad(f"{width}x{height} pixels, more than {MAX_PIXELS}")


def other_size(found: tuple[int, int], needed: tuple[int, int]) -> BadImage:
    """Return the error for a picture that does not fill its row; both are height and width."""
    return OtherSize(f"{found[1]}x{found[0]} pixels, where {needed[1]}x{needed[0]} are needed")


def unknown(head: bytes) -> BadImage:
    """Return the error for a file that begins like no image."""
    if not head:
        return bad("an empty file")
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return bad("a web page saved under an image's name")
    return bad(f"no image; it begins with {head[:8]!r}")

"""What stands before a JPEG's first scan: its size, its components, its orientation; read without decoding.

Segments by ITU-T T.81, annex B; EXIF by CIPA DC-008 (a TIFF header and its first directory). Anything out of the
ordinary is left to Pillow: the answer is then None.
"""

from __future__ import annotations

import struct

from colabkit.packs.decode.fitting import Data

Header = tuple[int, int, int, int]
"""Height and width as stored, the number of components, the orientation from 1 to 8; a plain tuple, which is cheap."""

FRAMES = frozenset((0xFFC0, 0xFFC1, 0xFFC2))  # baseline, extended, progressive
SOS = 0xFFDA
APP1 = 0xFFE1
PASSED = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0))) - {APP1}  # DHT, DQT, DRI, COM, APPn
EXIF = b"Exif\x00\x00"
ORIENTATION = 0x0112
SHORT = 3
TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}

_LATEST: list[tuple[bytes, Header | None]] = [(b"\xff\xd8\0", None)]
"""What the last header was up to its scan, and what it said."""

_marker_and_length = struct.Struct(">HH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from  # bits a value, height, width, components


def read_header(data: Data) -> Header | None:
    """Return what a JPEG's header says, or None for other formats and for headers that only Pillow should judge.

    The whole header has to be there: everything up to the first scan.
    """
    head, header = _LATEST[0]
    if isinstance(data, bytes) and data.startswith(head):  # files of one data set often differ behind it only
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
        return None  # cut short
    if bits != 8 or not height or not width or orientation is None:
        return None
    header = height, width, components, orientation
    _LATEST[0] = bytes(data[: at + 4]), header
    return header


def _orientation(segments: list[bytes]) -> int | None:
    """Return the orientation that APP1 segments tell, None if Pillow should judge it."""
    exif = [segment for segment in segments if segment.startswith(EXIF)]
    if len(exif) > 1:
        return None  # one directory in several parts
    found = _exif_orientation(exif[0][len(EXIF) :]) if exif else 0
    if found == 0:
        return None if any(b"tiff:Orientation" in segment for segment in segments) else 1
    return found


def _exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation in an EXIF directory, 0 if it has none, None if the directory is odd or damaged."""
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
            return None  # Pillow reads no further
        if tag == ORIENTATION:
            if found or kind != SHORT or count != 1 or not 1 <= value <= 8:
                return None
            found = value
    return found

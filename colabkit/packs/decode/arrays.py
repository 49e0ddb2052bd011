"""`.npy` files become arrays, without pickle and without trusting the size they declare."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from colabkit.foundation import BadImage
from colabkit.packs.decode.fitting import Data
from colabkit.packs.decode.reasons import bad


def decode_array(data: Data) -> npt.NDArray[Any]:
    """Return the array in a `.npy` file.

    Its memory is that of `data`, so nothing is copied, and of `bytes` it cannot be written to.

    Args:
        data: the bytes of a `.npy` file, format 1 or 2 (what `numpy.save` writes).

    Raises:
        BadImage: if the bytes are no such file, hold Python objects, or are more or fewer than the header says. The
            message is the reason alone; the caller knows the file's name.
    """
    if not data:
        raise bad("an empty file")
    if data[:4] == b"PK\x03\x04":
        raise bad("an archive of arrays (.npz), where one array (.npy) is needed")
    if data[:6] != b"\x93NUMPY":
        raise bad(f"no array; it begins with {bytes(data[:8])!r}")
    head = io.BytesIO(bytes(data[: 64 * 1024]))
    try:
        version = npy.read_magic(head)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise bad(f"an array of format {version[0]}.{version[1]}, where 1.0 or 2.0 is needed")
        shape, is_fortran, dtype = read(head)
    except BadImage:
        raise
    except Exception as error:  # NumPy evaluates the header as a literal, which raises anything
        raise bad(f"a damaged header of an array: {error}") from error
    if dtype.hasobject:
        raise bad("an array of Python objects, which only pickle could read")
    if dtype.itemsize == 0:
        raise bad("an array of elements without bytes")
    if any(side < 0 for side in shape):
        raise bad(f"a damaged header of an array: shape {shape}")
    needed, there = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
    if needed != there:
        raise bad(f"{there} bytes of values, where {dtype} {list(shape)} has {needed}")
    try:
        flat: npt.NDArray[Any] = np.ndarray(math.prod(shape), dtype, buffer=data, offset=head.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, OverflowError, TypeError) as error:  # sides beyond what NumPy counts, beside a side of 0
        raise bad(f"a damaged header of an array: {error}") from error

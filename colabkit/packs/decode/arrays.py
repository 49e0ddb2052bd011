"""`.npy` files become arrays, without pickle and without trusting the size they declare."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from colabkit.foundation import BadImage
from colabkit.packs.decode.pixels import Data


def decode_array(data: Data) -> npt.NDArray[Any]:
    """Return the array in a `.npy` file of format 1 or 2; it shares the memory of `data`.

    Raises:
        BadImage: if the bytes are no such file, hold Python objects, or are more or fewer than the header says. The
            message is the reason alone; the caller knows the file's name.
    """
    if not data:
        raise BadImage("an empty file")
    if data[:4] == b"PK\x03\x04":
        raise BadImage("an archive of arrays (.npz), where one array (.npy) is needed")
    if data[:6] != b"\x93NUMPY":
        raise BadImage(f"no array; it begins with {bytes(data[:8])!r}")
    head = io.BytesIO(bytes(data[: 64 * 1024]))
    try:
        version = npy.read_magic(head)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise BadImage(f"an array of format {version[0]}.{version[1]}, where 1.0 or 2.0 is needed")
        shape, is_fortran, dtype = read(head)
        if dtype.hasobject:
            raise BadImage("an array of Python objects, which only pickle could read")
        if dtype.itemsize == 0:
            raise BadImage("an array of elements without bytes")
        if any(side < 0 for side in shape):
            raise BadImage(f"a damaged header of an array: shape {shape}")
        needed, there = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
        if needed != there:
            raise BadImage(f"{there} bytes of values, where {dtype} {list(shape)} has {needed}")
        flat: npt.NDArray[Any] = np.ndarray(math.prod(shape), dtype, buffer=data, offset=head.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except BadImage:
        raise
    except Exception as error:  # NumPy evaluates the header as a literal, which raises anything
        raise BadImage(f"a damaged header of an array: {error}") from error

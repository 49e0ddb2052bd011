"""Reads pages of memory-mapped files in advance, so that an I/O error raises an exception instead of a signal."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

POPULATE_READ = 22
"""MADV_POPULATE_READ, since Linux 5.14; Python's mmap module does not define it."""


class UnreadablePages(OSError):
    """A part of a mapped file cannot be read."""


def read_pages(array: npt.NDArray[Any]) -> None:
    """Read the pages of a mapped array in advance, because an I/O error in a later access would kill the process.

    Raises:
        UnreadablePages: if the file is too short, or its disk or mount returns an error.
    """
    if (madvise := find_madvise()) is not None:
        address = array.__array_interface__["data"][0]
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        # Kernels that do not know this advice fail with a different error number.
        if madvise(start, address + array.nbytes - start, POPULATE_READ) and ctypes.get_errno() == errno.EFAULT:
            raise UnreadablePages(errno.EIO, os.strerror(errno.EIO))


@functools.cache
def find_madvise() -> Callable[[int, int, int], int] | None:
    """Return the function `madvise` of the C library, which sets `ctypes.get_errno()`; None if there is none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found.restype = ctypes.c_int
    return found

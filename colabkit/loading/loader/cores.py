"""Worker threads leave the other cores to the model: torch's own threads are kept down to one, for them alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from colabkit.foundation import read_file

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


def keep_to_one_core() -> None:
    """Have torch compute with one thread when it is called from this thread.

    OpenMP would give each calling thread helpers of its own, which go on spinning for milliseconds after every call and
    take the cores from the model. `torch.set_num_threads` would speak for threads to come as well. Where the OpenMP
    library is not found nothing changes, which is slower but no less right.
    """
    if (set_threads := _set_threads()) is not None:
        torch.get_num_threads()  # which else would set it again at its first use in this thread
        set_threads(1)


@functools.cache
def _set_threads() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of the OpenMP library that torch has loaded, None where there is none."""
    try:
        mapped = {line.split()[-1] for line in read_file("/proc/self/maps").splitlines() if "omp" in line}
    except OSError:
        return None
    for path in sorted(mapped, key=lambda path: ("/torch" not in path, path)):  # other packages bring theirs
        if path.rpartition("/")[2].startswith(_RUNTIMES):
            try:
                return ctypes.CDLL(path).omp_set_num_threads
            except (OSError, AttributeError):
                continue
    return None

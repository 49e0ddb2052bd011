"""Track which samples of an incomplete pack are written, and which are to be read next."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import ColabkitError, PackingFailed, cannot, partials
from colabkit.packs.format.layout import Indices, PackInfo

_TICK_S = 0.005
# Time that the writer waits for the first request. Otherwise it would begin with many files that are not needed first.
_FIRST_REQUEST_S = 1.0
_PACKING, _COMPLETE, _FAILED = range(3)


class PackAbandoned(Exception):
    """Nobody needs the pack anymore, so the thread that writes it ends."""


class Arrival:
    """The state of a pack that one thread writes, while other threads and forked processes read it.

    The writer calls `open`, `samples`, `add` and finally `complete` or `fail`. Readers call `want` and `wait_for`.

    Args:
        on_open: function that is called with this object once the pack can be opened.

    Attributes:
        info: description of the unsealed file, and then of the complete pack.
        crcs: CRC32 of each sample that has arrived, by split.
    """

    def __init__(self, on_open: Callable[[Arrival], None]) -> None:
        self.info: PackInfo | None = None
        self.crcs: dict[str, npt.NDArray[np.uint32]] = {}
        self._on_open = on_open
        self._has: dict[str, npt.NDArray[np.bool_]] = {}
        # Forked processes see changes to shared memory, but not the error.
        self._state = _shared(1, "u1")
        self._error: BaseException | None = None
        self._requests: deque[tuple[str, Indices]] = deque()
        self._is_requested, self._is_abandoned = threading.Event(), threading.Event()
        self._process, self._writer = os.getpid(), partials.owner()

    @property
    def is_complete(self) -> bool:
        """Whether the pack is complete and has its final name."""
        return bool(self._state[0] == _COMPLETE)

    @property
    def arrived(self) -> int:
        """Number of samples that have arrived."""
        return sum(int(np.count_nonzero(has)) for has in self._has.values())

    def open(self, info: PackInfo) -> None:
        """Announce the file to which the samples will be written."""
        counts = {split: info.count(split) for split in info.splits}
        self.crcs = {split: _shared(count, "<u4") for split, count in counts.items()}
        self._has = {split: _shared(count, "?") for split, count in counts.items()}
        self.info = info
        self._on_open(self)

    def samples(self) -> Iterator[tuple[str, int]]:
        """Yield the split and the index of each sample at least once, those that are wanted first."""
        self._is_requested.wait(_FIRST_REQUEST_S)
        coming: deque[Iterator[tuple[str, int]]] = deque(
            zip(itertools.repeat(split), range(len(has))) for split, has in self._has.items()
        )
        while coming:
            while self._requests:
                split, rows = self._requests.popleft()
                coming.appendleft(zip(itertools.repeat(split), rows.tolist()))
            if (one := next(coming[0], None)) is None:
                coming.popleft()
            else:
                yield one

    def add(self, split: str, start: int, crcs: npt.NDArray[np.uint32]) -> None:
        """Record that the samples from index `start` on have been written, with their CRC32."""
        span = slice(start, start + len(crcs))
        self.crcs[split][span] = crcs
        self._has[split][span] = True

    def complete(self, info: PackInfo) -> None:
        """Record that the pack is complete."""
        self.info = info
        self._state[0] = _COMPLETE

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the work."""
        self._error = error
        self._state[0] = _FAILED

    def abandon(self) -> None:
        """Make the writer end soon."""
        self._is_abandoned.set()

    def check_needed(self) -> None:
        """Raise `PackAbandoned` after `abandon` was called."""
        if self._is_abandoned.is_set():
            raise PackAbandoned

    def want(self, split: str, rows: Indices) -> None:
        """Ask for samples before all others, in the given order; requests of a forked process are ignored."""
        if os.getpid() == self._process:
            self._requests.append((split, rows))
            self._is_requested.set()

    def wait_for(self, split: str, rows: Indices, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until samples have arrived; an exception raised by `on_wait` ends the wait.

        Raises:
            ColabkitError: the error that ended the work of the writer.
        """
        if self.is_complete or self._has[split][rows].all():
            return
        self.want(split, rows)
        self._wait_until(lambda: bool(self._has[split][rows].all()), on_wait)

    def wait_for_all(self, on_wait: Callable[[], None] | None = None) -> PackInfo:
        """Wait until the pack is complete, and return its description.

        Raises:
            ColabkitError: the error that ended the work of the writer.
        """
        self._wait_until(lambda: False, on_wait)
        assert self.info is not None
        if not self.info.seal:
            found = "this process was forked while the pack was incomplete"
            next_step = "Pickle it, or open it again, in the process that prepared it"
            raise PackingFailed(cannot("open the complete pack", found, "", next_step))
        return self.info

    def _wait_until(self, has_arrived: Callable[[], bool], on_wait: Callable[[], None] | None) -> None:
        while not has_arrived() and not self.is_complete:
            if self._state[0] == _FAILED:
                raise self._failure()
            if os.getpid() != self._process and partials.is_running(self._writer) is False:
                raise self._failure()
            if on_wait is not None:
                on_wait()
            time.sleep(_TICK_S)

    def _failure(self) -> BaseException:
        if isinstance(self._error, ColabkitError):
            # A new object, because each raise would add to the traceback of the same one.
            again = type(self._error)(*self._error.args)
            again.__cause__ = self._error.__cause__
            return again
        error, found = self._error, f"packing failed in the process {self._process}, which shows the error"
        if isinstance(error, PackAbandoned):
            error, found = None, "the pack was closed before it was complete"
        elif error is not None:
            found = f"packing raised {type(error).__name__}: {error}"
        elif self._state[0] != _FAILED:
            found = f"the process {self._process}, which was packing, has ended"
        failed = PackingFailed(cannot("read a sample that is not packed yet", found, "", "Prepare the source again"))
        failed.__cause__ = error
        return failed


def _shared(count: int, dtype: str) -> npt.NDArray[Any]:
    """Return zeros in memory that is shared with forked processes."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype, count)

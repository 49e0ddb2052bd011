"""Saves a local pack in the background, while the caller already uses it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from colabkit.foundation import ProgressBar, has_started
from colabkit.packs.format.arrival import Abandoned
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.preparing.preparation import Preparation
from colabkit.packs.preparing.prepared_pack import PreparedPack, Way

_TICK_S = 0.2


class PackSaving:
    """A context manager that saves a local pack in a thread, which has ended when the block ends.

    Leaving the block waits until the pack is saved, unless it is left with a `KeyboardInterrupt`: then saving stops,
    and leaves nothing at the target. An error while saving is never raised: the report of the pack contains it. The
    next call of `prepare()` saves the local pack if this one did not.

    Args:
        work: the call that obtained the pack.
        found: the local pack.
        way: the route by which it was obtained.
        locked: holds the lock of the folder of the local packs until the pack is saved.

    Attributes:
        pack: the local pack; its report states that it is being saved.
    """

    def __init__(self, work: Preparation, found: PackInfo, way: Way, locked: ExitStack) -> None:
        self._work = work
        self._found = found
        self._way = way
        self._locked = locked
        self._moved_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if work.must_save(found.path):
            work.unsaved = "it is still being saved in the background"
            self._thread = threading.Thread(target=self._save, name="colabkit-save", daemon=True)
        self.pack = work.prepared(found, way)
        if self._thread is not None and not has_started(self._thread):
            # The system allows no more threads.
            self._thread = None
            self._save()

    @classmethod
    def of(cls, work: Preparation) -> Self:
        """Obtain the pack, and begin to save it."""
        with ExitStack() as locked:
            found, way = work.obtain(locked)
            return cls(work, found, way, locked.pop_all())

    @property
    def is_over(self) -> bool:
        """Whether saving has ended."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> PreparedPack:
        """Wait until the pack is saved or saving has failed, and return the pack with its final report."""
        size = 2 * self._found.path.stat().st_size
        with ProgressBar("save the pack", size, "B", self._work.progress and not self.is_over) as bar:
            shown = 0
            while self._thread is not None and self._thread.is_alive():
                moved = self._moved_bytes
                bar.advance(moved - shown)
                bar.wait()
                shown = moved
                self._thread.join(_TICK_S)
        self._locked.close()
        return self._work.prepared(self._found, self._way)

    def _save(self) -> None:
        try:
            self._work.save(self._found.path, self._watch, progress=False)
        except Exception as error:
            self._work.unsaved = f"saving raised {type(error).__name__}: {error}"

    def _watch(self, size: int) -> None:
        if self._stop.is_set():
            raise Abandoned
        self._moved_bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, Exception):
                self._stop.set()
            self.finish()
        finally:
            # Ctrl-C may have ended the wait.
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._locked.close()

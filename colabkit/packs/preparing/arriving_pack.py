"""The pack that `prepare(start="now")` returns while a thread still packs and saves it."""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from colabkit.foundation import ProgressBar, file_changes, has_started
from colabkit.packs.dataset.arriving import open_arriving
from colabkit.packs.dataset.open_split import OpenSplit, open_sealed
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.preparing.preparation import Preparation
from colabkit.packs.preparing.prepared_pack import PreparedPack, PrepareReport, with_reasons

_TICK_S = 0.1
# Seconds to wait for the thread after it was told to end; a read that hangs is abandoned.
_END_S = 10.0

_live: weakref.WeakSet[BackgroundPacking] = weakref.WeakSet()


def prepared_early(work: Preparation) -> PreparedPack:
    """Return the pack as soon as it can be opened: an `ArrivingPack` if it still has to be packed."""
    with ExitStack() as locked:
        if (found := work.find(locked)) is None:
            return BackgroundPacking(work, locked.pop_all()).started()
        if work.must_save(found[0].path):
            work.save(found[0].path)
    return work.prepared(*found)


class BackgroundPacking:
    """A thread that packs a source and saves the pack, and the pack that others already read.

    Args:
        work: the call of `prepare()`.
        locked: holds the lock of the folder of the local packs.

    Attributes:
        arrival: the record of the pack.
        progress: whether to show progress.
        saved_bytes: number of bytes of the pack that have been read and written to save it.
    """

    def __init__(self, work: Preparation, locked: ExitStack) -> None:
        # The thread shows no progress, because other output may follow the call.
        self.progress, work.progress = work.progress, False
        self.arrival = Arrival(self._open)
        self.saved_bytes = 0
        self._work = work
        self._locked = locked
        self._pack: ArrivingPack | None = None
        self._complete: PreparedPack | None = None
        self._error: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colabkit-prepare", daemon=True)

    def started(self) -> PreparedPack:
        """Start the thread, and return the pack once it can be opened."""
        _live.add(self)
        try:
            if not has_started(self._thread):
                # The system allows no more threads.
                self._run()
            with ProgressBar("prepare", None, " s", self.progress) as bar:
                waited_s = 0.0
                while not self._is_ready.wait(_TICK_S):
                    before, waited_s = waited_s, waited_s + _TICK_S
                    bar.advance(int(waited_s) - int(before))
        except BaseException:
            self.close()
            raise
        return self._pack or self._result()

    def finish(self) -> PreparedPack:
        """Wait until the pack is complete and saved, or saving has failed; return it with the final report."""
        samples = sum(self._pack.splits.values()) if self._pack is not None else None
        with ProgressBar("pack", samples, " samples", self.progress) as bar:
            shown = 0
            while self._thread.is_alive() and not self.arrival.is_complete:
                bar.advance((arrived := self.arrival.arrived) - shown)
                bar.wait()
                shown = arrived
                self._thread.join(_TICK_S)
        with ProgressBar("save the pack", None, "B", self.progress) as bar:
            shown = 0
            while self._thread.is_alive():
                bar.advance((saved := self.saved_bytes) - shown)
                bar.wait()
                shown = saved
                self._thread.join(_TICK_S)
        self.arrival.wait_for_all()
        return self._result()

    def close(self) -> None:
        """End the thread; a pack that is not complete is removed, and a complete one remains on this machine."""
        self.arrival.abandon()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def end_with_process(self) -> None:
        """End the thread before the process ends, but let it save a complete pack first."""
        if not self.arrival.is_complete:
            self.close()
        elif self._thread.is_alive():
            self._thread.join()

    def report_early(self, written: PackInfo) -> PrepareReport:
        """Return the report of the incomplete pack, which is described by `written`."""
        report = PrepareReport(
            path=self._work.path,
            way="arriving",
            local_s=self._work.local_s,
            saved_s=None,
            packed_s=None,
            saved_path=None,
            pack_bytes=written.path.stat().st_size,
            left_out=written.left_out,
            bad=(),
            inferred=written.inferred,
        )
        unsaved = "it is not complete yet" if self._work.save_folder is not None else self._work.unsaved
        return with_reasons(report, unsaved, self._work.unused, "")

    def _open(self, arrival: Arrival) -> None:
        assert arrival.info is not None
        self._pack = ArrivingPack(self, arrival.info)
        self._is_ready.set()

    def _run(self) -> None:
        try:
            with self._locked, file_changes.translated(f"prepare {self._work.name!r}"):
                info = self._work.packed(self.arrival)
                self.arrival.complete(info)
                if self._work.must_save(info.path):
                    self._work.save(info.path, self._count_saved, progress=False)
            self._complete = self._work.prepared(info, "packed")
            if self._pack is not None:
                self._pack.info, self._pack.report = info, self._complete.report
        except BaseException as error:
            self._error = error
            if not self.arrival.is_complete:
                self.arrival.fail(error)
        finally:
            self._is_ready.set()

    def _count_saved(self, size: int) -> None:
        self.arrival.check_needed()
        self.saved_bytes += size

    def _result(self) -> PreparedPack:
        if self._error is not None:
            raise self._error
        assert self._complete is not None
        return self._pack or self._complete


class ArrivingPack(PreparedPack):
    """A pack that a thread is still packing, and then saves; reading a sample waits until it has arrived.

    A `Loader` asks for its samples in the order of the epoch, so the thread reads those files first. Once all samples
    have arrived, the pack is the same as any other. If packing fails, reading a sample that has not arrived raises the
    error. Pickling waits until the pack is complete.

    When the process ends, an incomplete pack is removed, and a complete one is saved first. `close()`, or the end of a
    `with` block of the pack, ends the thread earlier.

    Attributes:
        report: report on the incomplete pack, and then on the complete one.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", to=None, start="now")
        >>> len(pack["train"])
        1797
    """

    def __init__(self, packing: BackgroundPacking, written: PackInfo) -> None:
        self._packing = packing
        report = packing.report_early(written)
        info = replace(written, path=report.path)
        # Map all splits now, because the file gets another name when it is complete.
        self._arriving = {split: open_arriving(packing.arrival, written, info, split) for split in info.splits}
        Pack.__init__(self, info, self._opened_split)
        self.report = report

    @property
    def is_complete(self) -> bool:
        """Whether all samples have arrived."""
        return self._packing.arrival.is_complete

    def finish(self) -> Self:
        """Wait until the pack is complete and saved; see `PreparedPack`."""
        self._packing.finish()
        return self

    def close(self) -> None:
        """End the thread; see `PreparedPack`."""
        self._packing.close()

    def __reduce__(self) -> tuple[object, ...]:
        self.finish()
        return PreparedPack, (self.info, self.report)

    def __repr__(self) -> str:
        if self.is_complete:
            return super().__repr__()
        arrived, samples = self._packing.arrival.arrived, sum(self.splits.values())
        return f"{super().__repr__()}\n  {arrived:,} of {samples:,} samples have arrived"

    def _opened_split(self, split: str) -> OpenSplit:
        if self.is_complete:
            return open_sealed(self.info.path.absolute(), self.info.seal, split)
        return self._arriving[split]

    def _file_bytes(self) -> tuple[int, int]:
        return self.report.pack_bytes, 0


@atexit.register
def _end_all() -> None:
    for packing in tuple(_live):
        packing.end_with_process()

"""The pack that `prepare(start="now")` returns while a thread still packs or saves it."""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from colabkit.foundation import ProgressBar, file_changes, has_started
from colabkit.packs.dataset.arriving import open_arriving
from colabkit.packs.dataset.open_split import OpenSplit, open_sealed
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.format.arrival import Arrival, PackAbandoned
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.packing.pack_call import PlannedFiles
from colabkit.packs.preparing.preparation import Preparation
from colabkit.packs.preparing.prepared_pack import PreparedPack, PrepareReport, Way, with_reasons

_TICK_S = 0.1
# Seconds to wait for the thread after `abandon()`; a read that hangs is abandoned.
_END_S = 10.0

_live: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()


def prepare_early(work: Preparation) -> PreparedPack:
    """Return the pack as soon as its samples can be read; pack and save it in the background where possible."""
    with ExitStack() as locked:
        if (existing := work.find(locked)) is None:
            planned = work.planned()
            work.late = planned.why_late
            if not work.late:
                return BackgroundWork(work, locked.pop_all(), planned).start()
        found: tuple[PackInfo, Way] = existing or (work.write(planned), "packed")
        if work.must_save(found[0].path):
            return BackgroundWork(work, locked.pop_all(), found).start()
    return work.prepared(*found)


class BackgroundWork:
    """A thread that writes a planned pack, if there is none yet, and saves the pack.

    Args:
        work: the call of `prepare()`.
        locked: holds the lock of the folder of the local packs.
        given: the planned pack, or a complete one and its route.

    Attributes:
        arrival: the record of the pack.
    """

    def __init__(self, work: Preparation, locked: ExitStack, given: PlannedFiles | tuple[PackInfo, Way]) -> None:
        self.arrival = Arrival(self._open)
        self._work = work
        self._locked = locked
        self._given = given
        self._saved_bytes = 0
        self._pack: BackgroundPack | None = None
        self._final: PreparedPack | None = None
        self._error: BaseException | None = None
        self._is_readable = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colabkit-prepare", daemon=True)
        if not isinstance(given, PlannedFiles):
            self.arrival.complete(given[0])
            self._offer(given[0], self._interim_report(*given), {})

    def start(self) -> PreparedPack:
        """Start the thread, and return the pack once samples can be read from it."""
        _live.add(self)
        try:
            if not has_started(self._thread):
                # The system allows no more threads.
                self._run()
            while not self._is_readable.wait(_TICK_S):
                pass
        except BaseException:
            self.close()
            raise
        return self._pack or self._final_pack()

    def finish(self) -> None:
        """Wait until the pack is complete, and saved or not; raise the error that ended packing."""
        samples = sum(self._pack.splits.values()) if self._pack is not None else None
        with ProgressBar("pack", samples, " samples", self._work.progress and not self.arrival.is_complete) as bar:
            shown = 0
            while self._thread.is_alive() and not self.arrival.is_complete:
                bar.advance((arrived := self.arrival.arrived) - shown)
                bar.wait()
                shown = arrived
                self._thread.join(_TICK_S)
        info = self.arrival.info
        size = 2 * info.path.stat().st_size if info is not None and self._thread.is_alive() else None
        with ProgressBar("save the pack", size, "B", self._work.progress and self._thread.is_alive()) as bar:
            shown = 0
            while self._thread.is_alive():
                bar.advance((saved := self._saved_bytes) - shown)
                bar.wait()
                shown = saved
                self._thread.join(_TICK_S)
        # In a forked process, the thread does not exist.
        self.arrival.wait_for_all()
        self._final_pack()

    def close(self) -> None:
        """End the thread; an incomplete pack is removed, and a complete one remains on this machine."""
        self.arrival.abandon()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def end(self) -> None:
        """End the thread, but let it save a complete pack first."""
        if not self.arrival.is_complete:
            self.close()
        elif self._thread.is_alive():
            self._thread.join()

    def _open(self, arrival: Arrival) -> None:
        """Offer the incomplete pack to the caller."""
        written = arrival.info
        assert written is not None
        report = self._interim_report(written, "arriving")
        info = replace(written, path=report.path)
        # Map all splits now, because the file gets another name when it is complete.
        self._offer(info, report, {split: open_arriving(arrival, written, info, split) for split in info.splits})

    def _offer(self, info: PackInfo, report: PrepareReport, arriving: dict[str, OpenSplit]) -> None:
        self._pack = BackgroundPack(self, info, report, arriving)
        self._is_readable.set()

    def _interim_report(self, info: PackInfo, way: Way) -> PrepareReport:
        is_arriving = way == "arriving"
        report = PrepareReport(
            path=self._work.path if is_arriving else info.path,
            way=way,
            local_s=self._work.local_s,
            saved_s=None,
            packed_s=None,
            saved_path=None,
            pack_bytes=info.path.stat().st_size,
            left_out=info.left_out,
            bad=info.bad,
            inferred=info.inferred,
        )
        unsaved = "it is not complete yet" if is_arriving else "it is still being saved in the background"
        if self._work.save_folder is None:
            return with_reasons(report, self._work.unsaved, self._work.unused, "")
        checked = "" if way in ("arriving", "packed") else self._work.checked
        return with_reasons(report, unsaved, self._work.unused, checked, self._work.late)

    def _run(self) -> None:
        try:
            with self._locked, file_changes.translated(f"prepare {self._work.name!r}"):
                given = self._given
                info = self._work.write(given, self.arrival) if isinstance(given, PlannedFiles) else given[0]
                way: Way = "packed" if isinstance(given, PlannedFiles) else given[1]
                self.arrival.complete(info)
                if self._pack is not None:
                    self._pack.switch_to(info)
                if self._work.must_save(info.path):
                    self._save(info)
            self._final = self._work.prepared(info, way)
            if self._pack is not None:
                self._pack.report = self._final.report
        except BaseException as error:
            self._error = error
            if not self.arrival.is_complete:
                self.arrival.fail(error)
            if threading.current_thread() is not self._thread and not isinstance(error, Exception):
                raise
        finally:
            self._is_readable.set()

    def _save(self, info: PackInfo) -> None:
        try:
            self._work.save(info.path, self._count_saved, progress=False)
        except PackAbandoned:
            self._work.unsaved = "saving was interrupted"
        except Exception as error:
            # The pack is usable, and the next call saves it.
            self._work.unsaved = f"saving raised {type(error).__name__}: {error}"

    def _count_saved(self, size: int) -> None:
        self.arrival.check_needed()
        self._saved_bytes += size

    def _final_pack(self) -> PreparedPack:
        if self._error is not None:
            raise self._error
        assert self._final is not None
        return self._final


class BackgroundPack(PreparedPack):
    """A pack that a thread is still packing or saving; reading a sample waits until it has been packed.

    A `Loader` asks for samples in the order of the epoch, so the thread reads those files first. If packing fails,
    reading a sample that is not packed yet raises the error. Pickling waits until the pack is complete.

    When the process ends, an incomplete pack is removed, and a complete one is saved first. The same happens at the end
    of a `with` block of the pack, but Ctrl-C stops saving.

    Attributes:
        report: report on the incomplete or unsaved pack, and on the final one once the thread has ended.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", to=None, start="now")
        >>> len(pack["train"]), pack.finish().is_complete
        (1797, True)
    """

    def __init__(
        self, work: BackgroundWork, info: PackInfo, report: PrepareReport, arriving: dict[str, OpenSplit]
    ) -> None:
        self._work = work
        self._arriving = arriving
        Pack.__init__(self, info, self._opened_split)
        self.report = report

    @property
    def is_complete(self) -> bool:
        """Whether all samples are packed."""
        return self._work.arrival.is_complete

    def finish(self) -> Self:
        """Wait until the pack is complete and saved; see `PreparedPack`."""
        self._work.finish()
        return self

    def close(self) -> None:
        """End the thread; see `PreparedPack`."""
        self._work.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self._work.end()
        else:
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        self.finish()
        return PreparedPack, (self.info, self.report)

    def __repr__(self) -> str:
        if self.is_complete:
            return super().__repr__()
        arrived, samples = self._work.arrival.arrived, sum(self.splits.values())
        return f"{super().__repr__()}\n  {arrived:,} of {samples:,} samples are packed"

    def switch_to(self, info: PackInfo) -> None:
        """Open the splits of the complete pack from now on, and describe it."""
        for opened in self._arriving.values():
            opened.info = info
        self.info = info
        # A file with gaps is replaced, and would take up disk space as long as it is mapped.
        self._arriving.clear()
        self._opened.clear()

    def _opened_split(self, split: str) -> OpenSplit:
        if (arriving := self._arriving.get(split)) is not None and not self.is_complete:
            return arriving
        info = self._work.arrival.info
        assert info is not None
        return open_sealed(info.path.absolute(), info.seal, split)

    def _file_bytes(self) -> tuple[int, int]:
        return self.report.pack_bytes, 0


@atexit.register
def _end_all() -> None:
    for work in tuple(_live):
        work.end()

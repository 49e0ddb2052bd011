"""Image files of a far source are read many at a time, well ahead of the threads that decode them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from colabkit.foundation import ColabkitError, LoaderMeters
from colabkit.loading.loader.portions import Portion
from colabkit.loading.loader.workers import Stopped
from colabkit.packs import FileDataset
from colabkit.storage import STALLED_S, Calls, Item, Level, Retries, read_item

_HELD_BYTES = 256 << 20
_TICK_S = 0.25

_Wanted = tuple[int, Item]


class ReadingAhead:
    """Reads the files of coming samples in a thread of its own, with as many requests in flight as pay.

    Args:
        files: where they are.
        is_kept: tells of a sample that it need not be read.
        meters: count the part `read`: the seconds of all requests together.
    """

    def __init__(self, files: FileDataset, is_kept: Callable[[int], bool], meters: LoaderMeters) -> None:
        self._retries = Retries(meters.retried)
        self._files = files
        self._is_kept = is_kept
        self._meters = meters
        self._changed = threading.Condition()  # guards what follows
        self._wanted: OrderedDict[int, int] = OrderedDict()  # numbers by position
        self._found: dict[int, bytes | BaseException] = {}
        self._asked: set[int] = set()  # positions that were asked for, and not fetched yet
        self._forgotten: set[int] = set()
        self._held_bytes = 0  # found, and not fetched yet
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="colabkit-loader-reading", daemon=True)
        self._thread.start()

    def coming(self, portion: Portion) -> None:
        """Note samples that will be fetched, in this order."""
        with self._changed:
            self._wanted.update(zip(portion.positions.tolist(), portion.numbers.tolist(), strict=True))
            self._changed.notify_all()

    def forget(self, position: int) -> None:
        """Let go of the sample at a position: it is kept already."""
        with self._changed:
            data = self._found.pop(position, None)
            if position in self._asked and data is None:
                self._forgotten.add(position)
            self._asked.discard(position)
            if isinstance(data, bytes):
                self._held_bytes -= len(data)
                self._changed.notify_all()

    def fetch(self, position: int) -> bytes | None:
        """Return the bytes of the sample at a position that was noted, each once; None if it is kept by now.

        Raises:
            SourceChanged, FileFailed, TimedOut: if they cannot be read.
        """
        with self._changed:
            while position not in self._found:
                if self._is_over:
                    raise Stopped
                if position not in self._asked and position not in self._wanted:
                    return None  # another thread kept it before it was asked for
                if self._error is not None:
                    raise self._error
                self._changed.wait(_TICK_S)
            data = self._found.pop(position)
            self._asked.discard(position)
            if isinstance(data, BaseException):
                raise data
            self._held_bytes -= len(data)
            self._changed.notify_all()
            return data

    def close(self) -> None:
        """End the reading; a read that hangs is left behind."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # where the garbage collector ends a pass that was left
            self._thread.join(2 * _TICK_S + 2.0)

    def _run(self) -> None:
        try:
            with Calls(self._read, Level(), STALLED_S, lambda: self._look(calls)) as calls:
                while not self._is_over:
                    self._make(calls)
                    if calls.under_way:
                        self._put(*calls.take())
                    else:
                        with self._changed:
                            if not self._is_over and (not self._wanted or self._held_bytes >= _HELD_BYTES):
                                self._changed.wait(_TICK_S)
        except Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _make(self, calls: Calls[_Wanted, Any]) -> None:
        """Make calls for the next samples while there is room for more."""
        while calls.room > 0 and calls.may_begin and self._held_bytes < _HELD_BYTES:
            with self._changed:
                if not self._wanted:
                    return
                position, number = self._wanted.popitem(last=False)
                if self._is_kept(number):
                    self._changed.notify_all()
                    continue
                self._asked.add(position)
            item = self._files.item(number)
            calls.make((position, item), item.size)

    def _read(self, wanted: _Wanted) -> tuple[int, bytes | BaseException]:
        position, item = wanted
        began = time.perf_counter()
        try:
            found = read_item(self._files.source, item, self._retries)
        except ColabkitError as error:
            return position, error
        self._meters.add("read", 1, len(found), time.perf_counter() - began)
        return position, found

    def _put(self, position: int, found: bytes | BaseException) -> None:
        with self._changed:
            if position in self._forgotten:
                self._forgotten.discard(position)
                return
            self._found[position] = found
            if isinstance(found, bytes):
                self._held_bytes += len(found)
            self._changed.notify_all()

    def _look(self, calls: Calls[_Wanted, Any]) -> None:
        """While nothing comes, ask for what was noted meanwhile; leave if nobody wants it any more."""
        if self._is_over:
            raise Stopped
        self._make(calls)

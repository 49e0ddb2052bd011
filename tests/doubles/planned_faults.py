"""Planned faults of a drive, which can be replayed.

A plan is JSON: `{"seed": 0, "mtime_grain_s": 2.0, "faults": [{"on": "read", "path": "*/003.png", "do": "short"}]}`.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import random
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

KINDS = ("open", "read", "list", "stat")
DEEDS = ("error", "short", "end", "vanish", "hide", "change", "rewrite", "hang", "die")

_ALL_BYTES = bytes(range(256))
_TICK_S = 0.01
# A change makes a file this much newer, which exceeds the timestamp resolution of every file system.
_CHANGE_S = 60


@dataclass(frozen=True)
class Fault:
    """A fault of a drive in some of its requests.

    Args:
        on: `"open"`, `"read"`, `"list"` or `"stat"`. The kernel itself stats paths that are opened.
        path: glob of paths from the mount's root, as in `"/birds/1.png"`; `*` matches slashes too. With `"hide"` it is
            the hidden path, otherwise the file or folder of the request.
        do: `"error"`: the request fails with `errno`. `"short"`: a read returns half of its bytes.
            `"end"`: a read returns no bytes, as at the file's end.
            `"vanish"`: the path is no longer found, although it is listed. `"hide"`: a listing leaves the name out.
            `"change"`: from then on each byte of the file is one larger, a byte `+` is appended, and the file is a
            minute newer; this repeats at each further request. `"rewrite"`: the same, but the size is unchanged, and
            the time is now. `"hang"`: no answer until all requests are released.
            `"die"`: the drive's process ends and leaves a dead mount.
        first: number of the first matching request that fails, from 1.
        count: number of consecutive faults; by default all further requests fail.
        each: count the requests of each path separately, so that concurrent requests can be replayed.
        one_in: the plan's seed picks one in this many of the matching paths.
        offset_from: reads that begin before this byte do not match.
        errno: name of the error, such as `"EIO"`.
    """

    on: str
    path: str
    do: str
    first: int = 1
    count: int | None = None
    each: bool = False
    one_in: int = 1
    offset_from: int = 0
    errno: str = "EIO"

    def __post_init__(self) -> None:
        only = {"short": "read", "end": "read", "hide": "list"}.get(self.do, self.on)
        if self.on not in KINDS or self.do not in DEEDS or self.on != only or not hasattr(errno, self.errno):
            raise ValueError(f"invalid fault: {self}")


class Plan:
    """The planned faults of a drive, and their state.

    Args:
        signals: three shared numbers: the first becomes 1 when hung requests are released, the second counts faults,
            and the third changes when another plan replaces this one, which also releases hung requests.
        seed: seed that picks the paths of faults with `one_in`.
        faults: the arguments of each `Fault`; if several are due, the first one occurs.
        mtime_grain_s: modification and change times are rounded down to multiples of this many seconds.
    """

    def __init__(
        self, signals: memoryview, *, seed: int = 0, faults: tuple[dict[str, Any], ...] = (), mtime_grain_s: float = 0.0
    ) -> None:
        self._signals = signals
        self._number = signals[2]
        self._seed = seed
        self._faults = [Fault(**fault) for fault in faults]
        self._matches = [re.compile(fnmatch.translate(fault.path)).match for fault in self._faults]
        self._grain_ns = round(mtime_grain_s * 1e9)
        self._asked: Counter[tuple[int, str]] = Counter()
        self._gone: set[str] = set()
        self._changes: Counter[str] = Counter()
        self._rewritten_ns: dict[str, int] = {}
        self._lock = threading.Lock()

    def meet(self, kind: str, path: str, offset: int = 0) -> str:
        """Count a request and apply the fault that is planned for it, if any; return the fault's `do`, or ""."""
        if path in self._gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        due = [
            fault
            for place, fault in enumerate(self._faults)
            if fault.on == kind and fault.do != "hide" and offset >= fault.offset_from
            if self._is_picked(place, path) and self._is_due(place, path)
        ]
        if not due:
            return ""
        self._count()
        deed = due[0].do
        if deed == "die":
            os._exit(1)
        if deed == "vanish":
            self._gone.add(path)
        if deed in {"change", "rewrite"}:
            with self._lock:
                self._changes[path] += 1
                if deed == "rewrite":
                    self._rewritten_ns[path] = time.time_ns()
        while deed == "hang" and not self._signals[0] and self._signals[2] == self._number:
            time.sleep(_TICK_S)
        if deed in {"error", "vanish"}:
            number = getattr(errno, due[0].errno if deed == "error" else "ENOENT")
            raise OSError(number, os.strerror(number))
        return deed

    def hidden(self, folder: str, names: list[str]) -> set[str]:
        """Count a listing and return the names that it leaves out."""
        left_out = set()
        for place, fault in enumerate(self._faults):
            if fault.do == "hide":
                picked = {name for name in names if self._is_picked(place, f"{folder.rstrip('/')}/{name}")}
                if picked and self._is_due(place, folder):
                    self._count()
                    left_out |= picked
        return left_out

    def disguise(self, path: str, found: Any) -> None:
        """Apply planned changes to the result of a stat call."""
        rewritten_ns = self._rewritten_ns.get(path)
        changes = 0 if rewritten_ns else self._changes[path]
        found.st_size += changes
        for time_at in (found.st_mtimespec, found.st_ctimespec):
            time_ns = rewritten_ns or (time_at.tv_sec + _CHANGE_S * changes) * 10**9 + time_at.tv_nsec
            if self._grain_ns:
                time_ns -= time_ns % self._grain_ns
            time_at.tv_sec, time_at.tv_nsec = divmod(time_ns, 10**9)

    def read(self, path: str, into: Any, offset: int, file: int) -> int:
        """Fill a buffer with the file's bytes after planned changes, and return their number."""
        changes = self._changes[path]
        if not changes:
            return os.preadv(file, [into], offset)
        larger = bytes((byte + changes) % 256 for byte in _ALL_BYTES)
        data = os.pread(file, len(into), offset).translate(larger)
        longer = 0 if path in self._rewritten_ns else changes
        end = min(offset + len(into), os.fstat(file).st_size + longer)
        data += b"+" * (end - offset - len(data))
        into[: len(data)] = data
        return len(data)

    def _is_picked(self, place: int, path: str) -> bool:
        if not self._matches[place](path):
            return False
        one_in = self._faults[place].one_in
        return one_in == 1 or random.Random(f"{self._seed} {place} {path}").randrange(one_in) == 0

    def _is_due(self, place: int, path: str) -> bool:
        fault = self._faults[place]
        with self._lock:
            key = (place, path if fault.each else "")
            self._asked[key] += 1
            turn = self._asked[key] - fault.first
            return turn >= 0 and (fault.count is None or turn < fault.count)

    def _count(self) -> None:
        with self._lock:
            self._signals[1] += 1

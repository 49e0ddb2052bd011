"""Find the other process that uses the most CPU time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from colabkit.foundation.mount_table import Reader
from colabkit.foundation.reports import printable

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PYTHON = re.compile(r"python[\d.]*")


def _process_ids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def cpu_seconds(read: Reader, path: str) -> float:
    """Return the CPU time of a process or thread from its file `stat` in `/proc`.

    Raises:
        OSError, ValueError, IndexError: if the process or thread has ended.
    """
    # The name, in parentheses, may contain spaces.
    numbers = read(path).rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / _TICKS_PER_S


class BusyProcess(NamedTuple):
    """A process, and the number of CPUs that it uses.

    Attributes:
        name: its name, script and ID, for example `"python train.py, PID 4711"`.
        cpus: number of CPUs that it uses.
    """

    name: str
    cpus: float


@dataclass
class OtherProcesses:
    """Finds the other process that uses the most CPU time, by comparing the CPU times of all processes in two calls.

    Args:
        read: returns the text of a file.
        clock: returns the current time in seconds.
        process_ids: returns the IDs of all processes.
    """

    read: Reader
    clock: Callable[[], float] = time.monotonic
    process_ids: Callable[[], Iterable[int]] = _process_ids
    _before: dict[int, float] = field(default_factory=dict, init=False)
    _before_s: float = field(default=0.0, init=False)

    def busiest(self, own: Collection[int]) -> BusyProcess | None:
        """Return the busiest process since the last call, except those in `own`; None in the first call."""
        now_s = self.clock()
        try:
            now = {one: cpu_s for one in self.process_ids() if one not in own and (cpu_s := self._cpu_s(one))}
        except OSError:
            now = {}
        before, self._before = self._before, now
        passed_s, self._before_s = now_s - self._before_s, now_s
        used = {one: cpu_s - before[one] for one, cpu_s in now.items() if one in before}
        busiest = max(used, key=lambda one: used[one], default=None)
        if busiest is None or passed_s <= 0 or not used[busiest]:
            return None
        return BusyProcess(self._name(busiest), used[busiest] / passed_s)

    def _cpu_s(self, process_id: int) -> float | None:
        try:
            return cpu_seconds(self.read, f"/proc/{process_id}/stat")
        except (OSError, ValueError, IndexError):
            # The process has ended.
            return None

    def _name(self, process_id: int) -> str:
        """Return a process's name and, for Python, its script's name; other arguments may contain secrets."""
        name, words = "", [""]
        try:
            name = self.read(f"/proc/{process_id}/comm").strip()
            words = self.read(f"/proc/{process_id}/cmdline").split("\0")[1:3]
        except (OSError, ValueError):
            pass
        script = ""
        if _PYTHON.fullmatch(name) and words:
            script = " ".join(words) if words[0] == "-m" else os.path.basename(words[0])
        if script.startswith("-") and not script.startswith("-m "):
            script = ""
        return f"{printable(f'{name} {script}'.strip() or 'a process')}, PID {process_id}"

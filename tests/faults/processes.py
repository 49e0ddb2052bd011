"""Faults 21 and 22: several processes that stage the same source, and file locks that do not work."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from trees import leftovers

from colabkit.foundation import file_changes, locks, partials

from .board import COLABKIT, Outcome, Result, attempt, fault, spread
from .copies import FORMS, Originals, content, make_quick, new_folder
from .tools import COPIERS, Copier

_SIZES = {f"{number % 2}/{number}.bin": 500 + 900 * number for number in range(6)}


def in_processes(count: int, work: Callable[[int], object]) -> list[int]:
    """Do the work in several concurrent processes, and return their exit codes, which are negative after a signal."""
    reader, writer = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(writer)
                # Wait until all processes have started.
                os.read(reader, 1)
                work(number)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(reader)
    os.close(writer)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _staged_at_once(
    copier: Copier,
    folder: Path,
    limit: int,
    cases: list[tuple[str, int, str]],
    begin: Callable[[str, int], None] = lambda how, number: None,
) -> Iterator[Result]:
    """Copy one source in several processes; at least one must succeed, and each success must leave a complete copy."""
    make_quick()
    locks._BUSY_S = 0.01
    originals = Originals(folder / "originals", _SIZES)
    for kind, count, how in spread([case for case in cases if case[0] in copier.kinds], limit):
        with new_folder(folder / "case") as made:
            source, target, expected = originals.root / FORMS[kind], made / "copy", originals.expected(kind)

            def copy(number: int, source: Path = source, target: Path = target, how: str = how) -> None:
                begin(how, number)
                copier.copy(source, target)

            def work(
                copy: Callable[[int], None] = copy,
                count: int = count,
                source: Path = source,
                target: Path = target,
                expected: object = expected,
            ) -> Outcome:
                ends = in_processes(count, copy)
                assert content(target) in (None, expected), "the copy is incomplete or differs"
                if not target.exists():
                    copier.copy(source, target)
                assert content(target) == expected, "the next call makes a copy that differs"
                if leftovers(target.parent):
                    copier.update(source, target)
                assert not leftovers(target.parent), "unfinished files are left"
                return Outcome.REFUSED if any(end == 1 for end in ends) else Outcome.SURVIVED

            yield attempt(f"{kind}: {count} processes{how and ', '}{how}", work, refusals=copier.refusals)


@fault(21, "several processes stage the same source at once", COPIERS)
def many_stagers(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    cases = [(kind, count, f"run {run}") for kind, count, run in itertools.product(FORMS, (2, 3, 5, 8), range(10))]
    yield from _staged_at_once(copier, folder, min(limit, 60), cases)


def _lie(how: str, number: int) -> None:
    """Break `flock` in this process, and kill process 0 at a file change, as `how` requests."""
    if how.startswith("locks always succeed"):
        fcntl.flock = lambda fd, operation: None  # type: ignore[assignment]
    elif how.startswith("locks fail"):

        def fail(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = fail  # type: ignore[assignment]
    place = int(how.rpartition(" ")[2])
    if "killed" in how and number == 0:
        changes = itertools.count(1)

        def kill(operation: str, path: Path) -> None:
            if next(changes) == place:
                os.kill(os.getpid(), signal.SIGKILL)

        file_changes.hook = kill


@fault(22, "locks lie, and their holders are killed", {COLABKIT: COPIERS[COLABKIT]})
def locks_that_lie(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    ways = ["locks always succeed, run", "locks fail, run", "the first is killed at file change"]
    ways += ["locks always succeed, and the first is killed at file change"]
    cases = [
        (kind, count, f"{way} {place}")
        for kind, count, way, place in itertools.product(("folder", "zip", "tar"), (2, 4, 8), ways, range(1, 20, 3))
    ]
    yield from _staged_at_once(copier, folder, min(limit, 80), cases, _lie)
    yield from _left_by_a_reused_process_id(copier, folder, -(-limit // 4))


def _left_by_a_reused_process_id(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    """Kill a process, and let the next process or another running one reuse its ID."""
    originals = Originals(folder / "originals", _SIZES)
    ways = ("locks fail, and it is killed at file change", "killed at file change")
    cases = [*itertools.product(("folder", "zip"), ways, range(1, 40), ("the next process", "another process"))]
    for kind, way, place, owner in spread(cases, limit):
        with new_folder(folder / "case") as made:
            source, target, expected = originals.root / FORMS[kind], made / "copy", originals.expected(kind)

            def work(
                source: Path = source,
                target: Path = target,
                expected: object = expected,
                how: str = f"{way} {place}",
                owner: str = owner,
            ) -> None:
                def copy(number: int) -> None:
                    _lie(how, number)
                    copier.copy(source, target)

                in_processes(1, copy)
                _give_away(target.parent, os.getpid() if owner == "the next process" else os.getppid())
                copier.copy(source, target)
                assert content(target) == expected, "the next call makes a copy that differs"
                left = leftovers(target.parent) + leftovers(Path(os.environ["COLABKIT_LOCAL"]))
                assert not left, f"unfinished files are left: {left}"

            case = f"{kind}: {way} {place}, and its process ID belongs to {owner}"
            yield attempt(case, work, refusals=copier.refusals)


def _give_away(folder: Path, pid: int) -> None:
    """Rename the partials of a dead process as if its ID were `pid`, which another process now has."""
    for path in folder.iterdir():
        if found := partials._PARTIAL.fullmatch(path.name):
            path.rename(path.with_name(f"{path.name[: found.start('pid')]}{pid}{path.name[found.end('pid') :]}"))

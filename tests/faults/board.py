"""The fault scoreboard: the rows, the score of each case, and the table of results.

A row is one fault. Its function is called once for colabkit and once for each plain tool that is compared with it, and
yields one `Result` for each case.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from colabkit.errors import ColabkitError

COLABKIT = "colabkit"
"""Name of the first tool of each row. The other tools are plain ones, whose outcomes are printed for comparison."""

_TICK_S = 0.01
_GRACE_S = 10.0
_MOST_OUTPUT = 4000
# Cases create many small files, which is faster in memory than on a disk.
_SHARED_MEMORY = "/dev/shm"
_NOT_RUN = "not run here"
_HANGS = "hangs"
# Modules of this folder that contain no rows.
_OTHER_MODULES = ("__main__", "board", "copies", "machine", "packers", "remotes", "soak", "tools")
# Imported once before the processes of the rows are forked. A process with torch would be slow to fork for each case.
_PRELOADED = ["tests.faults.board", "h5py", "PIL.Image", "fsspec", "pandas", "colabkit.storage.staging.api"]


class Outcome(IntEnum):
    """The outcome of a case, from best to worst; a row's outcome is that of its worst case."""

    SURVIVED = 0
    """The result is correct without any action of the user."""
    DEGRADED = 1
    """The work finished, and the report lists everything that it left out."""
    REFUSED = 2
    """A typed error; earlier results are unchanged, and no unfinished files are left."""
    WRONG = 3
    """A wrong result without an error, an untyped error, a crash, a hang, a leak, or unfinished files."""


@dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Args:
        case: description of the case, such as `"EIO at read 3"`.
        outcome: how it ended.
        detail: the error; for a wrong outcome also the traceback.
        is_silent: whether the outcome was wrong without any sign: no error, no crash, no hang.
    """

    case: str
    outcome: Outcome
    detail: str = ""
    is_silent: bool = False


class NotRunHereError(Exception):
    """A row cannot run on this machine; the text is the reason."""


Case = TypeVar("Case")
FaultRun = Callable[[Any, Path, int], Iterator[Result]]


@dataclass(frozen=True)
class Row:
    """A fault: `run(tool, folder, limit)` yields the results of at most about `limit` cases in an empty folder."""

    number: int
    title: str
    module: str
    run: FaultRun
    tools: Mapping[str, Any]


ROWS: dict[int, Row] = {}


def fault(number: int, title: str, tools: Mapping[str, Any] | None = None) -> Callable[[FaultRun], FaultRun]:
    """Register a function as the row with the given number.

    Args:
        number: number of the fault.
        title: the fault in a few words.
        tools: values passed to the function, by tool name; the first one is `COLABKIT`. By default, only colabkit is
            tested, with None.
    """

    def register(run: FaultRun) -> FaultRun:
        ROWS[number] = Row(number, title, run.__module__, run, tools or {COLABKIT: None})
        return run

    return register


def spread(cases: Sequence[Case], limit: int) -> list[Case]:
    """Return at most `limit` cases in order, always the same ones, with the first and the last."""
    if len(cases) <= limit:
        return list(cases)
    last = len(cases) - 1
    # Choose cases at irregular distances; evenly spaced ones might, for example, all have the same error number.
    inner = random.Random(limit).sample(range(1, last), max(0, limit - 2))
    return [cases[number] for number in sorted({0, *inner, last})[:limit]]


def attempt(
    case: str,
    work: Callable[[], Outcome | None],
    after: Callable[[], object] | None = None,
    *,
    refusals: type[BaseException] | tuple[type[BaseException], ...] = ColabkitError,
    seconds: float = 60.0,
    release: Callable[[], object] | None = None,
) -> Result:
    """Run one case in a forked process and score it.

    Args:
        case: description of the case, such as `"EIO at read 3"`.
        work: function that returns the outcome, or None for SURVIVED, and raises `AssertionError` if its result is
            wrong.
        after: called after success and after a refusal; raises `AssertionError` if earlier results have changed or
            unfinished files are left.
        refusals: errors that count as REFUSED; all others are WRONG.
        seconds: deadline, after which the case counts as hanging.
        release: called after a hanging process is killed, so that a mount answers and the process can end.
    """
    return next(attempts([(case, work)], after, refusals=refusals, seconds=seconds, release=release))


def attempts(
    cases: Sequence[tuple[str, Callable[[], Outcome | None]]],
    after: Callable[[], object] | None = None,
    *,
    refusals: type[BaseException] | tuple[type[BaseException], ...] = ColabkitError,
    seconds: float = 60.0,
    release: Callable[[], object] | None = None,
) -> Iterator[Result]:
    """Run many cheap cases in one forked process and score them, as in `attempt`; a crash or hang ends only its case.

    Args:
        cases: name and work of each case.
        after: called after each case.
        refusals: errors that count as REFUSED.
        seconds: deadline of each case.
        release: called after a hanging process is killed.
    """
    done = 0
    while done < len(cases):
        reader, writer = os.pipe()
        # Flush output first; otherwise, both processes would write the output that is buffered now.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.setsid()
            _score_and_exit(writer, [work for _, work in cases[done:]], after, refusals)
        os.close(writer)
        why = "the process ended early"
        try:
            for said in _answers(reader, len(cases) - done, seconds):
                outcome, detail, is_silent = json.loads(said)
                yield Result(cases[done][0], Outcome(outcome), detail, is_silent)
                done += 1
        except TimeoutError as error:
            why = str(error)
        finally:
            os.close(reader)
            _kill_group(pid)
            if why.startswith(_HANGS) and release is not None:
                release()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if done < len(cases):
            yield Result(cases[done][0], Outcome.WRONG, f"{why} (status {status})")
            done += 1


def _answers(reader: int, count: int, seconds: float) -> Iterator[str]:
    """Yield up to `count` lines that the child writes, fewer if it ends; raise `TimeoutError` if one takes too long."""
    data = b""
    deadline = time.monotonic() + seconds
    while count:
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"{_HANGS}: no result after {seconds:g} s")
        block = os.read(reader, 1 << 16)
        if not block:
            return
        *lines, data = (data + block).split(b"\n")
        for line in lines:
            yield line.decode()
            count -= 1
            deadline = time.monotonic() + seconds


def _score_and_exit(
    writer: int,
    works: Sequence[Callable[[], Outcome | None]],
    after: Callable[[], object] | None,
    refusals: type[BaseException] | tuple[type[BaseException], ...],
) -> NoReturn:
    # Freezing the existing objects keeps the garbage collections of `_leaks` short.
    gc.freeze()
    # Exit in `finally`, since an error would otherwise continue in the parent's code.
    try:
        for work in works:
            data = json.dumps(_score(work, after, refusals)).encode() + b"\n"
            while data:
                data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _score(
    work: Callable[[], Outcome | None],
    after: Callable[[], object] | None,
    refusals: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[Outcome, str, bool]:
    """Run one case; return its outcome, the details, and whether a wrong result went unnoticed."""
    outcome, detail, is_refused = Outcome.WRONG, "", False
    before = _held()
    try:
        try:
            outcome = work() or Outcome.SURVIVED
        except AssertionError:
            raise
        except refusals as error:
            outcome, detail, is_refused = Outcome.REFUSED, f"{type(error).__name__}: {error}", True
        if after is not None:
            after()
    except AssertionError:
        return Outcome.WRONG, traceback.format_exc()[-_MOST_OUTPUT:], not is_refused
    except BaseException:
        return Outcome.WRONG, traceback.format_exc()[-_MOST_OUTPUT:], False
    if leaks := _leaks(before):
        return Outcome.WRONG, f"leaks {leaks}", False
    return outcome, detail, False


def _kill_group(pid: int) -> None:
    """Kill all processes in the child's group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _held() -> tuple[int, int, int]:
    """Return the numbers of threads, child processes and open files."""
    return threading.active_count(), _children(), len(os.listdir("/proc/self/fd"))


def _children() -> int:
    """Return the number of child processes, including ended ones that nobody has waited for."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_text().rpartition(") ")[2].split()
                count += int(fields[1]) == os.getpid()
    return count


def _leaks(before: tuple[int, int, int]) -> str:
    """Describe the threads, child processes and files that still exceed those `before` after `_GRACE_S` seconds."""
    deadline = time.monotonic() + _GRACE_S
    while True:
        more = [now - earlier for now, earlier in zip(_held(), before, strict=True)]
        found = [f"{one} {name}" for one, name in zip(more, ("threads", "processes", "files"), strict=True) if one > 0]
        if not found or time.monotonic() > deadline:
            return ", ".join(found)
        gc.collect()
        time.sleep(_TICK_S)


@dataclass(frozen=True)
class Score:
    """The results of one tool in one row; `not_run` is the reason if the row cannot run on this machine."""

    number: int
    tool: str
    results: tuple[Result, ...]
    seconds: float
    not_run: str = ""

    @property
    def is_good(self) -> bool:
        return not self.not_run and all(result.outcome < Outcome.WRONG for result in self.results)

    @property
    def shown(self) -> str:
        """The outcome of the worst case, or that the row was not run."""
        if self.not_run:
            return _NOT_RUN
        return max(result.outcome for result in self.results).name


def run_row(module: str, number: int, tool: str, limit: int) -> Score:
    """Run one row of a module with one tool, in a new folder."""
    importlib.import_module(module)
    row = ROWS[number]
    # This process inherits the start method of its parent, but cases must use the default one.
    multiprocessing.set_start_method(None, force=True)
    # Freeze existing objects, so that garbage collection in forked processes does not copy their memory.
    gc.collect()
    gc.freeze()
    # Leftovers are recognized by ".partial" in their paths, so the folder's path must not contain this text.
    parent = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
    folder = Path(tempfile.mkdtemp(prefix=f"fault{number}-", dir=parent))
    os.environ["COLABKIT_LOCAL"] = str(folder / "local")
    (folder / "local").mkdir()
    started = time.monotonic()
    results: list[Result] = []
    not_run = ""
    try:
        (folder / "work").mkdir()
        results.extend(row.run(row.tools[tool], folder / "work", limit))
    except NotRunHereError as error:
        not_run = str(error)
    except Exception:
        results.append(Result("the row itself", Outcome.WRONG, traceback.format_exc()[-_MOST_OUTPUT:]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not results and not not_run and tool != COLABKIT:
        not_run = "the fault does not apply to this tool"
    elif not results and not not_run:
        results.append(Result("no case", Outcome.WRONG, "the row has no case"))
    return Score(number, tool, tuple(results), time.monotonic() - started, not_run)


def load_rows() -> None:
    """Import the modules of all groups, which register their rows."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in _OTHER_MODULES:
            importlib.import_module(f"{__package__}.{path.stem}")


def run_rows(
    numbers: Sequence[int], limit: int, plain_limit: int, jobs: int, note: Callable[[Score], object]
) -> list[Score]:
    """Run rows in parallel processes and return the scores in order.

    Args:
        numbers: the rows.
        limit: maximum number of colabkit's cases in a row.
        plain_limit: the same for each of the other tools; 0 leaves them out.
        jobs: number of concurrent processes.
        note: called with each score when it is complete.
    """
    load_rows()
    tasks = [
        (ROWS[number].module, number, tool, limit if tool == COLABKIT else plain_limit)
        for number in numbers
        for tool in ROWS[number].tools
        if tool == COLABKIT or plain_limit
    ]
    scores = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Use a new process for each task, because cases may leave patches and handlers behind.
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as executor:
        futures = [executor.submit(run_row, *task) for task in tasks]
        for future in as_completed(futures):
            score = future.result()
            note(score)
            scores[score.number, score.tool] = score
    return [scores[number, tool] for _, number, tool, _ in tasks]


def summary(scores: Sequence[Score]) -> str:
    """Return the numbers of rows without a wrong outcome, of cases, and of silent errors."""
    own = [score for score in scores if score.tool == COLABKIT]
    good = sum(score.is_good for score in own)
    left_out = [f"fault {score.number} was {_NOT_RUN}: {score.not_run}" for score in own if score.not_run]
    cases = sum(len(score.results) for score in own)
    silent = sum(result.is_silent for score in own for result in score.results)
    counts = f"{good} of {len(own)} faults without a WRONG outcome; {cases:,} cases; {silent} silent errors"
    return "; ".join([counts, *left_out])


def table(scores: Sequence[Score]) -> str:
    """Return the scoreboard as a Markdown table: one row for each fault, with the cases by outcome."""
    lines = ["| | fault | cases | colabkit | plain tools |", "|---|---|---|---|---|"]
    for own in (score for score in scores if score.tool == COLABKIT):
        counts = Counter(result.outcome for result in own.results)
        shown = ", ".join(f"{outcome.name} {counts[outcome]}" for outcome in Outcome if counts[outcome])
        plain = "; ".join(
            f"{score.tool}: {score.shown}"
            for score in scores
            if score.number == own.number and score.tool != COLABKIT and score.results
        )
        shown = shown or _NOT_RUN
        row = f"| {own.number} | {ROWS[own.number].title} | {len(own.results)} | {shown} | {plain} |"
        lines.append(row.replace("|  |", "| |"))
    return "\n".join(lines)

"""Shards as tasks of any executor of `concurrent.futures`, in whatever process of whatever machine they run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from colabkit.foundation import ColabkitError, InvalidOption, PackingFailed, ProgressBar, cannot, file_changes
from colabkit.packs.packing.array_samples import ArraySampleMaker
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.pack_writer import WrittenPack, find_written, write_pack
from colabkit.storage import Threads

_TICK_S = 0.25
_LOOKED_S = 0.5
# Running tasks look for their sign and end before.
_END_S = 10.0
# Arrays travel inside their tasks.
_SENT_BYTES = 1 << 30

Outcome: TypeAlias = tuple[WrittenPack | None, str]


@dataclass(frozen=True)
class ShardTask:
    """A shard to be written. It is pickled.

    Attributes:
        plan: of the shard.
        path: of the shard, absolute.
        sign: a file that is there as long as somebody waits for the shard.
        threads: files read at once.
    """

    plan: PackPlan
    path: Path
    sign: Path
    threads: Threads

    def run(self) -> Outcome:
        """Write the shard if it is not there; return what it holds, and the trace of an error that is not the family's.

        No processes are forked: the executor has its own. Raises as `pack()`.
        """
        try:
            with _WatchingBar(self) as bar, file_changes.translated(self.plan.act):
                bar.look()
                found = find_written(self.path, self.plan.about)
                return found or write_pack(self.plan, self.path, self.threads, bar, replace=True), ""
        except ColabkitError:
            raise
        except Exception as error:  # of the user's code; as text, since not each of them can be pickled
            text = "".join(traceback.format_exception(error)).rstrip()
            return None, f"{type(error).__name__} in a task of the executor: {error}\n\n{text}"


class _WatchingBar(ProgressBar):
    """Shows nothing, but stops a task that nobody waits for any more."""

    def __init__(self, task: ShardTask) -> None:
        super().__init__("pack", None, " samples", enabled=False)
        self._task = task
        self._looked = 0.0

    def advance(self, count: int, files: int = 0) -> None:
        self.look()

    def wait(self) -> None:
        self.look()

    def look(self) -> None:
        """Look for the sign, if that was not done just before.

        Raises:
            PackingFailed: if it is gone.
        """
        if time.monotonic() - self._looked < _LOOKED_S:
            return
        self._looked = time.monotonic()
        if not self._task.sign.exists():
            found = f"{str(self._task.path.parent)!r} is not there for a worker, or the call that made it is over"
            needed = "a folder that all workers share"
            raise PackingFailed(cannot(self._task.plan.act, found, needed, "Pack to a path that all machines have"))


def check_executor(act: str, executor: object) -> None:
    """Raise `InvalidOption` unless it is an executor."""
    if executor is not None and not isinstance(executor, concurrent.futures.Executor):
        found, needed = f"executor={type(executor).__name__}", "an executor of concurrent.futures"
        raise InvalidOption(cannot(act, found, needed, "Use client.get_executor() of Dask, say"))


def run_tasks(
    act: str,
    tasks: Mapping[int, ShardTask],
    executor: concurrent.futures.Executor,
    sign: Path,
    on_wait: Callable[[], None],
) -> Generator[tuple[int, WrittenPack], None, None]:
    """Yield what each task wrote, as they end; the first error, and leaving this early, stop all others.

    Args:
        act: verb and object for messages.
        tasks: by number.
        executor: runs them.
        sign: of all of them; it does not exist yet.
        on_wait: called some times a second.

    Raises:
        PackingFailed: if the executor fails, or one of its processes.
        InvalidOption: if a task cannot be pickled.
        ColabkitError: what a task raised.
    """
    os.close(file_changes.create(sign))
    remaining = iter(tasks.items())
    task_bytes = 0
    numbers: dict[concurrent.futures.Future[Outcome], int] = {}
    waiting: set[concurrent.futures.Future[Outcome]] = set()
    try:
        while True:
            while len(waiting) * task_bytes < _SENT_BYTES and (one := next(remaining, None)) is not None:
                future = _submitted(act, one[1], executor)
                numbers[future] = one[0]
                waiting.add(future)
                task_bytes = _array_bytes(one[1].plan)
            if not waiting:
                return
            ended, waiting = concurrent.futures.wait(waiting, _TICK_S, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                yield numbers[future], _result(act, tasks[numbers[future]], future)
            on_wait()
    finally:
        with contextlib.suppress(OSError):  # an error that is under way says more
            file_changes.remove(sign)
        running = [future for future in waiting if not future.cancel()]
        concurrent.futures.wait(running, _END_S)


def _array_bytes(plan: PackPlan) -> int:
    """Return the bytes of arrays that travel with a task; 0 where samples are read by whoever makes them."""
    return plan.samples * plan.row_bytes if isinstance(plan.maker, ArraySampleMaker) else 0


def _submitted(act: str, task: ShardTask, executor: concurrent.futures.Executor) -> concurrent.futures.Future[Outcome]:
    try:
        return executor.submit(task.run)
    except Exception as error:
        raise _failed(act, task, error) from error


def _result(act: str, task: ShardTask, future: concurrent.futures.Future[Outcome]) -> WrittenPack:
    try:
        written, trace = future.result()
    except ColabkitError:
        raise
    except Exception as error:
        raise _failed(act, task, error) from error
    if written is None:
        raise RuntimeError(trace)
    return written


def _failed(act: str, task: ShardTask, error: Exception) -> ColabkitError:
    """Return what it means that the executor could not run a task."""
    told = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    if isinstance(error, pickle.PicklingError | AttributeError | TypeError) and (reason := _unpicklable(task)):
        next_step = "Define functions and classes at the top of a module that workers can import"
        return InvalidOption(cannot(act, f"a task that cannot be sent ({reason})", "one that pickles", next_step))
    next_step = "Run it again with a new executor: whole shards are kept"
    return PackingFailed(cannot(act, f"an executor that failed ({told})", "tasks that end", next_step))


def _unpicklable(task: ShardTask) -> str:
    """Return why a task cannot be pickled, empty if it can."""
    try:
        pickle.dumps(task)
    except Exception as error:  # pickling raises anything
        return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    return ""

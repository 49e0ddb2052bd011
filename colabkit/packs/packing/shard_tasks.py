"""Writes shards in the tasks of a `concurrent.futures` executor, whose workers may be on other machines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
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
# Seconds to wait for running tasks to end; they check for their marker file more often.
_END_S = 10.0
# Limit for the bytes of arrays in submitted tasks, since arrays are pickled with the task.
_SENT_BYTES = 1 << 30

Outcome: TypeAlias = tuple[WrittenPack | None, str]


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard to an absolute path; the marker file `sign` exists as long as the caller waits for the shard."""

    plan: PackPlan
    path: Path
    sign: Path
    threads: Threads

    def run(self) -> Outcome:
        """Write the shard unless it exists; return the result, or the traceback if user code raised an error.

        No processes are forked, because the executor already runs several tasks in parallel.
        """
        try:
            with _WatchingBar(self) as bar, file_changes.translated(self.plan.act):
                bar.look()
                found = find_written(self.path, self.plan.about)
                return found or write_pack(self.plan, self.path, self.threads, bar, replace=True), ""
        except ColabkitError:
            raise
        except Exception as error:
            # The traceback is returned as text because not every exception can be pickled.
            text = "".join(traceback.format_exception(error)).rstrip()
            return None, f"{type(error).__name__} in a task of the executor: {error}\n\n{text}"


class _WatchingBar(ProgressBar):
    """A progress bar without a display, which stops a task that the caller has abandoned."""

    def __init__(self, task: ShardTask) -> None:
        super().__init__("pack", None, " samples", enabled=False)
        self._task = task
        self._looked = 0.0

    def advance(self, count: int, files: int = 0) -> None:
        self.look()

    def wait(self) -> None:
        self.look()

    def look(self) -> None:
        """Look for the marker file, at most twice a second; raise `PackingFailed` if it no longer exists."""
        if time.monotonic() - self._looked < _LOOKED_S:
            return
        self._looked = time.monotonic()
        if not self._task.sign.exists():
            folder = str(self._task.path.parent)
            found = f"{folder!r} does not exist on this worker, or the call that submitted the task has ended"
            next_step = "Pack to a folder that all workers share"
            raise PackingFailed(cannot(self._task.plan.act, found, "", next_step))


def run_tasks(
    act: str,
    tasks: Mapping[int, ShardTask],
    executor: concurrent.futures.Executor,
    sign: Path,
    on_wait: Callable[[], None],
) -> Generator[tuple[int, WrittenPack], None, None]:
    """Yield the result of each task as it finishes; an error or closing the generator stops all other tasks.

    Args:
        act: verb and object for messages.
        tasks: tasks by shard number.
        executor: runs the tasks.
        sign: marker file of all tasks; it must not exist yet.
        on_wait: called several times a second.

    Raises:
        PackingFailed: if the executor or one of its processes fails.
        InvalidOption: if a task cannot be pickled.
        ColabkitError: if a task raised it.
        RuntimeError: if a task raised any other error; the message contains the traceback.
    """
    os.close(file_changes.create(sign))
    remaining = iter(tasks.items())
    task_bytes = 0
    numbers: dict[concurrent.futures.Future[Outcome], int] = {}
    waiting: set[concurrent.futures.Future[Outcome]] = set()
    try:
        while True:
            while len(waiting) * task_bytes < _SENT_BYTES and (one := next(remaining, None)) is not None:
                number, task = one
                with _executor_errors(act, task):
                    future = executor.submit(task.run)
                numbers[future] = number
                waiting.add(future)
                # Limit only tasks with arrays, which are sent with the task; workers read other samples themselves.
                is_sent = isinstance(task.plan.maker, ArraySampleMaker)
                task_bytes = task.plan.samples * task.plan.row_bytes if is_sent else 0
            if not waiting:
                return
            ended, waiting = concurrent.futures.wait(waiting, _TICK_S, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                with _executor_errors(act, tasks[numbers[future]]):
                    written, trace = future.result()
                if written is None:
                    raise RuntimeError(trace)
                yield numbers[future], written
            on_wait()
    finally:
        # A failure to remove the marker file must not replace the original error.
        with contextlib.suppress(OSError):
            file_changes.remove(sign)
        running = [future for future in waiting if not future.cancel()]
        concurrent.futures.wait(running, _END_S)


@contextlib.contextmanager
def _executor_errors(act: str, task: ShardTask) -> Iterator[None]:
    """Re-raise colabkit's errors unchanged; convert others to `InvalidOption` or `PackingFailed`."""
    try:
        yield
    except ColabkitError:
        raise
    except Exception as error:
        if isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            try:
                pickle.dumps(task)
            except Exception as reason:
                # User-defined classes can raise any error while they are pickled.
                unsent = f"a task cannot be pickled ({_in_one_line(reason)})"
                define = "Define functions and classes at the top level of a module that workers can import"
                raise InvalidOption(cannot(act, unsent, "", define)) from error
        found = f"the executor failed ({_in_one_line(error)})"
        next_step = "Pack again with a new executor; complete shards are reused"
        raise PackingFailed(cannot(act, found, "", next_step)) from error


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"

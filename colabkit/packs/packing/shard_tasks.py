"""Writes shards in the tasks of a `concurrent.futures` executor, whose workers may be on other machines.

A shard may be attempted more than once, even at the same time: its worker may die, or the executor may lose contact
with a worker and run the task again. Each attempt writes into its own folder, and the first complete one gives the
shard its name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from colabkit.foundation import (
    ColabkitError,
    FetchFailed,
    FileFailed,
    InvalidOption,
    PackingFailed,
    ProgressBar,
    SilentBar,
    TimedOut,
    cannot,
    file_changes,
)
from colabkit.packs.packing.array_samples import ArraySampleMaker
from colabkit.packs.packing.executors import is_without_workers, replace_pool
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.pack_writer import Attempts, WrittenPack, find_written, write_pack
from colabkit.storage import Threads

logger = logging.getLogger("colabkit")

_TICK_S = 0.25
_LOOKED_S = 0.5
# Seconds to wait for running tasks to end; they check for their marker file more often.
_END_S = 10.0
# Seconds without workers after which this process packs shards itself. Dask restarts a killed worker within 15 seconds.
_ALONE_S = 60.0
_CHECK_S = 1.0
# Limit for the bytes of arrays in submitted tasks, since arrays are pickled with the task.
_SENT_BYTES = 1 << 30
# Errors that may not recur in another attempt, or on another worker. All other errors of colabkit are about the source.
_PASSING = (FetchFailed, FileFailed, TimedOut, PackingFailed)

# Outcome of an attempt, as the suffix of its mark.
_COMPLETE, _DUPLICATE, _FAILED, _LOST = "complete", "duplicate", "failed", "lost"

ShardResult: TypeAlias = tuple[WrittenPack | None, str]


@dataclass(frozen=True)
class ShardTask:
    """Writes one shard to an absolute path; the marker file `sign` exists as long as the caller waits for the shard.

    Attributes:
        plan: plan of the shard.
        path: path of the shard.
        attempts: folder of the attempts at all shards.
        sign: the marker file.
        threads: number of threads that read files.
    """

    plan: PackPlan
    path: Path
    attempts: Path
    sign: Path
    threads: Threads

    def __dask_tokenize__(self) -> str:
        """Return a different token for each attempt, because Dask runs equal tasks once and keeps the error."""
        return uuid.uuid4().hex

    def run(self) -> ShardResult:
        """Write the shard unless it exists; return the result, or the traceback if user code raised an error.

        No processes are forked, because the executor already runs several tasks in parallel.
        """
        try:
            look = _sign_check(self)
            with SilentBar(look) as bar, file_changes.translated(self.plan.act), _defer_sigterm():
                look()
                return find_written(self.path, self.plan.about) or self.attempt(bar), ""
        except ColabkitError:
            raise
        except Exception as error:
            # The traceback is returned as text because not every exception can be pickled.
            text = "".join(traceback.format_exception(error)).rstrip()
            return None, f"{type(error).__name__} in a task of the executor: {error}\n\n{text}"

    def attempt(self, bar: ProgressBar) -> WrittenPack:
        """Write the shard in a new folder, which is replaced by a mark when the attempt ends."""
        # An executor may run the same pickled task twice, so only the worker can choose a unique name.
        folder = self.attempts / f"{self.plan.about['shard'][0]}.{os.getpid()}-{uuid.uuid4().hex}"
        file_changes.make_folder(folder)
        end = _FAILED
        try:
            written = write_pack(self.plan, folder / self.path.name, self.threads, bar)
            kept, is_first = self.keep(folder / self.path.name, written) if written.seal else (written, True)
            end = _COMPLETE if is_first else _DUPLICATE
            return kept
        finally:
            _end_attempt(folder, end)

    def keep(self, path: Path, written: WrittenPack) -> tuple[WrittenPack, bool]:
        """Give a complete file the name of the shard; return the shard, and whether this attempt finished first."""
        try:
            file_changes.link(path, self.path)
        except OSError:
            # Another attempt finished first, or the file system has no hard links.
            if (first := find_written(self.path, self.plan.about)) is not None:
                return first, False
            file_changes.rename(path, self.path)
        return written, True


def _end_attempt(folder: Path, end: str) -> None:
    # The caller removes all attempts when it ends, and an error here must not replace the error of the attempt.
    with contextlib.suppress(OSError):
        file_changes.write_file(folder.with_name(f"{folder.name}.{end}"), b"")
        file_changes.remove(folder)


@contextlib.contextmanager
def _defer_sigterm() -> Iterator[None]:
    """Let a worker of a process pool finish the block before SIGTERM ends it.

    If one worker of a pool dies, the pool sends this signal to the others, once or, from Python 3.12 on, several times.
    Their shards would have to be packed again.
    """
    if multiprocessing.parent_process() is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    worker = os.getpid()

    def remember(number: int, _: FrameType | None) -> None:
        arrived.append(number)
        # A process that user code forks here inherits this handler, but not the end of the block.
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield
    finally:
        # If a handler of the program raised an error, the pool would take it for the task's result and wait forever.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if arrived or before is None else before)
        if arrived:
            os.kill(os.getpid(), signal.SIGTERM)


def _sign_check(task: ShardTask) -> Callable[[], None]:
    """Return a function that raises `PackingFailed` if the marker file is gone; it looks at most twice a second."""
    looked = 0.0

    def look() -> None:
        nonlocal looked
        if time.monotonic() - looked < _LOOKED_S:
            return
        looked = time.monotonic()
        if not task.sign.exists():
            folder = str(task.path.parent)
            found = f"{folder!r} does not exist on this worker, or the call that submitted the task has ended"
            next_step = "Pack to a folder that all workers share"
            raise PackingFailed(cannot(task.plan.act, found, "", next_step))

    return look


@dataclass
class ShardTasks:
    """Runs tasks on an executor, and reruns those that fail.

    Attributes:
        act: verb and object for messages.
        tasks: tasks by shard number.
        executor: runs the tasks; a broken process pool is replaced by a new one.
        retries: number of times that a task may fail before its error is raised.
        sign: marker file of all tasks; it must not exist yet.
        attempts: folder of the attempts.
        on_wait: called several times a second.
        new_pool: the pool that has replaced the executor.
        own_thread: the thread of this process that packs shards while the executor has no workers.
    """

    act: str
    tasks: Mapping[int, ShardTask]
    executor: concurrent.futures.Executor
    retries: int
    sign: Path
    attempts: Path
    on_wait: Callable[[], None]
    new_pool: concurrent.futures.ProcessPoolExecutor | None = None
    own_thread: concurrent.futures.ThreadPoolExecutor | None = None
    _failures: Counter[int] = field(default_factory=Counter)
    _checked: float = field(default_factory=time.monotonic)
    _worked: float = field(default_factory=time.monotonic)
    _own: concurrent.futures.Future[ShardResult] | None = None

    @property
    def made_by(self) -> str:
        """Who packed the shards, for the report."""
        pool = ", then of a new process pool" if self.new_pool is not None else ""
        return f"tasks of an executor{pool}{' and a thread of this process' if self.own_thread is not None else ''}"

    def results(self) -> Generator[tuple[int, WrittenPack], None, None]:
        """Yield the result of each task as it finishes; an error or closing the generator stops all other tasks.

        Raises:
            PackingFailed: if the executor does not accept tasks, or loses the worker of a task too often.
            InvalidOption: if a task cannot be pickled.
            ColabkitError: if a task raised it.
            RuntimeError: if a task raised any other error; the message contains the traceback.
        """
        queue = deque(self.tasks)
        waiting: dict[concurrent.futures.Future[ShardResult], int] = {}
        broken: dict[int, BrokenProcessPool] = {}
        file_changes.make_folder(self.attempts)
        os.close(file_changes.create(self.sign))
        try:
            while queue or waiting or broken:
                if not broken:
                    self._submit(queue, waiting, broken)
                elif not waiting:
                    self._replace_pool(broken)
                    queue.extend(broken)
                    broken.clear()
                    continue
                ended, _ = concurrent.futures.wait(waiting, _TICK_S, concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    number = waiting.pop(future)
                    try:
                        written = self._result(future, number)
                    except BrokenProcessPool as error:
                        broken[number] = error
                    except (*_PASSING, RuntimeError) as error:
                        self._count_failure(number, error)
                        queue.append(number)
                    else:
                        yield number, written
                self._help(waiting)
                self.on_wait()
        finally:
            self._stop(waiting)

    def count_attempts(self) -> Attempts:
        """Count the attempts of this call; those that have not ended are lost.

        Without a folder that all workers share, only failures are known.
        """
        ends = _ends_of_attempts(self.attempts)
        lost = sum(end in ("", _LOST) for end in ends.values())
        if len(ends) < len(self.tasks):
            return Attempts(len(self.tasks) + self._failures.total(), 0, self._failures.total())
        complete = [name.partition(".")[0] for name, end in ends.items() if end in (_COMPLETE, _DUPLICATE)]
        return Attempts(len(ends), len(complete) - len(set(complete)), lost)

    def _submit(
        self,
        queue: deque[int],
        waiting: dict[concurrent.futures.Future[ShardResult], int],
        broken: dict[int, BrokenProcessPool],
    ) -> None:
        executor = self.new_pool or self.executor
        while queue and len(waiting) * _sent_bytes(self.tasks[queue[0]].plan) < _SENT_BYTES:
            task = self.tasks[number := queue.popleft()]
            try:
                with _executor_errors(self.act, task):
                    waiting[executor.submit(task.run)] = number
            except BrokenProcessPool as error:
                broken[number] = error
                return

    def _result(self, future: concurrent.futures.Future[ShardResult], number: int) -> WrittenPack:
        with _executor_errors(self.act, self.tasks[number]):
            written, trace = future.result()
        if written is None:
            raise RuntimeError(trace)
        return written

    def _count_failure(self, number: int, error: Exception) -> None:
        self._failures[number] += 1
        if self._failures[number] > self.retries:
            raise error

    def _replace_pool(self, broken: Mapping[int, BrokenProcessPool]) -> None:
        """Start a new process pool once the old one has ended; the shards that it lost have failed once more."""
        while True:
            # Workers that are still alive finish their shards. List them first, since one may end with its attempt.
            living = {child.pid for child in multiprocessing.active_children()}
            lost = self._open_attempts()
            if living.isdisjoint(pid for _, pid in lost.values()):
                break
            time.sleep(_TICK_S)
            self.on_wait()
        for name in lost:
            _end_attempt(self.attempts / name, _LOST)
        begun = {number for number, _ in lost.values()}
        for number, error in broken.items():
            if number in begun or not begun.intersection(broken):
                self._count_failure(number, _failure(self.act, error))
        if self.new_pool is not None:
            self.new_pool.shutdown(wait=False)
        self.new_pool = replace_pool(self.executor)

    def _open_attempts(self) -> dict[str, tuple[int, int]]:
        """Return the shard number and the process ID of each attempt that has not ended, by name."""
        found = {}
        for name, end in _ends_of_attempts(self.attempts).items():
            if not end:
                number, pid, _ = name.replace("-", ".").split(".")
                found[name] = int(number), int(pid)
        return found

    def _help(self, waiting: dict[concurrent.futures.Future[ShardResult], int]) -> None:
        """Pack a shard in a thread of this process if the executor has had no workers for some time."""
        now = time.monotonic()
        if now - self._checked < _CHECK_S or (self._own is not None and not self._own.done()):
            return
        self._checked = now
        if not is_without_workers(self.executor):
            self._worked = now
        elif now - self._worked > _ALONE_S and (taken := next((one for one in waiting if one.cancel()), None)):
            if self.own_thread is None:
                lost = "%s: the Dask cluster has had no workers for %.0f s, so this process packs until one joins"
                logger.warning(lost, self.act, now - self._worked)
                self.own_thread = concurrent.futures.ThreadPoolExecutor(1, "colabkit-pack")
            number = waiting.pop(taken)
            self._own = self.own_thread.submit(self.tasks[number].run)
            waiting[self._own] = number

    def _stop(self, waiting: Iterable[concurrent.futures.Future[ShardResult]]) -> None:
        # A failure to remove the marker file must not replace the original error.
        with contextlib.suppress(OSError):
            file_changes.remove(self.sign)
        running = [future for future in waiting if not future.cancel()]
        _, endless = concurrent.futures.wait(running, _END_S)
        for pool in (self.new_pool, self.own_thread):
            if pool is not None:
                pool.shutdown(wait=not endless, cancel_futures=True)


def _sent_bytes(plan: PackPlan) -> int:
    """Return the size of the samples that are sent with a task, which are arrays; the worker reads all others."""
    return plan.samples * plan.row_bytes if isinstance(plan.maker, ArraySampleMaker) else 0


def remove_attempts(attempts: Path) -> None:
    """Remove the files of all attempts; those that are still running can no longer write."""
    # Removing a folder fails while others write into it, so first take it away from them.
    ended = attempts.with_name(f"{attempts.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        file_changes.rename(attempts, ended)
        # An attempt that has already looked up the folder may still create one file, so the first removal may fail.
        with contextlib.suppress(OSError):
            file_changes.remove(ended)
        file_changes.remove(ended)


def _ends_of_attempts(attempts: Path) -> dict[str, str]:
    """Return the outcome of each attempt, by name; an empty string if it has not ended."""
    found = {}
    for name in sorted(os.listdir(attempts)):
        number, unique, *end = name.split(".")
        found[f"{number}.{unique}"] = "".join(end)
    return found


@contextlib.contextmanager
def _executor_errors(act: str, task: ShardTask) -> Iterator[None]:
    """Convert errors to `InvalidOption` or `PackingFailed`, except those of colabkit and of a broken process pool."""
    try:
        yield
    except (ColabkitError, BrokenProcessPool):
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
        raise _failure(act, error) from error


def _failure(act: str, error: Exception) -> PackingFailed:
    found = f"the executor failed ({_in_one_line(error)})"
    return PackingFailed(cannot(act, found, "", "Pack again with a new executor; complete shards are reused"))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"

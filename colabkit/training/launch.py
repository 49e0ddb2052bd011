"""`notebook_launch()`: several training processes out of one notebook, through torch's own launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from colabkit.foundation import (
    InvalidOption,
    LaunchFailed,
    cannot,
    check_whole_number,
    format_things,
    kind_of,
    usable_cpus,
)

_TOLD = 20_000  # characters of a traceback: all of it has to fit into a pipe
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def notebook_launch(function: Callable[..., Any], processes: int | None = None, *arguments: Any) -> Any:
    """Call `function(*arguments)` in several processes of one `torch.distributed` group, and return what the first did.

    Each process has the GPU of its rank, with NCCL; without GPUs they share the CPUs, with gloo. Inside, `Loader` and
    `train()` divide the work among them. The processes are forks, so `function` may be of the notebook itself; models
    have to be made inside it.

    Args:
        function: what each process runs; what the first returns has to be something that can be pickled.
        processes: how many; None for one a GPU, or two without GPUs.
        arguments: of the function.

    Raises:
        InvalidOption: if there are too few GPUs, or CUDA is in use here already, which forks do not survive.
        LaunchFailed: if a process failed: the first that did, with its traceback as a note.
    """
    act = "launch training"
    gpus = torch.cuda.device_count()
    count = (gpus or 2) if processes is None else processes
    check_whole_number(act, "processes", count, 1)
    if not callable(function):
        raise InvalidOption(cannot(act, kind_of(function), "a function", "Pass it without calling it"))
    if gpus and count > gpus:
        raise InvalidOption(
            cannot(act, f"processes={count}", f"at most one for each of {format_things(gpus, 'GPU')}", "Use fewer")
        )
    if torch.cuda.is_initialized():
        next_step = "Restart the runtime, and make models and move tensors inside the function"
        raise InvalidOption(cannot(act, "CUDA in use in this process", "processes that begin without it", next_step))
    if distributed.is_available() and distributed.is_initialized():
        found, needed = "a process that is one of several already", "one on its own"
        raise InvalidOption(cannot(act, found, needed, "Call the function itself"))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    failures = multiprocessing.get_context("fork").SimpleQueue()
    worker = _Worker(function, count, bool(gpus), failures)
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with _quiet_launcher():
            return elastic_launch(config, worker)(*arguments)[0]
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.raise_signal(error.sigval)
        raise
    except ChildFailedError as error:
        told = [failures.get() for _ in iter(failures.empty, True)]
        rank, failure = error.get_first_failure()
        _, rank, text, trace = min(told, default=(0.0, rank, f"exit code {failure.exitcode}", ""))
        act, found = f"train in {count} processes", f"process {rank}: {text}"
        failed = LaunchFailed(cannot(act, found, "all to end well", "Call the function itself to look into it"))
        if trace:
            failed.add_note(trace)
        raise failed from None
    finally:
        for number, handler in former.items():  # torch's launcher leaves its own in their place
            signal.signal(number, handler)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the dozens of lines to itself that torch's launcher logs when a process fails: they are told in one."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Worker:
    """What each process runs: the group around the function."""

    def __init__(self, function: Callable[..., Any], count: int, has_gpus: bool, failures: Any) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")  # torch's launcher asks
        self._function = function
        self._count = count
        self._has_gpus = has_gpus
        self._failures = failures

    def __call__(self, *arguments: Any) -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # those of torch's launcher are of no use in a fork
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # libgomp's threads do not live on in a fork, and the processes share the CPUs anyway.
        torch.set_num_threads(max(1, int(usable_cpus()) // self._count) if self._has_gpus else 1)
        rank = int(os.environ["RANK"])
        if self._has_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            distributed.init_process_group("nccl" if self._has_gpus else "gloo")
            result = self._function(*arguments)
            if rank == 0:
                _check_result(result)
        except Exception as error:
            trace = "".join(traceback.format_exception(error))[-_TOLD:]
            self._failures.put((time.monotonic(), rank, f"{type(error).__name__}: {error}"[:_TOLD], trace))
            raise  # with the group as it is: the others would fail of its end, and might be told of first
        distributed.destroy_process_group()
        return result if rank == 0 else None


def _check_result(result: Any) -> None:
    try:
        pickle.dumps(result)
    except Exception as error:  # pickling runs the objects' own code
        found = f"{kind_of(result)} ({error})"
        needed, next_step = "something that can be pickled", "Return numbers, text, or what train() returns"
        raise InvalidOption(cannot("bring back what the function returned", found, needed, next_step)) from error

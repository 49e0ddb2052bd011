"""`notebook_launch()`: several training processes out of one notebook, through torch's own launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from colabkit.environment import usable_cpus
from colabkit.errors import InvalidOption, LaunchFailed, cannot, check_whole_number

__all__ = ["notebook_launch"]


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
        LaunchFailed: if a process failed, with its traceback.
    """
    act = "launch training"
    gpus = torch.cuda.device_count()
    count = (gpus or 2) if processes is None else processes
    check_whole_number(act, "processes", count, 1)
    if not callable(function):
        raise InvalidOption(cannot(act, f"a {type(function).__name__}", "a function", "Pass it without calling it"))
    if gpus and count > gpus:
        raise InvalidOption(cannot(act, f"processes={count}", f"at most one for each of {gpus} GPUs", "Use fewer"))
    if torch.cuda.is_initialized():
        next_step = "Restart the runtime, and make models and move tensors inside the function"
        raise InvalidOption(cannot(act, "CUDA in use in this process", "processes that begin without it", next_step))
    if distributed.is_available() and distributed.is_initialized():
        found, needed = "a process that is one of several already", "one on its own"
        raise InvalidOption(cannot(act, found, needed, "Call the function itself"))
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
    try:
        return elastic_launch(config, _Worker(function, count, bool(gpus)))(*arguments)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told = failure.message if isinstance(failure.message, str) else str(failure.message.get("message", ""))
        lines = told.strip().splitlines() or [f"exit code {failure.exitcode}"]
        raise LaunchFailed(
            cannot(f"train in {count} processes", f"process {rank}: {lines[0]}", "all to end well", "See its output")
        ) from error


class _Worker:
    """What each process runs: the group around the function."""

    def __init__(self, function: Callable[..., Any], count: int, has_gpus: bool) -> None:
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")  # torch's launcher asks
        self._function = function
        self._count = count
        self._has_gpus = has_gpus

    def __call__(self, *arguments: Any) -> Any:
        # libgomp's threads do not live on in a fork, and the processes share the CPUs anyway.
        torch.set_num_threads(max(1, int(usable_cpus()) // self._count) if self._has_gpus else 1)
        if self._has_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if self._has_gpus else "gloo")
        result = self._function(*arguments)
        distributed.destroy_process_group()  # not after an error: the others would fail of that, and be told of first
        return result

"""Executors that `pack()` accepts, and the process pool that replaces a broken one."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from colabkit.foundation import Code, InvalidOption, cannot, check_type, option

# The arguments of a process pool, and the attributes that hold them.
_SETTINGS = {
    "max_workers": "_max_workers",
    "mp_context": "_mp_context",
    "initializer": "_initializer",
    "initargs": "_initargs",
    "max_tasks_per_child": "_max_tasks_per_child",
}


class RayExecutor(concurrent.futures.Executor):
    """Runs each call as a task of Ray on one CPU.

    Ray does not repeat a task whose worker died: the caller does, and counts it.

    Args:
        ray: the module.
    """

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._remote = ray.remote(_call).options(max_retries=0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Submit a call and return its future; canceling it also interrupts a running task."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        reference = self._remote.remote(fn, args, kwargs)

        def finish(ended: concurrent.futures.Future[Any]) -> None:
            error = ended.exception()
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(ended.result())
            else:
                # Ray wraps an error that the call raised.
                future.set_exception(getattr(error, "cause", None) or error)

        def cancel(ended: concurrent.futures.Future[Any]) -> None:
            if ended.cancelled():
                self._ray.cancel(reference)

        reference.future().add_done_callback(finish)
        future.add_done_callback(cancel)
        return future


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def as_executor(act: str, value: Any) -> concurrent.futures.Executor:
    """Return the executor of a Dask client or of the module `ray`, and any other executor unchanged.

    Raises:
        InvalidOption: if the value is none of them, or Ray is not connected to a cluster.
    """
    if isinstance(value, ModuleType) and value is sys.modules.get("ray"):
        if not value.is_initialized():
            raise InvalidOption(cannot(act, "Ray is not connected to a cluster", "", "Call ray.init() first"))
        return RayExecutor(value)
    # A module of the user may have the same name.
    client: type[Any] | None = getattr(sys.modules.get("distributed"), "Client", None)
    if isinstance(client, type) and isinstance(value, client):
        value = value.get_executor()
    expected = "an executor of concurrent.futures, a Dask client or the module ray"
    next_step = ("For example, use ", option("executor", Code("client")), " with a Dask client")
    check_type(act, "executor", value, concurrent.futures.Executor, expected, next_step)
    executor: concurrent.futures.Executor = value
    return executor


def is_without_workers(executor: concurrent.futures.Executor) -> bool:
    """Return whether this is the executor of a Dask cluster that has no workers now; other executors do not tell."""
    module = sys.modules.get("distributed.cfexecutor")
    if module is None or not isinstance(executor, module.ClientExecutor):
        return False
    try:
        info = executor._client.scheduler_info()  # noqa: SLF001 - no public API
    except Exception:
        # The futures of a client that lost its scheduler raise the error.
        return False
    # After such a loss, there is no information. A periodic update counts the workers without listing them.
    return "workers" in info and not info.get("n_workers", len(info["workers"]))


def replace_pool(broken: concurrent.futures.Executor) -> concurrent.futures.ProcessPoolExecutor:
    """Return a new process pool with the settings of a broken one, which accepts no more tasks."""
    found = {name: getattr(broken, attribute, None) for name, attribute in _SETTINGS.items()}
    return concurrent.futures.ProcessPoolExecutor(**{name: value for name, value in found.items() if value})

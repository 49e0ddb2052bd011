"""Communication between the ranks of a distributed run, and `notebook_launch()`, which starts the ranks."""

from __future__ import annotations

import codecs
import ctypes
import inspect
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import cloudpickle
import torch
from torch import distributed

from colabkit.foundation import (
    Code,
    InvalidOption,
    LaunchFailed,
    cannot,
    check_type,
    check_whole_number,
    checked_call,
    format_things,
    kind_of,
    option,
    usable_cpus,
)

T = TypeVar("T")

_AGREE_EVERY_S = 0.25
_AGREE_STEPS = 100
_TRACE_CHARS = 20_000
_TICK_S = 0.1
# Seconds until the other processes are killed, after a second signal or once one process has ended after a signal.
_SIGNAL_GRACE_S = 60.0
_FAILURE_GRACE_S = 5.0
_MOST_SIGNALS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from colabkit.training.ranks import run_rank; "
_START += "run_rank(*map(int, sys.argv[2:]))"


def is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Ranks:
    """The ranks of a run, as a context manager; without `torch.distributed`, this process is the only rank.

    The ranks communicate over a CPU process group (Gloo), so that no process waits for its GPU.

    Attributes:
        rank: rank of this process.
        count: number of processes.
    """

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        self._group: Any = None
        self._own_group = False
        self._next_agreement = 0
        self._pause = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the checkpoints."""
        return self.rank == 0

    def __enter__(self) -> Self:
        if is_one_of_several():
            self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
            if "gloo" not in str(distributed.get_backend()):
                self._group = distributed.new_group(backend="gloo")
                self._own_group = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, other ranks may never reach this point, and destroying the group would wait for them.
        if self._own_group and kind is None:
            distributed.destroy_process_group(self._group)

    def from_first(self, value: T) -> T:
        """Return the value that rank 0 passes."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def from_all(self, value: T) -> list[T]:
        """Return the values that the ranks pass, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def together(self, act: str, work: Callable[[], T]) -> T:
        """Run `work` on all ranks and return this rank's result; if one rank fails, raise an error on all ranks.

        Raises:
            LaunchFailed: if `work` failed only on other ranks.
        """
        if self.count == 1:
            return work()
        result: Any = None
        trouble: Exception | None = None
        try:
            result = work()
        except Exception as error:
            trouble = error
        reasons = self.from_all(None if trouble is None else f"{type(trouble).__name__}: {trouble}")
        if trouble is not None:
            raise trouble
        for rank, reason in enumerate(reasons):
            if reason is not None:
                found = f"process {rank} failed with {reason.rstrip('.')}"
                raise LaunchFailed(cannot(act, found, "", "Read the output of that process"))
        return cast(T, result)

    def agreed(self, step: int, step_s: float, requests: list[int], at_once: bool = False) -> list[int]:
        """Return the maximum of each request over all ranks; zeros at steps without communication.

        Args:
            step: number of the step, equal on all ranks.
            step_s: duration of a step in seconds; the shorter a step is, the more steps pass between two exchanges.
            requests: requests of this rank, integers of 0 or more.
            at_once: whether to communicate at this step in any case; equal on all ranks.
        """
        if self.count == 1:
            return requests
        if step < self._next_agreement and not at_once:
            return [0] * len(requests)
        sent = torch.tensor([*requests, int(step_s * 1e6)], dtype=torch.int64, device="cpu")
        distributed.all_reduce(sent, distributed.ReduceOp.MAX, group=self._group)
        *agreed, step_us = sent.tolist()
        most = max(1, min(_AGREE_STEPS, int(_AGREE_EVERY_S * 1e6 / max(1, step_us))))
        # The first steps have atypical durations, so lengthen the interval gradually.
        self._pause = min(2 * self._pause, most)
        self._next_agreement = step + self._pause
        return agreed


@checked_call()
def notebook_launch(function: Callable[..., Any], args: Sequence[Any] = (), processes: int | None = None) -> Any:
    """Call `function(*args)` in several processes of one `torch.distributed` group; return rank 0's result.

    Each process uses the GPU of its rank, with NCCL. Without GPUs, the processes share the CPUs, with Gloo. In the
    function, `Loader` and `train()` distribute the work over the processes. Processes are started, not forked:
    `function` may be defined in the notebook, and receives copies of the arguments and of the variables that it uses.
    Create the model inside the function.

    Args:
        function: function that each process runs. `cloudpickle` must be able to pickle it, its arguments and its
            result.
        args: arguments of the function, as a tuple or a list.
        processes: number of processes; None for one per GPU, or two without GPUs.

    Returns:
        The return value of the function on rank 0.

    Raises:
        InvalidOption: if an argument is invalid, there are GPUs, but fewer than `processes`, the function cannot be
            pickled, or this process already belongs to a group.
        LaunchFailed: if a process failed. The error describes the first failure. If this was an exception, a note
            holds its traceback.

    Example:
        >>> import colabkit
        >>> def work(factor):
        ...     import torch.distributed as dist
        ...     return factor * dist.get_world_size()
        >>> colabkit.notebook_launch(work, (10,), processes=2)
        20
    """
    act = "launch training"
    gpus = torch.cuda.device_count()
    count = (gpus or 2) if processes is None else check_whole_number(act, "processes", processes, 1)
    if not callable(function):
        found = f"function is {kind_of(function)}"
        raise InvalidOption(cannot(act, found, "a function", "Pass the function without calling it"))
    usage = ("For example, use ", option("args", Code("(10,)")))
    check_type(act, "args", args, (tuple, list), "a tuple or a list of the function's arguments", usage)
    if gpus and count > gpus:
        too_many = (option("processes", count), f" with {format_things(gpus, 'GPU')}")
        next_step = ("Use ", option("processes", gpus), " or less")
        raise InvalidOption(cannot(act, too_many, "at most one process per GPU", next_step))
    if distributed.is_available() and distributed.is_initialized():
        grouped = "this process is already part of a torch.distributed group"
        raise InvalidOption(cannot(act, grouped, "", "Call the function directly"))
    with ExitStack() as stack:
        payload = stack.enter_context(tempfile.TemporaryFile())
        payload.write(_pickled(act, function, tuple(args)))
        payload.flush()
        return _Launch(count, bool(gpus), payload.fileno(), stack).result()


def _pickled(act: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle the function and its arguments; on failure, raise an error that names the object at fault, if known."""
    try:
        return bytes(cloudpickle.dumps((function, arguments)))
    # Pickling runs code of the objects, which may raise any exception.
    except Exception as error:
        used: dict[str, Any] = {}
        with suppress(TypeError, ValueError):
            variables = inspect.getclosurevars(function)
            used = {**variables.globals, **variables.nonlocals}
        used |= {f"argument {number}": value for number, value in enumerate(arguments, 1)}
        culprit = next((f"{name!r} ({kind_of(value)})" for name, value in used.items() if not _is_picklable(value)), "")
        found = f"the function uses {culprit or 'an object'} that cannot be pickled ({error})"
        raise InvalidOption(cannot(act, found, "", "Create it inside the function")) from error


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


class _Launch:
    """The processes of one `notebook_launch()`; closing `stack` kills them."""

    def __init__(self, count: int, has_gpus: bool, payload: int, stack: ExitStack) -> None:
        self._count = count
        self._received: list[int] = []
        self._forwarded = 0
        self._kill_at = math.inf
        self._failure: tuple[int, str, str] | None = None
        self._pipes: dict[connection.Connection, int] = {}
        self._answers: dict[int, tuple[Any, ...]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._kill)
        # The ranks find each other through this store, as under torchrun.
        self._store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        output, written = os.pipe()
        self._output: list[int] = [output]
        stack.callback(os.close, output)
        os.set_blocking(output, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        environ = {
            "OMP_NUM_THREADS": str(max(1, int(usable_cpus()) // count)),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # Python ignores other entries.
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        try:
            for rank in range(count):
                reader, writer = connection.Pipe(duplex=False)
                stack.enter_context(reader)
                self._pipes[reader] = rank
                with writer:
                    numbers = [str(int(number)) for number in (payload, writer.fileno(), has_gpus, os.getpid())]
                    process = subprocess.Popen(  # noqa: S603 - runs this Python, without a shell
                        [sys.executable, "-c", _START, path, *numbers],
                        stdin=subprocess.DEVNULL,
                        stdout=written,
                        stderr=written,
                        env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        pass_fds=(payload, writer.fileno()),
                        # A child in a new session does not receive Ctrl-C from a terminal; this process forwards the
                        # signal instead.
                        start_new_session=True,
                    )
                self._processes.append(process)
        finally:
            os.close(written)

    def result(self) -> Any:
        with self._signals():
            while any(process.poll() is None for process in self._processes):
                connection.wait([*self._pipes, *self._output], _TICK_S)
                self._pass_signals_on()
                self._look()
                if time.monotonic() >= self._kill_at:
                    self._kill()
            self._look()
        if self._received:
            if signal.SIGINT not in self._received:
                signal.raise_signal(self._received[0])
            raise KeyboardInterrupt
        if self._failure:
            rank, text, trace = self._failure
            act, next_step = f"train in {self._count} processes", "Call the function directly to debug it"
            error = LaunchFailed(cannot(act, f"process {rank} failed with {text.rstrip('.')}", "", next_step))
            if trace:
                error.add_note(trace)
            raise error
        return cloudpickle.loads(self._answers[0][1])

    def _look(self) -> None:
        ended = {rank: code for rank, process in enumerate(self._processes) if (code := process.poll()) is not None}
        self._take()
        if self._failure or self._received:
            return
        # A crashed process makes the others fail, so report the crash first.
        for rank, code in ended.items():
            if rank not in self._answers:
                text = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                self._failure = rank, text, ""
                break
        else:
            failed = [(answer[1], rank, *answer[2:]) for rank, answer in self._answers.items() if answer[0] == "failed"]
            if failed:
                self._failure = min(failed)[1:]
        if self._failure:
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + _FAILURE_GRACE_S

    def _take(self) -> None:
        for output in [*self._output]:
            with suppress(BlockingIOError):
                while data := os.read(output, 1 << 16):
                    sys.stdout.write(self._decoder.decode(data))
                    sys.stdout.flush()
                self._output.clear()
        for pipe in [pipe for pipe in self._pipes if pipe.poll()]:
            rank = self._pipes.pop(pipe)
            with suppress(EOFError, OSError):
                self._answers[rank] = pipe.recv()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Record signals instead of acting on them, if this is the main thread."""
        former: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    former[number] = signal.signal(number, lambda number, _: self._received.append(number))
        try:
            yield
        finally:
            for noted, handler in former.items():
                signal.signal(noted, handler)

    def _pass_signals_on(self) -> None:
        for number in self._received[self._forwarded :]:
            self._send(number)
            self._forwarded += 1
        # After the first signal, wait for the final checkpoint as long as all processes run.
        is_urgent = self._forwarded > 1 or any(process.poll() is not None for process in self._processes)
        if self._received and is_urgent:
            self._kill_at = min(self._kill_at, time.monotonic() + _SIGNAL_GRACE_S)
        if len(self._received) >= _MOST_SIGNALS:
            self._kill_at = 0.0

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def run_rank(payload: int, answer: int, has_gpus: int, parent: int) -> None:
    """Run the function of `notebook_launch()` in one of its processes, and send back its result or its error.

    Args:
        payload: file descriptor of the pickled function and arguments.
        answer: file descriptor of the pipe for the answer.
        has_gpus: whether each process has a GPU.
        parent: ID of the launching process. On Linux, the kernel kills this process when that one ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    rank = int(os.environ["RANK"])
    with connection.Connection(answer, readable=False) as pipe:
        try:
            if has_gpus:
                torch.cuda.set_device(rank)
            with mmap.mmap(payload, 0, prot=mmap.PROT_READ) as data:
                function, arguments = cloudpickle.loads(data)
            os.close(payload)
            distributed.init_process_group("nccl" if has_gpus else "gloo")
            if not has_gpus:
                # Without this barrier, a rank could end while others are still connecting to it, and they would fail.
                distributed.barrier()
            result = function(*arguments)
            packed = _packed_result(result) if rank == 0 else b""
        except Exception as error:
            trace = "".join(traceback.format_exception(error))[-_TRACE_CHARS:]
            pipe.send(("failed", time.monotonic(), f"{type(error).__name__}: {error}"[:_TRACE_CHARS], trace))
            # Do not destroy the group: other ranks would fail, and their errors could be reported instead of this one.
            sys.stdout.flush()
            os._exit(1)
        except KeyboardInterrupt:
            sys.stdout.flush()
            os._exit(128 + signal.SIGINT)
        distributed.destroy_process_group()
        pipe.send(("done", packed))


def _packed_result(result: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    # Pickling runs code of the objects, which may raise any exception.
    except Exception as error:
        found = f"{kind_of(result)} cannot be pickled ({error})"
        next_step = "Return numbers, text, or the report of colabkit.train()"
        raise InvalidOption(cannot("return the result of the function", found, "", next_step)) from error

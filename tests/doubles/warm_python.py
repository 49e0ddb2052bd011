"""Start Python programs without waiting for torch: each is a fork of a process that has imported slow packages.

Use `run()` and `Program` like `subprocess.run` and `subprocess.Popen`, for `[sys.executable, ...]`, or for an
interpreter of another environment. The program is `__main__` of a child process with its own session, arguments,
environment, folder and files. Tests of these properties must start a new interpreter instead:

- The packages of `PACKAGES` have been imported, but colabkit has not.
- Options of the interpreter, and environment variables that replace them except `PYTHONPATH`, have no effect.
- All programs have the same hash seed.
- At its end, a program waits for threads and calls `atexit` functions, but does not free its objects.

Where the server cannot start, as on other systems than Linux, programs are started as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

PACKAGES = ("torch", "torch._dynamo", "numpy", "h5py", "PIL.Image", "psutil", "IPython.core.interactiveshell")
_NUMBER = struct.Struct("q")
_MOST_FILES = 64
# Files of a program have smaller numbers while it starts.
_FIRST_SPARE_FD = 512
_IS_WARM = "__is_warm__"
"""Name of a variable that a started program has in its main module."""


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    stdin: bytes | str | None = None,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program until it ends, and return its exit status and both outputs, as `subprocess.run` does.

    Args:
        command: the interpreter and its arguments.
        stdin: the whole standard input; None inherits that of the test.
        timeout: timeout in seconds, after which the program is killed.
        check: whether an exit status other than 0 raises `CalledProcessError`.
        options: options of `subprocess.Popen`.
    """
    files = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **({} if stdin is None else {"stdin": -1})}
    with Program(command, **{**files, **options}) as program:
        try:
            output, errors = program.communicate(stdin, timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(program.args, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def warm_launches() -> Iterator[None]:
    """Let `colabkit.notebook_launch()` start its processes as forks of the server."""
    from colabkit.training import ranks

    with mock.patch.object(ranks, "subprocess", types.SimpleNamespace(Popen=Program, DEVNULL=subprocess.DEVNULL)):
        yield


class Program(subprocess.Popen[Any]):
    """A running program; use it like `subprocess.Popen`.

    Args:
        command: the interpreter and its arguments.
        options: options of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        super().__init__(command, **options)

    def _execute_child(self, *options: Any) -> None:
        args, _, _, _, pass_fds, cwd, env, _, _, _, *pipes = options[:16]
        python, *words = (os.fspath(word) for word in args if word != "-u")
        server = _server(os.getpid(), python)
        if not server:
            super()._execute_child(*options)
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        files = {number: number for number in pass_fds}
        files |= {number: number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
        environ = dict(os.environ) if env is None else {os.fsdecode(key): os.fsdecode(env[key]) for key in env}
        folder = os.getcwd() if cwd is None else os.path.abspath(os.fspath(cwd))
        request = pickle.dumps((words, environ, folder, list(files)))
        with _STARTING, socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server)
            _adopt_orphans(True)
            try:
                socket.send_fds(connection, [_NUMBER.pack(len(request))], list(files.values()))
                connection.sendall(request)
                # The server closes the connection when this process has become the parent of the program.
                answer = connection.makefile("rb").read()
            finally:
                _adopt_orphans(False)
        (self.pid,) = _NUMBER.unpack(answer)
        self._child_created = True
        self._close_pipe_fds(*pipes)


_STARTING = threading.Lock()


def _adopt_orphans(is_wanted: bool) -> None:
    """Set whether this process becomes the parent of orphans among its descendants: `PR_SET_CHILD_SUBREAPER`."""
    ctypes.CDLL(None).prctl(36, int(is_wanted), 0, 0, 0)


def start_server() -> None:
    """Start the server of this process now.

    A warm program must do so before it starts threads and registers work for its end, which forks would inherit.
    """
    _server(os.getpid(), sys.executable)


@functools.cache
def _server(pid: int, python: str) -> str:
    """Start the server of an interpreter for this process, which has the given ID; return the address of its socket.

    The address is empty if the server cannot start here, for example if an import starts threads.
    """
    folder = tempfile.mkdtemp(prefix="warm-")
    address = os.path.join(folder, "socket")
    is_warm = python == sys.executable and sys.modules["__main__"].__dict__.get(_IS_WARM)
    is_ready = _fork_server(address) if is_warm else _start_server(address, python)
    # Register this last, because a forked server also has what was registered before.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return address if is_ready else ""


def _start_server(address: str, python: str) -> bool:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Threads do not survive a fork.
    environ["OPENBLAS_NUM_THREADS"] = "1"
    command = [python, "-P", __file__, address]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, cwd="/")
    assert server.stdout is not None
    _SERVERS.append(server)
    return server.stdout.readline() == b"ready\n"


def _fork_server(address: str) -> bool:
    """Start a server as a fork of this program, which a server has started and which has no other thread."""
    # Only this process keeps the other end of stdin.
    (stdin, _), (ready, stdout) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, 2 * _FIRST_SPARE_FD)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        try:
            words = _serve(address)
        except BaseException:
            os._exit(1)
        _main(words)
    os.close(stdin)
    os.close(stdout)
    with open(ready, "rb") as file:
        return file.readline() == b"ready\n"


_SERVERS: list[subprocess.Popen[bytes]] = []
"""The servers, which end when this process ends and its ends of the pipes close."""


def _serve(address: str) -> list[str]:
    """Fork for each request until stdin closes. In a fork, return the arguments of its program."""
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the imports left {threads} threads, and forks would have only one of them"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            if 0 in select.select([0, listener], [], [])[0]:
                sys.exit()
            with listener.accept()[0] as connection:
                data, fds, _, _ = socket.recv_fds(connection, _NUMBER.size, _MOST_FILES)
                request = pickle.loads(connection.recv(_NUMBER.unpack(data)[0], socket.MSG_WAITALL))
                if _is_forked_twice(connection):
                    break
                for fd in fds:
                    os.close(fd)
    return _enter(request, fds)


def _is_forked_twice(connection: socket.socket) -> bool:
    """Fork a child that forks the program and ends; return whether this process is the program.

    The kernel makes the program a child of the nearest ancestor that adopts orphans, which is the test. Then the
    program, which leads a new session, sends its ID.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    child = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == child:
        os.sched_yield()
    connection.sendall(_NUMBER.pack(os.getpid()))
    return True


def _enter(request: tuple[list[str], dict[str, str], str, list[int]], fds: list[int]) -> list[str]:
    """Give this process the files, the environment, the folder and the defaults of a new one."""
    words, environ, folder, numbers = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_SPARE_FD) for fd in fds]
    os.closerange(3, _FIRST_SPARE_FD)
    for number, fd in zip(numbers, spare, strict=True):
        os.dup2(fd, number)
    os.closerange(_FIRST_SPARE_FD, max(spare) + 1)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, errors = ("r" if number == 0 else "w"), ("backslashreplace" if number == 2 else None)
        is_line = number == 2 or os.isatty(number)
        stream = open(number, mode, 1 if is_line else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.invalidate_caches()
    import numpy as np
    import torch

    np.random.seed()
    if environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    return words


def _main(words: list[str]) -> NoReturn:
    """Run a program as the main module, and end this process as the interpreter would, but keep its memory until then.

    Freeing all objects takes longer than the fork, because each page of memory that is written to is copied.
    """
    status = 1
    try:
        _run(words)
        status = 0
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            status = -signal.SIGINT
        # Begin the traceback in the program.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            status = 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _run(words: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, _IS_WARM: True})
    match words:
        case ["-c", code, *_]:
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", name, *_]:
            sys.argv = ["-m", *words[2:]]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(name)
        case _:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            main.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


if __name__ == "__main__":
    _main(_serve(sys.argv[1]))

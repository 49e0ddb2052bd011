"""Child programs with a timeout, and threads on systems that allow few.

A child that cannot be killed, for example on a hung mount, is abandoned.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colabkit.foundation.errors import FileFailed, TimedOut
from colabkit.foundation.messages import Text, cannot, option
from colabkit.foundation.mount_table import mount_holding, mounts
from colabkit.foundation.units import format_seconds

# Seconds to wait for a killed child to end; afterwards it is probably blocked in the kernel, immune to signals.
_GRACE_S = 1.0
_TICK_S = 0.2

_MORE_TIME = ("Try again, or increase ", option("timeout"))

_left_behind: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit status of a program, and its combined standard output and standard error."""

    status: int
    output: str


def run(
    command: Sequence[str],
    act: str,
    timeout: float,
    *,
    next_step: Text = _MORE_TIME,
    environ: Mapping[str, str] | None = None,
    on_tick: Callable[[float], None] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> ProcessResult:
    """Run a program until it ends and return its exit status and output.

    The program runs in `/`, in a new session and without input. It is killed with its children if it exceeds the
    timeout or if this call is interrupted.

    Args:
        command: program and arguments, which are not interpreted by a shell.
        act: verb and object for the message.
        timeout: timeout in seconds.
        next_step: advice for the message if the program exceeds the timeout.
        environ: environment variables; by default those of this process.
        on_tick: called with the elapsed seconds, about five times per second and after each block of output.
        on_line: called with each line of output that ends with a newline; the output is then not returned.

    Raises:
        TimedOut: if the program exceeds the timeout.
        OSError: if the program cannot be started.
    """
    _left_behind[:] = [child for child in _left_behind if child.poll() is None]
    started = time.monotonic()
    child = subprocess.Popen(  # noqa: S603 - no shell; callers choose the program
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environ,
        start_new_session=True,
    )
    assert child.stdout is not None
    output, line = bytearray(), bytearray()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            is_open = True
            while is_open or child.poll() is None:
                passed = time.monotonic() - started
                if passed >= timeout:
                    raise TimedOut(cannot(act, f"no response within {format_seconds(timeout)}", "", next_step))
                if on_tick is not None:
                    on_tick(passed)
                if not is_open:
                    # The program has closed its output and should end soon.
                    _wait(child, min(_TICK_S, timeout - passed))
                elif selector.select(min(_TICK_S, timeout - passed)):
                    block = os.read(child.stdout.fileno(), 1 << 16)
                    is_open = bool(block)
                    if on_line is None:
                        output += block
                        continue
                    line += block
                    *whole, line = line.split(b"\n")
                    for text in whole:
                        on_line(text.decode("utf-8", "replace"))
                elif child.poll() is not None:
                    # Stop reading: the program has ended, but one of its children keeps the output open.
                    break
        return ProcessResult(child.returncode, output.decode("utf-8", "replace"))
    finally:
        _end(child)


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line of output; None for other lines, such as warnings of the interpreter."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def program(name: str) -> str | None:
    """Return the path of a program in PATH, or None if not found; relative folders and remote mounts are skipped."""
    table = mounts()

    def is_local(folder: str) -> bool:
        holding = mount_holding(os.path.abspath(folder), table)
        return holding is None or not holding.is_remote

    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(one for one in folders if os.path.isabs(one) and is_local(one)))


def python(code: str, *arguments: str, isolated: bool = True) -> list[str]:
    """Return the command that runs Python code in a fresh interpreter.

    Args:
        code: Python source code.
        arguments: values of `sys.argv[1:]`.
        isolated: whether to ignore site packages and `PYTHON*` variables; the interpreter then starts in milliseconds.
    """
    return [sys.executable or "python3", *(["-I", "-S"] if isolated else []), "-c", code, *arguments]


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if not _wait(child, _GRACE_S):
            _left_behind.append(child)
    assert child.stdout is not None
    child.stdout.close()


def _wait(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def has_started(thread: threading.Thread) -> bool:
    """Start a thread; return False if the system cannot start another one."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def start_thread(thread: threading.Thread, act: Text) -> None:
    """Start a thread that the work requires.

    Args:
        thread: the thread.
        act: verb and object for the message.

    Raises:
        FileFailed: if the system cannot start another thread.
    """
    if not has_started(thread):
        next_step = "Close other programs, or raise the limits on memory (ulimit -v) and processes (ulimit -u)"
        raise FileFailed(cannot(act, "the system cannot start another thread", "", next_step))

"""Real mounts for tests: the slow drive of slow_drive.py, which tests can control, and `rclone mount`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import slow_drive
from slow_drive import detach, mounted_at
from waiting import comes_true

__all__ = ["FuseMount", "RcloneMount", "has_fuse", "has_rclone", "in_child", "mounted_at", "serve_here", "wait_for"]

Operation = Literal["open", "read", "list"]

DEADLINE_S = 15.0


def has_fuse() -> bool:
    has_mfusepy = importlib.util.find_spec("mfusepy") is not None
    return has_mfusepy and os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3") is not None


def has_rclone() -> bool:
    return shutil.which("rclone") is not None and os.access("/dev/fuse", os.R_OK | os.W_OK)


class _Mount:
    """A mount that a child process serves; leaving the block kills the process and unmounts even a hanging mount."""

    def __init__(self, point: Path, fstype: str) -> None:
        self.point = point
        self.fstype = fstype
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The ID of the process that serves the mount."""
        assert self._child is not None
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process that serves the mount has ended."""
        assert self._child is not None
        return self._child.poll() is not None

    def _start(self, command: list[str], **options: Any) -> None:
        self.point.mkdir(parents=True, exist_ok=True)
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, start_new_session=True, **options
        )
        try:
            # A child with status 0 has left the mount to a process of its own.
            wait_for(lambda: self.fstype in mounted_at(self.point) or bool(self._child.poll()), "the mount")
            if self._child.poll():
                self._said.seek(0)
                raise RuntimeError(f"{command} ended: {self._said.read().decode(errors='replace')}")
        except BaseException:
            self._end()
            raise

    def kill(self) -> None:
        """Kill the process with SIGKILL; the dead mount remains."""
        assert self._child is not None
        self._child.kill()
        self._child.wait(DEADLINE_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._child is not None
        self.kill()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._said.close()
        detach(self.point)


class FuseMount(_Mount):
    """A FUSE mount at `point` that shows the folder `root`. By default nothing is cached: every read reaches the mount.

    Args:
        point: mount point; created if missing.
        root: the folder to show, for reading and writing.
        fstype: the mount's type in /proc/mounts, beginning with `"fuse."`.
        latency_s: delay of each open, listing and read.
        locks: false for a file system on which `flock` and `fcntl` locks fail, as on some network mounts.
        at_once: maximum number of concurrent opens, listings and reads; others wait.
        open_s: latency of opens instead of `latency_s`.
        list_s: latency of listings instead of `latency_s`.
        read_s: latency of reads instead of `latency_s`.
        bandwidth: total bytes per second of all reads; None for no limit.
        attr_s: seconds for which the kernel may cache names, sizes and times.
        direct_io: false lets the kernel cache and read ahead the bytes of open files.
        plan: planned faults; see planned_faults.py.
        is_child: whether the process that serves the mount is a child of this one. If it is not, as with Google Drive,
            the mount can only be unmounted.
    """

    def __init__(
        self,
        point: Path,
        root: Path,
        fstype: str = "fuse.drive",
        latency_s: float = 0.0,
        locks: bool = True,
        at_once: int = 128,
        *,
        open_s: float | None = None,
        list_s: float | None = None,
        read_s: float | None = None,
        bandwidth: float | None = None,
        attr_s: float = 0.0,
        direct_io: bool = True,
        plan: dict[str, Any] | None = None,
        is_child: bool = True,
    ) -> None:
        super().__init__(point, fstype)
        self._plan = plan or {}
        open_ms, list_ms, read_ms = (1e3 * (latency_s if own is None else own) for own in (open_s, list_s, read_s))
        self._command = [
            *(sys.executable, slow_drive.__file__, str(root), str(point), f"--fstype={fstype}"),
            *(f"--open-ms={open_ms}", f"--list-ms={list_ms}", f"--read-ms={read_ms}", f"--at-once={at_once}"),
            *(f"--bandwidth={bandwidth or 0}", f"--attr-s={attr_s}"),
            *([] if direct_io else ["--page-cache"]),
            *([] if locks else ["--no-locks"]),
            *([] if is_child else ["--apart"]),
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as if_it_fails:
            shared, self._numbers = slow_drive.shared_numbers()
            self._plan_file, self._log = (os.memfd_create(name, 0) for name in ("plan", "log"))
            if_it_fails.callback(os.close, self._plan_file)
            if_it_fails.callback(os.close, self._log)
            try:
                os.write(self._plan_file, json.dumps(self._plan).encode())
                shared_options = [f"--shared={shared}", f"--log={self._log}", f"--plan=/dev/fd/{self._plan_file}"]
                self._start([*self._command, *shared_options], pass_fds=(shared, self._log, self._plan_file))
            finally:
                os.close(shared)
            if_it_fails.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        os.close(self._log)
        os.close(self._plan_file)

    def replan(self, plan: dict[str, Any] | None = None) -> None:
        """Replace the plan; this undoes planned changes of files and releases requests that hang as planned."""
        data = json.dumps(plan or {}).encode()
        os.ftruncate(self._plan_file, 0)
        os.pwrite(self._plan_file, data, 0)
        self._numbers[slow_drive.GO_ON] = 0
        self._numbers[slow_drive.PLANS] += 1

    def hang(self, operation: Operation | None = None, after: int = 0) -> None:
        """Stop responding: to all operations, or only to those of one kind, after `after` more of this kind."""
        if operation is None:
            os.kill(self.pid, signal.SIGSTOP)
            # The signal stops the threads one after another, so the last ones may still answer requests for a moment.
            wait_for(self._is_stopped, "the stop of all threads")
        else:
            kind = slow_drive.KINDS.index(operation)
            self._numbers[slow_drive.HANG + kind] = self._numbers[slow_drive.COUNT + kind] + after + 1

    def _is_stopped(self) -> bool:
        states = (path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat"))
        return all(state.rpartition(")")[2].split()[0] == "T" for state in states)

    def go_on(self) -> None:
        """Respond to all operations again, including waiting ones."""
        for kind in range(len(slow_drive.KINDS)):
            self._numbers[slow_drive.HANG + kind] = 0
        self._numbers[slow_drive.GO_ON] = 1
        os.kill(self.pid, signal.SIGCONT)

    def fail(self, number: int, one_in: int = 1) -> None:
        """Fail one in `one_in` reads and listings with the given errno from now on; `one_in=0` stops the failures."""
        self._numbers[slow_drive.ONE_IN] = one_in
        self._numbers[slow_drive.FAIL] = number

    @property
    def opened(self) -> int:
        return self._numbers[slow_drive.COUNT + slow_drive.OPEN]

    @property
    def listed(self) -> int:
        return self._numbers[slow_drive.COUNT + slow_drive.LIST]

    @property
    def opened_paths(self) -> list[str]:
        """The opened files in order, as paths from the mount's root, such as `"/birds/1.png"`."""
        return [os.fsdecode(path) for path in os.pread(self._log, 1 << 26, 0).split(b"\0")[:-1]]

    @property
    def read_bytes(self) -> int:
        """Number of bytes that reads have returned."""
        return self._numbers[slow_drive.READ_BYTES]

    @property
    def busiest(self) -> int:
        """Largest number of concurrent opens, listings and reads."""
        return self._numbers[slow_drive.BUSIEST]

    @property
    def faults(self) -> int:
        """Number of planned faults that occurred."""
        return self._numbers[slow_drive.FAULTS]


class RcloneMount(_Mount):
    """A local folder behind a real `rclone mount`.

    Args:
        point: mount point; created if missing.
        root: the folder to show.
        cache: rclone's cache folder.
        mode: caching of files: `"full"`, `"writes"` or `"off"`.
        rc: serve the remote control over HTTP at `url`.
        user: user name for the remote control; by default none is required.
        password: password of the user.
        options: further arguments.
    """

    def __init__(
        self,
        point: Path,
        root: Path,
        cache: Path,
        mode: str = "full",
        *,
        rc: bool = False,
        user: str = "",
        password: str = "",
        options: Iterable[str] = (),
    ) -> None:
        super().__init__(point, "fuse.rclone")
        self.cache = cache
        self.address = f"127.0.0.1:{_free_port()}" if rc else ""
        self.url = f"http://{self.address}" if rc else ""
        access = ["--rc-user", user, "--rc-pass", password] if user else ["--rc-no-auth"]
        self._command = [
            *("rclone", "mount", str(root), str(point), "--config", ""),
            *("--vfs-cache-mode", mode, "--cache-dir", str(cache), "--dir-cache-time", "1h"),
            *(["--rc", "--rc-addr", self.address, *access] if rc else []),
            *options,
        ]

    def __enter__(self) -> Self:
        self._start(self._command)
        return self


def wait_for(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Wait until a condition holds; raise `TimeoutError` after the deadline."""
    if not comes_true(condition, seconds):
        raise TimeoutError(f"{what} did not happen within {seconds} s")


def in_child(code: str, *arguments: object, seconds: float = 5.0) -> str:
    """Run Python code, which may hang, in a child process; return the output, or `"hung"` after the deadline."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        return child.communicate(timeout=seconds)[0].decode().strip()
    except subprocess.TimeoutExpired:
        # Do not wait for the child: if it hangs in the kernel, it dies only when the mount is removed.
        child.kill()
        assert child.stdout is not None
        child.stdout.close()
        return "hung"


def serve_here(point: str, root: str, fstype: str) -> None:
    """Serve a file system until it is unmounted."""
    shared, _ = slow_drive.shared_numbers()
    slow_drive.serve(root, point, fstype, slow_drive.Behavior(), shared, os.open(os.devnull, os.O_WRONLY))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

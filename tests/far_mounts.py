"""Real far mounts for tests: a FUSE file system that answers late, wrongly or never, and real `rclone mount`.

Run as a script this file is the file system's own process. What it is told and what it counted lie in memory that
both processes share, so a test can ask also when it hangs.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

Operation = Literal["open", "read", "list"]

DEADLINE_S = 15.0
_TICK_S = 0.01
_KINDS: tuple[Operation, ...] = ("open", "read", "list")
_FAIL, _ONE_IN, _HANG, _COUNT = 0, 1, 2, 5  # places in the shared numbers; the last two hold one for each kind
_SHARED_BYTES = 8 * 8


def has_fuse() -> bool:
    """Return whether this machine can mount FUSE file systems."""
    has_mfusepy = importlib.util.find_spec("mfusepy") is not None
    return has_mfusepy and os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3") is not None


def has_rclone() -> bool:
    """Return whether this machine can run `rclone mount`."""
    return shutil.which("rclone") is not None and os.access("/dev/fuse", os.R_OK | os.W_OK)


class _Mount:
    """A child process that serves a mount; leaving the block kills it and takes the mount away, also when it hangs."""

    def __init__(self, point: Path, fstype: str) -> None:
        self.point = point
        self.fstype = fstype
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that serves the mount."""
        assert self._child is not None
        return self._child.pid

    def _start(self, command: list[str], **options: Any) -> None:
        self.point.mkdir(parents=True, exist_ok=True)
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, start_new_session=True, **options
        )
        try:
            wait_for(lambda: self.fstype in mounted_at(self.point) or self._child.poll() is not None, "the mount")
            if self._child.poll() is not None:
                self._said.seek(0)
                raise RuntimeError(f"{command} ended: {self._said.read().decode(errors='replace')}")
        except BaseException:
            self._end()
            raise

    def kill(self) -> None:
        """Kill the process with SIGKILL; the mount stays, dead."""
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
        _detach(self.point)


class FuseMount(_Mount):
    """The folder `root` once more at `point`, through a process, with nothing cached: every read reaches it.

    Args:
        point: where it is mounted; made if missing.
        root: the folder that shows there, for reading and writing.
        fstype: its type in /proc/mounts, beginning with `"fuse."`.
        latency_s: each open, listing and read is answered so much later.
        locks: false for a file system on which `flock` and `fcntl` locks fail, as on network mounts.
        at_once: operations that are worked on at the same time; others wait.
    """

    def __init__(
        self,
        point: Path,
        root: Path,
        fstype: str = "fuse.drive",
        latency_s: float = 0.0,
        locks: bool = True,
        at_once: int = 128,
    ) -> None:
        super().__init__(point, fstype)
        self._told = {"root": str(root), "fstype": fstype, "latency_s": latency_s, "locks": locks, "at_once": at_once}

    def __enter__(self) -> Self:
        shared, self._log = (os.memfd_create(name, 0) for name in ("shared", "log"))
        try:
            os.ftruncate(shared, _SHARED_BYTES)
            self._numbers = memoryview(mmap.mmap(shared, _SHARED_BYTES)).cast("q")
            self._numbers[_ONE_IN] = 1
            told = {**self._told, "point": str(self.point), "shared": shared, "log": self._log}
            self._start([sys.executable, __file__, json.dumps(told)], pass_fds=(shared, self._log))
        except BaseException:
            os.close(self._log)
            raise
        finally:
            os.close(shared)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        os.close(self._log)

    def hang(self, operation: Operation | None = None, after: int = 0) -> None:
        """Answer no operation from now on, or none of one kind after so many more of them."""
        if operation is None:
            os.kill(self.pid, signal.SIGSTOP)
        else:
            kind = _KINDS.index(operation)
            self._numbers[_HANG + kind] = self._numbers[_COUNT + kind] + after + 1

    def go_on(self) -> None:
        """Answer everything again, also what waits."""
        for kind in range(len(_KINDS)):
            self._numbers[_HANG + kind] = 0
        os.kill(self.pid, signal.SIGCONT)

    def fail(self, number: int, one_in: int = 1) -> None:
        """Let one in so many reads and listings fail with this errno from now on; 0 ends that."""
        self._numbers[_ONE_IN] = one_in
        self._numbers[_FAIL] = number

    @property
    def opened(self) -> int:
        """How many times files were opened."""
        return self._numbers[_COUNT]

    @property
    def listed(self) -> int:
        """How many times folders were opened for listing."""
        return self._numbers[_COUNT + _KINDS.index("list")]

    @property
    def opened_paths(self) -> list[str]:
        """The files that were opened, in order, from the mount's root, as in `"/birds/1.png"`."""
        return [os.fsdecode(path) for path in os.pread(self._log, 1 << 26, 0).split(b"\0")[:-1]]


class RcloneMount(_Mount):
    """A local folder through a real `rclone mount`.

    Args:
        point: where it is mounted; made if missing.
        root: the folder that shows there.
        cache: rclone's cache folder.
        mode: `"full"`, `"writes"` or `"off"`: what of files it caches.
        rc: let it be asked and told over HTTP at `url`.
        user: who may ask; by default anybody.
        password: of the user.
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


def mounted_at(point: Path) -> list[str]:
    """Return the types of what is mounted at a folder, in the kernel's order."""
    lines = [line.split(" ") for line in Path("/proc/mounts").read_text().splitlines()]
    return [fields[2] for fields in lines if fields[1] == str(point).replace(" ", "\\040")]


def wait_for(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Return when a condition holds; it is an error if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {seconds} s")
        time.sleep(_TICK_S)


def in_child(code: str, *arguments: object, seconds: float = 5.0) -> str:
    """Return what Python code prints in a child that may touch a mount that hangs; `"hung"` after the deadline."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        return child.communicate(timeout=seconds)[0].decode().strip()
    except subprocess.TimeoutExpired:
        child.kill()  # it dies at the latest when the mount is taken away
        assert child.stdout is not None
        child.stdout.close()
        return "hung"


def _detach(point: Path) -> None:
    commands = [["fusermount3", "-u", "-z", str(point)], ["umount", "-l", str(point)]]
    for command in commands:
        if mounted_at(point) and shutil.which(command[0]):
            subprocess.run(command, capture_output=True, check=False, timeout=DEADLINE_S)
    if mounted_at(point):
        raise RuntimeError(f"{point} cannot be unmounted")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve_here(point: str, root: str, fstype: str) -> None:
    """Be a file system's process until its mount is taken away."""
    end, _ = os.pipe()
    os.dup2(end, 0)  # nobody closes the other end: no tests to end with
    shared, log = (os.memfd_create(name, 0) for name in ("shared", "log"))
    os.ftruncate(shared, _SHARED_BYTES)
    _serve(point=point, root=root, fstype=fstype, latency_s=0.0, locks=True, at_once=128, shared=shared, log=log)


def _serve(
    point: str, root: str, fstype: str, latency_s: float, locks: bool, at_once: int, shared: int, log: int
) -> None:
    """Be the file system's process until it is killed or the tests are gone."""
    import mfusepy

    numbers = memoryview(mmap.mmap(shared, _SHARED_BYTES)).cast("q")
    counting = threading.Lock()
    working = threading.Semaphore(at_once)

    def answer(operation: Operation, path: str | None = None) -> int:
        kind = _KINDS.index(operation)
        with counting:
            numbers[_COUNT + kind] += 1
            number = numbers[_COUNT + kind]
            if operation == "open" and path is not None:
                os.write(log, os.fsencode(path) + b"\0")
        while 0 < numbers[_HANG + kind] <= number:
            time.sleep(_TICK_S)
        with working:
            time.sleep(latency_s)
        return number

    def check(number: int) -> None:
        if numbers[_FAIL] and number % numbers[_ONE_IN] == 0:
            raise OSError(numbers[_FAIL], os.strerror(numbers[_FAIL]))

    class Folder(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
            found = os.fstat(fh) if fh else os.lstat(root + str(path))
            fields = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
            times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
            return {f"st_{name}": getattr(found, f"st_{name}") for name in fields} | times

        def opendir(self, path: str) -> int:
            return answer("list")

        def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
            check(fh)
            yield from ((name, {}, 0) for name in (".", ".."))
            for entry in os.scandir(root + path):
                yield entry.name, {"st_mode": entry.stat(follow_symlinks=False).st_mode, "st_ino": entry.inode()}, 0

        def releasedir(self, path: str, fh: int) -> int:
            return 0

        def open(self, path: str, flags: int) -> int:
            answer("open", path)
            return os.open(root + path, flags)

        def create(self, path: str, mode: int, flags: int) -> int:
            answer("open", path)
            return os.open(root + path, flags | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            check(answer("read"))
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(fh or root + path, length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(root + path, mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(root + path)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(root + path)
            return 0

        def rename(self, old: str, new: str) -> int:
            os.replace(root + old, root + new)
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, root + target)
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(root + source, root + target)
            return 0

        def readlink(self, path: str) -> str:
            return os.readlink(root + path)

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(root + path, mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(root + path, uid, gid)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(root + path, ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(root + path)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    class FolderWithoutLocks(Folder):
        def lock(self, path: str, fh: int, cmd: int, lock: Any) -> int:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        def flock(self, path: str, fh: int, op: int) -> int:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def end_with_the_tests() -> None:
        os.read(0, 1)
        _detach(Path(point))
        os._exit(0)

    threading.Thread(target=end_with_the_tests, daemon=True).start()
    many_threads: dict[str, Any] = {"max_threads": 128} if mfusepy.fuse_version_minor >= 12 else {}
    mfusepy.FUSE(
        Folder() if locks else FolderWithoutLocks(),
        point,
        foreground=True,
        subtype=fstype.removeprefix("fuse."),
        fsname=fstype.removeprefix("fuse."),
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        direct_io=True,
        hard_remove=True,
        **many_threads,
    )


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))

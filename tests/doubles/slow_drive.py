"""A slow, faulty drive: a FUSE mount of a folder with latency, one shared bandwidth and planned faults.

`python tests/doubles/slow_drive.py ROOT POINT --open-ms 40 --list-ms 40 --at-once 16 --bandwidth 50M` mounts it until
Ctrl-C or until it is unmounted. `far_mounts.FuseMount` runs the same command and shares memory with it, so that a
test can control and query it even while it hangs.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planned_faults import Plan

KINDS = ("open", "read", "list")
OPEN, READ, LIST = range(3)
# Indices into the shared numbers: HANG and COUNT have one for each kind of request.
FAIL, ONE_IN, HANG, COUNT, READ_BYTES, BUSIEST, GO_ON, FAULTS, PLANS = 0, 1, 2, 5, 8, 9, 10, 11, 12
SHARED_BYTES = 8 * 16

_libc = ctypes.CDLL(None, use_errno=True)
_TICK_S = 0.01
# Idle times of the connection below this limit cost no bandwidth, because readers wake up slightly late.
_CATCH_UP_S = 0.01
_THREADS = 128
# Maximum size of one request in bytes: the kernel's limit of 256 pages.
_MOST_BYTES = 1 << 20
# Maximum number of read-ahead requests that the kernel queues, as for Colab's Drive.
_MOST_READ_AHEAD = 1000


@dataclass(frozen=True)
class Behavior:
    """Speed and features of a drive.

    Args:
        open_s: latency of opens.
        list_s: latency of listings.
        read_s: latency of reads.
        bandwidth: total bytes per second of all reads; 0 for no limit.
        at_once: maximum number of concurrent opens, listings and reads; others wait.
        locks: false for a drive on which `flock` and `fcntl` locks fail, as on some network mounts.
        attr_s: seconds for which the kernel may cache names, sizes and times.
        direct_io: false lets the kernel cache and read ahead the bytes of open files.
    """

    open_s: float = 0.0
    list_s: float = 0.0
    read_s: float = 0.0
    bandwidth: float = 0.0
    at_once: int = _THREADS
    locks: bool = True
    attr_s: float = 0.0
    direct_io: bool = True


class Drive:
    """File system operations for mfusepy; `getattr` and `read` have the signatures that `_without_copies` expects.

    Args:
        root: the folder to show.
        behavior: speed and features.
        shared: descriptor of the shared numbers.
        log: descriptor to which the paths of opened files are written, each ending with a zero byte.
        plan: JSON file with the arguments of a `planned_faults.Plan`; read again when the shared number PLANS changes.
    """

    use_ns = True

    def __init__(self, root: str, behavior: Behavior, shared: int, log: int, plan: str) -> None:
        self._root = root
        self._root_bytes = os.fsencode(root)
        self._open_s, self._list_s, self._read_s = behavior.open_s, behavior.list_s, behavior.read_s
        self._byte_s = 1 / behavior.bandwidth if behavior.bandwidth else 0.0
        self._at_once = behavior.at_once
        self._numbers = numbers_at(shared)
        self._plan_path = plan
        self._log = log
        # This lock protects the shared numbers, `_line_free` and the log.
        self._lock = threading.Lock()
        # Time at which all bytes requested so far will have arrived.
        self._line_free = 0.0
        self._read_plan()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(behavior.at_once):
            self._places.put(None)

    @property
    def _plan(self) -> Plan | None:
        """The current plan; None without planned faults."""
        if self._plans != self._numbers[PLANS]:
            with self._lock:
                self._read_plan()
        return self._made

    def _read_plan(self) -> None:
        plans = self._numbers[PLANS]
        plan = json.loads(Path(self._plan_path).read_text()) if self._plan_path else {}
        self._made = Plan(self._numbers[GO_ON : PLANS + 1], **plan) if plan else None
        self._plans = plans

    def init_with_config(self, connection: Any, config: Any) -> None:
        # libfuse needs `max_read` both here and as a mount option.
        connection.max_read = _MOST_BYTES
        connection.max_background = _MOST_READ_AHEAD
        connection.congestion_threshold = _MOST_READ_AHEAD

    def _begin(self, kind: int, latency_s: float) -> int:
        """Count a request, take a slot, which the caller releases, and wait for the latency to pass."""
        numbers = self._numbers
        with self._lock:
            numbers[COUNT + kind] = number = numbers[COUNT + kind] + 1
        while 0 < numbers[HANG + kind] <= number:
            time.sleep(_TICK_S)
        self._places.get()
        with self._lock:
            numbers[BUSIEST] = max(numbers[BUSIEST], self._at_once - self._places.qsize())
        if latency_s:
            time.sleep(latency_s)
        return number

    def _end(self) -> None:
        self._places.put(None)

    def _check(self, number: int) -> None:
        failing = self._numbers[FAIL]
        if failing and number % self._numbers[ONE_IN] == 0:
            raise OSError(failing, os.strerror(failing))

    def _transfer(self, size: int) -> None:
        """Wait until the given number of bytes have been transferred, after all bytes requested earlier."""
        with self._lock:
            self._numbers[READ_BYTES] += size
            now = time.monotonic()
            if now - self._line_free > _CATCH_UP_S:
                self._line_free = now
            self._line_free += size * self._byte_s
            wait_s = self._line_free - now
        if wait_s > 0:
            time.sleep(wait_s)

    def getattr(self, path: bytes, found: Any, fh: int | None) -> int:
        """Fill libfuse's `struct stat`."""
        plan = self._plan
        if plan:
            plan.meet("stat", os.fsdecode(path))
        if _libc.lstat(self._root_bytes + path, found) if fh is None else _libc.fstat(fh, found):
            return -ctypes.get_errno()
        if plan:
            plan.disguise(os.fsdecode(path), found.contents)
        return 0

    def opendir(self, path: str) -> int:
        try:
            number = self._begin(LIST, self._list_s)
            if self._plan:
                self._plan.meet("list", path)
            return number
        finally:
            self._end()

    def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
        self._check(fh)
        with os.scandir(self._root + path) as entries:
            found = {entry.name: {"st_mode": _kind(entry), "st_ino": entry.inode()} for entry in entries}
        hidden = self._plan.hidden(path, list(found)) if self._plan else ()
        yield from ((name, {}, 0) for name in (".", ".."))
        yield from ((name, attributes, 0) for name, attributes in found.items() if name not in hidden)

    def releasedir(self, path: str, fh: int) -> int:
        return 0

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        # Lock, because concurrent writes to a memfd overwrite each other.
        with self._lock:
            os.write(self._log, os.fsencode(path) + b"\0")
        try:
            self._begin(OPEN, self._open_s)
            if self._plan:
                self._plan.meet("open", path)
            return os.open(self._root + path, flags, mode)
        finally:
            self._end()

    def create(self, path: str, mode: int, flags: int) -> int:
        return self.open(path, flags | os.O_CREAT, mode)

    def read(self, path: str, into: Any, offset: int, fh: int) -> int:
        """Fill libfuse's buffer and return the number of bytes."""
        try:
            self._check(self._begin(READ, self._read_s))
            if self._plan:
                deed = self._plan.meet("read", path, offset)
                size = self._plan.read(path, into, offset, fh)
                size = {"short": (size + 1) // 2, "end": 0}.get(deed, size)
            else:
                size = os.preadv(fh, [into], offset)
            self._transfer(size)
            return size
        finally:
            self._end()

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(fh or self._root + path, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._root + path, mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._root + path)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._root + path)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.replace(self._root + old, self._root + new)
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._root + target)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._root + source, self._root + target)
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._root + path)

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._root + path, mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._root + path, uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._root + path, ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._root + path)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG


def _without_locks(self: object, *asked: object) -> int:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _without_copies(fuse: type) -> type:
    """Return a subclass with half of mfusepy's overhead: a request takes about 25 µs of CPU time instead of 50 µs."""
    thread = threading.local()

    class Fuse(fuse):
        def _wrapper(self, function: Any, *arguments: Any) -> int:
            # Otherwise, Python would allocate and free the state of libfuse's thread in each request.
            if not hasattr(thread, "is_kept"):
                ctypes.pythonapi.PyGILState_Ensure()
                thread.is_kept = True
            return super()._wrapper(function, *arguments)

        def getattr_fuse_3(self, path: bytes, found: Any, info: Any) -> int:
            return self.operations.getattr(path, found, info.contents.fh if info else None)

        def read(self, path: bytes, buffer: Any, size: int, offset: int, info: Any) -> int:
            into = (ctypes.c_char * size).from_address(ctypes.addressof(buffer.contents))
            return self.operations.read(os.fsdecode(path), into, offset, info.contents.fh)

    return Fuse


def serve(
    root: str,
    point: str,
    fstype: str,
    behavior: Behavior,
    shared: int,
    log: int,
    plan: str = "",
) -> None:
    """Serve the file system until it is unmounted."""
    import mfusepy

    kind: type[Drive] = Drive
    if not behavior.locks:
        kind = type("DriveWithoutLocks", (Drive,), {"lock": _without_locks, "flock": _without_locks})
    name = fstype.removeprefix("fuse.")
    _without_copies(mfusepy.FUSE)(
        kind(root, behavior, shared, log, plan),
        point,
        foreground=True,
        subtype=name,
        fsname=name,
        attr_timeout=behavior.attr_s,
        entry_timeout=behavior.attr_s,
        negative_timeout=0,
        max_read=_MOST_BYTES,
        direct_io=behavior.direct_io,
        hard_remove=True,
        **({"max_threads": _THREADS} if mfusepy.fuse_version_minor >= 12 else {}),
    )


def shared_numbers() -> tuple[int, memoryview]:
    shared = os.memfd_create("shared", 0)
    os.ftruncate(shared, SHARED_BYTES)
    numbers = numbers_at(shared)
    numbers[ONE_IN] = 1
    return shared, numbers


def numbers_at(shared: int) -> memoryview:
    return memoryview(mmap.mmap(shared, SHARED_BYTES)).cast("q")


def mounted_at(point: Path) -> list[str]:
    """Return the types of the mounts at a folder, in the kernel's order."""
    lines = [line.split(" ") for line in Path("/proc/mounts").read_text().splitlines()]
    return [fields[2] for fields in lines if fields[1] == str(point).replace(" ", "\\040")]


def detach(point: Path) -> None:
    """Unmount, even if the mount hangs or is dead."""
    for command in (["fusermount3", "-u", "-z", str(point)], ["umount", "-l", str(point)]):
        if mounted_at(point) and shutil.which(command[0]):
            subprocess.run(command, capture_output=True, check=False, timeout=15)
    if mounted_at(point):
        raise RuntimeError(f"Cannot unmount {point}")


def _size(text: str) -> float:
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:])
    return float(text[:-1]) * factor if factor else float(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mount ROOT at POINT as a slow drive.")
    parser.add_argument("root", type=os.path.abspath)
    parser.add_argument("point", type=os.path.abspath)
    parser.add_argument("--open-ms", type=float, default=0.0, help="latency of each open")
    parser.add_argument("--list-ms", type=float, default=0.0, help="latency of each listing")
    parser.add_argument("--read-ms", type=float, default=0.0, help="latency of each read")
    parser.add_argument(
        "--at-once", type=int, default=_THREADS, help="maximum number of concurrent requests; others wait"
    )
    parser.add_argument("--bandwidth", type=_size, default=0.0, help="total bytes per second of all reads, such as 50M")
    parser.add_argument("--attr-s", type=float, default=0.0, help="seconds for which the kernel caches attributes")
    parser.add_argument("--page-cache", action="store_true", help="let the kernel cache and read ahead file contents")
    parser.add_argument("--plan", help="JSON file of planned faults; see planned_faults.py for its format")
    parser.add_argument("--no-locks", action="store_true", help="make file locks fail")
    parser.add_argument("--fstype", default="fuse.drive", help='type in the table of mounts, beginning with "fuse."')
    parser.add_argument("--shared", type=int, help="descriptor of shared numbers; the drive then ends with its stdin")
    parser.add_argument("--log", type=int, help="descriptor for the paths of opened files")
    parser.add_argument("--apart", action="store_true", help="serve from a process that is no child of the caller")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.apart and os.fork():
        os._exit(0)
    behavior = Behavior(
        open_s=arguments.open_ms / 1e3,
        list_s=arguments.list_ms / 1e3,
        read_s=arguments.read_ms / 1e3,
        bandwidth=arguments.bandwidth,
        at_once=arguments.at_once,
        locks=not arguments.no_locks,
        attr_s=arguments.attr_s,
        direct_io=not arguments.page_cache,
    )
    point = Path(arguments.point)
    # The main thread stays free to handle signals even if requests hang; all other threads block signals.
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, signal.SIGUSR1})
    if arguments.shared is None:
        shared, numbers = shared_numbers()
        log = os.open(os.devnull, os.O_WRONLY)
        plan = json.loads(Path(arguments.plan).read_text()) if arguments.plan else {}
        width = f"{arguments.bandwidth / 1e6:g} MB/s" if arguments.bandwidth else "unlimited bandwidth"
        print(
            f"{arguments.root} is shown at {arguments.point}: {arguments.open_ms:g} ms per open, "
            f"{arguments.list_ms:g} ms per listing, {arguments.read_ms:g} ms per read, "
            f"{arguments.at_once} requests at once, {width}, {len(plan.get('faults', []))} planned faults; "
            "press Ctrl-C to unmount, or send SIGUSR1 to release hanging requests",
            flush=True,
        )
    else:
        shared, log = arguments.shared, arguments.log
        numbers = numbers_at(shared)
        threading.Thread(target=end_with_stdin, args=(point,), daemon=True).start()

    def run() -> None:
        try:
            serve(arguments.root, arguments.point, arguments.fstype, behavior, shared, log, arguments.plan or "")
        except Exception as error:
            print(f"Cannot mount {point}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()
    while signal.sigwait({*ends, signal.SIGUSR1}) not in ends:
        numbers[GO_ON] = 1
    detach(point)
    os._exit(0)


def end_with_stdin(point: Path) -> None:
    os.read(0, 1)
    detach(point)
    os._exit(0)


if __name__ == "__main__":
    main()

"""The only place that changes files.

Every artefact of colabkit comes to be in one way: a private partial beside its final path, filled, then renamed. So a
final path is absent, the complete old thing or the complete new thing, at every instant and after any kill.

Each operation that changes the file system first passes `_step`. Tests put a hook there that counts the operations,
fails the n-th with any error, or kills the process at it; nothing else in the package writes, so the count is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from colabkit._units import format_bytes
from colabkit.environment import is_tmpfs, memory_limits
from colabkit.errors import ColabkitError, FileFailed, NotEnoughSpace, TargetExists, cannot
from colabkit.mounts import read_file, trouble

if TYPE_CHECKING:
    import h5py
    from typing_extensions import Buffer

_PARTIAL = re.compile(
    r"\.colabkit-(?P<key>[0-9a-f]{12})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-\d+\.partial"
)
HDF5_USER_BLOCK_BYTES = 4096
_FOREIGN_PARTIAL_S = 24 * 3600.0  # a partial of another machine is left alone this long: its owner cannot be asked

hook: Callable[[str, Path], None] | None = None
"""Called before each change with the operation's name and path; only tests set it."""


def _step(operation: str, path: Path) -> None:
    if hook is not None:
        hook(operation, path)


@contextmanager
def translated(act: str) -> Iterator[None]:
    """Turn an `OSError` of the block into the family's error, in one line that names `act` and the cause."""
    try:
        yield
    except ColabkitError:
        raise
    except OSError as error:
        if known := trouble(error):
            kind = NotEnoughSpace if error.errno == errno.ENOSPC else FileFailed
            raise kind(cannot(act, known[0], "a mount that works", known[1])) from error
        name = f" ({os.fspath(error.filename)!r})" if isinstance(error.filename, str | os.PathLike) else ""
        reason = f"{error.strerror or error}{name}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpace(
                cannot(act, reason, "room for all of it", "Free some space or choose another target")
            ) from error
        raise FileFailed(
            cannot(act, reason, "a file system that allows it", "Check the path and its permissions, or mount it again")
        ) from error


def make_folder(path: Path) -> None:
    """Create a folder and its parents where they are missing."""
    if not path.is_dir():
        _step("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """Create a file that did not exist and return its descriptor, open for reading and writing."""
    _step("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def reopen(path: Path) -> int:
    """Return the descriptor of a file that is there, open for reading and writing."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def reserve(fd: int, size: int, path: Path) -> None:
    """Reserve `size` bytes, so that later writes, also through a mapping, cannot run out of space."""
    _step("reserve", path)
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def write_at(fd: int, data: Buffer, offset: int, path: Path) -> None:
    """Write all of `data` at `offset`."""
    _step("write", path)
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def sync(fd: int, path: Path) -> None:
    """Wait until the file's bytes are on the medium."""
    _step("sync", path)
    os.fsync(fd)


def write_file(path: Path, data: Buffer, durable: bool = False) -> None:
    """Create `path` with `data`; on the medium when it returns if `durable`. Not atomic: use it inside a partial."""
    fd = create(path)
    try:
        write_at(fd, data, 0, path)
        if durable:
            sync(fd, path)
    finally:
        os.close(fd)


@contextmanager
def create_hdf5(path: Path) -> Iterator[h5py.File]:
    """Create an HDF5 file; its first page is a user block, which HDF5 leaves alone."""
    import h5py

    os.close(create(path))  # so that a refusal is the system's own, which says less and tells more than HDF5's
    # Data sets of a page and more start on a page, so that maps and int64 views of them are aligned.
    page = HDF5_USER_BLOCK_BYTES
    with h5py.File(
        path, "w", locking=False, alignment_threshold=page, alignment_interval=page, userblock_size=page
    ) as file:
        yield file


def remove(path: Path) -> None:
    """Remove a file or a whole folder; nothing happens where there is none."""
    _step("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard(final: Path) -> None:
    """Remove a finished file or folder: one rename makes it absent, so that no half of it is ever at its path."""
    with Partial(final) as partial:
        _rename(final, partial.path)


def _rename(path: Path, to: Path) -> None:
    _step("rename", path)
    os.replace(path, to)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Partial:
    """A private path beside `final` that becomes `final` in one rename, or disappears.

    `with Partial(final) as partial:` gives the path to fill, a file or a folder that does not exist yet; `publish()`
    renames it. Leaving the block without `publish()`, by an error or by Ctrl-C, removes it. What a killed process left
    behind for the same `final` is removed when the next one starts.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self._key = hashlib.sha256(os.fsencode(final.name)).hexdigest()[:12]  # however the folder is spelt

    def __enter__(self) -> Self:
        make_folder(self.final.parent)
        self._reclaim()
        owner = f"{_boot_id()}-{os.getpid()}-{_start_time(os.getpid())}"
        self.path = self.final.parent / f".colabkit-{self._key}-{owner}-{time.monotonic_ns()}.partial"
        self._old = self.path.with_name(self.path.name.replace(".partial", "0.partial"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if os.path.lexists(self._old) and not os.path.lexists(self.final):
                _rename(self._old, self.final)  # stopped between the two renames of `publish`
            for path in (self.path, self._old):
                if os.path.lexists(path):
                    remove(path)
        except OSError:
            if error is None:  # never hide the first error behind the second
                raise

    def publish(self, replace: bool = False) -> None:
        """Rename the partial to its final path.

        Raises:
            TargetExists: if something is at the final path and `replace` is false.
        """
        self._put(self.path, replace)

    def _put(self, path: Path, replace: bool) -> None:
        if not replace and os.path.lexists(self.final):
            act = f"publish {str(self.final)!r}"
            raise TargetExists(cannot(act, "the path was taken meanwhile", "a free path", "Run it again"))
        if path.is_dir() and self.final.is_dir() and not self.final.is_symlink():
            # Folders cannot be replaced in one rename: the old one becomes a partial first, and is removed last.
            _rename(self.final, self._old)
            _rename(path, self.final)
            remove(self._old)
        else:
            _rename(path, self.final)

    def _reclaim(self) -> None:
        with os.scandir(self.final.parent) as entries:
            found = [(entry.name, entry.path) for entry in entries if entry.name.startswith(f".colabkit-{self._key}-")]
        for name, path in found:
            match = _PARTIAL.fullmatch(name)
            if match and _is_abandoned(Path(path), match):
                remove(Path(path))


class KeptPartial(Partial):
    """A partial that is kept when its process ends or is killed, so that the next one goes on where it stopped.

    `with KeptPartial(folder, identity) as kept:` gives `kept.folder`, hidden in `folder`, with `kept.data` to fill, a
    file or a folder, and `kept.record`: what has to be the same for going on, empty at first. `publish_as()` renames
    what is whole. One process at a time has the kept folder, by a lock that ends with it; another that comes meanwhile,
    or where the file system has no locks, gets a folder of its own, which is not kept. After a restart of the machine
    it begins anew, since blocks may be missing that were never synced.

    Args:
        folder: where the final path will be.
        identity: a text of hexadecimal digits that tells this work from any other.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        super().__init__(folder / identity)

    def __enter__(self) -> Self:
        super().__enter__()
        shared = self.final.parent / f".colabkit-{self._key}-kept.partial"
        self._lock = _locked(shared)
        self.folder = self.path if self._lock is None else shared
        self.data = self.folder / "data"
        self.record: dict[str, Any] = {}
        try:
            make_folder(self.folder)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads((self.folder / _RECORD).read_bytes())
                self.record = dict(found["values"]) if found["start"] == _machine_start() else {}
            if not self.record:
                self.start_over()
        except BaseException:
            if self._lock is not None:
                os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._lock is not None and not self._has_bytes():
                _rename(self.folder, self.path)  # nobody can enter it any more, and so it can be removed
        finally:
            try:
                super().__exit__(kind, error, trace)
            finally:
                if self._lock is not None:
                    os.close(self._lock)

    def note(self, **values: Any) -> None:
        """Write the record: plain values, which the next process finds in `record`."""
        self.record = values
        new = self.folder / f"{_RECORD}.new"
        remove(new)
        write_file(new, json.dumps({"start": _machine_start(), "values": values}).encode())
        _rename(new, self.folder / _RECORD)

    def start_over(self) -> None:
        """Remove what was kept, and the record."""
        self.record = {}
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                remove(path)

    def publish_as(self, path: Path, final: Path, replace: bool = False) -> None:
        """Rename `path`, in the kept folder, to its final path beside that folder; errors as of `publish()`."""
        self.final = final
        self._put(path, replace)
        self.start_over()

    def _has_bytes(self) -> bool:
        own = {_LOCK, _RECORD, f"{_RECORD}.new"}
        return any(path.is_file() and path.name not in own and path.stat().st_size for path in self.folder.rglob("*"))


_LOCK, _RECORD = "lock", "record"
_LOCK_TRIES = 100  # others may come and go in between; a file system that answers wrongly must not hold us


def _locked(folder: Path) -> int | None:
    """Make a folder and return the descriptor that locks it; None where another has it or there are no locks."""
    for _ in range(_LOCK_TRIES):
        make_folder(folder)
        path = folder / _LOCK
        _step("create", path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue  # its owner finished and removed the folder meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                remove(folder)
            return None
        os.close(fd)
    return None


def _machine_start() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _is_abandoned(path: Path, name: re.Match[str]) -> bool:
    if name["boot"] == _boot_id():
        return _start_time(int(name["pid"])) != name["start"]
    try:
        return time.time() - path.lstat().st_mtime > _FOREIGN_PARTIAL_S
    except FileNotFoundError:
        return False


def _boot_id() -> str:
    try:
        # A process number means something in its own namespace only: containers share the machine's boot.
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        text = os.uname().nodename
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks, so that a reused number is told from its former owner."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0" if pid == os.getpid() or not Path("/proc").is_dir() else "gone"
    return stat.rpartition(")")[2].split()[19]


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system that holds, or will hold, `path`."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize


def disk_bytes(path: Path) -> int:
    """Return the disk space that a file, or all files of a folder, take; files that vanish meanwhile count nothing."""
    total = 0
    for file in (
        [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    ):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_blocks * 512
    return total


def check_space(act: str, needed: int, path: Path, available: int | None = None) -> None:
    """Refuse, before anything is written, what will not fit at `path`.

    Args:
        act: verb and object for the message.
        needed: bytes that will be written.
        path: where they go.
        available: a tighter limit than the file system's own, in bytes.

    Raises:
        NotEnoughSpace: naming both numbers.
    """
    free = free_bytes(path)
    if is_tmpfs(path):  # its bytes are RAM, of which a cgroup may allow less than the file system says
        free = min(free, memory_limits(read_file).available_bytes)
    if available is not None:
        free = min(free, available)
    if needed > free:
        where = f"{format_bytes(free)} free at {str(path.parent)!r}"
        raise NotEnoughSpace(
            cannot(act, where, f"{format_bytes(needed)} needed", "Free some space or choose another target")
        )

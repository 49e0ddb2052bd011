"""Partial outputs: files and folders that are published by renaming, removed, or kept to resume later."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from colabkit.foundation import file_changes
from colabkit.foundation.errors import TargetExists
from colabkit.foundation.locks import (
    LOCK,
    is_changing,
    is_locked,
    lock_folder,
    remove_unused,
    unlock,
    wait_while_busy,
)
from colabkit.foundation.messages import cannot
from colabkit.foundation.mount_table import read_file

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PARTIAL = re.compile(
    r"\.colabkit-(?P<key>[0-9a-f]{12})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-\d+(?P<old>-old)?\.partial"
)
# Partials from other machines, or from before a restart, are removed after this time, since nothing shows whether their
# processes have ended.
_FOREIGN_PARTIAL_S = 24 * 3600.0
# A kept folder that a process of another machine or container has marked counts as in use until nothing in it has
# changed for this time, since on some mounts a file appears on other machines only once it is complete.
_FOREIGN_MARK_S = 3600.0
# Maximum numbers of attempts, which prevent endless loops.
_MOST_COLLISIONS, _MOST_RENAMES = 3, 100


def discard(final: Path) -> None:
    """Remove a finished file or folder atomically: rename it first, so that its path never holds a part of it."""
    with Partial(final) as partial:
        file_changes.rename(final, partial.path)


def discard_abandoned(final: Path) -> int:
    """Remove the partials that killed processes left behind for a final path, and return the number of freed bytes.

    If a process was killed while it replaced a folder, and the final path is missing, the old folder is restored.
    """
    partial = Partial(final)
    sizes = {path: file_changes.disk_bytes(path) for path in partial.abandoned() if not path.stem.endswith("-old")}
    partial.reclaim()
    return sum(size for path, size in sizes.items() if not os.path.lexists(path))


def kept_for(final: Path) -> str:
    """Return the identity of the interrupted work for a final path; empty if there is none."""
    for folder in final.parent.glob(".colabkit-*-kept.partial"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((folder / _RECORD).read_bytes())["values"]
            # Both paths may have links and `..`.
            if os.path.realpath(values["path"]) == os.path.realpath(final):
                return str(values["identity"])
    return ""


def discard_kept(final: Path, identity: str) -> int:
    """Remove the kept partial of an interrupted run unless a process is using it; return the number of freed bytes."""
    kept = KeptPartial(final.parent, identity)
    if not kept.is_begun() or kept.is_busy():
        return 0
    freed = file_changes.disk_bytes(kept.kept_folder)
    with kept:
        kept.start_over()
        return freed if kept.folder == kept.kept_folder else 0


def write_atomically(
    path: Path, data: Buffer, *, durable: bool = False, replace: bool = True, kind: str | None = None
) -> None:
    """Write `data` to a partial and publish it; see `Partial` for `kind`, and `publish` for `replace` and errors."""
    with Partial(path, kind) as partial:
        file_changes.write_file(partial.path, data, durable)
        partial.publish(replace)


class Partial:
    """A private path next to `final` that is either renamed to `final` or removed.

    In the block `with Partial(final) as partial:`, write a file or folder at `partial.path`, which does not exist yet,
    and call `partial.publish()` to rename it. If the block ends without `publish()`, because of an error or Ctrl-C, the
    partial is removed. Partials left behind by killed processes are removed by the next `Partial` for the same `final`.

    Args:
        final: the final path.
        kind: key shared by several final paths in a folder; partials left behind for any of them are removed.
    """

    def __init__(self, final: Path, kind: str | None = None) -> None:
        self.final = final
        # The key uses the name only, so that different spellings of the folder give the same key.
        self._key = hashlib.sha256(os.fsencode(final.name if kind is None else kind)).hexdigest()[:12]

    def __enter__(self) -> Self:
        file_changes.make_folder(self.final.parent)
        self.reclaim()
        self.path = self.final.parent / f".colabkit-{self._key}-{owner()}-{time.monotonic_ns()}.partial"
        self._old = self.path.with_name(self.path.name.replace(".partial", "-old.partial"))
        _in_use.update((self.path.name, self._old.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if os.path.lexists(self._old) and not os.path.lexists(self.final):
                # The process was interrupted between the two renames of `publish`.
                file_changes.rename(self._old, self.final)
            for path in (self.path, self._old):
                if os.path.lexists(path):
                    file_changes.remove(path)
        except OSError:
            # An error while removing the partial must not hide the original error.
            if error is None:
                raise
        finally:
            # If the names were released earlier, another thread could remove the partial as an abandoned one.
            _in_use.difference_update((self.path.name, self._old.name))

    def publish(self, replace: bool = False, path: Path | None = None) -> None:
        """Rename the partial, or another `path` in the same file system, to the final path.

        Raises:
            TargetExists: if the final path exists and `replace` is false.
        """
        path = path or self.path
        if not replace and os.path.lexists(self.final):
            act = f"publish {str(self.final)!r}"
            raise TargetExists(cannot(act, "another process created this path in the meantime", "", "Try again"))
        for number in range(_MOST_RENAMES):
            try:
                if path.is_dir() and self.final.is_dir() and not self.final.is_symlink():
                    # One rename cannot replace a folder: first rename the old one to a partial, and remove it last.
                    file_changes.rename(self.final, self._old)
                    file_changes.rename(path, self.final)
                    file_changes.remove(self._old)
                else:
                    file_changes.rename(path, self.final)
                return
            except OSError as error:
                # Another process may have published to, or emptied, the same path between these steps.
                is_race = error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) and os.path.lexists(path)
                if not is_race or number + 1 == _MOST_RENAMES:
                    raise
                if os.path.lexists(self.final):
                    file_changes.remove(self._old)

    def _partials(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.final.parent) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(f".colabkit-{self._key}-")]
        return []

    def abandoned(self) -> list[Path]:
        """Return the partials that killed processes left behind for this final path, or for others of the same kind."""
        return [
            path for path in self._partials() if (name := _PARTIAL.fullmatch(path.name)) and _is_abandoned(path, name)
        ]

    def reclaim(self) -> None:
        """Remove the `abandoned()` partials, but restore the old folder if the final path is missing."""
        for path in self.abandoned():
            if path.stem.endswith("-old") and not os.path.lexists(self.final):
                # The process was killed between the two renames of `publish`.
                file_changes.rename(path, self.final)
            else:
                # Another process may be removing the same partial, or it may belong to another user.
                with contextlib.suppress(OSError):
                    file_changes.remove(path)


class KeptPartial(Partial):
    """A partial that survives the end of its process, so that a later process can resume the work.

    In the block `with KeptPartial(folder, identity) as kept:`, `kept.folder` is a hidden folder in `folder`. Write a
    file or folder at `kept.data`, and save the state needed to resume with `note()`. `kept.record` holds the saved
    state, and is empty if there is none. `publish_as()` renames the finished output.

    A lock ensures that only one process uses the kept folder; forked children do not inherit it. Some file systems
    grant a lock to every process. Therefore, each process also puts a mark into the folder, an empty file whose name
    contains its ID and start time, and does not use the folder if it finds the mark of another process that is alive.

    A process that cannot use the kept folder, for example because the file system does not support locks, uses a
    temporary folder, which is not kept. After a restart of the machine, the work starts over, since data that was not
    synced may be lost.

    Args:
        folder: folder of the final path.
        identity: hexadecimal digits that identify this work.
        on_wait: called about five times per second while another process holds the kept folder and changes files in it;
            if None, the block starts without waiting.
    """

    def __init__(self, folder: Path, identity: str, on_wait: Callable[[], None] | None = None) -> None:
        super().__init__(folder / identity)
        self._on_wait = on_wait

    @property
    def kept_folder(self) -> Path:
        """The path of the kept folder, which may not exist."""
        return self.final.parent / f".colabkit-{self._key}-kept.partial"

    def __enter__(self) -> Self:
        super().__enter__()
        shared = self.kept_folder
        self._lock = self._claim()
        self.folder = self.path if self._lock is None else shared
        self.data = self.folder / "data"
        self.record: dict[str, Any] = {}
        try:
            file_changes.make_folder(self.folder)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads((self.folder / _RECORD).read_bytes())
                self.record = dict(found["values"]) if found["start"] == _machine_start() else {}
            if not self.record:
                self.start_over()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._lock is not None and not self._has_bytes():
                try:
                    # After the rename, no other process can start to use the folder, so it can be removed.
                    file_changes.rename(self.folder, self.path)
                except OSError:
                    file_changes.remove(self.folder)
                    raise
                # On NFS, an open file that is removed stays in its folder under another name.
                lock, self._lock = self._lock, None
                unlock(lock)
        finally:
            try:
                super().__exit__(kind, error, trace)
            finally:
                self._release()

    def is_begun(self) -> bool:
        """Return whether a partial of this work exists."""
        return bool(self._partials())

    def is_busy(self) -> bool:
        """Return whether another process uses the kept folder."""
        return is_locked(self.kept_folder) or bool(self._living_marks())

    def show_life(self) -> None:
        """Touch the lock file to show waiting processes that this process is alive."""
        with contextlib.suppress(OSError):
            file_changes.touch(self.folder / LOCK)

    def _claim(self) -> int | None:
        """Lock the kept folder; return None if another process uses it or the file system does not support locks."""
        collisions = 0
        while collisions < _MOST_COLLISIONS:
            with contextlib.suppress(BlockingIOError):
                try:
                    lock = lock_folder(self.kept_folder)
                except PermissionError:
                    # The kept folder belongs to another user.
                    lock = None
                if lock is None:
                    return None
                try:
                    if self._is_only_user():
                        return lock
                except BaseException:
                    _in_use.discard(self.path.name)
                    remove_unused(self.kept_folder)
                    unlock(lock)
                    raise
                # The file system has granted the lock to several processes.
                unlock(lock)
                collisions += 1
            if self._on_wait is None or not wait_while_busy(self.kept_folder, self.is_busy, self._on_wait):
                break
        return None

    def _is_only_user(self) -> bool:
        """Put this process's mark into the kept folder; remove it and return False if another process uses the folder.

        If several processes call this at the same time, at most one of the calls returns True.
        """
        mark = self.kept_folder / self.path.name
        with contextlib.suppress(FileNotFoundError):
            os.close(file_changes.create(mark))
        if self._living_marks() == [mark.name]:
            return True
        file_changes.remove(mark)
        return False

    def _living_marks(self) -> list[str]:
        """Return the names of the marks of processes that use the kept folder."""
        living, own = [], getattr(self, "path", self.final).name
        with contextlib.suppress(FileNotFoundError), os.scandir(self.kept_folder) as entries:
            for entry in entries:
                if match := _PARTIAL.fullmatch(entry.name):
                    is_local = match["boot"] == _boot_id()
                    is_alive = (
                        not _is_abandoned(Path(entry), match)
                        if is_local
                        else is_changing(self.kept_folder, _FOREIGN_MARK_S, own)
                    )
                    if is_alive:
                        living.append(entry.name)
        return living

    def _release(self) -> None:
        if self._lock is not None:
            try:
                if os.path.lexists(mark := self.kept_folder / self.path.name):
                    file_changes.remove(mark)
            finally:
                unlock(self._lock)

    def note(self, **values: Any) -> None:
        """Save JSON values as the record, which a later process reads from `record`."""
        self.record = values
        new = self.folder / f"{_RECORD}.new"
        file_changes.remove(new)
        file_changes.write_file(new, json.dumps({"start": _machine_start(), "values": values}).encode())
        file_changes.rename(new, self.folder / _RECORD)

    def start_over(self) -> None:
        """Remove the kept data and the record."""
        self.record = {}
        for path in self.folder.iterdir():
            if path.name not in (LOCK, self.path.name):
                file_changes.remove(path)

    def publish_as(self, path: Path, final: Path, replace: bool = False) -> None:
        """Rename `path`, which is inside the kept folder, to `final`, which is next to that folder.

        Raises:
            TargetExists: if `final` exists and `replace` is false.
        """
        # After a kill, an old folder is found by the name of `final`, not by the identity of this work.
        with Partial(final) as partial:
            partial.publish(replace, path)
        self.start_over()

    def _has_bytes(self) -> bool:
        own = {LOCK, _RECORD, f"{_RECORD}.new"}
        return any(
            entry.name not in own and entry.is_file(follow_symlinks=False) and entry.stat().st_size
            for entry in file_changes.entries_below(self.folder)
        )


_RECORD = "record"


def _machine_start() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


_in_use: set[str] = set()
"""Names of partials that this process is using; its other partials are left over from failed removals."""


def _is_abandoned(path: Path, name: re.Match[str]) -> bool:
    if name["boot"] == _boot_id() and int(name["pid"]) == os.getpid():
        return path.name not in _in_use
    return has_ended(f"{name['boot']}-{name['pid']}-{name['start']}", path)


def owner() -> str:
    """Return an identifier of this process that is unique across machines and restarts: `boot-pid-start`."""
    return f"{_boot_id()}-{os.getpid()}-{_start_time(os.getpid())}"


def has_ended(maker: str, path: Path) -> bool:
    """Return whether the process that created a file has ended.

    A process on another machine, or from before a restart, is assumed to have ended if the file is over a day old.

    Args:
        maker: result of `owner()` in that process.
        path: the file.
    """
    if (is_alive := is_running(maker)) is not None:
        return not is_alive
    try:
        return time.time() - path.lstat().st_mtime > _FOREIGN_PARTIAL_S
    except FileNotFoundError:
        return False


def is_running(maker: str) -> bool | None:
    """Return whether a process is running; None if it is from another machine or container, or from before a restart.

    Args:
        maker: result of `owner()` in that process.
    """
    boot, pid, start = maker.split("-")
    return _start_time(int(pid)) in (start, _UNKNOWN) if boot == _boot_id() else None


def _boot_id() -> str:
    try:
        # Containers share the machine's boot ID, and a PID is unique only within its PID namespace.
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        text = os.uname().nodename
    return hashlib.sha256(text.encode()).hexdigest()[:8]


_UNKNOWN = "0"


def _start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks; `"gone"` if it has ended, `_UNKNOWN` if `/proc` hides it."""
    try:
        stat = read_file(f"/proc/{pid}/stat")
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
        except PermissionError:
            # It is a process of another user.
            pass
        return _UNKNOWN
    fields = stat.rpartition(")")[2].split()
    # State Z is a zombie: the process has ended, but its parent has not collected its exit status.
    return "gone" if fields[0] == "Z" else fields[19]

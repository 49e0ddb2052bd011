"""What becomes a finished file or folder in one rename, or disappears, or is kept for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colabkit.foundation import file_changes
from colabkit.foundation.errors import TargetExists, cannot
from colabkit.foundation.locks import LOCK, is_locked, lock_folder, unlock, wait_while_busy

_PARTIAL = re.compile(
    r"\.colabkit-(?P<key>[0-9a-f]{12})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-\d+(?P<old>-old)?\.partial"
)
_FOREIGN_PARTIAL_S = 24 * 3600.0  # a partial of another machine is left alone this long: its owner cannot be asked


def discard(final: Path) -> None:
    """Remove a finished file or folder: one rename makes it absent, so that no half of it is ever at its path."""
    with Partial(final) as partial:
        file_changes.rename(final, partial.path)


def kept_for(final: Path) -> str:
    """Return the identity of the interrupted work whose record names a final path, empty where there is none."""
    for folder in final.parent.glob(".colabkit-*-kept.partial"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((folder / _RECORD).read_bytes())["values"]
            if values["path"] == os.fspath(final):
                return str(values["identity"])
    return ""


def discard_kept(final: Path, identity: str) -> int:
    """Remove what an interrupted run kept for a final path, if no process has it; return the bytes given back."""
    kept = KeptPartial(final.parent, identity)
    if not kept.is_begun() or kept.is_busy():
        return 0
    freed = file_changes.disk_bytes(kept.kept_folder)
    with kept:
        kept.start_over()
    return freed


class Partial:
    """A private path beside `final` that becomes `final` in one rename, or disappears.

    `with Partial(final) as partial:` gives the path to fill, a file or a folder that does not exist yet; `publish()`
    renames it. Leaving the block without `publish()`, by an error or by Ctrl-C, removes it. What a killed process left
    behind for the same `final` is removed when the next one starts.

    Args:
        final: the path it becomes.
        kind: a text that several final paths of a folder share: then what was left behind for any of them is removed.
    """

    def __init__(self, final: Path, kind: str | None = None) -> None:
        self.final = final
        # The folder does not count, however it is spelt.
        self._key = hashlib.sha256(os.fsencode(final.name if kind is None else kind)).hexdigest()[:12]

    def __enter__(self) -> Self:
        file_changes.make_folder(self.final.parent)
        self._reclaim()
        self.path = self.final.parent / f".colabkit-{self._key}-{owner()}-{time.monotonic_ns()}.partial"
        self._old = self.path.with_name(self.path.name.replace(".partial", "-old.partial"))
        _in_use.update((self.path.name, self._old.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _in_use.difference_update((self.path.name, self._old.name))
        try:
            if os.path.lexists(self._old) and not os.path.lexists(self.final):
                file_changes.rename(self._old, self.final)  # stopped between the two renames of `publish`
            for path in (self.path, self._old):
                if os.path.lexists(path):
                    file_changes.remove(path)
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
            file_changes.rename(self.final, self._old)
            file_changes.rename(path, self.final)
            file_changes.remove(self._old)
        else:
            file_changes.rename(path, self.final)

    def _partials(self) -> list[Path]:
        """Return the partials of this final path, of all processes."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.final.parent) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(f".colabkit-{self._key}-")]
        return []

    def _reclaim(self) -> None:
        for path in self._partials():
            match = _PARTIAL.fullmatch(path.name)
            if not match or not _is_abandoned(path, match):
                continue
            if match["old"] and not os.path.lexists(self.final):
                file_changes.rename(path, self.final)  # a kill between the two renames of `publish` took it away
            else:
                file_changes.remove(path)


class KeptPartial(Partial):
    """A partial that is kept when its process ends or is killed, so that the next one goes on where it stopped.

    `with KeptPartial(folder, identity) as kept:` gives `kept.folder`, hidden in `folder`, with `kept.data` to fill, a
    file or a folder, and `kept.record`: what has to be the same for going on, empty at first. `publish_as()` renames
    what is whole. One process at a time has the kept folder, by a lock that ends with it; another that comes meanwhile
    and does not wait, or where the file system has no locks, gets a folder of its own, which is not kept.
    Forked children do not have the lock. After a restart of the machine it begins anew, since blocks may be missing
    that were never synced.

    Args:
        folder: where the final path will be.
        identity: a text of hexadecimal digits that tells this work from any other.
        on_wait: called about five times a second while another process has the kept folder and still changes files in
            it; without it the call does not wait.
    """

    def __init__(self, folder: Path, identity: str, on_wait: Callable[[], None] | None = None) -> None:
        super().__init__(folder / identity)
        self._on_wait = on_wait

    @property
    def kept_folder(self) -> Path:
        """The folder that is kept, whether it is there or not."""
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
            if self._lock is not None:
                unlock(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._lock is not None and not self._has_bytes():
                try:
                    # Under its new name nobody can enter it any more, so it can be removed.
                    file_changes.rename(self.folder, self.path)
                except OSError:
                    file_changes.remove(self.folder)
                    raise
        finally:
            try:
                super().__exit__(kind, error, trace)
            finally:
                if self._lock is not None:
                    unlock(self._lock)

    def is_begun(self) -> bool:
        """Return whether anything of this work, kept or left behind, lies in the folder."""
        return bool(self._partials())

    def is_busy(self) -> bool:
        """Return whether another process has the kept folder."""
        return is_locked(self.kept_folder)

    def show_life(self) -> None:
        """Show other processes that the work goes on."""
        with contextlib.suppress(OSError):
            file_changes.touch(self.folder / LOCK)

    def _claim(self) -> int | None:
        """Return the lock of the kept folder; None while another process keeps it, or where there are no locks."""
        while True:
            try:
                return lock_folder(self.kept_folder)
            except BlockingIOError:
                if self._on_wait is None or not wait_while_busy(self.kept_folder, self.is_busy, self._on_wait):
                    return None

    def note(self, **values: Any) -> None:
        """Write the record: plain values, which the next process finds in `record`."""
        self.record = values
        new = self.folder / f"{_RECORD}.new"
        file_changes.remove(new)
        file_changes.write_file(new, json.dumps({"start": _machine_start(), "values": values}).encode())
        file_changes.rename(new, self.folder / _RECORD)

    def start_over(self) -> None:
        """Remove what was kept, and the record."""
        self.record = {}
        for path in self.folder.iterdir():
            if path.name != LOCK:
                file_changes.remove(path)

    def publish_as(self, path: Path, final: Path, replace: bool = False) -> None:
        """Rename `path`, in the kept folder, to its final path beside that folder; errors as of `publish()`."""
        self.final = final
        self._put(path, replace)
        self.start_over()

    def _has_bytes(self) -> bool:
        own = {LOCK, _RECORD, f"{_RECORD}.new"}
        return any(path.is_file() and path.name not in own and path.stat().st_size for path in self.folder.rglob("*"))


_RECORD = "record"


def _machine_start() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


_in_use: set[str] = set()
"""Names of this process's own partials; others that bear its number are of removals that failed."""


def _is_abandoned(path: Path, name: re.Match[str]) -> bool:
    if name["boot"] == _boot_id() and int(name["pid"]) == os.getpid():
        return path.name not in _in_use
    return has_ended(f"{name['boot']}-{name['pid']}-{name['start']}", path)


def owner() -> str:
    """Return what names this process among all that were and will be, on any machine: `boot-number-start`."""
    return f"{_boot_id()}-{os.getpid()}-{_start_time(os.getpid())}"


def has_ended(maker: str, path: Path) -> bool:
    """Return whether the process that made a file has ended; one of another machine has when the file is a day old.

    Args:
        maker: what `owner()` returned in that process.
        path: the file.
    """
    boot, pid, start = maker.split("-")
    if boot == _boot_id():
        return _start_time(int(pid)) != start
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

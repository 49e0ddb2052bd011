"""`prepare()` returns a local pack of a source by the fastest route: local pack, saved pack or packing the source.

All local packs of one source with one set of options share a folder. Each file name contains a digest of the source's
state. Where the file system supports locks, a lock lets one process at a time create packs in the folder. The notes
file in the folder records how long staging and packing took and where the pack is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import (
    ColabkitError,
    Corrupt,
    InvalidOption,
    NotMounted,
    ProgressBar,
    Text,
    TimedOut,
    call,
    can_hang,
    cannot,
    checked_call,
    file_changes,
    kind_of,
    local_root,
    mounts,
    option,
    partials,
    try_lock,
    user_path,
    wait_while_busy,
)
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.memory_plan import is_arrays, is_dataset
from colabkit.packs.packing.options import PackOptions
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.prepared_pack import PreparedPack, PrepareReport, with_reasons
from colabkit.storage import (
    STALLED_S,
    PathTable,
    Retries,
    Source,
    Threads,
    answer_of,
    concurrently,
    identity_of,
    publish,
    short_name,
    stage,
)

# With two digests, a file name stays within 255 bytes even at 4 bytes per character.
_NAME_CHARS = 56
_LOCK, _NOTES = "lock", "notes.json"
# Maximum number of folder entries whose size and time are compared; for further entries, only names are compared.
_STATED_ENTRIES = 1000


@checked_call()
def prepare(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
    *,
    size: int | tuple[int, int] | None = None,
    encoding: Literal["auto", "raw", "source", "jpeg"] = "auto",
    quality: int = 90,
    channels: Literal[1, 3] = 3,
    labels: str | Sequence[str] | Callable[[str], Any] | None = "auto",
    task: Literal["auto", "classes", "multilabel", "regression"] = "auto",
    renumber: bool = False,
    splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
    fields: Sequence[str] | Mapping[str, str | Callable[[str], Any]] | None = None,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_bad: Literal["raise", "skip", "blank"] = "raise",
    max_bad: float = 0.1,
    to: str | os.PathLike[str] | None = "drive:colabkit",
    threads: int | Literal["auto"] = "auto",
    refresh: bool = False,
    progress: bool = True,
) -> PreparedPack:
    """Return a local pack of a source by the fastest route; its `report` shows which route was used.

    The routes, in order:

    1. Using a local pack of the same source and options. A source on a mount is not read. A source on this machine must
       be unchanged or no longer exist.
    2. Staging a pack of the same source, options and source state that is saved in `to`. The pack is copied as one
       file, and all its samples are verified.
    3. Packing the source.

    A local pack that is not saved yet is then saved, so the next session needs to stage only one file. If saving fails,
    the report contains the reason.

    The state of a folder is the names, sizes and modification times of its direct entries (of all entries after the
    first 1,000, only the names); the state of a file is its size and modification time. Pass `refresh=True` after
    changes deeper in the tree, behind a URL, or in files that a table lists. Saved packs of earlier states are never
    removed. If another process on this machine is preparing the same source with the same options, this call waits for
    its pack.

    Args:
        source: any source of `pack()` except arrays and datasets, including a URL.
        size: as in `pack()`.
        encoding: as in `pack()`.
        quality: as in `pack()`.
        channels: as in `pack()`.
        labels: as in `pack()`.
        task: as in `pack()`.
        renumber: as in `pack()`.
        splits: as in `pack()`.
        fields: as in `pack()`.
        path_column: as in `pack()`.
        root: as in `pack()`.
        seed: as in `pack()`.
        on_bad: as in `pack()`.
        max_bad: as in `pack()`.
        to: folder in which packs are saved; None saves nothing. A folder on Drive is ignored if Drive is not
            mounted.
        threads: number of concurrent reads, or `"auto"`.
        refresh: pack the source again even if a pack exists, and replace the saved pack.
        progress: show progress bars.

    Returns:
        The open pack, a mapping of split names to datasets.

    Raises:
        ColabkitError: any error that `pack()` raises.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", size=16, to="saved")
        >>> len(pack["train"]), pack["train"][0][0].shape
        (1797, torch.Size([3, 16, 16]))
        >>> pack.report.saved_path.exists()
        True
    """
    if not isinstance(source, Source) and (is_arrays(source) or is_dataset(source)):
        # Arrays have no paths that identify them, so the pack of other arrays might be returned.
        expected = "a path, an address or a table of paths"
        next_step = ("Pack arrays and datasets with ", call("pack"), ", and open the result with open_pack()")
        raise InvalidOption(cannot("prepare the source", f"the source is {kind_of(source)}", expected, next_step))
    name, key, _ = identity_of(source, extract=True, path_column=path_column, root=root)
    act = f"prepare {name!r}"
    given: dict[str, Any] = {
        "size": size,
        "encoding": encoding,
        "quality": quality,
        "channels": channels,
        "labels": labels,
        "task": task,
        "renumber": renumber,
        "splits": splits,
        "fields": fields,
        "path_column": path_column,
        "root": root,
        "seed": seed,
        "on_bad": on_bad,
        "max_bad": max_bad,
    }
    options = repr(PackOptions(act, **given).plain())
    save_folder, unsaved = _save_folder(to, name)
    folder = local_root(os.environ) / "packs" / f"{short_name(name)[:_NAME_CHARS]}-{_digest(key, options)}"

    def pack_to(path: Path) -> None:
        # overwrite=True also checks fetched or staged copies of the source for changes.
        pack(source, path, **given, threads=threads, overwrite=True, progress=progress)

    work = _Preparation(name, folder.absolute(), save_folder, unsaved, pack_to, threads, refresh, progress)
    with file_changes.translated(act):
        return work.run()


@dataclass
class _Preparation:
    """One call of `prepare()`.

    Attributes:
        name: name of the source; an absolute path if it has one.
        folder: folder of the local packs of this source and these options.
        save_folder: folder in which packs are saved; None if nothing is saved, for the reason in `unsaved`.
        pack_to: packs the source to a path.
        state: state of the source; None if it has not been read yet or the source does not exist.
    """

    name: str
    folder: Path
    save_folder: Path | None
    unsaved: Text
    pack_to: Callable[[Path], None]
    threads: Threads
    refresh: bool
    progress: bool
    state: str | None = None
    unused: Text = ""
    local_s: float = 0.0

    def __post_init__(self) -> None:
        self.is_remote = os.path.isabs(self.name) and can_hang(self.name, mounts())
        self.notes = self.read_notes()

    def run(self) -> PreparedPack:
        """Return the pack by the fastest route."""
        if not self.is_remote:
            self.read_state()
        found = self.find_local()
        if found is not None and (self.save_folder is None or self.is_saved(found.path)):
            return self.prepared(found, "local")
        if found is None and self.read_state() is None:
            # This raises the error for a missing source, unless the source was created in the meantime.
            self.pack_to(self.path)
        way: Literal["local", "saved", "packed"] = "local"
        with self.alone() as is_alone:
            self.notes = self.read_notes()
            found = self.find_local()
            if found is None:
                way, found = self.make()
                if is_alone:
                    self.remove_all_but(found.path)
            elif is_alone is False and not self.is_saved(found.path):
                self.save_folder, self.unsaved = None, "another process is saving it"
            if self.save_folder is not None and not self.is_saved(found.path):
                self.save(found.path)
        return self.prepared(found, way)

    def read_state(self) -> str | None:
        """Return the source's state, read on first use; None if the source does not exist."""
        if self.state is None:
            self.state = state_of(self.name, is_remote=self.is_remote)
        return self.state

    def find_local(self) -> PackInfo | None:
        """Return the local pack for the source's state, or the newest if it is unknown; None to make one."""
        if self.refresh:
            return None
        started = time.monotonic()
        paths = [self.path] if self.state is not None else _newest_first(self.folder)
        found = next(filter(None, map(_opened, paths)), None)
        self.local_s = time.monotonic() - started
        return found

    @property
    def path(self) -> Path:
        """Path of the local pack for the source's state."""
        return self.folder / f"{_digest(self.state or '')}.h5"

    def saved_path(self, local: Path) -> Path:
        """Return the path at which a local pack is saved."""
        assert self.save_folder is not None
        return self.save_folder / f"{self.folder.name}-{local.name}"

    def is_saved(self, local: Path) -> bool:
        """Return whether the notes record that a local pack is saved."""
        return self.save_folder is not None and self.notes.get("saved") == str(self.saved_path(local))

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool | None]:
        """Yield whether this process holds the folder's lock; None if the file system does not support locks.

        If another process holds the lock, wait until the lock is free, the pack exists, or the folder stops changing.
        """
        file_changes.make_folder(self.folder)
        fd = file_changes.open_lock(self.folder / _LOCK)
        try:
            is_alone = try_lock(fd)
            if is_alone is False:
                with ProgressBar("wait for another process", None, " s", self.progress) as bar:
                    wait_while_busy(self.folder, lambda: try_lock(fd) is False and self.find_local() is None, bar.wait)
                is_alone = try_lock(fd)
            yield is_alone
        finally:
            os.close(fd)

    def make(self) -> tuple[Literal["saved", "packed"], PackInfo]:
        """Stage the saved pack; if that is not possible, or `refresh` is set, pack the source."""
        way: Literal["saved", "packed"] = "packed"
        started = time.monotonic()
        if self.read_state() is not None and self.save_folder is not None and not self.refresh:
            saved = self.saved_path(self.path)
            if self.stage_saved(saved):
                way = "saved"
                self.note(saved_s=time.monotonic() - started, saved=str(saved))
        if way == "packed":
            self.note(saved="")
            if _opened(self.path) is None:
                # pack() would not replace a file that does not start like a pack.
                file_changes.remove(self.path)
            started = time.monotonic()
            self.pack_to(self.path)
            self.note(packed_s=time.monotonic() - started)
        started = time.monotonic()
        info = read_pack(self.path)
        self.local_s = time.monotonic() - started
        return way, info

    def stage_saved(self, saved: Path) -> bool:
        """Stage the saved pack if it exists and is undamaged; return whether that succeeded."""
        act = f"use {str(saved)!r}"
        copy = self.path.with_suffix(".staged")
        try:
            if not answer_of(lambda: os.path.isfile(saved), can_hang(str(saved), mounts())):
                return False
            report = stage(saved, copy, threads=self.threads, extract=False, progress=self.progress)
            with file_changes.translated(act), partials.Partial(self.path) as partial:
                file_changes.rename(report.path, partial.path)
                file_changes.remove(copy)
                if not _is_whole(partial.path, progress=self.progress):
                    next_step = "Check the disk or the connection if this happens again"
                    raise Corrupt(cannot(act, "the pack is damaged", "", next_step))
                partial.publish(replace=True)
        except ColabkitError as error:
            self.unused = error.message or str(error)
            if isinstance(error, TimedOut):
                self.save_folder, self.unsaved = None, f"{str(saved.parent)!r} does not respond"
            return False
        return True

    def save(self, local: Path) -> None:
        """Save a local pack, or record why that failed."""
        try:
            publish(local, self.saved_path(local), progress=self.progress)
            self.note(saved=str(self.saved_path(local)))
        except ColabkitError as error:
            self.unsaved = error.message or str(error)

    def remove_all_but(self, local: Path) -> None:
        """Remove packs of earlier states and leftovers of killed processes."""
        for path in list(self.folder.iterdir()):
            if path.name not in (local.name, _LOCK, _NOTES):
                with contextlib.suppress(OSError):
                    file_changes.remove(path)

    def read_notes(self) -> dict[str, Any]:
        """Return the notes of earlier calls."""
        try:
            return dict(json.loads((self.folder / _NOTES).read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def note(self, **values: object) -> None:
        """Write notes for later calls; failures are ignored because the notes are optional."""
        self.notes.update(values)
        with contextlib.suppress(OSError), partials.Partial(self.folder / _NOTES) as partial:
            file_changes.write_file(partial.path, json.dumps(self.notes).encode())
            partial.publish(replace=True)

    def prepared(self, info: PackInfo, way: Literal["local", "saved", "packed"]) -> PreparedPack:
        """Return the pack with its report."""
        is_saved = self.is_saved(info.path)
        seconds = {name: self.notes.get(name) for name in ("saved_s", "packed_s")}
        report = PrepareReport(
            path=info.path,
            way=way,
            local_s=self.local_s,
            **{name: float(one) if isinstance(one, int | float) else None for name, one in seconds.items()},
            saved_path=self.saved_path(info.path) if is_saved else None,
            pack_bytes=info.path.stat().st_size,
            left_out=info.left_out,
            bad=info.bad,
            inferred=info.inferred,
        )
        return PreparedPack(info, with_reasons(report, "" if is_saved else self.unsaved, self.unused))


def _save_folder(to: str | os.PathLike[str] | None, name: str) -> tuple[Path | None, Text]:
    """Return the folder in which packs of a source are saved, or None and the reason why they are not saved."""
    if to is None:
        return None, option("to", None)
    try:
        folder = Path(os.path.abspath(user_path(to, f"save packs in {str(to)!r}")))
    except NotMounted as error:
        return None, (error.message or str(error), " Or use ", option("to", None), " to save nothing.")
    if os.path.isabs(name) and folder.is_relative_to(name):
        return None, f"{str(folder)!r} is inside the source, and colabkit never writes to a source"
    return folder, ""


def state_of(name: str, *, is_remote: bool) -> str | None:
    """Return the state of a source, as `prepare` defines it; empty if it has no path, None if it does not exist.

    Only metadata is read, because the source may be on a slow mount.
    """
    if not os.path.isabs(name):
        return ""
    retries = Retries()
    try:
        top = answer_of(lambda: retries.run(lambda: os.stat(name)), is_remote)
        if not stat.S_ISDIR(top.st_mode):
            return json.dumps([top.st_size, top.st_mtime_ns])
        names = sorted(answer_of(lambda: retries.run(lambda: os.listdir(name)), is_remote))
    except FileNotFoundError:
        return None
    paths = (os.path.join(name, entry) for entry in names[:_STATED_ENTRIES])
    stalled_s = STALLED_S if is_remote else None
    states = concurrently(
        lambda path: (path, *retries.run(lambda: _entry_state(path))), paths, "auto", stalled_s=stalled_s
    )
    return json.dumps([names, sorted(states)])


def _entry_state(path: str) -> tuple[int, int, int]:
    """Return the type, size in bytes and modification time of a folder entry; the size is 0 if it is a folder."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        # The entry was removed in the meantime.
        return 0, 0, 0
    return stat.S_IFMT(found.st_mode), 0 if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime_ns


def _newest_first(folder: Path) -> list[Path]:
    """Return the packs in a folder, newest first; other processes may remove them in the meantime."""
    times = {}
    for path in folder.glob("*.h5"):
        with contextlib.suppress(OSError):
            times[path] = path.lstat().st_mtime_ns
    return sorted(times, key=lambda path: times[path], reverse=True)


def _opened(path: Path) -> PackInfo | None:
    try:
        return read_pack(path)
    except ColabkitError:
        return None


def _is_whole(path: Path, *, progress: bool) -> bool:
    """Return whether a pack and all its samples match their checksums."""
    try:
        return verify(path, progress=progress).is_good
    except ColabkitError:
        return False


def _digest(*texts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:12]

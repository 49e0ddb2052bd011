"""`prepare()` returns a local pack by the shortest way: the existing one, else the one on Drive, else a new one.

Local packs of one source and one set of options lie in a folder of their own, each under a digest of the state that the
source was in. One process at a time makes one there. The folder's notes hold how long each way took, and which pack is
saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import (
    ColabkitError,
    Corrupt,
    NotMounted,
    ProgressBar,
    TimedOut,
    can_hang,
    cannot,
    file_changes,
    mounts,
    near_folder,
    partials,
    try_lock,
    user_path,
    wait_while_busy,
)
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.labels.labelling import Labels, Splits
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.options import Fields, PackOptions, Size
from colabkit.packs.packing.pack_plan import Encoding, OnBad
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.prepared_pack import PreparedPack, PrepareReport, Way
from colabkit.storage import (
    STALLED_S,
    AnySource,
    Retries,
    Threads,
    answer_of,
    concurrently,
    identity_of,
    publish,
    short_name,
    stage,
)

# With two digests a name takes at most 255 bytes, also of 4 a character.
_NAME_CHARS = 56
_LOCK, _NOTES = "lock", "notes.json"
# Entries of a folder whose sizes and times count; of those beyond, only the names.
_STATED_ENTRIES = 1000


def prepare(
    source: AnySource,
    *,
    size: Size | None = None,
    encoding: Encoding | Literal["auto"] = "auto",
    quality: int = 90,
    channels: Literal[1, 3] = 3,
    labels: Labels = "auto",
    splits: Splits = None,
    fields: Fields | None = None,
    seed: int = 0,
    on_bad: OnBad = "raise",
    max_bad: float = 0.1,
    save_to: str | os.PathLike[str] | None = "drive:colabkit",
    threads: Threads = "auto",
    refresh: bool = False,
    progress: bool = True,
) -> PreparedPack:
    """Return a local pack of a source by the shortest way there is; its `report` names the way.

    A local pack of the same source and options is used without touching a source on a mount; one of a source on this
    machine only if that is in the same state or gone. Else one that was saved in `save_to`, for the same source,
    options and state, is staged, one file, and all its samples are checked. Else the source is packed. A local pack
    that is not saved yet is then saved, so that the next session stages one file; if that fails, the report says why.

    The state of a source is the names, sizes and times of what lies directly in it, or its own size and time if it is a
    file; what changes deeper is seen with `refresh=True`, and so are changes of addresses and of the files that a table
    names. Packs that were saved of former states stay until they are removed by hand. While another process prepares
    the same, this one waits for its pack.

    Args:
        source: as `pack()` takes it, also an address.
        size: as of `pack()`.
        encoding: as of `pack()`; so are the next eight.
        quality: of `"jpeg"`.
        channels: of images.
        labels: where they come from.
        splits: shares, or where they come from.
        fields: further columns.
        seed: of the splits.
        on_bad: what becomes of files that cannot be decoded.
        max_bad: how many there may be; a share above 0 allows at least one.
        save_to: the folder that keeps packs; None saves nothing. Where Drive is not mounted nothing is saved on it.
        threads: reads in flight, or `"auto"`.
        refresh: pack the source again, whatever is there, and save the new pack in place of the old one.
        progress: show progress bars.

    Raises:
        ColabkitError: what `pack()` raises.
    """
    name, key, _ = identity_of(source, extract=True)
    act = f"prepare {name!r}"
    given: dict[str, Any] = {
        "size": size,
        "encoding": encoding,
        "quality": quality,
        "channels": channels,
        "labels": labels,
        "splits": splits,
        "fields": fields,
        "seed": seed,
        "on_bad": on_bad,
        "max_bad": max_bad,
    }
    options = repr(PackOptions(act, **given).plain())
    save_folder, unsaved = _save_folder(save_to, name)
    folder = near_folder(os.environ) / "packs" / f"{short_name(name)[:_NAME_CHARS]}-{_digest(key, options)}"

    def pack_to(path: Path) -> None:
        # overwrite=True also looks again at what was fetched or staged for it.
        pack(source, path, **given, threads=threads, overwrite=True, progress=progress)

    work = _Preparation(name, folder.absolute(), save_folder, unsaved, pack_to, threads, refresh, progress)
    with file_changes.translated(act):
        return work.run()


@dataclass
class _Preparation:
    """One call of `prepare()`.

    Attributes:
        name: the source's, an absolute path if it has one.
        folder: of the local packs of this source and these options.
        save_folder: the folder that keeps packs, None where none are saved, as `unsaved` explains.
        pack_to: packs the source to a path.
        state: of the source; None before it is read, and where there is no source.
    """

    name: str
    folder: Path
    save_folder: Path | None
    unsaved: str
    pack_to: Callable[[Path], None]
    threads: Threads
    refresh: bool
    progress: bool
    state: str | None = None
    unused: str = ""
    near_s: float = 0.0

    def __post_init__(self) -> None:
        self.is_far = os.path.isabs(self.name) and can_hang(self.name, mounts())
        self.notes = self.read_notes()

    def run(self) -> PreparedPack:
        """Go the shortest way there is."""
        if not self.is_far:
            self.read_state()
        found = self.find_local()
        if found is not None and (self.save_folder is None or self.is_saved(found.path)):
            return self.prepared(found, "near")
        if found is None and self.read_state() is None:
            self.pack_to(self.path)  # an error, unless the source has just come
        way: Way = "near"
        with self.alone() as is_alone:
            self.notes = self.read_notes()
            found = self.find_local()
            if found is None:
                way, found = self.make()
                if is_alone:
                    self.remove_all_but(found.path)
            elif is_alone is False and not self.is_saved(found.path):
                self.save_folder, self.unsaved = None, "another process, which is at it, saves it"
            if self.save_folder is not None and not self.is_saved(found.path):
                self.save(found.path)
        return self.prepared(found, way)

    def read_state(self) -> str | None:
        """Return the source's state, None where there is no source; that of one on a mount is read late, and once."""
        if self.state is None:
            self.state = state_of(self.name, is_far=self.is_far)
        return self.state

    def find_local(self) -> PackInfo | None:
        """Return the local pack of the source's state, or the newest where that is not known; None if none is whole."""
        if self.refresh:
            return None
        started = time.monotonic()
        paths = [self.path] if self.state is not None else _newest_first(self.folder)
        found = next(filter(None, map(_opened, paths)), None)
        self.near_s = time.monotonic() - started
        return found

    @property
    def path(self) -> Path:
        """The local pack of the source's state."""
        return self.folder / f"{_digest(self.state or '')}.h5"

    def saved_path(self, local: Path) -> Path:
        """Return where a local pack is saved."""
        assert self.save_folder is not None
        return self.save_folder / f"{self.folder.name}-{local.name}"

    def is_saved(self, local: Path) -> bool:
        """Return whether a local pack is known to be saved."""
        return self.save_folder is not None and self.notes.get("saved") == str(self.saved_path(local))

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool | None]:
        """Yield whether this process alone works in the folder, None where the file system has no locks.

        Another process is waited for, until its pack is there or nothing changes in the folder any more.
        """
        file_changes.make_folder(self.folder)
        fd = file_changes.open_lock(self.folder / _LOCK)
        try:
            is_alone = try_lock(fd)
            if is_alone is False:
                with ProgressBar("wait for another prepare()", None, " s", self.progress) as bar:
                    wait_while_busy(self.folder, lambda: try_lock(fd) is False and self.find_local() is None, bar.wait)
                is_alone = try_lock(fd)
            yield is_alone
        finally:
            os.close(fd)

    def make(self) -> tuple[Literal["saved", "packed"], PackInfo]:
        """Stage the saved pack, else pack the source."""
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
                file_changes.remove(self.path)  # pack() overwrites nothing that is damaged
            started = time.monotonic()
            self.pack_to(self.path)
            self.note(packed_s=time.monotonic() - started)
        started = time.monotonic()
        info = read_pack(self.path)
        self.near_s = time.monotonic() - started
        return way, info

    def stage_saved(self, saved: Path) -> bool:
        """Stage the saved pack if there is one and it is whole; return whether it was."""
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
                    raise Corrupt(cannot(act, "it is damaged", "a pack as it was sealed", "It is packed again"))
                partial.publish(replace=True)
        except ColabkitError as error:
            self.unused = str(error)
            if isinstance(error, TimedOut):
                self.save_folder, self.unsaved = None, f"{str(saved.parent)!r} does not answer"
            return False
        return True

    def save(self, local: Path) -> None:
        """Save a local pack, or note why that failed."""
        try:
            publish(local, self.saved_path(local), progress=self.progress)
            self.note(saved=str(self.saved_path(local)))
        except ColabkitError as error:
            self.unsaved = str(error)

    def remove_all_but(self, local: Path) -> None:
        """Remove packs of former states, and what killed processes left."""
        for path in list(self.folder.iterdir()):
            if path.name not in (local.name, _LOCK, _NOTES):
                with contextlib.suppress(OSError):
                    file_changes.remove(path)

    def read_notes(self) -> dict[str, Any]:
        """Return what earlier calls noted."""
        try:
            return dict(json.loads((self.folder / _NOTES).read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def note(self, **values: object) -> None:
        """Write notes for the next call, which can do without them."""
        self.notes.update(values)
        with contextlib.suppress(OSError), partials.Partial(self.folder / _NOTES) as partial:
            file_changes.write_file(partial.path, json.dumps(self.notes).encode())
            partial.publish(replace=True)

    def prepared(self, info: PackInfo, way: Way) -> PreparedPack:
        """Return the pack with its report."""
        is_saved = self.is_saved(info.path)
        seconds = {name: self.notes.get(name) for name in ("saved_s", "packed_s")}
        report = PrepareReport(
            path=info.path,
            way=way,
            near_s=self.near_s,
            **{name: float(one) if isinstance(one, int | float) else None for name, one in seconds.items()},
            saved_path=self.saved_path(info.path) if is_saved else None,
            unsaved="" if is_saved else self.unsaved,
            unused=self.unused,
            pack_bytes=info.path.stat().st_size,
        )
        return PreparedPack(info, report)


def _save_folder(save_to: str | os.PathLike[str] | None, name: str) -> tuple[Path | None, str]:
    """Return where packs of a source are saved, else why they are not."""
    if save_to is None:
        return None, "save_to=None"
    try:
        folder = Path(os.path.abspath(user_path(save_to, f"save packs in {str(save_to)!r}")))
    except NotMounted as error:
        return None, f"{str(error).rstrip('.')}, or use save_to=None to save nothing"
    if os.path.isabs(name) and folder.is_relative_to(name):
        return None, f"{str(folder)!r} lies in the source, which is never written to"
    return folder, ""


def state_of(name: str, *, is_far: bool) -> str | None:
    """Return text that differs for most changes of a source, cheap on a slow mount; None where there is no source."""
    if not os.path.isabs(name):
        return ""
    retries = Retries()
    try:
        top = answer_of(lambda: retries.run(lambda: os.stat(name)), is_far)
        if not stat.S_ISDIR(top.st_mode):
            return json.dumps([top.st_size, top.st_mtime_ns])
        names = sorted(answer_of(lambda: retries.run(lambda: os.listdir(name)), is_far))
    except FileNotFoundError:
        return None
    paths = (os.path.join(name, entry) for entry in names[:_STATED_ENTRIES])
    stalled_s = STALLED_S if is_far else None
    states = concurrently(
        lambda path: (path, *retries.run(lambda: _entry_state(path))), paths, "auto", stalled_s=stalled_s
    )
    return json.dumps([names, sorted(states)])


def _entry_state(path: str) -> tuple[int, int, int]:
    """Return kind, size and time of a file, a folder or a link; a folder has no size that means anything."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:  # it was removed meanwhile
        return 0, 0, 0
    return stat.S_IFMT(found.st_mode), 0 if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime_ns


def _newest_first(folder: Path) -> list[Path]:
    """Return the packs in a folder, which other processes may remove meanwhile."""
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
    """Return whether a pack and all its samples are as they were sealed."""
    try:
        return verify(path, progress=progress).is_good
    except ColabkitError:
        return False


def _digest(*texts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:12]

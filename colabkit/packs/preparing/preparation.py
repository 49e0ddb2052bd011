"""One call of `prepare()`: it finds, stages or creates a pack of the source, and saves the pack."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    ColabkitError,
    Corrupt,
    ProgressBar,
    SourceMissing,
    Text,
    TimedOut,
    can_hang,
    cannot,
    file_changes,
    format_things,
    mounts,
    option,
    partials,
    release_lock,
    shown,
    try_lock,
    wait_while_busy,
)
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.pack_call import PlannedFiles
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.prepared_pack import PreparedPack, PrepareReport, Way, with_reasons
from colabkit.packs.preparing.source_state import SourceState
from colabkit.storage import Threads, answer_of, publish_watched, stage

_LOCK, _NOTES = "lock", "notes.json"
# Time limit for checking a remote source; after it, an existing local pack is used unchecked.
_CHECK_S = 10.0


@dataclass
class Preparation:
    """One call of `prepare()`.

    Attributes:
        name: name of the source; an absolute path if it has one.
        folder: folder of the local packs of this source and these options.
        request: digests of the source's identity and of the options; a pack holds them, and a digest of the source's
            state, as metadata.
        save_folder: folder in which packs are saved; None if nothing is saved, for the reason in `unsaved`.
        check_bad: function that raises an error if an existing pack has more bad samples than this call allows.
        plan: function that plans the pack of the source at a path, which also stores the state of the source.
        look: function that returns the state of the source.
        is_local: whether the source and all its files are known to be on this machine.
        state: state of the source; None if it is unknown or the source does not exist.
        checked: the facts about the source that were compared, for the report.
        late: the reason why the pack could not be read before it was complete, for the report.
        is_alone: whether this process holds the lock of the folder; None if that is unknown.
        seen: for each path checked so far, whether the file there is the saved pack.
    """

    name: str
    folder: Path
    request: Mapping[str, str]
    save_folder: Path | None
    unsaved: Text
    check_bad: Callable[[PackInfo], None]
    plan: Callable[[Path, SourceState | None], PlannedFiles]
    look: Callable[[Callable[[], None]], SourceState]
    is_local: bool
    threads: Threads
    refresh: bool
    progress: bool
    state: SourceState | None = None
    checked: Text = ""
    unused: Text = ""
    late: Text = ""
    local_s: float = 0.0
    is_alone: bool | None = None
    seen: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.notes = self.read_notes()

    def run(self) -> PreparedPack:
        """Return the pack by the fastest route, after saving it if necessary."""
        with contextlib.ExitStack() as locked:
            found, way = self.find(locked) or (self.write(self.planned()), "packed")
            if self.must_save(found.path):
                self.save(found.path)
        return self.prepared(found, way)

    def find(self, locked: contextlib.ExitStack) -> tuple[PackInfo, Way] | None:
        """Return an existing pack and its route; None if the source has to be packed.

        If the pack may have to be saved or packed, `locked` holds the lock of the folder until it is closed.
        """
        if (found := self._find(locked)) is not None:
            self.check_bad(found[0])
        return found

    def _find(self, locked: contextlib.ExitStack) -> tuple[PackInfo, Way] | None:
        started = time.monotonic()
        self.read_state()
        found = self.find_local()
        self.local_s = time.monotonic() - started
        if found is not None and not self.must_save(found.path):
            return found, "local"
        if found is None and self.state is None:
            # This raises the error for a missing source, unless the source was created in the meantime.
            self.plan(self.path, None).write()
        self.is_alone = locked.enter_context(self.alone())
        self.notes = self.read_notes()
        self.seen.clear()
        found = self.find_local()
        if found is None:
            return None if (staged := self.staged()) is None else (staged, "saved")
        if self.is_alone is False and not self.is_saved(found.path):
            self.save_folder, self.unsaved = None, "another process is saving it"
        return found, "local"

    def read_state(self) -> None:
        """Read the source's state, unless the source does not exist.

        If a check of a remote source fails or takes too long, the state stays unknown, and an existing local pack will
        be used.
        """
        stop = threading.Event()

        def go_on() -> None:
            if stop.is_set():
                raise TimedOut(cannot(f"check {self.name!r}", "the time limit has passed", "", "Try again"))

        try:
            # An error of the source must be a ColabkitError, so that an existing pack is used.
            with file_changes.translated(f"prepare {self.name!r}"):
                if self.is_local or self.find_local() is None:
                    self.state = self.look(go_on)
                else:
                    self.state = answer_of(lambda: self.look(go_on), can_hang=True, stalled_s=_CHECK_S, tries=1)
            self.checked = self.state.checked
        except SourceMissing as error:
            self.checked = ("nothing, because ", error.message.found if error.message else "the source is missing")
        except ColabkitError as error:
            if self.is_local or self.find_local() is None:
                raise
            cause = f"the check took more than {_CHECK_S:g} s" if isinstance(error, TimedOut) else error.message
            again = (option("refresh", True), " to pack the source again")
            self.checked = ("nothing, because ", cause or str(error), "; use ", *again)
        finally:
            stop.set()

    def find_local(self) -> PackInfo | None:
        """Return the usable local pack for the source's state (the newest pack if the state is unknown), or None."""
        if self.refresh:
            return None
        for path in _newest_first(self.folder) if self.state is None else [self.path]:
            try:
                info = read_pack(path)
            except SourceMissing:
                continue
            except ColabkitError as error:
                self.unused = error.message or str(error)
                continue
            if not (difference := self.difference_of(info)):
                return info
            self.unused = f"{str(path)!r}: {difference}"
        return None

    def difference_of(self, info: PackInfo) -> str:
        """Describe the differences between a pack and the one that this call would make; empty if there are none."""
        found = info.meta.get("request")
        found = found if isinstance(found, Mapping) else {}
        samples = format_things(sum(map(info.count, info.splits)), "sample")
        named = info.meta["classes"]
        classes = format_things(len(named) if isinstance(named, list) else 0, "class", "classes")
        holds = f"{samples} of {shown(info.meta['source'])} in {classes}"
        if found.get("source") != self.request["source"]:
            return f"it holds {holds}, and was not prepared from this source"
        if found.get("options") != self.request["options"]:
            return f"it was prepared with other options, and holds {holds}"
        if self.state is None:
            return ""
        if found.get("state") != short_digest(self.state.digest):
            return f"the source has changed since it was prepared, when it had {samples}"
        # The notes are newer than the metadata, for example after a saved pack was staged on another machine.
        noted = self.notes.get("changes")
        changes = (noted.get(info.seal) if isinstance(noted, Mapping) else None) or found.get("changes")
        # Inodes and change times are comparable only until the next reboot, so `changes` begins with the boot ID.
        is_comparable = str(changes).partition(" ")[0] == self.state.changes.partition(" ")[0]
        if is_comparable and changes != self.state.changes:
            return "files of the source were changed or replaced, and their sizes and times restored"
        return ""

    @property
    def path(self) -> Path:
        """Path of the local pack for the source's state."""
        return self.folder / f"{short_digest(self.state.digest if self.state else '')}.h5"

    def saved_path(self, local: Path) -> Path:
        """Return the path at which a local pack is saved."""
        assert self.save_folder is not None
        return self.save_folder / f"{self.folder.name}-{local.name}"

    def must_save(self, local: Path) -> bool:
        """Return whether a local pack is to be saved and is not saved yet."""
        return self.save_folder is not None and not self.is_saved(local)

    def is_saved(self, local: Path) -> bool:
        """Return whether a local pack is saved: the notes record it, and the saved file still has the same size.

        If the file system does not respond, the notes are trusted.
        """
        if self.save_folder is None or self.notes.get("saved") != (saved := str(self.saved_path(local))):
            return False
        if saved not in self.seen:
            try:
                size = answer_of(lambda: os.path.getsize(saved), can_hang(saved, mounts()), _CHECK_S, tries=1)
                self.seen[saved] = size == local.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                self.seen[saved] = False
            except (OSError, ColabkitError):
                self.seen[saved] = True
        return self.seen[saved]

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool | None]:
        """Yield whether this process holds the folder's lock; None if the file system does not support locks.

        If another process holds the lock, wait until the lock is free, the pack exists, or the folder stops changing.
        """
        file_changes.make_folder(self.folder)
        with file_changes.descriptor(file_changes.open_lock(self.folder / _LOCK)) as fd:
            is_alone = try_lock(fd)
            if is_alone is False:
                with ProgressBar("wait for another process", None, " s", self.progress) as bar:
                    wait_while_busy(self.folder, lambda: try_lock(fd) is False and self.find_local() is None, bar.wait)
                is_alone = try_lock(fd)
            try:
                yield is_alone
            finally:
                # Worker processes that were forked in the meantime have inherited the lock.
                release_lock(fd)

    def staged(self) -> PackInfo | None:
        """Stage the saved pack and return it; None if that is not possible, or `refresh` is set."""
        if self.state is None or self.save_folder is None or self.refresh:
            return None
        saved, started = self.saved_path(self.path), time.monotonic()
        if not self.stage_saved(saved):
            return None
        self.seen[str(saved)] = True
        self.note(saved_s=time.monotonic() - started, saved=str(saved))
        return self.opened()

    def planned(self) -> PlannedFiles:
        """List the files of the source, and plan their pack."""
        self.note(saved="")
        if _opened(self.path) is None:
            # Packing refuses to replace a file that does not start like a pack.
            file_changes.remove(self.path)
        return self.plan(self.path, self.state)

    def write(self, planned: PlannedFiles, arrival: Arrival | None = None) -> PackInfo:
        """Write the planned pack, and return it; readers of the incomplete pack use `arrival`."""
        planned.write(arrival)
        self.note(packed_s=time.monotonic() - planned.call.started)
        return self.opened()

    def opened(self) -> PackInfo:
        """Open the new pack, record how its source has changed, and remove the packs of earlier states."""
        started = time.monotonic()
        info = read_pack(self.path)
        self.local_s = time.monotonic() - started
        if self.state is not None:
            self.note(changes={info.seal: self.state.changes})
        if self.is_alone:
            self.remove_all_but(info.path)
        return info

    def stage_saved(self, saved: Path) -> bool:
        """Stage the saved pack if it exists, is undamaged and matches the request; return whether it was staged."""
        act = f"use {str(saved)!r}"
        copy = self.path.with_suffix(".staged")
        try:
            if not answer_of(lambda: os.path.isfile(saved), can_hang(str(saved), mounts())):
                return False
            report = stage(saved, copy, threads=self.threads, extract=False, progress=self.progress)
            with file_changes.translated(act), partials.Partial(self.path) as partial:
                file_changes.rename(report.path, partial.path)
                file_changes.remove(copy)
                info = _opened(partial.path)
                if info is not None and (difference := self.difference_of(info)):
                    self.unused = f"{str(saved)!r}: {difference}"
                    return False
                if info is None or not _is_whole(partial.path, progress=self.progress):
                    next_step = "Check the disk or the connection if this happens again"
                    raise Corrupt(cannot(act, "the pack is damaged", "", next_step))
                partial.publish(replace=True)
        except ColabkitError as error:
            self.unused = error.message or str(error)
            if isinstance(error, TimedOut):
                self.save_folder, self.unsaved = None, f"{str(saved.parent)!r} does not respond"
            return False
        return True

    def save(self, local: Path, watch: Callable[[int], None] = lambda _: None, *, progress: bool = True) -> None:
        """Save a local pack, or record why that failed.

        Args:
            local: the local pack.
            watch: argument of `publish_watched()`, which may raise `PackAbandoned` to stop.
            progress: whether to show progress, if this call does.
        """
        try:
            publish_watched(local, saved := self.saved_path(local), watch, progress=progress and self.progress)
            self.seen[str(saved)] = True
            self.note(saved=str(saved))
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
        with contextlib.suppress(OSError):
            partials.write_atomically(self.folder / _NOTES, json.dumps(self.notes).encode())

    def prepared(self, info: PackInfo, way: Way) -> PreparedPack:
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
        checked = "" if way == "packed" else self.checked
        return PreparedPack(
            info, with_reasons(report, "" if is_saved else self.unsaved, self.unused, checked, self.late)
        )


def _newest_first(folder: Path) -> list[Path]:
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
    try:
        return verify(path, progress=progress).is_good
    except ColabkitError:
        return False


def short_digest(*texts: str) -> str:
    """Return the first 12 hex digits of the SHA-256 of strings."""
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:12]

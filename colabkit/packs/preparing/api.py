"""`prepare()` is the shortest way to a near pack: the one that is near, else the one on Drive, else a new one.

Near packs of one source and one set of options lie in a folder of their own, each under a digest of the state that the
source was in. One process at a time makes one there. The folder's notes tell how long the ways took, and what is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
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
from colabkit.packs.packing.options import Fields, Size, checked_options
from colabkit.packs.packing.pack_plan import Encoding, OnBad
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.report import PreparedPack, PrepareReport, Way
from colabkit.packs.preparing.state import state_of
from colabkit.storage import AnySource, Threads, answer_of, identity_of, publish, short_name, stage

_NAME_CHARS = 56  # with two digests at most 255 bytes, also of 4 a character
_LOCK, _NOTES = "lock", "notes.json"


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
    """Return a near pack of a source by the shortest way there is; its `report` tells which.

    A near pack of the same source and options is used without touching a source on a mount; one of a source on this
    machine only if that is in the same state or gone. Else one that was saved in `save_to`, for the same source,
    options and state, is staged, one file, and all its samples are checked. Else the source is packed. A near pack that
    is not saved yet is then saved, so that the next session stages one file; if that fails, the report says why.

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
        refresh: pack the source anew, whatever is there, and save the new pack in place of the old one.
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
    options = repr(checked_options(act, **given).plain())
    keeping, unsaved = _keeping_folder(save_to, name)
    stem = f"{short_name(name)[:_NAME_CHARS]}-{_digest(key, options)}"
    folder = (near_folder(os.environ) / "packs" / stem).absolute()

    def make(near: Path) -> None:
        pack(
            source,
            near,
            **given,
            threads=threads,
            overwrite=True,  # which also looks again at what was fetched or staged for it
            progress=progress,
        )

    work = _Preparation(act, name, folder, keeping, unsaved, make, threads=threads, refresh=refresh, progress=progress)
    with file_changes.translated(act):
        return work.run()


class _Preparation:
    """One call of `prepare()`.

    Args:
        act: verb and object for messages.
        name: the source's, an absolute path if it has one.
        folder: of the near packs of this source and these options.
        keeping: the folder that keeps packs, None where none are saved.
        unsaved: why none are.
        make: packs the source to a path.
        threads: reads in flight.
        refresh: whether what is there does not count.
        progress: whether to show progress bars.
    """

    def __init__(
        self,
        act: str,
        name: str,
        folder: Path,
        keeping: Path | None,
        unsaved: str,
        make: Callable[[Path], None],
        *,
        threads: Threads,
        refresh: bool,
        progress: bool,
    ) -> None:
        self._act = act
        self._name = name
        self._folder = folder
        self._keeping = keeping
        self._unsaved = unsaved
        self._make = make
        self._threads = threads
        self._refresh = refresh
        self._progress = progress
        self._is_far = os.path.isabs(name) and can_hang(name, mounts())
        self._state: str | None = None
        self._unused = ""
        self._near_s = 0.0
        self._notes = self._noted()

    def run(self) -> PreparedPack:
        """Go the shortest way there is."""
        if not self._is_far:
            self._look()
        found = self._found()
        if found is not None and (self._keeping is None or self._is_saved(found.path)):
            return self._prepared(found, "near")
        if found is None and self._look() is None:
            self._make(self._near)  # an error, unless the source has just come
        way: Way = "near"
        with self._turn() as is_alone:
            self._notes = self._noted()
            found = self._found()
            if found is None:
                way, found = self._made()
                if is_alone:
                    self._remove_all_but(found.path)
            elif is_alone is False and not self._is_saved(found.path):
                self._keeping, self._unsaved = None, "another process, which is at it, saves it"
            if self._keeping is not None and not self._is_saved(found.path):
                self._save(found.path)
        return self._prepared(found, way)

    def _look(self) -> str | None:
        """Return the source's state, None where nothing is there; one on a mount is looked at now, if not before."""
        if self._state is None:
            self._state = state_of(self._name, is_far=self._is_far)
        return self._state

    def _found(self) -> PackInfo | None:
        """Return the near pack of the source's state, or the newest where that is not known; None if none is whole."""
        if self._refresh:
            return None
        started = time.monotonic()
        if self._state is not None:
            paths = [self._near]
        else:
            paths = sorted(self._folder.glob("*.h5"), key=_modified_ns, reverse=True)
        found = next(filter(None, map(_opened, paths)), None)
        self._near_s = time.monotonic() - started
        return found

    @property
    def _near(self) -> Path:
        return self._folder / f"{_digest(self._state or '')}.h5"

    def _saved(self, near: Path) -> Path:
        assert self._keeping is not None
        return self._keeping / f"{self._folder.name}-{near.name}"

    def _is_saved(self, near: Path) -> bool:
        return self._keeping is not None and self._notes.get("saved") == str(self._saved(near))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool | None]:
        """Give whether this process alone is at it, None where the file system has no locks.

        Another process that is at it is waited for, until its pack is there or nothing moves in the folder any more.
        """
        file_changes.make_folder(self._folder)
        fd = file_changes.open_lock(self._folder / _LOCK)
        try:
            is_alone = try_lock(fd)
            if is_alone is False:

                def is_busy() -> bool:
                    return try_lock(fd) is False and self._found() is None

                with ProgressBar("wait for another prepare()", None, " s", self._progress) as bar:
                    wait_while_busy(self._folder, is_busy, bar.wait)
                is_alone = try_lock(fd)
            yield is_alone
        finally:
            os.close(fd)

    def _made(self) -> tuple[Literal["saved", "packed"], PackInfo]:
        """Bring the saved pack near, else pack the source."""
        if self._look() is not None and self._keeping is not None and not self._refresh:
            started = time.monotonic()
            if self._staged(self._saved(self._near)):
                self._note(saved_s=time.monotonic() - started, saved=str(self._saved(self._near)))
                return "saved", self._reopened()
        self._note(saved="")
        if _opened(self._near) is None:
            file_changes.remove(self._near)  # what is damaged is not overwritten by pack()
        started = time.monotonic()
        self._make(self._near)
        self._note(packed_s=time.monotonic() - started)
        return "packed", self._reopened()

    def _reopened(self) -> PackInfo:
        started = time.monotonic()
        info = read_pack(self._near)
        self._near_s = time.monotonic() - started
        return info

    def _staged(self, saved: Path) -> bool:
        """Bring the saved pack near if it is there and whole; return whether it was."""
        act = f"use {str(saved)!r}"
        copy = self._near.with_suffix(".staged")
        try:
            if not answer_of(lambda: os.path.isfile(saved), can_hang(str(saved), mounts())):
                return False
            report = stage(saved, copy, threads=self._threads, extract=False, progress=self._progress)
            with file_changes.translated(act), partials.Partial(self._near) as partial:
                file_changes.rename(report.path, partial.path)
                file_changes.remove(copy)
                if not _is_whole(partial.path, progress=self._progress):
                    raise Corrupt(cannot(act, "it is damaged", "a pack as it was sealed", "It is packed anew"))
                partial.publish(replace=True)
        except ColabkitError as error:
            self._unused = str(error)
            if isinstance(error, TimedOut):
                self._keeping, self._unsaved = None, f"{str(saved.parent)!r} does not answer"
            return False
        return True

    def _save(self, near: Path) -> None:
        try:
            publish(near, self._saved(near), progress=self._progress)
        except ColabkitError as error:
            self._unsaved = str(error)
        else:
            self._note(saved=str(self._saved(near)))

    def _remove_all_but(self, near: Path) -> None:
        """Remove packs of former states, and what killed processes left."""
        for path in list(self._folder.iterdir()):
            if path.name not in (near.name, _LOCK, _NOTES):
                with contextlib.suppress(OSError):
                    file_changes.remove(path)

    def _noted(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / _NOTES).read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def _note(self, **values: object) -> None:
        """Remember what the next call may want to know; it does without if that cannot be written."""
        self._notes.update(values)
        with contextlib.suppress(OSError), partials.Partial(self._folder / _NOTES) as partial:
            file_changes.write_file(partial.path, json.dumps(self._notes).encode())
            partial.publish(replace=True)

    def _prepared(self, info: PackInfo, way: Way) -> PreparedPack:
        is_saved = self._is_saved(info.path)
        report = PrepareReport(
            path=info.path,
            way=way,
            near_s=self._near_s,
            saved_s=self._seconds("saved_s"),
            packed_s=self._seconds("packed_s"),
            saved_path=self._saved(info.path) if is_saved else None,
            unsaved="" if is_saved else self._unsaved,
            unused=self._unused,
            pack_bytes=info.path.stat().st_size,
        )
        return PreparedPack(info, report)

    def _seconds(self, name: str) -> float | None:
        found = self._notes.get(name)
        return float(found) if isinstance(found, int | float) else None


def _keeping_folder(save_to: str | os.PathLike[str] | None, name: str) -> tuple[Path | None, str]:
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


def _modified_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _digest(*texts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:12]

"""`prepare()` is the shortest way to a near pack: the one that is near, else the one on Drive, else a new one."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colabkit import _files, _partials
from colabkit._reports import Report
from colabkit._units import format_bytes, format_seconds
from colabkit.dataset import Pack
from colabkit.environment import can_hang, near_folder
from colabkit.errors import ColabkitError, InvalidOption, NotMounted, cannot
from colabkit.mounts import mounts, user_path
from colabkit.pack_format import read_pack
from colabkit.packing import Size, height_and_width, pack
from colabkit.sources import AnySource, Threads
from colabkit.sources.answering import answer_of
from colabkit.staging import publish, stage
from colabkit.staging.identity import identity_of

__all__ = ["PrepareReport", "PreparedPack", "prepare"]

_FINGERPRINT_ENTRIES = 1000
_NAME_CHARS = 60
_NOTE = ".json"


@dataclass(frozen=True, repr=False)
class PrepareReport(Report):
    """Which way `prepare()` went, and what the three ways take.

    Attributes:
        path: the near pack.
        way: `"near"`: it was there; `"saved"`: the one in `save_to` was staged; `"packed"`: it was made anew.
        near_s: seconds that opening a near pack takes.
        saved_s: seconds that staging the saved one took, None if that is not known.
        packed_s: seconds that packing from the source took, None if that is not known.
        saved_path: the saved pack, None where there is none.
        unsaved: why there is none.
        pack_bytes: the pack's length.
    """

    path: Path
    way: Literal["near", "saved", "packed"]
    near_s: float
    saved_s: float | None
    packed_s: float | None
    saved_path: Path | None
    unsaved: str
    pack_bytes: int

    def _summary(self) -> str:
        size = format_bytes(self.pack_bytes)
        saved = (
            f"; saved to {str(self.saved_path)!r} for next time" if self.saved_path else f"; not saved: {self.unsaved}"
        )
        what = {
            "near": f"Used the near pack {str(self.path)!r}, {size}",
            "saved": f"Staged the pack that was saved at {str(self.saved_path)!r}, {size}",
            "packed": f"Packed {size} to {str(self.path)!r}{saved}",
        }[self.way]
        return f"{what}. {self._ways()}"

    def _ways(self) -> str:
        known = [f"a near pack {format_seconds(self.near_s)}"]
        if self.saved_s is not None:
            known.append(f"a saved pack {format_seconds(self.saved_s)}")
        if self.packed_s is not None:
            known.append(f"packing from the source {format_seconds(self.packed_s)}")
        return f"The ways take: {', '.join(known)}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("near", self.near_s), ("saved", self.saved_s), ("packed", self.packed_s)]
        return [
            ("path", str(self.path)),
            ("saved", str(self.saved_path or self.unsaved)),
            *((f"way {name}", "not known" if taken is None else format_seconds(taken)) for name, taken in rows),
        ]


class PreparedPack(Pack):
    """A pack with the report of how `prepare()` came to it.

    Args:
        pack: the near pack.
        report: which way it went.
    """

    def __init__(self, pack: Pack, report: PrepareReport) -> None:
        super().__init__(pack.info)
        self.report = report

    def __repr__(self) -> str:
        return f"{self.report!r}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        return self.report._repr_html_() + super()._repr_html_()


def prepare(
    source: AnySource,
    *,
    size: Size | None = None,
    channels: Literal[1, 3] = 3,
    splits: Mapping[str, float] | None = None,
    seed: int = 0,
    save_to: str | os.PathLike[str] | None = "drive:colabkit",
    threads: Threads = "auto",
    refresh: bool = False,
    progress: bool = True,
) -> PreparedPack:
    """Return a near pack of a source by the shortest way there is; its `report` tells which.

    A near pack of the same source and options is used without touching the source. Else one that was saved in
    `save_to`, for the same source, options and state of the source, is staged: one file. Else the source is packed,
    and the pack saved in `save_to`, so that the next session stages one file. The state of a source is the names, sizes
    and times of what lies directly in it, or its own size and time if it is a file; what changes deeper is seen with
    `refresh=True`.

    Args:
        source: as `pack()` takes it, also an address.
        size: as of `pack()`.
        channels: as of `pack()`.
        splits: as of `pack()`.
        seed: as of `pack()`.
        save_to: the folder that keeps packs; None saves nothing. Where Drive is not mounted nothing is saved on it.
        threads: reads in flight, or `"auto"`.
        refresh: pack the source anew, whatever is there, and save the new pack.
        progress: show progress bars.

    Raises:
        ColabkitError: what `stage()`, `pack()`, `publish()` and `open_pack()` raise.
    """
    started = time.monotonic()
    name, key, address = identity_of(source, extract=True)
    act = f"prepare {name!r}"
    height_and_width(act, size)
    options = json.dumps([size, channels, dict(splits) if splits else None, seed if splits else None])
    stem = f"{(Path(name).stem or 'root')[:_NAME_CHARS]}-{_digest(key, options)}"
    folder = near_folder(os.environ) / "packs" / stem
    with _files.translated(act):
        if not refresh and (near := _newest(folder)):
            return _prepared(near, "near", started, folder, None, "it was saved when it was packed, if at all")
        saving, unsaved = _saving_folder(act, save_to)
        state = "" if address else _state_of(name)
        saved = saving / f"{stem}-{_digest(state)}.h5" if saving else None
        if saved and not refresh and _is_there(saved):
            report = stage(saved, folder / "saved", progress=progress)
            _note(folder, saved_s=report.seconds)
            return _prepared(report.path, "saved", time.monotonic(), folder, saved, "")
        packed = pack(
            source,
            folder / f"{stem}.h5",
            size=size,
            channels=channels,
            splits=splits,
            seed=seed,
            threads=threads,
            overwrite=True,
            progress=progress,
        )
        _note(folder, packed_s=time.monotonic() - started)
        _files.remove(folder / "saved")  # a near copy of what was just packed anew
        if saved:
            try:
                publish(packed.path, saved, progress=progress)
            except ColabkitError as error:
                saved, unsaved = None, str(error)
    return _prepared(packed.path, "packed", time.monotonic(), folder, saved, unsaved)


def _prepared(
    path: Path, way: Literal["near", "saved", "packed"], started: float, folder: Path, saved: Path | None, unsaved: str
) -> PreparedPack:
    opened = Pack(read_pack(path))
    times = _noted(folder)
    report = PrepareReport(
        path=path,
        way=way,
        near_s=time.monotonic() - started,
        saved_s=times.get("saved_s"),
        packed_s=times.get("packed_s"),
        saved_path=saved,
        unsaved=unsaved,
        pack_bytes=path.stat().st_size,
    )
    return PreparedPack(opened, report)


def _newest(folder: Path) -> Path | None:
    """Return the newest sealed pack in a folder and the near copies in it."""
    found = sorted([*folder.glob("*.h5"), *folder.glob("saved/*.h5")], key=lambda path: -path.stat().st_mtime_ns)
    for path in found:
        try:
            read_pack(path)
        except ColabkitError:
            continue
        return path
    return None


def _saving_folder(act: str, save_to: str | os.PathLike[str] | None) -> tuple[Path | None, str]:
    """Return where packs are saved, else why they are not."""
    if save_to is None:
        return None, "save_to=None"
    if not isinstance(save_to, str | os.PathLike):
        raise InvalidOption(cannot(act, f"save_to={save_to!r}", "a folder or None", "Use save_to='drive:colabkit'"))
    try:
        return user_path(save_to, act), ""
    except NotMounted:
        return None, "Drive is not mounted"


def _state_of(name: str) -> str:
    """Return what tells a source as it is from what it was, by one look."""
    if not os.path.isabs(name):
        return ""

    def look() -> list[tuple[str, int, int]]:
        found = os.stat(name)
        if not os.path.isdir(name):
            return [("", found.st_size, found.st_mtime_ns)]
        with os.scandir(name) as entries:
            first = list(itertools.islice(entries, _FINGERPRINT_ENTRIES))
        stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in first]
        return sorted((entry, 0 if os.path.isdir(name) else at.st_size, at.st_mtime_ns) for entry, at in stats)

    return json.dumps(answer_of(look, can_hang(name, mounts())))


def _is_there(path: Path) -> bool:
    return answer_of(path.is_file, can_hang(os.path.abspath(path), mounts()))


def _digest(*texts: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(texts))).hexdigest()[:8]


def _noted(folder: Path) -> dict[str, float]:
    try:
        found = json.loads((folder / f"times{_NOTE}").read_bytes())
        return {name: float(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _note(folder: Path, **seconds: float) -> None:
    """Remember how long a way took."""
    known = {**_noted(folder), **seconds}
    _files.make_folder(folder)
    with _partials.Partial(folder / f"times{_NOTE}") as partial:
        _files.write_file(partial.path, json.dumps(known).encode())
        partial.publish(replace=True)

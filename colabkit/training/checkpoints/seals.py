"""Manage the checkpoints of one folder: read their seals, add a checkpoint, and remove old ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from colabkit.foundation import ColabkitError, file_changes, format_things, partials

Mode: TypeAlias = Literal["min", "max"]

FORMAT = 2
_SEAL = re.compile(r"checkpoint-(\d{8,})\.json")
_FILE = re.compile(r"checkpoint-(\d{8,})(-\d+)?\.pt")
_MADE_BY = re.compile(rb"colabkit checkpoint ([0-9a-f]{8}-\d+-\d+)")
# Number of bytes to search for the marker, which is at the start of the pickle and therefore of the file.
_HEAD_BYTES = 1024
# Kind of the partial files of all steps: a single one, so that the next save removes the files of a killed run.
_KIND = "checkpoint"
_DEAD = frozenset({errno.ENOTCONN, errno.ESTALE})
_UNREADABLE = "its seal cannot be read"
_in_hand: set[str] = set()
"""Files of this process that have their final name but no seal yet."""


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class SealedCheckpoint:
    """A checkpoint that has a seal.

    Attributes:
        seal: path of the seal.
        path: path of the file with the content.
        step: step after which the checkpoint was taken.
        size: size of the file in bytes, according to the seal.
        digest: SHA-256 of the file in hex, according to the seal.
        score: value that ranks the checkpoint, or None.
        metric: mode and name of the score, such as `"min loss"`; only scores of the same metric are comparable.
        trouble: reason why the seal cannot be used; empty for a valid seal.
        is_unread: whether reading the seal failed, so that it may be valid.
    """

    seal: Path
    path: Path
    step: int
    size: int = 0
    digest: str = ""
    score: float | None = None
    metric: str = ""
    trouble: str = ""
    is_unread: bool = False

    @property
    def rated(self) -> tuple[float | None, str]:
        """The score of the checkpoint, and the metric of the score."""
        return self.score, self.metric

    def check_size(self) -> None:
        """Raise `DamagedCheckpoint` unless the seal is usable and the file has the sealed size."""
        if self.trouble:
            raise DamagedCheckpoint(self.trouble)
        with readable(self.path):
            found = self.path.stat().st_size
        if found != self.size:
            raise DamagedCheckpoint(f"the file has {format_things(found, 'byte')} instead of {self.size:,}")

    def check(self) -> None:
        """Raise `DamagedCheckpoint` unless the seal is usable and the file has the sealed size and digest."""
        self.check_size()
        with readable(self.path):
            digest = file_changes.sha256(self.path)
        if digest != self.digest:
            raise DamagedCheckpoint("the file does not match its SHA-256")

    def is_whole(self) -> bool:
        """Return whether the seal is usable and the file has the sealed size."""
        try:
            self.check_size()
        except DamagedCheckpoint:
            return False
        return True

    def may_be_whole(self) -> bool:
        """Return whether the seal or the size of the file cannot be read, which a retry may change."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self.is_unread


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert an `OSError` while reading `path` to `DamagedCheckpoint`, unless the mount is disconnected."""
    try:
        yield
    except OSError as error:
        if error.errno in _DEAD:
            error.filename = str(path)
            raise
        raise DamagedCheckpoint(str(error.strerror or error)) from error


def steps_in(folder: Path) -> list[int]:
    """Return the steps of a folder's sealed checkpoints, newest first, without reading the files."""
    return sorted((int(match[1]) for match in map(_SEAL.fullmatch, _names(folder)) if match), reverse=True)


def sealed_in(folder: Path) -> list[SealedCheckpoint]:
    """Return a folder's sealed checkpoints, newest first, reading only the seals."""
    return _of_names(folder, _names(folder))


def _of_names(folder: Path, names: Iterable[str]) -> list[SealedCheckpoint]:
    seals = [(int(match[1]), folder / name) for name in names if (match := _SEAL.fullmatch(name))]
    found = (_read(seal, step) for step, seal in sorted(seals, reverse=True))
    return [sealed for sealed in found if sealed is not None]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _read(seal: Path, step: int) -> SealedCheckpoint | None:
    path = seal.with_suffix(".pt")
    try:
        values = json.loads(seal.read_bytes())
        if values["format"] != FORMAT:
            return SealedCheckpoint(seal, path, step, trouble=f"its format is {values['format']}, not {FORMAT}")
        name, score = str(values["file"]), values["score"]
        match = _FILE.fullmatch(name)
        if match is None or int(match[1]) != step or values["step"] != step:
            return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE)
        number, metric = None if score is None else float(score), str(values["judge"])
        return SealedCheckpoint(
            seal, seal.with_name(name), step, int(values["bytes"]), str(values["sha256"]), number, metric
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _DEAD:
            raise
        return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE, is_unread=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE)


def marker() -> str:
    """Return the text at the start of a checkpoint file that identifies colabkit and this process as its writer."""
    return f"colabkit checkpoint {partials.owner()}"


def put(
    folder: Path,
    step: int,
    rated: tuple[float | None, str],
    size: int,
    fill: Callable[[Path], tuple[int, str]],
    act: str,
) -> SealedCheckpoint:
    """Add a sealed checkpoint to a folder and return it; an earlier checkpoint of the same step is replaced atomically.

    Unsealed files of killed runs are removed from the folder.

    Args:
        folder: folder; created if missing.
        step: step after which the checkpoint was taken.
        rated: score of the checkpoint, or None, and the metric, which starts with `"min"` or `"max"`.
        size: approximate size in bytes.
        fill: function that writes the file at a path and returns its size in bytes and its SHA-256.
        act: verb and object for messages.
    """
    names = _names(folder)
    sealed = _of_names(folder, names)
    former = next((one for one in sealed if one.step == step), None)
    unread = {one.step for one in sealed if one.is_unread}
    _remove_leftovers(folder, set(names) - {one.path.name for one in sealed}, unread)
    seal = folder / f"checkpoint-{step:08d}.json"
    path, number = seal.with_suffix(".pt"), 2
    # An earlier checkpoint of this step stays until its seal is replaced.
    while os.path.lexists(path):
        path, number = seal.with_name(f"{seal.stem}-{number}.pt"), number + 1
    _in_hand.add(os.fspath(path))
    try:
        file_changes.check_space(act, size, path)
        with partials.Partial(path, _KIND) as partial:
            written, digest = fill(partial.path)
            partial.publish()
        try:
            values = {"format": FORMAT, "file": path.name, "step": step, "bytes": written, "sha256": digest}
            text = json.dumps({**values, "score": rated[0], "judge": rated[1]})
            partials.write_atomically(seal, text.encode(), durable=True, kind=_KIND)
        except BaseException:
            with contextlib.suppress(OSError):
                file_changes.remove(path)
            raise
    except OSError as error:
        if not isinstance(error, ColabkitError):
            # Name the checkpoint, since errors name the hidden partial file.
            error.filename = str(path)
        raise
    finally:
        _in_hand.discard(os.fspath(path))
    if former is not None and former.path != path:
        file_changes.remove(former.path)
    return SealedCheckpoint(seal, path, step, written, digest, *rated)


def prune(
    folder: Path, step: int, keep_last: int, metric: str, damaged: Collection[Path] = (), needed: Collection[int] = ()
) -> list[SealedCheckpoint]:
    """Remove a folder's old checkpoints and return the remaining ones, newest first.

    The newest `keep_last`, the best one by `metric` and those of the steps in `needed` stay. Nothing is removed while
    fewer than `keep_last` have the sealed size. Checkpoints that cannot be read at the moment stay, since the best one
    may be among them. Checkpoints after `step` stay but are not counted, since resuming skipped them.
    """
    found = sealed_in(folder)
    whole = [one for one in found if one.step <= step and one.path not in damaged and one.is_whole()]
    if len(whole) < keep_last:
        return found
    kept = {one.step for one in whole[:keep_last]} | set(needed)
    if best := best_of(whole, metric):
        kept.add(best.step)
    old = [one for one in found if one.step <= step and one.step not in kept]
    removed = [one for one in old if one in whole or not one.may_be_whole()]
    for one in removed:
        _remove(one)
    return [one for one in found if one not in removed]


def remove_step(folder: Path, step: int) -> None:
    """Remove a folder's checkpoint of this step, if there is one."""
    for one in sealed_in(folder):
        if one.step == step:
            _remove(one)


def _remove(sealed: SealedCheckpoint) -> None:
    file_changes.remove(sealed.seal)
    file_changes.remove(sealed.path)


def best_of(found: Iterable[SealedCheckpoint], metric: str) -> SealedCheckpoint | None:
    """Return the checkpoint with the best score by a metric (in a tie, the earliest), or None without scores."""
    sign = -1 if metric.startswith("max") else 1
    scored = [(sign * one.score, one.step, one) for one in found if one.score is not None and one.metric == metric]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None


def _remove_leftovers(folder: Path, names: Iterable[str], unread: Collection[int]) -> None:
    """Remove those of the unsealed files `names` that have colabkit's marker and that no process is writing.

    Files of the steps in `unread`, whose seals cannot be read at the moment, stay.
    """
    for name in names:
        path, match = folder / name, _FILE.fullmatch(name)
        is_candidate = match is not None and int(match[1]) not in unread
        if is_candidate and os.fspath(path) not in _in_hand and _is_abandoned(path):
            file_changes.remove(path)


def _is_abandoned(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            match = _MADE_BY.search(file.read(_HEAD_BYTES))
    except OSError:
        return False
    # A file without the marker belongs to another program.
    if match is None:
        return False
    maker = match[1].decode()
    return maker == partials.owner() or partials.has_ended(maker, path)


def is_marked(value: Any) -> bool:
    """Return whether a value read from a file is a marker."""
    return isinstance(value, str) and _MADE_BY.fullmatch(value.encode()) is not None

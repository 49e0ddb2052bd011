"""The checkpoints of one folder: their names and seals, how one is put there, and which of them stay."""

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

from colabkit.foundation import ColabkitError, file_changes, partials

Mode: TypeAlias = Literal["min", "max"]

FORMAT = 2
_SEAL = re.compile(r"checkpoint-(\d{8,})\.json")
_FILE = re.compile(r"checkpoint-(\d{8,})(-\d+)?\.pt")
_MADE_BY = re.compile(rb"colabkit checkpoint ([0-9a-f]{8}-\d+-\d+)")
_HEAD_BYTES = 1024  # the pickle is the first thing in a file of torch, and the marker the first in the pickle
_KIND = "checkpoint"  # partials of all steps are of one kind: what a killed run began, the next save removes
_DEAD = frozenset({errno.ENOTCONN, errno.ESTALE})
_UNREADABLE = "its seal cannot be read"
_in_hand: set[str] = set()
"""Files of this process that have their final name and wait for their seal."""


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was sealed; the text is the reason."""


@dataclass(frozen=True, slots=True)
class SealedCheckpoint:
    """A checkpoint that has a seal.

    Attributes:
        seal: the seal's path.
        path: of the file with the content.
        step: after which it was taken.
        size: bytes of the file, as sealed.
        digest: its SHA-256 in hex, as sealed.
        score: how good it is, None if that is not known.
        judge: by what, as `"min loss"`: scores of other judges say nothing about this one.
        trouble: why the seal says nothing of the above; empty if it does.
    """

    seal: Path
    path: Path
    step: int
    size: int = 0
    digest: str = ""
    score: float | None = None
    judge: str = ""
    trouble: str = ""

    @property
    def rated(self) -> tuple[float | None, str]:
        """Score and judge."""
        return self.score, self.judge

    def check_size(self) -> None:
        """Raise `DamagedCheckpoint` unless the file is there with the sealed size."""
        if self.trouble:
            raise DamagedCheckpoint(self.trouble)
        with readable(self.path):
            found = self.path.stat().st_size
        if found != self.size:
            raise DamagedCheckpoint(f"{found} of {self.size} bytes")

    def check(self) -> None:
        """Raise `DamagedCheckpoint` unless the file's bytes are the sealed ones."""
        self.check_size()
        with readable(self.path):
            digest = file_changes.sha256(self.path)
        if digest != self.digest:
            raise DamagedCheckpoint("its bytes are not the sealed ones")

    def is_whole(self) -> bool:
        """Return whether the file is there with the sealed size."""
        try:
            self.check_size()
        except DamagedCheckpoint:
            return False
        return True


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an `OSError` of reading `path` into `DamagedCheckpoint`; a mount that is dead is no damage."""
    try:
        yield
    except OSError as error:
        if error.errno in _DEAD:
            error.filename = str(path)
            raise
        raise DamagedCheckpoint(str(error.strerror or error)) from error


def steps_in(folder: Path) -> list[int]:
    """Return the steps of a folder's sealed checkpoints, newest first, without reading any."""
    return sorted((int(match[1]) for match in map(_SEAL.fullmatch, _names(folder)) if match), reverse=True)


def sealed_in(folder: Path) -> list[SealedCheckpoint]:
    """Return a folder's sealed checkpoints, newest first; of these only the seals are read."""
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
    """Return what a seal says, None if it is gone."""
    path = seal.with_suffix(".pt")
    try:
        values = json.loads(seal.read_bytes())
        if values["format"] != FORMAT:
            return SealedCheckpoint(seal, path, step, trouble=f"checkpoint format {values['format']}, not {FORMAT}")
        name, score = str(values["file"]), values["score"]
        match = _FILE.fullmatch(name)
        if match is None or int(match[1]) != step or values["step"] != step:
            return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE)
        number, judge = None if score is None else float(score), str(values["judge"])
        return SealedCheckpoint(
            seal, seal.with_name(name), step, int(values["bytes"]), str(values["sha256"]), number, judge
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _DEAD:
            raise
        return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE)
    except (ValueError, KeyError, TypeError, RecursionError):
        return SealedCheckpoint(seal, path, step, trouble=_UNREADABLE)


def marker() -> str:
    """Return the text at the beginning of a file that tells whose it is: colabkit's, and of this process."""
    return f"colabkit checkpoint {partials.owner()}"


def put(
    folder: Path,
    step: int,
    rated: tuple[float | None, str],
    size: int,
    fill: Callable[[Path], tuple[int, str]],
    act: str,
) -> SealedCheckpoint:
    """Put a checkpoint into a folder, sealed last, and return it; one of the same step is replaced by one rename.

    Also removes what killed runs left in the folder unsealed.

    Args:
        folder: made if missing.
        step: after which it was taken.
        rated: its score, or None, and the judge, whose name begins with `"min"` or `"max"`.
        size: bytes that it will take, about.
        fill: writes the file at a path and returns its bytes and their SHA-256.
        act: verb and object for messages.
    """
    names = _names(folder)
    sealed = _of_names(folder, names)
    former = next((one for one in sealed if one.step == step), None)
    _remove_leftovers(folder, set(names) - {one.path.name for one in sealed})
    seal = folder / f"checkpoint-{step:08d}.json"
    path, number = seal.with_suffix(".pt"), 2
    while os.path.lexists(path):  # the former one stays until the new seal takes its place
        path, number = seal.with_name(f"{seal.stem}-{number}.pt"), number + 1
    _in_hand.add(os.fspath(path))
    try:
        file_changes.check_space(act, size, path)
        with partials.Partial(path, _KIND) as partial:
            written, digest = fill(partial.path)
            partial.publish()
        try:
            values = {"format": FORMAT, "file": path.name, "step": step, "bytes": written, "sha256": digest}
            with partials.Partial(seal, _KIND) as partial:
                text = json.dumps({**values, "score": rated[0], "judge": rated[1]})
                file_changes.write_file(partial.path, text.encode(), durable=True)
                partial.publish(replace=True)
        except BaseException:
            with contextlib.suppress(OSError):
                file_changes.remove(path)
            raise
    except OSError as error:
        if not isinstance(error, ColabkitError):
            error.filename = str(path)  # writes name no file, others the hidden one
        raise
    finally:
        _in_hand.discard(os.fspath(path))
    if former is not None and former.path != path:
        file_changes.remove(former.path)
    return SealedCheckpoint(seal, path, step, written, digest, *rated)


def prune(
    folder: Path, step: int, keep_last: int, judge: str, damaged: Collection[Path] = (), needed: Collection[int] = ()
) -> list[SealedCheckpoint]:
    """Remove a folder's old checkpoints, and return those that are left, newest first.

    The newest `keep_last`, the best by `judge` and those of the steps `needed` stay. Nothing is removed while fewer
    than `keep_last` have the sealed size. Checkpoints after `step` do not count: they are damaged, and were skipped.
    """
    found = sealed_in(folder)
    whole = [one for one in found if one.step <= step and one.path not in damaged and one.is_whole()]
    if len(whole) < keep_last:
        return found
    kept = {one.step for one in whole[:keep_last]} | set(needed)
    if best := best_of(whole, judge):
        kept.add(best.step)
    for old in found:
        if old.step <= step and old.step not in kept:
            file_changes.remove(old.seal)
            file_changes.remove(old.path)
    return [one for one in found if one.step > step or one.step in kept]


def best_of(found: Iterable[SealedCheckpoint], judge: str) -> SealedCheckpoint | None:
    """Return the checkpoint with the best score by a judge, of equal ones the earliest; None if none has a score."""
    sign = -1 if judge.startswith("max") else 1
    scored = [(sign * one.score, one.step, one) for one in found if one.score is not None and one.judge == judge]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None


def _remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove what has a checkpoint's name and colabkit's marker, and whose maker has ended; `names` have no seal."""
    for name in names:
        path = folder / name
        if _FILE.fullmatch(name) and os.fspath(path) not in _in_hand and _is_abandoned(path):
            file_changes.remove(path)


def _is_abandoned(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            match = _MADE_BY.search(file.read(_HEAD_BYTES))
    except OSError:
        return False
    if match is None:
        return False  # another program's
    maker = match[1].decode()
    return maker == partials.owner() or partials.has_ended(maker, path)


def is_marked(value: Any) -> bool:
    """Return whether `value`, read from a file, is a marker."""
    return isinstance(value, str) and _MADE_BY.fullmatch(value.encode()) is not None

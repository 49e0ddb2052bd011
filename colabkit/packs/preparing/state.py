"""The state of a source, told by one look: enough to see most changes, cheap enough for a slow mount."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from colabkit.storage import STALLED_S, Retries, answer_of, concurrently

T = TypeVar("T")

_LOOKED_AT = 1000  # entries whose sizes and times are asked for; of those beyond, the names count


def state_of(name: str, *, is_far: bool) -> str | None:
    """Return what tells a source as it is from what it was, by one look; None where nothing is there."""
    if not os.path.isabs(name):
        return ""
    try:
        top = answer_of(lambda: _patiently(lambda: os.stat(name)), is_far)
        if not stat.S_ISDIR(top.st_mode):
            return json.dumps([top.st_size, top.st_mtime_ns])
        names = sorted(answer_of(lambda: _patiently(lambda: os.listdir(name)), is_far))
    except FileNotFoundError:
        return None
    paths = (os.path.join(name, entry) for entry in names[:_LOOKED_AT])
    looks = concurrently(
        lambda path: (path, *_patiently(lambda: _looked_at(path))),
        paths,
        "auto",
        stalled_s=STALLED_S if is_far else None,
    )
    return json.dumps([names, sorted(looks)])


def _looked_at(path: str) -> tuple[int, int, int]:
    """Return kind, size and time of a file, a folder or a link; a folder's size says nothing."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:  # it has just gone
        return 0, 0, 0
    return stat.S_IFMT(found.st_mode), 0 if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime_ns


def _patiently(ask: Callable[[], T]) -> T:
    """Return what `ask` returns, after more tries if the mount fails for a moment."""
    retries, tries = Retries(), 0
    while True:
        try:
            return ask()
        except OSError as error:
            tries += 1
            retries.pause(error, tries)

"""Faults 6 to 10: mounts that die, and sources that change or are listed incompletely while they are copied."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from far_mounts import FuseMount, has_fuse

from .board import NotRunHereError, Outcome, Result, fault, spread
from .copies import (
    FORMS,
    PATHS,
    SMALL,
    Content,
    Originals,
    checked_copy,
    consistent_with,
    faulty_mount,
    make_quick,
    new_folder,
    rewritten,
)
from .remotes import remote_cases
from .tools import COPIERS, Copier

_LARGER = bytes((byte + 1) % 256 for byte in range(256))
_FILES = ("class0/000.bin", "class1/004.bin", "class2/008.bin", "large.bin")
_DAY_NS = 86_400 * 10**9


@fault(6, "a mount dies and is mounted again", COPIERS)
def a_mount_that_dies(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if not has_fuse():
        raise NotRunHereError("FUSE is missing")
    make_quick()
    originals = Originals(folder / "originals")
    requests = [("read", 1), ("read", 2), ("read", 5), ("read", 9), ("open", 1), ("open", 4), ("list", 1), ("list", 3)]
    # Starting a mount takes a long time, so limit the number of cases.
    for kind, (operation, first) in spread(list(itertools.product(copier.kinds, requests)), min(limit, 40)):
        case = f"{kind}: the mount dies at {operation} {first}"
        plan = {"faults": [{"on": operation, "path": "*", "do": "die", "first": first}]}
        expected = originals.expected(kind)
        with new_folder(folder / "case") as made:
            with FuseMount(folder / "mount", originals.root, plan=plan) as mount:
                source = mount.point / FORMS[kind]
                result = checked_copy(case, copier, source, expected, made, repair=None)
                has_died = mount.has_ended
            if not has_died:
                continue
            if result.outcome == Outcome.REFUSED:
                with FuseMount(folder / "mount", originals.root):
                    next_result = checked_copy(f"{case}, then again", copier, source, expected, made)
                result = result if next_result.outcome == Outcome.SURVIVED else next_result
            yield result


def _of_files(
    copier: Copier,
    folder: Path,
    limit: int,
    faults: list[tuple[str, dict[str, Any]]],
    is_correct: Callable[[Content], bool] | None = None,
    kinds: tuple[str, ...] = ("folder", "table", "zip", "tar", "tar.gz"),
    **plan: Any,
) -> Iterator[Result]:
    """Copy each kind of source with each fault; archives only with faults that affect every path."""
    cases = [
        (kind, case, one)
        for kind, (case, one) in itertools.product(kinds, faults)
        if kind in copier.kinds and (kind in ("folder", "table") or one["path"] == "*")
    ]
    with faulty_mount(copier, folder) as faulty:
        for kind, case, one in spread(cases, limit):
            for path in faulty.originals.root.rglob("*") if "mtime_grain_s" in plan else ():
                # With coarse timestamps, a change is hidden only if it falls into the same tick as the previous one.
                os.utime(path)
            own = {"path": PATHS[kind]} if one["path"] == "*" and one["on"] == "read" else {}
            yield from faulty.copy(case, kind, {"faults": [{**one, **own}], **plan}, is_correct=is_correct)


@fault(7, "a file vanishes after it was listed", COPIERS)
def a_file_that_vanishes(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    faults = [
        (f"{path} vanishes at {operation} {first}", {"on": operation, "path": path, "do": "vanish", "first": first})
        for path in [*(f"/tree/{name}" for name in SMALL), "/tree/class1", "*"]
        for operation in ("open", "stat", "read", "list")
        for first in range(1, 6)
        if path != "*" or operation != "stat" or first > 2
    ]
    yield from _of_files(copier, folder, limit, faults)


def _changes(deed: str) -> list[tuple[str, dict[str, Any]]]:
    """Return faults that change a file when it is read, opened or examined by a stat call."""
    return [
        (
            f"{name} changes at {operation} {first}{'' if count else ' and all later ones'}",
            {"on": operation, "path": f"/tree/{name}", "do": deed, "first": first, "count": count},
        )
        for name, (operation, firsts), count in itertools.product(
            _FILES, (("read", (1, 2, 3)), ("open", (1, 2)), ("stat", (1, 2, 3, 4))), (1, None)
        )
        for first in firsts
    ]


@fault(8, "files grow while they are copied", COPIERS)
def a_file_that_grows(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    files = Originals(folder / "same").files
    is_consistent = consistent_with(files, [lambda data, times: rewritten(data, times) + b"+" * times])
    archives = [
        (
            f"the archive changes at read {first}",
            {"on": "read", "path": "*", "do": "change", "first": first, "count": 1},
        )
        for first in range(1, 9)
    ]
    yield from _of_files(copier, folder, limit, _changes("change") + archives, is_consistent)
    yield from remote_cases(8, copier, folder, -(-limit // 4))


@fault(9, "files are rewritten with the same size and time", COPIERS)
def a_rewrite_that_is_hard_to_notice(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    is_consistent = consistent_with(Originals(folder / "same").files, [rewritten])
    for grain_s in (0.0, 1.0, 2.0):
        during = [(f"{case}, clock of {grain_s:g} s", one) for case, one in _changes("rewrite")]
        with new_folder(folder / f"{grain_s:g}") as made:
            # Limit the cases, each of which takes seconds because colabkit waits until a tick has passed.
            most = -(-limit // 10)
            yield from _of_files(copier, made, most, during, is_consistent, ("folder", "table"), mtime_grain_s=grain_s)
    yield from _rewritten_before_an_update(copier, folder, -(-limit // 2))
    yield from remote_cases(9, copier, folder, -(-limit // 4))


def _rewritten_before_an_update(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    """Copy, rewrite a file with the same size and time, and update the copy."""
    ages_ns = {"an hour ago": -_DAY_NS // 24, "in a day": _DAY_NS, "in 20 years": 20 * 365 * _DAY_NS}
    ways = ("in place", "by a rename")
    cases = [case for case in itertools.product(copier.kinds, ages_ns, ways, _FILES) if case[0] != "tar.gz"]
    for kind, age, way, name in spread(cases, limit):
        with new_folder(folder / "case") as made:
            originals = Originals(made / "originals")
            source = originals.root / FORMS[kind]
            path = originals.root / "tree" / name if kind in ("folder", "table") else source
            time_ns = time.time_ns() + ages_ns[age]
            os.utime(path, ns=(time_ns, time_ns))
            target = made / "copy"
            copier.copy(source, target)
            data = path.read_bytes()
            at = data.index(originals.files[name][:64])
            new = data[:at] + originals.files[name].translate(_LARGER) + data[at + len(originals.files[name]) :]
            if kind == "zip":
                # The change also affects the checksum of the member.
                checks = [
                    zlib.crc32(one).to_bytes(4, "little")
                    for one in (originals.files[name], new[at:][: len(originals.files[name])])
                ]
                new = new.replace(*checks)
            _write(path, new, is_renamed=way != "in place", time_ns=time_ns)
            expected = {
                place: one.translate(_LARGER) if place.endswith(name) else one
                for place, one in originals.expected(kind).items()
            }
            updating = replace(copier, copy=copier.update)
            yield checked_copy(f"{kind}: {name} rewritten {way}, dated {age}", updating, source, expected, made)


def _write(path: Path, data: bytes, *, is_renamed: bool, time_ns: int) -> None:
    """Replace the bytes of a file, and restore its modification time."""
    if is_renamed:
        new = path.with_name("new")
        new.write_bytes(data)
        os.replace(new, path)
    else:
        path.write_bytes(data)
    os.utime(path, ns=(time_ns, time_ns))


@fault(10, "listings fail, or leave names out", COPIERS)
def a_flaky_listing(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    hidden = [*(f"/tree/{name}" for name in SMALL), "/tree/class0", "/tree/class1/*", "/tree/class*"]
    faults = [
        (
            f"{path} is left out of listing {first}",
            {"on": "list", "path": path, "do": "hide", "first": first, "count": 1},
        )
        for path, first in itertools.product(hidden, (1, 2, 3))
    ]
    faults += [
        (
            f"listing {first} of {path} fails with {errno}, {count or 'unlimited'} times",
            {"on": "list", "path": path, "do": "error", "first": first, "count": count, "errno": errno},
        )
        for path, first, count, errno in itertools.product(
            ("/tree", "/tree/class0", "/tree/class2"), (1, 2), (1, 2, None), ("EIO", "ETIMEDOUT", "EACCES")
        )
    ]
    yield from _of_files(copier, folder, limit, faults, kinds=("folder",))

"""Faults 1 to 5: reads of mounts, buckets and web servers that fail, end early or never return."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .board import Result, fault, spread
from .copies import BIG, PATHS, SMALL, faulty_mount
from .remotes import remote_cases
from .tools import COPIERS, Copier

_ERRORS = ("EIO", "ETIMEDOUT", "ESTALE", "ENOTCONN", "EAGAIN")
_FINAL_ERRORS = ("EIO", "EACCES", "EBADMSG", "ENXIO", "EREMOTEIO")
_BLOCK = 4 << 20
_STEP = 1 << 20

Plans = Iterator[tuple[str, dict[str, Any]]]


def _copies(
    copier: Copier,
    folder: Path,
    limit: int,
    plans: Callable[[str], Plans],
    sizes: dict[str, int] = SMALL,
    **options: Any,
) -> Iterator[Result]:
    cases = [(kind, case, plan) for kind in copier.kinds for case, plan in plans(kind)]
    with faulty_mount(copier, folder, sizes) as faulty:
        for kind, case, plan in spread(cases, limit):
            yield from faulty.copy(case, kind, {"faults": [plan]}, **options)


@fault(1, "reads fail for a while", COPIERS)
def a_burst_of_errors(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    def plans(kind: str) -> Plans:
        for first, count, errno in itertools.product(range(1, 13), (1, 2, 3), _ERRORS):
            plan = {"on": "read", "path": PATHS[kind], "do": "error", "first": first, "count": count, "errno": errno}
            yield f"{errno} at reads {first} to {first + count - 1}", plan
        for operation, first in itertools.product(("open", "list", "stat"), range(1, 8)):
            yield (
                f"EIO at {operation} {first}",
                {"on": operation, "path": "*", "do": "error", "first": first, "count": 1},
            )

    yield from _copies(copier, folder, limit, plans)
    yield from remote_cases(1, copier, folder, -(-limit // 4))


@fault(2, "one file cannot be read at all", COPIERS)
def a_permanent_error(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    def plans(kind: str) -> Plans:
        paths = [f"/tree/{path}" for path in SMALL] if kind in ("folder", "table") else [f"/tree.{kind}"]
        offsets = (0,) if kind in ("folder", "table") else range(0, 1_500_000, 250_000)
        for path, errno, offset, operation in itertools.product(paths, _FINAL_ERRORS, offsets, ("read", "open")):
            if offset == 0 or operation == "read":
                plan = {"on": operation, "path": path, "do": "error", "errno": errno, "offset_from": offset}
                yield f"{errno} at every {operation} of {path} from byte {offset}", plan

    yield from _copies(copier, folder, limit, plans)
    yield from remote_cases(2, copier, folder, -(-limit // 4))


@fault(3, "reads fail in the middle of a big file", COPIERS)
def an_error_in_a_big_file(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    def plans(kind: str) -> Plans:
        path = "/tree/big.bin" if kind in ("folder", "table") else f"/tree.{kind}"
        for offset, count, errno in itertools.product(range(1, 2 * _BLOCK, _STEP), (1, 3, None), _ERRORS[:2]):
            plan = {"on": "read", "path": path, "do": "error", "offset_from": offset, "errno": errno, "count": count}
            yield f"{errno} from byte {offset}, {count or 'unlimited'} times", plan

    yield from _copies(copier, folder, limit, plans, BIG)
    yield from remote_cases(3, copier, folder, -(-limit // 4))


@fault(4, "files end too early, and reads return too little", COPIERS)
def an_early_end(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    def plans(kind: str) -> Plans:
        for deed, first, count in itertools.product(("end", "short"), range(1, 13), (1, 2, None)):
            plan = {"on": "read", "path": PATHS[kind], "do": deed, "first": first, "count": count}
            yield f"{deed} at read {first}, {count or 'unlimited'} times", plan
        for path in SMALL if kind in ("folder", "table") else ():
            yield f"{path} is empty when it is read", {"on": "read", "path": f"/tree/{path}", "do": "end"}

    yield from _copies(copier, folder, limit, plans)
    yield from remote_cases(4, copier, folder, -(-limit // 4))


@fault(5, "reads never return", COPIERS)
def a_hanging_read(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    def plans(kind: str) -> Plans:
        for operation, first, count in itertools.product(("read", "open", "list"), (1, 2, 4, 7, 10), (1, None)):
            path = "*" if operation == "list" else PATHS[kind]
            plan = {"on": operation, "path": path, "do": "hang", "first": first, "count": count}
            yield f"{operation} {first} hangs {'once' if count else 'forever'}", plan

    # The slowest colabkit case tries twice, with a limit of 0.3 s; a plain tool that hangs is not worth waiting for.
    yield from _copies(copier, folder, limit, plans, seconds=10.0 if "table" in copier.kinds else 3.0)
    yield from remote_cases(5, copier, folder, -(-limit // 4))

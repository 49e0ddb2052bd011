"""The same files in every form that `stage()` reads, and checks of copies that were made while faults occurred."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from far_mounts import FuseMount, has_fuse
from trees import leftovers

from colabkit.storage.fetching import transfer
from colabkit.storage.sources import bucket, concurrency, engine, folder, reads
from colabkit.storage.sources.items import STAGE_SEAL

from .board import NotRunHereError, Outcome, Result, attempt
from .tools import Copier

FORMS = {"folder": "tree", "zip": "tree.zip", "tar": "tree.tar", "tar.gz": "tree.tar.gz", "table": "table.csv"}
"""Name of the source of each kind."""

PATHS = {kind: "/tree/*" if kind in ("folder", "table") else f"/{name}" for kind, name in FORMS.items()}
"""Glob of the files whose bytes are read, for each kind of source."""

SMALL = {f"class{number % 3}/{number:03}.bin": 3000 + 777 * number for number in range(9)} | {"large.bin": 1_500_000}
"""Sizes of the files by path."""

BIG = {"big.bin": (8 << 20) + 4321, "one/small.bin": 1000}
"""Sizes of files of which one is read in blocks."""

Content = Mapping[str, bytes]

# Each change adds 1 to every byte, so the bytes repeat after this number of changes.
_MOST_CHANGES = 256


class Originals:
    """The same files as a folder, as archives and as a table of paths, in the folder `root`.

    Args:
        root: folder for the sources.
        sizes: size of each file by path; the file `zeros.bin` contains only zeros and takes no space in the folder.
        kinds: kinds of the sources.
    """

    def __init__(self, root: Path, sizes: Mapping[str, int] = SMALL, kinds: Collection[str] = tuple(FORMS)) -> None:
        generator = random.Random(5)
        self.root = root
        self.files = {
            path: bytes(size) if path == "zeros.bin" else generator.randbytes(size) for path, size in sizes.items()
        }
        for path, data in self.files.items():
            (root / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            with (root / "tree" / path).open("wb") as file:
                file.truncate(len(data))
                file.write(b"" if path == "zeros.bin" else data)
        for kind in kinds:
            self._write(kind)

    def _write(self, kind: str) -> None:
        root = self.root
        if kind == "zip":
            with zipfile.ZipFile(root / FORMS["zip"], "w", zipfile.ZIP_STORED) as zipped:
                for path in self.files:
                    zipped.write(root / "tree" / path, path)
        elif kind in ("tar", "tar.gz"):
            with tarfile.open(root / FORMS[kind], "w:gz" if kind == "tar.gz" else "w") as tarred:
                for path in self.files:
                    tarred.add(root / "tree" / path, path)
        elif kind == "table":
            (root / FORMS["table"]).write_text(
                "".join(f"{line}\n" for line in ("path", *(f"tree/{p}" for p in self.files)))
            )

    def expected(self, kind: str) -> Content:
        """Return the content of a correct copy."""
        if kind != "table":
            return self.files
        table = {FORMS["table"]: (self.root / FORMS["table"]).read_bytes()}
        return table | {f"tree/{path}": data for path, data in self.files.items()}


def content(target: Path) -> Content | None:
    """Return the bytes of all files of a copy except the seal; None if nothing exists at its path."""
    if not os.path.lexists(target):
        return None
    return {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file() and path.name != STAGE_SEAL
    }


def make_quick(stalled_s: float = 0.3) -> None:
    """Shorten the pauses between attempts and the time limits of reads in this process, which runs one row."""
    reads._BACK_OFF_S = transfer._BACK_OFF_S = 0.001
    for module in (engine, folder, concurrency, bucket):
        module.STALLED_S = stalled_s  # type: ignore[attr-defined]
    concurrency._GRACE_S = engine._CLOSE_S = reads._SHARED_OPEN_S = 0.1
    concurrency._TICK_S = 0.02
    bucket._LISTING_S = 1.0


def checked_copy(
    case: str,
    copier: Copier,
    source: Path | str,
    expected: Content,
    folder: Path,
    *,
    is_correct: Callable[[Content], bool] | None = None,
    repair: Callable[[], object] | None = lambda: None,
    **options: Any,
) -> Result:
    """Copy a source while a fault occurs, and score the outcome.

    A copy that was made must have the expected content, except for files that the report lists. After a refusal, the
    copy is absent or complete. Then the fault is repaired, and the same call must succeed and leave no unfinished
    files, not even those kept to resume the work.

    Args:
        case: description of the case, as in `attempt()`.
        copier: the tool.
        source: path or address of the source.
        expected: content of a correct copy.
        folder: folder for the copy; it should be empty.
        is_correct: returns whether another content is correct too, such as that of a changed source.
        repair: ends the fault; None if the same call cannot be repeated in the process of the case.
        options: arguments of `attempt()`.
    """
    target = folder / "copy"
    omitted: set[str] = set()

    def check() -> None:
        found = content(target)
        wanted = {path: data for path, data in expected.items() if path not in omitted}
        is_good = found == wanted or (found is not None and is_correct is not None and is_correct(found))
        assert is_good, f"the copy is incomplete or differs: {_difference(found, wanted)}"

    def make() -> bool:
        report = copier.copy(source, target)
        omitted.update(path for path, _ in getattr(report, "skipped", ()))
        return not omitted

    return checked_work(case, make, target, check, repair, refusals=copier.refusals, **options)


def checked_work(
    case: str,
    make: Callable[[], bool | None],
    target: Path,
    check: Callable[[], object],
    repair: Callable[[], object] | None = lambda: None,
    **options: Any,
) -> Result:
    """Make a file or folder while a fault occurs, and score the outcome, as described in `checked_copy`.

    Args:
        case: description of the case, as in `attempt()`.
        make: creates the target; returns false if the report lists what it left out.
        target: the file or folder.
        check: raises `AssertionError` if the existing target is wrong or incomplete.
        repair: ends the fault; None if the same call cannot be repeated in the process of the case.
        options: arguments of `attempt()`.
    """

    def work() -> Outcome:
        is_complete = make()
        check()
        return Outcome.DEGRADED if is_complete is False else Outcome.SURVIVED

    def after() -> None:
        is_there = os.path.lexists(target)
        if is_there:
            check()
        if repair is not None:
            repair()
            if not is_there:
                work()
            left = leftovers(target.parent) + leftovers(Path(os.environ["COLABKIT_LOCAL"]))
            assert not left, f"unfinished files are left: {left}"

    return attempt(case, work, after, **options)


def consistent_with(originals: Content, versions: list[Callable[[bytes, int], bytes]]) -> Callable[[Content], bool]:
    """Return a function that checks whether each file of a copy has the bytes of a single version."""

    def is_of_one_version(data: bytes, original: bytes) -> bool:
        return any(data == version(original, number) for version in versions for number in range(_MOST_CHANGES))

    def is_consistent(found: Content) -> bool:
        named = {path.removeprefix("tree/"): data for path, data in found.items() if path != FORMS["table"]}
        return named.keys() == originals.keys() and all(
            is_of_one_version(data, originals[path]) for path, data in named.items()
        )

    return is_consistent


def rewritten(data: bytes, times: int) -> bytes:
    """Return the bytes of a file after planned rewrites, as `planned_faults` makes them."""
    return data.translate(bytes((byte + times) % 256 for byte in range(256)))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _difference(found: Content | None, expected: Content) -> str:
    if found is None:
        return "it is absent"
    missing, added = expected.keys() - found.keys(), found.keys() - expected.keys()
    other = [path for path in found.keys() & expected.keys() if found[path] != expected[path]]
    return f"{len(missing)} files are missing, {len(added)} are unexpected, {len(other)} differ: {other[:3]}"


class FaultyMount:
    """Sources behind a mount whose faults are planned for each case."""

    def __init__(self, mount: FuseMount, originals: Originals, copier: Copier, folder: Path) -> None:
        self.mount = mount
        self.originals = originals
        self.copier = copier
        self.folder = folder

    def copy(self, case: str, kind: str, plan: dict[str, Any], **options: Any) -> Iterator[Result]:
        """Copy a source of one kind with planned faults; yield no result if the copy succeeds without any fault."""
        self.mount.replan(plan)
        before = self.mount.faults
        with new_folder(self.folder / "case") as folder:
            result = checked_copy(
                f"{kind}: {case}",
                self.copier,
                self.mount.point / FORMS[kind],
                self.originals.expected(kind),
                folder,
                repair=self.mount.replan,
                release=self.mount.replan,
                **options,
            )
        if result.outcome != Outcome.SURVIVED or self.mount.faults > before:
            yield result


@contextmanager
def faulty_mount(copier: Copier, folder: Path, sizes: Mapping[str, int] = SMALL) -> Iterator[FaultyMount]:
    """Yield a mount of new sources, with short time limits."""
    if not has_fuse():
        raise NotRunHereError("FUSE is missing")
    make_quick()
    originals = Originals(folder / "originals", sizes)
    with FuseMount(folder / "mount", originals.root) as mount:
        yield FaultyMount(mount, originals, copier, folder)

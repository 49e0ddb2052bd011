"""Faults 11 to 15: full disks, little memory, and targets that cannot be written."""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import operator
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trees import leftovers

import colabkit
from colabkit.foundation import file_changes

from .board import COLABKIT, NotRunHereError, Result, attempt, fault, spread
from .copies import FORMS, Originals, checked_copy, content, make_quick, new_folder
from .packers import PACKERS, Packer, checked_pack, expected_packs, write_images
from .tools import COPIERS, Copier

_ROOMY = 64 << 20
_STEP = 64 << 10
_PAGE = 4096
_NOBODY = 65_534

Hook = Callable[[str, Path], None]


def _run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(point: Path, size: int, kind: str = "tmpfs") -> Iterator[Callable[[], None]]:
    """Mount an empty disk of the given size, tmpfs or ext4, and yield a function that enlarges it or frees space."""
    if os.geteuid() != 0:
        raise NotRunHereError("only root can mount file systems")
    point.mkdir(exist_ok=True)
    image = point.with_name("image")
    try:
        if kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", point)
        else:
            with image.open("wb") as file:
                file.truncate(size)
            _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal,^resize_inode", "-m", 0, "-N", 16, "-b", 1024, image)
            _run("mount", "-o", "loop", image, point)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotRunHereError(f"a small {kind} cannot be mounted: {error}") from error

    def enlarge() -> None:
        (point / "filler").unlink(missing_ok=True)
        if kind == "tmpfs":
            _run("mount", "-o", f"remount,size={_ROOMY}", point)

    try:
        yield enlarge
    finally:
        _run("umount", "-l", point)
        image.unlink(missing_ok=True)


def without_check(make: Callable[..., object]) -> Callable[..., object]:
    """Return `make` with an overestimated free space, so that colabkit's check before writing passes."""

    def work(*arguments: Any) -> object:
        file_changes.free_bytes = lambda path: 1 << 40
        return make(*arguments)

    return work


def with_hook(make: Callable[..., object], hook: Hook) -> Callable[..., object]:
    """Return `make`, with a hook before each file change of the first call."""
    hooks = [hook]

    def work(*arguments: Any) -> object:
        if hooks:
            file_changes.hook = hooks.pop()
        return make(*arguments)

    return work


def failing(number: int, code: int, lasting: bool) -> Hook:
    """Return a hook that fails at one file change and, if `lasting`, at all later ones except removals and renames."""
    changes = itertools.count(1)

    def fail(operation: str, path: Path) -> None:
        at = next(changes)
        if at == number or (lasting and at > number and operation not in ("remove", "rename")):
            raise OSError(code, os.strerror(code), str(path))

    return fail


def no_hook() -> None:
    file_changes.hook = None


def filling(number: int, filler: Path) -> Hook:
    """Return a hook that fills the disk, like another process, at one file change."""
    changes = itertools.count(1)

    def fill(operation: str, path: Path) -> None:
        if next(changes) == number:
            fill_up(filler)

    return fill


def fill_up(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(_PAGE))


@fault(11, "the disk fills up while files are copied", COPIERS)
def a_full_disk(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    make_quick()
    originals = Originals(folder / "originals")
    is_own = copier.refusals is COPIERS[COLABKIT].refusals
    sizes = range(_STEP, 3_600_000, _STEP)
    shares = 3 if is_own else 1
    unchecked = replace(copier, copy=without_check(copier.copy))
    for kind, size, one in spread(
        [*itertools.product(copier.kinds, sizes, [copier, unchecked] if is_own else [copier])], limit // shares
    ):
        with small_disk(folder / "disk", size) as enlarge:
            case = f"{kind}: a tmpfs of {size >> 10} KiB{', not checked before' if one is unchecked else ''}"
            source, expected = originals.root / FORMS[kind], originals.expected(kind)
            yield checked_copy(case, one, source, expected, folder / "disk", repair=enlarge)
    if not is_own:
        return
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
    for kind, number, code, lasting in spread(
        [*itertools.product(copier.kinds, range(1, 45), codes, (False, True))], limit // shares
    ):
        with new_folder(folder / "case") as made:
            hooked = replace(copier, copy=with_hook(copier.copy, failing(number, code, lasting)))
            case = f"{kind}: {errno.errorcode[code]} at file change {number}{' and all later ones' if lasting else ''}"
            source, expected = originals.root / FORMS[kind], originals.expected(kind)
            yield checked_copy(case, hooked, source, expected, made, repair=no_hook)
    yield from _full_during_an_update(copier, originals, folder, limit // shares)


def _full_during_an_update(copier: Copier, originals: Originals, folder: Path, limit: int) -> Iterator[Result]:
    """Update a copy while another process fills the disk; the old or the new copy remains."""
    (originals.root / "tree" / "class0" / "000.bin").write_bytes(b"old")
    (folder / "old").mkdir()
    for kind, number in spread([*itertools.product(("folder", "table"), range(1, 40))], limit):
        with small_disk(folder / "disk", 8_000_000) as enlarge:
            source = originals.root / FORMS[kind]
            (originals.root / "tree" / "class0" / "000.bin").write_bytes(b"old")
            copier.copy(source, folder / "disk" / "copy")
            old = content(folder / "disk" / "copy")
            (originals.root / "tree" / "class0" / "000.bin").write_bytes(originals.files["class0/000.bin"])
            hook = filling(number, folder / "disk" / "filler")
            updating = replace(copier, copy=with_hook(copier.update, hook))
            case = f"{kind}: the disk is filled at file change {number} of an update"

            def repair(enlarge: Callable[[], None] = enlarge) -> None:
                no_hook()
                enlarge()
                # Remove the leftovers that the failed run could not remove.
                copier.update(source, folder / "disk" / "copy")  # noqa: B023 - called before the next case

            is_old = partial(operator.eq, old)
            expected = originals.expected(kind)
            yield checked_copy(case, updating, source, expected, folder / "disk", is_correct=is_old, repair=repair)


@fault(12, "a tmpfs is full when a memory map is written", PACKERS)
def a_full_tmpfs(packer: Packer, folder: Path, limit: int) -> Iterator[Result]:
    source = write_images(folder / "images")
    expected = expected_packs(packer, source, folder / "expected")
    is_own = packer.refusals is PACKERS[COLABKIT].refusals
    sizes = range(_PAGE, 160_000, _PAGE)
    for variant, size in spread([*itertools.product(packer.variants, sizes)], limit // 2 if is_own else limit):
        with small_disk(folder / "disk", size) as enlarge:
            unchecked = replace(packer, pack=without_check(packer.pack)) if is_own else packer
            case = f"{variant}: a tmpfs of {size >> 10} KiB"
            yield checked_pack(case, unchecked, source, variant, expected[variant], folder / "disk", enlarge)
    for variant, number in spread([*itertools.product(packer.variants, range(1, 40))], limit // 2 if is_own else 0):
        with small_disk(folder / "disk", 4_000_000) as enlarge:
            hook = filling(number, folder / "disk" / "filler")
            hooked = replace(packer, pack=with_hook(packer.pack, hook))
            case = f"{variant}: another process fills the tmpfs at file change {number}"

            def repair(enlarge: Callable[[], None] = enlarge) -> None:
                no_hook()
                enlarge()

            yield checked_pack(case, hooked, source, variant, expected[variant], folder / "disk", repair)


@fault(14, "the disk fills up while a pack is written", PACKERS)
def a_full_disk_during_packing(packer: Packer, folder: Path, limit: int) -> Iterator[Result]:
    source = write_images(folder / "images")
    expected = expected_packs(packer, source, folder / "expected")
    is_own = packer.refusals is PACKERS[COLABKIT].refusals
    disks = spread([*itertools.product(packer.variants, range(64, 264, 2))], limit // 4 if is_own else limit)
    for variant, size in disks:
        with small_disk(folder / "disk", size << 10, "ext4"):
            unchecked = replace(packer, pack=without_check(packer.pack)) if is_own else packer
            case = f"{variant}: an ext4 disk of {size} KiB"
            yield checked_pack(case, unchecked, source, variant, expected[variant], folder / "disk", None)
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
    cases = [*itertools.product(packer.variants, range(1, 60), codes, (False, True))] if is_own else []
    for variant, number, code, lasting in spread(cases, limit - len(disks)):
        with new_folder(folder / "case") as made:
            hooked = replace(packer, pack=with_hook(packer.pack, failing(number, code, lasting)))
            case = f"{variant}: {errno.errorcode[code]} at file change {number}{' and later ones' if lasting else ''}"
            yield checked_pack(case, hooked, source, variant, expected[variant], made, no_hook)


@contextlib.contextmanager
def _memory_group(limit: int) -> Iterator[Callable[[bool], None]]:
    """Create a cgroup with a memory limit, and yield a function that moves the calling process into it or out."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    first = {line.split(":")[1]: line.split(":")[2] for line in lines}
    version, root = (1, Path("/sys/fs/cgroup/memory")) if "memory" in first else (2, Path("/sys/fs/cgroup"))
    parent = root / first.get("memory", first.get("", "/")).lstrip("/")
    group = parent / f"faults-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise NotRunHereError(f"memory cgroups cannot be created: {error}") from error
    try:
        yield lambda is_inside: (group if is_inside else parent).joinpath("cgroup.procs").write_text(str(os.getpid()))  # type: ignore[func-returns-value]
    finally:
        group.rmdir()


@fault(13, "a cgroup allows less memory than is free", COPIERS)
def a_memory_limit(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    is_own = copier.refusals is COPIERS[COLABKIT].refusals
    # Files on a tmpfs take memory; files on a disk do not.
    disk = Path(tempfile.mkdtemp(prefix="fault13-", dir="/var/tmp"))
    os.environ["COLABKIT_LOCAL"] = str(disk)
    targets = ["path", "auto", "tmpfs", "disk"] if is_own else ["path"]
    kinds = [kind for kind in copier.kinds if kind != "tar.gz"]
    # Python itself and the copying of large blocks need about 100 MiB.
    cases = itertools.product(kinds, targets, (192, 256), (60, 120, 180, 240, 400))
    try:
        # Limit the cases, each of which writes hundreds of MiB.
        for kind, to, most, size in spread([*cases], min(limit // 2, 40)):
            with new_folder(folder / "case") as made, _memory_group(most << 20) as move:
                yield _copied_in_group(copier, kind, to, most, size, made, move)
    finally:
        shutil.rmtree(disk)


def _copied_in_group(
    copier: Copier, kind: str, to: str, most: int, size: int, folder: Path, move: Callable[[bool], None]
) -> Result:
    originals = Originals(folder / "originals", {"one.bin": 3000, "zeros.bin": size << 20}, [kind])
    found: list[Path] = []

    def work() -> None:
        move(True)
        try:
            if to == "path":
                copier.copy(originals.root / FORMS[kind], folder / "copy")
                found.append(folder / "copy")
            else:
                found.append(colabkit.stage(originals.root / FORMS[kind], to, progress=False).path)
        finally:
            move(False)
        assert content(found[0]) == originals.expected(kind), "the copy differs"

    def after() -> None:
        if found:
            shutil.rmtree(found[0])
        else:
            assert not (folder / "copy").exists(), "an incomplete copy is at the final path"
        assert not leftovers(folder), "unfinished files are left"

    return attempt(f"{kind} of {size} MiB to={to!r}, limit {most} MiB", work, after, refusals=copier.refusals)


@fault(15, "the target cannot be written", COPIERS)
def a_target_that_is_refused(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if os.geteuid() != 0:
        raise NotRunHereError("only root can mount file systems")
    originals = Originals(folder / "originals")
    # The other user needs access to the folder. Import modules first, because that user may be unable to read Python's
    # library.
    folder.parent.chmod(0o755)
    codecs.lookup("utf-8-sig")
    cases = [*itertools.product(copier.kinds, _OBSTACLES, (False, True))]
    for kind, obstacle, is_user in spread(cases, limit):
        with new_folder(folder / "case") as made, small_disk(made / "disk", _ROOMY):
            target = made / "disk" / "deep" / "copy"
            _OBSTACLES[obstacle](made / "disk")
            before = _tree(made)

            def copy(source: Path, target: Path, is_user: bool = is_user) -> None:
                if is_user:
                    os.setgroups([])
                    os.setgid(_NOBODY)
                    os.setuid(_NOBODY)
                copier.copy(source, target)

            def check(made: Path = made, before: object = before) -> None:
                if _tree(made) != before:
                    assert content(target) == originals.expected(kind), "the target was changed"  # noqa: B023

            case = f"{kind} as {'another user' if is_user else 'root'}: {obstacle}"
            make = partial(copy, originals.root / FORMS[kind], target)
            yield attempt(case, make, check, refusals=copier.refusals)


def _tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*") if path.is_file())


def _is_file(disk: Path) -> None:
    (disk / "deep").write_bytes(b"a file")


def _is_other_data(disk: Path) -> None:
    (disk / "deep" / "copy").mkdir(parents=True)
    (disk / "deep" / "copy" / "mine").write_bytes(b"not to be lost")


def _is_other_file(disk: Path) -> None:
    (disk / "deep").mkdir()
    (disk / "deep" / "copy").write_bytes(b"not to be lost")


def _is_dangling(disk: Path) -> None:
    (disk / "deep").mkdir()
    (disk / "deep" / "copy").symlink_to(disk / "nowhere")


def _is_read_only(disk: Path) -> None:
    (disk / "deep").mkdir()
    _run("mount", "-o", "remount,ro", disk)


def _belongs_to_root(disk: Path) -> None:
    (disk / "deep").mkdir()
    disk.chmod(0o755)


_OBSTACLES: dict[str, Callable[[Path], None]] = {
    "a file is in the way": _is_file,
    "other data is there": _is_other_data,
    "another file is there": _is_other_file,
    "a link to nowhere is there": _is_dangling,
    "the disk is read-only": _is_read_only,
    "the folder belongs to root": _belongs_to_root,
}

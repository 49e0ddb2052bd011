"""Faults 16 to 20: packs that change under a reader, and work that is killed or interrupted at any file change."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trees import leftovers

from colabkit.foundation import file_changes

from .board import COLABKIT, Result, attempt, fault, spread
from .copies import FORMS, Content, Originals, checked_copy, content, make_quick, new_folder
from .packers import PACKERS, Packer, expected_packs, write_images
from .tools import COPIERS, Copier

_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "shutil.copyfile", "os.link", "os.utime"}
# System calls at which programs are killed; each set is counted separately in each process.
_CALLS = ("openat", "mkdir,mkdirat", "write,copy_file_range", "rename,renameat,renameat2", "utimensat")
_WRITING = os.O_WRONLY | os.O_RDWR


class Changes:
    """Counts the file changes of this process, and kills or interrupts it at one of them.

    colabkit calls a hook before each change. In plain Python code, audit events show when files are created or renamed.
    """

    def __init__(self, number: int, act: Callable[[], object], is_own: bool) -> None:
        self.number = number
        self.act = act
        self.count = 0
        if is_own:
            file_changes.hook = lambda operation, path: self._add()
        else:
            sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in _EVENTS and (event != "open" or bool((arguments[2] or 0) & _WRITING))
        if is_change:
            self._add()

    def _add(self) -> None:
        self.count += 1
        if self.count == self.number:
            self.act()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_killed(work: Callable[[], object], number: int, is_own: bool) -> bool:
    """Do the work in a process that is killed at the given file change; return whether that change was reached."""
    pid = os.fork()
    if pid == 0:
        try:
            Changes(number, _kill, is_own)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def _changes_of(work: Callable[[], object], is_own: bool) -> int:
    """Return the number of file changes of the work, which is done in another process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            changes = Changes(0, _kill, is_own)
            work()
            os.write(writer, str(changes.count).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as file:
        return int(file.read() or 0)


def _killed_copies(copier: Copier, folder: Path, limit: int, kinds: tuple[str, ...]) -> Iterator[Result]:
    """Kill copying, and updating a copy, at each file change; afterwards, the copy must be absent or complete."""
    is_own = copier.refusals is COPIERS[COLABKIT].refusals
    make_quick()
    originals = Originals(folder / "originals", {"a/1.bin": 3000, "a/2.bin": 70_000, "b/3.bin": 0, "b/4.bin": 9})
    if copier.is_program:
        if "folder" in kinds:
            yield from _killed_programs(copier, originals, folder, limit)
        return
    cases: list[tuple[str, bool, int]] = []
    for kind, is_update in itertools.product([one for one in copier.kinds if one in kinds], (False, True)):
        with new_folder(folder / "count") as made:
            source, copy = originals.root / FORMS[kind], copier.update if is_update else copier.copy
            if is_update:
                copier.copy(source, made / "copy")
                os.utime(originals.root / "tree" / "a" / "1.bin")
                os.utime(source)
            count = _changes_of(partial(copy, source, made / "copy"), is_own)
        cases += [(kind, is_update, number) for number in range(1, count + 1)]
    for kind, is_update, number in spread(cases, limit):
        with new_folder(folder / "case") as made:
            source = originals.root / FORMS[kind]
            if is_update:
                copier.copy(source, made / "copy")
                os.utime(originals.root / "tree" / "a" / "1.bin")
                os.utime(source)
            kill = partial(_is_killed, number=number, is_own=is_own)
            case = f"{kind}: {'an update' if is_update else 'a copy'} is killed at file change {number}"
            yield _killed_copy(case, copier, source, originals.expected(kind), made, is_update, kill)


def _killed_programs(copier: Copier, originals: Originals, folder: Path, limit: int) -> Iterator[Result]:
    """Kill programs that copy the folder at their system calls; cases that have fewer calls yield no result."""
    if not shutil.which("strace"):
        return
    source, expected = originals.root / FORMS["folder"], originals.expected("folder")
    for is_update, calls, number in spread([*itertools.product((False, True), _CALLS, range(1, 9))], limit):
        with new_folder(folder / "case") as made:
            if is_update:
                copier.copy(source, made / "copy")
                os.utime(originals.root / "tree" / "a" / "1.bin")
            died = made / "died"

            def kill(work: Callable[[], object], calls: str = calls, number: int = number, died: Path = died) -> None:
                rule = f"inject={calls}:signal=SIGKILL:when={number}"
                with patch("subprocess.run", partial(_traced, rule, subprocess.run)):
                    try:
                        work()
                    except copier.refusals:
                        died.touch()

            case = f"{'an update' if is_update else 'a copy'} is killed at {calls} {number}"
            result = _killed_copy(case, copier, source, expected, made, is_update, kill)
            if died.exists():
                yield result


def _traced(rule: str, run: Callable[..., object], words: list[str], **options: Any) -> object:
    return run(["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=%file,%desc", "-e", rule, *words], **options)


def _killed_copy(
    case: str,
    copier: Copier,
    source: Path,
    expected: Content,
    folder: Path,
    is_update: bool,
    kill: Callable[[Callable[[], object]], object],
) -> Result:
    copy = copier.update if is_update else copier.copy

    def kill_and_repeat() -> None:
        kill(partial(copy, source, folder / "copy"))
        found = content(folder / "copy")
        assert found in (None, expected), "after the kill, the copy is incomplete"
        copy(source, folder / "copy")
        assert content(folder / "copy") == expected, "the next call makes a copy that differs"
        left = leftovers(folder) + leftovers(Path(os.environ["COLABKIT_LOCAL"]))
        assert not left, f"unfinished files are left: {left}"

    return attempt(case, kill_and_repeat, refusals=copier.refusals)


@fault(17, "staging is killed", COPIERS)
def a_killed_copy(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if "folder" in copier.kinds:
        yield from _killed_copies(copier, folder, limit, ("folder", "table"))


@fault(18, "extraction is killed", COPIERS)
def a_killed_extraction(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    yield from _killed_copies(copier, folder, limit, ("zip", "tar", "tar.gz"))


@fault(19, "packing is killed", PACKERS)
def a_killed_pack(packer: Packer, folder: Path, limit: int) -> Iterator[Result]:
    source = write_images(folder / "images", per_class=2)
    expected = expected_packs(packer, source, folder / "expected")
    is_own = packer.refusals is PACKERS[COLABKIT].refusals
    cases = []
    for variant in packer.variants:
        with new_folder(folder / "count") as made:
            count = _changes_of(partial(packer.pack, source, made / "pack.h5", variant), is_own)
        cases += [(variant, number) for number in range(1, max(count, 1) + 1)]
    for variant, number in spread(cases, limit):
        with new_folder(folder / "case") as made:
            target = made / "pack.h5"

            def kill_and_repeat(target: Path = target, variant: str = variant, number: int = number) -> None:
                act = partial(packer.pack, source, target, variant)
                # A plain tool writes everything to one file, so kill it before it closes that file.
                is_killed = _is_killed(act, number, is_own) if is_own else _is_killed_at_the_end(act)
                assert is_killed or not target.exists() or packer.read(target) == expected[variant]
                if target.exists():
                    assert _content(packer, target) == expected[variant], "after the kill, the pack is incomplete"
                else:
                    act()
                assert _content(packer, target) == expected[variant], "the next call makes a pack that differs"
                if not leftovers(target.parent):
                    return
                target.unlink()
                act()
                assert not leftovers(target.parent), "unfinished files are left"

            yield attempt(f"{variant}: packing is killed at file change {number}", kill_and_repeat)


def _content(packer: Packer, path: Path) -> object:
    try:
        return packer.read(path)
    except Exception as error:
        return str(error)


def _is_killed_at_the_end(work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed when it opens the fifth image; return whether it was killed."""
    from PIL import Image

    pid = os.fork()
    if pid == 0:
        try:
            opened, numbers = Image.open, itertools.count(1)

            def open_or_die(path: Path) -> object:
                if next(numbers) == 5:
                    _kill()
                return opened(path)

            Image.open = open_or_die  # type: ignore[assignment]
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@fault(20, "work is interrupted", COPIERS)
def an_interrupt(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if copier.is_program:
        return
    make_quick()
    is_own = copier.refusals is COPIERS[COLABKIT].refusals
    originals = Originals(folder / "originals")
    errors = (copier.refusals, KeyboardInterrupt)

    def signal_itself() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    for kind, number in spread([*itertools.product(copier.kinds, range(1, 50))], limit):
        with new_folder(folder / "case") as made:

            def copy(source: Path, target: Path, number: int = number, first: list[int] = [1]) -> object:  # noqa: B006
                if first:
                    first.pop()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    Changes(number, signal_itself, is_own)
                return copier.copy(source, target)

            source, expected = originals.root / FORMS[kind], originals.expected(kind)
            interrupted = replace(copier, copy=copy, refusals=errors)  # type: ignore[arg-type]

            def clean(source: Path = source, target: Path = made / "copy") -> None:
                # After an interrupt at the end of the work, the next call removes the leftovers.
                if target.exists():
                    copier.update(source, target)

            case = f"{kind}: Ctrl-C at file change {number}"
            yield checked_copy(case, interrupted, source, expected, made, repair=clean)


@fault(16, "a pack is replaced, removed or cut short under its reader", {COLABKIT: None})
def a_pack_that_changes(tool: None, folder: Path, limit: int) -> Iterator[Result]:
    from colabkit.packs import open_pack

    packer = PACKERS[COLABKIT]
    source = write_images(folder / "images")
    other = write_images(folder / "others", per_class=3)
    acts = ("replace", "remove", "pack again", "cut")
    for variant, act, at in spread([*itertools.product(("raw", "source", "jpeg"), acts, range(13))], limit):
        with new_folder(folder / "case") as made:
            path = made / "pack.h5"
            packer.pack(source, path, variant)
            packer.pack(other, made / "other.h5", variant)

            def read_while_it_changes(path: Path = path, act: str = act, at: int = at, variant: str = variant) -> None:
                data = open_pack(path)["train"]
                first = [_sample(data[number]) for number in range(len(data))]
                second = []
                for number in range(len(data)):
                    if number == at:
                        _change(path, act, packer, other, variant)
                    second.append(_sample(data[number]))
                assert second == first, "the samples differ"

            if act != "cut":
                yield attempt(f"{variant}: {act} before sample {at}", read_while_it_changes)
            elif at == 0:

                def open_after_the_cut(path: Path = path) -> None:
                    os.truncate(path, path.stat().st_size // 2)
                    open_pack(path)
                    raise AssertionError("a pack that was cut short is opened")

                yield attempt(f"{variant}: cut before it is opened", open_after_the_cut)


def _sample(sample: Any) -> list[bytes]:
    import numpy as np

    return [np.asarray(value).tobytes() for value in (sample if isinstance(sample, tuple) else (sample,))]


def _change(path: Path, act: str, packer: Packer, other: Path, variant: str) -> None:
    if act == "replace":
        os.replace(path.with_name("other.h5"), path)
    elif act == "remove":
        path.unlink()
    else:
        path.unlink()
        packer.pack(other, path, variant)

"""Random sequences of calls, changes, kills and damage, checked against a model of what must be read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forks import is_killed_at
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from PIL import Image
from trees import files_of, leftovers

import colabkit
from colabkit.errors import ColabkitError, SourceMissing, TargetExists
from colabkit.foundation import locks
from colabkit.storage.sources.items import STAGE_SEAL

STEPS = 30
"""Largest number of steps of a sequence."""

_CLASSES = ("ants", "bees")
_QUIET = {"progress": False, "threads": 1}

Samples = list[tuple[str, int]]
"""Class and color of each image of a pack, sorted."""


class Storage(RuleBasedStateMachine):
    """A folder of images, its local copy and its pack, with a model of the bytes that each must have.

    Attributes:
        images: color of each image of the source by path.
        copied: bytes of each file that the local copy must have, by path; None for no copy.
        packed: the samples that the pack must have; None for no pack.
        opened: open packs, each with the samples that it had when it was opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.former = os.environ.get("COLABKIT_LOCAL")
        os.environ["COLABKIT_LOCAL"] = str(self.home / "local")
        (self.home / "local").mkdir()
        self.source, self.copy, self.path = (self.home / name for name in ("source", "copy", "packs/pack.h5"))
        self.images: dict[str, int] = {}
        self.moment_ns = 10**18
        self.number = 0
        self.is_mounted = True
        self.copied: dict[str, bytes] | None = None
        self.packed: Samples | None = None
        self.opened: list[tuple[Any, Samples]] = []
        for name in _CLASSES:
            self.write(f"{name}/0.png", 0)

    def teardown(self) -> None:
        self.opened.clear()
        shutil.rmtree(self.home)
        os.environ.pop("COLABKIT_LOCAL")
        if self.former is not None:
            os.environ["COLABKIT_LOCAL"] = self.former

    def write(self, path: str, color: int) -> None:
        """Write an image with a new modification time; another test covers changes within one clock tick."""
        target = self.source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), color).save(target)
        self.moment_ns += 10**9
        os.utime(target, ns=(self.moment_ns, self.moment_ns))
        self.images[path] = color

    @property
    def files(self) -> dict[str, bytes]:
        """The bytes of the source."""
        return files_of(self.source)

    @property
    def samples(self) -> Samples:
        """The samples of a new pack, which is made from the local copy if there is one."""
        if self.copied is None:
            return sorted((path.partition("/")[0], color) for path, color in self.images.items())
        return sorted((path.partition("/")[0], _color(self.copy / path)) for path in self.copied)

    @property
    def pack_source(self) -> Path:
        return self.source if self.copied is None else self.copy

    # Changes to the source.

    @precondition(lambda self: self.is_mounted)
    @rule(name=st.sampled_from(_CLASSES), color=st.integers(0, 255))
    def add(self, name: str, color: int) -> None:
        self.number += 1
        self.write(f"{name}/{self.number}.png", color)

    @precondition(lambda self: self.is_mounted)
    @rule(data=st.data(), color=st.integers(0, 255))
    def rewrite(self, data: st.DataObject, color: int) -> None:
        self.write(data.draw(st.sampled_from(sorted(self.images))), color)

    @precondition(lambda self: self.is_mounted and len(self.images) > len(_CLASSES))
    @rule()
    def remove(self) -> None:
        path = max(path for path in self.images if not path.endswith("/0.png"))
        (self.source / path).unlink()
        del self.images[path]

    @precondition(lambda self: self.is_mounted)
    @rule()
    def unmount(self) -> None:
        self.source.rename(self.home / "unmounted")
        self.is_mounted = False

    @precondition(lambda self: not self.is_mounted)
    @rule()
    def remount(self) -> None:
        """Mount the source again, with other inodes and change times."""
        shutil.copytree(self.home / "unmounted", self.source)
        shutil.rmtree(self.home / "unmounted")
        self.is_mounted = True

    # Calls.

    def call_stage(self) -> None:
        colabkit.stage(self.source, self.copy, refresh=True, **_QUIET)

    def call_pack(self) -> None:
        colabkit.pack(self.pack_source, self.path, overwrite=True, **_QUIET)

    @rule(color=st.none() | st.integers(0, 255))
    def stage(self, color: int | None) -> None:
        if color is not None and self.is_mounted:
            self.write("ants/0.png", color)
        if not self.is_mounted:
            _refused(self.call_stage, SourceMissing)
            return
        self.call_stage()
        self.copied = self.files
        # A killed `pack()` leaves files next to the pack until the next call.
        left = [path for path in leftovers(self.home) if Path(path).parent != self.path.parent]
        assert not left, "staging leaves unfinished files"

    @rule()
    def stage_what_is_there(self) -> None:
        if self.copied is None and not self.is_mounted:
            return
        report = colabkit.stage(self.source, self.copy, **_QUIET)
        assert report.reused == (self.copied is not None)
        self.copied = self.files if self.copied is None else self.copied

    @rule(color=st.none() | st.integers(0, 255))
    def pack(self, color: int | None) -> None:
        if color is not None and self.is_mounted:
            self.write("bees/0.png", color)
        if not self.is_mounted and self.copied is None:
            _refused(self.call_pack, SourceMissing)
            return
        expected = self.samples
        self.call_pack()
        self.packed = expected
        assert not leftovers(self.path.parent), "packing leaves unfinished files"

    @rule()
    def evict_copy(self) -> None:
        if self.copied is None:
            return
        colabkit.unstage(self.copy)
        self.copied = None

    @rule()
    def evict_pack(self) -> None:
        self.path.unlink(missing_ok=True)
        self.packed = None

    @precondition(lambda self: self.packed is not None)
    @rule()
    def open(self) -> None:
        assert self.packed is not None
        self.opened.append((colabkit.open_pack(self.path)["train"], self.packed))

    @rule()
    def read_open_packs(self) -> None:
        for data, expected in self.opened:
            assert _samples_of(data) == expected, "an open pack has changed"

    @precondition(lambda self: self.copied is not None)
    @rule()
    def verify_copy(self) -> None:
        assert colabkit.verify(self.copy, progress=False).is_good

    # Faults.

    @precondition(lambda self: self.is_mounted)
    @rule(number=st.integers(1, 40), is_pack=st.booleans())
    def kill(self, number: int, is_pack: bool) -> None:
        if not is_pack:
            is_killed_at(number, self.call_stage)
            self.copied = _one_of(self.found_copy(), self.copied, self.files)
        else:
            expected = self.samples
            is_killed_at(number, self.call_pack)
            self.packed = _one_of(self.found_pack(), self.packed, expected)

    @precondition(lambda self: self.is_mounted)
    @rule(is_pack=st.booleans())
    def use_two_processes(self, is_pack: bool) -> None:
        expected = self.samples
        work = partial(_repeated, self.call_pack if is_pack else self.call_stage)
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            finally:
                os._exit(1)
        try:
            work()
        finally:
            status = os.waitpid(pid, 0)[1]
        assert status == 0, "the second process has failed"
        if is_pack:
            self.packed = expected
        else:
            self.copied = self.files

    @precondition(lambda self: self.packed is not None)
    @rule(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
    def corrupt_pack(self, place: float, mask: int) -> None:
        """Change a byte of the pack; reading must raise an error, or return the right samples."""
        data = bytearray(self.path.read_bytes())
        data[int(place * len(data))] ^= mask
        damaged = self.path.with_name("damaged.h5")
        damaged.write_bytes(data)
        damaged.replace(self.path)
        try:
            found = _samples_of(colabkit.open_pack(self.path)["train"])
        except ColabkitError:
            pass
        else:
            assert found == self.packed, "damage is not noticed"
        self.evict_pack()

    @precondition(lambda self: self.copied is not None)
    @rule(data=st.data())
    def corrupt_copy(self, data: st.DataObject) -> None:
        """Flip bits of one file of the copy; `verify()` must report the file."""
        assert self.copied is not None
        name = data.draw(st.sampled_from(sorted(self.copied)))
        target = self.copy / name
        times = target.stat()
        found = bytearray(target.read_bytes())
        found[len(found) // 2] ^= 255
        target.unlink()
        target.write_bytes(found)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert colabkit.verify(self.copy, progress=False).damaged == (name,)
        colabkit.unstage(self.copy)
        self.copied = None

    # Invariants, which are checked after each step.

    def found_copy(self) -> Mapping[str, bytes] | None:
        if not self.copy.exists():
            return None
        return {path: data for path, data in files_of(self.copy).items() if path != STAGE_SEAL}

    def found_pack(self) -> Samples | None:
        return _samples_of(colabkit.open_pack(self.path)["train"]) if self.path.exists() else None

    @invariant()
    def copy_is_complete(self) -> None:
        assert self.found_copy() == self.copied, "the copy is not as expected"

    @invariant()
    def pack_is_complete(self) -> None:
        assert self.found_pack() == self.packed, "the pack is not as expected"


def _color(path: Path) -> int:
    with Image.open(path) as image:
        return int(np.asarray(image).flat[0])


def _samples_of(data: Any) -> Samples:
    samples = [data[number] for number in range(len(data))]
    return sorted((data.classes[int(label)], int(image.flatten()[0])) for image, label in samples)


def _one_of(found: Any, *allowed: Any) -> Any:
    assert found in allowed, "after the kill, the output is neither the old nor the new one"
    return found


def _refused(work: Callable[[], object], error: type[ColabkitError]) -> None:
    try:
        work()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def _repeated(work: Callable[[], object]) -> None:
    """Repeat `work`, as the error advises, as long as another process creates the same output."""
    while True:
        try:
            work()
            return
        except TargetExists:
            continue


def run(examples: int, shrinks: bool = True) -> None:
    """Run some sequences, always the same ones; with `shrinks`, look for the shortest sequence that fails.

    Raises:
        Exception: the error of a sequence that breaks a promise, after its steps are printed.
    """
    locks._BUSY_S = 0.01
    run_state_machine_as_test(
        Storage,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink)[: 1 + shrinks],
        ),
    )

"""Operations stopped at a file change leave the old or the new output, or none if documented, and can be repeated.

Of the changes of each operation, the first, the last and a few others are tested, always the same ones. Rows 11, 17 to
20 and 37 of `tests.faults` test many more.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import assert_nothing_runs
from crash_operations import OPERATIONS, Operation
from http_servers import served
from strikes import ChangeHook, fill_disk, interrupt
from trees import leftovers

from colabkit.errors import ColabkitError, NotEnoughSpace
from colabkit.storage.fetching import transfer
from colabkit.storage.sources import reads

MOST_POINTS = 4
"""Largest number of tested changes besides the first and the last."""


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


ERRORS: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
    "full disk": (fill_disk, NotEnoughSpace),
    "I/O error": (fail, ColabkitError),
    "Ctrl-C": (interrupt, KeyboardInterrupt),
}


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


@pytest.fixture
def folder(tmp_path: Path, operation: Operation) -> Iterator[Path]:
    """Return a folder with the input and the earlier output of the operation."""
    folder = tmp_path / "folder"
    folder.mkdir()
    operation.start(folder)
    with served(b"fetched" * 1000) as server:
        (folder / "in").mkdir(exist_ok=True)
        (folder / "in" / "url").write_text(server.url)
        yield folder


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)


class Trial:
    """An operation that runs repeatedly with the same earlier output."""

    def __init__(
        self,
        operation: Operation,
        folder: Path,
        local: Path,
        set_hook: Callable[[Callable[[str, Path], None] | None], None],
    ) -> None:
        self.operation, self.folder, self.local = operation, folder, local
        (folder / "out").mkdir(exist_ok=True)
        shutil.copytree(folder / "out", folder / "before", symlinks=True)
        self.states = [operation.state(folder)]
        changes: list[str] = []
        set_hook(lambda operation, path: changes.append(operation))
        operation.work(folder)
        set_hook(None)
        self.states.append(operation.state(folder))
        assert self.states[0] != self.states[1]
        self.count = len(changes)
        assert self.count > 1
        self.restore()

    def points(self, name: str) -> list[int]:
        """Return the numbers of the changes to stop at; they differ between names."""
        inner = range(2, self.count)
        some = random.Random(f"{name} {self.count}").sample(inner, min(MOST_POINTS, len(inner)))
        return [1, *sorted(some), self.count]

    def restore(self) -> None:
        shutil.rmtree(self.folder / "out")
        shutil.copytree(self.folder / "before", self.folder / "out", symlinks=True)
        for path in self.local.iterdir():
            shutil.rmtree(path)

    def check(self, number: int) -> None:
        """Check the output after a stop, and after the next call."""
        allowed = [*self.states, None] if self.operation.is_removed_first else self.states
        assert self.operation.state(self.folder) in allowed, f"after change {number}"
        self.operation.work(self.folder)
        assert self.operation.state(self.folder) == self.states[1], f"after the call that follows change {number}"
        assert leftovers(self.folder) + leftovers(self.local) == [], f"not reclaimed after change {number}"
        self.restore()


@pytest.mark.full
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_at_a_change_is_typed_and_leaves_old_or_new_output(folder, operation, near_storage, file_hook, name):
    trial = Trial(operation, folder, near_storage, file_hook)
    act, expected = ERRORS[name]
    for number in trial.points(name):
        strike = ChangeHook(number, act)
        file_hook(strike)
        try:
            operation.work(folder)
        except expected:
            assert strike.was_reached
        else:
            # Without an exception, the output must be the new one.
            assert operation.state(folder) == trial.states[1]
        finally:
            file_hook(None)
        assert_nothing_runs(folder)
        trial.check(number)


@pytest.mark.full
def test_a_kill_at_a_change_leaves_old_or_new_output(folder, operation, near_storage, killed_at, file_hook):
    trial = Trial(operation, folder, near_storage, file_hook)
    for number in trial.points("kill"):
        is_killed = killed_at(number, partial(operation.work, folder))
        # A new process may make fewer changes, for example because an earlier one has created a folder.
        assert is_killed or number == trial.count
        trial.check(number)

"""Operations stopped at any file change leave the old or the new output, or none if documented, and can be repeated."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import assert_nothing_runs
from crash_operations import OPERATIONS, Operation
from http_servers import served
from strikes import AtChange, fill_disk, interrupt
from trees import leftovers

from colabkit.errors import ColabkitError, NotEnoughSpace


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


class Trial:
    """An operation that runs again and again with the same earlier output."""

    def __init__(self, operation: Operation, folder: Path, local: Path) -> None:
        self.operation, self.folder, self.local = operation, folder, local
        (folder / "out").mkdir(exist_ok=True)
        shutil.copytree(folder / "out", folder / "before", symlinks=True)
        self.states = [operation.state(folder)]
        operation.work(folder)
        self.states.append(operation.state(folder))
        assert self.states[0] != self.states[1]
        self.restore()

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
def test_an_error_at_any_change_is_typed_and_leaves_old_or_new_output(folder, operation, near_storage, file_hook, name):
    trial = Trial(operation, folder, near_storage)
    act, expected = ERRORS[name]
    for number in itertools.count(1):
        strike = AtChange(number, act)
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
        if not strike.was_reached:
            break
        assert_nothing_runs(folder)
        trial.check(number)
    assert number > 2


@pytest.mark.full
def test_a_kill_at_any_change_leaves_old_or_new_output(folder, operation, near_storage, killed_at):
    trial = Trial(operation, folder, near_storage)
    for number in itertools.count(1):
        if not killed_at(number, partial(operation.work, folder)):
            break
        trial.check(number)
    assert number > 2

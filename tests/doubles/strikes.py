"""Hooks for `file_hook` that stop work at one file change, and runs that are stopped at each change in turn."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from colabkit.errors import NotEnoughSpace


class ChangeHook:
    """A hook that acts at the `number`-th file change and, if `lasting`, at all later ones except removals and renames.

    Operations in `uncounted` do not count as changes. `operation` is the latest operation at which the hook acted.
    """

    error: BaseException

    def __init__(
        self, number: int, act: Callable[[], object], lasting: bool = False, uncounted: Collection[str] = ()
    ) -> None:
        self.number = number
        self.act = act
        self.lasting = lasting
        self.uncounted = uncounted
        self.count = 0
        self.operation = ""
        self._lock = threading.Lock()

    def __call__(self, operation: str, path: Path) -> None:
        if operation in self.uncounted:
            return
        with self._lock:
            self.count += 1
            is_due = self.count == self.number
        if is_due or (self.lasting and self.count > self.number and operation not in ("remove", "rename")):
            self.operation = operation
            self.act()

    @property
    def was_reached(self) -> bool:
        return self.count >= self.number


def failures(
    file_hook: Callable[[ChangeHook | None], None],
    act: Callable[[], object],
    work: Callable[[], object],
    error: type[BaseException] | tuple[type[BaseException], ...] = (NotEnoughSpace, KeyboardInterrupt),
    *,
    step: int = 1,
    lasting: bool = False,
    uncounted: Collection[str] = (),
) -> Iterator[tuple[int, ChangeHook]]:
    """Call `act`, which raises, at each file change of `work` in turn; yield the change's number and the hook.

    Only every `step`-th file change is tested. The runs end when `work` succeeds. `error` of a hook is the error that
    reached the caller.
    """
    for number in itertools.count(1, step):
        hook = ChangeHook(number, act, lasting, uncounted)
        file_hook(hook)
        try:
            work()
        except error as raised:
            assert hook.was_reached
            # Keep the error with all its frames alive, as a notebook does.
            hook.error = raised
        else:
            break
        finally:
            file_hook(None)
        yield number, hook
    assert not hook.was_reached, "the error did not reach the caller"
    assert number > 1, "the work changed nothing"


def kills(killed_at: Callable[[int, partial[object]], bool], work: partial[object]) -> Iterator[int]:
    """Kill `work` in a child process at its 1st, 2nd, … file change, and yield each number, until `work` succeeds."""
    number = 1
    while killed_at(number, work):
        yield number
        number += 1
    assert number > 1, "the work changed nothing"


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_at(name: str) -> Callable[[str, Path], None]:
    """Return a hook that fails like Ctrl-C when a file with the given path suffix changes."""

    def hook(operation: str, path: Path) -> None:
        if str(path).endswith(name):
            raise KeyboardInterrupt

    return hook

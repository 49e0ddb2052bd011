"""A hook for `file_hook` that fails at one file change, like a full disk or Ctrl-C."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path


class Strike:
    """A hook that calls `act` once, at the `number`-th file change; `error` is the error that reached the caller."""

    error: BaseException

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.left = number
        self.act = act
        self.lock = threading.Lock()
        self.operation = ""

    def __call__(self, operation: str, path: Path) -> None:
        with self.lock:
            self.left -= 1
            strikes = self.left == 0
        if strikes:
            self.operation = operation
            self.act()

    @property
    def struck(self) -> bool:
        return self.left <= 0


def struck_runs(
    file_hook: Callable[[Strike | None], None],
    act: Callable[[], None],
    work: Callable[[], object],
    error: type[BaseException],
    step: int = 1,
) -> Iterator[tuple[int, Strike]]:
    """Call `act`, which raises, at each file change of `work` in turn; yield the change's number and the hook.

    Only every `step`-th file change is tested. The runs end when `work` succeeds.
    """
    for number in itertools.count(1, step):
        strike = Strike(number, act)
        file_hook(strike)
        try:
            work()
        except error as raised:
            assert strike.struck
            # Keep the error with all its frames, because a notebook also does.
            strike.error = raised
        else:
            break
        finally:
            file_hook(None)
        yield number, strike
    assert not strike.struck, "the error did not reach the caller"


def killed_runs(killed_at: Callable[[int, partial[object]], bool], work: partial[object]) -> Iterator[int]:
    """Kill `work` in a child process at its 1st, 2nd, … file change, and yield each number, until `work` succeeds."""
    for number in itertools.count(1):
        if not killed_at(number, work):
            return
        yield number


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_at(name: str) -> Callable[[str, Path], None]:
    """Return a hook that fails like Ctrl-C when a file with this path suffix changes."""

    def hook(operation: str, path: Path) -> None:
        if str(path).endswith(name):
            raise KeyboardInterrupt

    return hook

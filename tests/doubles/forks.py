"""Run work in forked processes, which can be killed at a file change."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from colabkit.foundation import file_changes


def in_fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return the wait status, which is 0 if `work` succeeds."""
    return os.waitpid(start_fork(work), 0)[1]


def start_fork(work: Callable[[], object]) -> int:
    """Start `work` in a forked process and return its ID; its wait status is 0 if `work` succeeds."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def is_killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that is killed at the `number`-th file change; return whether `work` got that far."""
    count = 0

    def kill(operation: str, path: Path) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def work_with_hook() -> None:
        file_changes.hook = kill
        work()

    status = in_fork(work_with_hook)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


def make_pair(path: Path, text: str) -> None:
    """Create a folder with two files that contain `text`."""
    file_changes.make_folder(path)
    for name in ("one", "two"):
        file_changes.write_file(path / name, text.encode())


def pair_text(path: Path) -> str | None:
    """Return the text that both files of a `make_pair()` folder contain; None if there is no folder."""
    if not path.exists():
        return None
    texts = {(path / name).read_text() for name in ("one", "two")}
    assert len(texts) == 1, "a mixture of old and new"
    return texts.pop()

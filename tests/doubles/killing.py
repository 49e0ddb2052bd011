"""Kill work at a file change, in forks of a small process, because a process with torch is slow to fork."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from PIL import Image

from colabkit.foundation import file_changes
from colabkit.packs.packing.api import pack


class ForkServer:
    """A process that forks itself for each task, so that modules are imported only once.

    Tasks are `functools.partial` objects of importable functions. They run without the patches of the test.
    """

    def __enter__(self) -> Self:
        words = [sys.executable, os.fspath(Path(__file__))]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def at(self, number: int, work: partial[object]) -> bool:
        """Run `work` in a process that is killed at the `number`-th file change; return whether `work` got that far."""
        pickle.dump((number, dict(os.environ), os.getcwd(), work), self._process.stdin)
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL), f"the child ended with status {status}"
        return status == signal.SIGKILL


def _serve() -> None:
    """Fork for each task on stdin and write the wait status of the child, until stdin is closed."""
    _import_what_is_needed_late()
    while True:
        try:
            number, environment, folder, work = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            _be_killed(number, environment, folder, work)
        print(os.waitpid(pid, 0)[1], flush=True)


def _import_what_is_needed_late() -> None:
    """Pack two images, because each fork would otherwise repeat the imports that packing makes on demand."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tree" / "ants").mkdir(parents=True)
        for kind in ("PNG", "JPEG"):
            Image.new("RGB", (8, 8)).save(Path(folder) / "tree" / "ants" / f"1.{kind.lower()}", kind)
        for encoding in ("raw", "jpeg"):
            pack(Path(folder) / "tree", Path(folder) / encoding, encoding=encoding, threads=1, progress=False)


def _be_killed(number: int, environment: dict[str, str], folder: str, work: Callable[[], object]) -> None:
    changes, lock = itertools.count(1), threading.Lock()

    def hook(operation: str, path: Path) -> None:
        with lock:
            if next(changes) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        file_changes.hook = hook
        work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()

"""An IPython shell with colabkit loaded, and its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config


@contextmanager
def loaded_shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.extension_manager.load_extension("colabkit")
    try:
        yield shell
    finally:
        shell.extension_manager.unload_extension("colabkit")
        shell.reset()
        InteractiveShell.clear_instance()


def run(shell: InteractiveShell, cell: str) -> ExecutionResult:
    """Run a cell, and increase the execution count as Jupyter does."""
    return shell.run_cell(cell, store_history=True)


def shown_by(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of output since the last call, without colors."""
    shown = capsys.readouterr()
    return re.sub(r"\x1b\[[\d;]*m", "", shown.out + shown.err).strip().splitlines()

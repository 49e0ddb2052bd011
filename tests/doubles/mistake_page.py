"""Make each mistake of the table, and write the messages that users see to `docs/reference/mistakes.md`.

`python tests/doubles/mistake_page.py` writes the page.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import ipywidgets
from IPython.core.interactiveshell import InteractiveShell
from launchers import click, fill
from magic_shells import loaded_shell
from mistake_home import make_home, variables, without_privileges
from mistakes import LAUNCHER, MAGIC, MISTAKES, PYTHON, Mistake
from strikes import fill_disk

from colabkit.foundation import file_changes
from colabkit.notebook.command_line import main
from colabkit.notebook.launcher.panel import Launcher
from colabkit.notebook.launcher.settings import FIELDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "mistakes.md"
_FIELDS = {label: name for name, label in FIELDS.items()}
CAUSES: dict[str, str] = {}
"""The class of the error that a traceback shows before the message, by the code of the mistake; filled by `shown`."""
_BUTTONS = {"Train": "train", "Measure": "probe", "Copy": "stage", "Pack": "prepare"}


@cache
def shown() -> dict[Mistake, str]:
    """Make all mistakes, and return the message of each."""
    # The path has the same length everywhere, because messages shorten long values.
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    before = os.getcwd()
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {"COLABKIT_LOCAL": str(home / "local"), "COLUMNS": "100"}))
            for module in ("foundation.mount_table", "storage.drive.mountpoints", "storage.drive.drivefs"):
                stack.enter_context(mock.patch(f"colabkit.{module}.mounts", return_value=[]))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            home.chmod(0o755)
            make_home(home)
            os.chdir(home)
            stack.callback(os.chdir, before)
            shell = stack.enter_context(loaded_shell())
            stack.enter_context(without_privileges())
            return {
                mistake: _shown(mistake, shell).replace(f"{home}/", "").replace(str(home), "/home/you")
                for mistakes in MISTAKES.values()
                for mistake in mistakes
            }
    finally:
        (home / "secret").chmod(0o700)
        shutil.rmtree(home)


def _shown(mistake: Mistake, shell: InteractiveShell) -> str:
    """Return the message that the user sees; in Python and from magics, it follows the name of the error's class."""
    out = io.StringIO()
    with _scene(mistake.scene), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if mistake.surface == PYTHON:
            return _in_python(mistake.typed)
        if mistake.surface == MAGIC:
            shell.user_ns.update(variables())
            done = shell.run_cell(mistake.typed)
            error = done.error_in_exec or done.error_before_exec
            return f"{type(error).__name__}: {error}"
        if mistake.surface == LAUNCHER:
            return _in_launcher(mistake.typed)
        with contextlib.suppress(SystemExit):
            main(shlex.split(mistake.typed)[1:])
    return out.getvalue().strip().splitlines()[-1]


def _in_python(code: str) -> str:
    try:
        exec(code, variables())
    except Exception as error:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is not None:
            CAUSES[code] = type(cause).__name__
        return f"{type(error).__name__}: {error}"
    return "no error"


def _in_launcher(typed: str) -> str:
    panel = Launcher(ipywidgets)
    *fields, button = typed.split("; ")
    for label, _, value in (field.partition(": ") for field in fields):
        name = _FIELDS[label]
        fill(panel, **{name: value})
    try:
        return click(panel, _BUTTONS[button])
    finally:
        panel.close()


@contextmanager
def _scene(scene: str) -> Iterator[None]:
    """Simulate a full disk, a package that is not installed, or nothing."""
    if scene == "full disk":
        with mock.patch.object(
            file_changes, "hook", lambda operation, path: fill_disk() if operation == "write" else None
        ):
            yield
    elif scene:
        with mock.patch.dict(sys.modules, {scene: None}):
            yield
    else:
        yield


def page() -> str:
    messages, lines = shown(), [_HEAD]
    for topic, mistakes in MISTAKES.items():
        lines.append(f"\n## {topic}")
        for mistake in mistakes:
            surface = "" if mistake.surface in mistake.what.split() else f" ({mistake.surface})"
            lines.append(f"\n**{mistake.what[:1].upper()}{mistake.what[1:]}**{surface}\n")
            lines += [f"    {line}" for line in mistake.typed.splitlines()]
            lines.append(f"\n> {messages[mistake]}")
    return "\n".join(lines) + "\n"


_HEAD = """# Mistakes

This page lists mistakes that are easy to make, what you would have typed, and the complete message that you get: in
Python, from a magic, in a terminal and in the launcher. `data`, `loader`, `model`, `optimizer` and `step` are a split
of a pack, a `Loader`, a network, an optimizer and a `supervised_step`; `own` is a step that is a function. All possible
messages are in [Error messages](messages.md).

`python tests/doubles/mistake_page.py` makes all of these mistakes and writes this page; a test compares it."""


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{len(shown())} mistakes in {PAGE}\n")
